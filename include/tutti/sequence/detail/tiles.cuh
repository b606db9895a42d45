// tiles: products of tiles of 32 x 32 numbers by a block of threads, from shared memory: what tiled_attention is made of.
// Needs sequence/token_view and nvcc.
#pragma once

#include <cstddef>  // size_t

#include <tutti/core/memory.hpp>          // device_memory
#include <tutti/sequence/token_view.hpp>  // token_view

namespace tutti::sequence::detail {

inline constexpr unsigned tile = 32;           // rows, keys, and numbers of a head that are staged at a time
inline constexpr unsigned tile_parts = 4;      // a block of threads computes that many tiles of the width of a result
inline constexpr unsigned tile_threads = 256;  // 16 x 16, each two rows by two columns of a tile

template <class P> struct tile_memory {
    P of[tile][tile + 1];  // an odd stride: no two rows of a column in one bank

    /// Rows and columns of a head from (row, column) on; 0 beyond it.
    template <class T>
    __device__ void load(const token_view<const T, device_memory>& v, std::size_t head, std::size_t row,
                         std::size_t column) {
        const unsigned c = threadIdx.x % tile;
        for (unsigned r = threadIdx.x / tile; r < tile; r += tile_threads / tile) {
            const bool inside = row + r < v.tokens && column + c < v.width;
            of[r][c] = inside ? static_cast<P>(v.at(row + r, head)[column + c]) : P{0};
        }
    }
};

/// The four numbers of a thread: rows and columns 16 apart.
template <class P> struct tile_part {
    P of[2][2] = {};
    static __device__ unsigned row(unsigned i) { return threadIdx.x / 16 + 16 * i; }
    static __device__ unsigned column(unsigned j) { return threadIdx.x % 16 + 16 * j; }
    template <class F> static __device__ void each(F f) {
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
#pragma unroll
            for (unsigned j = 0; j < 2; ++j) { f(i, j); }
        }
    }
    /// += a b', rows by rows
    __device__ void add_rows(const tile_memory<P>& a, const tile_memory<P>& b) {
#pragma unroll 8
        for (unsigned k = 0; k < tile; ++k) {
            each([&](unsigned i, unsigned j) { of[i][j] += a.of[row(i)][k] * b.of[column(j)][k]; });
        }
    }
    /// += a b
    __device__ void add_product(const tile_memory<P>& a, const tile_memory<P>& b) {
#pragma unroll 8
        for (unsigned k = 0; k < tile; ++k) {
            each([&](unsigned i, unsigned j) { of[i][j] += a.of[row(i)][k] * b.of[k][column(j)]; });
        }
    }
    /// += a' b
    __device__ void add_transposed(const tile_memory<P>& a, const tile_memory<P>& b) {
#pragma unroll 8
        for (unsigned k = 0; k < tile; ++k) {
            each([&](unsigned i, unsigned j) { of[i][j] += a.of[k][row(i)] * b.of[k][column(j)]; });
        }
    }
};

/// Rows of a times rows of b over the whole width; `left` and `right` are scratch, free before and after.
template <class P, class T>
__device__ tile_part<P> rows_by_rows(tile_memory<P>& left, tile_memory<P>& right,
                                     const token_view<const T, device_memory>& a, std::size_t a_head, std::size_t a_row,
                                     const token_view<const T, device_memory>& b, std::size_t b_head,
                                     std::size_t b_row) {
    tile_part<P> sums;
    for (std::size_t column = 0; column < a.width; column += tile) {
        left.load(a, a_head, a_row, column);
        right.load(b, b_head, b_row, column);
        __syncthreads();
        sums.add_rows(left, right);
        __syncthreads();
    }
    return sums;
}

// Adds a thread's part of a tile to the gradient.
template <class P>
__device__ void add_part(const tile_part<P>& sums, const token_view<P, device_memory>& into, std::size_t head,
                         std::size_t first, std::size_t column) {
    tile_part<P>::each([&](unsigned i, unsigned j) {
        const std::size_t row = first + tile_part<P>::row(i);
        const std::size_t c = column + tile_part<P>::column(j);
        if (row < into.tokens && c < into.width) { into.at(row, head)[c] += sums.of[i][j]; }
    });
}

}  // namespace tutti::sequence::detail
