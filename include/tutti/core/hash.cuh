// The device side of core/hash.
// Needs core/cuda_run and nvcc.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // hashes

#include <tutti/core/cuda_run.cuh>  // fill, start
#include <tutti/core/hash.hpp>      // hash_operation

namespace tutti {

namespace detail {

// A word of eight bytes at any address, by the largest loads that its alignment allows.
template <class Part> __device__ inline std::uint64_t word_at(const std::byte* at) {
    std::uint64_t word = 0;
#pragma unroll
    for (unsigned k = 0; k < 8 / sizeof(Part); ++k) {
        word |= static_cast<std::uint64_t>(reinterpret_cast<const Part*>(at)[k]) << (8 * sizeof(Part) * k);
    }
    return word;
}

// Bytes of a block follow one another in its hash, so a thread has a block. Blocks lie far apart: a warp reads 128
// bytes of each of its 32 blocks at a time, together, into shared memory, while the 128 before are hashed.
template <class O, class Part> __global__ void __launch_bounds__(128) hash_blocks(const O op) {
    constexpr unsigned words = 16;         // of a block at a time
    constexpr unsigned rows = 32 / words;  // that the lanes of a warp read at once
    constexpr unsigned warps = 4;
    constexpr unsigned all = 0xffffffffu;
    __shared__ std::uint64_t shared[warps][32][words + 1];  // a column more keeps rows in different banks
    auto& tile = shared[threadIdx.x / 32];
    const unsigned lane = threadIdx.x % 32;
    const std::size_t count = op.blocks();
    const std::size_t first = (std::size_t{blockIdx.x} * warps + threadIdx.x / 32) * 32;
    if (first >= count) { return; }
    const std::size_t end_word = op.in.size() / 8;
    constexpr std::size_t words_of_block = O::block / 8;

    // Lane l reads word l % 16 of rows l / 16, l / 16 + 2, ...
    const std::size_t mine = (first + lane / words) * words_of_block + lane % words;
    std::uint64_t next[words];  // 32 rows of `words` words by 32 lanes
    const auto read = [&](std::size_t at) {
#pragma unroll
        for (unsigned k = 0; k < words; ++k) {
            const std::size_t w = mine + at + k * rows * words_of_block;
            next[k] = w < end_word ? word_at<Part>(op.in.data() + 8 * w) : 0;
        }
    };
    const std::size_t block = first + lane;
    const std::size_t begin = block * words_of_block;
    std::uint64_t h = O::seed_of(block);
    read(0);
    for (std::size_t at = 0; at < words_of_block; at += words) {
#pragma unroll
        for (unsigned k = 0; k < words; ++k) { tile[lane / words + rows * k][lane % words] = next[k]; }
        __syncwarp(all);
        if (at + words < words_of_block) { read(at + words); }
#pragma unroll
        for (unsigned k = 0; k < words; ++k) {
            if (begin + at + k < end_word) { h = hash_word(h, tile[lane][k]); }
        }
        __syncwarp(all);
    }
    if (block + 1 == count) {  // what is left of the last word
        for (std::size_t i = 8 * end_word; i < op.in.size(); ++i) { h = hash_byte(h, op.in.data()[i]); }
    }
    if (block >= count) { h = 0; }
    // Sums of integers wrap and do not depend on their order.
    for (unsigned apart = 16; apart != 0; apart /= 2) { h += __shfl_down_sync(all, h, apart); }
    if (lane == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(op.out.data()), static_cast<unsigned long long>(h));
    }
}

}  // namespace detail

/// Determinism  the host's value. Cost: one read of the input.
inline void launch(const cuda_queue& q, const hash_operation<device_memory>& op) {
    using operation = hash_operation<device_memory>;
    fill(q, op.out, std::uint64_t{0});
    const auto address = reinterpret_cast<std::uintptr_t>(op.in.data());
    auto* const kernel = address % 8 == 0   ? detail::hash_blocks<operation, std::uint64_t>
                         : address % 4 == 0 ? detail::hash_blocks<operation, std::uint32_t>
                                            : detail::hash_blocks<operation, std::uint8_t>;
    detail::start(q, op.name, kernel, op.blocks(), 128, op);
}

}  // namespace tutti
