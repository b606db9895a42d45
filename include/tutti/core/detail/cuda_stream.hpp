// cuda_stream: what a cuda_queue is made of: checked calls, the current device, a memory pool a device, streams.
// Needs core/error and the CUDA runtime.
// Nothing here calls CUDA in a static constructor or destructor.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // pool attributes
#include <map>          // pools
#include <memory>       // watchers
#include <mutex>        // spare events
#include <string_view>  // names of calls
#include <utility>      // move
#include <vector>       // spare events, erase_if

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/error.hpp>  // backend_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti {

namespace detail {

[[noreturn]] inline void raise_cuda(cudaError_t code, std::string_view call) {
    cudaGetLastError();  // an error that is not sticky would be reported again by the next check
    error_context context;
    context.operation = call;
    context.backend_code = static_cast<int>(code);
    context.backend_text = formatted("{}: {}", cudaGetErrorName(code), cudaGetErrorString(code));
    throw backend_error(formatted("{}: {} ({})", call, context.backend_text, context.backend_code), context);
}
/// Throws backend_error unless `code` is success.
inline void check_cuda(cudaError_t code, std::string_view call) {
    if (code != cudaSuccess) { raise_cuda(code, call); }
}

/// Throws memory_error. `held`: bytes that the caller's queues have on the current device, which is the pool's. What the
/// pool has and nobody uses is free: what could not be had as a whole stays there in part.
[[noreturn]] inline void raise_no_room(std::size_t bytes, int device, std::size_t held, cudaMemPool_t pool,
                                       std::string_view call) {
    std::size_t free = 0, total = 0;
    std::uint64_t reserved = 0, used = 0;
    const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess &&
                       cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved) == cudaSuccess &&
                       cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) == cudaSuccess;
    free += reserved - used;
    cudaGetLastError();  // neither is to be reported again by the next check
    constexpr double gib = std::size_t{1} << 30;
    const auto in_gib = [](std::size_t n) { return static_cast<double>(n) / gib; };
    error_context context;
    context.operation = call;
    context.backend_code = static_cast<int>(cudaErrorMemoryAllocation);
    context.backend_text =
        formatted("{}: {}", cudaGetErrorName(cudaErrorMemoryAllocation), cudaGetErrorString(cudaErrorMemoryAllocation));
    throw memory_error(formatted("{}: device {} has no room for {:.3g} GiB: {:.4g} GiB are held here{} ({})", call,
                                 device, in_gib(bytes), in_gib(held),
                                 known ? formatted(", {:.4g} of {:.4g} GiB are free", in_gib(free), in_gib(total)) : "",
                                 context.backend_text),
                       context);
}

/// Makes `device` current for one scope.
class on_device {
    int before_ = -1;

public:
    explicit on_device(int device) {
        int now = -1;
        check_cuda(cudaGetDevice(&now), "cudaGetDevice");
        if (now == device) { return; }
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
        before_ = now;
    }
    on_device(const on_device&) = delete;
    on_device& operator=(const on_device&) = delete;
    ~on_device() {
        if (before_ >= 0) { cudaSetDevice(before_); }
    }
};

/// The memory pool of a device. Made at first use and never destroyed: at exit the driver may be gone before us.
class cuda_pool {
    cudaMemPool_t handle_ = nullptr;

    explicit cuda_pool(int device) {
        cudaMemPoolProps properties{};
        properties.allocType = cudaMemAllocationTypePinned;  // what CUDA calls memory that does not migrate
        properties.location.type = cudaMemLocationTypeDevice;
        properties.location.id = device;
        check_cuda(cudaMemPoolCreate(&handle_, &properties), "cudaMemPoolCreate");
        std::uint64_t keep = UINT64_MAX;  // what was freed is used again, not given back at every synchronization
        check_cuda(cudaMemPoolSetAttribute(handle_, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    }

public:
    [[nodiscard]] static cuda_pool& of(int device) {
        static std::mutex mutex;
        static auto& pools = *new std::map<int, cuda_pool>;
        const std::lock_guard lock(mutex);
        const auto found = pools.find(device);
        if (found != pools.end()) { return found->second; }
        return pools.emplace(device, cuda_pool(device)).first->second;
    }
    [[nodiscard]] cudaMemPool_t handle() const noexcept { return handle_; }
    /// Lets another device of this process read and write the pool, now and later.
    void share_with(int peer) {
        cudaMemAccessDesc access{};
        access.location.type = cudaMemLocationTypeDevice;
        access.location.id = peer;
        access.flags = cudaMemAccessFlagsProtReadWrite;
        check_cuda(cudaMemPoolSetAccess(handle_, &access, 1), "cudaMemPoolSetAccess");
    }
};

/// Whoever knows why work of a stream may never end: a communicator, whose peers may be gone.
class cuda_watcher {
public:
    virtual ~cuda_watcher() = default;
    /// Called by host waits every now and then, and once more when they have ended. Throws what has gone wrong, which
    /// then is what the wait throws.
    virtual void look() = 0;
};

/// The watchers of a queue and its siblings: work of one may wait for work of another.
class cuda_watchers {
    std::mutex mutex_;
    std::vector<std::weak_ptr<cuda_watcher>> list_;

public:
    void add(const std::shared_ptr<cuda_watcher>& w) {
        const std::lock_guard lock(mutex_);
        std::erase_if(list_, [](const auto& each) { return each.expired(); });
        list_.push_back(w);
    }
    /// Is there anybody who watches?
    bool look() {
        std::vector<std::weak_ptr<cuda_watcher>> now;
        {
            const std::lock_guard lock(mutex_);
            now = list_;  // who looks may wait, and others may come meanwhile
        }
        bool any = false;
        for (const auto& each : now) {
            if (const auto w = each.lock()) {
                any = true;
                w->look();
            }
        }
        return any;
    }
};

/// A stream and what belongs to it.
class cuda_stream {
    bool owned_;
    std::mutex mutex_;
    std::vector<cudaEvent_t> spare_;  // making an event costs more than recording one
    std::mutex cell_mutex_;
    void* cell_ = nullptr;

public:
    static constexpr std::size_t cell_bytes = 64;
    const int device;
    const std::shared_ptr<cuda_watchers> watchers;
    cudaStream_t handle = nullptr;

    /// `urgent`: of the highest priority, so that its kernels' blocks begin before those of other streams.
    cuda_stream(int d, std::shared_ptr<cuda_watchers> w, bool urgent = false)
        : owned_(true), device(d), watchers(std::move(w)) {
        const on_device scope(d);
        int least = 0, greatest = 0;
        if (urgent) {
            check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        }
        check_cuda(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, greatest),
                   "cudaStreamCreateWithPriority");
    }
    cuda_stream(cudaStream_t existing, int d)
        : owned_(false), device(d), watchers(std::make_shared<cuda_watchers>()), handle(existing) {}
    cuda_stream(const cuda_stream&) = delete;
    cuda_stream& operator=(const cuda_stream&) = delete;
    ~cuda_stream() {  // errors mean that the driver is gone already
        for (const cudaEvent_t e : spare_) { cudaEventDestroy(e); }
        if (cell_ != nullptr) { cudaFreeHost(cell_); }
        if (owned_) { cudaStreamDestroy(handle); }  // work in flight still completes
    }

    [[nodiscard]] cudaEvent_t take_event() {
        {
            const std::lock_guard lock(mutex_);
            if (!spare_.empty()) {
                const cudaEvent_t e = spare_.back();
                spare_.pop_back();
                return e;
            }
        }
        const on_device scope(device);
        cudaEvent_t e = nullptr;
        check_cuda(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreateWithFlags");
        return e;
    }
    void give_event(cudaEvent_t e) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            spare_.push_back(e);
        } catch (...) { cudaEventDestroy(e); }
    }
    /// use(cell) with page-locked memory for one scalar, made at first use; one caller at a time.
    template <class Use> void with_cell(Use use) {
        const std::lock_guard lock(cell_mutex_);
        if (cell_ == nullptr) {
            const on_device scope(device);
            check_cuda(cudaHostAlloc(&cell_, cell_bytes, cudaHostAllocPortable), "cudaHostAlloc");
        }
        use(cell_);
    }
};

}  // namespace detail

}  // namespace tutti
