// Buffers: exact accounting, moves that leave one owner, alignment, sizes that do not fit.
#include <tutti/core/buffer.hpp>  // under test

#include <cstdint>      // addresses
#include <limits>       // sizes that overflow
#include <type_traits>  // no copies
#include <utility>      // move
#include <vector>       // many buffers

#include <tutti/core/virtual_queue.hpp>  // phantom storage

#include <doctest/doctest.h>  // checks
#include <support/build.hpp>  // sanitized

namespace {

using namespace tutti;

TEST_CASE("live and peak bytes are exact") {
    const host_queue q;
    const memory_account& a = q.account();
    {
        const buffer<float> first(q, 100);
        CHECK(a.live() == 400);
        {
            const buffer<double> second(q, 10);
            CHECK(a.live() == 480);
        }
        CHECK(a.live() == 400);
        const buffer<char> third(q, 1);
        CHECK(a.live() == 401);
        CHECK(a.peak() == 480);
    }
    CHECK(a.live() == 0);
    CHECK(a.peak() == 480);
}

TEST_CASE("queues of one rank share the account, other queues have their own") {
    const host_queue q;
    const host_queue sibling = q.sibling();
    const host_queue copy = q;
    const host_queue other;
    const buffer<int> a(sibling, 3);
    const buffer<int> b(copy, 5);
    const buffer<int> c(other, 7);
    CHECK(q.account().live() == 32);
    CHECK(other.account().live() == 28);
}

TEST_CASE("an empty buffer owns and counts nothing") {
    const host_queue q;
    const buffer<int> empty(q, 0);
    CHECK(empty.data() == nullptr);
    CHECK(empty.size() == 0);
    CHECK(empty.view().empty());
    CHECK(q.account().peak() == 0);
    const buffer<int> none;
    CHECK(none.data() == nullptr);
}

TEST_CASE("a move leaves one owner") {
    static_assert(!std::is_copy_constructible_v<buffer<int>> && !std::is_copy_assignable_v<buffer<int>>);
    static_assert(std::is_nothrow_move_constructible_v<buffer<int>> && std::is_nothrow_move_assignable_v<buffer<int>>);
    const host_queue q;
    const host_queue r;
    {
        buffer<int> a(q, 10);
        int* const storage = a.data();
        buffer<int> b = std::move(a);
        CHECK(a.data() == nullptr);
        CHECK(a.size() == 0);
        CHECK(b.data() == storage);
        CHECK(b.size() == 10);
        CHECK(q.account().live() == 40);

        buffer<int> c(r, 4);
        c = std::move(b);  // releases what c had through c's queue, not b's
        CHECK(c.data() == storage);
        CHECK(q.account().live() == 40);
        CHECK(r.account().live() == 0);

        buffer<int>& same = c;
        c = std::move(same);
        CHECK(c.data() == storage);
        CHECK(c.size() == 10);

        a = buffer<int>(q, 2);  // a moved-from buffer can be filled again
        CHECK(q.account().live() == 48);
    }
    CHECK(q.account().live() == 0);
}

TEST_CASE("host storage is aligned to pairs of cache lines") {
    const host_queue q;
    std::vector<buffer<char>> many;
    for (std::size_t size = 1; size < 200; size += 13) { many.emplace_back(q, size); }
    for (const auto& b : many) { CHECK(reinterpret_cast<std::uintptr_t>(b.data()) % host_queue::alignment == 0); }
}

TEST_CASE("a size that overflows is refused before anything is allocated") {
    const host_queue q;
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    CHECK_THROWS_WITH_AS(buffer<double>(q, most / 8 + 1),
                         "buffer: 2305843009213693952 elements of 8 bytes overflow the address space", usage_error);
    CHECK_THROWS_AS(buffer<std::uint16_t>(q, most), usage_error);
    CHECK(q.account().live() == 0);
    CHECK(q.account().peak() == 0);
}

TEST_CASE("memory that cannot be had is not counted") {
    const auto refused = [](std::size_t bytes) {
        const host_queue q;
        CHECK_THROWS_AS(buffer<char>(q, bytes), std::bad_alloc);
        CHECK(q.account().live() == 0);
        CHECK(q.account().peak() == 0);
    };
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    for (const std::size_t bytes : {most, most - host_queue::alignment + 2}) { refused(bytes); }  // rounded up: 0
    if (test::sanitized) { return; }  // AddressSanitizer ends the program at such a request
    refused(most / 4);
}

TEST_CASE("buffers become views of their elements, const or not") {
    const host_queue q;
    const buffer<float> b(q, 6);
    const view<float> w = b;
    const view<const float> c = b;
    CHECK(w.data() == b.data());
    CHECK(c.data() == b.data());
    CHECK(c.size() == 6);
    CHECK(b.size_bytes() == 24);
    static_assert(!std::is_convertible_v<buffer<float>, view<double>>);
    static_assert(std::is_same_v<decltype(b.view()), view<float>>);
}

TEST_CASE("a phantom buffer has a size and an account, no storage") {
    const virtual_queue q;
    {
        const buffer<float, virtual_queue> b(q, std::size_t{1} << 40);
        CHECK(b.data() == nullptr);
        CHECK(q.account().live() == std::size_t{1} << 42);
        buffer<float, virtual_queue> c(q.sibling(), 8);
        c = buffer<float, virtual_queue>(q, 2);
        CHECK(q.account().live() == (std::size_t{1} << 42) + 8);
    }
    CHECK(q.account().live() == 0);
    CHECK(q.account().peak() == (std::size_t{1} << 42) + 40);  // c held 8 elements until it had the 2
}

}  // namespace
