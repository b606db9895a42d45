// estimate: how long attention of a placement takes by the model: computing, and what of the transfers it cannot hide.
// Needs sequence/cost. Nothing is measured here; a partitioner may use it to choose, a bench to set beside the clock.
#pragma once

#include <algorithm>  // max, stable_sort
#include <array>      // by zone
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
    double computing = 0;  ///< seconds
    double waiting = 0;    ///< seconds for keys and values that no computing hides
    std::int64_t tokens = 0;
    [[nodiscard]] constexpr double seconds() const noexcept { return computing + waiting; }
    friend constexpr bool operator==(const rank_time&, const rank_time&) = default;
};

/// Times of a placement, in seconds.
struct placement_time {
    std::vector<rank_time> ranks{};
    double attention = 0;        ///< of the slowest rank
    double lower_bound = 0;      ///< of any placement: all computing spread evenly, no waiting
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
    std::stable_sort(rings.begin(), rings.end(), [](const ring_step& a, const ring_step& b) { return a.size < b.size; });
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

// seconds[i]: attention of the whole sequence i on one rank.
[[nodiscard]] inline std::vector<rank_time> rank_times(std::span<const ring> rings, std::span<const double> seconds,
                                                       std::span<const std::int64_t> lengths, const cluster& machines,
                                                       const transfer_cost& transfers) {
    const auto ranks = static_cast<std::size_t>(machines.ranks());
    std::vector<rank_time> times(ranks);
    std::array<std::vector<std::vector<ring_step>>, 2> steps{std::vector<std::vector<ring_step>>(ranks),
                                                             std::vector<std::vector<ring_step>>(ranks)};
    for (const ring& r : rings) {
        const auto s = static_cast<std::size_t>(r.sequence);
        const auto size = static_cast<double>(r.ranks.size());
        const ring_step step{static_cast<int>(r.ranks.size()), seconds[s] / size / size,
                             transfers.bytes_per_token * static_cast<double>(lengths[s]) / size /
                                 transfers.link_of(r.where).bytes_per_second};
        for (const int rank : r.ranks) {
            const auto at = static_cast<std::size_t>(rank);
            times[at].computing += seconds[s] / size;
            if (r.where != zone::local) { steps[r.where == zone::world ? 1 : 0][at].push_back(step); }
        }
    }
    for (std::size_t at = 0; at < ranks; ++at) {
        for (const zone z : {zone::node, zone::world}) {
            auto& mine = steps[z == zone::world ? 1 : 0][at];
            double computing = 0;
            for (const ring_step& r : mine) { computing += r.size * r.computing; }
            const double all = seconds_of_rounds(mine, transfers.link_of(z).latency_seconds);
            times[at].waiting += std::max(0.0, all - computing);
        }
    }
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

/// Times of a placement whose rings are run zone after zone, all rings of a zone in common rounds.
///
/// Semantics    cost(s) is the time of a whole sequence on one rank, for forward or for what else `transfers` counts the
///              bytes of. A ring of G ranks computes cost / G^2 a step and passes s / G tokens on meanwhile. Each rank is
///              taken by itself, as if others were never late; nothing of one zone hides what another waits for, which
///              an engine may do better.
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
