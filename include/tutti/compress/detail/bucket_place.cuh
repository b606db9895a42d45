// bucket_place: which bucket a group of threads works on, and how a thread moves its elements: in packs where it can.
// Needs core/cuda_run and nvcc. Segments travel in the kernel's parameters: nothing is uploaded, so a call can be captured
// in a graph and nothing has to outlive it.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // addresses

#include <tutti/core/cuda_run.cuh>  // pack

namespace tutti::compress::detail {

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

}  // namespace tutti::compress::detail
