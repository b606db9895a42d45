// Steps divided among ranks: sides, data, directions and all of them give the bits of one rank, in any order of ranks;
// scalars alone are exchanged; replicas that differ are found, and whose.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max
#include <chrono>     // timeout
#include <cmath>      // nextafter
#include <cstdint>    // terms
#include <limits>     // nan
#include <span>       // probes
#include <stdexcept>  // a forward pass that fails
#include <string>     // texts
#include <vector>     // runs

#include <support/failure.hpp>         // expect
#include <tutti/comm/counted.hpp>      // bytes on the wire
#include <tutti/comm/threads.hpp>      // ranks
#include <tutti/zeroth/replicate.hpp>  // under test

#include "mismatch.hpp"   // who is blamed
#include "quadratic.hpp"  // toy

using namespace tutti;
using comm::threads;
using test::expect;
using test::quadratic;
using test::same_run;
using test::toy_pipeline;
using test::toy_run;
using test::toy_steps;
using zeroth::division;
using zeroth::estimate;
using zeroth::estimator;
using zeroth::update_rule;

namespace {

int ranks_of(const division& d) { return d.sides * d.data * d.directions; }

// Steps on as many ranks as the division has; all must leave what `expected` is.
template <class T> void same_on_ranks(const toy_run<T>& expected, const estimator& how, const division& divided) {
    CHECK_NOTHROW(threads::launch(ranks_of(divided), [&](threads& world) {
        const auto run = toy_steps<T>(world.duplicate("zeroth"), expected.steps.size(), how, divided);
        expect(same_run(run, expected), "rank {} of {} has another run", world.rank(), world.size());
    }));
}

division undivided(division d) {
    d.sides = d.data = d.directions = 1;
    d.order.clear();
    return d;
}
// What the one rank leaves, and the same for the division.
template <class T> void same_as_one(const estimator& how, const division& divided, std::size_t steps = 12) {
    CAPTURE(divided.describe());
    same_on_ranks(toy_steps<T>(comm::self<>(), steps, how, undivided(divided)), how, divided);
}

}  // namespace

TEST_CASE("every division of a step has the bits of one rank") {
    const estimator plain{.seed = 21, .weight_decay = 0.01};
    // Sides alone; data alone; both; more shards than ranks; micro-batches to add up.
    same_as_one<double>(plain, {.sides = 2});
    for (const int data : {1, 2, 4}) {
        const auto shards = static_cast<std::size_t>(4);
        same_as_one<float>(plain, {.data = data, .shards = shards});
        same_as_one<float>(plain, {.sides = 2, .data = data, .shards = shards});
    }
    same_as_one<double>(plain, {.data = 3, .shards = 3, .micro_batches = 2});
    same_as_one<bfloat16>(plain, {.sides = 2, .data = 2, .shards = 6, .micro_batches = 2});
    // Directions over ranks, and all three ways together.
    estimator four = plain;
    four.directions = 4;
    same_as_one<float>(four, {.directions = 4});
    same_as_one<float>(four, {.sides = 2, .data = 2, .directions = 2, .shards = 4});
    // Other estimates and rules.
    estimator one_sided = four;
    one_sided.sides = estimate::one_sided;
    same_as_one<double>(one_sided, {.sides = 2, .directions = 2});
    same_as_one<double>(one_sided, {.data = 2, .shards = 2});
    estimator conservative = plain;
    conservative.rule = update_rule::conservative;
    conservative.weight_decay = 0;
    same_as_one<double>(conservative, {.sides = 2, .data = 2, .shards = 4});
    estimator sign = four;
    sign.rule = update_rule::sign;
    sign.draws = zeroth::distribution::rademacher;
    same_as_one<float>(sign, {.sides = 2, .data = 2, .shards = 2});
}

namespace {

// Notes the most probes that it was asked for at a time.
struct asked {
    toy_pipeline<float>& weights;
    std::size_t most = 0;
    void evaluate(std::span<const zeroth::probe> probes, std::size_t m, std::span<zeroth::loss_value> losses) {
        most = std::max(most, probes.size());
        weights.evaluate(probes, m, losses);
    }
    void update(std::span<const zeroth::pending_update> updates) { weights.update(updates); }
    void flush() { weights.flush(); }
    [[nodiscard]] std::uint64_t hash() { return weights.hash(); }
};

}  // namespace

TEST_CASE("a rank makes as many passes of a micro-batch at a time as branches_of says") {
    const auto expect_branches = [](const estimator& how, const division& divided, std::size_t right) {
        CAPTURE(how.describe());
        CAPTURE(divided.describe());
        CHECK(zeroth::branches_of(how, divided) == right);
        CHECK_NOTHROW(threads::launch(ranks_of(divided), [&](threads& world) {
            std::vector<float> w = test::toy_weights<float>();
            toy_pipeline<float> weights(host_queue(), view<float>(w), test::toy_slices(), quadratic<float>());
            asked passes{weights};
            zeroth::replicated driver(world.duplicate("zeroth"), passes, how, divided);
            driver.step(0.1);
            driver.step(0.1);
            // Of a one-sided difference one of a pair has a single pass.
            const bool alone = how.sides == estimate::one_sided && divided.sides == 2 && world.rank() % 2 == 1;
            expect(passes.most == (alone ? 1 : right), "rank {} was asked for {}", world.rank(), passes.most);
        }));
    };
    estimator how;
    expect_branches(how, {}, 2);
    expect_branches(how, {.sides = 2}, 1);
    expect_branches(how, {.data = 2, .shards = 2}, 2);
    how.directions = 4;
    expect_branches(how, {}, 8);
    expect_branches(how, {.sides = 2, .directions = 2}, 2);
    how.sides = estimate::one_sided;
    expect_branches(how, {}, 5);
    expect_branches(how, {.sides = 2}, 4);
    expect_branches(how, {.directions = 4}, 2);
    expect_branches({.rule = update_rule::conservative}, {}, 3);
    expect_branches({.rule = update_rule::conservative}, {.sides = 2}, 3);
}

TEST_CASE("the order of ranks does not matter, and two runs are one") {
    const estimator how{.directions = 2, .seed = 3};
    same_as_one<float>(how, {.sides = 2, .data = 2, .shards = 2, .order = {3, 1, 0, 2}});
    same_as_one<float>(how, {.sides = 2, .data = 2, .directions = 2, .shards = 2, .order = {7, 1, 4, 2, 3, 5, 0, 6}});
    same_as_one<float>(how, {.sides = 2, .data = 2, .directions = 2, .shards = 2, .order = {7, 1, 4, 2, 3, 5, 0, 6}});
}

TEST_CASE("a rank sends 16 bytes a step, whatever the model and however many ranks") {
    for (const division& d : {division{.sides = 2}, division{.data = 2, .shards = 2}, division{.data = 8, .shards = 8},
                              division{.sides = 2, .data = 4, .shards = 4}}) {
        CHECK_NOTHROW(threads::launch(ranks_of(d), [&](threads& world) {
            comm::counted<threads> counting(world.duplicate("zeroth"));
            const auto ledger = counting.traffic_ledger();
            const auto run = toy_steps<float>(std::move(counting), 10, {}, d);
            expect(run.scalar_bytes == 160, "{} bytes in 10 steps", run.scalar_bytes);
            const auto sent = ledger->snapshot();
            const auto gathers = sent[comm::collective::all_gather];
            expect(gathers.calls == 10, "{} gathers in 10 steps", gathers.calls);
            expect(gathers == sent.total(), "something else than gathers was sent");
            // A gather sends a rank's part to each other rank.
            const auto others = static_cast<std::uint64_t>(world.size() - 1);
            expect(gathers.bytes == 160 * others, "{} bytes on the wire", gathers.bytes);
        }));
    }
}

TEST_CASE("a loss that is not finite on one rank moves no rank") {
    const estimator how{.seed = 8};
    const division d{.sides = 2, .data = 2, .shards = 2};
    const auto before = toy_steps<float>(comm::self<>(), 2, how, undivided(d));
    for (int bad = 0; bad < 4; ++bad) {
        CHECK_NOTHROW(threads::launch(4, [&](threads& world) {
            quadratic<float> loss;
            int calls = 0;
            const bool spoils = world.rank() == bad;
            loss.spoiled = [&calls, spoils](std::size_t, double l) {
                return ++calls == 3 && spoils ? std::numeric_limits<double>::quiet_NaN() : l;  // in the third step
            };
            const auto run = toy_steps<float>(world.duplicate("zeroth"), 3, how, d, 0.02, loss);
            expect(run.skipped == 1 && run.steps[2].skipped, "rank {} did not skip the step", world.rank());
            expect(test::same_bytes(run.weights, before.weights), "rank {} moved", world.rank());
        }));
    }
}

namespace {

// What 4 ranks throw when `spoil(rank, step, weights, how, rate)` may do something before each of 8 steps, and as step 0
// before the first; rank 2 is to blame.
using toy = toy_pipeline<float>;
template <class Spoil> test::mismatch spoiled(const division& d, Spoil spoil) {
    return test::mismatch_of(4, 2, 8, [&](threads& world, auto run) {
        std::vector<float> w = test::toy_weights<float>();
        toy weights(host_queue(), view<float>(w), test::toy_slices(), quadratic<float>());
        estimator how{.seed = 5};
        double rate = 0.02;
        spoil(world.rank(), 0, w, how, rate);
        zeroth::replicated driver(world.duplicate("zeroth"), weights, how, d);
        run([&](std::uint64_t k) {
            spoil(world.rank(), k, w, how, rate);
            driver.step(rate);
        });
    });
}

}  // namespace

TEST_CASE("a replica that differs is found within the steps between checks; other seeds and rates at once") {
    const division d{.sides = 2, .data = 2, .shards = 2, .check_every = 3};
    const auto expect_found = [&](auto spoil, const char* text, std::uint64_t step) {
        const test::mismatch found = spoiled(d, spoil);
        CAPTURE(found.text);
        CHECK(found.text.find(text) != std::string::npos);
        CHECK(found.step == step);
    };
    expect_found([](int, std::uint64_t, auto&, auto&, auto&) {}, "nothing", 0);
    // One bit of one weight, before the fourth step: found at the check behind the sixth.
    expect_found(
        [](int rank, std::uint64_t step, std::vector<float>& w, auto&, auto&) {
            if (rank == 2 && step == 4) { w[33] = std::nextafter(w[33], 9.0f); }
        },
        "agree: weights after step 5 differs", 6);
    // Before the first: at the start.
    expect_found(
        [](int rank, std::uint64_t step, std::vector<float>& w, auto&, auto&) {
            if (rank == 2 && step == 0) { w[0] = 0; }
        },
        "agree: weights at the start differs", 0);
    expect_found(
        [](int rank, std::uint64_t step, auto&, estimator& how, auto&) {
            if (rank == 2 && step == 0) { how.seed = 6; }
        },
        "agree: zeroth's options differs", 0);
    expect_found(
        [](int rank, std::uint64_t step, auto&, auto&, double& rate) {
            if (rank == 2 && step == 4) { rate = 0.021; }
        },
        "agree: step number, seed or learning rate of step 3 differs", 4);
}

namespace {

// A step on two ranks in which something is wrong on rank 1, which throws an Error; rank 0 must learn what it was.
template <class Error, class Forward> void expect_ended(Forward forward, double rate, const std::string& text) {
    CAPTURE(text);
    const auto on_rank = [&](threads& world) {
        std::vector<float> w = test::toy_weights<float>();
        const auto loss = [&](view<const float> x, std::size_t m) {
            return world.rank() == 1 ? forward(x, m) : quadratic<float>()(x, m);
        };
        zeroth::in_memory weights(host_queue(), view<float>(w), test::toy_slices(), loss);
        std::string found = "nothing";
        bool right = false;
        try {
            // Rank 0 may still be in here when rank 1 has come to its step.
            zeroth::replicated driver(world.duplicate("zeroth"), weights, {}, {.data = 2, .shards = 2});
            driver.step(world.rank() == 1 ? rate : 0.02);
        } catch (const aborted_error& e) {
            found = e.what();
            right = world.rank() == 0 && found.find(text) != std::string::npos;
        } catch (const Error&) { right = world.rank() == 1; } catch (const std::exception& e) {
            found = e.what();
        }
        expect(right, "rank {} ended by: {}", world.rank(), found);
    };
    CHECK_NOTHROW(threads::launch(2, on_rank, {.timeout = std::chrono::seconds(60)}));
}

}  // namespace

TEST_CASE("what goes wrong on one rank ends the step on all of them, with its text") {
    expect_ended<std::logic_error>(
        [](view<const float>, std::size_t) -> test::loss_value { throw std::logic_error("no such batch"); }, 0.02,
        "no such batch");
    expect_ended<int>([](view<const float>, std::size_t) -> test::loss_value { throw 7; }, 0.02,
                      "zeroth: a step threw something that is no std::exception");
    std::uint32_t terms = 5;
    const auto odd = [&terms](view<const float>, std::size_t) { return test::loss_value{1.0, terms++}; };
    expect_ended<usage_error>(odd, 0.02, "zeroth: one micro-batch has 5 and 6 loss terms");
    expect_ended<usage_error>(quadratic<float>(), -1, "zeroth: the learning rate is -1, expected 0 or more");
}

TEST_CASE("a run that resumes at a step goes on as if it had not stopped") {
    const estimator how{.seed = 14};
    const auto whole = toy_steps<float>(comm::self<>(), 6, how);
    std::vector<float> w = test::toy_weights<float>();
    std::uint64_t next = 0;
    for (int part = 0; part < 2; ++part) {
        toy weights(host_queue(), view<float>(w), test::toy_slices(), quadratic<float>());
        zeroth::replicated driver(comm::self<>(), weights, how);
        driver.resume(next);
        for (int k = 0; k < 3; ++k) { driver.step(0.02 / (1 + 0.1 * static_cast<double>(driver.next_step()))); }
        next = driver.next_step();
    }
    CHECK(next == 6);
    CHECK(test::same_bytes(w, whole.weights));
}
