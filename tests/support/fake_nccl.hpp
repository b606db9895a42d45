// fake_nccl: NCCL's C interface over fake_cuda, for tests that link it in place of libnccl; its controls and its log.
// Needs NCCL's header and fake_cuda. Ranks are threads, or one thread with groups, of one process.
// Operations are work on streams that meets the other ranks and blocks its stream until all have come, as kernels do.
// Not modeled: that ncclCommAbort, too, frees memory for which CUDA waits for other devices.
#pragma once

#include <cstddef>      // sizes
#include <functional>   // what comes between calls
#include <string>       // names
#include <string_view>  // names
#include <thread>       // who called
#include <vector>       // the log

#include <nccl.h>

namespace tutti::test::fake_nccl {

/// Every control as at the start, log and problems empty. Communicators stay.
void reset();
void set_version(int version);  ///< default 22803

// --- failure --------------------------------------------------------------------------------------------------------
inline constexpr int any = -1;
/// Which calls or operations are meant. Communicators are numbered from 1 in the order in which they were completed
/// (the ranks of one share the number, the log shows it).
struct target {
    int rank = any;
    int communicator = any;
};
/// The n-th call of `function` from now, counted from 1 on each target rank together, does nothing and returns `code`.
void fail(std::string_view function, int nth, ncclResult_t code, target who = {});
/// The n-th operation that `who` launches from now never arrives, until the rank aborts. Peers wait for it for good, or
/// until one of them aborts: then those that have arrived complete, and leave their outputs as they were.
void stall(int nth, target who);
/// From the n-th operation that `who` launches from now, the communicator has the asynchronous error `code` there, and
/// nothing on it completes, until the rank aborts.
void async_error(int nth, ncclResult_t code, target who);

/// Runs act() within the n-th call of `function` from now, counted as above, on its thread, before it is in the log and
/// before it fails where that is planned.
void before(std::string_view function, int nth, std::function<void()> act, target who = {});

// --- behavior that real NCCL may show -------------------------------------------------------------------------------
/// A device runs one kernel at a time, in the order of launches.
void exclusive_device(bool on);
/// Operations whose ranks disagree hang until aborted. Otherwise they complete and leave their outputs as they were.
/// Both are a problem (below).
void mismatch_hangs(bool on);
/// ncclCommDestroy returns once every rank has destroyed or aborted.
void destroy_waits_for_all(bool on);
/// How often ncclCommGetAsyncError of a communicator that is not blocking answers ncclInProgress before operations are
/// launched; default 1. Nothing is on the stream before.
void polls_until_launch(int n);

// --- what happened --------------------------------------------------------------------------------------------------
struct call {
    std::string function;
    int communicator = 0;  ///< 0: none, or not yet complete
    int rank = any;
    std::size_t bytes = 0;  ///< count * size of the datatype
    int depth = 0;          ///< groups around the call
    cudaStream_t stream = nullptr;
    std::thread::id thread;
};
/// Every call that concerns a communicator or a group, but ncclCommGetAsyncError, in order.
[[nodiscard]] std::vector<call> log();
[[nodiscard]] std::size_t calls(std::string_view function);
/// What real NCCL leaves undefined, in words: ranks that disagree, buffers that are not of the device or are too small,
/// communicators used after their end, ended twice, or used by two threads at once. Empty after a correct program.
[[nodiscard]] std::vector<std::string> problems();
[[nodiscard]] std::size_t live_communicators();
/// Of streams, that have come to where they meet those of other ranks, and are not through.
[[nodiscard]] std::size_t waiting_operations();

}  // namespace tutti::test::fake_nccl
