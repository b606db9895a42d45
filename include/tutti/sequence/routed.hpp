// routed: the grouped calls of ring attention along routes, so that what crosses between nodes uses all of their NICs.
// Needs sequence/route. The routing layer of Zeppelin (Chen et al., EuroSys 2026) under its attention engine.
#pragma once

#include <cstddef>  // number of a call
#include <span>     // messages
#include <utility>  // move
#include <vector>   // routes

#include <tutti/comm/call.hpp>          // transfer
#include <tutti/comm/communicator.hpp>  // can_exchange
#include <tutti/comm/topology.hpp>      // topology
#include <tutti/sequence/flow.hpp>      // flow
#include <tutti/sequence/route.hpp>     // route

namespace tutti::sequence {

/// A round_exchange of ring_attention: each call's messages take the ways of route::fastest.
///
/// Semantics    messages between nodes are spread where the topology's links and NICs make that faster; on one node, or
///              with one NIC a node, all go directly.
/// Determinism  data is moved, not computed: same bits, whatever the way.
/// Cost         planned: as route::fastest, for every call; of the hops this rank keeps its own. exchange: as
///              route::exchange.
/// Errors       usage_error when the communicator has another number of ranks than the topology.
class routed {
    comm::topology machines_;
    std::vector<route> routes_;

public:
    explicit routed(comm::topology machines) : machines_(std::move(machines)) {}

    [[nodiscard]] routed planned(std::span<const std::vector<flow>> calls, int rank) const {
        routed with(machines_);
        for (const std::vector<flow>& call : calls) { with.routes_.push_back(route::fastest(machines_, call, rank)); }
        return with;
    }
    template <comm::can_exchange C>
    void exchange(C& comm, std::size_t number, std::span<const comm::transfer<memory_of<C>>> messages) const {
        routes_[number].exchange(comm, messages);
    }
    /// By number of the call, each made for this rank.
    [[nodiscard]] std::span<const route> routes() const noexcept { return routes_; }
};

}  // namespace tutti::sequence
