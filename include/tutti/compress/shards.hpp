// shards: a layout cut among ranks, where the compressor allows it.
// Needs compress/compressor and core/partition. Owners of parts in compressed collectives, and shards as ZeRO has them.
#pragma once

#include <algorithm>    // adjacent_find, max, min, sort
#include <cstddef>      // size_t
#include <iterator>     // next
#include <string_view>  // names of operations
#include <vector>       // segments

#include <tutti/compress/compressor.hpp>  // segment, layout
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/partition.hpp>       // part, partition
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress {

/// Which segments belong to which rank: shard 0, shard 1, ... one behind the other.
///
/// Semantics  equal on all ranks. cut() makes one; a strategy that has its own shards makes it from a list a rank.
class shards {
    std::vector<segment> segments_;
    std::vector<std::size_t> begin_;  // of each shard in segments_, and the end

    friend shards cut(layout all, std::size_t granularity, int ranks);
    shards() = default;

public:
    explicit shards(const std::vector<std::vector<segment>>& by_rank) {
        for (const auto& list : by_rank) {
            begin_.push_back(segments_.size());
            segments_.insert(segments_.end(), list.begin(), list.end());
        }
        begin_.push_back(segments_.size());
    }

    [[nodiscard]] int ranks() const noexcept { return static_cast<int>(begin_.size()) - 1; }
    [[nodiscard]] layout of(int rank) const& {
        if (rank < 0 || rank >= ranks()) {
            throw usage_error(formatted("shards: rank {} is not one of {} ranks", rank, ranks()));
        }
        const auto r = static_cast<std::size_t>(rank);
        return layout(segments_).subspan(begin_[r], begin_[r + 1] - begin_[r]);
    }
    [[nodiscard]] layout all() const& noexcept { return segments_; }
    layout of(int) const&& = delete;  // would refer to what is gone
    layout all() const&& = delete;
    /// The shards of all other ranks, in rank order.
    [[nodiscard]] std::vector<segment> without(int rank) const {
        const layout own = of(rank);
        std::vector<segment> others(segments_.data(), own.data());
        others.insert(others.end(), own.data() + own.size(), segments_.data() + segments_.size());
        return others;
    }
    friend bool operator==(const shards&, const shards&) = default;
};

/// Cuts a layout into one shard a rank, as equal in elements as cuts at multiples of `granularity` elements of each
/// tensor and between segments allow. Granularity 0: between segments only.
///
/// Semantics    every cut is the allowed one that is nearest to where core/partition would cut (the lower of two as
///              near), so a shard has at most `granularity` elements more than the mean: half of that at either end.
///              Shards may be empty, segments without elements are left out.
/// Determinism  a function of the arguments: what a bucket of the compressor holds depends on no number of ranks.
/// Cost         linear in segments + ranks.
/// Errors       usage_error when a segment begins inside a bucket, or there are no ranks.
[[nodiscard]] inline shards cut(layout all, std::size_t granularity, int ranks) {
    if (ranks < 1) { throw usage_error(formatted("cut: {} ranks", ranks)); }
    std::size_t total = 0;
    for (const segment& s : all) {
        if (granularity != 0 && s.first % granularity != 0) {
            throw usage_error(formatted("cut: a segment of tensor {} begins at its element {}, which is not a multiple "
                                        "of the granularity {}",
                                        s.tensor, s.first, granularity));
        }
        total += s.size();
    }
    const auto parts = static_cast<std::size_t>(ranks);
    shards result;
    const auto add = [&](const segment& s, std::size_t from, std::size_t to) {
        if (from == to) { return; }
        segment piece = s;
        if (to - from != s.size()) {
            piece.offset += from;
            piece.first += from;
            piece.rows = to - from;
            piece.cols = 1;
        }
        result.segments_.push_back(piece);
    };
    result.begin_.push_back(0);
    std::size_t before = 0;  // elements ahead of the segment
    for (const segment& s : all) {
        const std::size_t size = s.size();
        std::size_t done = 0;  // elements of it that have an owner
        while (result.begin_.size() < parts) {
            const std::size_t ideal = partition(total, parts, result.begin_.size()).first;
            if (ideal > before + size) { break; }
            const std::size_t wanted = ideal - before;
            const std::size_t low = granularity == 0 ? 0 : std::min(wanted, size) / granularity * granularity;
            const std::size_t high = granularity == 0 ? size : std::min(size, low + granularity);
            const std::size_t at = high - wanted < wanted - low ? high : low;
            add(s, done, at);
            done = at;
            result.begin_.push_back(result.segments_.size());
        }
        add(s, done, size);
        before += size;
    }
    result.begin_.resize(parts + 1, result.segments_.size());  // the end; and all shards, when there are no segments
    return result;
}

namespace detail {

/// From the lowest element of a layout to the last, as a part of the views. No segments: nothing, at 0.
[[nodiscard]] inline part extent_of(layout all) noexcept {
    if (all.empty()) { return {}; }
    std::size_t first = all.front().offset;
    std::size_t end = 0;
    for (const segment& s : all) {
        first = std::min(first, s.offset);
        end = std::max(end, s.offset + s.size());
    }
    return {first, end - first};
}

/// The same segments in views that begin at element `base` of the ones before.
[[nodiscard]] inline std::vector<segment> rebased(layout all, std::size_t base) {
    std::vector<segment> moved(all.begin(), all.end());
    for (segment& s : moved) { s.offset -= base; }
    return moved;
}

/// Calls f(part) for the longest runs of neighboring segments.
template <class F> void for_runs(layout all, F f) {
    part run;
    for (const segment& s : all) {
        if (s.offset == run.first + run.count) {
            run.count += s.size();
            continue;
        }
        if (run.count != 0) { f(run); }
        run = {s.offset, s.size()};
    }
    if (run.count != 0) { f(run); }
}

/// Refuses segments outside of `size` elements, and segments that share some.
inline void expect_layout(std::string_view operation, layout all, std::size_t size) {
    expect_inside(operation, all, size);
    const auto follows = [](const segment& a, const segment& b) { return a.offset + a.size() <= b.offset; };
    const auto clash = [&](layout in_order) {
        return std::adjacent_find(in_order.begin(), in_order.end(),
                                  [&](const segment& a, const segment& b) { return !follows(a, b); });
    };
    if (clash(all) == all.end()) { return; }
    std::vector<segment> sorted(all.begin(), all.end());
    std::erase_if(sorted, [](const segment& s) { return s.size() == 0; });
    std::sort(sorted.begin(), sorted.end(), [](const segment& a, const segment& b) { return a.offset < b.offset; });
    const auto at = clash(sorted);
    if (at == layout(sorted).end()) { return; }
    throw usage_error(formatted("{}: segments of tensors {} and {} share element {}", operation, at->tensor,
                                std::next(at)->tensor, std::next(at)->offset));
}

}  // namespace detail

}  // namespace tutti::compress
