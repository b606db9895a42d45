// Tickets: every state in which one can be waited for, moved, overwritten and dropped.
#include <doctest/doctest.h>  // checks

#include <chrono>       // delays
#include <thread>       // sleep_for
#include <type_traits>  // properties

#include "stream_queue.hpp"         // a device-like queue
#include <tutti/comm/self.hpp>      // one rank
#include <tutti/schedule/lane.hpp>  // lane

using namespace tutti;
using namespace std::chrono_literals;
using test::stream_queue;

TEST_CASE_TEMPLATE("ticket states", Q, host_queue, stream_queue) {
    using ticket = schedule::ticket<Q>;
    using self = comm::self<Q>;
    static_assert(std::is_nothrow_move_constructible_v<ticket> && std::is_nothrow_move_assignable_v<ticket>);
    static_assert(std::is_nothrow_default_constructible_v<ticket> && !std::is_copy_constructible_v<ticket>);
    schedule::lane lane(self{});
    Q consumer;
    host_queue host;
    const auto quick = [](self&) {};
    const auto failing = [](self&) { throw std::runtime_error("failed"); };

    SUBCASE("default-constructed") {
        const ticket t;
        t.wait(consumer);
        t.wait(host);
        t.wait(host);
    }
    SUBCASE("moved-from, by construction and assignment") {
        ticket a = lane.submit("quick", quick);
        ticket b = std::move(a);
        a.wait(consumer);
        a.wait(host);
        ticket c;
        c = std::move(b);
        b.wait(host);
        c.wait(consumer);
        c.wait(host);
        c = std::move(b);  // a claim on nothing again
        c.wait(host);
    }
    SUBCASE("already complete") {
        ticket t = lane.submit("quick", quick);
        lane.drain();
        t.wait(consumer);
        t.wait(host);
    }
    SUBCASE("in flight") {
        ticket t = lane.submit("slow", [](self&) { std::this_thread::sleep_for(5ms); });
        t.wait(host);
        t.wait(consumer);
    }
    SUBCASE("failed: every wait throws, also after moves") {
        ticket t = lane.submit("failing", failing);
        CHECK_THROWS_WITH(t.wait(host), "failed");
        CHECK_THROWS_WITH(t.wait(consumer), "failed");
        ticket moved = std::move(t);
        t.wait(host);
        CHECK_THROWS_WITH(moved.wait(host), "failed");
        moved = ticket{};
        moved.wait(host);
    }
    SUBCASE("failed and never waited for") { ticket t = lane.submit("failing", failing); }
    SUBCASE("overwritten by itself") {
        ticket t = lane.submit("failing", failing);
        ticket& same = t;
        t = std::move(same);
        CHECK_THROWS_WITH(t.wait(host), "failed");
    }
    SUBCASE("a mix, waited for in any order") {
        std::vector<ticket> all(2);
        all.push_back(lane.submit("quick", quick));
        all.push_back(lane.submit("slow", [](self&) { std::this_thread::sleep_for(2ms); }));
        all.push_back(std::move(all[2]));
        for (std::size_t i = all.size(); i-- > 0;) { all[i].wait(consumer); }
        for (const ticket& t : all) { t.wait(host); }
    }
    SUBCASE("outlives its lane") {
        ticket t;
        {
            schedule::lane inner(self{});
            t = inner.submit("quick", quick);
        }
        t.wait(host);
    }
}
