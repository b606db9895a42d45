// exact: numbers whose every operation is rounded by itself, on the host and on the device.
// Needs core/config. Device compilers fuse a * b + c into one rounding unless told not to; promised bits must not
// depend on that. On the host the loop around is TUTTI_EXACT.
#pragma once

#include <cmath>     // sqrt
#include <concepts>  // floating_point

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE

namespace tutti {

/// One float or double. Semantics: IEEE 754, to nearest even, no fused operations. Cost: that of the plain type.
template <std::floating_point R> struct exact {
    R value;

    TUTTI_HOST_DEVICE constexpr explicit exact(R v) noexcept : value(v) {}

    friend TUTTI_HOST_DEVICE exact operator*(exact a, exact b) noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(R) == sizeof(float)) {
            return exact(__fmul_rn(a.value, b.value));
        } else {
            return exact(__dmul_rn(a.value, b.value));
        }
#else
        return exact(a.value * b.value);
#endif
    }
    friend TUTTI_HOST_DEVICE exact operator+(exact a, exact b) noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(R) == sizeof(float)) {
            return exact(__fadd_rn(a.value, b.value));
        } else {
            return exact(__dadd_rn(a.value, b.value));
        }
#else
        return exact(a.value + b.value);
#endif
    }
    friend TUTTI_HOST_DEVICE exact operator-(exact a, exact b) noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(R) == sizeof(float)) {
            return exact(__fsub_rn(a.value, b.value));
        } else {
            return exact(__dsub_rn(a.value, b.value));
        }
#else
        return exact(a.value - b.value);
#endif
    }
    // Divisions and roots are not fused with anything, but -use_fast_math would replace them.
    friend TUTTI_HOST_DEVICE exact operator/(exact a, exact b) noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(R) == sizeof(float)) {
            return exact(__fdiv_rn(a.value, b.value));
        } else {
            return exact(__ddiv_rn(a.value, b.value));
        }
#else
        return exact(a.value / b.value);
#endif
    }
    friend TUTTI_HOST_DEVICE exact root(exact a) noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(R) == sizeof(float)) {
            return exact(__fsqrt_rn(a.value));
        } else {
            return exact(__dsqrt_rn(a.value));
        }
#else
        return exact(std::sqrt(a.value));
#endif
    }
};

}  // namespace tutti
