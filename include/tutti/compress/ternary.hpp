// ternary: minus, zero or plus one scale for a bucket, drawn so that the mean is right; two bits an element.
// Needs compress/buckets; on a CUDA queue compress/buckets.cuh.
// Source: Wen et al., TernGrad, NeurIPS 2017, sections 3.1 and 4.1 (clipping at 2.5 standard deviations).
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // codes
#include <string_view>  // names
#include <tuple>        // what was measured

#include <tutti/compress/buckets.hpp>      // bucketed
#include <tutti/compress/detail/grid.hpp>  // centered_grid
#include <tutti/core/config.hpp>           // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>            // exact

namespace tutti::compress {

/// TernGrad. segment::level is 2; 0 is dense to collectives, and 2 to encode.
///
/// Semantics    scale = the largest magnitude of the bucket, or 2.5 times the root of its mean square if that is less;
///              an element is plus or minus the scale with the probability |x| / scale, else zero. Unbiased but for
///              elements beyond the scale, which are taken for the scale: a residual keeps what they lose. The mean
///              square is about zero, not about the mean: a constant bucket is not clipped.
/// Units        wire of a segment: float scale a bucket; zeros up to 16 bytes; codes of two bits, 0: minus, 1: zero,
///              2: plus (3 is not written and decodes to twice the scale), the first in the lowest; zeros up to 16
///              bytes. Three values in 1.6 bits would save a fifth, and cost divisions by three.
/// Cost         buckets of 512: 0.258 bytes an element.
struct ternary : bucketed<ternary> {
    constexpr explicit ternary(std::size_t bucket = 512, rounding mode = rounding::stochastic)
        : bucketed<ternary>(bucket, mode) {}

    using meta = float;  ///< scale
    using folds = detail::folds<detail::largest_magnitude, detail::sum_of_squares>;
    static constexpr std::uint32_t purpose = 0x7465726e;  // "tern"
    static constexpr std::string_view names[] = {"ternary", "ternary_decode", "ternary_decode_add"};

    [[nodiscard]] static unsigned bits(const segment& s) { return detail::only_width("ternary", s, 2); }
    [[nodiscard]] TUTTI_HOST_DEVICE static meta measured(const folds::results& of, std::size_t n, unsigned) noexcept {
        const float largest = std::get<0>(of);
        if (!(largest < detail::infinite_from)) { return detail::not_finite; }
        const exact mean_square = exact(std::get<1>(of)) / exact(static_cast<double>(n));
        const auto clip = static_cast<float>((exact(2.5) * root(mean_square)).value);
        return detail::at_least_tiny(clip < largest ? clip : largest);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static detail::centered_grid coder(meta scale, unsigned) noexcept {
        return {scale, 1};
    }
};

}  // namespace tutti::compress
