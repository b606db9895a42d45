// Elements: every 16-bit pattern and every rounding boundary, judged by a decoder and a rounder that share no code with
// the library: values as long double, which holds them and the middles between them exactly.
#include <tutti/core/element.hpp>  // under test

#include <algorithm>  // upper_bound
#include <bit>        // bit_cast
#include <cmath>      // ldexp, nextafter
#include <cstdint>    // patterns
#include <limits>     // infinity, quiet_NaN
#include <random>     // values between the boundaries
#include <string>     // first failure
#include <vector>     // tables

#include <doctest/doctest.h>  // checks
#include <fmt/format.h>       // patterns in messages

namespace {

using tutti::bfloat16;
using tutti::float16;

/// Field widths of a 16-bit format; the rest follows from IEEE 754.
template <class T> struct layout;
template <> struct layout<float16> { static constexpr int mantissa_bits = 10, bias = 15; };
template <> struct layout<bfloat16> { static constexpr int mantissa_bits = 7, bias = 127; };

template <class T>
constexpr unsigned infinity_pattern = (0x7fffu >> layout<T>::mantissa_bits) << layout<T>::mantissa_bits;

/// What a non-negative pattern stands for. The infinity pattern gives the power of two that overflow is measured by.
template <class T> long double magnitude_of(unsigned pattern) {
    constexpr int bits = layout<T>::mantissa_bits;
    const int exponent = static_cast<int>(pattern >> bits);
    const auto mantissa = static_cast<long double>(pattern & ((1u << bits) - 1));
    constexpr int unit = 1 - layout<T>::bias - bits;
    if (exponent == 0) { return std::ldexp(mantissa, unit); }
    return std::ldexp(mantissa + static_cast<long double>(1u << bits), unit + exponent - 1);
}

/// Nearest pattern, ties to even, by search in the table of all magnitudes.
template <class T> unsigned nearest(long double x) {
    static const std::vector<long double> table = [] {
        std::vector<long double> t;
        for (unsigned p = 0; p <= infinity_pattern<T>; ++p) { t.push_back(magnitude_of<T>(p)); }
        return t;
    }();
    const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
    const long double magnitude = std::fabs(x);
    if (magnitude >= table.back()) { return sign | infinity_pattern<T>; }
    const auto above = static_cast<unsigned>(std::upper_bound(table.begin(), table.end(), magnitude) - table.begin());
    const long double down = magnitude - table[above - 1];
    const long double up = table[above] - magnitude;
    const bool odd = ((above - 1) & 1u) != 0;
    return sign | (down < up || (down == up && !odd) ? above - 1 : above);
}

/// Counts failures so that millions of comparisons cost one assertion.
struct tally {
    int wrong = 0;
    std::string first;
    template <class From> void expect(From from, unsigned got, unsigned want) {
        if (got == want) { return; }
        if (wrong++ == 0) { first = fmt::format("{} gives {:04x}, not {:04x}", from, got, want); }
    }
};

template <class T> void rounds(tally& t, float x, unsigned want) {
    t.expect(x, T(x).bits, want);
    t.expect(-x, T(-x).bits, want | 0x8000u);
}
template <class T> void rounds(tally& t, double x, unsigned want) {
    t.expect(x, T(x).bits, want);
    t.expect(-x, T(-x).bits, want | 0x8000u);
}

}  // namespace

TEST_CASE_TEMPLATE("16-bit floats decode every pattern", T, float16, bfloat16) {
    tally t;
    for (unsigned p = 0; p < 0x8000u; ++p) {
        for (const unsigned pattern : {p, p | 0x8000u}) {
            const auto value = static_cast<float>(std::bit_cast<T>(static_cast<std::uint16_t>(pattern)));
            const bool negative = pattern >= 0x8000u;
            bool right = std::signbit(value) == negative;
            if (p < infinity_pattern<T>) {
                right = right && std::fabs(value) == magnitude_of<T>(p);
            } else if (p == infinity_pattern<T>) {
                right = right && std::isinf(value);
            } else {
                right = right && std::isnan(value);
            }
            t.expect(value, right ? 1 : 0, 1);
        }
    }
    INFO(t.first);
    CHECK(t.wrong == 0);
}

TEST_CASE_TEMPLATE("16-bit floats survive float and double and back", T, float16, bfloat16) {
    constexpr unsigned quiet = 1u << (layout<T>::mantissa_bits - 1);
    tally t;
    for (unsigned pattern = 0; pattern <= 0xffffu; ++pattern) {
        const auto value = static_cast<float>(std::bit_cast<T>(static_cast<std::uint16_t>(pattern)));
        const bool nan = (pattern & 0x7fffu) > infinity_pattern<T>;
        t.expect(value, T(value).bits, nan ? pattern | quiet : pattern);
        t.expect(value, T(static_cast<double>(value)).bits, nan ? pattern | quiet : pattern);
    }
    INFO(t.first);
    CHECK(t.wrong == 0);
}

TEST_CASE_TEMPLATE("16-bit floats round to nearest even at every boundary", T, float16, bfloat16) {
    constexpr double infinite = std::numeric_limits<double>::infinity();
    tally t;
    for (unsigned p = 0; p < infinity_pattern<T>; ++p) {
        const long double middle = (magnitude_of<T>(p) + magnitude_of<T>(p + 1)) / 2;
        const unsigned even = (p & 1u) == 0 ? p : p + 1;

        const auto single = static_cast<float>(middle);
        REQUIRE(static_cast<long double>(single) == middle);  // else the float cases below would mean nothing
        rounds<T>(t, single, even);
        rounds<T>(t, std::nextafter(single, 0.0f), p);
        rounds<T>(t, std::nextafter(single, std::numeric_limits<float>::infinity()), p + 1);

        // A double next to the middle becomes the middle when it is first rounded to float, and then goes the wrong
        // way.
        const auto twice = static_cast<double>(middle);
        rounds<T>(t, twice, even);
        rounds<T>(t, std::nextafter(twice, 0.0), p);
        rounds<T>(t, std::nextafter(twice, infinite), p + 1);
    }
    rounds<T>(t, std::numeric_limits<float>::infinity(), infinity_pattern<T>);
    rounds<T>(t, infinite, infinity_pattern<T>);
    rounds<T>(t, std::numeric_limits<float>::max(), infinity_pattern<T>);
    rounds<T>(t, std::numeric_limits<double>::max(), infinity_pattern<T>);
    rounds<T>(t, std::numeric_limits<float>::denorm_min(), 0);
    rounds<T>(t, std::numeric_limits<double>::denorm_min(), 0);
    INFO(t.first);
    CHECK(t.wrong == 0);
}

TEST_CASE_TEMPLATE("16-bit floats round random values as the oracle does", T, float16, bfloat16) {
    std::mt19937_64 random(20240607);
    tally t;
    for (int i = 0; i < 400000; ++i) {
        const auto single = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (!std::isnan(single)) { t.expect(single, T(single).bits, nearest<T>(single)); }
        // Exponents where the format has values or just has none.
        const double scale = std::ldexp(1.0, static_cast<int>(random() % (2 * layout<T>::bias + 60)) - layout<T>::bias -
                                                 layout<T>::mantissa_bits - 25);
        const double twice = (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5) * scale;
        t.expect(twice, T(twice).bits, nearest<T>(twice));
    }
    INFO(t.first);
    CHECK(t.wrong == 0);
}

TEST_CASE_TEMPLATE("16-bit floats keep NaN, its sign and its upper payload, and make it quiet", T, float16, bfloat16) {
    constexpr int bits = layout<T>::mantissa_bits;
    constexpr unsigned quiet = 1u << (bits - 1);
    tally t;
    for (unsigned payload = 0; payload < (1u << bits); ++payload) {
        for (const std::uint32_t low : {0u, 1u, (1u << (23 - bits)) - 1}) {
            const std::uint32_t mantissa = (payload << (23 - bits)) | low;
            if (mantissa == 0) { continue; }  // an infinity
            for (const std::uint32_t sign : {0u, 0x80000000u}) {
                const unsigned want = (sign >> 16) | infinity_pattern<T> | quiet | payload;
                const auto single = std::bit_cast<float>(sign | 0x7f800000u | mantissa);
                t.expect(payload, T(single).bits, want);
                const std::uint64_t wide = (std::uint64_t{sign} << 32) | 0x7ff0000000000000u |
                                           (std::uint64_t{mantissa} << 29) | (low != 0 ? 1u : 0u);
                t.expect(payload, T(std::bit_cast<double>(wide)).bits, want);
            }
        }
    }
    // The payload's last bits alone must not turn a NaN into an infinity.
    t.expect("lowest bit", T(std::bit_cast<double>(0x7ff0000000000001u)).bits, infinity_pattern<T> | quiet);
    INFO(t.first);
    CHECK(t.wrong == 0);
}

#ifdef __FLT16_MAX__
TEST_CASE("float16 equals the compiler's own binary16") {
    std::mt19937_64 random(77);
    tally t;
    for (int i = 0; i < 400000; ++i) {
        const auto single = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        const double twice =
            std::ldexp(static_cast<double>(random() >> 11) * 0x1p-53, static_cast<int>(random() % 46) - 28);
        if (!std::isnan(single)) {
            t.expect(single, float16(single).bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(single)));
        }
        t.expect(twice, float16(twice).bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(twice)));
    }
    INFO(t.first);
    CHECK(t.wrong == 0);
}
#endif

TEST_CASE("conversions work in constant expressions") {
    static_assert(float16(1.0f).bits == 0x3c00 && float16(-2.0).bits == 0xc000);
    static_assert(bfloat16(1.0f).bits == 0x3f80 && bfloat16(-2.0).bits == 0xc000);
    static_assert(static_cast<float>(float16(65504.0f)) == 65504.0f);
    static_assert(float16().bits == 0 && bfloat16().bits == 0);
    CHECK(float16(65519.996f).bits == 0x7bff);  // the largest float below the first that overflows
    CHECK(float16(65520.0f).bits == 0x7c00);
}

TEST_CASE("element types have names, sizes and accumulators") {
    using namespace tutti;
    const auto same = []<class T>(dtype want, std::string_view name, T) {
        CHECK(dtype_of<T> == want);
        CHECK(name_of(dtype_of<T>) == name);
        CHECK(size_of(dtype_of<T>) == sizeof(T));
    };
    same(dtype::float32, "float32", float{});
    same(dtype::float64, "float64", double{});
    same(dtype::float16, "float16", float16{});
    same(dtype::bfloat16, "bfloat16", bfloat16{});
    same(dtype::int8, "int8", std::int8_t{});
    same(dtype::int16, "int16", std::int16_t{});
    same(dtype::int32, "int32", std::int32_t{});
    same(dtype::int64, "int64", std::int64_t{});
    same(dtype::uint8, "uint8", std::uint8_t{});
    same(dtype::uint16, "uint16", std::uint16_t{});
    same(dtype::uint32, "uint32", std::uint32_t{});
    same(dtype::uint64, "uint64", std::uint64_t{});
    same(dtype::byte, "byte", std::byte{});
    same(dtype::byte, "byte", bool{});
    // Types of the language that are none of the fixed-width aliases.
    same(dtype::int64, "int64", 0ll);
    same(dtype::uint64, "uint64", 0ull);

    struct triple {
        float x, y, z;
    };
    static_assert(transportable<triple> && transportable<bool> && !element<triple> && !element<bool>);
    static_assert(!transportable<float*> && !transportable<std::string>);
    static_assert(element<std::int8_t> && !floating_element<std::int8_t> && floating_element<bfloat16>);
    static_assert(std::same_as<accumulator_t<float16>, float> && std::same_as<accumulator_t<bfloat16>, float>);
    static_assert(std::same_as<accumulator_t<double>, double> && std::same_as<accumulator_t<std::int8_t>, std::int8_t>);
    static_assert(std::same_as<master_t<double>, double> && std::same_as<master_t<float16>, float>);
    static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2 && std::is_trivially_copyable_v<float16>);
}
