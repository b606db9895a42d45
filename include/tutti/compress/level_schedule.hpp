// level_schedule: at which step gradients are sent dense, accumulated for measuring, and levels chosen anew.
// Needs core/error. A function of the step alone, so it needs no state to resume.
// Source: defaults and windows of the code published with Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357).
#pragma once

#include <cstdint>      // steps
#include <string_view>  // names

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::compress {

/// What a step does; each includes what the one before it does, but for `dense`.
enum class level_action : std::uint8_t {
    dense,       ///< send gradients as they are
    compress,    ///< send them at the current levels
    accumulate,  ///< and add them to what errors will be measured on
    select       ///< and, when the step is done, measure and choose: the next step uses the new levels
};

[[nodiscard]] constexpr std::string_view name_of(level_action a) noexcept {
    switch (a) {
    case level_action::dense: return "dense";
    case level_action::compress: return "compress";
    case level_action::accumulate: return "accumulate";
    case level_action::select: return "select";
    }
    return "unknown";
}

/// Action by step, counted from 0: `warmup` dense steps, then rounds of `period` steps. The last `window` steps of a
/// round accumulate, the very last of them selects. The first round runs at the uniform choice.
///
/// Semantics    a selection sees exactly `window` gradients, none of them dense. Selecting at the end of a step leaves
///              the time until the next gradients are ready to solve on a lane; all ranks adopt the result at the same
///              step, never "when ready".
/// Determinism  of the arguments alone.
/// Errors       usage_error when the window is 0, or longer than the period: windows would overlap.
class level_schedule {
public:
    struct steps {
        std::uint64_t warmup = 1000;
        std::uint64_t period = 100;
        std::uint64_t window = 10;
    };

    level_schedule() : level_schedule(steps{}) {}
    explicit level_schedule(const steps& s) : steps_(s) {
        if (s.window == 0) { throw usage_error("level_schedule: a window of 0 steps measures nothing"); }
        if (s.window > s.period) {
            throw usage_error(
                formatted("level_schedule: a window of {} steps is longer than the period of {}", s.window, s.period));
        }
    }

    [[nodiscard]] level_action operator()(std::uint64_t step) const noexcept {
        if (step < steps_.warmup) { return level_action::dense; }
        const std::uint64_t left = steps_.period - 1 - (step - steps_.warmup) % steps_.period;  // in the round
        if (left == 0) { return level_action::select; }
        return left < steps_.window ? level_action::accumulate : level_action::compress;
    }

private:
    steps steps_;
};

}  // namespace tutti::compress
