// The device side of compress/detail/sparse_encode: what a segment sends is found in one pass over it, without a wait.
// Needs core/cuda_run, CUB and nvcc.
// A sample tells a magnitude that about twice the wanted elements reach. One pass collects those that do (candidates);
// their digits are counted, highest first, until the last magnitude that is sent is known, as a radix select does; what
// each tile sends is counted and summed up, and written in order. Where there are too many candidates, or too few, all
// elements take their place.
// Not cub::DeviceSelect and DeviceRadixSort: they work on one tensor a call, and would read the elements twice or move
// them all.
#pragma once

#include <algorithm>  // min
#include <cmath>      // sqrt
#include <cstddef>    // size_t, byte
#include <cstdint>    // grades, addresses

#include <cub/block/block_scan.cuh>  // sums before a thread, before a tile

#include <tutti/compress/detail/segment_batch.cuh>  // segments in a kernel
#include <tutti/compress/detail/sparse_encode.hpp>  // the operation
#include <tutti/core/buffer.hpp>                    // scratch

namespace tutti::compress::detail {

using count_type = unsigned long long;  // of atomicAdd

inline constexpr unsigned tile_size = 8192;  // elements of which a block collects
inline constexpr unsigned tile_threads = 256;
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
__global__ void __launch_bounds__(tile_threads)
    collect(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch) {
    constexpr unsigned warps = tile_threads / 32;
    constexpr unsigned rounds = tile_size / tile_threads / 4;
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
__global__ void __launch_bounds__(tile_threads)
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
    const std::size_t step = std::size_t{batch.first_block[r + 1] - batch.first_block[r]} * tile_threads;
    const candidate* const candidates = scratch.candidates + row.candidates;
    for (unsigned i = threadIdx.x; i < size; i += tile_threads) { bins[i] = 0; }
    __syncthreads();
#pragma unroll 4
    for (std::size_t i = std::size_t{blockIdx.x - batch.first_block[r]} * tile_threads + threadIdx.x; i < n;
         i += step) {
        const std::uint32_t m = magnitude(all ? x(row.offset + i) : candidates[i].value);
        if (stage > 0 ? m >> (d.shift + d.bits) == like : m >= like) { atomicAdd(&bins[d.of(m)], 1u); }
    }
    __syncthreads();
    count_type* const to = scratch.bins + r * most_bins;
    for (unsigned i = threadIdx.x; i < size; i += tile_threads) {
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

// Calls use(element, value, magnitude, there) for what a tile has, in order, 32 a time, by a whole warp.
template <bool exact, class T, class Use>
__device__ inline void for_each_of_tile(const encode_row& row, const search_state& search, const tile_state& state,
                                        const encode_scratch& scratch, const device_elements<T>& x, std::size_t tile,
                                        Use use) {
    const bool all = all_are_candidates<exact>(row, search);
    const candidate* const candidates = scratch.candidates + row.candidates + (all ? 0 : state.candidates);
    const unsigned n = all ? tile_size : state.found;
    for (unsigned first = 0; first < n; first += 32) {
        const unsigned at = first + threadIdx.x % 32;
        bool there = at < n;
        const unsigned place = all || !there ? at : candidates[at].place;
        const std::size_t i = row.element(tile, place);
        there = there && i < row.size;
        const float value = !there ? 0 : all ? x(row.offset + i) : candidates[at].value;
        use(i, value, magnitude(value), there);
    }
}

template <bool exact, unsigned shift, class T>
__global__ void __launch_bounds__(tile_threads) count_selected(const __grid_constant__ segment_batch<encode_row> batch,
                                                               device_elements<T> x, encode_scratch scratch) {
    const unsigned tile = (blockIdx.x * tile_threads + threadIdx.x) / 32;
    if (tile >= batch.blocks()) { return; }
    const unsigned r = batch.row_of(tile);
    tile_state& state = scratch.tiles[tile];
    const search_state search = scratch.search[r];
    unsigned larger = 0, equal = 0;
    for_each_of_tile<exact>(batch.rows[r], search, state, scratch, x, tile - batch.first_block[r],
                            [&](std::size_t, float, std::uint32_t m, bool there) {
                                larger += there && m >> shift > search.grade ? 1 : 0;
                                equal += there && m >> shift == search.grade ? 1 : 0;
                            });
    larger = warp_sum(larger);
    equal = warp_sum(equal);
    if (threadIdx.x % 32 == 0) {
        state.larger_here = larger;
        state.equal_here = equal;
    }
}

struct selected_counts {
    count_type larger;
    count_type equal;
    friend __device__ selected_counts operator+(selected_counts a, selected_counts b) {
        return {a.larger + b.larger, a.equal + b.equal};
    }
};

// Sums what tiles send; ends the wire behind its entries.
template <class Row>
__global__ void __launch_bounds__(whole_block)
    sum_tiles(const __grid_constant__ segment_batch<Row> batch, encode_scratch scratch, std::byte* wires) {
    using scan = cub::BlockScan<selected_counts, whole_block, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename scan::TempStorage storage;
    const encode_row& row = batch.rows[blockIdx.x];
    tile_state* const tiles = scratch.tiles + batch.first_block[blockIdx.x];
    const unsigned count = batch.first_block[blockIdx.x + 1] - batch.first_block[blockIdx.x];
    selected_counts total{0, 0};
    constexpr unsigned each = 4;
    for (unsigned first = 0; first < count; first += whole_block * each) {
        selected_counts own[each];
        const unsigned at = first + threadIdx.x * each;
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            own[k] = {0, 0};
            if (at + k < count) { own[k] = {tiles[at + k].larger_here, tiles[at + k].equal_here}; }
        }
        selected_counts sum{0, 0};
        scan(storage).ExclusiveScan(
            own, own, selected_counts{0, 0}, [](selected_counts a, selected_counts b) { return a + b; }, sum);
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            if (at + k < count) {
                tiles[at + k].larger = total.larger + own[k].larger;
                tiles[at + k].equal = total.equal + own[k].equal;
            }
        }
        total = total + sum;
        __syncthreads();
    }
    const count_type quota = scratch.search[blockIdx.x].wanted;
    const count_type entries = total.larger + (total.equal < quota ? total.equal : quota);
    const sparse_format f = row.format;
    auto* const wire = reinterpret_cast<std::uint32_t*>(wires + row.wire);
    if (f.counted && threadIdx.x < 4) {
        wire[threadIdx.x] = threadIdx.x == 0   ? static_cast<std::uint32_t>(entries)
                            : threadIdx.x == 1 ? static_cast<std::uint32_t>(entries >> 32)
                                               : 0;
    }
    const std::size_t width = f.wide ? 2 : 1;
    for (std::size_t i = f.indices_at() / 4 + entries * width + threadIdx.x; i < f.values_at() / 4; i += whole_block) {
        wire[i] = 0;
    }
    for (std::size_t i = f.values_at() / 4 + entries + threadIdx.x; i < f.bytes() / 4; i += whole_block) {
        wire[i] = 0;
    }
}

template <bool exact, unsigned shift, class T>
__global__ void __launch_bounds__(tile_threads)
    write_entries(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch,
                  std::byte* wires) {
    const unsigned tile = (blockIdx.x * tile_threads + threadIdx.x) / 32;
    if (tile >= batch.blocks()) { return; }
    const unsigned r = batch.row_of(tile);
    const encode_row& row = batch.rows[r];
    const tile_state& state = scratch.tiles[tile];
    const search_state search = scratch.search[r];
    if (state.larger_here + state.equal_here == 0) { return; }  // what is not finite is always one of them
    const unsigned earlier = (1u << threadIdx.x % 32) - 1;
    count_type larger = state.larger, equal = state.equal;
    for_each_of_tile<exact>(row, search, state, scratch, x, tile - batch.first_block[r],
                            [&](std::size_t i, float value, std::uint32_t m, bool there) {
                                const bool is_larger = there && m >> shift > search.grade;
                                const bool is_equal = there && m >> shift == search.grade;
                                const unsigned larger_ones = __ballot_sync(0xffffffffu, is_larger);
                                const unsigned equal_ones = __ballot_sync(0xffffffffu, is_equal);
                                const count_type equal_before = equal + __popc(equal_ones & earlier);
                                const bool sent = is_larger || (is_equal && equal_before < search.wanted);
                                if (sent) {
                                    const count_type entry =
                                        larger + __popc(larger_ones & earlier) +
                                        (equal_before < search.wanted ? equal_before : search.wanted);
                                    row.format.put(wires + row.wire, entry, i, sent_value(value));
                                }
                                if (x.owed != nullptr && (sent || (there && m == not_finite))) {
                                    x.owed[row.offset + i] = 0;
                                }
                                larger += __popc(larger_ones);
                                equal += __popc(equal_ones);
                            });
}

/// Determinism  the host's bytes and bits. Cost: one pass; where all elements are candidates five more for an exact
///              scheme, three for others. Twelve launches, or eight, for each 32 tensors. No wait.
/// Scratch      about 0.3 bytes an element at 1 %.
template <class C, floating_element T>
void launch(const cuda_queue& q, const sparse_encode_operation<C, T, device_memory>& op) {
    expect_aligned(C::name, op.wire.data());
    constexpr bool exact = C::exact;
    constexpr unsigned shift = exact ? 0 : digits[0].shift;
    const device_elements<T> x{op.in.data(), op.residual.empty() ? nullptr : op.residual.data()};
    constexpr std::size_t aligned = std::min<std::size_t>(16, 4 * sizeof(T));
    const bool packed =
        reinterpret_cast<std::uintptr_t>(x.in) % aligned == 0 && reinterpret_cast<std::uintptr_t>(x.owed) % 16 == 0;
    std::size_t candidates = 0;
    const auto describe = [&](segment_batch<encode_row>& batch, const segment& s, std::size_t wire) {
        if (batch.count == 0) { candidates = 0; }
        const std::size_t k = kept(C::name, s);
        const std::size_t rank = sample_rank(s.size(), k);
        // Six deviations of what a sample of that rank stands for.
        const double share = rank == 0 ? 0 : (static_cast<double>(rank) + 6 * std::sqrt(static_cast<double>(rank)) + 8);
        const auto room = static_cast<std::size_t>(share / sample_size * static_cast<double>(s.size()));
        const auto lead = static_cast<unsigned>(s.offset % 4);
        batch.add({s.offset, s.size(), k, C::capacity(k) - k, candidates, room, wire, op.scheme.format(s), op.sample(s),
                   static_cast<unsigned>(rank), lead},
                  blocks_for(s.size() + lead, tile_size));
        candidates += room;
    };
    for_each_batch<encode_row>(
        op.all, [&](const segment& s) { return op.scheme.format(s).bytes(); }, describe,
        [&](const segment_batch<encode_row>& tiles) {
            const buffer<search_state, cuda_queue> search(q, tiles.count);
            const buffer<count_type, cuda_queue> bins(q, tiles.count * most_bins);
            const buffer<tile_state, cuda_queue> states(q, tiles.blocks());
            const buffer<candidate, cuda_queue> found(q, candidates);
            const encode_scratch scratch{search.data(), bins.data(), states.data(), found.data()};
            tutti::detail::check_cuda(cudaMemsetAsync(bins.data(), 0, bins.size_bytes(), q.stream()),
                                      "cudaMemsetAsync");
            // Digits are counted by as many blocks as the largest card holds at once, or fewer.
            segment_batch<encode_row> counting;
            for (unsigned r = 0; r < tiles.count; ++r) {
                counting.add(tiles.rows[r], std::min(tiles.first_block[r + 1] - tiles.first_block[r], 1024u));
            }
            start_blocks(q, C::name, take_sample<exact, T>, tiles.count, whole_block, tiles, x, scratch);
            start_blocks(q, C::name, packed ? collect<true, T> : collect<false, T>, tiles.blocks(), tile_threads, tiles,
                         x, scratch);
            start_blocks(q, C::name, count_digit<exact, 0, T>, counting.blocks(), tile_threads, counting, x, scratch);
            start_blocks(q, C::name, settle_digit<0, !exact>, tiles.count, whole_block, tiles, scratch);
            if constexpr (exact) {
                start_blocks(q, C::name, count_digit<exact, 1, T>, counting.blocks(), tile_threads, counting, x,
                             scratch);
                start_blocks(q, C::name, settle_digit<1, false>, tiles.count, whole_block, tiles, scratch);
                start_blocks(q, C::name, count_digit<exact, 2, T>, counting.blocks(), tile_threads, counting, x,
                             scratch);
                start_blocks(q, C::name, settle_digit<2, true>, tiles.count, whole_block, tiles, scratch);
            }
            const std::size_t warps = blocks_for(tiles.blocks(), tile_threads / 32);
            start_blocks(q, C::name, count_selected<exact, shift, T>, warps, tile_threads, tiles, x, scratch);
            start_blocks(q, C::name, sum_tiles<encode_row>, tiles.count, whole_block, tiles, scratch, op.wire.data());
            start_blocks(q, C::name, write_entries<exact, shift, T>, warps, tile_threads, tiles, x, scratch,
                         op.wire.data());
        });
}

}  // namespace tutti::compress::detail
