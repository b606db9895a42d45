// cuda_attention: the block kernel of CUDA queues: a library's fused attention where it has a kernel, tiles elsewhere.
// Needs sequence/fused_attention, sequence/tiled_attention and nvcc.
#pragma once

#include <bit>       // bit_width
#include <concepts>  // same_as
#include <cstddef>   // size_t
#include <cstdint>   // counts of rows
#include <memory>    // the library
#include <utility>   // move

#include <tutti/core/buffer.hpp>                // scratch
#include <tutti/core/cuda_queue.hpp>            // cuda_queue
#include <tutti/core/element.hpp>               // accumulator_t
#include <tutti/core/stochastic_rounding.hpp>   // half_element
#include <tutti/sequence/block_attention.hpp>   // forward_block, backward_block
#include <tutti/sequence/fused_attention.hpp>   // fused_attention
#include <tutti/sequence/tiled_attention.cuh>   // tiled_attention
#include <tutti/sequence/token_operations.cuh>  // copy, add, fill

namespace tutti::sequence {

namespace detail {

/// Rows that a fused call for n rows has: 128 up to 1024, then four steps an octave, so that sequences of all lengths
/// share few graphs. At most a quarter is padding.
[[nodiscard]] constexpr std::size_t fused_rows(std::size_t n) noexcept {
    const std::size_t step = n <= 1024 ? 128 : std::size_t{1} << (std::bit_width(n - 1) - 3);
    return (n + step - 1) / step * step;
}

}  // namespace detail

/// The block kernel of CUDA queues.
///
/// Semantics    as block_attention says. A library is asked for blocks of 16-bit numbers whose queries see all keys, or
///              keys up to their own; the rest is tiled_attention's, and so is what the library has no kernel for. It
///              reads rows where they are when their number is one that calls are made for (detail::fused_rows), else
///              copies padded with zeros. A row whose scores are all -inf is NaN where the library makes it so.
/// Units        the library's results are of 16 bits: forward's are widened, backward's added to the sums in float.
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
    std::unique_ptr<buffer<std::int32_t, cuda_queue>> counts_;

public:
    using element_type = T;
    using queue_type = cuda_queue;
    static constexpr bool wants_out = may_fuse;

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
            if (b.out.same_shape(b.query) && fused_keys(b) != 0) { return backward_in_parts(q, b); }
        }
        tiles_.backward(q, b);
    }

private:
    // Keys that a fused call is about; 0: it cannot be one.
    template <class B> [[nodiscard]] std::size_t fused_keys(const B& b) const noexcept {
        if (fused_ == nullptr || b.query.empty() || b.key.empty()) { return 0; }
        if (b.seen.keys_of(0, b.key.tokens) == b.key.tokens) { return b.key.tokens; }
        const bool aligned = b.seen.first_query == b.seen.first_key && b.query.tokens <= b.key.tokens;
        return aligned ? b.query.tokens : 0;
    }

    // In calls as large as the library likes them: of fewer heads, then of fewer rows. Gradients add up.
    void backward_in_parts(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        const std::size_t keys = fused_keys(b);
        const std::size_t rows = detail::fused_rows(b.query.tokens);
        const std::size_t most = fused_->most_scores() / rows / detail::fused_rows(keys);
        if (b.query.heads <= most || (b.key.heads == 1 && rows * detail::fused_rows(keys) == 128 * 128)) {
            if (!fused_backward(q, b)) { tiles_.backward(q, b); }
            return;
        }
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
    [[nodiscard]] static backward_block<T, device_memory> some_heads(backward_block<T, device_memory> b,
                                                                     std::size_t first, std::size_t count) noexcept {
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
            if constexpr (std::same_as<B, backward_block<T, device_memory>>) {
                add_copy(b.out, c.queries, of_query);
                add_copy(b.d_out, c.queries, of_query);
            }
            reserve(owner_.numbers_, numbers);
            reserve(owner_.sums_, c.queries * c.heads.query);
            c.log_sum_exp = owner_.sums_->data();
            if (c.queries != b.query.tokens || c.keys != keys) {
                reserve(owner_.counts_, 2);
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
            if (readable(v, rows)) { return {const_cast<T*>(v.data), v.token_stride, v.head_stride}; }
            const tensor<T> copy = scratch(rows, v.heads);
            copy_tokens(queue_, v, copy.rows(0, v.tokens));
            fill_tokens(queue_, copy.rows(v.tokens, rows - v.tokens), T{});
            return described(copy);
        }
        [[nodiscard]] static fused_tensor described(const tensor<T>& v) {
            return {v.data, v.token_stride, v.head_stride};
        }
        [[nodiscard]] tensor<float> sums() const {
            return numbers_by_head(owner_.sums_->view().sub(0, c.queries * c.heads.query), c.queries, c.heads.query);
        }

    private:
        // Heads inside of tokens: else the strides, and so the graphs, would be others for each number of tokens.
        [[nodiscard]] static bool readable(const tensor<const T>& v, std::size_t rows) noexcept {
            return v.tokens == rows && v.head_stride <= v.token_stride && v.token_stride % 8 == 0 &&
                   v.head_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
        }
        template <class U> void reserve(std::unique_ptr<buffer<U, cuda_queue>>& memory, std::size_t count) const {
            if (memory != nullptr && memory->size() >= count) { return; }
            memory.reset();  // the old one goes first: peaks are counted
            memory = std::make_unique<buffer<U, cuda_queue>>(queue_, count);
        }
    };

    [[nodiscard]] bool fused_forward(const cuda_queue& q, const forward_block<T, device_memory>& b) {
        const std::size_t keys = fused_keys(b);
        if (keys == 0) { return false; }
        call f(*this, q, b, keys, false);
        const tensor<T> out = f.scratch(f.c.queries, f.c.heads.query);
        f.c.out = f.described(out);
        if (!fused_->run(q, f.c)) { return false; }
        copy_tokens(q, out.rows(0, b.query.tokens), b.out);
        copy_tokens(q, f.sums().rows(0, b.query.tokens), b.log_sum_exp);
        return true;
    }
    [[nodiscard]] bool fused_backward(const cuda_queue& q, const backward_block<T, device_memory>& b) {
        const std::size_t keys = fused_keys(b);
        if (keys == 0) { return false; }
        call f(*this, q, b, keys, true);
        f.c.out = f.given(b.out, f.c.queries);
        f.c.d_out = f.given(b.d_out, f.c.queries);
        const tensor<T> d_query = f.scratch(f.c.queries, f.c.heads.query);
        const tensor<T> d_key = f.scratch(f.c.keys, f.c.heads.kv);
        const tensor<T> d_value = f.scratch(f.c.keys, f.c.heads.kv);
        f.c.d_query = f.described(d_query);
        f.c.d_key = f.described(d_key);
        f.c.d_value = f.described(d_value);
        fill_tokens(q, f.sums().rows(b.query.tokens, f.c.queries - b.query.tokens), 0.0f);
        copy_tokens(q, b.log_sum_exp, f.sums().rows(0, b.query.tokens));
        if (!fused_->run(q, f.c)) { return false; }
        add_tokens(q, d_query.rows(0, b.query.tokens), b.d_query);
        add_tokens(q, d_key.rows(0, keys), b.d_key.rows(0, keys));
        add_tokens(q, d_value.rows(0, keys), b.d_value.rows(0, keys));
        return true;
    }
};
static_assert(block_attention<cuda_attention<float>>);

template <> struct default_attention<cuda_queue> {
    template <floating_element T> using of = cuda_attention<T>;
    using type = of<bfloat16>;
};

}  // namespace tutti::sequence
