// The static checker: nothing wrong in any schedule of up to 16 ranks and 64 micro-batches, and every seeded mistake
// found.
#include <doctest/doctest.h>  // checks

#include <algorithm>   // find_if, rotate, swap
#include <cstddef>     // size_t
#include <functional>  // mutations
#include <string>      // what was said
#include <utility>     // swap
#include <vector>      // schedules

#include <tutti/parallel/pipeline_check.hpp>         // under test
#include <tutti/parallel/pipeline_program.hpp>       // under test
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules

#include <support/build.hpp>  // full_speed

using namespace tutti;
using namespace tutti::parallel;

namespace {

// Every schedule that p ranks and m micro-batches admit.
std::vector<pipeline_schedule> all_schedules(int p, int m) {
    std::vector<pipeline_schedule> all{gpipe(p, m), one_forward_one_backward(p, m), zero_bubble(p, m),
                                       zero_bubble(p, m, {}, 2 * p - 1), zero_bubble_v(p, m)};
    for (int v = 2; v <= 4; ++v) {
        if (m % p == 0) { all.push_back(interleaved(p, m, v)); }
    }
    if (p % 2 == 0 && m % 2 == 0 && m >= 2 * p) { all.push_back(dual_pipe(p, m)); }
    return all;
}

bool valid(const pipeline_schedule& s) {
    validate(s);
    for (const delivery when : {delivery::between, delivery::ahead}) { validate(s, program_of(s, when)); }
    return true;
}

// What is said about a schedule; "" if it is thought valid.
std::string said(const pipeline_schedule& s) {
    try {
        validate(s);
    } catch (const usage_error& e) { return e.what(); }
    return "";
}
std::string said(const pipeline_schedule& s, const pipeline_program& p) {
    try {
        validate(s, p);
    } catch (const usage_error& e) { return e.what(); }
    return "";
}
std::size_t place_of(const std::vector<action>& list, const action& a) {
    const auto at = std::find_if(list.begin(), list.end(), [&](const action& b) {
        return a.what == b.what && a.stage == b.stage && a.micro_batch == b.micro_batch;
    });
    REQUIRE(at != list.end());
    return static_cast<std::size_t>(at - list.begin());
}
std::size_t step_of(const std::vector<pipeline_step>& list, step_kind kind, std::size_t nth = 0) {
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].kind == kind && nth-- == 0) { return i; }
    }
    REQUIRE(false);
    return 0;
}

}  // namespace

TEST_CASE("all schedules, p <= 16, m <= 64, v <= 4: no mismatch, no deadlock, limits that are reached") {
    const bool all = test::full_speed;
    int seen = 0;
    for (int p = 1; p <= 16; p += all || p < 4 ? 1 : 5) {
        for (int m = 1; m <= (all ? 64 : 40); m += all || m < 4 ? 1 : 12) {
            for (const pipeline_schedule& s : all_schedules(p, m)) {
                CAPTURE(s.name);
                CAPTURE(p);
                CAPTURE(m);
                REQUIRE(valid(s));
                // Ranks that follow a rule hold as much as is stated, those that search may need less.
                if (!s.name.starts_with("zero_bubble")) { REQUIRE(replayed(s, {}).peak_held == s.in_flight_limit); }
                ++seen;
            }
        }
    }
    CHECK(seen == (all ? 5945 : 273));
}

TEST_CASE("programs also hold when passes take other times than those they were derived from") {
    for (const pass_times t : {pass_times{7, 2, 3, 1}, pass_times{1, 9, 4, 5}}) {
        for (const pipeline_schedule& s : all_schedules(6, 18)) {
            CAPTURE(s.name);
            for (const delivery when : {delivery::between, delivery::ahead}) { validate(s, program_of(s, when, t)); }
        }
    }
}

TEST_CASE("mistakes in a schedule are found, with rank and action") {
    const pipeline_schedule good = zero_bubble(4, 8);
    CHECK(said(good).empty());
    const auto mutated = [&](const std::function<void(pipeline_schedule&)>& change) {
        pipeline_schedule s = good;
        change(s);
        return said(s);
    };
    const auto erased = [&](pass what) {
        return mutated([&](pipeline_schedule& s) {
            auto& list = s.actions[2];
            list.erase(list.begin() + static_cast<std::ptrdiff_t>(place_of(list, {what, 2, 7})));
        });
    };
    CHECK(erased(pass::forward) == "zero_bubble: rank 2, backward_input of micro-batch 7 in stage 2: comes before its "
                                   "forward");
    CHECK(erased(pass::backward_input) ==
          "zero_bubble: rank 2, backward_weight of micro-batch 7 in stage 2: comes before "
          "its backward_input");
    CHECK(erased(pass::backward_weight) ==
          "zero_bubble: rank 2, backward_weight of micro-batch 7 in stage 2: is missing");
    CHECK(mutated([](pipeline_schedule& s) { s.actions[1].clear(); }) ==
          "zero_bubble: rank 1, forward of micro-batch 0 in stage 1: is missing");
    for (const pass what : {pass::forward, pass::backward_input, pass::backward_weight}) {
        CHECK(mutated([&](pipeline_schedule& s) {
                  s.actions[0].push_back({what, 0, 3});
              }) == formatted("zero_bubble: rank 0, {} of micro-batch 3 in stage 0: comes twice", name_of(what)));
    }
    CHECK(mutated([](pipeline_schedule& s) {
              s.actions[0].push_back({pass::backward, 0, 3});
          }) == "zero_bubble: rank 0, backward of micro-batch 3 in stage 0: comes twice");
    CHECK(mutated([](pipeline_schedule& s) {
              s.actions[3].push_back({pass::forward, 1, 0});
          }) == "zero_bubble: rank 3, forward of micro-batch 0 in stage 1: belongs to rank 1");
    CHECK(mutated([](pipeline_schedule& s) {
              s.actions[3].push_back({pass::forward, 4, 0});
          }) == "zero_bubble: rank 3, forward of micro-batch 0 in stage 4: there is no such stage or micro-batch");
    CHECK(mutated([](pipeline_schedule& s) {
              s.actions[3].push_back({pass::forward, 3, 8});
          }) == "zero_bubble: rank 3, forward of micro-batch 8 in stage 3: there is no such stage or micro-batch");
    const auto swapped = [&](std::size_t rank, action a, action b) {
        return mutated([&](pipeline_schedule& s) {
            auto& list = s.actions[rank];
            std::swap(list[place_of(list, a)], list[place_of(list, b)]);
        });
    };
    CHECK(swapped(3, {pass::forward, 3, 0}, {pass::backward_input, 3, 0}) ==
          "zero_bubble: rank 3, backward_input of micro-batch 0 in stage 3: comes before its forward");
    CHECK(swapped(3, {pass::backward_weight, 3, 0}, {pass::backward_input, 3, 0}) ==
          "zero_bubble: rank 3, backward_weight of micro-batch 0 in stage 3: comes before its backward_input");
    CHECK(
        swapped(1, {pass::backward_weight, 1, 4}, {pass::backward_weight, 1, 5}) ==
        "zero_bubble: rank 1, backward_weight of micro-batch 4 in stage 1: is added behind that of micro-batch 5; sums "
        "must be in order");
    // More in flight than stated: a forward more before the first weight gradient, or a limit that is too low.
    CHECK(mutated([](pipeline_schedule& s) {
              auto& list = s.actions[0];
              const auto from = list.begin() + static_cast<std::ptrdiff_t>(place_of(list, {pass::forward, 0, 4}));
              std::rotate(list.begin(), from, from + 1);
          }) == "zero_bubble: rank 0, forward of micro-batch 3 in stage 0: holds 5 where 4 are allowed");
    CHECK(mutated([](pipeline_schedule& s) { s.in_flight_limit[0] = 3; }) ==
          "zero_bubble: rank 0, forward of micro-batch 3 in stage 0: holds 4 where 3 are allowed");
    // Forwards of two ranks in other orders wait for one another: rank 0's first backward comes too early.
    CHECK(mutated([](pipeline_schedule& s) {
              auto& list = s.actions[3];
              std::swap(list[place_of(list, {pass::forward, 3, 0})], list[place_of(list, {pass::forward, 3, 7})]);
              std::swap(list[place_of(list, {pass::backward_input, 3, 0})],
                        list[place_of(list, {pass::backward_input, 3, 7})]);
              std::swap(list[place_of(list, {pass::backward_weight, 3, 0})],
                        list[place_of(list, {pass::backward_weight, 3, 7})]);
          }).find("sums must be in order") != std::string::npos);
    pipeline_schedule crossed = one_forward_one_backward(2, 4);
    std::swap(crossed.actions[1][0], crossed.actions[1][6]);  // rank 1 begins with the last forward ...
    std::rotate(crossed.actions[1].begin() + 1, crossed.actions[1].begin() + 6, crossed.actions[1].begin() + 7);
    crossed.in_flight_limit = {4, 4};
    CHECK(said(crossed) ==
          "1f1b: rank 0 waits for ever at backward of micro-batch 0 in stage 0: backward of micro-batch 0 "
          "in stage 1 never comes before it");
}

TEST_CASE("mistakes in the shape of a schedule, and in its pairs") {
    const pipeline_schedule good = dual_pipe(4, 8);
    const auto mutated = [&](const std::function<void(pipeline_schedule&)>& change) {
        pipeline_schedule s = good;
        change(s);
        return said(s);
    };
    CHECK(mutated([](pipeline_schedule& s) { s.ranks = 0; }) ==
          "dual_pipe: 0 ranks and 8 micro-batches; both must be positive");
    CHECK(mutated([](pipeline_schedule& s) { s.actions.pop_back(); }) == "dual_pipe: 3 lists and 4 limits for 4 ranks");
    CHECK(mutated([](pipeline_schedule& s) { s.routes.clear(); }) == "dual_pipe: 0 routes of 0 stages");
    CHECK(mutated([](pipeline_schedule& s) { s.routes[1].pop_back(); }) == "dual_pipe: routes of different lengths");
    CHECK(mutated([](pipeline_schedule& s) { s.routes[1][2] = 4; }) == "dual_pipe: a stage on rank 4");
    CHECK(mutated([](pipeline_schedule& s) { s.held = {1, 2}; }).find("neither may grow") != std::string::npos);
    const std::string said_of_pair = mutated([](pipeline_schedule& s) { s.actions[0].back().joined = true; });
    CHECK(said_of_pair.find("is joined with something else than a backward") != std::string::npos);
    CHECK(mutated([](pipeline_schedule& s) {
              for (auto& list : s.actions) {
                  for (action& a : list) { a.joined = false; }
              }
          }).empty());
    pipeline_schedule own = one_forward_one_backward(1, 1);
    own.actions[0][0].joined = true;
    CHECK(said(own) == "1f1b: rank 0, forward of micro-batch 0 in stage 0: is joined with its own backward");
}

TEST_CASE("mistakes in a program are found, with rank and step") {
    const pipeline_schedule s = one_forward_one_backward(3, 6);
    const pipeline_program good = program_of(s);
    CHECK(said(s, good).empty());
    const auto mutated = [&](const std::function<void(pipeline_program&)>& change) {
        pipeline_program p = good;
        change(p);
        return said(s, p);
    };
    const auto erase = [](std::vector<pipeline_step>& list, std::size_t i) {
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
    };
    CHECK(mutated([](pipeline_program& p) { p.pop_back(); }) == "1f1b: a program for 2 ranks of 3");
    CHECK(mutated([&](pipeline_program& p) { erase(p[0], step_of(p[0], step_kind::send)); }) ==
          "1f1b: rank 0, forward of micro-batch 0 in stage 0: its result is never sent");
    CHECK(mutated([&](pipeline_program& p) { erase(p[1], step_of(p[1], step_kind::receive)); }) ==
          "1f1b: rank 1, forward of micro-batch 0 in stage 1: its input has not been received");
    CHECK(
        mutated([&](pipeline_program& p) { erase(p[1], step_of(p[1], step_kind::compute, 2)); }) ==
        "1f1b: rank 1, send of the result of backward of micro-batch 0 in stage 1 to rank 0: is not there to be sent");
    CHECK(mutated([&](pipeline_program& p) {
              std::swap(p[0][step_of(p[0], step_kind::compute, 0)], p[0][step_of(p[0], step_kind::compute, 1)]);
          }) == "1f1b: rank 0, forward of micro-batch 1 in stage 0: is not what the schedule has here");
    CHECK(mutated([&](pipeline_program& p) { erase(p[0], p[0].size() - 1); }) ==
          "1f1b: rank 0, backward of micro-batch 5 in stage 0: is never computed");
    CHECK(mutated([&](pipeline_program& p) { p[0].push_back(p[0][step_of(p[0], step_kind::send)]); }) ==
          "1f1b: rank 0, send of the result of forward of micro-batch 0 in stage 0 to rank 1: is not there to be sent");
    CHECK(mutated([&](pipeline_program& p) { p[1].push_back(p[1][step_of(p[1], step_kind::receive)]); }) ==
          "1f1b: rank 1, receive of the result of forward of micro-batch 0 in stage 0 from rank 0: comes twice");
    CHECK(mutated([&](pipeline_program& p) {
              p[1][step_of(p[1], step_kind::send)].peer = 0;
          }).find("to the wrong rank") != std::string::npos);
    CHECK(mutated([&](pipeline_program& p) {
              p[1][step_of(p[1], step_kind::receive)].peer = 2;
          }).find("is nothing this rank needs from there") != std::string::npos);
    // Two messages of a pair in another order on one side.
    CHECK(mutated([&](pipeline_program& p) {
              std::swap(p[0][step_of(p[0], step_kind::send, 0)], p[0][step_of(p[0], step_kind::send, 1)]);
          }) == "1f1b: rank 0, send of the result of forward of micro-batch 1 in stage 0 to rank 1: is not there to be "
                "sent");
    CHECK(mutated([&](pipeline_program& p) {
              auto& list = p[1];
              std::rotate(list.begin(),
                          list.begin() + static_cast<std::ptrdiff_t>(step_of(list, step_kind::receive, 1)),
                          list.begin() + static_cast<std::ptrdiff_t>(step_of(list, step_kind::receive, 1)) + 1);
          }) == "1f1b: rank 1, receive of the result of forward of micro-batch 1 in stage 0 from rank 0: but message 0 "
                "from there is the result of forward of micro-batch 0 in stage 0");
    // A message that both sides have, but that a rank makes too late: it first waits for what depends on it.
    const auto moved_behind_receive = [&](std::size_t rank, std::size_t send, std::size_t receive) {
        return mutated([&](pipeline_program& p) {
            auto& list = p[rank];
            const auto from = static_cast<std::ptrdiff_t>(step_of(list, step_kind::send, send));
            const auto to = static_cast<std::ptrdiff_t>(step_of(list, step_kind::receive, receive));
            REQUIRE(from < to);
            std::rotate(list.begin() + from, list.begin() + from + 1, list.begin() + to + 1);
        });
    };
    const std::string late = moved_behind_receive(0, 2, 0);
    CHECK(late.find("1f1b: rank 0, ") == 0);
    CHECK(late.ends_with("waits for ever"));
}

TEST_CASE("ranks that each send before they receive wait for ever, though one call on each side would do") {
    // Two ranks swap an activation and a gradient.
    pipeline_schedule s = one_forward_one_backward(2, 2);
    pipeline_program crossed = program_of(s);
    const auto find = [&](std::size_t rank, step_kind kind, int micro_batch, pass what) {
        for (std::size_t i = 0; i < crossed[rank].size(); ++i) {
            const pipeline_step& step = crossed[rank][i];
            if (step.kind == kind && step.what.micro_batch == micro_batch && step.what.what == what) { return i; }
        }
        REQUIRE(false);
        return std::size_t{0};
    };
    // Rank 0 sends forward 1 and then receives backward 0; let rank 1 send backward 0 before it receives forward 1.
    auto& list = crossed[1];
    const std::size_t receive = find(1, step_kind::receive, 1, pass::forward);
    const std::size_t send = find(1, step_kind::send, 0, pass::backward);
    REQUIRE(receive < send);
    std::rotate(list.begin() + static_cast<std::ptrdiff_t>(receive),
                list.begin() + static_cast<std::ptrdiff_t>(receive) + 1,
                list.begin() + static_cast<std::ptrdiff_t>(send) + 1);
    CHECK(said(s, crossed) ==
          "1f1b: rank 0, send of the result of forward of micro-batch 1 in stage 0 to rank 1: waits for ever");
    // A receive so early that it waits for what only the rank itself could set off later.
    pipeline_program early = program_of(s);
    auto& zero = early[0];
    const auto first = static_cast<std::ptrdiff_t>(step_of(zero, step_kind::receive));
    const auto behind = static_cast<std::ptrdiff_t>(step_of(zero, step_kind::send)) + 1;
    std::rotate(zero.begin() + behind, zero.begin() + first, zero.begin() + first + 1);
    CHECK(said(s, early) ==
          "1f1b: rank 0, receive of the result of backward of micro-batch 0 in stage 1 from rank 1: waits for ever");
}
