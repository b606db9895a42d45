// packed_blocks: many sequences of a packed block as few calls of a library of fused kernels, without copies of tensors.
// Needs sequence/fused_attention, sequence/token_operations and nvcc.
#pragma once

#include <array>    // tables of both directions
#include <cstddef>  // size_t
#include <cstdint>  // offsets, lengths
#include <memory>   // scratch
#include <utility>  // move
#include <vector>   // calls

#include <tutti/core/buffer.hpp>                   // tables
#include <tutti/core/cuda_queue.hpp>               // cuda_queue
#include <tutti/core/element.hpp>                  // dtype_of
#include <tutti/sequence/block_attention.hpp>      // blocks
#include <tutti/sequence/detail/fused_blocks.cuh>  // addressable, described
#include <tutti/sequence/detail/packed_calls.hpp>  // packed_call
#include <tutti/sequence/fused_attention.hpp>      // fused_attention
#include <tutti/sequence/token_operations.cuh>     // copy

namespace tutti::sequence::detail {

template <floating_element T> class packed_blocks {
    template <class U> using tensor = token_view<U, device_memory>;
    std::unique_ptr<buffer<float, cuda_queue>> sums_;  // logarithms, [row][head]
    // What packed calls of a direction are told of their sequences, on the host and the same on the device: the layers of
    // a step have the same.
    template <class U> struct table {
        std::vector<U> here;
        std::unique_ptr<buffer<U, cuda_queue>> there;
        void set(const cuda_queue& q, std::vector<U> numbers) {
            if (there != nullptr && numbers == here) { return; }
            here = std::move(numbers);
            reserve_scratch(q, there, here.size());
            upload(q, view<const U>(here), there->view().sub(0, here.size()));
        }
    };
    struct tables {
        table<std::int64_t> offsets;
        table<std::int32_t> lengths;
    };
    std::array<tables, 2> told_;

public:
    /// Returns the calls that the library has no kernel for. Tensors are used where they are.
    [[nodiscard]] std::vector<packed_call> forward(fused_attention& library, const cuda_queue& q,
                                                   const final_forward_block<T, device_memory>& b,
                                                   std::vector<packed_call> calls) {
        fused_call c = packed(b, false);
        c.out = described(b.out);
        if (!fusible(b, {&c.query, &c.key, &c.value, &c.out})) { return calls; }
        const tensor<float> sums = sums_by_row(q, b.query);
        c.log_sum_exp = sums.data;
        calls = run(library, q, c, {&c.query, &c.key, &c.value, &c.out}, std::move(calls));
        copy_tokens(q, sums, b.log_sum_exp);
        return calls;
    }
    [[nodiscard]] std::vector<packed_call> backward(fused_attention& library, const cuda_queue& q,
                                                    const final_backward_block<T, device_memory>& b,
                                                    std::vector<packed_call> calls) {
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
        return run(library, q, c, all, std::move(calls));
    }

private:
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
    [[nodiscard]] static bool fusible(const B& b, const std::vector<fused_tensor*>& tensors) noexcept {
        if (b.query.empty() || b.seen.first_query != b.seen.first_key) { return false; }
        for (const fused_tensor* t : tensors) {
            if (!addressable(*t)) { return false; }
        }
        return true;
    }
    [[nodiscard]] tensor<float> sums_by_row(const cuda_queue& q, const tensor<const T>& query) {
        const std::size_t numbers = query.tokens * query.heads;
        reserve_scratch(q, sums_, numbers);
        return tensor<float>(sums_->view().sub(0, numbers), query.tokens, query.heads, std::size_t{1});
    }
    [[nodiscard]] std::vector<packed_call> run(fused_attention& library, const cuda_queue& q, fused_call& c,
                                               const std::vector<fused_tensor*>& tensors,
                                               std::vector<packed_call> calls) {
        std::vector<std::int64_t> offsets;
        std::vector<std::int32_t> lengths;
        for (const packed_call& p : calls) {
            for (const fused_tensor* t : tensors) { p.append_offsets(t->token_stride, offsets); }
            p.append_offsets(c.heads.query, offsets);
            p.append_lengths(lengths);
        }
        tables& told = told_[c.backward ? 1 : 0];
        told.offsets.set(q, std::move(offsets));
        told.lengths.set(q, std::move(lengths));
        const std::int64_t* next = told.offsets.there->data();
        const std::int32_t* counts = told.lengths.there->data();
        std::vector<packed_call> refused;
        for (packed_call& p : calls) {
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
            if (!library.run(q, c)) { refused.push_back(std::move(p)); }
        }
        return refused;
    }
};

}  // namespace tutti::sequence::detail
