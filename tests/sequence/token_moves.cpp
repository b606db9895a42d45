// Token moves: sums exact, as few tokens as possible between nodes, least cost against certificates; large numbers.
#include <doctest/doctest.h>

#include <algorithm>  // max, sort
#include <cstdint>    // tokens
#include <limits>     // overflow
#include <numeric>    // accumulate
#include <random>     // random loads
#include <vector>     // tables

#include <tutti/sequence/token_moves.hpp>  // tested

using namespace tutti;
using namespace tutti::sequence;

namespace {

using counts = std::vector<std::int64_t>;
using moves = std::vector<token_move>;

std::int64_t total(const counts& c) { return std::accumulate(c.begin(), c.end(), std::int64_t{0}); }

/// What a set of moves does.
struct account {
    counts after;
    std::int64_t moved = 0;
    std::int64_t across = 0;
    bool sorted = true;   ///< and no pair twice
    bool one_way = true;  ///< no rank gives and takes
    bool positive = true;
    account(const cluster& machines, counts current, const moves& m) : after(std::move(current)) {
        std::vector<char> gives(after.size(), 0);
        std::vector<char> takes(after.size(), 0);
        for (std::size_t i = 0; i < m.size(); ++i) {
            after[static_cast<std::size_t>(m[i].from)] -= m[i].tokens;
            after[static_cast<std::size_t>(m[i].to)] += m[i].tokens;
            moved += m[i].tokens;
            across += m[i].from / machines.ranks_per_node != m[i].to / machines.ranks_per_node ? m[i].tokens : 0;
            gives[static_cast<std::size_t>(m[i].from)] = 1;
            takes[static_cast<std::size_t>(m[i].to)] = 1;
            positive = positive && m[i].tokens > 0;
            sorted = sorted &&
                     (i == 0 || m[i - 1].from < m[i].from || (m[i - 1].from == m[i].from && m[i - 1].to < m[i].to));
        }
        for (std::size_t r = 0; r < after.size(); ++r) { one_way = one_way && gives[r] + takes[r] < 2; }
    }
};

/// Surpluses, and those of whole nodes: what no moves can undercut.
struct bounds {
    std::int64_t moved = 0;
    std::int64_t across = 0;
    bounds(const cluster& machines, const counts& current, const counts& target) {
        for (int node = 0; node < machines.nodes; ++node) {
            std::int64_t excess = 0;
            for (int l = 0; l < machines.ranks_per_node; ++l) {
                const auto r = static_cast<std::size_t>(node * machines.ranks_per_node + l);
                moved += std::max<std::int64_t>(0, current[r] - target[r]);
                excess += current[r] - target[r];
            }
            across += std::max<std::int64_t>(0, excess);
        }
    }
};

std::int64_t total_cost(const counts& cost, std::size_t ranks, const moves& m) {
    std::int64_t all = 0;
    for (const token_move& each : m) {
        all += cost[static_cast<std::size_t>(each.from) * ranks + static_cast<std::size_t>(each.to)] * each.tokens;
    }
    return all;
}

/// The cheapest way to empty `surplus` into `deficit`, by trying all.
std::int64_t cheapest_by_force(const counts& cost, counts& surplus, counts& deficit, std::size_t from = 0,
                               std::size_t to = 0) {
    const std::size_t ranks = surplus.size();
    if (from == ranks) { return 0; }
    if (to == ranks) {
        return surplus[from] == 0 ? cheapest_by_force(cost, surplus, deficit, from + 1, 0)
                                  : std::numeric_limits<std::int64_t>::max() / 2;
    }
    std::int64_t best = std::numeric_limits<std::int64_t>::max() / 2;
    const std::int64_t most = std::min(surplus[from], deficit[to]);
    for (std::int64_t n = 0; n <= most; ++n) {
        surplus[from] -= n;
        deficit[to] -= n;
        best = std::min(best, n * cost[from * ranks + to] + cheapest_by_force(cost, surplus, deficit, from, to + 1));
        surplus[from] += n;
        deficit[to] += n;
    }
    return best;
}

/// No cycle of the residual network has a negative length: then, and only then, a flow is of least cost.
bool is_cheapest(const counts& cost, const counts& current, const counts& target, const moves& m) {
    const std::size_t ranks = current.size();
    struct arc {
        std::size_t from, to;
        std::int64_t length;
    };
    std::vector<arc> arcs;
    for (std::size_t g = 0; g < ranks; ++g) {
        for (std::size_t t = 0; t < ranks; ++t) {
            if (current[g] > target[g] && current[t] < target[t]) { arcs.push_back({g, t, cost[g * ranks + t]}); }
        }
    }
    for (const token_move& each : m) {
        const auto g = static_cast<std::size_t>(each.from);
        const auto t = static_cast<std::size_t>(each.to);
        arcs.push_back({t, g, -cost[g * ranks + t]});
    }
    counts distance(ranks, 0);
    for (std::size_t round = 0; round <= ranks; ++round) {
        bool changed = false;
        for (const arc& a : arcs) {
            if (distance[a.from] + a.length < distance[a.to]) {
                distance[a.to] = distance[a.from] + a.length;
                changed = true;
            }
        }
        if (!changed) { return true; }
    }
    return false;
}

counts random_loads(std::mt19937& random, std::size_t ranks, std::int64_t most) {
    counts loads(ranks);
    for (auto& l : loads) { l = std::uniform_int_distribution<std::int64_t>(most * 6 / 10, most * 14 / 10)(random); }
    return loads;
}

}  // namespace

TEST_CASE("balanced: the mean, and one more for those that have most") {
    CHECK(balanced_tokens(counts{5, 0, 5, 1}) == counts{3, 2, 3, 3});
    CHECK(balanced_tokens(counts{0, 0, 0}) == counts{0, 0, 0});
    CHECK(balanced_tokens(counts{0, 0, 1}) == counts{0, 0, 1});
    CHECK(balanced_tokens(counts{1, 1, 1, 0}) == counts{1, 1, 1, 0});
    CHECK(balanced_tokens(counts{2, 0, 0, 0}) == counts{1, 1, 0, 0});
    CHECK(balanced_tokens(counts{7}) == counts{7});
}

TEST_CASE("moves by hand: inside first, the rest in proportion") {
    // Node 0 has 30 too many on ranks 0 and 1 and lacks 10 on rank 2; node 1 lacks 20.
    const cluster machines{2, 3};
    const counts current{20, 40, 0, 3, 7, 0};
    const counts target{10, 20, 10, 10, 10, 10};
    // 10 of 30 stay: 3 of rank 0's 10, 7 of rank 1's 20.
    CHECK(moves_inside_first(machines, current, target) ==
          moves{{0, 2, 3}, {0, 3, 7}, {1, 2, 7}, {1, 4, 3}, {1, 5, 10}});
    CHECK(moves_inside_first(machines, target, target).empty());
}

TEST_CASE("2,000 random loads: sums exact, both lower bounds reached, few messages") {
    std::mt19937 random(7);
    for (int instance = 0; instance < 2000; ++instance) {
        const cluster machines = instance % 2 == 0 ? cluster{8, 8} : cluster{1 + instance % 5, 1 + instance % 7};
        const auto ranks = static_cast<std::size_t>(machines.nodes * machines.ranks_per_node);
        counts current = random_loads(random, ranks, instance % 3 == 0 ? 20 : 4096);
        if (instance % 4 == 0) { current[random() % ranks] = 0; }
        const counts target = balanced_tokens(current);
        const auto [least, most] = std::minmax_element(target.begin(), target.end());
        REQUIRE(*most - *least <= 1);
        REQUIRE(total(target) == total(current));
        const moves m = moves_inside_first(machines, current, target);
        const account did(machines, current, m);
        const bounds bound(machines, current, target);
        REQUIRE(did.after == target);
        REQUIRE(did.moved == bound.moved);
        REQUIRE(did.across == bound.across);
        REQUIRE(did.sorted);
        REQUIRE(did.one_way);
        REQUIRE(did.positive);
        REQUIRE(m.size() < 2 * ranks);
        // Other choices of the ranks that get one token more move no fewer: each saves at most one.
        const std::int64_t mean = total(current) / static_cast<std::int64_t>(ranks);
        std::int64_t above = 0;
        std::int64_t above_mean = 0;
        for (const std::int64_t c : current) {
            above += std::max<std::int64_t>(0, c - mean);
            above_mean += c > mean ? 1 : 0;
        }
        REQUIRE(did.moved == above - std::min(above_mean, total(current) % static_cast<std::int64_t>(ranks)));
    }
}

TEST_CASE("what leaves a node leaves by all that have too much") {
    // 4 ranks with 100 too many each, 200 taken inside: each sends 50 out, none 100.
    const cluster machines{2, 8};
    counts current{300, 300, 300, 300, 150, 150, 150, 150, 175, 175, 175, 175, 175, 175, 175, 175};
    const counts target(16, 200);
    counts out(16, 0);
    counts in(16, 0);
    for (const token_move& m : moves_inside_first(machines, current, target)) {
        if (m.from / 8 == m.to / 8) { continue; }
        out[static_cast<std::size_t>(m.from)] += m.tokens;
        in[static_cast<std::size_t>(m.to)] += m.tokens;
    }
    CHECK(out == counts{50, 50, 50, 50, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
    CHECK(in == counts{0, 0, 0, 0, 0, 0, 0, 0, 25, 25, 25, 25, 25, 25, 25, 25});
}

TEST_CASE("two levels of cost: inside first is as cheap as the cheapest") {
    std::mt19937 random(11);
    for (int instance = 0; instance < 40; ++instance) {
        const cluster machines{4, 4};
        const counts current = random_loads(random, 16, 1000);
        const counts target = balanced_tokens(current);
        counts cost(256);
        for (std::size_t i = 0; i < 256; ++i) { cost[i] = i / 16 / 4 == i % 16 / 4 ? 3 : 40; }
        const moves cheapest = moves_of_least_cost(cost, current, target);
        const moves inside = moves_inside_first(machines, current, target);
        CHECK(total_cost(cost, 16, inside) == total_cost(cost, 16, cheapest));
        CHECK(account(machines, current, cheapest).after == target);
    }
}

TEST_CASE("any costs: cheapest by force, and by its certificate") {
    std::mt19937 random(5);
    for (int instance = 0; instance < 200; ++instance) {
        const auto ranks = static_cast<std::size_t>(2 + instance % 4);
        counts current(ranks);
        for (auto& c : current) { c = static_cast<std::int64_t>(random() % 7); }
        const counts target = balanced_tokens(current);
        counts cost(ranks * ranks);
        for (auto& c : cost) { c = static_cast<std::int64_t>(random() % 10); }
        counts surplus(ranks);
        counts deficit(ranks);
        for (std::size_t r = 0; r < ranks; ++r) {
            surplus[r] = std::max<std::int64_t>(0, current[r] - target[r]);
            deficit[r] = std::max<std::int64_t>(0, target[r] - current[r]);
        }
        const moves m = moves_of_least_cost(cost, current, target);
        REQUIRE(account({1, static_cast<int>(ranks)}, current, m).after == target);
        REQUIRE(total_cost(cost, ranks, m) == cheapest_by_force(cost, surplus, deficit));
    }
    for (int instance = 0; instance < 20; ++instance) {
        const std::size_t ranks = 64;
        const counts current = random_loads(random, ranks, 1 << 20);
        const counts target = balanced_tokens(current);
        counts cost(ranks * ranks);
        for (auto& c : cost) { c = static_cast<std::int64_t>(random() % (instance % 2 == 0 ? 5 : 1000000)); }
        const moves m = moves_of_least_cost(cost, current, target);
        const account did({1, static_cast<int>(ranks)}, current, m);
        REQUIRE(did.after == target);
        REQUIRE(did.moved == bounds({1, static_cast<int>(ranks)}, current, target).moved);
        REQUIRE(did.sorted);
        REQUIRE(is_cheapest(cost, current, target, m));
        REQUIRE(m == moves_of_least_cost(cost, current, target));
    }
}

TEST_CASE("numbers of tokens beyond 32 bits, and their products beyond 64") {
    constexpr std::int64_t large = std::int64_t{1} << 60;
    const cluster machines{2, 2};
    const counts current{3 * large, large, large, 1};
    const counts target = balanced_tokens(current);
    CHECK(total(target) == 5 * large + 1);
    const account did(machines, current, moves_inside_first(machines, current, target));
    const bounds bound(machines, current, target);
    CHECK(did.after == target);
    CHECK(did.moved == bound.moved);
    CHECK(did.across == bound.across);
    const counts cost(16, 0);
    CHECK(account(machines, current, moves_of_least_cost(cost, current, target)).after == target);
}

TEST_CASE("what makes no sense is refused") {
    const counts three{1, 2, 3};
    CHECK_THROWS_WITH_AS(static_cast<void>(balanced_tokens({})), "token moves: there is no rank", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(balanced_tokens(counts{1, -2})), "token moves: rank 1 has -2 tokens",
                         usage_error);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    CHECK_THROWS_WITH_AS(static_cast<void>(balanced_tokens(counts{most, 1})),
                         "token moves: the number of all tokens overflows", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(moves_inside_first({1, 3}, three, counts{6, 0})),
                         "token moves: 3 ranks have tokens, 2 have a target", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(moves_inside_first({1, 3}, three, counts{6, 0, 1})),
                         "token moves: there are 6 tokens, the targets add up to 7", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(moves_inside_first({2, 2}, three, three)),
                         "token moves: 2 nodes of 2 ranks for 3 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(moves_of_least_cost(counts(8, 1), three, three)),
                         "token moves: 8 costs for 3 ranks", usage_error);
    counts cost(9, 1);
    cost[5] = -1;
    CHECK_THROWS_WITH_AS(static_cast<void>(moves_of_least_cost(cost, three, three)),
                         "token moves: a token costs -1 from rank 1 to rank 2; 0 ... 2^40 are allowed", usage_error);
}
