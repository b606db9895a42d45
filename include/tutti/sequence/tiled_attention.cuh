// tiled_attention: attention of a block on a GPU, forward and backward, for all types, shapes and masks, in tiles of
// 32 x 32. Needs sequence/block_attention and nvcc. For what tensor cores do not do: float, double, odd widths, odd
// masks.
// Source: Dao et al. 2022, arXiv:2205.14135.
#pragma once

#include <algorithm>    // min
#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <cstdint>      // positions
#include <limits>       // infinity
#include <string_view>  // names

#include <tutti/core/cuda_run.cuh>             // device, checks
#include <tutti/core/element.hpp>              // accumulator_t
#include <tutti/sequence/block_attention.hpp>  // forward_block, backward_block
#include <tutti/sequence/detail/tiles.cuh>     // tile_memory, tile_part

namespace tutti::sequence {

namespace detail {

/// NaN is larger than anything.
template <class P> __device__ P larger_of(P a, P b) { return a > b || a != a ? a : b; }

// A row of a tile a warp: its scores become exp(score - largest so far); what earlier tiles gave is to be times `keep`.
template <class P> __device__ void soften_row(P& score, P& largest, P& total, P& keep, unsigned lane) {
    constexpr P nothing = -std::numeric_limits<P>::infinity();
    P next = score;
    for (unsigned step = tile / 2; step > 0; step /= 2) {
        next = larger_of(next, __shfl_xor_sync(0xffffffffu, next, step));
    }
    const P last = largest;
    next = larger_of(last, next);
    const P kept = last == nothing ? P{0} : std::exp(last - next);
    const P weight = next == nothing ? P{0} : std::exp(score - next);
    P sum = weight;
    for (unsigned step = tile / 2; step > 0; step /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, step); }
    score = weight;
    __syncwarp();
    if (lane == 0) {
        largest = next;
        total = total * kept + sum;
        keep = kept;
    }
}

template <class T> __global__ void __launch_bounds__(tile_threads) tiled_forward(forward_block<T, device_memory> b) {
    using P = accumulator_t<T>;
    using part = tile_part<P>;
    constexpr P nothing = -std::numeric_limits<P>::infinity();
    __shared__ tile_memory<P> left, right, weights;
    __shared__ P largest[tile], total[tile], keep[tile];
    const std::size_t first = std::size_t{blockIdx.x} * tile;
    const std::size_t head = blockIdx.y;
    const std::size_t column = std::size_t{blockIdx.z} * tile * tile_parts;
    const std::size_t source = head / (b.query.heads / b.key.heads);
    const std::size_t end = std::min(first + tile, b.query.tokens);
    const std::size_t seen = b.seen.keys_of(end - 1, b.key.tokens);
    const std::size_t parts = std::min(std::size_t{tile_parts}, (b.out.width - column + tile - 1) / tile);
    const unsigned lane = threadIdx.x % tile;
    if (threadIdx.x < tile) {
        largest[threadIdx.x] = nothing;
        total[threadIdx.x] = 0;
    }
    part sums[tile_parts];
    for (std::size_t base = 0; base < seen; base += tile) {
        const part scores = rows_by_rows(left, right, b.query, head, first, b.key, source, base);
        part::each([&](unsigned i, unsigned j) {
            const std::size_t row = first + part::row(i);
            const std::size_t key = base + part::column(j);
            const bool visible = row < end && key < b.seen.keys_of(row, b.key.tokens);
            weights.of[part::row(i)][part::column(j)] = visible ? scores.of[i][j] * static_cast<P>(b.scale) : nothing;
        });
        __syncthreads();
        for (unsigned row = threadIdx.x / tile; row < tile; row += tile_threads / tile) {
            soften_row(weights.of[row][lane], largest[row], total[row], keep[row], lane);
        }
        __syncthreads();
#pragma unroll
        for (unsigned p = 0; p < tile_parts; ++p) {
            if (p >= parts) { break; }
            right.load(b.value, source, base, column + p * tile);
            __syncthreads();
            part::each([&](unsigned i, unsigned j) { sums[p].of[i][j] *= keep[part::row(i)]; });
            sums[p].add_product(weights, right);
            __syncthreads();
        }
    }
    __syncthreads();  // of no keys: for what the first threads have set
#pragma unroll
    for (unsigned p = 0; p < tile_parts; ++p) {
        part::each([&](unsigned i, unsigned j) {
            const unsigned row = part::row(i);
            const std::size_t c = column + p * tile + part::column(j);
            if (first + row >= end || c >= b.out.width) { return; }
            b.out.at(first + row, head)[c] = largest[row] == nothing ? P{0} : sums[p].of[i][j] / total[row];
        });
    }
    if (blockIdx.z == 0 && threadIdx.x < end - first) {
        const P most = largest[threadIdx.x];
        *b.log_sum_exp.at(first + threadIdx.x, head) = most == nothing ? most : most + std::log(total[threadIdx.x]);
    }
}

/// Probabilities of a tile of rows and keys, and the gradients of its scores, each in its thread's place.
template <class T> struct softmax_gradients {
    using P = accumulator_t<T>;
    tile_part<P> weights, scores;
    __device__ softmax_gradients(tile_memory<P>& left, tile_memory<P>& right, const backward_block<T, device_memory>& b,
                                 std::size_t head, std::size_t source, std::size_t first, std::size_t base)
        : weights(rows_by_rows(left, right, b.query, head, first, b.key, source, base))
        , scores(rows_by_rows(left, right, b.d_out, head, first, b.value, source, base)) {
        tile_part<P>::each([&](unsigned i, unsigned j) {
            const std::size_t row = first + tile_part<P>::row(i);
            const std::size_t key = base + tile_part<P>::column(j);
            P weight = 0;
            P gradient = 0;
            if (row < b.query.tokens && key < b.seen.keys_of(row, b.key.tokens)) {
                const P normalizer = *b.log_sum_exp.at(row, head);
                if (normalizer != -std::numeric_limits<P>::infinity()) {
                    weight = std::exp(weights.of[i][j] * static_cast<P>(b.scale) - normalizer);
                    gradient = weight * (scores.of[i][j] - *b.delta.at(row, head)) * static_cast<P>(b.scale);
                }
            }
            weights.of[i][j] = weight;
            scores.of[i][j] = gradient;
        });
    }
    static __device__ void store(const tile_part<P>& from, tile_memory<P>& into) {
        tile_part<P>::each(
            [&](unsigned i, unsigned j) { into.of[tile_part<P>::row(i)][tile_part<P>::column(j)] = from.of[i][j]; });
    }
};

template <class T>
__global__ void __launch_bounds__(tile_threads) tiled_backward_queries(backward_block<T, device_memory> b) {
    using P = accumulator_t<T>;
    __shared__ tile_memory<P> left, right, gradients;
    const std::size_t first = std::size_t{blockIdx.x} * tile;
    const std::size_t head = blockIdx.y;
    const std::size_t column = std::size_t{blockIdx.z} * tile * tile_parts;
    const std::size_t source = head / (b.query.heads / b.key.heads);
    const std::size_t seen = b.seen.keys_of(std::min(first + tile, b.query.tokens) - 1, b.key.tokens);
    tile_part<P> sums[tile_parts];
    for (std::size_t base = 0; base < seen; base += tile) {
        const softmax_gradients<T> of(left, right, b, head, source, first, base);
        of.store(of.scores, gradients);
        __syncthreads();
#pragma unroll
        for (unsigned p = 0; p < tile_parts; ++p) {
            if (column + p * tile >= b.key.width) { break; }
            right.load(b.key, source, base, column + p * tile);
            __syncthreads();
            sums[p].add_product(gradients, right);
            __syncthreads();
        }
    }
#pragma unroll
    for (unsigned p = 0; p < tile_parts; ++p) { add_part(sums[p], b.d_query, head, first, column + p * tile); }
}

template <class T>
__global__ void __launch_bounds__(tile_threads) tiled_backward_keys(backward_block<T, device_memory> b) {
    using P = accumulator_t<T>;
    __shared__ tile_memory<P> left, right, weights, gradients;
    const std::size_t base = std::size_t{blockIdx.x} * tile;
    const std::size_t source = blockIdx.y;
    const std::size_t column = std::size_t{blockIdx.z} * tile * tile_parts;
    const std::size_t group = b.query.heads / b.key.heads;
    // Rows above this one see none of these keys.
    const std::int64_t above =
        b.seen.rule == mask::full ? 0 : b.seen.first_key + static_cast<std::int64_t>(base) - b.seen.first_query;
    const std::size_t from = above > 0 ? static_cast<std::size_t>(above) / tile * tile : 0;
    tile_part<P> key_sums[tile_parts], value_sums[tile_parts];
    for (std::size_t head = source * group; head < (source + 1) * group; ++head) {
        for (std::size_t first = from; first < b.query.tokens; first += tile) {
            const softmax_gradients<T> of(left, right, b, head, source, first, base);
            of.store(of.weights, weights);
            of.store(of.scores, gradients);
            __syncthreads();
#pragma unroll
            for (unsigned p = 0; p < tile_parts; ++p) {
                if (column + p * tile >= b.key.width) { break; }
                left.load(b.query, head, first, column + p * tile);
                right.load(b.d_out, head, first, column + p * tile);
                __syncthreads();
                key_sums[p].add_transposed(gradients, left);
                value_sums[p].add_transposed(weights, right);
                __syncthreads();
            }
        }
    }
#pragma unroll
    for (unsigned p = 0; p < tile_parts; ++p) {
        add_part(key_sums[p], b.d_key, source, base, column + p * tile);
        add_part(value_sums[p], b.d_value, source, base, column + p * tile);
    }
}

template <class Block>
void start_tiles(const cuda_queue& q, std::string_view name, void (*kernel)(Block), std::size_t rows, std::size_t heads,
                 std::size_t width, const Block& block) {
    constexpr std::size_t columns = tile * tile_parts;
    if (heads > 65535 || rows / tile > 0x7ffffffe) {
        throw usage_error(formatted("{}: {} rows of {} heads are too many for one launch", name, rows, heads));
    }
    const tutti::detail::on_device scope(q.device());
    kernel<<<dim3(static_cast<unsigned>((rows + tile - 1) / tile), static_cast<unsigned>(heads),
                  static_cast<unsigned>((width + columns - 1) / columns)),
             tile_threads, 0, q.stream()>>>(block);
    tutti::detail::check_cuda(cudaGetLastError(), name);
}

}  // namespace detail

/// The block kernel of CUDA queues that takes everything.
///
/// Semantics    as block_attention says; a query whose scores are all -inf counts as one that sees no key.
/// Units        products and sums are in accumulator_t<T>, by the units of that type: no tensor cores.
/// Determinism  the same block gives the same bits: every result is summed by one thread, in one order.
/// Cost         a launch forward, two backward. Per pair of query and key: 4 flops a number of width forward and 14
///              backward, which computes scores and their gradients twice; for each 128 numbers of width once more.
template <floating_element T> struct tiled_attention {
    using element_type = T;
    using queue_type = cuda_queue;

    void forward(const cuda_queue& q, const forward_block<T, device_memory>& b) const {
        if (b.query.empty()) { return; }
        detail::start_tiles(q, "attention", detail::tiled_forward<T>, b.query.tokens, b.query.heads, b.query.width, b);
    }
    void backward(const cuda_queue& q, const backward_block<T, device_memory>& b) const {
        if (b.query.empty() || b.key.empty()) { return; }
        detail::start_tiles(q, "attention backward", detail::tiled_backward_queries<T>, b.query.tokens, b.query.heads,
                            b.query.width, b);
        detail::start_tiles(q, "attention backward", detail::tiled_backward_keys<T>, b.key.tokens, b.key.heads,
                            b.key.width, b);
    }
};
static_assert(block_attention<tiled_attention<float>>);

}  // namespace tutti::sequence
