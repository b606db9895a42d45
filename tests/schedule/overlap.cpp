// Overlap metrics: from spans laid out by hand to the figures of their formulas, and the period that hides a mean.
#include <doctest/doctest.h>  // checks

#include <chrono>  // spans
#include <cmath>   // isnan
#include <string>  // lanes

#include <tutti/schedule/overlap.hpp>  // under test

using namespace tutti;
using namespace std::chrono_literals;
using schedule::overlap_of;
using schedule::shortest_period;
using schedule::span_kind;
using schedule::timeline;

namespace {

/// A run of rank 0, in whole milliseconds.
struct layout {
    deadline start = clock_type::now();
    timeline t{start};
    timeline::track main = t.track_of(0, "main"), steps = t.track_of(0, "steps"), lane = t.track_of(0, "world/rounds"),
                    other = t.track_of(0, "world/inner"), stranger = t.track_of(1, "world/rounds");

    void add(timeline::track where, const char* name, span_kind kind, int begin, int end) {
        t.add(where, name, kind, start + std::chrono::milliseconds(begin), start + std::chrono::milliseconds(end));
    }
    void step(int begin, int end) { add(steps, "step", span_kind::step, begin, end); }
};

/// Rounds of two steps of 10 ms with a mean that takes 24 ms beside the next one; the second steps wait for it and then
/// take 1 ms more. The first round, whose steps take 12 ms, has nothing to wait for.
void add_late_means(layout& l, int rounds) {
    int now = 0;
    for (int r = 0; r < rounds; ++r) {
        const int each = r == 0 ? 12 : 10;
        l.step(now, now + each);
        now += each;
        const int wait = r == 0 ? 0 : 4;
        if (r != 0) { l.add(l.main, "mean", span_kind::wait, now + each, now + each + wait); }
        l.add(l.main, schedule::outer_update_span, span_kind::work, now + each + wait, now + each + wait + 1);
        l.step(now, now + each + wait + 1);
        now += each + wait + 1;
        l.add(l.lane, "mean", span_kind::communication, now, now + 24);
    }
}

}  // namespace

TEST_CASE("means over rounds but the first, in seconds") {
    layout l;
    add_late_means(l, 4);
    // Not within a step, of another rank, and not of the lane's names: none of them counts.
    l.add(l.main, "mean", span_kind::wait, 1000, 2000);
    l.add(l.stranger, "mean", span_kind::communication, 0, 500);
    l.add(l.main, "gather", span_kind::wait, 26, 27);
    l.add(l.main, "compute", span_kind::work, 26, 27);
    const auto m = overlap_of(l.t, 0, {.period = 2, .lane = "world/rounds"});
    CHECK(m.period == 2);
    CHECK(m.rounds == 3);
    CHECK(m.step == doctest::Approx(0.013));  // of the first round, the larger of the two: all others were busy
    CHECK(m.communication == doctest::Approx(0.024));
    CHECK(m.exposed == doctest::Approx(0.004));
    CHECK(m.outer == doctest::Approx(0.001));
    CHECK(m.round == doctest::Approx(0.025));
    CHECK(m.efficiency() == doctest::Approx(1 - 4.0 / 24));
    CHECK(m.exposed_share() == doctest::Approx(4.0 / 25));
    CHECK(m.interference() == doctest::Approx(20.0 / 26 - 1));
    CHECK(m.throughput() == doctest::Approx(26.0 / 25));

    const auto known = overlap_of(l.t, 0, {.period = 2, .lane = "world/rounds", .step = 0.01});
    CHECK(known.interference() == doctest::Approx(0));
    CHECK(known.throughput() == doctest::Approx(20.0 / 25));
}

TEST_CASE("a lane is measured alone, or all together") {
    layout l;
    add_late_means(l, 3);
    for (int at = 0; at < 80; at += 10) { l.add(l.other, "gather", span_kind::communication, at + 1, at + 3); }
    CHECK(overlap_of(l.t, 0, {.period = 2, .lane = "world/rounds"}).communication == doctest::Approx(0.024));
    CHECK(overlap_of(l.t, 0, {.period = 2, .lane = "world/rounds"}).step == doctest::Approx(0.013));
    const auto all = overlap_of(l.t, 0, {.period = 2});
    CHECK(all.communication == doctest::Approx(0.024 + 0.005));  // 5 gathers of 2 ms end in the two rounds of 25 ms
    CHECK(std::isnan(all.step));                                 // no step was without
}

TEST_CASE("a round that is not whole is left out, one alone is all there is, and none gives no figures") {
    layout l;
    add_late_means(l, 3);
    const auto two = overlap_of(l.t, 0, {.period = 2});
    l.step(200, 300);
    CHECK(overlap_of(l.t, 0, {.period = 2}).round == two.round);
    CHECK(overlap_of(l.t, 0, {.period = 2}).rounds == 2);
    CHECK(overlap_of(l.t, 0, {.period = 5}).rounds == 1);

    const auto none = overlap_of(l.t, 0, {.period = 8});
    CHECK(none.rounds == 0);
    CHECK(std::isnan(none.round));
    CHECK(std::isnan(none.exposed));
    CHECK(std::isnan(none.efficiency()));
    CHECK(none.step == doctest::Approx(0.013));  // 12, 13, and the last one of 100 ms
    CHECK(std::isnan(overlap_of(l.t, 7, {}).step));
    CHECK(overlap_of(l.t, 0, {.skip = 100}).rounds == 0);
    // Behind the first two steps rounds begin later by one.
    CHECK(overlap_of(l.t, 0, {.period = 2, .skip = 2}).rounds == 1);
    CHECK_THROWS_WITH_AS(static_cast<void>(overlap_of(l.t, 0, {.period = 0})),
                         "overlap_of: the period is 0 steps, expected 1 or more", usage_error);
}

TEST_CASE("waiting in every step: communication that hides behind a part of it") {
    layout l;
    for (int s = 0; s < 5; ++s) {
        l.add(l.lane, "all_reduce", span_kind::communication, 10 * s + 2, 10 * s + 7);
        l.add(l.main, "all_reduce", span_kind::wait, 10 * s + 5, 10 * s + 7);
        l.step(10 * s, 10 * s + 10);
    }
    const auto m = overlap_of(l.t, 0);
    CHECK(m.rounds == 4);
    CHECK(m.communication == doctest::Approx(0.005));
    CHECK(m.exposed == doctest::Approx(0.002));
    CHECK(m.efficiency() == doctest::Approx(0.6));
    CHECK(m.exposed_share() == doctest::Approx(0.2));
    CHECK(m.outer == 0);
    CHECK(std::isnan(m.throughput()));  // nothing tells how long a step takes without
}

TEST_CASE("the shortest period keeps to the share, and one step less does not") {
    for (const double communication : {0.0, 1e-9, 0.25, 0.99, 1.0, 1.02, 2.5, 13.95, 1000.0}) {
        for (const double share : {0.01, 0.1, 0.5}) {
            CAPTURE(communication);
            CAPTURE(share);
            const auto waiting = [&](double tau, bool hidden) {
                const double exposed = hidden ? std::max(0.0, communication - tau) : communication;
                return exposed / (tau + exposed);
            };
            for (const bool hidden : {true, false}) {
                const auto tau = static_cast<double>(shortest_period(1, communication, share, hidden));
                CHECK(waiting(tau, hidden) <= share + 1e-12);
                if (tau > 1) { CHECK(waiting(tau - 1, hidden) > share); }
            }
        }
    }
    CHECK(shortest_period(0.1, 1.395, 0.01, true) == 14);  // the paper's setting: 13.95 steps
    CHECK(shortest_period(2, 0, 0.01, false) == 1);
    CHECK(shortest_period(1e-300, 1e300, 0.01, true) == 1'000'000'000'000'000);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK_THROWS_WITH_AS(static_cast<void>(shortest_period(nan, 1, 0.01, true)),
                         "shortest_period: a step of nan s and communication of 1 s", usage_error);
    CHECK_THROWS_AS(static_cast<void>(shortest_period(0, 1, 0.01, true)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(shortest_period(1, -1, 0.01, true)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(shortest_period(1, nan, 0.01, true)), usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(shortest_period(1, 1, 0, true)),
                         "shortest_period: a share of 0, expected a value in (0, 1)", usage_error);
    CHECK_THROWS_AS(static_cast<void>(shortest_period(1, 1, 1, true)), usage_error);
}
