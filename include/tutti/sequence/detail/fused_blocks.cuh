// fused_blocks: blocks of attention as calls of a library of fused kernels: copies where it cannot read or write in place.
// Needs sequence/fused_attention, sequence/token_operations and nvcc.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // counts of rows
#include <memory>       // scratch
#include <type_traits>  // remove_const

#include <tutti/core/buffer.hpp>                   // scratch
#include <tutti/core/cuda_queue.hpp>               // cuda_queue
#include <tutti/core/element.hpp>                  // dtype_of
#include <tutti/sequence/block_attention.hpp>      // blocks
#include <tutti/sequence/detail/packed_calls.hpp>  // fused_rows
#include <tutti/sequence/fused_attention.hpp>      // fused_attention
#include <tutti/sequence/token_operations.cuh>     // copy, add, fill

namespace tutti::sequence::detail {

/// Grows only.
template <class U>
void reserve_scratch(const cuda_queue& q, std::unique_ptr<buffer<U, cuda_queue>>& memory, std::size_t count) {
    if (memory != nullptr && memory->size() >= count) { return; }
    memory.reset();  // the old one goes first: peaks are counted
    memory = std::make_unique<buffer<U, cuda_queue>>(q, count);
}

/// Can a library read and write it? Heads inside of tokens: else the strides, and so the graphs, would be others for each
/// number of tokens.
[[nodiscard]] inline bool addressable(const fused_tensor& t) noexcept {
    return t.head_stride <= t.token_stride && t.token_stride % 8 == 0 && t.head_stride % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
}
template <class T> [[nodiscard]] fused_tensor described(const token_view<T, device_memory>& v) noexcept {
    return {const_cast<std::remove_const_t<T>*>(v.data), v.token_stride, v.head_stride};
}

template <floating_element T> class fused_blocks {
    template <class U> using tensor = token_view<U, device_memory>;
    std::unique_ptr<buffer<T, cuda_queue>> numbers_;
    std::unique_ptr<buffer<float, cuda_queue>> sums_;
    std::unique_ptr<buffer<std::int32_t, cuda_queue>> counts_;

public:
    /// A block whose queries see `keys` keys, or keys up to their own; false: the library has no kernel for it.
    template <class B>
    [[nodiscard]] bool forward(fused_attention& library, const cuda_queue& q, const B& b, std::size_t keys) {
        call f(*this, q, b, keys, false);
        const tensor<T> out = f.written(b.out, f.c.queries);
        f.c.out = described(out);
        if (!library.run(q, f.c)) { return false; }
        deliver(q, out, b.out, true);
        copy_tokens(q, f.sums().rows(0, b.query.tokens), b.log_sum_exp);
        return true;
    }
    // Keys behind those that are seen get nothing: where a block starts gradients, 0.
    template <class B>
    [[nodiscard]] bool backward(fused_attention& library, const cuda_queue& q, const B& b, std::size_t keys) {
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
        if (!library.run(q, f.c)) { return false; }
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

private:
    // One call: its scratch, handed out piece by piece, and what goes in.
    class call {
        fused_blocks& owner_;
        const cuda_queue& queue_;
        std::size_t taken_ = 0;

    public:
        fused_call c;

        template <class B>
        call(fused_blocks& owner, const cuda_queue& q, const B& b, std::size_t keys, bool backward)
            : owner_(owner), queue_(q) {
            c.element = dtype_of<T>;
            c.heads = {b.query.heads, b.key.heads, b.query.width};
            c.scale = b.scale;
            c.backward = backward;
            c.causal = b.seen.keys_of(0, keys) != keys;
            c.queries = fused_rows(b.query.tokens);
            c.keys = fused_rows(keys);
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
            reserve_scratch(queue_, owner_.numbers_, numbers);
            reserve_scratch(queue_, owner_.sums_, c.queries * c.heads.query);
            c.log_sum_exp = owner_.sums_->data();
            if (c.queries != b.query.tokens || c.keys != keys) {
                reserve_scratch(queue_, owner_.counts_, 2);
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
};

}  // namespace tutti::sequence::detail
