// cost: what a collective puts on the wire (exact integers), and how long that takes (alpha-beta model).
// Needs comm/call and comm/topology. The one convention of counters, shaped networks, benches and planners.
#pragma once

#include <algorithm>  // max
#include <bit>        // countl_zero
#include <cstddef>    // size_t
#include <cstdint>    // exact byte counts

#include <tutti/comm/call.hpp>       // collective, call
#include <tutti/comm/topology.hpp>   // link, topology
#include <tutti/core/partition.hpp>  // slices of an all_reduce

namespace tutti::comm {

/// The size of a call as benches quote it: the whole buffer, also for reduce_scatter, all_gather, gather, scatter and
/// all_to_all, whose one rank's part is 1/n of it. exchange: the larger of what this rank sends and receives.
/// Source  doc/PERFORMANCE.md of NVIDIA/nccl-tests.
[[nodiscard]] inline std::size_t message_bytes(const call& c, int ranks) noexcept {
    const auto n = static_cast<std::size_t>(ranks);
    switch (c.kind) {
    case collective::gather: return c.in_bytes() * n;
    case collective::scatter: return c.out_bytes() * n;
    default: return c.count() * c.element_size;
    }
}

/// Bytes that `rank` of `ranks` puts on the wire for `c`: what an algorithm that moves no byte twice has to send.
///
///   all_reduce          reduce-scatter then all-gather, both direct, over the slices of core/partition:
///                       (count - own) + own * (n-1) elements
///   reduce_scatter(_v)  all but its own part             all_gather(_v)   its own part, n-1 times
///   broadcast           the root: everything, once       scatter          the root: all but its own part
///   reduce, gather      all but the root: their input    all_to_all(_v)   all but its own part
///   exchange            what it sends to other ranks     barrier          0
///
/// Units        bytes. n = 1 gives 0.
/// Determinism  a function of the call alone: any backend, any timing gives the same number. A backend's own algorithm
///              may send more.
[[nodiscard]] inline std::uint64_t wire_bytes(const call& c, int rank, int ranks) noexcept {
    if (ranks <= 1) { return 0; }
    const auto n = static_cast<std::uint64_t>(ranks);
    const auto r = static_cast<std::size_t>(rank);
    const std::uint64_t in = c.in_bytes();
    switch (c.kind) {
    case collective::all_reduce: {
        const std::uint64_t own = partition(c.in_count, static_cast<std::size_t>(ranks), r).count * c.element_size;
        return (in - own) + own * (n - 1);
    }
    case collective::reduce_scatter:
    case collective::reduce_scatter_v: return in - c.out_bytes();
    case collective::all_gather:
    case collective::all_gather_v: return in * (n - 1);
    case collective::broadcast: return rank == c.root ? in : 0;
    case collective::reduce:
    case collective::gather: return rank == c.root ? 0 : in;
    case collective::scatter: return rank == c.root ? in - c.out_bytes() : 0;
    case collective::all_to_all: return in - in / n;
    case collective::all_to_all_v: return in - c.send_counts[r] * c.element_size;
    case collective::exchange: {
        std::uint64_t sent = 0;
        for (const message& m : c.messages) { sent += m.sends && m.peer != rank ? m.bytes : 0; }
        return sent;
    }
    case collective::barrier: return 0;
    }
    return 0;
}

/// Bus bandwidth = message_bytes / time * bus_factor: comparable with the speed of the links, whatever the number of
/// ranks.
/// Source  doc/PERFORMANCE.md of NVIDIA/nccl-tests. barrier moves nothing: 0.
[[nodiscard]] constexpr double bus_factor(collective kind, int ranks) noexcept {
    const double others = static_cast<double>(ranks - 1) / ranks;
    switch (kind) {
    case collective::all_reduce: return 2 * others;
    case collective::broadcast:
    case collective::reduce:
    case collective::exchange: return 1;
    case collective::barrier: return 0;
    default: return others;
    }
}

/// How long a call takes: what passes before the first byte arrives, and how long the links are busy.
struct call_time {
    double latency = 0;         ///< seconds
    double inside = 0;          ///< seconds this rank's link inside its node is busy
    double between = 0;         ///< seconds this rank's link between nodes is busy
    bool side_by_side = false;  ///< both links are busy at the same time, not one behind the other
    [[nodiscard]] constexpr double seconds() const noexcept {
        return latency + (side_by_side ? std::max(inside, between) : inside + between);
    }
    friend constexpr bool operator==(const call_time&, const call_time&) = default;
};

/// Time of a collective of `bytes` (message_bytes) among `ranks` on a flat network, as `between` of the result.
///
/// With a = latency, b = 1 / bandwidth, S = bytes, n = ranks, L = ceil(log2 n); each is the least latency and the least
/// traffic of one known algorithm:
///   all_reduce                     2 L a + 2 (n-1)/n S b   recursive halving, then doubling
///   reduce_scatter, all_gather       L a +   (n-1)/n S b   recursive halving; doubling
///   gather, scatter                  L a +   (n-1)/n S b   binomial tree
///   broadcast, reduce                L a +           S b   pipelined tree
///   all_to_all                   (n-1) a +   (n-1)/n S b   direct, one peer after the other
///   exchange                           a +           S b   all messages at once; on two levels, on both links
///   barrier                          L a                   dissemination
/// The uneven forms cost what the even form of the same total costs. One rank costs nothing.
///
/// Source  Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005; Hensgen,
///         Finkel, Manber: Two algorithms for barrier synchronization, 1988.
[[nodiscard]] constexpr call_time time_of(collective kind, double bytes, int ranks, link l) noexcept {
    if (ranks <= 1) { return {}; }
    const int depth = 32 - std::countl_zero(static_cast<std::uint32_t>(ranks - 1));
    int steps = depth;
    if (kind == collective::all_reduce) { steps = 2 * depth; }
    if (kind == collective::all_to_all || kind == collective::all_to_all_v) { steps = ranks - 1; }
    if (kind == collective::exchange) { steps = 1; }
    return {steps * l.latency_seconds, 0, bus_factor(kind, ranks) * bytes / l.bytes_per_second};
}

namespace detail {
// A collective inside a node, as part of a longer one.
[[nodiscard]] constexpr call_time inside_node(collective kind, double bytes, int ranks, link l) noexcept {
    const call_time t = time_of(kind, bytes, ranks, l);
    return {t.latency, t.between, 0};
}
[[nodiscard]] constexpr call_time operator+(const call_time& a, const call_time& b) noexcept {
    return {a.latency + b.latency, a.inside + b.inside, a.between + b.between};
}
}  // namespace detail

/// Ranks on nodes, as far as the times of collectives depend on it: what they need of a topology, without its tables.
struct two_levels {
    int ranks = 1;
    int nodes = 1;
    int largest_node = 1;   ///< ranks of it
    int smallest_node = 1;  ///< ranks of it
    int ranks_per_nic = 1;
    link inside{};
    link between{};  ///< through one NIC
};

/// Time of a collective of `bytes` (message_bytes) on a two-level network: one level after the other, each as above.
///
/// With g ranks a node, m nodes, n = g m, and NICs shared by k ranks (so that each gets 1/k of the bandwidth between):
///   all_reduce       reduce_scatter(S) inside, all_reduce(S/g) between on all g ranks at once, all_gather(S) inside
///   reduce_scatter   reduce_scatter(S) inside, reduce_scatter(S/g) between;  all_gather the other way round
///   broadcast, scatter   between the leaders, then inside;  reduce, gather   the other way round; leaders do not share
///   all_to_all       direct: (g-1)/n of S inside, (n-g)/n of S between
///   exchange         between, with a NIC of its own
///   barrier          inside to the leader, between leaders, inside again
/// Nodes of different sizes: the inside is that of the largest node, the part that goes between that of the smallest.
/// One node, or one rank a node: exactly the flat formulas.
[[nodiscard]] constexpr call_time time_of(collective kind, double bytes, const two_levels& t) noexcept {
    using enum collective;
    using detail::operator+;
    const auto in = [&](collective k, double s) { return detail::inside_node(k, s, t.largest_node, t.inside); };
    if (t.nodes == 1) { return in(kind, bytes); }
    const int n = t.ranks;
    const int m = t.nodes;
    const link shared{t.between.latency_seconds, t.between.bytes_per_second / t.ranks_per_nic};
    const double part = bytes / t.smallest_node;
    switch (kind) {
    case all_reduce: return in(reduce_scatter, bytes) + time_of(all_reduce, part, m, shared) + in(all_gather, bytes);
    case reduce_scatter:
    case reduce_scatter_v: return in(reduce_scatter, bytes) + time_of(reduce_scatter, part, m, shared);
    case all_gather:
    case all_gather_v: return time_of(all_gather, part, m, shared) + in(all_gather, bytes);
    case broadcast:
    case reduce: return time_of(kind, bytes, m, t.between) + in(kind, bytes);
    case gather:
    case scatter: return time_of(kind, bytes, m, t.between) + in(kind, bytes * t.largest_node / n);
    case all_to_all:
    case all_to_all_v: {
        const int remote = n - t.smallest_node;
        return in(kind, bytes * t.largest_node / n) +
               call_time{remote * t.between.latency_seconds, 0, bytes * remote / n / shared.bytes_per_second};
    }
    case exchange: return time_of(kind, bytes, n, t.between);
    case barrier: return in(kind, 0) + time_of(kind, 0, m, t.between) + in(kind, 0);
    }
    return {};
}
/// The same on all ranks of a topology.
[[nodiscard]] inline call_time time_of(collective kind, double bytes, const topology& t) noexcept {
    return time_of(kind, bytes,
                   two_levels{t.ranks(), t.nodes(), t.largest_node(), t.smallest_node(), t.ranks_per_nic(), t.inside(),
                              t.between()});
}

/// Time of `c` as `rank` sees it. all_to_all_v and exchange count the rank's own messages, a link being busy as long as
/// the fuller of its two directions; the other collectives are priced by their size.
/// Errors  usage_error when the topology has no such rank.
[[nodiscard]] inline call_time time_of(const call& c, int rank, const topology& t) {
    if (c.kind != collective::all_to_all_v && c.kind != collective::exchange) {
        return time_of(c.kind, static_cast<double>(message_bytes(c, t.ranks())), t);
    }
    struct load {
        double sent = 0;
        double received = 0;
        int peers = 0;
        [[nodiscard]] double seconds(const link& l) const { return std::max(sent, received) / l.bytes_per_second; }
    };
    load local;
    load remote;
    const auto count = [&](int peer, std::size_t sent, std::size_t received) {
        if (peer == rank || (sent == 0 && received == 0)) { return; }
        load& at = t.same_node(rank, peer) ? local : remote;
        at.sent += static_cast<double>(sent);
        at.received += static_cast<double>(received);
        ++at.peers;
    };
    if (c.kind == collective::exchange) {
        for (const message& m : c.messages) { count(m.peer, m.sends ? m.bytes : 0, m.sends ? 0 : m.bytes); }
        // All messages leave at once: the latest latency covers the others.
        const double latency = std::max(local.peers > 0 ? t.inside().latency_seconds : 0,
                                        remote.peers > 0 ? t.between().latency_seconds : 0);
        return {latency, local.seconds(t.inside()), remote.seconds(t.between()), true};
    }
    for (int peer = 0; peer < t.ranks(); ++peer) {
        const auto p = static_cast<std::size_t>(peer);
        count(peer, c.send_counts[p] * c.element_size, c.recv_counts[p] * c.element_size);
    }
    return {local.peers * t.inside().latency_seconds + remote.peers * t.between().latency_seconds,
            local.seconds(t.inside()), remote.seconds(t.between()) * t.ranks_per_nic()};
}

}  // namespace tutti::comm
