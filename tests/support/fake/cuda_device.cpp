// fake_cuda: devices, errors, counters, and what tests plan.
// Needs fake/cuda_state.
#include <atomic>       // counters
#include <cstdio>       // snprintf
#include <map>          // functions by name
#include <mutex>        // registry
#include <string>       // names
#include <string_view>  // names
#include <utility>      // move

#include <support/fake/cuda_state.hpp>  // declarations

namespace tutti::test::fake_cuda {

namespace {

constexpr int most_devices = 64;

// Never destroyed: threads of streams may outlive main.
struct machine {
    std::mutex mutex;
    std::map<std::string, call_site, std::less<>> sites;
    std::atomic<int> devices{4};
    std::atomic<std::size_t> host_waits{0};
    std::atomic<cudaError_t> faults[most_devices] = {};
    std::atomic<int> fault_counts[most_devices] = {};
};
machine& the() {
    static auto& m = *new machine;
    return m;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool host_function = false;

}  // namespace

call_site& site(std::string_view function) {
    const unobserved lock(the().mutex);
    return the().sites[std::string(function)];
}

cudaError_t enter(call_site& s) {
    s.calls.fetch_add(1, std::memory_order_relaxed);
    if (host_function) { return cudaErrorNotPermitted; }
    if (s.acts_in.load(std::memory_order_relaxed) > 0 && s.acts_in.fetch_sub(1, std::memory_order_acquire) == 1) {
        s.act();
    }
    if (s.fails_in.load(std::memory_order_relaxed) > 0 && s.fails_in.fetch_sub(1, std::memory_order_relaxed) == 1) {
        return s.code.load(std::memory_order_relaxed);
    }
    return cudaSuccess;
}

cudaError_t note(cudaError_t e) {
    if (e != cudaSuccess) { last_error = e; }
    return e;
}

cudaError_t fault_of(int device) { return the().faults[device].load(std::memory_order_acquire); }
void host_waited() { the().host_waits.fetch_add(1, std::memory_order_relaxed); }
int current_device() { return device_of_thread; }
int device_count() { return the().devices.load(std::memory_order_relaxed); }
bool& in_host_function() { return host_function; }

void set_devices(int count) { the().devices = count < most_devices ? count : most_devices; }
bool faulted(int device) { return fault_of(device) != cudaSuccess; }
int faults_of(int device) { return the().fault_counts[device].load(std::memory_order_acquire); }
void fault(int device, cudaError_t code) {
    ++the().fault_counts[device];
    the().faults[device].store(code, std::memory_order_release);
}
std::size_t host_waits() { return the().host_waits.load(std::memory_order_relaxed); }
std::size_t calls(std::string_view function) { return site(function).calls.load(std::memory_order_relaxed); }

void fail(std::string_view function, int nth, cudaError_t code) {
    call_site& s = site(function);
    s.code.store(code, std::memory_order_relaxed);
    s.fails_in.store(nth, std::memory_order_relaxed);
}

void before(std::string_view function, int nth, work act) {
    call_site& s = site(function);
    s.act = std::move(act);
    s.acts_in.store(nth, std::memory_order_release);
}

void reset() {
    set_devices(4);
    delay(0, std::chrono::microseconds(0));
    for (auto& f : the().faults) { f = cudaSuccess; }
    the().host_waits = 0;
    last_error = cudaSuccess;
    device_of_thread = 0;
    const unobserved lock(the().mutex);
    for (auto& [name, s] : the().sites) {
        s.calls = 0;
        s.fails_in = 0;
        s.acts_in = 0;
    }
}

}  // namespace tutti::test::fake_cuda

using namespace tutti::test::fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    FAKE_CUDA_CALL(cudaGetDeviceCount);
    *count = device_count();
    return note(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
    FAKE_CUDA_CALL(cudaGetDevice);
    *device = current_device();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    FAKE_CUDA_CALL(cudaSetDevice);
    if (device < 0 || device >= device_count()) { return note(cudaErrorInvalidDevice); }
    device_of_thread = device;
    return note(fault_of(device));
}
cudaError_t cudaDeviceSynchronize() {
    FAKE_CUDA_CALL(cudaDeviceSynchronize);
    host_waited();
    if (const cudaError_t e = capture_forbids(); e != cudaSuccess) { return note(e); }
    for (const cudaStream_t s : streams_of(current_device())) {
        if (const cudaError_t e = wait_for(*s); e != cudaSuccess) { return note(e); }
    }
    return note(fault_of(current_device()));
}

// A fault is said again and again; anything else once.
cudaError_t cudaGetLastError() {
    FAKE_CUDA_CALL(cudaGetLastError);
    const cudaError_t fault = fault_of(current_device());
    const cudaError_t last = last_error;
    last_error = cudaSuccess;
    return fault != cudaSuccess ? fault : last;
}
cudaError_t cudaPeekAtLastError() {
    FAKE_CUDA_CALL(cudaPeekAtLastError);
    const cudaError_t fault = fault_of(current_device());
    return fault != cudaSuccess ? fault : last_error;
}

#define FAKE_CUDA_ERRORS(X)                                                                                            \
    X(cudaSuccess, "no error")                                                                                         \
    X(cudaErrorInvalidValue, "invalid argument")                                                                       \
    X(cudaErrorMemoryAllocation, "out of memory")                                                                      \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                                         \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                                                \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                       \
    X(cudaErrorNotReady, "device not ready")                                                                           \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                             \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                                            \
    X(cudaErrorNotPermitted, "operation not permitted")                                                                \
    X(cudaErrorNotSupported, "operation not supported")                                                                \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                           \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")                    \
    X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")                  \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")                         \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                            \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")                      \
    X(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread")   \
    X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define X(code, text)                                                                                                  \
    case code: return #code;
        FAKE_CUDA_ERRORS(X)
#undef X
    default: return "unrecognized error code";
    }
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define X(code, text)                                                                                                  \
    case code: return text;
        FAKE_CUDA_ERRORS(X)
#undef X
    default: return "unrecognized error code";
    }
}

cudaError_t cudaDriverGetVersion(int* version) {
    FAKE_CUDA_CALL(cudaDriverGetVersion);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    FAKE_CUDA_CALL(cudaRuntimeGetVersion);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    FAKE_CUDA_CALL(cudaDeviceCanAccessPeer);
    if (device < 0 || device >= device_count() || peer < 0 || peer >= device_count()) {
        return note(cudaErrorInvalidDevice);
    }
    *can = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    FAKE_CUDA_CALL(cudaDeviceGetPCIBusId);
    if (device < 0 || device >= device_count()) { return note(cudaErrorInvalidDevice); }
    const int written = std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0", device + 1);
    return note(written < length ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    FAKE_CUDA_CALL(cudaGetDeviceProperties);
    if (device < 0 || device >= device_count()) { return note(cudaErrorInvalidDevice); }
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "fake device %d", device);
    properties->pciBusID = device + 1;
    properties->major = 9;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    FAKE_CUDA_CALL(cudaDeviceGetStreamPriorityRange);
    if (least != nullptr) { *least = 0; }
    if (greatest != nullptr) { *greatest = -5; }
    return cudaSuccess;
}

}  // extern "C"
