// nccl_end: the end of NCCL communicators, with a bound: a peer that is gone may keep NCCL from ever returning.
// Needs comm/detail/nccl_channel.
#pragma once

#include <atomic>     // what is open
#include <chrono>     // bounds
#include <cstddef>    // size_t
#include <exception>  // no threads to be had
#include <memory>     // channels
#include <mutex>      // a caller inside NCCL
#include <thread>     // helpers
#include <utility>    // move
#include <vector>     // channels

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/detail/nccl_channel.hpp>  // channels
#include <tutti/core/deadline.hpp>             // deadline

namespace tutti::comm::detail {

inline constexpr duration longest_end = std::chrono::seconds(10);  // of a wait for NCCL to let go
// Of a wait for a caller to come out of NCCL. One that the machine lets stand still must not find its handle freed, and
// cannot be told from one that hangs there.
inline constexpr duration longest_call = std::chrono::seconds(2);

/// Each piece of work on a thread of its own; returns when all have ended, or false: those that have not by then are
/// left alone.
template <class Work> bool run_bounded(const std::vector<Work>& work) noexcept {
    try {
        const auto open = std::make_shared<std::atomic<std::size_t>>(work.size());
        std::vector<std::thread> helpers;
        helpers.reserve(work.size());
        try {
            for (const auto& w : work) {
                helpers.emplace_back([open, w] {
                    w();
                    --*open;
                });
            }
        } catch (const std::exception&) {  // no thread to be had: the rest is left behind
            *open -= work.size() - helpers.size();
        }
        const deadline limit = after(longest_end);
        while (*open != 0 && clock_type::now() < limit) { std::this_thread::sleep_for(std::chrono::microseconds(200)); }
        const bool ended = *open == 0;
        for (auto& h : helpers) { ended ? h.join() : h.detach(); }
        return ended;
    } catch (const std::exception&) { return false; }  // no memory: all is left behind
}

/// One after the other, up to the first that does not end in time; `how` is ncclCommDestroy or ncclCommAbort.
inline void end_handles(const std::vector<ncclComm_t>& handles, int device, ncclResult_t (*how)(ncclComm_t)) noexcept {
    try {
        for (const ncclComm_t handle : handles) {
            const auto work = [handle, device, how] {
                cudaSetDevice(device);
                how(handle);
            };
            if (!run_bounded(std::vector{work})) { return; }
        }
    } catch (const std::exception&) {}  // no memory: they are left behind
}

/// All at once: one after the other would deadlock, since freeing one waits for the kernels of the next.
inline void abort_all(const std::vector<std::shared_ptr<nccl_channel>>& channels, int device) noexcept {
    const auto abort_of = [device](std::shared_ptr<nccl_channel> c) {
        return [c = std::move(c), device] {
            // A thread that is inside NCCL comes out, or hangs there and is got out by the abort.
            const deadline limit = after(longest_call);
            std::unique_lock lock(c->in_use, std::defer_lock);
            while (!lock.try_lock() && clock_type::now() < limit) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            const ncclComm_t handle = c->comm.exchange(nullptr);
            if (lock.owns_lock()) { lock.unlock(); }  // the abort may hang, and a caller may want to hear of it
            cudaSetDevice(device);
            if (handle != nullptr) { ncclCommAbort(handle); }
        };
    };
    std::vector<decltype(abort_of(nullptr))> work;
    for (const auto& c : channels) { work.push_back(abort_of(c)); }
    run_bounded(work);
}

}  // namespace tutti::comm::detail
