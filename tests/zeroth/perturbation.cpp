// Directions, perturbed copies and updates: by position, whatever the slices; against the double formula; replayed in
// pieces; restored or not; what is refused.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // reverse
#include <array>      // flags
#include <bit>        // bit_cast
#include <cmath>      // fabs, nextafter
#include <limits>     // nan
#include <vector>     // elements

#include <support/build.hpp>              // full_speed
#include <support/oracle.hpp>             // random_element, same_bytes
#include <tutti/core/virtual_queue.hpp>   // costs
#include <tutti/zeroth/perturbation.hpp>  // under test

using namespace tutti;
using zeroth::direction;
using zeroth::distribution;
using zeroth::pending_update;
using zeroth::tensor_slice;
using zeroth::update_then_perturb;
using test::same_bytes;

namespace {

const host_queue q;

template <class T> std::vector<T> weights(std::size_t n, std::uint64_t seed = 7) {
    std::vector<T> w(n);
    for (std::size_t i = 0; i < n; ++i) { w[i] = static_cast<T>(0.02f * test::random_element<float>(seed, i)); }
    return w;
}

// Four tensors one behind the other, of odd sizes.
std::vector<tensor_slice> model() {
    return {{.tensor = 0, .offset = 0, .count = 301},
            {.tensor = 1, .offset = 301, .count = 7, .decayed = false},
            {.tensor = 5, .offset = 308, .count = 1},
            {.tensor = 6, .offset = 309, .count = 194}};
}
constexpr std::size_t model_size = 503;

// The same elements in random pieces, in reverse order.
std::vector<tensor_slice> cut(const std::vector<tensor_slice>& whole, std::uint64_t seed) {
    std::vector<tensor_slice> pieces;
    const random_stream draws{seed, 1, 1};
    std::uint64_t k = 0;
    for (const tensor_slice& s : whole) {
        for (std::size_t done = 0; done < s.count;) {
            tensor_slice p = s;
            p.count = std::min<std::size_t>(s.count - done, draws.below(k++, 23));
            p.first = s.first + done;
            p.offset = s.offset + done;
            done += p.count;
            pieces.push_back(p);
        }
    }
    std::reverse(pieces.begin(), pieces.end());
    return pieces;
}

std::vector<pending_update> three_steps(distribution kind) {
    return {{{.seed = 3, .step = 10, .kind = kind}, 0.7, 1e-2, 0.1},
            {{.seed = 3, .step = 11, .kind = kind}, -1.3, 5e-3, 0.1},
            {{.seed = 3, .step = 11, .index = 1, .kind = kind}, 0.4, 5e-3, 0},
            {{.seed = 3, .step = 12, .kind = kind}, 0, 2e-2, 0.1}};
}

}  // namespace

TEST_CASE(
    "a direction's elements depend on seed, step, index and tensor, and with index 0 are those of a plain stream") {
    const direction z{.seed = 0x123456789abcdef0, .step = 9};
    for (std::uint64_t e = 0; e < 9; ++e) { CHECK(element_of(z, 4, e) == random_stream{z.seed, 4, 9}.normal(e)); }
    // Correlations of pairs that a mistake in the address would make equal.
    const auto draw = [](const direction& d, std::uint32_t tensor) {
        constexpr std::size_t n = 1 << 14;
        std::vector<double> out(n);
        for (std::size_t e = 0; e < n; ++e) { out[e] = static_cast<double>(element_of(d, tensor, e)); }
        return out;
    };
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        CAPTURE(zeroth::name_of(kind));
        const direction base{.seed = 5, .step = 1, .kind = kind};
        direction seed = base, step = base, high = base, index = base, crossed = base;
        seed.seed ^= 1;
        step.step += 1;
        high.step += std::uint64_t{1} << 32;
        index.index = 1;
        crossed.seed ^= 1;
        crossed.index = 1;
        const std::vector<std::vector<double>> all = {draw(base, 3), draw(base, 4),  draw(seed, 3),   draw(step, 3),
                                                      draw(high, 3), draw(index, 3), draw(crossed, 3)};
        const auto n = static_cast<double>(all[0].size());
        for (std::size_t a = 0; a < all.size(); ++a) {
            double mean = 0;
            for (const double v : all[a]) { mean += v / n; }
            CHECK(std::fabs(mean) <= 4 / std::sqrt(n));
            for (std::size_t b = 0; b <= a; ++b) {
                double product = 0;
                for (std::size_t i = 0; i < all[a].size(); ++i) { product += all[a][i] * all[b][i] / n; }
                CAPTURE(a);
                CAPTURE(b);
                CHECK(std::fabs(product - (a == b ? 1 : 0)) <= 4 * std::sqrt(a == b ? 2 / n : 1 / n));
            }
        }
    }
}

TEST_CASE("signs are the 128 bits of a block of the generator") {
    const direction z{.seed = 8, .step = 2, .kind = distribution::rademacher};
    const random_stream s = z.stream(3);
    for (std::uint64_t e = 0; e < 300; ++e) {
        const std::uint32_t bit = (s.block(e / 128)[e / 32 % 4] >> (e % 32)) & 1u;
        CHECK(element_of(z, 3, e) == (bit != 0 ? -1.0f : 1.0f));
    }
}

TEST_CASE_TEMPLATE("slices, their order and their place do not matter", T, float, bfloat16) {
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        const auto updates = three_steps(kind);
        const direction z{.seed = 3, .step = 13, .kind = kind};
        const std::vector<T> start = weights<T>(model_size);
        std::vector<T> w = start, out(model_size), sums(model_size);
        update_then_perturb(q, view<T>(w), view<T>(out), model(), updates, z, 1e-3);
        sum_directions(q, view<T>(sums), model(), updates);
        CHECK(!same_bytes(w, start));
        CHECK(!same_bytes(w, out));
        for (std::uint64_t seed = 0; seed < 5; ++seed) {
            std::vector<T> w2 = start, out2(model_size), sums2(model_size);
            const auto pieces = cut(model(), seed);
            update_then_perturb(q, view<T>(w2), view<T>(out2), pieces, updates, z, 1e-3);
            sum_directions(q, view<T>(sums2), pieces, updates);
            CHECK(same_bytes(w2, w));
            CHECK(same_bytes(out2, out));
            CHECK(same_bytes(sums2, sums));
        }
        // One tensor alone, at another place; others frozen.
        std::vector<T> alone(start.begin() + 309, start.end());
        alone.insert(alone.begin(), T(1.0f));
        const tensor_slice moved{.tensor = 6, .offset = 1, .count = 194};
        apply_updates(q, view<T>(alone), {&moved, 1}, updates);
        CHECK(same_bytes(std::vector<T>(alone.begin() + 1, alone.end()), std::vector<T>(w.begin() + 309, w.end())));
        CHECK(static_cast<float>(alone[0]) == 1.0f);
        auto frozen = model();
        for (std::size_t k = 0; k < 3; ++k) { frozen[k].frozen = true; }
        std::vector<T> w3 = start, out3(model_size);
        update_then_perturb(q, view<T>(w3), view<T>(out3), frozen, updates, z, 1e-3);
        for (std::size_t i = 0; i < model_size; ++i) {
            CHECK(same_bytes(std::vector<T>{w3[i], out3[i]},
                             i < 309 ? std::vector<T>{start[i], start[i]} : std::vector<T>{w[i], out[i]}));
        }
    }
}

TEST_CASE_TEMPLATE("lists of updates give the same bits at once, step by step, and fused", T, float, double, float16,
                   bfloat16) {
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        const auto updates = three_steps(kind);
        const std::span<const pending_update> all(updates);
        const direction z{.seed = 3, .step = 13, .kind = kind};
        const std::vector<T> start = weights<T>(model_size);
        std::vector<T> once = start, single = start, fused = start, copy(model_size), copy2(model_size);
        apply_updates(q, view<T>(once), model(), all);
        for (const std::size_t first : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
            apply_updates(q, view<T>(single), model(), all.subspan(first, first == 1 ? 2 : 1));
        }
        CHECK(same_bytes(once, single));
        update_then_perturb(q, view<T>(fused), view<T>(copy), model(), all, z, -1e-3);
        perturb(q, view<T>(once), view<T>(copy2), model(), z, -1e-3);
        CHECK(same_bytes(fused, once));
        CHECK(same_bytes(copy, copy2));
        // Without updates only the copy is written.
        update_then_perturb(q, view<T>(fused), view<T>(copy), model(), {}, z, -1e-3);
        CHECK(same_bytes(fused, once));
        CHECK(same_bytes(copy, copy2));
    }
}

TEST_CASE("updates and perturbed copies are those of the double formula") {
    for (const distribution kind : {distribution::normal, distribution::rademacher}) {
        const auto updates = three_steps(kind);
        const direction z{.seed = 4, .step = 1, .kind = kind};
        std::vector<double> w = weights<double>(model_size), out(model_size), sums(model_size), expected = w;
        std::vector<float> narrow(w.begin(), w.end());
        update_then_perturb(q, view<double>(w), view<double>(out), model(), updates, z, 1e-3);
        sum_directions(q, view<double>(sums), model(), updates);
        apply_updates(q, view<float>(narrow), model(), updates);
        for (const tensor_slice& s : model()) {
            for (std::size_t i = 0; i < s.count; ++i) {
                double& x = expected[s.offset + i];
                const auto at = [&](std::size_t u) {
                    return static_cast<double>(element_of(updates[u].z, s.tensor, s.first + i));
                };
                const double decay = s.decayed ? 0.1 : 0;
                x -= 1e-2 * (0.7 * at(0) + decay * x);
                x -= 5e-3 * (-1.3 * at(1) + 0.4 * at(2) + decay * x);
                x -= 2e-2 * (decay * x);
                CHECK(std::fabs(w[s.offset + i] - x) <= 1e-12);
                CHECK(std::fabs(static_cast<double>(narrow[s.offset + i]) - x) <= 2e-8);
                const double copy = x + 1e-3 * static_cast<double>(element_of(z, s.tensor, s.first + i));
                CHECK(std::fabs(out[s.offset + i] - copy) <= 1e-12);
                CHECK(std::fabs(sums[s.offset + i] - (0.7 * at(0) - 1.3 * at(1) + 0.4 * at(2))) <= 1e-12);
            }
        }
    }
}

TEST_CASE("a direction twice with half the gradient is that direction once, bit for bit") {
    std::vector<float> once = weights<float>(model_size), twice = once;
    const direction z{.seed = 1, .step = 1};
    apply_updates(q, view<float>(once), model(), std::vector<pending_update>{{z, 0.9, 1e-2, 0}});
    apply_updates(q, view<float>(twice), model(), std::vector<pending_update>{{z, 0.45, 1e-2, 0}, {z, 0.45, 1e-2, 0}});
    CHECK(same_bytes(once, twice));
}

TEST_CASE("perturbed in place and back, weights move; with a copy they never do") {
    constexpr float epsilon = 1e-3f;
    const std::vector<float> start = weights<float>(model_size);
    std::vector<float> w = start;
    const direction z{.seed = 6, .step = 0};
    perturb(q, view<float>(w), view<float>(w), model(), z, static_cast<double>(epsilon));
    perturb(q, view<float>(w), view<float>(w), model(), z, -2 * static_cast<double>(epsilon));
    perturb(q, view<float>(w), view<float>(w), model(), z, static_cast<double>(epsilon));
    std::size_t moved = 0;
    for (const tensor_slice& s : model()) {
        for (std::size_t i = 0; i < s.count; ++i) {
            const float before = start[s.offset + i];
            const float reach = std::fabs(before) + epsilon * std::fabs(element_of(z, s.tensor, i));
            const float ulp = std::nextafter(reach, 1.0f) - reach;
            CHECK(std::fabs(w[s.offset + i] - before) <= 1.5f * ulp);
            moved += w[s.offset + i] != before;
        }
    }
    // Two replicas that perturb to different sides and restore are no longer equal: why weights are not perturbed in place.
    std::vector<float> up = start, down = start;
    for (const double side : {1.0, -1.0}) {
        perturb(q, view<float>(up), view<float>(up), model(), z, side * static_cast<double>(epsilon));
        perturb(q, view<float>(down), view<float>(down), model(), z, -side * static_cast<double>(epsilon));
    }
    std::size_t apart = 0;
    for (std::size_t i = 0; i < model_size; ++i) { apart += up[i] != down[i]; }
    CHECK(apart > model_size / 20);
    CHECK(moved > model_size / 4);  // about 45 of 100 do
    // A learning rate of 0, with gradients: 20,000 steps of a small tensor.
    const tensor_slice small{.tensor = 1, .count = 16};
    std::vector<bfloat16> kept = weights<bfloat16>(16), copy(16);
    const auto before = kept;
    const std::uint64_t steps = test::full_speed ? 20000 : 2000;
    for (std::uint64_t t = 1; t <= steps; ++t) {
        const pending_update last{{.seed = 6, .step = t - 1}, 3.5, 0, 0.1};
        update_then_perturb(q, view<bfloat16>(kept), view<bfloat16>(copy), {&small, 1}, {&last, 1},
                            {.seed = 6, .step = t}, 1e-3);
    }
    CHECK(same_bytes(kept, before));
}

TEST_CASE("what is not finite, not inside, or twice is refused before anything moves") {
    std::vector<float> w = weights<float>(model_size), out(model_size);
    const auto start = w;
    const direction z{};
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const view<float> all(w);
    const auto apply = [&](pending_update u) { apply_updates(q, all, model(), {&u, 1}); };
    CHECK_THROWS_WITH_AS(apply({z, nan, 1, 0}), "apply_updates: the gradient is nan", usage_error);
    CHECK_THROWS_WITH_AS(apply({z, 1, nan, 0}), "apply_updates: the learning rate is nan", usage_error);
    CHECK_THROWS_WITH_AS(apply({z, 1, 1, nan}), "apply_updates: the weight decay is nan", usage_error);
    CHECK_THROWS_WITH_AS(perturb(q, all, view<float>(out), model(), z, nan), "perturb: the scale is nan", usage_error);
    CHECK_THROWS_AS(perturb(q, all, view<float>(out).sub(0, 9), model(), z, 1), usage_error);
    CHECK_THROWS_AS(perturb(q, all.sub(0, 400), view<float>(w).sub(1, 400), model(), z, 1), usage_error);
    CHECK_THROWS_WITH_AS(perturb(q, all.sub(0, 502), view<float>(out).sub(0, 502), model(), z, 1),
                         "perturb: a slice of tensor 6 ends at 503 of a view of 502 elements", usage_error);
    const std::vector<pending_update> mixed{{z, 1, 1, 0}, {{.kind = distribution::rademacher}, 1, 1, 0}};
    CHECK_THROWS_WITH_AS(apply_updates(q, all, model(), mixed),
                         "apply_updates: directions of two distributions in one list", usage_error);
    const std::vector<pending_update> many(65, {{.step = 4}, 1, 1, 0});
    CHECK_THROWS_WITH_AS(apply_updates(q, all, model(), many), "apply_updates: more than 64 directions in step 4",
                         usage_error);
    CHECK_THROWS_WITH_AS(update_then_perturb(q, all, all, model(), std::span(mixed).first(1), z, 1),
                         "update_then_perturb: the perturbed copy may not be the weights", usage_error);
    CHECK(same_bytes(w, start));

    // Tied weights: listed twice under two numbers, or twice under one.
    CHECK_NOTHROW(zeroth::expect_each_once(cut(model(), 3), model_size));
    auto tied = model();
    tied.push_back({.tensor = 9, .offset = 300, .count = 5});
    CHECK_THROWS_WITH_AS(zeroth::expect_each_once(tied, model_size),
                         "zeroth: tensors 0 and 9 share element 300 of the weights; tied weights are listed once",
                         usage_error);
    tied.back() = {.tensor = 0, .first = 300, .offset = 503, .count = 5};
    CHECK_THROWS_WITH_AS(zeroth::expect_each_once(tied, 600),
                         "zeroth: element 300 of tensor 0 is in two slices; tied weights are listed once", usage_error);
    CHECK_THROWS_AS(zeroth::expect_each_once(tied, model_size), usage_error);
}

TEST_CASE("costs: bytes of all views, draws of all directions") {
    virtual_queue clock({1e9, 1e18});
    const auto updates = three_steps(distribution::normal);
    const view<float, phantom_memory> w(nullptr, model_size);
    perturb(clock, w, w, model(), {}, 1);
    apply_updates(clock, w, model(), updates);
    update_then_perturb(clock, w, w, model(), updates, {}, 1);
    sum_directions(clock, w, model(), updates);
    CHECK(resolve(clock.recording())[0] == doctest::Approx((2 + 2 + 3 + 1) * 4.0 * model_size * 1e-9));
}
