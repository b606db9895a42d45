// The device side of parallel/vocabulary: words looked up, and their gradients.
// Needs core/cuda_run, CUB and nvcc. A block takes a row.
#pragma once

#include <algorithm>  // max
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

}  // namespace tutti::parallel
