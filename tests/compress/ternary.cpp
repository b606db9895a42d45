// Ternary: three values, unbiased inside of the clip, which is 2.5 root mean squares.
#include <tutti/compress/ternary.hpp>  // under test

#include <cmath>   // sqrt
#include <vector>  // arrays

#include <doctest/doctest.h>  // checks

#include "bucketed.hpp"       // calls
#include "support/build.hpp"  // full_speed

using namespace tutti;
using namespace tutti::compress;
using test::encode;
using test::normals;
using test::whole;

namespace {
float scale_of(const std::vector<float>& in) {
    const segment s = whole(in.size(), 2);
    const auto e = encode(ternary(), layout(&s, 1), in);
    float scale = 0;
    std::memcpy(&scale, e.wire.data(), sizeof scale);
    return scale;
}
}  // namespace

TEST_CASE("the scale is the largest magnitude, or the clip") {
    CHECK(scale_of({1, -2, 0, 1}) == 2);
    std::vector<float> in(100, 1.0f);
    in[7] = -50.0f;  // mean square (99 + 2500) / 100
    CHECK(scale_of(in) == doctest::Approx(2.5 * std::sqrt(25.99)).epsilon(1e-6));
    CHECK(scale_of(std::vector<float>(100, -3.0f)) == 3);  // a constant is not clipped to nothing
    const auto out = test::round_trip(ternary(), 2, in);
    CHECK(out[7] == -scale_of(in));
}

TEST_CASE("values are minus scale, zero, plus scale, with the right means") {
    constexpr std::size_t n = 512;
    const int draws = test::full_speed ? 20000 : 2000;
    const auto in = normals<float>(n, 1);
    const float scale = scale_of(in);
    std::vector<double> sum(n);
    std::size_t other = 0;
    for (int t = 0; t < draws; ++t) {
        const auto out = test::round_trip(ternary(), 2, in, {1, static_cast<std::uint32_t>(t), 0});
        for (std::size_t i = 0; i < n; ++i) {
            sum[i] += static_cast<double>(out[i]);
            other += out[i] != 0 && out[i] != scale && out[i] != -scale;
            other += out[i] * in[i] < 0;
        }
    }
    CHECK(other == 0);
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const auto s = static_cast<double>(scale);
        const double x = std::min(std::max(static_cast<double>(in[i]), -s), s);
        const double share = std::fabs(x) / s;
        if (share < 1e-3 || share > 1 - 1e-3) { continue; }
        worst = std::max(worst, std::fabs(sum[i] / draws - x) / (s * std::sqrt(share * (1 - share) / draws)));
    }
    CHECK(worst < 5);
    CHECK(worst > 1);
}
