// selected_mean_state: what changes in a selected_mean: the window, the selection beside the steps, the levels in use.
// Needs strategy/detail/{compressed_mean_state,level_selection}. `How` is the selected_mean that made it.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // steps
#include <optional>   // a selection
#include <span>       // levels
#include <utility>    // move
#include <vector>     // levels

#include <tutti/comm/communicator.hpp>                // communicator
#include <tutti/compress/compressor.hpp>              // segment
#include <tutti/compress/dense.hpp>                   // dense_level
#include <tutti/compress/detail/flat.hpp>             // sums of elements
#include <tutti/compress/level_choice.hpp>            // level_choice
#include <tutti/compress/level_errors.hpp>            // measurable
#include <tutti/compress/level_schedule.hpp>          // level_schedule
#include <tutti/compress/level_table.hpp>             // costs
#include <tutti/core/buffer.hpp>                      // levels as memory
#include <tutti/core/elementwise.hpp>                 // fill
#include <tutti/core/reduce_op.hpp>                   // mean
#include <tutti/core/run.hpp>                         // fetch
#include <tutti/core/state.hpp>                       // state_entry
#include <tutti/schedule/bucket.hpp>                  // bucket_plan
#include <tutti/schedule/lane.hpp>                    // lane_options
#include <tutti/strategy/detail/level_selection.hpp>  // what goes beside the steps
#include <tutti/strategy/gradient_exchange.hpp>       // exchange_state_of
#include <tutti/strategy/strategy.hpp>                // parameters

namespace tutti::strategy::detail {

template <class How, communicator C, floating_element T>
requires compress::measurable<decltype(How::mean.compressor), queue_of<C>> && comm::can_all_reduce<C, T, tutti::mean> &&
    comm::can_all_reduce<C, float, tutti::mean> && comm::can_all_reduce<C, double, tutti::mean>
class selected_mean_state {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using action = compress::level_action;
    using inner_type = exchange_state_of<decltype(How::mean), C, T>;

    inner_type inner_;
    compress::level_schedule schedule_;
    schedule::bucket_plan plan_;
    Q queue_;
    action action_ = action::compress;  // of the step
    bool first_of_window_ = false;
    std::vector<std::size_t> compressed_;  // parameters
    buffer<std::int32_t, Q> kept_levels_;  // theirs, as memory; norms likewise
    buffer<double, Q> kept_norms_;
    compress::level_choice choice_;
    std::optional<level_selection<C, How>> selection_;  // none where there is one level
    std::vector<state_entry<M>> entries_;

public:
    selected_mean_state(const How& how, inner_type inner, C& comm, const parameters<T, M>& list,
                        const schedule::bucket_plan& plan, const schedule::lane_options& lanes)
        : inner_(std::move(inner))
        , schedule_(how.steps)
        , plan_(plan)
        , queue_(comm.queue())
        , kept_levels_(queue_, 0)
        , kept_norms_(queue_, 0) {
        static_assert(!charging_queue<Q>, "levels depend on values, which a virtual queue does not have");
        for (const auto& e : inner_.entries()) { entries_.push_back(e); }
        if (how.levels.size() == 1) { return; }
        std::vector<compress::segment> tensors;
        compress::level_table table;
        for (std::size_t i = 0; i < list.size(); ++i) {
            const compress::segment& s = inner_.tensors()[i];
            if (s.level == compress::dense_level) { continue; }
            compressed_.push_back(i);
            tensors.push_back(s);
            table.add_layer(how.costs_of(s, plan.bucket_of[i], plan.buckets.size()));
        }
        if (tensors.empty()) { return; }
        kept_levels_ = buffer<std::int32_t, Q>(queue_, tensors.size());
        kept_norms_ = buffer<double, Q>(queue_, how.critical ? tensors.size() : 0);
        fill(queue_, kept_levels_.view(), how.mean.level);
        fill(queue_, kept_norms_.view(), 0.0);
        selection_.emplace(how, comm, std::move(tensors), std::move(table), plan.elements, lanes);
        entries_.push_back(state_of("exchange/levels", kept_levels_.view(), ownership::replicated));
        entries_.push_back(state_of("exchange/window", selection_->window()));
        if (how.critical) { entries_.push_back(state_of("exchange/norms", kept_norms_.view(), ownership::replicated)); }
    }

    void expect_rate(double rate) const { inner_.expect_rate(rate); }
    void begin(double rate, double loss_scale) {
        const std::uint64_t step = inner_.steps();
        const auto steps_ago = [&](std::uint64_t n) { return step >= n ? schedule_(step - n) : action::compress; };
        if (selection_ && steps_ago(1) == action::select) { selection_->start(queue_, step - 1); }
        if (selection_ && selection_->started() && steps_ago(1 + selection_->how().delay) == action::select) {
            adopt();
        }
        const double scale_before = inner_.loss_scale();
        inner_.begin(rate, loss_scale);
        action_ = schedule_(step);
        if (!selection_ && action_ != action::dense) { action_ = action::compress; }
        first_of_window_ = steps_ago(1) != action::accumulate;
        if (selection_ && !first_of_window_ && loss_scale != scale_before) {
            const auto window = selection_->window();
            scale(queue_, window, window, static_cast<float>(loss_scale / scale_before));
        }
    }

    [[nodiscard]] auto average(std::size_t b, view<T, M> flat) const {
        const std::size_t first = plan_.buckets[b].offset, size = plan_.buckets[b].size;
        view<float, M> window, owed;
        if (selection_) {
            window = selection_->window().sub(first, size);
            if (!selection_->how().averages() && !inner_.owed().empty()) { owed = inner_.owed().sub(first, size); }
        }
        return [send = inner_.average(b, flat), gradient = flat.sub(first, size), owed, window, doing = action_,
                begins = first_of_window_](C& c) {
            if (doing == action::dense) {
                c.all_reduce(gradient, gradient, tutti::mean{});
                return;
            }
            if (doing != action::compress) {
                if (begins) { fill(c.queue(), window, 0.0f); }
                run(c.queue(), compress::detail::add_operation<T, M>{gradient, window});
                if (!owed.empty()) { run(c.queue(), compress::detail::add_operation<float, M>{owed, window}); }
            }
            send(c);
        };
    }

    void flush() {
        if (selection_) { selection_->drain(); }
    }
    [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return entries_; }
    void restored() {
        inner_.restored();
        choice_ = {};
        if (!selection_) { return; }
        selection_->drop();
        std::vector<int> kept(compressed_.size());
        for (std::size_t t = 0; t < kept.size(); ++t) {
            kept[t] = fetch(queue_, kept_levels_.view().sub(t, 1), 0);
            if (kept_norms_.size() != 0) { selection_->norms()[t] = fetch(queue_, kept_norms_.view().sub(t, 1), 0.0); }
        }
        set_levels(kept);
        // One that had begun, and whose levels are not in use yet, begins again: the window is as it was.
        const std::uint64_t step = inner_.steps(), ago = selection_->how().delay + 1;
        for (std::uint64_t s = step - std::min(step, ago); s + 1 < step; ++s) {
            if (schedule_(s) == action::select) { selection_->start(queue_, s); }
        }
    }

    /// By parameter: the whole tensor as it is sent, at its level.
    [[nodiscard]] std::span<const compress::segment> tensors() const noexcept { return inner_.tensors(); }
    /// The last choice; before the first, and after a resume, it has no options. Levels are its options, unless its
    /// reason is error_not_finite: then they stayed.
    [[nodiscard]] const compress::level_choice& choice() const noexcept { return choice_; }

private:
    void adopt() {
        choice_ = selection_->finish(queue_);
        if (choice_.reason == compress::choice_reason::error_not_finite) { return; }
        std::vector<int> adopted;
        for (const std::size_t option : choice_.options) { adopted.push_back(selection_->how().levels[option]); }
        set_levels(adopted);
        for (std::size_t t = 0; t < adopted.size(); ++t) {
            fill(queue_, kept_levels_.view().sub(t, 1), adopted[t]);
            if (kept_norms_.size() != 0) { fill(queue_, kept_norms_.view().sub(t, 1), selection_->norms()[t]); }
        }
    }
    void set_levels(std::span<const int> of_compressed) {
        std::vector<int> all(inner_.tensors().size(), compress::dense_level);
        for (std::size_t t = 0; t < compressed_.size(); ++t) { all[compressed_[t]] = of_compressed[t]; }
        inner_.set_levels(all);
    }
};

}  // namespace tutti::strategy::detail
