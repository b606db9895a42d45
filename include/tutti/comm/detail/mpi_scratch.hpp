// mpi_scratch: memory of the library's own that MPI works on: freed when the call succeeded, left to MPI when not.
// Needs core/queue. `mpi_copies` makes a call safe to throw out of: MPI sees copies of what the caller owns.
#pragma once

#include <algorithm>   // min, max
#include <cstddef>     // byte
#include <cstring>     // memcpy
#include <exception>   // uncaught_exceptions
#include <functional>  // less: total order of pointers
#include <utility>     // exchange, move
#include <vector>      // messages

#include <tutti/comm/call.hpp>   // call
#include <tutti/core/queue.hpp>  // host_queue
#include <tutti/core/view.hpp>   // overlaps

namespace tutti::comm::detail {

/// Storage from the queue, so that the rank's account counts it.
class mpi_scratch {
    host_queue queue_;
    std::size_t bytes_;
    std::byte* data_;
    int uncaught_ = std::uncaught_exceptions();

public:
    mpi_scratch(const host_queue& q, std::size_t bytes)
        : queue_(q), bytes_(bytes), data_(static_cast<std::byte*>(queue_.allocate(bytes))) {}
    mpi_scratch(const mpi_scratch&) = delete;
    mpi_scratch& operator=(const mpi_scratch&) = delete;
    ~mpi_scratch() {
        // Unwinding: a request may still write here, whenever MPI is called next.
        if (std::uncaught_exceptions() == uncaught_) { queue_.release(data_, bytes_); }
    }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    template <class T> [[nodiscard]] T* as() const noexcept { return reinterpret_cast<T*>(data_); }
};

/// Storage that a communicator keeps between its calls: fresh pages would cost more than the copies made into them.
class mpi_workspace {
    host_queue queue_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;

public:
    explicit mpi_workspace(host_queue q) noexcept : queue_(std::move(q)) {}
    mpi_workspace(const mpi_workspace&) = delete;
    mpi_workspace& operator=(const mpi_workspace&) = delete;
    ~mpi_workspace() { queue_.release(data_, bytes_); }
    /// At least `bytes`; what was there before is gone.
    [[nodiscard]] std::byte* at_least(std::size_t bytes) {
        if (bytes > bytes_) {
            queue_.release(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
            data_ = static_cast<std::byte*>(queue_.allocate(bytes));
            bytes_ = bytes;
        }
        return data_;
    }
    /// Leaves it to MPI, which may still write here.
    void abandon() noexcept {
        data_ = nullptr;
        bytes_ = 0;
    }
};

inline void copy_bytes(void* to, const void* from, std::size_t bytes) noexcept {
    if (bytes != 0 && to != from) { std::memcpy(to, from, bytes); }
}

/// A call on copies of the caller's data; in place stays in place. Cost: one copy in, one copy out, as much memory
/// again.
class mpi_copies {
    const call& original_;
    call copy_;
    std::vector<message> messages_;
    mpi_scratch storage_;

    static constexpr std::size_t alignment = host_queue::alignment;
    [[nodiscard]] static std::size_t aligned(std::size_t bytes) noexcept {
        return (bytes + alignment - 1) / alignment * alignment;
    }
    [[nodiscard]] static std::size_t size_for(const call& c) noexcept {
        if (c.kind != collective::exchange) { return aligned(c.in_bytes()) + aligned(c.out_bytes()); }
        std::size_t total = 0;
        for (const message& m : c.messages) { total += aligned(m.bytes); }
        return total;
    }

public:
    mpi_copies(const call& c, const host_queue& q)
        : original_(c), copy_(c), messages_(c.messages.begin(), c.messages.end()), storage_(q, size_for(c)) {
        std::byte* free = storage_.data();
        if (c.kind == collective::exchange) {
            for (message& m : messages_) {
                if (m.sends) { copy_bytes(free, m.data, m.bytes); }
                m.data = m.bytes == 0 ? nullptr : free;
                free += aligned(m.bytes);
            }
            copy_.messages = messages_;
            return;
        }
        const auto* const in = static_cast<const std::byte*>(c.in);
        auto* const out = static_cast<std::byte*>(c.out);
        if (overlaps(in, c.in_bytes(), out, c.out_bytes())) {  // one contains the other: the positions stay as they are
            const std::byte* const first = std::min<const std::byte*>(in, out, std::less<>{});
            copy_.in = free + (in - first);
            copy_.out = free + (out - first);
        } else {
            if (c.in_bytes() != 0) { copy_.in = free; }
            if (c.out_bytes() != 0) { copy_.out = free + aligned(c.in_bytes()); }
        }
        if (c.in_bytes() != 0) { std::memcpy(const_cast<void*>(copy_.in), c.in, c.in_bytes()); }
    }
    [[nodiscard]] const call& on_copies() const noexcept { return copy_; }
    /// Gives the caller what arrived.
    void deliver() const noexcept {
        if (original_.kind != collective::exchange) {
            copy_bytes(original_.out, copy_.out, original_.out_bytes());
            return;
        }
        for (std::size_t i = 0; i < messages_.size(); ++i) {
            const message& m = original_.messages[i];
            if (!m.sends) { copy_bytes(m.data, messages_[i].data, m.bytes); }
        }
    }
};

}  // namespace tutti::comm::detail
