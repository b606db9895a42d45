// What a collective moves: the conventions of nccl-tests for bandwidths, and the least memory traffic for the roofline.
// Needs nothing. Sizes: S is the size column, the larger of the two buffers of a rank; n is the number of ranks.
#pragma once

#include <array>        // names
#include <cstddef>      // size_t
#include <optional>     // name lookup
#include <string_view>  // names

namespace bench {

enum class kind { all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, memory_copy };

inline constexpr std::array<std::string_view, 7> kind_names = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "memcpy"};

[[nodiscard]] constexpr std::string_view name_of(kind k) { return kind_names[static_cast<std::size_t>(k)]; }

[[nodiscard]] constexpr bool reduces(kind k) {
    return k == kind::all_reduce || k == kind::reduce_scatter || k == kind::reduce;
}
[[nodiscard]] constexpr bool rooted(kind k) { return k == kind::broadcast || k == kind::reduce; }
/// S is n parts, one a rank.
[[nodiscard]] constexpr bool parted(kind k) {
    return k == kind::reduce_scatter || k == kind::all_gather || k == kind::all_to_all;
}
[[nodiscard]] constexpr bool has_out_of_place(kind k) { return k != kind::broadcast; }
[[nodiscard]] constexpr bool has_in_place(kind k) { return k != kind::all_to_all && k != kind::memory_copy; }

/// busbw = algbw * this, as nccl-tests defines it.
[[nodiscard]] constexpr double bus_factor(kind k, double n) {
    switch (k) {
    case kind::all_reduce: return 2 * (n - 1) / n;
    case kind::reduce_scatter:
    case kind::all_gather:
    case kind::all_to_all: return (n - 1) / n;
    case kind::broadcast:
    case kind::reduce:
    case kind::memory_copy: return 1;
    }
    return 1;
}

/// Bytes that all ranks together must at least read and write when they share one memory: every input byte that is used
/// is read once by one rank (by every rank that keeps a copy, where nothing is computed), every output byte is written
/// once. Reading a line in order to write it (write-allocate) is not counted, as it is not in `a += b`.
[[nodiscard]] constexpr double least_traffic(kind k, double n, double bytes, bool in_place) {
    switch (k) {
    case kind::all_reduce: return 2 * n * bytes;
    case kind::reduce_scatter:  // reads n inputs, writes n parts
    case kind::reduce: return (n + 1) * bytes;
    case kind::all_gather: return in_place ? 2 * (n - 1) * bytes : 2 * n * bytes;
    case kind::broadcast: return 2 * (n - 1) * bytes;
    case kind::all_to_all:
    case kind::memory_copy: return 2 * n * bytes;
    }
    return 0;
}

/// Bytes a rank touches.
[[nodiscard]] constexpr double footprint(kind k, double n, double bytes, bool in_place) {
    if (in_place) { return bytes; }
    return k == kind::reduce_scatter || k == kind::all_gather ? bytes + bytes / n : 2 * bytes;
}

}  // namespace bench
