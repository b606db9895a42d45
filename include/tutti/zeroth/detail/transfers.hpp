// transfers: bytes between the host and the memory of a queue, in that queue's order.
// Needs core/elementwise; on a CUDA queue core/cuda_queue.
#pragma once

#include <cstddef>  // byte

#include <tutti/core/elementwise.hpp>  // copy
#include <tutti/core/queue.hpp>        // queue
#include <tutti/core/view.hpp>         // view

namespace tutti::zeroth::detail {

template <queue Q, memory H>
void bring(const Q& q, view<const std::byte, H> in, view<std::byte, typename Q::memory_type> out) {
    if constexpr (Q::executes_inline) {
        copy(q, in, out);
    } else {
        upload(q, in, out);
    }
}
template <queue Q, memory H>
void take(const Q& q, view<const std::byte, typename Q::memory_type> in, view<std::byte, H> out) {
    if constexpr (Q::executes_inline) {
        copy(q, in, out);
    } else {
        download(q, in, out);
    }
}

}  // namespace tutti::zeroth::detail
