// fused_attention: what cuda_attention asks of a library of attention kernels, which may be compiled elsewhere.
// Needs core/cuda_queue, and no such library; sequence/cudnn_attention is one.
#pragma once

#include <atomic>   // the program's library
#include <cstddef>  // size_t
#include <cstdint>  // counts of rows
#include <limits>   // no limit
#include <memory>   // kernels

#include <tutti/core/cuda_queue.hpp>      // cuda_queue
#include <tutti/core/element.hpp>         // dtype
#include <tutti/sequence/token_view.hpp>  // attention_heads

namespace tutti::sequence {

/// A tensor of 16-bit numbers: 16-byte aligned, its strides multiples of 8. Where it is an input it is not written.
struct fused_tensor {
    void* data = nullptr;
    std::size_t token_stride = 0;
    std::size_t head_stride = 0;
    const std::int64_t* offsets = nullptr;  ///< of a packed call: of each sequence's first number, and one more
};

/// One call of a library.
///
/// Shapes  queries, keys: rows that the tensors have, multiples of 128. seen_queries and seen_keys: how many of them
///         count, in the device's memory; null where all do. causal: query i sees keys [0, i], and there are as many
///         queries as keys.
/// Packed  where sequences is not 0, the call is of so many, each of which attends to itself, anywhere in the rows of the
///         tensors: where offsets say, which like the counts are in the device's memory. queries and keys are rows of
///         the longest then; one may have none. What is written is rows that count, and no others.
/// Units   log_sum_exp: natural logarithms, [query head][queries], packed [row][query head]. It and out are written by
///         forward, and read by backward, to which they are of all keys that the queries attended to.
struct fused_call {
    dtype element = dtype::bfloat16;
    attention_heads heads{};
    double scale = 1;
    bool backward = false;
    bool causal = false;
    std::size_t queries = 0;
    std::size_t keys = 0;
    std::size_t sequences = 0;
    const std::int32_t* seen_queries = nullptr;
    const std::int32_t* seen_keys = nullptr;
    fused_tensor query{}, key{}, value{}, out{};
    float* log_sum_exp = nullptr;
    const std::int64_t* log_sum_exp_offsets = nullptr;
    fused_tensor d_out{}, d_query{}, d_key{}, d_value{};  ///< backward; what is written is not added to
};

/// Kernels of attention that a library has.
///
/// Semantics    run: enqueues the call, or says that there is no kernel for it, having enqueued nothing. What it writes
///              beyond the rows that count is unspecified, but for packed calls.
/// Determinism  the same call gives the same bits.
/// Errors       backend_error with the library's text.
class fused_attention {
public:
    fused_attention() = default;
    fused_attention(const fused_attention&) = delete;
    fused_attention& operator=(const fused_attention&) = delete;
    virtual ~fused_attention() = default;
    [[nodiscard]] virtual bool run(const cuda_queue& q, const fused_call& call) = 0;
    /// Query heads * queries * keys that a backward call should have at most, where its memory grows with them.
    [[nodiscard]] virtual std::size_t most_scores() const noexcept { return std::numeric_limits<std::size_t>::max(); }
};

/// The program's library: what a cuda_attention uses that is given none.
///
/// Semantics  provide: says how one is made from now on, and returns what was said before; null: there is none. Including
///            sequence/cudnn_attention.hpp in any one file of a program does so before main. make: null where there is
///            none.
/// Threads    any.
class default_fused_attention {
public:
    using maker = std::unique_ptr<fused_attention> (*)();
    static maker provide(maker m) noexcept { return provided().exchange(m); }
    [[nodiscard]] static std::unique_ptr<fused_attention> make() {
        const maker m = provided().load();
        return m == nullptr ? nullptr : m();
    }

private:
    [[nodiscard]] static std::atomic<maker>& provided() noexcept {
        static std::atomic<maker> m{nullptr};
        return m;
    }
};

}  // namespace tutti::sequence
