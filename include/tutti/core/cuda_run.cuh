// cuda_run: the device side of the door: elementwise operations on a cuda_queue, one thread an element.
// Needs core/cuda_queue and nvcc.
#pragma once

#include <concepts>  // same_as
#include <cstddef>   // size_t

#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/run.hpp>         // operation

namespace tutti {

/// An operation whose arithmetic is that of independent elements.
template <class O>
concept elementwise_operation = operation<O> && requires(const O& o, std::size_t i) {
    { o.size() } -> std::same_as<std::size_t>;
    o.element(i);
};

namespace detail {
template <class O> __global__ void for_each_element(O op, std::size_t count) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) { op.element(i); }
}
/// Blocks of a grid. Errors: usage_error beyond what a grid holds.
[[nodiscard]] inline unsigned grid_for(std::string_view name, std::size_t items, std::size_t per_block) {
    const std::size_t blocks = items / per_block + (items % per_block != 0 ? 1 : 0);
    if (blocks > 0x7fffffff) {
        throw usage_error(formatted("{}: {} elements are too many for one launch", name, items));
    }
    return static_cast<unsigned>(blocks);
}
}  // namespace detail

/// Determinism  the bits of the host's loop, as far as element() uses `exact` or single operations.
/// Cost         one launch; none without elements.
template <elementwise_operation O> void launch(const cuda_queue& q, const O& op) {
    constexpr unsigned threads = 256;
    const std::size_t count = op.size();
    if (count == 0) { return; }
    const detail::on_device scope(q.device());
    detail::for_each_element<<<detail::grid_for(O::name, count, threads), threads, 0, q.stream()>>>(op, count);
    detail::check_cuda(cudaGetLastError(), O::name);
}

}  // namespace tutti
