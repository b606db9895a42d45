// Element types: float, double, float16, bfloat16 and the fixed-width integers; their names and their accumulators.
// Needs core/config. Conversions to 16 bits round to nearest even and keep NaN, also from double (rounded once).
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // byte
#include <cstdint>      // fixed-width integers
#include <string_view>  // names
#include <type_traits>  // conditional_t

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE

namespace tutti {

namespace detail {

// Nearest float truncated toward zero with the sticky bit in its last place: rounding that once more to 16 bits gives
// the same result as rounding the double directly ("round to odd").
TUTTI_HOST_DEVICE constexpr float round_to_odd(double x) noexcept {
    const float nearest = static_cast<float>(x);
    if (static_cast<double>(nearest) == x || x != x) { return nearest; }
    auto bits = __builtin_bit_cast(std::uint32_t, nearest);
    const double magnitude = x < 0 ? -x : x;
    const float rounded = nearest < 0 ? -nearest : nearest;
    if (static_cast<double>(rounded) > magnitude) { --bits; }
    return __builtin_bit_cast(float, bits | 1u);
}

TUTTI_HOST_DEVICE constexpr std::uint16_t bfloat16_bits(float x) noexcept {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (!__builtin_is_constant_evaluated()) {  // one instruction, which gives all NaN the same bits
        std::uint16_t rounded = 0;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
        return x != x ? static_cast<std::uint16_t>(quiet_nan) : rounded;
    }
#endif
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// All cases are computed and one is chosen, so that loops vectorize and device threads stay together.
TUTTI_HOST_DEVICE constexpr std::uint16_t float16_bits(float x) noexcept {
    const auto all = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t sign = (all >> 16) & 0x8000u;
    const std::uint32_t bits = all & 0x7fffffffu;
    const std::uint32_t nan = 0x7e00u | ((bits >> 13) & 0x3ffu);
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {  // one instruction, which gives all NaN the same bits
        std::uint16_t rounded = 0;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
        return bits > 0x7f800000u ? static_cast<std::uint16_t>(sign | nan) : rounded;
    }
#endif
    const std::uint32_t normal = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
    // A subnormal result is a number of steps of 2^-24, the last place of 0.5: the addition rounds.
    const std::uint32_t subnormal =
        __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, bits) + 0.5f) - 0x3f000000u;
    std::uint32_t half = bits < 0x38800000u ? subnormal : normal;
    half = bits >= 0x477ff000u ? 0x7c00u : half;  // 65520 is the first to overflow
    half = bits > 0x7f800000u ? nan : half;
    return static_cast<std::uint16_t>(sign | half);
}

TUTTI_HOST_DEVICE constexpr float float16_value(std::uint16_t half) noexcept {
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1fu;
    const std::uint32_t mantissa = half & 0x3ffu;
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {  // one instruction, which gives all NaN the same bits
        float value = 0;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
        const float nan = __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13));
        return (half & 0x7fffu) > 0x7c00u ? nan : value;
    }
#endif
    // A subnormal is read as (1 + mantissa) 2^-14, and the 1 is taken off again; from others nothing is.
    const std::uint32_t scale = exponent == 0 ? 1u : exponent;
    const float excess = exponent == 0 ? 0x1p-14f : 0.0f;
    const float finite = __builtin_bit_cast(float, ((scale + 112u) << 23) | (mantissa << 13)) - excess;
    const std::uint32_t special = 0x7f800000u | (mantissa << 13);
    const std::uint32_t bits = exponent == 0x1fu ? special : __builtin_bit_cast(std::uint32_t, finite);
    return __builtin_bit_cast(float, sign | bits);
}

}  // namespace detail

/// IEEE binary16. Arithmetic happens in float, to which it converts exactly.
struct float16 {
    std::uint16_t bits = 0;
    constexpr float16() noexcept = default;
    TUTTI_HOST_DEVICE constexpr explicit float16(float x) noexcept : bits(detail::float16_bits(x)) {}
    TUTTI_HOST_DEVICE constexpr explicit float16(double x) noexcept : float16(detail::round_to_odd(x)) {}
    TUTTI_HOST_DEVICE constexpr operator float() const noexcept { return detail::float16_value(bits); }
};

/// The upper half of an IEEE binary32. Arithmetic happens in float, to which it converts exactly.
struct bfloat16 {
    std::uint16_t bits = 0;
    constexpr bfloat16() noexcept = default;
    TUTTI_HOST_DEVICE constexpr explicit bfloat16(float x) noexcept : bits(detail::bfloat16_bits(x)) {}
    TUTTI_HOST_DEVICE constexpr explicit bfloat16(double x) noexcept : bfloat16(detail::round_to_odd(x)) {}
    TUTTI_HOST_DEVICE constexpr operator float() const noexcept {
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
    }
};

/// Name of an element type at run time. `byte` is data that is moved and never reduced.
enum class dtype : std::uint8_t {
    byte,
    float32,
    float64,
    float16,
    bfloat16,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64
};

[[nodiscard]] constexpr std::string_view name_of(dtype t) noexcept {
    constexpr std::string_view names[] = {"byte",  "float32", "float64", "float16", "bfloat16", "int8",  "int16",
                                          "int32", "int64",   "uint8",   "uint16",  "uint32",   "uint64"};
    return names[static_cast<std::size_t>(t)];
}

[[nodiscard]] constexpr std::size_t size_of(dtype t) noexcept {
    constexpr std::size_t sizes[] = {1, 4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8};
    return sizes[static_cast<std::size_t>(t)];
}

/// Anything that can be moved as bytes: communicated, gathered, exchanged.
template <class T>
concept transportable = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>;

namespace detail {
template <class T> constexpr dtype dtype_of() noexcept {
    if constexpr (std::same_as<T, float>) {
        return dtype::float32;
    } else if constexpr (std::same_as<T, double>) {
        return dtype::float64;
    } else if constexpr (std::same_as<T, tutti::float16>) {
        return dtype::float16;
    } else if constexpr (std::same_as<T, tutti::bfloat16>) {
        return dtype::bfloat16;
    } else if constexpr (std::integral<T> && !std::same_as<T, bool> && sizeof(T) <= 8) {
        constexpr bool s = std::is_signed_v<T>;
        if constexpr (sizeof(T) == 1) {
            return s ? dtype::int8 : dtype::uint8;
        } else if constexpr (sizeof(T) == 2) {
            return s ? dtype::int16 : dtype::uint16;
        } else if constexpr (sizeof(T) == 4) {
            return s ? dtype::int32 : dtype::uint32;
        } else {
            return s ? dtype::int64 : dtype::uint64;
        }
    } else {
        return dtype::byte;
    }
}
}  // namespace detail

/// dtype of T; `byte` for types that are only transportable (bool, structs).
template <transportable T> inline constexpr dtype dtype_of = detail::dtype_of<T>();

/// Number types the library computes with. bool is not one: its "sum" would be an OR.
template <class T>
concept element = transportable<T> && dtype_of<T>
!= dtype::byte;

template <class T>
concept floating_element = element<T> &&
    (std::floating_point<T> || std::same_as<T, float16> || std::same_as<T, bfloat16>);

/// What sums of T are kept in: float for the 16-bit floats, T otherwise. Rounded to T once, at the end.
template <element T>
using accumulator_t = std::conditional_t<std::same_as<T, float16> || std::same_as<T, bfloat16>, float, T>;

/// What optimizer state and authoritative weights of T are kept in: double for double, float otherwise.
template <floating_element T> using master_t = std::conditional_t<std::same_as<T, double>, double, float>;

}  // namespace tutti
