// nccl_watched: what the watchdog of a family sees of one communicator: its health, and whether its work is late.
// Needs comm/detail/{nccl_channel,nccl_calls}. The watchdog holds the channel's lock meanwhile.
#pragma once

#include <memory>    // channels
#include <optional>  // markers
#include <utility>   // move

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/detail/nccl_calls.hpp>    // checked calls
#include <tutti/comm/detail/nccl_channel.hpp>  // channels
#include <tutti/core/cuda_queue.hpp>           // events
#include <tutti/core/deadline.hpp>             // deadline

namespace tutti::comm::detail {

/// A channel and the event that the watchdog last put behind its work.
struct nccl_watched {
    std::shared_ptr<nccl_channel> channel;
    std::optional<cuda_queue::event_type> marker{};
    deadline marked_at{};
    nccl_progress marked{};  ///< before the marker

    explicit nccl_watched(std::shared_ptr<nccl_channel> c) : channel(std::move(c)) {}

    /// Errors  backend_error with what NCCL says.
    void expect_healthy() const {
        const ncclComm_t handle = channel->comm.load();
        if (handle == nullptr) { return; }
        ncclResult_t code = ncclSuccess;
        check_nccl(ncclCommGetAsyncError(handle, &code), "ncclCommGetAsyncError", channel->context());
        if (code != ncclSuccess && code != ncclInProgress) {
            raise_nccl(code, "asynchronous work", channel->context());
        }
    }

    /// Puts an event behind new work. True when the last one has not been reached within `timeout`.
    [[nodiscard]] bool is_late(deadline now, duration timeout) {
        const nccl_channel& c = *channel;
        if (marker) {
            if (!marker->ready()) { return now - marked_at > timeout; }
            marker.reset();
        }
        const nccl_position p = c.position();
        const bool idle = p.collectives == marked.at.collectives && p.exchanges == marked.at.exchanges;
        if (idle || c.queue.capture() != 0) { return false; }
        auto event = c.queue.record();
        // A capture that began meanwhile has the event. While it goes on the event must not be queried.
        if (c.queue.capture() != 0 || is_captured(event)) { return false; }
        marked = c.progress();
        marked_at = now;
        marker = std::move(event);
        return false;
    }

private:
    [[nodiscard]] static bool is_captured(const cuda_queue::event_type& event) {
        const bool captured = cudaEventQuery(event.native_handle()) == cudaErrorCapturedEvent;
        cudaGetLastError();  // an answer, not an error
        return captured;
    }
};

}  // namespace tutti::comm::detail
