// route: an exchange of messages that cross between nodes through all NICs at once: dispatch to the ranks of the NICs,
// cross, combine. Needs comm/topology and a communicator with exchange. The routing layer of Zeppelin (Chen et al.,
// EuroSys 2026): which NIC a rank sits at no longer decides how fast its messages are.
#pragma once

#include <cstddef>      // bytes
#include <optional>     // a rank
#include <span>         // flows, messages
#include <string_view>  // names
#include <vector>       // plan

#include <tutti/comm/call.hpp>               // transfer
#include <tutti/comm/communicator.hpp>       // can_exchange
#include <tutti/comm/detail/call_check.hpp>  // disjoint
#include <tutti/comm/topology.hpp>           // topology
#include <tutti/core/buffer.hpp>             // staging
#include <tutti/core/error.hpp>              // usage_error
#include <tutti/core/memory.hpp>             // memory
#include <tutti/core/text.hpp>               // formatted
#include <tutti/sequence/route_plan.hpp>     // hops
#include <tutti/sequence/route_time.hpp>     // crossing

namespace tutti::sequence {

/// The ways of a list of messages, known to every rank from the list and the topology alone.
///
/// Semantics    the messages between two nodes are spread over the NICs that both nodes use, in units of 16 bytes: a
///              message stays with its source's NIC as far as that has room, the rest is dispatched to ranks of other
///              NICs, crosses to ranks of the same NICs there, and is combined at its destination. Chunks of it pass
///              these three stages one behind the other: in step s, chunk s is dispatched while s - 1 crosses and s - 2
///              is combined. Messages inside a node, and those that are not spread, take one hop, a part in every step.
///   exchange   the list's exchange: as communicator.exchange, but called by every rank of the communicator, also by
///              those that only pass data on. A rank's sends and receives match the flows that it is source and
///              destination of, for each peer in order.
/// Determinism  data is moved, not computed: same bits, whatever the way.
/// Deadlock     none: in each step all of a rank's messages are one group, and a step waits only for the same step of
///              others, which wait only for earlier ones.
/// Cost         U units between two nodes with x common NICs: each carries at most ceil(U / x) of them. chunks + 2
///              exchanges. Data that takes all stages is sent three times. staging_bytes(rank): two chunks (one, when
///              there is but one) of every part of a message that the rank passes on.
/// Errors       usage_error when a rank does not exist, sizes do not fit the list, or the communicator is another size, or
///              another rank's than the one that the route was made for.
class route {
    std::vector<flow> flows_;
    route_plan plan_;
    int ranks_;
    std::optional<int> only_;

    template <class Choose>
    route(const comm::topology& t, std::span<const flow> flows, Choose choose, std::optional<int> only = {})
        : flows_(flows.begin(), flows.end())
        , plan_(detail::route_planner::make(t, flows_, choose, only))
        , ranks_(t.ranks())
        , only_(only) {}

public:
    /// Messages between two nodes are spread where the model of route_time says that it pays, in the best number of
    /// chunks; others go directly. Given a rank, the route has the hops of that rank alone, which alone can exchange by
    /// it: what a rank keeps of many routes.
    [[nodiscard]] static route fastest(const comm::topology& t, std::span<const flow> flows,
                                       std::optional<int> only = {}) {
        return route(
            t, flows,
            [&](const crossing& c) -> std::size_t {
                const std::size_t chunks = best_chunks(c, t);
                return routed_seconds(c, chunks, t) < direct_seconds(c, t) ? chunks : 0;
            },
            only);
    }
    /// No message is spread.
    [[nodiscard]] static route direct(const comm::topology& t, std::span<const flow> flows) {
        return route(t, flows, [](const crossing&) -> std::size_t { return 0; });
    }
    /// All messages between nodes are spread, in so many chunks. Errors: usage_error also when that is 0.
    [[nodiscard]] static route spread(const comm::topology& t, std::span<const flow> flows, std::size_t chunks) {
        if (chunks == 0) { throw usage_error("route: spread in 0 chunks"); }
        return route(t, flows, [&](const crossing&) { return chunks; });
    }

    [[nodiscard]] std::span<const flow> flows() const noexcept { return flows_; }
    /// By step: all hops of all ranks, or those from and to the one rank that it was made for.
    [[nodiscard]] std::span<const hop> hops() const noexcept { return plan_.hops; }
    /// The steps of all ranks, and the bytes that all of them send.
    [[nodiscard]] std::size_t steps() const noexcept { return plan_.steps; }
    [[nodiscard]] const route_bytes& bytes() const noexcept { return plan_.bytes; }
    /// Memory that exchange takes from the communicator's queue, and gives back.
    [[nodiscard]] std::size_t staging_bytes(int rank) const {
        if (rank < 0 || rank >= ranks_) {
            throw usage_error(formatted("route: rank {} is not one of {} ranks", rank, ranks_));
        }
        return plan_.staging[static_cast<std::size_t>(rank)];
    }

    template <comm::can_exchange C> void exchange(C& c, std::span<const comm::transfer<memory_of<C>>> transfers) const {
        using transfer = comm::transfer<memory_of<C>>;
        if (c.size() != ranks_) {
            throw usage_error(formatted("route: planned for {} ranks, '{}' has {}", ranks_, c.name(), c.size()));
        }
        const int me = c.rank();
        if (only_ && me != *only_) {
            throw usage_error(formatted("route: made for rank {} alone, not for rank {}", *only_, me));
        }
        const own_messages own(*this, me, transfers);
        expect_disjoint(transfers, c.name(), me);
        const buffer<std::byte, queue_of<C>> staging(c.queue(), staging_bytes(me));
        const auto part = [&](void* memory, std::size_t offset) -> void* {
            return memory == nullptr ? nullptr : static_cast<std::byte*>(memory) + offset;  // phantoms have no address
        };
        std::vector<transfer> group;
        for (std::size_t i = 0; i < plan_.hops.size();) {
            const std::size_t step = plan_.hops[i].step;
            group.clear();
            for (; i < plan_.hops.size() && plan_.hops[i].step == step; ++i) {
                const hop& h = plan_.hops[i];
                if (h.from == me) {
                    void* const at = h.staged_from == hop::not_staged ? part(own.sent[h.flow], h.begin)
                                                                      : part(staging.data(), h.staged_from);
                    group.push_back({{true, h.to, at, h.bytes}});
                }
                if (h.to == me) {
                    void* const at = h.staged_to == hop::not_staged ? part(own.received[h.flow], h.begin)
                                                                    : part(staging.data(), h.staged_to);
                    group.push_back({{false, h.from, at, h.bytes}});
                }
            }
            if (!group.empty()) { c.exchange(group); }
        }
    }

private:
    // What one group would check, and several with parts of the messages would not.
    template <memory M>
    void expect_disjoint(std::span<const comm::transfer<M>> transfers, std::string_view name, int me) const {
        comm::call c;
        c.kind = comm::collective::exchange;
        std::vector<comm::message> messages;
        for (const auto& t : transfers) { messages.push_back(t.bytes); }
        comm::detail::call_check(c, name, me, ranks_).disjoint(messages);
    }

    // Where a rank has its flows: by flow.
    struct own_messages {
        std::vector<void*> sent;
        std::vector<void*> received;

        template <memory M>
        own_messages(const route& r, int me, std::span<const comm::transfer<M>> transfers)
            : sent(r.flows_.size(), nullptr), received(r.flows_.size(), nullptr) {
            std::vector<char> used(transfers.size(), 0);
            std::size_t matched = 0;
            const auto match = [&](bool sends, int peer, std::size_t f) {
                for (std::size_t i = 0; i < transfers.size(); ++i) {
                    const comm::message& m = transfers[i].bytes;
                    if (used[i] != 0 || m.sends != sends || m.peer != peer) { continue; }
                    if (m.bytes != r.flows_[f].bytes) {
                        throw usage_error(
                            formatted("route: message {} from rank {} to rank {} has {} bytes, rank {} {} "
                                      "{}",
                                      f, r.flows_[f].source, r.flows_[f].destination, r.flows_[f].bytes, me,
                                      sends ? "sends" : "receives", m.bytes));
                    }
                    used[i] = 1;
                    ++matched;
                    return m.data;
                }
                throw usage_error(formatted("route: rank {} does not {} message {} (rank {} to rank {})", me,
                                            sends ? "send" : "receive", f, r.flows_[f].source,
                                            r.flows_[f].destination));
            };
            for (std::size_t f = 0; f < r.flows_.size(); ++f) {
                if (r.flows_[f].source == me) { sent[f] = match(true, r.flows_[f].destination, f); }
                if (r.flows_[f].destination == me) { received[f] = match(false, r.flows_[f].source, f); }
            }
            if (matched != transfers.size()) {
                throw usage_error(
                    formatted("route: rank {} has {} messages, the list {} of it", me, transfers.size(), matched));
            }
        }
    };
};

}  // namespace tutti::sequence
