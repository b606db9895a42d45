// worker: the thread behind a lane of a host queue: jobs first-in first-out, their completion, their first error.
// Needs comm/detail/wait for the number of processors. Not templated on the communicator: compiled once a program.
// Waiting: a short spin while every lane and its consumer can have a processor each, then a condition variable.
#pragma once

#include <algorithm>           // max
#include <atomic>              // completion flags
#include <chrono>              // microseconds
#include <condition_variable>  // blocking waits
#include <cstdint>             // counts
#include <cstdio>              // last words
#include <deque>               // jobs
#include <exception>           // exception_ptr, terminate
#include <memory>              // jobs are shared with tickets
#include <mutex>               // the list
#include <string>              // names
#include <string_view>         // texts
#include <thread>              // the worker
#include <utility>             // move

#include <tutti/comm/detail/wait.hpp>   // usable_processors, relax
#include <tutti/core/deadline.hpp>      // timeouts
#include <tutti/core/error.hpp>         // usage_error, timeout_error
#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/span.hpp>      // spans
#include <tutti/schedule/timeline.hpp>  // where they go

namespace tutti::schedule::detail {

/// What every lane has, whatever its communicator: a name, a timeout, a place to record to, a way to abort the family.
class lane_link {
public:
    std::string name;
    duration timeout;
    std::atomic<timeline*> trace{nullptr};  ///< null once the lane is gone; any thread that waits reads it
    timeline::track own_track = 0;
    timeline::track consumer_track = 0;

    /// Errors  usage_error when the timeout is not positive.
    lane_link(std::string lane_name, duration patience) : name(std::move(lane_name)), timeout(patience) {
        expect_timeout(formatted("lane '{}'", name), timeout);
    }
    lane_link(const lane_link&) = delete;
    lane_link& operator=(const lane_link&) = delete;
    virtual ~lane_link() = default;
    /// Poisons the communicator's family; nothing once the lane is gone. From any thread.
    virtual void abort(std::string_view why) noexcept = 0;

    /// What work has to hear of an abort, before the program ends.
    [[nodiscard]] duration last_patience() const noexcept {
        return std::max<duration>(timeout, std::chrono::seconds(5));
    }
    /// abort, saying which work of which lane it was about.
    void abort_over(std::string_view work, std::string_view what) noexcept {
        try {
            abort(formatted("'{}' on lane '{}' {}", work, name, what));
        } catch (...) { abort(what); }  // no memory for the text
    }
};

/// The text of an exception.
[[nodiscard]] inline std::string text_of(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& e) { return e.what(); } catch (...) {
        return "an exception that is no std::exception";
    }
}

/// Work that outlives every deadline still touches memory that its owner is about to free: ending the program is the
/// one thing left that corrupts nothing.
[[noreturn]] inline void give_up(std::string_view lane, std::string_view what) noexcept {
    std::fprintf(stderr, "tutti: lane '%.*s': %.*s did not end after its family was aborted; terminating\n",
                 static_cast<int>(lane.size()), lane.data(), static_cast<int>(what.size()), what.data());
    std::terminate();
}

/// Decides whether a wait starts by spinning: while recent waits were short, and while there is a processor to spin on.
class spin_policy {
    static constexpr duration spin_time = std::chrono::microseconds(50);    // about the price of a sleep and a wake-up
    static constexpr duration short_wait = std::chrono::microseconds(100);  // a wait that slept includes that price
    std::atomic<bool> recent_were_short_{true};                             // a hint; order does not matter

public:
    static inline std::atomic<int> workers{0};  ///< alive in this process

    template <class Ready> void spin(Ready ready) const noexcept {
        // Each worker has a consumer: with fewer processors than that a spin steals time from what it waits for.
        if (!recent_were_short_.load(std::memory_order_relaxed) ||
            2 * workers.load(std::memory_order_relaxed) > comm::detail::usable_processors()) {
            return;
        }
        const deadline end = after(spin_time);
        do {
            for (int i = 0; i < 16; ++i) {
                if (ready()) { return; }
                comm::detail::relax();
            }
        } while (clock_type::now() < end);
    }
    void waited(duration time) noexcept { recent_were_short_.store(time < short_wait, std::memory_order_relaxed); }
};

/// One piece of submitted work and what became of it.
class job {
    friend class worker;
    std::string name_;
    std::exception_ptr error_;  // written before done_ is released, constant afterwards
    std::atomic<bool> done_{false};

public:
    explicit job(std::string_view name) : name_(name) {}
    job(const job&) = delete;
    job& operator=(const job&) = delete;
    virtual ~job() = default;
    [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    /// Throws the work's error, if any; only after done().
    void rethrow() const {
        if (error_ != nullptr) { std::rethrow_exception(error_); }
    }
    [[nodiscard]] const std::string& name() const noexcept { return name_; }

private:
    virtual void run() = 0;               // prerequisites, then the work
    virtual void discard() noexcept = 0;  // destroys them, and what they keep
};

/// The list and its thread. Jobs run in the order of `push`; after the first error later ones are not run and carry it.
///
/// Threads  push, drain and stop: one thread at a time. await and abort: any thread.
class worker : public lane_link {
    std::mutex mutex_;                      // guards all below but the atomics, which it only orders
    std::condition_variable arrived_;       // the worker sleeps here
    std::condition_variable finished_one_;  // those who wait for jobs sleep here
    std::deque<std::shared_ptr<job>> jobs_;
    std::uint64_t submitted_ = 0;
    std::uint64_t finished_ = 0;
    int sleepers_ = 0;
    bool asleep_ = false;
    std::exception_ptr first_error_;
    std::atomic<bool> something_to_do_{false};  // jobs_ is not empty or stop_
    bool stop_ = false;
    spin_policy idle_;
    spin_policy waiting_;
    std::thread thread_;
    std::thread::id id_;  // of thread_, also while it is being joined

public:
    using lane_link::lane_link;

    void start() {
        thread_ = std::thread([this] { loop(); });
        id_ = thread_.get_id();
        spin_policy::workers.fetch_add(1, std::memory_order_relaxed);
    }

    void push(std::shared_ptr<job> next) {
        bool wake = false;
        {
            const std::lock_guard lock(mutex_);
            jobs_.push_back(std::move(next));
            ++submitted_;
            something_to_do_.store(true, std::memory_order_release);
            wake = asleep_;
        }
        if (wake) { arrived_.notify_one(); }
    }

    /// Blocks until the job is done. False when `patience` passes without progress: no job of this lane finished
    /// meanwhile.
    [[nodiscard]] bool await(const job& j, duration patience) {
        if (j.done()) { return true; }
        if (std::this_thread::get_id() == id_) { return false; }  // it would wait for itself
        const deadline start = clock_type::now();
        waiting_.spin([&] { return j.done(); });
        if (!j.done()) {
            std::unique_lock lock(mutex_);
            if (!sleep(lock, patience, [&] { return j.done(); })) { return false; }
        }
        waiting_.waited(clock_type::now() - start);
        return true;
    }

    /// The same, with an error that says what has not happened.
    void require_done(const job& j) {
        if (await(j, timeout)) { return; }
        if (std::this_thread::get_id() == id_) {
            throw usage_error(
                formatted("ticket: '{}' is waited for on its own lane '{}', which would never end", j.name(), name));
        }
        const std::lock_guard lock(mutex_);
        throw timeout_error(formatted("ticket: '{}' on lane '{}' did not finish, and nothing else there did, within "
                                      "{:.3g} s ({} jobs unfinished)",
                                      j.name(), name, seconds(timeout), submitted_ - finished_),
                            {});
    }

    /// As a consumer: the time spent here is exposed.
    void consume(const job& j) {
        if (j.done()) { return; }
        const scoped_span span(trace, consumer_track, j.name(), span_kind::wait);
        require_done(j);
    }

    /// Blocks until all jobs pushed so far are done; false as in await.
    [[nodiscard]] bool await_all(duration patience) {
        std::unique_lock lock(mutex_);
        return sleep(lock, patience, [this, all = submitted_] { return finished_ >= all; });
    }
    [[nodiscard]] std::exception_ptr first_error() {
        const std::lock_guard lock(mutex_);
        return first_error_;
    }
    [[nodiscard]] std::uint64_t unfinished() {
        const std::lock_guard lock(mutex_);
        return submitted_ - finished_;
    }

    /// Ends the thread once all jobs are done; an unwinding or overdue lane aborts its family first.
    void stop(bool unwinding) noexcept {
        if (!thread_.joinable()) { return; }
        if (unwinding && unfinished() != 0) {
            abort_over("all work", "was in flight when an exception destroyed the lane");
        }
        if (!await_all(timeout)) {
            abort_over("all work", "did not finish in time when the lane was destroyed");
            if (!await_all(last_patience())) { give_up(name, "work in flight"); }
        }
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
            something_to_do_.store(true, std::memory_order_release);
        }
        arrived_.notify_one();
        thread_.join();
        spin_policy::workers.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    // Sleeps until `ready`; the deadline restarts with every job that finishes, so it is bounded by the jobs in the
    // list.
    template <class Ready> bool sleep(std::unique_lock<std::mutex>& lock, duration patience, Ready ready) {
        ++sleepers_;
        bool in_time = true;
        std::uint64_t seen = finished_;
        deadline end = after(patience);
        while (in_time && !ready()) {
            const bool late = finished_one_.wait_until(lock, end) == std::cv_status::timeout;
            if (finished_ != seen) {
                seen = finished_;
                end = after(patience);
            } else if (late) {
                in_time = ready();
            }
        }
        --sleepers_;
        return in_time;
    }

    void loop() {
        while (const std::shared_ptr<job> next = take()) { work_on(*next); }
    }

    [[nodiscard]] std::shared_ptr<job> take() {
        std::unique_lock lock(mutex_);
        if (jobs_.empty() && !stop_) {
            lock.unlock();
            const deadline start = clock_type::now();
            idle_.spin([this] { return something_to_do_.load(std::memory_order_acquire); });
            lock.lock();
            asleep_ = true;
            arrived_.wait(lock, [this] { return !jobs_.empty() || stop_; });  // stop() always comes: the lane owns us
            asleep_ = false;
            idle_.waited(clock_type::now() - start);
        }
        if (jobs_.empty()) { return nullptr; }
        std::shared_ptr<job> next = std::move(jobs_.front());
        jobs_.pop_front();
        something_to_do_.store(!jobs_.empty() || stop_, std::memory_order_release);
        return next;
    }

    void work_on(job& next) noexcept {
        std::exception_ptr error = first_error();
        const bool failed_before = error != nullptr;
        if (!failed_before) {
            const scoped_span span(trace, own_track, next.name(), span_kind::communication);
            try {
                next.run();
            } catch (...) { error = std::current_exception(); }
        }
        // Other ranks may already be in the collective that this rank will not join.
        if (error != nullptr && !failed_before) { abort(text_of(error)); }
        next.discard();  // before anybody is told: what it keeps has been released when a ticket says done
        bool wake = false;
        {
            const std::lock_guard lock(mutex_);
            if (first_error_ == nullptr) { first_error_ = error; }
            next.error_ = std::move(error);
            next.done_.store(true, std::memory_order_release);
            ++finished_;
            wake = sleepers_ != 0;
        }
        if (wake) { finished_one_.notify_all(); }
    }
};

}  // namespace tutti::schedule::detail
