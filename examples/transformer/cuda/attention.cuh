// Causal self-attention on a GPU for any head width, in float: a warp a row, nothing of length x length is kept.
// Needs vectors.cuh and nvcc. For what cuDNN does not do: float, odd head widths, builds without it.
#pragma once

#include <algorithm>  // clamp
#include <cmath>      // sqrt
#include <cstddef>    // size_t

#include <tutti/core/cuda_queue.hpp>  // queue, checks

#include "vectors.cuh"

namespace transformer::gpu {

/// One row of a head as floats in shared memory times a row in global memory.
template <class T> __device__ float dot(const float* a, const T* b, int count, bool whole) {
    float sum = 0;
    for (int c = 0; c < count; c += group) {
        const eight x = load(b + c, count - c, whole);
#pragma unroll
        for (int i = 0; i < group; ++i) { sum += c + i < count ? a[c + i] * x[i] : 0.0f; }
    }
    return sum;
}

/// Which row of which head a warp works on, and where its part of shared memory is.
struct head_row {
    int lane, row, sequence, head;
    std::size_t statistics;  // of (sequence, head, 0)
    __device__ head_row(const attention_shape& s) : lane(static_cast<int>(threadIdx.x)) {
        const unsigned tiles = (static_cast<unsigned>(s.length) + blockDim.y - 1) / blockDim.y;
        const unsigned which = blockIdx.x / tiles;
        row = static_cast<int>(blockIdx.x % tiles * blockDim.y + threadIdx.y);
        sequence = static_cast<int>(which) / s.heads;
        head = static_cast<int>(which) % s.heads;
        statistics = std::size_t{which} * static_cast<std::size_t>(s.length);
    }
    /// Row r of the sequence, at the head's columns of part 0 (queries), 1 (keys) or 2 (values).
    template <class T> __device__ T* of(const matrix<T>& m, const attention_shape& s, int r, int part = 0) const {
        return m.row(sequence * s.length + r) + part * s.width() + head * s.head_width;
    }
};

template <class T>
__global__ void attention_rows(attention_shape s, matrix<const T> qkv, matrix<T> out, float* log_sum_exp, float scale,
                               bool whole) {
    extern __shared__ float cells[];
    const head_row at(s);
    if (at.row >= s.length) { return; }
    const int d = s.head_width;
    float* const query = cells + threadIdx.y * 2 * static_cast<unsigned>(d);
    float* const sum = query + d;
    for (int c = at.lane; c < d; c += 32) {
        query[c] = static_cast<float>(at.of(qkv, s, at.row)[c]) * scale;
        sum[c] = 0;
    }
    __syncwarp();
    float largest = -INFINITY, total = 0;
    for (int base = 0; base <= at.row; base += 32) {
        const int j = base + at.lane, keys = min(32, at.row + 1 - base);
        const float score = at.lane < keys ? dot(query, at.of(qkv, s, j, 1), d, whole) : -INFINITY;
        float next = fmaxf(largest, score);
        for (int step = 16; step > 0; step /= 2) { next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, step)); }
        const float keep = expf(largest - next);  // 0 the first time
        const float p = expf(score - next);
        total = total * keep + sum_over_warp(p);
        largest = next;
        for (int first = 0; first < d; first += 32) {
            const int c = first + at.lane;
            float x = c < d ? sum[c] * keep : 0.0f;
            for (int k = 0; k < keys; ++k) {
                const float weight = __shfl_sync(0xffffffffu, p, k);
                if (c < d) { x += weight * static_cast<float>(at.of(qkv, s, base + k, 2)[c]); }
            }
            if (c < d) { sum[c] = x; }
        }
    }
    for (int c = at.lane; c < d; c += 32) { at.of(out, s, at.row)[c] = static_cast<T>(sum[c] / total); }
    if (at.lane == 0) { log_sum_exp[at.statistics + static_cast<std::size_t>(at.row)] = largest + logf(total); }
}

/// Gradients of queries; leaves dy . y of each row in `along`.
template <class T>
__global__ void attention_backward_queries(attention_shape s, matrix<const T> d_out, matrix<const T> qkv,
                                           matrix<const T> out, const float* log_sum_exp, float* along, matrix<T> d_qkv,
                                           float scale, bool whole) {
    extern __shared__ float cells[];
    const head_row at(s);
    if (at.row >= s.length) { return; }
    const int d = s.head_width;
    float* const query = cells + threadIdx.y * 3 * static_cast<unsigned>(d);
    float* const dy = query + d;
    float* const sum = dy + d;
    float part = 0;
    for (int c = at.lane; c < d; c += 32) {
        query[c] = static_cast<float>(at.of(qkv, s, at.row)[c]) * scale;
        dy[c] = static_cast<float>(at.of(d_out, s, at.row)[c]);
        part += dy[c] * static_cast<float>(at.of(out, s, at.row)[c]);
        sum[c] = 0;
    }
    __syncwarp();
    const float along_y = sum_over_warp(part);
    const float normalizer = log_sum_exp[at.statistics + static_cast<std::size_t>(at.row)];
    for (int base = 0; base <= at.row; base += 32) {
        const int j = base + at.lane, keys = min(32, at.row + 1 - base);
        float ds = 0;
        if (at.lane < keys) {
            const float p = expf(dot(query, at.of(qkv, s, j, 1), d, whole) - normalizer);
            ds = p * (dot(dy, at.of(qkv, s, j, 2), d, whole) - along_y) * scale;
        }
        for (int first = 0; first < d; first += 32) {
            const int c = first + at.lane;
            float x = c < d ? sum[c] : 0.0f;
            for (int k = 0; k < keys; ++k) {
                const float weight = __shfl_sync(0xffffffffu, ds, k);
                if (c < d) { x += weight * static_cast<float>(at.of(qkv, s, base + k, 1)[c]); }
            }
            if (c < d) { sum[c] = x; }
        }
    }
    for (int c = at.lane; c < d; c += 32) { at.of(d_qkv, s, at.row)[c] = static_cast<T>(sum[c]); }
    if (at.lane == 0) { along[at.statistics + static_cast<std::size_t>(at.row)] = along_y; }
}

/// Gradients of keys and values: a warp a key, over the queries that see it.
template <class T>
__global__ void attention_backward_keys(attention_shape s, matrix<const T> d_out, matrix<const T> qkv,
                                        const float* log_sum_exp, const float* along, matrix<T> d_qkv, float scale,
                                        bool whole) {
    extern __shared__ float cells[];
    const head_row at(s);
    if (at.row >= s.length) { return; }
    const int d = s.head_width;
    float* const key = cells + threadIdx.y * 4 * static_cast<unsigned>(d);
    float* const value = key + d;
    float* const d_key = value + d;
    float* const d_value = d_key + d;
    for (int c = at.lane; c < d; c += 32) {
        key[c] = static_cast<float>(at.of(qkv, s, at.row, 1)[c]) * scale;
        value[c] = static_cast<float>(at.of(qkv, s, at.row, 2)[c]);
        d_key[c] = 0;
        d_value[c] = 0;
    }
    __syncwarp();
    for (int base = at.row; base < s.length; base += 32) {
        const int i = base + at.lane, queries = min(32, s.length - base);
        float p = 0, ds = 0;
        if (at.lane < queries) {
            const std::size_t row = at.statistics + static_cast<std::size_t>(i);
            p = expf(dot(key, at.of(qkv, s, i), d, whole) - log_sum_exp[row]);
            ds = p * (dot(value, at.of(d_out, s, i), d, whole) - along[row]) * scale;
        }
        for (int first = 0; first < d; first += 32) {
            const int c = first + at.lane;
            float dk = c < d ? d_key[c] : 0.0f, dv = c < d ? d_value[c] : 0.0f;
            for (int k = 0; k < queries; ++k) {
                const float to_key = __shfl_sync(0xffffffffu, ds, k), to_value = __shfl_sync(0xffffffffu, p, k);
                if (c < d) {
                    dk += to_key * static_cast<float>(at.of(qkv, s, base + k)[c]);
                    dv += to_value * static_cast<float>(at.of(d_out, s, base + k)[c]);
                }
            }
            if (c < d) {
                d_key[c] = dk;
                d_value[c] = dv;
            }
        }
    }
    for (int c = at.lane; c < d; c += 32) {
        at.of(d_qkv, s, at.row, 1)[c] = static_cast<T>(d_key[c]);
        at.of(d_qkv, s, at.row, 2)[c] = static_cast<T>(d_value[c]);
    }
}

/// Starts a kernel with a warp a row of each head, each with `vectors` rows of floats in shared memory.
template <class... Parameters, class... Arguments>
void start_heads(const tutti::cuda_queue& q, const char* name, void (*kernel)(attention_shape, Parameters...),
                 const attention_shape& s, int vectors, const Arguments&... arguments) {
    const std::size_t each = static_cast<std::size_t>(vectors) * static_cast<std::size_t>(s.head_width) * sizeof(float);
    const std::size_t warps = std::clamp(std::size_t{48 * 1024} / each, std::size_t{1}, std::size_t{4});
    const std::size_t tiles = (static_cast<std::size_t>(s.length) + warps - 1) / warps;
    const std::size_t blocks = tiles * static_cast<std::size_t>(s.batch) * static_cast<std::size_t>(s.heads);
    const tutti::detail::on_device scope(q.device());
    if (warps * each > 48 * 1024) {
        tutti::detail::check_cuda(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(each)), name);
    }
    kernel<<<static_cast<unsigned>(blocks), dim3(32, static_cast<unsigned>(warps)), warps * each, q.stream()>>>(
        s, arguments...);
    tutti::detail::check_cuda(cudaGetLastError(), name);
}

/// log_sum_exp: a float for each (sequence, head, row).
/// Determinism  a function of the values and extents. Cost: about the square of the length, far from the peak.
template <class T>
void attention(const tutti::cuda_queue& q, const attention_shape& s, matrix<const T> qkv, matrix<T> out,
               float* log_sum_exp) {
    const bool whole = in_groups(qkv) && s.head_width % group == 0;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
    start_heads(q, "attention", attention_rows<T>, s, 2, qkv, out, log_sum_exp, scale, whole);
}

/// Overwrites d_qkv. `along` is scratch, as large as log_sum_exp.
template <class T>
void attention_backward(const tutti::cuda_queue& q, const attention_shape& s, matrix<const T> d_out,
                        matrix<const T> qkv, matrix<const T> out, const float* log_sum_exp, float* along,
                        matrix<T> d_qkv) {
    const bool whole = in_groups(qkv) && in_groups(d_out) && s.head_width % group == 0;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
    start_heads(q, "attention_backward_queries", attention_backward_queries<T>, s, 3, d_out, qkv, out, log_sum_exp,
                along, d_qkv, scale, whole);
    start_heads(q, "attention_backward_keys", attention_backward_keys<T>, s, 4, d_out, qkv, log_sum_exp,
                static_cast<const float*>(along), d_qkv, scale, whole);
}

}  // namespace transformer::gpu
