// The device side of core/philox: normals with the host's bits.
// Needs core/cuda_run and nvcc.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // positions

#include <tutti/core/cuda_run.cuh>  // start, packs
#include <tutti/core/philox.hpp>    // fill_normal_operation

namespace tutti {

namespace detail {

inline constexpr unsigned normal_blocks_per_thread = 4;

template <bool whole, class O> __device__ inline void fill_normal_block(const O& op, std::uint64_t block) {
    using T = typename decltype(op.out)::value_type;
    constexpr unsigned width = std::min<unsigned>(4, 16 / sizeof(T));
    const auto z = normals_from(op.stream.block(block));
    const std::uint64_t at = 4 * block;
    if constexpr (whole) {
        T* const to = op.out.data() + (at - op.first);
#pragma unroll
        for (unsigned p = 0; p < 4; p += width) {
            pack<T, width> values;
#pragma unroll
            for (unsigned lane = 0; lane < width; ++lane) {
                values.of[lane] = static_cast<T>(op.deviation * z[p + lane]);
            }
            values.store(to + p);
        }
    } else {
        for (unsigned lane = 0; lane < 4; ++lane) {
            const std::uint64_t i = at + lane - op.first;  // wraps before the first
            if (i < op.out.size()) { op.out.data()[i] = static_cast<T>(op.deviation * z[lane]); }
        }
    }
}

// A block of the generator gives four neighbors in the stream. `packed`: they are neighbors in a pack, too.
template <class O>
__global__ void __launch_bounds__(transform_threads)
    fill_normals(const O op, std::uint64_t first_block, std::uint64_t end_block, bool packed) {
    constexpr unsigned tile = transform_threads * normal_blocks_per_thread;
    const std::uint64_t begin = first_block + std::uint64_t{blockIdx.x} * tile;
    if (packed && 4 * begin >= op.first && 4 * (begin + tile) <= op.first + op.out.size()) {
#pragma unroll
        for (unsigned k = 0; k < tile; k += transform_threads) { fill_normal_block<true>(op, begin + k + threadIdx.x); }
    } else {
#pragma unroll 1
        for (unsigned k = 0; k < tile; k += transform_threads) {
            if (begin + k + threadIdx.x < end_block) { fill_normal_block<false>(op, begin + k + threadIdx.x); }
        }
    }
}

}  // namespace detail

/// Determinism  the host's bits.
/// Cost         one launch. Bound by arithmetic: about 180 instructions for four normals, a quarter of them the
///              generator's. Fastest where stream position and address agree: `first` a multiple of 4, aligned memory.
template <floating_element T> void launch(const cuda_queue& q, const fill_normal_operation<T, device_memory>& op) {
    using operation = fill_normal_operation<T, device_memory>;
    if (op.out.empty()) { return; }
    const std::uint64_t first = op.first / 4;
    const std::uint64_t end = (op.first + op.out.size() - 1) / 4 + 1;
    const auto address = reinterpret_cast<std::uintptr_t>(op.out.data()) - op.first % 4 * sizeof(T);
    const bool packed = address % std::min<std::size_t>(16, 4 * sizeof(T)) == 0;
    const std::size_t threads = (static_cast<std::size_t>(end - first) - 1) / detail::normal_blocks_per_thread + 1;
    detail::start(q, op.name, detail::fill_normals<operation>, threads, detail::transform_threads, op, first, end,
                  packed);
}

}  // namespace tutti
