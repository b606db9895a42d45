// The compressed collectives with the compressors that the library brings: equal bits, nothing lost, plain and
// hierarchical.
#include <doctest/doctest.h>  // checks

#include <cmath>   // fabs
#include <vector>  // data

#include "ranks.hpp"                          // places, data
#include <tutti/compress/error_feedback.hpp>  // residuals
#include <tutti/compress/hierarchical.hpp>    // tested
#include <tutti/compress/power_sgd.hpp>       // low rank
#include <tutti/compress/quantize.hpp>        // bits
#include <tutti/compress/random_k.hpp>        // linear, one round
#include <tutti/compress/sign.hpp>            // a bit
#include <tutti/compress/top_k.hpp>           // sparse

using namespace tutti;
using namespace tutti::test;
using compress::dense_level;
using compress::segment;

namespace {

/// Matrices and vectors; the vectors go dense.
std::vector<segment> model(int level) {
    return {{0, level, 0, 0, 48, 40},        {1, dense_level, 1920, 0, 48, 1}, {2, level, 1968, 0, 16, 64},
            {3, dense_level, 2992, 0, 3, 1}, {4, dense_level, 2995, 0, 5, 1},  {5, level, 3000, 0, 600, 2}};
}
constexpr std::size_t size = 4200;

/// Steps of f(step, gradient in place): ranks stay equal, and what arrived and is left is what was given.
template <class F> void check(comm::threads& world, double owners, view<const float> residual, F f) {
    std::vector<double> arrived(size);
    std::vector<double> owed(size);
    for (std::uint32_t step = 0; step < 30; ++step) {
        std::vector<float> g = gradient(size, at(world.rank()), step);
        for (std::size_t i = 0; i < size; ++i) { owed[i] += static_cast<double>(g[i]); }
        f(step, view<float>(g));
        expect_equal_on_all(world, g);
        for (std::size_t i = 0; i < size; ++i) { arrived[i] += static_cast<double>(g[i]); }
    }
    std::vector<double> left(size);
    for (std::size_t i = 0; i < size; ++i) { left[i] = static_cast<double>(residual[i]) / owners; }
    world.all_reduce(view<const double>(left), view<double>(left), sum{});
    world.all_reduce(view<const double>(owed), view<double>(owed), mean{});
    for (std::size_t i = 0; i < size; ++i) {
        expect(std::fabs(arrived[i] + left[i] - owed[i]) < 1e-3, "element {}: {} + {} of {}", i, arrived[i], left[i],
               owed[i]);
    }
}

template <class X> void check_scheme(const X& x, int level) {
    const auto all = model(level);
    std::vector<segment> compressed;
    for (const segment& s : all) {
        if (s.level != dense_level) { compressed.push_back(s); }
    }
    for_ranks<on_threads>([&](comm::threads& world) {
        auto state = compress::make_state(x, world.queue(), compressed);
        compress::residuals<> left(world.queue(), size);
        check(world, world.size(), left.view(), [&](std::uint32_t step, view<float> g) {
            compress::all_reduce(world, x, state, all, view<const float>(g), g, left.view(),
                                 {1, step, static_cast<std::uint32_t>(world.rank())});
        });
    });
    comm::threads::launch(4, [&](comm::threads& world) {
        auto inside = *world.split(std::vector<int>{0, 0, 1, 1}, "inside");
        auto across = *world.split(std::vector<int>{0, 1, 0, 1}, "across");
        auto state = compress::make_state(x, world.queue(), compressed);
        compress::residuals<> left(world.queue(), size);
        check(world, across.size(), left.view(), [&](std::uint32_t step, view<float> g) {
            compress::all_reduce(inside, across, x, state, all, view<const float>(g), g, left.view(),
                                 {1, step, static_cast<std::uint32_t>(across.rank())});
        });
    });
}

}  // namespace

TEST_CASE("quantize, 4 bits and 1 bit") {
    check_scheme(compress::quantize(), 4);
    check_scheme(compress::quantize(64, compress::rounding::nearest), 1);
}
TEST_CASE("top_k") { check_scheme(compress::top_k(), 500); }
TEST_CASE("random_k") { check_scheme(compress::random_k(), 1000); }
TEST_CASE("power_sgd") { check_scheme(compress::power_sgd(), 2); }
