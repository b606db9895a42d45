// ZeRO shared inside nodes: the means of data parallelism, bits where sums are the same, exact traffic and memory.
#include <doctest/doctest.h>  // checks

#include <numeric>  // reduce
#include <string>   // texts
#include <vector>   // results

#include "schedule/stream_queue.hpp"         // a device-like queue
#include "sharded_toy.hpp"                   // trainer
#include "stream_toy.hpp"                    // its backward on a stream
#include "support/oracle.hpp"                // same_bytes
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/comm/topology.hpp>           // nodes
#include <tutti/core/virtual_queue.hpp>      // no host memory
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/strategy/data_parallel.hpp>  // what it has to equal
#include <tutti/strategy/node_shards.hpp>    // tested
#include <tutti/strategy/zero.hpp>           // zero

using namespace tutti;
using comm::collective;
using comm::threads;
using comm::topology;
using optimize::adamw;
using strategy::node_shards;
using strategy::zero;
using test::for_stages;
using test::nodes;
using test::plan_of_steps;
using test::refusal;
using test::same_bytes;
using test::several_blocks;
using test::sized_toy;
using test::train_sharded;
using counted = comm::counted<threads>;
using outcome = test::outcome<double>;

static_assert(strategy::shard_exchange<node_shards, comm::self<virtual_queue>, bfloat16>);
static_assert(strategy::shardable<zero<3, comm::self<virtual_queue>, adamw, bfloat16, node_shards>>);
static_assert(!strategy::shard_exchange<topology, threads, float>);

namespace {

constexpr std::size_t count = 10;  // parameters of several_blocks
template <int Stage> using plain = zero<Stage, counted, adamw, double>;
template <int Stage> using in_nodes = zero<Stage, counted, adamw, double, node_shards>;

/// Trains what make(comm) gives. Only rank 0 has the initial values that count.
template <class Make> outcome trained(int n, const plan_of_steps& r, Make make) {
    return test::of_all_ranks<double>(n, [&](threads& world) {
        sized_toy<double> t(several_blocks, test::layout::together, test::layout::none,
                            1 + 50 * static_cast<std::uint64_t>(world.rank()));
        return test::train_to_the_end(make(counted(world.duplicate("dp"))), t, world, r);
    });
}
template <int Stage>
outcome shared_inside(const topology& where, const plan_of_steps& r, std::size_t bucket_bytes = 40000) {
    return trained(where.ranks(), r, [&](counted c) {
        return in_nodes<Stage>(std::move(c), {}, {.bucket_bytes = bucket_bytes}, {where});
    });
}
outcome replicated(int n, const plan_of_steps& r) {
    return trained(n, r, [](counted c) { return strategy::data_parallel<counted, adamw, double>(std::move(c)); });
}
std::uint64_t all_reduce_bytes(std::size_t elements, int rank, int n) {
    comm::call c;
    c.kind = collective::all_reduce;
    c.element_size = sizeof(double);
    c.in_count = c.out_count = elements;
    return comm::wire_bytes(c, rank, n);
}
std::size_t shared_elements(const strategy::detail::shard_plan& plan) {
    return strategy::detail::sharded_norm<threads, double>(host_queue(), plan).shared_elements();
}

}  // namespace

TEST_CASE("nodes average as data parallelism does, however ranks are placed, clipped and accumulated") {
    for (const int micro : {1, 3}) {
        const plan_of_steps r{.steps = 3, .micro = micro, .clip_norm = micro == 1 ? 20.0 : 5.0};
        const auto expected = replicated(4, r);
        for (const double norm : expected.norms) { REQUIRE(norm > r.clip_norm); }  // clipping does happen
        for_stages([&](auto stage) {
            CHECK(test::distance(shared_inside<stage>(topology::uniform(2, 2), r), expected) <= 1e-12);
            CHECK(test::distance(shared_inside<stage>(nodes({1, 0, 0, 1}), r, sizeof(double)), expected) <= 1e-12);
        });
    }
}

TEST_CASE("one node has the bits of plain shards, one rank a node those of data parallelism") {
    const plan_of_steps one{.steps = 3}, three{.steps = 2, .micro = 3};
    const auto expected = replicated(3, one);
    for_stages([&](auto stage) {
        CHECK(shared_inside<stage>(topology::one_node(3), three) ==
              trained(3, three, [&](counted c) { return plain<stage>(std::move(c), {}, {.bucket_bytes = 40000}); }));
        CHECK(shared_inside<stage>(topology::uniform(3, 1), one) == expected);
    });
}

TEST_CASE("the same data on all ranks: nodes of two make a pairwise tree, and the bits are those of one rank") {
    const auto alike = [](int n, auto make) {
        std::vector<double> values;
        threads::launch(n, [&](threads& world) {
            sized_toy<double> t(several_blocks);
            auto s = make(counted(world.duplicate("dp")));
            s.attach(t.parameters);
            train_sharded(s, count, 0, 1, {.steps = 3});
            const auto all = test::values_of(s, count);
            if (world.rank() == 0) { values = all; }
            s.finish();
        });
        return values;
    };
    const auto one = alike(1, [](counted c) { return plain<2>(std::move(c), {}, {.bucket_bytes = 40000}); });
    for_stages([&](auto stage) {
        for (const auto& where : {topology::uniform(2, 2), topology::uniform(4, 2)}) {
            CHECK(same_bytes(
                alike(where.ranks(),
                      [&](counted c) { return in_nodes<stage>(std::move(c), {}, {.bucket_bytes = 40000}, {where}); }),
                one));
        }
    });
}

TEST_CASE("bytes sent and held are those of the documentation") {
    for (const auto& where : {topology::uniform(2, 2), topology::uniform(1, 3), topology::uniform(3, 1)}) {
        for (const int micro : {1, 4}) {
            if (micro == 1 && where.nodes() != 2) { continue; }
            for_stages([&](auto stage) {
                CAPTURE(int(stage));
                CAPTURE(where.nodes());
                CAPTURE(micro);
                threads::launch(where.ranks(), [&](threads& world) {
                    const int g = where.smallest_node();
                    const auto others = static_cast<std::uint64_t>(g - 1);
                    counted c(world.duplicate("dp"));
                    const auto ledger = c.traffic_ledger();
                    sized_toy<double> t(several_blocks);
                    in_nodes<stage> s(std::move(c), {}, {.bucket_bytes = 40000}, {where});
                    s.attach(t.parameters);
                    train_sharded(s, count, world.rank(), world.size(), {.steps = 1, .micro = micro});
                    s.flush();
                    const auto before = ledger->snapshot();
                    for (int m = 0; m < micro; ++m) {
                        s.begin({m, micro});
                        test::pass(s, count, 7, 1);
                    }
                    s.flush();
                    const auto passes = ledger->snapshot() - before;
                    s.step({0.1, 1});
                    s.flush();
                    const auto step = ledger->snapshot() - before;

                    const auto& plan = s.shards();
                    const std::size_t P = plan.buckets().elements, p = plan.owned();
                    CHECK(plan.ranks() == static_cast<std::size_t>(g));
                    std::vector<std::size_t> buckets;
                    comm::traffic between;
                    for (std::size_t b = 0; b < plan.size(); ++b) {
                        if (plan.bucket(b).size != 0) { buckets.push_back(b); }
                        if (plan.own(b).count == 0 || where.nodes() == 1) { continue; }
                        between =
                            between + comm::traffic{1, all_reduce_bytes(plan.own(b).count, where.node_of(world.rank()),
                                                                        where.nodes())};
                    }
                    REQUIRE(buckets.size() > 2);
                    const auto times = static_cast<std::uint64_t>(stage == 1 ? 1 : micro);
                    CHECK(step[collective::reduce_scatter_v] ==
                          comm::traffic{times * buckets.size(), times * sizeof(double) * (P - p)});
                    if (stage != 3) {
                        CHECK(step[collective::all_gather_v] ==
                              comm::traffic{buckets.size(), sizeof(double) * p * others});
                    }
                    // Beside backward, before step is called, and once however many micro-batches there are.
                    CHECK(passes[collective::all_reduce] == between);
                    const std::size_t blocks = (P + 4095) / 4096, shared = shared_elements(plan);
                    const int place = where.local_rank(world.rank());
                    const comm::traffic norm{shared == 0 ? 1u : 2u,
                                             all_reduce_bytes(blocks, place, g) + all_reduce_bytes(shared, place, g)};
                    CHECK(step[collective::all_reduce] == between + norm);
                    CHECK(step.total() == step[collective::reduce_scatter_v] + step[collective::all_gather_v] +
                                              step[collective::all_reduce]);

                    const std::size_t two = 2 * plan.largest_bucket();
                    std::size_t elements = 3 * p + (blocks + 1) + shared;  // masters, two moments; the norm
                    elements += stage == 1 ? P + p : p + two;              // gradients
                    if (stage == 3) { elements += two; }                   // values
                    const std::size_t bytes = sizeof(double) * elements + sizeof(std::uint64_t);
                    CHECK(world.queue().account().peak() == bytes);
                    CHECK(world.queue().account().live() == bytes);
                    s.finish();
                });
            });
        }
    }
}

TEST_CASE("one rank's bad gradient skips the step on all nodes and changes nothing") {
    for_stages([&](auto stage) {
        threads::launch(4, [&](threads& world) {
            sized_toy<double> t(several_blocks);
            in_nodes<stage> s(counted(world.duplicate("dp")), {}, {.bucket_bytes = 40000}, {topology::uniform(2, 2)});
            s.attach(t.parameters);
            train_sharded(s, count, world.rank(), 4, {.steps = 1});
            test::check_skips_bad_gradient(s, count, world.rank());
            double elements[] = {static_cast<double>(s.owned().size())};
            s.sum_over_shards(elements);
            CHECK(elements[0] == std::reduce(several_blocks.begin(), several_blocks.end(), 0.0));  // of one node
            s.finish();
        });
    });
}

TEST_CASE("finish finds nodes whose masters differ, and names their ranks") {
    for_stages([&](auto stage) {
        std::vector<std::string> texts(4);
        CHECK_THROWS(threads::launch(4, [&](threads& world) {
            sized_toy<double> t(several_blocks);
            in_nodes<stage> s(counted(world.duplicate("dp")), {}, {.bucket_bytes = 40000}, {topology::uniform(2, 2)});
            s.attach(t.parameters);
            if (world.rank() == 3) { s.owned()[0] += 1; }
            try {
                s.finish();
            } catch (const mismatch_error& e) {
                texts[static_cast<std::size_t>(world.rank())] = e.what();
                throw;
            }
        }));
        for (const auto& text : texts) {
            CHECK(text.find("the hash of a node's masters at finish differs") != std::string::npos);
        }
    });
}

TEST_CASE("nodes that do not fit are refused before anything is sent") {
    threads::launch(3, [&](threads& world) {
        CHECK(refusal([&] {
                  in_nodes<2>(counted(world.duplicate("dp")), {}, {}, {nodes({0, 0, 1})});
              }) == "node shards: nodes of 1 to 2 ranks; all must have as many");
        counted c(world.duplicate("two"));
        const auto ledger = c.traffic_ledger();
        in_nodes<2> s(std::move(c), {}, {}, {topology::uniform(2, 2)});
        sized_toy<double> t(several_blocks);
        CHECK(refusal([&] { s.attach(t.parameters); }) == "node shards: nodes of 4 ranks together, 'world/two' has 3");
        CHECK(ledger->total() == comm::traffic{});
        CHECK(refusal([&] { s.begin({}); }) == "begin: no parameters are attached");
    });
    threads::launch(4, [&](threads& world) {  // ranks that state different nodes
        in_nodes<2> s(counted(world.duplicate("dp")), {}, {},
                      {world.rank() == 1 ? nodes({0, 1, 0, 1}) : topology::uniform(2, 2)});
        sized_toy<double> t(several_blocks);
        CHECK_THROWS_AS(s.attach(t.parameters), mismatch_error);
    });
}

TEST_CASE("a stream gives the bits of the host") {
    using device = comm::self<test::stream_queue>;
    sized_toy<float> t(several_blocks), u(several_blocks);
    const node_shards one{topology::one_node(1)};
    zero<2, comm::self<host_queue>, adamw, float, node_shards> on_host(comm::self<host_queue>(), {}, {}, one);
    zero<2, device, adamw, float, node_shards> on_stream(device{}, {}, {}, one);
    auto list = test::on_stream_of(u);
    on_host.attach(t.parameters);
    on_stream.attach(list);
    test::check_same_bits(on_host, on_stream, count);
    on_stream.finish();
}
