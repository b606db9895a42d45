// The device side of compress/level_errors: partial sums a block, added up in order by a second launch.
// Needs core/cuda_run, CUB (its radix sort) and nvcc. No host waits; segments travel in the kernels' parameters.
// Source: as compress/level_errors.hpp.
#pragma once

#include <algorithm>    // max
#include <cstddef>      // size_t, byte
#include <cstdint>      // keys
#include <limits>       // NaN
#include <span>         // pieces
#include <string_view>  // names
#include <vector>       // pieces

#include <cub/device/device_radix_sort.cuh>  // magnitudes in order

#include <tutti/compress/detail/batch.cuh>                   // batches
#include <tutti/compress/detail/level_error_operations.hpp>  // operations
#include <tutti/compress/level_errors.hpp>                   // what it is the device side of
#include <tutti/compress/power_sgd.cuh>                      // the iteration
#include <tutti/core/buffer.hpp>                             // scratch
#include <tutti/core/cuda_queue.hpp>                         // cuda_queue
#include <tutti/core/cuda_run.cuh>                           // start

namespace tutti::compress::detail {

inline constexpr unsigned measuring_warps = 8;
inline constexpr std::size_t run_part = std::size_t{1} << 16;  // elements of a run that one block adds up
inline constexpr std::size_t buckets_of_block = 128;
inline constexpr std::size_t most_widths = 8;  // of a grid: bits are 1 to 8

/// `count` numbers, `stride` apart, that become one.
struct partial_sums {
    const double* from;
    double* to;
    std::size_t count, stride;
};
/// Determinism  a number goes to the lane of its place mod 32.
template <class Piece> __global__ void add_partial_sums(const __grid_constant__ batch<Piece> all) {
    const Piece p = all.of[place_of(all, blockIdx.x).piece];
    double sum = 0;
    for (std::size_t i = threadIdx.x; i < p.count; i += 32) { sum += p.from[i * p.stride]; }
    for (unsigned d = 16; d > 0; d /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, static_cast<int>(d)); }
    if (threadIdx.x == 0) { *p.to = sum; }
}
inline void start_partial_sums(const cuda_queue& q, std::string_view name, const std::vector<partial_sums>& all) {
    start_batches(q, name, add_partial_sums<partial_sums>, 32, std::span<const partial_sums>(all),
                  [](const partial_sums&) { return std::size_t{1}; });
}

// Each warp's sums, added up in the warps' order by the threads below `width`.
template <unsigned most> __device__ inline void add_over_warps(const double (&sums)[most], unsigned width, double* to) {
    __shared__ double of_warp[measuring_warps][most];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (unsigned i = 0; i < most; ++i) { of_warp[threadIdx.x / 32][i] = sums[i]; }
    }
    __syncthreads();
    if (threadIdx.x < width) {
        double total = 0;
        for (unsigned w = 0; w < measuring_warps; ++w) { total += of_warp[w][threadIdx.x]; }
        to[threadIdx.x] = total;
    }
}
__device__ inline double added_over_warp(double x) {
    for (unsigned d = 16; d > 0; d /= 2) { x += __shfl_xor_sync(0xffffffffu, x, static_cast<int>(d)); }
    return x;
}

template <class T> struct run_piece {
    const T* from;
    double* partial;
    std::size_t count;
};
template <class T>
__global__ void __launch_bounds__(32 * measuring_warps) square_runs(const __grid_constant__ batch<run_piece<T>> all) {
    const block_place place = place_of(all, blockIdx.x);
    const run_piece<T> p = all.of[place.piece];
    const std::size_t first = place.block * run_part;
    const std::size_t end = p.count - first < run_part ? p.count : first + run_part;
    double sum = 0;
#pragma unroll 8
    for (std::size_t i = first + threadIdx.x; i < end; i += 32 * measuring_warps) {
        sum += run_squares<T, device_memory>::square(p.from[i]);
    }
    const double sums[1] = {added_over_warp(sum)};
    add_over_warps(sums, 1, p.partial + place.block);
}

/// Cost  one read, in parts of 2^16 elements; two launches for some 400 runs.
template <floating_element T> void launch(const cuda_queue& q, const run_squares<T, device_memory>& op) {
    std::size_t blocks = 0;
    for (const part& r : op.runs) { blocks += parts_of(r.count, run_part); }
    const buffer<double, cuda_queue> partial(q, blocks);
    std::vector<run_piece<T>> pieces;
    std::vector<partial_sums> sums;
    std::size_t at = 0;
    for (std::size_t r = 0; r < op.runs.size(); ++r) {
        const std::size_t parts = parts_of(op.runs[r].count, run_part);
        pieces.push_back({op.in.data() + op.runs[r].first, partial.data() + at, op.runs[r].count});
        sums.push_back({partial.data() + at, op.sums.data() + r, parts, 1});
        at += parts;
    }
    start_batches(q, op.name, square_runs<T>, 32 * measuring_warps, std::span<const run_piece<T>>(pieces),
                  [](const run_piece<T>& p) { return parts_of(p.count, run_part); });
    start_partial_sums(q, op.name, sums);
}

template <class T> __global__ void write_magnitudes(const T* in, std::uint32_t* out, std::size_t n) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = magnitude(formed(in[i])); }
}

/// Cost  a radix sort, which puts all in order: some ten reads and writes, and scratch for the keys twice.
template <floating_element T> void launch(const cuda_queue& q, const order_magnitudes<T, device_memory>& op) {
    const std::size_t n = op.in.size();
    if (n == 0) { return; }
    const buffer<std::uint32_t, cuda_queue> keys(q, n);
    tutti::detail::start(q, op.name, write_magnitudes<T>, n, 256, op.in.data(), keys.data(), n);
    auto* const out = reinterpret_cast<std::uint32_t*>(op.out.data());
    const tutti::detail::on_device scope(q.device());
    const auto sort = [&](void* scratch, std::size_t& bytes) {
        tutti::detail::check_cuda(
            cub::DeviceRadixSort::SortKeysDescending(scratch, bytes, keys.data(), out, n, 0, 31, q.stream()), op.name);
    };
    std::size_t bytes = 0;
    sort(nullptr, bytes);
    const buffer<std::byte, cuda_queue> scratch(q, std::max<std::size_t>(bytes, 1));
    sort(scratch.data(), bytes);
}

struct measured_widths {
    unsigned bits[most_widths];
    unsigned count;
};
template <class T> struct losses_piece {
    const T* in;
    double* partial;
    std::size_t size;
};

inline constexpr unsigned most_of_lane = static_cast<unsigned>(largest_bucket) / 32;
template <class Fold>
__device__ inline typename Fold::type folded_by_warp(const float (&x)[most_of_lane], unsigned n, unsigned lane) {
    auto folded = Fold::identity;
#pragma unroll
    for (unsigned j = 0; j < most_of_lane; ++j) {
        if (lane + 32 * j < n) { folded = Fold::combine(folded, Fold::lift(x[j])); }
    }
    for (unsigned d = 16; d > 0; d /= 2) {
        folded = Fold::combine(folded, __shfl_xor_sync(0xffffffffu, folded, static_cast<int>(d)));
    }
    return folded;
}
template <class... Fold>
__device__ inline typename folds<Fold...>::results measured_by_warp(folds<Fold...>, const float (&x)[most_of_lane],
                                                                    unsigned n, unsigned lane) {
    return typename folds<Fold...>::results(folded_by_warp<Fold>(x, n, lane)...);
}

// A warp has a bucket at a time, in its registers, and goes over it once a level.
template <class C, class T>
__global__ void __launch_bounds__(32 * measuring_warps)
    measure_buckets(const __grid_constant__ batch<losses_piece<T>> all, const __grid_constant__ C scheme,
                    const __grid_constant__ measured_widths levels) {
    const block_place place = place_of(all, blockIdx.x);
    const losses_piece<T> p = all.of[place.piece];
    const unsigned lane = threadIdx.x % 32;
    const std::size_t bucket = scheme.granularity();
    const bool by_chance = scheme.mode() == rounding::stochastic;
    double sums[most_widths + 1] = {};
    for (unsigned k = threadIdx.x / 32; k < buckets_of_block; k += measuring_warps) {
        const std::size_t first = (place.block * buckets_of_block + k) * bucket;
        if (first >= p.size) { break; }
        const auto n = static_cast<unsigned>(p.size - first < bucket ? p.size - first : bucket);
        float x[most_of_lane];
        double squares = 0;
#pragma unroll
        for (unsigned j = 0; j < most_of_lane; ++j) {
            const unsigned i = lane + 32 * j;
            x[j] = i < n ? formed(p.in[first + i]) : 0.0f;
            squares += static_cast<double>(x[j]) * static_cast<double>(x[j]);
        }
        sums[0] += added_over_warp(squares);
        const auto measured = measured_by_warp(typename C::folds(), x, n, lane);
#pragma unroll
        for (unsigned l = 0; l < most_widths; ++l) {
            if (l >= levels.count) { continue; }
            const unsigned bits = levels.bits[l];
            const auto coder = scheme.coder(scheme.measured(measured, n, bits), bits);
            if (!coder.finite()) {
                sums[l + 1] = std::numeric_limits<double>::quiet_NaN();
                continue;
            }
            float loss = 0;
#pragma unroll
            for (unsigned j = 0; j < most_of_lane; ++j) {
                if (lane + 32 * j < n) { loss += rounding_loss(coder.place(x[j]), by_chance); }
            }
            const auto unit = static_cast<double>(coder.unit);
            sums[l + 1] += unit * unit * added_over_warp(static_cast<double>(loss));
        }
    }
    const unsigned width = levels.count + 1;
    add_over_warps(sums, width, p.partial + std::size_t{place.block} * width);
}

/// Cost  one read; one launch a batch of segments, and one for some 400 of their sums.
template <class C, floating_element T> void launch(const cuda_queue& q, const bucket_losses<C, T, device_memory>& op) {
    measured_widths levels{};
    levels.count = static_cast<unsigned>(op.levels.size());  // ascending bits: no more than there are
    for (std::size_t l = 0; l < op.levels.size(); ++l) { levels.bits[l] = op.bits(l); }
    const std::size_t width = op.levels.size() + 1;
    const std::size_t share = op.scheme.granularity() * buckets_of_block;
    std::size_t blocks = 0;
    for (const segment& s : op.all) { blocks += parts_of(s.size(), share); }
    const buffer<double, cuda_queue> partial(q, blocks * width);
    std::vector<losses_piece<T>> pieces;
    std::vector<partial_sums> sums;
    std::size_t at = 0;
    for (std::size_t t = 0; t < op.all.size(); ++t) {
        const segment& s = op.all[t];
        const std::size_t parts = parts_of(s.size(), share);
        pieces.push_back({op.in.data() + s.offset, partial.data() + at * width, s.size()});
        for (std::size_t i = 0; i < width; ++i) {
            sums.push_back({partial.data() + at * width + i, op.rows.data() + t * width + i, parts, width});
        }
        at += parts;
    }
    start_batches(
        q, op.name, measure_buckets<C, T>, 32 * measuring_warps, std::span<const losses_piece<T>>(pieces),
        [share](const losses_piece<T>& p) { return parts_of(p.size, share); }, op.scheme, levels);
    start_partial_sums(q, op.name, sums);
}

template <class O> __global__ void finish_each_row(const O op) {
    const std::size_t r = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (r < op.rows.size() / op.width) { op.finish(r); }
}
inline void launch(const cuda_queue& q, const finish_rows<device_memory>& op) {
    tutti::detail::start(q, op.name, finish_each_row<finish_rows<device_memory>>, op.rows.size() / op.width, 64, op);
}

}  // namespace tutti::compress::detail
