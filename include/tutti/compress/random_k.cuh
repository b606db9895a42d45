// The device side of compress/random_k.
// Needs core/cuda_run and nvcc.
#pragma once

#include <cstddef>  // size_t

#include <tutti/compress/detail/segment_batch.cuh>  // segments in a kernel
#include <tutti/compress/random_k.hpp>              // operations
#include <tutti/core/buffer.hpp>                    // flags
#include <tutti/core/cuda_queue.hpp>                // cuda_queue
#include <tutti/core/cuda_run.cuh>                  // fill
#include <tutti/core/elementwise.hpp>               // fill

namespace tutti::compress::detail {

struct random_row {
    std::size_t offset;
    std::size_t size;
    std::size_t wire;
    random_places places;
    float factor;
};
inline constexpr unsigned random_each = 4;         // entries of a thread
inline constexpr unsigned random_tile = 256 * 32;  // elements of a block

// Forms x, and tells whether all of it is finite.
template <class T>
__global__ void __launch_bounds__(256)
    form_finite(const __grid_constant__ segment_batch<random_row> batch, const T* in, float* residual, int* spoiled) {
    const unsigned r = batch.row_of(blockIdx.x);
    const random_row& row = batch.rows[r];
    const std::size_t first = std::size_t{blockIdx.x - batch.first_block[r]} * random_tile + threadIdx.x;
    bool bad = false;
#pragma unroll 16
    for (unsigned k = 0; k < random_tile; k += 256) {
        const std::size_t i = first + k;
        if (i < row.size) {
            const std::size_t at = row.offset + i;
            const float value = residual == nullptr ? formed(in[at]) : formed(in[at], residual[at]);
            const bool finite = magnitude(value) < infinite_magnitude;
            bad = bad || !finite;
            if (residual != nullptr) { residual[at] = finite ? value : 0; }
        }
    }
    if (__syncthreads_or(bad ? 1 : 0) != 0 && threadIdx.x == 0) { atomicOr(&spoiled[r], 1); }
}

template <class T>
__global__ void __launch_bounds__(256)
    gather_places(const __grid_constant__ segment_batch<random_row> batch, const T* in, const float* residual,
                  const int* spoiled, float* wire) {
    const unsigned r = batch.row_of(blockIdx.x);
    const random_row& row = batch.rows[r];
    const std::size_t first = std::size_t{blockIdx.x - batch.first_block[r]} * (256 * random_each) + threadIdx.x;
    const bool bad = spoiled[r] != 0;
#pragma unroll
    for (unsigned k = 0; k < random_each; ++k) {
        const std::size_t j = first + k * 256;
        if (j < row.places.k) {
            const std::size_t at = row.offset + row.places[j];
            const float value = residual == nullptr ? formed(in[at]) : residual[at];
            wire[row.wire + j] = bad ? sent_value(__builtin_bit_cast(float, infinite_magnitude)) : row.factor * value;
        }
    }
}

template <class T>
__global__ void __launch_bounds__(256) scatter_places(const __grid_constant__ segment_batch<random_row> batch, T* out,
                                                      float* residual, const float* sum, float ranks) {
    const unsigned r = batch.row_of(blockIdx.x);
    const random_row& row = batch.rows[r];
    const std::size_t first = std::size_t{blockIdx.x - batch.first_block[r]} * (256 * random_each) + threadIdx.x;
#pragma unroll
    for (unsigned k = 0; k < random_each; ++k) {
        const std::size_t j = first + k * 256;
        if (j < row.places.k) {
            const std::size_t at = row.offset + row.places[j];
            out[at] = static_cast<T>(mean_of(sum[row.wire + j], ranks));
            if (residual != nullptr) { residual[at] = 0; }
        }
    }
}

// Calls use(batch), with blocks for places.
template <class Operation, class Use> void for_each_random_batch(const Operation& op, Use use) {
    const auto kept = [&](const segment& s) { return op.scheme.wire_count(s, 0); };
    for_each_batch<random_row>(
        op.all, kept,
        [&](segment_batch<random_row>& batch, const segment& s, std::size_t wire) {
            const std::size_t k = kept(s);
            batch.add({s.offset, s.size(), wire, random_places::of(op.key, s, k), op.scheme.factor(s)},
                      blocks_for(k, 256 * random_each));
        },
        use);
}

/// Determinism  the host's bits. Cost: one pass over the input, and two launches for each 32 tensors.
template <class C, floating_element T>
void launch(const cuda_queue& q, const random_gather_operation<C, T, device_memory>& op) {
    float* const residual = op.residual.empty() ? nullptr : op.residual.data();
    for_each_random_batch(op, [&](const segment_batch<random_row>& places) {
        const buffer<int, cuda_queue> spoiled(q, places.count);
        fill(q, spoiled.view(), 0);
        segment_batch<random_row> elements;
        for (unsigned r = 0; r < places.count; ++r) {
            elements.add(places.rows[r], blocks_for(places.rows[r].size, random_tile));
        }
        start_blocks(q, op.name, form_finite<T>, elements.blocks(), 256, elements, op.in.data(), residual,
                     spoiled.data());
        start_blocks(q, op.name, gather_places<T>, places.blocks(), 256, places, op.in.data(), residual, spoiled.data(),
                     op.wire.data());
    });
}

/// Determinism  the host's bits. Cost: one pass over the output, and a launch for each 32 tensors.
template <class C, floating_element T>
void launch(const cuda_queue& q, const random_scatter_operation<C, T, device_memory>& op) {
    clear_segments(q, op.all, op.out.data());
    float* const residual = op.residual.empty() ? nullptr : op.residual.data();
    for_each_random_batch(op, [&](const segment_batch<random_row>& places) {
        start_blocks(q, op.name, scatter_places<T>, places.blocks(), 256, places, op.out.data(), residual,
                     op.sum.data(), op.ranks);
    });
}

}  // namespace tutti::compress::detail
