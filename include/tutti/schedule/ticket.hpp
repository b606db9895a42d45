// ticket<Queue>: the claim on one piece of work that a lane of that queue has accepted.
// Needs schedule/detail/worker. Waiting orders a consumer behind the work; letting go of a ticket waits for it.
// Rules: an exception never leaves work behind that could touch freed memory (see ~ticket).
#pragma once

#include <concepts>     // same_as
#include <exception>    // uncaught_exceptions, exception_ptr
#include <memory>       // shared with the lane
#include <optional>     // events
#include <string>       // names
#include <string_view>  // names
#include <utility>      // exchange

#include <tutti/comm/communicator.hpp>       // communicator
#include <tutti/core/queue.hpp>              // queue
#include <tutti/schedule/detail/worker.hpp>  // job
#include <tutti/schedule/span.hpp>           // waits

namespace tutti::schedule {

template <communicator C> class lane;

/// A claim on submitted work. Default-constructed and moved-from tickets are claims on nothing: done.
///
/// Semantics  wait(consumer) orders what the consumer queue does next behind the work and rethrows the work's error; it
///            may be repeated. A host consumer blocks. A device consumer is ordered by an event behind device work, and
///            blocks the caller for host work.
///            Destroying or overwriting a ticket waits for the work. If that happens while an exception unwinds the
///            ticket's scope, or the deadline passes, the communicator's family is aborted first, so that the work
///            ends. Work that even then does not end within another deadline, of 5 seconds at least, ends the program:
///            it owns memory its owner frees. A device ticket that a device consumer has waited for lets go without
///            waiting: the consumer's order holds.
/// Threads    one thread at a time uses a ticket; different tickets are independent.
/// Deadline   the lane's timeout, counted from the last job that the lane finished.
/// Cost       waiting for finished work: one atomic load. On a device: an event; with a trace two marks around it, so that
///            a wait that holds nothing up shows as the 1 to 3 us between them.
/// Errors     the work's; timeout_error past the deadline; usage_error when a lane's own work waits for that lane.
template <queue Q> class ticket;

template <queue Q>
requires(Q::executes_inline) class [[nodiscard]] ticket<Q> {
    template <communicator C> friend class lane;

    std::shared_ptr<detail::worker> lane_;
    std::shared_ptr<detail::job> job_;
    int exceptions_ = std::uncaught_exceptions();

    ticket(std::shared_ptr<detail::worker> lane, std::shared_ptr<detail::job> j) noexcept
        : lane_(std::move(lane)), job_(std::move(j)) {}

public:
    ticket() noexcept = default;
    ticket(ticket&& other) noexcept
        : lane_(std::exchange(other.lane_, nullptr)), job_(std::exchange(other.job_, nullptr)) {}
    ticket& operator=(ticket&& other) noexcept {
        if (this != &other) {
            let_go();
            lane_ = std::exchange(other.lane_, nullptr);
            job_ = std::exchange(other.job_, nullptr);
        }
        return *this;
    }
    ~ticket() { let_go(); }

    template <queue Consumer> void wait(const Consumer&) const {
        if (job_ == nullptr) { return; }
        lane_->consume(*job_);
        job_->rethrow();
    }

private:
    // What a lane keeps of a ticket that its work runs behind.
    struct prerequisite {
        std::shared_ptr<detail::worker> lane;
        std::shared_ptr<detail::job> job;
        void operator()(duration) const {
            if (job == nullptr) { return; }
            lane->require_done(*job);
            job->rethrow();
        }
    };
    [[nodiscard]] prerequisite share() const { return {lane_, job_}; }
    template <queue Behind> void order(const Behind&) const { share()(duration{}); }

    void let_go() noexcept {
        if (job_ != nullptr && !job_->done()) {
            if (std::uncaught_exceptions() > exceptions_) {
                lane_->abort_over(job_->name(), "was in flight when an exception dropped its ticket");
            }
            if (!lane_->await(*job_, lane_->timeout)) {
                lane_->abort_over(job_->name(), "did not finish in time when its ticket was dropped");
                if (!lane_->await(*job_, lane_->last_patience())) { detail::give_up(lane_->name, job_->name()); }
            }
        }
        job_ = nullptr;
        lane_ = nullptr;
    }
};

template <queue Q>
requires(!Q::executes_inline) class [[nodiscard]] ticket<Q> {
    template <communicator C> friend class lane;

    std::shared_ptr<detail::lane_link> lane_;
    std::optional<typename Q::event_type> event_;
    std::exception_ptr error_;
    std::string name_;
    int exceptions_ = std::uncaught_exceptions();
    mutable bool ordered_ = false;  // a consumer's queue runs behind the work and so keeps its buffers

    ticket(std::shared_ptr<detail::lane_link> lane, std::string_view name, typename Q::event_type e,
           std::exception_ptr error)
        : lane_(std::move(lane)), event_(std::move(e)), error_(std::move(error)), name_(name) {}

public:
    ticket() noexcept = default;
    ticket(ticket&& other) noexcept { take(other); }
    ticket& operator=(ticket&& other) noexcept {
        if (this != &other) {
            let_go();
            take(other);
        }
        return *this;
    }
    ~ticket() { let_go(); }

    template <queue Consumer> void wait(const Consumer& consumer) const {
        if (lane_ == nullptr) { return; }
        if (error_ != nullptr) { std::rethrow_exception(error_); }
        if constexpr (std::same_as<typename Consumer::event_type, typename Q::event_type>) {
            timeline* const trace = timed_queue<Consumer> ? lane_->trace.load() : nullptr;
            const scoped_span held_up(trace, lane_->consumer_track, name_, consumer, span_kind::wait);
            order(consumer);
            ordered_ = true;
        } else {
            auto e = *event_;
            if (e.ready()) { return; }
            const scoped_span span(lane_->trace, lane_->consumer_track, name_, span_kind::wait);
            e.wait_host(after(lane_->timeout));
        }
    }

private:
    struct prerequisite {
        std::optional<typename Q::event_type> event;
        std::exception_ptr error;
        void operator()(duration timeout) const {
            if (error != nullptr) { std::rethrow_exception(error); }
            if (event.has_value()) {
                auto e = *event;
                e.wait_host(after(timeout));
            }
        }
    };
    [[nodiscard]] prerequisite share() const { return {event_, error_}; }
    template <queue Behind> void order(Behind behind) const {
        if (error_ != nullptr) { std::rethrow_exception(error_); }
        if (!event_.has_value()) { return; }
        if constexpr (std::same_as<typename Behind::event_type, typename Q::event_type>) {
            auto e = *event_;
            behind.wait(e);
        } else {
            share()(lane_->timeout);
        }
    }

    void take(ticket& other) noexcept {
        lane_ = std::exchange(other.lane_, nullptr);
        event_ = std::exchange(other.event_, std::nullopt);
        error_ = std::exchange(other.error_, nullptr);
        name_ = std::exchange(other.name_, {});
        ordered_ = std::exchange(other.ordered_, false);
    }
    void let_go() noexcept {
        if (event_.has_value() && !ordered_ && !event_->ready()) {
            if (std::uncaught_exceptions() > exceptions_) {
                lane_->abort_over(name_, "was in flight when an exception dropped its ticket");
            }
            if (!finished(lane_->timeout)) {
                lane_->abort_over(name_, "did not finish in time when its ticket was dropped");
                if (!finished(lane_->last_patience())) { detail::give_up(lane_->name, name_); }
            }
        }
        event_.reset();
        lane_ = nullptr;
    }
    [[nodiscard]] bool finished(duration patience) noexcept {
        try {
            event_->wait_host(after(patience));
        } catch (...) { return false; }
        return true;
    }
};

}  // namespace tutti::schedule
