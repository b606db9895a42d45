// The device side of optimize/clip: block sums of squares and their sum, with the host's bits.
// Needs core/cuda_run and nvcc.
// Not CUB's reductions: those add in an order of their own, which depends on the card; here it is that of the host's
// loop.
#pragma once

#include <cstddef>  // size_t

#include <tutti/core/cuda_run.cuh>  // start
#include <tutti/optimize/clip.hpp>  // operations

namespace tutti::optimize {

namespace detail {

// As many threads a block of elements as the host's loop has partial sums, so both add in one order.
template <class O> __global__ void sum_squares(O op) {
    const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::size_t block = thread / O::lanes;
    const std::size_t lane = thread % O::lanes;
    double partial = 0;
    if (block < op.out.size()) {
        const std::size_t first = block * norm_block;
        const std::size_t rest = op.in.size() - first;
        const std::size_t count = rest < norm_block ? rest : norm_block;
        const auto* const x = op.in.data() + first;
#pragma unroll 16
        for (std::size_t i = lane; i < count; i += O::lanes) { partial = O::added_square(partial, x[i]); }
    }
    double total = 0;
    for (unsigned j = 0; j < O::lanes; ++j) {
        total += __shfl_sync(0xffffffffu, partial, static_cast<int>(j), O::lanes);
    }
    if (lane == 0 && block < op.out.size()) { op.out.data()[block] = total; }
}

template <class O> __global__ void sum_in_order(O op) {
    __shared__ double partial[O::lanes];
    double mine = 0;
    for (std::size_t i = threadIdx.x; i < op.in.size(); i += O::lanes) { mine += op.in.data()[i]; }
    partial[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0;
        for (const double p : partial) { total += p; }
        op.out.data()[0] = total;
    }
}

}  // namespace detail

/// Determinism  the host's bits. Cost: one read of the input.
template <floating_element T> void launch(const cuda_queue& q, const square_sums_operation<T, device_memory>& op) {
    using operation = square_sums_operation<T, device_memory>;
    tutti::detail::start(q, op.name, detail::sum_squares<operation>, op.out.size() * op.lanes, 256, op);
}

/// Determinism  the host's bits. Cost: one block; for sums of a few ten thousand numbers.
inline void launch(const cuda_queue& q, const ordered_sum_operation<device_memory>& op) {
    using operation = ordered_sum_operation<device_memory>;
    tutti::detail::start(q, op.name, detail::sum_in_order<operation>, op.lanes, static_cast<unsigned>(op.lanes), op);
}

}  // namespace tutti::optimize
