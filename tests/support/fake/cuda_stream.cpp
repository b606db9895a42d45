// fake_cuda: streams as threads that work through what hosts append, and the order between them.
// Needs fake/cuda_state.
#include <algorithm>  // max
#include <atomic>     // flags
#include <cerrno>     // interrupted waits
#include <chrono>     // delays
#include <memory>     // marks
#include <mutex>      // locks
#include <set>        // streams
#include <thread>     // a stream's thread
#include <utility>    // move

#include <support/fake/cuda_state.hpp>  // declarations
#include <support/oracle.hpp>           // mixed

namespace tutti::test::fake_cuda {

namespace {

// Never destroyed: threads of streams may outlive main.
struct registry {
    std::mutex mutex;
    std::set<cudaStream_t> streams;
    std::vector<cudaStream_t> defaults = std::vector<cudaStream_t>(64);
    std::atomic<unsigned long long> made{0};
    std::atomic<std::size_t> running{0};
    std::atomic<std::uint64_t> delay_seed{0};
    std::atomic<std::int64_t> delay_at_most{0};
    std::atomic<int> virtual_times{0};
    const std::chrono::steady_clock::time_point epoch = std::chrono::steady_clock::now();
};
registry& the() {
    static auto& r = *new registry;
    return r;
}

thread_local CUstream_st* worked_through = nullptr;  // by this thread

bool time_is_virtual() { return the().virtual_times.load(std::memory_order_relaxed) != 0; }

CUstream_st* make_stream(int device, unsigned flags, int priority) {
    auto* const s = new CUstream_st(device, flags, priority);
    the().running.fetch_add(1, std::memory_order_relaxed);
    // Detached: work in flight when a stream is destroyed, or when the program ends, is nobody's to wait for.
    std::thread([s] {
        s->work_through();
        delete s;
        the().running.fetch_sub(1, std::memory_order_relaxed);
    }).detach();
    const unobserved lock(the().mutex);
    the().streams.insert(s);
    return s;
}

cudaError_t append(CUstream_st& s, work w) {
    auto* const i = new item;
    i->run = std::move(w);
    s.push(i);
    return cudaSuccess;
}
cudaError_t append_signal(CUstream_st& s, const std::shared_ptr<mark>& m) {
    auto* const i = new item;
    i->run = [m] {
        m->complete(time_is_virtual() ? the().epoch + worked_through->spent : std::chrono::steady_clock::now());
    };
    i->signal = true;
    s.push(i);
    return cudaSuccess;
}

cudaError_t create(cudaStream_t* stream, unsigned flags, int priority) {
    if (stream == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0) { return cudaErrorInvalidValue; }
    if (faulted(current_device())) { return fault_of(current_device()); }
    *stream = make_stream(current_device(), flags, priority);
    return cudaSuccess;
}

}  // namespace

CUstream_st* resolve(cudaStream_t handle) {
    const int device = current_device();
    const bool is_default = handle == nullptr || handle == cudaStreamLegacy;
    {
        const unobserved lock(the().mutex);
        if (is_default) { handle = the().defaults[static_cast<std::size_t>(device)]; }
        if (handle != nullptr) { return the().streams.contains(handle) ? handle : nullptr; }
    }
    CUstream_st* const s = make_stream(device, cudaStreamDefault, 0);
    const unobserved lock(the().mutex);
    the().defaults[static_cast<std::size_t>(device)] = s;
    return s;
}

std::vector<cudaStream_t> streams_of(int device) {
    const unobserved lock(the().mutex);
    std::vector<cudaStream_t> found;
    for (const cudaStream_t s : the().streams) {
        if (s->device == device) { found.push_back(s); }
    }
    return found;
}

cudaError_t enqueue_always(CUstream_st& s, work w) {
    auto* const i = new item;
    i->run = std::move(w);
    i->always = true;
    const std::lock_guard lock(s.mutex);
    s.push(i);
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<work()> bind) {
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return cudaErrorInvalidResourceHandle; }
    if (faulted(s->device)) { return fault_of(s->device); }
    const std::lock_guard lock(s->mutex);
    if (s->capturing == nullptr) { return append(*s, bind()); }
    const std::lock_guard capture_lock(s->capturing->mutex);
    if (s->capturing->invalid) { return cudaErrorStreamCaptureInvalidated; }
    s->frontier = {s->capturing->add({std::move(bind), s->frontier})};
    return cudaSuccess;
}

void launch(cudaStream_t stream, work kernel) {
    if (note(enqueue(stream, [kernel] { return kernel; })) != cudaSuccess) { std::abort(); }
}

cudaError_t wait_for(CUstream_st& s) {
    const auto reached = std::make_shared<mark>();
    {
        const std::lock_guard lock(s.mutex);
        if (s.capturing != nullptr) {
            const std::lock_guard capture_lock(s.capturing->mutex);
            s.capturing->invalid = true;
            return cudaErrorStreamCaptureUnsupported;
        }
        append_signal(s, reached);
    }
    reached->wait(s.device);
    return fault_of(s.device);
}
void wait_for_process() {
    host_waited();
    std::vector<std::pair<int, std::shared_ptr<mark>>> ends;
    {
        const unobserved lock(the().mutex);  // none is destroyed meanwhile
        for (const cudaStream_t s : the().streams) {
            const std::lock_guard stream_lock(s->mutex);
            if (s->capturing != nullptr) { continue; }
            append_signal(*s, ends.emplace_back(s->device, std::make_shared<mark>()).second);
        }
    }
    for (const auto& [device, end] : ends) { end->wait(device); }
}

cudaError_t record(CUevent_st& e, CUstream_st& s) {
    if (e.device != s.device) { return cudaErrorInvalidResourceHandle; }
    if (faulted(s.device)) { return fault_of(s.device); }
    const std::scoped_lock lock(s.mutex, e.mutex);
    e.captured = s.capturing;
    e.frontier = s.frontier;
    e.last = nullptr;
    if (s.capturing != nullptr) { return cudaSuccess; }
    e.last = std::make_shared<mark>();
    return append_signal(s, e.last);
}

cudaError_t wait(CUstream_st& s, CUevent_st& e) {
    if (faulted(s.device)) { return fault_of(s.device); }
    const std::scoped_lock lock(s.mutex, e.mutex);
    if (e.captured != nullptr) {
        if (e.captured->ended) { return cudaErrorCapturedEvent; }
        if (s.capturing == nullptr) {  // joins the capture
            const std::lock_guard capture_lock(e.captured->mutex);
            e.captured->streams.push_back(&s);
            s.capturing = e.captured;
        } else if (s.capturing != e.captured) {
            const std::scoped_lock both(s.capturing->mutex, e.captured->mutex);
            s.capturing->invalid = e.captured->invalid = true;
            return cudaErrorStreamCaptureMerge;
        }
        s.frontier.insert(e.frontier.begin(), e.frontier.end());
        return cudaSuccess;
    }
    if (e.last == nullptr) { return cudaSuccess; }  // never recorded
    if (s.capturing != nullptr) {
        const std::lock_guard capture_lock(s.capturing->mutex);
        s.capturing->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    return append(s, [m = e.last, device = s.device] {
        m->wait(device);
        if (m->ready() && time_is_virtual()) {
            worked_through->spent = std::max(worked_through->spent, std::chrono::nanoseconds(m->when() - the().epoch));
        }
    });
}

cudaError_t order(cudaStream_t first, cudaStream_t behind) {
    CUstream_st* const f = resolve(first);
    CUstream_st* const b = resolve(behind);
    if (f == nullptr || b == nullptr) { return cudaErrorInvalidResourceHandle; }
    CUevent_st between{f->device, 0, {}, {}, {}, {}};
    const cudaError_t e = record(between, *f);
    return e == cudaSuccess ? wait(*b, between) : e;
}

int device_of(cudaStream_t stream) {
    CUstream_st* const s = resolve(stream);
    return s == nullptr ? -1 : s->device;
}
hold::hold(cudaStream_t stream) : stream_(stream) { resolve(stream)->held = true; }
hold::~hold() { stream_->held = false; }
void delay(std::uint64_t seed, std::chrono::microseconds at_most) {
    the().delay_seed.store(seed, std::memory_order_relaxed);
    the().delay_at_most.store(at_most.count(), std::memory_order_relaxed);
}
virtual_time::virtual_time() { ++the().virtual_times; }
virtual_time::~virtual_time() { --the().virtual_times; }
void spend(cudaStream_t stream, std::chrono::nanoseconds length) {
    launch(stream, [length] {
        if (time_is_virtual()) {
            worked_through->spent += length;
        } else {
            std::this_thread::sleep_for(length);
        }
    });
}
std::size_t live_streams() { return the().running.load(std::memory_order_relaxed); }

}  // namespace tutti::test::fake_cuda

using namespace tutti::test;
using namespace tutti::test::fake_cuda;

CUstream_st::CUstream_st(int on_device, unsigned with_flags, int with_priority)
    : device(on_device), flags(with_flags), priority(with_priority), id(++the().made), tail(new item), head_(tail) {
    sem_init(&posted_, 0, 0);
}
CUstream_st::~CUstream_st() {
    sem_destroy(&posted_);
    delete head_;
}
void CUstream_st::push(item* i) {
    ++enqueued;
    i->faults = faults_of(device);
    tail->next.store(i, std::memory_order_release);
    tail = i;
    sem_post(&posted_);
}
void CUstream_st::work_through() {
    in_host_function() = true;
    worked_through = this;
    for (std::size_t n = 0;; ++n) {
        while (sem_wait(&posted_) != 0 && errno == EINTR) {}
        item* const i = head_->next.load(std::memory_order_acquire);
        delete head_;
        head_ = i;
        if (i->last) { return; }
        while (held.load(std::memory_order_acquire)) { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
        if (const auto most = the().delay_at_most.load(std::memory_order_relaxed); most > 0) {
            const auto word = tutti::test::mixed(the().delay_seed.load(std::memory_order_relaxed) ^ (id << 32) ^ n);
            std::this_thread::sleep_for(std::chrono::microseconds(word % (static_cast<std::uint64_t>(most) + 1)));
        }
        // Who was told by a signal finds the stream idle.
        if (i->signal) { completed.store(n + 1, std::memory_order_release); }
        if (i->signal || i->always || i->faults == faults_of(device)) { i->run(); }
        i->run = nullptr;
        completed.store(n + 1, std::memory_order_release);
    }
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    FAKE_CUDA_CALL(cudaStreamCreateWithPriority);
    return note(create(stream, flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    FAKE_CUDA_CALL(cudaStreamCreateWithFlags);
    return note(create(stream, flags, 0));
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    FAKE_CUDA_CALL(cudaStreamCreate);
    return note(create(stream, cudaStreamDefault, 0));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaStreamDestroy);
    {
        const unobserved lock(the().mutex);
        if (the().streams.erase(stream) == 0) { return note(cudaErrorInvalidResourceHandle); }
    }
    auto* const end = new item;
    end->last = true;
    cudaError_t lost = cudaSuccess;
    {
        const std::lock_guard lock(stream->mutex);
        if (stream->capturing != nullptr) {
            const std::lock_guard capture_lock(stream->capturing->mutex);
            stream->capturing->invalid = true;
            std::erase(stream->capturing->streams, stream);
        }
        lost = fault_of(stream->device);
    }
    stream->push(end);  // its thread deletes it, maybe at once: nobody else may use it any more
    return note(lost);
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
    FAKE_CUDA_CALL(cudaStreamGetDevice);
    *device = device_of(stream);
    return note(*device < 0 ? cudaErrorInvalidResourceHandle : cudaSuccess);
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    FAKE_CUDA_CALL(cudaStreamGetFlags);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    *flags = s->flags;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    FAKE_CUDA_CALL(cudaStreamGetPriority);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    *priority = s->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaStreamQuery);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    if (faulted(s->device)) { return note(fault_of(s->device)); }
    const std::lock_guard lock(s->mutex);
    if (s->completed.load(std::memory_order_acquire) == s->enqueued) { return cudaSuccess; }
    host_waited();
    return note(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaStreamSynchronize);
    host_waited();
    CUstream_st* const s = resolve(stream);
    if (s == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    return note(wait_for(*s));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    FAKE_CUDA_CALL(cudaStreamWaitEvent);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr || event == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    return note(wait(*s, *event));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    FAKE_CUDA_CALL(cudaLaunchHostFunc);
    const work call = [function, argument] { function(argument); };
    return note(enqueue(stream, [call] { return call; }));
}

}  // extern "C"
