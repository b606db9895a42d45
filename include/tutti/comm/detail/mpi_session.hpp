// mpi_session: one call in progress: waits for requests by polling, keeps the deadline, finds out who did not arrive.
// Needs comm/detail/mpi_family. Nothing here blocks inside MPI, so every wait can end.
#pragma once

#include <mpi.h>

#include <algorithm>  // clamp, find, min
#include <atomic>     // helper thread's result
#include <chrono>     // budgets of waiting
#include <cstddef>    // size_t
#include <cstdio>     // the last line
#include <cstdlib>    // abort
#include <exception>  // leaving by an error
#include <memory>     // helper thread's result
#include <span>       // messages
#include <string>     // texts
#include <thread>     // yield, sleep_for, helper
#include <vector>     // requests

#include <time.h>  // clock_gettime

#include <tutti/comm/call.hpp>               // message
#include <tutti/comm/detail/mpi_family.hpp>  // notes
#include <tutti/comm/detail/wait.hpp>        // relax
#include <tutti/core/deadline.hpp>           // deadline

namespace tutti::comm::detail {

/// How often a waiting rank looks for notes.
inline constexpr duration note_interval = std::chrono::milliseconds(1);

/// Processor time that this thread has used.
[[nodiscard]] inline duration thread_time() noexcept {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}

/// Calls done() until it is true or `limit` has passed, and between_times() every millisecond.
///
/// MPI moves data only while it is called. So poll without a pause first, then yield (ranks may be more than cores), then
/// sleep, but never for more than 1/64 of the time without progress, which bounds what sleeping adds. A call that used the
/// processor for longer than an idle one does has moved data: then it starts over, so transfers are not slept through.
template <class Done, class Between> [[nodiscard]] bool poll_until(deadline limit, Done done, Between between_times) {
    constexpr duration spinning = std::chrono::microseconds(20);
    constexpr duration yielding = std::chrono::milliseconds(5);
    constexpr duration longest_nap = std::chrono::milliseconds(1);
    constexpr duration idle_call = std::chrono::microseconds(2);
    if (done()) { return true; }
    deadline idle_since = clock_type::now();
    deadline next_look = idle_since + note_interval;
    for (;;) {
        const deadline now = clock_type::now();
        if (now >= next_look) {
            between_times();
            next_look = now + note_interval;
        }
        if (now >= limit) { return done(); }
        const duration idle = now - idle_since;
        if (idle < yielding) {
            if (idle < spinning) {
                relax();
            } else {
                std::this_thread::yield();
            }
            if (done()) { return true; }
            continue;
        }
        const duration before = thread_time();
        if (done()) { return true; }
        if (thread_time() - before > idle_call) {
            idle_since = now;
        } else {
            std::this_thread::sleep_for(std::min<duration>(longest_nap, idle / 64));
        }
    }
}

/// The one line that a rank says before it ends the job.
[[noreturn]] inline void end_job(MPI_Comm comm, std::string_view text) noexcept {
    std::fprintf(stderr, "tutti: %.*s; ending the job\n", static_cast<int>(text.size()), text.data());
    std::fflush(stderr);
    MPI_Abort(comm, EXIT_FAILURE);
    std::abort();  // MPI_Abort has no way back
}

class mpi_session {
    mpi_family& family_;
    mpi_activity& activity_;
    error_context context_;
    deadline limit_;
    bool counts_;
    bool left_ = false;

public:
    /// Errors  usage_error, aborted_error: mpi_family::enter.
    mpi_session(mpi_family& f, mpi_activity& a, error_context context, bool counts)
        : family_(f), activity_(a), context_(std::move(context)), limit_(after(f.choice.timeout)), counts_(counts) {
        family_.enter(activity_, context_, counts_);
    }
    mpi_session(const mpi_session&) = delete;
    mpi_session& operator=(const mpi_session&) = delete;
    ~mpi_session() {
        if (!left_) { family_.leave(activity_); }
    }
    /// Leaves by an error: the family is poisoned.
    void fail(std::string_view why) noexcept {
        left_ = true;
        family_.retreat(activity_, why);
    }

    [[nodiscard]] const error_context& context() const noexcept { return context_; }
    [[nodiscard]] std::uint64_t position() const noexcept { return activity_.position; }
    [[nodiscard]] std::size_t largest_call() const noexcept { return family_.choice.largest_call; }
    void expect(int code, std::string_view function) const { expect_success(code, function, context_); }

    /// Waits for one request.
    /// MPI_Test would report an error of a nonblocking collective to the handler of MPI_COMM_WORLD in some
    /// implementations, which ends the job; MPI_Request_get_status reports it to nobody but us.
    void complete(MPI_Request& request, std::string_view function) {
        until([&] {
            int done = 0;
            MPI_Status status;
            status.MPI_ERROR = MPI_SUCCESS;
            expect(MPI_Request_get_status(request, &done, &status), function);
            if (done == 0) { return false; }
            expect(status.MPI_ERROR, function);
            expect(MPI_Wait(&request, MPI_STATUS_IGNORE), function);
            return true;
        });
    }

    /// Sends and receives all of them. A message is one MPI message whatever its size, so sizes that differ are seen.
    void transfer(std::span<const message> messages, MPI_Comm comm, int tag);

    /// Runs a call that MPI only has in blocking form. With MPI_THREAD_MULTIPLE on a helper thread, so that the deadline
    /// holds; a helper that never returns is left behind. Otherwise in place, after everybody is known to have come.
    template <class F> MPI_Comm create(F blocking, std::string_view function) {
        struct outcome {
            std::atomic<bool> done{false};
            int code = MPI_SUCCESS;
            MPI_Comm made = MPI_COMM_NULL;
        };
        const auto result = std::make_shared<outcome>();
        if (!family_.multiple()) {
            result->code = blocking(&result->made);
        } else {
            std::thread helper([result, blocking] {
                result->code = blocking(&result->made);
                result->done.store(true, std::memory_order_release);
            });
            try {
                until([&] { return result->done.load(std::memory_order_acquire); });
            } catch (...) {
                helper.detach();
                throw;
            }
            helper.join();
        }
        expect(result->code, function);
        return result->made;
    }

private:
    template <class Done> void until(Done done, const std::vector<int>* awaited = nullptr) {
        const auto watched = [&] {
            if (family_.poisoned()) { family_.raise(context_); }
            return done();
        };
        if (poll_until(limit_, watched, [&] { family_.poll(); })) { return; }
        explain_absence(done, awaited);
    }
    template <class Done> void explain_absence(Done done, const std::vector<int>* awaited);
    struct inquiring;
};

// Registers an inquiry for as long as it is alive.
struct mpi_session::inquiring {
    mpi_family& family;
    mpi_inquiry inquiry;
    inquiring(mpi_family& f, std::vector<int> asked, std::uint64_t channel) : family(f) {
        inquiry.asked = std::move(asked);
        family.ask(inquiry, channel);
    }
    inquiring(const inquiring&) = delete;
    inquiring& operator=(const inquiring&) = delete;
    ~inquiring() { family.forget(inquiry); }
};

// The deadline has passed. Asks the others where they are: a rank that waits in this very call answers, so does one that
// waits in another call; one that is elsewhere does not. `awaited`: for messages, the peers of those that are open.
// Returns when the call completes after all while we ask.
template <class Done> void mpi_session::explain_absence(Done done, const std::vector<int>* awaited) {
    const std::vector<int>& members = activity_.members;
    std::vector<int> ranks;
    std::vector<int> asked;
    for (std::size_t r = 0; r < members.size(); ++r) {
        const int rank = static_cast<int>(r);
        const bool open = awaited == nullptr || std::find(awaited->begin(), awaited->end(), rank) != awaited->end();
        if (rank == context_.rank || !open) { continue; }
        ranks.push_back(rank);
        asked.push_back(members[r]);
    }
    inquiring query(family_, asked, activity_.id);
    const duration grace =
        std::clamp<duration>(family_.choice.timeout / 2, std::chrono::milliseconds(200), std::chrono::seconds(2));
    bool completed = false;
    const auto enough = [&] { return (completed = done()) || family_.answered(query.inquiry); };
    static_cast<void>(poll_until(after(grace), enough, [&] { family_.poll(); }));
    if (completed) { return; }

    std::vector<int> missing;
    std::string details;
    bool first_here = true;  // of the ranks that have arrived
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        const auto& reply = query.inquiry.replies[i];
        const bool arrived = reply && reply->position >= activity_.position;
        if (arrived && ranks[i] < context_.rank) { first_here = false; }
        if (arrived && awaited == nullptr) { continue; }
        missing.push_back(ranks[i]);
        details += fmt::format("{}rank {} {}", details.empty() ? "" : ", ", ranks[i],
                               !reply                 ? "is in no call"
                               : reply->doing.empty() ? "is between calls"
                                                      : "is " + reply->doing);
    }
    const double waited = seconds(family_.choice.timeout);
    const std::string text =
        missing.empty() ? fmt::format("{}: all ranks arrived, but it did not complete within {} s{}",
                                      context_.operation, waited, where(context_))
                        : fmt::format("{}: rank {} did not {} within {} s ({}){}", context_.operation, list_of(missing),
                                      awaited == nullptr ? "arrive" : "take part", waited, details, where(context_));
    if (family_.choice.on_failure == failure_policy::throw_error) { throw timeout_error(text, missing, context_); }
    // One rank speaks, the others give it a second to end them.
    if (!first_here) {
        static_cast<void>(poll_until(
            after(std::chrono::seconds(1)), [] { return false; }, [&] { family_.poll(); }));
    }
    end_job(family_.root(), text);
}

inline void mpi_session::transfer(std::span<const message> messages, MPI_Comm comm, int tag) {
    std::vector<MPI_Request> requests(messages.size(), MPI_REQUEST_NULL);
    std::vector<MPI_Status> statuses(messages.size());
    std::vector<int> finished(messages.size());
    const int count = narrow<int>(messages.size(), "exchange: number of messages");
    const std::size_t largest = largest_call();

    // Receives first: a message that finds its receiver is not stored in between.
    for (const bool sends : {false, true}) {
        for (std::size_t i = 0; i < messages.size(); ++i) {
            const message& m = messages[i];
            if (m.sends != sends) { continue; }
            const mpi_extent extent(m.bytes, largest, context_);
            const int code = sends ? MPI_Isend(m.data, extent.count, extent.type, m.peer, tag, comm, &requests[i])
                                   : MPI_Irecv(m.data, extent.count, extent.type, m.peer, tag, comm, &requests[i]);
            expect(code, sends ? "MPI_Isend" : "MPI_Irecv");
        }
    }

    std::vector<int> open;  // peers of messages under way, for the error
    std::size_t left = messages.size();
    const auto inspect = [&](const message& m, const MPI_Status& status, int code) {
        int kind = MPI_SUCCESS;
        MPI_Error_class(code, &kind);
        MPI_Count received = 0;
        if (code == MPI_SUCCESS && !m.sends) {
            expect(MPI_Get_elements_x(&status, MPI_BYTE, &received), "MPI_Get_elements_x");
        }
        const bool shorter = code == MPI_SUCCESS && !m.sends && static_cast<std::size_t>(received) != m.bytes;
        if (kind == MPI_ERR_TRUNCATE || shorter) {
            const std::string sent = shorter ? fmt::format("{}", received) : fmt::format("more than {}", m.bytes);
            throw mismatch_error(fmt::format("{}: sizes differ (rank {} sent {} bytes, {} were expected){}",
                                             context_.operation, m.peer, sent, m.bytes, where(context_)),
                                 {m.peer}, context_);
        }
        expect(code, m.sends ? "MPI_Isend" : "MPI_Irecv");
    };
    const auto advance = [&] {
        if (left == 0) { return true; }
        int n = 0;
        const int code = MPI_Testsome(count, requests.data(), &n, finished.data(), statuses.data());
        int kind = MPI_SUCCESS;
        MPI_Error_class(code, &kind);
        const bool in_status = kind == MPI_ERR_IN_STATUS;
        if (!in_status) { expect(code, "MPI_Testsome"); }
        for (int k = 0; n != MPI_UNDEFINED && k < n; ++k) {
            const auto i = static_cast<std::size_t>(finished[static_cast<std::size_t>(k)]);
            const MPI_Status& status = statuses[static_cast<std::size_t>(k)];
            inspect(messages[i], status, in_status ? status.MPI_ERROR : MPI_SUCCESS);
            --left;
        }
        if (left == 0) { return true; }
        if (clock_type::now() >= limit_) {
            open.clear();
            for (std::size_t i = 0; i < messages.size(); ++i) {
                if (requests[i] != MPI_REQUEST_NULL) { open.push_back(messages[i].peer); }
            }
        }
        return false;
    };
    until(advance, &open);
}

}  // namespace tutti::comm::detail
