// mpi_family: what all communicators of one root share on one rank: the abort flag, and the notes by which ranks tell
// each other of an abort and ask who has arrived.
// Needs MPI 3. Notes are small messages on the root's communicator, under their own tag; no thread runs for them.
#pragma once

#include <mpi.h>  // MPI

#include <atomic>       // threads inside
#include <chrono>       // bounds of short waits
#include <cstddef>      // size_t
#include <cstdint>      // ids
#include <iterator>     // next
#include <list>         // notes under way
#include <mutex>        // the control plane
#include <optional>     // answers
#include <string_view>  // causes
#include <thread>       // owner, pauses
#include <utility>      // exchange, move
#include <vector>       // communicators, inquiries

#include <tutti/comm/detail/family.hpp>     // poison and its first cause
#include <tutti/comm/detail/mpi_note.hpp>   // notes
#include <tutti/comm/detail/mpi_types.hpp>  // mpi_is_up
#include <tutti/comm/mpi_options.hpp>       // options
#include <tutti/core/deadline.hpp>          // after
#include <tutti/core/text.hpp>              // formatted

namespace tutti::comm::detail {

/// Threads    all functions may be called from any thread; with `single_threaded` only the owner touches MPI, and what
///            others ask for happens at the owner's next call.
/// Cost       a call enters by one MPI_Improbe, and looks again every millisecond while it waits. A rank that is not in
///            a call of the library hears nothing.
class mpi_family {
    MPI_Comm root_;
    int rank_;
    int size_;
    bool multiple_;
    std::thread::id owner_ = std::this_thread::get_id();
    family fate_;
    std::atomic<int> inside_{0};  // threads in a call: whoever fails waits for the others to stop calling MPI

    struct sent {
        mpi_note note;
        MPI_Request request = MPI_REQUEST_NULL;
    };
    std::mutex mutex_;  // guards what follows
    std::list<sent> under_way_;
    std::vector<mpi_activity*> activities_;
    std::vector<mpi_inquiry*> inquiries_;
    std::uint64_t tokens_ = 0;
    bool untold_ = false;  // the abort has not been sent to the others yet
    bool heard_ = false;   // the abort came by a note

public:
    const mpi_options choice;

    mpi_family(MPI_Comm root, int rank, int size, bool multiple, mpi_options o)
        : root_(root), rank_(rank), size_(size), multiple_(multiple), fate_(o.timeout), choice(std::move(o)) {}
    mpi_family(const mpi_family&) = delete;
    mpi_family& operator=(const mpi_family&) = delete;
    ~mpi_family() {
        // MPI may be gone, and a family that failed leaves requests behind: then nothing is given back.
        if (!may_call() || !mpi_is_up() || fate_.poisoned()) { return; }
        reap();
        if (under_way_.empty()) { MPI_Comm_free(&root_); }
    }

    [[nodiscard]] MPI_Comm root() const noexcept { return root_; }
    [[nodiscard]] bool multiple() const noexcept { return multiple_; }
    [[nodiscard]] bool poisoned() const noexcept { return fate_.poisoned(); }
    [[nodiscard]] bool may_call() const noexcept { return multiple_ || std::this_thread::get_id() == owner_; }
    /// Another rank failed first.
    [[nodiscard]] bool heard_of_failure() {
        const std::lock_guard lock(mutex_);
        return heard_;
    }
    [[noreturn]] void raise(const error_context& context) { fate_.raise(context); }

    void add(mpi_activity& a) {
        const std::lock_guard lock(mutex_);
        activities_.push_back(&a);
    }
    void remove(mpi_activity& a) noexcept {
        const std::lock_guard lock(mutex_);
        std::erase(activities_, &a);
    }

    /// A thread begins a call.
    /// Errors  usage_error on the wrong thread or without MPI; aborted_error once the family is poisoned.
    void enter(mpi_activity& a, const error_context& context, bool counts) {
        if (!may_call()) {
            throw usage_error(formatted("{}: called from a second thread, but MPI runs single-threaded; lanes need "
                                        "MPI_THREAD_MULTIPLE{}",
                                        context.operation, where(context)),
                              context);
        }
        if (!mpi_is_up()) {
            throw usage_error(formatted("{}: MPI has been finalized{}", context.operation, where(context)), context);
        }
        enter_mpi();
        try {
            const std::lock_guard lock(mutex_);
            if (!poisoned()) { listen(); }
            if (!poisoned()) {
                a.position += counts ? 1 : 0;
                a.operation = context.operation;
                a.sequence = context.sequence;
                a.busy.store(true, std::memory_order_relaxed);
                return;
            }
        } catch (...) {
            leave_mpi();
            throw;
        }
        leave_mpi();
        tell_others();
        raise(context);
    }
    void leave(mpi_activity& a) noexcept {
        a.busy.store(false, std::memory_order_relaxed);
        leave_mpi();
    }
    /// Leaves by an error: returns when no thread of this rank is in MPI for this family, so that MPI writes no more
    /// into buffers that unwinding frees. Bounded: the others look at the flag at every turn.
    void retreat(mpi_activity& a, std::string_view why) noexcept {
        poison(why);
        leave(a);
        const deadline limit = after(std::chrono::seconds(3));
        while (inside_.load(std::memory_order_seq_cst) != 0 && clock_type::now() < limit) { std::this_thread::yield(); }
    }

    /// Marks the family as failed and tells every rank. The first cause stays.
    void poison(std::string_view why) noexcept {
        {
            const std::lock_guard lock(mutex_);
            mark(why, false);
        }
        tell_others();
    }

    /// Handles the notes that have come.
    void poll() {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) { listen(); }  // otherwise another thread is at it
    }

    void ask(mpi_inquiry& q, std::uint64_t channel) {
        const std::lock_guard lock(mutex_);
        q.token = ++tokens_;
        q.replies.assign(q.asked.size(), std::nullopt);
        inquiries_.push_back(&q);
        for (const int member : q.asked) { send(member, {mpi_note::query, rank_, q.token, channel}); }
    }
    [[nodiscard]] bool answered(const mpi_inquiry& q) {
        const std::lock_guard lock(mutex_);
        return q.complete();
    }
    void forget(mpi_inquiry& q) noexcept {
        const std::lock_guard lock(mutex_);
        std::erase(inquiries_, &q);
    }

private:
    // The functions below need the mutex held, except tell_others, which takes it.
    void mark(std::string_view why, bool heard) noexcept {
        if (poisoned()) { return; }
        heard_ = heard;
        untold_ = !heard;
        try {
            mpi_job_failure::set(why, choice.on_failure);
        } catch (...) {}  // out of memory: the job ends by its deadline
        fate_.poison(why);
    }
    void send(int to, const mpi_note& note) {
        under_way_.push_back({note, MPI_REQUEST_NULL});
        sent& s = under_way_.back();
        // A rank that cannot be told will find out by its deadline.
        if (MPI_Isend(&s.note, sizeof(mpi_note), MPI_BYTE, to, note_tag, root_, &s.request) != MPI_SUCCESS) {
            under_way_.pop_back();
        }
    }
    void reap() noexcept {
        for (auto s = under_way_.begin(); s != under_way_.end();) {
            int done = 0;
            const bool failed = MPI_Test(&s->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS;
            s = done != 0 && !failed ? under_way_.erase(s) : std::next(s);
        }
    }
    void listen() {
        if (!under_way_.empty()) { reap(); }
        for (;;) {
            int found = 0;
            MPI_Message handle = MPI_MESSAGE_NULL;
            MPI_Status status;
            int bytes = 0;
            mpi_note note;
            int code = MPI_Improbe(MPI_ANY_SOURCE, note_tag, root_, &found, &handle, &status);
            if (code == MPI_SUCCESS && found == 0) { return; }
            if (code == MPI_SUCCESS) { code = MPI_Get_count(&status, MPI_BYTE, &bytes); }
            const bool fits = bytes == static_cast<int>(sizeof(note));  // receiving another would be an error of MPI's
            if (code == MPI_SUCCESS && fits) {
                code = MPI_Mrecv(&note, sizeof(note), MPI_BYTE, &handle, MPI_STATUS_IGNORE);
            }
            if (code != MPI_SUCCESS) {
                mark(formatted("rank {} cannot hear the others: {}", rank_, mpi_text(code)), false);
                return;
            }
            if (!fits || note.signature != mpi_note::own) {
                mark(formatted("a message with tag {} that is not the library's came from rank {}; send your own on an "
                               "MPI_Comm_dup of native_handle",
                               note_tag, status.MPI_SOURCE),
                     false);
                return;
            }
            handle_note(note);
        }
    }
    void handle_note(const mpi_note& note) {
        if (note.kind == mpi_note::abort) { mark(note.text, true); }
        if (note.kind == mpi_note::query) {
            mpi_note reply{mpi_note::answer, rank_, note.token, note.channel};
            const mpi_activity* shown = nullptr;  // the communicator asked about, or else one that is in a call
            for (const mpi_activity* a : activities_) {
                const bool busy = a->busy.load(std::memory_order_relaxed);
                if (a->id == note.channel) { reply.position = a->position; }
                if (busy && (shown == nullptr || a->id == note.channel)) { shown = a; }
            }
            if (shown != nullptr) {
                reply.say(formatted("in {}, call {} on '{}'", shown->operation, shown->sequence, shown->name));
            }
            send(note.from, reply);
        }
        if (note.kind == mpi_note::answer) {
            for (mpi_inquiry* q : inquiries_) {
                if (q->token != note.token) { continue; }
                for (std::size_t i = 0; i < q->asked.size(); ++i) {
                    if (q->asked[i] == note.from) { q->replies[i] = {note.position, note.text}; }
                }
            }
        }
    }
    // Sends the cause to every rank and lets MPI push the messages out, for at most a second.
    void tell_others() noexcept {
        if (!may_call() || !mpi_is_up()) { return; }
        enter_mpi();
        try {
            std::unique_lock lock(mutex_);
            if (std::exchange(untold_, false)) {
                mpi_note note{mpi_note::abort, rank_};
                note.say(fate_.cause());
                for (int r = 0; r < size_; ++r) {
                    if (r != rank_) { send(r, note); }
                }
                const deadline limit = after(std::chrono::seconds(1));
                while (!under_way_.empty() && clock_type::now() < limit) {
                    reap();
                    lock.unlock();
                    std::this_thread::yield();
                    lock.lock();
                }
            }
        } catch (...) {}  // out of memory: the others find out by their deadline
        leave_mpi();
    }
    // Announced before looking at the abort flag: whoever raises it sees us, or we see the flag.
    void enter_mpi() noexcept { inside_.fetch_add(1, std::memory_order_seq_cst); }
    void leave_mpi() noexcept { inside_.fetch_sub(1, std::memory_order_seq_cst); }
};

}  // namespace tutti::comm::detail
