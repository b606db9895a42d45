// buffer<T, Queue>: storage that is obtained from a queue and given back in that queue's order.
// Needs core/queue and core/view. Move-only; the rank's peak memory is counted through the queue's account.
#pragma once

#include <cstddef>  // size_t
#include <limits>   // overflow check
#include <utility>  // exchange

#include <tutti/core/element.hpp>  // transportable
#include <tutti/core/queue.hpp>    // queue
#include <tutti/core/text.hpp>     // formatted
#include <tutti/core/view.hpp>     // view

namespace tutti {

/// Owns `size()` elements of T in the queue's memory.
///
/// Semantics  contents are unspecified until written. Release is ordered behind the queue's work, so a buffer may be
///            destroyed while work on *its own* queue still uses it; work on other queues must be waited for.
/// Cost       one allocation; the bytes count in `queue.account()` until release.
/// Errors     usage_error when count * sizeof(T) overflows; std::bad_alloc or backend_error when memory is short.
template <transportable T, queue Q = host_queue> class buffer {
    Q queue_{};
    T* data_ = nullptr;
    std::size_t size_ = 0;

public:
    using element_type = T;
    using queue_type = Q;
    using memory_type = typename Q::memory_type;

    buffer() requires std::default_initializable<Q>
    = default;
    buffer(Q q, std::size_t size) : queue_(std::move(q)), size_(size) {
        if (size > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
            throw usage_error(formatted("buffer: {} elements of {} bytes overflow the address space", size, sizeof(T)));
        }
        data_ = static_cast<T*>(queue_.allocate(size * sizeof(T)));
    }
    buffer(buffer&& other) noexcept
        : queue_(other.queue_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    buffer& operator=(buffer&& other) noexcept {
        if (this != &other) {
            release();
            queue_ = other.queue_;
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }
    ~buffer() { release(); }

    [[nodiscard]] tutti::view<T, memory_type> view() const noexcept { return {data_, size_}; }
    operator tutti::view<T, memory_type>() const noexcept { return view(); }
    operator tutti::view<const T, memory_type>() const noexcept { return view(); }
    [[nodiscard]] T* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }

private:
    void release() noexcept {
        const std::size_t bytes = std::exchange(size_, 0) * sizeof(T);
        T* const p = std::exchange(data_, nullptr);
        if (bytes != 0) { queue_.release(p, bytes); }
    }
};

}  // namespace tutti
