// bits: codes of 1 to 8 bits, eight at a time, packed behind each other without gaps.
// Needs core/config. Eight codes of b bits are b bytes: code j at bits [j b, (j + 1) b) of a little-endian number, so
// every eight of them begin at a byte.
#pragma once

#include <bit>      // endian
#include <cstddef>  // size_t
#include <cstdint>  // words
#include <cstring>  // memcpy

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE

namespace tutti::compress::detail {

static_assert(std::endian::native == std::endian::little, "wires are written as they lie in memory");

/// Elements whose codes are packed together.
inline constexpr std::size_t chunk = 8;
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t chunks_of(std::size_t elements) noexcept {
    return elements / chunk + (elements % chunk != 0 ? 1 : 0);
}

// One step of packing: in each lane of 2 * `lane_half` bits, the upper half's low `bits` move down onto those of the lower.
struct bit_lanes {
    std::uint64_t low, high;
    unsigned shift;
    constexpr bit_lanes(unsigned lane_half, unsigned bits) noexcept : low(0), high(0), shift(lane_half - bits) {
        const std::uint64_t ones = (std::uint64_t{1} << bits) - 1;
        for (unsigned at = 0; at < 64; at += 2 * lane_half) { low |= ones << at; }
        high = low << bits;
    }
    [[nodiscard]] constexpr std::uint64_t together(std::uint64_t v) const noexcept {
        return (v & low) | ((v >> shift) & high);
    }
    [[nodiscard]] constexpr std::uint64_t apart(std::uint64_t v) const noexcept {
        return (v & low) | ((v & high) << shift);
    }
};

/// Packs bytes in place: codes[j] < 2^bits; `bits` bytes a chunk come to lie behind each other from codes[0] on.
/// Semantics  `codes` holds whole chunks. Cost: nine operations a chunk that vectorize, and a store.
inline void pack(std::uint8_t* codes, std::size_t chunks, unsigned bits) noexcept {
    if (bits == chunk) { return; }
    const bit_lanes first(8, bits), second(16, 2 * bits), third(32, 4 * bits);
    for (std::size_t c = 0; c < chunks; ++c) {
        std::uint64_t v = 0;
        std::memcpy(&v, codes + c * chunk, chunk);
        v = third.together(second.together(first.together(v)));
        std::memcpy(codes + c * chunk, &v, chunk);
    }
    for (std::size_t c = 1; c < chunks;
         ++c) {  // what a store writes too much, the next one overwrites or is read by none
        std::uint64_t v = 0;
        std::memcpy(&v, codes + c * chunk, chunk);
        std::memcpy(codes + c * bits, &v, chunk);
    }
}

/// The reverse: `packed` holds `chunks` times `bits` bytes, and `chunk` more that may be read; codes one a byte.
inline void unpack(const std::uint8_t* packed, std::uint8_t* codes, std::size_t chunks, unsigned bits) noexcept {
    const bit_lanes first(8, bits), second(16, 2 * bits), third(32, 4 * bits);
    for (std::size_t c = 0; c < chunks; ++c) {
        std::uint64_t v = 0;
        std::memcpy(&v, packed + c * bits, chunk);
        v = first.apart(second.apart(third.apart(v)));
        std::memcpy(codes + c * chunk, &v, chunk);
    }
}

// a b + c. nvcc makes two instructions of it where it sees that b is a power of two.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::uint32_t product_and_sum(std::uint32_t a, std::uint32_t b,
                                                                     std::uint32_t c) noexcept {
#if defined(__CUDA_ARCH__)
    std::uint32_t r = 0;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
#else
    return a * b + c;
#endif
}

/// Codes j and j + 4 of a chunk in the halves of word j.
using paired_codes = std::uint32_t[chunk / 2];

/// A chunk's codes in two words, two codes in each half: few instructions a code on a device.
struct joined_codes {
    std::uint32_t first, second;

    TUTTI_HOST_DEVICE void join(const paired_codes& codes, unsigned bits) noexcept {
        first = product_and_sum(codes[1], 1u << bits, codes[0]);
        second = product_and_sum(codes[3], 1u << bits, codes[2]);
    }
    /// The chunk's number. Fast where `bits` is a constant.
    [[nodiscard]] TUTTI_HOST_DEVICE std::uint64_t number(unsigned bits) const noexcept {
        if (bits == 4) { return product_and_sum(second, 256, first); }
        const std::uint32_t low = (first & 0xffffu) | (second & 0xffffu) << (2 * bits);
        const std::uint32_t high = first >> 16 | second >> 16 << (2 * bits);
        return low | std::uint64_t{high} << (4 * bits);
    }
};

}  // namespace tutti::compress::detail
