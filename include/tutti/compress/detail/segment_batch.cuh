// segment_batch: a layout as kernels see it: some of its segments in a table among the kernel's parameters, and which
// blocks work on which of them. No copy and no wait is needed to get it there.
// Needs compress/compressor and nvcc.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // addresses
#include <string_view>  // names

#include <cuda_runtime_api.h>  // memset

#include <tutti/compress/compressor.hpp>  // layout
#include <tutti/core/cuda_queue.hpp>      // cuda_queue
#include <tutti/core/cuda_run.cuh>        // start
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress::detail {

// As many as let a table with rows of 112 bytes stay below the 4 KiB that every driver takes.
inline constexpr unsigned batch_segments = 32;

/// Rows of one segment each; blocks [first_block[i], first_block[i + 1]) of a launch work on row i.
template <class Row> struct segment_batch {
    Row rows[batch_segments];
    unsigned first_block[batch_segments + 1] = {};
    unsigned count = 0;

    void add(const Row& row, std::size_t blocks) {
        rows[count] = row;
        if (blocks > 0x7fffffffu - first_block[count]) {
            throw usage_error(formatted("compress: {} blocks are too many for one launch", blocks));
        }
        first_block[count + 1] = first_block[count] + static_cast<unsigned>(blocks);
        ++count;
    }
    [[nodiscard]] __host__ __device__ unsigned blocks() const noexcept { return first_block[count]; }
    [[nodiscard]] __device__ unsigned row_of(unsigned block) const {
        unsigned low = 0;
        for (unsigned high = count; high - low > 1;) {
            const unsigned middle = (low + high) / 2;
            (first_block[middle] <= block ? low : high) = middle;
        }
        return low;
    }
};

/// Calls use(batch) with rows that describe(segment, first byte or element of its wire) adds; segments without elements
/// are left out. `step(segment)` is how far a segment's wire goes.
template <class Row, class Step, class Describe, class Use>
void for_each_batch(layout all, Step step, Describe describe, Use use) {
    segment_batch<Row> batch;
    std::size_t wire = 0;
    for (const segment& s : all) {
        if (s.size() != 0) { describe(batch, s, wire); }
        wire += step(s);
        if (batch.count == batch_segments) {
            use(batch);
            batch = {};
        }
    }
    if (batch.count != 0) { use(batch); }
}

/// Zeros in the elements of all segments; neighbors at once.
template <class T> void clear_segments(const cuda_queue& q, layout all, T* data) {
    const tutti::detail::on_device scope(q.device());
    for (std::size_t i = 0; i < all.size();) {
        const std::size_t first = all[i].offset;
        std::size_t end = first + all[i].size();
        for (++i; i < all.size() && all[i].offset == end; ++i) { end += all[i].size(); }
        if (end == first) { continue; }
        tutti::detail::check_cuda(cudaMemsetAsync(data + first, 0, (end - first) * sizeof(T), q.stream()),
                                  "cudaMemsetAsync");
    }
}

/// Blocks that take `each` items apiece.
[[nodiscard]] constexpr std::size_t blocks_for(std::size_t items, std::size_t each) noexcept {
    return items / each + (items % each != 0 ? 1 : 0);
}

/// A launch of `blocks` blocks.
template <class... Parameters, class... Arguments>
void start_blocks(const cuda_queue& q, std::string_view name, void (*kernel)(Parameters...), std::size_t blocks,
                  unsigned threads, const Arguments&... arguments) {
    tutti::detail::start(q, name, kernel, blocks * threads, threads, arguments...);
}

/// Refuses a wire that cannot be read in words.
inline void expect_aligned(std::string_view operation, const void* wire) {
    const auto address = reinterpret_cast<std::uintptr_t>(wire);
    if (address % wire_alignment != 0) {
        throw usage_error(formatted("{}: the wire begins {} bytes behind a multiple of {}", operation,
                                    address % wire_alignment, wire_alignment));
    }
}

}  // namespace tutti::compress::detail
