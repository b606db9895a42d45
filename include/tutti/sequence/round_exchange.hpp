// round_exchange: how the grouped calls of a ring_attention are made: straight, or over ranks that pass on.
// Needs comm/communicator and sequence/flow. sequence/routed is another.
#pragma once

#include <concepts>  // copyable, same_as
#include <cstddef>   // number of a call
#include <span>      // messages
#include <vector>    // messages of calls

#include <tutti/comm/call.hpp>          // transfer
#include <tutti/comm/communicator.hpp>  // can_exchange, memory_of
#include <tutti/sequence/flow.hpp>      // flow

namespace tutti::sequence {

/// How the grouped calls of a ring_attention are made.
///
/// Semantics  planned(calls, rank): before the first call and with each new placement; returns an exchange for that rank,
///            whatever this one was planned for. Calls are the same on all ranks: all messages of all ranks, by number of
///            the call. exchange(comm, number, messages): of what was returned, on every rank of the communicator, in the
///            order of the calls, with the rank's own messages, those of a pair of ranks in the order of the plan; as
///            communicator.exchange, but a rank may pass on what others send.
template <class E, class C>
concept round_exchange = std::copyable<E> && communicator<C> &&
    requires(const E& e, std::span<const std::vector<flow>> calls, int rank, C& comm, std::size_t number,
             std::span<const comm::transfer<memory_of<C>>> messages) {
    { e.planned(calls, rank) } -> std::same_as<E>;
    e.exchange(comm, number, messages);
};

/// Every message goes straight from its source to its destination.
struct direct_exchange {
    [[nodiscard]] direct_exchange planned(std::span<const std::vector<flow>>, int) const noexcept { return {}; }
    template <comm::can_exchange C>
    void exchange(C& comm, std::size_t, std::span<const comm::transfer<memory_of<C>>> messages) const {
        comm.exchange(messages);
    }
};

}  // namespace tutti::sequence
