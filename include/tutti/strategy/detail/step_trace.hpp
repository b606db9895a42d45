// step_trace: the steps of a strategy on a timeline, from the begin of their first micro-batch on.
// Needs schedule/span. Without a timeline it costs a branch.
#pragma once

#include <tutti/core/queue.hpp>         // queue
#include <tutti/schedule/span.hpp>      // moment_of
#include <tutti/schedule/timeline.hpp>  // timeline

namespace tutti::strategy::detail {

template <queue Q> class step_trace {
    schedule::timeline* to_;
    schedule::timeline::track track_ = 0;
    schedule::moment<Q> begin_{};

public:
    /// `to` may be null.
    step_trace(schedule::timeline* to, int rank) : to_(to) {
        if (to_ != nullptr) { track_ = to_->track_of(rank, "steps"); }
    }
    void begin(const Q& q) noexcept {
        if (to_ != nullptr) { begin_ = schedule::moment_of(q); }
    }
    void end(const Q& q) const noexcept {
        if (to_ != nullptr) { to_->add(track_, "step", schedule::span_kind::step, begin_, schedule::moment_of(q)); }
    }
};

}  // namespace tutti::strategy::detail
