// The global norm: right, in one order, whatever the shards; and the factor that clips.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // min
#include <cmath>      // sqrt
#include <limits>     // infinity
#include <vector>     // elements

#include "support/oracle.hpp"            // random elements
#include <tutti/core/virtual_queue.hpp>  // costs
#include <tutti/optimize/clip.hpp>       // global_norm

using namespace tutti;
using optimize::global_norm;
using optimize::norm_block;
using optimize::norm_blocks;

namespace {
constexpr auto alone = [](view<double>) {};

template <class T> double norm_of(const std::vector<T>& g) {
    std::vector<double> scratch(norm_blocks(g.size()) + 1);
    return global_norm(host_queue{}, view<const T>(g), 0, g.size(), scratch, alone);
}
}  // namespace

TEST_CASE("the norm by hand") {
    CHECK(norm_of<float>({3, -4}) == 5);
    CHECK(norm_of<double>({2, 3, 6}) == 7);
    CHECK(norm_of<float>({}) == 0);
    CHECK(norm_of(std::vector<float>(3 * norm_block + 1, 2.0f)) == std::sqrt(4.0 * (3 * norm_block + 1)));
}

TEST_CASE_TEMPLATE("the norm against long double, all sizes", T, float, double, bfloat16, float16) {
    for (const std::size_t n : {1ul, 7ul, 8ul, 9ul, 4095ul, 4096ul, 4097ul, 50000ul}) {
        std::vector<T> g(n);
        long double squares = 0;
        for (std::size_t i = 0; i < n; ++i) {
            g[i] = test::random_element<T>(9, i);
            const auto x = static_cast<long double>(static_cast<master_t<T>>(g[i]));
            squares += x * x;
        }
        CHECK(norm_of(g) == doctest::Approx(static_cast<double>(std::sqrt(squares))).epsilon(1e-14));
    }
}

TEST_CASE("squares that overflow float do not overflow") {
    CHECK(norm_of<float>({3e30f, 4e30f}) == doctest::Approx(5e30));
}

TEST_CASE("what is not finite shows") {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        for (const std::size_t at : {0ul, 5000ul, 9999ul}) {
            std::vector<float> g(10000, 1.0f);
            g[at] = bad;
            CHECK_FALSE(std::isfinite(norm_of(g)));
        }
    }
}

TEST_CASE("bits do not depend on the sharding") {
    constexpr std::size_t n = 9 * norm_block + 123;
    std::vector<float> g(n);
    for (std::size_t i = 0; i < n; ++i) { g[i] = test::random_element<float>(5, i) * static_cast<float>(i % 97); }
    const double whole = norm_of(g);
    for (const std::size_t shards : {2ul, 3ul, 10ul}) {
        // The other shards' sums arrive through sum_over_shards, as an all_reduce would bring them.
        const std::size_t per = (norm_blocks(n) + shards - 1) / shards * norm_block;
        std::vector<double> added(norm_blocks(n));
        for (int pass = 0; pass < 2; ++pass) {
            std::vector<double> total(norm_blocks(n));
            for (std::size_t r = 0; r <= shards; ++r) {  // the last one has nothing
                const std::size_t first = std::min(r * per, n);
                std::vector<double> scratch(norm_blocks(n) + 1, 77.0);
                const auto part = view<const float>(g).sub(first, std::min(per, n - first));
                const double norm = global_norm(host_queue{}, part, first, n, scratch, [&](view<double> x) {
                    for (std::size_t b = 0; b < x.size(); ++b) {
                        total[b] += x[b];
                        if (pass == 1) { x[b] = added[b]; }
                    }
                });
                if (pass == 1) { CHECK(norm == whole); }
            }
            added = total;
        }
    }
}

TEST_CASE("ranges and scratch that do not fit are refused") {
    std::vector<float> g(norm_block * 2);
    std::vector<double> scratch(3);
    const view<const float> v(g);
    CHECK_NOTHROW(static_cast<void>(global_norm(host_queue{}, v, 0, g.size(), scratch, alone)));
    CHECK_THROWS_AS(static_cast<void>(global_norm(host_queue{}, v.sub(0, 5), 1, g.size(), scratch, alone)),
                    usage_error);
    CHECK_THROWS_AS(static_cast<void>(global_norm(host_queue{}, v, norm_block, g.size(), scratch, alone)), usage_error);
    CHECK_THROWS_AS(
        static_cast<void>(global_norm(host_queue{}, v, 0, g.size(), view<double>(scratch).sub(0, 2), alone)),
        usage_error);
}

TEST_CASE("the factor is PyTorch's") {
    CHECK(optimize::clip_factor(10, 0) == 1);  // off
    CHECK(optimize::clip_factor(0.5, 1) == 1);
    CHECK(optimize::clip_factor(0, 1) == 1);
    CHECK(optimize::clip_factor(4, 1) == 1 / (4 + 1e-6));
    CHECK(optimize::clip_factor(1, 1) == 1 / (1 + 1e-6));
}

TEST_CASE("a virtual norm costs one read") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    const view<const float, phantom_memory> g(nullptr, 2 * norm_block);
    CHECK(global_norm(q, g, 0, g.size(), view<double, phantom_memory>(nullptr, 3),
                      [](view<double, phantom_memory>) {}) == 0);
    CHECK(resolve(q.recording())[0] == 8 * norm_block + 16 + 16 + 8);
}
