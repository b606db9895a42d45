// scoped_span: what happens between its construction and its destruction, on a timeline: the host's time, or a queue's.
// Needs schedule/timeline and core/queue. With a null timeline it costs a branch.
#pragma once

#include <optional>     // marks that could not be made
#include <string_view>  // names
#include <utility>      // declval

#include <tutti/core/deadline.hpp>      // clock_type
#include <tutti/core/queue.hpp>         // timed_queue
#include <tutti/schedule/timeline.hpp>  // timeline

namespace tutti::schedule {

/// Where a span begins or ends: a mark on a queue that has them, which is empty where it could not be made; else the
/// host's time.
template <queue Q> [[nodiscard]] auto moment_of(const Q& q) noexcept {
    if constexpr (timed_queue<Q>) {
        try {
            return q.mark();
        } catch (...) { return std::optional<typename Q::mark_type>(); }  // a trace never fails the run
    } else {
        return clock_type::now();
    }
}
template <queue Q> using moment = decltype(moment_of(std::declval<const Q&>()));

/// Records a scope: when the host went through it or, given a timed queue, when that queue did.
template <queue Q = host_queue> class scoped_span {
    timeline* to_;
    timeline::track track_;
    std::string_view name_;
    span_kind kind_;
    const Q* queue_ = nullptr;
    moment<Q> begin_{};

    [[nodiscard]] moment<Q> now() const noexcept {
        if constexpr (timed_queue<Q>) {
            return moment_of(*queue_);
        } else {
            return clock_type::now();
        }
    }

public:
    /// `name` must outlive the span.
    scoped_span(timeline* to, timeline::track track, std::string_view name,
                span_kind kind = span_kind::work) requires(!timed_queue<Q>)
        : to_(to), track_(track), name_(name), kind_(kind) {
        if (to_ != nullptr) { begin_ = now(); }
    }
    /// So must `q`.
    scoped_span(timeline* to, timeline::track track, std::string_view name, const Q& q,
                span_kind kind = span_kind::work)
        : to_(to), track_(track), name_(name), kind_(kind), queue_(&q) {
        if (to_ != nullptr) { begin_ = now(); }
    }
    scoped_span(const scoped_span&) = delete;
    scoped_span& operator=(const scoped_span&) = delete;
    ~scoped_span() {
        if (to_ != nullptr) { to_->add(track_, name_, kind_, begin_, now()); }
    }
};

}  // namespace tutti::schedule
