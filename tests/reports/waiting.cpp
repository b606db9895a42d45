// Public bug reports on deadlines: ignored by some operations, and silent about who is missing. For ranks that are
// threads; those that are processes answer the same reports in comm/mpi_failures.cpp.
#include <atomic>      // who has finished
#include <chrono>      // deadlines
#include <functional>  // operations
#include <latch>       // starts
#include <string>      // texts
#include <thread>      // sleep
#include <vector>      // data

#include <tutti/comm/threads.hpp>  // under test

#include <doctest/doctest.h>  // checks

#include <support/failure.hpp>           // expect
#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace std::chrono_literals;
using comm::threads;
using test::expect;
using test::with_growing_timeouts;

namespace {

// Counts its scope's end.
struct ending {
    std::atomic<int>& count;
    ~ending() { ++count; }
};

struct waiting_call {
    std::string name;
    std::function<void(threads&)> call;
};

// Everything that waits, small and large, with the missing rank as partner or root where there is one.
std::vector<waiting_call> operations(int absent) {
    std::vector<waiting_call> all;
    for (const std::size_t count : {4u, 20000u}) {
        const auto add = [&](std::string name, auto call) {
            all.push_back({name + " of " + std::to_string(count), [call, count](threads& c) {
                               const auto n = static_cast<std::size_t>(c.size());
                               std::vector<float> part(count), whole(count * n), more(count * n);
                               std::vector<std::size_t> table(n, count);
                               call(c, view<float>(part), view<float>(whole), view<float>(more), table);
                           }});
        };
        using v = view<float>;
        using t = std::vector<std::size_t>&;
        add("all_reduce", [](threads& c, v part, v, v, t) { c.all_reduce(part, part, sum{}); });
        add("reduce", [=](threads& c, v part, v, v, t) { c.reduce(part, part, sum{}, absent); });
        add("reduce_scatter", [](threads& c, v part, v whole, v, t) { c.reduce_scatter(whole, part, sum{}); });
        add("reduce_scatter_v",
            [](threads& c, v part, v whole, v, t table) { c.reduce_scatter_v(whole, part, table, sum{}); });
        add("all_gather", [](threads& c, v part, v whole, v, t) { c.all_gather(part, whole); });
        add("all_gather_v", [](threads& c, v part, v whole, v, t table) { c.all_gather_v(part, whole, table); });
        add("broadcast", [=](threads& c, v part, v, v, t) { c.broadcast(part, absent); });
        add("gather", [](threads& c, v part, v whole, v, t) { c.gather(part, whole, 1); });
        add("scatter", [=](threads& c, v part, v whole, v, t) { c.scatter(whole, part, absent); });
        add("all_to_all", [](threads& c, v, v whole, v more, t) { c.all_to_all(whole, more); });
        add("all_to_all_v", [](threads& c, v, v whole, v more, t table) { c.all_to_all_v(whole, table, more, table); });
        add("exchange: receive",
            [=](threads& c, v part, v, v, t) { c.exchange(std::vector{comm::receive_from(absent, part)}); });
        add("exchange: send",
            [=](threads& c, v part, v, v, t) { c.exchange(std::vector{comm::send_to(absent, part)}); });
    }
    all.push_back({"barrier", [](threads& c) { c.barrier(); }});
    all.push_back({"agree", [](threads& c) { c.agree(1, "hash"); }});
    all.push_back({"duplicate", [](threads& c) { static_cast<void>(c.duplicate("child")); }});
    all.push_back({"split", [](threads& c) {
                       static_cast<void>(c.split(std::vector<int>(static_cast<std::size_t>(c.size()), 0), "child"));
                   }});
    return all;
}

}  // namespace

TEST_CASE("NVIDIA/nccl#1260: which ranks did not join?") {
    with_growing_timeouts([](duration timeout) {
        std::atomic<int> ended = 0;
        std::latch started(5);
        const auto run = [&](threads& c) {
            started.arrive_and_wait();
            if (c.rank() == 1 || c.rank() == 3) {  // alive, but elsewhere
                c.barrier();
                while (ended < 3) { std::this_thread::sleep_for(1ms); }
                return;
            }
            const ending end{ended};
            c.barrier();
            std::vector<float> v(10);
            c.all_reduce(v, view<float>(v), sum{});
        };
        try {
            threads::launch(5, run, {.name = "dp", .timeout = timeout});
        } catch (const timeout_error& e) {
            const std::string text = e.what();
            expect(e.missing() == std::vector<int>{1, 3}, "{}", text);
            expect(e.context().sequence == 2 && e.context().operation == "all_reduce", "{}", text);
            expect(text.starts_with(formatted("all_reduce: rank 1, 3 did not arrive within {} s, call 2 on 'dp', rank ",
                                              seconds(timeout))),
                   "{}", text);
            return;
        }
        expect(false, "nobody was missed");
    });
}

TEST_CASE("pytorch/pytorch#88000, pytorch/pytorch#97191, pytorch/pytorch#109611, pytorch/gloo#520: ignored timeouts") {
    constexpr int ranks = 3;
    for (const int absent : {0, 2}) {
        for (const waiting_call& op : operations(absent)) {
            for (const bool first_use : {true, false}) {
                CAPTURE(op.name);
                CAPTURE(absent);
                CAPTURE(first_use);
                const auto attempt = [&](duration timeout) {
                    std::atomic<int> ended = 0, timed_out = 0, aborted = 0;
                    std::latch started(ranks);  // a thread that a busy machine starts late would be missing too
                    const auto run = [&](threads& c) {
                        started.arrive_and_wait();
                        if (c.rank() == absent) {
                            if (!first_use) { c.barrier(); }
                            while (ended < ranks - 1) { std::this_thread::sleep_for(1ms); }
                            return;
                        }
                        const ending end{ended};
                        if (!first_use) { c.barrier(); }
                        const auto start = clock_type::now();
                        try {
                            op.call(c);
                        } catch (const timeout_error& e) {
                            ++timed_out;
                            if (e.missing() != std::vector<int>{absent}) { throw; }
                            expect(clock_type::now() - start >= timeout, "too early: {}", e.what());
                        } catch (const aborted_error& e) {  // the other one was first, and said why
                            ++aborted;
                            const std::string within = formatted("within {} s", seconds(timeout));
                            if (std::string(e.what()).find(within) == std::string::npos) { throw; }
                        }
                    };
                    threads::launch(ranks, run, {.name = "dp", .timeout = timeout});
                    expect(timed_out >= 1 && timed_out + aborted == ranks - 1, "{} timed out, {} were aborted",
                           timed_out.load(), aborted.load());
                };
                with_growing_timeouts(attempt, {100ms, 1s, 5s});
            }
        }
    }
}

// One deadline spans a call, however many ranks are late one after the other.
TEST_CASE("pytorch/pytorch#88000: ranks that trickle in do not stretch the deadline") {
    constexpr auto timeout = 200ms;
    std::atomic<bool> ended = false;
    const auto start = clock_type::now();
    CHECK_THROWS_AS(threads::launch(5,
                                    [&](threads& c) {
                                        if (c.rank() == 4) {
                                            struct ending {
                                                std::atomic<bool>& done;
                                                ~ending() { done = true; }
                                            } const end{ended};
                                            c.barrier();
                                            return;
                                        }
                                        // Rank r comes after r + 1 times 0.8 deadlines, unless the one that waits has
                                        // ended.
                                        const auto due = start + (c.rank() + 1) * timeout * 8 / 10;
                                        while (!ended && clock_type::now() < due) { std::this_thread::sleep_for(1ms); }
                                        if (!ended) { c.barrier(); }
                                    },
                                    {.name = "dp", .timeout = timeout}),
                    timeout_error);
}
