// What data_parallel and its optimizers need on a cuda_queue. Include it instead of the .hpp in a file that nvcc compiles.
// Needs core/cuda_run, optimize/clip.cuh and nvcc.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // hashes

#include <tutti/core/cuda_run.cuh>           // elementwise operations, start
#include <tutti/optimize/clip.cuh>           // global norm
#include <tutti/strategy/data_parallel.hpp>  // data_parallel

namespace tutti::strategy::detail {

template <class O> __global__ void hash_blocks(O op) {
    const std::size_t b = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (b >= op.blocks()) { return; }
    // Sums of integers wrap and do not depend on their order.
    atomicAdd(reinterpret_cast<unsigned long long*>(op.out.data()), static_cast<unsigned long long>(op.of_block(b)));
}

/// Determinism  the host's value. Cost: one read of the input, not coalesced; it runs once, at finish.
inline void launch(const cuda_queue& q, const hash_operation<device_memory>& op) {
    fill(q, op.out, std::uint64_t{0});
    tutti::detail::start(q, op.name, hash_blocks<hash_operation<device_memory>>, op.blocks(), 128, op);
}

}  // namespace tutti::strategy::detail
