// selected_mean<Compressor>: a compressed_mean that chooses levels anew as training goes on, by tensor (L-GreCo).
// Needs strategy/compressed_mean and compress/level_*; on a CUDA queue strategy/selected_mean.cuh.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357); with `critical` also Agarwal et al., Accordion, MLSys
// 2021 (arXiv 2010.16248).
#pragma once

#include <algorithm>  // find, min, max
#include <cmath>      // isfinite
#include <concepts>   // copyable
#include <cstddef>    // size_t
#include <cstdint>    // steps
#include <optional>   // an option that may be off
#include <span>       // levels
#include <string>     // descriptions
#include <utility>    // move
#include <vector>     // levels

#include <tutti/comm/communicator.hpp>                // communicator
#include <tutti/compress/critical_regime.hpp>         // checks of eta
#include <tutti/compress/detail/flat.hpp>             // sums of elements
#include <tutti/compress/level_choice.hpp>            // choice_options
#include <tutti/compress/level_errors.hpp>            // measurable
#include <tutti/compress/level_schedule.hpp>          // level_schedule
#include <tutti/compress/level_table.hpp>             // costs
#include <tutti/core/buffer.hpp>                      // levels as memory
#include <tutti/core/elementwise.hpp>                 // fill
#include <tutti/core/error.hpp>                       // usage_error
#include <tutti/core/reduce_op.hpp>                   // mean
#include <tutti/core/run.hpp>                         // fetch
#include <tutti/core/state.hpp>                       // state_entry
#include <tutti/core/text.hpp>                        // formatted
#include <tutti/schedule/bucket.hpp>                  // bucket_plan
#include <tutti/schedule/lane.hpp>                    // lane_options
#include <tutti/strategy/compressed_mean.hpp>         // what is controlled
#include <tutti/strategy/detail/level_selection.hpp>  // what goes beside the steps
#include <tutti/strategy/strategy.hpp>                // parameters

namespace tutti::strategy {

/// What a selection makes as small as it can.
enum class level_cost : std::uint8_t {
    bytes,   ///< on the wire
    exposed  ///< bytes, those of the last bucket in full and of earlier ones by their place: they have backward to hide
             ///< behind. The published time-aware weights.
};
/// Which gradient a selection measures, of those that the steps of its window add up.
enum class measured_gradient : std::uint8_t {
    local,    ///< each rank its own with what it owes, as it is compressed; tables are averaged over the ranks
    averaged  ///< the mean over the ranks without what they owe: one dense all_reduce a selection
};

/// Accordion: tensors whose gradient changes fast count with a careful level in the budget, others with a relaxed one.
struct critical_levels {
    int relaxed = 0;
    int careful = 0;
    double eta = 0.5;  ///< the change of a norm, from one selection to the next, that is fast
};

/// Sends gradients through a compressor at levels that lose as little as the uniform level and cost less.
///
/// Semantics    at first, and always in the budget, every tensor has the level mean.level. In each round of `steps` the
///              gradients of the window are added up; after its last step all `levels` are measured on the sum, tables
///              are averaged over the ranks, and choose_levels solves. The new levels are used from `delay` steps later
///              on, by all ranks in the same step, once they agree on the hash of the choice; never "when ready".
///              Factors and residuals are kept. A choice never costs more than the uniform level, nor, measured on the
///              window, loses more than choice.alpha times as much. Tensors that compressed_mean sends as they are stay
///              so; levels whose wire is larger than the tensor are no options. With `critical` the budget is that of
///              the careful and relaxed levels, and the uniform one counts before the first choice alone.
///   dense      steps of the warm-up send gradients as they are.
/// Not finite   a gradient that is not finite spoils its window, until the next one begins: levels stay as they are.
///   one level  is no choice: then nothing is measured, and this is a compressed_mean with a warm-up.
/// Determinism  as compressed_mean. Levels are functions of gradients, not of time.
/// Cost         compressed_mean's; a float an element more storage, and 12 to 24 bytes an element of memory traffic in
///              the steps of a window. A selection, beside the steps: squared_errors, an all_reduce of 8 bytes a tensor
///              and level (averaged: also of 4 bytes an element), choose_levels. `delay` steps later a step waits for
///              what is left of it, and for one exchange of hashes. Over NCCL, where the collectives of a family start
///              in the order of their calls, the next step's gradients leave behind squared_errors.
/// Errors       usage_error for options that make no sense; mismatch_error, naming the ranks, where choices differ.
template <std::copyable Compressor> struct selected_mean {
    compressed_mean<Compressor> mean{};  ///< its level is the uniform one; its largest_level is that of `levels`
    std::vector<int> levels{};           ///< to choose among: ascending, mean.level one of them
    compress::level_schedule::steps steps{};
    std::uint64_t delay = 1;  ///< steps between the one that measures and the one that uses its levels
    compress::choice_options choice{};
    level_cost cost = level_cost::bytes;
    measured_gradient measured = measured_gradient::local;
    std::optional<critical_levels> critical{};

    template <communicator C, floating_element T>
    requires compress::measurable<Compressor, queue_of<C>> && comm::can_all_reduce<C, T, tutti::mean> &&
        comm::can_all_reduce<C, float, tutti::mean> && comm::can_all_reduce<C, double, tutti::mean>
    class state_type {
        using Q = queue_of<C>;
        using M = memory_of<C>;
        using action = compress::level_action;

        typename compressed_mean<Compressor>::template state_type<C, T> inner_;
        compress::level_schedule schedule_;
        schedule::bucket_plan plan_;
        Q queue_;
        action action_ = action::compress;  // of the step
        bool first_of_window_ = false;
        std::vector<std::size_t> compressed_;  // parameters
        buffer<std::int32_t, Q> kept_levels_;  // theirs, as memory; norms likewise
        buffer<double, Q> kept_norms_;
        compress::level_choice choice_;
        std::optional<detail::level_selection<C, selected_mean>> selection_;  // none where there is one level
        std::vector<state_entry<M>> entries_;

    public:
        state_type(const selected_mean& how, C& comm, const parameters<T, M>& list, const schedule::bucket_plan& plan,
                   const schedule::lane_options& lanes)
            : inner_(how.controlled().template make_state<C, T>(comm, list, plan, lanes))
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
            if (how.critical) {
                entries_.push_back(state_of("exchange/norms", kept_norms_.view(), ownership::replicated));
            }
        }

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
            if (!selection_) { return; }
            selection_->drop();
            std::vector<int> kept(compressed_.size());
            for (std::size_t t = 0; t < kept.size(); ++t) {
                kept[t] = fetch(queue_, kept_levels_.view().sub(t, 1), 0);
                if (kept_norms_.size() != 0) {
                    selection_->norms()[t] = fetch(queue_, kept_norms_.view().sub(t, 1), 0.0);
                }
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
        /// Where the levels come from; before the first choice, and after a resume, it has no options.
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

    void validate() const {
        mean.validate();
        static_cast<void>(compress::level_schedule(steps));  // refuses
        for (std::size_t l = 1; l < levels.size(); ++l) {
            if (levels[l] <= levels[l - 1]) {
                throw usage_error(
                    formatted("selected mean: level {} comes after {}; levels must ascend", levels[l], levels[l - 1]));
            }
        }
        if (levels.size() > compress::level_table::most_options) {
            throw usage_error(formatted("selected mean: {} levels to choose among, at most {}", levels.size(),
                                        compress::level_table::most_options));
        }
        static_cast<void>(option_of(mean.level));
        if (mean.momentum) {
            throw usage_error("selected mean: levels are measured on gradients, so mean.momentum cannot be used");
        }
        if (mean.largest_level != 0) {
            throw usage_error(formatted(
                "selected mean: mean.largest_level is {}; it is the last of `levels`: leave it 0", mean.largest_level));
        }
        if (critical) {
            static_cast<void>(option_of(critical->relaxed));
            static_cast<void>(option_of(critical->careful));
            static_cast<void>(compress::critical_regime(0, critical->eta));
        }
        if (delay > steps.period - steps.window) {
            throw usage_error(
                formatted("selected mean: levels chosen {} steps after a window; the next begins after {}", delay,
                          steps.period - steps.window));
        }
        if (!(choice.alpha > 0) || !std::isfinite(choice.alpha)) {
            throw usage_error(formatted("selected mean: alpha is {}, not positive and finite", choice.alpha));
        }
        compress::level_table one;
        one.add_layer(std::vector<double>{1.0});
        static_cast<void>(compress::choose_levels(one, std::vector<std::size_t>{0}, choice));  // refuses
    }
    [[nodiscard]] std::string describe() const {
        std::string of;
        for (const int level : levels) { of += formatted("{}{}", of.empty() ? "" : " ", level); }
        return formatted(
            "{}; levels of {} chosen every {} steps after {}, on {} gradients of {} steps, used {} later, "
            "{} of {} error norms, solver {} of {} bins, by {}{}",
            controlled().describe(), of, steps.period, steps.warmup, averages() ? "averaged" : "local", steps.window,
            delay, choice.alpha, choice.sum == compress::error_sum::norms ? "summed" : "squared",
            static_cast<int>(choice.solver), choice.bins, cost == level_cost::bytes ? "bytes" : "exposed bytes",
            critical ? formatted(", critical {} or {}, eta {}", critical->careful, critical->relaxed, critical->eta)
                     : std::string());
    }
    template <communicator C, floating_element T>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>& list,
                                              const schedule::bucket_plan& plan,
                                              const schedule::lane_options& lanes) const {
        return state_type<C, T>(*this, comm, list, plan, lanes);
    }

    [[nodiscard]] bool averages() const noexcept { return measured == measured_gradient::averaged; }
    /// The place of a level in `levels`. Errors: usage_error when it is none of them.
    [[nodiscard]] std::size_t option_of(int level) const {
        const auto at = std::find(levels.begin(), levels.end(), level);
        if (at == levels.end()) {
            throw usage_error(
                formatted("selected mean: level {} is none of the {} to choose among", level, levels.size()));
        }
        return static_cast<std::size_t>(at - levels.begin());
    }

private:
    [[nodiscard]] compressed_mean<Compressor> controlled() const {
        compressed_mean<Compressor> c = mean;
        if (!levels.empty()) { c.largest_level = levels.back(); }
        return c;
    }
    /// By level, up to the largest whose wire is no larger than the tensor, and at least to those of the budget.
    [[nodiscard]] std::vector<double> costs_of(compress::segment s, std::size_t bucket, std::size_t buckets) const {
        const double weight =
            cost == level_cost::bytes ? 1 : static_cast<double>(bucket + 1) / static_cast<double>(buckets);
        const int needed = critical ? std::max(critical->relaxed, critical->careful) : mean.level;
        std::vector<double> costs;
        for (const int level : levels) {
            s.level = level;
            const std::size_t bytes = mean.bytes_of(s);  // refuses
            if (level > needed && bytes > 4 * s.size()) { continue; }
            costs.push_back(weight * static_cast<double>(bytes));
        }
        return costs;
    }
};

}  // namespace tutti::strategy
