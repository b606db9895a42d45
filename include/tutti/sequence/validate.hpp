// validate: whether a placement keeps its promises, and whether ranks that run rings in given orders can all finish.
// Needs sequence/placement. For placements that come from elsewhere, and for tests: partitioners make valid ones.
#pragma once

#include <algorithm>  // sort, max
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <span>       // orders
#include <string>     // messages
#include <vector>     // tables

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence {

namespace detail {
struct owned_piece {
    piece what;
    int rank = 0;
};

inline void validate_coverage(const placement& p) {
    std::vector<std::vector<owned_piece>> of(p.lengths.size());
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        for (const piece& q : p.pieces[rank]) {
            if (q.sequence < 0 || static_cast<std::size_t>(q.sequence) >= of.size()) {
                throw usage_error(formatted("placement: rank {} has a piece of sequence {}, of {} sequences", rank,
                                            q.sequence, of.size()));
            }
            const auto s = static_cast<std::size_t>(q.sequence);
            if (q.begin < 0 || q.begin > q.end || q.end > p.lengths[s]) {
                throw usage_error(formatted("placement: rank {}: [{}, {}) are no tokens of sequence {}, which has {}",
                                            rank, q.begin, q.end, q.sequence, p.lengths[s]));
            }
            if (q.begin < q.end) { of[s].push_back({q, static_cast<int>(rank)}); }
        }
    }
    for (std::size_t s = 0; s < of.size(); ++s) {
        std::sort(of[s].begin(), of[s].end(), [](const owned_piece& a, const owned_piece& b) {
            return a.what.begin != b.what.begin ? a.what.begin < b.what.begin : a.rank < b.rank;
        });
        std::int64_t covered = 0;
        int last = -1;
        for (const owned_piece& o : of[s]) {
            if (o.what.begin > covered) {
                throw usage_error(formatted("placement: sequence {}: tokens [{}, {}) are on no rank; rank {} goes on",
                                            s, covered, o.what.begin, o.rank));
            }
            if (o.what.begin < covered) {
                throw usage_error(formatted("placement: sequence {}: token {} is on rank {} and on rank {}", s,
                                            o.what.begin, last, o.rank));
            }
            covered = o.what.end;
            last = o.rank;
        }
        if (covered != p.lengths[s]) {
            throw usage_error(
                formatted("placement: sequence {}: tokens [{}, {}) are on no rank", s, covered, p.lengths[s]));
        }
    }
}

[[noreturn]] inline void refuse_ring(const ring& r, const std::string& what) {
    throw usage_error(formatted("placement: the ring of sequence {} {}", r.sequence, what));
}

// `last_of`, by rank: the number, from 1 on, of the ring that had it last.
inline void validate_ring(const ring& r, const placement& p, std::size_t number, std::vector<std::size_t>& last_of) {
    if (r.sequence < 0 || static_cast<std::size_t>(r.sequence) >= p.lengths.size()) {
        refuse_ring(r, formatted("has no sequence: there are {}", p.lengths.size()));
    }
    if (r.ranks.empty()) { refuse_ring(r, "has no rank"); }
    for (const int rank : r.ranks) {
        if (rank < 0 || rank >= p.machines.ranks()) {
            refuse_ring(r, formatted("has rank {}, of {} ranks", rank, p.machines.ranks()));
        }
        std::size_t& last = last_of[static_cast<std::size_t>(rank)];
        if (last == number) { refuse_ring(r, formatted("has rank {} twice", rank)); }
        last = number;
    }
    const zone reached = zone_of(p.machines, r.ranks);
    if (r.where != reached) {
        refuse_ring(r, formatted("is said to be {}, its ranks {} are {}", name_of(r.where), list_of(r.ranks),
                                 name_of(reached)));
    }
}

// The ranks of a node are neighbors in the ring, and all of them where there are several nodes.
inline void validate_nodes(const ring& r, const placement& p) {
    std::vector<int> in_node(static_cast<std::size_t>(p.machines.nodes));  // ranks of the ring
    for (std::size_t i = 0; i < r.ranks.size(); ++i) {
        const int node = p.machines.node_of(r.ranks[i]);
        int& seen = in_node[static_cast<std::size_t>(node)];
        if (seen > 0 && p.machines.node_of(r.ranks[i - 1]) != node) {
            refuse_ring(r, formatted("comes back to node {} with rank {}", node, r.ranks[i]));
        }
        ++seen;
    }
    for (const int rank : r.ranks) {
        const int node = p.machines.node_of(rank);
        const int there = in_node[static_cast<std::size_t>(node)];
        if (r.where == zone::world && there != p.machines.ranks_per_node) {
            refuse_ring(r, formatted("has rank {} and {} of the {} ranks of node {}, not whole nodes", rank, there,
                                     p.machines.ranks_per_node, node));
        }
    }
}

// Without empty pieces, and neighbors joined: what lies in memory.
[[nodiscard]] inline std::vector<piece> in_memory(std::span<const piece> pieces) {
    std::vector<piece> out;
    for (const piece& q : pieces) {
        if (q.size() == 0) { continue; }
        if (!out.empty() && out.back().sequence == q.sequence && out.back().end == q.begin) {
            out.back().end = q.end;
        } else {
            out.push_back(q);
        }
    }
    return out;
}
}  // namespace detail

/// The promises of pieces alone: every token of every sequence is on one rank, and no rank has more than `capacity`.
/// Errors  usage_error that names sequence and rank.
inline void validate_pieces(const placement& p, std::int64_t capacity = no_capacity) {
    (void)detail::expect_placeable("placement", p.lengths, p.machines, capacity);
    if (p.pieces.size() != static_cast<std::size_t>(p.machines.ranks())) {
        throw usage_error(
            formatted("placement: pieces of {} ranks are given for {}", p.pieces.size(), p.machines.ranks()));
    }
    detail::validate_coverage(p);
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        if (tokens_of(p.pieces[rank]) > capacity) {
            throw usage_error(formatted("placement: rank {} has {} tokens, its capacity is {}", rank,
                                        tokens_of(p.pieces[rank]), capacity));
        }
    }
}

namespace detail {
// Pieces are known to be whole.
inline void validate_order_and_places(const placement& p) {
    std::vector<bool> seen(p.lengths.size());
    std::vector<std::size_t> last_of(static_cast<std::size_t>(p.machines.ranks()));
    for (std::size_t i = 0; i < p.rings.size(); ++i) {
        validate_ring(p.rings[i], p, i + 1, last_of);
        const auto s = static_cast<std::size_t>(p.rings[i].sequence);
        if (seen[s]) { throw usage_error(formatted("placement: sequence {} has two rings", s)); }
        seen[s] = true;
        if (i > 0 && !runs_before(p.rings[i - 1], p.rings[i])) {
            throw usage_error(
                formatted("placement: the ring of sequence {} ({}) stands behind that of sequence {} ({}), "
                          "against the order that all ranks share",
                          s, name_of(p.rings[i].where), p.rings[i - 1].sequence, name_of(p.rings[i - 1].where)));
        }
    }
    for (std::size_t s = 0; s < seen.size(); ++s) {
        if (!seen[s] && p.lengths[s] != 0) { throw usage_error(formatted("placement: sequence {} has no ring", s)); }
    }
    const placement expected = assembled(p.machines, p.lengths, p.rings);
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        const auto has = in_memory(p.pieces[rank]);
        const auto should = in_memory(expected.pieces[rank]);
        for (std::size_t i = 0; i < std::max(has.size(), should.size()); ++i) {
            if (i < has.size() && i < should.size() && has[i] == should[i]) { continue; }
            const piece& q = i < has.size() ? has[i] : should[i];
            throw usage_error(
                formatted("placement: rank {}: tokens [{}, {}) of sequence {} are not where the rings put "
                          "them",
                          rank, q.begin, q.end, q.sequence));
        }
    }
}
}  // namespace detail

/// What attention over rings needs: pieces that have every token once; a ring for every sequence that has tokens, of
/// distinct ranks; rings in their order; pieces that are what the rings say.
/// Semantics  pieces may be cut finer or coarser than the rings' chunks, as long as memory holds the same tokens.
/// Errors     usage_error that names sequence and rank.
inline void validate_rings(const placement& p) {
    validate_pieces(p);
    detail::validate_order_and_places(p);
}

/// All promises of a placement: those above; on no rank more than `capacity` tokens; rings whose ranks of a node are
/// neighbors, and of several nodes all.
/// Errors  usage_error that names sequence and rank.
inline void validate(const placement& p, std::int64_t capacity = no_capacity) {
    validate_pieces(p, capacity);
    detail::validate_order_and_places(p);
    for (const ring& r : p.rings) { detail::validate_nodes(r, p); }
}

/// Whether ranks that each run their rings one after the other, in an order of their own, can all finish.
///
/// Semantics  orders[rank] lists numbers of `rings`, those that the rank is in, each once. A ring runs when all its
///            ranks have come to it, so orders that contradict each other, over any number of ranks, never end. The one
///            order of a placement cannot; orders by local load can.
/// Cost       linear in the sizes of the rings.
/// Errors     usage_error that names the sequences and ranks of a circle, or a rank whose list is not of its rings.
inline void validate_order(std::span<const ring> rings, std::span<const std::vector<std::size_t>> orders) {
    struct step {
        std::size_t ring = 0;
        int rank = 0;
    };
    std::vector<std::vector<step>> before(rings.size());  // what a ring waits for, and on which rank
    std::vector<std::size_t> listed(rings.size());        // by how many of its ranks
    std::vector<std::vector<std::size_t>> rings_of(orders.size());
    for (std::size_t at = 0; at < rings.size(); ++at) {
        for (const int rank : rings[at].ranks) {
            if (rank >= 0 && static_cast<std::size_t>(rank) < orders.size()) {
                rings_of[static_cast<std::size_t>(rank)].push_back(at);
            }
        }
    }
    std::vector<bool> due(rings.size());  // the rank is in the ring, and has not listed it yet
    for (std::size_t rank = 0; rank < orders.size(); ++rank) {
        for (const std::size_t at : rings_of[rank]) { due[at] = true; }
        for (std::size_t i = 0; i < orders[rank].size(); ++i) {
            const std::size_t at = orders[rank][i];
            if (at >= rings.size() || !due[at]) {
                throw usage_error(
                    formatted("placement: rank {} lists ring {}, which it is not in, or lists twice", rank, at));
            }
            due[at] = false;
            ++listed[at];
            if (i > 0) { before[at].push_back({orders[rank][i - 1], static_cast<int>(rank)}); }
        }
        for (const std::size_t at : rings_of[rank]) { due[at] = false; }
    }
    for (std::size_t at = 0; at < rings.size(); ++at) {
        if (listed[at] != rings[at].ranks.size()) {
            throw usage_error(formatted("placement: the ring of sequence {} is listed by {} of its {} ranks",
                                        rings[at].sequence, listed[at], rings[at].ranks.size()));
        }
    }
    // Depth first along what is waited for; a ring that is met again while it is open closes a circle.
    enum class state : unsigned char { fresh, open, done };
    std::vector<state> states(rings.size(), state::fresh);
    struct frame {
        std::size_t ring = 0;
        std::size_t next = 0;  // of before[ring]
    };
    for (std::size_t root = 0; root < rings.size(); ++root) {
        std::vector<frame> stack;
        if (states[root] == state::fresh) { stack.push_back({root, 0}); }
        while (!stack.empty()) {
            const std::size_t at = stack.back().ring;
            states[at] = state::open;
            if (stack.back().next == before[at].size()) {
                states[at] = state::done;
                stack.pop_back();
                continue;
            }
            const step s = before[at][stack.back().next++];
            if (states[s.ring] == state::fresh) { stack.push_back({s.ring, 0}); }
            if (states[s.ring] != state::open) { continue; }
            std::string circle;
            for (std::size_t i = stack.size(); i-- > 0;) {
                const step& waited = before[stack[i].ring][stack[i].next - 1];
                circle += formatted("{}rank {} runs sequence {} before sequence {}", circle.empty() ? "" : ", ",
                                    waited.rank, rings[waited.ring].sequence, rings[stack[i].ring].sequence);
                if (stack[i].ring == s.ring) { break; }
            }
            throw usage_error("placement: rings wait for each other: " + circle);
        }
    }
}

}  // namespace tutti::sequence
