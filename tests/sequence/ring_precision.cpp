// Attention over rings in float, and of 16-bit numbers with sums in float: how far from the exact result.
#include <doctest/doctest.h>  // checks

#include <atomic>       // calls
#include <cstddef>      // size_t
#include <cstdint>      // bytes
#include <span>         // lengths
#include <type_traits>  // engines
#include <utility>      // move
#include <vector>       // distances

#include <sequence/problem.hpp>                 // direct solution
#include <tutti/comm/counted.hpp>               // ledger
#include <tutti/core/buffer.hpp>                // sums of final blocks
#include <tutti/sequence/gather_attention.hpp>  // under test
#include <tutti/sequence/host_attention.hpp>    // kernel
#include <tutti/sequence/ring_attention.hpp>    // under test
#include <tutti/sequence/token_operations.hpp>  // rounding

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

// The numbers of T that the problem is made of, solved by a ring of T and in double: how far apart.
template <class T> class errors {
    problem p_;
    solution reference_;

    static problem rounded(mask rule) {
        problem p({4, 2, 16}, {full_speed ? 128 : 64, 61}, rule, 3);
        p.round_to<T>();
        return p;
    }

public:
    explicit errors(mask rule) : p_(rounded(rule)), reference_(solved_directly(p_)) {}
    std::vector<distance> on(int ranks) const {
        const solution got = solved_together<T>(p_, on_all(ranks, p_.lengths), [](comm::threads c, const problem& q) {
            return ring_attention<comm::threads, host_attention<T>>(std::move(c), q.heads, {.rule = q.rule});
        });
        std::vector<distance> all;
        for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
            all.push_back(between(got.*which, reference_.*which));
        }
        all.push_back(between(got.log_sum_exp, reference_.log_sum_exp));
        return all;
    }
};

// The host's kernel with all that a kernel may offer: final blocks, and gradients that it starts.
struct willing : host_attention<tutti::bfloat16> {
    using T = tutti::bfloat16;
    using base = host_attention<T>;
    static constexpr bool starts_gradients = true;
    using sums = buffer<float>;

    using base::forward;
    void forward(host_queue q, const final_forward_block<T, host_memory>& b) {
        sums memory(q, b.out.size());
        const auto out = beside(memory, b.out);
        base::forward(q, {b.query, b.key, b.value, b.seen, b.scale, out, b.log_sum_exp});
        copy_tokens(q, out, b.out);
    }
    void backward(host_queue q, backward_block<T, host_memory> b) {
        if (b.starts_query) { fill_tokens(q, b.d_query, 0.0f); }
        if (b.starts_keys) {
            fill_tokens(q, b.d_key, 0.0f);
            fill_tokens(q, b.d_value, 0.0f);
        }
        base::backward(q, b);
    }
    void backward(host_queue q, const final_backward_block<T, host_memory>& b) {
        sums of_query(q, b.d_query.size()), of_key(q, b.d_key.size()), of_value(q, b.d_value.size());
        const auto d_query = beside(of_query, b.d_query), d_key = beside(of_key, b.d_key),
                   d_value = beside(of_value, b.d_value);
        backward(q, backward_block<T, host_memory>{b.query, b.key, b.value, b.seen, b.scale, b.d_out, b.out,
                                                   b.log_sum_exp, b.delta, d_query, d_key, d_value, true, true});
        copy_tokens(q, d_query, b.d_query);
        copy_tokens(q, d_key, b.d_key);
        copy_tokens(q, d_value, b.d_value);
    }

private:
    static token_view<float> beside(const sums& memory, const token_view<T>& result) {
        return {memory.view(), result.tokens, result.heads, result.width};
    }
};
static_assert(final_attention<willing> && !final_attention<host_attention<tutti::bfloat16>>);

// Takes packed blocks as well: sequence by sequence, but it is one call.
struct packing : willing {
    using willing::backward;
    using willing::forward;
    inline static std::atomic<int> calls = 0, sequences = 0;
    void forward(host_queue q, const packed_forward_block<T, host_memory>& b) {
        each(b.lengths, b.all.query.tokens, [&](std::size_t first, std::size_t n) {
            const auto of = [&](const auto& v) { return v.rows(first, n); };
            const auto& a = b.all;
            willing::forward(q, final_forward_block<T, host_memory>{of(a.query), of(a.key), of(a.value), a.seen,
                                                                    a.scale, of(a.out), of(a.log_sum_exp)});
        });
    }
    void backward(host_queue q, const packed_backward_block<T, host_memory>& b) {
        each(b.lengths, b.all.query.tokens, [&](std::size_t first, std::size_t n) {
            const auto of = [&](const auto& v) { return v.rows(first, n); };
            const auto& a = b.all;
            willing::backward(q, final_backward_block<T, host_memory>{
                                     of(a.query), of(a.key), of(a.value), a.seen, a.scale, of(a.d_out), of(a.out),
                                     of(a.log_sum_exp), of(a.delta), of(a.d_query), of(a.d_key), of(a.d_value)});
        });
    }

private:
    template <class F> static void each(std::span<const std::size_t> lengths, std::size_t tokens, F f) {
        ++calls;
        std::size_t first = 0;
        for (const std::size_t n : lengths) {
            ++sequences;
            f(first, n);
            first += n;
        }
        expect(first == tokens, "lengths of {} rows, there are {}", first, tokens);
    }
};
static_assert(packed_attention<packing> && !packed_attention<willing>);

// Rounds what it makes of any block, and computes delta by itself, as libraries do.
struct rounding : willing {
    static constexpr bool rounds_blocks = true;
    static constexpr bool wants_out = true;
    using willing::forward;
    void forward(host_queue, const forward_block<T, host_memory>&) { expect(false, "a block that is not final"); }
    using willing::backward;
    void backward(host_queue q, const final_backward_block<T, host_memory>& b) {
        expect(b.delta.empty(), "delta is there");
        buffer<float> own(q, b.query.tokens * b.query.heads);
        const auto delta = numbers_by_head(own.view(), b.query.tokens, b.query.heads);
        run(q, dot_tokens_operation<T, host_memory>{b.d_out, b.out, delta});
        auto whole = b;
        whole.delta = delta;
        willing::backward(q, whole);
    }
};
static_assert(rounds_blocks<rounding> && !rounds_blocks<willing>);

}  // namespace

TEST_CASE("final blocks and gradients that kernels start change no bit") {
    const placement where =
        placed({1, 3}, {61, 20, 1, 5, 33, 0, 7, 2, 12}, {{0, 1, 2}, {1}, {2, 0}, {2, 1}, {0}, {}, {1}, {0}, {1}});
    for (const mask rule : {mask::causal, mask::full}) {
        problem p({4, 2, 16}, where.lengths, rule, 9);
        p.round_to<tutti::bfloat16>();
        const auto solved = [&]<class Engine>(std::type_identity<Engine>) {
            return solved_together<tutti::bfloat16>(p, where, [](comm::threads c, const problem& q) {
                return Engine(std::move(c), q.heads, {.rule = q.rule});
            });
        };
        using plain = ring_attention<comm::threads, host_attention<tutti::bfloat16>>;
        const solution reference = solved(std::type_identity<plain>());
        const solution by_ring = solved(std::type_identity<ring_attention<comm::threads, willing>>());
        const solution gathered = solved(std::type_identity<gather_attention<comm::threads, willing>>());
        packing::calls = packing::sequences = 0;
        const solution packed = solved(std::type_identity<gather_attention<comm::threads, packing>>());
        // Rank 0 has two sequences by itself, rank 1 has three, rank 2 none: a call of each of the two a direction.
        CHECK(packing::sequences == 2 * 5);
        CHECK(packing::calls == 2 * 2);
        const solution packed_by_ring = solved(std::type_identity<ring_attention<comm::threads, packing>>());
        CHECK(packing::sequences == 4 * 5);
        for (const auto which :
             {&solution::out, &solution::log_sum_exp, &solution::d_query, &solution::d_key, &solution::d_value}) {
            CHECK(by_ring.*which == reference.*which);
            CHECK(gathered.*which == reference.*which);
            CHECK(packed.*which == reference.*which);
            CHECK(packed_by_ring.*which == reference.*which);
        }
    }
}

TEST_CASE("blocks that kernels round are summed in float") {
    // Rings of two, in which nothing is summed but two results; of three; larger ones; members without tokens.
    const std::vector<placement> all{
        placed({1, 2}, {61, 20, 33}, {{0, 1}, {1}, {1, 0}}),
        placed({1, 3}, {61, 20, 3}, {{0, 1, 2}, {2, 0}, {1, 0, 2}}),
        placed({1, 5}, {61, 20, 1, 5, 33, 0, 7, 200},
               {{0, 1, 2}, {1}, {2, 0}, {2, 1}, {0}, {}, {4, 3, 2, 1, 0}, {3, 1, 4, 0, 2}})};
    for (std::size_t i = 0; i < 2 * all.size(); ++i) {
        CAPTURE(i);
        const placement& where = all[i / 2];
        problem p({4, 2, 16}, where.lengths, i % 2 == 0 ? mask::causal : mask::full, 9);
        p.round_to<tutti::bfloat16>();
        const auto solved = [&]<class Engine>(std::type_identity<Engine>) {
            return solved_together<tutti::bfloat16>(p, where, [](comm::threads c, const problem& q) {
                return Engine(std::move(c), q.heads, {.rule = q.rule});
            });
        };
        const solution reference = solved_directly(p);
        const solution whole = solved(std::type_identity<ring_attention<comm::threads, willing>>());
        const solution got = solved(std::type_identity<ring_attention<comm::threads, rounding>>());
        CHECK(same_bits(got, solved(std::type_identity<gather_attention<comm::threads, rounding>>())));
        for (const auto which : {&solution::out, &solution::d_query, &solution::d_key, &solution::d_value}) {
            const double error = between(got.*which, reference.*which).relative;
            CHECK(error <= 4e-3);
            CHECK(error <= 1.5 * between(whole.*which, reference.*which).relative);
        }
        CHECK(between(got.log_sum_exp, reference.log_sum_exp).relative <= 1e-6);
    }
}

TEST_CASE("a sum of gradients is sent in float, one part of it as the kernel rounded it") {
    using counted = comm::counted<comm::threads>;
    using engine = ring_attention<counted, rounding>;
    const attention_heads heads{4, 2, 16};
    const std::uint64_t block = 2 * heads.kv * heads.width * sizeof(tutti::bfloat16);  // bytes a token
    const placement where = placed({1, 4}, {96, 80}, {{0, 1, 2, 3}, {2, 0}});
    const problem p(heads, where.lengths);
    std::vector<std::uint64_t> planned(4);
    for (const auto& call : engine::calls_of(where, heads)) {
        for (const flow& f : call) { planned[at(f.source)] += f.bytes; }
    }
    comm::threads::launch(4, [&](comm::threads& world) {
        counted c(world.duplicate("counted"));
        const auto ledger = c.traffic_ledger();
        engine e(std::move(c), heads);
        e.plan(where);
        rank_data<tutti::bfloat16> mine(p, where, world.rank());
        mine.forward(e);
        mine.backward(e);
        // Of four: keys and values three times each way, gradients once in 16 bits, twice in 32. Of two: each once.
        const std::uint64_t of_four = (3 + 3 + 1 + 2 * 2) * 24 * block;
        const std::uint64_t of_two = world.rank() % 2 == 0 ? (1 + 1 + 1) * 40 * block : 0;
        const std::uint64_t sent = ledger->total().bytes;
        expect(sent == of_four + of_two, "{} bytes, not {}", sent, of_four + of_two);
        expect(sent == planned[at(world.rank())], "{} bytes, not {}", sent, planned[at(world.rank())]);
    });
}

TEST_CASE("float: as near as its own rounding") {
    // zhuzilin/ring-flash-attention#87, feifeibear/long-context-attention#149: gradients rounded to another type.
    for (const mask rule : {mask::causal, mask::full}) {
        const errors<float> of(rule);
        for (const int ranks : full_speed ? std::vector{1, 2, 4, 8} : std::vector{4}) {
            CAPTURE(ranks);
            for (const distance& d : of.on(ranks)) {
                CHECK(d.relative <= 1e-6);
                CHECK(d.absolute <= 1e-5);
            }
        }
    }
}

TEST_CASE("bfloat16: results are rounded once, and rings of any size are as good as one rank") {
    // zhuzilin/ring-flash-attention#42, #22, #67: errors grew with the number of ranks.
    for (const mask rule : {mask::causal, mask::full}) {
        const errors<tutti::bfloat16> of(rule);
        const std::vector<distance> alone = of.on(1);
        for (const int ranks : full_speed ? std::vector{1, 2, 8, 16} : std::vector{4}) {
            CAPTURE(ranks);
            const std::vector<distance> all = of.on(ranks);
            for (std::size_t i = 0; i < 4; ++i) {
                CHECK(all[i].relative <= 4e-3);
                CHECK(all[i].relative <= 1.25 * alone[i].relative);
                CHECK(all[i].relative >= 1e-4);  // it is numbers of 16 bits that are compared
            }
            CHECK(all[4].relative <= 1e-6);  // sums are float
        }
    }
}
