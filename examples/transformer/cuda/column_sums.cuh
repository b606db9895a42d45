// Sums of columns that do not depend on timing: partial sums of blocks of rows, added in order. Gradients of biases.
// Needs vectors.cuh and nvcc.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t

#include <tutti/core/cuda_queue.hpp>  // queue, checks

#include "vectors.cuh"

namespace transformer::gpu {

/// Rows of partial sums that a reduction over many rows makes at most: what scratch must hold, times the columns.
inline constexpr int most_partials = 1024;

/// One row of partial sums holds gridDim.y vectors of `columns`; vector y is added to out_y:
/// out_y[c] += sum over p of partial[(p * gridDim.y + y) * columns + c], in an order of p that `count` fixes.
template <class T> __global__ void add_partials(const float* partial, int count, int columns, T* out_0, T* out_1) {
    __shared__ float cells[32][33];
    const int c = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x);
    T* const out = blockIdx.y == 0 ? out_0 : out_1;
    float sum = 0;
    if (c < columns) {
        const float* const first = partial + std::size_t{blockIdx.y} * static_cast<std::size_t>(columns) + c;
        const std::size_t stride = std::size_t{gridDim.y} * static_cast<std::size_t>(columns);
#pragma unroll 8
        for (int p = static_cast<int>(threadIdx.y); p < count; p += 32) {
            sum += first[static_cast<std::size_t>(p) * stride];
        }
    }
    cells[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= columns) { return; }
    for (int p = 1; p < 32; ++p) { sum += cells[p][threadIdx.x]; }
    out[c] = static_cast<T>(static_cast<float>(out[c]) + sum);
}

/// A warp holds 256 columns; the block's eight warps share its rows. Whole: aligned rows of whole groups.
template <class T, bool Whole> __global__ void sum_rows(matrix<const T> in, int rows_each, float* partial) {
    constexpr int warps = 8, ahead = 4;
    __shared__ float cells[warps][32 * group + 4];
    const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
    const int first = (static_cast<int>(blockIdx.x) * 32 + lane) * group;
    const int begin = static_cast<int>(blockIdx.y) * rows_each;
    const int end = min(begin + rows_each, in.rows);
    eight sum{};
    const auto add = [&](const eight& x) {
#pragma unroll
        for (int i = 0; i < group; ++i) { sum[i] += x[i]; }
    };
    int r = begin + warp;
    if constexpr (Whole) {
        const bool present = first < in.columns;
        for (; r + (ahead - 1) * warps < end; r += ahead * warps) {
            const in_flight<T> x0(in.row(r) + first, present), x1(in.row(r + warps) + first, present),
                x2(in.row(r + 2 * warps) + first, present), x3(in.row(r + 3 * warps) + first, present);
            add(x0.floats());
            add(x1.floats());
            add(x2.floats());
            add(x3.floats());
        }
    }
    for (; r < end; r += warps) { add(load(in.row(r) + first, in.columns - first, Whole)); }
#pragma unroll
    for (int i = 0; i < group; ++i) { cells[warp][lane * group + i] = sum[i]; }
    __syncthreads();
    const int t = warp * 32 + lane;  // as many threads as columns
    const int c = static_cast<int>(blockIdx.x) * 32 * group + t;
    if (c >= in.columns) { return; }
    float total = 0;
    for (int w = 0; w < warps; ++w) { total += cells[w][t]; }
    partial[static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(in.columns) + static_cast<std::size_t>(c)] =
        total;
}

/// Adds `count` rows of partial sums to `out`, or where there is a second, rows of two vectors to the two.
template <class T>
void add_column_partials(const tutti::cuda_queue& q, const float* partial, int count, int columns, T* out,
                         T* second = nullptr) {
    const dim3 grid(static_cast<unsigned>((columns + 31) / 32), second == nullptr ? 1 : 2);
    const tutti::detail::on_device scope(q.device());
    add_partials<T><<<grid, dim3(32, 32), 0, q.stream()>>>(partial, count, columns, out, second);
    tutti::detail::check_cuda(cudaGetLastError(), "add_partials");
}

/// out[c] += the sum of column c. `scratch` holds most_partials * in.columns floats.
/// Determinism  depends on the extents alone. Cost: one read of the matrix.
template <class T> void add_column_sums(const tutti::cuda_queue& q, matrix<const T> in, float* scratch, T* out) {
    const int partials = std::min(128, (in.rows + 63) / 64);
    const int rows_each = (in.rows + partials - 1) / partials;
    const dim3 grid(static_cast<unsigned>((in.columns + 32 * group - 1) / (32 * group)),
                    static_cast<unsigned>(partials));
    {
        auto* const kernel = in_groups(in) && in.columns % group == 0 ? sum_rows<T, true> : sum_rows<T, false>;
        const tutti::detail::on_device scope(q.device());
        kernel<<<grid, dim3(32, 8), 0, q.stream()>>>(in, rows_each, scratch);
        tutti::detail::check_cuda(cudaGetLastError(), "sum_rows");
    }
    add_column_partials(q, scratch, partials, in.columns, out);
}

}  // namespace transformer::gpu
