// Embedding on a GPU. Backward adds up the rows of a token in the order of the batch, through a list sorted by token; so
// it does those of a position, where sequences are not of one length.
// Needs vectors.cuh and nvcc. The lists are made on the host, which has the tokens anyway.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // lists

#include <tutti/core/cuda_run.cuh>  // start

#include "vectors.cuh"

namespace transformer::gpu {

template <class T>
__global__ void __launch_bounds__(1024)
    embedding_rows(const std::int32_t* tokens, const std::int32_t* positions, int length, matrix<const T> token_rows,
                   matrix<const T> position_rows, matrix<T> out, bool whole) {
    const int r = static_cast<int>(blockIdx.x);
    for (int first = static_cast<int>(threadIdx.x) * group; first < out.columns;
         first += static_cast<int>(blockDim.x) * group) {
        const int count = out.columns - first;
        eight x{};
        if (tokens[r] >= 0) { x = load(token_rows.row(tokens[r]) + first, count, whole); }
        if (position_rows.data != nullptr) {
            const eight p =
                load(position_rows.row(positions != nullptr ? positions[r] : r % length) + first, count, whole);
#pragma unroll
            for (int i = 0; i < group; ++i) { x[i] += p[i]; }
        }
        store(out.row(r) + first, x, count, whole);
    }
}

/// Numbers of a batch's rows, tokens or positions, on the device; and the rows by number: `order` has those of the first
/// number, then those of the second, each in their order in the batch, and `starts` where each of the `distinct` numbers
/// that occur begins in it, then the number of rows. Rows without a number, which is negative, are in neither.
struct numbered_rows {
    const std::int32_t* numbers = nullptr;
    const std::int32_t* order = nullptr;
    const std::int32_t* starts = nullptr;
    int distinct = 0;
};

/// Block b adds the rows order[starts[b] ... starts[b + 1]) to the row that their number has.
template <class T>
__global__ void __launch_bounds__(1024)
    add_rows_by_number(const std::int32_t* numbers, const std::int32_t* order, const std::int32_t* starts,
                       matrix<const T> d_out, matrix<T> d_table, bool whole) {
    extern __shared__ float sums_of_others[];
    const int begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    const int first = static_cast<int>(threadIdx.x) * group, count = d_out.columns - first;
    eight sum{};
    if (count > 0) {
#pragma unroll 4
        for (int k = begin + static_cast<int>(threadIdx.y); k < end; k += static_cast<int>(blockDim.y)) {
            const eight dy = load(d_out.row(order[k]) + first, count, whole);
#pragma unroll
            for (int i = 0; i < group; ++i) { sum[i] += dy[i]; }
        }
    }
    const auto cell = [&](unsigned y, int i) -> float& {
        return sums_of_others[(std::size_t{y - 1} * group + static_cast<std::size_t>(i)) * blockDim.x + threadIdx.x];
    };
    if (threadIdx.y > 0) {
#pragma unroll
        for (int i = 0; i < group; ++i) { cell(threadIdx.y, i) = sum[i]; }
    }
    __syncthreads();
    if (threadIdx.y > 0 || count <= 0) { return; }
    T* const target = d_table.row(numbers[order[begin]]) + first;
    eight total = load(target, count, whole);
#pragma unroll
    for (int i = 0; i < group; ++i) {
        for (unsigned y = 1; y < blockDim.y; ++y) { sum[i] += cell(y, i); }
        total[i] += sum[i];
    }
    store(target, total, count, whole);
}

/// Block p adds the rows of position p in all sequences.
template <class T>
__global__ void __launch_bounds__(1024)
    add_rows_of_positions(int length, matrix<const T> d_out, matrix<T> d_position_rows, bool whole) {
    const int p = static_cast<int>(blockIdx.x);
    const int first = static_cast<int>(threadIdx.x) * group, count = d_out.columns - first;
    if (count <= 0) { return; }
    eight sum{};
#pragma unroll 8
    for (int r = p; r < d_out.rows; r += length) {
        const eight dy = load(d_out.row(r) + first, count, whole);
#pragma unroll
        for (int i = 0; i < group; ++i) { sum[i] += dy[i]; }
    }
    T* const target = d_position_rows.row(p) + first;
    eight total = load(target, count, whole);
#pragma unroll
    for (int i = 0; i < group; ++i) { total[i] += sum[i]; }
    store(target, total, count, whole);
}

/// out[t] = token_rows[tokens[t]] + position_rows[positions[t]]; without positions those of sequences of one length. A
/// negative token is one whose row another rank has: zero here. No position_rows: others add them.
/// Cost: one write, one read of the rows in use.
template <class T>
void embedding(const tutti::cuda_queue& q, const std::int32_t* tokens, const std::int32_t* positions, int length,
               matrix<const T> token_rows, matrix<const T> position_rows, matrix<T> out) {
    const bool whole = in_groups(token_rows) && in_groups(position_rows) && in_groups(out);
    const tutti::detail::on_device scope(q.device());
    embedding_rows<T><<<static_cast<unsigned>(out.rows), std::min(threads_for(out.columns), 1024u), 0, q.stream()>>>(
        tokens, positions, length, token_rows, position_rows, out, whole);
    tutti::detail::check_cuda(cudaGetLastError(), "embedding");
}

/// Adds each row of d_out to the row of d_table that has its number.
/// Determinism  a function of the batch. Cost: a read of d_out, a read and a write of the rows in use.
template <class T>
void add_by_number(const tutti::cuda_queue& q, const numbered_rows& by, matrix<const T> d_out, matrix<T> d_table) {
    if (by.distinct == 0) { return; }  // every row has none
    const unsigned threads = threads_for(d_out.columns);
    const unsigned parts = threads <= 128 ? 4 : 1;  // of a number's rows: a common token has thousands
    const std::size_t scratch = std::size_t{parts - 1} * group * threads * sizeof(float);
    const tutti::detail::on_device scope(q.device());
    add_rows_by_number<T><<<static_cast<unsigned>(by.distinct), dim3(threads, parts), scratch, q.stream()>>>(
        by.numbers, by.order, by.starts, d_out, d_table, in_groups(d_out) && in_groups(d_table));
    tutti::detail::check_cuda(cudaGetLastError(), "add_rows_by_number");
}

/// The same for the positions of sequences of one length.
template <class T>
void add_by_position(const tutti::cuda_queue& q, int length, matrix<const T> d_out, matrix<T> d_position_rows) {
    const tutti::detail::on_device scope(q.device());
    add_rows_of_positions<T><<<static_cast<unsigned>(length), threads_for(d_out.columns), 0, q.stream()>>>(
        length, d_out, d_position_rows, in_groups(d_out) && in_groups(d_position_rows));
    tutti::detail::check_cuda(cudaGetLastError(), "add_rows_of_positions");
}

}  // namespace transformer::gpu
