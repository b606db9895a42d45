// sparse_search: the device's search for what a segment sends: candidates of one pass, and the digits of their
// magnitudes. Needs core/cuda_run, CUB and nvcc.
// A sample tells a magnitude that about twice the wanted elements reach. One pass collects those that do (candidates);
// their digits are counted, highest first, until the last magnitude that is sent is known, as a radix select does.
// Where there are too many candidates, or too few, all elements take their place.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // grades

#include <cub/block/block_scan.cuh>  // sums before a thread

#include <tutti/compress/detail/magnitude.hpp>      // digits
#include <tutti/compress/detail/segment_batch.cuh>  // segments in a kernel
#include <tutti/compress/detail/sparse_wire.hpp>    // sparse_format
#include <tutti/core/cuda_run.cuh>                  // packs
#include <tutti/core/philox.hpp>                    // random_stream

namespace tutti::compress::detail {

using count_type = unsigned long long;  // of atomicAdd

inline constexpr unsigned tile_size = 8192;  // elements of which a block collects
inline constexpr unsigned selection_threads = 256;
inline constexpr unsigned tile_rounds = tile_size / selection_threads / 4;
inline constexpr unsigned digits_shift = digits[0].shift;
inline constexpr unsigned whole_block = 1024;  // threads of kernels with a block a segment

struct encode_row {
    std::size_t offset;
    std::size_t size;
    std::size_t wanted;
    std::size_t extra;       // room for more of the last grade than wanted
    std::size_t candidates;  // first in the scratch
    std::size_t room;        // for candidates; 0: all elements are
    std::size_t wire;
    sparse_format format;
    random_stream sample;
    unsigned rank;  // in the sample
    unsigned lead;  // elements by which the first tile begins before the segment, so that tiles are aligned

    [[nodiscard]] __device__ std::size_t element(std::size_t tile, unsigned place) const {
        return tile * tile_size + place - lead;  // wraps before the first
    }
};

// What is known of a segment so far.
struct search_state {
    count_type found;   // candidates
    count_type wanted;  // place among those of the grade; at last, how many of the grade are sent
    std::uint32_t grade;
    std::uint32_t lowest;  // grade of the first digit from which on candidates are collected
};
struct tile_candidates {
    count_type first;
    unsigned count;
};
struct tile_counts {
    unsigned larger;  // than the last grade
    unsigned equal;
};
struct alignas(8) candidate {  // one word
    unsigned place;            // in its tile
    float value;
};
struct selected_counts {
    count_type larger;
    count_type equal;
    friend __device__ selected_counts operator+(selected_counts a, selected_counts b) {
        return {a.larger + b.larger, a.equal + b.equal};
    }
};

struct encode_scratch {
    search_state* search;
    count_type* bins;  // of each segment: most_bins
    candidate* candidates;
    tile_candidates* tiles;
    tile_counts* here;
    selected_counts* before;
};

template <class T> struct device_elements {
    const T* in;
    float* owed;  // null: none

    [[nodiscard]] __device__ float unformed(std::size_t i) const {
        return owed == nullptr ? formed(in[i]) : formed(in[i], owed[i]);
    }
    [[nodiscard]] __device__ float operator()(std::size_t i) const { return owed == nullptr ? formed(in[i]) : owed[i]; }
};

template <bool exact> [[nodiscard]] __device__ bool all_are_candidates(const encode_row& row, const search_state& s) {
    return row.room == 0 || s.found > row.room || (exact && s.found < row.wanted);
}

// The bin of the wanted-th from above, by a whole block. Less than wanted: the bin `lowest`.
struct found_bin {
    std::uint32_t bin;
    count_type wanted;
};
template <class Count>
[[nodiscard]] __device__ found_bin find_bin(const Count* bins, unsigned size, count_type wanted, std::uint32_t lowest) {
    using scan = cub::BlockScan<count_type, whole_block, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename scan::TempStorage storage;
    __shared__ found_bin result;
    if (threadIdx.x == 0) { result = {lowest, wanted}; }
    const unsigned each = size < whole_block ? 1 : size / whole_block;
    const unsigned first = threadIdx.x * each;  // from above
    count_type own = 0;
    if (first < size) {
        for (unsigned k = 0; k < each; ++k) { own += bins[size - 1 - first - k]; }
    }
    count_type before = 0;
    scan(storage).ExclusiveSum(own, before);
    __syncthreads();
    if (before < wanted && wanted <= before + own) {
        std::size_t rest = wanted - before;
        const std::uint32_t bin = bin_of(bins, size - 1 - first, 0, rest);
        result = {bin, rest};
    }
    __syncthreads();
    return result;
}

template <bool exact, class T>
__global__ void __launch_bounds__(whole_block)
    take_sample(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch) {
    __shared__ unsigned bins[most_bins];
    const encode_row& row = batch.rows[blockIdx.x];
    std::uint32_t lowest = 1;
    if (row.rank != 0) {
        constexpr digit d = digits[0];
        for (unsigned i = threadIdx.x; i < most_bins; i += whole_block) { bins[i] = 0; }
        __syncthreads();
        for (unsigned j = threadIdx.x; j < sample_size; j += whole_block) {
            const std::size_t at = sample_position(row.sample, row.size, j);
            atomicAdd(&bins[d.of(magnitude(x.unformed(row.offset + at)))], 1u);
        }
        __syncthreads();
        const std::uint32_t bin = find_bin(bins, most_bins, row.rank, 0).bin;
        lowest = bin == 0 ? 1 : bin;
    }
    if (threadIdx.x == 0) { scratch.search[blockIdx.x] = {0, row.wanted, 0, lowest}; }
}

template <class T> __device__ inline void load_four(const T* from, T (&to)[4]) {
    constexpr unsigned width = sizeof(T) <= 4 ? 4 : 2;
#pragma unroll
    for (unsigned k = 0; k < 4; k += width) {
        tutti::detail::pack<T, width> p;
        p.load(from + k);
#pragma unroll
        for (unsigned j = 0; j < width; ++j) { to[k + j] = p.of[j]; }
    }
}

// A thread's part of a tile, formed: rounds of four neighbors. Eight loads come before the first use.
template <bool feedback, class T>
__device__ inline void form_whole(const device_elements<T>& x, std::size_t at, float (&value)[tile_rounds][4]) {
    constexpr unsigned ahead = feedback ? tile_rounds / 2 : tile_rounds;
#pragma unroll
    for (unsigned first = 0; first < tile_rounds; first += ahead) {
        T in[ahead][4];
        float owed[ahead][4];
#pragma unroll
        for (unsigned k = 0; k < ahead; ++k) {
            load_four(x.in + at + (first + k) * 128, in[k]);
            if constexpr (feedback) { load_four<float>(x.owed + at + (first + k) * 128, owed[k]); }
        }
#pragma unroll
        for (unsigned k = 0; k < ahead; ++k) {
            tutti::detail::pack<float, 4> p;
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                if constexpr (feedback) {
                    p.of[j] = formed(in[k][j], owed[k][j]);
                } else {
                    p.of[j] = formed(in[k][j]);
                }
                value[first + k][j] = p.of[j];
            }
            if constexpr (feedback) { p.store(x.owed + at + (first + k) * 128); }
        }
    }
}

// Sum of the four bytes.
[[nodiscard]] __device__ inline unsigned sum_of_bytes(unsigned x) {
    const unsigned pairs = (x & 0x00ff00ffu) + ((x >> 8) & 0x00ff00ffu);
    return (pairs & 0xffffu) + (pairs >> 16);
}

// Forms x, and collects candidates: those of a tile together and in order, the tiles in any.
template <bool feedback, class T>
__global__ void __launch_bounds__(selection_threads, 3)
    collect(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch,
            bool packed) {
    constexpr unsigned warps = selection_threads / 32;
    __shared__ unsigned found_by[warps];
    __shared__ count_type begin;
    const unsigned r = batch.row_of(blockIdx.x);
    const encode_row& row = batch.rows[r];
    if (row.room == 0 && !feedback) { return; }
    const std::size_t tile = blockIdx.x - batch.first_block[r];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned place = warp * (tile_rounds * 128) + lane * 4;
    const std::size_t first = row.element(tile, place);
    const std::uint32_t low = scratch.search[r].lowest << digits_shift;

    float value[tile_rounds][4];
    const bool inside = tile * tile_size >= row.lead && (tile + 1) * tile_size <= row.size + row.lead;
    if (packed && inside) {
        form_whole<feedback>(x, row.offset + first, value);
    } else {
#pragma unroll
        for (unsigned k = 0; k < tile_rounds; ++k) {
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                const std::size_t i = first + k * 128 + j;
                value[k][j] = i < row.size ? x.unformed(row.offset + i) : 0;
                if (feedback && i < row.size) { x.owed[row.offset + i] = value[k][j]; }
            }
        }
    }
    if (row.room == 0) { return; }

    // No bound is above what is not finite, nor as low as the zeros outside of the segment.
    unsigned hits = 0;
#pragma unroll
    for (unsigned k = 0; k < tile_rounds; ++k) {
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            hits |= (__builtin_bit_cast(std::uint32_t, value[k][j]) & 0x7fffffffu) >= low ? 1u << (4 * k + j) : 0u;
        }
    }
    // How many each round has, in the bytes of two words, and how many the lanes before have of them.
    static_assert(tile_rounds == 8);
    const unsigned pairs = hits - ((hits >> 1) & 0x55555555u);
    const unsigned fours = (pairs & 0x33333333u) + ((pairs >> 2) & 0x33333333u);
    unsigned in_rounds[2] = {fours & 0x0f0f0f0fu, (fours >> 4) & 0x0f0f0f0fu};  // 0, 2, 4, 6 and 1, 3, 5, 7
    unsigned before_in[2], all_in[2];
#pragma unroll
    for (unsigned w = 0; w < 2; ++w) {
        unsigned sum = in_rounds[w];
#pragma unroll
        for (unsigned distance = 1; distance < 32; distance *= 2) {
            const unsigned other = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) { sum += other; }
        }
        all_in[w] = __shfl_sync(0xffffffffu, sum, 31);
        before_in[w] = sum - in_rounds[w];
    }
    if (lane == 0) { found_by[warp] = sum_of_bytes(all_in[0]) + sum_of_bytes(all_in[1]); }
    __syncthreads();
    unsigned before = 0, found = 0;
#pragma unroll
    for (unsigned w = 0; w < warps; ++w) {
        before += w < warp ? found_by[w] : 0;
        found += found_by[w];
    }
    if (threadIdx.x == 0) {
        begin = atomicAdd(&scratch.search[r].found, static_cast<count_type>(found));
        scratch.tiles[blockIdx.x] = {begin, found};
    }
    __syncthreads();
    if (begin + found > row.room) { return; }
    candidate* to = scratch.candidates + row.candidates + begin + before;
#pragma unroll
    for (unsigned k = 0; k < tile_rounds; ++k) {
        candidate* next = to + ((before_in[k % 2] >> (8 * (k / 2))) & 255u);
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            if ((hits >> (4 * k + j) & 1u) != 0) { *next++ = {place + k * 128 + j, value[k][j]}; }
        }
        to += (all_in[k % 2] >> (8 * (k / 2))) & 255u;
    }
}

// Counts a digit of what agrees with the digits before it.
template <bool exact, unsigned stage, class T>
__global__ void __launch_bounds__(selection_threads)
    count_digit(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch) {
    constexpr digit d = digits[stage];
    constexpr unsigned size = 1u << d.bits;
    __shared__ unsigned bins[size];
    const unsigned r = batch.row_of(blockIdx.x);
    const encode_row& row = batch.rows[r];
    const search_state& search = scratch.search[r];
    const bool all = all_are_candidates<exact>(row, search);
    // The first digit of all from a bound on; the others of what has the same digits before.
    const std::uint32_t like = stage > 0 ? search.grade : exact && all ? 0 : search.lowest << d.shift;
    const std::size_t n = all ? row.size : search.found;
    const std::size_t step = std::size_t{batch.first_block[r + 1] - batch.first_block[r]} * selection_threads;
    const candidate* const candidates = scratch.candidates + row.candidates;
    for (unsigned i = threadIdx.x; i < size; i += selection_threads) { bins[i] = 0; }
    __syncthreads();
#pragma unroll 4
    for (std::size_t i = std::size_t{blockIdx.x - batch.first_block[r]} * selection_threads + threadIdx.x; i < n;
         i += step) {
        const std::uint32_t m = magnitude(all ? x(row.offset + i) : candidates[i].value);
        if (stage > 0 ? m >> (d.shift + d.bits) == like : m >= like) { atomicAdd(&bins[d.of(m)], 1u); }
    }
    __syncthreads();
    count_type* const to = scratch.bins + r * most_bins;
    for (unsigned i = threadIdx.x; i < size; i += selection_threads) {
        if (bins[i] != 0) { atomicAdd(&to[i], static_cast<count_type>(bins[i])); }
    }
}

// Settles a digit, and clears the counters for the next.
template <unsigned stage, bool last>
__global__ void __launch_bounds__(whole_block)
    settle_digit(const __grid_constant__ segment_batch<encode_row> batch, encode_scratch scratch) {
    constexpr digit d = digits[stage];
    constexpr unsigned size = 1u << d.bits;
    count_type* const bins = scratch.bins + blockIdx.x * most_bins;
    search_state& search = scratch.search[blockIdx.x];
    const found_bin f = find_bin(bins, size, search.wanted, stage == 0 ? search.lowest : 0);
    for (unsigned i = threadIdx.x; i < size; i += whole_block) { bins[i] = 0; }
    if (threadIdx.x == 0) {
        search.grade = search.grade << d.bits | f.bin;
        search.wanted = f.wanted + (last ? batch.rows[blockIdx.x].extra : 0);
    }
}

}  // namespace tutti::compress::detail
