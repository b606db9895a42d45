// The device side of parallel/bias: what layers whose weights are cut over ranks need beside products.
// Needs core/cuda_run and nvcc. A thread takes a column of a block of rows: neighbors read and write neighbors.
#pragma once

#include <algorithm>  // clamp, max
#include <cstddef>    // size_t

#include <tutti/core/buffer.hpp>    // partial sums
#include <tutti/core/cuda_run.cuh>  // cuda_queue
#include <tutti/core/element.hpp>   // master_t
#include <tutti/parallel/bias.hpp>  // operations

namespace tutti::parallel {

namespace detail {

inline constexpr unsigned bias_threads = 128;

inline unsigned blocks_of_columns(std::size_t columns) {
    return static_cast<unsigned>((columns + bias_threads - 1) / bias_threads);
}

template <class O> __global__ void __launch_bounds__(bias_threads) add_bias(O op, std::size_t rows_each) {
    using T = typename decltype(op.y)::value_type;
    using R = master_t<T>;
    const std::size_t j = std::size_t{blockIdx.x} * bias_threads + threadIdx.x, columns = op.bias.size();
    if (j >= columns) { return; }
    const R bias = static_cast<R>(op.bias.data()[j]);
    const std::size_t first = blockIdx.y * rows_each * columns;
    const std::size_t end = min(first + rows_each * columns, op.y.size());
#pragma unroll 4
    for (std::size_t at = first + j; at < end; at += columns) {
        op.y.data()[at] = static_cast<T>(static_cast<R>(op.y.data()[at]) + bias);
    }
}

// partial[b][j] = the sum of column j of the b-th block of rows.
template <class O, class R>
__global__ void __launch_bounds__(bias_threads) sum_rows(O op, std::size_t rows_each, R* partial) {
    const std::size_t j = std::size_t{blockIdx.x} * bias_threads + threadIdx.x, columns = op.sums.size();
    if (j >= columns) { return; }
    const std::size_t first = blockIdx.y * rows_each * columns;
    const std::size_t end = min(first + rows_each * columns, op.y.size());
    R total = 0;
#pragma unroll 8
    for (std::size_t at = first + j; at < end; at += columns) { total += static_cast<R>(op.y.data()[at]); }
    partial[blockIdx.y * columns + j] = total;
}
template <class O, class R>
__global__ void __launch_bounds__(bias_threads) add_sums(O op, unsigned blocks, const R* partial) {
    using T = typename decltype(op.sums)::value_type;
    const std::size_t j = std::size_t{blockIdx.x} * bias_threads + threadIdx.x, columns = op.sums.size();
    if (j >= columns) { return; }
    R total = static_cast<R>(op.sums.data()[j]);
    for (unsigned b = 0; b < blocks; ++b) { total += partial[b * columns + j]; }
    op.sums.data()[j] = static_cast<T>(total);
}

}  // namespace detail

/// Determinism  the bits of the host. Cost: one read and one write of y.
template <floating_element T> void launch(const cuda_queue& q, const add_bias_operation<T, device_memory>& op) {
    if (op.y.empty()) { return; }
    constexpr std::size_t most_blocks = 65535;  // of a grid's second dimension
    const std::size_t rows = op.y.size() / op.bias.size();
    const std::size_t each = std::max<std::size_t>(16, (rows + most_blocks - 1) / most_blocks);
    const dim3 grid(detail::blocks_of_columns(op.bias.size()), static_cast<unsigned>((rows + each - 1) / each));
    const tutti::detail::on_device scope(q.device());
    detail::add_bias<<<grid, detail::bias_threads, 0, q.stream()>>>(op, each);
    tutti::detail::check_cuda(cudaGetLastError(), op.name);
}
/// Cost: one read of y; scratch of at most 64 rows.
template <floating_element T>
void launch(const cuda_queue& q, const add_bias_gradient_operation<T, device_memory>& op) {
    if (op.y.empty()) { return; }
    const std::size_t columns = op.sums.size(), rows = op.y.size() / columns;
    const std::size_t blocks = std::clamp<std::size_t>(rows / 32, 1, 64), each = (rows + blocks - 1) / blocks;
    const buffer<master_t<T>, cuda_queue> partial(q, blocks * columns);
    const unsigned across = detail::blocks_of_columns(columns);
    const tutti::detail::on_device scope(q.device());
    detail::sum_rows<<<dim3(across, static_cast<unsigned>(blocks)), detail::bias_threads, 0, q.stream()>>>(
        op, each, partial.data());
    tutti::detail::check_cuda(cudaGetLastError(), op.name);
    detail::add_sums<<<across, detail::bias_threads, 0, q.stream()>>>(op, static_cast<unsigned>(blocks),
                                                                      partial.data());
    tutti::detail::check_cuda(cudaGetLastError(), op.name);
}

}  // namespace tutti::parallel
