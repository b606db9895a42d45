// compressed_mean_state: what changes in a compressed_mean: levels, counts, what compression lost, and the work of a bucket.
// Needs compress and comm. `How` is the compressed_mean that made it.
#pragma once

#include <cmath>        // isnan
#include <concepts>     // same_as
#include <cstddef>      // size_t, ptrdiff_t
#include <cstdint>      // seeds, steps
#include <memory>       // what work on the lane shares with the strategy
#include <optional>     // a rate, momentum
#include <span>         // levels
#include <string>       // messages
#include <type_traits>  // decay
#include <utility>      // move
#include <vector>       // segments

#include <tutti/comm/communicator.hpp>            // communicator
#include <tutti/comm/node_groups.hpp>             // split_inside, split_across
#include <tutti/compress/all_reduce.hpp>          // all_reduce, make_state
#include <tutti/compress/compressor.hpp>          // segment
#include <tutti/compress/dense.hpp>               // dense_level
#include <tutti/compress/error_feedback.hpp>      // residuals
#include <tutti/compress/hierarchical.hpp>        // all_reduce between nodes
#include <tutti/compress/momentum_feedback.hpp>   // momentum
#include <tutti/core/detail/detour.hpp>           // between two queues
#include <tutti/core/error.hpp>                   // usage_error
#include <tutti/core/partition.hpp>               // part
#include <tutti/core/reduce_op.hpp>               // mean
#include <tutti/core/state.hpp>                   // state_entry
#include <tutti/core/text.hpp>                    // formatted
#include <tutti/schedule/bucket.hpp>              // bucket_plan
#include <tutti/strategy/detail/kept_number.hpp>  // counts

namespace tutti::strategy::detail {

/// May gradients of T be averaged as they are inside nodes?
template <class Compressor, class C, class T>
concept goes_by_node =
    compress::reducible_by<Compressor, C, T> && comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T>;

/// Semantics    as gradient_exchange's states; the communicator is that of the strategy, and between nodes two of its own.
template <class How, communicator C, floating_element T> class compressed_mean_state {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using Compressor = decltype(How::compressor);
    using segments = std::vector<compress::segment>;
    using compressor_state = std::decay_t<decltype(compress::make_state(
        std::declval<const Compressor&>(), std::declval<Q>(), std::declval<compress::layout>()))>;

    struct node_links {
        C inside;  // the ranks of this node
        C across;  // those of this rank's place, on all nodes
    };
    // What work on the lane shares with the strategy. Its address stays when the strategy moves.
    struct shared {
        Compressor compressor;
        compressor_state state;
        compress::residuals<Q> lost;
        std::optional<compress::momentum_feedback<Q>> momentum{};  ///< in place of `lost`
        std::optional<node_links> links{};

        /// `own` are the bucket's elements of `flat`.
        void average(C& c, compress::layout all, view<T, M> flat, part own, const compress::draw_key& key) {
            if constexpr (std::same_as<T, float>) {
                if (momentum) {
                    momentum->add_part(c.queue(), flat.sub(own.first, own.count), own.first);
                    compress::all_reduce(c, compressor, state, all, momentum->in(), flat, momentum->residual(), key,
                                         mean{});
                    momentum->sent(c.queue(), all);
                    return;
                }
            }
            if constexpr (goes_by_node<Compressor, C, T>) {
                if (links) {
                    const tutti::detail::detour there(c.queue(), links->inside.queue());
                    compress::all_reduce(links->inside, links->across, compressor, state, all, flat, flat, lost.view(),
                                         key, mean{});
                    return;
                }
            }
            compress::all_reduce(c, compressor, state, all, flat, flat, lost.view(), key, mean{});
        }
    };
    std::shared_ptr<shared> shared_;
    std::vector<std::shared_ptr<const segments>> of_bucket_;
    segments tensors_;  // of the whole model, by parameter
    schedule::bucket_plan plan_;
    kept_number<std::uint64_t, Q> steps_;
    std::optional<kept_number<double, Q>> rate_;  // if it matters
    kept_number<double, Q> scale_;
    std::vector<state_entry<M>> entries_;
    Q queue_;
    std::uint64_t seed_;
    std::uint32_t rank_;
    int largest_;

public:
    /// `tensors` are whole, by parameter, at their first levels.
    compressed_mean_state(const How& how, C& comm, segments tensors, const schedule::bucket_plan& plan)
        : tensors_(std::move(tensors))
        , plan_(plan)
        , steps_(comm.queue(), 0)
        , scale_(comm.queue(), 1)
        , queue_(comm.queue())
        , seed_(how.seed)
        , rank_(static_cast<std::uint32_t>(comm.rank()))
        , largest_(how.largest()) {
        segments largest;
        for (compress::segment s : tensors_) {
            if (s.level == compress::dense_level) { continue; }
            s.level = largest_;
            largest.push_back(s);
        }
        const bool kept = how.feedback && !how.momentum;
        shared_ = std::make_shared<shared>(shared{how.compressor, compress::make_state(how.compressor, queue_, largest),
                                                  compress::residuals<Q>(queue_, kept ? plan.elements : 0)});
        if (how.goes_between_nodes()) {
            C inside = comm::split_inside(comm, *how.nodes);
            C across = comm::split_across(comm, *how.nodes);
            shared_->links = node_links{std::move(inside), std::move(across)};
        }
        if (how.momentum) { shared_->momentum.emplace(queue_, plan.elements, *how.momentum); }
        if (how.rescale) { rate_.emplace(queue_, 0.0); }
        const auto list = [this](const auto& entries) {
            entries_.insert(entries_.end(), entries.begin(), entries.end());
        };
        for (state_entry<M> e : shared_->state.entries()) {
            if (how.goes_between_nodes()) { e.whose = ownership::local; }  // ranks of a node have different shares
            entries_.push_back(std::move(e));
        }
        if (kept) { list(shared_->lost.entries()); }
        if (how.momentum) { list(shared_->momentum->entries()); }
        entries_.push_back(steps_.entry("exchange/steps", ownership::replicated));
        if (rate_) { entries_.push_back(rate_->entry("exchange/rate", ownership::replicated)); }
        entries_.push_back(scale_.entry("exchange/loss_scale", ownership::replicated));
        regroup();
    }

    void expect_rate(double rate) const {
        if (rate_ && std::isnan(rate)) {
            throw usage_error(
                "compressed mean: rescale needs the learning rate of every step, as in begin({.learning_rate = 1e-3})");
        }
    }
    void begin(double rate, double loss_scale) {
        if (loss_scale != scale_.value()) {
            const double factor = loss_scale / scale_.value();
            shared_->momentum ? shared_->momentum->rescale(queue_, factor) : shared_->lost.rescale(factor);
            scale_.set(loss_scale);
        }
        if (rate_ && rate > 0) {
            const double before = rate_->value();
            if (before > 0 && rate != before) { shared_->lost.rescale(before / rate); }
            rate_->set(rate);
        }
        steps_.set(steps_.value() + 1);
    }
    [[nodiscard]] auto average(std::size_t b, view<T, M> flat) const {
        const compress::draw_key key{seed_, static_cast<std::uint32_t>(steps_.value()), rank_};
        return [own = shared_, all = of_bucket_[b], flat, key,
                bucket = part{plan_.buckets[b].offset, plan_.buckets[b].size}](C& c) {
            own->average(c, compress::layout(*all), flat, bucket, key);
        };
    }
    void flush() const noexcept {}
    [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }
    void restored() {
        shared_->state.restored();
        steps_.restored();
        if (rate_) { rate_->restored(); }
        scale_.restored();
    }

    /// What gradients of the step that has begun are multiplied by.
    [[nodiscard]] double loss_scale() const noexcept { return scale_.value(); }
    /// Steps that have begun.
    [[nodiscard]] std::uint64_t steps() const noexcept { return steps_.value(); }
    /// What this rank owes, flat like the gradients; empty without feedback.
    [[nodiscard]] view<float, M> owed() const noexcept {
        return shared_->momentum ? shared_->momentum->residual() : shared_->lost.view();
    }
    /// By parameter: the whole tensor as it is sent, at its level.
    [[nodiscard]] std::span<const compress::segment> tensors() const noexcept { return tensors_; }
    /// New levels, by parameter, equal on all ranks; between steps. compress::dense_level for tensors that are not
    /// compressed, and for no other. Errors: usage_error naming the parameter.
    void set_levels(std::span<const int> levels) {
        if (levels.size() != tensors_.size()) {
            throw usage_error(formatted("set_levels: {} levels for {} tensors", levels.size(), tensors_.size()));
        }
        for (std::size_t i = 0; i < levels.size(); ++i) {
            const bool dense = tensors_[i].level == compress::dense_level;
            if (dense ? levels[i] != compress::dense_level : levels[i] < 1 || levels[i] > largest_) {
                throw usage_error(
                    formatted("set_levels: level {} for tensor {}, which {}", levels[i], i,
                              dense ? std::string("is not compressed") : formatted("has 1 to {}", largest_)));
            }
        }
        for (std::size_t i = 0; i < levels.size(); ++i) { tensors_[i].level = levels[i]; }
        regroup();
    }

private:
    void regroup() {
        of_bucket_.clear();
        for (const schedule::bucket& b : plan_.buckets) {
            const auto first = tensors_.begin() + static_cast<std::ptrdiff_t>(b.first);
            of_bucket_.push_back(std::make_shared<const segments>(first, first + static_cast<std::ptrdiff_t>(b.count)));
        }
    }
};

}  // namespace tutti::strategy::detail
