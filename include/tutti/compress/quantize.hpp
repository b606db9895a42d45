// quantize: 1 to 8 bits an element, on a grid measured of each bucket; bits per segment, rounding by chance or nearest.
// Needs compress/buckets; on a CUDA queue compress/buckets.cuh.
// Source: Alistarh et al., QSGD, NeurIPS 2017; Markov et al., CGX, Middleware 2022, section 4 (buckets, max-min).
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // codes
#include <string_view>  // names
#include <tuple>        // what was measured
#include <type_traits>  // conditional_t

#include <tutti/compress/buckets.hpp>      // bucketed
#include <tutti/compress/detail/grid.hpp>  // grids
#include <tutti/core/config.hpp>           // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>            // exact
#include <tutti/core/text.hpp>             // formatted

namespace tutti::compress {

/// Max-min quantization: segment::level is the number of bits, 1 to 8.
///
/// Semantics    unit = (max - min) / (2^bits - 1) of a bucket, at least 2^-126; an element is coded as a whole number
///              of units above min. Unbiased with stochastic rounding (to 2^-16 of a unit), whose error is below a
///              unit; half of it to the nearest. min is exact, and so are constant buckets.
/// Units        wire of a segment: {float unit, float min} a bucket; zeros up to 16 bytes; codes of `bits` bits, the
///              first in the lowest, eight in `bits` bytes; zeros up to 16 bytes.
/// Cost         4 bits, buckets of 512: 0.516 bytes an element, an eighth of float. See bucketed for the rest.
struct quantize : bucketed<quantize> {
    constexpr explicit quantize(std::size_t bucket = 512, rounding mode = rounding::stochastic)
        : bucketed<quantize>(bucket, mode) {}

    struct meta {
        float unit, base;
    };
    using folds = detail::folds<detail::lowest, detail::highest>;
    static constexpr bool spans_all = true;
    static constexpr std::uint32_t purpose = 0x7175616e;  // "quan"
    static constexpr std::string_view names[] = {"quantize", "dequantize", "dequantize_add"};

    [[nodiscard]] unsigned bits(const segment& s) const {
        if (s.level < 1 || s.level > 8) {
            throw usage_error(formatted("quantize: tensor {} has level {}; bits are 1 to 8", s.tensor, s.level));
        }
        return static_cast<unsigned>(s.level);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE meta measured(const folds::results& of, std::size_t, unsigned bits) const noexcept {
        const float min = std::get<0>(of), max = std::get<1>(of);
        if (!(min > -detail::infinite_from && max < detail::infinite_from)) { return {detail::not_finite, 0}; }
        const exact top(static_cast<float>((1u << bits) - 1));
        const float unit = ((exact(max) - exact(min)) / top).value;
        return {detail::at_least_tiny(unit), (exact(min) + exact(0.0f)).value};  // -0 becomes 0
    }
    [[nodiscard]] TUTTI_HOST_DEVICE detail::offset_grid coder(meta m, unsigned bits) const noexcept {
        return {m.unit, m.base, (1u << bits) - 1};
    }
};

/// What the grid of qsgd spans.
enum class norm : std::uint8_t { max, l2 };

/// Quantization around zero: segment::level is the number of bits, 2 to 8, one of them the sign.
///
/// Semantics    unit = norm of the bucket / (2^(bits - 1) - 1), at least 2^-126; an element is coded as a whole number
///              of units from zero, so zeros stay zero. norm::max with nearest rounding is the usual symmetric integer
///              quantization; both ends are reached, -2^(bits - 1) is not used. norm::l2 is QSGD as first published:
///              fewer codes differ from zero, the error is larger. Unbiased with stochastic rounding.
///              A 2-norm from 2^126 on counts as not finite.
/// Units        wire of a segment: float unit a bucket; zeros up to 16 bytes; codes of `bits` bits, unit * (code -
///              (2^(bits - 1) - 1)), the first in the lowest, eight in `bits` bytes; zeros up to 16 bytes.
/// Cost         4 bits, buckets of 512: 0.508 bytes an element.
template <norm of> struct qsgd : bucketed<qsgd<of>> {
    constexpr explicit qsgd(std::size_t bucket = 512, rounding mode = rounding::stochastic)
        : bucketed<qsgd>(bucket, mode) {}

    using meta = float;  ///< unit
    using folds = detail::folds<std::conditional_t<of == norm::max, detail::largest_magnitude, detail::sum_of_squares>>;
    static constexpr bool spans_all = true;
    static constexpr std::uint32_t purpose = 0x71736764;  // "qsgd"
    static constexpr std::string_view names[] = {"qsgd", "qsgd_decode", "qsgd_decode_add"};

    [[nodiscard]] unsigned bits(const segment& s) const {
        if (s.level < 2 || s.level > 8) {
            throw usage_error(formatted("qsgd: tensor {} has level {}; bits are 2 to 8", s.tensor, s.level));
        }
        return static_cast<unsigned>(s.level);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE meta measured(const typename folds::results& measured, std::size_t,
                                                  unsigned bits) const noexcept {
        float span = 0;
        if constexpr (of == norm::max) {
            span = std::get<0>(measured);
        } else {
            span = static_cast<float>(root(exact(std::get<0>(measured))).value);
        }
        if (!(span < detail::infinite_from)) { return detail::not_finite; }
        const exact levels(static_cast<float>((1u << (bits - 1)) - 1));
        return detail::at_least_tiny((exact(span) / levels).value);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE detail::centered_grid coder(meta unit, unsigned bits) const noexcept {
        return {unit, (1u << (bits - 1)) - 1};
    }
};

}  // namespace tutti::compress
