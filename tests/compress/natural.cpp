// Natural compression: powers of two around the element, with the right probabilities, over the whole range.
#include <tutti/compress/natural.hpp>  // under test

#include <cmath>   // frexp
#include <vector>  // arrays

#include <doctest/doctest.h>  // checks

#include "bucketed.hpp"       // calls
#include "support/build.hpp"  // full_speed

using namespace tutti;
using namespace tutti::compress;
using test::normals;
using test::whole;

TEST_CASE("an element becomes one of the powers around it, unbiased, with a variance of at most an eighth") {
    constexpr std::size_t n = 512;
    const int draws = test::full_speed ? 20000 : 2000;
    const auto in = normals<float>(n, 1);
    std::vector<double> sum(n), squares(n);
    std::size_t wrong = 0;
    for (int t = 0; t < draws; ++t) {
        const auto out = test::round_trip(natural(), 8, in, {1, static_cast<std::uint32_t>(t), 0});
        for (std::size_t i = 0; i < n; ++i) {
            const float below = std::exp2(std::floor(std::log2(std::fabs(in[i]))));
            wrong += std::fabs(out[i]) != below && std::fabs(out[i]) != 2 * below;
            wrong += std::signbit(out[i]) != std::signbit(in[i]);
            const double e = static_cast<double>(out[i]) - static_cast<double>(in[i]);
            sum[i] += e;
            squares[i] += e * e;
        }
    }
    CHECK(wrong == 0);
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const double x = std::fabs(static_cast<double>(in[i])), below = std::exp2(std::floor(std::log2(x)));
        const double variance = (x - below) * (2 * below - x);
        if (variance < 1e-4 * below * below) { continue; }
        worst = std::max(worst, std::fabs(sum[i] / draws) / std::sqrt(variance / draws));
        largest = std::max(largest, squares[i] / draws / (x * x));
    }
    CHECK(worst < 5);
    CHECK(worst > 1);
    CHECK(largest < 0.125 * (test::full_speed ? 1.03 : 1.1));
    CHECK(largest > 0.12);
}

TEST_CASE("powers of two stay, 126 of them below the largest") {
    for (const float top : {1.0f, 0x1p40f, 0x1p125f}) {
        std::vector<float> in(254);
        for (int k = 0; k < 127; ++k) {
            in[static_cast<std::size_t>(2 * k)] = std::ldexp(top, -k);
            in[static_cast<std::size_t>(2 * k + 1)] = -std::ldexp(top, -k);
        }
        CHECK(test::round_trip(natural(), 8, in) == in);
        CHECK(test::round_trip(natural(512, rounding::nearest), 8, in) == in);
    }
}

// sands-lab/grace's natural compression cuts exponents off below 2^-109 and above 2^18.
TEST_CASE("the range follows the bucket") {
    for (const float size : {1e-37f, 1e-33f, 1e6f, 1e37f}) {
        const std::vector<float> in{size, -3 * size, 2 * size};
        const auto out = test::round_trip(natural(512, rounding::nearest), 8, in);
        for (std::size_t i = 0; i < in.size(); ++i) { CHECK(out[i] == doctest::Approx(in[i]).epsilon(0.34)); }
    }
}

TEST_CASE("elements below the smallest power become it or zero, unbiased") {
    std::vector<float> in(512, 0.3f * 0x1p-66f);
    in[0] = 0x1p60f;
    double sum = 0;
    constexpr int draws = 200;
    for (std::uint32_t t = 0; t < draws; ++t) {
        const auto out = test::round_trip(natural(), 8, in, {1, t, 0});
        for (std::size_t i = 1; i < in.size(); ++i) {
            REQUIRE((out[i] == 0 || out[i] == 0x1p-66f));
            sum += static_cast<double>(out[i]) / 0x1p-66;
        }
    }
    const double count = 511.0 * draws;
    CHECK(std::fabs(sum / count - 0.3) < 5 * std::sqrt(0.3 * 0.7 / count));
}

TEST_CASE("to the nearest: beyond the middle goes up") {
    const std::vector<float> in{4.0f, 1.0f, 1.25f, 1.49f, 1.5f, 1.75f, 2.9f, 3.1f};
    CHECK(test::round_trip(natural(512, rounding::nearest), 8, in) ==
          std::vector<float>{4.0f, 1.0f, 1.0f, 1.0f, 2.0f, 2.0f, 2.0f, 4.0f});
}
