// cuda_run: the device side of the door: elementwise operations on a cuda_queue, one thread an element.
// Needs core/cuda_queue and nvcc.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <string_view>  // names

#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/run.hpp>         // operation
#include <tutti/core/text.hpp>        // formatted

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
/// Starts `kernel` with a thread for each of `items`; the last block may have more. Without items, nothing.
/// Errors: usage_error beyond what a grid holds; backend_error.
template <class... Parameters, class... Arguments>
void start(const cuda_queue& q, std::string_view name, void (*kernel)(Parameters...), std::size_t items,
           unsigned threads, const Arguments&... arguments) {
    if (items == 0) { return; }
    const std::size_t blocks = (items - 1) / threads + 1;
    if (blocks > 0x7fffffff) {
        throw usage_error(formatted("{}: {} elements are too many for one launch", name, items));
    }
    const on_device scope(q.device());
    kernel<<<static_cast<unsigned>(blocks), threads, 0, q.stream()>>>(arguments...);
    check_cuda(cudaGetLastError(), name);
}
}  // namespace detail

/// Determinism  the bits of the host's loop, as far as element() uses `exact` or single operations.
/// Cost         one launch; none without elements.
template <elementwise_operation O> void launch(const cuda_queue& q, const O& op) {
    detail::start(q, O::name, detail::for_each_element<O>, op.size(), 256, op, op.size());
}

}  // namespace tutti
