// Layers cut over ranks against one process's direct loops, in double; what they send; what they refuse.
#include <doctest/doctest.h>  // checks

#include <atomic>       // products that have begun
#include <chrono>       // deadlines
#include <cmath>        // exp, log
#include <cstddef>      // size_t, ptrdiff_t
#include <cstdint>      // words
#include <string>       // texts
#include <string_view>  // names
#include <thread>       // sleep_for
#include <type_traits>  // is_same_v
#include <vector>       // tensors

#include <tutti/comm/counted.hpp>                       // bytes
#include <tutti/comm/threads.hpp>                       // ranks
#include <tutti/parallel/linear.hpp>                    // under test
#include <tutti/parallel/tensor_group.hpp>              // under test
#include <tutti/parallel/tied_weights.hpp>              // under test
#include <tutti/parallel/vocabulary.hpp>                // under test
#include <tutti/parallel/vocabulary_cross_entropy.hpp>  // likewise

#include <tutti/parallel/schedules/dual_pipe.hpp>    // two copies
#include <tutti/parallel/schedules/one_way.hpp>      // ends on two ranks
#include <tutti/parallel/schedules/zero_bubble.hpp>  // ends on one rank

#include <support/build.hpp>    // full_speed
#include <support/failure.hpp>  // expect

#include "cut_layers.hpp"  // the oracle

using namespace tutti;
using namespace tutti::test;
using namespace tutti::parallel;
using counted = comm::counted<comm::threads>;

namespace {

constexpr double bar = 1e-12;

}  // namespace

TEST_CASE("loss and every gradient as on one rank, sequence-parallel or not, overlapped or not") {
    // 101 words: prime, so that every table is padded; 29 rows do not divide either; a rank may have none.
    const std::vector<problem> problems{{model(101, 24, 48), 29}, {model(13, 5, 120), 5}};
    for (const problem& p : problems) {
        for (const int t : {1, 2, 3, 4, 8}) {
            for (const bool sequence : {false, true}) {
                for (const bool overlap : {false, true}) {
                    comm::threads::launch(t, [&](comm::threads& c) {
                        tensor_options o;
                        o.sequence_parallel = sequence;
                        o.overlap = overlap;
                        expect_solved<double>(p, counted(std::move(c)), o, plain_products{}, bar);
                    });
                }
            }
        }
    }
}

namespace {

// Products of two ranks that wait for each other: rank 1 begins its first one when rank 0 has begun its second one.
struct meeting_products {
    static inline std::atomic<int> begun_on_0{0};
    static inline thread_local int rank = -1;
    static inline thread_local int begun = 0;

    static void expect_begun_on_0(int count) {
        for (const deadline end = after(std::chrono::seconds(20)); begun_on_0 < count;) {
            expect(clock_type::now() < end, "rank 0 has begun {} products, not {}", begun_on_0.load(), count);
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
    template <class T> static void multiply(const factor<T>& a, const factor<T>& b, matrix<T> out, T alpha, T beta) {
        ++begun;
        if (rank == 0) { begun_on_0 = begun; }
        if (rank == 1 && begun == 1) { expect_begun_on_0(2); }
        plain_products::multiply(a, b, out, alpha, beta);
    }
};

}  // namespace

// Rank 1 comes to the gather when rank 0 is in the product beside it, and to the sum when rank 0 is in the product beside
// that: neither ends unless the products overlap what is sent.
TEST_CASE("rows come and sums go while products run") {
    constexpr std::size_t rows = 6, inputs = 4, outputs = 8;
    const numbers x_all = drawn(1, rows * inputs, 1), weight = drawn(2, outputs * inputs, 1);
    const numbers d_y = drawn(3, rows * outputs, 1);
    std::vector<numbers> d_x(2), d_weight(2);
    const auto backward = [&](comm::threads& c, auto products, bool overlap, std::vector<numbers>& dx,
                              std::vector<numbers>& dw) {
        const auto me = static_cast<std::size_t>(c.rank());
        tensor_options o;
        o.sequence_parallel = true;
        o.overlap = overlap;
        tensor_group<comm::threads> group(std::move(c), o);
        column_linear<comm::threads, double, decltype(products)> up(group, inputs, outputs);
        const part own = group.row_share(rows);
        const numbers x(x_all.begin() + std::ptrdiff_t(own.first * inputs),
                        x_all.begin() + std::ptrdiff_t((own.first + own.count) * inputs));
        const numbers w = rows_of(weight, inputs, group.feature_share(outputs, "outputs"), 0);
        const numbers dy = columns_of(d_y, outputs, group.feature_share(outputs, "outputs"));
        dx[me].resize(own.count * inputs);
        dw[me].resize(w.size());
        if (std::is_same_v<decltype(products), meeting_products> && me == 1) { meeting_products::expect_begun_on_0(1); }
        up.backward(rows, x, w, dy, dx[me], dw[me], {});
    };
    meeting_products::begun_on_0 = 0;
    comm::threads::launch(2,
                          [&](comm::threads& c) {
                              meeting_products::rank = c.rank();
                              meeting_products::begun = 0;
                              backward(c, meeting_products{}, true, d_x, d_weight);
                          },
                          {.name = "world", .timeout = std::chrono::seconds(10)});
    CHECK(meeting_products::begun_on_0 == 2);
    std::vector<numbers> plain_x(2), plain_weight(2);
    comm::threads::launch(2, [&](comm::threads& c) { backward(c, plain_products{}, false, plain_x, plain_weight); });
    CHECK(d_x == plain_x);
    CHECK(d_weight == plain_weight);
}

TEST_CASE("what is sent: one sum each way a pair of layers, three numbers a row for the loss") {
    constexpr int t = 4;
    constexpr std::size_t rows = 16;
    constexpr std::size_t h = 8;
    constexpr std::size_t inner = 12;
    constexpr std::uint64_t row_bytes = rows * h * 8;
    for (const bool sequence : {false, true}) {
        comm::threads::launch(t, [&](comm::threads& c) {
            counted own(std::move(c));
            const auto ledger = own.traffic_ledger();
            tensor_options o;
            o.sequence_parallel = sequence;
            tensor_group<counted> group(std::move(own), o);
            column_linear<counted, double> up(group, h, inner);
            row_linear<counted, double> down(group, inner, h);
            const std::size_t outer = group.outer_rows(rows);
            const numbers x(outer * h, 1), w1(up.weights(), 1), w2(down.weights(), 1), a(rows * up.outputs(), 1);
            numbers y(outer * h), out(a.size()), dx(outer * h), dw1(w1.size()), dw2(w2.size()), da(a.size());
            using comm::collective;
            const auto sent = [&](auto work) {
                const auto before = ledger->snapshot();
                work();
                return ledger->snapshot() - before;
            };
            // Ring bytes: 2(t-1)/t for a sum, (t-1)/t for a gather or a sum to rows.
            const auto is = [&](const comm::traffic_snapshot& s, std::uint64_t sums, std::uint64_t gathers,
                                std::uint64_t scatters, std::string_view what) {
                constexpr std::uint64_t part_of = row_bytes * (t - 1) / t;
                comm::traffic_snapshot reference;
                reference[collective::all_reduce] = {sums, sums * 2 * part_of};
                reference[collective::all_gather_v] = {gathers, gathers * part_of};
                reference[collective::reduce_scatter_v] = {scatters, scatters * part_of};
                expect(s == reference, "{}: {} calls, {} bytes", what, s.total().calls, s.total().bytes);
            };
            const std::uint64_t plain = sequence ? 0 : 1;
            const std::uint64_t cut = sequence ? 1 : 0;
            is(sent([&] { up.forward(rows, x, w1, {}, out); }), 0, cut, 0, "up forward");
            is(sent([&] { down.forward(rows, a, w2, {}, y); }), plain, 0, cut, "down forward");
            is(sent([&] { down.backward(rows, a, w2, x, da, dw2, {}); }), 0, cut, 0, "down backward");
            is(sent([&] { up.backward(rows, x, w1, a, dx, dw1, {}); }), plain, cut, cut, "up backward");
            const vocabulary_share share(group, 101);
            vocabulary_cross_entropy<counted, double> entropy(group, share);
            const numbers logits(rows * share.count);
            const words targets(rows, 7);
            numbers loss(rows), z(rows);
            const auto s = sent([&] { entropy.forward(logits, targets, loss, z); });
            comm::traffic_snapshot reference;
            reference[collective::all_reduce] = {2, 2 * 3 * rows * 8 * (t - 1) / t};
            expect(s == reference, "entropy: {} calls, {} bytes", s.total().calls, s.total().bytes);
            expect(std::fabs(loss[3] - std::log(101.0)) <= bar * 5, "{} is not log 101", loss[3]);
        });
    }
}

TEST_CASE("logits of any size: no overflow, no row without a largest") {
    comm::threads::launch(3, [](comm::threads& c) {
        tensor_group<counted> group{counted(std::move(c))};
        const vocabulary_share share(group, 7);  // 3 a rank: the last one has a word and two that are padding
        expect(share.padded == 9 && share.real == (group.rank() == 2 ? 1u : 3u), "{} words", share.real);
        vocabulary_cross_entropy<counted, double> entropy(group, share);
        numbers logits(2 * share.count);
        for (std::size_t j = 0; j < share.count; ++j) {
            logits[j] = share.first + j == 2 ? 5000 : -5000;
            logits[share.count + j] = -1e4 + static_cast<double>(share.first + j);
        }
        const words targets{2, 6};
        numbers loss(2), z(2);
        entropy.forward(logits, targets, loss, z);
        expect(loss[0] == 0, "a certain word costs {}", loss[0]);
        double total = 0;
        for (int j = 0; j < 7; ++j) { total += std::exp(j - 6.0); }
        expect(std::fabs(loss[1] - std::log(total)) <= 1e-11, "{} is not {}", loss[1], std::log(total));
    });
}

TEST_CASE("tied weights: the ranks that hold them, and the sum of their gradients") {
    constexpr int p = 4;
    comm::threads::launch(p, [](comm::threads& c) {
        const int rank = c.rank();
        const auto sum_on = [&](const pipeline_schedule& s, const std::vector<int>& stages) {
            tied_weights<comm::threads> tied(c, s, stages);
            numbers g{1.0 + rank, 10.0 * rank};
            if (!tied.held()) { return 0.0; }
            tied.add_up(view<double>(g));
            const double same = 3;
            tied.expect_same(view<const double>(&same, 1));
            return g[0] + g[1];
        };
        const auto ends = sum_on(one_forward_one_backward(p, 4), {0, p - 1});
        expect(ends == (rank == 0 || rank == 3 ? 5.0 + 30.0 : 0), "ends of 1F1B: {}", ends);
        const auto same_rank = sum_on(zero_bubble_v(p, 4), {0, 2 * p - 1});
        expect(same_rank == (rank == 0 ? 1.0 : 0), "ends of ZB-V: {}", same_rank);
        const auto copies = sum_on(dual_pipe(p, 8), {1});
        expect(copies == (rank == 1 || rank == 2 ? 5.0 + 30.0 : 0), "copies of DualPipe: {}", copies);
        const auto three = sum_on(interleaved(p, 4, 2), {0, 5, 7});
        expect(three == (rank != 2 ? 7.0 + 40.0 : 0), "three stages: {}", three);
    });
    const auto differ = [](comm::threads& c) {
        tied_weights<comm::threads> tied(c, one_forward_one_backward(2, 2), {0, 1});
        const double mine = c.rank();
        tied.expect_same(view<const double>(&mine, 1));
    };
    CHECK_THROWS_AS(comm::threads::launch(2, differ), mismatch_error);
    const auto not_held = [](comm::threads& c) {
        tied_weights<comm::threads> tied(c, one_forward_one_backward(2, 2), {0});
        double x = 1;
        tied.add_up(view<double>(&x, 1));
    };
    CHECK_THROWS_WITH_AS(comm::threads::launch(2, not_held),
                         "tied_weights: add_up on a rank that holds none of the stages", usage_error);
    const auto no_stage = [](comm::threads& c) { tied_weights<comm::threads>(c, one_forward_one_backward(2, 2), {2}); };
    CHECK_THROWS_WITH_AS(comm::threads::launch(2, no_stage), "tied_weights: stage 2 of 2", usage_error);
}

TEST_CASE("what does not fit is refused with the numbers, before anything moved") {
    const auto on_two = [](auto work) {
        comm::threads::launch(2, [&](comm::threads& c) {
            tensor_group<counted> group{counted(std::move(c))};
            work(group);
        });
    };
    using group_type = tensor_group<counted>;
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) { column_linear<counted, double>(g, 4, 5); }),
                         "tensor: 5 outputs do not divide over 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) { row_linear<counted, double>(g, 7, 4); }),
                         "tensor: 7 inputs do not divide over 2 ranks", usage_error);
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) { vocabulary_share(g, 0); }), "vocabulary: 0 words in multiples of 1",
                         usage_error);
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) {
                             numbers x(8), w(8), y(5);
                             column_linear<counted, double>(g, 4, 4).forward(2, x, w, {}, y);
                         }),
                         "column_linear: y of 5 elements, not 2 x 2", usage_error);
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) {
                             numbers x(4), w(8), y(8), bias(2);
                             row_linear<counted, double>(g, 4, 4).forward(2, x, w, bias, y);
                         }),
                         "row_linear: bias of 2 elements, not 1 x 4", usage_error);
    const auto embed = [](std::int32_t word) {
        return [word](group_type& g) {
            const vocabulary_share share(g, 5);
            vocabulary_embedding<counted, double> e(g, share, 2);
            numbers w(e.weights()), y(2);
            const words list{word};
            e.forward(list, w, y);
        };
    };
    CHECK_THROWS_WITH_AS(on_two(embed(5)), "vocabulary: word 5 of 5", usage_error);  // padding is no word
    CHECK_THROWS_WITH_AS(on_two(embed(-1)), "vocabulary: word -1 of 5", usage_error);
    CHECK_THROWS_WITH_AS(on_two([](group_type& g) {
                             const vocabulary_share share(g, 5);
                             vocabulary_cross_entropy<counted, double> e(g, share);
                             numbers logits(share.count), loss(1), z(1);
                             const words none{-2};
                             e.forward(logits, none, loss, z);
                         }),
                         "vocabulary: word -2 of 5", usage_error);
}
