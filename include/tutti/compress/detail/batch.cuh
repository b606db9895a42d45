// batch: pieces of work of different sizes in one launch, described in the kernel's parameters.
// Needs core/cuda_run and nvcc. Nothing is uploaded, so launches can be captured; a block finds its piece by bisection.
// Also what kernels on matrices share: reductions of many sums in a warp, packs of four.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // addresses
#include <limits>       // blocks of a grid
#include <span>         // pieces
#include <string_view>  // names

#include <tutti/core/cuda_run.cuh>  // start, packs
#include <tutti/core/element.hpp>   // floating_element
#include <tutti/core/error.hpp>     // usage_error
#include <tutti/core/text.hpp>      // formatted

namespace tutti::compress::detail {

/// As many pieces as fit into half of the parameters that a kernel may have.
template <class Piece> struct batch {
    static constexpr unsigned capacity = 16000 / (sizeof(Piece) + sizeof(unsigned));
    unsigned count;
    unsigned first[capacity + 1];  ///< blocks of the pieces before each
    Piece of[capacity];
};

/// Where a block is: its piece, and its number among the blocks of that piece.
struct block_place {
    unsigned piece, block;
};
template <class Piece> __device__ inline block_place place_of(const batch<Piece>& all, unsigned block) {
    unsigned low = 0;
    unsigned high = all.count;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (all.first[middle] <= block ? low : high) = middle;
    }
    return {low, block - all.first[low]};
}

/// Runs `kernel` on all pieces, with blocks_of(piece) blocks for each and further arguments for all.
template <class Piece, class Blocks, class... Parameters, class... Arguments>
void start_batches(const cuda_queue& q, std::string_view name, void (*kernel)(Parameters...), unsigned threads,
                   std::span<const Piece> pieces, Blocks blocks_of, const Arguments&... arguments) {
    batch<Piece> now;
    now.count = 0;
    now.first[0] = 0;
    const auto flush = [&] {
        tutti::detail::start(q, name, kernel, std::size_t{now.first[now.count]} * threads, threads, now, arguments...);
        now.count = 0;
    };
    for (const Piece& p : pieces) {
        const std::size_t blocks = blocks_of(p);
        if (blocks == 0) { continue; }
        if (blocks > std::size_t{std::numeric_limits<int>::max()}) {
            throw usage_error(formatted("{}: a matrix is too large for one launch ({} blocks)", name, blocks));
        }
        if (now.count == batch<Piece>::capacity || now.first[now.count] + blocks > std::numeric_limits<int>::max()) {
            flush();
        }
        now.of[now.count] = p;
        now.first[now.count + 1] = now.first[now.count] + static_cast<unsigned>(blocks);
        ++now.count;
    }
    flush();
}

[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t parts_of(std::size_t n, std::size_t part) noexcept {
    return (n + part - 1) / part;
}

/// Adds each of `values` over the 32 lanes of a warp, always in the same order. Every step sends half of what is left
/// to a neighbor, so that a lane ends with a few totals: those from total_of(lane) on, in values[0] and after.
/// `left`: values that are still apart. All indices are constants, or the values would leave their registers.
template <unsigned count, unsigned left = count, unsigned offset = 16, class Number>
__device__ inline void sum_over_warp(Number (&values)[count]) {
    static_assert((count & (count - 1)) == 0);
    if constexpr (left > 1) {
        const bool upper = (threadIdx.x & offset) != 0;
#pragma unroll
        for (unsigned v = 0; v < left / 2; ++v) {
            const Number kept = upper ? values[v + left / 2] : values[v];
            const Number sent = upper ? values[v] : values[v + left / 2];
            values[v] = kept + __shfl_xor_sync(0xffffffffu, sent, static_cast<int>(offset));
        }
    } else {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], static_cast<int>(offset));
    }
    if constexpr (offset > 1) { sum_over_warp<count, (left > 1 ? left / 2 : 1), offset / 2>(values); }
}
template <unsigned count> inline constexpr unsigned totals_per_lane = count >= 32 ? count / 32 : 1;
/// The first total of a lane. Where there are fewer totals than lanes, neighbors have the same.
template <unsigned count> __device__ inline unsigned total_of(unsigned lane) {
    return count >= 32 ? lane * (count / 32) : lane / (32 / count);
}

/// Four neighbors of a row as floats; zeros behind its end. `wide`: rows are aligned to packs, and whole packs long.
template <bool wide, floating_element T>
__device__ inline void load_four(float (&to)[4], const T* row, std::size_t at, std::size_t end) {
    if constexpr (wide && sizeof(T) <= 4) {
        tutti::detail::pack<T, 4> values;
        values.load(row + at);
#pragma unroll
        for (unsigned v = 0; v < 4; ++v) { to[v] = static_cast<float>(values.of[v]); }
    } else {
#pragma unroll
        for (unsigned v = 0; v < 4; ++v) { to[v] = at + v < end ? static_cast<float>(row[at + v]) : 0.0f; }
    }
}
template <bool wide, floating_element T>
__device__ inline void store_four(const float (&from)[4], T* row, std::size_t at, std::size_t end) {
    if constexpr (wide && sizeof(T) <= 4) {
        tutti::detail::pack<T, 4> values;
#pragma unroll
        for (unsigned v = 0; v < 4; ++v) { values.of[v] = static_cast<T>(from[v]); }
        values.store(row + at);
    } else {
#pragma unroll
        for (unsigned v = 0; v < 4; ++v) {
            if (at + v < end) { row[at + v] = static_cast<T>(from[v]); }
        }
    }
}
/// Whether packs of four of T begin at p.
template <class T> [[nodiscard]] bool packed(const T* p) noexcept {
    return reinterpret_cast<std::uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

}  // namespace tutti::compress::detail
