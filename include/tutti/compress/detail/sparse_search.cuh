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
struct tile_state {
    count_type candidates;  // where they begin
    count_type larger;      // before this tile
    count_type equal;
    unsigned found;
    unsigned larger_here;
    unsigned equal_here;
};
struct candidate {
    unsigned place;  // in its tile
    float value;
};

struct encode_scratch {
    search_state* search;
    count_type* bins;  // of each segment: most_bins
    tile_state* tiles;
    candidate* candidates;
};

template <class T> struct device_elements {
    const T* in;
    float* owed;  // null: none

    [[nodiscard]] __device__ float unformed(std::size_t i) const {
        return owed == nullptr ? formed(in[i]) : formed(in[i], owed[i]);
    }
    [[nodiscard]] __device__ float operator()(std::size_t i) const { return owed == nullptr ? formed(in[i]) : owed[i]; }
};

[[nodiscard]] __device__ inline unsigned warp_sum(unsigned x) {
    for (int distance = 16; distance > 0; distance /= 2) { x += __shfl_xor_sync(0xffffffffu, x, distance); }
    return x;
}

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

template <class T, class To> __device__ inline void load_four(const T* from, To (&to)[4]) {
    constexpr unsigned width = sizeof(T) <= 4 ? 4 : 2;
#pragma unroll
    for (unsigned k = 0; k < 4; k += width) {
        tutti::detail::pack<T, width> p;
        p.load(from + k);
#pragma unroll
        for (unsigned j = 0; j < width; ++j) { to[k + j] = p.of[j]; }
    }
}

// Forms x, and collects candidates: those of a tile together and in order, the tiles in any.
template <bool packed, class T>
__global__ void __launch_bounds__(selection_threads)
    collect(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch) {
    constexpr unsigned warps = selection_threads / 32;
    constexpr unsigned rounds = tile_size / selection_threads / 4;
    __shared__ unsigned found_by[warps];
    __shared__ count_type begin;
    const unsigned r = batch.row_of(blockIdx.x);
    const encode_row& row = batch.rows[r];
    if (row.room == 0 && x.owed == nullptr) { return; }
    const std::size_t tile = blockIdx.x - batch.first_block[r];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned place = warp * (rounds * 128) + lane * 4;

    float value[rounds][4];
#pragma unroll
    for (unsigned k = 0; k < rounds; ++k) {
        const std::size_t i = row.element(tile, place + k * 128);
        if (packed && i < row.size && row.size - i >= 4) {
            T in[4];
            load_four(x.in + row.offset + i, in);
            if (x.owed == nullptr) {
#pragma unroll
                for (unsigned j = 0; j < 4; ++j) { value[k][j] = formed(in[j]); }
            } else {
                float owed[4];
                load_four(x.owed + row.offset + i, owed);
#pragma unroll
                for (unsigned j = 0; j < 4; ++j) { value[k][j] = formed(in[j], owed[j]); }
            }
        } else {
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) { value[k][j] = i + j < row.size ? x.unformed(row.offset + i + j) : 0; }
        }
    }
    if (x.owed != nullptr) {
#pragma unroll
        for (unsigned k = 0; k < rounds; ++k) {
            const std::size_t i = row.element(tile, place + k * 128);
            if (packed && i < row.size && row.size - i >= 4) {
                tutti::detail::pack<float, 4> p;
#pragma unroll
                for (unsigned j = 0; j < 4; ++j) { p.of[j] = value[k][j]; }
                p.store(x.owed + row.offset + i);
            } else {
#pragma unroll
                for (unsigned j = 0; j < 4; ++j) {
                    if (i + j < row.size) { x.owed[row.offset + i + j] = value[k][j]; }
                }
            }
        }
    }
    if (row.room == 0) { return; }

    // Zeros outside of the segment are below every bound.
    const std::uint32_t low = scratch.search[r].lowest << digits[0].shift;
    unsigned hits = 0;
#pragma unroll
    for (unsigned k = 0; k < rounds; ++k) {
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) { hits |= (magnitude(value[k][j]) >= low ? 1u : 0u) << (4 * k + j); }
    }
    const unsigned own = warp_sum(static_cast<unsigned>(__popc(hits)));
    if (lane == 0) { found_by[warp] = own; }
    __syncthreads();
    unsigned before = 0, found = 0;
#pragma unroll
    for (unsigned w = 0; w < warps; ++w) {
        before += w < warp ? found_by[w] : 0;
        found += found_by[w];
    }
    if (threadIdx.x == 0) {
        begin = atomicAdd(&scratch.search[r].found, static_cast<count_type>(found));
        tile_state& state = scratch.tiles[blockIdx.x];
        state.candidates = begin;
        state.found = found;
    }
    __syncthreads();
    if (begin + found > row.room) { return; }
    candidate* to = scratch.candidates + row.candidates + begin + before;
    const unsigned earlier = (1u << lane) - 1;
#pragma unroll
    for (unsigned k = 0; k < rounds; ++k) {
        const unsigned mine = (hits >> (4 * k)) & 15u;
        const auto count = static_cast<unsigned>(__popc(mine));
        const unsigned ones = __ballot_sync(0xffffffffu, (count & 1u) != 0);
        const unsigned twos = __ballot_sync(0xffffffffu, (count & 2u) != 0);
        const unsigned fours = __ballot_sync(0xffffffffu, (count & 4u) != 0);
        candidate* next = to + __popc(ones & earlier) + 2 * __popc(twos & earlier) + 4 * __popc(fours & earlier);
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            if ((mine >> j & 1u) != 0) { *next++ = {place + k * 128 + j, value[k][j]}; }
        }
        to += __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
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
