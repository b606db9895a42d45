// The kernels of the compressors of buckets: a group of threads measures and codes a bucket in registers.
// Needs core/cuda_run, compress/detail/bucket_operations and nvcc. Segments travel in the kernel's parameters: nothing
// is uploaded, so a call can be captured in a graph and nothing has to outlive it.
#pragma once

#include <array>        // draws
#include <cmath>        // fabs
#include <concepts>     // same_as
#include <cstddef>      // size_t, byte
#include <cstdint>      // codes
#include <tuple>        // what was measured
#include <type_traits>  // conditional_t
#include <utility>      // declval

#include <tutti/compress/detail/bucket_operations.hpp>  // operations
#include <tutti/compress/detail/grid.hpp>               // unlimited_bits
#include <tutti/core/cuda_run.cuh>                      // pack

namespace tutti::compress {

namespace detail {

inline constexpr unsigned bucket_threads = 128;

/// A segment as kernels see it: its buckets are counted from `begin`, its wire and its codes begin at bytes.
struct placed_segment {
    std::size_t begin, offset, first, size, wire, codes;
    std::uint32_t tensor, bits;
};
inline constexpr unsigned table_segments = 64;  // with all else below the 4 KiB of parameters that every driver takes
struct segment_table {
    std::size_t buckets = 0;
    unsigned count = 0;
    placed_segment of[table_segments];
};

/// What a thread works on.
struct bucket_place {
    placed_segment s;
    std::size_t first;  ///< element of the segment
    std::size_t meta;   ///< byte of the wire where the bucket's is
    int n;              ///< elements of the bucket; none beyond the last bucket
    unsigned lane;      ///< of the group
    bool last;          ///< of the segment
};
template <class Meta>
__device__ inline bucket_place place_of(const segment_table& t, std::size_t bucket, unsigned threads) {
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
// Neighbors of which `count` exist; others are `absent`. `aligned`: the first is at 16 bytes. `whole`: so it is, all exist.
template <bool whole, class T, std::size_t n>
__device__ inline void load_some(const T* from, int count, bool aligned, T (&to)[n], T absent = T{}) {
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
        for (int j = 0; j < static_cast<int>(n); ++j) { to[j] = j < count ? from[j] : absent; }
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

// use(0), ..., use(each - 1). In a loop, what they index is not in registers, but there is less to compile.
template <bool unrolled, unsigned each, class Use> __device__ inline void for_chunks(Use use) {
    if constexpr (unrolled) {
#pragma unroll
        for (unsigned k = 0; k < each; ++k) { use(k); }
    } else {
#pragma unroll 1
        for (unsigned k = 0; k < each; ++k) { use(k); }
    }
}

/// A chunk of elements in a thread's registers.
template <class R> struct held_chunk {
    R of[chunk];

    // As load_some.
    template <bool whole, class T> __device__ void load(const T* from, int count, bool aligned, T absent) {
        T loaded[chunk];
        load_some<whole>(from, count, aligned, loaded, absent);
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) { of[j] = static_cast<R>(loaded[j]); }
    }
    [[nodiscard]] __device__ R number(unsigned j) const { return of[j]; }
};

// Extremes of pairs of 16-bit numbers: half an instruction an element. NaN of any reaches the result.
template <class Fold, class T> __device__ inline std::uint32_t combined_pairs(std::uint32_t a, std::uint32_t b) {
#if __CUDA_ARCH__ >= 800
    std::uint32_t r = 0;
    if constexpr (std::same_as<T, float16> && std::same_as<Fold, lowest>) {
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else if constexpr (std::same_as<T, float16>) {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else if constexpr (std::same_as<Fold, lowest>) {
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
#else
    const auto half = [&](unsigned shift) {
        T x, y;
        x.bits = static_cast<std::uint16_t>(a >> shift);
        y.bits = static_cast<std::uint16_t>(b >> shift);
        return std::uint32_t{T(Fold::combine(static_cast<float>(x), static_cast<float>(y))).bits} << shift;
    };
    return half(0) | half(16);
#endif
}

/// A chunk of 16-bit elements as it was loaded: two in a register, and converted where they are used.
template <class T> struct held_pairs {
    std::uint32_t words[chunk / 2];

    template <bool whole> __device__ void load(const T* from, int count, bool aligned, T absent) {
        if constexpr (whole) {  // not through elements: the compiler would keep those, one a register
            load_some<true>(reinterpret_cast<const std::uint32_t*>(from), 0, true, words);
        } else {
            T loaded[chunk];
            load_some<false>(from, count, aligned, loaded, absent);
#pragma unroll
            for (unsigned j = 0; j < chunk / 2; ++j) {
                words[j] = loaded[2 * j].bits | std::uint32_t{loaded[2 * j + 1].bits} << 16;
            }
        }
    }
    // Conversions elsewhere keep the bits of a NaN, which takes instructions; no code tells one NaN from another.
    [[nodiscard]] __device__ float number(unsigned j) const {
        if constexpr (std::same_as<T, bfloat16>) {
            return __builtin_bit_cast(float, j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000u);
        } else {
            float value = 0;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(words[j / 2] >> (j % 2 * 16))));
            return value;
        }
    }
};

template <class Fold, bool unrolled, unsigned each, class Held>
__device__ inline typename Fold::type folded_by_thread(const Held (&x)[each]) {
    typename Fold::type partial[chunk];
    for_chunks<unrolled, each>([&](unsigned k) {
#pragma unroll
        for (unsigned j = 0; j < chunk; ++j) {
            const auto lifted = Fold::lift(static_cast<float>(x[k].number(j)));
            partial[j] = k == 0 ? lifted : Fold::combine(partial[j], lifted);
        }
    });
#pragma unroll
    for (unsigned d = chunk / 2; d > 0; d /= 2) {
#pragma unroll
        for (unsigned j = 0; j < d; ++j) { partial[j] = Fold::combine(partial[j], partial[j + d]); }
    }
    return partial[0];
}
template <class Fold, bool unrolled, unsigned each, class T>
requires(!Fold::ordered) __device__ inline float folded_by_thread(const held_pairs<T> (&x)[each]) {
    std::uint32_t partial[chunk / 2];
    for_chunks<unrolled, each>([&](unsigned k) {
#pragma unroll
        for (unsigned j = 0; j < chunk / 2; ++j) {
            const std::uint32_t pair = x[k].words[j];
            const std::uint32_t lifted = std::same_as<Fold, largest_magnitude> ? pair & 0x7fff7fffu : pair;
            partial[j] = k == 0 ? lifted : combined_pairs<Fold, T>(partial[j], lifted);
        }
    });
    const std::uint32_t both = combined_pairs<Fold, T>(combined_pairs<Fold, T>(partial[0], partial[1]),
                                                       combined_pairs<Fold, T>(partial[2], partial[3]));
    held_pairs<T> one;
    one.words[0] = combined_pairs<Fold, T>(both, both >> 16);
    return one.number(0);
}
template <bool unrolled, unsigned each, class Held, class... Fold>
__device__ inline typename folds<Fold...>::results results_of(folds<Fold...>, const Held (&x)[each], unsigned threads) {
    typename folds<Fold...>::results all(folded_by_thread<Fold, unrolled>(x)...);
#pragma unroll 1
    for (unsigned d = threads / 2; d > 0; d /= 2) {
        all = std::apply(
            [&](const auto&... one) {
                return typename folds<Fold...>::results(
                    Fold::combine(one, __shfl_xor_sync(0xffffffffu, one, static_cast<int>(d)))...);
            },
            all);
    }
    return all;
}
template <class C> inline constexpr bool ordered_sums = false;
template <class... Fold> inline constexpr bool ordered_sums<folds<Fold...>> = (... || Fold::ordered);

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
template <class T> inline constexpr unsigned decoded_each = sizeof(T) == 2 ? 32 : 16;
template <class T> inline constexpr unsigned decoded_width = sizeof(T) == 2 ? 8 : 4;

// Two numbers as elements in the halves of a word, in one instruction. It gives all NaN the same bits, and so does
// arithmetic: elements one by one would have them, too.
template <class T> __device__ inline std::uint32_t rounded_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    std::uint32_t r = 0;
    if constexpr (std::same_as<T, bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
#else
    return T(low).bits | std::uint32_t{T(high).bits} << 16;
#endif
}

// Value of the code whose `bits` begin at bit `at` of a word. Behind the exponent of 2^23 a mantissa counts ones: a code
// that lies in it is a float after one instruction, and moved down and freed of the 2^23 after another, exactly.
template <unsigned bits, class Coder>
__device__ inline float value_in(const Coder& coder, std::uint32_t word, unsigned at) {
    constexpr std::uint32_t ones = (1u << bits) - 1;
    if constexpr (requires { coder.value_at(1.0f); }) {
        const unsigned away = at + bits > 23 ? 16 : 0, place = at - away;
        // nvcc makes two instructions of what is not written as one.
        std::uint32_t raised = 0;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"  // (a & b) | c
            : "=r"(raised)
            : "r"(word >> away), "r"(ones << place), "r"(__float_as_uint(0x1p23f)));
        const float down = 1.0f / static_cast<float>(1u << place);
        return coder.value_at(__fmaf_rn(__uint_as_float(raised), down, -0x1p23f * down));
    } else {
        return coder.value((word >> at) & ones);
    }
}

// A whole bucket of 16-bit elements at 16 bytes: codes of a chunk are one word at a multiple of its bytes.
template <unsigned bits, class O>
__device__ inline void decode_words(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    using meta = typename decltype(op.scheme)::meta;
    using word = std::conditional_t<bits == 2, std::uint16_t, std::conditional_t<bits == 4, std::uint32_t, uint2>>;
    constexpr unsigned chunks = decoded_each<T> / chunk;
    const auto stride = static_cast<int>(threads);
    const auto* const from = reinterpret_cast<const word*>(op.wire.data() + p.s.codes) + (p.first / chunk + p.lane);
    word codes[chunks];
#pragma unroll
    for (int k = 0; k < static_cast<int>(chunks); ++k) { codes[k] = from[stride * k]; }
    const auto coder = op.scheme.coder(*reinterpret_cast<const meta*>(op.wire.data() + p.meta), bits);
    T* const out = op.out.data() + (p.s.offset + p.first) + p.lane * chunk;
#pragma unroll
    for (int k = 0; k < static_cast<int>(chunks); ++k) {
        std::uint32_t pairs[chunk / 2];
#pragma unroll
        for (unsigned j = 0; j < chunk / 2; ++j) {
            const auto number = [&](unsigned i) {
                const unsigned at = i * bits;
                if constexpr (bits == 8) {
                    return op.scaled(value_in<bits>(coder, at < 32 ? codes[k].x : codes[k].y, at % 32));
                } else {
                    return op.scaled(value_in<bits>(coder, codes[k], at));
                }
            };
            pairs[j] = rounded_pair<T>(number(2 * j), number(2 * j + 1));
        }
        store_some<true>(reinterpret_cast<std::uint32_t*>(out + stride * k * static_cast<int>(chunk)), 0, true, pairs);
    }
}

template <bool whole, class O>
__device__ inline void decode_place(const O& op, const bucket_place& p, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    constexpr unsigned width = decoded_width<T>, each = decoded_each<T>;
    T* const out = op.out.data() + p.s.offset + p.first;
    const bool aligned = packs_at(out);
    const bucket_decoder decoder(op.scheme, op.wire.data(), p);
    std::uint32_t codes[each / 4];
    const auto index = [&](unsigned k) { return (p.lane + threads * (k / width)) * width + k % width; };
#pragma unroll
    for (unsigned k = 0; k < each; k += 4) {
        codes[k / 4] = whole || static_cast<int>(index(k)) < p.n ? decoder.four(index(k)) : 0;
    }
#pragma unroll
    for (unsigned k = 0; k < each; k += width) {
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
    float sums[decoded_each<float> / 4][4];
    const auto index = [&](unsigned k) { return (p.lane + threads * k) * 4; };
    const auto count = [&](unsigned k) { return p.n - static_cast<int>(index(k)); };
#pragma unroll
    for (unsigned k = 0; k < decoded_each<float> / 4; ++k) {
        load_some<whole>(sum + index(k), count(k), aligned, sums[k]);
    }
#pragma unroll 1
    for (std::size_t w = 0; w < op.count; ++w) {
        const bucket_decoder decoder(op.scheme, op.wires.data() + w * stride, p);
        std::uint32_t codes[decoded_each<float> / 4];
#pragma unroll
        for (unsigned k = 0; k < decoded_each<float> / 4; ++k) {
            codes[k] = whole || count(k) > 0 ? decoder.four(index(k)) : 0;
        }
#pragma unroll
        for (unsigned k = 0; k < decoded_each<float> / 4; ++k) {
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) {
                sums[k][j] = (exact(sums[k][j]) + exact(decoder.value(codes[k], j))).value;
            }
        }
    }
#pragma unroll
    for (unsigned k = 0; k < decoded_each<float> / 4; ++k) {
        store_some<whole>(sum + index(k), count(k), aligned, sums[k]);
    }
}

template <class O>
__global__ void __launch_bounds__(bucket_threads)
    decode_kernel(const __grid_constant__ O op, const __grid_constant__ segment_table table, unsigned threads) {
    using T = typename decltype(op.out)::value_type;
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n != static_cast<int>(threads * decoded_each<T>) || !packs_at(op.out.data() + p.s.offset + p.first)) {
        return decode_place<false>(op, p, threads);
    }
    if constexpr (sizeof(T) == 2) {
        switch (p.s.bits) {
        case 2: return decode_words<2>(op, p, threads);
        case 4: return decode_words<4>(op, p, threads);
        case 8: return decode_words<8>(op, p, threads);
        default: break;
        }
    }
    decode_place<true>(op, p, threads);
}

template <class O>
__global__ void __launch_bounds__(bucket_threads, 8)
    add_kernel(const __grid_constant__ O op, const __grid_constant__ segment_table table, std::size_t stride,
               unsigned threads) {
    const bucket_place p = place_of<typename decltype(op.scheme)::meta>(table, op.scheme.granularity(), threads);
    if (p.n == 0) { return; }
    if (p.n == static_cast<int>(threads * decoded_each<float>) && packs_at(op.sum.data() + p.s.offset + p.first)) {
        add_place<true>(op, p, stride, threads);
    } else {
        add_place<false>(op, p, stride, threads);
    }
}

}  // namespace detail

}  // namespace tutti::compress
