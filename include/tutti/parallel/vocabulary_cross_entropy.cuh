// The device side of parallel/vocabulary_cross_entropy: the loss over logits of which each rank has some.
// Needs core/cuda_run and nvcc. A block takes a row; its threads' partial results are merged in a fixed order.
#pragma once

#include <cmath>    // INFINITY
#include <cstddef>  // size_t
#include <cstdint>  // words

#include <tutti/core/cuda_run.cuh>                      // start
#include <tutti/parallel/vocabulary_cross_entropy.hpp>  // operations

namespace tutti::parallel {

namespace detail {

inline constexpr unsigned logit_threads = 512;

// merge(merge(x0, x1), ...) over the block's threads, in an order that depends on nothing; valid in thread 0.
template <class R, class Merge> __device__ R merged_over_block(R own, Merge merge) {
    __shared__ R of_warps[logit_threads / 32];
    for (int step = 16; step > 0; step /= 2) { own = merge(own, __shfl_down_sync(0xffffffffu, own, step)); }
    if (threadIdx.x % 32 == 0) { of_warps[threadIdx.x / 32] = own; }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned w = 1; w < logit_threads / 32; ++w) { own = merge(own, of_warps[w]); }
    }
    return own;
}

template <class O> __global__ void __launch_bounds__(logit_threads) largest_logits(O op) {
    using R = typename decltype(op.largest)::value_type;
    const std::size_t i = blockIdx.x;
    const auto* const row = op.in.row(i);
    const auto larger = [](R a, R b) { return b > a || b != b ? b : a; };
    R most = -INFINITY;
    for (std::size_t j = threadIdx.x; j < op.in.real; j += logit_threads) {
        most = larger(most, static_cast<R>(row[j]));
    }
    most = merged_over_block(most, larger);
    if (threadIdx.x == 0) { op.largest.data()[i] = most; }
}

template <class O> __global__ void __launch_bounds__(logit_threads) sums_of_exponentials(O op) {
    using R = typename decltype(op.sums)::value_type;
    const std::size_t i = blockIdx.x, rows = op.targets.size();
    const auto* const row = op.in.row(i);
    const R largest = op.largest.data()[i];
    R sum = 0;
    for (std::size_t j = threadIdx.x; j < op.in.real; j += logit_threads) {
        sum += std::exp(static_cast<R>(row[j]) - largest);
    }
    sum = merged_over_block(sum, [](R a, R b) { return a + b; });
    if (threadIdx.x != 0) { return; }
    const std::int32_t target = op.targets.data()[i];
    op.sums.data()[i] = sum;
    op.sums.data()[rows + i] = op.in.logit(i, target);
}

template <class O> __global__ void row_losses(O op) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < op.targets.size()) { op.of_row(i); }
}

// Each thread reads an element and writes the one in its place: the gradient may be where the logits are.
template <class O> __global__ void __launch_bounds__(logit_threads) gradients_of_logits(O op) {
    const std::size_t i = blockIdx.x;
    for (std::size_t j = threadIdx.x; j < op.in.count; j += logit_threads) {
        op.d.data()[i * op.in.count + j] = op.of(i, j);
    }
}

}  // namespace detail

/// Cost: one read of the logits.
template <floating_element T> void launch(const cuda_queue& q, const logit_maxima_operation<T, device_memory>& op) {
    using operation = logit_maxima_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::largest_logits<operation>, op.largest.size() * detail::logit_threads,
                         detail::logit_threads, op);
}
/// Determinism  a function of the logits. Cost: one read of the logits.
template <floating_element T> void launch(const cuda_queue& q, const exponential_sums_operation<T, device_memory>& op) {
    using operation = exponential_sums_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::sums_of_exponentials<operation>, op.targets.size() * detail::logit_threads,
                         detail::logit_threads, op);
}
template <floating_element R> void launch(const cuda_queue& q, const losses_operation<R, device_memory>& op) {
    using operation = losses_operation<R, device_memory>;
    tutti::detail::start(q, op.name, detail::row_losses<operation>, op.targets.size(), 256, op);
}
/// Cost: one read and one write of the logits.
template <floating_element T> void launch(const cuda_queue& q, const logit_gradients_operation<T, device_memory>& op) {
    using operation = logit_gradients_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::gradients_of_logits<operation>, op.targets.size() * detail::logit_threads,
                         detail::logit_threads, op);
}

}  // namespace tutti::parallel
