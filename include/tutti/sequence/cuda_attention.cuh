// cuda_attention: the block kernel of CUDA queues: a library's fused attention where it has a kernel, tiles elsewhere.
// Needs sequence/fused_attention, sequence/tiled_attention and nvcc.
#pragma once

#include <array>     // tables of both directions
#include <concepts>  // same_as
#include <cstddef>   // size_t
#include <cstdint>   // counts of rows
#include <memory>    // the library
#include <utility>   // move
#include <vector>    // packed calls

#include <tutti/core/buffer.hpp>                   // scratch
#include <tutti/core/cuda_queue.hpp>               // cuda_queue
#include <tutti/core/element.hpp>                  // accumulator_t
#include <tutti/core/stochastic_rounding.hpp>      // half_element
#include <tutti/sequence/block_attention.hpp>      // forward_block, backward_block
#include <tutti/sequence/detail/packed_calls.hpp>  // packed_calls
#include <tutti/sequence/fused_attention.hpp>      // fused_attention
#include <tutti/sequence/tiled_attention.cuh>      // tiled_attention
#include <tutti/sequence/token_operations.cuh>     // copy, add, fill

namespace tutti::sequence {

/// The block kernel of CUDA queues.
///
/// Semantics    as block_attention says. A library is asked for blocks of 16-bit numbers whose queries see all keys, or
///              keys up to their own; the rest is tiled_attention's, and so is what the library has no kernel for. It
///              reads rows where they are when their number is one that calls are made for (detail::fused_rows), else
///              copies padded with zeros. A row whose scores are all -inf is NaN where the library makes it so.
/// Units        the library's results are of 16 bits: forward's are widened, backward's added to the sums in float; those
///              of final blocks it writes itself.
/// Determinism  the same block gives the same bits, as far as the library says so of itself.
/// Cost         the library's, and a pass over its results; a copy of the inputs where rows are padded. Scratch: the
///              results of a block, and its padded inputs.
template <floating_element T> class cuda_attention {
    using P = accumulator_t<T>;
    static constexpr bool may_fuse = half_element<T>;
    template <class U> using tensor = token_view<U, device_memory>;

    std::unique_ptr<fused_attention> fused_;
    tiled_attention<T> tiles_;
    std::unique_ptr<buffer<T, cuda_queue>> numbers_;
    std::unique_ptr<buffer<float, cuda_queue>> sums_;
    std::unique_ptr<buffer<P, cuda_queue>> results_;  // of final blocks that are computed as others are
    std::unique_ptr<buffer<P, cuda_queue>> deltas_;
    std::unique_ptr<buffer<std::int32_t, cuda_queue>> counts_;
    // What packed calls of a direction are told of their sequences, on the host and the same on the device: the layers of
    // a step have the same.
    template <class U> struct table {
        std::vector<U> here;
        std::unique_ptr<buffer<U, cuda_queue>> there;
        void set(const cuda_queue& q, std::vector<U> numbers) {
            if (there != nullptr && numbers == here) { return; }
            here = std::move(numbers);
            reserve(q, there, here.size());
            upload(q, view<const U>(here), there->view().sub(0, here.size()));
        }
    };
    struct tables {
        table<std::int64_t> offsets;
        table<std::int32_t> lengths;
    };
    std::array<tables, 2> packed_;

public:
    using element_type = T;
    using queue_type = cuda_queue;
    static constexpr bool wants_out = may_fuse;
    static constexpr bool starts_gradients = true;
    static constexpr bool rounds_blocks = may_fuse;

    /// With the program's library, see default_fused_attention.
    cuda_attention() : cuda_attention(may_fuse ? default_fused_attention::make() : nullptr) {}
    /// With this one; null: tiles alone.
    explicit cuda_attention(std::unique_ptr<fused_attention> fused) : fused_(std::move(fused)) {}

    void forward(const cuda_queue& q, const forward_block<T, device_memory>& b) {
        if constexpr (may_fuse) {
            if (fused_forward(q, b)) { return; }
        }
        tiles_.forward(q, b);
    }
    void backward(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        if constexpr (may_fuse) {
            if (b.out.same_shape(b.query) && fused_keys(b) != 0) {
                return fits(b) ? backward_as_one(q, b) : backward_in_parts(q, started(q, b));
            }
        }
        by_tiles(q, b);
    }
    void forward(const cuda_queue& q, const final_forward_block<T, device_memory>& b) {
        if constexpr (may_fuse) {
            if (fused_forward(q, b)) { return; }
        }
        reserve(q, results_, b.out.size());
        const tensor<P> out(results_->view(), b.out.tokens, b.out.heads, b.out.width);
        tiles_.forward(q, {b.query, b.key, b.value, b.seen, b.scale, out, b.log_sum_exp});
        copy_tokens(q, out, b.out);
    }
    void backward(const cuda_queue& q, const final_backward_block<T, device_memory>& b) {
        if constexpr (may_fuse) {
            if (b.out.same_shape(b.query) && fused_keys(b) == b.key.tokens && !b.key.empty()) {
                if (fits(b) && fused_backward(q, b)) { return; }
                if (!fits(b) && b.key.heads > 1) {  // those of other heads have no part in these
                    const std::size_t half = b.key.heads / 2;
                    backward(q, some_heads(b, 0, half));
                    backward(q, some_heads(b, half, b.key.heads - half));
                    return;
                }
            }
        }
        reserve(q, results_, b.query.size() + 2 * b.key.size());
        std::size_t taken = 0;
        const auto beside = [&](const tensor<T>& v) {
            taken += v.size();
            return tensor<P>(results_->view().sub(taken - v.size(), v.size()), v.tokens, v.heads, v.width);
        };
        const tensor<P> d_query = beside(b.d_query), d_key = beside(b.d_key), d_value = beside(b.d_value);
        backward(q, backward_block<T, device_memory>{b.query, b.key, b.value, b.seen, b.scale, b.d_out, b.out,
                                                     b.log_sum_exp, b.delta, d_query, d_key, d_value, true, true});
        copy_tokens(q, d_query, b.d_query);
        copy_tokens(q, d_key, b.d_key);
        copy_tokens(q, d_value, b.d_value);
    }

    void forward(const cuda_queue& q, const packed_forward_block<T, device_memory>& b) {
        std::vector<detail::packed_call> rest = detail::packed_calls(b.lengths);
        if constexpr (may_fuse) { rest = packed_forward(q, b.all, std::move(rest)); }
        each(rest, [&](std::size_t first, std::size_t count) { forward(q, rows_of(b.all, first, count)); });
    }
    void backward(const cuda_queue& q, const packed_backward_block<T, device_memory>& b) {
        std::vector<detail::packed_call> rest = detail::packed_calls(b.lengths);
        if constexpr (may_fuse) { rest = packed_backward(q, b.all, std::move(rest)); }
        each(rest, [&](std::size_t first, std::size_t count) { backward(q, rows_of(b.all, first, count)); });
    }

private:
    // f(first row, rows) for each sequence of these calls.
    template <class F> static void each(const std::vector<detail::packed_call>& calls, F f) {
        for (const detail::packed_call& c : calls) {
            for (std::size_t i = 0; i < c.firsts.size(); ++i) { f(c.firsts[i], c.lengths[i]); }
        }
    }
    // Keys that a fused call is about; 0: it cannot be one.
    template <class B> [[nodiscard]] std::size_t fused_keys(const B& b) const noexcept {
        if (fused_ == nullptr || b.query.empty() || b.key.empty()) { return 0; }
        if (b.seen.keys_of(0, b.key.tokens) == b.key.tokens) { return b.key.tokens; }
        const bool aligned = b.seen.first_query == b.seen.first_key && b.query.tokens <= b.key.tokens;
        return aligned ? b.query.tokens : 0;
    }

    // As few scores as the library likes in a call?
    template <class B> [[nodiscard]] bool fits(const B& b) const noexcept {
        return b.query.heads <=
               fused_->most_scores() / detail::fused_rows(b.query.tokens) / detail::fused_rows(fused_keys(b));
    }
    template <class B> [[nodiscard]] bool has_parts(const B& b) const noexcept {
        return b.key.heads > 1 || detail::fused_rows(b.query.tokens) * detail::fused_rows(fused_keys(b)) > 128 * 128;
    }
    // They are given delta.
    void by_tiles(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        backward_block<T, device_memory> whole = started(q, b);
        if (b.delta.empty() && !b.query.empty()) {
            reserve(q, deltas_, b.query.tokens * b.query.heads);
            const tensor<P> delta =
                numbers_by_head(deltas_->view().sub(0, b.query.tokens * b.query.heads), b.query.tokens, b.query.heads);
            run(q, dot_tokens_operation<T, device_memory>{b.d_out, b.out, delta});
            whole.delta = delta;
        }
        tiles_.backward(q, whole);
    }
    // What is to be written is 0 now, and to be added to.
    [[nodiscard]] static backward_block<T, device_memory> started(const cuda_queue& q,
                                                                  backward_block<T, device_memory> b) {
        if (b.starts_query) { fill_tokens(q, b.d_query, P{0}); }
        if (b.starts_keys) {
            fill_tokens(q, b.d_key, P{0});
            fill_tokens(q, b.d_value, P{0});
        }
        b.starts_query = b.starts_keys = false;
        return b;
    }
    void backward_as_one(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        if (!fused_backward(q, b)) { by_tiles(q, b); }
    }
    // In calls as large as the library likes them: of fewer heads, then of fewer rows. Gradients add up.
    void backward_in_parts(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        if (fits(b) || !has_parts(b)) { return backward_as_one(q, b); }
        const std::size_t keys = fused_keys(b);
        if (b.key.heads > 1) {
            const std::size_t half = b.key.heads / 2;
            backward_in_parts(q, some_heads(b, 0, half));
            backward_in_parts(q, some_heads(b, half, b.key.heads - half));
            return;
        }
        const bool causal = b.seen.keys_of(0, keys) != keys;
        if (causal || b.query.tokens >= keys) {
            const std::size_t half = detail::fused_rows((b.query.tokens + 1) / 2);
            const std::size_t rest = b.query.tokens - half;
            if (!causal) {
                backward_in_parts(q, some_rows(b, 0, half, 0, keys, {}));
                backward_in_parts(q, some_rows(b, half, rest, 0, keys, {}));
                return;
            }
            backward_in_parts(q, some_rows(b, 0, half, 0, half, {mask::causal, 0, 0}));
            backward_in_parts(q, some_rows(b, half, rest, 0, half, {}));
            backward_in_parts(q, some_rows(b, half, rest, half, rest, {mask::causal, 0, 0}));
            return;
        }
        const std::size_t half = detail::fused_rows((keys + 1) / 2);
        backward_in_parts(q, some_rows(b, 0, b.query.tokens, 0, half, {}));
        backward_in_parts(q, some_rows(b, 0, b.query.tokens, half, keys - half, {}));
    }
    template <class B> [[nodiscard]] static B some_heads(B b, std::size_t first, std::size_t count) noexcept {
        const std::size_t group = b.query.heads / b.key.heads;
        const auto of_query = [&](auto& v) { v = v.some_heads(first * group, count * group); };
        of_query(b.query);
        of_query(b.d_out);
        of_query(b.out);
        of_query(b.log_sum_exp);
        of_query(b.delta);
        of_query(b.d_query);
        const auto of_key = [&](auto& v) { v = v.some_heads(first, count); };
        of_key(b.key);
        of_key(b.value);
        of_key(b.d_key);
        of_key(b.d_value);
        return b;
    }
    [[nodiscard]] static backward_block<T, device_memory> some_rows(backward_block<T, device_memory> b,
                                                                    std::size_t query, std::size_t queries,
                                                                    std::size_t key, std::size_t keys,
                                                                    visibility seen) noexcept {
        const auto of_query = [&](auto& v) { v = v.rows(query, queries); };
        of_query(b.query);
        of_query(b.d_out);
        of_query(b.out);
        of_query(b.log_sum_exp);
        of_query(b.delta);
        of_query(b.d_query);
        const auto of_key = [&](auto& v) { v = v.rows(key, keys); };
        of_key(b.key);
        of_key(b.value);
        of_key(b.d_key);
        of_key(b.d_value);
        b.seen = seen;
        return b;
    }

    [[nodiscard]] static final_forward_block<T, device_memory> rows_of(const final_forward_block<T, device_memory>& b,
                                                                       std::size_t first, std::size_t count) noexcept {
        return {
            b.query.rows(first, count), b.key.rows(first, count),        b.value.rows(first, count), b.seen, b.scale,
            b.out.rows(first, count),   b.log_sum_exp.rows(first, count)};
    }
    [[nodiscard]] static final_backward_block<T, device_memory> rows_of(const final_backward_block<T, device_memory>& b,
                                                                        std::size_t first, std::size_t count) noexcept {
        return {b.query.rows(first, count),
                b.key.rows(first, count),
                b.value.rows(first, count),
                b.seen,
                b.scale,
                b.d_out.rows(first, count),
                b.out.rows(first, count),
                b.log_sum_exp.rows(first, count),
                b.delta.rows(first, count),
                b.d_query.rows(first, count),
                b.d_key.rows(first, count),
                b.d_value.rows(first, count)};
    }

    // The calls that the library has no kernel for. Tensors are used where they are, with the logarithms [row][head].
    [[nodiscard]] std::vector<detail::packed_call> packed_forward(const cuda_queue& q,
                                                                  const final_forward_block<T, device_memory>& b,
                                                                  std::vector<detail::packed_call> calls) {
        fused_call c = packed(b, false);
        c.out = described(b.out);
        if (!fusible(b, {&c.query, &c.key, &c.value, &c.out})) { return calls; }
        const tensor<float> sums = sums_by_row(q, b.query);
        c.log_sum_exp = sums.data;
        calls = run_packed(q, c, {&c.query, &c.key, &c.value, &c.out}, std::move(calls));
        copy_tokens(q, sums, b.log_sum_exp);
        return calls;
    }
    [[nodiscard]] std::vector<detail::packed_call> packed_backward(const cuda_queue& q,
                                                                   const final_backward_block<T, device_memory>& b,
                                                                   std::vector<detail::packed_call> calls) {
        fused_call c = packed(b, true);
        c.out = described(b.out);
        c.d_out = described(b.d_out);
        c.d_query = described(b.d_query);
        c.d_key = described(b.d_key);
        c.d_value = described(b.d_value);
        const std::vector<fused_tensor*> all{&c.query, &c.key,     &c.value, &c.out,
                                             &c.d_out, &c.d_query, &c.d_key, &c.d_value};
        if (!b.out.same_shape(b.query) || !fusible(b, all)) { return calls; }
        const tensor<float> sums = sums_by_row(q, b.query);
        c.log_sum_exp = sums.data;
        copy_tokens(q, b.log_sum_exp, sums);
        return run_packed(q, c, all, std::move(calls));
    }
    template <class B> [[nodiscard]] static fused_call packed(const B& b, bool backward) {
        fused_call c;
        c.element = dtype_of<T>;
        c.heads = {b.query.heads, b.key.heads, b.query.width};
        c.scale = b.scale;
        c.backward = backward;
        c.causal = b.seen.rule == mask::causal;
        c.query = described(b.query);
        c.key = described(b.key);
        c.value = described(b.value);
        return c;
    }
    template <class B>
    [[nodiscard]] bool fusible(const B& b, const std::vector<fused_tensor*>& tensors) const noexcept {
        if (fused_ == nullptr || b.query.empty() || b.seen.first_query != b.seen.first_key) { return false; }
        for (const fused_tensor* t : tensors) {
            if (!addressable(*t)) { return false; }
        }
        return true;
    }
    [[nodiscard]] tensor<float> sums_by_row(const cuda_queue& q, const tensor<const T>& query) {
        const std::size_t numbers = query.tokens * query.heads;
        reserve(q, sums_, numbers);
        return tensor<float>(sums_->view().sub(0, numbers), query.tokens, query.heads, std::size_t{1});
    }
    [[nodiscard]] std::vector<detail::packed_call> run_packed(const cuda_queue& q, fused_call& c,
                                                              const std::vector<fused_tensor*>& tensors,
                                                              std::vector<detail::packed_call> calls) {
        std::vector<std::int64_t> offsets;
        std::vector<std::int32_t> lengths;
        for (const detail::packed_call& p : calls) {
            for (const fused_tensor* t : tensors) { p.append_offsets(t->token_stride, offsets); }
            p.append_offsets(c.heads.query, offsets);
            p.append_lengths(lengths);
        }
        tables& told = packed_[c.backward ? 1 : 0];
        told.offsets.set(q, std::move(offsets));
        told.lengths.set(q, std::move(lengths));
        const std::int64_t* next = told.offsets.there->data();
        const std::int32_t* counts = told.lengths.there->data();
        std::vector<detail::packed_call> refused;
        for (detail::packed_call& p : calls) {
            c.sequences = p.sequences();
            c.queries = c.keys = p.rows;
            c.seen_queries = c.seen_keys = counts;
            counts += c.sequences;
            for (fused_tensor* t : tensors) {
                t->offsets = next;
                next += c.sequences + 1;
            }
            c.log_sum_exp_offsets = next;
            next += c.sequences + 1;
            if (!fused_->run(q, c)) { refused.push_back(std::move(p)); }
        }
        return refused;
    }

    // Can a library read and write it? Heads inside of tokens: else the strides, and so the graphs, would be others for
    // each number of tokens.
    [[nodiscard]] static bool addressable(const fused_tensor& t) noexcept {
        return t.head_stride <= t.token_stride && t.token_stride % 8 == 0 && t.head_stride % 8 == 0 &&
               reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    }
    [[nodiscard]] static fused_tensor described(const tensor<const T>& v) noexcept {
        return {const_cast<T*>(v.data), v.token_stride, v.head_stride};
    }

    // One call: its scratch, handed out piece by piece, and what goes in.
    class call {
        cuda_attention& owner_;
        const cuda_queue& queue_;
        std::size_t taken_ = 0;

    public:
        fused_call c;

        template <class B>
        call(cuda_attention& owner, const cuda_queue& q, const B& b, std::size_t keys, bool backward)
            : owner_(owner), queue_(q) {
            c.element = dtype_of<T>;
            c.heads = {b.query.heads, b.key.heads, b.query.width};
            c.scale = b.scale;
            c.backward = backward;
            c.causal = b.seen.keys_of(0, keys) != keys;
            c.queries = detail::fused_rows(b.query.tokens);
            c.keys = detail::fused_rows(keys);
            const std::size_t of_query = c.queries * c.heads.query * c.heads.width;
            const std::size_t of_keys = c.keys * c.heads.kv * c.heads.width;
            std::size_t numbers = of_query + (backward ? 2 * of_keys : 0);  // results
            const auto add_copy = [&](const tensor<const T>& v, std::size_t rows, std::size_t size) {
                numbers += readable(v, rows) ? 0 : size;
            };
            add_copy(b.query, c.queries, of_query);
            add_copy(b.key.rows(0, keys), c.keys, of_keys);
            add_copy(b.value.rows(0, keys), c.keys, of_keys);
            if constexpr (!std::same_as<B, forward_block<T, device_memory>> &&
                          !std::same_as<B, final_forward_block<T, device_memory>>) {
                add_copy(b.out, c.queries, of_query);
                add_copy(b.d_out, c.queries, of_query);
            }
            reserve(queue_, owner_.numbers_, numbers);
            reserve(queue_, owner_.sums_, c.queries * c.heads.query);
            c.log_sum_exp = owner_.sums_->data();
            if (c.queries != b.query.tokens || c.keys != keys) {
                reserve(queue_, owner_.counts_, 2);
                const auto set = [&](std::size_t i, std::size_t rows) {
                    fill_tokens(queue_,
                                tensor<std::int32_t>(owner_.counts_->view().sub(i, 1), std::size_t{1}, std::size_t{1},
                                                     std::size_t{1}),
                                static_cast<std::int32_t>(rows));
                    return owner_.counts_->data() + i;
                };
                c.seen_queries = set(0, b.query.tokens);
                c.seen_keys = set(1, keys);
            }
            c.query = given(b.query, c.queries);
            c.key = given(b.key.rows(0, keys), c.keys);
            c.value = given(b.value.rows(0, keys), c.keys);
        }
        [[nodiscard]] tensor<T> scratch(std::size_t rows, std::size_t heads) {
            const std::size_t size = rows * heads * c.heads.width;
            taken_ += size;
            return tensor<T>(owner_.numbers_->view().sub(taken_ - size, size), rows, heads, c.heads.width);
        }
        // The tensor itself, or a copy that a library can read and that has as many rows as it is to have.
        [[nodiscard]] fused_tensor given(const tensor<const T>& v, std::size_t rows) {
            if (readable(v, rows)) { return described(v); }
            const tensor<T> copy = scratch(rows, v.heads);
            copy_tokens(queue_, v, copy.rows(0, v.tokens));
            fill_tokens(queue_, copy.rows(v.tokens, rows - v.tokens), T{});
            return described(copy);
        }
        // Where the library writes a result: that itself where it can, else scratch.
        template <class R> [[nodiscard]] tensor<T> written(const tensor<R>& result, std::size_t rows) {
            if constexpr (std::same_as<R, T>) {
                if (readable(result, rows)) { return result; }
            }
            return scratch(rows, result.heads);
        }
        [[nodiscard]] tensor<float> sums() const {
            return numbers_by_head(owner_.sums_->view().sub(0, c.queries * c.heads.query), c.queries, c.heads.query);
        }

    private:
        [[nodiscard]] static bool readable(const tensor<const T>& v, std::size_t rows) noexcept {
            return v.tokens == rows && addressable(described(v));
        }
    };

    template <class U>
    static void reserve(const cuda_queue& q, std::unique_ptr<buffer<U, cuda_queue>>& memory, std::size_t count) {
        if (memory != nullptr && memory->size() >= count) { return; }
        memory.reset();  // the old one goes first: peaks are counted
        memory = std::make_unique<buffer<U, cuda_queue>>(q, count);
    }
    // From where the library wrote a result: there already, to be written, or to be added to.
    template <class R>
    static void deliver(const cuda_queue& q, const tensor<T>& from, const tensor<R>& to, bool starts) {
        if constexpr (std::same_as<R, T>) {
            if (from.data != to.data) { copy_tokens(q, from.rows(0, to.tokens), to); }
        } else if (starts) {
            copy_tokens(q, from.rows(0, to.tokens), to);
        } else {
            add_tokens(q, from.rows(0, to.tokens), to);
        }
    }

    template <class B> [[nodiscard]] bool fused_forward(const cuda_queue& q, const B& b) {
        const std::size_t keys = fused_keys(b);
        if (keys == 0) { return false; }
        call f(*this, q, b, keys, false);
        const tensor<T> out = f.written(b.out, f.c.queries);
        f.c.out = described(out);
        if (!fused_->run(q, f.c)) { return false; }
        deliver(q, out, b.out, true);
        copy_tokens(q, f.sums().rows(0, b.query.tokens), b.log_sum_exp);
        return true;
    }
    // Keys behind those that are seen get nothing: where a block starts gradients, 0.
    template <class B> [[nodiscard]] bool fused_backward(const cuda_queue& q, const B& b) {
        const std::size_t keys = fused_keys(b);
        if (keys == 0) { return false; }
        call f(*this, q, b, keys, true);
        f.c.out = f.given(b.out, f.c.queries);
        f.c.d_out = f.given(b.d_out, f.c.queries);
        const tensor<T> d_query = f.written(b.d_query, f.c.queries);
        const tensor<T> d_key = f.written(b.d_key.rows(0, keys), f.c.keys);
        const tensor<T> d_value = f.written(b.d_value.rows(0, keys), f.c.keys);
        f.c.d_query = described(d_query);
        f.c.d_key = described(d_key);
        f.c.d_value = described(d_value);
        fill_tokens(q, f.sums().rows(b.query.tokens, f.c.queries - b.query.tokens), 0.0f);
        copy_tokens(q, b.log_sum_exp, f.sums().rows(0, b.query.tokens));
        if (!fused_->run(q, f.c)) { return false; }
        bool starts_query = true, starts_keys = true;
        if constexpr (std::same_as<B, backward_block<T, device_memory>>) {
            starts_query = b.starts_query;
            starts_keys = b.starts_keys;
        }
        deliver(q, d_query, b.d_query, starts_query);
        deliver(q, d_key, b.d_key.rows(0, keys), starts_keys);
        deliver(q, d_value, b.d_value.rows(0, keys), starts_keys);
        if (starts_keys) {
            const std::size_t unseen = b.key.tokens - keys;
            fill_tokens(q, b.d_key.rows(keys, unseen), {});
            fill_tokens(q, b.d_value.rows(keys, unseen), {});
        }
        return true;
    }
};
static_assert(packed_attention<cuda_attention<float>> && packed_attention<cuda_attention<bfloat16>>);

template <> struct default_attention<cuda_queue> {
    template <floating_element T> using of = cuda_attention<T>;
    using type = of<bfloat16>;
};

}  // namespace tutti::sequence
