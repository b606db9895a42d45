// Attention over rings in double: against the direct solution, for lengths, rings and zones of all kinds.
#include <doctest/doctest.h>  // checks

#include <cmath>    // gradient check
#include <cstddef>  // size_t
#include <cstdint>  // lengths
#include <mutex>    // results of ranks
#include <vector>   // data

#include <sequence/problem.hpp>               // direct solution
#include <tutti/core/reduce_op.hpp>           // sum
#include <tutti/sequence/host_attention.hpp>  // kernel
#include <tutti/sequence/ring_attention.hpp>  // under test

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

constexpr double bar = 1e-12;

using engine = ring_attention<comm::threads, host_attention<double>>;
engine make(comm::threads c, const problem& p) { return engine(std::move(c), p.heads, {.rule = p.rule}); }

void expect_solved(const problem& p, const placement& where, const solution& reference) {
    const solution got = solved_together<double>(p, where, make);
    CHECK(between(got, reference).absolute <= bar);
}
void expect_solved(const problem& p, const placement& where) { expect_solved(p, where, solved_directly(p)); }

// Two nodes of three ranks; rings of both, of one, of one rank, in orders that are not those of the ranks; some empty.
placement mixed_zones() {
    return placed(
        {2, 3}, {61, 20, 8, 33, 5, 0, 47, 11, 1, 17, 3, 26},
        {{4, 1, 3, 0}, {2, 0}, {3}, {5, 4, 3}, {1}, {0, 1}, {0, 1, 2, 3, 4, 5}, {3}, {5, 0}, {3, 4}, {}, {2, 1, 0}});
}

}  // namespace

TEST_CASE("a ring gives what one device gives: causal and full, heads in groups, strided rows") {
    // pytorch/pytorch#141429 (full with balanced chunks), #129515 (rows that are not contiguous, and what forward saved);
    // SandAI-org/MagiAttention#122 (results that depended on the mask).
    for (const mask rule : {mask::causal, mask::full}) {
        for (const attention_heads heads :
             {attention_heads{1, 1, 4}, attention_heads{4, 2, 3}, attention_heads{3, 1, 5}}) {
            const problem p(heads, {57, 24, 9}, rule);
            const solution reference = solved_directly(p);
            for (const int ranks : full_speed ? std::vector{1, 2, 3, 4, 8} : std::vector{1, 3, 4}) {
                CAPTURE(ranks);
                expect_solved(p, on_all(ranks, p.lengths), reference);
            }
        }
    }
}

TEST_CASE("lengths need not divide, be as long as the ring, or be anything") {
    // NVIDIA/TransformerEngine#1930 (7 on 2 ranks taken for 6), #3331 (698 on 4), #2186 (these six lengths);
    // zhuzilin/ring-flash-attention#39 (odd total), #51, pytorch/torchtitan#2536 (137, 2041, 89);
    // NVIDIA-NeMo/Megatron-Bridge#4489 (empty ones at the end).
    const problem all({1, 1, 4}, {1, 7, 9, 12, 57, 137, 9, 8, 8, 12, 8, 12, 89, 129, 0, 0}, mask::causal);
    const solution reference = solved_directly(all);
    for (const int ranks : full_speed ? std::vector{1, 2, 3, 4, 5, 6, 7, 8, 12, 16} : std::vector{2, 5, 16}) {
        CAPTURE(ranks);
        expect_solved(all, on_all(ranks, all.lengths), reference);
    }
    if (!full_speed) { return; }
    const problem larger({1, 1, 2}, {698, 2041, 4097}, mask::causal);
    const solution of_larger = solved_directly(larger);
    for (const int ranks : {4, 7, 16}) {
        CAPTURE(ranks);
        expect_solved(larger, on_all(ranks, larger.lengths), of_larger);
    }
}

TEST_CASE("sequences of all zones, many on a rank, some of one token or none") {
    for (const mask rule : {mask::causal, mask::full}) {
        placement where = mixed_zones();
        where.lengths[10] = 0;  // has no ring
        const problem p({4, 2, 4}, where.lengths, rule, 5);
        expect_solved(p, where);
    }
}

TEST_CASE("ranks without tokens, and batches without any") {
    // SandAI-org/MagiAttention#9: no work on a rank.
    const problem p({1, 1, 3}, {12, 1, 2}, mask::causal);
    expect_solved(p, placed({1, 4}, p.lengths, {{2, 0}, {0, 1, 2}, {2}}));
    const problem none({1, 1, 3}, {}, mask::causal);
    expect_solved(none, on_all(3, {}));
    const problem empty({1, 1, 3}, {0, 0}, mask::full);
    expect_solved(empty, on_all(3, {0, 0}));
}

TEST_CASE("many rings in one round") {
    // pytorch/pytorch#174288: hundreds of messages in a batch.
    const std::vector<std::int64_t> lengths(200, 5);
    const problem p({1, 1, 2}, lengths, mask::causal);
    expect_solved(p, on_all(2, lengths));
}

TEST_CASE("plans may change between calls, and calls of a plan repeat to the bit") {
    const problem first({2, 1, 4}, {57, 24, 9});
    const problem second({2, 1, 4}, {5, 90, 0, 33, 17}, mask::causal, 2);
    const placement of_first = on_all(3, first.lengths);
    const placement of_second = placed({1, 3}, second.lengths, {{0}, {2, 1, 0}, {1}, {0, 2}, {1}});
    std::vector<solution> got;
    for (const problem* p : {&first, &second, &first, &first}) { got.emplace_back(*p); }
    std::mutex mutex;
    comm::threads::launch(3, [&](comm::threads& world) {
        engine e(world.duplicate("attention"), first.heads);
        std::size_t n = 0;
        for (const problem* p : {&first, &second, &first, &first}) {
            const placement& where = p == &first ? of_first : of_second;
            if (n < 3) { e.plan(where); }
            rank_data<double> mine(*p, where, world.rank());
            mine.forward(e);
            mine.backward(e);
            mine.collect(got[n++], mutex, true);
        }
    });
    CHECK(between(got[0], solved_directly(first)).absolute <= bar);
    CHECK(between(got[1], solved_directly(second)).absolute <= bar);
    CHECK(same_bits(got[0], got[2]));
    CHECK(same_bits(got[0], got[3]));
}

TEST_CASE("gradients are those of the forward pass, by central differences") {
    const problem p({2, 1, 4}, {24, 24, 24}, mask::causal, 7);
    const placement where = on_all(3, p.lengths);
    comm::threads::launch(3, [&](comm::threads& world) {
        engine e(world.duplicate("attention"), p.heads);
        e.plan(where);
        rank_data<double> mine(p, where, world.rank());
        const auto total = [&](double own) {
            world.all_reduce(view<const double>(&own, 1), view<double>(&own, 1), sum{});
            return own;
        };
        // The loss is the sum over out * d_out.
        const auto loss = [&] {
            mine.forward(e);
            double own = 0;
            for (std::size_t t = 0; t < mine.tokens; ++t) {
                for (std::size_t h = 0; h < p.heads.query; ++h) {
                    for (std::size_t c = 0; c < p.heads.width; ++c) {
                        own += mine.result().at(t, h)[c] * mine.out_gradient().at(t, h)[c];
                    }
                }
            }
            return total(own);
        };
        static_cast<void>(loss());
        mine.backward(e);
        const auto along = [&](token_view<double> value, token_view<double> gradient, std::uint64_t seed) {
            const auto step = [&](double h) {
                double slope = 0;
                for (std::size_t t = 0; t < mine.tokens; ++t) {
                    for (std::size_t i = 0; i < value.heads * value.width; ++i) {
                        const double u = random_element<double>(seed + at(world.rank()), 100 * t + i);
                        value.at(t, i / value.width)[i % value.width] += h * u;
                        slope += gradient.at(t, i / value.width)[i % value.width] * u;
                    }
                }
                return total(slope);
            };
            constexpr double h = 1e-4;
            const double expected = step(h);
            double difference = loss();
            step(-2 * h);
            difference -= loss();
            step(h);
            expect(std::fabs(difference / (2 * h) - expected) <= 1e-7 * std::fabs(expected), "slope {}, expected {}",
                   difference / (2 * h), expected);
        };
        for (std::uint64_t seed = 0; seed < 40; seed += 10) {
            along(mine.query(), mine.d_query(), 1000 + seed);
            along(mine.key(), mine.d_key(), 2000 + seed);
            along(mine.value(), mine.d_value(), 3000 + seed);
        }
    });
}

TEST_CASE("a loss over valid tokens is divided by the count of all ranks, also where a rank has none") {
    // NVIDIA/Megatron-LM#1764 (a rank without valid tokens), #7513 (gradients divided by each rank's own count).
    problem p({1, 1, 4}, {40}, mask::causal, 11);
    const placement where = on_all(4, p.lengths);
    const auto valid = [](std::size_t t) { return t >= 3 && t < 8; };  // of ranks 0 and 1
    for (std::size_t t = 0; t < 40; ++t) {
        for (std::size_t c = 0; c < 4; ++c) { p.d_out[0][4 * t + c] *= valid(t) ? 1.0 / 5 : 0; }
    }
    const solution reference = solved_directly(p);
    double expected = 0;
    for (std::size_t i = 0; i < p.d_out[0].size(); ++i) { expected += reference.out[0][i] * p.d_out[0][i]; }
    solution got(p);
    std::mutex mutex;
    comm::threads::launch(4, [&](comm::threads& world) {
        engine e = make(world.duplicate("attention"), p);
        e.plan(where);
        rank_data<double> mine(p, where, world.rank());
        mine.forward(e);
        double own[2] = {0, 0};  // sum of out * weight, number of valid tokens
        std::size_t row = 0;
        for (const auto& piece : where.pieces[at(world.rank())]) {
            for (std::int64_t t = piece.begin; t < piece.end; ++t, ++row) {
                if (!valid(at(t))) { continue; }
                ++own[1];
                for (std::size_t c = 0; c < 4; ++c) {
                    own[0] += mine.result().at(row, 0)[c] * 5 * mine.out_gradient().at(row, 0)[c];
                }
            }
        }
        expect((own[1] == 0) == (world.rank() >= 2), "rank {} has {} valid tokens", world.rank(), own[1]);
        world.all_reduce(view<const double>(own, 2), view<double>(own, 2), sum{});
        expect(std::fabs(own[0] / own[1] - expected) <= bar, "loss {}, expected {}", own[0] / own[1], expected);
        mine.backward(e);
        mine.collect(got, mutex, true);
    });
    CHECK(between(got, reference).absolute <= bar);
    for (std::size_t i = 4 * 8; i < got.d_key[0].size(); ++i) { CHECK(got.d_key[0][i] == 0); }
}
