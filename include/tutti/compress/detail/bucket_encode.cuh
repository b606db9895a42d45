// bucket_encode: the kernel of encode_buckets: a group of threads measures a bucket and codes it in registers.
// Needs detail/bucket_measure, detail/bucket_operations and nvcc.
#pragma once

#include <array>        // draws
#include <cmath>        // fabs
#include <cstddef>      // size_t, byte
#include <cstdint>      // codes
#include <type_traits>  // conditional_t

#include <tutti/compress/compressor.hpp>             // aligned_wire
#include <tutti/compress/detail/bits.hpp>            // joined_codes
#include <tutti/compress/detail/bucket_measure.cuh>  // results_of
#include <tutti/compress/detail/bucket_place.cuh>    // place_of
#include <tutti/compress/detail/draws.hpp>           // keyed_stream
#include <tutti/compress/detail/folds.hpp>           // infinite_from
#include <tutti/compress/detail/grid.hpp>            // unlimited_bits
#include <tutti/core/exact.hpp>                      // products and sums rounded separately

namespace tutti::compress::detail {

template <class Coder>
concept raising_coder = requires(const Coder& c) {
    c.raised(1.0f, 0u);
};
template <bool unlimited, class Coder>
__device__ inline void draw_codes(const Coder& coder, const float (&x)[chunk],
                                  const std::array<std::uint32_t, 4>& drawn, paired_codes& codes) {
#pragma unroll
    for (unsigned j = 0; j < chunk / 2; ++j) {
        const std::uint32_t a = half_of(drawn, j), b = half_of(drawn, j + 4);
        if constexpr (unlimited) {
            codes[j] = tops_of(topped_by(coder.steps(x[j]), half_above(drawn, j)),
                               topped_by(coder.steps(x[j + 4]), half_above(drawn, j + 4)));
        } else if constexpr (raising_coder<Coder>) {
            codes[j] = codes_of(coder.raised(x[j], a), coder.raised(x[j + 4], b), coder.last);
        } else {
            codes[j] = coder.code(x[j], a) | coder.code(x[j + 4], b) << 16;
        }
    }
}
template <class Coder>
__device__ inline void round_codes(const Coder& coder, const float (&x)[chunk], paired_codes& codes) {
#pragma unroll
    for (unsigned j = 0; j < chunk / 2; ++j) { codes[j] = coder.code(x[j]) | coder.code(x[j + 4]) << 16; }
}
/// Writes the `bits` bytes of each chunk k that exists(k), `stride` bytes apart. Codes begin at 16 bytes: a chunk of a
/// power of two of bytes is aligned to it.
template <bool unrolled, unsigned each, class Exists>
__device__ inline void store_codes(std::byte* to, int stride, unsigned bits, const joined_codes (&codes)[each],
                                   Exists exists) {
    const auto store = [&](auto one) {
        for_chunks<unrolled, each>([&](unsigned k) {
            if (exists(k)) { one(to + stride * static_cast<int>(k), codes[k]); }
        });
    };
    if (bits == 4) {
        store([](std::byte* at, const joined_codes& c) {
            *reinterpret_cast<std::uint32_t*>(at) = static_cast<std::uint32_t>(c.number(4));
        });
    } else if (bits == 8) {
        store([](std::byte* at, const joined_codes& c) { *reinterpret_cast<std::uint64_t*>(at) = c.number(8); });
    } else if (bits == 2) {
        store([](std::byte* at, const joined_codes& c) {
            *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(c.number(2));
        });
    } else {
        store([=](std::byte* at, const joined_codes& c) {
            const std::uint64_t number = c.number(bits);
            for (unsigned i = 0; i < bits; ++i) {
                *reinterpret_cast<std::uint8_t*>(at + i) = static_cast<std::uint8_t>(number >> (8 * i));
            }
        });
    }
}

/// Whether codes of a few bits have a kernel's part of their own: where memory does not take longer than drawing.
template <class C, class T, bool feedback, bool draws>
inline constexpr bool may_be_unlimited = sizeof(T) == 2 && !feedback && draws && requires {
    C::spans_all;
};

// `whole`: threads of the warp have `each` chunks of elements that all exist, at 16 bytes. `unlimited`: no code needs to
// be limited to the last.
template <bool whole, bool unlimited, bool feedback, bool draws, unsigned each, class O>
__device__ inline void encode_place(const O& op, const bucket_place& p, const keyed_stream& stream, unsigned threads) {
    using real = typename O::real;
    using T = typename decltype(op.in)::value_type;
    using scheme = decltype(op.scheme);
    using meta = typename scheme::meta;
    const int stride = static_cast<int>(threads * chunk), lead = static_cast<int>(p.lane * chunk);
    const T* const in = op.in.data() + (p.s.offset + p.first);
    float* const left = feedback ? op.residual.data() + (p.s.offset + p.first) : nullptr;
    const bool in_packs = packs_at(in), left_packs = packs_at(left);
    const auto index = [&](unsigned k) { return lead + stride * static_cast<int>(k); };
    const auto count = [&](unsigned k) { return p.n - index(k); };
    std::byte* const wire = op.wire.data();

    // What does not exist counts as nothing in sums, and as the first element among extremes.
    constexpr bool zeros = whole || ordered_sums<typename scheme::folds>;
    const T none = zeros || p.n == 0 ? T{} : in[0];
    const float none_left = zeros || !feedback || p.n == 0 ? 0.0f : left[0];
    std::conditional_t<feedback || sizeof(T) != 2, held_chunk<real>, held_pairs<T>> x[each];
    for_chunks<whole, each>([&](unsigned k) {
        x[k].template load<whole>(in + index(k), count(k), in_packs, none);
        if constexpr (feedback) {
            float kept[chunk];
            load_some<whole>(left + index(k), count(k), left_packs, kept, none_left);
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                x[k].of[j] = (exact(x[k].of[j]) + exact(static_cast<real>(kept[j]))).value;
            }
        }
    });
    // A whole bucket has a power of two of blocks and begins at a multiple of it: the upper word of their numbers is one,
    // and what the first rounds make of it is made once.
    const std::uint64_t first_block = (p.s.first + p.first) / chunk;
    const auto block = [&](unsigned k) {
        const std::uint64_t number = first_block + (p.lane + threads * k);
        return stream.block(static_cast<std::uint32_t>(number),
                            static_cast<std::uint32_t>((whole ? first_block : number) >> 32), p.s.tensor);
    };
    // While elements arrive: what is drawn for the first of them, held back from where it is used, and zeros.
    constexpr bool early = whole && unlimited;
    std::array<std::uint32_t, 4> first{};
    if constexpr (early) {
        first = block(0);
        asm volatile("" : "+r"(first[0]), "+r"(first[1]), "+r"(first[2]), "+r"(first[3]));
    }
    if (p.last && p.n != 0) {  // those fill up the segment's wire
        for (std::size_t b = p.meta + sizeof(meta) + p.lane; b < p.s.codes; b += threads) { wire[b] = std::byte{0}; }
        const std::size_t bytes = chunks_of(p.s.size) * p.s.bits;
        for (std::size_t b = bytes + p.lane; b < aligned_wire(bytes); b += threads) {
            wire[p.s.codes + b] = std::byte{0};
        }
    }
    const auto measured = results_of<whole>(typename scheme::folds(), x, threads);
    if (!whole && p.n == 0) { return; }
    const meta m = op.scheme.measured(measured, static_cast<std::size_t>(p.n), p.s.bits);
    if (p.lane == 0) { *reinterpret_cast<meta*>(wire + p.meta) = m; }
    const auto coder = op.scheme.coder(m, p.s.bits);
    const bool finite = coder.finite();

    joined_codes joined[each];
    for_chunks<whole, each>([&](unsigned k) {
        float value[chunk];
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) { value[j] = static_cast<float>(x[k].number(j)); }
        paired_codes codes;
        if constexpr (draws) {
            draw_codes<unlimited>(coder, value, early && k == 0 ? first : block(k), codes);
        } else {
            round_codes(coder, value, codes);
        }
        if constexpr (!whole) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(chunk / 2); ++j) {
                codes[j] = j + 4 < count(k) ? codes[j] : j < count(k) ? codes[j] & 0xffffu : 0;
            }
        }
        joined[k].join(codes, p.s.bits);
        if constexpr (feedback) {
            float rest[chunk];
#pragma unroll
            for (unsigned j = 0; j < chunk; ++j) {
                const std::uint32_t one = j < 4 ? codes[j] & 0xffffu : codes[j - 4] >> 16;
                const exact decoded(static_cast<real>(coder.value(one)));
                rest[j] = static_cast<float>((exact(x[k].number(j)) - decoded).value);
            }
            if (!finite) {
                load_some<whole>(left + index(k), count(k), left_packs, rest);
#pragma unroll
                for (unsigned j = 0; j < chunk; ++j) { rest[j] = std::fabs(rest[j]) < infinite_from ? rest[j] : 0.0f; }
            }
            store_some<whole>(left + index(k), count(k), left_packs, rest);
        }
    });
    for_chunks<whole, each>([&](unsigned k) {
        if (!finite) { joined[k] = {0, 0}; }
    });
    std::byte* const codes_at = wire + p.s.codes + (p.first / chunk + p.lane) * p.s.bits;
    store_codes<whole>(codes_at, static_cast<int>(threads * p.s.bits), p.s.bits, joined,
                       [&](unsigned k) { return whole || count(k) > 0; });
}

// Apart, and by value: what is indexed in a loop there would keep the other's elements out of registers.
template <bool feedback, bool draws, unsigned each, class O>
__device__ __noinline__ void encode_part(const O& op, const bucket_place p, const keyed_stream& stream,
                                         unsigned threads) {
    encode_place<false, false, feedback, draws, each>(op, p, stream, threads);
}

// Blocks of a multiprocessor: as many as the registers for a thread's elements allow.
template <unsigned each, bool feedback, class real>
inline constexpr unsigned encoding_blocks = sizeof(real) > 4 ? 2 : (each == 4 ? 6 : 8) - (feedback ? 2 : 0);

/// Chunks of a thread at most. Pairs of 16-bit elements need half of the registers.
template <class C, class T, bool feedback>
inline constexpr unsigned most_chunks = sizeof(T) > 2 || feedback || ordered_sums<typename C::folds> ? 4 : 8;

template <unsigned each, bool feedback, bool draws, class O>
__global__ void __launch_bounds__(bucket_threads, (encoding_blocks<each, feedback, typename O::real>))
    encode_kernel(const __grid_constant__ O op, const __grid_constant__ segment_table table,
                  const __grid_constant__ keyed_stream stream, unsigned threads) {
    using scheme = decltype(op.scheme);
    const bucket_place p = place_of<typename scheme::meta>(table, op.scheme.granularity(), threads);
    const std::size_t at = p.s.offset + p.first;
    const bool full = p.n == static_cast<int>(threads * each * chunk) && packs_at(op.in.data() + at) &&
                      (!feedback || packs_at(op.residual.data() + at));
    // Together: threads of a warp exchange what they measured.
    if constexpr (may_be_unlimited<scheme, typename decltype(op.in)::value_type, feedback, draws>) {
        if (__all_sync(0xffffffffu, full && p.s.bits <= unlimited_bits)) {
            return encode_place<true, true, feedback, draws, each>(op, p, stream, threads);
        }
    }
    if (__all_sync(0xffffffffu, full)) {
        encode_place<true, false, feedback, draws, each>(op, p, stream, threads);
    } else {
        encode_part<feedback, draws, each>(op, p, stream, threads);
    }
}

}  // namespace tutti::compress::detail
