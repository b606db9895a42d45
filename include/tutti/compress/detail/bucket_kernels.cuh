// The kernels of the compressors of buckets: a group of threads measures and codes a bucket in registers.
// Needs core/cuda_run, compress/detail/bucket_operations and nvcc. Segments travel in the kernel's parameters: nothing
// is uploaded, so a call can be captured in a graph and nothing has to outlive it.
#pragma once

#include <array>    // draws
#include <cmath>    // fabs
#include <cstddef>  // size_t, byte
#include <cstdint>  // codes
#include <utility>  // declval

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

template <class T> __device__ inline bool packs_at(const T* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
// Neighbors of which `count` exist; others are zero. `aligned`: the first is at 16 bytes. `whole`: so it is, all exist.
template <bool whole, class T, std::size_t n>
__device__ inline void load_some(const T* from, int count, bool aligned, T (&to)[n]) {
    constexpr unsigned width = 16 / sizeof(T) < n ? 16 / sizeof(T) : n;
    if (whole || (aligned && count >= static_cast<int>(n))) {
#pragma unroll
        for (unsigned at = 0; at < n; at += width) {
            tutti::detail::pack<T, width> some;
            some.load(from + at);
#pragma unroll
            for (unsigned j = 0; j < width; ++j) { to[at + j] = some.of[j]; }
        }
    } else {
#pragma unroll
        for (int j = 0; j < static_cast<int>(n); ++j) { to[j] = j < count ? from[j] : T{}; }
    }
}
template <bool whole, class T, std::size_t n>
__device__ inline void store_some(T* to, int count, bool aligned, const T (&from)[n]) {
    constexpr unsigned width = 16 / sizeof(T) < n ? 16 / sizeof(T) : n;
    if (whole || (aligned && count >= static_cast<int>(n))) {
#pragma unroll
        for (unsigned at = 0; at < n; at += width) {
            tutti::detail::pack<T, width> some;
#pragma unroll
            for (unsigned j = 0; j < width; ++j) { some.of[j] = from[at + j]; }
            some.store(to + at);
        }
    } else {
#pragma unroll
        for (int j = 0; j < static_cast<int>(n); ++j) {
            if (j < count) { to[j] = from[j]; }
        }
    }
}
// Writes the `bits` bytes of a chunk. Codes begin at 16 bytes: a chunk of a power of two of bytes is aligned to it.
__device__ inline void store_codes(std::byte* to, unsigned bits, std::uint64_t number) {
    if (bits == 4) {
        *reinterpret_cast<std::uint32_t*>(to) = static_cast<std::uint32_t>(number);
    } else if (bits == 8) {
        *reinterpret_cast<std::uint64_t*>(to) = number;
    } else if (bits == 2) {
        *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(number);
    } else if (bits == 1) {
        *reinterpret_cast<std::uint8_t*>(to) = static_cast<std::uint8_t>(number);
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
#pragma unroll
    for (unsigned d = 16; d > 0; d /= 2) {
        const auto both = Fold::combine(partial[0], __shfl_xor_sync(0xffffffffu, partial[0], static_cast<int>(d)));
        partial[0] = d < threads ? both : partial[0];
    }
    return partial[0];
}
template <bool whole, unsigned each, class R, class... Fold>
__device__ inline typename folds<Fold...>::results results_of(folds<Fold...>, const R (&x)[each][chunk],
                                                              const bucket_place& p, unsigned threads) {
    return typename folds<Fold...>::results(folded_by_group<Fold, whole, each>(x, p, threads)...);
}

template <bool whole, bool feedback, unsigned each, class O>
__device__ inline void encode_place(const O& op, const bucket_place& p, const keyed_stream& stream, unsigned threads) {
    using real = typename O::real;
    using T = typename decltype(op.in)::value_type;
    using meta = typename decltype(op.scheme)::meta;
    const std::size_t at = p.s.offset + p.first;
    const T* const in = op.in.data() + at;
    float* const left = feedback ? op.residual.data() + at : nullptr;
    std::byte* const wire = op.wire.data();
    const bool in_packs = packs_at(in), left_packs = packs_at(left);
    const auto index = [&](unsigned k) { return (p.lane + threads * k) * static_cast<unsigned>(chunk); };
    const auto count = [&](unsigned k) { return p.n - static_cast<int>(index(k)); };

    T loaded[each][chunk];
    float kept[each][chunk];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        load_some<whole>(in + index(k), count(k), in_packs, loaded[k]);
        if constexpr (feedback) { load_some<whole>(left + index(k), count(k), left_packs, kept[k]); }
    }
    // Draws need no elements: they are made while those are on their way. In a loop: out of straight code, the compiler
    // moves the first use of the elements, and waits for them, to before the draws.
    std::array<std::uint32_t, 4> drawn[each];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        drawn[k] = stream.start((p.s.first + p.first) / chunk + p.lane + threads * k, p.s.tensor);
    }
    const bool draws = op.scheme.mode() == rounding::stochastic;
    constexpr unsigned at_once = keyed_stream::rounds / 2;
#pragma unroll 1
    for (unsigned first = 0; first < (draws ? keyed_stream::rounds : 0); first += at_once) {
#pragma unroll
        for (unsigned r = 0; r < at_once; ++r) {
#pragma unroll
            for (unsigned k = 0; k < each; ++k) { drawn[k] = stream.round(drawn[k], first + r); }
        }
    }
    real x[each][chunk];
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) {
            x[k][j] = static_cast<real>(loaded[k][j]);
            if constexpr (feedback) { x[k][j] = (exact(x[k][j]) + exact(static_cast<real>(kept[k][j]))).value; }
        }
    }
    const auto measured = results_of<whole, each>(typename decltype(op.scheme)::folds(), x, p, threads);
    if (!whole && p.n == 0) { return; }
    const meta m = op.scheme.measured(measured, static_cast<std::size_t>(p.n), p.s.bits);
    if (p.lane == 0) { *reinterpret_cast<meta*>(wire + p.meta) = m; }
    const auto coder = op.scheme.coder(m, p.s.bits);
    const bool finite = coder.finite();
    std::byte* const codes_at = wire + p.s.codes + (p.first / chunk + p.lane) * p.s.bits;
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
        if (!whole && count(k) <= 0) { continue; }
        std::uint32_t codes[chunk] = {};
        if (finite && draws) {
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                codes[j] = coder.code(static_cast<float>(x[k][j]), half_of(drawn[k], j));
            }
        } else if (finite) {
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) { codes[j] = coder.code(static_cast<float>(x[k][j])); }
        }
        if constexpr (!whole) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(chunk); ++j) { codes[j] = j < count(k) ? codes[j] : 0; }
        }
        store_codes(codes_at + threads * k * p.s.bits, p.s.bits, packed(codes, p.s.bits));
        if constexpr (feedback) {
            float rest[chunk];
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                const exact decoded(static_cast<real>(coder.value(codes[j])));
                rest[j] = static_cast<float>((exact(x[k][j]) - decoded).value);
            }
            if (!finite) {
                load_some<whole>(left + index(k), count(k), left_packs, rest);
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) { rest[j] = std::fabs(rest[j]) < infinite_from ? rest[j] : 0.0f; }
            }
            store_some<whole>(left + index(k), count(k), left_packs, rest);
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

// Blocks of a multiprocessor: as many as the registers for a thread's elements allow.
template <unsigned each, bool feedback, class real>
inline constexpr unsigned encoding_blocks = sizeof(real) > 4 ? 1 : (each == 4 ? 3 : 4) - (feedback ? 1 : 0);

template <unsigned each, bool feedback, class O, class Table>
__global__ void __launch_bounds__(bucket_threads, (encoding_blocks<each, feedback, typename O::real>))
    encode_kernel(const __grid_constant__ O op, const __grid_constant__ Table table,
                  const __grid_constant__ keyed_stream stream, unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    const std::size_t at = p.s.offset + p.first;
    const bool full = p.n == static_cast<int>(threads * each * chunk) && packs_at(op.in.data() + at) &&
                      (!feedback || packs_at(op.residual.data() + at));
    // Together: threads of a warp exchange what they measured.
    if (__all_sync(0xffffffffu, full)) {
        encode_place<true, feedback, each>(op, p, stream, threads);
    } else {
        encode_place<false, feedback, each>(op, p, stream, threads);
    }
}

/// What decodes a bucket of a wire. Codes are read in fours, which have at most 32 bits: from the word that holds the
/// first, and from the next if the last is there.
template <class C> class bucket_decoder {
    decltype(std::declval<C>().coder(typename C::meta(), 0u)) coder_;
    const std::uint32_t* words_;
    unsigned lead_, bits_;

public:
    __device__ bucket_decoder(const C& scheme, const std::byte* wire, const bucket_place& p)
        : coder_(scheme.coder(*reinterpret_cast<const typename C::meta*>(wire + p.meta), p.s.bits)), bits_(p.s.bits) {
        const std::size_t codes = p.s.codes + p.first / chunk * bits_;
        words_ = reinterpret_cast<const std::uint32_t*>(wire + codes / 4 * 4);
        lead_ = static_cast<unsigned>(codes % 4 * 8);
    }
    /// Codes i to i + 3 of the bucket, which begins at a chunk; i is a multiple of four.
    [[nodiscard]] __device__ std::uint32_t four(unsigned i) const {
        const unsigned at = lead_ + i * bits_;
        std::uint64_t some = words_[at / 32];
        if (at % 32 + 4 * bits_ > 32) { some |= std::uint64_t{words_[at / 32 + 1]} << 32; }
        return static_cast<std::uint32_t>(some >> (at % 32));
    }
    [[nodiscard]] __device__ float value(std::uint32_t codes, unsigned j) const {
        return coder_.value((codes >> (j * bits_)) & ((1u << bits_) - 1));
    }
};

/// Elements that a thread decodes, in packs of which a warp writes neighbors: those of 16 bytes, of four at least.
inline constexpr unsigned decoded_each = 16;
template <class T> inline constexpr unsigned decoded_width = sizeof(T) == 2 ? 8 : 4;

template <bool whole, class O>
__device__ inline void decode_place(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    constexpr unsigned width = decoded_width<T>;
    T* const out = op.out.data() + p.s.offset + p.first;
    const bool aligned = packs_at(out);
    const bucket_decoder decoder(op.scheme, op.wire.data(), p);
    std::uint32_t codes[decoded_each / 4];
    const auto index = [&](unsigned k) { return (p.lane + threads * (k / width)) * width + k % width; };
#pragma unroll
    for (unsigned k = 0; k < decoded_each; k += 4) {
        codes[k / 4] = whole || static_cast<int>(index(k)) < p.n ? decoder.four(index(k)) : 0;
    }
#pragma unroll
    for (unsigned k = 0; k < decoded_each; k += width) {
        T values[width];
#pragma unroll
        for (unsigned j = 0; j < width; ++j) { values[j] = op.result(decoder.value(codes[(k + j) / 4], j % 4)); }
        store_some<whole>(out + index(k), p.n - static_cast<int>(index(k)), aligned, values);
    }
}

template <bool whole, class O>
__device__ inline void add_place(const O& op, const bucket_place& p, std::size_t stride, unsigned threads) {
    float* const sum = op.sum.data() + p.s.offset + p.first;
    const bool aligned = packs_at(sum);
    float sums[decoded_each / 4][4];
    const auto index = [&](unsigned k) { return (p.lane + threads * k) * 4; };
    const auto count = [&](unsigned k) { return p.n - static_cast<int>(index(k)); };
#pragma unroll
    for (unsigned k = 0; k < decoded_each / 4; ++k) { load_some<whole>(sum + index(k), count(k), aligned, sums[k]); }
#pragma unroll 1
    for (std::size_t w = 0; w < op.count; ++w) {
        const bucket_decoder decoder(op.scheme, op.wires.data() + w * stride, p);
        std::uint32_t codes[decoded_each / 4];
#pragma unroll
        for (unsigned k = 0; k < decoded_each / 4; ++k) {
            codes[k] = whole || count(k) > 0 ? decoder.four(index(k)) : 0;
        }
#pragma unroll
        for (unsigned k = 0; k < decoded_each / 4; ++k) {
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                sums[k][j] = (exact(sums[k][j]) + exact(decoder.value(codes[k], j))).value;
            }
        }
    }
#pragma unroll
    for (unsigned k = 0; k < decoded_each / 4; ++k) { store_some<whole>(sum + index(k), count(k), aligned, sums[k]); }
}

template <class O, class Table>
__global__ void __launch_bounds__(bucket_threads)
    decode_kernel(const __grid_constant__ O op, const __grid_constant__ Table table, unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * decoded_each) && packs_at(op.out.data() + p.s.offset + p.first)) {
        decode_place<true>(op, p, threads);
    } else {
        decode_place<false>(op, p, threads);
    }
}

template <class O, class Table>
__global__ void __launch_bounds__(bucket_threads, 4)
    add_kernel(const __grid_constant__ O op, const __grid_constant__ Table table, std::size_t stride,
               unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * decoded_each) && packs_at(op.sum.data() + p.s.offset + p.first)) {
        add_place<true>(op, p, stride, threads);
    } else {
        add_place<false>(op, p, stride, threads);
    }
}

}  // namespace detail

}  // namespace tutti::compress
