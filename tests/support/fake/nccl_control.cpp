// fake_nccl: what tests plan, the log, and the problems.
// Needs fake/nccl_state.
#include <algorithm>    // count_if
#include <atomic>       // switches
#include <functional>   // what comes between calls
#include <mutex>        // plans
#include <string>       // problems
#include <string_view>  // names
#include <thread>       // who called
#include <utility>      // move
#include <vector>       // the log

#include <support/fake/nccl_state.hpp>  // declarations
#include <support/fake/unobserved.hpp>  // unobserved

namespace tutti::test::fake_nccl {

namespace {

struct plan {
    std::string function;  // empty: operations
    int calls_left;
    ncclResult_t code;  // ncclSuccess: stalls
    target who;
};
struct interlude {
    std::string function;
    int calls_left;
    std::function<void()> act;
    target who;
};
// Never destroyed: threads of streams may outlive main.
struct control {
    std::mutex mutex;
    std::vector<plan> plans;
    std::vector<interlude> interludes;
    std::vector<call> log;
    std::vector<std::string> problems;
    std::atomic<int> version{22803}, polls{1};
    std::atomic<bool> exclusive{false}, mismatch_hangs{false}, destroy_waits{false};
    turnstile devices[64];
};
control& the() {
    static auto& c = *new control;
    return c;
}
thread_local std::string last_error;

bool meant(const target& who, int rank, int communicator) {
    return (who.rank == any || who.rank == rank) && (who.communicator == any || who.communicator == communicator);
}

void add_plan(plan p) {
    const unobserved lock(the().mutex);
    the().plans.push_back(std::move(p));
}

ncclResult_t note_call(call made) {
    std::vector<std::function<void()>> acts;
    {
        const unobserved lock(the().mutex);
        for (interlude& i : the().interludes) {
            if (i.function == made.function && meant(i.who, made.rank, made.communicator) && --i.calls_left == 0) {
                acts.push_back(i.act);
            }
        }
    }
    for (const auto& act : acts) { act(); }
    const unobserved lock(the().mutex);
    ncclResult_t code = ncclSuccess;
    for (plan& p : the().plans) {
        if (p.function == made.function && meant(p.who, made.rank, made.communicator) && --p.calls_left == 0) {
            code = p.code;
        }
    }
    the().log.push_back(std::move(made));
    return code;
}

}  // namespace

ncclResult_t enter(std::string_view function, ncclComm* c, std::size_t bytes, cudaStream_t stream) {
    const ncclResult_t planned =
        note_call({std::string(function), c == nullptr ? 0 : c->of->number.load(), c == nullptr ? any : c->rank, bytes,
                   depth(), stream, std::this_thread::get_id()});
    return planned == ncclSuccess ? planned : fails(planned, std::string(function) + ": planned by the test");
}
ncclResult_t enter(std::string_view function, int rank) {
    const ncclResult_t planned =
        note_call({std::string(function), 0, rank, 0, depth(), nullptr, std::this_thread::get_id()});
    return planned == ncclSuccess ? planned : fails(planned, std::string(function) + ": planned by the test");
}

fate next_operation(const ncclComm& c) {
    fate f;
    const unobserved lock(the().mutex);
    for (plan& p : the().plans) {
        if (!p.function.empty() || !meant(p.who, c.rank, c.of->number)) { continue; }
        --p.calls_left;
        if (p.code == ncclSuccess) {
            f.stalls = f.stalls || p.calls_left == 0;
        } else if (p.calls_left <= 0) {
            f.async = p.code;
        }
    }
    return f;
}

void problem(std::string text) {
    const unobserved lock(the().mutex);
    the().problems.push_back(std::move(text));
}
ncclResult_t fails(ncclResult_t code, std::string text) {
    last_error = std::move(text);
    return code;
}
bool is_exclusive() { return the().exclusive; }
bool hangs_on_mismatch() { return the().mismatch_hangs; }
bool destroy_waits() { return the().destroy_waits; }
int polls() { return the().polls; }
turnstile& order_of_device(int device) { return the().devices[device]; }

void reset() {
    the().version = 22803;
    the().polls = 1;
    the().exclusive = the().mismatch_hangs = the().destroy_waits = false;
    last_error.clear();
    const unobserved lock(the().mutex);
    the().plans.clear();
    the().interludes.clear();
    the().log.clear();
    the().problems.clear();
}
void set_version(int version) { the().version = version; }
void fail(std::string_view function, int nth, ncclResult_t code, target who) {
    add_plan({std::string(function), nth, code, who});
}
void before(std::string_view function, int nth, std::function<void()> act, target who) {
    const unobserved lock(the().mutex);
    the().interludes.push_back({std::string(function), nth, std::move(act), who});
}
void stall(int nth, target who) { add_plan({"", nth, ncclSuccess, who}); }
void async_error(int nth, ncclResult_t code, target who) { add_plan({"", nth, code, who}); }
void exclusive_device(bool on) { the().exclusive = on; }
void mismatch_hangs(bool on) { the().mismatch_hangs = on; }
void destroy_waits_for_all(bool on) { the().destroy_waits = on; }
void polls_until_launch(int n) { the().polls = n; }

std::vector<call> log() {
    const unobserved lock(the().mutex);
    return the().log;
}
std::size_t calls(std::string_view function) {
    const unobserved lock(the().mutex);
    return static_cast<std::size_t>(
        std::count_if(the().log.begin(), the().log.end(), [&](const call& c) { return c.function == function; }));
}
std::vector<std::string> problems() {
    const unobserved lock(the().mutex);
    return the().problems;
}

}  // namespace tutti::test::fake_nccl

using namespace tutti::test::fake_nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = the().version;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

}  // extern "C"
