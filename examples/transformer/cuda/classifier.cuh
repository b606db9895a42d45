// Softmax, cross-entropy and its gradient on a GPU, in the memory of the logits; the sum of losses in a fixed order.
// Needs vectors.cuh and nvcc. A row is read from memory once; between the passes it waits in shared memory if it fits.
#pragma once

#include <algorithm>    // min
#include <cmath>        // infinity
#include <cstddef>      // size_t
#include <cstdint>      // targets
#include <type_traits>  // precision

#include <cuda_pipeline.h>  // copies into shared memory

#include <tutti/core/cuda_queue.hpp>  // queue, checks

#include "vectors.cuh"

namespace transformer::gpu {

inline constexpr int classifier_threads = 512;

/// e^x, to float's precision where logits have it.
template <class T> __device__ float power_of_e(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return expf(x);
    } else {
        return __expf(x);
    }
}

/// A largest value, and the sum of exponentials relative to it.
template <class T> struct soft_sum {
    float largest = -INFINITY;
    float sum = 0;
    __device__ void merge(const soft_sum& other) {
        const float common = fmaxf(largest, other.largest);
        // Two empty ones have nothing to scale: inf - inf is not a number.
        sum = common == -INFINITY
                  ? 0.0f
                  : sum * power_of_e<T>(largest - common) + other.sum * power_of_e<T>(other.largest - common);
        largest = common;
    }
};

/// Shared: the row is aligned, padded to whole groups, and waits in shared memory for the second pass; else it is read
/// again, from the caches. Two blocks share a multiprocessor, so that one computes while the other loads.
template <class T, bool Gradient, bool Shared>
__global__ void __launch_bounds__(classifier_threads, 2)
    cross_entropy_rows(matrix<T> logits, const std::int32_t* targets, float scale, float* losses, bool whole) {
    extern __shared__ uint4 kept[];
    constexpr int stride = classifier_threads * group;
    __shared__ float largest_of[32], sum_of[32];
    const int r = static_cast<int>(blockIdx.x);
    const int begin = static_cast<int>(threadIdx.x) * group;
    T* const row = logits.row(r);
    const int target = targets[r];  // negative: none
    const float at_target = static_cast<float>(row[max(target, 0)]);
    if constexpr (Shared) {
        for (int first = begin; first < logits.columns; first += stride) {
            __pipeline_memcpy_async(&kept[first / group], row + first, sizeof(uint4));
        }
        __pipeline_commit();
        __pipeline_wait_prior(0);  // each thread reads what it copied itself: no barrier
    }
    const auto at = [&](int first) {
        if constexpr (Shared) {
            return unpack<T>(kept[first / group]);
        } else {
            return load(row + first, logits.columns - first, whole);
        }
    };
    soft_sum<T> mine;
    for (int first = begin; first < logits.columns; first += stride) {
        eight x = at(first);
        const int count = logits.columns - first;
        if (count < group) {
#pragma unroll
            for (int i = 0; i < group; ++i) { x[i] = i < count ? x[i] : -INFINITY; }
        }
        float largest = x[0];
#pragma unroll
        for (int i = 1; i < group; ++i) { largest = fmaxf(largest, x[i]); }
        if (largest > mine.largest) {
            mine.sum *= power_of_e<T>(mine.largest - largest);  // from nothing: 0 times 0
            mine.largest = largest;
        }
#pragma unroll
        for (int i = 0; i < group; ++i) { mine.sum += power_of_e<T>(x[i] - mine.largest); }
    }
    for (int step = 16; step > 0; step /= 2) {
        mine.merge({__shfl_xor_sync(0xffffffffu, mine.largest, step), __shfl_xor_sync(0xffffffffu, mine.sum, step)});
    }
    if (threadIdx.x % 32 == 0) {
        largest_of[threadIdx.x / 32] = mine.largest;
        sum_of[threadIdx.x / 32] = mine.sum;
    }
    __syncthreads();  // all have read the target's logit as well, before anyone overwrites it
    // The partial sums of the warps, by each warp for itself.
    soft_sum<T> all;
    if (threadIdx.x % 32 < classifier_threads / 32) { all = {largest_of[threadIdx.x % 32], sum_of[threadIdx.x % 32]}; }
    for (int step = 16; step > 0; step /= 2) {
        all.merge({__shfl_xor_sync(0xffffffffu, all.largest, step), __shfl_xor_sync(0xffffffffu, all.sum, step)});
    }
    if (threadIdx.x == 0) { losses[r] = target < 0 ? 0.0f : logf(all.sum) + (all.largest - at_target); }
    if constexpr (Gradient) {
        const float factor = target < 0 ? 0.0f : scale / all.sum;
        for (int first = begin; first < logits.columns; first += stride) {
            eight x = at(first);
#pragma unroll
            for (int i = 0; i < group; ++i) { x[i] = factor * power_of_e<T>(x[i] - all.largest); }
            const auto to_target = static_cast<unsigned>(target - first);
            if (to_target < group || logits.columns - first < group) {  // rare: the rest is kept simple
#pragma unroll
                for (int i = 0; i < group; ++i) {
                    x[i] -= static_cast<unsigned>(i) == to_target ? scale : 0.0f;
                    x[i] = first + i < logits.columns ? x[i] : 0.0f;
                }
            }
            store(row + first, x, logits.stride - first, whole);
        }
        // Whole groups of padding: a product over the padded row must find zeros there.
        const int after = (logits.columns + group - 1) / group * group;
        for (int c = after + static_cast<int>(threadIdx.x); c < logits.stride; c += classifier_threads) {
            row[c] = static_cast<T>(0.0f);
        }
    }
}

/// total += the sum of the losses, in double.
static __global__ void __launch_bounds__(1024) add_losses(const float* losses, int count, double* total) {
    __shared__ double cells[1024];
    double sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 1024) { sum += static_cast<double>(losses[i]); }
    cells[threadIdx.x] = sum;
    for (unsigned half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) { cells[threadIdx.x] += cells[threadIdx.x + half]; }
    }
    if (threadIdx.x == 0) { *total += cells[0]; }
}

/// Adds the sum of -ln softmax(logits)[target] over all rows that have one, which is not negative, to *total, a double
/// on the device. With `gradient` turns the logits into the gradient of scale * that sum. What lies between the columns and the stride takes no part; the
/// gradient there is zero. `losses` holds a float a row.
///
/// Determinism  a function of the logits. Cost: one read of the logits; with the gradient one write more.
template <class T>
void cross_entropy(const tutti::cuda_queue& q, matrix<T> logits, const std::int32_t* targets, bool gradient,
                   float scale, float* losses, double* total) {
    const bool whole = in_groups(logits);
    auto* kernel = gradient ? cross_entropy_rows<T, true, false> : cross_entropy_rows<T, false, false>;
    const tutti::detail::on_device scope(q.device());
    std::size_t shared = 0;
    if constexpr (std::is_same_v<T, tutti::bfloat16>) {
        constexpr std::size_t half_of_hopper = 110 * 1024;
        const std::size_t row = static_cast<std::size_t>((logits.columns + group - 1) / group) * sizeof(uint4);
        int available = 0;
        tutti::detail::check_cuda(
            cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, q.device()), "cross_entropy");
        if (gradient && whole && row <= std::min(half_of_hopper, static_cast<std::size_t>(available) - 1024)) {
            kernel = cross_entropy_rows<T, true, true>;
            shared = row;
            tutti::detail::check_cuda(
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
                "cross_entropy");
        }
    }
    kernel<<<static_cast<unsigned>(logits.rows), classifier_threads, shared, q.stream()>>>(logits, targets, scale,
                                                                                           losses, whole);
    tutti::detail::check_cuda(cudaGetLastError(), "cross_entropy");
    add_losses<<<1, 1024, 0, q.stream()>>>(losses, logits.rows, total);
    tutti::detail::check_cuda(cudaGetLastError(), "add_losses");
}

}  // namespace transformer::gpu
