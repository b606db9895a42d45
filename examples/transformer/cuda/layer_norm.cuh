// Layer normalization on a GPU: a row in the registers of a warp, or of a block where it is wide, so it is read once.
// Needs column_sums.cuh and nvcc. At most 8192 columns, forward 16384.
#pragma once

#include <algorithm>    // min
#include <array>        // groups of a lane
#include <cstddef>      // size_t
#include <type_traits>  // integral_constant
#include <utility>      // integer_sequence

#include <tutti/core/cuda_queue.hpp>  // queue, checks

#include "column_sums.cuh"
#include "vectors.cuh"

namespace transformer::gpu {

/// What backward needs of a row besides its input.
struct norm_statistics {
    float mean;
    float inverse_deviation;
};

// ---- a warp a row, for aligned rows of whole groups: lane l holds groups l, l + 32, ... ----------------------------

inline constexpr int norm_warps = 4;       // rows of a block at a time
inline constexpr int norm_partials = 528;  // blocks of backward: four to each of Hopper's 132 multiprocessors

template <class T, int Groups>
__global__ void __launch_bounds__(32 * norm_warps)
    layer_norm_by_warps(matrix<const T> in, const T* gain, const T* bias, matrix<T> out, norm_statistics* rows) {
    const int r = static_cast<int>(blockIdx.x) * norm_warps + static_cast<int>(threadIdx.y);
    if (r >= in.rows) { return; }
    const int begin = static_cast<int>(threadIdx.x) * group;
    const auto place = [&](int k) { return begin + k * 32 * group; };
    const auto fetch = [&]<int... K>(std::integer_sequence<int, K...>, const T* row) {
        return std::array<in_flight<T>, Groups>{in_flight<T>(row + place(K), place(K) < in.columns)...};
    };
    constexpr std::make_integer_sequence<int, Groups> all;
    const auto x = fetch(all, in.row(r)), g = fetch(all, gain), b = fetch(all, bias);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
        const eight v = x[k].floats();
#pragma unroll
        for (int i = 0; i < group; ++i) { sum += v[i]; }
    }
    const float width = static_cast<float>(in.columns);
    const float mean = sum_over_warp(sum) / width;
    float squares = 0;
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
        const eight v = x[k].floats();
        const float present = place(k) < in.columns ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < group; ++i) { squares += present * (v[i] - mean) * (v[i] - mean); }
    }
    const float inverse = 1.0f / sqrtf(sum_over_warp(squares) / width + 1e-5f);
    if (threadIdx.x == 0) { rows[r] = {mean, inverse}; }
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
        eight v = x[k].floats();
        const eight gains = g[k].floats(), biases = b[k].floats();
#pragma unroll
        for (int i = 0; i < group; ++i) { v[i] = (v[i] - mean) * inverse * gains[i] + biases[i]; }
        if (place(k) < in.columns) { store(out.row(r) + place(k), v, group, true); }
    }
}

/// Block b takes rows b * warps + warp, then those gridDim.x * warps further on; its sums become partial sum b.
template <class T, int Groups>
__global__ void __launch_bounds__(32 * norm_warps, Groups <= 3 && sizeof(T) == 2 ? 4 : 2)
    layer_norm_backward_by_warps(matrix<const T> d_out, matrix<const T> in, const T* gain, const norm_statistics* rows,
                                 matrix<T> d_in, bool adds, float* partial) {
    __shared__ float cells[norm_warps][32 * group];
    const int warp = static_cast<int>(threadIdx.y), lane = static_cast<int>(threadIdx.x);
    const int begin = lane * group;
    const float width = static_cast<float>(in.columns);
    const auto place = [&](int k) { return begin + k * 32 * group; };
    const auto fetch = [&]<int... K>(std::integer_sequence<int, K...>, const T* row, bool present) {
        return std::array<in_flight<T>, Groups>{in_flight<T>(row + place(K), present && place(K) < in.columns)...};
    };
    constexpr std::make_integer_sequence<int, Groups> all;
    eight d_gain[Groups] = {}, d_bias[Groups] = {};
    for (int r = static_cast<int>(blockIdx.x) * norm_warps + warp; r < in.rows;
         r += static_cast<int>(gridDim.x) * norm_warps) {
        const auto x = fetch(all, in.row(r), true), dy = fetch(all, d_out.row(r), true),
                   before = fetch(all, d_in.row(r), adds);
        const auto [mean, inverse] = rows[r];
        float sum_g = 0, sum_gx = 0;  // of g = dy * gain, and of g * normalized
#pragma unroll
        for (int k = 0; k < Groups; ++k) {
            const eight v = x[k].floats(), d = dy[k].floats(),
                        g = in_flight<T>(gain + place(k), place(k) < in.columns).floats();
#pragma unroll
            for (int i = 0; i < group; ++i) {
                const float normalized = (v[i] - mean) * inverse;
                d_gain[k][i] += d[i] * normalized;
                d_bias[k][i] += d[i];
                sum_g += d[i] * g[i];
                sum_gx += d[i] * g[i] * normalized;
            }
        }
        const float mean_g = sum_over_warp(sum_g) / width, mean_gx = sum_over_warp(sum_gx) / width;
#pragma unroll
        for (int k = 0; k < Groups; ++k) {
            const eight v = x[k].floats(), d = dy[k].floats(),
                        g = in_flight<T>(gain + place(k), place(k) < in.columns).floats();
            eight dx = before[k].floats();
#pragma unroll
            for (int i = 0; i < group; ++i) {
                dx[i] += (d[i] * g[i] - mean_g - (v[i] - mean) * inverse * mean_gx) * inverse;
            }
            if (place(k) < in.columns) { store(d_in.row(r) + place(k), dx, group, true); }
        }
    }
    float* const of_block = partial + std::size_t{blockIdx.x} * 2 * static_cast<std::size_t>(in.columns);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int k = 0; k < Groups; ++k) {
            const eight& mine = which == 0 ? d_gain[k] : d_bias[k];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < group; ++i) { cells[warp][i * 32 + lane] = mine[i]; }  // no two lanes in one bank
            __syncthreads();
            for (int c = warp * 32 + lane; c < 32 * group; c += norm_warps * 32) {
                const int column = k * 32 * group + c;
                if (column >= in.columns) { break; }
                float sum = 0;
                for (int w = 0; w < norm_warps; ++w) { sum += cells[w][c % group * 32 + c / group]; }
                of_block[which * in.columns + column] = sum;
            }
        }
    }
}

/// Calls use(std::integral_constant) with the least number of groups a lane that is compiled and holds the columns.
/// Returns false where a row is not of whole groups or too wide for a warp. Steps are the widths of GPT-2.
template <class Use> bool with_groups(int columns, Use use) {
    if (columns % group != 0) { return false; }
    const int needed = (columns + 32 * group - 1) / (32 * group);
    if (needed <= 3) {
        use(std::integral_constant<int, 3>{});
    } else if (needed <= 4) {
        use(std::integral_constant<int, 4>{});
    } else if (needed <= 5) {
        use(std::integral_constant<int, 5>{});
    } else if (needed <= 7) {
        use(std::integral_constant<int, 7>{});
    } else {
        return false;
    }
    return true;
}

// ---- a block a row, for all others ----------------------------------------------------------------------------------

inline constexpr int most_threads = 1024;  // a row of 8192 columns, a group a thread

/// Thread t holds groups t, t + threads, ...
template <class T, int Groups>
__global__ void __launch_bounds__(most_threads) layer_norm_rows(matrix<const T> in, const T* gain, const T* bias,
                                                                matrix<T> out, norm_statistics* rows, bool whole) {
    __shared__ float cells[2][32];
    const int r = static_cast<int>(blockIdx.x);
    const auto first = [](int k) { return (static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x)) * group; };
    eight x[Groups];
    float sum[1] = {0};
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
        x[k] = load(in.row(r) + first(k), in.columns - first(k), whole);
#pragma unroll
        for (int i = 0; i < group; ++i) { sum[0] += x[k][i]; }
    }
    sum_over_block(sum, cells[0]);
    const float width = static_cast<float>(in.columns);
    const float mean = sum[0] / width;
    float squares[1] = {0};
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
#pragma unroll
        for (int i = 0; i < group; ++i) {
            const float d = first(k) + i < in.columns ? x[k][i] - mean : 0.0f;
            squares[0] += d * d;
        }
    }
    sum_over_block(squares, cells[1]);
    const float inverse = 1.0f / sqrtf(squares[0] / width + 1e-5f);
    if (threadIdx.x == 0) { rows[r] = {mean, inverse}; }
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
        const int count = in.columns - first(k);
        if (count <= 0) { return; }
        const eight g = load(gain + first(k), count, whole), b = load(bias + first(k), count, whole);
        eight y;
#pragma unroll
        for (int i = 0; i < group; ++i) { y[i] = (x[k][i] - mean) * inverse * g[i] + b[i]; }
        store(out.row(r) + first(k), y, count, whole);
    }
}

/// Block b takes rows b, b + blocks, ...; its sums for gain and bias become partial sum b.
template <class T>
__global__ void __launch_bounds__(most_threads)
    layer_norm_backward_rows(matrix<const T> d_out, matrix<const T> in, const T* gain, const norm_statistics* rows,
                             matrix<T> d_in, bool adds, float* partial, bool whole) {
    __shared__ float cells[2][2 * 32];
    const int first = static_cast<int>(threadIdx.x) * group, count = in.columns - first;
    const float width = static_cast<float>(in.columns);
    const eight g = load(gain + first, count, whole);
    eight d_gain{}, d_bias{};
    int turn = 0;
    for (int r = static_cast<int>(blockIdx.x); r < in.rows; r += static_cast<int>(gridDim.x)) {
        const eight x = load(in.row(r) + first, count, whole);
        const eight dy = load(d_out.row(r) + first, count, whole);
        eight dx{};
        if (adds) { dx = load(d_in.row(r) + first, count, whole); }
        const norm_statistics of = rows[r];
        eight normalized;
        float sums[2] = {0, 0};  // of g = dy * gain, and of g * normalized
#pragma unroll
        for (int i = 0; i < group; ++i) {
            normalized[i] = i < count ? (x[i] - of.mean) * of.inverse_deviation : 0.0f;
            sums[0] += dy[i] * g[i];
            sums[1] += dy[i] * g[i] * normalized[i];
            d_gain[i] += dy[i] * normalized[i];
            d_bias[i] += dy[i];
        }
        sum_over_block(sums, cells[turn]);  // the barrier of the next row frees this row's cells
        turn ^= 1;
        if (count <= 0) { continue; }
        const float mean_g = sums[0] / width, mean_gx = sums[1] / width;
#pragma unroll
        for (int i = 0; i < group; ++i) {
            dx[i] += (dy[i] * g[i] - mean_g - normalized[i] * mean_gx) * of.inverse_deviation;
        }
        store(d_in.row(r) + first, dx, count, whole);
    }
    if (count <= 0) { return; }
    float* const of_block = partial + std::size_t{blockIdx.x} * 2 * static_cast<std::size_t>(in.columns) + first;
    store(of_block, d_gain, count, false);
    store(of_block + in.columns, d_bias, count, false);
}

/// out = normalized(in) * gain + bias, row by row. Cost: one read, one write.
template <class T>
void layer_norm(const tutti::cuda_queue& q, matrix<const T> in, const T* gain, const T* bias, matrix<T> out,
                norm_statistics* rows) {
    const bool whole = in_groups(in) && in_groups(out) && in_groups(gain) && in_groups(bias);
    const tutti::detail::on_device scope(q.device());
    const bool by_warps =
        whole && with_groups(in.columns, [&](auto groups) {
            layer_norm_by_warps<T, groups.value><<<static_cast<unsigned>((in.rows + norm_warps - 1) / norm_warps),
                                                   dim3(32, norm_warps), 0, q.stream()>>>(in, gain, bias, out, rows);
        });
    if (!by_warps) {
        const unsigned threads = threads_for(in.columns);
        const bool narrow = threads <= most_threads;
        auto* const kernel = narrow ? layer_norm_rows<T, 1> : layer_norm_rows<T, 2>;
        kernel<<<static_cast<unsigned>(in.rows), narrow ? threads : (threads / 2 + 31) / 32 * 32, 0, q.stream()>>>(
            in, gain, bias, out, rows, whole);
    }
    tutti::detail::check_cuda(cudaGetLastError(), "layer_norm");
}

/// Adds to d_gain and d_bias; adds to d_in, or overwrites it. `scratch` holds 2 * most_partials * columns floats.
/// Determinism  depends on the extents alone. Cost: two reads and a write, one read more where it adds.
template <class T>
void layer_norm_backward(const tutti::cuda_queue& q, matrix<const T> d_out, matrix<const T> in, const T* gain,
                         const norm_statistics* rows, matrix<T> d_in, bool adds, float* scratch, T* d_gain, T* d_bias) {
    const bool whole = in_groups(in) && in_groups(d_out) && in_groups(d_in) && in_groups(gain);
    const tutti::detail::on_device scope(q.device());
    int count = std::min(most_partials, in.rows);
    const bool by_warps = whole && with_groups(in.columns, [&](auto groups) {
                              count = std::min(norm_partials, (in.rows + norm_warps - 1) / norm_warps);
                              layer_norm_backward_by_warps<T, groups.value>
                                  <<<static_cast<unsigned>(count), dim3(32, norm_warps), 0, q.stream()>>>(
                                      d_out, in, gain, rows, d_in, adds, scratch);
                          });
    if (!by_warps) {
        layer_norm_backward_rows<T><<<static_cast<unsigned>(count), threads_for(in.columns), 0, q.stream()>>>(
            d_out, in, gain, rows, d_in, adds, scratch, whole);
    }
    tutti::detail::check_cuda(cudaGetLastError(), "layer_norm_backward");
    add_column_partials(q, scratch, count, in.columns, d_gain, d_bias);
}

}  // namespace transformer::gpu
