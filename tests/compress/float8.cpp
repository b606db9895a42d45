// 8-bit floats: every code, every boundary between codes, scales of blocks, the MXFP8 layout.
#include <tutti/compress/float8.hpp>  // under test

#include <algorithm>  // sort
#include <cmath>      // ldexp
#include <vector>     // arrays

#include <doctest/doctest.h>  // checks

#include "bucketed.hpp"       // calls
#include "support/build.hpp"  // full_speed

using namespace tutti;
using namespace tutti::compress;
using test::encode;
using test::normals;
using test::whole;

namespace {

// The number of a code, from the definition; NaN and infinity as the formats have them.
double number_of(float8_format format, unsigned code) {
    const bool e4m3 = format == float8_format::e4m3;
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    const int field = static_cast<int>((code & 0x7fu) >> mantissa_bits);
    const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
    const double sign = (code & 0x80u) != 0 ? -1 : 1;
    if (e4m3 && (code & 0x7fu) == 0x7f) { return std::nan(""); }
    if (!e4m3 && field == 31) { return mantissa == 0 ? sign * INFINITY : std::nan(""); }
    const double steps = field == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    return sign * std::ldexp(steps, std::max(field, 1) - bias - mantissa_bits);
}

// A wire of one block of 32 with scale 2^exponent, and its codes from `first` on.
std::vector<std::byte> wire_of(int exponent, unsigned first) {
    std::vector<std::byte> wire(48);
    wire[0] = static_cast<std::byte>(exponent + 127);
    for (unsigned i = 0; i < 32; ++i) { wire[16 + i] = static_cast<std::byte>(first + i); }
    return wire;
}

template <float8_format format> void every_code() {
    const segment s = whole(32, 8);
    for (const int exponent : {0, 5, -127, 100}) {
        for (unsigned first = 0; first < 256; first += 32) {
            const auto out = test::decode(float8<format>(), layout(&s, 1), wire_of(exponent, first), 32);
            for (unsigned i = 0; i < 32; ++i) {
                const double expected = std::ldexp(number_of(format, first + i), exponent);
                if (std::isnan(expected)) {
                    CHECK(std::isnan(out[i]));
                } else {
                    CHECK(static_cast<double>(out[i]) == expected);
                }
            }
        }
    }
    for (const float v : test::decode(float8<format>(), layout(&s, 1), wire_of(128, 0), 32)) { CHECK(std::isnan(v)); }
}

// Encodes x beside the largest number, so that the scale is 1.
template <float8_format format> unsigned code_of(float x, rounding mode, draw_key key = {1, 2, 3}) {
    const segment s = whole(8, 8);
    std::vector<float> in(8, x);
    in[7] = format == float8_format::e4m3 ? 448.0f : 57344.0f;
    const auto e = encode(float8<format>(8, mode), layout(&s, 1), in, {}, key);
    CHECK(e.wire[0] == std::byte{127});
    return std::to_integer<unsigned>(e.wire[16]);
}

template <float8_format format> void nearest_everywhere() {
    std::size_t wrong = 0;
    const unsigned last = format == float8_format::e4m3 ? 0x7e : 0x7b;
    for (unsigned code = 0; code < last; ++code) {
        const double low = number_of(format, code), high = number_of(format, code + 1);
        const auto middle = static_cast<float>((low + high) / 2);
        const unsigned even = code % 2 == 0 ? code : code + 1;
        for (const float sign : {1.0f, -1.0f}) {
            const unsigned bit = sign < 0 ? 0x80u : 0u;
            const auto coded = [&](float x) { return code_of<format>(sign * x, rounding::nearest); };
            wrong += coded(static_cast<float>(low)) != (code | bit);
            wrong += coded(middle) != (even | bit);
            wrong += coded(std::nextafter(middle, 0.0f)) != (code | bit);
            wrong += coded(std::nextafter(middle, 1e9f)) != ((code + 1) | bit);
        }
    }
    CHECK(wrong == 0);
}

template <float8_format format> void scale_everywhere() {
    const double most = format == float8_format::e4m3 ? 448 : 57344;
    std::size_t wrong = 0;
    const segment s = whole(8, 8);
    const auto exponent_of = [&](float largest) {
        std::vector<float> in(8, 0.0f);
        in[3] = -largest;
        return std::to_integer<int>(encode(float8<format>(8), layout(&s, 1), in).wire[0]) - 127;
    };
    for (int k = -149; k < 126; ++k) {
        const float power = std::ldexp(1.0f, k);
        for (const float x : {power, 1.5f * power, std::nextafter(1.75f * power, 0.0f), 1.75f * power,
                              std::nextafter(1.75f * power, INFINITY), std::nextafter(2 * power, 0.0f)}) {
            if (x == 0) { continue; }
            const int e = exponent_of(x);
            wrong += static_cast<double>(x) > std::ldexp(most, e);                   // nothing saturates
            wrong += e > -127 && static_cast<double>(x) <= std::ldexp(most, e - 1);  // and it is the least
        }
    }
    CHECK(exponent_of(0) == -127);
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("every code decodes to its number, times the scale") {
    every_code<float8_format::e4m3>();
    every_code<float8_format::e5m2>();
}

TEST_CASE("to the nearest even at every boundary, in one rounding") {
    nearest_everywhere<float8_format::e4m3>();
    nearest_everywhere<float8_format::e5m2>();
}

// pytorch/ao#4725: the scale was rounded from float32 to bfloat16 to E8M0, and went across a power of two.
TEST_CASE("the scale is the least power that does not saturate, for every exponent") {
    scale_everywhere<float8_format::e4m3>();
    scale_everywhere<float8_format::e5m2>();
}

TEST_CASE("stochastic rounding goes up in proportion, also between subnormals") {
    const int draws = test::full_speed ? 20000 : 4000;
    for (const float x : {300.0f, 1.03f, 0.0137f, 0.0003f}) {
        CAPTURE(x);
        double sum = 0, low = 1e9, high = 0;
        std::vector<float> in(8, x);
        in[7] = 448;
        for (int t = 0; t < draws / 7; ++t) {
            const auto out =
                test::round_trip(float8<>(8, rounding::stochastic), 8, in, {1, static_cast<std::uint32_t>(t), 0});
            for (std::size_t i = 0; i < 7; ++i) {
                sum += static_cast<double>(out[i]);
                low = std::min(low, static_cast<double>(out[i]));
                high = std::max(high, static_cast<double>(out[i]));
            }
        }
        const double count = draws / 7 * 7, share = (static_cast<double>(x) - low) / (high - low);
        CHECK(low <= static_cast<double>(x));
        CHECK(high > static_cast<double>(x));
        CHECK(std::fabs(sum / count - static_cast<double>(x)) <
              5 * (high - low) * std::sqrt(share * (1 - share) / count) + (high - low) * 0x1p-15);
    }
    for (unsigned code = 0; code < 0x7e; ++code) {  // numbers of the format stay
        const auto x = static_cast<float>(number_of(float8_format::e4m3, code));
        for (std::uint32_t t = 0; t < 20; ++t) {
            CHECK(code_of<float8_format::e4m3>(x, rounding::stochastic, {1, t, 0}) == code);
        }
    }
}

// ROCm/rocm-systems#9556, #10374: fp8 sums of finite values became NaN, averages wrong. Here sums are floats.
TEST_CASE("sums of many wires are floats") {
    const segment s = whole(32, 8);
    const auto e = encode(float8<>(), layout(&s, 1), std::vector<float>(32, 448.0f));
    std::vector<std::byte> wires;
    for (int i = 0; i < 100; ++i) { wires.insert(wires.end(), e.wire.begin(), e.wire.end()); }
    std::vector<float> sum(32);
    float8<>().decode_add(host_queue{}, layout(&s, 1), view<const std::byte>(wires), 100, view<float>(sum));
    for (const float v : sum) { CHECK(v == 44800.0f); }
}

TEST_CASE("blocks of 32 with E8M0 scales in front are MXFP8") {
    std::vector<float> in(64);
    for (std::size_t i = 0; i < 64; ++i) { in[i] = i < 32 ? 1.0f : 0x1p-20f; }
    const segment s = whole(64, 8);
    const auto e = encode(float8<>(), layout(&s, 1), in);
    REQUIRE(e.wire.size() == 16 + 64);
    CHECK(e.wire[0] == std::byte{127 - 8});  // 1 = 256 * 2^-8
    CHECK(e.wire[1] == std::byte{127 - 28});
    CHECK(e.wire[16] == std::byte{0x78});  // 256: exponent field 15, mantissa 0
    CHECK(e.wire[16 + 63] == std::byte{0x78});
    CHECK(e.wire[2] == std::byte{0});
}
