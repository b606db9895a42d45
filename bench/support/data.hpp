// Data whose sums are exact: small integers that depend on rank, iteration and position, and the check of every result.
// Needs core. An element that is stale, misplaced, or lacks one rank's part is wrong in 15 of 16 cases.
#pragma once

#include <cmath>     // fabs, pow
#include <concepts>  // same_as
#include <cstddef>   // size_t
#include <cstdint>   // hashes
#include <limits>    // epsilon

#include <tutti/core/element.hpp>  // bfloat16
#include <tutti/core/view.hpp>     // view

#include "traffic.hpp"  // kind

namespace bench {

/// 0 ... 15.
[[nodiscard]] constexpr int value_at(std::uint32_t seed, std::uint32_t i) {
    std::uint32_t h = (i ^ seed) * 0x9e3779b1u;
    h = (h ^ (h >> 15)) * 0x85ebca77u;
    return static_cast<int>(h >> 28);
}
[[nodiscard]] constexpr std::uint32_t seed_of(std::uint32_t rank, std::uint32_t iteration) {
    return rank * 0x632be5abu + iteration * 0x2545f491u;
}

template <class T> [[nodiscard]] constexpr double epsilon_of() {
    if constexpr (std::same_as<T, tutti::bfloat16>) {
        return 1.0 / 128;
    } else {
        return static_cast<double>(std::numeric_limits<T>::epsilon());
    }
}

/// One call, or `calls` calls one after the other on the same buffers, as seen by `rank`.
struct situation {
    bench::kind kind;
    std::uint32_t ranks;
    std::uint32_t rank;
    std::uint32_t root;
    std::uint32_t iteration;
    bool in_place;
    int calls;
};

/// The input of situation.rank, `count` elements of position `offset` and on.
template <class T> void fill(const situation& s, T* data, std::size_t count, std::size_t offset = 0) {
    const std::uint32_t seed = seed_of(s.rank, s.iteration);
    for (std::size_t i = 0; i < count; ++i) {
        data[i] = static_cast<T>(static_cast<float>(value_at(seed, static_cast<std::uint32_t>(offset + i))));
    }
}

namespace detail {
// Elements that differ from rank `source`'s input at `offset`.
template <class T>
std::uint64_t wrong_copies(const situation& s, std::uint32_t source, const T* data, std::size_t count,
                           std::size_t offset) {
    const std::uint32_t seed = seed_of(source, s.iteration);
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto expected =
            static_cast<T>(static_cast<float>(value_at(seed, static_cast<std::uint32_t>(offset + i))));
        wrong += data[i] != expected ? 1u : 0u;
    }
    return wrong;
}

// Elements that differ from the sum over ranks at `offset`. In place, later calls add to what earlier ones left: an
// all_reduce multiplies by n; the others add the peers' inputs once more.
template <class T> std::uint64_t wrong_sums(const situation& s, const T* data, std::size_t count, std::size_t offset) {
    const bool repeated = s.in_place && s.calls > 1;
    const double growth = repeated && s.kind == kind::all_reduce ? std::pow(s.ranks, s.calls - 1) : 1;
    const double again = repeated && s.kind != kind::all_reduce ? s.calls - 1 : 0;
    const double tolerance = repeated ? s.calls * static_cast<double>(s.ranks) * epsilon_of<T>() : 0;
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto at = static_cast<std::uint32_t>(offset + i);
        int all = 0;
        for (std::uint32_t p = 0; p < s.ranks; ++p) { all += value_at(seed_of(p, s.iteration), at); }
        const int own = value_at(seed_of(s.rank, s.iteration), at);
        const double expected = growth * all + again * (all - own);
        const double error = std::fabs(static_cast<double>(data[i]) - expected);
        wrong += error <= tolerance * expected ? 0u : 1u;  // NaN is wrong
    }
    return wrong;
}
}  // namespace detail

/// Wrong elements of this rank's output. `count` is the output's size.
template <class T> [[nodiscard]] std::uint64_t check(const situation& s, const T* out, std::size_t count) {
    switch (s.kind) {
    case kind::reduce:
        if (s.rank != s.root) { return 0; }
        [[fallthrough]];
    case kind::all_reduce: return detail::wrong_sums(s, out, count, 0);
    case kind::reduce_scatter: return detail::wrong_sums(s, out, count, s.rank * count);
    case kind::broadcast: return detail::wrong_copies(s, s.root, out, count, 0);
    case kind::memory_copy: return detail::wrong_copies(s, s.rank, out, count, 0);
    case kind::all_gather:
    case kind::all_to_all: {
        const std::size_t part = count / s.ranks;
        const std::size_t offset = s.kind == kind::all_to_all ? s.rank * part : 0;
        std::uint64_t wrong = 0;
        for (std::uint32_t p = 0; p < s.ranks; ++p) {
            wrong += detail::wrong_copies(s, p, out + p * part, part, offset);
        }
        return wrong;
    }
    }
    return count;
}

}  // namespace bench
