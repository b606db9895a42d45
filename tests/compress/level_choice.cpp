// choose_levels against all choices counted out, and the properties it promises on instances too large for that.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // shuffle, max
#include <cmath>      // fabs, ldexp
#include <numeric>    // iota
#include <random>     // instances
#include <utility>    // pair, move
#include <vector>     // choices

#include <tutti/compress/level_choice.hpp>  // choose_levels

#include "compress/level_instances.hpp"  // tables and judges

using namespace tutti;
using namespace tutti::test;
using compress::choice_options;
using compress::choice_reason;
using compress::choose_levels;
using compress::level_choice;

namespace {

/// Up to the rounding of a sum: compilers may fuse the judge's squares into it.
bool same_sum(double a, double b) { return std::fabs(a - b) <= 1e-14 * std::fabs(b); }

/// What holds for every table that makes sense, whatever the solver: numbers are those of the table, the budget is kept,
/// uniform is never beaten by its replacement in cost, falling back means uniform.
void check_promises(const instance& i, const choice_options& o, const level_choice& c) {
    REQUIRE(c.options.size() == i.layers());
    CHECK(c.cost == i.cost(c.options));
    CHECK(same_sum(c.error, i.error(c.options, o.sum)));
    CHECK(c.uniform_cost == i.cost(i.uniform));
    CHECK(same_sum(c.budget, o.alpha * i.error(i.uniform, o.sum)));
    CHECK(c.cost <= c.uniform_cost);
    if (o.alpha >= 1 || !c.fell_back()) { CHECK(c.error <= c.budget * (1 + 1e-12)); }
    if (c.fell_back()) { CHECK(c.options == i.uniform); }
}

/// How far the rounding of costs to integers can lead a rounded solver from the least cost.
double cost_grain(const instance& i) {
    double most = 0;
    for (const auto& row : i.costs) { most += *std::max_element(row.begin(), row.end()); }
    return std::ldexp(most, -28) * static_cast<double>(i.layers());
}

/// Against the exact optimum: never better, never worse than the optimum of a budget that is smaller by a bin a layer.
void check_against_all_choices(const instance& i, choice_options o) {
    const double budget = o.alpha * i.error(i.uniform, o.sum);
    const double least = i.least_cost(budget * (1 + 1e-12), o.sum);
    const double lost = static_cast<double>(i.layers()) / static_cast<double>(o.bins);
    const double least_of_less = i.least_cost(budget * (1 - lost), o.sum);
    o.lower_bound = true;
    for (const level_solver s : all_solvers) {
        o.solver = s;
        const level_choice c = choose_levels(i.table(), i.uniform, o);
        CAPTURE(compress::describe(c));
        CAPTURE(static_cast<int>(s));
        check_promises(i, o, c);
        if (c.reason == choice_reason::no_budget) {
            CHECK(budget == 0);
            continue;
        }
        REQUIRE(c.lower_bound);
        CHECK(*c.lower_bound <= least * (1 + 1e-12));
        if (c.error <= budget * (1 + 1e-12)) { CHECK(c.cost >= least * (1 - 1e-12)); }
        if (budget * (1 - lost) >= 0) { CHECK(c.cost <= std::min(c.uniform_cost, least_of_less + cost_grain(i))); }
    }
}

}  // namespace

TEST_CASE("equal to all choices counted out, within a bin a layer") {
    std::mt19937_64 random(1);
    for (std::size_t layers = 1; layers <= 6; ++layers) {
        for (std::size_t options = 1; options <= 4; ++options) {
            for (int repeat = 0; repeat < 4; ++repeat) {
                for (const error_sum how : {error_sum::norms, error_sum::squares}) {
                    for (const std::size_t bins : std::vector<std::size_t>{7, 100, 2000}) {
                        for (const double alpha : {0.6, 1.0, 1.7}) {
                            const choice_options o{.alpha = alpha, .sum = how, .bins = bins};
                            check_against_all_choices(network_like(random, layers, options), o);
                            check_against_all_choices(disorderly(random, layers, options), o);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("exactly equal when all errors are multiples of a bin") {
    std::mt19937_64 random(2);
    int solved = 0;
    for (const double unit : {1.0, 0.1, 1.0 / 3, 1e-30, 7e20}) {
        for (int repeat = 0; repeat < 150; ++repeat) {
            const instance i = multiples(random, 1 + random() % 6, 1 + random() % 4, unit);
            const double budget = i.error(i.uniform, error_sum::norms);
            if (budget == 0) { continue; }
            choice_options o{.bins = static_cast<std::size_t>(std::lround(budget / unit)), .lower_bound = true};
            const double least = i.least_cost(budget * (1 + 1e-12), error_sum::norms);
            for (const level_solver s : all_solvers) {
                o.solver = s;
                const level_choice c = choose_levels(i.table(), i.uniform, o);
                check_promises(i, o, c);
                CHECK(c.reason == choice_reason::solved);
                CHECK(c.cost == least);
                CHECK(c.lower_bound == least);
                ++solved;
            }
        }
    }
    CHECK(solved > 1500);
}

TEST_CASE("squares: the budget is that of the true squared error") {
    // Norms 3 + 4 = 7 allow {1, 6}; squares 9 + 16 = 25 do not allow 1 + 36, but {0, 5}.
    const instance i{{{10, 20, 15}, {1, 20, 9}}, {{1, 3, 0}, {6, 4, 5}}, {1, 1}};
    for (const level_solver s : all_solvers) {
        const auto norms = choose_levels(i.table(), i.uniform, {.solver = s, .bins = 7});
        CHECK(norms.options == std::vector<std::size_t>{0, 0});
        CHECK(norms.error == 7);
        const auto squares = choose_levels(i.table(), i.uniform, {.sum = error_sum::squares, .solver = s, .bins = 25});
        CHECK(squares.options == std::vector<std::size_t>{2, 2});
        CHECK(squares.error == 25);
        CHECK(squares.budget == 25);
    }
}

TEST_CASE("ranks, bits and densities of large networks: budget, cost, bounds, and the gap to the exact optimum") {
    std::mt19937_64 random(3);
    for (int repeat = 0; repeat < 6; ++repeat) {
        const instance i = network_like(random, 20, 4);
        const double least = i.least_cost_by_list(i.error(i.uniform, error_sum::norms) * (1 + 1e-12));
        for (const level_solver s : all_solvers) {
            const choice_options o{.solver = s, .lower_bound = true};
            const level_choice c = choose_levels(i.table(), i.uniform, o);
            check_promises(i, o, c);
            CHECK(c.reason == choice_reason::solved);
            CHECK(*c.lower_bound <= least);
            CHECK(c.cost >= least);
            if (s != level_solver::rounded_up) { CHECK(c.cost <= least * 1.001); }
            CHECK(c.cost <= least * 1.01);
        }
    }
    const instance large = network_like(random, 100, 30);
    double least_found = infinity;
    double bound = 0;
    std::vector<double> costs;
    for (const level_solver s : all_solvers) {
        const choice_options o{.solver = s, .lower_bound = true};
        const level_choice c = choose_levels(large.table(), large.uniform, o);
        check_promises(large, o, c);
        CHECK(c.cost < 0.7 * c.uniform_cost);
        least_found = std::min(least_found, c.cost);
        bound = *c.lower_bound;
        costs.push_back(c.cost);
    }
    CHECK(bound <= least_found);
    CHECK(bound >= 0.98 * least_found);
    CHECK(costs[1] <= costs[2] * 1.001);  // rounded_nearest is as good as carried
    CHECK(costs[2] < costs[0]);           // and both better than rounded_up
}

TEST_CASE("a larger budget never makes the choice dearer") {
    std::mt19937_64 random(4);
    for (int repeat = 0; repeat < 20; ++repeat) {
        const instance i = repeat % 2 == 0 ? network_like(random, 12, 6) : multiples(random, 12, 6, 0.1);
        for (const level_solver s : all_solvers) {
            double previous = infinity;
            for (double alpha = 1; alpha < 4; alpha *= 1.0 + 0.07 * (1 + repeat)) {
                const auto c = choose_levels(i.table(), i.uniform, {.alpha = alpha, .solver = s, .bins = 2000});
                if (s == level_solver::rounded_up) {
                    CHECK(c.cost <= previous + cost_grain(i));
                } else {
                    CHECK(c.cost <= previous * 1.003);  // these two are not exact in error, so not exact in this
                }
                previous = c.cost;
            }
        }
    }
}

TEST_CASE("the order of layers and of options does not matter") {
    std::mt19937_64 random(5);
    for (int repeat = 0; repeat < 6; ++repeat) {
        const instance i = network_like(random, 25, 8);
        instance shuffled = i;
        std::vector<std::size_t> order(i.layers());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::shuffle(order.begin(), order.end(), random);
        for (std::size_t l = 0; l < order.size(); ++l) {
            // Layers in another order, options from the last to the first.
            shuffled.costs[l].assign(i.costs[order[l]].rbegin(), i.costs[order[l]].rend());
            shuffled.errors[l].assign(i.errors[order[l]].rbegin(), i.errors[order[l]].rend());
            shuffled.uniform[l] = i.costs[order[l]].size() - 1 - i.uniform[order[l]];
        }
        for (const level_solver s : all_solvers) {
            const auto a = choose_levels(i.table(), i.uniform, {.solver = s});
            const auto b = choose_levels(shuffled.table(), shuffled.uniform, {.solver = s});
            CHECK(b.uniform_cost == doctest::Approx(a.uniform_cost).epsilon(1e-12));
            CHECK(b.cost == doctest::Approx(a.cost).epsilon(s == level_solver::rounded_up ? 1e-12 : 1e-3));
        }
    }
}

TEST_CASE("layers that are all alike cost what the uniform choice costs") {
    std::mt19937_64 random(6);
    // 150 layers: a uniform share of the budget is no whole number of bins.
    for (const auto& [layers, spread] : {std::pair{150, 0.0}, std::pair{150, 1e-3}, std::pair{1000, 1e-3}}) {
        const instance i = homogeneous(random, static_cast<std::size_t>(layers), spread);
        for (const level_solver s : all_solvers) {
            for (const std::size_t bins : std::vector<std::size_t>{1000, 10'000}) {
                const choice_options o{.solver = s, .bins = bins};
                const level_choice c = choose_levels(i.table(), i.uniform, o);
                check_promises(i, o, c);
                CHECK(c.cost == c.uniform_cost);
            }
        }
    }
}

TEST_CASE("costs beyond the precision of any float keep the promises") {
    std::mt19937_64 random(7);
    for (const double scale : {1.0, 1e15, 1e300, 1e-300, 4e-320}) {
        for (int repeat = 0; repeat < 30; ++repeat) {
            instance i = network_like(random, 5, 4);
            for (auto& row : i.costs) {
                // Options that differ in the last bits of a double, and some by orders of magnitude.
                for (double& c : row) { c = scale * (repeat % 2 == 0 ? 1 + c * 1e-16 : c * 1e-7); }
            }
            check_against_all_choices(i, {.bins = 1000});
        }
    }
    // One layer dwarfs the others, whose costs all round to 0: the dwarfing one must still be right.
    const instance i{{{1e12, 2e12}, {1, 2}, {1, 2}}, {{1, 0.5}, {1, 0.5}, {1, 0.5}}, {1, 0, 0}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s});
        check_promises(i, {.solver = s}, c);
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options[0] == 0);
    }
}

TEST_CASE("a sum of so many errors that its own rounding exceeds the tolerance is still within the budget") {
    // 0.1 in each of 100,000 layers sums to 1.8e-12 more, relatively, than 0.2 in every other one.
    instance i;
    for (int l = 0; l < 100'000; ++l) {
        i.costs.push_back({3, 2});
        i.errors.push_back({l % 2 == 0 ? 0.2 : 0.0, 0.1});
        i.uniform.push_back(0);
    }
    for (const level_solver s : all_solvers) {
        const choice_options o{.solver = s, .bins = 10};
        check_promises(i, o, choose_levels(i.table(), i.uniform, o));
    }
}

TEST_CASE("of equal costs the smaller error is taken") {
    const instance i{{{5, 5, 5, 7}, {0, 0, 0, 0}}, {{3, 2, 2.5, 1}, {3, 0.5, 1, 2}}, {0, 0}};
    for (const level_solver s : all_solvers) {
        CHECK(choose_levels(i.table(), i.uniform, {.solver = s}).options == std::vector<std::size_t>{1, 1});
    }
    // Two choices cost 3, one loses 3, the other 2, and both are within the budget.
    const instance j{{{1, 2}, {2, 2, 1}}, {{2, 0}, {1, 1, 2}}, {1, 0}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(j.table(), j.uniform, {.alpha = 3, .solver = s, .bins = 3});
        CHECK(c.cost == 3);
        CHECK(c.error == 2);
    }
    // Again two of cost 3; here both end in the second of two bins, where one of them goes on.
    const instance k{{{1, 2}, {2, 1}}, {{2, 0}, {1, 2.6}}, {1, 1}};
    CHECK(choose_levels(k.table(), k.uniform, {.alpha = 1.5, .solver = level_solver::carried, .bins = 2}).error == 2.6);
}

TEST_CASE("one layer, one option, no layers") {
    for (const level_solver s : all_solvers) {
        const instance one{{{4, 3, 2, 1}}, {{0, 1, 2, 3}}, {2}};
        const auto c = choose_levels(one.table(), one.uniform, {.solver = s, .lower_bound = true});
        CHECK(c.options == std::vector<std::size_t>{2});
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.lower_bound == 2);

        const instance single{{{4}, {5}, {6}}, {{1}, {0}, {2}}, {0, 0, 0}};
        CHECK(choose_levels(single.table(), single.uniform, {.solver = s}).options == single.uniform);

        const auto none = choose_levels({}, {}, {.solver = s});
        CHECK(none.options.empty());
        CHECK(none.reason == choice_reason::no_budget);
        CHECK(none.cost == 0);
    }
}

TEST_CASE("a table with as many options as fit, a single bin, and a million") {
    instance i;
    for (int l = 0; l < 3; ++l) {
        i.costs.emplace_back();
        i.errors.emplace_back();
        for (int o = 0; o < 256; ++o) {
            i.costs.back().push_back(256 - o);
            i.errors.back().push_back(o);
        }
        i.uniform.push_back(255);
    }
    i.uniform[0] = 100;
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s, .bins = 610});
        check_promises(i, {.solver = s}, c);
        CHECK(c.cost == 768 - 610);
        check_promises(i, {}, choose_levels(i.table(), i.uniform, {.solver = s, .bins = 1}));
        const instance few{{{1, 2}, {1, 2}}, {{2, 1}, {0.5, 0.25}}, {0, 1}};
        CHECK(choose_levels(few.table(), few.uniform, {.solver = s, .bins = 1 << 20}).options ==
              std::vector<std::size_t>{1, 0});
    }
}

TEST_CASE("alpha below 1: met where it can be, otherwise uniform with the reason") {
    // Half the error is to be had for less: option 2 of the first layer.
    const instance possible{{{9, 10, 8}, {5, 6, 9}}, {{4, 2, 0.5}, {3, 2, 1}}, {1, 1}};
    // Less error costs more.
    const instance dearer{{{1, 2, 3}}, {{4, 2, 1}}, {1}};
    // Nothing loses less.
    const instance none{{{1, 2}}, {{4, 2}}, {1}};
    for (const level_solver s : all_solvers) {
        const choice_options o{.alpha = 0.7, .solver = s, .lower_bound = true};
        const auto c = choose_levels(possible.table(), possible.uniform, o);
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options == std::vector<std::size_t>{2, 1});
        CHECK(c.error <= c.budget);

        const auto d = choose_levels(dearer.table(), dearer.uniform, o);
        CHECK(d.reason == choice_reason::dearer);
        CHECK(d.options == dearer.uniform);
        CHECK(d.error > d.budget);
        CHECK(d.lower_bound == 3);

        const auto n = choose_levels(none.table(), none.uniform, o);
        CHECK(n.reason == choice_reason::over_budget);
        CHECK(n.options == none.uniform);
        CHECK(n.lower_bound == infinity);
    }
}

TEST_CASE("the lower bound is there when asked for") {
    std::mt19937_64 random(8);
    const instance i = network_like(random, 5, 4);
    CHECK(!choose_levels(i.table(), i.uniform).lower_bound);
    CHECK(choose_levels(i.table(), i.uniform, {.lower_bound = true}).lower_bound);
    // and differs from none of the rest
    CHECK(choose_levels(i.table(), i.uniform, {.lower_bound = true}).options ==
          choose_levels(i.table(), i.uniform).options);
}

TEST_CASE("arguments that cannot be meant are refused") {
    const instance i{{{1, 2}, {3, 4}}, {{2, 1}, {2, 1}}, {1, 1}};
    const auto table = i.table();
    const std::vector<std::size_t> short_one{1};
    CHECK_THROWS_WITH_AS(static_cast<void>(choose_levels(table, short_one)),
                         "choose_levels: the uniform choice has 1 layers, the table 2", usage_error);
    const std::vector<std::size_t> beyond{1, 2};
    CHECK_THROWS_WITH_AS(static_cast<void>(choose_levels(table, beyond)),
                         "choose_levels: layer 1: the uniform option is 2 of 2", usage_error);
    for (const double alpha : {0.0, -1.0, infinity, std::numeric_limits<double>::quiet_NaN()}) {
        CHECK_THROWS_AS(static_cast<void>(choose_levels(table, i.uniform, {.alpha = alpha})), usage_error);
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(choose_levels(table, i.uniform, {.bins = 0})),
                         "choose_levels: 0 bins, not 1 to 1048576", usage_error);
    CHECK_THROWS_AS(static_cast<void>(choose_levels(table, i.uniform, {.bins = 1048577})), usage_error);
    for (const double e : {-1e-300, -infinity}) {
        instance negative = i;
        negative.errors[1][0] = e;
        CHECK_THROWS_AS(static_cast<void>(choose_levels(negative.table(), i.uniform)), usage_error);
    }
    const instance huge{{{1e308}, {1e308}}, {{1}, {1}}, {0, 0}};
    CHECK_THROWS_WITH_AS(static_cast<void>(choose_levels(huge.table(), huge.uniform)),
                         "choose_levels: the sum of the largest costs is infinite", usage_error);
}

TEST_CASE("the hash tells choices apart and is the same everywhere") {
    const auto hash = [](std::vector<std::size_t> options) {
        level_choice c;
        c.options = std::move(options);
        return hash_of(c);
    };
    CHECK(hash({}) == 14695981039346656037ull);
    CHECK(hash({3, 1, 4}) == 12687983202461399270ull);  // worked out apart from the library
    CHECK(hash({3, 1, 4}) != hash({3, 4, 1}));
    CHECK(hash({3, 1, 4}) != hash({3, 1, 4, 0}));
    CHECK(hash({0}) != hash({0, 0}));
    CHECK(hash({1}) != hash({256}));
    level_choice cost;  // what the choice costs is no part of it
    cost.options = {3, 1, 4};
    cost.cost = 9;
    CHECK(hash_of(cost) == hash({3, 1, 4}));
}

TEST_CASE("a line for the log") {
    const instance i{{{2, 4}, {2, 4}}, {{1, 1}, {0.5, 0.25}}, {1, 1}};
    CHECK(describe(choose_levels(i.table(), i.uniform, {.lower_bound = true})) ==
          "levels: solved; cost 6, 75.0 % of uniform; error 1.25 of budget 1.25; cost at least 6");
    const instance bad{{{2, 4}, {2, 4}}, {{2, 1}, {infinity, 0.25}}, {1, 1}};
    CHECK(
        describe(choose_levels(bad.table(), bad.uniform)) ==
        "levels: uniform, as an error is not finite (layer 1); cost 8, 100.0 % of uniform; error 1.25 of budget 1.25");
    const instance free{{{0}}, {{0}}, {0}};
    CHECK(describe(choose_levels(free.table(), free.uniform)) ==
          "levels: uniform, as the uniform choice loses nothing; cost 0; error 0 of budget 0");
    for (const auto r : {choice_reason::solved, choice_reason::error_not_finite, choice_reason::no_budget,
                         choice_reason::over_budget, choice_reason::dearer}) {
        CHECK(name_of(r) != "unknown");
    }
}
