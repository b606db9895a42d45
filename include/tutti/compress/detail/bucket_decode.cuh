// bucket_decode: the kernels of decode_buckets and add_buckets: a group of threads reads codes of a bucket in words.
// Needs detail/bucket_place, detail/bucket_operations and nvcc.
#pragma once

#include <cstddef>      // size_t, byte
#include <cstdint>      // codes
#include <type_traits>  // conditional_t
#include <utility>      // declval

#include <tutti/compress/detail/bits.hpp>          // chunk
#include <tutti/compress/detail/bucket_place.cuh>  // place_of
#include <tutti/core/exact.hpp>                    // products and sums rounded separately

namespace tutti::compress::detail {

/// What decodes a bucket of a wire. Codes are read in fours, which have at most 32 bits: from the word that holds the
/// first, and from the next if the last is there.
template <class C> class bucket_decoder {
    decltype(std::declval<C>().coder(typename C::meta(), 0u)) coder_;
    const std::uint32_t* words_;
    unsigned lead_, bits_;

public:
    __device__ bucket_decoder(const C& scheme, const std::byte* wire, const bucket_place& p)
        : coder_(scheme.coder(*reinterpret_cast<const typename C::meta*>(wire + p.meta), p.s.bits)), bits_(p.s.bits) {
        const std::size_t codes = p.s.codes + p.first / chunk * bits_;
        words_ = reinterpret_cast<const std::uint32_t*>(wire + codes / 4 * 4);
        lead_ = static_cast<unsigned>(codes % 4 * 8);
    }
    /// Codes i to i + 3 of the bucket, which begins at a chunk; i is a multiple of four.
    [[nodiscard]] __device__ std::uint32_t four(unsigned i) const {
        const unsigned at = lead_ + i * bits_;
        std::uint64_t some = words_[at / 32];
        if (at % 32 + 4 * bits_ > 32) { some |= std::uint64_t{words_[at / 32 + 1]} << 32; }
        return static_cast<std::uint32_t>(some >> (at % 32));
    }
    [[nodiscard]] __device__ float value(std::uint32_t codes, unsigned j) const {
        return coder_.value((codes >> (j * bits_)) & ((1u << bits_) - 1));
    }
};

/// Elements that a thread decodes, in packs of which a warp writes neighbors: those of 16 bytes, of four at least.
template <class T> inline constexpr unsigned decoded_each = sizeof(T) == 2 ? 32 : 16;
template <class T> inline constexpr unsigned decoded_width = sizeof(T) == 2 ? 8 : 4;

// Value of the code whose `bits` begin at bit `at` of a word. Behind the exponent of 2^23 a mantissa counts ones: a code
// that lies in it is a float after one instruction, and moved down and freed of the 2^23 after another, exactly.
template <unsigned bits, class Coder>
__device__ inline float value_in(const Coder& coder, std::uint32_t word, unsigned at) {
    constexpr std::uint32_t ones = (1u << bits) - 1;
    if constexpr (requires { coder.value_at(1.0f); }) {
        const unsigned away = at + bits > 23 ? 16 : 0, place = at - away;
        // nvcc makes two instructions of what is not written as one.
        std::uint32_t raised = 0;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"  // (a & b) | c
            : "=r"(raised)
            : "r"(word >> away), "r"(ones << place), "r"(__float_as_uint(0x1p23f)));
        const float down = 1.0f / static_cast<float>(1u << place);
        return coder.value_at(__fmaf_rn(__uint_as_float(raised), down, -0x1p23f * down));
    } else {
        return coder.value((word >> at) & ones);
    }
}

// A whole bucket of 16-bit elements at 16 bytes: codes of a chunk are one word at a multiple of its bytes.
template <unsigned bits, class O>
__device__ inline void decode_words(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    using meta = typename decltype(op.scheme)::meta;
    using word = std::conditional_t<bits == 2, std::uint16_t, std::conditional_t<bits == 4, std::uint32_t, uint2>>;
    constexpr unsigned chunks = decoded_each<T> / chunk;
    const auto stride = static_cast<int>(threads);
    const auto* const from = reinterpret_cast<const word*>(op.wire.data() + p.s.codes) + (p.first / chunk + p.lane);
    word codes[chunks];
#pragma unroll
    for (int k = 0; k < static_cast<int>(chunks); ++k) { codes[k] = from[stride * k]; }
    const auto coder = op.scheme.coder(*reinterpret_cast<const meta*>(op.wire.data() + p.meta), bits);
    T* const out = op.out.data() + (p.s.offset + p.first) + p.lane * chunk;
#pragma unroll
    for (int k = 0; k < static_cast<int>(chunks); ++k) {
        std::uint32_t pairs[chunk / 2];
#pragma unroll
        for (unsigned j = 0; j < chunk / 2; ++j) {
            const auto number = [&](unsigned i) {
                const unsigned at = i * bits;
                if constexpr (bits == 8) {
                    return op.scaled(value_in<bits>(coder, at < 32 ? codes[k].x : codes[k].y, at % 32));
                } else {
                    return op.scaled(value_in<bits>(coder, codes[k], at));
                }
            };
            pairs[j] = tutti::detail::rounded_pair<T>(number(2 * j), number(2 * j + 1));
        }
        store_some<true>(reinterpret_cast<std::uint32_t*>(out + stride * k * static_cast<int>(chunk)), 0, true, pairs);
    }
}

template <bool whole, class O>
__device__ inline void decode_place(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    constexpr unsigned width = decoded_width<T>, each = decoded_each<T>;
    T* const out = op.out.data() + p.s.offset + p.first;
    const bool aligned = packs_at(out);
    const bucket_decoder decoder(op.scheme, op.wire.data(), p);
    std::uint32_t codes[each / 4];
    const auto index = [&](unsigned k) { return (p.lane + threads * (k / width)) * width + k % width; };
#pragma unroll
    for (unsigned k = 0; k < each; k += 4) {
        codes[k / 4] = whole || static_cast<int>(index(k)) < p.n ? decoder.four(index(k)) : 0;
    }
#pragma unroll
    for (unsigned k = 0; k < each; k += width) {
        T values[width];
#pragma unroll
        for (unsigned j = 0; j < width; ++j) { values[j] = op.result(decoder.value(codes[(k + j) / 4], j % 4)); }
        store_some<whole>(out + index(k), p.n - static_cast<int>(index(k)), aligned, values);
    }
}

template <bool whole, class O>
__device__ inline void add_place(const O& op, const bucket_place& p, std::size_t stride, unsigned threads) {
    float* const sum = op.sum.data() + p.s.offset + p.first;
    const bool aligned = packs_at(sum);
    constexpr unsigned fours = decoded_each<float> / 4;
    float sums[fours][4];
    const auto index = [&](unsigned k) { return (p.lane + threads * k) * 4; };
    const auto count = [&](unsigned k) { return p.n - static_cast<int>(index(k)); };
#pragma unroll
    for (unsigned k = 0; k < fours; ++k) { load_some<whole>(sum + index(k), count(k), aligned, sums[k]); }
#pragma unroll 1
    for (std::size_t w = 0; w < op.count; ++w) {
        const bucket_decoder decoder(op.scheme, op.wires.data() + w * stride, p);
        std::uint32_t codes[fours];
#pragma unroll
        for (unsigned k = 0; k < fours; ++k) { codes[k] = whole || count(k) > 0 ? decoder.four(index(k)) : 0; }
#pragma unroll
        for (unsigned k = 0; k < fours; ++k) {
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                sums[k][j] = (exact(sums[k][j]) + exact(decoder.value(codes[k], j))).value;
            }
        }
    }
#pragma unroll
    for (unsigned k = 0; k < fours; ++k) { store_some<whole>(sum + index(k), count(k), aligned, sums[k]); }
}

template <class O>
__global__ void __launch_bounds__(bucket_threads)
    decode_kernel(const __grid_constant__ O op, const __grid_constant__ segment_table table, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n != static_cast<int>(threads * decoded_each<T>) || !packs_at(op.out.data() + p.s.offset + p.first)) {
        return decode_place<false>(op, p, threads);
    }
    if constexpr (sizeof(T) == 2) {
        switch (p.s.bits) {
        case 2: return decode_words<2>(op, p, threads);
        case 4: return decode_words<4>(op, p, threads);
        case 8: return decode_words<8>(op, p, threads);
        default: break;
        }
    }
    decode_place<true>(op, p, threads);
}

template <class O>
__global__ void __launch_bounds__(bucket_threads, 8)
    add_kernel(const __grid_constant__ O op, const __grid_constant__ segment_table table, std::size_t stride,
               unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * decoded_each<float>) && packs_at(op.sum.data() + p.s.offset + p.first)) {
        add_place<true>(op, p, stride, threads);
    } else {
        add_place<false>(op, p, stride, threads);
    }
}

}  // namespace tutti::compress::detail
