// natural: sign and power of two, a byte an element: rounded up or down to a power so that the mean is right.
// Needs compress/buckets; on a CUDA queue compress/buckets.cuh.
// Source: Horvath et al., Natural compression for distributed deep learning, 2019, section 2.
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

/// Natural compression: the error of an element is in proportion to the element. segment::level is 8; 0 is dense to collectives, and 8 to encode.
///
/// Semantics    an element becomes one of the two powers of two around it, stochastically: unbiased, with a mean
///              square error of at most |x|^2 / 8; or the nearer one. Powers reach from the first at or above the
///              bucket's largest magnitude 126 powers down; smaller elements become the smallest power or zero,
///              unbiased as well.
/// Units        wire of a segment: float top, that first power, a bucket; zeros up to 16 bytes; a byte an element: bit
///              7 the sign, bits 0 to 6 c: 0 is zero, others top * 2^(c - 127); zeros up to 16 bytes.
/// Cost         buckets of 512: 1.008 bytes an element.
struct natural : bucketed<natural> {
    constexpr explicit natural(std::size_t bucket = 512, rounding mode = rounding::stochastic)
        : bucketed<natural>(bucket, mode) {}

    using meta = float;  ///< top
    using folds = detail::folds<detail::largest_magnitude>;
    static constexpr std::uint32_t purpose = 0x6e617475;  // "natu"
    static constexpr std::string_view names[] = {"natural", "natural_decode", "natural_decode_add"};

    struct powers {
        float top, inverse;
        TUTTI_HOST_DEVICE explicit powers(float t) noexcept : top(t), inverse((exact(1.0f) / exact(t)).value) {}
        [[nodiscard]] TUTTI_HOST_DEVICE bool finite() const noexcept { return top == top; }
        // |x| / top is at most 1, of exponent field 127. Where that field is 0, floats are evenly spaced, and the bits
        // below it are how far it is from zero to the smallest power.
        [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t rounded(float x, std::uint32_t below_a_power) const noexcept {
            const auto share = __builtin_bit_cast(std::uint32_t, (exact(std::fabs(x)) * exact(inverse)).value);
            const auto sign = (__builtin_bit_cast(std::uint32_t, x) >> 24) & 0x80u;
            return sign | (share + below_a_power) >> 23;
        }
        [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x, std::uint32_t draw) const noexcept {
            return rounded(x, draw << 7);
        }
        [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x) const noexcept { return rounded(x, 0x400000u); }
        [[nodiscard]] TUTTI_HOST_DEVICE float value(std::uint32_t code) const noexcept {
            const auto power = __builtin_bit_cast(float, (code & 0x7fu) << 23);
            const float signed_power = (code & 0x80u) != 0 ? -power : power;
            return (exact(signed_power) * exact(top)).value;
        }
    };
    [[nodiscard]] static unsigned bits(const segment& s) { return detail::only_width("natural", s, 8); }
    [[nodiscard]] TUTTI_HOST_DEVICE static meta measured(const folds::results& of, std::size_t, unsigned) noexcept {
        const float largest = std::get<0>(of);
        if (!(largest < detail::infinite_from)) { return detail::not_finite; }
        const auto bits = __builtin_bit_cast(std::uint32_t, largest);
        return detail::at_least_tiny(__builtin_bit_cast(float, (bits + 0x7fffffu) & 0x7f800000u));
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static powers coder(meta top, unsigned) noexcept { return powers(top); }
};

}  // namespace tutti::compress
