// sign: one bit an element, and the mean magnitude of its bucket.
// Needs compress/buckets; on a CUDA queue compress/buckets.cuh.
// Source: Karimireddy et al., Error feedback fixes SignSGD, ICML 2019; Seide et al., 1-bit SGD, Interspeech 2014.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // codes
#include <string_view>  // names
#include <tuple>        // what was measured

#include <tutti/compress/buckets.hpp>      // bucketed
#include <tutti/compress/detail/grid.hpp>  // not_finite
#include <tutti/core/config.hpp>           // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>            // exact

namespace tutti::compress {

/// Signs: an element decodes to plus or minus the mean magnitude of its bucket. segment::level is 1; 0 is dense to collectives, and 1 to encode.
///
/// Semantics    zero is coded as plus. What is lost is (1 - rho^2) |x|^2 with rho = |x|_1 / (sqrt(n) |x|_2), always
///              less than |x|^2, which the root of the mean square as scale does not achieve (2 (1 - rho) |x|^2):
///              biased, so for use with error feedback. A sum of magnitudes from 2^126 on counts as not finite.
/// Units        wire of a segment: float scale a bucket; zeros up to 16 bytes; a byte for every eight elements, the
///              first in the lowest bit, 1 for negative; zeros up to 16 bytes.
/// Cost         buckets of 1024 by default, the largest there are: beside single bits a scale for 512 elements would be
///              a sixteenth of the wire. 0.129 bytes an element.
struct sign : bucketed<sign> {
    constexpr explicit sign(std::size_t bucket = detail::largest_bucket) : bucketed<sign>(bucket, rounding::nearest) {}

    using meta = float;  ///< scale
    using folds = detail::folds<detail::sum_of_magnitudes>;
    static constexpr std::uint32_t purpose = 0;  // draws nothing
    static constexpr std::string_view names[] = {"sign", "sign_decode", "sign_decode_add"};

    struct signs {
        float scale;
        [[nodiscard]] TUTTI_HOST_DEVICE bool finite() const noexcept { return scale == scale; }
        [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x) const noexcept { return x < 0 ? 1 : 0; }
        [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x, std::uint32_t) const noexcept { return code(x); }
        [[nodiscard]] TUTTI_HOST_DEVICE float value(std::uint32_t code) const noexcept {
            return code % 2 != 0 ? -scale : scale;
        }
    };
    [[nodiscard]] static unsigned bits(const segment& s) { return detail::only_width("sign", s, 1); }
    [[nodiscard]] TUTTI_HOST_DEVICE static meta measured(const folds::results& of, std::size_t n, unsigned) noexcept {
        const float sum = std::get<0>(of);
        if (!(sum < detail::infinite_from)) { return detail::not_finite; }
        return (exact(sum) / exact(static_cast<float>(n))).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static signs coder(meta scale, unsigned) noexcept { return {scale}; }
};

}  // namespace tutti::compress
