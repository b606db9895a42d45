// level_schedule at every step: against the sentence that defines it, and against the windows of the published code.
#include <doctest/doctest.h>  // checks

#include <cstdint>  // steps
#include <vector>   // actions

#include <tutti/compress/level_schedule.hpp>  // level_schedule

using namespace tutti;
using compress::level_action;
using compress::level_schedule;

TEST_CASE("every step of every small schedule") {
    for (std::uint64_t warmup = 0; warmup <= 6; ++warmup) {
        for (std::uint64_t period = 1; period <= 8; ++period) {
            for (std::uint64_t window = 1; window <= period; ++window) {
                const level_schedule at({.warmup = warmup, .period = period, .window = window});
                std::uint64_t gathered = 0;
                std::uint64_t selections = 0;
                for (std::uint64_t step = 0; step < 50; ++step) {
                    const level_action a = at(step);
                    CHECK((a == level_action::dense) == (step < warmup));
                    if (step < warmup) { continue; }
                    // The round written out: period - window, window - 1, 1.
                    const std::uint64_t in_round = (step - warmup) % period;
                    const auto expected = in_round + 1 == period        ? level_action::select
                                          : in_round + window >= period ? level_action::accumulate
                                                                        : level_action::compress;
                    CHECK(a == expected);
                    gathered += a >= level_action::accumulate ? 1 : 0;
                    if (a == level_action::select) {
                        CHECK(gathered == window);  // no more, no fewer, since the last selection
                        gathered = 0;
                        ++selections;
                        CHECK(step + 1 == warmup + selections * period);  // so the first is a period after the warm-up
                    }
                }
                CHECK(selections == (50 - warmup) / period);
            }
        }
    }
}

TEST_CASE("defaults: those of the published code") {
    const level_schedule at;
    CHECK(at(0) == level_action::dense);
    CHECK(at(999) == level_action::dense);
    CHECK(at(1000) == level_action::compress);
    CHECK(at(1089) == level_action::compress);
    for (std::uint64_t s = 1090; s < 1099; ++s) { CHECK(at(s) == level_action::accumulate); }
    CHECK(at(1099) == level_action::select);
    CHECK(at(1100) == level_action::compress);
    CHECK(at(1190) == level_action::accumulate);
    CHECK(at(1199) == level_action::select);
    CHECK(at(~std::uint64_t{0}) == at(1000 + (~std::uint64_t{0} - 1000) % 100));
}

TEST_CASE("windows that cannot be are refused") {
    CHECK_THROWS_WITH_AS(level_schedule({.period = 9, .window = 10}),
                         "level_schedule: a window of 10 steps is longer than the period of 9", usage_error);
    CHECK_THROWS_WITH_AS(level_schedule({.period = 9, .window = 0}),
                         "level_schedule: a window of 0 steps measures nothing", usage_error);
    CHECK_THROWS_AS(level_schedule({.period = 0, .window = 0}), usage_error);
    CHECK_THROWS_AS(level_schedule({.period = 0, .window = 1}), usage_error);
    CHECK_NOTHROW(level_schedule({.warmup = 0, .period = 1, .window = 1}));
}

TEST_CASE("names") {
    CHECK(name_of(level_action::dense) == "dense");
    CHECK(name_of(level_action::compress) == "compress");
    CHECK(name_of(level_action::accumulate) == "accumulate");
    CHECK(name_of(level_action::select) == "select");
}
