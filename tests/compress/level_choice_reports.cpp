// What the published hook of L-GreCo (LGrCo/L-GreCo, lgreco_hook.py) gets wrong, each as a test of choose_levels. The
// facts were read in that file; those that concern a compressor or a script have no test here.
#include <doctest/doctest.h>  // checks

#include <cstdint>   // hashes
#include <limits>    // nan
#include <optional>  // result of a lane
#include <random>    // instances
#include <span>      // errors
#include <vector>    // choices

#include <tutti/comm/self.hpp>              // a lane's communicator
#include <tutti/comm/threads.hpp>           // ranks
#include <tutti/compress/level_choice.hpp>  // choose_levels
#include <tutti/schedule/lane.hpp>          // lane

#include "compress/level_instances.hpp"  // tables

using namespace tutti;
using namespace tutti::test;
using compress::choice_reason;
using compress::choose_levels;
using compress::level_choice;

namespace {
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
}  // namespace

TEST_CASE("1: the first layer may use the last bin") {
    // Its "j > q" instead of "j >= q" makes the uniform choice of a single layer infeasible.
    const instance i{{{2, 3}}, {{2, 1}}, {1}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s});
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options == i.uniform);
    }
}

TEST_CASE("2: rounding up in every layer never makes the choice dearer than uniform") {
    // Of 300 instances of 3 to 7 layers the hook's choice is dearer in 14, 12 and 7, with 100, 1000 and 10,000 bins.
    std::mt19937_64 random(1);
    for (const std::size_t bins : std::vector<std::size_t>{100, 1000, 10'000}) {
        for (int repeat = 0; repeat < 100; ++repeat) {
            const instance i = network_like(random, 3 + random() % 5, 4);
            for (const level_solver s : all_solvers) {
                const auto c = choose_levels(i.table(), i.uniform, {.solver = s, .bins = bins});
                CHECK(c.cost <= c.uniform_cost);
                CHECK(c.cost == i.cost(c.options));
            }
        }
    }
}

TEST_CASE("3: where nothing fits into the bins the choice is uniform, and says so") {
    // The hook takes the argmin of a table of infinities, goes back through -1, and sets every rank to min_rank - 1.
    std::mt19937_64 random(2);
    const instance i = homogeneous(random, 1000, 1e-3);
    const auto none = choose_levels(i.table(), i.uniform, {.solver = level_solver::rounded_up, .bins = 999});
    CHECK(none.reason == choice_reason::over_budget);
    CHECK(none.options == i.uniform);
    CHECK(none.cost == none.uniform_cost);
    // One bin more, and the most expensive option of every layer fits.
    const auto dear = choose_levels(i.table(), i.uniform, {.solver = level_solver::rounded_up, .bins = 1000});
    CHECK(dear.reason == choice_reason::dearer);
    CHECK(dear.options == i.uniform);
}

TEST_CASE("4: an error above the budget is forbidden") {
    // The hook clamps it to the last bin, which a single layer can pay. Here the cheapest option loses far too much.
    const instance i{{{1, 5, 9}}, {{1e9, 1, 0.5}}, {1}};
    const instance slightly{{{1, 5, 9}}, {{1 + 1e-9, 1, 0.5}}, {1}};
    for (const level_solver s : all_solvers) {
        CHECK(choose_levels(i.table(), i.uniform, {.solver = s}).options == i.uniform);
        CHECK(choose_levels(slightly.table(), slightly.uniform, {.solver = s}).options == i.uniform);
    }
    // All options but one over the budget, in every layer.
    const instance only{{{1, 2, 7}, {1, 2, 7}}, {{50, 40, 1}, {50, 40, 1}}, {2, 2}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(only.table(), only.uniform, {.solver = s});
        CHECK(c.options == only.uniform);
        CHECK(c.reason == choice_reason::solved);
    }
}

TEST_CASE("5: an error that is not finite means uniform, and names its layer") {
    // The hook throws the result of nan_to_num away; a nan becomes INT_MIN bins and a slice from the end.
    std::mt19937_64 random(3);
    const instance good = network_like(random, 6, 4);
    for (const double bad : {not_a_number, infinity}) {
        for (std::size_t l = 0; l < good.layers(); ++l) {
            for (std::size_t o = 0; o < 4; ++o) {
                instance i = good;
                i.errors[l][o] = bad;
                for (const level_solver s : all_solvers) {
                    for (const error_sum how : {error_sum::norms, error_sum::squares}) {
                        const auto c =
                            choose_levels(i.table(), i.uniform, {.sum = how, .solver = s, .lower_bound = true});
                        CHECK(c.reason == choice_reason::error_not_finite);
                        CHECK(c.layer == l);
                        CHECK(c.options == i.uniform);
                        CHECK(c.cost == c.uniform_cost);
                        CHECK(!c.lower_bound);
                    }
                }
            }
        }
    }
    // Finite errors whose squares, sum or budget are not.
    const instance squares{{{1, 2}, {1, 2}}, {{2, 1}, {1e200, 1}}, {1, 1}};
    const auto c = choose_levels(squares.table(), squares.uniform, {.sum = error_sum::squares});
    CHECK(c.reason == choice_reason::error_not_finite);
    CHECK(c.layer == 1);
    const instance sum{{{1}, {1}, {1}}, {{1e308}, {1e308}, {1}}, {0, 0, 0}};
    CHECK(choose_levels(sum.table(), sum.uniform).layer == 1);
    CHECK(choose_levels(sum.table(), sum.uniform).reason == choice_reason::error_not_finite);
    const instance one{{{1}}, {{1e308}}, {0}};
    CHECK(choose_levels(one.table(), one.uniform, {.alpha = 100}).reason == choice_reason::error_not_finite);
    // A table nobody has measured yet is such a table.
    compress::level_table empty;
    const std::vector<double> costs{1, 2};
    empty.add_layer(costs);
    CHECK(choose_levels(empty, std::vector<std::size_t>{1}).reason == choice_reason::error_not_finite);
}

TEST_CASE("6: a budget of 0 means uniform") {
    // The hook divides by the width of a bin, which is 0 when all gradients are, or when uniform ranks are full ranks.
    const instance zero_gradients{{{1, 2}, {1, 2}}, {{0, 0}, {0, 0}}, {1, 1}};
    const instance full_ranks{{{1, 2}, {1, 2}}, {{3, 0}, {3, 0}}, {1, 1}};
    for (const instance& i : {zero_gradients, full_ranks}) {
        for (const level_solver s : all_solvers) {
            const auto c = choose_levels(i.table(), i.uniform, {.solver = s, .lower_bound = true});
            CHECK(c.reason == choice_reason::no_budget);
            CHECK(c.options == i.uniform);
            CHECK(c.budget == 0);
            CHECK(!c.lower_bound);
        }
    }
    // The smallest budget there is still counts: its bins have no width that a double could hold.
    const double least = std::numeric_limits<double>::denorm_min();
    const instance tiny{{{1, 2}, {1, 2}}, {{1, least}, {0, 0}}, {1, 1}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(tiny.table(), tiny.uniform, {.solver = s});
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options == std::vector<std::size_t>{1, 0});
    }
}

TEST_CASE("7: layers may have fewer options than others") {
    // For matrices whose smaller side is below min_rank or max_rank the hook's slices have the wrong length.
    const instance i{{{1, 2, 3, 4}, {7}, {1, 1.5}}, {{8, 4, 2, 1}, {0}, {2, 1}}, {2, 0, 0}};
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s});
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options == std::vector<std::size_t>{2, 0, 0});
        CHECK(choose_levels(i.table(), i.uniform, {.alpha = 1.25, .solver = s}).options ==
              std::vector<std::size_t>{1, 0, 1});
    }
}

TEST_CASE("8: an option that loses nothing uses no bins") {
    // The hook counts at least one bin a layer: here 40 layers at full rank would need 40 of 10.
    instance i{{{1, 2, 3}}, {{4, 2, 1}}, {1}};
    for (int l = 0; l < 40; ++l) {
        i.costs.push_back({1, 5});
        i.errors.push_back({9, 0});
        i.uniform.push_back(1);
    }
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s, .bins = 10});
        CHECK(c.reason == choice_reason::solved);
        CHECK(c.options == i.uniform);
        // Twice the budget: the only lossy layer alone can use it.
        CHECK(choose_levels(i.table(), i.uniform, {.alpha = 2, .solver = s, .bins = 10}).options[0] == 0);
    }
}

TEST_CASE("9: the cost that is reported is that of the choice") {
    // The hook goes on counting bytes by the uniform rank after ranks have changed.
    std::mt19937_64 random(4);
    const instance i = network_like(random, 10, 5);
    for (const level_solver s : all_solvers) {
        const auto c = choose_levels(i.table(), i.uniform, {.solver = s});
        CHECK(c.options != i.uniform);
        CHECK(c.cost == i.cost(c.options));
        CHECK(c.cost < c.uniform_cost);
        CHECK(c.uniform_cost == i.cost(i.uniform));
    }
}

TEST_CASE("11: solving can go beside the training step") {
    // The hook solves inside the communication hook of one rank while the others wait for a broadcast.
    std::mt19937_64 random(5);
    const instance i = network_like(random, 30, 8);
    schedule::lane<comm::self<>> lane{comm::self<>()};
    const auto table = i.table();
    std::optional<level_choice> chosen;
    const auto done = lane.submit("levels", [&](comm::self<>&) { chosen = choose_levels(table, i.uniform); });
    done.wait(host_queue());
    REQUIRE(chosen);
    CHECK(hash_of(*chosen) == hash_of(choose_levels(table, i.uniform)));
}

TEST_CASE("12: whether a layer is compressed at all is decided anew") {
    // The hook decides that once, at the uniform rank. A dense option loses nothing and costs what it costs.
    const instance i{{{4, 10}, {2, 6, 10}}, {{1, 0}, {9, 1.5, 0}}, {1, 1}};
    for (const level_solver s : all_solvers) {
        // Dense at first, now compressed: 1 is lost of the 1.5, 6 is saved. But not at the price of the other.
        const auto c = choose_levels(i.table(), i.uniform, {.alpha = 2.5 / 1.5, .solver = s});
        CHECK(c.options == std::vector<std::size_t>{0, 1});
        // Compressed at first, now dense: that pays for the first layer.
        const auto d = choose_levels(i.table(), i.uniform, {.solver = s});
        CHECK(d.options == std::vector<std::size_t>{0, 2});
        CHECK(d.cost == 14);
    }
}

TEST_CASE("14: every rank decides on the errors of all") {
    // The hook decides on the noisy gradient of rank 0 alone. Errors lie in one span, so one sum makes tables equal.
    std::vector<std::uint64_t> alone(4);
    comm::threads::launch(4, [&](comm::threads& c) {
        std::mt19937_64 random(6);
        instance i = network_like(random, 12, 6);
        std::mt19937_64 own(static_cast<std::uint64_t>(c.rank()) + 100);
        std::uniform_real_distribution<double> noise(0.2, 3.0);
        for (auto& row : i.errors) {
            for (double& e : row) { e *= noise(own); }
        }
        auto table = i.table();
        alone[static_cast<std::size_t>(c.rank())] = hash_of(choose_levels(table, i.uniform));
        const view<double> errors(table.errors().data(), table.errors().size());
        c.all_reduce(errors, errors, mean{});
        const auto together = choose_levels(table, i.uniform);
        CHECK(together.reason == choice_reason::solved);
        CHECK_NOTHROW(c.agree(hash_of(together), "levels"));
    });
    CHECK(alone[0] != alone[1]);  // without the sum they would not have agreed
}
