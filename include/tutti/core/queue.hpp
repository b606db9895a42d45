// The queue concept (where work runs) and host_queue, which runs it inline.
// Needs core/memory and core/deadline. A queue is a cheap handle, copied by value; it also hands out storage.
#pragma once

#include <concepts>  // copyable, same_as
#include <cstddef>   // size_t
#include <cstdint>   // PTRDIFF_MAX
#include <memory>    // shared account
#include <new>       // aligned operator new
#include <optional>  // marks

#include <tutti/core/deadline.hpp>  // event waits
#include <tutti/core/memory.hpp>    // memory_account

namespace tutti {

/// An in-order place where work runs.
///
/// Semantics  `record` marks the point after all work submitted so far; `wait(e)` orders later work behind e and blocks
///            the host only on a queue that runs inline. `allocate`/`release` are ordered with the queue's work.
template <class Q>
concept queue = std::copyable<Q> && requires(Q q, typename Q::event_type& e, deadline d, std::size_t bytes, void* p) {
    requires memory<typename Q::memory_type>;
    { Q::executes_inline } -> std::convertible_to<bool>;
    { q.record() } -> std::same_as<typename Q::event_type>;
    q.wait(e);
    { e.ready() } -> std::same_as<bool>;
    e.wait_host(d);
    { q.allocate(bytes) } -> std::same_as<void*>;
    q.release(p, bytes);
    { q.account() } -> std::same_as<memory_account&>;
    { q.sibling() } -> std::same_as<Q>;  // another queue of the same rank: own order, same account
};

/// A queue that can tell when it got somewhere.
///
/// Semantics  `mark` is a point like `record`'s that knows, once it is `ready`, when it was reached: on the host's clock,
///            and, more exactly, how long after an earlier mark of the queue. Nothing where the queue only takes notes
///            of work that runs later. A mark that will never be reached throws when it is asked.
template <class Q>
concept timed_queue = queue<Q> && requires(const Q q, const typename Q::mark_type& m) {
    { q.mark() } -> std::same_as<std::optional<typename Q::mark_type>>;
    { m.ready() } -> std::same_as<bool>;
    { m.when() } -> std::same_as<deadline>;
    { m.since(m) } -> std::same_as<duration>;
};

/// Runs work at once on the calling thread.
///
/// Semantics    everything is complete on return, so its events have always happened.
/// Threads      handles may be copied to other threads; the account is shared and thread-safe.
/// Cost         constructing one allocates its account; copying counts a reference.
class host_queue {
    std::shared_ptr<memory_account> account_ = std::make_shared<memory_account>();

public:
    using memory_type = host_memory;
    static constexpr bool executes_inline = true;
    static constexpr std::size_t alignment = 128;  // two cache lines: adjacent-line prefetch pairs them

    struct event_type {
        [[nodiscard]] bool ready() const noexcept { return true; }
        void wait_host(deadline) const noexcept {}
    };

    [[nodiscard]] event_type record() const noexcept { return {}; }
    void wait(const event_type&) const noexcept {}

    /// Storage aligned to `alignment`, contents unspecified. Zero bytes give nullptr.
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        if (bytes == 0) { return nullptr; }
        if (bytes > PTRDIFF_MAX) { throw std::bad_alloc(); }  // rounding up to the alignment could wrap to few
        void* const p = ::operator new (bytes, std::align_val_t{alignment});
        account_->allocated(bytes);
        return p;
    }
    void release(void* p, std::size_t bytes) const noexcept {
        if (p == nullptr) { return; }
        ::operator delete (p, std::align_val_t{alignment});
        account_->released(bytes);
    }
    [[nodiscard]] memory_account& account() const noexcept { return *account_; }
    [[nodiscard]] host_queue sibling() const noexcept { return *this; }
};
static_assert(queue<host_queue>);

/// The queue whose storage the host reads, and Q reaches in its own order.
template <queue Q> struct staging_queue_of { using type = Q; };
template <queue Q> using staging_queue = typename staging_queue_of<Q>::type;

}  // namespace tutti
