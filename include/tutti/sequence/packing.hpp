// packing: whole items into bins: the classical rules, for sequences that are not cut and for micro-batches.
// Needs core/error. Pure host code.
// Source: longest first, R. L. Graham, SIAM J. Appl. Math. 17, 1969; largest differencing, N. Karmarkar and R. M. Karp,
// 1982; first fit decreasing, D. S. Johnson, 1973.
#pragma once

#include <algorithm>  // sort, heaps, min
#include <cmath>      // isfinite
#include <cstddef>    // size_t
#include <cstdint>    // sizes
#include <numeric>    // iota
#include <span>       // items
#include <utility>    // move
#include <vector>     // bins

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::sequence {

/// No bin: an item that found no room.
inline constexpr int no_bin = -1;

namespace detail {
inline void expect_packable(std::span<const double> weights, int bins) {
    if (bins < 1) { throw usage_error(formatted("packing: {} bins", bins)); }
    for (std::size_t i = 0; i < weights.size(); ++i) {
        if (!std::isfinite(weights[i]) || weights[i] < 0) {
            throw usage_error(formatted("packing: item {} has weight {}", i, weights[i]));
        }
    }
}
// Items by descending weight; equal ones by number.
template <class Weight> [[nodiscard]] std::vector<std::size_t> heaviest_first(std::span<const Weight> weights) {
    std::vector<std::size_t> order(weights.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; });
    return order;
}
}  // namespace detail

/// Bins of items, the heaviest first, each to the lightest bin with room for its size. With sizes of 1 and a capacity
/// of items / bins, all bins get as many.
///
/// Semantics    returns the bin of each item, or no_bin. Weights balance, sizes fill; they may be the same or not.
/// Guarantee    without capacity the heaviest bin is at most 4/3 - 1/(3 bins) of the least possible.
/// Determinism  ties go to the item, and the bin, of the lower number.
/// Cost         items * (bins + log items).
/// Errors       usage_error: no bins, weights that are negative or not finite, or another number of sizes.
[[nodiscard]] inline std::vector<int> packed_longest_first(std::span<const double> weights,
                                                           std::span<const std::int64_t> sizes, int bins,
                                                           std::int64_t capacity) {
    detail::expect_packable(weights, bins);
    if (sizes.size() != weights.size()) {
        throw usage_error(formatted("packing: {} weights and {} sizes", weights.size(), sizes.size()));
    }
    std::vector<double> load(static_cast<std::size_t>(bins));
    std::vector<std::int64_t> filled(load.size());
    std::vector<int> result(weights.size(), no_bin);
    for (const std::size_t i : detail::heaviest_first(weights)) {
        std::size_t best = load.size();
        for (std::size_t b = 0; b < load.size(); ++b) {
            const bool room = sizes[i] <= capacity && filled[b] <= capacity - sizes[i];
            if (room && (best == load.size() || load[b] < load[best])) { best = b; }
        }
        if (best == load.size()) { continue; }
        load[best] += weights[i];
        filled[best] += sizes[i];
        result[i] = static_cast<int>(best);
    }
    return result;
}

/// Bins of items by differencing: partial solutions of one item each are merged, the two of the largest spread first,
/// the heaviest bin of one with the lightest of the other. Often much closer to the optimum than longest first.
///
/// Guarantee    two bins: at most 7/6 of the least possible.
/// Determinism  of the arguments alone.
/// Cost         items * bins * (log items + log bins).
/// Errors       as of packed_longest_first. There is no capacity.
[[nodiscard]] inline std::vector<int> packed_by_differences(std::span<const double> weights, int bins) {
    detail::expect_packable(weights, bins);
    const auto width = static_cast<std::size_t>(bins);
    struct part {
        double sum = 0;
        std::vector<std::size_t> items;
    };
    using solution = std::vector<part>;  // bins, the heaviest first
    struct entry {
        double spread;
        std::size_t number;  // of its first item: ties
        solution bins;
    };
    const auto behind = [](const entry& a, const entry& b) {
        return a.spread != b.spread ? a.spread < b.spread : a.number > b.number;
    };
    std::vector<entry> heap;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        entry e{width > 1 ? weights[i] : 0, i, solution(width)};
        e.bins.front() = {weights[i], {i}};
        heap.push_back(std::move(e));
    }
    std::make_heap(heap.begin(), heap.end(), behind);
    const auto take = [&] {
        std::pop_heap(heap.begin(), heap.end(), behind);
        entry e = std::move(heap.back());
        heap.pop_back();
        return e;
    };
    while (heap.size() > 1) {
        entry a = take();
        entry b = take();
        for (std::size_t i = 0; i < width; ++i) {
            part& other = b.bins[width - 1 - i];
            a.bins[i].sum += other.sum;
            a.bins[i].items.insert(a.bins[i].items.end(), other.items.begin(), other.items.end());
        }
        std::stable_sort(a.bins.begin(), a.bins.end(), [](const part& x, const part& y) { return x.sum > y.sum; });
        a.spread = a.bins.front().sum - a.bins.back().sum;
        a.number = std::min(a.number, b.number);
        heap.push_back(std::move(a));
        std::push_heap(heap.begin(), heap.end(), behind);
    }
    std::vector<int> result(weights.size(), no_bin);
    for (std::size_t b = 0; b < width && !heap.empty(); ++b) {
        for (const std::size_t i : heap.front().bins[b].items) { result[i] = static_cast<int>(b); }
    }
    return result;
}

/// Bins of items, the largest first, each to the first bin with room: as few bins as come easily, for micro-batches of
/// a token budget.
///
/// Guarantee    at most 11/9 of the least possible number of bins, and 6/9.
/// Determinism  ties go to the lower number.
/// Cost         items * bins.
/// Errors       usage_error when an item is negative or larger than the capacity.
[[nodiscard]] inline std::vector<int> packed_first_fit(std::span<const std::int64_t> sizes, std::int64_t capacity) {
    std::vector<std::int64_t> filled;
    std::vector<int> result(sizes.size(), no_bin);
    for (const std::size_t i : detail::heaviest_first(sizes)) {
        if (sizes[i] < 0 || sizes[i] > capacity) {
            throw usage_error(formatted("packing: item {} of size {} fits into no bin of {}", i, sizes[i], capacity));
        }
        std::size_t b = 0;
        while (b < filled.size() && filled[b] > capacity - sizes[i]) { ++b; }
        if (b == filled.size()) { filled.push_back(0); }
        filled[b] += sizes[i];
        result[i] = static_cast<int>(b);
    }
    return result;
}

}  // namespace tutti::sequence
