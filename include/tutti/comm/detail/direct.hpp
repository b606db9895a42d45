// Direct data movement between ranks that can read and write each other's memory: no staging, no rings.
// Needs comm/call and core/partition. Callers have made sure that nobody leaves meanwhile.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // byte
#include <cstdint>    // uintptr_t
#include <cstring>    // memcpy
#include <numeric>    // accumulate
#include <vector>     // rows

#include <tutti/comm/call.hpp>       // call
#include <tutti/core/partition.hpp>  // slices

namespace tutti::comm::detail {

/// Asks for the cache lines of memory that is about to be overwritten: a hint, harmless for any address.
inline void claim(const void* data, std::size_t bytes) noexcept {
    const auto* const first = static_cast<const std::byte*>(data);
    for (std::size_t at = 0; at < bytes; at += 64) {
#if defined(__x86_64__)
        asm volatile("prefetchw %0" : : "m"(first[at]));  // the builtin asks for ownership only where -march knows it
#else
        __builtin_prefetch(first + at, 1);
#endif
    }
}

/// Copies past the caches: the destination's lines are neither read before nor kept after. Call stream_fence behind.
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    std::size_t at = 0;
#if defined(__x86_64__)
#if defined(__AVX512F__)
    constexpr std::size_t width = 64;
#elif defined(__AVX__)
    constexpr std::size_t width = 32;
#else
    constexpr std::size_t width = 16;
#endif
    using word = long long __attribute__((vector_size(width)));
    at = std::min(bytes, (width - reinterpret_cast<std::uintptr_t>(to) % width) % width);
    std::memcpy(to, from, at);
    for (; at + width <= bytes; at += width) {
        word w;
        std::memcpy(&w, from + at, width);
        // Not the intrinsics: their header takes a quarter of a second to compile.
#if defined(__AVX__)
        asm volatile("vmovntdq %1, %0" : "=m"(*reinterpret_cast<word*>(to + at)) : "v"(w));
#else
        asm volatile("movntdq %1, %0" : "=m"(*reinterpret_cast<word*>(to + at)) : "x"(w));
#endif
    }
#endif
    std::memcpy(to + at, from + at, bytes - at);
}
/// Orders streamed copies before the arrival that announces them.
inline void stream_fence() noexcept {
#if defined(__x86_64__)
    asm volatile("sfence" : : : "memory");
#endif
}

/// all_reduce and reduce: reduces slice `rank` of all inputs and writes it to every output that wants it.
///
/// Shapes       rows[p] is rank p's input, out_of(p) its output (the same address when it works in place).
/// Determinism  rows are added in rank order; slices do not change bits.
/// Cost         reads ranks * slice, writes the slice once for each output. Blocks stay in the first-level cache, so
///              the copies to the other outputs read what was just written. An output that is its rank's input has just
///              been read. Any other one is in its rank's cache: its lines are claimed while the block is reduced. Or
///              it is too large for that: it is streamed, which spares reading it.
template <class OutOf>
void reduce_slice(const call& c, std::size_t rank, std::vector<const void*>& rows, OutOf out_of) {
    constexpr std::size_t grain_bytes = 128;  // slices share no pair of cache lines
    constexpr std::size_t block_bytes = 1024;
    constexpr std::size_t stream_bytes = std::size_t{64} << 20;  // of all outputs: no cache keeps as much for us alone
    const std::size_t size = c.element_size;
    const std::size_t ranks = rows.size();
    const part slice = partition(c.in_count, ranks, rank, grain_bytes / size);
    const std::size_t end = (slice.first + slice.count) * size;
    const bool everywhere = c.kind == collective::all_reduce;
    const bool large = ranks * c.in_bytes() >= stream_bytes;
    const std::size_t first = everywhere ? rank : static_cast<std::size_t>(c.root);  // whose output is written first
    alignas(64) std::byte scratch[block_bytes];
    const auto output = [&](std::size_t p, std::size_t at) { return static_cast<std::byte*>(out_of(p)) + at; };
    const auto advance = [&](std::size_t bytes) {
        for (const void*& row : rows) { row = static_cast<const std::byte*>(row) + bytes; }
    };
    const auto for_each_other = [&](auto visit) {
        for (std::size_t p = 0; everywhere && p < ranks; ++p) {
            if (p != first) { visit(p); }
        }
    };
    advance(slice.first * size);
    for (std::size_t at = slice.first * size; at < end;) {
        const std::size_t bytes = std::min(block_bytes, end - at);
        const auto in_place = [&](std::size_t p) { return output(p, at) == rows[p]; };
        const bool aside = large && !in_place(first);
        std::byte* const result = aside ? scratch : output(first, at);
        for_each_other([&](std::size_t p) {
            if (!large && !in_place(p)) { claim(output(p, at), bytes); }
        });
        c.reduce(result, rows.data(), static_cast<int>(ranks), bytes / size);
        if (aside) { stream_copy(output(first, at), result, bytes); }
        for_each_other([&](std::size_t p) {
            if (large && !in_place(p)) {
                stream_copy(output(p, at), result, bytes);
            } else {
                std::memcpy(output(p, at), result, bytes);
            }
        });
        advance(bytes);
        at += bytes;
    }
    if (large) { stream_fence(); }
}

/// Every other collective, and small reductions: fills this rank's output from the inputs of all.
///
/// Shapes    rows[p] is rank p's input; send_counts_of(p) its table in all_to_all_v.
/// Aliasing  a part that is in place already is left alone.
template <class SendCountsOf>
void pull(const call& c, std::size_t rank, std::vector<const void*>& rows, SendCountsOf send_counts_of) {
    const std::size_t ranks = rows.size();
    const std::size_t out_bytes = c.out_bytes();
    const auto move = [&](std::size_t to, const void* row, std::size_t from, std::size_t bytes) {
        if (bytes == 0) { return; }
        std::byte* const target = static_cast<std::byte*>(c.out) + to;
        const std::byte* const source = static_cast<const std::byte*>(row) + from;
        if (target != source) { std::memcpy(target, source, bytes); }
    };
    const auto before = [](const std::size_t* counts, std::size_t r) {
        return std::accumulate(counts, counts + r, std::size_t{0});
    };
    const auto reduce_from = [&](std::size_t offset) {
        if (c.out_count == 0) { return; }
        for (const void*& row : rows) { row = static_cast<const std::byte*>(row) + offset; }
        c.reduce(c.out, rows.data(), static_cast<int>(ranks), c.out_count);
    };
    const bool at_root = static_cast<int>(rank) == c.root;
    switch (c.kind) {
    case collective::barrier:
    case collective::exchange: return;
    case collective::all_reduce: return reduce_from(0);
    case collective::reduce: return at_root ? reduce_from(0) : void();
    case collective::reduce_scatter: return reduce_from(rank * out_bytes);
    case collective::reduce_scatter_v: return reduce_from(before(c.send_counts.data(), rank) * c.element_size);
    case collective::broadcast: return move(0, rows[static_cast<std::size_t>(c.root)], 0, out_bytes);
    case collective::scatter: return move(0, rows[static_cast<std::size_t>(c.root)], rank * out_bytes, out_bytes);
    case collective::gather:
        if (!at_root) { return; }
        [[fallthrough]];
    case collective::all_gather:
        for (std::size_t p = 0; p < ranks; ++p) { move(p * c.in_bytes(), rows[p], 0, c.in_bytes()); }
        return;
    case collective::all_gather_v:
        for (std::size_t p = 0, at = 0; p < ranks; ++p) {
            const std::size_t bytes = c.send_counts[p] * c.element_size;
            move(at, rows[p], 0, bytes);
            at += bytes;
        }
        return;
    case collective::all_to_all: {
        const std::size_t share = c.in_bytes() / ranks;
        for (std::size_t p = 0; p < ranks; ++p) { move(p * share, rows[p], rank * share, share); }
        return;
    }
    case collective::all_to_all_v:
        for (std::size_t p = 0, at = 0; p < ranks; ++p) {
            const std::size_t bytes = c.recv_counts[p] * c.element_size;
            move(at, rows[p], before(send_counts_of(p), rank) * c.element_size, bytes);
            at += bytes;
        }
        return;
    }
}

}  // namespace tutti::comm::detail
