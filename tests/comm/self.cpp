// self: what is particular to one rank: messages to itself, other queues, its own abort. All else is in conformance.
#include <string>  // texts
#include <vector>  // data

#include <tutti/comm/self.hpp>           // under test
#include <tutti/core/virtual_queue.hpp>  // a queue without data

#include <doctest/doctest.h>  // checks

using namespace tutti;
using comm::receive_from;
using comm::self;
using comm::send_to;

TEST_CASE("a message without its partner is refused: nobody else could ever bring it") {
    self<> c;
    std::vector<int> a(3, 1), b(3), d(2);
    CHECK_THROWS_WITH_AS(c.exchange(std::vector{send_to(0, view<int>(a))}),
                         "exchange: 1 sends and 0 receives with one rank, call 1 on 'self', rank 0", usage_error);
    CHECK_THROWS_WITH_AS(c.exchange(std::vector{send_to(0, view<int>(a)), receive_from(0, view<int>(d))}),
                         "exchange: message 0 has 12 bytes, its receiver 8, call 2 on 'self', rank 0", usage_error);
    CHECK(d == std::vector<int>(2));
    c.exchange(
        std::vector{receive_from(0, view<int>(b)), send_to(0, view<int>(a))});  // it is not a failure of the family
    CHECK(b == a);
}

TEST_CASE("names, siblings and the account of children") {
    self<> c(host_queue{}, {.name = "alone"});
    auto child = c.duplicate("lane");
    auto part = child.split(std::vector<int>{5}, "part");
    REQUIRE(part);
    CHECK(c.name() == "alone");
    CHECK(child.name() == "alone/lane");
    CHECK(part->name() == "alone/lane/part");
    CHECK(!c.split(std::vector<int>{-1}, "none"));
    CHECK(&part->queue().account() == &c.queue().account());
}

TEST_CASE("an abort tells operation, cause and name, from the first to the last call") {
    self<> c;
    auto child = c.duplicate("child");
    child.abort("first");
    c.abort("second");
    CHECK_THROWS_WITH_AS(c.barrier(), "barrier: aborted: first, on 'self'", aborted_error);
    try {
        child.synchronize();
        FAIL("synchronize came back");
    } catch (const aborted_error& e) {
        CHECK(std::string(e.what()) == "synchronize: aborted: first, on 'self/child'");
        CHECK(e.context().operation == "synchronize");
        CHECK(e.context().communicator == "self/child");
        CHECK(e.context().rank == 0);
    }
}

TEST_CASE("a timeout of no time is refused") {
    CHECK_THROWS_WITH_AS(self<>(host_queue{}, {.name = "hurried", .timeout = {}}),
                         "self: the timeout is 0 s, expected more than 0", usage_error);
}

TEST_CASE("on a virtual queue what is copied is charged") {
    self<virtual_queue> c(virtual_queue({1, 1}));
    using phantom = view<float, phantom_memory>;
    const phantom x(nullptr, 10), y(nullptr, 20);
    c.exchange(std::vector{send_to(0, x), receive_from(0, x), send_to(0, y), receive_from(0, y)});
    CHECK(resolve(c.queue().recording()) == std::vector<double>{240});  // 30 floats, read and written
    // Views without addresses cannot tell in place from out of place; they count as in place.
    c.all_reduce(x, x, sum{});
    CHECK(resolve(c.queue().recording()) == std::vector<double>{240});
    auto lane = c.duplicate("lane");  // a stream of its own on the same rank
    lane.exchange(std::vector{send_to(0, x), receive_from(0, x)});
    CHECK(resolve(c.queue().recording()) == std::vector<double>{240, 80});
    c.agree(1, "hash");
    c.synchronize();
}
