// random_k: distinct places, each as likely as the others whatever the sizes; unbiased and of the promised second
// moment; the mean over ranks; error feedback; what is not finite; errors; and what public reports say goes wrong.
#include <doctest/doctest.h>  // checks

#include <cmath>   // sqrt, fabs
#include <limits>  // infinity
#include <set>     // distinct places
#include <vector>  // storage

#include <tutti/compress/random_k.hpp>   // under test
#include <tutti/core/virtual_queue.hpp>  // costs

#include "compress/sparse.hpp"  // gradients
#include "support/oracle.hpp"   // rows

using namespace tutti;
using compress::draw_key;
using compress::random_k;
using compress::segment;
using compress::detail::random_places;
using namespace tutti::test;

static_assert(compress::linear_compressor<random_k, host_queue> &&
              compress::linear_compressor<random_k, virtual_queue, bfloat16>);
static_assert(compress::linear_compressor<random_k, host_queue, float16> &&
              compress::linear_compressor<random_k, host_queue, double>);

namespace {

// A step of several ranks. residuals: one a rank, or none.
template <class T>
std::vector<std::vector<T>> step(const random_k& x, const std::vector<segment>& all, const rows<T>& in,
                                 rows<float>& residuals, draw_key key) {
    const host_queue q;
    const std::size_t count = compress::detail::wire_count(x, all, 0);
    std::vector<float> sum(count);
    std::vector<random_k::state_type<host_queue>> states;
    for (std::size_t r = 0; r < in.size(); ++r) {
        key.rank = static_cast<std::uint32_t>(r);
        states.push_back(x.make_state(q, all));
        std::vector<float> wire(count, 99), none;
        x.contribute(q, all, states[r], 0, view<const T>(in[r]), view<float>(residuals.empty() ? none : residuals[r]),
                     view<float>(wire), key);
        for (std::size_t j = 0; j < count; ++j) { sum[j] += wire[j]; }
    }
    rows<T> out = in;  // may be in
    for (std::size_t r = 0; r < in.size(); ++r) {
        std::vector<float> none;
        x.absorb(q, all, states[r], 0, view<float>(sum), static_cast<int>(in.size()));
        x.finish(q, all, states[r], view<const T>(out[r]), view<float>(residuals.empty() ? none : residuals[r]),
                 view<T>(out[r]));
    }
    return out;
}
std::vector<float> alone(const random_k& x, const std::vector<segment>& all, const std::vector<float>& in,
                         draw_key key) {
    rows<float> none;
    return step<float>(x, all, {in}, none, key)[0];
}

}  // namespace

TEST_CASE("exactly k places, all different") {
    for (const std::size_t n : {1ul, 2ul, 7ul, 100ul, 1001ul, 65537ul}) {
        for (const int level : {1, 333, 5000, 7001, 10000}) {
            const segment s{3, level, 0, 0, n, 1};
            const std::size_t k = random_k::wire_count(s, 0);
            CHECK(k == std::max<std::size_t>(1, n * static_cast<std::size_t>(level) / 10000));
            for (std::uint32_t t = 0; t < 3; ++t) {
                const auto places = random_places::of({7, t, 0}, s, k);
                std::set<std::size_t> seen;
                for (std::size_t j = 0; j < k; ++j) { seen.insert(places[j]); }
                CHECK(seen.size() == k);
                CHECK(*seen.rbegin() < n);
            }
        }
    }
}

// Sizes that k does not divide: cells of 1 and 2, of 2 and 3, of 33 and 34; and every place must be as likely.
TEST_CASE("every place is chosen with the probability k / n") {
    struct sizes {
        std::size_t n;
        int level;
    };
    for (const auto [n, level] : {sizes{13, 7000}, sizes{13, 3900}, sizes{100, 300}}) {
        const segment s{3, level, 0, 0, n, 1};
        const std::size_t k = random_k::wire_count(s, 0);
        constexpr std::uint32_t draws = 40000;
        std::vector<double> chosen(n);
        for (std::uint32_t t = 0; t < draws; ++t) {
            const auto places = random_places::of({7, t, 0}, s, k);
            for (std::size_t j = 0; j < k; ++j) { chosen[places[j]] += 1; }
        }
        const double p = static_cast<double>(k) / static_cast<double>(n);
        for (const double c : chosen) { CHECK(std::fabs(c - draws * p) <= 5 * std::sqrt(draws * p * (1 - p))); }
    }
}

TEST_CASE("unbiased: the mean is the input, the second moment d / k of its own") {
    constexpr std::size_t n = 101;
    constexpr std::uint32_t draws = 20000;
    const auto all = laid_out({{n, 2000}});  // 20
    const auto in = gradient<float>("t(2)", n);
    std::vector<double> mean(n);
    double second = 0, own = 0;
    for (std::uint32_t t = 0; t < draws; ++t) {
        const auto out = alone(random_k{.unbiased = true}, all, in, {11, t, 0});
        for (std::size_t i = 0; i < n; ++i) {
            mean[i] += static_cast<double>(out[i]) / draws;
            second += static_cast<double>(out[i]) * out[i] / draws;
        }
    }
    const double ratio = static_cast<double>(n) / 20;
    for (std::size_t i = 0; i < n; ++i) {
        const double x = in[i];
        own += x * x;
        CHECK(std::fabs(mean[i] - x) <= 5 * std::sqrt((ratio - 1) * x * x / draws));
    }
    CHECK(second == doctest::Approx(ratio * own).epsilon(0.03));
}

TEST_CASE("as they are: a contraction by 1 - k / d in the mean, and by each step") {
    constexpr std::size_t n = 101;
    const auto all = laid_out({{n, 2000}});
    const auto in = gradient<float>("gaussian", n);
    double left = 0, own = 0;
    for (const float x : in) { own += static_cast<double>(x) * x; }
    for (std::uint32_t t = 0; t < 5000; ++t) {
        const auto out = alone(random_k{}, all, in, {11, t, 0});
        double here = 0;
        for (std::size_t i = 0; i < n; ++i) {
            CHECK((out[i] == 0 || out[i] == in[i]));
            here += static_cast<double>(in[i] - out[i]) * (in[i] - out[i]);
        }
        CHECK(here <= own * (1 + 1e-12));
        left += here / 5000;
    }
    CHECK(left == doctest::Approx((1 - 20.0 / n) * own).epsilon(0.02));
}

TEST_CASE_TEMPLATE("the mean over ranks at the same places, and residuals that keep the rest", T, float, bfloat16,
                   float16, double) {
    constexpr std::size_t ranks = 3;
    const auto all = laid_out({{1000, 100}, {0, 1}, {17, 5000}, {1, 1}});
    rows<T> in;
    rows<float> residuals, x;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        in.push_back(gradient<T>("gaussian", 1018, r));
        residuals.push_back(gradient<float>("laplace", 1018, r + 9));
        x.push_back(sums(in[r], residuals[r]));
    }
    const auto out = step(random_k{}, all, in, residuals, {4, 5, 0});
    std::size_t sent = 0;
    for (std::size_t i = 0; i < 1018; ++i) {
        const float sum = x[0][i] + x[1][i] + x[2][i];
        const bool chosen = residuals[0][i] == 0;
        sent += chosen ? 1u : 0u;
        for (std::size_t r = 0; r < ranks; ++r) {
            CHECK(static_cast<float>(out[r][i]) ==
                  static_cast<float>(chosen ? static_cast<T>(sum / 3.0f) : static_cast<T>(0.0f)));
            const float left = chosen ? 0.0f : x[r][i];
            CHECK(std::memcmp(&residuals[r][i], &left, sizeof(left)) == 0);
        }
    }
    CHECK(sent == 10 + 8 + 1);
}

// sands-lab/grace, randomk.py: seeds were sums of bytes of the name and the step, so that anagrams, and names and steps
// that add up alike, shared their places.
TEST_CASE("tensors, steps and seeds have places of their own; ranks have the same") {
    constexpr std::size_t n = 100000, k = 1000;
    const auto places = [](draw_key key, std::uint32_t tensor) {
        return random_places::of(key, segment{tensor, 100, 0, 0, n, 1}, k);
    };
    // In how many cells two choices take the same place; by chance 10.
    const auto common = [](const random_places& a, const random_places& b) {
        std::size_t count = 0;
        for (std::size_t j = 0; j < k; ++j) { count += (a[j] + n - a.turn) % n == (b[j] + n - b.turn) % n ? 1u : 0u; }
        return count;
    };
    const auto one = places({1, 1, 0}, 1);
    CHECK(common(places({1, 1, 7}, 1), one) == k);
    CHECK(places({1, 1, 7}, 1).turn == one.turn);
    for (const auto& other : {places({1, 0, 0}, 2), places({1, 2, 0}, 0), places({1, 1, 0}, 2), places({1, 2, 0}, 1),
                              places({2, 1, 0}, 1), places({2, 0, 0}, 1)}) {
        CHECK(common(one, other) <= 30);
        CHECK(one.turn != other.turn);
    }
}

TEST_CASE("what is not finite spoils its segment, and only this step") {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        const auto all = laid_out({{500, 100}, {500, 100}});
        rows<float> in{gradient<float>("gaussian", 1000), gradient<float>("laplace", 1000)};
        rows<float> residuals(2, std::vector<float>(1000));
        in[0][123] = bad;
        const auto out = step(random_k{}, all, in, residuals, {1, 1, 0});
        std::size_t nan = 0;
        for (std::size_t i = 0; i < 1000; ++i) {
            nan += std::isnan(out[1][i]) ? 1u : 0u;
            CHECK((i < 500 || !std::isnan(out[0][i])));
            CHECK(std::isfinite(residuals[0][i]));
        }
        CHECK(nan == 5);
        CHECK(residuals[0][123] == 0);
        // Without a residual it shows too, although it would hardly be chosen.
        rows<float> none;
        nan = 0;
        const auto without = step(random_k{}, all, in, none, {1, 2, 0});
        for (const float v : without[0]) { nan += std::isnan(v) ? 1u : 0u; }
        CHECK(nan == 5);
    }
}

// github.com/sands-lab/grace/issues/16, github.com/deepspeedai/DeepSpeed/pull/5652: nothing to send.
TEST_CASE("nothing at all") {
    rows<float> none;
    CHECK(step<float>(random_k{}, {}, {{}}, none, {})[0].empty());
    CHECK(step<float>(random_k{}, laid_out({{0, 1}}), {{}}, none, {})[0].empty());
}

// github.com/bytedance/byteps/pull/299: fp16 tensors had 16-bit indices; the scale of the unbiased form.
TEST_CASE("16-bit elements beyond 2^16, and the factor") {
    const auto all = laid_out({{200000, 5000}});
    rows<float16> in(1, std::vector<float16>(200000, float16(0.5f)));
    rows<float> none;
    const auto out = step(random_k{.unbiased = true}, all, in, none, {1, 1, 0})[0];
    std::size_t high = 0;
    for (std::size_t i = 65536; i < out.size(); ++i) {
        CHECK((static_cast<float>(out[i]) == 0 || static_cast<float>(out[i]) == 1));
        high += static_cast<float>(out[i]) == 1 ? 1u : 0u;
    }
    CHECK(high > 60000);
    CHECK(random_k{.unbiased = true}.factor({0, 100, 0, 0, 1050, 1}) == 105);
    CHECK(random_k{}.factor({0, 100, 0, 0, 1050, 1}) == 1);
}

TEST_CASE("bad levels, sizes, rounds and ranks are refused; so is a residual that would grow") {
    const host_queue q;
    std::vector<float> in(100, 1), residual(100, 2), wire(5, 3), none;
    const auto all = laid_out({{100, 500}});
    const random_k x, unbiased{.unbiased = true};
    auto state = x.make_state(q, all);
    CHECK(state.entries().empty());
    const view<const float> from(in);
    CHECK_THROWS_WITH_AS(static_cast<void>(x.make_state(q, laid_out({{3, 0}}))),
                         "random_k: level 0 of tensor 0: kept elements in 10,000 are 1 to 10000", usage_error);
    CHECK_THROWS_WITH_AS(x.contribute(q, all, state, 1, from, view<float>(residual), view<float>(wire), {}),
                         "random_k: round 1 of 1", usage_error);
    CHECK_THROWS_WITH_AS(x.contribute(q, all, state, 0, from, view<float>(residual), view<float>(wire).sub(0, 4), {}),
                         "random_k: the wire has 4 elements instead of 5", usage_error);
    CHECK_THROWS_WITH_AS(x.contribute(q, all, state, 0, from, view<float>(residual).sub(1, 99), view<float>(wire), {}),
                         "random_k: the residual has 99 elements instead of 100", usage_error);
    CHECK_THROWS_WITH_AS(
        x.contribute(q, laid_out({{100, 600}}), state, 0, from, view<float>(none), view<float>(wire), {}),
        "random_k: 6 kept elements for a state of 5: make it for the largest levels", usage_error);
    CHECK_THROWS_WITH_AS(unbiased.contribute(q, all, state, 0, from, view<float>(residual), view<float>(wire), {}),
                         "random_k: an unbiased one leaves more than it was given: without residual, or unbiased off",
                         usage_error);
    CHECK_THROWS_WITH_AS(
        x.contribute(q, laid_out({{101, 500}}), state, 0, from, view<float>(none), view<float>(wire), {}),
        "random_k: tensor 0 is at elements 0 to 101 of 100", usage_error);
    CHECK_THROWS_WITH_AS(x.absorb(q, all, state, 0, view<float>(wire), 0), "random_k: 0 ranks cannot have sent",
                         usage_error);
    CHECK_THROWS_AS(x.finish(q, all, state, from, view<float>(none), view<float>(in).sub(0, 99)), usage_error);
    CHECK(residual == std::vector<float>(100, 2));
    CHECK(wire == std::vector<float>(5, 3));
}

TEST_CASE("a virtual queue is charged") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    const auto all = laid_out({{10000, 100}});
    const view<float, phantom_memory> x(nullptr, 10000), wire(nullptr, 100);
    const random_k scheme;
    auto state = scheme.make_state(q, all);
    scheme.contribute(q, all, state, 0, x, x, wire, {});
    scheme.absorb(q, all, state, 0, wire, 4);
    scheme.finish(q, all, state, x, x, x);
    const auto& steps = q.recording().streams[0];
    REQUIRE(steps.size() == 3);
    CHECK(steps[0].seconds == 3 * 40000 + 800);
    CHECK(steps[1].seconds == 800);
    CHECK(steps[2].seconds == 40000 + 800);
}
