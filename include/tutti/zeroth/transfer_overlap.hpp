// transfer_overlap: how well an offload pipeline hid transfers and computation under each other, from its timeline.
// Needs schedule/timeline.
#pragma once

#include <algorithm>  // max, min
#include <cstddef>    // size_t

#include <tutti/core/deadline.hpp>      // seconds
#include <tutti/schedule/timeline.hpp>  // timeline

namespace tutti::zeroth {

/// Means over the steps of one rank, in seconds. Compute is the model alone. Transfers are as long as they took beside
/// each other: for times alone, measure alone.
struct transfer_overlap {
    std::size_t steps = 0;
    double upload = 0;
    double compute = 0;
    double offload = 0;
    double step = 0;  ///< with what is between steps

    /// 1 where the longest of the three fills the step. 0 without steps.
    [[nodiscard]] double efficiency() const noexcept {
        return step > 0 ? std::max({upload, compute, offload}) / step : 0;
    }
    /// Of a step: not covered by the computation.
    [[nodiscard]] double exposed() const noexcept { return std::max(0.0, step - compute); }
};

/// Of all steps but the first `skip`. Of a span counts what lies within them: transfers may begin in the step before, and
/// end in the one behind.
[[nodiscard]] inline transfer_overlap overlap_of(const schedule::timeline& trace, int rank, std::size_t skip = 1) {
    transfer_overlap all;
    const auto steps = trace.steps(rank);
    if (steps.size() <= skip) { return all; }
    const deadline begin = steps[skip].begin;
    const deadline end = steps.back().end;
    for (const schedule::timed_span& s : trace.spans(rank)) {
        const double length = std::max(0.0, seconds(std::min(s.end, end) - std::max(s.begin, begin)));
        if (s.kind == schedule::span_kind::communication) {
            all.upload += s.name == "upload" || s.name == "load" ? length : 0;
            all.offload += s.name == "offload" ? length : 0;
        } else if (s.kind == schedule::span_kind::work) {
            all.compute += s.name == "head" || s.name == "block" || s.name == "tail" ? length : 0;
        }
    }
    all.steps = steps.size() - skip;
    const auto each = static_cast<double>(all.steps);
    all.step = seconds(end - begin) / each;
    all.upload /= each;
    all.offload /= each;
    all.compute /= each;
    return all;
}

}  // namespace tutti::zeroth
