// grid: numbers as whole multiples of a unit, the arithmetic that quantizers share.
// Needs detail/draws. Semantics: a unit is at least the smallest normal float, so its inverse is finite; NaN marks a
// bucket that held something not finite.
#pragma once

#include <cstdint>  // codes
#include <limits>   // NaN

#include <tutti/compress/detail/draws.hpp>  // rounding
#include <tutti/core/config.hpp>            // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>             // exact

namespace tutti::compress::detail {

/// Where a grid spans all elements, steps() is beyond its ends by roundings alone. At so many bits those are three of at
/// most 63, or four of 31 around zero: the sum with 256 in raised_by is that of the end, and nothing needs to be limited.
inline constexpr unsigned unlimited_bits = 6;

inline constexpr float not_finite = std::numeric_limits<float>::quiet_NaN();

[[nodiscard]] TUTTI_HOST_DEVICE inline float at_least_tiny(float unit) noexcept {
    return unit < 0x1p-126f ? 0x1p-126f : unit;
}

// Of numbers, not NaN. One instruction each on a device, and vectorized on the host.
[[nodiscard]] TUTTI_HOST_DEVICE inline float lesser(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    return fminf(a, b);
#else
    return a < b ? a : b;
#endif
}
[[nodiscard]] TUTTI_HOST_DEVICE inline float greater(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    return fmaxf(a, b);
#else
    return a > b ? a : b;
#endif
}

/// code -> base + unit * code, codes 0 to `last`.
struct offset_grid {
    float unit, base, inverse;
    std::uint32_t last;

    TUTTI_HOST_DEVICE offset_grid(float unit_, float base_, std::uint32_t last_) noexcept
        : unit(unit_), base(base_), inverse((exact(1.0f) / exact(unit_)).value), last(last_) {}
    [[nodiscard]] TUTTI_HOST_DEVICE bool finite() const noexcept { return unit == unit; }
    // Roundings may leave the largest element's a few last places above the last code.
    [[nodiscard]] TUTTI_HOST_DEVICE float steps(float x) const noexcept {
        return ((exact(x) - exact(base)) * exact(inverse)).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float place(float x) const noexcept {
        return lesser(steps(x), static_cast<float>(last));
    }
    /// As raised_by, of an element not yet limited to the last code: the code is the lesser one of it and the result's.
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t raised(float x, std::uint32_t draw) const noexcept {
        return raised_by(steps(x), draw);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x, std::uint32_t draw) const noexcept {
        return rounded_by(place(x), draw);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x) const noexcept { return rounded_nearest(place(x)); }
    [[nodiscard]] TUTTI_HOST_DEVICE float value_at(float code) const noexcept {
        return (exact(base) + exact(unit) * exact(code)).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float value(std::uint32_t code) const noexcept {
        return value_at(static_cast<float>(static_cast<std::int32_t>(code)));
    }
};

/// code -> unit * (code - levels), codes 0 to 2 levels; zero has a code. What lies
/// beyond the ends is coded as the end.
struct centered_grid {
    float unit, inverse, levels;
    std::uint32_t last;

    TUTTI_HOST_DEVICE centered_grid(float unit_, std::uint32_t levels_) noexcept
        : unit(unit_)
        , inverse((exact(1.0f) / exact(unit_)).value)
        , levels(static_cast<float>(levels_))
        , last(2 * levels_) {}
    [[nodiscard]] TUTTI_HOST_DEVICE bool finite() const noexcept { return unit == unit; }
    [[nodiscard]] TUTTI_HOST_DEVICE float steps(float x) const noexcept {
        return (exact(x) * exact(inverse) + exact(levels)).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float place(float x) const noexcept {
        return lesser(greater(steps(x), 0.0f), 2 * levels);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t raised(float x, std::uint32_t draw) const noexcept {
        return raised_by(place(x), draw);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x, std::uint32_t draw) const noexcept {
        return rounded_by(place(x), draw);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint32_t code(float x) const noexcept { return rounded_nearest(place(x)); }
    [[nodiscard]] TUTTI_HOST_DEVICE float value_at(float code) const noexcept {
        return (exact(unit) * (exact(code) - exact(levels))).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float value(std::uint32_t code) const noexcept {
        return value_at(static_cast<float>(static_cast<std::int32_t>(code)));
    }
};

}  // namespace tutti::compress::detail
