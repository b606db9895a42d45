// mpi_session: one call in progress: waits for requests by polling, keeps the deadline, finds out who did not arrive.
// Needs comm/detail/mpi_family and mpi_wait. Nothing here blocks inside MPI, so every wait can end.
#pragma once

#include <mpi.h>  // MPI

#include <algorithm>    // clamp, find
#include <atomic>       // helper thread's result
#include <chrono>       // bounds of short waits
#include <cstddef>      // size_t
#include <cstdint>      // positions
#include <memory>       // helper thread's result
#include <span>         // messages
#include <string>       // texts
#include <string_view>  // texts
#include <thread>       // helper
#include <utility>      // move
#include <vector>       // requests

#include <tutti/comm/call.hpp>               // message
#include <tutti/comm/detail/mpi_family.hpp>  // notes
#include <tutti/comm/detail/mpi_wait.hpp>    // poll_until, end_job
#include <tutti/core/deadline.hpp>           // deadline
#include <tutti/core/text.hpp>               // formatted

namespace tutti::comm::detail {

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
    void complete(MPI_Request& request, std::string_view function) {
        until([&] {
            int done = 0;
            expect(MPI_Request_get_status(request, &done, MPI_STATUS_IGNORE), function);
            if (done != 0) { expect(take_completed(request), function); }
            return done != 0;
        });
    }

    /// Sends and receives all of them. A message is one MPI message whatever its size, so sizes that differ are seen.
    void transfer(std::span<const message> messages, MPI_Comm comm, int tag);

    /// Runs a call that MPI only has in blocking form. With MPI_THREAD_MULTIPLE on a helper thread, so that the
    /// deadline holds; a helper that never returns is left behind. Otherwise in place, after everybody is known to have
    /// come.
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
    // `awaited` is asked at the deadline: the ranks whose messages are under way, or nullptr when all ranks count.
    template <class Done, class Awaited> void until(Done done, Awaited awaited) {
        deadline give_up{};
        const auto watched = [&] {
            if (done()) { return true; }
            if (!family_.poisoned()) { return false; }
            // A rank that failed behind this call may be heard before the call's own last message: then it completes.
            if (give_up == deadline{}) { give_up = after(std::chrono::milliseconds(100)); }
            if (clock_type::now() >= give_up) { family_.raise(context_); }
            return false;
        };
        if (!poll_until(limit_, watched, [&] { family_.poll(); })) { explain_absence(done, awaited()); }
    }
    template <class Done> void until(Done done) {
        until(done, []() -> const std::vector<int>* { return nullptr; });
    }
    template <class Done> void explain_absence(Done done, const std::vector<int>* awaited);
    void inspect(const message& m, int code, const MPI_Status& status) const;
    struct inquiring;
};

// Registers an inquiry for as long as it is alive: answers, which any thread of the family may hear, are read after.
struct mpi_session::inquiring {
    mpi_family& family;
    mpi_inquiry& inquiry;
    inquiring(mpi_family& f, mpi_inquiry& q, std::uint64_t channel) : family(f), inquiry(q) { family.ask(q, channel); }
    inquiring(const inquiring&) = delete;
    inquiring& operator=(const inquiring&) = delete;
    ~inquiring() { family.forget(inquiry); }
};

// The deadline has passed. Asks the others where they are: a rank that waits in this very call answers, so does one
// that waits in another call; one that is elsewhere does not. `awaited`: for messages, the peers of those that are
// open. Returns when the call completes after all while we ask.
template <class Done> void mpi_session::explain_absence(Done done, const std::vector<int>* awaited) {
    const std::vector<int>& members = activity_.members;
    std::vector<int> ranks;
    mpi_inquiry query;
    for (std::size_t r = 0; r < members.size(); ++r) {
        const int rank = static_cast<int>(r);
        const bool open = awaited == nullptr || std::find(awaited->begin(), awaited->end(), rank) != awaited->end();
        if (rank == context_.rank || !open) { continue; }
        ranks.push_back(rank);
        query.asked.push_back(members[r]);
    }
    const duration grace =
        std::clamp<duration>(family_.choice.timeout / 2, std::chrono::milliseconds(200), std::chrono::seconds(2));
    bool completed = false;
    const auto enough = [&] { return (completed = done()) || family_.poisoned() || family_.answered(query); };
    {
        const inquiring asks(family_, query, activity_.id);
        static_cast<void>(poll_until(after(grace), enough, [&] { family_.poll(); }));
    }
    if (completed) { return; }
    // Another rank was first to find out, and has left: its text says who is missing, its silence does not mean it is.
    if (family_.poisoned()) { family_.raise(context_); }

    std::vector<int> missing;
    std::string details;
    bool first_here = true;  // of the ranks that have arrived
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        const auto& reply = query.replies[i];
        const bool arrived = reply && reply->position >= activity_.position;
        if (arrived && ranks[i] < context_.rank) { first_here = false; }
        if (arrived && awaited == nullptr) { continue; }
        missing.push_back(ranks[i]);
        details += formatted("{}rank {} {}", details.empty() ? "" : ", ", ranks[i],
                             !reply                 ? "is in no call"
                             : reply->doing.empty() ? "is between calls"
                                                    : "is " + reply->doing);
    }
    const double waited = seconds(family_.choice.timeout);
    const std::string text =
        missing.empty() ? formatted("{}: all ranks arrived, but it did not complete within {} s{}", context_.operation,
                                    waited, where(context_))
                        : formatted("{}: rank {} did not {} within {} s ({}){}", context_.operation, list_of(missing),
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
    std::vector<std::size_t> open;  // messages under way
    // Receives first: a message that finds its receiver is not stored in between.
    for (const bool sends : {false, true}) {
        for (std::size_t i = 0; i < messages.size(); ++i) {
            const message& m = messages[i];
            if (m.sends != sends) { continue; }
            const mpi_extent extent(m.bytes, largest_call(), context_);
            const int code = sends ? MPI_Isend(m.data, extent.count, extent.type, m.peer, tag, comm, &requests[i])
                                   : MPI_Irecv(m.data, extent.count, extent.type, m.peer, tag, comm, &requests[i]);
            expect(code, sends ? "MPI_Isend" : "MPI_Irecv");
            open.push_back(i);
        }
    }

    std::size_t next = 0;
    std::vector<int> peers;  // of messages under way, for the error
    // One call that finds nothing a turn, whatever the number of messages: each call drives all of them.
    const auto advance = [&] {
        while (!open.empty()) {
            next = next < open.size() ? next : 0;
            const std::size_t i = open[next];
            int done = 0;
            expect(MPI_Request_get_status(requests[i], &done, MPI_STATUS_IGNORE), "MPI_Request_get_status");
            if (done == 0) {
                ++next;
                return false;
            }
            MPI_Status status;
            const int code = take_completed(requests[i], &status);
            inspect(messages[i], code, status);
            open[next] = open.back();
            open.pop_back();
        }
        return true;
    };
    until(advance, [&] {
        for (const std::size_t i : open) { peers.push_back(messages[i].peer); }
        return &peers;
    });
}

// A message has ended: its size must be what its receiver expected.
inline void mpi_session::inspect(const message& m, int code, const MPI_Status& status) const {
    int kind = MPI_SUCCESS;
    MPI_Error_class(code, &kind);
    MPI_Count received = 0;
    const bool arrived = code == MPI_SUCCESS && !m.sends;
    if (arrived) { expect(MPI_Get_elements_x(&status, MPI_BYTE, &received), "MPI_Get_elements_x"); }
    const bool shorter = arrived && static_cast<std::size_t>(received) != m.bytes;
    if (kind == MPI_ERR_TRUNCATE || shorter) {
        const std::string sent = shorter ? formatted("{}", received) : formatted("more than {}", m.bytes);
        throw mismatch_error(formatted("{}: sizes differ (rank {} sent {} bytes, {} were expected){}",
                                       context_.operation, m.peer, sent, m.bytes, where(context_)),
                             {m.peer}, context_);
    }
    expect(code, m.sends ? "MPI_Isend" : "MPI_Irecv");
}

}  // namespace tutti::comm::detail
