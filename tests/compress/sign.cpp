// Signs: the error is a fixed share of the square, whatever the distribution; ends, zeros and ties.
#include <tutti/compress/sign.hpp>  // under test

#include <cmath>   // sqrt
#include <vector>  // arrays

#include <doctest/doctest.h>  // checks

#include "bucketed.hpp"  // calls

using namespace tutti;
using namespace tutti::compress;
using test::encode;
using test::normals;
using test::whole;

TEST_CASE("what is lost is (1 - rho^2) of the square, also where few elements carry it") {
    const auto gauss = normals<float>(1024, 1);
    std::vector<float> heavy(gauss), sparse(gauss);
    for (float& v : heavy) { v = v * v * v * v * v; }
    for (std::size_t i = 0; i < sparse.size(); ++i) { sparse[i] = i % 100 == 0 ? sparse[i] : 0.0f; }
    for (const auto& in : {gauss, heavy, sparse}) {
        const auto out = test::round_trip(sign(), 1, in);
        double sum = 0, squares = 0, lost = 0;
        for (std::size_t i = 0; i < in.size(); ++i) {
            const double x = static_cast<double>(in[i]), e = x - static_cast<double>(out[i]);
            sum += std::fabs(x);
            squares += x * x;
            lost += e * e;
        }
        const double rho = sum / std::sqrt(static_cast<double>(in.size()) * squares);
        CHECK(lost / squares == doctest::Approx(1 - rho * rho).epsilon(1e-5));
        CHECK(lost < squares);
    }
}

TEST_CASE("a bit for each sign, lowest first, zero is plus") {
    const std::vector<float> in{1, -2, 3, -0.0f, 0, -6, -7, 8, -9, 10};
    const segment s = whole(in.size(), 1);
    const auto e = encode(sign(), layout(&s, 1), in);
    REQUIRE(e.wire.size() == 32);
    float scale = 0;
    std::memcpy(&scale, e.wire.data(), sizeof scale);
    CHECK(scale == 4.6f);
    CHECK(e.wire[16] == std::byte{0b01100010});
    CHECK(e.wire[17] == std::byte{0b00000001});
    CHECK(test::round_trip(sign(), 0, in)[1] == -4.6f);
}

TEST_CASE("with a residual, what was not sent is sent later") {
    // The mean of what is decoded over many steps is the gradient.
    const auto in = normals<float>(1024, 1);
    std::vector<float> residual(in.size());
    std::vector<double> sent(in.size());
    const segment s = whole(in.size(), 1);
    constexpr int steps = 2000;
    for (int t = 0; t < steps; ++t) {
        auto e = encode(sign(), layout(&s, 1), in, residual);
        const auto out = test::decode(sign(), layout(&s, 1), e.wire, in.size());
        for (std::size_t i = 0; i < in.size(); ++i) { sent[i] += static_cast<double>(out[i]); }
        residual = std::move(e.residual);
    }
    double worst = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
        worst = std::max(
            worst, std::fabs(sent[i] + static_cast<double>(residual[i]) - steps * static_cast<double>(in[i])) / steps);
    }
    CHECK(worst < 1e-4);
}

TEST_CASE("a sum of magnitudes that overflows counts as not finite") {
    CHECK(std::isnan(test::round_trip(sign(), 1, std::vector<float>(1024, 1e36f))[0]));
    CHECK(test::round_trip(sign(), 1, std::vector<float>(50, 1e36f))[0] == doctest::Approx(1e36f));
}
