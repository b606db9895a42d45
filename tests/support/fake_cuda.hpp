// fake_cuda: the CUDA runtime on the processor, for tests that link it in place of libcudart; its controls.
// Needs CUDA's headers. A stream is a thread, device memory is heap memory: sanitizers see what users' headers do.
// Not modeled: kernels of nvcc, the legacy stream's implicit order with others, graphs other than captured ones.
#pragma once

#include <chrono>       // delays
#include <cstddef>      // size_t
#include <cstdint>      // seeds
#include <functional>   // work
#include <optional>     // lookup
#include <string_view>  // names of functions

#include <cuda_runtime_api.h>

namespace tutti::test::fake_cuda {

/// Every control as at the start: 4 devices, no delays, no failures planned, no device at fault, counters at zero.
/// Streams, events and memory stay.
void reset();
void set_devices(int count);

// --- time -----------------------------------------------------------------------------------------------------------
/// Every operation of every stream starts up to `at_most` late, by a time drawn from `seed`. Zero: no delays.
void delay(std::uint64_t seed, std::chrono::microseconds at_most);
/// While it lives, `stream` starts nothing. It must end before the stream is destroyed.
class hold {
    cudaStream_t stream_;

public:
    explicit hold(cudaStream_t stream);
    hold(const hold&) = delete;
    hold& operator=(const hold&) = delete;
    ~hold();
};
/// While it lives, the times of events are virtual: every stream has a clock of its own that starts at zero, `spend`
/// alone advances it, and who waits for an event takes over its time where that is later.
class virtual_time {
public:
    virtual_time();
    virtual_time(const virtual_time&) = delete;
    virtual_time& operator=(const virtual_time&) = delete;
    ~virtual_time();
};
/// Work that takes so long, in the stream's order: virtual time, or real time where that is what events tell.
void spend(cudaStream_t stream, std::chrono::nanoseconds length);

using work = std::function<void()>;
/// Runs act() within the n-th call of `function` from now, counted from 1, before anything else of it: what another
/// thread may do between two calls. One plan a function.
void before(std::string_view function, int nth, work act);

// --- failure --------------------------------------------------------------------------------------------------------
/// The n-th call of `function` from now, counted from 1, does nothing and returns `code`.
void fail(std::string_view function, int nth, cudaError_t code);
/// From now on the device is lost, as after a kernel that wrote to no memory: its streams run no more work, and every
/// call that concerns it returns `code`.
void fault(int device, cudaError_t code = cudaErrorIllegalAddress);
[[nodiscard]] bool faulted(int device);

// --- counts ---------------------------------------------------------------------------------------------------------
/// Calls of a function of the runtime, such as "cudaEventRecord".
[[nodiscard]] std::size_t calls(std::string_view function);
/// How often the host waited or found that it would have to: synchronizing calls, copies of memory that is not
/// page-locked, queries of a stream or an event that was not ready.
[[nodiscard]] std::size_t host_waits();
[[nodiscard]] std::size_t live_streams();  ///< also those destroyed whose work is not done
[[nodiscard]] std::size_t live_events();
[[nodiscard]] std::size_t live_allocations();  ///< of devices and of page-locked memory, not yet freed by the host

// --- for tests and for other fakes ----------------------------------------------------------------------------------
/// Runs `kernel` in the stream's order, on its thread; during a capture it becomes part of the graph.
void launch(cudaStream_t stream, work kernel);
/// The same for work that takes a place in some order when it is launched: `bind` is called at once, or, where the
/// stream is being captured, at every launch of the graph.
cudaError_t enqueue(cudaStream_t stream, std::function<work()> bind);
/// Later work of `behind` waits for the work that `first` has now.
cudaError_t order(cudaStream_t first, cudaStream_t behind);
/// -1 when there is no such stream.
[[nodiscard]] int device_of(cudaStream_t stream);

struct allocation {
    char* data = nullptr;
    std::size_t bytes = 0;
    cudaMemoryType type = cudaMemoryTypeDevice;
    int device = 0;  ///< current at the allocation where the memory is the host's
    cudaMemPool_t pool = nullptr;
    unsigned long long capture = 0;  ///< owned by the graph of this capture
};
/// The allocation that contains p.
[[nodiscard]] std::optional<allocation> lookup(const void* p);

}  // namespace tutti::test::fake_cuda
