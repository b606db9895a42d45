// Attention that gathers keys and values, or exchanges tokens for heads: against the direct solution, and the ring.
#include <doctest/doctest.h>  // checks

#include <array>    // totals
#include <cstddef>  // size_t
#include <cstdint>  // lengths
#include <string>   // messages
#include <vector>   // data

#include <sequence/problem.hpp>                  // direct solution
#include <tutti/comm/counted.hpp>                // ledger
#include <tutti/sequence/gather_attention.hpp>   // under test
#include <tutti/sequence/host_attention.hpp>     // kernel
#include <tutti/sequence/ring_attention.hpp>     // the other way
#include <tutti/sequence/ulysses_attention.hpp>  // under test

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

template <class T> using ring_of = ring_attention<comm::threads, host_attention<T>>;
template <class T> using gather_of = gather_attention<comm::threads, host_attention<T>>;
template <class T> using ulysses_of = ulysses_attention<comm::threads, host_attention<T>>;

// Computes delta by itself, as libraries of kernels do.
struct own_delta : host_attention<double> {
    static constexpr bool wants_out = true;
    void backward(host_queue q, backward_block<double, host_memory> b) {
        std::vector<double> own(b.query.tokens * b.query.heads);
        const token_view<double> delta = numbers_by_head(view<double>(own), b.query.tokens, b.query.heads);
        expect(b.out.same_shape(b.query) && b.delta.empty(), "out is not there, or delta is");
        run(q, dot_tokens_operation<double, host_memory>{b.d_out, b.out, delta});
        b.delta = delta;
        host_attention<double>::backward(q, b);
    }
};

template <template <class> class Engine, class T = double>
solution solved_by(const problem& p, const placement& where) {
    return solved_together<T>(
        p, where, [](comm::threads c, const problem& q) { return Engine<T>(std::move(c), q.heads, {.rule = q.rule}); });
}

// Rings of 1, 2 and 3 ranks: what divides 6 heads.
placement several_rings() {
    return placed({2, 2}, {37, 16, 5, 1, 0, 23, 9, 2, 30},
                  {{3, 1}, {0, 1, 2}, {2}, {1, 2}, {0, 1}, {3, 2, 0}, {1}, {2, 3, 1}, {0}});
}

// The bytes that each rank sends forward and backward.
template <class Engine, class T>
std::vector<std::array<std::uint64_t, 2>> sent(const problem& p, const placement& where) {
    std::vector<std::array<std::uint64_t, 2>> bytes(where.pieces.size());
    comm::threads::launch(static_cast<int>(where.pieces.size()), [&](comm::threads& world) {
        comm::counted<comm::threads> c(world.duplicate("counted"));
        const auto ledger = c.traffic_ledger();
        Engine e(std::move(c), p.heads);
        e.plan(where);
        rank_data<T> mine(p, where, world.rank());
        mine.forward(e);
        auto& mine_sent = bytes[at(world.rank())];
        mine_sent[0] = ledger->total().bytes;
        mine.backward(e);
        mine_sent[1] = ledger->total().bytes - mine_sent[0];
    });
    return bytes;
}
// Tokens of the sequence that each rank has.
std::vector<std::uint64_t> tokens_of_sequence(const placement& where, int sequence) {
    std::vector<std::uint64_t> tokens(where.pieces.size());
    for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
        for (const auto& piece : where.pieces[rank]) {
            if (piece.sequence == sequence) { tokens[rank] += at(piece.end - piece.begin); }
        }
    }
    return tokens;
}

}  // namespace

TEST_CASE("gathered keys and values give the bits of the ring") {
    for (const mask rule : {mask::causal, mask::full}) {
        const placement where = several_rings();
        const problem p({4, 2, 3}, where.lengths, rule);
        const solution got = solved_by<gather_of>(p, where);
        CHECK(between(got, solved_directly(p)).absolute <= 1e-12);
        CHECK(same_bits(got, solved_by<ring_of>(p, where)));
        CHECK(
            same_bits(solved_by<gather_of, tutti::bfloat16>(p, where), solved_by<ring_of, tutti::bfloat16>(p, where)));
    }
}

TEST_CASE("exchanged heads give the bits of one rank") {
    for (const mask rule : {mask::causal, mask::full}) {
        for (const attention_heads heads : {attention_heads{6, 6, 2}, attention_heads{12, 6, 3}}) {
            if (!full_speed && heads.query == heads.kv) { continue; }
            const placement where = several_rings();
            problem p(heads, where.lengths, rule);
            const solution got = solved_by<ulysses_of>(p, where);
            CHECK(between(got, solved_directly(p)).absolute <= 1e-12);
            const std::vector<std::vector<int>> alone(where.lengths.size(), {0});
            CHECK(same_bits(got, solved_by<ulysses_of>(p, placed({1, 1}, where.lengths, alone))));
            p.round_to<tutti::bfloat16>();
            CHECK(between(solved_by<ulysses_of, tutti::bfloat16>(p, where), solved_directly(p)).relative <= 4e-3);
        }
    }
}

TEST_CASE("exchanged heads keep no memory for partial results") {
    const placement where = placed({1, 2}, {40, 12}, {{0, 1}, {0, 1}});
    comm::threads::launch(2, [&](comm::threads& world) {
        comm::threads own = world.duplicate("attention");
        const host_queue q = own.queue();
        const std::size_t before = q.account().live();
        ulysses_of<double> e(std::move(own), {4, 2, 8});
        e.plan(where);
        expect(q.account().live() == before, "a plan keeps {} bytes", q.account().live() - before);
    });
}

TEST_CASE("ranks that do not divide the heads are refused, on all of them") {
    // deepspeedai/DeepSpeed#7384, #5177: silently wrong.
    const placement where = several_rings();
    comm::threads::launch(4, [&](comm::threads& world) {
        const auto refuses = [&](attention_heads heads, std::string_view text) {
            ulysses_of<double> e(world.duplicate("attention"), heads);
            std::string said;
            try {
                e.plan(where);
            } catch (const usage_error& error) { said = error.what(); }
            expect(said == text, "'{}' instead of '{}'", said, text);
        };
        refuses({8, 4, 2}, "ulysses_attention: 3 ranks of sequence 1 do not divide 8 query heads and 4 kv heads");
        refuses({6, 3, 2}, "ulysses_attention: 2 ranks of sequence 0 do not divide 6 query heads and 3 kv heads");
    });
    // What was refused is not planned.
    CHECK_THROWS_WITH_AS(comm::threads::launch(4,
                                               [&](comm::threads& world) {
                                                   ulysses_of<double> e(world.duplicate("attention"), {2, 2, 2});
                                                   try {
                                                       e.plan(where);
                                                   } catch (const usage_error&) {}
                                                   e.forward({}, {}, {}, {}, {});
                                               }),
                         "attention: no plan", usage_error);
}

TEST_CASE("kernels that want out are given it") {
    const placement where = several_rings();
    const problem p({6, 6, 3}, where.lengths);
    const solution expected = solved_by<ulysses_of>(p, where);
    CHECK(same_bits(solved_together<double>(p, where,
                                            [](comm::threads c, const problem& of) {
                                                return ulysses_attention<comm::threads, own_delta>(std::move(c),
                                                                                                   of.heads);
                                            }),
                    expected));
    CHECK(same_bits(solved_together<double>(p, where,
                                            [](comm::threads c, const problem& of) {
                                                return ring_attention<comm::threads, own_delta>(std::move(c), of.heads);
                                            }),
                    solved_by<ring_of>(p, where)));
}

TEST_CASE("the bytes sent are those of the formulas") {
    using counted = comm::counted<comm::threads>;
    const placement where = several_rings();
    const problem p({12, 6, 5}, where.lengths);
    const std::uint64_t width = 5;
    const auto expected = [&](auto of_ring) {
        std::vector<std::array<std::uint64_t, 2>> bytes(where.pieces.size());
        for (const ring& r : where.rings) {
            const auto tokens = tokens_of_sequence(where, r.sequence);
            for (const int rank : r.ranks) {
                const auto b = of_ring(std::uint64_t{r.ranks.size()}, tokens[at(rank)],
                                       static_cast<std::uint64_t>(where.lengths[at(r.sequence)]));
                bytes[at(rank)][0] += b[0];
                bytes[at(rank)][1] += b[1];
            }
        }
        return bytes;
    };
    using row = std::array<std::uint64_t, 2>;
    // n of s tokens; 6 kv heads.
    const auto gathers = [&](std::uint64_t element, std::uint64_t sum) {
        return expected([=](std::uint64_t g, std::uint64_t n, std::uint64_t s) {
            const std::uint64_t gathered = (g - 1) * n * 2 * 6 * width * element;
            return row{gathered, gathered + (s - n) * 2 * 6 * width * sum};
        });
    };
    CHECK(sent<gather_attention<counted, host_attention<double>>, double>(p, where) == gathers(8, 8));
    CHECK(sent<gather_attention<counted, host_attention<tutti::bfloat16>>, tutti::bfloat16>(p, where) == gathers(2, 4));
    // 12 query heads, 6 of keys, 6 of values.
    const auto exchanges = [&](std::uint64_t element, std::uint64_t sum, bool wants_out = false) {
        return expected([=](std::uint64_t g, std::uint64_t n, std::uint64_t s) {
            const std::uint64_t given = n * (g - 1);
            return row{
                (given * (12 + 2 * 6) * width * element + (s - n) * 12 * (width * element + sum)) / g,
                (given * (((wants_out ? 3 : 2) * 12 + 2 * 6) * width * element + (wants_out ? 1 : 2) * 12 * sum) +
                 (s - n) * (12 + 2 * 6) * width * element) /
                    g};
        });
    };
    CHECK(sent<ulysses_attention<counted, host_attention<double>>, double>(p, where) == exchanges(8, 8));
    CHECK(sent<ulysses_attention<counted, own_delta>, double>(p, where) ==
          exchanges(8, 8, true));  // out instead of delta
    CHECK(sent<ulysses_attention<counted, host_attention<tutti::bfloat16>>, tutti::bfloat16>(p, where) ==
          exchanges(2, 4));
}
