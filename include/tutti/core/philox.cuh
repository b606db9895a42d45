// The device side of core/philox: normals with the host's bits.
// Needs core/cuda_run and nvcc.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // positions

#include <tutti/core/cuda_run.cuh>  // start
#include <tutti/core/philox.hpp>    // fill_normal_operation

namespace tutti {

namespace detail {
// One thread a block of the generator, whose four words are neighbors in the stream.
template <class O> __global__ void fill_normals(O op) {
    const std::uint64_t block = (op.first >> 2) + std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::uint64_t end = op.first + op.out.size();
    if (4 * block >= end) { return; }
    const auto z = normals_from(op.stream.block(block));
    for (unsigned lane = 0; lane < 4; ++lane) {
        const std::uint64_t at = 4 * block + lane;
        if (at >= op.first && at < end) {
            using T = typename decltype(op.out)::value_type;
            op.out.data()[at - op.first] = static_cast<T>(op.deviation * z[lane]);
        }
    }
}
}  // namespace detail

/// Determinism  the host's bits.
template <floating_element T> void launch(const cuda_queue& q, const fill_normal_operation<T, device_memory>& op) {
    if (op.out.empty()) { return; }
    const std::uint64_t blocks = ((op.first + op.out.size() + 3) >> 2) - (op.first >> 2);
    detail::start(q, op.name, detail::fill_normals<fill_normal_operation<T, device_memory>>,
                  static_cast<std::size_t>(blocks), 256, op);
}

}  // namespace tutti
