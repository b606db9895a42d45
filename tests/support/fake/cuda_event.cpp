// fake_cuda: events.
// Needs fake/cuda_state.
#include <atomic>  // counter
#include <chrono>  // elapsed times
#include <memory>  // marks
#include <mutex>   // locks

#include <support/fake/cuda_state.hpp>  // declarations

namespace tutti::test::fake_cuda {

namespace {

std::atomic<std::size_t> live{0};

cudaError_t create(cudaEvent_t* event, unsigned flags) {
    if (faulted(current_device())) { return fault_of(current_device()); }
    *event = new CUevent_st{current_device(), flags, {}, {}, {}, {}};
    live.fetch_add(1, std::memory_order_relaxed);
    return cudaSuccess;
}

}  // namespace

std::size_t live_events() { return live.load(std::memory_order_relaxed); }

}  // namespace tutti::test::fake_cuda

using namespace tutti::test::fake_cuda;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    FAKE_CUDA_CALL(cudaEventCreateWithFlags);
    return note(create(event, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    FAKE_CUDA_CALL(cudaEventCreate);
    return note(create(event, cudaEventDefault));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    FAKE_CUDA_CALL(cudaEventDestroy);
    if (event == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    live.fetch_sub(1, std::memory_order_relaxed);
    const cudaError_t lost = fault_of(event->device);
    delete event;  // who waits for it holds its mark
    return note(lost);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FAKE_CUDA_CALL(cudaEventRecord);
    CUstream_st* const s = resolve(stream);
    if (s == nullptr || event == nullptr) { return note(cudaErrorInvalidResourceHandle); }
    return note(record(*event, *s));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    FAKE_CUDA_CALL(cudaEventQuery);
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    if (faulted(event->device)) { return note(fault_of(event->device)); }
    const std::lock_guard lock(event->mutex);
    if (event->captured != nullptr) { return note(cudaErrorCapturedEvent); }
    if (event->last == nullptr || event->last->ready()) { return cudaSuccess; }
    host_waited();
    return note(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    FAKE_CUDA_CALL(cudaEventSynchronize);
    host_waited();
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    std::shared_ptr<mark> last;
    {
        const std::lock_guard lock(event->mutex);
        if (event->captured != nullptr) { return note(cudaErrorCapturedEvent); }
        last = event->last;
    }
    if (last != nullptr) { last->wait(event->device); }
    return note(fault_of(event->device));
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    FAKE_CUDA_CALL(cudaEventElapsedTime);
    if (start->device != end->device) { return note(cudaErrorInvalidResourceHandle); }
    if (faulted(start->device)) { return note(fault_of(start->device)); }
    std::unique_lock first(start->mutex, std::defer_lock), second(end->mutex, std::defer_lock);
    if (start == end) {
        first.lock();
    } else {
        std::lock(first, second);
    }
    if (start->last == nullptr || end->last == nullptr || ((start->flags | end->flags) & cudaEventDisableTiming) != 0) {
        return note(cudaErrorInvalidResourceHandle);
    }
    if (!start->last->ready() || !end->last->ready()) { return note(cudaErrorNotReady); }
    *milliseconds = std::chrono::duration<float, std::milli>(end->last->when() - start->last->when()).count();
    return cudaSuccess;
}

}  // extern "C"
