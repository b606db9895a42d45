// cuda_stream: what a cuda_queue is made of: the current device, a memory pool a device, streams.
// Needs core/detail/cuda_{check,page_locked} and the CUDA runtime.
// Nothing here calls CUDA in a static constructor or destructor.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // pool attributes
#include <map>      // pools
#include <memory>   // watchers
#include <mutex>    // spare events
#include <utility>  // move
#include <vector>   // spare events, erase_if

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/detail/cuda_check.hpp>        // check_cuda
#include <tutti/core/detail/cuda_page_locked.hpp>  // cells

namespace tutti {

namespace detail {

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
        cuda_page_locked::give(cell_, cell_bytes);
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
    /// use(cell) with page-locked memory for one scalar, made at first use; one caller at a time. After an exception of
    /// use's, whose copy may still come, the cell is left to it.
    template <class Use> void with_cell(Use use) {
        const std::lock_guard lock(cell_mutex_);
        if (cell_ == nullptr) {
            const on_device scope(device);
            cell_ = cuda_page_locked::take(cell_bytes);
        }
        void* const cell = std::exchange(cell_, nullptr);
        use(cell);
        cell_ = cell;
    }
};

}  // namespace detail

}  // namespace tutti
