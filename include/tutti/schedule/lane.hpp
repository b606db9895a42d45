// lane<Comm>: asynchrony. Owns a communicator and runs submitted work on it first-in first-out, beside its caller.
// Needs schedule/ticket and a communicator of its own (comm.duplicate). A thread for host queues, a stream for others.
// Rules: every rank submits the same collectives in the same order; the first error ends lane and family.
#pragma once

#include <concepts>     // invocable
#include <exception>    // exception_ptr
#include <memory>       // state shared with tickets
#include <mutex>        // abort from any thread
#include <optional>     // work that has been destroyed
#include <string>       // names
#include <string_view>  // names
#include <tuple>        // prerequisites
#include <type_traits>  // conditional_t
#include <utility>      // exchange

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/core/queue.hpp>         // timed_queue
#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/span.hpp>      // scoped_span
#include <tutti/schedule/ticket.hpp>    // ticket

namespace tutti::schedule {

struct lane_options {
    /// Longest wait without progress. Twice the communicators' default: theirs passes first and names who is missing.
    duration timeout = 2 * default_timeout();
    timeline* trace = nullptr;      ///< where work and waits are recorded; must outlive the lane and waits in progress
    int trace_rank = -1;            ///< process of the trace; -1: the communicator's rank
    std::string consumer = "main";  ///< track on which waiting consumers appear
};

namespace detail {

template <class> inline constexpr bool is_ticket = false;
template <queue Q> inline constexpr bool is_ticket<ticket<Q>> = true;

/// What work may run behind: a queue (all that it has been given so far) or a ticket.
template <class D>
concept dependency = queue<D> || is_ticket<D>;

// What a host lane keeps of a queue that its work runs behind.
template <queue Q> struct queue_prerequisite {
    std::optional<typename Q::event_type> event;
    explicit queue_prerequisite(Q q) {
        if constexpr (!Q::executes_inline) { event = q.record(); }  // on an inline queue it has all happened
    }
    void operator()(duration timeout) const {
        if (!event.has_value()) { return; }
        auto e = *event;
        e.wait_host(after(timeout));
    }
};

template <communicator C, class Work, class... Before> class job_of final : public job {
    C& comm_;
    duration timeout_;
    std::optional<std::tuple<Before...>> before_;
    std::optional<Work> work_;

public:
    job_of(std::string_view name, C& comm, duration timeout, Work&& work, Before&&... before)
        : job(name)
        , comm_(comm)
        , timeout_(timeout)
        , before_(std::in_place, std::move(before)...)
        , work_(std::move(work)) {}

private:
    void run() override {
        std::apply([&](const Before&... each) { (each(timeout_), ...); }, *before_);
        static_cast<void>((*work_)(comm_));
    }
    // What ran before goes too: jobs that each keep the one before them would live as long as the newest ticket.
    void discard() noexcept override {
        work_.reset();
        before_.reset();
    }
};

}  // namespace detail

/// Runs work beside its caller, in order, on a communicator of its own.
///
/// Semantics  host queue: a thread runs the work. Device queue: the work runs on the caller's thread and only enqueues,
///            behind events of what it depends on. Work captures views and buffers by value, never `this`.
///   submit   `work(comm)` runs behind everything submitted before and behind `after`: queues (all they have been given
///            so far) and tickets. Work must not wait for tickets of its own lane, nor submit to it.
///   errors   an error in the work, or in a ticket it depends on, aborts the communicator's family, so that other ranks
///            end too. The lane has then failed: later work is not run, its tickets carry the first error.
///   drain    blocks until all submitted work is done; throws the lane's first error.
///   trace    work is recorded where it ran, between host times or marks of a timed queue, and so are waits where they
///            held a consumer up. Other queues have no times: only steps and waits of the host are recorded there.
/// Order      ranks must submit the same collectives in the same order; lanes and the main communicator are
///            independent.
/// Lifetime   destruction waits like ~ticket: for all work, aborting the family first when unwinding or overdue.
/// Threads    one thread at a time submits and drains; tickets may be waited for anywhere.
/// Cost       host: one allocation; submit and wait on an idle lane take about a microsecond while there are processors
///            for lanes and consumers to spin on, two thread wake-ups otherwise. Device: one event, and the same
///            microsecond; with a trace and so marks, ten.
template <communicator C> class lane {
    using Q = queue_of<C>;

    struct host_state final : detail::worker {
        std::mutex mutex;  // abort may come from any thread, also while the lane is being destroyed
        std::optional<C> comm;
        host_state(C own, std::string lane_name, duration patience)
            : detail::worker(std::move(lane_name), patience), comm(std::move(own)) {}
        void abort(std::string_view why) noexcept override {
            const std::lock_guard lock(mutex);
            if (comm.has_value()) { comm->abort(why); }
        }
    };
    struct device_state final : detail::lane_link {
        std::mutex mutex;
        std::optional<C> comm;
        std::exception_ptr first_error;
        device_state(C own, std::string lane_name, duration patience)
            : detail::lane_link(std::move(lane_name), patience), comm(std::move(own)) {}
        void abort(std::string_view why) noexcept override {
            const std::lock_guard lock(mutex);
            if (comm.has_value()) { comm->abort(why); }
        }
    };
    using state = std::conditional_t<Q::executes_inline, host_state, device_state>;

    std::shared_ptr<state> state_;
    int exceptions_ = std::uncaught_exceptions();

public:
    using communicator_type = C;
    using queue_type = Q;

    /// Errors  usage_error when the timeout is not positive.
    explicit lane(C own, lane_options options = {}) {
        std::string name(own.name());
        const int rank = options.trace_rank < 0 ? own.rank() : options.trace_rank;
        state_ = std::make_shared<state>(std::move(own), std::move(name), options.timeout);
        if (options.trace != nullptr) {
            state_->trace = options.trace;
            state_->own_track = options.trace->track_of(rank, state_->name);
            state_->consumer_track = options.trace->track_of(rank, options.consumer);
        }
        if constexpr (Q::executes_inline) { state_->start(); }
    }
    lane(lane&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
    lane& operator=(lane&& other) noexcept {
        if (this != &other) {
            close();
            state_ = std::exchange(other.state_, nullptr);
        }
        return *this;
    }
    ~lane() { close(); }

    template <std::invocable<C&> Work, detail::dependency... After>
    [[nodiscard]] ticket<Q> submit(std::string_view name, Work work, After&... after) {
        state& s = usable("submit");
        if constexpr (Q::executes_inline) {
            auto next = make_job(name, s, std::move(work), before(after)...);
            s.push(next);
            return ticket<Q>(state_, std::move(next));
        } else {
            Q q = s.comm->queue();
            if (s.first_error == nullptr) {
                try {
                    (order(q, after, s.timeout), ...);
                    const scoped_span running(timed_queue<Q> ? s.trace.load() : nullptr, s.own_track, name, q,
                                              span_kind::communication);
                    static_cast<void>(work(*s.comm));
                } catch (...) {
                    s.first_error = std::current_exception();
                    s.abort(detail::text_of(s.first_error));
                }
            }
            return ticket<Q>(state_, name, q.record(), s.first_error);
        }
    }

    void drain() {
        state& s = usable("drain");
        if constexpr (Q::executes_inline) {
            if (!s.await_all(s.timeout)) {
                throw timeout_error(
                    formatted("lane: '{}' did not drain: no job finished within {:.3g} s ({} unfinished)", s.name,
                              seconds(s.timeout), s.unfinished()),
                    {});
            }
            if (const std::exception_ptr error = s.first_error()) { std::rethrow_exception(error); }
        } else {
            if (s.first_error != nullptr) { std::rethrow_exception(s.first_error); }
            s.comm->synchronize();
        }
    }

    /// Poisons the communicator's family; from any thread.
    void abort(std::string_view why) noexcept {
        if (state_ != nullptr) { state_->abort(why); }
    }
    /// Of its communicator, and of its track in a trace.
    [[nodiscard]] const std::string& name() const { return usable("name").name; }
    [[nodiscard]] int rank() const { return usable("rank").comm->rank(); }
    [[nodiscard]] int size() const { return usable("size").comm->size(); }
    [[nodiscard]] Q queue() const { return usable("queue").comm->queue(); }

private:
    [[nodiscard]] state& usable(std::string_view operation) const {
        if (state_ == nullptr) { throw usage_error(formatted("lane: {} on a lane that was moved from", operation)); }
        return *state_;
    }

    template <tutti::queue D> static detail::queue_prerequisite<D> before(const D& d) {
        return detail::queue_prerequisite<D>(d);
    }
    template <tutti::queue D> static auto before(const ticket<D>& t) { return t.share(); }

    template <class Work, class... Before>
    static std::shared_ptr<detail::job> make_job(std::string_view name, state& s, Work&& work, Before... behind) {
        return std::make_shared<detail::job_of<C, Work, Before...>>(name, *s.comm, s.timeout, std::move(work),
                                                                    std::move(behind)...);
    }

    template <tutti::queue D> static void order(Q q, D d, duration timeout) {
        if constexpr (std::same_as<typename D::event_type, typename Q::event_type>) {
            auto e = d.record();
            q.wait(e);
        } else {
            detail::queue_prerequisite<D>{d}(timeout);
        }
    }
    template <tutti::queue D> static void order(Q q, const ticket<D>& t, duration) { t.order(q); }

    void close() noexcept {
        if (state_ == nullptr) { return; }
        const bool unwinding = std::uncaught_exceptions() > exceptions_;
        if constexpr (Q::executes_inline) {
            state_->stop(unwinding);
        } else {
            try {
                if (unwinding && !state_->comm->queue().record().ready()) {
                    state_->abort_over("all work", "was in flight when an exception destroyed the lane");
                }
                state_->comm->synchronize();
            } catch (...) {
                state_->abort_over("all work", "did not finish when the lane was destroyed");
                if (timeline* const trace = state_->trace) { trace->abandon(state_->own_track); }
            }
        }
        // Tickets may outlive the lane; its timeline and its communicator do not.
        const std::shared_ptr<state> last = std::exchange(state_, nullptr);
        last->trace = nullptr;
        const std::lock_guard lock(last->mutex);
        last->comm.reset();
    }
};

}  // namespace tutti::schedule
