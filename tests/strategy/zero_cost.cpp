// What ZeRO costs, exactly: who owns what, bytes sent, memory held.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max
#include <cstdint>    // counts
#include <set>        // owners
#include <vector>     // owners

#include <support/build.hpp>         // TUTTI_TEST_TYPES
#include "sharded_toy.hpp"           // trainer
#include <tutti/comm/counted.hpp>    // bytes on the wire
#include <tutti/comm/threads.hpp>    // ranks
#include <tutti/optimize/adamw.hpp>  // adamw
#include <tutti/strategy/zero.hpp>   // zero

using namespace tutti;
using comm::collective;
using comm::threads;
using optimize::adamw;
using strategy::zero;
using strategy::detail::shard_plan;
using test::several_blocks;
using test::sized_toy;

namespace {

constexpr std::size_t grain = 4096;

std::vector<std::size_t> owner_of_each_element(const shard_plan& plan) {
    std::vector<std::size_t> owner(plan.buckets().elements, ~std::size_t{0});
    for (std::size_t b = 0; b < plan.size(); ++b) {
        std::size_t e = plan.bucket(b).offset;
        for (std::size_t r = 0; r < plan.ranks(); ++r) {
            for (std::size_t k = 0; k < plan.counts(b)[r]; ++k) { owner[e++] = r; }
        }
        REQUIRE(e == plan.bucket(b).offset + plan.bucket(b).size);
    }
    return owner;
}
// Elements of blocks that have several owners.
std::size_t shared_elements(const std::vector<std::size_t>& owner) {
    std::size_t shared = 0;
    for (std::size_t first = 0; first < owner.size(); first += grain) {
        const std::size_t end = std::min(first + grain, owner.size());
        const std::set<std::size_t> ranks(owner.begin() + std::ptrdiff_t(first), owner.begin() + std::ptrdiff_t(end));
        if (ranks.size() > 1) { shared += end - first; }
    }
    return shared;
}
std::uint64_t all_reduce_bytes(std::size_t count, std::size_t size, int rank, int n) {
    comm::call c;
    c.kind = collective::all_reduce;
    c.element_size = size;
    c.in_count = c.out_count = count;
    return comm::wire_bytes(c, rank, n);
}

template <int Stage, class T> using counted_zero = zero<Stage, comm::counted<threads>, adamw, T>;

template <class F> void for_each_stage(F f) {
    f(std::integral_constant<int, 1>{});
    f(std::integral_constant<int, 2>{});
    f(std::integral_constant<int, 3>{});
}

// The gathers of stage 3: every bucket for each pass, forward and backward, less those that are there still. Buckets
// without elements do not exist for it.
std::vector<std::size_t> gathers(const std::vector<std::size_t>& buckets, int micro) {
    std::vector<std::size_t> list;  // in launch order: forward runs through it backwards
    for (int m = 0; m < micro; ++m) {
        for (std::size_t k = buckets.size(); k-- > 0;) {
            if (m > 0 && k + 1 == buckets.size()) { continue; }  // where the last backward ended
            list.push_back(buckets[k]);
        }
        for (std::size_t k = 2; k < buckets.size(); ++k) { list.push_back(buckets[k]); }
    }
    return list;
}

template <int Stage, class T> void check_traffic_and_memory(int n, std::size_t bucket_bytes, int micro) {
    CAPTURE(Stage);
    CAPTURE(n);
    CAPTURE(bucket_bytes);
    CAPTURE(micro);
    std::vector<std::uint64_t> gradients(static_cast<std::size_t>(n)), values(gradients);
    threads::launch(n, [&](threads& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        const auto ranks = static_cast<std::size_t>(n);
        comm::counted<threads> counted(world.duplicate("dp"));
        const auto ledger = counted.traffic_ledger();
        sized_toy<T> t(several_blocks);
        counted_zero<Stage, T> s(std::move(counted), {}, {.bucket_bytes = bucket_bytes});
        s.attach(t.parameters);
        const test::plan_of_steps one{.steps = 1, .micro = micro};
        test::train_sharded(s, several_blocks.size(), world.rank(), n, one);  // the first step records an order
        s.flush();
        const auto before = ledger->snapshot();
        test::train_sharded(s, several_blocks.size(), world.rank(), n, one);
        s.flush();
        const auto step = ledger->snapshot() - before;

        const shard_plan& plan = s.shards();
        const std::size_t elements = plan.buckets().elements;
        std::vector<std::size_t> buckets;
        for (std::size_t b = 0; b < plan.size(); ++b) {
            if (plan.bucket(b).size != 0) { buckets.push_back(b); }
        }
        const auto times = static_cast<std::uint64_t>(Stage == 1 ? 1 : micro);
        CHECK(step[collective::reduce_scatter_v] ==
              comm::traffic{times * buckets.size(), times * sizeof(T) * (elements - plan.owned())});
        comm::traffic gathered{buckets.size(), sizeof(T) * plan.owned() * (ranks - 1)};
        if (Stage == 3) {
            gathered = {};
            for (const std::size_t b : gathers(buckets, micro)) {
                gathered = gathered + comm::traffic{1, sizeof(T) * plan.own(b).count * (ranks - 1)};
            }
        }
        CHECK(step[collective::all_gather_v] == gathered);
        const std::size_t blocks = (elements + grain - 1) / grain;
        const std::size_t shared = shared_elements(owner_of_each_element(plan));
        CHECK(step[collective::all_reduce] ==
              comm::traffic{shared == 0 ? 1u : 2u, all_reduce_bytes(blocks, sizeof(double), world.rank(), n) +
                                                       all_reduce_bytes(shared, sizeof(T), world.rank(), n)});
        CHECK(step.total() ==
              step[collective::reduce_scatter_v] + step[collective::all_gather_v] + step[collective::all_reduce]);
        gradients[rank] = step[collective::reduce_scatter_v].bytes;
        values[rank] = step[collective::all_gather_v].bytes;

        const std::size_t p = plan.owned();
        const std::size_t master = sizeof(master_t<T>);
        const std::size_t two = std::min(buckets.size(), std::size_t{2}) * plan.largest_bucket();
        std::size_t bytes = 3 * master * p + sizeof(std::uint64_t);   // masters, two moments, the step count
        bytes += sizeof(double) * (blocks + 1) + sizeof(T) * shared;  // the norm
        bytes += sizeof(T) * (Stage == 1 ? elements + p : p + two);   // gradients
        if (Stage == 3) { bytes += sizeof(T) * two + (sizeof(T) == master ? 0 : sizeof(T) * p); }  // values
        CHECK(world.queue().account().peak() == bytes);
        CHECK(world.queue().account().live() == bytes);
        s.finish();
    });
    // Over all ranks nothing depends on how evenly they share.
    const std::uint64_t model = sizeof(T) * std::reduce(several_blocks.begin(), several_blocks.end());
    const auto others = static_cast<std::uint64_t>(n - 1);
    CHECK(std::reduce(gradients.begin(), gradients.end()) ==
          others * model * static_cast<std::uint64_t>(Stage == 1 ? 1 : micro));
    if (Stage != 3) { CHECK(std::reduce(values.begin(), values.end()) == others * model); }
}

}  // namespace

TEST_CASE("shards: every element has one owner, cuts lie at blocks, parts differ by a block at most") {
    const std::vector<std::vector<std::size_t>> models{several_blocks, test::tiny,        {}, {0}, {1},
                                                       {100000},       {4096, 4096, 8192}};
    for (const auto& sizes : models) {
        for (const int n : test::sanitized ? std::vector{3} : std::vector{1, 2, 3, 4, 7}) {
            for (const std::size_t bytes : {4u, 20000u, 1u << 30}) {
                const auto buckets = schedule::plan_buckets(sizes, 4, bytes);
                std::vector<std::size_t> owned(static_cast<std::size_t>(n));
                std::size_t whole = 0;
                for (int rank = 0; rank < n; ++rank) {
                    const shard_plan plan(buckets, n, rank);
                    const auto owner = owner_of_each_element(plan);
                    std::vector<std::size_t> mine;  // in the order of the model
                    for (std::size_t e = 0; e < owner.size(); ++e) {
                        REQUIRE(owner[e] < static_cast<std::size_t>(n));
                        if (owner[e] == static_cast<std::size_t>(rank)) { mine.push_back(e); }
                    }
                    REQUIRE(plan.owned() == mine.size());
                    for (std::size_t b = 0; b < plan.size(); ++b) {
                        const auto& own = plan.own(b);
                        for (std::size_t k = 0; k < own.count; ++k) { REQUIRE(mine[own.place + k] == own.first + k); }
                        std::size_t cut = plan.bucket(b).offset;
                        std::size_t least = ~std::size_t{0};
                        std::size_t most = 0;
                        for (const std::size_t count : plan.counts(b)) {
                            cut += count;
                            least = std::min(least, count);
                            most = std::max(most, count);
                            const bool inside =
                                cut != plan.bucket(b).offset && cut != plan.bucket(b).offset + plan.bucket(b).size;
                            if (inside) { REQUIRE(cut % grain == 0); }
                        }
                        REQUIRE(most - least < 2 * grain);  // the first and the last block may be cut by the bucket
                    }
                    whole += plan.owned();
                    owned[static_cast<std::size_t>(rank)] = plan.owned();
                }
                CHECK(whole == buckets.elements);
                // A rank that gets one more block does not get it in every bucket.
                if (sizes == std::vector<std::size_t>{4096, 4096, 8192} && bytes == 4 && n == 3) {
                    for (const std::size_t o : owned) { CHECK(o >= 4096); }
                }
            }
        }
    }
}

// Megatron-LM#6357: accumulating, stages 2 and 3 hold no more; NVIDIA/cosmos-framework#161: nor does stage 1 send more
TEST_CASE_TEMPLATE("bytes sent and held are those of the documentation", T, TUTTI_TEST_TYPES(float, bfloat16)) {
    for (const int n : {1, 2, 3, 4}) {
        for (const std::size_t bytes : {std::size_t{2}, std::size_t{20000}, std::size_t{1} << 30}) {
            if (bytes < sizeof(T)) { continue; }
            for (const int micro : {1, 4}) {
                check_traffic_and_memory<1, T>(n, bytes, micro);
                check_traffic_and_memory<2, T>(n, bytes, micro);
                check_traffic_and_memory<3, T>(n, bytes, micro);
            }
        }
    }
}

TEST_CASE("gradients and values of the trainer take the place of buckets; values apart cost one bucket") {
    threads::launch(2, [](threads& world) {
        const auto held = [&](auto stage, test::layout values, test::layout gradients) {
            sized_toy<float> t(several_blocks, values, gradients);
            zero<stage, threads, adamw> s(world.duplicate("dp"), {}, {.bucket_bytes = std::size_t{1} << 30});
            s.attach(t.parameters);
            test::train_sharded(s, several_blocks.size(), world.rank(), 2, {.steps = 2, .micro = 2});
            s.flush();
            return world.queue().account().live();
        };
        using test::layout;
        const std::size_t all = sizeof(float) * std::reduce(several_blocks.begin(), several_blocks.end());
        for_each_stage([&](auto stage) {
            const std::size_t usual = held(stage, layout::together, layout::none);
            CHECK(held(stage, layout::together, layout::together) == usual - all);
            CHECK(held(stage, layout::together, layout::scattered) == usual);
            CHECK(held(stage, layout::scattered, layout::none) == usual + (stage == 3 ? 0 : all));
        });
    });
}

TEST_CASE("stage 1 sends nothing before the last micro-batch; stage 2 reduces behind each one") {
    threads::launch(2, [](threads& world) {
        comm::counted<threads> counted(world.duplicate("dp")), other(world.duplicate("dp2"));
        const auto first = counted.traffic_ledger();
        const auto second = other.traffic_ledger();
        sized_toy<float> t(several_blocks), u(several_blocks);
        counted_zero<1, float> s(std::move(counted), {}, {.bucket_bytes = 20000});
        counted_zero<2, float> z(std::move(other), {}, {.bucket_bytes = 20000});
        s.attach(t.parameters);
        z.attach(u.parameters);
        const auto calls = [](const auto& ledger) { return ledger->snapshot()[collective::reduce_scatter_v].calls; };
        const std::size_t buckets = schedule::plan_buckets(several_blocks, 4, 20000).buckets.size();
        REQUIRE(buckets >= 3);
        for (int m = 0; m < 3; ++m) {
            s.begin({m, 3});
            z.begin({m, 3});
            test::pass(s, several_blocks.size(), 1, 1);
            test::pass(z, several_blocks.size(), 1, 1);
            s.flush();
            z.flush();
            CHECK(calls(first) == (m < 2 ? 0 : buckets));
            CHECK(calls(second) == buckets * static_cast<std::size_t>(m + 1));
        }
        s.step({0.1});
        z.step({0.1});
        s.finish();
        z.finish();
    });
}
