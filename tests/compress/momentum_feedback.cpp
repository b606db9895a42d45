// momentum_feedback: with nothing held back it is SGD with momentum; otherwise it is deep gradient compression as it is
// written down, bit for bit; masking; warm-up; what is not finite does not stay; resume; errors.
#include <doctest/doctest.h>  // checks

#include <cmath>    // fabs
#include <limits>   // NaN
#include <string>   // names
#include <utility>  // pairs
#include <vector>   // storage

#include <tutti/compress/momentum_feedback.hpp>  // under test
#include <tutti/compress/random_k.hpp>           // a linear compressor
#include <tutti/compress/threshold.hpp>          // a compressor
#include <tutti/compress/top_k.hpp>              // a compressor
#include <tutti/core/virtual_queue.hpp>          // costs

#include "compress/sparse.hpp"  // gradients

using namespace tutti;
using compress::draw_key;
using compress::momentum_feedback;
using compress::momentum_options;
using compress::random_k;
using compress::segment;
using compress::threshold;
using compress::top_k;
using compress::warm_up_level;
using namespace tutti::test;

namespace {

using feedback = momentum_feedback<host_queue>;
const host_queue q;

// What one rank sends for a gradient, in floats.
template <class X, class T>
std::vector<float> send(const X& x, feedback& f, const std::vector<segment>& all, const std::vector<T>& g,
                        draw_key key) {
    f.add(q, view<const T>(g));
    std::vector<float> out(g.size());
    if constexpr (std::same_as<X, random_k>) {
        auto state = x.make_state(q, all);
        std::vector<float> wire(compress::detail::wire_count(x, all, 0));
        x.contribute(q, all, state, 0, f.in(), f.residual(), view<float>(wire), key);
        x.absorb(q, all, state, 0, view<float>(wire), 1);
        x.finish(q, all, state, f.in(), f.residual(), view<float>(out));
    } else {
        std::vector<std::byte> wire(compress::detail::wire_bytes(x, all));
        x.encode(q, all, f.in(), f.residual(), view<std::byte>(wire), key);
        x.decode(q, all, view<const std::byte>(wire), view<float>(out), 1.0f);
    }
    f.sent(q, all);
    return out;
}

std::vector<float> values(view<const float> v) { return {v.begin(), v.end()}; }

}  // namespace

// T17. momentum SGD is that of optimize/sgd.hpp: u = m u + g, and with Nesterov's  g + m u  is applied.
TEST_CASE_TEMPLATE("with nothing held back it is SGD with momentum", X, top_k, threshold, random_k) {
    constexpr std::size_t n = 300;
    for (const bool nesterov : {false, true}) {
        for (const bool masking : {false, true}) {
            feedback f(q, n, {.momentum = 0.9f, .nesterov = nesterov, .masking = masking});
            const auto all = laid_out({{n, 10000}});
            std::vector<double> weights(n, 1), velocity(n), ours(n, 1);
            for (std::uint32_t t = 0; t < 200; ++t) {
                const auto g = gradient<float>("gaussian", n, t);
                const auto sent = send(X{}, f, all, g, {1, t, 0});
                for (std::size_t i = 0; i < n; ++i) {
                    velocity[i] = static_cast<double>(0.9f) * velocity[i] + static_cast<double>(g[i]);
                    weights[i] -= 0.01 * (nesterov ? g[i] + static_cast<double>(0.9f) * velocity[i] : velocity[i]);
                    ours[i] -= 0.01 * static_cast<double>(sent[i]);
                }
            }
            for (std::size_t i = 0; i < n; ++i) { CHECK(std::fabs(ours[i] - weights[i]) <= 1e-6); }
        }
    }
}

// The paper's algorithm 1, with the selection by sorting: u, v, the mask, every bit, with the density changing.
TEST_CASE("deep gradient compression as it is written down") {
    constexpr std::size_t n = 700;
    for (const bool nesterov : {false, true}) {
        for (const bool masking : {false, true}) {
            feedback f(q, n, {.momentum = 0.75f, .nesterov = nesterov, .masking = masking});
            std::vector<float> u(n), v(n);
            for (std::uint32_t t = 0; t < 40; ++t) {
                const auto g = gradient<float>(t % 2 == 0 ? "t(2)" : "few", n, t);
                const auto all = laid_out({{n, warm_up_level(50, t / 8, 4)}});
                const auto sent = send(top_k{}, f, all, g, {});
                for (std::size_t i = 0; i < n; ++i) {
                    if (nesterov) {
                        const float sum = u[i] + g[i];
                        u[i] = 0.75f * sum;
                        const float with_gradient = v[i] + g[i];
                        v[i] = u[i] + with_gradient;
                    } else {
                        const float decayed = 0.75f * u[i];
                        u[i] = decayed + g[i];
                        v[i] = v[i] + u[i];
                    }
                }
                std::vector<float> want(n);
                for (const std::size_t i : largest(v.data(), n, top_k::kept(all[0]))) {
                    want[i] = v[i];
                    v[i] = 0;
                    if (masking) { u[i] = 0; }
                }
                REQUIRE(same_bits(sent, want));
                REQUIRE(same_bits(values(f.residual()), v));
                REQUIRE(same_bits(values(f.in()), u));
            }
        }
    }
}

TEST_CASE_TEMPLATE("momentum stops where an element was sent, and nowhere else", X, top_k, threshold, random_k) {
    constexpr std::size_t n = 1000;
    feedback f(q, n, {});
    const auto all = laid_out({{600, 500}, {400, 10000}});
    const auto sent = send(X{}, f, all, gradient<float>("gaussian", n), {1, 1, 0});
    std::size_t stopped = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const bool masked = i < 600 && sent[i] != 0;
        CHECK((values(f.in())[i] == 0) == masked);
        CHECK((values(f.residual())[i] == 0) == (sent[i] != 0));
        stopped += masked ? 1u : 0u;
    }
    CHECK(stopped >= 30);
    CHECK(stopped <= 39);
}

TEST_CASE_TEMPLATE("gradients of 16 bits, and double", T, bfloat16, float16, double) {
    feedback f(q, 3, {.momentum = 0.5f});
    const std::vector<T> g{T(1.0f), T(-2.0f), T(0.25f)};
    f.add(q, view<const T>(g));
    f.add(q, view<const T>(g));
    CHECK(values(f.in()) == std::vector<float>{1.5f, -3, 0.375f});
}

// github.com/PaddlePaddle/models/issues/3145: NaN at epoch 38, for good.
TEST_CASE_TEMPLATE("a gradient that is not finite is sent once, and gone", X, top_k, threshold, random_k) {
    for (const bool nesterov : {false, true}) {
        for (const bool masking : {false, true}) {
            for (const int level : {100, 10000}) {
                constexpr std::size_t n = 1000;
                feedback f(q, n, {.momentum = 0.9f, .nesterov = nesterov, .masking = masking});
                const auto all = laid_out({{n, level}});
                auto g = gradient<float>("gaussian", n);
                for (std::size_t i = 5; i < 900; i += 20) { g[i] = std::numeric_limits<float>::quiet_NaN(); }
                g[7] = std::numeric_limits<float>::infinity();
                const auto finite = [](const std::vector<float>& v) {
                    return std::all_of(v.begin(), v.end(), [](float x) { return std::isfinite(x); });
                };
                CHECK_FALSE(finite(send(X{}, f, all, g, {1, 0, 0})));
                for (std::uint32_t t = 1; t < 4; ++t) {
                    CHECK(finite(values(f.in())));
                    CHECK(finite(values(f.residual())));
                    CHECK(finite(send(X{}, f, all, gradient<float>("gaussian", n, t), {1, t, 0})));
                }
            }
        }
    }
}

// Two elements of 100 a step, and four whose gradients are large and alternate. Without feedback nothing else is ever
// sent; with it the alternating ones cancel, and all others get their turn.
TEST_CASE("a quadratic is minimized although 2 % of a gradient are sent") {
    constexpr std::size_t n = 100;
    const auto all = laid_out({{n, 200}});
    const auto minimized = [&](bool with_feedback) {
        feedback f(q, n, {.momentum = 0.5f});
        std::vector<float> x(n, 1), none;
        for (std::uint32_t t = 0; t < 20000; ++t) {
            std::vector<float> g = x;
            for (std::size_t i = 0; i < 4; ++i) { g[i] += t % 2 == 0 ? 50.0f : -50.0f; }
            const auto sent = with_feedback ? send(top_k{}, f, all, g, {})
                                            : decoded<float>(top_k{}, all, encoded(top_k{}, all, g, none), n);
            for (std::size_t i = 0; i < n; ++i) { x[i] -= 0.001f * sent[i]; }
        }
        return x;
    };
    const auto with = minimized(true), without = minimized(false);
    for (std::size_t i = 4; i < n; ++i) {
        CHECK(std::fabs(with[i]) < 0.1f);
        CHECK(without[i] == 1);
    }
}

TEST_CASE("a resume continues with the same bits") {
    constexpr std::size_t n = 500;
    const auto all = laid_out({{n, 300}});
    feedback whole(q, n, {}), first(q, n, {}), second(q, n, {});
    for (std::uint32_t t = 0; t < 5; ++t) {
        static_cast<void>(send(top_k{}, whole, all, gradient<float>("laplace", n, t), {}));
        static_cast<void>(send(top_k{}, first, all, gradient<float>("laplace", n, t), {}));
    }
    const auto from = first.entries(), to = second.entries();
    REQUIRE(from.size() == 2);
    CHECK(from[0].name == "momentum");
    CHECK(from[1].name == "residual");
    for (std::size_t e = 0; e < 2; ++e) {
        CHECK(from[e].type == dtype::float32);
        CHECK(from[e].shape == std::vector<std::size_t>{n});
        std::memcpy(to[e].data.data(), from[e].data.data(), from[e].data.size());
    }
    for (std::uint32_t t = 5; t < 10; ++t) {
        const auto g = gradient<float>("laplace", n, t);
        REQUIRE(same_bits(send(top_k{}, whole, all, g, {}), send(top_k{}, second, all, g, {})));
    }
}

TEST_CASE("warm-up: the density falls by one factor") {
    const std::vector<int> want{2512, 631, 158, 40, 10, 10};
    for (std::size_t p = 0; p < want.size(); ++p) { CHECK(warm_up_level(10, p, 4) == want[p]); }
    CHECK(warm_up_level(100, 0, 0) == 100);
    CHECK(warm_up_level(100, 0, 1) == 1000);
    CHECK(warm_up_level(10000, 0, 5) == 10000);
    CHECK(warm_up_level(1, 0, 1000000) == 10000);
    for (std::size_t p = 1; p < 50; ++p) { CHECK(warm_up_level(3, p, 50) <= warm_up_level(3, p - 1, 50)); }
    CHECK_THROWS_WITH_AS(static_cast<void>(warm_up_level(0, 0, 4)),
                         "warm_up_level: level 0: kept elements in 10,000 are 1 to 10000", usage_error);
}

TEST_CASE("bad options and sizes are refused") {
    CHECK_THROWS_WITH_AS(feedback(q, 3, {.momentum = 1}),
                         "momentum_feedback: momentum is 1, expected a value in [0, 1)", usage_error);
    CHECK_THROWS_AS(feedback(q, 3, {.momentum = std::numeric_limits<float>::quiet_NaN()}), usage_error);
    feedback f(q, 3, {});
    const std::vector<float> g(4);
    CHECK_THROWS_WITH_AS(f.add(q, view<const float>(g)), "momentum_feedback: the gradient has 4 elements instead of 3",
                         usage_error);
    CHECK_THROWS_WITH_AS(f.sent(q, laid_out({{4, 100}})), "momentum_feedback: tensor 0 is at elements 0 to 4 of 3",
                         usage_error);
}

TEST_CASE("a virtual queue is charged; neighbors that are treated alike are one operation") {
    virtual_queue v(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    momentum_feedback<virtual_queue> f(v, 1000, {.nesterov = true});
    const auto all = laid_out({{300, 100}, {300, 50}, {400, 10000}});
    f.add(v, view<const bfloat16, phantom_memory>(nullptr, 1000));
    f.sent(v, all);
    const auto& steps = v.recording().streams[0];
    REQUIRE(steps.size() == 5);  // two fills
    CHECK(steps[2].seconds == 18000);
    CHECK(steps[3].seconds == 12 * 600);
    CHECK(steps[4].seconds == 12 * 400);
    CHECK(v.account().live() == 8000);
}
