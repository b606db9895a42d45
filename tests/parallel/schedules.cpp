// Schedules: figures against closed forms and published values in whole numbers, and what the generators refuse.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max_element
#include <cstdint>    // times, units held
#include <limits>     // most that can be counted
#include <string>     // texts
#include <vector>     // peaks

#include <tutti/parallel/pipeline_check.hpp>         // validate
#include <tutti/parallel/pipeline_render.hpp>        // text_of, svg_of
#include <tutti/parallel/pipeline_replay.hpp>        // under test
#include <tutti/parallel/schedules/dual_pipe.hpp>    // under test
#include <tutti/parallel/schedules/one_way.hpp>      // under test
#include <tutti/parallel/schedules/zero_bubble.hpp>  // under test

#include <support/build.hpp>  // full_speed

using namespace tutti;
using namespace tutti::parallel;

namespace {

constexpr pass_times equal{1, 1, 1};
constexpr pass_times uneven{10, 12, 8};

template <class T> T most(const std::vector<T>& v) { return *std::max_element(v.begin(), v.end()); }

struct figures {
    std::int64_t makespan, ideal, bubble;
    int peak;  // of rank 0, chunks
    friend bool operator==(const figures&, const figures&) = default;
};
figures of(const pipeline_schedule& s, const pass_times& t = equal) {
    const pipeline_replay r = replayed(s, t);
    return {r.makespan(), r.busy[0], r.bubble(), r.peak_in_flight[0]};
}

int count(const std::string& text, std::string_view what) {
    int n = 0;
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) { ++n; }
    return n;
}

}  // namespace

TEST_CASE("GPipe and 1F1B: bubble (p - 1)(F + B); all micro-batches held, or p - r") {
    CHECK(of(gpipe(4, 8)) == figures{33, 24, 9, 8});
    CHECK(of(one_forward_one_backward(4, 8)) == figures{33, 24, 9, 4});
    CHECK(of(one_forward_one_backward(8, 16)) == figures{69, 48, 21, 8});
    CHECK(of(one_forward_one_backward(16, 640)) == figures{1965, 1920, 45, 16});
    CHECK(of(one_forward_one_backward(8, 24), uneven).bubble == 210);
    for (int p = 1; p <= 8; ++p) {
        for (int m = 1; m <= 20; ++m) {
            for (const pass_times& t : {equal, uneven, pass_times{3, 5, 1}}) {
                const std::int64_t work = t.forward + t.backward_input + t.backward_weight;
                for (const auto& s : {gpipe(p, m), one_forward_one_backward(p, m)}) {
                    const pipeline_replay r = replayed(s, t);
                    REQUIRE(r.makespan() == (m + p - 1) * work);
                    REQUIRE(r.busy[0] == m * work);
                }
                const pipeline_replay r = replayed(one_forward_one_backward(p, m), t);
                for (int rank = 0; rank < p; ++rank) {
                    REQUIRE(r.peak_in_flight[static_cast<std::size_t>(rank)] == std::min(m, p - rank));
                }
            }
        }
    }
}

TEST_CASE("interleaved: bubble (p - 1)(F + B)/v of whole stages; p v + p - 1 chunks held") {
    // A chunk takes 1/v of a stage, so figures are in v-ths.
    CHECK(of(interleaved(4, 8, 2)) == figures{57, 48, 9, 11});
    CHECK(of(interleaved(4, 8, 4)) == figures{105, 96, 9, 19});
    CHECK(of(interleaved(8, 16, 2)) == figures{117, 96, 21, 23});
    CHECK(of(interleaved(8, 16, 4)) == figures{213, 192, 21, 39});
    for (int p = 1; p <= 6; ++p) {
        for (int v = 2; v <= 4; ++v) {
            for (int groups = 2; groups <= 4; ++groups) {
                const pipeline_replay r = replayed(interleaved(p, groups * p, v), uneven);
                REQUIRE(r.makespan() == 30 * (groups * p * v + p - 1));
                REQUIRE(r.peak_in_flight[0] == p * v + p - 1);
            }
        }
    }
}

TEST_CASE("zero bubble: no worse than published, within the same memory") {
    // ZB-H1: (p - 1)(F + Bi - W), a third of 1F1B's where all passes take the same.
    CHECK(of(zero_bubble(8, 24)) == figures{79, 72, 7, 8});
    const pipeline_replay h1 = replayed(zero_bubble(8, 24, uneven), uneven);
    CHECK(h1.bubble() <= 98);
    CHECK(most(h1.peak_in_flight) <= 8);
    // ZB-H2.
    const pipeline_replay h2 = replayed(zero_bubble(8, 24, equal, 15), equal);
    CHECK(h2.longest_span() == 72);
    CHECK(h2.bubble() == 0);
    CHECK(most(h2.peak_in_flight) <= 15);
    const pipeline_replay roomy = replayed(zero_bubble(8, 24, uneven, 16, {2, 1}), uneven);
    CHECK(roomy.bubble() <= 8);
    CHECK(most(roomy.peak_held) <= 2 * 16);
    // ZB-V.
    const pipeline_replay v = replayed(zero_bubble_v(8, 24), equal);
    CHECK(v.busy[0] == 144);
    CHECK(v.bubble() == 0);
    CHECK(most(v.peak_held) <= 3 * 16);
    const pipeline_replay uneven_v = replayed(zero_bubble_v(8, 24, uneven), uneven);
    CHECK(uneven_v.busy[0] == 1440);
    CHECK(uneven_v.bubble() <= 48);
    CHECK(most(uneven_v.peak_held) <= 3 * 16);
    for (int p = 1; p <= (tutti::test::full_speed ? 16 : 5); ++p) {
        for (const int m : {2 * p, 3 * p + 1, 4 * p}) {
            REQUIRE(of(zero_bubble(p, m)).bubble == p - 1);
            REQUIRE(of(zero_bubble_v(p, m)).bubble == 0);
            REQUIRE(of(zero_bubble(p, m, uneven), uneven).bubble <= 14 * (p - 1));
        }
    }
}

TEST_CASE("zero bubble: what is held may be told in bytes, and the schedule is the one of small units") {
    const std::int64_t big = std::int64_t{3} << 40;
    const auto alike = [&](pipeline_schedule large, const pipeline_schedule& small) {
        validate(large);
        CHECK(large.actions == small.actions);
        const pipeline_replay bytes = replayed(large, equal);
        const pipeline_replay units = replayed(small, equal);
        for (std::size_t r = 0; r < small.actions.size(); ++r) {
            CHECK(bytes.peak_held[r] == units.peak_held[r] * (big / 3));
            CHECK(large.in_flight_limit[r] == small.in_flight_limit[r] * (big / 3));
        }
        // One byte less than what a rank holds at most is not enough.
        large.in_flight_limit[1] = bytes.peak_held[1] - 1;
        CHECK_THROWS_AS(validate(large), usage_error);
    };
    alike(zero_bubble(4, 8, equal, 0, {big, big / 3}), zero_bubble(4, 8, equal, 0, {3, 1}));
    alike(zero_bubble(4, 12, equal, 6, {big, big / 3}), zero_bubble(4, 12, equal, 6, {3, 1}));
    alike(zero_bubble_v(4, 8, equal, {big, big / 3}), zero_bubble_v(4, 8));

    constexpr std::int64_t most_units = std::numeric_limits<std::int64_t>::max();
    validate(zero_bubble(2, 2, equal, 0, {most_units / 4, 1}));
    CHECK_THROWS_WITH_AS(static_cast<void>(zero_bubble(2, 2, equal, 0, {most_units / 4 + 1, 1})),
                         "zero_bubble: chunks that hold 2305843009213693952 units each are together more than 64 bits "
                         "count; take a larger unit",
                         usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble(2, 20, equal, 0, {most_units / 4, 1})), usage_error);
    validate(zero_bubble_v(2, 2, equal, {most_units / 8, 1}));
    CHECK_THROWS_AS(static_cast<void>(zero_bubble_v(2, 2, equal, {most_units / 8 + 1, 1})), usage_error);
    // Of a schedule of another origin all chunks count, whatever its limits say.
    pipeline_schedule own = gpipe(2, 4);
    own.in_flight_limit = {most_units, most_units};
    own.held = {most_units / 8, 1};
    validate(own);
    own.held.before_backward += 1;
    CHECK_THROWS_AS(validate(own), usage_error);
}

TEST_CASE("zero bubble: the search is linear in micro-batches") {
    // With so many a quadratic one takes minutes, more than a test may; without optimization it is not tried.
    const int m = tutti::test::full_speed ? 1 << 18 : 1 << 10;
    const figures f = of(zero_bubble_v(1, m));
    CHECK(f.makespan == 6 * m);
    CHECK(f.bubble == 0);
}

TEST_CASE("DualPipe: bubble (p/2 - 1)(F&B + B - 3W); p + 1 micro-batches held") {
    constexpr pass_times joint{1, 1, 1, 0, 3};
    CHECK(of(dual_pipe(8, 20), joint) == figures{66, 60, 6, 9});
    CHECK(of(dual_pipe(16, 64), joint) == figures{206, 192, 14, 17});
    // Where a pair takes less than its parts, what is before the first and behind the last pair counts as well.
    CHECK(of(dual_pipe(8, 20), {2, 2, 2, 0, 4}).makespan - 20 * 4 == 24);
    for (int p = 2; p <= 12; p += 2) {
        for (const int m : {2 * p, 2 * p + 2, 4 * p}) {
            CHECK(of(dual_pipe(p, m), joint) == figures{3 * m + p - 2, 3 * m, p - 2, p + 1});
        }
    }
}

TEST_CASE("8 ranks, 24 micro-batches, all passes alike: the schedules beside each other") {
    CHECK(of(gpipe(8, 24)) == figures{93, 72, 21, 24});
    CHECK(of(one_forward_one_backward(8, 24)) == figures{93, 72, 21, 8});
    CHECK(of(interleaved(8, 24, 2)) == figures{165, 144, 21, 23});
    CHECK(of(zero_bubble(8, 24)) == figures{79, 72, 7, 8});
    CHECK(of(zero_bubble(8, 24, equal, 15)) == figures{79, 72, 0, 15});
    CHECK(of(zero_bubble_v(8, 24)) == figures{151, 144, 0, 16});
    CHECK(of(dual_pipe(8, 24)) == figures{78, 72, 6, 9});
}

TEST_CASE("messages take time: each crosses p - 1 borders both ways before the first rank goes on") {
    // One micro-batch: out and back.
    CHECK(of(one_forward_one_backward(4, 1), {2, 3, 4, 5}).makespan == 4 * 9 + 6 * 5);
    CHECK(of(gpipe(4, 8), {1, 1, 1, 1}).makespan == 33 + 6);
    for (const pass_times t : {pass_times{2, 3, 1, 4}, pass_times{1, 9, 5, 40}, pass_times{30, 1, 2, 7}}) {
        for (int p = 1; p <= 6; ++p) {
            for (const int m : {1, 2, 5, 13}) {
                validate(zero_bubble(p, m, t));
                validate(zero_bubble(p, m, t, 2 * p, {2, 1}));
                validate(zero_bubble_v(p, m, t));
                validate(zero_bubble_v(p, m, t, {1, 1}));
            }
        }
    }
}

TEST_CASE("what no schedule admits is refused with the numbers") {
    CHECK_THROWS_WITH_AS(static_cast<void>(gpipe(0, 1)), "gpipe: 0 ranks and 1 micro-batches; both must be positive",
                         usage_error);
    CHECK_THROWS_AS(static_cast<void>(one_forward_one_backward(1, 0)), usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(interleaved(4, 6, 2)),
                         "interleaved: 6 micro-batches are not a multiple of 4 ranks", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(interleaved(4, 8, 1)), "interleaved: 1 chunks a rank; at least 2",
                         usage_error);
    CHECK_THROWS_AS(static_cast<void>(dual_pipe(3, 8)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(dual_pipe(4, 9)), usage_error);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(dual_pipe(4, 6)),
        "dual_pipe: 4 ranks and 6 micro-batches; both must be even, and twice as many micro-batches as "
        "ranks",
        usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble(4, 8, equal, 3)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble(4, 8, {1, 0, 1})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble_v(4, 8, {1, 1, 1, -1})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble_v(4, 8, equal, {0, 0})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(zero_bubble(4, 8, equal, 0, {1, 2})), usage_error);
}

TEST_CASE("a schedule as text and as a picture") {
    CHECK(text_of(one_forward_one_backward(2, 3)) ==
          "1f1b: 3 micro-batches through 2 stages on 2 ranks, makespan 12, bubble 3\n"
          "rank 0, 2 in flight: F0 F1 . B0 F2 B1 . B2\n"
          "rank 1, 1 in flight: F0 B0 F1 B1 F2 B2\n");
    CHECK(text_of(dual_pipe(2, 4)) == "dual_pipe: 4 micro-batches through 2 stages on 2 ranks, makespan 12, bubble 0\n"
                                      "rank 0, 3 in flight: F0 F2' F1 B2' F3'+B0 B3' b1 w1\n"
                                      "rank 1, 3 in flight: F2' F0 F3' B0 F1+B2' B1 b3' w3'\n");
    const std::string svg = svg_of(zero_bubble_v(3, 4));
    CHECK(count(svg, "<title>") == 3 * 3 * 2 * 4);
    CHECK(count(svg, "<title>backward_weight of micro-batch 3 in stage 5, ") == 1);
    CHECK(count(svg, "</g>") == count(svg, "<g>"));
    CHECK(count(svg, ">rank ") == 3);
}
