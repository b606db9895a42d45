// nccl_order: the communicators of one rank start their kernels in the order of calls, which is the same on all ranks.
// Needs core/cuda_queue.
// NCCL kernels of two communicators that start in different orders on different devices can deadlock.
#pragma once

#include <cstdint>   // captures
#include <mutex>     // one launch at a time
#include <optional>  // the last launch, if any

#include <cuda_runtime_api.h>  // CUDA runtime

#include <tutti/core/cuda_queue.hpp>  // events

namespace tutti::comm::detail {

/// Each launch starts behind the one before it, by an event where they are on different streams.
class nccl_order {
    struct launch {
        std::optional<cuda_queue::event_type> end;
        cudaStream_t stream = nullptr;
        std::uint64_t capture = 0;
    };
    std::mutex mutex_;
    // An event of a capture means nothing outside of it, nor the other way round: so there are two last ones.
    launch eager_;
    launch captured_;

public:
    /// enqueue() puts NCCL operations on the queue's stream.
    template <class Enqueue> void run(const cuda_queue& q, Enqueue enqueue) {
        const std::lock_guard lock(mutex_);
        const std::uint64_t capture = q.capture();
        launch& last = capture == 0 ? eager_ : captured_;
        if (last.end && last.stream != q.stream() && last.capture == capture) { q.wait(*last.end); }
        enqueue();
        last = {q.record(), q.stream(), capture};
    }
};

}  // namespace tutti::comm::detail
