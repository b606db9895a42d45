// The device side of parallel/vocabulary: words looked up, and the loss over logits of which each rank has some.
// Needs core/cuda_run, CUB and nvcc. A block takes a row; its threads' partial results are merged in a fixed order.
#pragma once

#include <algorithm>  // max
#include <cmath>      // INFINITY
#include <cstddef>    // byte, size_t
#include <cstdint>    // words

#include <cub/device/device_radix_sort.cuh>  // rows by word

#include <tutti/core/buffer.hpp>          // sorted rows
#include <tutti/core/cuda_run.cuh>        // start
#include <tutti/core/error.hpp>           // narrow
#include <tutti/parallel/vocabulary.hpp>  // operations

namespace tutti::parallel {

namespace detail {

inline constexpr unsigned vocabulary_threads = 512;

// merge(merge(x0, x1), ...) over the block's threads, in an order that depends on nothing; valid in thread 0.
template <class R, class Merge> __device__ R merged_over_block(R own, Merge merge) {
    __shared__ R of_warps[vocabulary_threads / 32];
    for (int step = 16; step > 0; step /= 2) { own = merge(own, __shfl_down_sync(0xffffffffu, own, step)); }
    if (threadIdx.x % 32 == 0) { of_warps[threadIdx.x / 32] = own; }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned w = 1; w < vocabulary_threads / 32; ++w) { own = merge(own, of_warps[w]); }
    }
    return own;
}

template <class O> __global__ void __launch_bounds__(vocabulary_threads) largest_logits(O op) {
    using R = typename decltype(op.largest)::value_type;
    const std::size_t i = blockIdx.x;
    const auto* const row = op.in.row(i);
    const auto larger = [](R a, R b) { return b > a || b != b ? b : a; };
    R most = -INFINITY;
    for (std::size_t j = threadIdx.x; j < op.in.real; j += vocabulary_threads) {
        most = larger(most, static_cast<R>(row[j]));
    }
    most = merged_over_block(most, larger);
    if (threadIdx.x == 0) { op.largest.data()[i] = most; }
}

template <class O> __global__ void __launch_bounds__(vocabulary_threads) sums_of_exponentials(O op) {
    using R = typename decltype(op.sums)::value_type;
    const std::size_t i = blockIdx.x, rows = op.targets.size();
    const auto* const row = op.in.row(i);
    const R largest = op.largest.data()[i];
    R sum = 0;
    for (std::size_t j = threadIdx.x; j < op.in.real; j += vocabulary_threads) {
        sum += std::exp(static_cast<R>(row[j]) - largest);
    }
    sum = merged_over_block(sum, [](R a, R b) { return a + b; });
    if (threadIdx.x != 0) { return; }
    const std::int32_t target = op.targets.data()[i];
    op.sums.data()[i] = sum;
    op.sums.data()[rows + i] =
        op.in.has(target) ? static_cast<R>(row[static_cast<std::size_t>(target) - op.in.first]) : R{0};
}

template <class O> __global__ void row_losses(O op) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < op.targets.size()) { op.of_row(i); }
}

// Each thread reads an element and writes the one in its place: the gradient may be where the logits are.
template <class O> __global__ void __launch_bounds__(vocabulary_threads) gradients_of_logits(O op) {
    const std::size_t i = blockIdx.x;
    for (std::size_t j = threadIdx.x; j < op.in.count; j += vocabulary_threads) {
        op.d.data()[i * op.in.count + j] = op.of(i, j);
    }
}

template <class O> __global__ void __launch_bounds__(vocabulary_threads) looked_up_rows(O op) {
    using T = typename decltype(op.y)::value_type;
    const std::size_t i = blockIdx.x;
    const T* const row = op.row_of(op.words.data()[i]);
    for (std::size_t j = threadIdx.x; j < op.width; j += vocabulary_threads) {
        op.y.data()[i * op.width + j] = row != nullptr ? row[j] : static_cast<T>(0.0f);
    }
}

template <class Index> __global__ void count_up(Index* rows, std::size_t count) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) { rows[i] = static_cast<Index>(i); }
}

// rows[p] are those of words[p]; a block for each p, of which those with the first row of a word do the work.
template <class O>
__global__ void __launch_bounds__(vocabulary_threads)
    add_rows_of_words(O op, const std::int32_t* words, const std::int32_t* rows) {
    using T = typename decltype(op.d_table)::value_type;
    using R = master_t<T>;
    const std::size_t p = blockIdx.x, count = op.words.size();
    const std::int32_t word = words[p];
    const std::size_t own = static_cast<std::size_t>(word) - op.first;
    if (own >= op.d_table.size() / op.width || (p > 0 && words[p - 1] == word)) { return; }
    T* const to = op.d_table.data() + own * op.width;
    for (std::size_t j = threadIdx.x; j < op.width; j += vocabulary_threads) {
        R total = static_cast<R>(to[j]);
        for (std::size_t k = p; k < count && words[k] == word; ++k) {
            total += static_cast<R>(op.d_y.data()[static_cast<std::size_t>(rows[k]) * op.width + j]);
        }
        to[j] = static_cast<T>(total);
    }
}

}  // namespace detail

template <floating_element T> void launch(const cuda_queue& q, const look_up_operation<T, device_memory>& op) {
    using operation = look_up_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::looked_up_rows<operation>, op.words.size() * detail::vocabulary_threads,
                         detail::vocabulary_threads, op);
}
/// Determinism  a function of the list: rows of a word are added up one after the other, found by a stable sort.
/// Cost         a sort of the list, 12 bytes of scratch a row and CUB's; one read of d_y, one read and write of the rows
///              in use. A word's rows are read by one block.
/// Errors       usage_error for 2^31 words or more.
template <floating_element T> void launch(const cuda_queue& q, const add_looked_up_operation<T, device_memory>& op) {
    using operation = add_looked_up_operation<T, device_memory>;
    if (op.words.empty()) { return; }
    const std::size_t count = op.words.size();
    const int n = narrow<int>(count, "words of an embedding");
    const buffer<std::int32_t, cuda_queue> memory(q, 3 * count);
    std::int32_t* const words = memory.data();
    std::int32_t* const rows = words + count;
    std::int32_t* const unsorted = rows + count;
    tutti::detail::start(q, op.name, detail::count_up<std::int32_t>, count, 256, unsorted, count);
    const auto sort = [&](void* scratch, std::size_t bytes) {
        const tutti::detail::on_device scope(q.device());
        tutti::detail::check_cuda(cub::DeviceRadixSort::SortPairs(scratch, bytes, op.words.data(), words,
                                                                  static_cast<const std::int32_t*>(unsorted), rows, n,
                                                                  0, 32, q.stream()),
                                  op.name);
        return bytes;
    };
    const std::size_t bytes = sort(nullptr, 0);
    const buffer<std::byte, cuda_queue> scratch(q, std::max<std::size_t>(bytes, 1));
    static_cast<void>(sort(scratch.data(), bytes));
    tutti::detail::start(q, op.name, detail::add_rows_of_words<operation>, count * detail::vocabulary_threads,
                         detail::vocabulary_threads, op, static_cast<const std::int32_t*>(words),
                         static_cast<const std::int32_t*>(rows));
}

/// Cost: one read of the logits.
template <floating_element T> void launch(const cuda_queue& q, const logit_maxima_operation<T, device_memory>& op) {
    using operation = logit_maxima_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::largest_logits<operation>, op.largest.size() * detail::vocabulary_threads,
                         detail::vocabulary_threads, op);
}
/// Determinism  a function of the logits. Cost: one read of the logits.
template <floating_element T> void launch(const cuda_queue& q, const exponential_sums_operation<T, device_memory>& op) {
    using operation = exponential_sums_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::sums_of_exponentials<operation>,
                         op.targets.size() * detail::vocabulary_threads, detail::vocabulary_threads, op);
}
template <floating_element R> void launch(const cuda_queue& q, const losses_operation<R, device_memory>& op) {
    using operation = losses_operation<R, device_memory>;
    tutti::detail::start(q, op.name, detail::row_losses<operation>, op.targets.size(), 256, op);
}
/// Cost: one read and one write of the logits.
template <floating_element T> void launch(const cuda_queue& q, const logit_gradients_operation<T, device_memory>& op) {
    using operation = logit_gradients_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::gradients_of_logits<operation>,
                         op.targets.size() * detail::vocabulary_threads, detail::vocabulary_threads, op);
}

}  // namespace tutti::parallel
