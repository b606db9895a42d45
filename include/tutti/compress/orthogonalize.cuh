// The device side of compress/orthogonalize: Gram matrices by warps, factors by a block each, rows by a thread each.
// Needs compress/detail/batch.cuh and nvcc. No host waits and no atomics: fixed partial sums, added in a fixed order.
// Source: as compress/orthogonalize.hpp.
#pragma once

#include <cstddef>  // size_t
#include <span>     // pieces
#include <utility>  // exchange
#include <vector>   // pieces

#include <tutti/compress/detail/batch.cuh>   // batches
#include <tutti/compress/orthogonalize.hpp>  // operation, inverse_cholesky
#include <tutti/core/buffer.hpp>             // scratch
#include <tutti/core/cuda_queue.hpp>         // cuda_queue
#include <tutti/core/error.hpp>              // narrow

namespace tutti::compress {

namespace detail {

// One matrix, and its scratch: the partial sums of its Gram matrix by blocks of 4 x 4, and what inverse_cholesky needs.
struct tall_piece {
    const float* in;
    float* out;
    double* partial;  // [chunk][block of the lower triangle][16]
    double* cells;    // r * r, and r for the diagonal
    std::size_t rows;
    unsigned columns;
    unsigned chunk;   // rows of a partial sum
    unsigned chunks;  //
    unsigned blocks;  // 4 x 4 blocks of the lower triangle
};

inline constexpr unsigned warps_per_block = 8;
// Factors up to this size are made in shared memory.
inline constexpr unsigned shared_columns = 64;

// A warp a chunk of rows and a block of 4 x 4 of the Gram matrix.
template <class Piece>
__global__ void __launch_bounds__(32 * warps_per_block)
    gram_partials(const __grid_constant__ batch<Piece> all, bool second) {
    const block_place here = place_of(all, blockIdx.x);
    const Piece& t = all.of[here.piece];
    const unsigned lane = threadIdx.x % 32;
    const std::size_t item = std::size_t{here.block} * warps_per_block + threadIdx.x / 32;
    if (item >= std::size_t{t.chunks} * t.blocks) { return; }
    const auto block = static_cast<unsigned>(item % t.blocks);
    unsigned a = 0;
    while ((a + 1) * (a + 2) / 2 <= block) { ++a; }
    const unsigned b = block - a * (a + 1) / 2;
    const float* const x = second ? t.out : t.in;
    const std::size_t begin = item / t.blocks * t.chunk;
    const std::size_t end = begin + t.chunk < t.rows ? begin + t.chunk : t.rows;
    double sums[16] = {};
    for (std::size_t i = begin + lane; i < end; i += 32) {
        double u[4], v[4];
#pragma unroll
        for (unsigned c = 0; c < 4; ++c) {
            u[c] = 4 * a + c < t.columns ? static_cast<double>(x[(4 * a + c) * t.rows + i]) : 0.0;
            v[c] = 4 * b + c < t.columns ? static_cast<double>(x[(4 * b + c) * t.rows + i]) : 0.0;
        }
#pragma unroll
        for (unsigned c = 0; c < 4; ++c) {
#pragma unroll
            for (unsigned d = 0; d < 4; ++d) { sums[4 * c + d] += u[c] * v[d]; }
        }
    }
    sum_over_warp(sums);
    t.partial[item * 16 + total_of<16>(lane)] = sums[0];  // two lanes, the same value
}

struct block_barrier {
    __device__ void operator()() const { __syncthreads(); }
};

// A block a matrix.
template <class Piece> __global__ void __launch_bounds__(256) factorize(const __grid_constant__ batch<Piece> all) {
    __shared__ double cells_here[shared_columns * shared_columns];
    __shared__ double diagonal_here[shared_columns];
    const Piece& t = all.of[blockIdx.x];
    const unsigned r = t.columns;
    const bool here = r <= shared_columns;
    double* const cells = here ? cells_here : t.cells;
    double* const diagonal = here ? diagonal_here : t.cells + std::size_t{r} * r;
    for (unsigned at = threadIdx.x; at < r * r; at += blockDim.x) {
        const unsigned i = at / r;
        const unsigned j = at % r;
        double total = 0;
        if (j <= i) {
            const unsigned a = i / 4;
            const double* const from = t.partial + (a * (a + 1) / 2 + j / 4) * 16 + (i % 4) * 4 + j % 4;
#pragma unroll 8
            for (unsigned c = 0; c < t.chunks; ++c) { total += from[std::size_t{c} * t.blocks * 16]; }
        }
        cells[at] = total;
    }
    __syncthreads();
    inverse_cholesky(cells, diagonal, r, threadIdx.x, blockDim.x, block_barrier());
    if (here) {
        for (unsigned at = threadIdx.x; at < r * r; at += blockDim.x) { t.cells[at] = cells[at]; }
    }
}

// A row of up to `width` columns in registers.
template <unsigned width>
__device__ inline void apply_to_row(const tall_piece& t, const float* x, const double* cells, std::size_t row) {
    const unsigned r = t.columns;
    double of[width];
#pragma unroll
    for (unsigned k = 0; k < width; ++k) { of[k] = k < r ? static_cast<double>(x[k * t.rows + row]) : 0.0; }
#pragma unroll
    for (unsigned j = 0; j < width; ++j) {
        if (j < r) {
            double sum = 0;
#pragma unroll
            for (unsigned k = 0; k <= j; ++k) { sum += cells[k * r + j] * of[k]; }
            t.out[j * t.rows + row] = static_cast<float>(sum);
        }
    }
}

// A thread a row: in place too, since it needs no other row.
template <class Piece>
__global__ void __launch_bounds__(256) apply_inverses(const __grid_constant__ batch<Piece> all, bool second) {
    __shared__ double cells_here[32 * 32];
    const block_place place = place_of(all, blockIdx.x);
    const Piece& t = all.of[place.piece];
    const unsigned r = t.columns;
    if (r <= 32) {
        for (unsigned at = threadIdx.x; at < r * r; at += blockDim.x) { cells_here[at] = t.cells[at]; }
    }
    __syncthreads();
    const std::size_t row = std::size_t{place.block} * blockDim.x + threadIdx.x;
    if (row >= t.rows) { return; }
    const float* const x = second ? t.out : t.in;
    if (r <= 4) {
        apply_to_row<4>(t, x, cells_here, row);
    } else if (r <= 8) {
        apply_to_row<8>(t, x, cells_here, row);
    } else if (r <= 16) {
        apply_to_row<16>(t, x, cells_here, row);
    } else if (r <= 32) {
        apply_to_row<32>(t, x, cells_here, row);
    } else {
        for (unsigned j = r; j-- > 0;) {
            double sum = 0;
            for (unsigned k = 0; k <= j; ++k) {
                sum += t.cells[std::size_t{k} * r + j] * static_cast<double>(x[k * t.rows + row]);
            }
            t.out[j * t.rows + row] = static_cast<float>(sum);
        }
    }
}

}  // namespace detail

/// Semantics    the host's algorithm. Scratch comes from the queue, so that launches can be captured.
/// Determinism  the bits depend on a matrix alone, and agree with the host's to rounding.
/// Cost         six launches.
inline void launch(const cuda_queue& q, const orthogonalize_operation<device_memory>& op) {
    std::vector<detail::tall_piece> pieces;
    std::size_t scratch = 0;
    const auto take = [&](std::size_t doubles) { return std::exchange(scratch, scratch + doubles); };
    std::vector<std::size_t> partials, cells;
    for (const tall_matrix<device_memory>& a : op.all) {
        if (a.rows == 0 || a.columns == 0) { continue; }
        detail::tall_piece t{};
        t.in = a.in.data();
        t.out = a.out.data();
        t.rows = a.rows;
        t.columns = static_cast<unsigned>(a.columns);
        const std::size_t groups = detail::parts_of(t.columns, 4);
        t.blocks = narrow<unsigned>(groups * (groups + 1) / 2, "orthogonalize: columns");
        t.chunk = narrow<unsigned>(256 * detail::parts_of(a.rows, 256 * 64), "orthogonalize: rows");  // up to 64 sums
        t.chunks = static_cast<unsigned>(detail::parts_of(a.rows, t.chunk));
        partials.push_back(take(std::size_t{t.chunks} * t.blocks * 16));
        cells.push_back(take(std::size_t{t.columns} * (t.columns + 1)));
        pieces.push_back(t);
    }
    if (pieces.empty()) { return; }
    const buffer<double, cuda_queue> storage(q, scratch);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        pieces[i].partial = storage.data() + partials[i];
        pieces[i].cells = storage.data() + cells[i];
    }
    const std::span<const detail::tall_piece> all(pieces);
    for (const bool second : {false, true}) {
        detail::start_batches(
            q, op.name, detail::gram_partials<detail::tall_piece>, 32 * detail::warps_per_block, all,
            [](const detail::tall_piece& t) {
                return detail::parts_of(std::size_t{t.chunks} * t.blocks, detail::warps_per_block);
            },
            second);
        detail::start_batches(q, op.name, detail::factorize<detail::tall_piece>, 256, all,
                              [](const detail::tall_piece&) { return std::size_t{1}; });
        detail::start_batches(
            q, op.name, detail::apply_inverses<detail::tall_piece>, 256, all,
            [](const detail::tall_piece& t) { return detail::parts_of(t.rows, 256); }, second);
    }
}

}  // namespace tutti::compress
