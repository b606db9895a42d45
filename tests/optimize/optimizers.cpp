// AdamW and SGD against values computed by hand, against the double reference, and against themselves in other
// segments.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // min, max
#include <cmath>      // fabs
#include <cstring>    // memcmp
#include <limits>     // nan, infinity
#include <optional>   // noise
#include <vector>     // elements

#include "reference.hpp"                 // the judge
#include "support/oracle.hpp"            // random elements
#include <tutti/core/virtual_queue.hpp>  // costs
#include <tutti/optimize/adamw.hpp>      // adamw
#include <tutti/optimize/sgd.hpp>        // sgd

using namespace tutti;
using optimize::adamw;
using optimize::segment;
using optimize::sgd;
using optimize::step_values;

static_assert(optimize::optimizer<adamw, float, host_queue> && optimize::optimizer<adamw, double, host_queue>);
static_assert(optimize::optimizer<adamw, bfloat16, host_queue> && optimize::optimizer<adamw, float16, virtual_queue>);
static_assert(optimize::optimizer<sgd, float, host_queue> && optimize::optimizer<sgd, bfloat16, virtual_queue>);
static_assert(std::same_as<optimize::optimizer_state<bfloat16, host_queue>::value_type, float>);
static_assert(std::same_as<optimize::optimizer_state<double, host_queue>::value_type, double>);

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

// One optimizer on one array, with its state.
template <class O, class T> struct run_of {
    O optimizer;
    std::vector<master_t<T>> x;
    std::vector<segment> segments;
    host_queue q{};
    optimize::optimizer_state<T, host_queue> state;

    run_of(O o, std::vector<master_t<T>> start, std::vector<segment> s)
        : optimizer(o), x(std::move(start)), segments(std::move(s)), state(o.template make_state<T>(q, x.size())) {}
    void step(const std::vector<T>& g, double rate, double factor = 1) {
        optimizer.template update<T>(q, x, view<const T>(g), state, segments, {rate, factor});
    }
};

// `sizes` of odd lengths, so that vector loops have tails; alternately with and without decay.
std::vector<segment> alternating(std::size_t n) {
    std::vector<segment> out;
    for (std::size_t first = 0, size = 1; first < n; first += size, size = size * 3 + 2) {
        size = std::min(size, n - first);
        out.push_back({first, size, out.size() % 2 == 0});
    }
    return out;
}
std::vector<bool> flags(const std::vector<segment>& segments, std::size_t n) {
    std::vector<bool> out(n);
    for (const segment& s : segments) {
        for (std::size_t i = s.first; i < s.first + s.count; ++i) { out[i] = s.decay; }
    }
    return out;
}

// 12 steps with changing rates and clipping factors; the largest error relative to the largest element.
template <class T, class O, class Reference> double distance_from(Reference reference, O optimizer) {
    constexpr std::size_t n = 3001;
    std::vector<master_t<T>> start(n);
    std::vector<double> x(n);
    for (std::size_t i = 0; i < n; ++i) { x[i] = start[i] = test::random_element<master_t<T>>(1, i); }
    run_of<O, T> tested(optimizer, start, alternating(n));
    const auto decays = flags(tested.segments, n);
    for (int k = 0; k < 12; ++k) {
        const double rate = 0.01 / (1 + k);
        const double factor = k % 3 == 0 ? 1.0 : 0.25;
        std::vector<T> g(n);
        std::vector<double> exact(n);
        for (std::size_t i = 0; i < n; ++i) {
            g[i] = test::random_element<T>(static_cast<std::uint64_t>(k) + 2, i);
            exact[i] = factor * static_cast<double>(static_cast<master_t<T>>(g[i]));
        }
        tested.step(g, rate, factor);
        reference.step(x, exact, rate, decays);
    }
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) { worst = std::max(worst, std::fabs(static_cast<double>(tested.x[i]) - x[i])); }
    return worst;
}

}  // namespace

TEST_CASE("adamw by hand") {
    // lr 0.1, wd 0.5, b1 0.5, b2 0.75, eps 0: x = 2, g = 3.
    // decay: 2 (1 - 0.05) = 1.9;  m = 1.5, m' = 3;  v = 2.25, v' = 9;  x = 1.9 - 0.1 * 3 / 3 = 1.8
    run_of<adamw, double> r({0.5, 0.75, 0, 0.5}, {2, 2}, {{0, 1, true}, {1, 1, false}});
    r.step({3, 3}, 0.1);
    CHECK(r.x[0] == doctest::Approx(1.8).epsilon(1e-15));
    CHECK(r.x[1] == doctest::Approx(1.9).epsilon(1e-15));
    CHECK(r.state[0][0] == 1.5);
    CHECK(r.state[1][0] == 2.25);
    CHECK(r.state.steps() == 1);
    CHECK(r.state.counter()[0] == 1);
    // g = -1: m = 0.25, m' = 0.25 / 0.75 = 1/3;  v = 1.9375, v' = 1.9375 / 0.4375
    r.step({-1, -1}, 0.1);
    CHECK(r.x[0] == doctest::Approx(1.8 * 0.95 - 0.1 / 3 / std::sqrt(1.9375 / 0.4375)).epsilon(1e-15));
    CHECK(r.x[1] == doctest::Approx(1.9 - 0.1 / 3 / std::sqrt(1.9375 / 0.4375)).epsilon(1e-15));
    CHECK(r.state.steps() == 2);
}

TEST_CASE("adamw: epsilon stands outside the root, behind the bias correction") {
    run_of<adamw, double> r({0.9, 0.999, 0.5, 0}, {0}, {{0, 1, true}});
    r.step({1}, 1);
    CHECK(r.x[0] == doctest::Approx(-1 / 1.5).epsilon(1e-14));  // first step: m' = g, v' = g^2
}

TEST_CASE("sgd by hand") {
    // L2: d = 3 + 0.5 * 2 = 4; u = 4; x = 2 - 0.1 * 4 = 1.6. Then d = -1 + 0.8 = -0.2; u = 0.9 * 4 - 0.2 = 3.4
    run_of<sgd, double> r({0.9, 0.5, false}, {2, 2}, {{0, 1, true}, {1, 1, false}});
    r.step({3, 3}, 0.1);
    CHECK(r.x[0] == doctest::Approx(1.6).epsilon(1e-15));
    CHECK(r.x[1] == doctest::Approx(1.7).epsilon(1e-15));
    r.step({-1, -1}, 0.1);
    CHECK(r.x[0] == doctest::Approx(1.6 - 0.34).epsilon(1e-15));
    CHECK(r.x[1] == doctest::Approx(1.7 - 0.1 * 1.7).epsilon(1e-15));
    // Nesterov: x = 2 - 0.1 * (4 + 0.9 * 4)
    run_of<sgd, double> nesterov({0.9, 0.5, true}, {2}, {{0, 1, true}});
    nesterov.step({3}, 0.1);
    CHECK(nesterov.x[0] == doctest::Approx(2 - 0.76).epsilon(1e-15));
    // Without momentum there is no state.
    run_of<sgd, double> plain({0, 0.5, false}, {2}, {{0, 1, true}});
    plain.step({3}, 0.1);
    CHECK(plain.x[0] == doctest::Approx(1.6).epsilon(1e-15));
    CHECK(plain.state.moments().empty());
    CHECK(plain.state.steps() == 1);
}

TEST_CASE("against the double reference") {
    const test::reference_adamw a{0.9, 0.95, 1e-8, 0.1};
    const adamw tested{0.9, 0.95, 1e-8, 0.1};
    CHECK(distance_from<double>(a, tested) < 1e-12);
    CHECK(distance_from<float>(a, tested) < 1e-6);
    CHECK(distance_from<bfloat16>(a, tested) < 1e-6);  // same master precision: only the gradients are 16-bit
    CHECK(distance_from<float16>(a, tested) < 1e-6);
    for (const bool nesterov : {false, true}) {
        CHECK(distance_from<double>(test::reference_sgd{0.9, 0.1, nesterov}, sgd{0.9, 0.1, nesterov}) < 1e-12);
        CHECK(distance_from<float>(test::reference_sgd{0.9, 0.1, nesterov}, sgd{0.9, 0.1, nesterov}) < 1e-6);
        CHECK(distance_from<bfloat16>(test::reference_sgd{0.9, 0.1, nesterov}, sgd{0.9, 0.1, nesterov}) < 1e-6);
    }
    CHECK(distance_from<double>(test::reference_sgd{0, 0.1, false}, sgd{0, 0.1, false}) < 1e-12);
}

TEST_CASE_TEMPLATE("bits do not depend on how elements are segmented", O, adamw, sgd) {
    constexpr std::size_t n = 2000;
    std::vector<float> start(n), g(n);
    for (std::size_t i = 0; i < n; ++i) {
        start[i] = test::random_element<float>(3, i);
        g[i] = test::random_element<float>(4, i);
    }
    run_of<O, float> whole(O{}, start, {{0, n, true}});
    std::vector<segment> many;
    for (std::size_t i = 0; i < n; i += 7) { many.push_back({i, std::min<std::size_t>(7, n - i), true}); }
    run_of<O, float> parts(O{}, start, many);
    for (int k = 0; k < 3; ++k) {
        whole.step(g, 0.01, 0.5);
        parts.step(g, 0.01, 0.5);
    }
    CHECK(test::same_bytes(whole.x, parts.x));
    CHECK(std::memcmp(whole.state[0].data(), parts.state[0].data(), n * sizeof(float)) == 0);
}

TEST_CASE_TEMPLATE("what is published is what is rounded afterwards, and changes nothing else", O, adamw, sgd) {
    constexpr std::size_t n = 2000;
    std::vector<float> start(n);
    std::vector<bfloat16> g(n);
    for (std::size_t i = 0; i < n; ++i) {
        start[i] = test::random_element<float>(3, i);
        g[i] = test::random_element<bfloat16>(4, i);
    }
    const random_stream noise{.seed = 7, .stream = 8, .step = 9};
    const auto segments = alternating(n);
    for (const bool stochastic : {false, true}) {
        run_of<O, bfloat16> plain(O{}, start, segments);
        run_of<O, bfloat16> fused(O{}, start, segments);
        std::vector<bfloat16> out(n), wanted(n);
        std::vector<view<bfloat16>> values;
        for (const segment& s : segments) { values.push_back(view<bfloat16>(out).sub(s.first, s.count)); }
        optimize::publication<bfloat16, host_memory> publish{values, std::nullopt, 1000};
        if (stochastic) { publish.noise = noise; }
        plain.step(g, 0.01, 0.5);
        fused.optimizer.template update<bfloat16>(fused.q, fused.x, view<const bfloat16>(g), fused.state, segments,
                                                  {0.01, 0.5}, publish);
        CHECK(test::same_bytes(plain.x, fused.x));
        CHECK(std::memcmp(plain.state[0].data(), fused.state[0].data(), n * sizeof(float)) == 0);
        if (stochastic) {
            copy_stochastically(plain.q, plain.x, view<bfloat16>(wanted), noise, 1000);
        } else {
            copy(plain.q, view<const float>(plain.x), view<bfloat16>(wanted));
        }
        CHECK(test::same_bytes(out, wanted));
    }
}

TEST_CASE("publications that do not fit are refused before anything moved") {
    run_of<adamw, float> r({}, {1, 2, 3}, {{0, 1, true}, {1, 2, true}});
    const std::vector<float> g(3, 1.0f);
    std::vector<float> out(3);
    const view<float> o(out);
    const auto refused = [&](std::vector<view<float>> values, std::optional<random_stream> noise) {
        CHECK_THROWS_AS(r.optimizer.update<float>(r.q, r.x, g, r.state, r.segments, {0.1, 1}, {values, noise, 0}),
                        usage_error);
        CHECK(r.state.steps() == 0);
        CHECK(r.x == std::vector<float>{1, 2, 3});
    };
    refused({o}, {});
    refused({o.sub(0, 1), o.sub(1, 1)}, {});
    refused({o.sub(0, 1), o.sub(1, 2)}, random_stream{});  // floats are not rounded
    r.optimizer.update<float>(r.q, r.x, g, r.state, r.segments, {0.1, 1},
                              {std::vector{o.sub(0, 1), o.sub(1, 2)}, {}, 0});
    CHECK(out == r.x);
}

TEST_CASE("elements outside the segments are left alone, empty updates count") {
    run_of<adamw, float> r({}, {1, 2, 3}, {{1, 1, true}});
    r.step({1, 1, 1}, 0.1);
    CHECK(r.x[0] == 1);
    CHECK(r.x[1] != 2);
    CHECK(r.x[2] == 3);
    CHECK(r.state[0][0] == 0);
    run_of<adamw, float> none({}, {}, {});
    none.step({}, 0.1);
    CHECK(none.state.steps() == 1);
}

TEST_CASE("a state whose memory was written counts on from there") {
    run_of<adamw, double> a({}, {1}, {{0, 1, true}});
    a.step({1}, 0.1);
    a.step({2}, 0.1);
    run_of<adamw, double> b({}, {a.x[0]}, {{0, 1, true}});
    for (std::size_t m = 0; m < 2; ++m) { b.state[m][0] = a.state[m][0]; }
    b.state.counter()[0] = a.state.counter()[0];
    b.state.restored(b.q);
    a.step({3}, 0.1);
    b.step({3}, 0.1);
    CHECK(a.x[0] == b.x[0]);
    CHECK(b.state.steps() == 3);
}

TEST_CASE("values that make no sense are refused") {
    CHECK_NOTHROW(adamw{}.validate());
    for (const double bad : {-0.1, 1.0, 2.0, not_a_number, infinity}) {
        CHECK_THROWS_AS((adamw{.beta1 = bad}.validate()), usage_error);
        CHECK_THROWS_AS((adamw{.beta2 = bad}.validate()), usage_error);
        CHECK_THROWS_AS((sgd{.momentum = bad}.validate()), usage_error);
    }
    for (const double bad : {-0.1, not_a_number, infinity}) {
        CHECK_THROWS_AS((adamw{.epsilon = bad}.validate()), usage_error);
        CHECK_THROWS_AS((adamw{.weight_decay = bad}.validate()), usage_error);
        CHECK_THROWS_AS((sgd{.weight_decay = bad}.validate()), usage_error);
    }
    CHECK_THROWS_WITH_AS((adamw{.beta2 = 1.5}.validate()), "adamw: beta2 is 1.5, expected a value in [0, 1)",
                         usage_error);
    CHECK_THROWS_WITH_AS((sgd{.momentum = 0, .nesterov = true}.validate()), "sgd: nesterov needs a momentum",
                         usage_error);
    CHECK_NOTHROW((adamw{.beta1 = 0, .epsilon = 0, .weight_decay = 0}.validate()));

    run_of<adamw, float> r({}, {1, 2}, {{0, 2, true}});
    const std::vector<float> before = r.x;
    for (const double bad : {-1.0, not_a_number, infinity}) { CHECK_THROWS_AS(r.step({1, 1}, bad), usage_error); }
    for (const double bad : {not_a_number, infinity}) { CHECK_THROWS_AS(r.step({1, 1}, 0.1, bad), usage_error); }
    CHECK_THROWS_AS(r.step({1, 1, 1}, 0.1), usage_error);
    r.segments = {{1, 2, true}};
    CHECK_THROWS_AS(r.step({1, 1}, 0.1), usage_error);
    CHECK(r.x == before);
    CHECK(r.state.steps() == 0);
}

TEST_CASE("descriptions tell rules apart") {
    CHECK(adamw{}.describe() == adamw{}.describe());
    CHECK(adamw{}.describe() != adamw{.beta2 = 0.9990000001}.describe());
    CHECK(sgd{}.describe() != sgd{.nesterov = true}.describe());
    CHECK(adamw{}.describe() == "adamw(beta1 0.9, beta2 0.999, epsilon 1e-08, weight_decay 0.01)");
}

TEST_CASE("virtual updates charge exactly what they would move") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    const view<float, phantom_memory> x(nullptr, 1000);
    const std::vector<segment> segments{{0, 400, true}, {400, 600, false}};
    auto state = adamw{}.make_state<float>(q, 1000);
    const double before = resolve(q.recording())[0];
    CHECK(before == 8 * 1000 + 8);  // zeroed
    adamw{}.update<float>(q, x, view<const float, phantom_memory>(x), state, segments, {0.1, 1});
    CHECK(resolve(q.recording())[0] - before == 28 * 1000 + 8);  // and the step count
    CHECK(q.account().live() == 8 * 1000 + 8);
    {
        const view<bfloat16, phantom_memory> gradient(nullptr, 1000), values(nullptr, 1000);
        auto masters = adamw{}.make_state<bfloat16>(q, 1000);
        const std::vector<view<bfloat16, phantom_memory>> parts{values.sub(0, 400), values.sub(400, 600)};
        const double then = resolve(q.recording())[0];
        adamw{}.update<bfloat16>(q, x, gradient, masters, segments, {0.1, 1}, {parts, {}, 0});
        CHECK(resolve(q.recording())[0] - then == (26 + 2) * 1000 + 8);  // 2 bytes more, and no second pass
    }
    virtual_queue p(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    auto none = sgd{.momentum = 0}.make_state<float>(p, 1000);
    const double start = resolve(p.recording())[0];
    sgd{.momentum = 0}.update<float>(p, x, view<const float, phantom_memory>(x), none, segments, {0.1, 1});
    CHECK(resolve(p.recording())[0] - start == 12 * 1000 + 8);
}
