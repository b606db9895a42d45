// nccl_channel: one NCCL communicator of one rank: its handle, its queue, and what a watchdog wants to know about it.
// Needs comm/detail/nccl_calls and core/cuda_queue.
#pragma once

#include <atomic>       // what the watchdog reads
#include <chrono>       // a bound
#include <cstdint>      // positions
#include <mutex>        // one caller of NCCL at a time
#include <new>          // nothrow
#include <string>       // name
#include <string_view>  // names of operations
#include <thread>       // sleep_for
#include <utility>      // move
#include <vector>       // members

#include <cuda_runtime_api.h>  // CUDA runtime
#include <nccl.h>              // NCCL

#include <tutti/comm/call.hpp>        // collective, control_record
#include <tutti/core/buffer.hpp>      // scratch
#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/deadline.hpp>    // clock_type
#include <tutti/core/error.hpp>       // error_context

namespace tutti::comm::detail {

/// What one rank did on one communicator, as it tells the others when something hangs.
struct nccl_position {
    std::uint64_t id = 0;           ///< of the communicator, equal on all ranks
    std::uint64_t collectives = 0;  ///< number of the last one that was begun
    std::uint64_t exchanges = 0;    ///< the same of grouped messages
};

/// What the thread that uses a communicator had begun last, at some time.
struct nccl_progress {
    nccl_position at;
    bool exchanging = false;
    error_context context;
};

class nccl_channel {
public:
    /// The device must be current, for page-locked memory.
    nccl_channel(cuda_queue q, std::string n, int own_rank, std::vector<int> ranks, std::uint64_t identity)
        : queue(std::move(q))
        , name(std::move(n))
        , rank(own_rank)
        , members(std::move(ranks))
        , id(identity)
        , cell(queue, 16)
        , records(queue, members.size() + 1)
        , page_locked({}, members.size() + 1) {
        tutti::detail::check_cuda(cudaMemsetAsync(cell.data(), 0, cell.size(), queue.stream()), "cudaMemsetAsync");
    }

    nccl_channel(const nccl_channel&) = delete;
    nccl_channel& operator=(const nccl_channel&) = delete;
    // After a failure copies to page-locked memory may still be on the stream. It is left to them if they do not end.
    ~nccl_channel() {
        try {
            const auto end = queue.record();
            const deadline limit = after(std::chrono::seconds(10));
            while (!end.ready() && clock_type::now() < limit) {
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
            if (end.ready()) { return; }
        } catch (const error&) {}  // the device is lost, and nobody knows what it still writes
        static_cast<void>(new (std::nothrow) buffer<control_record, pinned_queue>(std::move(page_locked)));
    }

    const cuda_queue queue;
    const std::string name;
    const int rank;                  ///< in this communicator
    const std::vector<int> members;  ///< their ranks in the root
    const std::uint64_t id;
    bool owned = true;           ///< or the caller's handle
    std::uint64_t children = 0;  ///< made from this one
    std::atomic<ncclComm_t> comm{nullptr};

    // Scratch: of barriers (a byte, but NCCL reads the word around it), and of control gathers (one's own record, then
    // those of all).
    buffer<std::uint8_t, cuda_queue> cell;
    buffer<control_record, cuda_queue> records;
    buffer<control_record, pinned_queue> page_locked;

    // Written by the thread that uses the communicator, read by the watchdog.
    std::atomic<std::uint64_t> collectives{0};
    std::atomic<std::uint64_t> exchanges{0};
    std::atomic<collective> last{collective::barrier};
    std::atomic<const char*> doing{nullptr};     ///< the control operation in progress, if any
    std::atomic<deadline::rep> inside_since{0};  ///< 0 while no NCCL call is in progress
    std::mutex in_use;                           ///< held during NCCL calls

    [[nodiscard]] nccl_position position() const noexcept { return {id, collectives, exchanges}; }
    [[nodiscard]] std::string_view operation() const noexcept {
        const char* const waiting = doing.load();
        return waiting != nullptr ? std::string_view(waiting) : name_of(last.load());
    }
    [[nodiscard]] error_context context() const {
        const bool exchanging = last.load() == collective::exchange;
        return {std::string(operation()),
                name,
                rank,
                exchanging ? exchanges.load() : collectives.load(),
                0,
                dtype::byte,
                0,
                {}};
    }

    [[nodiscard]] nccl_progress progress() const {
        return {position(), last.load() == collective::exchange, context()};
    }
    /// Within `use`: the watchdog must not see a call that it cannot yet put an event behind.
    void begin(collective kind, std::uint64_t sequence) noexcept {
        last.store(kind, std::memory_order_relaxed);
        (kind == collective::exchange ? exchanges : collectives).store(sequence, std::memory_order_relaxed);
    }
    /// The handle, for its end. Nobody is inside NCCL with it any more.
    [[nodiscard]] ncclComm_t take() {
        const std::lock_guard lock(in_use);
        return comm.exchange(nullptr);
    }

    /// The control operation in progress, for as long as this lives.
    class control {
        nccl_channel& channel_;

    public:
        control(nccl_channel& c, const char* operation) : channel_(c) { c.doing.store(operation); }
        control(const control&) = delete;
        control& operator=(const control&) = delete;
        ~control() { channel_.doing.store(nullptr); }
    };
    /// The thread is inside NCCL for as long as this lives.
    class use {
        nccl_channel& channel_;
        std::lock_guard<std::mutex> lock_;

    public:
        explicit use(nccl_channel& c) : channel_(c), lock_(c.in_use) {
            channel_.inside_since.store(clock_type::now().time_since_epoch().count(), std::memory_order_relaxed);
        }
        use(const use&) = delete;
        use& operator=(const use&) = delete;
        ~use() { channel_.inside_since.store(0, std::memory_order_relaxed); }
    };
};

}  // namespace tutti::comm::detail
