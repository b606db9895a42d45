// float8: floats of eight bits with a power of two for each block; with blocks of 32, the MXFP8 layout.
// Needs compress/buckets; on a CUDA queue compress/buckets.cuh.
// Source: Micikevicius et al., FP8 formats for deep learning, 2022; Open Compute Project, Microscaling formats 1.0.
#pragma once

#include <cmath>        // fabs
#include <cstddef>      // size_t
#include <cstdint>      // codes
#include <string_view>  // names
#include <tuple>        // what was measured

#include <tutti/compress/buckets.hpp>      // bucketed
#include <tutti/compress/detail/grid.hpp>  // not_finite
#include <tutti/core/config.hpp>           // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>            // exact

namespace tutti::compress {

/// Sign, exponent, mantissa: up to 448 (no infinity, one NaN) or up to 57344 (as IEEE 754).
enum class float8_format : std::uint8_t { e4m3, e5m2 };

namespace detail {

template <float8_format format> struct float8_traits {
    static constexpr bool e4m3 = format == float8_format::e4m3;
    static constexpr unsigned mantissa = e4m3 ? 3 : 2;
    static constexpr int bias = e4m3 ? 7 : 15;
    static constexpr int top_exponent = e4m3 ? 8 : 15;  ///< of the largest number, 1.75 * 2^top_exponent
    static constexpr unsigned cut = 23 - mantissa;      ///< bits of a float that are rounded away
};
[[nodiscard]] TUTTI_HOST_DEVICE constexpr float power_of_two(int exponent) noexcept {  // -126 to 127
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// Numbers of a block whose elements are float8 times 2^exponent.
template <float8_format format> struct float8_block {
    using traits = float8_traits<format>;
    static constexpr float least_normal = power_of_two(1 - traits::bias);
    static constexpr std::uint32_t field_of_one = 127u << traits::mantissa;  ///< the upper bits of 1.0f
    float scale, inverse;

    // exponent + 127, of which 255 is NaN. 2^-127 is subnormal.
    TUTTI_HOST_DEVICE explicit float8_block(std::uint32_t e8m0) noexcept
        : scale(__builtin_bit_cast(float, e8m0 == 255 ? 0x7fc00000u
                                          : e8m0 == 0 ? 0x00400000u
                                                      : e8m0 << 23))
        , inverse(__builtin_bit_cast(float, e8m0 >= 254 ? 0x00400000u : (254 - e8m0) << 23)) {}
    [[nodiscard]] TUTTI_HOST_DEVICE bool finite() const noexcept { return scale == scale; }

    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t sign_of(float x) const noexcept {
        return (__builtin_bit_cast(std::uint32_t, x) >> 24) & 0x80u;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float magnitude(float x) const noexcept {
        return (exact(std::fabs(x)) * exact(inverse)).value;
    }
    // Random bits are added below the last place that stays, and the sum is cut. Below the least normal, that is added
    // first, so that the last place is the same everywhere there.
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x, std::uint32_t draw) const noexcept {
        const float y = magnitude(x);
        const bool subnormal = y < least_normal;
        const float raised = (exact(y) + exact(subnormal ? least_normal : 0.0f)).value;
        const auto bits = __builtin_bit_cast(std::uint32_t, raised);
        const std::uint32_t field = (bits + (draw << (traits::cut - 16))) >> traits::cut;
        return sign_of(x) | (field - offset(subnormal));
    }
    // One rounding each: of the bits, or of the sum with a number whose last place is that of the smallest.
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x) const noexcept {
        const float y = magnitude(x);
        constexpr float magic = power_of_two(1 - traits::bias - static_cast<int>(traits::mantissa) + 23);
        const float in_steps = (exact(y) + exact(magic)).value;
        const auto subnormal = __builtin_bit_cast(std::uint32_t, in_steps) - __builtin_bit_cast(std::uint32_t, magic);
        const auto bits = __builtin_bit_cast(std::uint32_t, y);
        const std::uint32_t even = (bits >> traits::cut) & 1u;
        const std::uint32_t normal = ((bits + ((1u << (traits::cut - 1)) - 1) + even) >> traits::cut) - offset(false);
        return sign_of(x) | (y < least_normal ? subnormal : normal);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float value(std::uint32_t code) const noexcept {
        const std::uint32_t magnitude = code & 0x7fu;
        const bool subnormal = magnitude < 1u << traits::mantissa;
        const auto bits = (magnitude + offset(subnormal)) << traits::cut;
        const float number = (exact(__builtin_bit_cast(float, bits)) - exact(subnormal ? least_normal : 0.0f)).value;
        // E5M2: field 31 holds the infinity and NaN; E4M3: only the last number is not one.
        constexpr std::uint32_t special = traits::e4m3 ? 0x7fu : 0x7cu;
        constexpr std::uint32_t infinity = traits::e4m3 ? 0x100u : 0x7cu;
        const auto beyond = __builtin_bit_cast(float, magnitude == infinity ? 0x7f800000u : 0x7fc00000u);
        const float y = magnitude >= special ? beyond : number;
        return (exact((code & 0x80u) != 0 ? -y : y) * exact(scale)).value;
    }

private:
    // From the upper bits of a float to those of a float8; one more where the least normal was added.
    [[nodiscard]] TUTTI_HOST_DEVICE static constexpr std::uint32_t offset(bool subnormal) noexcept {
        return field_of_one - ((static_cast<std::uint32_t>(traits::bias) - (subnormal ? 1u : 0u)) << traits::mantissa);
    }
};

}  // namespace detail

/// Blocks of 8-bit floats. segment::level is 8; 0 is dense to collectives, and 8 to encode.
///
/// Semantics    scale = the least power of two, at least 2^-127, with which the largest magnitude of the block is not
///              above the largest float8: nothing saturates, nothing is rounded twice. Found from the bits of the
///              float: a rounding of largest / 448 could go across a power. To nearest even by default; stochastic
///              rounding is unbiased.
/// Units        wire of a segment: a byte a block, exponent of the scale + 127 (E8M0), 255 for a block that is not
///              finite; zeros up to 16 bytes; a byte an element; zeros up to 16 bytes. Blocks of 32 with E4M3 or E5M2
///              are MXFP8.
/// Cost         blocks of 32: 1.031 bytes an element.
template <float8_format format = float8_format::e4m3> struct float8 : bucketed<float8<format>> {
    constexpr explicit float8(std::size_t block = 32, rounding mode = rounding::nearest)
        : bucketed<float8>(block, mode) {}

    using meta = std::uint8_t;  ///< E8M0
    using folds = detail::folds<detail::largest_magnitude>;
    static constexpr std::uint32_t purpose = 0x666c7438;  // "flt8"
    static constexpr std::string_view names[] = {"float8", "float8_decode", "float8_decode_add"};

    [[nodiscard]] static unsigned bits(const segment& s) { return detail::only_width("float8", s, 8); }
    [[nodiscard]] TUTTI_HOST_DEVICE static meta measured(const folds::results& of, std::size_t, unsigned) noexcept {
        const float largest = std::get<0>(of);
        if (!(largest < detail::infinite_from)) { return 255; }
        const auto bits = __builtin_bit_cast(std::uint32_t, largest);
        const bool up = (bits & 0x7fffffu) > 0x600000u;  // above 1.75
        const int e8m0 = static_cast<int>(bits >> 23) - detail::float8_traits<format>::top_exponent + (up ? 1 : 0);
        return static_cast<meta>(e8m0 < 0 ? 0 : e8m0);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static detail::float8_block<format> coder(meta e8m0, unsigned) noexcept {
        return detail::float8_block<format>(e8m0);
    }
};

}  // namespace tutti::compress
