// The rounds of rings: order, delays, messages, work and memory to the byte; and what is refused.
#include <doctest/doctest.h>  // checks

#include <algorithm>   // sort
#include <array>       // totals
#include <chrono>      // delays
#include <cstddef>     // size_t
#include <cstdint>     // lengths
#include <functional>  // bad placements
#include <limits>      // infinity
#include <memory>      // shared counts
#include <mutex>       // results of ranks
#include <string>      // messages
#include <thread>      // delays
#include <utility>     // move
#include <vector>      // data

#include <sequence/problem.hpp>               // direct solution
#include <tutti/comm/counted.hpp>             // ledger
#include <tutti/core/reduce_op.hpp>           // sum
#include <tutti/sequence/host_attention.hpp>  // kernel
#include <tutti/sequence/ring_attention.hpp>  // under test

using namespace tutti;
using namespace tutti::test;
using namespace tutti::sequence;

namespace {

using kernel = host_attention<double>;

// An exchange that comes late, each time by another while, and that only the planned one may make.
struct late_exchange {
    std::uint64_t seed = 0;
    std::size_t known = 0;  // calls
    [[nodiscard]] late_exchange planned(std::span<const std::vector<flow>> calls, int) const {
        return {seed, calls.size()};
    }
    template <class C>
    void exchange(C& comm, std::size_t number, std::span<const comm::transfer<host_memory>> messages) const {
        expect(number < known, "call {} of {}", number, known);
        const std::uint64_t word = mixed(seed * 1000 + static_cast<std::uint64_t>(comm.rank()) * 100 + number);
        if (word % 3 != 0) { std::this_thread::sleep_for(std::chrono::microseconds(word % 700)); }
        comm.exchange(messages);
    }
};

// Counts its copies.
struct copied_exchange : direct_exchange {
    std::shared_ptr<int> copies;
    int rank;
    copied_exchange(std::shared_ptr<int> count, int own) : copies(std::move(count)), rank(own) {}
    copied_exchange(const copied_exchange& other) : copies(other.copies), rank(other.rank) { ++*copies; }
    copied_exchange(copied_exchange&&) = default;
    copied_exchange& operator=(const copied_exchange&) = default;
    [[nodiscard]] copied_exchange planned(std::span<const std::vector<flow>>, int own) const { return {copies, own}; }
};

// Counts the pairs of a query and a key that it is asked to look at.
struct counting_kernel {
    using element_type = double;
    using queue_type = host_queue;
    kernel real{};
    std::shared_ptr<double> pairs = std::make_shared<double>(0);
    template <class B> void count(const B& b) {
        for (std::size_t i = 0; i < b.query.tokens; ++i) {
            *pairs += static_cast<double>(b.seen.keys_of(i, b.key.tokens));
        }
    }
    void forward(host_queue q, const forward_block<double, host_memory>& b) {
        count(b);
        real.forward(q, b);
    }
    void backward(host_queue q, const backward_block<double, host_memory>& b) {
        count(b);
        real.backward(q, b);
    }
};

// Attends to nothing, and has no memory of its own.
struct idle_kernel {
    using element_type = double;
    using queue_type = host_queue;
    void forward(host_queue q, const forward_block<double, host_memory>& b) const {
        fill_tokens(q, b.out, 0.0);
        fill_tokens(q, b.log_sum_exp, -std::numeric_limits<double>::infinity());
    }
    void backward(host_queue, const backward_block<double, host_memory>&) const noexcept {}
};

// Sequences on rings of drawn ranks in a drawn order, many on each rank.
placement drawn(int nodes, int per_node, std::size_t sequences, std::uint64_t seed) {
    std::vector<std::int64_t> lengths;
    std::vector<std::vector<int>> rings;
    const int ranks = nodes * per_node;
    for (std::size_t s = 0; s < sequences; ++s) {
        const std::uint64_t word = mixed(seed * 1000 + s);
        lengths.push_back(static_cast<std::int64_t>(word % 40));
        std::vector<int> all;
        for (int r = 0; r < ranks; ++r) { all.push_back(r); }
        for (std::size_t i = all.size(); i > 1; --i) { std::swap(all[i - 1], all[mixed(word + i) % i]); }
        all.resize(1 + (word >> 8) % at(ranks));
        rings.push_back(all);
    }
    return placed({nodes, per_node}, lengths, rings);
}

template <class F> std::string text_of_usage_error(F f) {
    try {
        f();
    } catch (const usage_error& e) { return e.what(); }
    return "no usage_error";
}

}  // namespace

TEST_CASE("ranks that are late, in any way, change neither the end nor a bit") {
    // NVIDIA/nccl#479, #584: sends and receives in different orders on different ranks.
    for (const int ranks : {2, 4, 8, 16}) {
        for (std::uint64_t seed = 0; seed < (full_speed ? 4u : 1u); ++seed) {
            CAPTURE(ranks);
            CAPTURE(seed);
            const placement where = drawn(2, ranks / 2, 24, seed + 1);
            const problem p({2, 1, 2}, where.lengths, mask::causal, seed);
            const auto solved = [&](std::uint64_t delays) {
                return solved_together<double>(p, where, [&](comm::threads c, const problem&) {
                    return ring_attention<comm::threads, kernel, late_exchange>(std::move(c), p.heads, {}, {},
                                                                                {delays});
                });
            };
            const solution got = solved(seed * 2);
            CHECK(between(got, solved_directly(p)).absolute <= 1e-12);
            CHECK(same_bits(got, solved(seed * 2 + 1)));
        }
    }
}

TEST_CASE("the bytes a rank sends are those of the formula") {
    using counted = comm::counted<comm::threads>;
    const auto sent = [](const placement& where, attention_heads heads, auto element) {
        using T = decltype(element);
        std::vector<std::array<std::uint64_t, 2>> bytes(where.pieces.size());
        const problem p(heads, where.lengths);
        comm::threads::launch(static_cast<int>(where.pieces.size()), [&](comm::threads& world) {
            counted c(world.duplicate("counted"));
            const auto ledger = c.traffic_ledger();
            ring_attention<counted, host_attention<T>> e(std::move(c), heads);
            e.plan(where);
            rank_data<T> mine(p, where, world.rank());
            auto& mine_sent = bytes[at(world.rank())];
            mine.forward(e);
            mine_sent[0] = ledger->total().bytes;
            mine.backward(e);
            mine_sent[1] = ledger->total().bytes - mine_sent[0];
        });
        return bytes;
    };
    const attention_heads heads{4, 2, 3};
    // Equal chunks: (G - 1) / G of s tokens of kappa bytes; backward as much twice.
    for (const int ranks : {1, 2, 3, 4, 8}) {
        CAPTURE(ranks);
        const std::uint64_t s = 96;
        const auto g = static_cast<std::uint64_t>(ranks);
        const std::uint64_t kappa = 2 * heads.kv * heads.width * sizeof(double);
        for (const auto& b : sent(on_all(ranks, {96}), heads, double{})) {
            CHECK(b[0] == (g - 1) * s / g * kappa);
            CHECK(b[1] == 2 * (g - 1) * s / g * kappa);
        }
        // 16-bit keys and values travel as such, their gradients as floats.
        for (const auto& b : sent(on_all(ranks, {96}), heads, tutti::bfloat16{})) {
            CHECK(b[0] == (g - 1) * s / g * kappa / 4);
            CHECK(b[1] == (g - 1) * s / g * (kappa / 4 + kappa / 2));
        }
    }
    // Unequal chunks, several rings: rank i of a ring sends all tokens but those of rank i + 1, and gradients of all but
    // its own.
    const placement where = drawn(2, 3, 17, 9);
    std::vector<std::array<std::uint64_t, 2>> expected(6);
    std::vector<std::vector<std::int64_t>> tokens(where.lengths.size(), std::vector<std::int64_t>(6));
    for (std::size_t rank = 0; rank < 6; ++rank) {
        for (const auto& piece : where.pieces[rank]) { tokens[at(piece.sequence)][rank] += piece.end - piece.begin; }
    }
    for (const ring& r : where.rings) {
        const std::int64_t s = where.lengths[at(r.sequence)];
        for (std::size_t i = 0; r.ranks.size() > 1 && i < r.ranks.size(); ++i) {
            const std::int64_t next = tokens[at(r.sequence)][at(r.ranks[(i + 1) % r.ranks.size()])];
            expected[at(r.ranks[i])][0] += at(s - next) * 2 * heads.kv * heads.width * sizeof(double);
            const std::int64_t own = tokens[at(r.sequence)][at(r.ranks[i])];
            expected[at(r.ranks[i])][1] += at(2 * s - next - own) * 2 * heads.kv * heads.width * sizeof(double);
        }
    }
    const auto got = sent(where, heads, double{});
    CHECK(got == expected);

    // The plan of the calls has every message, also of numbers of 16 bits with sums of 32.
    const auto planned = [](const std::vector<std::vector<flow>>& calls) {
        std::vector<std::array<std::uint64_t, 2>> bytes(6);
        for (std::size_t i = 0; i < calls.size(); ++i) {
            for (const flow& f : calls[i]) { bytes[at(f.source)][i < calls.size() / 2 - 1 ? 0 : 1] += f.bytes; }
        }
        return bytes;
    };
    CHECK(planned(ring_attention<comm::threads, kernel>::calls_of(where, heads)) == expected);
    using narrow = tutti::bfloat16;
    CHECK(planned(ring_attention<comm::threads, host_attention<narrow>>::calls_of(where, heads)) ==
          sent(where, heads, narrow{}));
}

TEST_CASE("only pairs that see each other are computed, as many on each rank of a ring") {
    // pytorch/pytorch#189902: right results, unbalanced work.
    const placement where = on_all(4, {300, 257, 1000});
    const problem p({1, 1, 1}, where.lengths);
    std::vector<double> pairs(4);
    comm::threads::launch(4, [&](comm::threads& world) {
        counting_kernel k;
        const auto counted = k.pairs;
        ring_attention<comm::threads, counting_kernel> e(world.duplicate("attention"), p.heads, {}, std::move(k));
        e.plan(where);
        rank_data<double> mine(p, where, world.rank());
        mine.forward(e);
        pairs[at(world.rank())] = *counted;
        mine.backward(e);
        expect(*counted == 2 * pairs[at(world.rank())], "backward looks at other pairs");
    });
    double total = 0;
    for (const std::int64_t s : where.lengths) { total += static_cast<double>(s * (s + 1) / 2); }
    CHECK(pairs[0] + pairs[1] + pairs[2] + pairs[3] == total);
    for (const double n : pairs) { CHECK(n <= 1.035 * total / 4); }
}

TEST_CASE("a round runs the rings of the world, then of the node, then its share of the sequences of one rank") {
    struct recording_kernel : counting_kernel {
        std::shared_ptr<std::vector<std::size_t>> queries = std::make_shared<std::vector<std::size_t>>();
        void forward(host_queue q, const forward_block<double, host_memory>& b) {
            queries->push_back(b.query.tokens);
            counting_kernel::forward(q, b);
        }
        void backward(host_queue q, const backward_block<double, host_memory>& b) {
            queries->push_back(b.query.tokens);
            counting_kernel::backward(q, b);
        }
    };
    // Chunks of rank 0: of 8 tokens of a ring of four, of 6 tokens of a ring of two; three sequences of 10 tokens.
    const placement where = placed({2, 2}, {10, 64, 10, 24, 10}, {{0}, {0, 1, 2, 3}, {0}, {0, 1}, {0}});
    const problem p({1, 1, 1}, where.lengths);
    comm::threads::launch(4, [&](comm::threads& world) {
        recording_kernel k;
        const auto queries = k.queries;
        ring_attention<comm::threads, recording_kernel> e(world.duplicate("attention"), p.heads, {}, std::move(k));
        e.plan(where);
        rank_data<double> mine(p, where, world.rank());
        mine.forward(e);
        // All rows see own keys; those of the others, which are between rank 0's chunks, the late rows alone.
        const std::vector<std::size_t> expected{16, 12, 10, /**/ 8, 6, 10, /**/ 8, 10, /**/ 8};
        expect(world.rank() != 0 || *queries == expected, "another order");
        // Backward leaves them, and the own keys of the second ring, to the rounds in which gradients come home.
        queries->clear();
        mine.backward(e);
        const std::vector<std::size_t> back{16, /**/ 8, 6, /**/ 8, 12, /**/ 8, /**/ 10, 10, 10};
        expect(world.rank() != 0 || *queries == back, "another order of backward");
    });
}

TEST_CASE("an exchange is planned for its rank, and what it planned before is not copied") {
    const placement two = on_all(3, {20}), one = on_all(3, {12, 7});
    comm::threads::launch(3, [&](comm::threads& world) {
        const auto copies = std::make_shared<int>(0);
        const copied_exchange first{copies, -1};
        ring_attention<comm::threads, idle_kernel, copied_exchange> e(world.duplicate("attention"), {2, 2, 8}, {}, {},
                                                                      first);
        const int before = *copies;
        for (const placement* p : {&two, &one, &two}) { e.plan(*p); }
        expect(*copies == before, "{} copies", *copies - before);
        expect(e.exchange().rank == world.rank(), "planned for rank {}", e.exchange().rank);
    });
}

TEST_CASE("memory is two blocks of keys and values, and three of their gradients") {
    // zhuzilin/ring-flash-attention README and #81: more buffers than the algorithm needs.
    const attention_heads heads{2, 2, 8};
    const problem p(heads, {96, 50}, mask::causal);
    const placement where = placed({1, 4}, p.lengths, {{0, 1, 2, 3}, {2}});
    comm::threads::launch(4, [&](comm::threads& world) {
        rank_data<double> mine(p, where, world.rank());
        comm::threads own = world.duplicate("attention");
        const host_queue q = own.queue();
        const std::size_t before = q.account().live();
        ring_attention<comm::threads, idle_kernel> e(std::move(own), heads);
        e.plan(where);
        mine.forward(e);
        const std::size_t block = 24 * 2 * heads.kv * heads.width * sizeof(double);
        // Rank 0 is before all others: only its late chunk sees their keys. What a rank has alone is merged with nothing.
        const std::size_t longest = world.rank() == 0 ? 12 : 24;
        const std::size_t partial = longest * heads.query * (heads.width + 1) * sizeof(double);
        expect(q.account().peak() - before == 2 * block + partial, "forward takes {} bytes, not {}",
               q.account().peak() - before, 2 * block + partial);
        mine.backward(e);
        const std::size_t deltas = mine.tokens * heads.query * sizeof(double);
        expect(q.account().peak() - before == 5 * block + partial + deltas, "backward takes {} bytes, not {}",
               q.account().peak() - before, 5 * block + partial + deltas);
    });
}

TEST_CASE("ranks with other plans, or that attend otherwise, are told so before anything moves") {
    const auto expect_mismatch = [](auto plan_of, auto heads_of, auto options_of) {
        for (int bad = 0; bad < 3; bad += 2) {
            std::array<bool, 3> told{};
            CHECK_THROWS_AS(comm::threads::launch(3,
                                                  [&](comm::threads& world) {
                                                      const bool other = world.rank() == bad;
                                                      ring_attention<comm::threads, kernel> e(
                                                          world.duplicate("attention"), heads_of(other),
                                                          options_of(other));
                                                      try {
                                                          e.plan(plan_of(other));
                                                      } catch (const mismatch_error& error) {
                                                          told[at(world.rank())] = error.ranks() == std::vector{bad};
                                                          throw;
                                                      }
                                                  }),
                            mismatch_error);
            CHECK(told == std::array{true, true, true});
        }
    };
    const auto same_plan = [](bool) { return on_all(3, {20}); };
    const auto same_heads = [](bool) { return attention_heads{2, 1, 4}; };
    const auto same_options = [](bool) { return attention_options{}; };
    expect_mismatch([](bool other) { return on_all(3, {other ? 21 : 20}); }, same_heads, same_options);
    expect_mismatch(
        same_plan,
        [](bool other) {
            return attention_heads{2, other ? 2u : 1u, 4};
        },
        same_options);
    expect_mismatch(same_plan, same_heads,
                    [](bool other) { return attention_options{.rule = other ? mask::full : mask::causal}; });
    expect_mismatch(same_plan, same_heads, [](bool other) { return attention_options{.scale = other ? 0.5 : 0.25}; });
}

TEST_CASE("a placement that is none is refused on all ranks, which can go on") {
    const placement good = placed({2, 2}, {16, 9, 20, 4}, {{0, 1, 2, 3}, {1, 0}, {3, 1}, {2}});
    const std::vector<std::pair<std::string, std::function<void(placement&)>>> bad{
        {"placement: 2 nodes of 3 ranks, the communicator has 4 ranks",
         [](placement& p) { p.machines.ranks_per_node = 3; }},
        {"placement: pieces of 3 ranks are given for 4", [](placement& p) { p.pieces.pop_back(); }},
        {"placement: sequence 1 has -9 tokens", [](placement& p) { p.lengths[1] = -9; }},
        {"placement: the ring of sequence 7 has no sequence: there are 4",
         [](placement& p) { p.rings[3].sequence = 7; }},
        {"placement: the ring of sequence 3 has no rank", [](placement& p) { p.rings[3].ranks.clear(); }},
        {"placement: the ring of sequence 3 has rank 4, of 4 ranks", [](placement& p) { p.rings[3].ranks[0] = 4; }},
        {"placement: the ring of sequence 1 has rank 0 twice", [](placement& p) { p.rings[2].ranks[0] = 0; }},
        {"placement: the ring of sequence 1 is said to be local, its ranks 1, 0 are node",
         [](placement& p) { p.rings[2].where = zone::local; }},
        {"placement: the ring of sequence 2 is said to be node, its ranks 3, 1 are world",
         [](placement& p) { p.rings[1].where = zone::node; }},
        {"placement: sequence 2 has two rings", [](placement& p) { p.rings[2] = p.rings[1]; }},
        {"placement: sequence 3 has no ring", [](placement& p) { p.rings.pop_back(); }},
        // The order of one rank alone, by its load, is what ranks could wait for each other in.
        {"placement: the ring of sequence 0 (world) stands behind that of sequence 2 (world), against the order that "
         "all ranks share",
         [](placement& p) { std::swap(p.rings[0], p.rings[1]); }},
        {"placement: the ring of sequence 2 (world) stands behind that of sequence 1 (node), against the order that "
         "all ranks share",
         [](placement& p) { std::swap(p.rings[1], p.rings[2]); }},
        {"placement: rank 1: tokens [5, 15) of sequence 2 are not where the rings put them",
         [](placement& p) { std::rotate(p.pieces[1].begin(), p.pieces[1].begin() + 2, p.pieces[1].end()); }},
        // feifeibear/long-context-attention#53: input in another order than the ring's.
        {"placement: rank 2: tokens [10, 12) of sequence 0 are not where the rings put them",
         [](placement& p) { std::swap(p.pieces[2][0], p.pieces[2][1]); }},
        {"placement: sequence 0: tokens [6, 7) are on no rank; rank 3 goes on",
         [](placement& p) { ++p.pieces[3][0].begin; }},
    };
    const problem p({1, 1, 2}, good.lengths);
    solution got(p);
    std::mutex mutex;
    comm::threads::launch(4, [&](comm::threads& world) {
        ring_attention<comm::threads, kernel> e(world.duplicate("attention"), p.heads);
        for (const auto& [text, change] : bad) {
            placement wrong = good;
            change(wrong);
            const std::string said = text_of_usage_error([&] { e.plan(wrong); });
            expect(said == text, "'{}' instead of '{}'", said, text);
        }
        ring_attention<comm::threads, kernel> uneven(world.duplicate("uneven"), {3, 2, 4});
        const std::string said = text_of_usage_error([&] { uneven.plan(good); });
        expect(said == "attention: 3 query heads, 2 key and value heads of width 4", "'{}'", said);
        e.plan(good);
        rank_data<double> mine(p, good, world.rank());
        mine.forward(e);
        mine.backward(e);
        mine.collect(got, mutex, true);
    });
    CHECK(between(got, solved_directly(p)).absolute <= 1e-12);
}

TEST_CASE("a rank whose shapes do not fit moves nothing and ends the others") {
    const placement where = on_all(3, {30});
    const problem p({2, 1, 4}, where.lengths);
    const auto outcome = [&](auto call) {
        int aborted = 0;
        std::mutex mutex;
        std::string text;
        CHECK_THROWS_AS(comm::threads::launch(3,
                                              [&](comm::threads& world) {
                                                  ring_attention<comm::threads, kernel> e(world.duplicate("attention"),
                                                                                          p.heads);
                                                  e.plan(where);
                                                  rank_data<double> mine(p, where, world.rank());
                                                  try {
                                                      call(e, mine, world.rank() == 1);
                                                  } catch (const usage_error& error) {
                                                      text = error.what();
                                                      bool ended = false;
                                                      try {
                                                          world.synchronize();
                                                      } catch (const aborted_error&) { ended = true; }
                                                      expect(ended, "the others still wait");
                                                      throw;
                                                  } catch (const aborted_error&) {
                                                      const std::lock_guard lock(mutex);
                                                      ++aborted;
                                                      throw;
                                                  }
                                              },
                                              {.timeout = std::chrono::seconds(20)}),
                        usage_error);
        CHECK(aborted == 2);
        return text;
    };
    CHECK(outcome([](auto& e, auto& mine, bool bad) {
              mine.rows -= bad ? 4 : 0;
              mine.forward(e);
          }) == "attention: query is 9 x 2 x 4, expected 10 x 2 x 4");
    CHECK(outcome([](auto& e, auto& mine, bool bad) {
              e.forward(mine.query(), bad ? mine.query() : mine.key(), mine.value(), mine.result(), mine.numbers());
          }) == "attention: key is 13 x 2 x 4, expected 10 x 1 x 4");
    CHECK(outcome([](auto& e, auto& mine, bool bad) {
              mine.forward(e);
              e.backward(mine.out_gradient(), mine.query(), mine.key(), mine.value(), mine.result(), mine.numbers(),
                         mine.d_query(), bad ? token_view<double>() : mine.d_key(), mine.d_value());
          }) == "attention: d_key is 0 x 0 x 0, expected 10 x 1 x 4");
    comm::threads::launch(1, [&](comm::threads& world) {
        ring_attention<comm::threads, kernel> e(world.duplicate("attention"), p.heads);
        const std::string said = text_of_usage_error([&] { e.forward({}, {}, {}, {}, {}); });
        expect(said == "attention: no plan", "'{}'", said);
    });
}

TEST_CASE("a kernel that throws ends all ranks with its error") {
    struct failing_kernel : counting_kernel {
        bool fails = false;
        void backward(host_queue q, const backward_block<double, host_memory>& b) {
            if (fails) { throw std::runtime_error("the kernel failed"); }
            counting_kernel::backward(q, b);
        }
    };
    const placement where = on_all(4, {64, 40});
    const problem p({1, 1, 2}, where.lengths);
    CHECK_THROWS_WITH_AS(comm::threads::launch(4,
                                               [&](comm::threads& world) {
                                                   failing_kernel k;
                                                   k.fails = world.rank() == 2;
                                                   ring_attention<comm::threads, failing_kernel> e(
                                                       world.duplicate("attention"), p.heads, {}, std::move(k));
                                                   e.plan(where);
                                                   rank_data<double> mine(p, where, world.rank());
                                                   mine.forward(e);
                                                   mine.backward(e);
                                               },
                                               {.timeout = std::chrono::seconds(20)}),
                         "the kernel failed", std::runtime_error);
}
