// cuda_mark: a point in a stream's work that knows when it was reached, on the host's clock; cuda_queue::mark makes it.
// Needs the CUDA runtime and core/detail/cuda_stream. Events with timing are pooled by device, apart from a queue's
// ordinary ones, which are cheaper.
#pragma once

#include <chrono>   // milliseconds
#include <map>      // clocks by device
#include <memory>   // marks share events with the clock
#include <mutex>    // spare events
#include <utility>  // swap
#include <vector>   // spare events

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/deadline.hpp>            // clock_type
#include <tutti/core/detail/cuda_stream.hpp>  // check_cuda, on_device

namespace tutti {

namespace detail {

/// Lets this thread ask for events while streams, its own or another thread's, are being captured: CUDA takes every
/// question for a mistake that spoils the capture, unless it is told that it is none.
class beside_captures {
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;

public:
    beside_captures() {
        check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
    }
    beside_captures(const beside_captures&) = delete;
    beside_captures& operator=(const beside_captures&) = delete;
    ~beside_captures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
};

/// A device's clock as the host's: both were read once, at the first use. Made at first use and never destroyed, like
/// cuda_pool. From then on it counts the device's time.
class cuda_clock {
public:
    /// An event with timing. It goes back to the clock's pool.
    class event {
        cuda_clock& from_;

    public:
        const cudaEvent_t handle;
        explicit event(cuda_clock& from) : from_(from), handle(from.take()) {}
        event(const event&) = delete;
        event& operator=(const event&) = delete;
        ~event() { from_.give(handle); }
    };

    [[nodiscard]] static cuda_clock& of(int device) {
        static std::mutex mutex;
        static auto& clocks = *new std::map<int, cuda_clock>;
        const std::lock_guard lock(mutex);
        const auto found = clocks.find(device);
        if (found != clocks.end()) { return found->second; }
        cuda_clock& made = clocks.try_emplace(device, device).first->second;
        try {
            made.read_both();
        } catch (...) {
            clocks.erase(device);
            throw;
        }
        return made;
    }
    explicit cuda_clock(int device) : device_(device) {}
    cuda_clock(const cuda_clock&) = delete;
    cuda_clock& operator=(const cuda_clock&) = delete;
    ~cuda_clock() {
        base_.reset();
        for (const cudaEvent_t e : spare_) { cudaEventDestroy(e); }
    }

    /// When an event that has been reached was.
    [[nodiscard]] deadline time_of(std::shared_ptr<const event> e) {
        const std::lock_guard lock(base_mutex_);
        const duration later = elapsed(*base_, *e);
        const deadline time = base_time_ + later;
        // CUDA counts in floats of milliseconds: beyond a second they would not tell microseconds apart for long.
        if (later > std::chrono::seconds(1)) {
            base_ = std::move(e);
            base_time_ = time;
        }
        return time;
    }
    [[nodiscard]] static duration elapsed(const event& begin, const event& end) {
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), "cudaEventElapsedTime");
        return std::chrono::duration_cast<duration>(std::chrono::duration<double, std::milli>(milliseconds));
    }
    /// The host's time of the first reading is right within this much, either way.
    [[nodiscard]] duration uncertainty() const noexcept { return uncertainty_; }

private:
    [[nodiscard]] cudaEvent_t take() {
        {
            const std::lock_guard lock(spare_mutex_);
            if (!spare_.empty()) {
                const cudaEvent_t e = spare_.back();
                spare_.pop_back();
                return e;
            }
        }
        const on_device scope(device_);
        cudaEvent_t e = nullptr;
        check_cuda(cudaEventCreate(&e), "cudaEventCreate");
        return e;
    }
    void give(cudaEvent_t e) noexcept {
        try {
            const std::lock_guard lock(spare_mutex_);
            spare_.push_back(e);
        } catch (...) { cudaEventDestroy(e); }
    }

    // On a stream that has nothing else to do the device reads its clock between the host's two readings. Of a few
    // attempts the one counts whose readings are closest.
    void read_both() {
        const on_device scope(device_);
        const beside_captures asking;
        const cuda_stream idle(device_, nullptr);
        const deadline limit = after(default_timeout());
        for (int attempt = 0; attempt < 10; ++attempt) {
            auto now = std::make_shared<event>(*this);
            const deadline before = clock_type::now();
            check_cuda(cudaEventRecord(now->handle, idle.handle), "cudaEventRecord");
            cudaError_t reached = cudaErrorNotReady;
            while ((reached = cudaEventQuery(now->handle)) == cudaErrorNotReady && clock_type::now() < limit) {}
            check_cuda(reached, "cudaEventQuery");
            const duration within = (clock_type::now() - before) / 2;
            if (base_ == nullptr || within < uncertainty_) {
                base_ = std::move(now);
                base_time_ = before + within;
                uncertainty_ = within;
            }
        }
    }

    const int device_;
    std::mutex spare_mutex_;
    std::vector<cudaEvent_t> spare_;  // making an event costs more than recording one
    std::mutex base_mutex_;           // taken before the other: letting go of an event gives it back
    std::shared_ptr<const event> base_;
    deadline base_time_{};
    duration uncertainty_{};
};

}  // namespace detail

/// A point in the work of a stream that will know when it was reached.
///
/// Semantics   `when` and `since` may be asked once `ready` has said yes. The device's clock is tied to the host's once a
///             process, at the first mark on the device; then the clocks drift apart. On an H200 that tie was right
///             within 3 us, and the drift 5 us a second. Times of one device fit each other as CUDA's events do, to
///             half a microsecond; the two marks of `since` are of one device.
/// Threads     may be asked anywhere, also while streams are being captured.
/// Errors      backend_error where the point will never be reached, as after a fault of the device.
class cuda_mark {
    friend class cuda_queue;
    detail::cuda_clock* clock_;
    std::shared_ptr<detail::cuda_clock::event> event_;

    cuda_mark(int device, cudaStream_t stream)
        : clock_(&detail::cuda_clock::of(device)), event_(std::make_shared<detail::cuda_clock::event>(*clock_)) {
        detail::check_cuda(cudaEventRecord(event_->handle, stream), "cudaEventRecord");
    }

public:
    [[nodiscard]] bool ready() const {
        const detail::beside_captures asking;
        const cudaError_t code = cudaEventQuery(event_->handle);
        if (code == cudaErrorNotReady) {
            cudaGetLastError();  // an answer, not an error
            return false;
        }
        detail::check_cuda(code, "cudaEventQuery");
        return true;
    }
    [[nodiscard]] deadline when() const {
        const detail::beside_captures asking;
        return clock_->time_of(event_);
    }
    [[nodiscard]] duration since(const cuda_mark& earlier) const {
        const detail::beside_captures asking;
        return detail::cuda_clock::elapsed(*earlier.event_, *event_);
    }
};

}  // namespace tutti
