// low_rank_kernels: what a device does for compress/detail/low_rank.
// Needs compress/detail/batch.cuh and nvcc. No atomics: fixed partial sums, added in a fixed order.
// Bound by memory: a pass over the matrices keeps as many loads under way as it can.
#pragma once

#include <cstddef>  // size_t
#include <limits>   // quiet_NaN

#include <tutti/compress/detail/batch.cuh>     // batches
#include <tutti/compress/detail/low_rank.hpp>  // factored_matrix
#include <tutti/core/element.hpp>              // floating_element

namespace tutti::compress::detail {

using device_matrix = factored_matrix<device_memory>;
using device_matrices = factored_matrices<device_memory>;

// --- small kernels on the factors ------------------------------------------------------------------------------------

// A block a column.
template <class Piece> __global__ void __launch_bounds__(256) draw_columns(const __grid_constant__ batch<Piece> all) {
    const block_place here = place_of(all, blockIdx.x);
    const Piece& a = all.of[here.piece];
    float* const column = a.q.data() + here.block * a.cols;
    bool used = false;
    for (std::size_t i = threadIdx.x; i < a.cols; i += blockDim.x) { used = used || column[i] != 0; }
    if (__syncthreads_or(used)) { return; }
    for (std::size_t i = threadIdx.x; i < a.cols; i += blockDim.x) {
        column[i] = a.draws.normal(here.block * a.cols + i);
    }
}
// A block a column.
template <class Piece> __global__ void __launch_bounds__(256) poison_columns(const __grid_constant__ batch<Piece> all) {
    const block_place here = place_of(all, blockIdx.x);
    const Piece& a = all.of[here.piece];
    const float* const column = a.wire.data() + here.block * a.cols;
    bool bad = false;
    for (std::size_t i = threadIdx.x; i < a.cols; i += blockDim.x) { bad = bad || !is_finite(column[i]); }
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) { a.poison.data()[here.block] = bad ? std::numeric_limits<float>::quiet_NaN() : 0.0f; }
}
__device__ inline bool is_poisoned(const float* poison, unsigned rank) {
    bool poisoned = false;
    for (unsigned j = 0; j < rank; ++j) { poisoned = poisoned || poison[j] != 0; }
    return poisoned;
}
// A thread an element.
template <class Piece>
__global__ void __launch_bounds__(256) mean_factors(const __grid_constant__ batch<Piece> all, float ranks) {
    const block_place here = place_of(all, blockIdx.x);
    const Piece& a = all.of[here.piece];
    const std::size_t i = std::size_t{here.block} * blockDim.x + threadIdx.x;
    if (i >= a.q.size()) { return; }
    const bool poisoned = is_poisoned(a.poison.data(), static_cast<unsigned>(a.rank));
    a.q.data()[i] = poisoned ? 0.0f : __fdiv_rn(a.wire.data()[i], ranks);
}

// --- passes over the matrices ----------------------------------------------------------------------------------------

template <floating_element T> struct product_piece {
    const T* in;         // of the matrix
    float* x;            // residual of the matrix, if there is one
    const float* left;   // p
    const float* right;  // q
    const float* own;
    const float* poison;
    float* result;  // wire; partial sums of the right product
    T* out;
    std::size_t rows, cols;
    unsigned rank;
    bool wide;  // rows are whole packs of four
};

// Four rows a warp at a time; 32 columns of the factor take the registers of two.
template <unsigned width> inline constexpr unsigned rows_per_warp = width > 16 ? 2 : 4;
inline constexpr unsigned left_warps = 8;

// Columns first ... first + width of X Q. A lane has four neighbors in every 128 columns of X.
template <unsigned width, bool wide, floating_element T>
__device__ inline void left_product(const product_piece<T>& a, unsigned block, unsigned first) {
    constexpr unsigned height = rows_per_warp<width>;
    const unsigned lane = threadIdx.x % 32;
    const std::size_t row = (std::size_t{block} * left_warps + threadIdx.x / 32) * height;
    if (row >= a.rows) { return; }
    const std::size_t cols = a.cols;
    const T* const in = a.in + row * cols;
    float* const x = a.x == nullptr ? nullptr : a.x + row * cols;
    const float* const q = a.right + first * cols;
    const unsigned count = a.rank - first < width ? a.rank - first : width;
    const unsigned rows = a.rows - row < height ? static_cast<unsigned>(a.rows - row) : height;
    float sums[height * width] = {};
    for (std::size_t k = 4 * lane; k < cols; k += 128) {
        float values[height][4], kept[height][4];
#pragma unroll
        for (unsigned h = 0; h < height; ++h) {
            if (h < rows) {
                load_four<wide>(values[h], in + h * cols, k, cols);
            } else {
#pragma unroll
                for (unsigned v = 0; v < 4; ++v) { values[h][v] = 0; }
            }
        }
        if (x != nullptr) {
#pragma unroll
            for (unsigned h = 0; h < height; ++h) {
                if (h < rows) { load_four<wide>(kept[h], x + h * cols, k, cols); }
            }
#pragma unroll
            for (unsigned h = 0; h < height; ++h) {
                if (h < rows) {
#pragma unroll
                    for (unsigned v = 0; v < 4; ++v) { values[h][v] += kept[h][v]; }
                    store_four<wide>(values[h], x + h * cols, k, cols);
                }
            }
        }
#pragma unroll
        for (unsigned j = 0; j < width; ++j) {
            if (j < count) {
                float factor[4];
                load_four<wide>(factor, q + j * cols, k, cols);
#pragma unroll
                for (unsigned h = 0; h < height; ++h) {
#pragma unroll
                    for (unsigned v = 0; v < 4; ++v) { sums[h * width + j] += values[h][v] * factor[v]; }
                }
            }
        }
    }
    sum_over_warp(sums);
#pragma unroll
    for (unsigned v = 0; v < totals_per_lane<height * width>; ++v) {
        const unsigned total = total_of<height * width>(lane) + v;
        const unsigned h = total / width;
        const unsigned j = total % width;
        if (h < rows && j < count) { a.result[(first + j) * a.rows + row + h] = sums[v]; }
    }
}

template <unsigned width, floating_element T>
__global__ void __launch_bounds__(32 * left_warps, width > 4 ? 2 : 3)
    left_products(const __grid_constant__ batch<product_piece<T>> all, unsigned first) {
    const block_place here = place_of(all, blockIdx.x);
    const product_piece<T>& a = all.of[here.piece];
    if (a.wide) {
        left_product<width, true>(a, here.block, first);
    } else {
        left_product<width, false>(a, here.block, first);
    }
}

inline constexpr unsigned tile_threads = 64;
inline constexpr unsigned tile_columns = 4 * tile_threads;
inline constexpr unsigned staged_rows = 64;
// Rows of a partial sum, more where the partial sums of a row are more.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr unsigned right_rows(unsigned width) noexcept {
    return width > 16 ? 512 : 256;
}

// Partial sums, over the rows of one chunk, of columns first ... first + width of X' P. A thread has four columns of X.
template <unsigned width, bool wide, floating_element T>
__device__ inline void right_product(const product_piece<T>& a, unsigned block, unsigned first,
                                     float (&p)[staged_rows][width]) {
    const auto tiles = static_cast<unsigned>(parts_of(a.cols, tile_columns));
    const std::size_t chunk = block / tiles;
    const std::size_t k = std::size_t{block % tiles} * tile_columns + 4 * threadIdx.x;
    const std::size_t begin = chunk * right_rows(width);
    const std::size_t end = begin + right_rows(width) < a.rows ? begin + right_rows(width) : a.rows;
    const unsigned count = a.rank - first < width ? a.rank - first : width;
    float sums[width][4] = {};
    for (std::size_t i = begin; i < end; i += staged_rows) {
        __syncthreads();
        for (unsigned at = threadIdx.x; at < staged_rows * width; at += tile_threads) {
            const unsigned j = at / staged_rows;
            const unsigned h = at % staged_rows;
            p[h][j] = j < count && i + h < end ? a.left[(first + j) * a.rows + i + h] : 0.0f;
        }
        __syncthreads();
        if (k >= a.cols) { continue; }
        const T* const x = a.in + i * a.cols;
        const unsigned rows = end - i < staged_rows ? static_cast<unsigned>(end - i) : staged_rows;
        constexpr unsigned together = 8;
        for (unsigned h = 0; h < rows; h += together) {
            float values[together][4];
#pragma unroll
            for (unsigned u = 0; u < together; ++u) {
                if (h + u < rows) {
                    load_four<wide>(values[u], x + (h + u) * a.cols, k, a.cols);
                } else {
#pragma unroll
                    for (unsigned v = 0; v < 4; ++v) { values[u][v] = 0; }
                }
            }
#pragma unroll
            for (unsigned u = 0; u < together; ++u) {
#pragma unroll
                for (unsigned j = 0; j < width; ++j) {
#pragma unroll
                    for (unsigned v = 0; v < 4; ++v) { sums[j][v] += p[h + u][j] * values[u][v]; }
                }
            }
        }
    }
    if (k >= a.cols) { return; }
#pragma unroll
    for (unsigned j = 0; j < width; ++j) {
        if (j < count) { store_four<wide>(sums[j], a.result + (chunk * a.rank + first + j) * a.cols, k, a.cols); }
    }
}

template <unsigned width, floating_element T>
__global__ void __launch_bounds__(tile_threads)
    right_products(const __grid_constant__ batch<product_piece<T>> all, unsigned first) {
    alignas(16) __shared__ float p[staged_rows][width];
    const block_place here = place_of(all, blockIdx.x);
    const product_piece<T>& a = all.of[here.piece];
    if (a.wide) {
        right_product<width, true>(a, here.block, first, p);
    } else {
        right_product<width, false>(a, here.block, first, p);
    }
}

struct partial_piece {
    const float* partial;
    float* wire;
    float* own;
    std::size_t size;  // rank * cols
    unsigned chunks;
};
// Elements of a block, and threads for each.
inline constexpr unsigned added_elements = 32;
inline constexpr unsigned added_lanes = 8;

template <class Piece>
__global__ void __launch_bounds__(added_elements* added_lanes) add_partials(const __grid_constant__ batch<Piece> all) {
    __shared__ float sums[added_lanes][added_elements];
    const block_place here = place_of(all, blockIdx.x);
    const Piece& a = all.of[here.piece];
    const unsigned element = threadIdx.x % added_elements;
    const unsigned lane = threadIdx.x / added_elements;
    const std::size_t i = std::size_t{here.block} * added_elements + element;
    float sum = 0;
    if (i < a.size) {
#pragma unroll 4
        for (unsigned c = lane; c < a.chunks; c += added_lanes) { sum += a.partial[c * a.size + i]; }
    }
    sums[lane][element] = sum;
    __syncthreads();
    if (lane == 0 && i < a.size) {
        float total = 0;
#pragma unroll
        for (unsigned l = 0; l < added_lanes; ++l) { total += sums[l][element]; }
        a.wire[i] = total;
        a.own[i] = total;
    }
}

inline constexpr unsigned expanded_rows = 32;  // of a block
inline constexpr unsigned rows_together = 4;

template <bool wide, floating_element T> __device__ inline void expand_tile(const product_piece<T>& a, unsigned block) {
    const auto tiles = static_cast<unsigned>(parts_of(a.cols, tile_columns));
    const std::size_t cols = a.cols;
    const std::size_t k = std::size_t{block % tiles} * tile_columns + 4 * threadIdx.x;
    if (k >= cols) { return; }
    const std::size_t begin = std::size_t{block / tiles} * expanded_rows;
    const std::size_t end = begin + expanded_rows < a.rows ? begin + expanded_rows : a.rows;
    const bool both = a.x != nullptr;
    const bool poisoned = is_poisoned(a.poison, a.rank);
    for (std::size_t i = begin; i < end; i += rows_together) {
        const unsigned rows = end - i < rows_together ? static_cast<unsigned>(end - i) : rows_together;
        float kept[rows_together][4];
        if (both) {
#pragma unroll
            for (unsigned h = 0; h < rows_together; ++h) {
                if (h < rows) { load_four<wide>(kept[h], a.x + (i + h) * cols, k, cols); }
            }
        }
        float mean[rows_together][4] = {};
        float own[rows_together][4] = {};
#pragma unroll 2
        for (unsigned j = 0; j < a.rank; ++j) {
            float q[4], o[4];
            load_four<wide>(q, a.right + j * cols, k, cols);
            if (both) { load_four<wide>(o, a.own + j * cols, k, cols); }
#pragma unroll
            for (unsigned h = 0; h < rows_together; ++h) {
                const float p = a.left[j * a.rows + (h < rows ? i + h : i)];
#pragma unroll
                for (unsigned v = 0; v < 4; ++v) {
                    mean[h][v] += p * q[v];
                    if (both) { own[h][v] += p * o[v]; }
                }
            }
        }
#pragma unroll
        for (unsigned h = 0; h < rows_together; ++h) {
            if (h >= rows) { break; }
            if (both) {
                if (poisoned) { load_four<wide>(own[h], a.in + (i + h) * cols, k, cols); }
#pragma unroll
                for (unsigned v = 0; v < 4; ++v) { kept[h][v] = finite_or_zero(kept[h][v] - own[h][v]); }
                store_four<wide>(kept[h], a.x + (i + h) * cols, k, cols);
            }
            if (poisoned) {
#pragma unroll
                for (unsigned v = 0; v < 4; ++v) { mean[h][v] = std::numeric_limits<float>::quiet_NaN(); }
            }
            store_four<wide>(mean[h], a.out + (i + h) * cols, k, cols);
        }
    }
}

template <floating_element T>
__global__ void __launch_bounds__(tile_threads, 10) expand(const __grid_constant__ batch<product_piece<T>> all) {
    const block_place here = place_of(all, blockIdx.x);
    const product_piece<T>& a = all.of[here.piece];
    if (a.wide) {
        expand_tile<true>(a, here.block);
    } else {
        expand_tile<false>(a, here.block);
    }
}

}  // namespace tutti::compress::detail
