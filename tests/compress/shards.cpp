// shards: the cut of a layout among ranks: complete, allowed, balanced, the same for whoever computes it.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max, min
#include <cstdlib>    // abs
#include <vector>     // layouts

#include "ranks.hpp"                  // layout_of
#include <tutti/compress/shards.hpp>  // tested

using namespace tutti;
using compress::cut;
using compress::segment;
using compress::shards;
using test::layout_of;

namespace {

/// Everything that cut() promises, checked element by element with nothing of its arithmetic.
void check_cut(const std::vector<segment>& all, std::size_t granularity, int ranks) {
    CAPTURE(granularity);
    CAPTURE(ranks);
    const shards parts = cut(all, granularity, ranks);
    REQUIRE(parts.ranks() == ranks);
    std::size_t total = 0;
    for (const auto& s : all) { total += s.size(); }

    // In order, without gap or overlap, cut at allowed places, and what is not cut is as it was.
    std::size_t in = 0;
    std::size_t done = 0;
    std::vector<std::size_t> cuts;  // elements ahead of each shard
    std::size_t before = 0;
    bool all_in_order = true;
    for (int r = 0; r < ranks; ++r) {
        cuts.push_back(before);
        for (const segment& piece : parts.of(r)) {
            while (in < all.size() && done == all[in].size()) {
                ++in;
                done = 0;
            }
            REQUIRE(in < all.size());
            const segment& whole = all[in];
            all_in_order = all_in_order && piece.tensor == whole.tensor && piece.level == whole.level &&
                           piece.offset == whole.offset + done && piece.first == whole.first + done && piece.size() > 0;
            if (piece.size() == whole.size()) {
                all_in_order = all_in_order && piece == whole;
            } else {
                const std::size_t end = done + piece.size();
                const bool allowed =
                    granularity != 0 && done % granularity == 0 && (end == whole.size() || end % granularity == 0);
                all_in_order = all_in_order && allowed && piece.cols == 1;
            }
            done += piece.size();
            before += piece.size();
        }
    }
    CHECK(all_in_order);
    CHECK(before == total);

    // Each cut is one of the nearest allowed ones.
    std::vector<std::size_t> allowed{0};
    std::size_t base = 0;
    for (const auto& s : all) {
        for (std::size_t k = granularity; granularity != 0 && k < s.size(); k += granularity) {
            allowed.push_back(base + k);
        }
        base += s.size();
        allowed.push_back(base);
    }
    bool nearest = true;
    for (int r = 1; r < ranks; ++r) {
        const auto ideal =
            static_cast<long>(partition(total, static_cast<std::size_t>(ranks), static_cast<std::size_t>(r)).first);
        long best = 1L << 60;
        for (const std::size_t a : allowed) { best = std::min(best, std::abs(static_cast<long>(a) - ideal)); }
        nearest = nearest && std::abs(static_cast<long>(cuts[test::at(r)]) - ideal) == best;
    }
    CHECK(nearest);
}

}  // namespace

// deepspeedai/DeepSpeed#4386 asserts multiples of 8 on 3 nodes; deepspeedai/DeepSpeed#5652: a partition of no elements
TEST_CASE(
    "every size around the number of ranks and the bucket is cut completely, at allowed places, nearest to even") {
    for (const int ranks : {1, 2, 3, 4, 5, 7, 8, 13}) {
        const auto w = static_cast<std::size_t>(ranks);
        for (const std::size_t granularity : {0u, 1u, 4u, 8u, 30u, 64u, 1000u}) {
            for (std::size_t n = 0; n <= 40; ++n) { check_cut(layout_of({n}, 4), granularity, ranks); }
            for (const std::size_t n : {w * granularity, w * granularity + 1, (w + 1) * granularity / 2,
                                        std::size_t{997}, std::size_t{1021}, std::size_t{4096}}) {
                check_cut(layout_of({n}, 4), granularity, ranks);
            }
        }
    }
}

TEST_CASE("layouts of several tensors: small, empty, and none at all") {
    for (const int ranks : {1, 2, 3, 4, 8}) {
        for (const std::size_t granularity : {0u, 1u, 8u, 64u}) {
            check_cut({}, granularity, ranks);
            check_cut(layout_of({0, 0, 0}, 4), granularity, ranks);
            check_cut(layout_of({0, 5, 0, 0, 17, 0}, 4), granularity, ranks);
            check_cut(layout_of({1, 1, 1, 1, 1, 1, 1}, 4), granularity, ranks);
            check_cut(layout_of({768, 589824, 2304, 768, 3072}, 4), granularity, ranks);
            check_cut(layout_of({63, 64, 65, 127, 128, 129, 31, 1, 0, 997}, 4), granularity, ranks);
            for (std::size_t a = 0; a < 12; ++a) {
                for (std::size_t b = 0; b < 12; ++b) { check_cut(layout_of({a, b, 9}, 4), granularity, ranks); }
            }
        }
    }
}

TEST_CASE("no shard has more than a bucket above the mean") {
    for (const int ranks : {2, 3, 5, 8, 16}) {
        const auto w = static_cast<std::size_t>(ranks);
        for (const std::size_t granularity : {1u, 32u, 512u}) {
            const auto all = layout_of({768, 589824, 2304, 768, 3072, 7}, 4);
            const std::size_t total = test::end_of(all);
            const shards parts = cut(all, granularity, ranks);
            for (int r = 0; r < ranks; ++r) {
                std::size_t own = 0;
                for (const auto& s : parts.of(r)) { own += s.size(); }
                CHECK(own <= (total + w - 1) / w + granularity);
            }
        }
    }
}

TEST_CASE("a segment that is a part itself is cut at its tensor's buckets, wherever it lies in the views") {
    // Elements 96 to 296 of tensor 3, which are elements 1000 to 1200 of the views.
    const std::vector<segment> all{{3, 4, 1000, 96, 200, 1}};
    const shards parts = cut(all, 32, 2);
    REQUIRE(parts.of(0).size() == 1);
    CHECK(parts.of(0)[0] == segment{3, 4, 1000, 96, 96, 1});
    CHECK(parts.of(1)[0] == segment{3, 4, 1096, 192, 104, 1});
    CHECK_THROWS_WITH_AS(static_cast<void>(cut(std::vector<segment>{{3, 4, 0, 97, 200, 1}}, 32, 2)),
                         "cut: a segment of tensor 3 begins at its element 97, which is not a multiple of the "
                         "granularity 32",
                         usage_error);
    CHECK_NOTHROW(static_cast<void>(cut(std::vector<segment>{{3, 4, 0, 97, 200, 1}}, 0, 2)));
    CHECK_THROWS_WITH_AS(static_cast<void>(cut(all, 32, 0)), "cut: 0 ranks", usage_error);
}

TEST_CASE("the parts of a cut: one rank's, all but one rank's, all; and lists that a caller brings") {
    const auto all = layout_of({10, 20, 30, 40}, 4);
    const shards parts = cut(all, 0, 3);
    for (int r = 0; r < 3; ++r) {
        std::vector<segment> others;
        for (int p = 0; p < 3; ++p) {
            if (p != r) { others.insert(others.end(), parts.of(p).begin(), parts.of(p).end()); }
        }
        CHECK(parts.without(r) == others);
    }
    CHECK(std::vector<segment>(parts.all().begin(), parts.all().end()) == all);
    const shards brought({{all[0], all[1]}, {}, {all[2]}, {all[3]}});
    CHECK(brought.ranks() == 4);
    CHECK(brought.of(1).empty());
    CHECK(brought.of(2)[0] == all[2]);
    CHECK(brought.without(1) == all);
    CHECK_THROWS_WITH_AS(static_cast<void>(parts.of(3)), "shards: rank 3 is not one of 3 ranks", usage_error);
    CHECK_THROWS_AS(static_cast<void>(parts.of(-1)), usage_error);
}

TEST_CASE("layouts that reach beyond their views or share elements are refused; any order of apart ones is not") {
    const auto expect = [](const std::vector<segment>& all, std::size_t size) {
        compress::detail::expect_layout("x", all, size);
    };
    CHECK_NOTHROW(expect({{0, 4, 50, 0, 10, 1}, {1, 4, 0, 0, 0, 1}, {2, 4, 0, 0, 50, 1}}, 60));
    CHECK_THROWS_WITH_AS(expect({{0, 4, 51, 0, 10, 1}}, 60), "x: tensor 0 is at elements 51 to 61 of 60", usage_error);
    CHECK_THROWS_WITH_AS(expect({{4, 4, 50, 0, 10, 1}, {5, 4, 0, 0, 51, 1}}, 60),
                         "x: segments of tensors 5 and 4 share element 50", usage_error);
    CHECK_THROWS_AS(expect({{4, 4, 0, 0, 10, 1}, {4, 4, 0, 0, 10, 1}}, 60), usage_error);
}

TEST_CASE("runs join neighbors, in order, and skip nothing") {
    std::vector<part> runs;
    compress::detail::for_runs(std::vector<segment>{{0, 4, 10, 0, 5, 1},
                                                    {1, 4, 15, 0, 5, 1},
                                                    {2, 4, 0, 0, 3, 1},
                                                    {3, 4, 30, 0, 0, 1},
                                                    {4, 4, 40, 0, 1, 1},
                                                    {5, 4, 41, 0, 0, 1},
                                                    {6, 4, 41, 0, 2, 1}},
                               [&](part p) { runs.push_back(p); });
    CHECK(runs == std::vector<part>{{10, 10}, {0, 3}, {40, 3}});
    const auto e = compress::detail::extent_of(std::vector<segment>{{0, 4, 10, 0, 5, 1}, {2, 4, 3, 0, 3, 1}});
    CHECK(e == part{3, 12});
}
