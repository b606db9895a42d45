// The device side of compress/detail/sparse_encode: what the search has found is counted tile by tile, summed up, and
// written in order. No wait.
// Needs core/cuda_run, CUB and nvcc. Not cub::DeviceSelect and DeviceRadixSort: they work on one tensor a call, and
// would read the elements twice or move them all.
#pragma once

#include <algorithm>  // min
#include <cmath>      // sqrt
#include <cstddef>    // size_t, byte
#include <cstdint>    // grades, addresses

#include <cub/block/block_scan.cuh>  // sums before a tile

#include <cuda_runtime_api.h>  // memset

#include <tutti/compress/detail/segment_batch.cuh>  // segments in a kernel
#include <tutti/compress/detail/sparse_encode.hpp>  // the operation
#include <tutti/compress/detail/sparse_search.cuh>  // the search
#include <tutti/core/buffer.hpp>                    // scratch
#include <tutti/core/cuda_queue.hpp>                // cuda_queue

namespace tutti::compress::detail {

[[nodiscard]] __device__ inline unsigned warp_sum(unsigned x) {
    for (int distance = 16; distance > 0; distance /= 2) { x += __shfl_xor_sync(0xffffffffu, x, distance); }
    return x;
}

// Calls use(element, value, magnitude, there) for what a tile has, in order, 32 a time, by a whole warp. Eight times as
// many are loaded at once.
template <bool exact, class T, class Use>
__device__ inline void for_each_of_tile(const encode_row& row, const search_state& search, tile_candidates mine,
                                        const encode_scratch& scratch, const device_elements<T>& x, std::size_t tile,
                                        Use use) {
    constexpr unsigned ahead = 8;
    const bool all = all_are_candidates<exact>(row, search);
    const candidate* const candidates = scratch.candidates + row.candidates + (all ? 0 : mine.first);
    const unsigned n = all ? tile_size : mine.count;
    for (unsigned first = 0; first < n; first += 32 * ahead) {
        candidate loaded[ahead];
        std::size_t at[ahead];
        bool there[ahead];
#pragma unroll
        for (unsigned k = 0; k < ahead; ++k) {
            const unsigned c = first + 32 * k + threadIdx.x % 32;
            there[k] = c < n;
            loaded[k] = {c, 0};
            if (there[k] && !all) { loaded[k] = candidates[c]; }
            at[k] = row.element(tile, loaded[k].place);
            there[k] = there[k] && at[k] < row.size;
            if (there[k] && all) { loaded[k].value = x(row.offset + at[k]); }
        }
#pragma unroll
        for (unsigned k = 0; k < ahead; ++k) {
            if (first + 32 * k < n) { use(at[k], loaded[k].value, magnitude(loaded[k].value), there[k]); }
        }
    }
}

template <bool exact, unsigned shift, class T>
__global__ void __launch_bounds__(selection_threads)
    count_selected(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x,
                   encode_scratch scratch) {
    const unsigned tile = (blockIdx.x * selection_threads + threadIdx.x) / 32;
    if (tile >= batch.blocks()) { return; }
    const unsigned r = batch.row_of(tile);
    const search_state search = scratch.search[r];
    unsigned larger = 0, equal = 0;
    for_each_of_tile<exact>(batch.rows[r], search, scratch.tiles[tile], scratch, x, tile - batch.first_block[r],
                            [&](std::size_t, float, std::uint32_t m, bool there) {
                                larger += there && m >> shift > search.grade ? 1 : 0;
                                equal += there && m >> shift == search.grade ? 1 : 0;
                            });
    larger = warp_sum(larger);
    equal = warp_sum(equal);
    if (threadIdx.x % 32 == 0) { scratch.here[tile] = {larger, equal}; }
}

// Sums what tiles send, and says in the header how many entries that are.
template <class Row>
__global__ void __launch_bounds__(whole_block)
    sum_tiles(const __grid_constant__ segment_batch<Row> batch, encode_scratch scratch, std::byte* wires) {
    using scan = cub::BlockScan<selected_counts, whole_block, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename scan::TempStorage storage;
    const Row& row = batch.rows[blockIdx.x];
    const unsigned begin = batch.first_block[blockIdx.x];
    const unsigned end = batch.first_block[blockIdx.x + 1];
    selected_counts total{0, 0};
    constexpr unsigned each = 4;
    for (unsigned first = begin; first < end; first += whole_block * each) {
        selected_counts own[each];
        const unsigned at = first + threadIdx.x * each;
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            tile_counts here{0, 0};
            if (at + k < end) { here = scratch.here[at + k]; }
            own[k] = {here.larger, here.equal};
        }
        selected_counts sum{0, 0};
        scan(storage).ExclusiveScan(
            own, own, selected_counts{0, 0}, [](selected_counts a, selected_counts b) { return a + b; }, sum);
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            if (at + k < end) { scratch.before[at + k] = total + own[k]; }
        }
        total = total + sum;
        __syncthreads();
    }
    if (row.format.counted && threadIdx.x == 0) {
        const count_type quota = scratch.search[blockIdx.x].wanted;
        const std::uint64_t entries = total.larger + (total.equal < quota ? total.equal : quota);
        store(wires + row.wire, entries);
    }
}

template <bool exact, unsigned shift, class T>
__global__ void __launch_bounds__(selection_threads)
    write_entries(const __grid_constant__ segment_batch<encode_row> batch, device_elements<T> x, encode_scratch scratch,
                  std::byte* wires) {
    const unsigned tile = (blockIdx.x * selection_threads + threadIdx.x) / 32;
    if (tile >= batch.blocks()) { return; }
    const tile_counts here = scratch.here[tile];
    if (here.larger + here.equal == 0) { return; }  // what is not finite is always one of them
    const unsigned r = batch.row_of(tile);
    const encode_row& row = batch.rows[r];
    const search_state search = scratch.search[r];
    const unsigned earlier = (1u << threadIdx.x % 32) - 1;
    selected_counts before = scratch.before[tile];
    for_each_of_tile<exact>(row, search, scratch.tiles[tile], scratch, x, tile - batch.first_block[r],
                            [&](std::size_t i, float value, std::uint32_t m, bool there) {
                                const bool is_larger = there && m >> shift > search.grade;
                                const bool is_equal = there && m >> shift == search.grade;
                                const unsigned larger_ones = __ballot_sync(0xffffffffu, is_larger);
                                const unsigned equal_ones = __ballot_sync(0xffffffffu, is_equal);
                                const count_type equal_before = before.equal + __popc(equal_ones & earlier);
                                const bool sent = is_larger || (is_equal && equal_before < search.wanted);
                                if (sent) {
                                    const count_type entry =
                                        before.larger + __popc(larger_ones & earlier) +
                                        (equal_before < search.wanted ? equal_before : search.wanted);
                                    row.format.put(wires + row.wire, entry, i, sent_value(value));
                                }
                                if (x.owed != nullptr && (sent || (there && m == infinite_magnitude))) {
                                    x.owed[row.offset + i] = 0;
                                }
                                before.larger += __popc(larger_ones);
                                before.equal += __popc(equal_ones);
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
    if (!op.wire.empty()) {
        const tutti::detail::on_device scope(q.device());
        tutti::detail::check_cuda(cudaMemsetAsync(op.wire.data(), 0, op.wire.size(), q.stream()), "cudaMemsetAsync");
    }
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
            const buffer<candidate, cuda_queue> found(q, candidates);
            const buffer<tile_candidates, cuda_queue> of_tiles(q, tiles.blocks());
            const buffer<tile_counts, cuda_queue> here(q, tiles.blocks());
            const buffer<selected_counts, cuda_queue> before(q, tiles.blocks());
            const encode_scratch scratch{search.data(),   bins.data(), found.data(),
                                         of_tiles.data(), here.data(), before.data()};
            tutti::detail::check_cuda(cudaMemsetAsync(bins.data(), 0, bins.size_bytes(), q.stream()),
                                      "cudaMemsetAsync");
            // Digits are counted by as many blocks as the largest card holds at once, or fewer.
            segment_batch<encode_row> counting;
            for (unsigned r = 0; r < tiles.count; ++r) {
                counting.add(tiles.rows[r], std::min(tiles.first_block[r + 1] - tiles.first_block[r], 1024u));
            }
            start_blocks(q, C::name, take_sample<exact, T>, tiles.count, whole_block, tiles, x, scratch);
            start_blocks(q, C::name, x.owed != nullptr ? collect<true, T> : collect<false, T>, tiles.blocks(),
                         selection_threads, tiles, x, scratch, packed);
            start_blocks(q, C::name, count_digit<exact, 0, T>, counting.blocks(), selection_threads, counting, x,
                         scratch);
            start_blocks(q, C::name, settle_digit<0, !exact>, tiles.count, whole_block, tiles, scratch);
            if constexpr (exact) {
                start_blocks(q, C::name, count_digit<exact, 1, T>, counting.blocks(), selection_threads, counting, x,
                             scratch);
                start_blocks(q, C::name, settle_digit<1, false>, tiles.count, whole_block, tiles, scratch);
                start_blocks(q, C::name, count_digit<exact, 2, T>, counting.blocks(), selection_threads, counting, x,
                             scratch);
                start_blocks(q, C::name, settle_digit<2, true>, tiles.count, whole_block, tiles, scratch);
            }
            const std::size_t warps = blocks_for(tiles.blocks(), selection_threads / 32);
            start_blocks(q, C::name, count_selected<exact, shift, T>, warps, selection_threads, tiles, x, scratch);
            start_blocks(q, C::name, sum_tiles<encode_row>, tiles.count, whole_block, tiles, scratch, op.wire.data());
            start_blocks(q, C::name, write_entries<exact, shift, T>, warps, selection_threads, tiles, x, scratch,
                         op.wire.data());
        });
}

}  // namespace tutti::compress::detail
