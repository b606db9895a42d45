// route_plan: the hops of messages between nodes, step by step: who sends which bytes of which message to whom.
// Needs sequence/token_moves (spreading bytes over NICs is spreading tokens over ranks) and sequence/route_time.
#pragma once

#include <algorithm>  // max, min, stable_sort
#include <cstddef>    // bytes
#include <cstdint>    // units
#include <limits>     // hop::not_staged
#include <map>        // crossings by pair of nodes
#include <optional>   // a rank
#include <span>       // flows
#include <utility>    // pair
#include <vector>     // hops

#include <tutti/comm/topology.hpp>         // topology
#include <tutti/core/partition.hpp>        // targets
#include <tutti/sequence/flow.hpp>         // flow
#include <tutti/sequence/route_time.hpp>   // crossing
#include <tutti/sequence/token_moves.hpp>  // moves_inside_first

namespace tutti::sequence {

/// Directly; or from the source to the rank of a NIC, between nodes, and from the rank of a NIC to the destination.
enum class hop_kind : unsigned char { direct, dispatch, cross, combine };

/// Bytes [begin, begin + bytes) of a flow, from where `from` has them to where `to` keeps them: at an offset in the
/// rank's staging memory, or in the flow's own.
struct hop {
    static constexpr std::size_t not_staged = std::numeric_limits<std::size_t>::max();
    hop_kind kind = hop_kind::direct;
    std::size_t step = 0;
    int from = 0;
    int to = 0;
    std::size_t flow = 0;
    std::size_t begin = 0;
    std::size_t bytes = 0;
    std::size_t staged_from = not_staged;
    std::size_t staged_to = not_staged;
    friend constexpr bool operator==(const hop&, const hop&) = default;
};

/// What all ranks send, each hop counted.
struct route_bytes {
    std::uint64_t inside = 0;   ///< inside of nodes
    std::uint64_t between = 0;  ///< between them
    friend constexpr bool operator==(const route_bytes&, const route_bytes&) = default;
};

struct route_plan {
    std::vector<hop> hops;             ///< by step; within one, in an order that all ranks share
    std::vector<std::size_t> staging;  ///< bytes, by rank
    std::size_t steps = 0;             ///< of all ranks
    route_bytes bytes{};
};

namespace detail {

inline constexpr std::size_t route_unit = 16;  // bytes: what one device thread moves at a time

/// A part of a flow that crosses by one NIC.
struct share {
    std::size_t flow;
    int nic;
    std::size_t begin;
    std::size_t bytes;
};

class route_planner {
    const comm::topology& t_;
    std::span<const flow> flows_;
    std::optional<int> only_;
    route_plan plan_;

public:
    /// `choose`(crossing) says in how many chunks the messages between two nodes are spread, or 0: not at all. Where
    /// `only` is given, the hops are those from and to that rank.
    template <class Choose>
    [[nodiscard]] static route_plan make(const comm::topology& t, std::span<const flow> flows, Choose choose,
                                         std::optional<int> only) {
        route_planner planner(t, flows, only);
        planner.plan_all(choose);
        return std::move(planner.plan_);
    }

    /// The flows of one pair of nodes, in units of 16 bytes, spread over the NICs that both nodes use.
    ///
    /// A flow stays with its source's NIC as far as there is room. Each of x NICs gets floor or ceil of all units / x.
    [[nodiscard]] static std::vector<share> spread(const comm::topology& t, std::span<const flow> flows,
                                                   std::span<const std::size_t> chosen) {
        const auto nics = static_cast<std::size_t>(t.nics_per_node());
        std::vector<std::int64_t> pinned(nics, 0);
        std::int64_t units = 0;
        for (const std::size_t f : chosen) {
            pinned[nic(t, flows[f].source)] += units_of(flows[f].bytes);
            units += units_of(flows[f].bytes);
        }
        const flow& any = flows[chosen.front()];
        std::vector<std::size_t> shared;
        for (std::size_t j = 0; j < nics; ++j) {
            if (!ranks_by(t, t.node_of(any.source), j).empty() && !ranks_by(t, t.node_of(any.destination), j).empty()) {
                shared.push_back(j);
            }
        }
        if (shared.empty()) { return {}; }
        std::vector<std::int64_t> target(nics, 0);
        for (std::size_t i = 0; i < shared.size(); ++i) {
            target[shared[i]] =
                static_cast<std::int64_t>(tutti::partition(static_cast<std::size_t>(units), shared.size(), i).count);
        }
        auto moves = moves_inside_first({1, t.nics_per_node()}, pinned, target);
        for (std::size_t j = 0; j < nics; ++j) {
            const std::int64_t stays = std::min(pinned[j], target[j]);
            if (stays > 0) { moves.push_back({static_cast<int>(j), static_cast<int>(j), stays}); }
        }
        // What stays comes first.
        std::stable_sort(moves.begin(), moves.end(), [](const token_move& a, const token_move& b) {
            return a.from != b.from ? a.from < b.from : (a.from == a.to) > (b.from == b.to);
        });
        return deal(t, flows, chosen, moves);
    }

private:
    route_planner(const comm::topology& t, std::span<const flow> flows, std::optional<int> only)
        : t_(t), flows_(flows), only_(only) {
        if (only_) { (void)t_.node_of(*only_); }  // throws for a rank that is not there
        plan_.staging.assign(static_cast<std::size_t>(t.ranks()), 0);
    }

    [[nodiscard]] static std::size_t nic(const comm::topology& t, int rank) {
        return static_cast<std::size_t>(t.nic_of(rank));
    }
    [[nodiscard]] static std::int64_t units_of(std::size_t bytes) {
        return static_cast<std::int64_t>(bytes / route_unit + (bytes % route_unit != 0 ? 1 : 0));
    }
    [[nodiscard]] static std::vector<int> ranks_by(const comm::topology& t, int node, std::size_t which) {
        std::vector<int> ranks;
        for (const int r : t.ranks_on(node)) {
            if (nic(t, r) == which) { ranks.push_back(r); }
        }
        return ranks;
    }
    // The flows of each NIC, one behind the other, are dealt out in the order of its moves.
    [[nodiscard]] static std::vector<share> deal(const comm::topology& t, std::span<const flow> flows,
                                                 std::span<const std::size_t> chosen, std::vector<token_move>& moves) {
        std::vector<share> shares;
        for (const std::size_t f : chosen) {
            const std::int64_t units = units_of(flows[f].bytes);
            std::int64_t at = 0;
            for (token_move& m : moves) {
                const std::int64_t taken = m.from == t.nic_of(flows[f].source) ? std::min(units - at, m.tokens) : 0;
                if (taken == 0) { continue; }
                const std::size_t begin = static_cast<std::size_t>(at) * route_unit;
                const std::size_t end = std::min(static_cast<std::size_t>(at + taken) * route_unit, flows[f].bytes);
                shares.push_back({f, m.to, begin, end - begin});
                at += taken;
                m.tokens -= taken;
            }
        }
        return shares;
    }

    // The rank by which a rank's data passes NIC j: itself, or one that has that NIC, the neighbors' turn by turn.
    [[nodiscard]] int proxy(int rank, int through) const {
        if (t_.nic_of(rank) == through) { return rank; }
        const auto ranks = ranks_by(t_, t_.node_of(rank), static_cast<std::size_t>(through));
        return ranks[static_cast<std::size_t>(t_.local_rank(rank)) % ranks.size()];
    }

    [[nodiscard]] crossing busiest(std::span<const std::size_t> chosen, std::span<const share> shares) const {
        struct load {
            double sent = 0;
            double received = 0;
            [[nodiscard]] double most() const { return std::max(sent, received); }
        };
        const auto nics = static_cast<std::size_t>(t_.nics_per_node());
        std::vector<load> direct(nics);
        std::vector<double> through(nics, 0);
        std::map<int, load> inside;  // by rank
        for (const std::size_t f : chosen) {
            direct[nic(t_, flows_[f].source)].sent += static_cast<double>(flows_[f].bytes);
            direct[nic(t_, flows_[f].destination)].received += static_cast<double>(flows_[f].bytes);
        }
        const auto pass = [&](int from, int to, std::size_t bytes) {
            if (from == to) { return; }
            inside[from].sent += static_cast<double>(bytes);
            inside[to].received += static_cast<double>(bytes);
        };
        for (const share& s : shares) {
            through[static_cast<std::size_t>(s.nic)] += static_cast<double>(s.bytes);
            pass(flows_[s.flow].source, proxy(flows_[s.flow].source, s.nic), s.bytes);
            pass(proxy(flows_[s.flow].destination, s.nic), flows_[s.flow].destination, s.bytes);
        }
        crossing c;
        for (const load& l : direct) { c.direct = std::max(c.direct, l.most()); }
        for (const double b : through) { c.spread = std::max(c.spread, b); }
        for (const auto& [rank, l] : inside) { c.inside = std::max(c.inside, l.most()); }
        return c;
    }

    template <class Choose> void plan_all(Choose choose) {
        std::map<std::pair<int, int>, std::vector<std::size_t>> crossings;
        std::vector<std::size_t> direct;
        for (std::size_t f = 0; f < flows_.size(); ++f) {
            const int source = t_.node_of(flows_[f].source);  // throws for ranks that are not there
            const int destination = t_.node_of(flows_[f].destination);
            if (source == destination) {
                direct.push_back(f);
            } else {
                crossings[{source, destination}].push_back(f);
            }
        }
        std::size_t steps = 1;
        for (const auto& [nodes, chosen] : crossings) {
            const std::vector<share> shares = spread(t_, flows_, chosen);
            const std::size_t chunks = shares.empty() ? 0 : choose(busiest(chosen, shares));
            if (chunks == 0) {
                direct.insert(direct.end(), chosen.begin(), chosen.end());
                continue;
            }
            steps = std::max(steps, chunks + 2);
            for (const share& s : shares) { route(s, chunks); }
        }
        // A part in every step, so that no step waits for a whole message.
        std::sort(direct.begin(), direct.end());
        for (const std::size_t f : direct) {
            count(flows_[f].source, flows_[f].destination, flows_[f].bytes, steps);
            if (!wanted(flows_[f].source, flows_[f].destination)) { continue; }
            for (std::size_t step = 0; step < steps; ++step) {
                const std::size_t begin = start_of(step, steps, flows_[f].bytes);
                const std::size_t end = start_of(step + 1, steps, flows_[f].bytes);
                add({hop_kind::direct, step, flows_[f].source, flows_[f].destination, f, begin, end - begin});
            }
        }
        std::stable_sort(plan_.hops.begin(), plan_.hops.end(),
                         [](const hop& a, const hop& b) { return a.step < b.step; });
    }

    [[nodiscard]] bool wanted(int from, int to) const noexcept { return !only_ || from == *only_ || to == *only_; }
    void add(const hop& h) {
        if (h.bytes > 0 && wanted(h.from, h.to)) { plan_.hops.push_back(h); }
    }
    // What takes a hop in parts, the last of which, never an empty one, is sent in step `steps` - 1.
    void count(int from, int to, std::size_t bytes, std::size_t steps) {
        if (bytes == 0) { return; }
        plan_.steps = std::max(plan_.steps, steps);
        (t_.same_node(from, to) ? plan_.bytes.inside : plan_.bytes.between) += bytes;
    }
    // Of chunk `c` of `bytes` in `chunks` chunks of whole units: unit floor(c * units / chunks).
    [[nodiscard]] static std::size_t start_of(std::size_t c, std::size_t chunks, std::size_t bytes) {
        const auto units = static_cast<std::size_t>(units_of(bytes));
        return std::min(bytes, (units / chunks * c + units % chunks * c / chunks) * route_unit);
    }

    // Chunk c is dispatched in step c, crosses in the next, and is combined in the one behind. A proxy so has at most
    // two chunks at a time: the one that comes and the one that goes.
    void route(const share& s, std::size_t chunks) {
        const flow& f = flows_[s.flow];
        const int sender = proxy(f.source, s.nic);
        const int receiver = proxy(f.destination, s.nic);
        const auto units = static_cast<std::size_t>(units_of(s.bytes));
        const std::size_t room = std::min(s.bytes, (units / chunks + (units % chunks != 0 ? 1 : 0)) * route_unit);
        const std::size_t held = std::min<std::size_t>(chunks, 2);
        const auto reserve = [&](int rank) {
            std::size_t& end = plan_.staging[static_cast<std::size_t>(rank)];
            end += held * room;
            return end - held * room;
        };
        const bool dispatches = sender != f.source;
        const bool combines = receiver != f.destination;
        const std::size_t at_sender = dispatches ? reserve(sender) : hop::not_staged;
        const std::size_t at_receiver = combines ? reserve(receiver) : hop::not_staged;
        if (dispatches) { count(f.source, sender, s.bytes, chunks); }
        count(sender, receiver, s.bytes, chunks + 1);
        if (combines) { count(receiver, f.destination, s.bytes, chunks + 2); }
        if (!wanted(f.source, sender) && !wanted(receiver, f.destination)) { return; }
        for (std::size_t c = 0; c < chunks; ++c) {
            const std::size_t begin = s.begin + start_of(c, chunks, s.bytes);
            const std::size_t bytes = s.begin + start_of(c + 1, chunks, s.bytes) - begin;
            const auto slot = [&](std::size_t base) {
                return base == hop::not_staged ? hop::not_staged : base + c % held * room;
            };
            const std::size_t here = slot(at_sender);
            const std::size_t there = slot(at_receiver);
            if (dispatches) {
                add({hop_kind::dispatch, c, f.source, sender, s.flow, begin, bytes, hop::not_staged, here});
            }
            add({hop_kind::cross, c + 1, sender, receiver, s.flow, begin, bytes, here, there});
            if (combines) {
                add({hop_kind::combine, c + 2, receiver, f.destination, s.flow, begin, bytes, there, hop::not_staged});
            }
        }
    }
};

}  // namespace detail
}  // namespace tutti::sequence
