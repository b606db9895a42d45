// Attention of long and short sequences on virtual ranks: a plan of Zeppelin sends what it says and what real ranks send,
// and a ring takes what its closed form says.
#include <doctest/doctest.h>

#include <cstdint>  // lengths
#include <limits>   // memory that takes no time
#include <vector>   // lengths

#include <tutti/comm/counted.hpp>                  // bytes on the wire
#include <tutti/comm/threads.hpp>                  // real ranks
#include <tutti/core/elementwise.hpp>              // fill
#include <tutti/sequence/engine.hpp>               // engine
#include <tutti/sequence/estimate.hpp>             // closed form
#include <tutti/sequence/host_attention.hpp>       // what real ranks compute
#include <tutti/sequence/partition/even_ring.hpp>  // a plan
#include <tutti/sequence/partition/zeppelin.hpp>   // a plan
#include <tutti/sequence/routed.hpp>               // spread messages
#include <tutti/simulate/simulate.hpp>             // tested

using namespace tutti;
using namespace tutti::sequence;
using comm::topology;
using rank = simulate::communicator;

namespace {

// FLOPs that a pair of a query and a key is charged: so many that merges of partial results do not show.
constexpr double flops_of_pair = 1e6;

// A kernel that is charged for each pair that it sees; twice as much backward.
struct charged_attention {
    using element_type = bfloat16;
    using queue_type = virtual_queue;
    template <class Block> static double pairs(const Block& b) {
        double all = 0;
        for (std::size_t i = 0; i < b.query.tokens; ++i) { all += double(b.seen.keys_of(i, b.key.tokens)); }
        return flops_of_pair * all;
    }
    void forward(virtual_queue q, const forward_block<bfloat16, phantom_memory>& b) {
        q.charge("forward", {0, pairs(b)});
    }
    void backward(virtual_queue q, const backward_block<bfloat16, phantom_memory>& b) {
        q.charge("backward", {0, 2 * pairs(b)});
    }
};

constexpr attention_heads heads{4, 2, 16};
constexpr double infinity = std::numeric_limits<double>::infinity();

struct result {
    simulate::outcome outcome;
    engine_traffic traffic;
};
// Forward and, if it is wanted, backward of one layer on this rank.
template <class Kernel, class Route, class Layout, class C, class Partition>
engine_traffic attend_once(C& world, const topology& machines, const Partition& partition,
                           const std::vector<std::int64_t>& lengths, attention_options how, bool backward) {
    using Q = queue_of<C>;
    const Q queue = world.queue();
    engine<C, Partition, Route, Layout, Kernel> attention(
        std::move(world), heads, {.partition = partition, .machines = machines, .attention = how});
    attention.plan(lengths);
    const std::size_t in = attention.rows() * (heads.query + 2 * heads.kv) * heads.width;
    const std::size_t out = attention.rows() * heads.query * heads.width;
    const buffer<bfloat16, Q> qkv(queue, in), rows(queue, out);
    fill(queue, qkv.view(), bfloat16(0.5F));
    auto layer = attention.make_memory();
    attention.forward(qkv.view(), rows.view(), layer);
    if (backward) { attention.backward(rows.view(), qkv.view(), layer); }
    return attention.traffic();
}
// The same on all virtual ranks.
template <class Partition, class Route, class Layout>
result attend(const topology& machines, const Partition& partition, const std::vector<std::int64_t>& lengths,
              attention_options how, bool backward, double pairs_per_second) {
    result r;
    r.outcome = simulate::cluster(machines, {infinity, flops_of_pair * pairs_per_second}).run([&](rank& world) {
        r.traffic = attend_once<charged_attention, Route, Layout>(world, machines, partition, lengths, how, backward);
    });
    return r;
}

}  // namespace

TEST_CASE("a ring of one sequence takes its closed form") {
    constexpr int members = 8;
    constexpr std::int64_t tokens = 16 * 1024;
    const topology node = topology::one_node(members, {1e-6, 1e9});
    const double bytes = kv_bytes_per_token(int(heads.kv), int(heads.width), 2);
    for (const double pairs_per_second : {1e12, 1e9}) {  // transfers show; transfers are hidden
        CAPTURE(pairs_per_second);
        const auto r = attend<partition::even_ring, direct_exchange, in_place>(node, {}, {tokens}, {.rule = mask::full},
                                                                               false, pairs_per_second);
        const auto place = partition::even_ring{}({{tokens}}, cluster_of(node), no_capacity);
        const auto modelled =
            estimated(place, attention_cost{1 / pairs_per_second}, transfer_cost{bytes, {1e-6, 1e9}, {}});
        CHECK(r.outcome.seconds == doctest::Approx(modelled.attention).epsilon(1e-5));
        const double sent = double(tokens) / members * (members - 1) * bytes;
        for (const auto& o : r.outcome.ranks) { CHECK(double(o.traffic[comm::collective::exchange].bytes) == sent); }
    }
}

TEST_CASE("Zeppelin's plan on 16 ranks of two nodes sends what it says, and is faster than even rings") {
    const topology machines = topology::uniform(2, 8, {5e-6, 100e9}, {10e-6, 2e9}, 8);
    const std::vector<std::int64_t> lengths{64000, 24000, 24000, 12000, 12000, 9000, 5200, 3100, 2500, 1800};
    const double bytes = kv_bytes_per_token(int(heads.kv), int(heads.width), 2);
    const partition::zeppelin plan(partition::zeppelin_options::hiding(
        attention_cost{1e-12}, transfer_cost{bytes, machines.inside(), machines.between()}));
    const auto sum_of = [](const result& r) {
        std::uint64_t all = 0;
        for (const auto& o : r.outcome.ranks) { all += o.traffic[comm::collective::exchange].bytes; }
        return all;
    };
    const auto zeppelin =
        attend<partition::zeppelin, direct_exchange, remapped>(machines, plan, lengths, {}, true, 1e12);
    CHECK(zeppelin.traffic.moved_tokens > 0);
    CHECK(sum_of(zeppelin) == zeppelin.traffic.inside + zeppelin.traffic.between);
    const auto even = attend<partition::even_ring, direct_exchange, remapped>(machines, {}, lengths, {}, true, 1e12);
    CHECK(sum_of(even) == even.traffic.inside + even.traffic.between);
    CHECK(zeppelin.outcome.seconds < even.outcome.seconds);
    // Messages between nodes spread over the NICs: more bytes inside, less time where one NIC was the limit.
    const auto spread = attend<partition::zeppelin, routed, remapped>(machines, plan, lengths, {}, true, 1e12);
    CHECK(sum_of(spread) == spread.traffic.inside + spread.traffic.between);
    CHECK(spread.traffic.between >= zeppelin.traffic.between);
    CHECK(spread.outcome.seconds < 1.05 * zeppelin.outcome.seconds);
}

namespace {

// The host's kernel, whose own scratch is not counted: a charged one has none.
struct kernel_apart {
    using element_type = bfloat16;
    using queue_type = host_queue;
    host_attention<bfloat16> kernel;
    host_queue apart;
    void forward(host_queue, const forward_block<bfloat16, host_memory>& b) { kernel.forward(apart, b); }
    void backward(host_queue, const backward_block<bfloat16, host_memory>& b) { kernel.backward(apart, b); }
};

}  // namespace

TEST_CASE("Zeppelin on virtual ranks: every rank sends and holds what a real one does") {
    const topology machines = topology::uniform(2, 2, {5e-6, 100e9}, {10e-6, 2e9}, 2);
    const std::vector<std::int64_t> lengths{400, 150, 90, 64, 40, 33, 17, 5};
    const partition::zeppelin plan(partition::zeppelin_options::hiding(
        attention_cost{1e-12},
        transfer_cost{kv_bytes_per_token(int(heads.kv), int(heads.width), 2), machines.inside(), machines.between()}));
    constexpr std::size_t n = 4;
    std::vector<comm::traffic_snapshot> sent(n);
    std::vector<engine_traffic> real(n), foretold(n);
    std::vector<std::size_t> peaks(n);
    comm::threads::launch(n, [&](comm::threads& t) {
        const auto me = static_cast<std::size_t>(t.rank());
        const host_queue queue = t.queue();
        comm::counted world(std::move(t));
        const auto ledger = world.traffic_ledger();
        real[me] = attend_once<kernel_apart, routed, remapped>(world, machines, plan, lengths, {}, true);
        sent[me] = ledger->snapshot();
        peaks[me] = queue.account().peak();
    });
    const auto o = simulate::cluster(machines).run([&](rank& world) {
        const auto me = static_cast<std::size_t>(world.rank());
        foretold[me] = attend_once<charged_attention, routed, remapped>(world, machines, plan, lengths, {}, true);
    });
    for (std::size_t r = 0; r < n; ++r) {
        CAPTURE(r);
        CHECK(foretold[r] == real[r]);
        CHECK(o.ranks[r].traffic == sent[r]);
        CHECK(sent[r][comm::collective::exchange].bytes > 0);
        CHECK(o.ranks[r].peak_bytes == peaks[r]);
    }
    CHECK(real[0].moved_tokens > 0);
}
