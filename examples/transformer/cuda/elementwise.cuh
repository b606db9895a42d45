// Bias, residual and GELU on a GPU, for the shapes and precisions where they are not part of a matrix product.
// Needs vectors.cuh and nvcc. GELU in the tanh form, as x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3).
#pragma once

#include <cstddef>  // size_t

#include <tutti/core/cuda_run.cuh>  // start

#include "vectors.cuh"

namespace transformer::gpu {

inline constexpr float gelu_scale = 0.79788456080286535588f;  // sqrt(2 / pi)
inline constexpr float gelu_cube = 0.044715f;

template <class T> __global__ void gelu_groups(const T* in, T* out, std::size_t size, bool whole) {
    const std::size_t first = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * group;
    if (first >= size) { return; }
    const int count = size - first < group ? static_cast<int>(size - first) : group;
    eight x = load(in + first, count, whole);
#pragma unroll
    for (int i = 0; i < group; ++i) {
        const float u = gelu_scale * (x[i] + gelu_cube * x[i] * x[i] * x[i]);
        x[i] = x[i] / (1.0f + expf(-2.0f * u));
    }
    store(out + first, x, count, whole);
}

template <class T> __global__ void gelu_slope_groups(const T* in, T* gradient, std::size_t size, bool whole) {
    const std::size_t first = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * group;
    if (first >= size) { return; }
    const int count = size - first < group ? static_cast<int>(size - first) : group;
    const eight x = load(in + first, count, whole);
    eight g = load(gradient + first, count, whole);
#pragma unroll
    for (int i = 0; i < group; ++i) {
        const float u = gelu_scale * (x[i] + gelu_cube * x[i] * x[i] * x[i]);
        const float slope = gelu_scale * (1.0f + 3.0f * gelu_cube * x[i] * x[i]);
        const float sigmoid = 1.0f / (1.0f + expf(-2.0f * u));
        g[i] *= sigmoid + 2.0f * x[i] * sigmoid * (1.0f - sigmoid) * slope;
    }
    store(gradient + first, g, count, whole);
}

template <class T> __global__ void start_rows_from(const T* bias, matrix<const T> residual, matrix<T> out, bool whole) {
    const int r = static_cast<int>(blockIdx.x);
    for (int first = static_cast<int>(threadIdx.x) * group; first < out.columns;
         first += static_cast<int>(blockDim.x) * group) {
        const int count = out.columns - first;
        eight x = load(bias + first, count, whole);
        if (residual.data != nullptr) {
            const eight y = load(residual.row(r) + first, count, whole);
#pragma unroll
            for (int i = 0; i < group; ++i) { x[i] += y[i]; }
        }
        store(out.row(r) + first, x, count, whole);
    }
}

/// Every row of out = bias, plus the residual's row where there is one: what a product is then added to.
template <class T> void start_rows(const tutti::cuda_queue& q, const T* bias, matrix<const T> residual, matrix<T> out) {
    const bool whole = in_groups(bias) && in_groups(out) && (residual.data == nullptr || in_groups(residual));
    const tutti::detail::on_device scope(q.device());
    start_rows_from<T><<<static_cast<unsigned>(out.rows), 128, 0, q.stream()>>>(bias, residual, out, whole);
    tutti::detail::check_cuda(cudaGetLastError(), "start_rows");
}

/// out = GELU(in). Cost: one read, one write.
template <class T> void gelu(const tutti::cuda_queue& q, const T* in, T* out, std::size_t size) {
    tutti::detail::start(q, "gelu", gelu_groups<T>, (size + group - 1) / group, 256, in, out, size,
                         in_groups(in) && in_groups(out));
}

/// gradient *= GELU's derivative at `in`. Cost: two reads, one write.
template <class T> void times_gelu_slope(const tutti::cuda_queue& q, const T* in, T* gradient, std::size_t size) {
    tutti::detail::start(q, "times_gelu_slope", gelu_slope_groups<T>, (size + group - 1) / group, 256, in, gradient,
                         size, in_groups(in) && in_groups(gradient));
}

}  // namespace transformer::gpu
