// bucket_measure: a bucket in the registers of a group of threads, and what is measured of it there.
// Needs detail/bucket_place, detail/folds and nvcc. Results are the host's, bit by bit.
#pragma once

#include <concepts>  // same_as
#include <cstdint>   // pairs
#include <tuple>     // what was measured

#include <tutti/compress/detail/bits.hpp>          // chunk
#include <tutti/compress/detail/bucket_place.cuh>  // load_some, for_chunks
#include <tutti/compress/detail/folds.hpp>         // what is measured
#include <tutti/core/element.hpp>                  // float16, bfloat16

namespace tutti::compress::detail {

/// A chunk of elements in a thread's registers.
template <class R> struct held_chunk {
    R of[chunk];

    // As load_some.
    template <bool whole, class T> __device__ void load(const T* from, int count, bool aligned, T absent) {
        T loaded[chunk];
        load_some<whole>(from, count, aligned, loaded, absent);
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) { of[j] = static_cast<R>(loaded[j]); }
    }
    [[nodiscard]] __device__ R number(unsigned j) const { return of[j]; }
};

// Extremes of pairs of 16-bit numbers: half an instruction an element. NaN of any reaches the result.
template <class Fold, class T> __device__ inline std::uint32_t combined_pairs(std::uint32_t a, std::uint32_t b) {
#if __CUDA_ARCH__ >= 800
    std::uint32_t r = 0;
    if constexpr (std::same_as<T, float16> && std::same_as<Fold, lowest>) {
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else if constexpr (std::same_as<T, float16>) {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else if constexpr (std::same_as<Fold, lowest>) {
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
#else
    const auto half = [&](unsigned shift) {
        T x, y;
        x.bits = static_cast<std::uint16_t>(a >> shift);
        y.bits = static_cast<std::uint16_t>(b >> shift);
        return std::uint32_t{T(Fold::combine(static_cast<float>(x), static_cast<float>(y))).bits} << shift;
    };
    return half(0) | half(16);
#endif
}

/// A chunk of 16-bit elements as it was loaded: two in a register, and converted where they are used.
template <class T> struct held_pairs {
    std::uint32_t words[chunk / 2];

    template <bool whole> __device__ void load(const T* from, int count, bool aligned, T absent) {
        if constexpr (whole) {  // not through elements: the compiler would keep those, one a register
            load_some<true>(reinterpret_cast<const std::uint32_t*>(from), 0, true, words);
        } else {
            T loaded[chunk];
            load_some<false>(from, count, aligned, loaded, absent);
#pragma unroll
            for (unsigned j = 0; j < chunk / 2; ++j) {
                words[j] = loaded[2 * j].bits | std::uint32_t{loaded[2 * j + 1].bits} << 16;
            }
        }
    }
    // Conversions elsewhere keep the bits of a NaN, which takes instructions; no code tells one NaN from another.
    [[nodiscard]] __device__ float number(unsigned j) const {
        if constexpr (std::same_as<T, bfloat16>) {
            return __builtin_bit_cast(float, j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000u);
        } else {
            float value = 0;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(words[j / 2] >> (j % 2 * 16))));
            return value;
        }
    }
};

template <class Fold, bool unrolled, unsigned each, class Held>
__device__ inline typename Fold::type folded_by_thread(const Held (&x)[each]) {
    typename Fold::type partial[chunk];
    for_chunks<unrolled, each>([&](unsigned k) {
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) {
            const auto lifted = Fold::lift(static_cast<float>(x[k].number(j)));
            partial[j] = k == 0 ? lifted : Fold::combine(partial[j], lifted);
        }
    });
#pragma unroll
    for (unsigned d = chunk / 2; d > 0; d /= 2) {
#pragma unroll
        for (unsigned j = 0; j < d; ++j) { partial[j] = Fold::combine(partial[j], partial[j + d]); }
    }
    return partial[0];
}
template <class Fold, bool unrolled, unsigned each, class T>
requires(!Fold::ordered) __device__ inline float folded_by_thread(const held_pairs<T> (&x)[each]) {
    std::uint32_t partial[chunk / 2];
    for_chunks<unrolled, each>([&](unsigned k) {
#pragma unroll
        for (unsigned j = 0; j < chunk / 2; ++j) {
            const std::uint32_t pair = x[k].words[j];
            const std::uint32_t lifted = std::same_as<Fold, largest_magnitude> ? pair & 0x7fff7fffu : pair;
            partial[j] = k == 0 ? lifted : combined_pairs<Fold, T>(partial[j], lifted);
        }
    });
    const std::uint32_t both = combined_pairs<Fold, T>(combined_pairs<Fold, T>(partial[0], partial[1]),
                                                       combined_pairs<Fold, T>(partial[2], partial[3]));
    held_pairs<T> one;
    one.words[0] = combined_pairs<Fold, T>(both, both >> 16);
    return one.number(0);
}
template <bool unrolled, unsigned each, class Held, class... Fold>
__device__ inline typename folds<Fold...>::results results_of(folds<Fold...>, const Held (&x)[each], unsigned threads) {
    typename folds<Fold...>::results all(folded_by_thread<Fold, unrolled>(x)...);
#pragma unroll 1
    for (unsigned d = threads / 2; d > 0; d /= 2) {
        all = std::apply(
            [&](const auto&... one) {
                return typename folds<Fold...>::results(
                    Fold::combine(one, __shfl_xor_sync(0xffffffffu, one, static_cast<int>(d)))...);
            },
            all);
    }
    return all;
}
template <class C> inline constexpr bool ordered_sums = false;
template <class... Fold> inline constexpr bool ordered_sums<folds<Fold...>> = (... || Fold::ordered);

}  // namespace tutti::compress::detail
