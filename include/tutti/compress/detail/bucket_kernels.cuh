// The kernels of the compressors of buckets: a group of threads measures and codes a bucket in registers.
// Needs core/cuda_run, compress/detail/bucket_operations and nvcc. Segments travel in the kernel's parameters: nothing
// is uploaded, so a call can be captured in a graph and nothing has to outlive it.
#pragma once

#include <cmath>    // fabs
#include <cstddef>  // size_t, byte
#include <cstdint>  // codes

#include <tutti/compress/detail/bucket_operations.hpp>  // operations
#include <tutti/core/cuda_run.cuh>                      // pack

namespace tutti::compress {

namespace detail {

inline constexpr unsigned bucket_threads = 256;

/// A segment as kernels see it: its buckets are counted from `begin`, its wire and its codes begin at bytes.
struct placed_segment {
    std::size_t begin, offset, first, size, wire, codes;
    std::uint32_t tensor, bits;
};
template <std::size_t capacity> struct segment_table {
    std::size_t buckets;
    unsigned count;
    placed_segment of[capacity];
};
inline constexpr std::size_t few_segments = 16;    // what costs nothing beside a launch
inline constexpr std::size_t many_segments = 560;  // nearly the 32,764 bytes that parameters may have

/// What a thread works on.
struct bucket_place {
    placed_segment s;
    std::size_t first;  ///< element of the segment
    std::size_t meta;   ///< byte of the wire where the bucket's is
    int n;              ///< elements of the bucket; none beyond the last bucket
    unsigned lane;      ///< of the group
    bool last;          ///< of the segment
};
template <class Meta, std::size_t capacity>
__device__ inline bucket_place place_of(const segment_table<capacity>& t, std::size_t bucket, unsigned threads) {
    const auto shift = static_cast<unsigned>(__ffs(static_cast<int>(threads))) - 1;
    const std::size_t number = std::size_t{blockIdx.x} * (bucket_threads >> shift) + (threadIdx.x >> shift);
    unsigned at = 0;
    for (unsigned beyond = t.count; beyond - at > 1;) {
        const unsigned middle = (at + beyond) / 2;
        (t.of[middle].begin <= number ? at : beyond) = middle;
    }
    bucket_place p{};
    p.s = t.of[at];
    p.lane = threadIdx.x & (threads - 1);
    const std::size_t b = number - p.s.begin;
    p.first = b * bucket;
    p.meta = p.s.wire + b * sizeof(Meta);
    const std::size_t rest = number < t.buckets ? p.s.size - p.first : 0;
    p.n = static_cast<int>(rest < bucket ? rest : bucket);
    p.last = rest <= bucket;
    return p;
}

// The first of this thread's codes.
template <class Byte> __device__ inline Byte* codes_of(Byte* wire, const bucket_place& p) {
    return wire + p.s.codes + (p.first / chunk + p.lane) * p.s.bits;
}

template <class T> __device__ inline bool packs_at(const T* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
// Elements of a chunk of which `count` exist; others are zero.
template <bool whole, class T>
__device__ inline void load_chunk(const T* from, int count, bool aligned, T (&to)[chunk]) {
    constexpr unsigned width = 16 / sizeof(T);
    if (whole || (aligned && count >= static_cast<int>(chunk))) {
#pragma unroll
        for (unsigned at = 0; at < chunk; at += width) {
            tutti::detail::pack<T, width> some;
            some.load(from + at);
#pragma unroll
            for (unsigned j = 0; j < width; ++j) { to[at + j] = some.of[j]; }
        }
    } else {
#pragma unroll
        for (int j = 0; j < static_cast<int>(chunk); ++j) { to[j] = j < count ? from[j] : T{}; }
    }
}
template <bool whole, class T>
__device__ inline void store_chunk(T* to, int count, bool aligned, const T (&from)[chunk]) {
    constexpr unsigned width = 16 / sizeof(T);
    if (whole || (aligned && count >= static_cast<int>(chunk))) {
#pragma unroll
        for (unsigned at = 0; at < chunk; at += width) {
            tutti::detail::pack<T, width> some;
#pragma unroll
            for (unsigned j = 0; j < width; ++j) { some.of[j] = from[at + j]; }
            some.store(to + at);
        }
    } else {
#pragma unroll
        for (int j = 0; j < static_cast<int>(chunk); ++j) {
            if (j < count) { to[j] = from[j]; }
        }
    }
}
// The `bits` bytes of a chunk's codes. Codes begin at 16 bytes: a chunk of a power of two of bytes is aligned to it.
__device__ inline std::uint64_t load_codes(const std::byte* from, unsigned bits) {
    if (bits == 4) { return *reinterpret_cast<const std::uint32_t*>(from); }
    if (bits == 8) { return *reinterpret_cast<const std::uint64_t*>(from); }
    if (bits == 2) { return *reinterpret_cast<const std::uint16_t*>(from); }
    std::uint64_t number = 0;
    for (unsigned i = 0; i < bits; ++i) {
        number |= static_cast<std::uint64_t>(*reinterpret_cast<const std::uint8_t*>(from + i)) << (8 * i);
    }
    return number;
}
__device__ inline void store_codes(std::byte* to, unsigned bits, std::uint64_t number) {
    if (bits == 4) {
        *reinterpret_cast<std::uint32_t*>(to) = static_cast<std::uint32_t>(number);
    } else if (bits == 8) {
        *reinterpret_cast<std::uint64_t*>(to) = number;
    } else if (bits == 2) {
        *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(number);
    } else {
        for (unsigned i = 0; i < bits; ++i) {
            *reinterpret_cast<std::uint8_t*>(to + i) = static_cast<std::uint8_t>(number >> (8 * i));
        }
    }
}

template <class Fold, bool whole, unsigned each, class R>
__device__ inline typename Fold::type folded_by_group(const R (&x)[each][chunk], const bucket_place& p,
                                                      unsigned threads) {
    typename Fold::type partial[chunk];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const int left = p.n - static_cast<int>((p.lane + threads * k) * chunk);
#pragma unroll
        for (int j = 0; j < static_cast<int>(chunk); ++j) {
            const auto lifted = whole || j < left ? Fold::lift(static_cast<float>(x[k][j])) : Fold::identity;
            partial[j] = k == 0 ? lifted : Fold::combine(partial[j], lifted);
        }
    }
#pragma unroll
    for (unsigned d = chunk / 2; d > 0; d /= 2) {
#pragma unroll
        for (unsigned j = 0; j < d; ++j) { partial[j] = Fold::combine(partial[j], partial[j + d]); }
    }
    for (unsigned d = threads / 2; d > 0; d /= 2) {
        partial[0] = Fold::combine(partial[0], __shfl_xor_sync(0xffffffffu, partial[0], static_cast<int>(d)));
    }
    return partial[0];
}
template <bool whole, unsigned each, class R, class... Fold>
__device__ inline typename folds<Fold...>::results results_of(folds<Fold...>, const R (&x)[each][chunk],
                                                              const bucket_place& p, unsigned threads) {
    return typename folds<Fold...>::results(folded_by_group<Fold, whole, each>(x, p, threads)...);
}

template <bool whole, unsigned each, class O>
__device__ inline void encode_place(const O& op, const bucket_place& p, const keyed_stream& stream, unsigned threads) {
    using real = typename O::real;
    using T = typename decltype(op.in)::value_type;
    using meta = typename decltype(op.scheme)::meta;
    const std::size_t at = p.s.offset + p.first;
    const T* const in = op.in.data() + at;
    float* const left = op.residual.empty() ? nullptr : op.residual.data() + at;
    std::byte* const wire = op.wire.data();
    const bool in_packs = packs_at(in), left_packs = packs_at(left);

    real x[each][chunk];
    {
        T loaded[each][chunk];
        float kept[each][chunk];
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            const unsigned i = (p.lane + threads * k) * chunk;
            load_chunk<whole>(in + i, p.n - static_cast<int>(i), in_packs, loaded[k]);
        }
        if (left != nullptr) {
#pragma unroll
            for (unsigned k = 0; k < each; ++k) {
                const unsigned i = (p.lane + threads * k) * chunk;
                load_chunk<whole>(left + i, p.n - static_cast<int>(i), left_packs, kept[k]);
            }
        }
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                x[k][j] = static_cast<real>(loaded[k][j]);
                if (left != nullptr) { x[k][j] = (exact(x[k][j]) + exact(static_cast<real>(kept[k][j]))).value; }
            }
        }
    }
    const auto measured = results_of<whole, each>(typename decltype(op.scheme)::folds(), x, p, threads);
    if (!whole && p.n == 0) { return; }
    const meta m = op.scheme.measured(measured, static_cast<std::size_t>(p.n), p.s.bits);
    if (p.lane == 0) { *reinterpret_cast<meta*>(wire + p.meta) = m; }
    const auto coder = op.scheme.coder(m, p.s.bits);
    std::byte* const codes_at = codes_of(wire, p);
    const std::uint64_t first_block = (p.s.first + p.first) / chunk + p.lane;
    const bool finite = coder.finite();
    const bool draws = op.scheme.mode() == rounding::stochastic;
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const unsigned i = (p.lane + threads * k) * chunk;
        const int count = p.n - static_cast<int>(i);
        if (!whole && count <= 0) { continue; }
        std::uint32_t codes[chunk] = {};
        if (finite) {
            if (draws) {
                const auto block = stream.block(first_block + threads * k, p.s.tensor);
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) {
                    codes[j] = coder.code(static_cast<float>(x[k][j]), half_of(block, j));
                }
            } else {
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) { codes[j] = coder.code(static_cast<float>(x[k][j])); }
            }
            if (!whole) {
#pragma unroll
                for (int j = 0; j < static_cast<int>(chunk); ++j) { codes[j] = j < count ? codes[j] : 0; }
            }
        }
        store_codes(codes_at + threads * k * p.s.bits, p.s.bits, packed(codes, p.s.bits));
        if (left != nullptr) {
            float rest[chunk];
            if (finite) {
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) {
                    const exact decoded(static_cast<real>(coder.value(codes[j])));
                    rest[j] = static_cast<float>((exact(x[k][j]) - decoded).value);
                }
            } else {
                load_chunk<whole>(left + i, count, left_packs, rest);
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) { rest[j] = std::fabs(rest[j]) < infinite_from ? rest[j] : 0.0f; }
            }
            store_chunk<whole>(left + i, count, left_packs, rest);
        }
    }
    if (p.last) {  // the zeros that fill up the segment's wire
        for (std::size_t b = p.meta + sizeof(meta) + p.lane; b < p.s.codes; b += threads) { wire[b] = std::byte{0}; }
        const std::size_t bytes = chunks_of(p.s.size) * p.s.bits;
        for (std::size_t b = bytes + p.lane; b < aligned_wire(bytes); b += threads) {
            wire[p.s.codes + b] = std::byte{0};
        }
    }
}

template <unsigned each, class O, class Table>
__global__ void __launch_bounds__(bucket_threads)
    encode_kernel(const __grid_constant__ O op, const __grid_constant__ Table table,
                  const __grid_constant__ keyed_stream stream, unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    const std::size_t at = p.s.offset + p.first;
    const bool full = p.n == static_cast<int>(threads * each * chunk) && packs_at(op.in.data() + at) &&
                      (op.residual.empty() || packs_at(op.residual.data() + at));
    // Together: threads of a warp exchange what they measured.
    if (__all_sync(0xffffffffu, full)) {
        encode_place<true, each>(op, p, stream, threads);
    } else {
        encode_place<false, each>(op, p, stream, threads);
    }
}

template <bool whole, unsigned each, class O>
__device__ inline void decode_place(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    T* const out = op.out.data() + p.s.offset + p.first;
    const bool aligned = packs_at(out);
    const std::byte* const wire = op.wire.data();
    const auto coder =
        op.scheme.coder(*reinterpret_cast<const typename decltype(op.scheme)::meta*>(wire + p.meta), p.s.bits);
    const std::byte* const codes_at = codes_of(wire, p);
    std::uint64_t numbers[each];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const unsigned i = (p.lane + threads * k) * chunk;
        numbers[k] = whole || static_cast<int>(i) < p.n ? load_codes(codes_at + threads * k * p.s.bits, p.s.bits) : 0;
    }
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const unsigned i = (p.lane + threads * k) * chunk;
        std::uint32_t codes[chunk];
        unpacked(numbers[k], p.s.bits, codes);
        T values[chunk];
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) { values[j] = op.result(coder.value(codes[j])); }
        store_chunk<whole>(out + i, p.n - static_cast<int>(i), aligned, values);
    }
}

template <unsigned each, class O, class Table>
__global__ void __launch_bounds__(bucket_threads)
    decode_kernel(const __grid_constant__ O op, const __grid_constant__ Table table, unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * each * chunk) && packs_at(op.out.data() + p.s.offset + p.first)) {
        decode_place<true, each>(op, p, threads);
    } else {
        decode_place<false, each>(op, p, threads);
    }
}

template <bool whole, unsigned each, class O>
__device__ inline void add_place(const O& op, const bucket_place& p, unsigned threads) {
    float* const sum = op.sum.data() + p.s.offset + p.first;
    const bool aligned = packs_at(sum);
    const std::size_t stride = op.wires.size() / op.count;
    float sums[each][chunk];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const unsigned i = (p.lane + threads * k) * chunk;
        load_chunk<whole>(sum + i, p.n - static_cast<int>(i), aligned, sums[k]);
    }
    for (std::size_t w = 0; w < op.count; ++w) {
        const std::byte* const wire = op.wires.data() + w * stride;
        const auto coder =
            op.scheme.coder(*reinterpret_cast<const typename decltype(op.scheme)::meta*>(wire + p.meta), p.s.bits);
        const std::byte* const codes_at = codes_of(wire, p);
#pragma unroll
        for (unsigned k = 0; k < each; ++k) {
            const unsigned i = (p.lane + threads * k) * chunk;
            if (!whole && static_cast<int>(i) >= p.n) { continue; }
            std::uint32_t codes[chunk];
            unpacked(load_codes(codes_at + threads * k * p.s.bits, p.s.bits), p.s.bits, codes);
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                sums[k][j] = (exact(sums[k][j]) + exact(coder.value(codes[j]))).value;
            }
        }
    }
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        const unsigned i = (p.lane + threads * k) * chunk;
        store_chunk<whole>(sum + i, p.n - static_cast<int>(i), aligned, sums[k]);
    }
}

template <unsigned each, class O, class Table>
__global__ void __launch_bounds__(bucket_threads)
    add_kernel(const __grid_constant__ O op, const __grid_constant__ Table table, unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * each * chunk) && packs_at(op.sum.data() + p.s.offset + p.first)) {
        add_place<true, each>(op, p, threads);
    } else {
        add_place<false, each>(op, p, threads);
    }
}

}  // namespace detail

}  // namespace tutti::compress
