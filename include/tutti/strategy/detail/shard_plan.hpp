// shard_plan: which elements of each bucket belong to which rank, and where a rank keeps its own.
// Needs schedule/bucket and optimize/clip. A pure function of the bucket plan, the number of ranks and the rank.
#pragma once

#include <algorithm>  // min, max
#include <cstddef>    // size_t
#include <span>       // counts
#include <utility>    // move
#include <vector>     // pieces

#include <tutti/core/partition.hpp>                  // partition
#include <tutti/core/view.hpp>                       // view
#include <tutti/optimize/clip.hpp>                   // norm_block
#include <tutti/schedule/bucket.hpp>                 // bucket_plan
#include <tutti/strategy/detail/parameter_list.hpp>  // contiguous, tensor_part
#include <tutti/strategy/strategy.hpp>               // parameters

namespace tutti::strategy::detail {

/// Elements [first, first + count) of the model; the rank that owns them keeps them from element `place` on.
struct owned_piece {
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t place = 0;
};

/// Cuts every bucket into one part a rank, in rank order.
///
/// Semantics    cuts lie at multiples of norm_block elements of the model, so that blocks of the global norm are split
///              only where buckets end. The parts of a bucket differ by at most one block; which ranks get one more
///              moves on by a rank from bucket to bucket. Nothing is padded: parts may be short or empty.
///              A rank keeps its parts one behind the other, in the order of the model.
/// Cost         buckets * ranks.
class shard_plan {
    schedule::bucket_plan plan_;
    std::size_t ranks_;
    std::vector<std::size_t> counts_;  // by bucket, then rank
    std::vector<owned_piece> own_;     // by bucket
    std::size_t owned_ = 0;

public:
    shard_plan(schedule::bucket_plan plan, int ranks, int rank)
        : plan_(std::move(plan))
        , ranks_(static_cast<std::size_t>(ranks))
        , counts_(plan_.buckets.size() * ranks_)
        , own_(plan_.buckets.size()) {
        constexpr std::size_t grain = optimize::norm_block;
        for (std::size_t b = plan_.buckets.size(); b-- > 0;) {  // launch order is the model's, reversed
            const auto [first, size] = std::pair(plan_.buckets[b].offset, plan_.buckets[b].size);
            const std::size_t end = first + size;
            const std::size_t blocks = size == 0 ? 0 : (end - 1) / grain - first / grain + 1;
            std::size_t block = first / grain;
            for (std::size_t r = 0; r < ranks_; ++r) {
                const std::size_t begin = std::min(std::max(block * grain, first), end);
                block += partition(blocks, ranks_, (r + ranks_ - b % ranks_) % ranks_).count;
                const std::size_t count = std::min(std::max(block * grain, begin), end) - begin;
                counts_[b * ranks_ + r] = count;
                if (r == static_cast<std::size_t>(rank)) {
                    own_[b] = {begin, count, owned_};
                    owned_ += count;
                }
            }
        }
    }

    [[nodiscard]] const schedule::bucket_plan& buckets() const noexcept { return plan_; }
    [[nodiscard]] const schedule::bucket& bucket(std::size_t b) const noexcept { return plan_.buckets[b]; }
    [[nodiscard]] std::size_t size() const noexcept { return plan_.buckets.size(); }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
    /// Elements of the bucket that each rank owns.
    [[nodiscard]] std::span<const std::size_t> counts(std::size_t b) const noexcept {
        return std::span(counts_).subspan(b * ranks_, ranks_);
    }
    [[nodiscard]] const owned_piece& own(std::size_t b) const noexcept { return own_[b]; }
    /// All elements that this rank owns.
    [[nodiscard]] std::size_t owned() const noexcept { return owned_; }
    [[nodiscard]] std::size_t largest_bucket() const noexcept {
        std::size_t largest = 0;
        for (const auto& b : plan_.buckets) { largest = std::max(largest, b.size); }
        return largest;
    }
    /// This rank's part in a view of the whole bucket.
    template <class T, memory M> [[nodiscard]] view<T, M> own_part(std::size_t b, view<T, M> whole) const {
        return whole.sub(own_[b].first - plan_.buckets[b].offset, own_[b].count);
    }
    /// This rank's part of the bucket in a view of all that it owns.
    template <class T, memory M> [[nodiscard]] view<T, M> kept_part(std::size_t b, view<T, M> kept) const {
        return kept.sub(own_[b].place, own_[b].count);
    }
    /// What this rank owns of elements [first, first + count), which lie in one bucket.
    [[nodiscard]] owned_piece own_of(std::size_t b, std::size_t first, std::size_t count) const noexcept {
        const owned_piece& all = own_[b];
        const std::size_t begin = std::max(first, all.first);
        const std::size_t end = std::min(first + count, all.first + all.count);
        if (begin >= end) { return {first, 0, 0}; }
        return {begin, end - begin, all.place + (begin - all.first)};
    }
    /// What this rank owns of tensor i of `size` elements.
    [[nodiscard]] tensor_part part_of(std::size_t i, std::size_t size) const noexcept {
        const owned_piece own = own_of(plan_.bucket_of[i], plan_.offsets[i], size);
        return {own.first - plan_.offsets[i], own.count, own.place};
    }
};

/// The trainer's tensors of one bucket, as work on a lane finds them.
template <class T, memory M> struct bucket_tensor {
    view<T, M> theirs;
    std::size_t offset;  ///< in the bucket
};

/// The trainer's tensors of bucket b that it brings, and the one view that all of them make up, if they do.
template <class T, memory M> struct bucket_tensors {
    view<T, M> together;
    std::vector<bucket_tensor<T, M>> apart;  ///< none where they lie together
    bool missing = false;                    ///< there are elements that the trainer brings no tensor for
};
template <class T, memory M>
[[nodiscard]] bucket_tensors<T, M> tensors_of(const parameters<T, M>& list, view<T, M> parameter<T, M>::*which,
                                              const schedule::bucket_plan& plan, std::size_t b) {
    const schedule::bucket& at = plan.buckets[b];
    const parameters<T, M> part(list.begin() + static_cast<std::ptrdiff_t>(at.first),
                                list.begin() + static_cast<std::ptrdiff_t>(at.first + at.count));
    bucket_tensors<T, M> found;
    const view<T, M> together = contiguous(part, which);
    if (together.size() == at.size) {
        found.together = together;
        return found;
    }
    for (std::size_t i = at.first; i < at.first + at.count; ++i) {
        const view<T, M> theirs = list[i].*which;
        if (list[i].value.empty()) { continue; }
        if (theirs.empty()) {
            found.missing = true;
        } else {
            found.apart.push_back({theirs, plan.offsets[i] - at.offset});
        }
    }
    return found;
}

}  // namespace tutti::strategy::detail
