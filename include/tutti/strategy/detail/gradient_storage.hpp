// gradient_storage: the flat gradient of a model, and how the trainer's own gradient tensors map to it.
// Needs schedule/bucket and strategy/detail/parameter_list.
// Zero copy where the trainer brings no tensors, or brings them one behind the other; packing and unpacking elsewhere.
#pragma once

#include <cstddef>  // size_t
#include <memory>   // pieces shared with work in flight
#include <utility>  // move
#include <vector>   // pieces

#include <tutti/core/buffer.hpp>                     // storage
#include <tutti/core/elementwise.hpp>                // fill, copy
#include <tutti/schedule/bucket.hpp>                 // bucket_plan
#include <tutti/strategy/detail/parameter_list.hpp>  // contiguous

namespace tutti::strategy::detail {

/// Gradients in parameter order, as one view.
///
/// Semantics  `of(i)` is where backward accumulates: part of `flat()`, or the trainer's tensor. Tensors that are not
///            part of the flat view are packed into it and unpacked from it, by bucket, by work that captures
///            `apart(bucket)`.
/// Cost       one buffer of all elements, none when the trainer's tensors lie one behind the other in parameter order.
template <floating_element T, queue Q> class gradient_storage {
    using M = typename Q::memory_type;

public:
    /// A tensor of the trainer and its place in the flat view.
    struct piece {
        view<T, M> theirs;
        view<T, M> packed;
    };
    using pieces = std::vector<piece>;

    explicit gradient_storage(Q q) : storage_(std::move(q), 0) {}

    void place(Q q, const parameters<T, M>& list, const schedule::bucket_plan& plan) {
        flat_ = contiguous(list, &parameter<T, M>::gradient);
        const bool in_place = flat_.size() == plan.elements;
        if (!in_place) {
            storage_ = buffer<T, Q>(q, plan.elements);
            flat_ = storage_.view();
        }
        for (std::size_t i = 0; i < list.size(); ++i) {
            const bool is_apart = !in_place && !list[i].gradient.empty();
            of_.push_back(is_apart ? list[i].gradient : flat_.sub(plan.offsets[i], list[i].value.size()));
            any_in_flat_ = any_in_flat_ || !is_apart;
        }
        for (const schedule::bucket& b : plan.buckets) {
            pieces apart;
            for (std::size_t i = b.first; i < b.first + b.count; ++i) {
                if (in_place || list[i].gradient.empty()) { continue; }
                apart.push_back({list[i].gradient, flat_.sub(plan.offsets[i], list[i].value.size())});
            }
            apart_.push_back(std::make_shared<const pieces>(std::move(apart)));
        }
    }

    void zero(Q q) const {
        if (any_in_flat_) { fill(q, flat_, T{}); }
        for (const auto& list : apart_) {
            for (const piece& p : *list) { fill(q, p.theirs, T{}); }
        }
    }
    [[nodiscard]] view<T, M> flat() const noexcept { return flat_; }
    [[nodiscard]] view<T, M> of(std::size_t i) const { return of_[i]; }
    [[nodiscard]] const std::shared_ptr<const pieces>& apart(std::size_t bucket) const { return apart_[bucket]; }

    static void pack(Q q, const pieces& list) {
        for (const piece& p : list) { copy(q, p.theirs, p.packed); }
    }
    static void unpack(Q q, const pieces& list) {
        for (const piece& p : list) { copy(q, p.packed, p.theirs); }
    }

private:
    buffer<T, Q> storage_;
    view<T, M> flat_;
    std::vector<view<T, M>> of_;                        // by parameter
    std::vector<std::shared_ptr<const pieces>> apart_;  // by bucket
    bool any_in_flat_ = false;
};

}  // namespace tutti::strategy::detail
