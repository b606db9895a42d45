// Lanes of host queues: order, errors, deadlines, lifetimes.
#include <doctest/doctest.h>  // checks

#include <atomic>   // flags between threads
#include <chrono>   // delays
#include <future>   // promises
#include <memory>   // captured state
#include <numeric>  // iota
#include <vector>   // order of execution

#include <tutti/comm/self.hpp>      // one rank
#include <tutti/core/buffer.hpp>    // captured buffers
#include <tutti/schedule/lane.hpp>  // lane

#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace std::chrono_literals;
using schedule::lane;
using self = comm::self<host_queue>;
using ticket = schedule::ticket<host_queue>;

namespace {

void nap() { std::this_thread::sleep_for(2ms); }

// Work that ends only because its communicator is aborted.
const auto until_aborted = [](self& c) {
    for (;;) {
        std::this_thread::sleep_for(1ms);
        c.synchronize();
    }
};

// A queue whose lanes' prerequisites can be counted.
struct counted_queue : host_queue {
    struct event_type {
        std::shared_ptr<int> alive;
        [[nodiscard]] bool ready() const noexcept { return true; }
        void wait_host(deadline) const noexcept {}
    };
    static constexpr bool executes_inline = false;
    std::shared_ptr<int> events = std::make_shared<int>();
    [[nodiscard]] event_type record() const noexcept { return {events}; }
    void wait(const event_type&) const noexcept {}
    [[nodiscard]] counted_queue sibling() const noexcept { return *this; }
    [[nodiscard]] long alive() const noexcept { return events.use_count() - 1; }
};

std::string text_of_error(auto f) {
    try {
        f();
    } catch (const std::exception& e) { return e.what(); }
    return {};
}

}  // namespace

TEST_CASE("work runs in the order of submission, on another thread") {
    lane l(self{});
    host_queue q;
    std::vector<int> order;
    std::thread::id where;
    std::vector<ticket> tickets;
    for (int i = 0; i < 200; ++i) {
        tickets.push_back(l.submit("append", [&order, &where, i](self&) {
            if (i % 50 == 0) { nap(); }
            order.push_back(i);
            where = std::this_thread::get_id();
        }));
    }
    tickets.back().wait(q);
    std::vector<int> expected(200);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(order == expected);
    CHECK(where != std::this_thread::get_id());
}

TEST_CASE("work runs beside its caller") {
    lane l(self{});
    std::promise<void> caller_went_on;
    auto t = l.submit("wait for the caller", [&](self&) { caller_went_on.get_future().wait(); });
    caller_went_on.set_value();  // deadlock if submit ran the work
    t.wait(host_queue{});
}

TEST_CASE("work runs behind tickets of other lanes") {
    lane first(self{});
    lane second(self{});
    host_queue q;
    for (int repeat = 0; repeat < 20; ++repeat) {
        int value = 0;
        auto a = first.submit("slow", [&value](self&) {
            nap();
            value = 1;
        });
        auto b = second.submit(
            "behind", [&value](self&) { value *= 10; }, a, q);
        auto c = first.submit(
            "behind both", [&value](self&) { value += 1; }, a, b);
        c.wait(q);
        CHECK(value == 11);
    }
}

TEST_CASE("an error in the work reaches its ticket, aborts the family and ends the lane") {
    self parent{};
    lane l(parent.duplicate("lane"));
    host_queue q;
    bool ran = false;
    auto before = l.submit("fine", [](self&) {});
    auto bad = l.submit("bad", [](self&) { throw std::runtime_error("no such luck"); });
    auto later = l.submit("later", [&ran](self&) { ran = true; });
    CHECK_NOTHROW(before.wait(q));
    CHECK_THROWS_WITH_AS(bad.wait(q), "no such luck", std::runtime_error);
    CHECK_THROWS_WITH_AS(bad.wait(q), "no such luck", std::runtime_error);  // repeatable
    CHECK_THROWS_WITH_AS(later.wait(q), "no such luck", std::runtime_error);
    CHECK_FALSE(ran);
    auto much_later = l.submit("much later", [&ran](self&) { ran = true; });
    CHECK_THROWS_WITH_AS(much_later.wait(q), "no such luck", std::runtime_error);
    CHECK_FALSE(ran);
    CHECK_THROWS_WITH_AS(l.drain(), "no such luck", std::runtime_error);
    CHECK_NOTHROW(before.wait(q));
    const std::string cause = text_of_error([&] { parent.barrier(); });
    CHECK(cause.find("no such luck") != std::string::npos);
}

TEST_CASE("an exception that is no std::exception is carried too") {
    self parent{};
    lane l(parent.duplicate("lane"));
    auto t = l.submit("odd", [](self&) { throw 7; });
    CHECK_THROWS_AS(t.wait(host_queue{}), int);
    CHECK(text_of_error([&] { parent.barrier(); }).find("an exception that is no std::exception") != std::string::npos);
}

TEST_CASE("an error of a ticket that work depends on is an error of the work") {
    lane first(self{});
    self parent{};
    lane second(parent.duplicate("second"));
    bool ran = false;
    auto a = first.submit("bad", [](self&) { throw std::runtime_error("first cause"); });
    auto b = second.submit(
        "behind", [&ran](self&) { ran = true; }, a);
    CHECK_THROWS_WITH_AS(b.wait(host_queue{}), "first cause", std::runtime_error);
    CHECK_FALSE(ran);
    CHECK_THROWS_AS(parent.barrier(), aborted_error);
}

TEST_CASE("drain returns when all work is done") {
    lane l(self{});
    std::atomic<int> done{0};
    std::vector<ticket> tickets;
    for (int i = 0; i < 5; ++i) {
        tickets.push_back(l.submit("slow", [&done](self&) {
            nap();
            ++done;
        }));
    }
    l.drain();
    CHECK(done == 5);
    l.drain();
}

// pytorch/pytorch#18465, pytorch/pytorch#148590
TEST_CASE("what work captured is released before its ticket says done") {
    host_queue q;
    lane l(self{q});
    bool released = false;
    const auto captured = [&released] {  // something that takes its time to go
        released = false;
        return std::shared_ptr<void>(nullptr, [&released](void*) {
            std::this_thread::sleep_for(20ms);
            released = true;
        });
    };
    buffer<float> b(q, 1000);
    const std::size_t live = q.account().live();
    auto t = l.submit("use", [b = std::move(b), c = captured()](self&) { b.data()[999] = 1; });
    t.wait(q);
    CHECK(released);
    CHECK(q.account().live() == live - 4000);
    auto failing = l.submit("fail", [c = captured()](self&) { throw std::runtime_error("x"); });
    CHECK_THROWS(failing.wait(q));
    CHECK(released);
    auto never_run = l.submit("not run", [c = captured()](self&) {});
    CHECK_THROWS(never_run.wait(q));
    CHECK(released);
}

TEST_CASE("what work ran behind is released too: lanes that wait for each other keep nothing of the past") {
    host_queue q;
    counted_queue counted;
    const auto nothing = [](self&) {};
    lane second(self{});
    ticket newest;
    {
        lane first(self{});
        for (int step = 0; step < 500; ++step) {
            auto ahead = first.submit("ahead", nothing, newest, counted);
            newest = second.submit("behind", nothing, ahead, counted);
        }
        newest.wait(q);
        CHECK(counted.alive() == 0);
        newest = second.submit("behind a lane that ends", nothing, newest, counted);
    }
    newest.wait(q);
    CHECK(counted.alive() == 0);
    auto failing = second.submit(
        "fail", [](self&) { throw std::runtime_error("x"); }, newest, counted);
    CHECK_THROWS(failing.wait(q));
    CHECK(counted.alive() == 0);
    auto never_run = second.submit("not run", nothing, failing, counted);
    CHECK_THROWS(never_run.wait(q));
    CHECK(counted.alive() == 0);
}

TEST_CASE("dropping a ticket waits for its work") {
    lane l(self{});
    bool done = false;
    {
        auto t = l.submit("slow", [&done](self&) {
            std::this_thread::sleep_for(20ms);
            done = true;
        });
    }
    CHECK(done);
    bool done_too = false;
    auto t = l.submit("slow", [&done_too](self&) {
        std::this_thread::sleep_for(20ms);
        done_too = true;
    });
    t = ticket{};
    CHECK(done_too);
}

TEST_CASE("a ticket dropped by an exception aborts the family, so its work ends, and waits for that") {
    self parent{};
    lane l(parent.duplicate("lane"), {.timeout = 60s});
    const auto start = clock_type::now();
    std::atomic<bool> ended{false};
    bool ended_before_memory_was_freed = false;
    try {
        struct witness {  // destroyed after the ticket, as the memory that its work uses would be
            std::atomic<bool>& ended;
            bool& out;
            ~witness() { out = ended; }
        } memory{ended, ended_before_memory_was_freed};
        auto t = l.submit("stuck", [&ended](self& c) {
            try {
                until_aborted(c);
            } catch (...) {
                std::this_thread::sleep_for(20ms);
                ended = true;
                throw;
            }
        });
        throw std::runtime_error("trainer failed");
    } catch (const std::runtime_error&) {}
    CHECK(ended_before_memory_was_freed);
    CHECK(clock_type::now() - start < 30s);
    CHECK(text_of_error([&] {
              parent.barrier();
          }).find("'stuck' on lane 'self/lane' was in flight when an exception dropped its ticket") !=
          std::string::npos);
}

TEST_CASE("a ticket inside an exception handler's work is not unwinding") {
    self parent{};
    lane l(parent.duplicate("lane"));
    struct cleanup {
        lane<self>& l;
        ~cleanup() {
            bool done = false;
            {
                auto t = l.submit("clean up", [&done](self&) { nap(), done = true; });
            }
            CHECK(done);
        }
    };
    try {
        cleanup c{l};
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK_NOTHROW(parent.barrier());
}

TEST_CASE("a ticket dropped by an exception after its work is done aborts nothing") {
    self parent{};
    lane l(parent.duplicate("lane"));
    try {
        auto t = l.submit("quick", [](self&) {});
        t.wait(host_queue{});
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK_NOTHROW(parent.barrier());
}

TEST_CASE("a wait ends by the deadline and says what did not happen; the ticket then ends the work") {
    self parent{};
    lane l(parent.duplicate("lane"), {.timeout = 300ms});
    {
        auto t = l.submit("stuck", until_aborted);
        auto behind = l.submit("behind", [](self&) {});
        const std::string text = text_of_error([&] { behind.wait(host_queue{}); });
        CHECK(text == "ticket: 'behind' on lane 'self/lane' did not finish, and nothing else there did, within 0.3 s "
                      "(2 jobs unfinished)");
        CHECK_THROWS_AS(t.wait(host_queue{}), timeout_error);  // repeatable
        CHECK_THROWS_AS(l.drain(), timeout_error);
        CHECK_NOTHROW(parent.barrier());  // a wait alone aborts nothing
    }
    CHECK(text_of_error([&] { parent.barrier(); }).find("did not finish in time when its ticket was dropped") !=
          std::string::npos);
}

TEST_CASE("a deadline of no time is refused, and one of hardly any does not end the program") {
    CHECK(text_of_error([] { lane l(self{}, {.timeout = 0s}); }) ==
          "lane 'self': the timeout is 0 s, expected more than 0");
    self parent{};
    lane l(parent.duplicate("lane"), {.timeout = 1ns});
    { auto t = l.submit("stuck", until_aborted); }
    CHECK(text_of_error([&] { parent.barrier(); }).find("did not finish in time") != std::string::npos);
}

TEST_CASE("the deadline counts from the last job that finished") {
    test::with_growing_timeouts([](duration timeout) {
        lane l(self{}, {.timeout = timeout});
        std::vector<ticket> tickets;
        for (int i = 0; i < 8; ++i) {  // 1.2 timeouts
            tickets.push_back(l.submit("slow", [=](self&) { std::this_thread::sleep_for(timeout * 3 / 20); }));
        }
        tickets.back().wait(host_queue{});
    });
}

TEST_CASE("destroying a lane waits for its work") {
    int done = 0;
    ticket outlives;
    {
        lane l(self{});
        outlives = l.submit("slow", [&done](self&) {
            std::this_thread::sleep_for(20ms);
            done = 1;
        });
    }
    CHECK(done == 1);
    CHECK_NOTHROW(outlives.wait(host_queue{}));
}

TEST_CASE("a lane destroyed by an exception aborts its family when work is in flight") {
    self parent{};
    ticket t;
    try {
        lane l(parent.duplicate("lane"), {.timeout = 60s});
        t = l.submit("stuck", until_aborted);
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK(text_of_error([&] { parent.barrier(); }).find("was in flight when an exception destroyed the lane") !=
          std::string::npos);
    CHECK_THROWS_AS(t.wait(host_queue{}), aborted_error);

    self other{};
    try {
        lane l(other.duplicate("lane"));
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK_NOTHROW(other.barrier());  // nothing was in flight
}

TEST_CASE("a lane destroyed with overdue work aborts its family") {
    self parent{};
    ticket t;
    {
        lane l(parent.duplicate("lane"), {.timeout = 300ms});
        t = l.submit("stuck", until_aborted);
    }
    CHECK_THROWS_AS(t.wait(host_queue{}), aborted_error);
    CHECK(text_of_error([&] { parent.barrier(); }).find("did not finish in time when the lane was destroyed") !=
          std::string::npos);
}

TEST_CASE("lanes move; a lane that was moved from says so") {
    lane a(self{});
    std::atomic<int> done{0};
    auto t1 = a.submit("one", [&](self&) { nap(), ++done; });
    lane b(std::move(a));
    auto t2 = b.submit("two", [&](self&) { ++done; });
    t2.wait(host_queue{});
    CHECK(done == 2);
    CHECK_THROWS_WITH_AS(static_cast<void>(a.submit("x", [](self&) {})), "lane: submit on a lane that was moved from",
                         usage_error);
    CHECK_THROWS_AS(a.drain(), usage_error);
    a.abort("nothing happens");
    lane c(self{});
    auto t3 = c.submit("three", [&](self&) { nap(), ++done; });
    c = std::move(b);  // waits for what c had
    CHECK(done == 3);
    auto t4 = c.submit("four", [&](self&) { ++done; });
    c.drain();
    CHECK(done == 4);
    CHECK(c.rank() == 0);
    CHECK(c.size() == 1);
}

TEST_CASE("work that waits for its own lane is refused instead of hanging") {
    lane l(self{}, {.timeout = 60s});
    ticket second;
    std::promise<void> submitted;
    auto first = l.submit("first", [&](self&) {
        submitted.get_future().wait();
        second.wait(host_queue{});
    });
    second = l.submit("second", [](self&) {});
    submitted.set_value();
    CHECK_THROWS_WITH_AS(first.wait(host_queue{}),
                         "ticket: 'second' is waited for on its own lane 'self', which would never end", usage_error);
}

TEST_CASE("abort from another thread ends work in flight") {
    lane l(self{}, {.timeout = 60s});
    auto t = l.submit("stuck", until_aborted);
    std::thread other([&] { l.abort("enough"); });
    CHECK(text_of_error([&] { t.wait(host_queue{}); }).find("enough") != std::string::npos);
    other.join();
}

TEST_CASE("several threads wait for tickets of one lane") {
    lane l(self{});
    for (int repeat = 0; repeat < 20; ++repeat) {
        std::promise<void> start;
        auto a = l.submit("a", [f = start.get_future()](self&) { f.wait(); });
        auto b = l.submit("b", [](self&) { throw std::logic_error("seen by all"); });
        std::atomic<int> seen{0};
        std::vector<std::thread> waiters;
        for (int i = 0; i < 3; ++i) {
            waiters.emplace_back([&] {
                try {
                    b.wait(host_queue{});
                } catch (const std::logic_error& e) {
                    if (std::string_view(e.what()) == "seen by all") { ++seen; }
                }
            });
        }
        start.set_value();
        for (auto& w : waiters) { w.join(); }
        CHECK(seen == 3);
        l = lane(self{});
    }
}

TEST_CASE("submit and wait in quick succession lose no wake-up") {
    lane l(self{}, {.timeout = 20s});
    host_queue q;
    int sum = 0;
    for (int i = 0; i < 3000; ++i) {
        auto t = l.submit(
            "add", [&sum](self&) { ++sum; }, q);
        if (i % 500 == 0) { std::this_thread::sleep_for(300us); }  // long enough for the worker to fall asleep
        t.wait(q);
    }
    CHECK(sum == 3000);
}

// Temporaries cannot be borrowed by work in flight.
static_assert(!std::constructible_from<view<float>, std::vector<float>>);
template <class C, class... Q>
concept submits_behind = requires(lane<C> l, void work(C&), Q&&... queue) {
    l.submit("x", work, queue()...);
};
static_assert(submits_behind<self, host_queue& (&)()> && !submits_behind<self, host_queue (&)()>);
static_assert(!std::copy_constructible<lane<self>> && std::movable<lane<self>>);
