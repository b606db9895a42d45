// Lanes of queues that do not run inline: a device-like stream, and a virtual queue with exact times.
#include <doctest/doctest.h>  // checks

#include <atomic>  // flags
#include <chrono>  // delays
#include <thread>  // ids
#include <vector>  // results

#include "stream_queue.hpp"              // a device-like queue
#include <tutti/comm/self.hpp>           // one rank
#include <tutti/core/buffer.hpp>         // device storage
#include <tutti/core/elementwise.hpp>    // work
#include <tutti/core/virtual_queue.hpp>  // exact times
#include <tutti/schedule/lane.hpp>       // lane

using namespace tutti;
using namespace std::chrono_literals;
using schedule::lane;
using test::stream_queue;
using device = comm::self<stream_queue>;
using host = comm::self<host_queue>;
using modeled = comm::self<virtual_queue>;

namespace {
// value = 10 * value + digit: the order of operations can be read off the result.
struct append_digit {
    static constexpr std::string_view name = "append_digit";
    view<double, test::stream_memory> value;
    double digit;
    [[nodiscard]] tutti::cost cost() const noexcept { return {16, 2}; }
    void operator()() const { value.data()[0] = 10 * value.data()[0] + digit; }
};

bool healthy(device& c) {
    try {
        c.barrier();
    } catch (const aborted_error&) { return false; }
    return true;
}
}  // namespace

TEST_CASE("device work runs behind queues and tickets, and consumers behind it, by events") {
    device main{};
    stream_queue q = main.queue();
    lane one(main.duplicate("one"));
    lane two(main.duplicate("two"));
    buffer<double, stream_queue> value(q, 1);
    for (int repeat = 0; repeat < 30; ++repeat) {
        fill(q, value.view(), 0.0);
        run(q, append_digit{value, 1});
        const auto append = [&](double digit) {
            return [v = value.view(), digit](device& c) { run(c.queue(), append_digit{v, digit}); };
        };
        auto a = one.submit("2", append(2), q);
        auto b = two.submit("3", append(3), a);
        auto c = one.submit("4", append(4), b);
        c.wait(q);
        run(q, append_digit{value, 5});
        CHECK(fetch(q, value.view(), 0.0) == 12345);
    }
}

TEST_CASE("device lanes run the work on the caller's thread and do not block it") {
    device main{};
    lane l(main.duplicate("lane"));
    const auto me = std::this_thread::get_id();
    std::thread::id where;
    std::atomic<bool> go{false};
    auto t = l.submit("blocks the stream", [&](device& c) {
        where = std::this_thread::get_id();
        c.queue().enqueue([&go] {
            while (!go) { std::this_thread::sleep_for(100us); }
        });
    });
    CHECK(where == me);
    stream_queue q = main.queue();
    t.wait(q);  // by an event: would never return otherwise
    go = true;
    t.wait(host_queue{});
}

TEST_CASE("host lanes wait for device queues and tickets, device lanes for host tickets") {
    device main{};
    stream_queue q = main.queue();
    lane on_device(main.duplicate("lane"));
    lane on_host(host{});
    buffer<double, stream_queue> value(q, 1);
    for (int repeat = 0; repeat < 20; ++repeat) {
        fill(q, value.view(), 1.0);
        double seen = 0;
        const auto look = [&seen, v = value.view()](host&) { seen = v.data()[0]; };
        auto a = on_host.submit("behind a stream", look, q);
        a.wait(q);  // blocks: host work has no event
        CHECK(seen == 1.0);
        auto b = on_device.submit(
            "2", [v = value.view()](device& c) { fill(c.queue(), v, 2.0); }, q);
        auto c = on_host.submit("behind a device ticket", look, b);
        auto d = on_device.submit(
            "3", [v = value.view()](device& k) { fill(k.queue(), v, 3.0); }, c);
        d.wait(host_queue{});
        CHECK(seen == 2.0);
        CHECK(value.data()[0] == 3.0);
    }
}

TEST_CASE("a dropped device ticket waits, unless a consumer's queue took the work over") {
    device main{};
    stream_queue q = main.queue();
    lane l(main.duplicate("lane"));
    std::atomic<bool> go{false}, done{false};
    const auto until_go = [&](duration at_most) {
        return [&, at_most](device& c) {
            c.queue().enqueue([&, limit = after(at_most)] {
                while (!go && clock_type::now() < limit) { std::this_thread::sleep_for(1ms); }
                done = true;
            });
        };
    };
    { auto t = l.submit("slow", until_go(20ms)); }
    CHECK(done.exchange(false));
    {
        auto t = l.submit("slow", until_go(10s));
        t.wait(q);
    }
    CHECK_FALSE(done);
    go = true;
    q.record().wait_host(after(10s));
    CHECK(done);
}

TEST_CASE("errors on a device lane: from the work, from what it depends on, from a device that does not finish") {
    device main{};
    stream_queue q = main.queue();
    {
        lane l(main.duplicate("lane"));
        bool ran = false;
        auto bad = l.submit("bad", [](device&) { throw std::runtime_error("refused"); });
        auto later = l.submit("later", [&ran](device&) { ran = true; });
        CHECK_THROWS_WITH(bad.wait(q), "refused");
        CHECK_THROWS_WITH(later.wait(q), "refused");
        CHECK_THROWS_WITH(later.wait(host_queue{}), "refused");
        CHECK_THROWS_WITH(l.drain(), "refused");
        CHECK_FALSE(ran);
        CHECK_THROWS_AS(main.barrier(), aborted_error);

        device other{};
        lane dependent(other.duplicate("lane"));
        auto c = dependent.submit(
            "behind", [&ran](device&) { ran = true; }, later);
        CHECK_THROWS_WITH(c.wait(host_queue{}), "refused");
        CHECK_FALSE(ran);
        CHECK_THROWS_AS(other.barrier(), aborted_error);
    }
    std::atomic<bool> go{false};
    device third{};
    lane slow(third.duplicate("lane"), {.timeout = 300ms});
    std::thread releases;
    {
        auto t = slow.submit("stuck", [&go](device& c) {
            c.queue().enqueue([&go] {
                while (!go) { std::this_thread::sleep_for(100us); }
            });
        });
        CHECK_THROWS_AS(t.wait(host_queue{}), timeout_error);
        CHECK_NOTHROW(third.barrier());
        releases = std::thread([&] {
            while (healthy(third)) { std::this_thread::sleep_for(1ms); }
            go = true;
        });
    }
    releases.join();
    CHECK_THROWS_AS(third.barrier(), aborted_error);
}

TEST_CASE("a device ticket dropped by an exception aborts the family") {
    device main{};
    lane l(main.duplicate("lane"));
    std::atomic<bool> done{false};
    try {
        auto t = l.submit("slow", [&done](device& c) {
            c.queue().enqueue([&done] {
                std::this_thread::sleep_for(20ms);
                done = true;
            });
        });
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK(done);
    CHECK_THROWS_AS(main.barrier(), aborted_error);
}

TEST_CASE("virtual lanes: overlap and waits take exactly the time they would") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1});
    modeled main(q);
    lane l(main.duplicate("lane"));
    const auto charged = [](double seconds) {
        return [seconds](modeled& c) { c.queue().charge("lane work", {seconds, 0}); };
    };
    q.charge("before", {10, 0});
    auto a = l.submit("5 s", charged(5), q);  // 10 .. 15
    q.charge("beside", {3, 0});               // 10 .. 13
    auto b = l.submit("1 s", charged(1), q);  // 15 .. 16: behind a, on the same lane
    q.charge("beside", {1, 0});               // 13 .. 14
    a.wait(q);                                // 15
    q.charge("between", {0.5, 0});            // 15.5
    b.wait(q);                                // 16
    b.wait(q);
    auto idle = l.submit("0 s", charged(0));  // behind nothing else
    q.charge("after", {4, 0});                // 20
    const std::vector<double> ends = resolve(q.recording());
    REQUIRE(ends.size() == 2);
    CHECK(ends[0] == 20);
    CHECK(ends[1] == 16);
    l.drain();
}

TEST_CASE("virtual lanes depend on each other's tickets") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1});
    modeled main(q);
    lane one(main.duplicate("one"));
    lane two(main.duplicate("two"));
    auto a = one.submit("7 s", [](modeled& c) { c.queue().charge("x", {7, 0}); });
    auto b = two.submit(
        "2 s",
        [](modeled& c) {
            c.queue().charge("x", {2, 0});
        },
        a);
    b.wait(q);
    CHECK(resolve(q.recording()) == std::vector<double>{9, 7, 9});
}

TEST_CASE("tickets that outlive their lane write to no timeline: it may be gone too") {
    schedule::timeline trace{deadline{}};
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1});
    modeled main(q);
    schedule::ticket<virtual_queue> t;
    {
        lane l(main.duplicate("lane"), {.trace = &trace});
        t = l.submit("7 s", [](modeled& c) { c.queue().charge("x", {7, 0}); });
        t.wait(q);
        CHECK(trace.pending() == 2);  // the work, and what it held up
    }
    q.charge("beside", {1, 0});
    t.wait(q);
    CHECK(trace.pending() == 2);
    CHECK(resolve(q.recording()) == std::vector<double>{8, 7});
    CHECK(trace.exposed(0) == 7);
}
