// The hierarchical all_reduce: nodes of several ranks, dense inside, compressed between.
#include <doctest/doctest.h>  // checks

#include <cmath>   // fabs
#include <vector>  // data

#include "ranks.hpp"                        // data
#include "schemes.hpp"                      // compressors
#include <tutti/comm/counted.hpp>           // bytes on the wire
#include <tutti/compress/hierarchical.hpp>  // tested
#include <tutti/core/virtual_queue.hpp>     // order of queues

using namespace tutti;
using namespace tutti::test;
using compress::dense;
using compress::dense_level;

namespace {

struct grid {
    int nodes = 1;
    int per_node = 1;
};
const std::vector<grid> grids{{1, 1}, {1, 4}, {4, 1}, {2, 2}, {2, 3}, {3, 2}, {2, 4}, {4, 2}};

/// body(world, inside, across) on nodes * per_node ranks; a rank's place in `across` is its node.
template <class Body> void on_grid(grid g, Body body) {
    comm::threads::launch(g.nodes * g.per_node, [&](comm::threads& world) {
        std::vector<int> node;
        std::vector<int> place;
        for (int r = 0; r < world.size(); ++r) {
            node.push_back(r / g.per_node);
            place.push_back(r % g.per_node);
        }
        auto inside = world.split(node, "inside");
        auto across = world.split(place, "across");
        body(world, *inside, *across);
    });
}
template <class C> draw_key key_of(const C& across, std::uint32_t step = 0) {
    return {3, step, static_cast<std::uint32_t>(across.rank())};
}

}  // namespace

TEST_CASE("through dense it is the mean, and the sum, over all ranks, for any grid; apart and in place") {
    const auto all = layout_of({100, 7, 1, 330, 32, 0, 65}, 4, 3);
    const std::size_t size = end_of(all) + 2;
    for (const grid& g : grids) {
        CAPTURE(g.nodes);
        CAPTURE(g.per_node);
        on_grid(g, [&](auto& world, auto& inside, auto& across) {
            rows<float> in(at(world.size()), std::vector<float>(size));
            for (int r = 0; r < world.size(); ++r) {
                for (std::size_t i = 0; i < size; ++i) { in[at(r)][i] = small_element<float>(op_kind::sum, at(r), i); }
            }
            const auto total = reduced_in_rank_order<float>(op_kind::sum, in);
            compress::stateless<host_queue> none;
            std::vector<float> out(size, 99.0f);
            compress::all_reduce(inside, across, dense<>(), none, all, view<const float>(in[at(world.rank())]),
                                 view<float>(out), {}, key_of(across), sum{});
            for (std::size_t i = 0; i < size; ++i) {
                expect(out[i] == (i < 3 || i + 2 >= size ? 99.0f : total[i]), "sum: element {} is {}", i, out[i]);
            }
            std::vector<float> g16(in[at(world.rank())]);
            compress::all_reduce(inside, across, dense<>(), none, all, view<const float>(g16), view<float>(g16), {},
                                 key_of(across));
            for (std::size_t i = 3; i + 2 < size; ++i) {
                expect(std::fabs(g16[i] - total[i] / static_cast<float>(world.size())) < 1e-6f, "mean: element {}", i);
            }
        });
    }
}

TEST_CASE("every rank of every node ends with the same bits, step after step, whatever the compressor") {
    const auto check = [](const auto& x, int level) {
        auto all = layout_of({321, 64, 5, 40}, level);
        all[2].level = dense_level;
        for (const grid& g : grids) {
            CAPTURE(g.nodes);
            CAPTURE(g.per_node);
            on_grid(g, [&](auto& world, auto& inside, auto& across) {
                auto state = compress::make_state(x, world.queue(), all);
                std::vector<float> residual(430);
                for (std::uint32_t step = 0; step < 6; ++step) {
                    std::vector<float> v = gradient(430, at(world.rank()), step);
                    compress::all_reduce(inside, across, x, state, all, view<const float>(v), view<float>(v),
                                         view<float>(residual), key_of(across, step));
                    expect_equal_on_all(world, v);
                }
            });
        }
    };
    check(bucketed{true}, 2);
    check(largest{}, 500);
    check(sampled{}, 3);
}

TEST_CASE("nothing is lost: what arrived and what is left, over nodes, is what all gradients add up to") {
    const auto check = [](const auto& x, int level) {
        const auto all = layout_of({321, 64, 45}, level);
        for (const grid& g : {grid{2, 2}, grid{3, 2}}) {
            on_grid(g, [&](auto& world, auto& inside, auto& across) {
                auto state = compress::make_state(x, world.queue(), all);
                std::vector<float> residual(430);
                std::vector<double> owed(430);
                std::vector<double> arrived(430);
                for (std::uint32_t step = 0; step < 30; ++step) {
                    const auto mine = gradient(430, at(world.rank()), step);
                    std::vector<float> out(430);
                    compress::all_reduce(inside, across, x, state, all, view<const float>(mine), view<float>(out),
                                         view<float>(residual), key_of(across, step));
                    for (std::size_t i = 0; i < 430; ++i) {
                        arrived[i] += out[i];
                        owed[i] += mine[i];
                    }
                }
                // Residuals are of means over a node: their sum over nodes counts each shard once.
                std::vector<double> left(430);
                for (std::size_t i = 0; i < 430; ++i) { left[i] = static_cast<double>(residual[i]) / across.size(); }
                world.all_reduce(view<const double>(left), view<double>(left), sum{});
                world.all_reduce(view<const double>(owed), view<double>(owed), mean{});
                for (std::size_t i = 0; i < 430; ++i) {
                    expect(std::fabs(arrived[i] + left[i] - owed[i]) < 1e-4, "element {}: {} + {} of {}", i, arrived[i],
                           left[i], owed[i]);
                }
            });
        }
    };
    check(bucketed{true}, 2);
    check(largest{}, 500);
    check(sampled{}, 3);
}

TEST_CASE("only a shard crosses between nodes: counted bytes equal the formula") {
    on_grid({2, 4}, [](auto& world, auto& plain_inside, auto& plain_across) {
        comm::counted<comm::threads> inside(plain_inside.duplicate("i"));
        comm::counted<comm::threads> across(plain_across.duplicate("a"));
        const auto all = layout_of({32 * 8 * 10}, 4);
        std::vector<float> v(2560);
        compress::stateless<host_queue> none;
        compress::all_reduce(inside, across, bucketed{}, none, all, view<const float>(v), view<float>(v), {},
                             key_of(across));
        static_cast<void>(world);
        // 640 elements are this rank's; half of them go to the other node, and half come back, 40 bytes a bucket.
        expect(across.traffic_ledger()->total() == comm::traffic{2, 2 * 10 * 40}, "across: {}",
               across.traffic_ledger()->total().bytes);
        expect(inside.traffic_ledger()->total() == comm::traffic{2, 2 * 3 * 640 * 4}, "inside: {}",
               inside.traffic_ledger()->total().bytes);
    });
}

TEST_CASE("as work of a lane that owns the inner communicator") {
    on_grid({2, 2}, [](auto& world, auto& inside, auto& across) {
        const auto all = layout_of({300}, 4);
        std::vector<float> direct = gradient(300, at(world.rank()));
        std::vector<float> on_lane = direct;
        compress::stateless<host_queue> none;
        compress::all_reduce(inside, across, bucketed{true}, none, all, view<const float>(direct), view<float>(direct),
                             {}, key_of(across));
        schedule::lane<comm::threads> lane(inside.duplicate("lane"));
        comm::threads between = across.duplicate("between");
        const auto done = lane.submit("hierarchical", [&](comm::threads& c) {
            compress::stateless<host_queue> state;
            compress::all_reduce(c, between, bucketed{true}, state, all, view<const float>(on_lane),
                                 view<float>(on_lane), {}, key_of(between));
        });
        done.wait(world.queue());
        expect(same_bytes(direct, on_lane), "a lane gives other bits");
    });
}

TEST_CASE("work between nodes is ordered behind the inner queue's and ahead of what follows, also when it throws") {
    for (const bool throws : {false, true}) {
        virtual_queue inside({1.0, 1e30});  // a byte a second
        virtual_queue across = inside.sibling();
        inside.charge("inside", {5, 0});
        try {
            const tutti::detail::detour between(inside, across);
            across.charge("across", {3, 0});
            if (throws) { throw usage_error("in between"); }
        } catch (const usage_error&) { CHECK(throws); }
        inside.charge("inside", {1, 0});
        CHECK(resolve(inside.recording()) == std::vector<double>{9, 8});
    }
}

TEST_CASE("segments that do not follow each other are refused") {
    comm::self<> c;
    comm::self<> d;
    compress::stateless<host_queue> none;
    std::vector<float> v(100);
    const std::vector<segment> gap{{0, 4, 0, 0, 10, 1}, {1, 4, 11, 0, 10, 1}};
    CHECK_THROWS_WITH_AS(
        compress::all_reduce(c, d, bucketed{}, none, gap, view<const float>(v), view<float>(v), {}, key_of(d)),
        "hierarchical all_reduce: tensor 1 is at element 11, not behind tensor 0, which ends at 10", usage_error);
}
