// selected_mean<Compressor>: a compressed_mean that chooses levels anew as training goes on, by tensor (L-GreCo).
// Needs strategy/compressed_mean and compress/level_*; on a CUDA queue strategy/selected_mean.cuh.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357); with `critical` also Agarwal et al., Accordion, MLSys
// 2021 (arXiv 2010.16248).
#pragma once

#include <algorithm>  // find, max
#include <cmath>      // isfinite
#include <concepts>   // copyable
#include <cstddef>    // size_t
#include <cstdint>    // steps
#include <optional>   // an option that may be off
#include <string>     // descriptions
#include <vector>     // levels

#include <tutti/comm/communicator.hpp>                    // communicator
#include <tutti/compress/compressor.hpp>                  // segment
#include <tutti/compress/critical_regime.hpp>             // checks of eta
#include <tutti/compress/level_choice.hpp>                // choice_options
#include <tutti/compress/level_schedule.hpp>              // level_schedule
#include <tutti/compress/level_table.hpp>                 // most_options
#include <tutti/core/error.hpp>                           // usage_error
#include <tutti/core/text.hpp>                            // formatted
#include <tutti/schedule/bucket.hpp>                      // bucket_plan
#include <tutti/schedule/lane.hpp>                        // lane_options
#include <tutti/strategy/compressed_mean.hpp>             // what is controlled
#include <tutti/strategy/detail/selected_mean_state.hpp>  // what changes
#include <tutti/strategy/strategy.hpp>                    // parameters

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

    static constexpr bool needs_all_buckets = true;  ///< a window is of whole steps

    template <communicator C, floating_element T> using state_type = detail::selected_mean_state<selected_mean, C, T>;

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
        for (const int level : levels) { mean.expect_level(level); }
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
        return state_type<C, T>(*this, controlled().template make_state<C, T>(comm, list, plan, lanes), comm, list,
                                plan, lanes);
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

private:
    [[nodiscard]] compressed_mean<Compressor> controlled() const {
        compressed_mean<Compressor> c = mean;
        if (!levels.empty()) { c.largest_level = levels.back(); }
        return c;
    }
};

}  // namespace tutti::strategy
