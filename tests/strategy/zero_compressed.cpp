// ZeRO whose gradients and values are sent compressed: exact where nothing is lost, bounded where something is, the same
// values on all ranks, exact masters, bytes and memory; resuming and skipping.
#include <doctest/doctest.h>  // checks

#include <algorithm>    // copy, max, min
#include <cmath>        // fabs, isfinite
#include <cstring>      // memcmp
#include <limits>       // nan
#include <set>          // distinct tensors
#include <string>       // texts
#include <type_traits>  // stages
#include <vector>       // results

#include "sharded_toy.hpp"                       // trainer
#include "support/oracle.hpp"                    // same_bytes
#include <tutti/comm/counted.hpp>                // bytes on the wire
#include <tutti/comm/self.hpp>                   // one rank
#include <tutti/comm/threads.hpp>                // ranks
#include <tutti/compress/dense.hpp>              // vectors
#include <tutti/compress/power_sgd.hpp>          // no compressor of this kind
#include <tutti/compress/quantize.hpp>           // compressor
#include <tutti/core/virtual_queue.hpp>          // no host memory
#include <tutti/optimize/adamw.hpp>              // adamw
#include <tutti/optimize/sgd.hpp>                // what arrived, as it is
#include <tutti/strategy/compressed_shards.hpp>  // tested
#include <tutti/strategy/zero.hpp>               // zero

using namespace tutti;
using comm::collective;
using comm::threads;
using compress::quantize;
using optimize::adamw;
using strategy::as_is;
using strategy::compressed_shards;
using strategy::zero;
using test::for_stages;
using test::refusal;
using test::same_bytes;
using test::saved;
using test::several_blocks;
using test::sized_toy;
using test::train_sharded;
using counted = comm::counted<threads>;

using in_bits = compressed_shards<>;
static_assert(strategy::shardable<zero<1, comm::self<virtual_queue>, adamw, bfloat16, in_bits>>);
static_assert(strategy::shardable<zero<3, comm::self<virtual_queue>, adamw, double, in_bits>>);
static_assert(strategy::shard_exchange<compressed_shards<as_is, as_is>, threads, float>);
static_assert(!strategy::shard_exchange<compressed_shards<compress::power_sgd>, threads, float>);

namespace {

constexpr std::size_t count = 10;  // parameters of several_blocks
constexpr std::size_t bucket_bytes = 40000;
template <int Stage, class Exchange = in_bits, class T = float> using tested = zero<Stage, counted, adamw, T, Exchange>;

// Some of the tensors are matrices.
template <class T> sized_toy<T> matrices() {
    sized_toy<T> t(several_blocks);
    t.parameters[1].shape = {90, 100};
    t.parameters[3].shape = {3, 11};
    t.parameters[4].shape = {64, 8, 8};
    t.parameters[5].shape = {1, 7};
    t.parameters[8].shape = {3, 4};
    t.parameters[9].shape = {30, 100};
    return t;
}
bool is_matrix(std::size_t i) { return i == 1 || i == 3 || i == 4 || i == 8 || i == 9; }

// Whole numbers from 0 to 15, both in every eight: four bits hold them. They do not depend on values.
template <class S> void whole_numbers(S& s, int rank, int step, int micro) {
    using T = typename S::element_type;
    for (int m = 0; m < micro; ++m) {
        s.begin({m, micro});
        for (std::size_t i = count; i-- > 0;) {
            static_cast<void>(s.before_use(i));
            const auto g = s.gradient(i);
            for (std::size_t e = 0; e < g.size(); ++e) {
                const std::size_t x = e % 8 == 0   ? 0
                                      : e % 8 == 1 ? 15
                                                   : (e * 7 + std::size_t(rank * 5 + step + m)) % 16;
                g[e] = static_cast<T>(static_cast<float>(g[e]) + static_cast<float>(x));
            }
            s.after_use(i);
            s.gradient_ready(i);
        }
    }
    s.step({.learning_rate = 0.05, .clip_norm = 3});
}

// What a rank owns of a parameter: elements [first, first + size) of it, from element `place` of owned() on.
struct piece {
    std::size_t parameter, first, size, place;
};
std::vector<piece> pieces_of(const strategy::detail::shard_plan& plan, std::size_t b, std::size_t rank) {
    std::vector<piece> all;
    std::size_t begin = plan.bucket(b).offset;
    for (std::size_t r = 0; r < rank; ++r) { begin += plan.counts(b)[r]; }
    const std::size_t end = begin + plan.counts(b)[rank];
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = plan.buckets().offsets[i];
        const std::size_t from = std::max(at, begin), to = std::min(at + several_blocks[i], end);
        if (plan.buckets().bucket_of[i] == b && from < to) {
            all.push_back({i, from - at, to - from, plan.own(b).place + (from - begin)});
        }
    }
    return all;
}
// Bytes of a rank's part of a bucket at so many bits.
std::size_t wire_of(const strategy::detail::shard_plan& plan, std::size_t b, std::size_t rank, int bits) {
    std::size_t bytes = 0;
    for (const piece& p : pieces_of(plan, b, rank)) {
        const std::size_t as_floats = (p.size * 4 + 15) / 16 * 16;
        const std::size_t meta = (p.size + 511) / 512 * 8;
        const std::size_t codes = (p.size + 7) / 8 * static_cast<std::size_t>(bits);
        const std::size_t compressed = (meta + 15) / 16 * 16 + (codes + 15) / 16 * 16;
        bytes += is_matrix(p.parameter) && compressed <= p.size * 4 ? compressed : as_floats;
    }
    return bytes;
}

// Values are on the grid of their masters' bucket; vectors are the masters.
template <class S> void check_values(S& s, double worst_rounding) {
    const auto values = test::values_of(s, count);
    std::vector<double> seen(values.begin(), values.end());
    const auto owned = s.owned();
    const auto& plan = s.shards();
    std::size_t moved = 0;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        std::size_t me = 0;
        for (std::size_t at = plan.bucket(b).offset; me < plan.ranks(); at += plan.counts(b)[me++]) {
            if (at == plan.own(b).first && plan.counts(b)[me] == plan.own(b).count) { break; }
        }
        REQUIRE(me < plan.ranks());
        for (const piece& p : pieces_of(plan, b, me)) {
            for (std::size_t first = 0; first < p.size; first += 512) {
                const std::size_t end = std::min(first + 512, p.size);
                const auto* const masters = owned.data() + p.place;
                const auto [least, most] = std::minmax_element(masters + first, masters + end);
                const double unit = (double(*most) - double(*least)) / 255;
                for (std::size_t e = first; e < end; ++e) {
                    const double x = seen[plan.buckets().offsets[p.parameter] + p.first + e];
                    const double off = std::fabs(x - double(masters[e]));
                    const double rounding = worst_rounding * std::fabs(x) + 1e-6 * unit;
                    REQUIRE(off <= (is_matrix(p.parameter) ? unit : 0.0) + rounding);
                    if (off > rounding) { ++moved; }
                }
            }
        }
    }
    CHECK(moved > plan.owned() / 4);
}

}  // namespace

TEST_CASE("gradients that their bits hold give the masters of plain shards; all ranks have the same values near them") {
    for (const int n : {2, 4}) {
        for_stages([&](auto stage) {
            CAPTURE(n);
            CAPTURE(int(stage));
            std::vector<std::vector<float>> values(static_cast<std::size_t>(n));
            threads::launch(n, [&](threads& world) {
                auto t = matrices<float>(), u = matrices<float>();
                tested<stage> s(counted(world.duplicate("a")), {}, {.bucket_bytes = bucket_bytes});
                tested<stage, strategy::plain_shards> plain(counted(world.duplicate("b")), {},
                                                            {.bucket_bytes = bucket_bytes});
                s.attach(t.parameters);
                plain.attach(u.parameters);
                check_values(s, 1e-6);  // from attach on
                for (int step = 0; step < 2; ++step) {
                    const int micro = stage == 1 ? 1 : 2;  // stage 1 sends the sum of micro-batches
                    whole_numbers(s, world.rank(), step, micro);
                    whole_numbers(plain, world.rank(), step, micro);
                }
                const auto mine = s.owned(), exact = plain.owned();
                REQUIRE(mine.size() == exact.size());
                CHECK(std::memcmp(mine.data(), exact.data(), mine.size_bytes()) == 0);
                check_values(s, 1e-6);
                values[static_cast<std::size_t>(world.rank())] = test::values_of(s, count);
                s.publish();  // again: nothing changes
                CHECK(same_bytes(test::values_of(s, count), values[static_cast<std::size_t>(world.rank())]));
                s.finish();
                plain.finish();
            });
            for (const auto& other : values) { CHECK(same_bytes(other, values[0])); }
        });
    }
}

TEST_CASE("either may go as it is; values of 16 bits are made of masters that were not rounded before") {
    threads::launch(2, [&](threads& world) {
        auto t = matrices<float>(), u = matrices<float>(), v = matrices<float>();
        tested<2, compressed_shards<as_is, quantize>> values(counted(world.duplicate("a")), {},
                                                             {.bucket_bytes = bucket_bytes});
        tested<2, compressed_shards<quantize, as_is>> gradients(counted(world.duplicate("b")), {},
                                                                {.bucket_bytes = bucket_bytes});
        tested<2, strategy::plain_shards> plain(counted(world.duplicate("c")), {}, {.bucket_bytes = bucket_bytes});
        values.attach(t.parameters);
        gradients.attach(u.parameters);
        plain.attach(v.parameters);
        whole_numbers(values, world.rank(), 0, 1);
        whole_numbers(gradients, world.rank(), 0, 1);
        whole_numbers(plain, world.rank(), 0, 1);
        check_values(values, 1e-6);
        CHECK(same_bytes(test::values_of(gradients, count), test::values_of(plain, count)));
        CHECK(std::memcmp(values.owned().data(), plain.owned().data(), plain.owned().size_bytes()) == 0);

        auto w = matrices<bfloat16>();
        tested<3, in_bits, bfloat16> half(counted(world.duplicate("d")), {}, {.bucket_bytes = bucket_bytes});
        half.attach(w.parameters);
        whole_numbers(half, world.rank(), 0, 1);
        check_values(half, 1.0 / 256);
        half.finish();
    });
}

TEST_CASE("bytes sent and held are those of the documentation") {
    for (const int n : {1, 3}) {
        for_stages([&](auto stage) {
            CAPTURE(n);
            CAPTURE(int(stage));
            constexpr int micro = 2;
            threads::launch(n, [&](threads& world) {
                counted c(world.duplicate("dp"));
                const auto ledger = c.traffic_ledger();
                auto t = matrices<float>();
                tested<stage> s(std::move(c), {}, {.bucket_bytes = bucket_bytes}, {.feedback = true});
                s.attach(t.parameters);
                train_sharded(s, count, world.rank(), n, {.steps = 1, .micro = micro});
                s.flush();
                const auto before = ledger->snapshot();
                train_sharded(s, count, world.rank(), n, {.steps = 1, .micro = micro});
                s.flush();
                const auto step = ledger->snapshot() - before;

                const auto& plan = s.shards();
                const auto rank = static_cast<std::size_t>(world.rank());
                std::size_t gradients = 0, values = 0, buckets = 0;
                for (std::size_t b = 0; b < plan.size(); ++b) {
                    buckets += plan.bucket(b).size != 0;
                    values += wire_of(plan, b, rank, 8);
                    for (std::size_t r = 0; r < plan.ranks(); ++r) {
                        if (r != rank) { gradients += wire_of(plan, b, r, 4); }
                    }
                }
                REQUIRE(buckets > 1);
                const auto times = static_cast<std::uint64_t>(stage == 1 ? 1 : micro);
                CHECK(step[collective::all_to_all_v] == comm::traffic{times * buckets, times * gradients});
                CHECK(step[collective::reduce_scatter_v] == comm::traffic{});
                const auto gathered = step[collective::all_gather] + step[collective::all_gather_v];
                const auto others = static_cast<std::uint64_t>(n - 1);
                if (stage != 3) { CHECK(gathered == comm::traffic{buckets, others * values}); }
                CHECK(step.total() == step[collective::all_to_all_v] + gathered + step[collective::all_reduce]);

                const std::size_t P = plan.buckets().elements, p = plan.owned(), two = 2 * plan.largest_bucket();
                const std::size_t blocks = (P + 4095) / 4096;
                const std::size_t shared =
                    strategy::detail::sharded_norm<threads, float>(host_queue(), plan).shared_elements();
                std::size_t floats = 3 * p + shared + (stage == 1 ? P + p : p + two) + (stage == 3 ? two : 0) + P;
                CHECK(world.queue().account().live() == 4 * floats + 8 * (blocks + 1) + 8 + 16);
                s.finish();
            });
        });
    }
}

TEST_CASE("a resumed run continues bit by bit, and not without what the exchange keeps") {
    constexpr int n = 2;
    const strategy::zero_options options{.bucket_bytes = bucket_bytes};
    const in_bits exchange{.feedback = true, .seed = 3};
    const auto train = [&](auto& s, int rank, int first) {
        for (int step = first; step < first + 2; ++step) {
            for (int m = 0; m < 2; ++m) {
                const double scale = step < 2 ? 4 : 8;
                s.begin({.index = m, .count = 2, .loss_scale = scale});
                test::pass(s, count, static_cast<std::uint64_t>((step * n + rank) * 2 + m), scale / 2);
            }
            s.step({0.05, 20});
        }
    };
    for_stages([&](auto stage) {
        std::vector<test::saved_state> checkpoint(n), ends(n);
        std::vector<std::vector<float>> straight(n);
        threads::launch(n, [&](threads& world) {
            const auto rank = static_cast<std::size_t>(world.rank());
            auto t = matrices<float>();
            tested<stage> s(counted(world.duplicate("dp")), {}, options, exchange);
            s.attach(t.parameters);
            train(s, world.rank(), 0);
            CHECK(s.exchange().owed().size() == s.shards().buckets().elements);
            checkpoint[rank] = saved(s);
            train(s, world.rank(), 2);
            ends[rank] = saved(s);
            straight[rank] = test::values_of(s, count);
        });
        for (const std::string without : {"", "exchange/residual", "exchange/passes", "exchange/loss_scale"}) {
            CAPTURE(without);
            threads::launch(n, [&](threads& world) {
                const auto rank = static_cast<std::size_t>(world.rank());
                auto t = matrices<float>();
                tested<stage> s(counted(world.duplicate("dp")), {}, options, exchange);
                s.attach(t.parameters);
                const auto from = checkpoint[rank];
                REQUIRE(s.state().size() == from.size());
                for (std::size_t k = 0; k < from.size(); ++k) {
                    const auto& e = s.state()[k];
                    if (e.name != without) { std::copy(from[k].begin(), from[k].end(), e.data.begin()); }
                }
                s.restored();
                train(s, world.rank(), 2);
                const auto values = test::values_of(s, count);
                CHECK(same_bytes(values, straight[rank]) == without.empty());
                if (without.empty()) { CHECK(saved(s) == ends[rank]); }
            });
        }
    });
}

TEST_CASE("one rank's bad gradient, in a matrix or a vector, skips the step on all and leaves nothing behind") {
    constexpr int n = 3;
    for_stages([&](auto stage) {
        threads::launch(n, [&](threads& world) {
            auto t = matrices<float>();
            tested<stage> s(counted(world.duplicate("dp")), {}, {.bucket_bytes = bucket_bytes}, {.feedback = true});
            s.attach(t.parameters);
            train_sharded(s, count, world.rank(), n, {.steps = 1});
            const auto values = test::values_of(s, count);
            const std::vector<float> masters(s.owned().begin(), s.owned().end());
            for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
                for (const std::size_t where : {1u, 7u}) {
                    s.begin({});
                    test::pass(s, count, 9, 1, [&](std::size_t i, const auto& g) {
                        if (world.rank() == 1 && i == where) { g[4000] = bad; }
                    });
                    CHECK(s.step({0.1, 1}).skipped);
                    CHECK(same_bytes(test::values_of(s, count), values));
                    CHECK(std::memcmp(masters.data(), s.owned().data(), s.owned().size_bytes()) == 0);
                }
            }
            bool finite = true;
            for (const float x : s.exchange().owed()) { finite = finite && std::isfinite(x); }
            CHECK(finite);
            s.begin({});
            test::pass(s, count, 9, 1);
            CHECK_FALSE(s.step({0.1, 1}).skipped);
            s.finish();
        });
    });
}

TEST_CASE("training converges, with four bits of gradients and eight of values") {
    const auto distance = [](const std::vector<float>& values) {
        double sum = 0;
        for (std::size_t e = 0; e < values.size(); ++e) {
            sum += std::pow(double(values[e]) - test::random_element<double>(77, e), 2);
        }
        return sum / static_cast<double>(values.size());
    };
    threads::launch(2, [&](threads& world) {
        auto t = matrices<float>();
        tested<3> s(counted(world.duplicate("dp")), {.weight_decay = 0}, {.bucket_bytes = bucket_bytes});
        s.attach(t.parameters);
        const double before = distance(test::values_of(s, count));
        for (int step = 0; step < 40; ++step) {
            s.begin({});
            for (std::size_t i = count; i-- > 0;) {
                const auto x = s.before_use(i);
                const auto g = s.gradient(i);
                for (std::size_t e = 0; e < g.size(); ++e) {  // ranks differ by what adds up to nothing
                    const std::size_t at = s.shards().buckets().offsets[i] + e;
                    const double apart = (world.rank() == 0 ? 0.2 : -0.2) * test::random_element<double>(78, at);
                    g[e] += static_cast<float>(double(x[e]) - test::random_element<double>(77, at) + apart);
                }
                s.after_use(i);
                s.gradient_ready(i);
            }
            s.step({step < 30 ? 0.1 : 0.02});
        }
        CHECK(distance(test::values_of(s, count)) < before / 50);
        s.finish();
    });
}

TEST_CASE("with feedback, what arrived and what is owed add up to all gradients") {
    constexpr int n = 2, steps = 3;
    std::vector<std::vector<float>> owed(n);
    threads::launch(n, [&](threads& world) {
        auto t = matrices<float>();
        zero<2, counted, optimize::sgd, float, in_bits> s(counted(world.duplicate("dp")), {.momentum = 0},
                                                          {.bucket_bytes = bucket_bytes}, {.feedback = true});
        s.attach(t.parameters);
        const std::vector<float> before(s.owned().begin(), s.owned().end());
        const auto gradient = [](std::size_t step, std::size_t rank, std::size_t e) {
            return test::random_element<float>(90 + step * n + rank, e);
        };
        const auto& offsets = s.shards().buckets().offsets;
        for (std::size_t step = 0; step < steps; ++step) {
            s.begin({});
            for (std::size_t i = count; i-- > 0;) {
                const auto g = s.gradient(i);
                for (std::size_t e = 0; e < g.size(); ++e) {
                    g[e] += gradient(step, static_cast<std::size_t>(world.rank()), offsets[i] + e);
                }
                s.gradient_ready(i);
            }
            s.step({1});
        }
        std::vector<float> debt(s.exchange().owed().begin(), s.exchange().owed().end());
        world.all_reduce(view<const float>(debt), view<float>(debt), sum{});
        double worst = 0, largest = 0;
        for (std::size_t b = 0; b < s.shards().size(); ++b) {
            const auto& own = s.shards().own(b);
            for (std::size_t k = 0; k < own.count; ++k) {
                double all = 0;
                for (std::size_t step = 0; step < steps; ++step) {
                    for (std::size_t rank = 0; rank < n; ++rank) { all += gradient(step, rank, own.first + k); }
                }
                const double arrived = double(before[own.place + k]) - double(s.owned()[own.place + k]);
                worst = std::max(worst, std::fabs(arrived + double(debt[own.first + k]) / n - all / n));
                largest = std::max(largest, std::fabs(double(debt[own.first + k])));
            }
        }
        CHECK(worst < 1e-5);
        CHECK(largest > 1e-2);
        s.finish();
    });
}

TEST_CASE("values of equal masters are drawn anew after each update, and not between; ranks draw their own numbers") {
    std::vector<std::vector<float>> owed(3);
    threads::launch(3, [&](threads& world) {
        auto t = matrices<float>();
        tested<3> s(counted(world.duplicate("dp")), {}, {.bucket_bytes = bucket_bytes}, {.feedback = true});
        s.attach(t.parameters);
        const auto first = test::values_of(s, count);
        CHECK(same_bytes(test::values_of(s, count), first));
        s.begin({});
        test::pass(s, count, 1, 1);
        s.step({0});
        CHECK_FALSE(same_bytes(test::values_of(s, count), first));
        check_values(s, 1e-6);
        owed[static_cast<std::size_t>(world.rank())].assign(s.exchange().owed().begin(), s.exchange().owed().end());
        std::set<std::uint32_t> tensors;
        std::size_t segments = 0;
        for (const auto parts : {s.exchange().gradient_parts(), s.exchange().value_parts()}) {
            for (const auto& of_bucket : parts) {
                for (const auto& segment : of_bucket.all()) { tensors.insert(segment.tensor), ++segments; }
            }
        }
        CHECK(tensors.size() == segments);
    });
    std::size_t differ = 0;  // the same gradients, where neither rank is the owner
    for (std::size_t e = 0; e < owed[0].size(); ++e) {
        differ += owed[0][e] != 0 && owed[1][e] != 0 && owed[0][e] != owed[1][e];
    }
    CHECK(differ > 1000);
}

TEST_CASE("settings that make no sense are refused, and ranks that differ in them") {
    CHECK(refusal([] { in_bits{.gradient_level = 9}.validate(); }) ==
          "quantize: tensor 0 has level 9; bits are 1 to 8");
    CHECK(refusal([] { in_bits{.value_level = 0}.validate(); }) ==
          "compressed shards: values at level 0, which compresses nothing; as_is in place of their compressor leaves "
          "them as they are");
    CHECK(refusal([] { compressed_shards<as_is>{.feedback = true}.validate(); }) ==
          "compressed shards: feedback is of compressed gradients, these go as they are");
    threads::launch(1, [](threads& world) {
        CHECK_THROWS_AS(tested<2>(counted(world.duplicate("level")), {}, {}, {.gradient_level = 9}), usage_error);
        auto t = matrices<bfloat16>();
        tested<3, in_bits, bfloat16> s(counted(world.duplicate("rounded")), {}, {.stochastic_rounding_seed = 1});
        CHECK(refusal([&] { s.attach(t.parameters); }) ==
              "attach: values that are compressed are rounded by their compressor; leave out stochastic_rounding_seed");
    });
    threads::launch(2, [&](threads& world) {
        auto u = matrices<float>();
        tested<2> r(counted(world.duplicate("dp")), {}, {}, {.value_level = 7 + world.rank()});
        CHECK_THROWS_AS(r.attach(u.parameters), mismatch_error);
    });
    threads::launch(2, [&](threads& world) {
        auto u = matrices<float>();
        const auto mode = world.rank() == 0 ? compress::rounding::stochastic : compress::rounding::nearest;
        tested<2> r(counted(world.duplicate("dp")), {}, {}, {.gradients = compress::quantize(512, mode)});
        CHECK_THROWS_AS(r.attach(u.parameters), mismatch_error);
    });
}

TEST_CASE("the same code runs where there is no memory") {
    strategy::parameters<bfloat16, phantom_memory> list{{"p0", {100, 10}, true, {nullptr, 1000}, {}},
                                                        {"p1", {300}, true, {nullptr, 300}, {}}};
    const virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    zero<3, comm::self<virtual_queue>, adamw, bfloat16, in_bits> s(comm::self<virtual_queue>(q), {}, {},
                                                                   {.feedback = true});
    s.attach(list);
    for (int step = 0; step < 2; ++step) {
        s.begin({});
        for (const std::size_t i : {1u, 0u}) {
            static_cast<void>(s.before_use(i));
            static_cast<void>(s.gradient(i));
            s.after_use(i);
            s.gradient_ready(i);
        }
        CHECK(s.step({.learning_rate = 0.1, .clip_norm = 1}).norm == 0);
    }
    s.finish();
    CHECK(resolve(q.recording())[0] > 0);
}
