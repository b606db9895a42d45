// cuda_attention: the block kernel of CUDA queues: a library's fused attention where it has a kernel, tiles elsewhere.
// Needs sequence/fused_attention, sequence/tiled_attention and nvcc.
#pragma once

#include <cstddef>  // size_t
#include <memory>   // the library
#include <utility>  // move
#include <vector>   // packed calls

#include <tutti/core/buffer.hpp>                    // scratch
#include <tutti/core/cuda_queue.hpp>                // cuda_queue
#include <tutti/core/element.hpp>                   // accumulator_t
#include <tutti/core/stochastic_rounding.hpp>       // half_element
#include <tutti/sequence/block_attention.hpp>       // forward_block, backward_block
#include <tutti/sequence/detail/fused_blocks.cuh>   // fused_blocks
#include <tutti/sequence/detail/packed_blocks.cuh>  // packed_blocks
#include <tutti/sequence/detail/packed_calls.hpp>   // fused_rows, packed_calls
#include <tutti/sequence/fused_attention.hpp>       // fused_attention
#include <tutti/sequence/tiled_attention.cuh>       // tiled_attention
#include <tutti/sequence/token_operations.cuh>      // copy, add, fill

namespace tutti::sequence {

/// The block kernel of CUDA queues.
///
/// Semantics    as block_attention says. A library is asked for blocks of 16-bit numbers whose queries see all keys, or
///              keys up to their own; the rest is tiled_attention's, and so is what the library has no kernel for. It
///              reads rows where they are when their number is one that calls are made for (detail::fused_rows), else
///              copies padded with zeros. Packed sequences it attends to where they are, many in a call, if tensors are
///              aligned and the library has a kernel; else one after the other. A row whose scores are all -inf is NaN
///              where the library makes it so.
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
    detail::fused_blocks<T> blocks_;
    detail::packed_blocks<T> packed_;
    std::unique_ptr<buffer<P, cuda_queue>> results_;  // of final blocks that are computed as others are
    std::unique_ptr<buffer<P, cuda_queue>> deltas_;

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
        detail::reserve_scratch(q, results_, b.out.size());
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
        detail::reserve_scratch(q, results_, b.query.size() + 2 * b.key.size());
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
        if constexpr (may_fuse) {
            if (fused_ != nullptr) { rest = packed_.forward(*fused_, q, b.all, std::move(rest)); }
        }
        each(rest, [&](std::size_t first, std::size_t count) { forward(q, rows_of(b.all, first, count)); });
    }
    void backward(const cuda_queue& q, const packed_backward_block<T, device_memory>& b) {
        std::vector<detail::packed_call> rest = detail::packed_calls(b.lengths);
        if constexpr (may_fuse) {
            if (fused_ != nullptr) { rest = packed_.backward(*fused_, q, b.all, std::move(rest)); }
        }
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

    template <class B> [[nodiscard]] bool fused_forward(const cuda_queue& q, const B& b) {
        const std::size_t keys = fused_keys(b);
        return keys != 0 && blocks_.forward(*fused_, q, b, keys);
    }
    template <class B> [[nodiscard]] bool fused_backward(const cuda_queue& q, const B& b) {
        const std::size_t keys = fused_keys(b);
        return keys != 0 && blocks_.backward(*fused_, q, b, keys);
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
            detail::reserve_scratch(q, deltas_, b.query.tokens * b.query.heads);
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
};
static_assert(packed_attention<cuda_attention<float>> && packed_attention<cuda_attention<bfloat16>>);

template <> struct default_attention<cuda_queue> {
    template <floating_element T> using of = cuda_attention<T>;
    using type = of<bfloat16>;
};

}  // namespace tutti::sequence
