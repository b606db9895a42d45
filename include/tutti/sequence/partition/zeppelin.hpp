// zeppelin: places sequences on one rank, on rings inside a node and on rings over nodes, so that all ranks compute as
// long as each other and as few transfers as possible cross nodes.
// Needs sequence/estimate and partition/even_ring. Host code without communication: every rank makes the same plan.
// Source: from Zeppelin (Chen et al., arXiv 2509.21841) are the hierarchy of local, intra-node and inter-node sequences
// chosen by the ratio of computing to communication, zigzag rings, and that far rings run first. How ring sizes are
// found and ranks chosen is ours, not the paper's Algorithms 1 and 2: sizes come from a sequence's share of the cost,
// with finer and finer cuts until loads are even; so are the thresholds, the use of an estimate, and the fallback.
#pragma once

#include <algorithm>    // lower_bound, max, min
#include <cmath>        // ceil, isfinite
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <functional>   // costs
#include <optional>     // transfers
#include <span>         // lengths
#include <string_view>  // reasons
#include <utility>      // move
#include <vector>       // loads

#include <tutti/core/error.hpp>                     // usage_error
#include <tutti/core/text.hpp>                      // formatted
#include <tutti/sequence/cost.hpp>                  // attention_cost, transfer_cost
#include <tutti/sequence/detail/rank_loads.hpp>     // which ranks come next
#include <tutti/sequence/estimate.hpp>              // rank_times
#include <tutti/sequence/packing.hpp>               // heaviest_first
#include <tutti/sequence/partition/even_ring.hpp>   // the fallback
#include <tutti/sequence/partition/ring_sizes.hpp>  // allowed sizes
#include <tutti/sequence/placement.hpp>             // placement

namespace tutti::sequence::partition {

/// How a plan was found.
enum class zeppelin_reason : unsigned char {
    balanced,      ///< within the tolerance
    least_loaded,  ///< the best of all cuts, above the tolerance
    even_faster,   ///< even rings, which are faster by the estimate
    no_room        ///< even rings: no cut found room within the capacity
};

[[nodiscard]] constexpr std::string_view name_of(zeppelin_reason r) noexcept {
    switch (r) {
    case zeppelin_reason::balanced: return "balanced within the tolerance";
    case zeppelin_reason::least_loaded: return "the best that was found, above the tolerance";
    case zeppelin_reason::even_faster: return "even rings are faster by the estimate";
    case zeppelin_reason::no_room: return "even rings, since the capacity leaves no room for others";
    }
    return "unknown";
}

struct zeppelin_options {
    /// Time of attention of a whole sequence on one rank. Only ratios matter, unless transfers are given.
    std::function<double(std::int64_t tokens)> cost = h100_forward;
    /// Given: ranks are charged for steps of rings and for what computing does not hide, and the plan is never slower
    /// than even rings by the estimate. Not given: the balance of computing alone counts.
    std::optional<transfer_cost> transfers{};
    /// Rings are not cut finer than this, unless capacity demands it: least_tokens_that_hide.
    least_tokens least{};
    /// Allowed sizes, ascending, such as powers_of_two(machines); empty: any. The fallback to all ranks always is.
    std::vector<int> ring_sizes{};
    /// A plan whose slowest rank is within (1 + eps) of the lower bound is good enough.
    double eps = 0.05;
    /// Cuts to try, from coarse to fine: no rank gets more than theta times the average load from one sequence.
    std::vector<double> thetas{1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05};

    /// What a machine with this cost and these links wants: transfers charged, and rings that hide them.
    [[nodiscard]] static zeppelin_options hiding(const attention_cost& cost, const transfer_cost& transfers) {
        zeppelin_options o;
        o.cost = cost;
        o.transfers = transfers;
        o.least = least_tokens_that_hide(cost, transfers);
        return o;
    }
};

struct zeppelin_plan {
    placement where{};
    double imbalance =
        1;             ///< slowest rank over the lower bound: by computing, or with transfers where they are charged
    double theta = 0;  ///< the cut that gave it; 0 of even rings
    zeppelin_reason reason = zeppelin_reason::balanced;
};

/// The partitioner.
///
/// Semantics    sequences go in order of length. One of cost w on k ranks loads each by w / k; k is the least allowed
///              size with w / k <= theta * average and room for its tokens, rings over several nodes being of whole
///              nodes. It goes to the ranks of one node, or to the nodes, that are least loaded afterwards; where there
///              is no room a larger ring is tried: inside a node the least of twice the size or more, or of the whole
///              node, over nodes the next. The first theta whose plan is within the tolerance wins, else the best plan
///              of all.
/// Guarantee    tokens of a rank <= capacity. With only local rings and no capacity the slowest rank is within
///              1 + theta * (1 - 1/D) of the lower bound. The plan of even rings, the fallback, needs the tokens to fit
///              into all ranks together, and may exceed the capacity of one by two tokens.
/// Determinism  of the arguments alone. Sequences of the same lengths in another order get the same ranks by length.
/// Cost         thetas * sequences * (ranks + nodes * log) at most; usually one to three thetas are tried.
/// Errors       usage_error: lengths, capacity or an option make no sense, more tokens than all ranks hold together, a
///              cost that is negative or not finite.
class zeppelin {
    zeppelin_options options_;

public:
    zeppelin() : zeppelin(zeppelin_options{}) {}
    explicit zeppelin(zeppelin_options o) : options_(std::move(o)) {
        if (!options_.cost) { throw usage_error("zeppelin: there is no cost"); }
        if (!std::isfinite(options_.eps) || options_.eps < 0) {
            throw usage_error(formatted("zeppelin: eps is {}", options_.eps));
        }
        if (options_.thetas.empty()) { throw usage_error("zeppelin: there is no theta to try"); }
        for (const double theta : options_.thetas) {
            if (!std::isfinite(theta) || theta <= 0) { throw usage_error(formatted("zeppelin: theta is {}", theta)); }
        }
        if (options_.least.node < 0 || options_.least.world < 0) {
            throw usage_error(formatted("zeppelin: a rank keeps at least {} and {} tokens", options_.least.node,
                                        options_.least.world));
        }
    }

    [[nodiscard]] const zeppelin_options& options() const noexcept { return options_; }

    [[nodiscard]] placement operator()(std::span<const std::int64_t> lengths, const cluster& machines,
                                       std::int64_t capacity = no_capacity) const {
        return plan(lengths, machines, capacity).where;
    }

    /// The placement, and how it was found.
    [[nodiscard]] zeppelin_plan plan(std::span<const std::int64_t> lengths, const cluster& machines,
                                     std::int64_t capacity = no_capacity) const {
        const std::int64_t total = sequence::detail::expect_placeable("zeppelin", lengths, machines, capacity);
        if (total / machines.ranks() + (total % machines.ranks() != 0 ? 1 : 0) > capacity) {
            throw usage_error(formatted("zeppelin: {} tokens are more than {} ranks hold at {} each", total,
                                        machines.ranks(), capacity));
        }
        problem p{lengths, machines, capacity, sequence::detail::seconds_by_sequence(lengths, options_.cost),
                  {},      {},       0};
        p.order = sequence::detail::heaviest_first(lengths);
        p.sizes = options_.ring_sizes.empty() ? all_ring_sizes(machines) : options_.ring_sizes;
        validate_ring_sizes(p.sizes, machines);
        for (const std::size_t s : p.order) { p.average += p.seconds[s] / machines.ranks(); }

        std::vector<ring> best;
        double best_imbalance = 0;
        double best_theta = 0;
        for (const double theta : options_.thetas) {
            auto rings = cut(p, theta);
            if (!rings) { continue; }
            const double found = imbalance(p, *rings);
            if (best_theta == 0 || found < best_imbalance) {
                best = *std::move(rings);
                best_imbalance = found;
                best_theta = theta;
            }
            if (best_imbalance <= 1 + options_.eps) { break; }
        }
        const bool balanced = best_imbalance <= 1 + options_.eps;
        zeppelin_plan result{
            {}, best_imbalance, best_theta, balanced ? zeppelin_reason::balanced : zeppelin_reason::least_loaded};
        if (best_theta != 0) { result.where = assembled(machines, lengths, std::move(best)); }
        // In the order of the finished plan, as `estimated` sums, so that both agree on which is faster.
        if (best_theta != 0 && options_.transfers) { result.imbalance = imbalance(p, result.where.rings); }
        const bool faster = options_.transfers && even_imbalance(p) < result.imbalance;
        if (best_theta == 0 || faster) {
            result.where = even_ring{}(lengths, machines, capacity);
            result.imbalance = options_.transfers ? even_imbalance(p) : imbalance(p, result.where.rings);
            result.theta = 0;
            result.reason = best_theta == 0 ? zeppelin_reason::no_room : zeppelin_reason::even_faster;
        }
        return result;
    }

private:
    struct problem {
        std::span<const std::int64_t> lengths;
        cluster machines;
        std::int64_t capacity;
        std::vector<double> seconds;     // by sequence
        std::vector<std::size_t> order;  // sequences, the longest first
        std::vector<int> sizes;          // of rings
        double average;                  // seconds a rank
    };

    [[nodiscard]] static zone zone_for(const problem& p, int size) noexcept {
        return size == 1 ? zone::local : size <= p.machines.ranks_per_node ? zone::node : zone::world;
    }

    // The smallest size of at least `least` ranks; sizes.size() when there is none.
    [[nodiscard]] static std::size_t size_from(const problem& p, double least) {
        const auto at =
            std::lower_bound(p.sizes.begin(), p.sizes.end(), least, [](int size, double l) { return size < l; });
        return static_cast<std::size_t>(at - p.sizes.begin());
    }

    // The size to start from, as an index: small enough pieces for theta and not too small ones to hide transfers, then
    // large enough for the capacity.
    [[nodiscard]] std::size_t first_size(const problem& p, std::size_t s, double limit) const {
        const double w = p.seconds[s];
        const std::int64_t length = p.lengths[s];
        // The small number forgives rounding in the quotient.
        const double wanted = w <= limit ? 1 : std::ceil(w / limit - 1e-9);
        std::size_t at = std::min(size_from(p, wanted), p.sizes.size() - 1);
        const auto hides = [&](int size) { return length / size >= options_.least.of(zone_for(p, size)); };
        while (at > 0 && !hides(p.sizes[at])) { --at; }
        while (at < p.sizes.size() && most_tokens(length, p.sizes[at]) > p.capacity) { ++at; }
        return at;
    }

    // What a ring adds to the load of each of its ranks.
    [[nodiscard]] double load_of(const problem& p, std::size_t s, int size) const {
        if (!options_.transfers || size == 1) { return p.seconds[s] / size; }
        const double tokens = static_cast<double>(p.lengths[s]) / size;
        const double step = p.seconds[s] / size / size + options_.transfers->step(tokens);
        const double sending = options_.transfers->bytes_per_token * tokens /
                               options_.transfers->link_of(zone_for(p, size)).bytes_per_second;
        return step + (size - 1) * std::max(step, sending);
    }

    // Rings of all sequences, none of which loads a rank by more than theta * average; nothing where there is no room.
    [[nodiscard]] std::optional<std::vector<ring>> cut(const problem& p, double theta) const {
        const int width = p.machines.ranks_per_node;
        sequence::detail::rank_loads loads(p.machines, p.capacity);
        std::vector<ring> rings;
        rings.reserve(p.order.size());
        for (const std::size_t s : p.order) {
            std::size_t at = first_size(p, s, theta * p.average);
            std::span<const int> ranks;
            for (; at < p.sizes.size();
                 at = p.sizes[at] < width ? size_from(p, std::min(width, 2 * p.sizes[at])) : at + 1) {
                ranks = loads.choose(p.sizes[at], most_tokens(p.lengths[s], p.sizes[at]));
                if (!ranks.empty()) { break; }
            }
            if (ranks.empty()) { return std::nullopt; }
            loads.add(ranks, p.lengths[s], load_of(p, s, p.sizes[at]));
            rings.push_back({static_cast<int>(s), zone_for(p, p.sizes[at]), {ranks.begin(), ranks.end()}});
        }
        return rings;
    }

    // The slowest rank over the average. Without transfers by the larger of two measures of computing: even shares of
    // each ring, and shares by the pairs of queries and keys that chunks really have.
    [[nodiscard]] double imbalance(const problem& p, std::span<const ring> rings) const {
        if (p.average == 0) { return 1; }
        double slowest = 0;
        if (options_.transfers) {
            for (const rank_time& t :
                 sequence::detail::rank_times(rings, p.seconds, p.lengths, p.machines, *options_.transfers)) {
                slowest = std::max(slowest, t.seconds());
            }
            return slowest / p.average;
        }
        std::vector<double> even(static_cast<std::size_t>(p.machines.ranks()));
        std::vector<double> by_pairs(even.size());
        for (const ring& r : rings) {
            const auto s = static_cast<std::size_t>(r.sequence);
            const int size = static_cast<int>(r.ranks.size());
            const double pairs = pairs_of({r.sequence, 0, p.lengths[s]});
            for (int i = 0; i < size; ++i) {
                const auto rank = static_cast<std::size_t>(r.ranks[static_cast<std::size_t>(i)]);
                even[rank] += p.seconds[s] / size;
                const double own = pairs_of(chunk_of(r.sequence, p.lengths[s], i, size)) +
                                   pairs_of(chunk_of(r.sequence, p.lengths[s], 2 * size - 1 - i, size));
                by_pairs[rank] += pairs > 0 ? p.seconds[s] * own / pairs : 0;
            }
        }
        for (std::size_t r = 0; r < even.size(); ++r) { slowest = std::max({slowest, even[r], by_pairs[r]}); }
        return slowest / p.average;
    }

    // The same of even rings with transfers, which load all ranks alike.
    [[nodiscard]] double even_imbalance(const problem& p) const {
        if (p.average == 0) { return 1; }
        const int ranks = p.machines.ranks();
        sequence::detail::rank_rings rings;
        for (std::size_t s = 0; s < p.lengths.size(); ++s) {
            rings.add(ranks, zone_for(p, ranks), p.seconds[s], p.lengths[s], *options_.transfers);
        }
        return rings.time(*options_.transfers).seconds() / p.average;
    }
};

}  // namespace tutti::sequence::partition
