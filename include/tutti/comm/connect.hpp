// connect_all: what a backend sets up for two ranks that talk for the first time, for all pairs at a time of one's choice.
// Needs can_exchange.
#pragma once

#include <cstddef>  // byte, size_t
#include <span>     // messages
#include <vector>   // messages

#include <tutti/comm/communicator.hpp>  // can_exchange
#include <tutti/core/buffer.hpp>        // what is sent
#include <tutti/core/view.hpp>          // views

namespace tutti::comm {

/// A byte from every rank to every other.
///
/// Semantics  collective. NCCL makes the connections of point-to-point messages when they are first used, and the host
///            waits for the other rank and for memory meanwhile: a program whose ranks must not wait for each other
///            there, as in the middle of a pipeline, calls this before. Ordered on the communicator's queue, like the
///            messages themselves.
/// Cost       one grouped call of 2 (n - 1) messages.
/// Errors     those of exchange.
template <can_exchange C> void connect_all(C& comm) {
    using Q = queue_of<C>;
    const auto ranks = static_cast<std::size_t>(comm.size());
    const buffer<std::byte, Q> out(comm.queue(), 1), in(comm.queue(), ranks);  // nobody reads what is in them
    std::vector<transfer<memory_of<C>>> messages;
    for (int other = 0; other < comm.size(); ++other) {
        if (other == comm.rank()) { continue; }
        messages.push_back(send_to(other, view<const std::byte, memory_of<C>>(out.view())));
        messages.push_back(receive_from(other, in.view().sub(static_cast<std::size_t>(other), 1)));
    }
    if (!messages.empty()) { comm.exchange(std::span<const transfer<memory_of<C>>>(messages)); }
}

}  // namespace tutti::comm
