// estimate: how long attention of a placement takes by the model: computing, steps of rings, and what of the transfers
// neither hides.
// Needs sequence/cost. Nothing is measured here; a partitioner may use it to choose, a bench to set beside the clock.
#pragma once

#include <algorithm>  // max, stable_sort
#include <cmath>      // isfinite
#include <concepts>   // costs
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <span>       // rings
#include <vector>     // ranks

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/cost.hpp>       // transfer_cost
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence {

/// What one rank does in attention.
struct rank_time {
    double computing = 0;  ///< seconds of attention
    double waiting = 0;    ///< seconds for keys, values and gradients that no computing hides
    std::int64_t tokens = 0;
    double steps = 0;  ///< seconds of the steps of rings beside attention
    [[nodiscard]] constexpr double seconds() const noexcept { return computing + steps + waiting; }
    friend constexpr bool operator==(const rank_time&, const rank_time&) = default;
};

/// Times of a placement, in seconds.
struct placement_time {
    std::vector<rank_time> ranks{};
    double attention = 0;        ///< of the slowest rank
    double lower_bound = 0;      ///< of any placement: all attention spread evenly, no waiting, no steps
    double linear = 0;           ///< modules that see each token by itself, on the rank with the most tokens
    double linear_remapped = 0;  ///< the same when tokens are spread evenly for them
};

namespace detail {
// One ring as one of its ranks sees it, by step.
struct ring_step {
    int size = 0;
    double computing = 0;
    double sending = 0;
};

// Rings of one zone advance together. In a round every rank passes on the keys and values of all its rings that go on,
// in one exchange, while it computes what arrived in the round before.
[[nodiscard]] inline double seconds_of_rounds(std::vector<ring_step>& rings, double latency) {
    std::stable_sort(rings.begin(), rings.end(),
                     [](const ring_step& a, const ring_step& b) { return a.size < b.size; });
    // Sums from each ring to the largest: rings still going.
    double computing = 0;
    double sending = 0;
    for (std::size_t i = rings.size(); i-- > 0;) {
        computing = rings[i].computing += computing;
        sending = rings[i].sending += sending;
    }
    double seconds = 0;
    int done = 0;  // rounds
    for (std::size_t first = 0; first < rings.size();) {
        const ring_step going = rings[first];
        while (first < rings.size() && rings[first].size == going.size) { ++first; }
        const double next = first < rings.size() ? latency + rings[first].sending : 0;
        seconds += (going.size - 1 - done) * std::max(going.computing, latency + going.sending);
        seconds += std::max(going.computing, next);  // the last round of the rings that end here
        done = going.size;
    }
    return seconds;
}

// The rings of one rank.
class rank_rings {
    double locals_ = 0;  // seconds of sequences of one rank
    double shares_ = 0;  // of attention in rings
    double steps_ = 0;
    std::vector<ring_step> node_;
    std::vector<ring_step> world_;

public:
    // `count` sequences, each a ring of the same `size` ranks; seconds: of a whole sequence on one rank.
    void add(int size, zone where, double seconds, std::int64_t length, const transfer_cost& transfers,
             double count = 1) {
        const double share = count * seconds / size;
        if (where == zone::local) {
            locals_ += share;
            return;
        }
        const double tokens = static_cast<double>(length) / size;
        const comm::link& link = transfers.link_of(where);
        const double step = count * transfers.step(tokens);
        shares_ += share;
        steps_ += size * step;
        (where == zone::world ? world_ : node_)
            .push_back({size, share / size + step, count * transfers.bytes_per_token * tokens / link.bytes_per_second});
    }
    // Uses up the rings.
    [[nodiscard]] rank_time time(const transfer_cost& transfers) {
        rank_time t{locals_ + shares_, 0, 0, steps_};
        for (const zone z : {zone::world, zone::node}) {
            auto& rings = z == zone::world ? world_ : node_;
            double alone = 0;
            for (const ring_step& r : rings) { alone += r.size * r.computing; }
            t.waiting += std::max(0.0, seconds_of_rounds(rings, transfers.link_of(z).latency_seconds) - alone);
        }
        return t;
    }
};

// seconds: by sequence, of the whole of it on one rank.
[[nodiscard]] inline std::vector<rank_time> rank_times(std::span<const ring> rings, std::span<const double> seconds,
                                                       std::span<const std::int64_t> lengths, const cluster& machines,
                                                       const transfer_cost& transfers) {
    std::vector<rank_rings> by_rank(static_cast<std::size_t>(machines.ranks()));
    for (const ring& r : rings) {
        const auto s = static_cast<std::size_t>(r.sequence);
        for (const int rank : r.ranks) {
            by_rank[static_cast<std::size_t>(rank)].add(static_cast<int>(r.ranks.size()), r.where, seconds[s],
                                                        lengths[s], transfers);
        }
    }
    std::vector<rank_time> times;
    for (rank_rings& r : by_rank) { times.push_back(r.time(transfers)); }
    return times;
}

// By sequence; nothing for empty ones.
template <class Cost>
[[nodiscard]] std::vector<double> seconds_by_sequence(std::span<const std::int64_t> lengths, const Cost& cost) {
    std::vector<double> seconds;
    seconds.reserve(lengths.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const double w = lengths[i] == 0 ? 0.0 : static_cast<double>(cost(lengths[i]));
        if (!std::isfinite(w) || w < 0) {
            throw usage_error(formatted("cost: sequence {} of {} tokens costs {}", i, lengths[i], w));
        }
        seconds.push_back(w);
    }
    return seconds;
}
}  // namespace detail

/// What one of `ranks` does in `sequences` of `tokens` each that all of them share: the times of `estimated` for
/// partition::even_ring, without a placement. `seconds`: of attention of one whole sequence on one rank.
[[nodiscard]] inline rank_time time_of_even_rings(int ranks, zone where, double seconds, std::int64_t tokens,
                                                  std::int64_t sequences, const transfer_cost& transfers) {
    if (sequences == 0) { return {}; }
    detail::rank_rings rings;
    rings.add(ranks, where, seconds, tokens, transfers, static_cast<double>(sequences));
    rank_time t = rings.time(transfers);
    t.tokens = sequences * tokens / ranks;
    return t;
}

/// Times of a placement whose rings are run zone after zone, all rings of a zone in common rounds.
///
/// Semantics    cost(s) is the time of a whole sequence on one rank, for forward or for what else `transfers` counts
///              the bytes of. A ring of G ranks computes cost / G^2 a step, takes transfers.step(s / G) beside it, and
///              passes s / G tokens on meanwhile. Each rank is taken by itself, as if others were never late; nothing of
///              one zone, and no sequence of one rank, hides what a ring waits for, which an engine may do better.
/// Determinism  of the arguments alone.
/// Cost         ranks of all rings, and a sort a rank.
/// Errors       usage_error when a cost is negative or not finite, or the placement has sequences but no rings.
template <std::invocable<std::int64_t> Cost>
[[nodiscard]] placement_time estimated(const placement& p, const Cost& cost, const transfer_cost& transfers = {},
                                       const linear_cost& linear = {}) {
    if (p.rings.size() != p.lengths.size()) {
        throw usage_error(
            formatted("estimate: {} rings for {} sequences; only rings have a time", p.rings.size(), p.lengths.size()));
    }
    const auto seconds = detail::seconds_by_sequence(p.lengths, cost);
    placement_time t;
    t.ranks = detail::rank_times(p.rings, seconds, p.lengths, p.machines, transfers);
    std::int64_t all = 0;
    std::int64_t most = 0;
    for (std::size_t rank = 0; rank < t.ranks.size(); ++rank) {
        rank_time& r = t.ranks[rank];
        r.tokens = tokens_of(p.pieces[rank]);
        all += r.tokens;
        most = std::max(most, r.tokens);
        t.attention = std::max(t.attention, r.seconds());
    }
    for (const double w : seconds) { t.lower_bound += w / p.machines.ranks(); }
    t.linear = linear(most);
    t.linear_remapped = linear(all / p.machines.ranks() + (all % p.machines.ranks() != 0 ? 1 : 0));
    return t;
}

}  // namespace tutti::sequence
