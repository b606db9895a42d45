// Eight elements at a time: 16-byte loads and stores where addresses allow, conversion to float, sums over a block.
// Needs matrix.hpp and nvcc.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // addresses
#include <type_traits>  // element types

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <tutti/core/element.hpp>  // bfloat16, float16

#include "../matrix.hpp"

namespace transformer::gpu {

inline constexpr int group = 8;  // elements that a thread holds

/// Eight numbers as floats.
struct eight {
    float v[group];
    __device__ float& operator[](int i) { return v[i]; }
    __device__ float operator[](int i) const { return v[i]; }
};

/// May `p` + any multiple of 8 elements be loaded 16 bytes at a time?
[[nodiscard]] inline bool in_groups(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
template <class T> [[nodiscard]] bool in_groups(const matrix<T>& m) {
    return m.stride % group == 0 && in_groups(m.data);
}

/// Elements that are computed with as floats and kept in 16 bits.
template <class T>
inline constexpr bool is_half = std::is_same_v<T, tutti::bfloat16> || std::is_same_v<T, tutti::float16>;

/// Eight T of 16 bits as one load brings them.
template <class T> __device__ eight unpack(const uint4& raw) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    eight x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, tutti::bfloat16>) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
            const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
    return x;
}
/// Two floats as a word of two T of 16 bits, rounded to nearest even.
template <class T> __device__ unsigned pack(float low, float high) {
    if constexpr (std::is_same_v<T, tutti::bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
}

/// Elements [0, count) of p, zeros behind them. `whole`: p is aligned, so that eight come in one or two loads.
template <class T> __device__ eight load(const T* p, int count, bool whole) {
    eight x;
    if (whole && count >= group) {
        if constexpr (is_half<T>) {
            x = unpack<T>(*reinterpret_cast<const uint4*>(p));
        } else {
            const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
            x = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
        }
    } else {
#pragma unroll
        for (int i = 0; i < group; ++i) { x[i] = i < count ? static_cast<float>(p[i]) : 0.0f; }
    }
    return x;
}

/// The first `count` of x, rounded to nearest even.
template <class T> __device__ void store(T* p, const eight& x, int count, bool whole) {
    if (whole && count >= group) {
        if constexpr (is_half<T>) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) { words[i] = pack<T>(x[2 * i], x[2 * i + 1]); }
            *reinterpret_cast<uint4*>(p) = {words[0], words[1], words[2], words[3]};
        } else {
            reinterpret_cast<float4*>(p)[0] = {x[0], x[1], x[2], x[3]};
            reinterpret_cast<float4*>(p)[1] = {x[4], x[5], x[6], x[7]};
        }
    } else {
#pragma unroll
        for (int i = 0; i < group; ++i) {
            if (i < count) { p[i] = static_cast<T>(x[i]); }
        }
    }
}

/// Eight elements as one load brings them, so that many loads can be under way before the first is looked at.
template <class T> struct in_flight {
    std::conditional_t<is_half<T>, uint4, eight> raw{};
    /// Of an aligned row of whole groups; zeros where `present` is false.
    __device__ in_flight(const T* p, bool present) {
        if (!present) { return; }
        if constexpr (is_half<T>) {
            raw = *reinterpret_cast<const uint4*>(p);
        } else {
            raw = load(p, group, true);
        }
    }
    __device__ eight floats() const {
        if constexpr (is_half<T>) {
            return unpack<T>(raw);
        } else {
            return raw;
        }
    }
};

/// Whole warps that hold a row of `columns` elements, eight a thread; at most 1024 threads.
[[nodiscard]] inline unsigned threads_for(int columns) {
    const unsigned threads = (static_cast<unsigned>(columns) + group - 1) / group;
    return (threads + 31) / 32 * 32;
}

__device__ inline float sum_over_warp(float x) {
    for (int step = 16; step > 0; step /= 2) { x += __shfl_xor_sync(0xffffffffu, x, step); }
    return x;
}

/// Sums of each of x over the block, the same on every thread. `cells` holds Count * 32 floats and is free again after
/// the next barrier of the block.
/// Determinism  a fixed tree.
template <int Count> __device__ void sum_over_block(float (&x)[Count], float* cells) {
#pragma unroll
    for (int k = 0; k < Count; ++k) { x[k] = sum_over_warp(x[k]); }
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int k = 0; k < Count; ++k) { cells[k * 32 + warp] = x[k]; }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        x[k] = 0;
        for (int w = 0; w < warps; ++w) { x[k] += cells[k * 32 + w]; }
    }
}

}  // namespace transformer::gpu
