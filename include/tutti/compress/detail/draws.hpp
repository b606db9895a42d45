// draws: 16 random bits for every element of a tensor, and rounding by them.
// Needs core/philox and core/exact. Half a word is enough to choose between two neighbors, and halves the cost of
// generating, which is most of the cost of quantizing.
#pragma once

#include <array>    // blocks
#include <cstddef>  // size_t
#include <cstdint>  // words
#include <cstring>  // memcpy

#if defined(__SSE2__)
#include <immintrin.h>  // products of lanes
#endif

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE
#include <tutti/core/exact.hpp>   // sums that are not fused
#include <tutti/core/philox.hpp>  // random_stream

namespace tutti::compress {

/// How a number between two codes becomes one of them: up or down by chance, so that the mean over many draws is the
/// number (to 2^-16 of the distance), or to the nearer one.
enum class rounding : std::uint8_t { stochastic, nearest };

namespace detail {

/// Half j of a block of random words: that of element 8k + j of the tensor, where the block is the stream's k-th.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t half_of(const std::array<std::uint32_t, 4>& block,
                                                                unsigned j) noexcept {
    return j % 2 == 0 ? block[j / 2] & 0xffffu : block[j / 2] >> 16;
}

// A vector register of words, each in a lane of 64 bits so that products fit, whose upper halves may hold anything.
#if defined(__AVX512F__)
inline constexpr std::size_t lane_bytes = 64;
#elif defined(__AVX2__)
inline constexpr std::size_t lane_bytes = 32;
#else
inline constexpr std::size_t lane_bytes = 16;
#endif
using word_lanes [[gnu::vector_size(lane_bytes)]] = unsigned long long;

// Compilers do not find the instruction for products of lower halves by themselves.
[[nodiscard]] inline word_lanes wide_products(word_lanes a, word_lanes b) noexcept {
#if defined(__AVX512F__)
    return reinterpret_cast<word_lanes>(
        _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<word_lanes>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
    return reinterpret_cast<word_lanes>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    return (a & 0xffffffffull) * (b & 0xffffffffull);
#endif
}

/// halves[i] of elements 8 first_block + i, for `blocks` blocks, one or more, and those that fill up a register with
/// them: at most seven more, for which there must be room.
/// Cost  a fraction of drawing block after block, since blocks are drawn side by side.
inline void draw_halves(const random_stream& stream, std::uint64_t first_block, std::size_t blocks,
                        std::uint16_t* halves) noexcept {
    constexpr std::size_t width = lane_bytes / 8;
    constexpr word_lanes zero{};
    std::size_t b = 0;
    do {
        word_lanes c0 = zero, c2 = zero + stream.stream, c3 = zero + stream.step;
        for (std::size_t l = 0; l < width; ++l) { c0[l] = first_block + b + l; }
        word_lanes c1 = c0 >> 32;
        auto key0 = static_cast<std::uint32_t>(stream.seed), key1 = static_cast<std::uint32_t>(stream.seed >> 32);
        for (int round = 0; round < 10; ++round) {  // as in philox()
            const word_lanes x = wide_products(c0, zero + 0xD2511F53u), y = wide_products(c2, zero + 0xCD9E8D57u);
            c0 = (y >> 32) ^ c1 ^ (zero + key0);
            c1 = y;
            c2 = (x >> 32) ^ c3 ^ (zero + key1);
            c3 = x;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        const word_lanes low = (c0 & 0xffffffffull) | (c1 << 32), high = (c2 & 0xffffffffull) | (c3 << 32);
        for (std::size_t l = 0; l < width; ++l) {
            const std::uint64_t block[] = {low[l], high[l]};
            std::memcpy(halves + 8 * (b + l), block, sizeof block);
        }
        b += width;
    } while (b < blocks);
}

/// A stream whose round keys are there already: constants of a kernel, where they cost no instructions.
struct keyed_stream {
    static constexpr unsigned rounds = 10;
    std::uint32_t keys[rounds][2];
    std::uint32_t step;

    explicit keyed_stream(const random_stream& of) noexcept : keys(), step(of.step) {
        auto key0 = static_cast<std::uint32_t>(of.seed), key1 = static_cast<std::uint32_t>(of.seed >> 32);
        for (auto& key : keys) {
            key[0] = key0;
            key[1] = key1;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
    }
    /// random_stream::block(lower + 2^32 upper) of the tensor.
    [[nodiscard]] TUTTI_HOST_DEVICE std::array<std::uint32_t, 4> block(std::uint32_t lower, std::uint32_t upper,
                                                                       std::uint32_t tensor) const noexcept {
        std::array<std::uint32_t, 4> c{lower, upper, tensor, step};
        for (const auto& key : keys) {
            const std::uint64_t x = tutti::detail::wide_product(0xD2511F53u, c[0]);
            const std::uint64_t y = tutti::detail::wide_product(0xCD9E8D57u, c[2]);
            c = {static_cast<std::uint32_t>(y >> 32) ^ c[1] ^ key[0], static_cast<std::uint32_t>(y),
                 static_cast<std::uint32_t>(x >> 32) ^ c[3] ^ key[1], static_cast<std::uint32_t>(x)};
        }
        return c;
    }
};

/// What raised_by has in its upper half besides the code.
inline constexpr std::uint32_t raised_zero = 0x8700;
/// f in [0, 256) as a fixed-point number of 16 fractional bits, plus `draw`: its upper half, less raised_zero, is f rounded
/// up with the probability of its fraction if `draw` is uniform in [0, 2^16). Whole numbers stay.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t raised_by(float f, std::uint32_t draw) noexcept {
    // From 256 to 512 the last place of a float is 2^-15: the sum's low bits are f as a fixed-point number. Above them
    // is the exponent.
    const auto fixed = __builtin_bit_cast(std::uint32_t, (exact(f) + exact(256.0f)).value);
    return 2 * fixed + draw;
}
/// The codes of two such results, but at most `last`, in the halves of a word. One instruction takes the upper halves,
/// one subtracts and limits them.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t codes_of(std::uint32_t a, std::uint32_t b,
                                                              std::uint32_t last) noexcept {
#if defined(__CUDA_ARCH__)
    constexpr std::uint32_t down = 0x10000u - raised_zero;
    return __viaddmin_u16x2(__byte_perm(a, b, 0x7632), down << 16 | down, last << 16 | last);
#else
    const std::uint32_t x = (a >> 16) - raised_zero, y = (b >> 16) - raised_zero;
    return (x < last ? x : last) | (y < last ? y : last) << 16;
#endif
}
/// As raised_by, of f below 128: the upper byte is f rounded up, and nothing else. `above` is 2^8 times the draw, and what
/// is below that does not matter.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t topped_by(float f, std::uint32_t above) noexcept {
    return 512 * __builtin_bit_cast(std::uint32_t, (exact(f) + exact(256.0f)).value) + above;  // the exponent overflows
}
/// Half j of a block so placed. One instruction each.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t half_above(const std::array<std::uint32_t, 4>& block,
                                                                unsigned j) noexcept {
    if (j % 2 != 0) { return block[j / 2] >> 8; }
#if defined(__CUDA_ARCH__)
    return __byte_perm(block[j / 2], 0, 0x4104);
#else
    return (block[j / 2] & 0xffffu) << 8;
#endif
}
/// Two upper bytes below 128 in the halves of a word.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t tops_of(std::uint32_t a, std::uint32_t b) noexcept {
#if defined(__CUDA_ARCH__)
    std::uint32_t r = 0;
    asm("prmt.b32 %0, %1, %2, 0xf7b3;" : "=r"(r) : "r"(a), "r"(b));  // zeros are copies of the bytes' signs
    return r;
#else
    return a >> 24 | b >> 24 << 16;
#endif
}
/// f in [0, 255] so rounded.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t rounded_by(float f, std::uint32_t draw) noexcept {
    return (raised_by(f, draw) >> 16) & 0xffu;
}
/// To the nearest, halves to even: from 2^23 on the last place of a float is 1.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t rounded_nearest(float f) noexcept {
    return __builtin_bit_cast(std::uint32_t, (exact(f) + exact(0x1p23f)).value) & 0xffu;
}

}  // namespace detail

}  // namespace tutti::compress
