// What the files of fake_cuda share: errors and counters, streams and their items, events, captures.
// Needs fake_cuda. Not for tests.
// Locks: a stream's mutex before a capture's; the host alone takes them, never the thread of a stream.
#pragma once

#include <semaphore.h>  // posts order towards the stream alone, as CUDA does

#include <atomic>              // counters
#include <chrono>              // elapsed times
#include <condition_variable>  // waits
#include <cstddef>             // size_t
#include <memory>              // shared marks
#include <mutex>               // locks
#include <set>                 // frontiers
#include <string>              // names
#include <thread>              // who captures
#include <utility>             // move
#include <vector>              // nodes

#include <support/fake/unobserved.hpp>  // unobserved
#include <support/fake_cuda.hpp>        // work

namespace tutti::test::fake_cuda {

// --- calls ----------------------------------------------------------------------------------------------------------
struct call_site {
    std::atomic<std::size_t> calls{0};
    std::atomic<int> fails_in{0};  // calls; 0: never
    std::atomic<cudaError_t> code{cudaSuccess};
    std::atomic<int> acts_in{0};  // the same
    work act;                     // written before acts_in
};
call_site& site(std::string_view function);
cudaError_t enter(call_site& s);   // counts, does what was planned to come first; the error that was planned
cudaError_t note(cudaError_t e);   // what cudaGetLastError will say; returns e
cudaError_t fault_of(int device);  // cudaSuccess, or the fault
int faults_of(int device);         // how many there were: work from before one never runs
void host_waited();
int current_device();
int device_count();
bool& in_host_function();  // of this thread: CUDA may not be called there

// First in every function of the runtime.
#define FAKE_CUDA_CALL(name)                                                                                           \
    do {                                                                                                               \
        static auto& here = ::tutti::test::fake_cuda::site(#name);                                                     \
        const cudaError_t planned = ::tutti::test::fake_cuda::enter(here);                                             \
        if (planned != cudaSuccess) { return ::tutti::test::fake_cuda::note(planned); }                                \
    } while (false)

// --- streams and events ---------------------------------------------------------------------------------------------
/// Something that happens once, for which threads wait.
class mark {
    std::mutex mutex_;
    std::condition_variable happened_;
    std::atomic<bool> done_{false};
    std::chrono::steady_clock::time_point when_;

public:
    [[nodiscard]] bool ready() const { return done_.load(std::memory_order_acquire); }
    [[nodiscard]] std::chrono::steady_clock::time_point when() const { return when_; }
    void complete(std::chrono::steady_clock::time_point now) {
        {
            const std::lock_guard lock(mutex_);
            when_ = now;
            done_.store(true, std::memory_order_release);
        }
        happened_.notify_all();
    }
    /// Returns as well once the device that waits is lost.
    void wait(int device) {
        if (ready()) { return; }
        std::unique_lock lock(mutex_);
        while (!ready() && !faulted(device)) { happened_.wait_for(lock, std::chrono::milliseconds(5)); }
    }
};

struct node {
    std::function<work()> bind;
    std::set<std::size_t> after;
};
/// The memory that was allocated in a capture: freed with the last of graph, executables and launches.
struct graph_data {
    std::vector<node> nodes;
    std::vector<void*> memory;
    graph_data() = default;
    graph_data(const graph_data&) = delete;
    graph_data& operator=(const graph_data&) = delete;
    ~graph_data();
};
struct capture {
    const unsigned long long id;
    const cudaStreamCaptureMode mode;
    const cudaStream_t origin;
    const std::thread::id thread = std::this_thread::get_id();
    std::mutex mutex;  // of what follows
    std::shared_ptr<graph_data> graph = std::make_shared<graph_data>();
    std::vector<cudaStream_t> streams;
    bool invalid = false;
    std::atomic<bool> ended{false};

    capture(unsigned long long number, cudaStreamCaptureMode with_mode, cudaStream_t began_in)
        : id(number), mode(with_mode), origin(began_in), streams{began_in} {}
    std::size_t add(node n) {
        graph->nodes.push_back(std::move(n));
        return graph->nodes.size() - 1;
    }
};
/// cudaSuccess unless a capture, of this or another thread, forbids what might disturb it; such captures are spoiled.
cudaError_t capture_forbids();

// Links of a list that hosts append to and one thread takes from.
struct item {
    std::atomic<item*> next{nullptr};
    work run;
    int faults = 0;       // of the device, when this was appended
    bool signal = false;  // tells that all before it is done, also after a fault
    bool always = false;  // runs also after a fault
    bool last = false;    // the stream was destroyed
};

CUstream_st* resolve(cudaStream_t handle);  // null: no such stream
std::vector<cudaStream_t> streams_of(int device);
cudaError_t enqueue_always(CUstream_st& stream, work w);
cudaError_t record(CUevent_st& event, CUstream_st& stream);
cudaError_t wait(CUstream_st& stream, CUevent_st& event);
cudaError_t wait_for(CUstream_st& stream);  // the host waits
void wait_for_process();                    // the host waits for all streams of all devices
void free_memory(void* p);                  // storage alone
bool forget(void* p);                       // false: not allocated

}  // namespace tutti::test::fake_cuda

struct CUstream_st {
    const int device;
    const unsigned flags;
    const int priority;
    const unsigned long long id;
    std::atomic<bool> held{false};
    std::atomic<std::size_t> completed{0};
    std::chrono::nanoseconds spent{0};  // virtual time; the stream's thread's own

    std::mutex mutex;  // of what follows; never taken by the stream's thread
    std::size_t enqueued = 0;
    tutti::test::fake_cuda::item* tail;
    std::shared_ptr<tutti::test::fake_cuda::capture> capturing;
    std::set<std::size_t> frontier;  // nodes that the next one runs after

    CUstream_st(int on_device, unsigned with_flags, int with_priority);
    CUstream_st(const CUstream_st&) = delete;
    CUstream_st& operator=(const CUstream_st&) = delete;
    ~CUstream_st();

    void push(tutti::test::fake_cuda::item* i);  // the mutex is held
    void work_through();                         // the stream's thread

private:
    sem_t posted_;
    tutti::test::fake_cuda::item* head_;
};

struct CUevent_st {
    const int device;
    const unsigned flags;
    std::mutex mutex;
    std::shared_ptr<tutti::test::fake_cuda::mark> last;  // null: never recorded
    std::shared_ptr<tutti::test::fake_cuda::capture> captured;
    std::set<std::size_t> frontier;
};

struct CUmemPoolHandle_st {
    const int device;
    std::set<int> peers;
    std::uint64_t threshold = 0;
};

struct CUgraph_st {
    std::shared_ptr<tutti::test::fake_cuda::graph_data> data;
};
struct CUgraphExec_st {
    std::shared_ptr<tutti::test::fake_cuda::graph_data> data;
};
