// Embedding on a GPU. Backward adds up the rows of a token in the order of the batch, through a list sorted by token.
// Needs vectors.cuh and nvcc. The list is made on the host, which has the tokens anyway.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // lists
#include <span>     // lists

#include <tutti/core/cuda_run.cuh>  // start

#include "vectors.cuh"

namespace transformer::gpu {

template <class T>
__global__ void __launch_bounds__(1024)
    embedding_rows(const std::int32_t* tokens, int length, matrix<const T> token_rows, matrix<const T> position_rows,
                   matrix<T> out, bool whole) {
    const int r = static_cast<int>(blockIdx.x);
    const int first = static_cast<int>(threadIdx.x) * group, count = out.columns - first;
    if (count <= 0) { return; }
    eight x = load(token_rows.row(tokens[r]) + first, count, whole);
    const eight p = load(position_rows.row(r % length) + first, count, whole);
#pragma unroll
    for (int i = 0; i < group; ++i) { x[i] += p[i]; }
    store(out.row(r) + first, x, count, whole);
}

/// Block b adds the rows order[starts[b] ... starts[b + 1]) to the row that their token has.
template <class T>
__global__ void __launch_bounds__(1024)
    add_rows_of_tokens(const std::int32_t* tokens, const std::int32_t* order, const std::int32_t* starts,
                       matrix<const T> d_out, matrix<T> d_token_rows, bool whole) {
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
    T* const target = d_token_rows.row(tokens[order[begin]]) + first;
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

/// out[t] = token_rows[tokens[t]] + position_rows[t mod length]. Cost: one write, one read of the rows in use.
template <class T>
void embedding(const tutti::cuda_queue& q, const std::int32_t* tokens, int length, matrix<const T> token_rows,
               matrix<const T> position_rows, matrix<T> out) {
    const bool whole = in_groups(token_rows) && in_groups(position_rows) && in_groups(out);
    const tutti::detail::on_device scope(q.device());
    embedding_rows<T><<<static_cast<unsigned>(out.rows), threads_for(out.columns), 0, q.stream()>>>(
        tokens, length, token_rows, position_rows, out, whole);
    tutti::detail::check_cuda(cudaGetLastError(), "embedding");
}

/// Adds to both gradients. `order`: positions in the batch, sorted by token and then by position; `starts`: where in it
/// each of the `distinct` tokens begins, and at the end the number of rows.
/// Determinism  a function of the batch. Cost: two reads of d_out, a read and a write of the rows in use.
template <class T>
void embedding_backward(const tutti::cuda_queue& q, const std::int32_t* tokens, const std::int32_t* order,
                        const std::int32_t* starts, int distinct, int length, matrix<const T> d_out,
                        matrix<T> d_token_rows, matrix<T> d_position_rows) {
    const unsigned threads = threads_for(d_out.columns);
    const unsigned parts = threads <= 128 ? 4 : 1;  // of a token's rows: a common token has thousands
    const std::size_t scratch = std::size_t{parts - 1} * group * threads * sizeof(float);
    const tutti::detail::on_device scope(q.device());
    add_rows_of_tokens<T><<<static_cast<unsigned>(distinct), dim3(threads, parts), scratch, q.stream()>>>(
        tokens, order, starts, d_out, d_token_rows, in_groups(d_out) && in_groups(d_token_rows));
    tutti::detail::check_cuda(cudaGetLastError(), "add_rows_of_tokens");
    add_rows_of_positions<T><<<static_cast<unsigned>(length), threads, 0, q.stream()>>>(
        length, d_out, d_position_rows, in_groups(d_out) && in_groups(d_position_rows));
    tutti::detail::check_cuda(cudaGetLastError(), "add_rows_of_positions");
}

}  // namespace transformer::gpu
