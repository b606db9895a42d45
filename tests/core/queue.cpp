// The queue concept and host_queue.
#include <tutti/core/queue.hpp>  // under test

#include <utility>  // declval

#include <tutti/core/virtual_queue.hpp>  // another queue

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;

// A queue without one of the things the concept asks for.
struct no_sibling : private host_queue {
    using host_queue::account;
    using host_queue::allocate;
    using host_queue::event_type;
    using host_queue::executes_inline;
    using host_queue::memory_type;
    using host_queue::record;
    using host_queue::release;
    using host_queue::wait;
};
struct whole : host_queue {
    [[nodiscard]] whole sibling() const { return *this; }
};

TEST_CASE("the concept asks for order, storage and siblings") {
    static_assert(queue<host_queue> && queue<virtual_queue> && queue<whole>);
    static_assert(!queue<no_sibling> && !queue<int> && !queue<host_memory>);
    static_assert(memory<host_memory> && memory<phantom_memory> && !memory<int>);
    static_assert(host_queue::executes_inline && !virtual_queue::executes_inline);
    CHECK(sizeof(host_queue) == 2 * sizeof(void*));  // a cheap handle
}

TEST_CASE("on the host everything has happened") {
    const host_queue q;
    const auto e = q.record();
    CHECK(e.ready());
    e.wait_host(deadline{});  // long past: still no error, nothing is waited for
    q.wait(e);
}

TEST_CASE("storage is counted while it lives") {
    const host_queue q;
    void* const p = q.allocate(24);
    CHECK(q.account().live() == 24);
    q.release(p, 24);
    CHECK(q.account().live() == 0);
    CHECK(q.allocate(0) == nullptr);
    q.release(nullptr, 0);
    CHECK(q.account().live() == 0);
    CHECK(&q.account() == &q.sibling().account());
    CHECK(&q.account() != &host_queue().account());
}

}  // namespace
