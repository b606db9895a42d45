// PowerSGD as arithmetic: against the paper's step in double, against the singular values, over ranks, over time.
#include <tutti/compress/power_sgd.hpp>  // under test

#include <algorithm>  // max
#include <cmath>      // sqrt, pow
#include <vector>     // matrices

#include <doctest/doctest.h>  // checks

#include "dense.hpp"
#include "low_rank_trial.hpp"
#include "support/oracle.hpp"  // same_bytes

using namespace tutti;
using test::dense;
using test::distance;
using test::low_rank_reference;
using test::low_rank_trial;
using test::matrix_segment;
using test::norm;
using test::normal_matrix;
using test::plus;
using test::rounded;

static_assert(compress::linear_compressor<compress::power_sgd, host_queue, float>);
static_assert(compress::linear_compressor<compress::power_sgd, host_queue, double>);
static_assert(compress::linear_compressor<compress::power_sgd, host_queue, float16>);
static_assert(compress::linear_compressor<compress::power_sgd, host_queue, bfloat16>);

namespace {

dense of(const std::vector<float>& v, std::size_t n, std::size_t m) { return dense(n, m, v.data()); }

double largest(const std::vector<float>& v) {
    float worst = 0;
    for (const float x : v) { worst = std::max(worst, std::fabs(x)); }
    return static_cast<double>(worst);
}

random_stream draws_of(std::uint64_t seed, std::uint32_t step, std::uint32_t tensor) {
    return compress::draw_key{seed, step, 0}.shared().stream(tensor, compress::power_sgd::draw_purpose);
}

}  // namespace

// Every step is judged by itself, from the residuals and the factor that it began with: errors do not add up.
TEST_CASE_TEMPLATE("a step is that of the paper, in double", T, float, double, bfloat16, float16) {
    struct shape {
        std::size_t n, m;
        int level;
    };
    for (const shape s : {shape{40, 24, 3}, shape{24, 40, 4}, shape{1, 9, 2}, shape{9, 2, 5}, shape{33, 1031, 7},
                          shape{1031, 33, 6}, shape{70, 80, 35}, shape{5, 3000, 1}}) {
        CAPTURE(s.n);
        CAPTURE(s.m);
        const std::size_t ranks = 3;
        low_rank_trial<T> trial(s.n, s.m, s.level, ranks);
        const std::size_t rank = std::min({s.n, s.m, std::size_t(s.level)});
        for (std::uint32_t step = 0; step < 4; ++step) {
            test::rows<T> g;
            std::vector<dense> x;
            for (std::uint32_t r = 0; r < ranks; ++r) {
                g.push_back(
                    rounded<T>(plus(normal_matrix(s.n, s.m, 10 * step + r), normal_matrix(s.n, s.m, 1000), 0.5)));
                std::vector<double> wide;
                for (const T y : g[r]) { wide.push_back(static_cast<double>(static_cast<master_t<T>>(y))); }
                x.push_back(plus(dense(s.n, s.m, wide.data()), of(trial.residuals[r], s.n, s.m), 1));
            }
            const low_rank_reference expected(x, trial.factor(), rank, draws_of(trial.seed, step, 0));
            const auto out = trial.step(g);
            for (std::size_t r = 0; r < ranks; ++r) {
                CHECK(test::same_bytes(out[r], out[0]));
                CHECK(norm(plus(of(trial.residuals[r], s.n, s.m), expected.residuals[r], -1)) <= 2e-6 * norm(x[r]));
            }
            std::vector<double> wide;
            for (const T y : out[0]) { wide.push_back(static_cast<double>(static_cast<master_t<T>>(y))); }
            CHECK(distance(dense(s.n, s.m, wide.data()), expected.out) <= 2e-6 + test::roundoff<T>());
            CHECK(distance(trial.factor(), expected.factor) <= 2e-6);
        }
    }
}

TEST_CASE("without a residual a step is the same, and nothing is kept but the factor") {
    low_rank_trial trial(30, 50, 4, 2);
    trial.feedback = false;
    for (std::uint32_t step = 0; step < 3; ++step) {
        const test::rows<float> g{rounded(normal_matrix(30, 50, 2 * step)),
                                  rounded(normal_matrix(30, 50, 2 * step + 1))};
        const std::vector<dense> x{of(g[0], 30, 50), of(g[1], 30, 50)};
        const low_rank_reference expected(x, trial.factor(), 4, draws_of(trial.seed, step, 0));
        CHECK(distance(of(trial.step(g)[0], 30, 50), expected.out) <= 2e-6);
    }
}

TEST_CASE("matrices of no more than the rank come out whole") {  // T19
    for (const std::size_t n : {4ul, 30ul, 200ul}) {
        for (const std::size_t m : {3ul, 50ul}) {
            const dense full = normal_matrix(n, m, 3);
            const auto g = rounded(full);
            low_rank_trial whole(n, m, static_cast<int>(std::min(n, m)));
            CHECK(distance(of(whole.step({g})[0], n, m), of(g, n, m)) <= 1e-5);
            low_rank_trial more(n, m, 1000);
            CHECK(distance(of(more.step({g})[0], n, m), of(g, n, m)) <= 1e-5);
            const dense thin = test::with_singular_values(n, m, {5, 2, 1}, 40);
            low_rank_trial three(n, m, 3);
            CHECK(distance(of(three.step({rounded(thin)})[0], n, m), thin) <= 1e-5);
            CHECK(largest(three.residuals[0]) <= 1e-5);
        }
    }
}

TEST_CASE("what is sent is orthogonal to what is kept") {  // T20
    low_rank_trial trial(96, 128, 5);
    const auto g = rounded(normal_matrix(96, 128, 5));
    const auto out = trial.step({g})[0];
    const double all = std::pow(norm(of(g, 96, 128)), 2);
    const double sent = std::pow(norm(of(out, 96, 128)), 2);
    const double kept = std::pow(norm(of(trial.residuals[0], 96, 128)), 2);
    CHECK(sent > 0.05 * all);
    CHECK(std::fabs(all - sent - kept) <= 1e-5 * all);
}

// Its warm start drew anew each step: github.com/pytorch/pytorch/pull/50283
TEST_CASE("no better than the best approximation, and as good once the iteration has gone on") {  // T21
    std::vector<double> values;
    for (int i = 0; i < 20; ++i) { values.push_back(10 * std::pow(1.6, -i)); }
    const dense a = test::with_singular_values(48, 36, values, 50);
    for (const std::size_t r : {1ul, 2ul, 4ul}) {
        CAPTURE(r);
        const auto s = test::singular_values(of(rounded(a), 48, 36));
        CHECK(s[0] == doctest::Approx(10).epsilon(1e-6));
        double best = 0;
        for (std::size_t i = r; i < s.size(); ++i) { best += s[i] * s[i]; }
        best = std::sqrt(best);
        low_rank_trial trial(48, 36, static_cast<int>(r));
        trial.feedback = false;
        double first = 0, error = 0;
        for (int step = 0; step < 20; ++step) {
            error = norm(plus(of(trial.step({rounded(a)})[0], 48, 36), a, -1));
            if (step == 0) { first = error; }
            CHECK(error >= best * (1 - 1e-5));
        }
        CHECK(error <= best * 1.01);
        CHECK(first > best * 1.01);  // or nothing was shown
    }
}

// The sum over the ranks is divided by their number once: github.com/epfml/powersgd/issues/10
TEST_CASE("ranks are one rank with the mean") {  // T22
    for (const std::size_t ranks : {2ul, 5ul}) {
        low_rank_trial many(40, 60, 4, ranks);
        low_rank_trial one(40, 60, 4);
        for (std::uint32_t step = 0; step < 4; ++step) {
            test::rows<float> g;
            dense mean(40, 60);
            for (std::uint32_t r = 0; r < ranks; ++r) {
                g.push_back(rounded(normal_matrix(40, 60, 100 * step + r)));
                mean = plus(mean, of(g[r], 40, 60), 1.0 / static_cast<double>(ranks));
            }
            const auto out = many.step(g);
            const auto expected = one.step({rounded(mean)});
            CHECK(distance(of(out[0], 40, 60), of(expected[0], 40, 60)) <= 1e-5);
            dense kept(40, 60);
            for (const auto& e : many.residuals) { kept = plus(kept, of(e, 40, 60), 1.0 / static_cast<double>(ranks)); }
            CHECK(distance(kept, of(one.residuals[0], 40, 60)) <= 1e-5);
        }
    }
}

TEST_CASE("zero, thin, tiny and huge matrices") {  // T24; zeros: github.com/pytorch/pytorch/pull/55738
    const dense a = normal_matrix(30, 20, 60);
    for (const double scale : {1e-30, 1e30}) {
        low_rank_trial trial(30, 20, 3), same(30, 20, 3);
        const dense scaled = plus(dense(30, 20), a, scale);
        for (int step = 0; step < 3; ++step) {
            const auto out = trial.step({rounded(scaled)})[0];
            const auto expected = same.step({rounded(a)})[0];
            CHECK(distance(plus(dense(30, 20), of(out, 30, 20), 1 / scale), of(expected, 30, 20)) <= 1e-5);
        }
    }
    low_rank_trial trial(30, 20, 3, 2);
    const std::vector<float> zero(600);
    const auto g = rounded(a);
    for (int step = 0; step < 2; ++step) {
        const auto out = trial.step({zero, zero});
        CHECK(out[0] == zero);
        CHECK(trial.residuals[1] == zero);
    }
    // Zeros left no trace: columns of zeros would stay zeros for ever.
    low_rank_trial fresh(30, 20, 3, 2);
    fresh.step_count = trial.step_count;
    CHECK(test::same_bytes(trial.step({g, zero})[0], fresh.step({g, zero})[0]));
    // Rank one, then more: the columns that were not needed come back.
    low_rank_trial thin(30, 20, 3);
    for (int step = 0; step < 3; ++step) {
        CHECK(distance(of(thin.step({std::vector<float>(600, 2.0f)})[0], 30, 20),
                       of(std::vector<float>(600, 2.0f), 30, 20)) <= 1e-5);
    }
    const dense three = test::with_singular_values(30, 20, {3, 2, 1}, 61);
    CHECK(distance(of(thin.step({rounded(three)})[0], 30, 20), three) <= 1e-5);
}

// Products of float16 in float16 overflow from 256 on and vanish below 1.7e-4, as PyTorch's hook warns.
TEST_CASE("float16 of any size is multiplied in float") {
    for (const double scale : {3e-5, 5e3}) {
        const auto g = rounded<float16>(test::with_singular_values(40, 30, {40 * scale, 20 * scale}, 62));
        low_rank_trial<float16> trial(40, 30, 2);
        const auto out = trial.step({g})[0];
        double error = 0, size = 0;
        for (std::size_t i = 0; i < g.size(); ++i) {
            error += std::pow(static_cast<double>(static_cast<float>(out[i]) - static_cast<float>(g[i])), 2);
            size += std::pow(static_cast<double>(static_cast<float>(g[i])), 2);
        }
        CHECK(error <= 1e-4 * size);
    }
}

// epfml/powersgd divides columns of a batch of rank-1 tensors by the norm of the whole batch.
TEST_CASE("together or one by one, in any order, cut into any calls: the same bits") {  // T25
    std::vector<test::segment> all;
    std::size_t elements = 0;
    for (std::uint32_t t = 0; t < 9; ++t) {
        const bool equal = t < 6;
        all.push_back(matrix_segment(t, equal ? 24 : 7 + t, equal ? 32 : 513, t % 2 == 0 ? 1 : 5, elements));
        elements += all.back().size();
    }
    low_rank_trial together(all, 2, elements);
    low_rank_trial reversed(all, 2, elements);
    std::reverse(reversed.segments.begin(), reversed.segments.end());
    std::vector<low_rank_trial<float>> alone;
    for (const auto& s : all) {
        auto moved = s;
        moved.offset = 0;
        alone.emplace_back(std::vector<test::segment>{moved}, 2, s.size());
    }
    for (std::uint32_t step = 0; step < 3; ++step) {
        const test::rows<float> g{rounded(normal_matrix(1, elements, 70 + step)),
                                  rounded(normal_matrix(1, elements, 80 + step))};
        const auto out = together.step(g);
        CHECK(test::same_bytes(reversed.step(g)[0], out[0]));
        CHECK(test::same_bytes(reversed.residuals[1], together.residuals[1]));
        for (std::size_t t = 0; t < all.size(); ++t) {
            const auto part = [&](const std::vector<float>& v) {
                const auto first = v.begin() + static_cast<std::ptrdiff_t>(all[t].offset);
                return std::vector<float>(first, first + static_cast<std::ptrdiff_t>(all[t].size()));
            };
            CHECK(test::same_bytes(alone[t].step({part(g[0]), part(g[1])})[0], part(out[0])));
            CHECK(test::same_bytes(alone[t].residuals[0], part(together.residuals[0])));
        }
    }
}

// e = M - (the mean over the ranks), as PyTorch's hook and the paper's code have it, takes in by how much the ranks
// differ, step after step; asked about in github.com/epfml/powersgd/issues/3
TEST_CASE("residuals stay bounded, also where the ranks' gradients differ for good") {  // T26
    const std::size_t n = 12, m = 10;
    low_rank_trial local(n, m, 3, 2);
    low_rank_trial mean(n, m, 3, 2);
    const dense apart = normal_matrix(n, m, 1);
    double early = 0, late = 0, late_of_mean = 0;
    for (std::uint32_t step = 0; step < 4000; ++step) {
        const test::rows<float> g{rounded(plus(normal_matrix(n, m, 2 * step + 10), apart, 1)),
                                  rounded(plus(normal_matrix(n, m, 2 * step + 11), apart, -1))};
        static_cast<void>(local.step(g));
        test::rows<float> x = g;
        for (std::size_t r = 0; r < 2; ++r) {
            for (std::size_t i = 0; i < n * m; ++i) { x[r][i] += mean.residuals[r][i]; }
        }
        const auto out = mean.step(g);
        for (std::size_t r = 0; r < 2; ++r) {
            for (std::size_t i = 0; i < n * m; ++i) { mean.residuals[r][i] = x[r][i] - out[r][i]; }
            const double now = largest(local.residuals[r]);
            if (step < 500) { early = std::max(early, now); }
            if (step >= 3500) {
                late = std::max(late, now);
                late_of_mean = std::max(late_of_mean, largest(mean.residuals[r]));
            }
        }
    }
    CHECK(early > 1);
    CHECK(late <= 1.5 * early);
    CHECK(late_of_mean > 20 * early);  // or the steps were too few to tell
}

TEST_CASE("nothing is lost: what was sent and what is left add up to the gradients") {  // T27
    const std::size_t n = 20, m = 30, ranks = 3;
    low_rank_trial trial(n, m, 2, ranks);
    dense sent(n, m), given(n, m);
    for (std::uint32_t step = 0; step < 1000; ++step) {
        if (step % 250 == 249) { trial.segments[0].level = static_cast<int>(1 + step % 2); }
        test::rows<float> g;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            g.push_back(rounded(plus(normal_matrix(n, m, step * 3 + r), normal_matrix(n, m, 9999 + r), 1)));
            given = plus(given, of(g[r], n, m), 1.0 / ranks);
        }
        sent = plus(sent, of(trial.step(g)[0], n, m), 1);
    }
    for (const auto& e : trial.residuals) { sent = plus(sent, of(e, n, m), 1.0 / ranks); }
    // Factors, wires and residuals are float: rounding, 1e-7 a step, is all that is lost.
    CHECK(distance(sent, given) <= 2e-6);
}

TEST_CASE("gradient descent on a quadratic ends where it does without compression") {
    const std::size_t n = 16, m = 12;
    const dense goal = normal_matrix(n, m, 90);
    const dense apart = normal_matrix(n, m, 91);  // the ranks' goals differ, around the common one
    for (const int level : {1, 4}) {
        low_rank_trial trial(n, m, level, 2);
        dense x(n, m);
        for (int step = 0; step < 3000; ++step) {
            const test::rows<float> g{rounded(plus(plus(x, goal, -1), apart, 1)),
                                      rounded(plus(plus(x, goal, -1), apart, -1))};
            x = plus(x, of(trial.step(g)[0], n, m), -0.05);
        }
        CHECK(distance(x, goal) <= 1e-5);
    }
}
