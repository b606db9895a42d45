// groups: neighboring weights in the registers of a thread: loaded as numbers, moved, rounded, stored.
// Needs core/cuda_run and nvcc. One instruction converts two 16-bit floats; a NaN stays one, whichever.
#pragma once

#include <concepts>  // same_as
#include <cstdint>   // pairs
#include <cstring>   // memcpy

#include <tutti/core/cuda_run.cuh>        // packs, pairs
#include <tutti/core/element.hpp>         // float16, bfloat16
#include <tutti/zeroth/perturbation.hpp>  // arithmetic

namespace tutti::zeroth::detail {

template <class T> inline constexpr bool is_half = std::same_as<T, float16> || std::same_as<T, bfloat16>;

template <class T> __device__ inline void take_apart(std::uint32_t pair, float& low, float& high) {
    if constexpr (std::same_as<T, float16>) {
        asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
            : "=f"(low), "=f"(high)
            : "r"(pair));
    } else {
        low = __uint_as_float(pair << 16);
        high = __uint_as_float(pair & 0xffff0000u);
    }
}

/// 16-byte accesses.
template <class T, class Real, unsigned width> __device__ inline void load_group(Real (&to)[width], const T* from) {
    constexpr unsigned part = 16 / sizeof(T);
    static_assert(width % part == 0);
#pragma unroll
    for (unsigned p = 0; p < width; p += part) {
        tutti::detail::pack<T, part> values;
        values.load(from + p);
        if constexpr (is_half<T>) {
            std::uint32_t pairs[part / 2];
            memcpy(pairs, values.of, sizeof pairs);
#pragma unroll
            for (unsigned i = 0; i < part; i += 2) { take_apart<T>(pairs[i / 2], to[p + i], to[p + i + 1]); }
        } else {
#pragma unroll
            for (unsigned i = 0; i < part; ++i) { to[p + i] = values.of[i]; }
        }
    }
}
template <class T, class Real, unsigned width> __device__ inline void store_group(T* to, const Real (&from)[width]) {
    constexpr unsigned part = 16 / sizeof(T);
#pragma unroll
    for (unsigned p = 0; p < width; p += part) {
        tutti::detail::pack<T, part> values;
        if constexpr (is_half<T>) {
            std::uint32_t pairs[part / 2];
#pragma unroll
            for (unsigned i = 0; i < part; i += 2) {
                pairs[i / 2] = tutti::detail::rounded_pair<T>(from[p + i], from[p + i + 1]);
            }
            memcpy(values.of, pairs, sizeof pairs);
        } else {
#pragma unroll
            for (unsigned i = 0; i < part; ++i) { values.of[i] = from[p + i]; }
        }
        values.store(to + p);
    }
}
/// w = T(w - d)
template <class T, class Real, unsigned width>
__device__ inline void move_group(Real (&w)[width], const Real (&d)[width]) {
    if constexpr (is_half<T>) {
#pragma unroll
        for (unsigned i = 0; i < width; i += 2) {
            take_apart<T>(tutti::detail::rounded_pair<T>(__fsub_rn(w[i], d[i]), __fsub_rn(w[i + 1], d[i + 1])), w[i],
                          w[i + 1]);
        }
    } else {
#pragma unroll
        for (unsigned i = 0; i < width; ++i) { w[i] = arithmetic<Real>::template moved<T>(w[i], d[i]); }
    }
}

}  // namespace tutti::zeroth::detail
