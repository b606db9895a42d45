// mpi_wait: polling until something is done or the deadline has passed, taking what has completed, and ending the job.
// Needs MPI 3 and core/deadline.
#pragma once

#include <mpi.h>  // MPI

#include <algorithm>    // max, min
#include <chrono>       // budgets of waiting
#include <cstdio>       // the last line
#include <cstdlib>      // abort
#include <mutex>        // one handler put aside at a time
#include <string_view>  // the last line
#include <thread>       // yield, sleep_for
#include <utility>      // exchange

#include <time.h>  // clock_gettime

#include <tutti/comm/detail/wait.hpp>  // relax
#include <tutti/core/deadline.hpp>     // deadline

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
/// MPI moves data only while it is called, and its calls cost the same processor time whenever they find nothing to do.
/// So poll without a pause first, then yield (ranks may be more than cores), then sleep, but never for more than 1/64
/// of the time waited so far, which bounds what sleeping adds. A call that took much longer than the cheapest one has
/// moved data: then poll on for a while, so that transfers are not slept through. A waiting rank costs a few percent of
/// a processor.
template <class Done, class Between> [[nodiscard]] bool poll_until(deadline limit, Done done, Between between_times) {
    constexpr duration spinning = std::chrono::microseconds(20);
    constexpr duration yielding = std::chrono::milliseconds(5);
    constexpr duration after_nap = std::chrono::microseconds(10);
    constexpr duration after_progress = std::chrono::microseconds(500);
    constexpr duration longest_nap = std::chrono::milliseconds(1);
    if (done()) { return true; }
    const deadline start = clock_type::now();
    deadline next_look = start + note_interval;
    deadline spin_until = start + spinning;
    deadline yield_until = start + yielding;
    duration cheapest = std::chrono::seconds(1);
    for (bool cold = false;;) {
        const deadline now = clock_type::now();
        if (now >= next_look) {
            between_times();
            next_look = now + note_interval;
        }
        if (now >= limit) { return done(); }
        if (now < spin_until) {
            relax();
        } else if (now < yield_until) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::min<duration>(longest_nap, (now - start) / 64));
            spin_until = clock_type::now() + after_nap;
            cold = true;
        }
        if (now < start + spinning) {  // too short to look closely
            if (done()) { return true; }
            continue;
        }
        const duration before = thread_time();
        if (done()) { return true; }
        const duration taken = thread_time() - before;
        cheapest = std::min(cheapest, taken);
        // The first call after a nap finds nothing in its caches.
        if (taken > (std::exchange(cold, false) ? 16 : 4) * cheapest + std::chrono::microseconds(2)) {
            yield_until = std::max(yield_until, clock_type::now() + after_progress);
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

/// MPI_Wait of a request that has completed. Open MPI 4 reports what went wrong in a nonblocking collective to the
/// handler of MPI_COMM_WORLD instead of its communicator's, and by default that ends the job. So that handler is put
/// aside for the length of this call, which waits for nothing. (MPICH 4.0 does so in every call that looks at a
/// request: there a message that does not fit ends the job by MPI's own words.)
[[nodiscard]] inline int take_completed(MPI_Request& request, MPI_Status* status = MPI_STATUS_IGNORE) {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    if (const int code = MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler); code != MPI_SUCCESS) { return code; }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    const int result = MPI_Wait(&request, status);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Errhandler_free(&handler);
    return result;
}

/// The same for what all ranks of `comm` find out together: the first rank speaks, the others give it time to.
[[noreturn]] inline void end_job_together(MPI_Comm comm, std::string_view text) noexcept {
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    if (rank != 0) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
    end_job(comm, text);
}

}  // namespace tutti::comm::detail
