// token_moves: how many tokens go from which rank to which, so that all have the same number. A pure function of counts.
// Needs sequence/placement. Zeppelin (Chen et al., EuroSys 2026) calls this the transfer matrix of its remapping layer.
#pragma once

#include <algorithm>  // max, min, sort
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <limits>     // overflow
#include <numeric>    // iota
#include <span>       // counts
#include <vector>     // moves

#include <tutti/core/error.hpp>                     // usage_error
#include <tutti/core/text.hpp>                      // formatted
#include <tutti/sequence/detail/min_cost_flow.hpp>  // cheapest_transport
#include <tutti/sequence/placement.hpp>             // cluster

namespace tutti::sequence {

/// `tokens` > 0 tokens leave `from` for `to`.
struct token_move {
    int from = 0;
    int to = 0;
    std::int64_t tokens = 0;
    friend constexpr bool operator==(const token_move&, const token_move&) = default;
};

namespace detail {

[[nodiscard]] inline std::int64_t sum_of_tokens(std::span<const std::int64_t> tokens) {
    std::int64_t sum = 0;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
        if (tokens[r] < 0) { throw usage_error(formatted("token moves: rank {} has {} tokens", r, tokens[r])); }
        if (tokens[r] > std::numeric_limits<std::int64_t>::max() - sum) {
            throw usage_error("token moves: the number of all tokens overflows");
        }
        sum += tokens[r];
    }
    return sum;
}

/// What ranks have too much of, and too little.
struct imbalance {
    std::vector<std::int64_t> surplus;
    std::vector<std::int64_t> deficit;

    imbalance(std::span<const std::int64_t> current, std::span<const std::int64_t> target) {
        if (current.size() != target.size()) {
            throw usage_error(
                formatted("token moves: {} ranks have tokens, {} have a target", current.size(), target.size()));
        }
        if (sum_of_tokens(current) != sum_of_tokens(target)) {
            throw usage_error(formatted("token moves: there are {} tokens, the targets add up to {}",
                                        sum_of_tokens(current), sum_of_tokens(target)));
        }
        for (std::size_t r = 0; r < current.size(); ++r) {
            surplus.push_back(std::max<std::int64_t>(0, current[r] - target[r]));
            deficit.push_back(std::max<std::int64_t>(0, target[r] - current[r]));
        }
    }
};

/// `total` dealt in proportion to `weights`, whose sum is at least `total`; no share is larger than its weight.
[[nodiscard]] inline std::vector<std::int64_t> in_proportion(std::int64_t total,
                                                             std::span<const std::int64_t> weights) {
    __extension__ using wide = unsigned __int128;  // a product of two numbers of tokens
    const auto all = static_cast<wide>(sum_of_tokens(weights));
    std::vector<std::int64_t> shares;
    wide passed = 0;
    std::int64_t dealt = 0;
    for (const std::int64_t w : weights) {
        passed += static_cast<wide>(w);
        const auto until = all == 0 ? 0 : static_cast<std::int64_t>(static_cast<wide>(total) * passed / all);
        shares.push_back(until - dealt);
        dealt = until;
    }
    return shares;
}

/// Appends moves that use up both, the first surplus with the first deficit: fewer moves than ranks that take part.
/// Index 0 is rank `first`.
inline void pair_in_order(std::vector<std::int64_t> surplus, std::vector<std::int64_t> deficit, std::size_t first,
                          std::vector<token_move>& moves) {
    std::size_t to = 0;
    for (std::size_t from = 0; from < surplus.size(); ++from) {
        while (surplus[from] > 0) {
            while (deficit[to] == 0) { ++to; }
            const std::int64_t tokens = std::min(surplus[from], deficit[to]);
            moves.push_back({static_cast<int>(first + from), static_cast<int>(first + to), tokens});
            surplus[from] -= tokens;
            deficit[to] -= tokens;
        }
    }
}

inline void sort_moves(std::vector<token_move>& moves) {
    std::sort(moves.begin(), moves.end(), [](const token_move& a, const token_move& b) {
        return a.from != b.from ? a.from < b.from : a.to < b.to;
    });
}

}  // namespace detail

/// The mean of `tokens` for every rank, rounded down, and one more for as many as it takes: for those that have most,
/// of equals the first. So the least number of tokens has to move.
/// Errors  usage_error when there is no rank, a number is negative, or the sum overflows.
[[nodiscard]] inline std::vector<std::int64_t> balanced_tokens(std::span<const std::int64_t> tokens) {
    if (tokens.empty()) { throw usage_error("token moves: there is no rank"); }
    const std::int64_t all = detail::sum_of_tokens(tokens);
    const auto ranks = static_cast<std::int64_t>(tokens.size());
    std::vector<std::size_t> by_tokens(tokens.size());
    std::iota(by_tokens.begin(), by_tokens.end(), std::size_t{0});
    std::stable_sort(by_tokens.begin(), by_tokens.end(),
                     [&](std::size_t a, std::size_t b) { return tokens[a] > tokens[b]; });
    std::vector<std::int64_t> target(tokens.size(), all / ranks);
    for (std::int64_t i = 0; i < all % ranks; ++i) { ++target[by_tokens[static_cast<std::size_t>(i)]]; }
    return target;
}

/// Moves from `current` to `target` tokens a rank that prefer to stay inside nodes.
///
/// Semantics    inside a node, surpluses fill deficits; only what then is left crosses, each rank of the node giving or
///              taking its part in proportion, so that no NIC does it all.
/// Optimality   with S and T the sums of surpluses and deficits of a node, S - T of its tokens have no room there, and
///              exactly max(0, S - T) leave it. So no other moves send fewer tokens between nodes, nor, where a token
///              costs more between nodes than inside, cost less. Moved in all: the sum of all surpluses.
/// Determinism  a function of the arguments; sorted by (from, to). A rank only gives or only takes.
/// Cost         linear in ranks and moves; fewer than 2 moves a rank.
/// Errors       usage_error when the numbers of ranks differ, the sums differ or overflow, or a number is negative.
[[nodiscard]] inline std::vector<token_move> moves_inside_first(const cluster& machines,
                                                                std::span<const std::int64_t> current,
                                                                std::span<const std::int64_t> target) {
    detail::imbalance left(current, target);
    if (machines.nodes < 1 || machines.ranks_per_node < 1 ||
        static_cast<std::size_t>(machines.nodes) * static_cast<std::size_t>(machines.ranks_per_node) !=
            current.size()) {
        throw usage_error(formatted("token moves: {} nodes of {} ranks for {} ranks", machines.nodes,
                                    machines.ranks_per_node, current.size()));
    }
    std::vector<token_move> moves;
    const auto ranks = static_cast<std::size_t>(machines.ranks_per_node);
    for (std::size_t first = 0; first < current.size(); first += ranks) {
        const auto surplus = std::span(left.surplus).subspan(first, ranks);
        const auto deficit = std::span(left.deficit).subspan(first, ranks);
        const std::int64_t inside = std::min(detail::sum_of_tokens(surplus), detail::sum_of_tokens(deficit));
        const auto given = detail::in_proportion(inside, surplus);
        const auto taken = detail::in_proportion(inside, deficit);
        for (std::size_t r = 0; r < ranks; ++r) {
            surplus[r] -= given[r];
            deficit[r] -= taken[r];
        }
        detail::pair_in_order(given, taken, first, moves);
    }
    detail::pair_in_order(left.surplus, left.deficit, 0, moves);
    detail::sort_moves(moves);
    return moves;
}

/// The moves from `current` to `target` tokens a rank of which the sum of cost[from * ranks + to] * tokens is least.
///
/// Units        any, such as nanoseconds a token; the diagonal plays no part.
/// Determinism  a function of the arguments, exact in integers; sorted by (from, to).
/// Cost         successive shortest paths: O(ranks^2) for each, some paths a rank. A millisecond at 64 ranks.
/// Errors       as above; usage_error also when costs are not one for each pair, or not in 0 ... 2^40.
[[nodiscard]] inline std::vector<token_move> moves_of_least_cost(std::span<const std::int64_t> cost,
                                                                 std::span<const std::int64_t> current,
                                                                 std::span<const std::int64_t> target) {
    const detail::imbalance left(current, target);
    const std::size_t ranks = current.size();
    if (cost.size() != ranks * ranks) {
        throw usage_error(formatted("token moves: {} costs for {} ranks", cost.size(), ranks));
    }
    constexpr std::int64_t most = std::int64_t{1} << 40;  // paths of a million ranks do not overflow
    for (std::size_t i = 0; i < cost.size(); ++i) {
        if (cost[i] < 0 || cost[i] > most) {
            throw usage_error(formatted("token moves: a token costs {} from rank {} to rank {}; 0 ... 2^40 are allowed",
                                        cost[i], i / ranks, i % ranks));
        }
    }
    std::vector<std::size_t> givers;
    std::vector<std::size_t> takers;
    for (std::size_t r = 0; r < ranks; ++r) {
        if (left.surplus[r] > 0) { givers.push_back(r); }
        if (left.deficit[r] > 0) { takers.push_back(r); }
    }
    std::vector<std::int64_t> supply;
    std::vector<std::int64_t> demand;
    std::vector<std::int64_t> price;
    for (const std::size_t t : takers) { demand.push_back(left.deficit[t]); }
    for (const std::size_t g : givers) {
        supply.push_back(left.surplus[g]);
        for (const std::size_t t : takers) { price.push_back(cost[g * ranks + t]); }
    }
    const std::vector<std::int64_t> flow = detail::cheapest_transport(price, supply, demand);
    std::vector<token_move> moves;
    for (std::size_t g = 0; g < givers.size(); ++g) {
        for (std::size_t t = 0; t < takers.size(); ++t) {
            const std::int64_t tokens = flow[g * takers.size() + t];
            if (tokens > 0) { moves.push_back({static_cast<int>(givers[g]), static_cast<int>(takers[t]), tokens}); }
        }
    }
    return moves;
}

}  // namespace tutti::sequence
