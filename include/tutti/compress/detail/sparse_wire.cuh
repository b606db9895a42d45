// The device side of compress/detail/sparse_wire: wires of indices and values are decoded with the host's bits.
// Needs core/cuda_run and nvcc.
#pragma once

#include <cstddef>      // size_t, byte
#include <string_view>  // names

#include <tutti/compress/detail/segment_batch.cuh>  // segments in a kernel
#include <tutti/compress/detail/sparse_wire.hpp>    // operations
#include <tutti/core/cuda_queue.hpp>                // cuda_queue

namespace tutti::compress::detail {

struct wire_row {
    std::size_t offset;
    std::size_t size;
    std::size_t wire;
    sparse_format format;
};
inline constexpr unsigned entries_per_block = 1024;

// An index is in a wire once, so that threads meet only in a damaged one.
template <bool add, class T>
__global__ void __launch_bounds__(256) scatter_entries(const __grid_constant__ segment_batch<wire_row> batch,
                                                       const std::byte* wires, T* out, float factor) {
    const unsigned r = batch.row_of(blockIdx.x);
    const wire_row& row = batch.rows[r];
    const std::byte* const wire = wires + row.wire;
    const std::size_t entries = row.format.entries(wire);
    const std::size_t first = std::size_t{blockIdx.x - batch.first_block[r]} * entries_per_block + threadIdx.x;
#pragma unroll
    for (unsigned k = 0; k < entries_per_block; k += 256) {
        const std::size_t e = first + k;
        if (e >= entries) { return; }
        const std::size_t i = row.format.index(wire, e);
        if (i >= row.size) { continue; }
        T& to = out[row.offset + i];
        const float v = row.format.value(wire, e);
        if constexpr (add) {
            to += v;
        } else {
            to = static_cast<T>(factor * v);
        }
    }
}

template <bool add, class C, class T>
void start_scatter(const cuda_queue& q, std::string_view name, const C& x, layout all, const std::byte* wires, T* out,
                   float factor) {
    for_each_batch<wire_row>(
        all, [&](const segment& s) { return x.format(s).bytes(); },
        [&](segment_batch<wire_row>& batch, const segment& s, std::size_t wire) {
            const sparse_format f = x.format(s);
            batch.add({s.offset, s.size(), wire, f}, blocks_for(f.capacity, entries_per_block));
        },
        [&](const segment_batch<wire_row>& batch) {
            start_blocks(q, name, scatter_entries<add, T>, batch.blocks(), 256, batch, wires, out, factor);
        });
}

/// Determinism  the host's bits. Cost: one pass over the output and, for each 32 tensors, a launch.
template <class C, floating_element T>
void launch(const cuda_queue& q, const sparse_decode_operation<C, T, device_memory>& op) {
    expect_aligned(C::name, op.wire.data());
    clear_segments(q, op.all, op.out.data());
    start_scatter<false>(q, op.name, op.scheme, op.all, op.wire.data(), op.out.data(), op.factor);
}

/// Determinism  the host's bits: wires are added one after the other. Cost: for each wire and 32 tensors, a launch.
template <class C> void launch(const cuda_queue& q, const sparse_add_operation<C, device_memory>& op) {
    expect_aligned(C::name, op.wires.data());
    const std::size_t bytes = wire_bytes(op.scheme, op.all);
    for (std::size_t w = 0; w < op.count; ++w) {
        start_scatter<true>(q, op.name, op.scheme, op.all, op.wires.data() + w * bytes, op.sum.data(), 1.0f);
    }
}

}  // namespace tutti::compress::detail
