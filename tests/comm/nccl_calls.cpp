// comm::nccl as NCCL sees it: which calls in which order, what happens when one of them fails or never ends, who is
// aborted, what the host waits for. Over fakes of CUDA and NCCL.
#include <atomic>      // outcomes
#include <barrier>     // counts that no other rank disturbs
#include <chrono>      // deadlines
#include <functional>  // what a store does
#include <memory>      // stores
#include <optional>    // a communicator's end
#include <string>      // texts
#include <thread>      // aborts from elsewhere
#include <vector>      // logs

#include <doctest/doctest.h>

#include <tutti/comm/nccl.hpp>      // under test
#include <tutti/core/buffer.hpp>    // device memory
#include <tutti/schedule/lane.hpp>  // lanes

#include <support/fake_cuda.hpp>         // counts of waits
#include <support/fake_nccl.hpp>         // log, failures
#include <support/growing_timeouts.hpp>  // deadlines that one rank alone misses
#include <support/soon.hpp>              // bounded waits

using namespace tutti;
using namespace std::chrono_literals;
using comm::nccl;
using test::soon;
using test::until_failed;
namespace fake = tutti::test::fake_nccl;
namespace cuda = tutti::test::fake_cuda;

namespace {

using device_buffer = buffer<float, cuda_queue>;

struct fixture {
    std::size_t left_behind = 0;  // by starts that failed: NCCL has no way to end one that waits for a rank
    std::size_t live = 0;         // before the test, or its last attempt
    int attempts = 0;

    fixture() { begin(); }
    void begin() {
        fake::reset();
        cuda::reset();
        live = fake::live_communicators();
    }
    // attempt(timeout) begins like a test, and says by an exception what is wrong.
    template <class Attempt> void with_growing_timeouts(Attempt attempt) {
        tutti::test::with_growing_timeouts([&](duration timeout) {
            begin();
            ++attempts;
            attempt(timeout);
        });
    }
    ~fixture() {
        for (const std::string& p : fake::problems()) { FAIL_CHECK(p); }
        // NCCL may still be at a start that an attempt before gave up.
        if (attempts < 2) { CHECK(fake::live_communicators() == live + left_behind); }
        CHECK(fake::calls("ncclGroupStart") == fake::calls("ncclGroupEnd"));
    }
};

void expect(bool holds, const std::string& text) {
    if (!holds) { throw std::logic_error(text); }
}
template <class Holds> void await(Holds holds, const std::string& text) { expect(soon(holds), text); }
template <class E, class Work> E thrown(Work work) {
    try {
        work();
    } catch (const E& e) { return e; }
    throw std::logic_error("nothing was thrown");
}
bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// The calls that rank 0 makes in work(comm), without those of start and end: "function:bytes".
template <class Work> std::vector<std::string> calls_of(int ranks, Work work) {
    std::vector<std::string> seen;
    nccl::launch(ranks, [&](nccl& c) {
        c.agree(1, "everybody is here");
        const std::size_t before = fake::log().size();
        work(c);
        c.synchronize();
        if (c.rank() != 0) { return; }
        const auto log = fake::log();
        const std::thread::id me = std::this_thread::get_id();
        for (std::size_t i = before; i < log.size(); ++i) {
            if (log[i].thread != me) { continue; }
            expect(log[i].communicator == 0 || log[i].stream == c.queue().stream(), "another stream");
            seen.push_back(log[i].function.substr(4) + (log[i].bytes == 0 ? "" : ":" + std::to_string(log[i].bytes)));
        }
    });
    return seen;
}
using words = std::vector<std::string>;

}  // namespace

TEST_CASE_FIXTURE(fixture, "each collective is the NCCL calls that it says") {
    const auto with = [](auto use) {
        return calls_of(2, [&](nccl& c) {
            const device_buffer in(c.queue(), 8);
            const device_buffer out(c.queue(), 8);
            use(c, view<const float, device_memory>(in.view()), out.view());
        });
    };
    CHECK(with([](nccl& c, auto in, auto out) { c.all_reduce(in, out, mean{}); }) == words{"AllReduce:32"});
    CHECK(with([](nccl& c, auto in, auto out) { c.all_reduce(in.sub(0, 0), out.sub(0, 0), sum{}); }).empty());
    CHECK(with([](nccl& c, auto in, auto out) { c.reduce_scatter(in, out.sub(0, 4), sum{}); }) ==
          words{"ReduceScatter:16"});
    CHECK(with([](nccl& c, auto in, auto out) { c.all_gather(in.sub(0, 4), out); }) == words{"AllGather:16"});
    CHECK(with([](nccl& c, auto, auto out) { c.broadcast(out, 1); }) == words{"Broadcast:32"});
    CHECK(with([](nccl& c, auto in, auto out) { c.reduce(in, out, max{}, 1); }) == words{"Reduce:32"});
    CHECK(with([](nccl& c, auto, auto) { c.barrier(); }) == words{"AllReduce:1"});
    CHECK(with([](nccl& c, auto in, auto out) { c.all_to_all(in, out); }) ==
          words{"GroupStart", "Send:16", "Recv:16", "Send:16", "Recv:16", "GroupEnd"});
    CHECK(with([](nccl& c, auto in, auto out) { c.gather(in.sub(0, 4), out, 0); }) ==
          words{"GroupStart", "Send:16", "Recv:16", "Recv:16", "GroupEnd"});
    CHECK(with([](nccl& c, auto in, auto out) {
              c.gather(c.rank() == 0 ? view<const float, device_memory>(out.sub(0, 4)) : in.sub(0, 4), out, 0);
          }) == words{"GroupStart", "Recv:16", "GroupEnd"});
    CHECK(with([](nccl& c, auto in, auto out) { c.scatter(in, out.sub(0, 4), 1); }) ==
          words{"GroupStart", "Recv:16", "GroupEnd"});
    CHECK(calls_of(1,
                   [](nccl& c) {  // alone: copies
                       const device_buffer b(c.queue(), 8);
                       c.all_reduce(b.view(), b.view(), mean{});
                       c.all_to_all(b.view().sub(0, 4), b.view().sub(4, 4));
                   })
              .empty());
    const std::vector<std::size_t> uneven{5, 0};
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.all_gather_v(in.sub(0, uneven[static_cast<std::size_t>(c.rank())]), out.sub(0, 5), uneven);
          }) == words{"GroupStart", "Broadcast:20", "GroupEnd"});
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.reduce_scatter_v(in.sub(0, 5), out.sub(0, uneven[static_cast<std::size_t>(c.rank())]), uneven, sum{});
          }) == words{"GroupStart", "Reduce:20", "GroupEnd"});
    for (const auto& table : {std::vector<std::size_t>{4, 3}, {3, 4}, {4, 4}}) {
        CAPTURE(table[0]);
        const std::size_t all = table[0] + table[1];
        CHECK(with([&](nccl& c, auto in, auto out) {
                  c.all_gather_v(in.sub(0, table[static_cast<std::size_t>(c.rank())]), out.sub(0, all), table);
              }) == words{"AllGather:16"});
        CHECK(with([&](nccl& c, auto in, auto out) {
                  c.reduce_scatter_v(in.sub(0, all), out.sub(0, table[static_cast<std::size_t>(c.rank())]), table,
                                     mean{});
              }) == words{"ReduceScatter:16"});
    }
    const std::vector<std::size_t> too_uneven{5, 2};  // 10 are more than a quarter over 7
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.all_gather_v(in.sub(0, too_uneven[static_cast<std::size_t>(c.rank())]), out.sub(0, 7), too_uneven);
          }) == words{"GroupStart", "Broadcast:20", "Broadcast:8", "GroupEnd"});
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.reduce_scatter_v(in.sub(0, 7), out.sub(0, too_uneven[static_cast<std::size_t>(c.rank())]), too_uneven,
                                 sum{});
          }) == words{"GroupStart", "Reduce:20", "Reduce:8", "GroupEnd"});
    CHECK(with([](nccl& c, auto in, auto out) {
              const int peer = 1 - c.rank();
              c.exchange(std::vector{comm::send_to(peer, in.sub(0, 3)), comm::receive_from(peer, out.sub(0, 3)),
                                     comm::send_to(c.rank(), in.sub(4, 1)),
                                     comm::receive_from(c.rank(), out.sub(4, 1))});
          }) == words{"GroupStart", "Send:12", "Recv:12", "GroupEnd"});
}

TEST_CASE_FIXTURE(fixture, "nearly equal parts go through scratch that goes back, with as few copies as can be") {
    std::barrier together(2);  // counters are those of all ranks
    nccl::launch(2, [&](nccl& c) {
        const std::vector<std::size_t> table{40, 36};
        const auto me = static_cast<std::size_t>(c.rank());
        const std::size_t first = me == 0 ? 0 : table[0];
        const device_buffer whole(c.queue(), 76);
        const device_buffer other(c.queue(), 76);
        const auto part = whole.view().sub(first, table[me]);
        const std::size_t held = c.queue().account().live();
        const auto copies_of = [&](auto use) {
            c.synchronize();
            together.arrive_and_wait();
            const std::size_t before = cuda::calls("cudaMemcpyAsync");
            together.arrive_and_wait();
            use();
            together.arrive_and_wait();
            const std::size_t made = cuda::calls("cudaMemcpyAsync") - before;
            together.arrive_and_wait();
            expect(c.queue().account().live() == held, "scratch was kept");
            return made;
        };
        // Both parts into the scratch on both ranks, and the shorter one out of it.
        expect(copies_of([&] { c.reduce_scatter_v(whole.view(), other.view().sub(0, table[me]), table, sum{}); }) == 5,
               "reduce_scatter_v");
        expect(copies_of([&] { c.reduce_scatter_v(whole.view(), part, table, sum{}); }) == 5, "the same in place");
        // The shorter part into the scratch, all parts to their places; in place but one's own.
        expect(copies_of([&] { c.all_gather_v(other.view().sub(0, table[me]), whole.view(), table); }) == 5,
               "all_gather_v");
        expect(copies_of([&] { c.all_gather_v(part, whole.view(), table); }) == 3, "the same in place");
        const std::vector<std::size_t> equal{38, 38};
        const auto equal_part = whole.view().sub(38 * me, 38);
        expect(copies_of([&] {
                   c.reduce_scatter_v(whole.view(), equal_part, equal, sum{});
                   c.all_gather_v(equal_part, whole.view(), equal);
               }) == 0,
               "equal parts are copied");
    });
}

TEST_CASE_FIXTURE(fixture, "nearly equal parts that are captured need no scratch, which a graph would keep") {
    CHECK(calls_of(2,
                   [](nccl& c) {
                       const std::vector<std::size_t> table{4, 3};
                       const auto me = static_cast<std::size_t>(c.rank());
                       const device_buffer b(c.queue(), 7);
                       const auto part = b.view().sub(me == 0 ? 0 : 4, table[me]);
                       const cudaStream_t stream = c.queue().stream();
                       cudaGraph_t graph = nullptr;
                       tutti::detail::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                                 "begin");
                       c.reduce_scatter_v(b.view(), part, table, sum{});
                       c.all_gather_v(part, b.view(), table);
                       tutti::detail::check_cuda(cudaStreamEndCapture(stream, &graph), "end");
                       tutti::detail::check_cuda(cudaGraphDestroy(graph), "destroy");
                   }) == words{"GroupStart", "Reduce:16", "Reduce:12", "GroupEnd", "GroupStart", "Broadcast:16",
                               "Broadcast:12", "GroupEnd"});
}

TEST_CASE_FIXTURE(fixture, "a start that fails on one rank fails on all, with its cause") {
    // Rank 0 asks NCCL first: so it is sure to be left behind there.
    const auto plan = [&] {
        const std::size_t asked = fake::calls("ncclCommInitRank") + 1;
        fake::before("ncclCommInitRank", 1,
                     [=] { static_cast<void>(soon([=] { return fake::calls("ncclCommInitRank") == asked; })); },
                     {.rank = 1});
        fake::fail("ncclCommInitRank", 1, ncclSystemError, {.rank = 1});
        ++left_behind;
    };
    plan();
    std::atomic<int> told = 0;
    CHECK_THROWS_AS(nccl::launch(2, [](nccl&) {}, {.timeout = 20s}), backend_error);
    plan();
    comm::threads::launch(2, [&](comm::threads& world) {
        try {
            const nccl c = nccl::over(world, cuda_queue(world.rank()), {.timeout = 20s});
        } catch (const backend_error& e) {
            told += contains(e.what(), "nccl: ncclCommInitRank failed: ") && world.rank() == 1 ? 1 : 0;
            expect(e.context().backend_code == ncclSystemError, "NCCL's code");
        } catch (const aborted_error& e) {
            told += contains(e.what(), "rank 1: nccl: ncclCommInitRank failed") && world.rank() == 0 ? 1 : 0;
        }
    });
    CHECK(told == 2);
    CHECK(soon([&] { return fake::live_communicators() == live + left_behind; }));
}

TEST_CASE_FIXTURE(fixture, "a call that fails inside a group ends the group and the family") {
    std::atomic<int> told = 0;
    nccl::launch(3, [&](nccl& c) {
        const device_buffer b(c.queue(), 6);
        const device_buffer d(c.queue(), 6);
        try {
            c.barrier();
            c.synchronize();  // who comes out of it last may hear of the failure here
            if (c.rank() == 2) { fake::fail("ncclRecv", 2, ncclInternalError, {.rank = 2}); }
            c.all_to_all(b.view(), d.view());
            until_failed(c);
        } catch (const backend_error& e) {
            expect(c.rank() == 2 && contains(e.what(), "all_to_all: ncclRecv failed: "), e.what());
            ++told;
        } catch (const aborted_error& e) {
            expect(contains(e.what(), "rank 2: all_to_all: ncclRecv failed: "), e.what());
            ++told;
        }
    });
    CHECK(told == 3);
}

TEST_CASE_FIXTURE(fixture, "an asynchronous error is heard by all, without another call") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        nccl::launch(3,
                     [&](nccl& c) {
                         const device_buffer b(c.queue(), 6);
                         if (c.rank() == 1) { fake::async_error(3, ncclRemoteError, {.rank = 1}); }
                         try {
                             c.agree(1, "planned");  // the first operation from now
                             for (int i = 0; i < 2; ++i) { c.all_reduce(b.view(), b.view(), sum{}); }
                             until_failed(c);
                         } catch (const aborted_error& e) {
                             expect(contains(e.what(), "rank 1: all_reduce: asynchronous work failed"), e.what());
                             ++told;
                         }
                     },
                     {.timeout = timeout});
        expect(told == 3, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "a connection that is lost is traced to the rank that does not answer") {
    // Rank 2 is gone; what NCCL knows of that is an error of its own, found by the watchdog or by the next call.
    bool by_a_call = false;
    SUBCASE("by the watchdog") {}
    SUBCASE("by a call") { by_a_call = true; }
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        nccl::launch(3,
                     [&](nccl& c) {
                         const device_buffer b(c.queue(), 6);
                         try {
                             c.agree(1, "planned");
                             if (c.rank() == 2) { return; }
                             // Rank 2's watchdog would answer.
                             await([&] { return fake::live_communicators() <= live + 2; },
                                   "a communicator that was left lives");
                             if (c.rank() == 0 && by_a_call) {
                                 fake::fail("ncclAllReduce", 1, ncclRemoteError, {.rank = 0});
                             }
                             if (c.rank() == 0 && !by_a_call) { fake::async_error(1, ncclRemoteError, {.rank = 0}); }
                             c.all_reduce(b.view(), b.view(), sum{});  // one: a call behind it would find the error too
                             until_failed(c);
                         } catch (const aborted_error& e) {
                             expect(contains(e.what(), "rank 0: rank 2 does not answer: all_reduce: "), e.what());
                             ++told;
                         }
                     },
                     {.timeout = timeout});
        expect(told == 2, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "an operation that never completes though all ranks came") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        const auto e = thrown<timeout_error>([&] {
            nccl::launch(2,
                         [&](nccl& c) {
                             const device_buffer b(c.queue(), 6);
                             if (c.rank() == 0) { fake::stall(2, {.rank = 0}); }
                             c.agree(1, "planned");
                             try {
                                 c.all_reduce(b.view(), b.view(), sum{});
                                 c.synchronize();
                             } catch (const error&) {
                                 ++told;
                                 throw;
                             }
                         },
                         {.timeout = timeout});
        });
        expect(contains(e.what(), formatted("all_reduce: all ranks are there, but it did not complete within {:.3g} s",
                                            seconds(timeout))),
               e.what());
        expect(told == 2, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "an abort is one ncclCommAbort for every communicator of the family on every rank") {
    std::size_t made = 0;
    std::barrier together(4);
    nccl::launch(4, [&](nccl& c) {
        auto lane = c.duplicate("lane");
        const std::vector<int> parity{0, 1, 0, 1};
        auto part = c.split(parity, "part");
        c.agree(1, "here");
        if (c.rank() == 0) { made = fake::live_communicators(); }
        c.agree(2, "counted");
        const device_buffer b(c.queue(), 100);
        // Work is in flight on all of them, and one rank does not take part.
        if (c.rank() != 3) {
            c.all_reduce(b.view(), b.view(), sum{});
            lane.all_reduce(b.view(), b.view(), sum{});
        }
        together.arrive_and_wait();
        if (c.rank() == 1) { c.abort("enough"); }
        try {
            until_failed(*part);
        } catch (const aborted_error& e) { expect(contains(e.what(), "rank 1: enough"), e.what()); }
    });
    CHECK(made > 0);
    CHECK(fake::calls("ncclCommAbort") == 4 * 3);
    CHECK(fake::calls("ncclCommDestroy") == 0);
}

TEST_CASE_FIXTURE(fixture, "a communicator may end while the device of another thread's rank waits for this one") {
    std::atomic<bool> waiting{false};
    std::barrier together(2);  // a rank's family may end before another rank has counted
    nccl::launch(2,
                 [&](nccl& c) {
                     std::optional<nccl> child = c.duplicate("child");
                     const buffer<float, pinned_queue> loss(pinned_queue(), 1);
                     child->barrier();
                     child->synchronize();
                     if (c.rank() == 1) {
                         c.barrier();  // rank 0 takes part when its child, and what it had, are no more
                         waiting = true;
                     } else {
                         while (!waiting) { std::this_thread::sleep_for(1ms); }
                     }
                     child.reset();
                     { const buffer<float, pinned_queue> scalar(pinned_queue(), 1); }
                     const bool kept = fake::calls("ncclCommDestroy") == 0;
                     together.arrive_and_wait();
                     expect(kept, "destroyed before the family's end");
                     if (c.rank() == 0) { c.barrier(); }
                     c.synchronize();
                 },
                 {.timeout = 30s});
    CHECK(fake::calls("ncclCommDestroy") == 2 * 2);
    CHECK(fake::calls("ncclCommAbort") == 0);
}

TEST_CASE_FIXTURE(fixture, "handles that are kept until a family ends are aborted when it fails") {
    nccl::launch(2, [](nccl& c) {
        { const nccl child = c.duplicate("child"); }
        try {
            c.agree(1, "child ended");
            if (c.rank() == 0) { c.abort("enough"); }
            until_failed(c);
        } catch (const aborted_error&) {}
    });
    CHECK(fake::calls("ncclCommAbort") == 2 * 2);
    CHECK(fake::calls("ncclCommDestroy") == 0);
}

TEST_CASE_FIXTURE(fixture, "the steady state of lanes has no host wait, and orders launches by events") {
    std::barrier together(2);  // counters are those of all ranks: nobody waits while another counts
    nccl::launch(2, [&](nccl& c) {
        schedule::lane<nccl> lane(c.duplicate("lane"));
        cuda_queue q = c.queue();
        const device_buffer a(q, 100);
        const device_buffer b(q, 100);
        const auto round = [&] {
            const view<float, device_memory> v = a.view();
            auto t = lane.submit(
                "sum", [v](nccl& on) { on.all_reduce(v, v, max{}); }, q);
            c.all_reduce(b.view(), b.view(), max{});
            t.wait(q);
        };
        round();
        c.synchronize();
        lane.drain();
        c.agree(1, "warm");
        together.arrive_and_wait();
        // A watchdog looks at an event a communicator, rank and 20 ms, which counts too.
        const auto begin = clock_type::now();
        const std::size_t waits = cuda::host_waits();
        const std::size_t orders = cuda::calls("cudaStreamWaitEvent");
        together.arrive_and_wait();
        for (int i = 0; i < 500; ++i) { round(); }
        together.arrive_and_wait();
        const std::size_t waited = cuda::host_waits() - waits;
        const std::size_t ordered = cuda::calls("cudaStreamWaitEvent") - orders;
        const double looks = 8 * (seconds(clock_type::now() - begin) / 0.02 + 2);
        together.arrive_and_wait();
        expect(static_cast<double>(waited) <= looks, std::to_string(waited) + " host waits in 500 rounds");
        // A rank and round: the lane behind the main queue, that behind the lane, and either launch behind the other.
        expect(ordered >= 4 * 2 * 500 - 4, std::to_string(ordered) + " waits order 500 rounds");
        c.synchronize();
    });
}

TEST_CASE_FIXTURE(fixture, "devices that run one collective at a time do not deadlock, whatever is late") {
    fake::exclusive_device(true);
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
        cuda::delay(seed, 200us);
        nccl::launch(4, [&](nccl& c) {
            schedule::lane<nccl> first(c.duplicate("first"));
            schedule::lane<nccl> second(c.duplicate("second"));
            cuda_queue q = c.queue();
            const device_buffer b(q, 64);
            const view<float, device_memory> v = b.view();
            for (int i = 0; i < 25; ++i) {
                std::this_thread::sleep_for(std::chrono::microseconds((c.rank() * 7 + i * 13) % 90));
                auto s = first.submit(
                    "a", [v](nccl& on) { on.all_reduce(v.sub(0, 20), v.sub(0, 20), max{}); }, q);
                c.all_reduce(v.sub(20, 20), v.sub(20, 20), max{});
                auto t = second.submit(
                    "b", [v](nccl& on) { on.all_reduce(v.sub(40, 20), v.sub(40, 20), max{}); }, q);
                s.wait(q);
                t.wait(q);
            }
            c.synchronize();
        });
    }
}

TEST_CASE_FIXTURE(fixture, "a communicator left by an exception, with nobody to say more, fails its family") {
    std::atomic<int> told = 0;
    comm::threads::launch(2, [&](comm::threads& world) {
        const auto work = [&] {
            nccl c = nccl::over(world, cuda_queue(world.rank()));
            const device_buffer b(c.queue(), 10);
            c.all_reduce(b.view(), b.view(), max{});
            c.synchronize();
            if (world.rank() == 1) { throw std::domain_error("lost"); }
            c.all_reduce(b.view(), b.view(), max{});
            c.synchronize();
        };
        try {
            work();
        } catch (const std::domain_error&) { ++told; } catch (const aborted_error& e) {
            told += contains(e.what(), "rank 1: 'world' was left by an exception") ? 1 : 0;
        }
    });
    CHECK(told == 2);
}

namespace {

// A store that is slow to answer a watchdog, or has broken down.
class odd_store {
    comm::memory_store inner_;

public:
    std::atomic<int> slow_ms = 0;
    std::atomic<bool> broken = false;
    std::atomic<bool> breaks_at_fail = false;
    std::function<void()> asked = [] {};  // for a failure

    void set(std::string_view key, std::span<const std::byte> value) { inner_.set(key, value); }
    std::vector<std::byte> get(std::string_view key, deadline limit) { return inner_.get(key, limit); }
    std::optional<std::vector<std::byte>> find(std::string_view key) { return inner_.find(key); }
    void forget(std::string_view key) { inner_.forget(key); }
    void arrive(std::string_view key, int rank) { inner_.arrive(key, rank); }
    void leave(std::string_view key, int rank) { inner_.leave(key, rank); }
    std::vector<int> missing(std::string_view key, int ranks) { return inner_.missing(key, ranks); }
    void wait_for_all(std::string_view key, int ranks, deadline limit) { inner_.wait_for_all(key, ranks, limit); }
    void fail(std::string_view key, int rank, std::string_view why) {
        if (breaks_at_fail) { broken = true; }
        if (broken) { throw std::runtime_error("the disk is gone"); }
        inner_.fail(key, rank, why);
    }
    std::optional<std::string> failure(std::string_view key) {
        std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
        asked();
        if (broken) { throw std::runtime_error("the disk is gone"); }
        return inner_.failure(key);
    }
};

}  // namespace

TEST_CASE_FIXTURE(fixture, "a communicator that is made while its family fails is aborted with it") {
    for (int i = 0; i < 40; ++i) {
        nccl c(std::make_shared<comm::memory_store>(), 0, 1, cuda_queue(0));
        std::vector<nccl> children;
        std::thread other([&, i] {
            std::this_thread::sleep_for(std::chrono::microseconds(300 + 37 * i));
            c.abort("enough");
        });
        CHECK_THROWS_AS(
            [&] {
                while (children.size() < 50) { children.push_back(c.duplicate("child")); }  // each has threads
                for (;;) { c.synchronize(); }
            }(),
            aborted_error);
        other.join();
        for (const nccl& child : children) { CHECK(child.native_handle() == nullptr); }
    }
}

TEST_CASE_FIXTURE(fixture, "a communicator that comes to its family during the abort, or behind it, is aborted") {
    const auto channel_of = [](std::uint64_t id) {
        const int device = 0;
        ncclComm_t raw = nullptr;
        REQUIRE(ncclCommInitAll(&raw, 1, &device) == ncclSuccess);
        auto c = std::make_shared<comm::detail::nccl_channel>(cuda_queue(device), "c", 0, std::vector{0}, id);
        c->comm.store(raw);
        return c;
    };
    const auto abort_with = [&](auto between) {
        const std::size_t aborts = fake::calls("ncclCommAbort");
        const auto early = channel_of(0);
        const auto late = channel_of(1);
        const auto family = std::make_shared<comm::detail::nccl_family>(nullptr, "family", 0, 1, 0, 10s);
        family->add(early);
        between(*family, *early, late);
        CHECK_THROWS_AS(family->raise({}), aborted_error);
        CHECK(early->comm.load() == nullptr);
        CHECK(late->comm.load() == nullptr);
        for (const auto& c : {early, late}) { family->close(c, false); }
        CHECK(fake::calls("ncclCommAbort") == aborts + 2);
    };
    bool judged = false;
    for (int attempt = 0; attempt < 5 && !judged; ++attempt) {
        abort_with([&](auto& family, auto& early, auto& late) {
            const std::lock_guard inside(early.in_use);  // a call, which the abort lets end
            const deadline begin = clock_type::now();
            family.poison("enough");
            std::this_thread::sleep_for(400ms);
            const bool kept = early.comm.load() != nullptr;
            // A thread that was not woken for longer than the abort waits is as good as one that hangs.
            judged = clock_type::now() - begin < comm::detail::longest_call;
            if (judged) { CHECK(kept); }
            family.add(late);
        });
    }
    CHECK(judged);
    abort_with([&](auto& family, auto& early, auto& late) {
        family.poison("enough");
        CHECK_THROWS_AS(family.raise({}), aborted_error);  // behind the abort
        CHECK(early.comm.load() == nullptr);
        family.add(late);
    });
}

TEST_CASE_FIXTURE(fixture, "a rank that cannot have its memory does not leave the others waiting") {
    for (const bool at_start : {true, false}) {
        CAPTURE(at_start);
        const auto begin = clock_type::now();
        std::atomic<int> told = 0;
        comm::threads::launch(2, [&](comm::threads& world) {
            const auto work = [&] {
                if (at_start && world.rank() == 0) {
                    cuda::fail("cudaMallocFromPoolAsync", 1, cudaErrorMemoryAllocation);
                }
                world.barrier();
                nccl c = nccl::over(world, cuda_queue(world.rank()));
                if (world.rank() == 0) { cuda::fail("cudaMallocFromPoolAsync", 1, cudaErrorMemoryAllocation); }
                world.barrier();
                nccl lane = c.duplicate("lane");
                lane.barrier();
                lane.synchronize();
            };
            try {
                work();
            } catch (const backend_error& e) {
                told += contains(e.what(), "cudaMallocFromPoolAsync") ? 1 : 0;
            } catch (const aborted_error& e) { told += contains(e.what(), "cudaMallocFromPoolAsync") ? 10 : 0; }
        });
        CHECK(told == 11);
        CHECK(clock_type::now() - begin < 20s);
        CHECK(soon(
            [&] { return fake::live_communicators() == live; }));  // rank 1 does not wait for NCCL when it hears of it
    }
}

TEST_CASE_FIXTURE(fixture, "a destructor that meets the timeout leaves timeout_error to a caller") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> timeouts = 0;
        std::atomic<int> told = 0;
        nccl::launch(2,
                     [&](nccl& c) {
                         const device_buffer b(c.queue(), 10);
                         {
                             const std::vector<int> colors{0, 0};
                             auto lane = c.split(colors, "lane");
                             if (c.rank() == 0) { lane->all_reduce(b.view(), b.view(), max{}); }
                             if (c.rank() == 1) {
                                 await([&] { return c.native_handle() == nullptr; }, "nothing was aborted");
                             }
                         }
                         try {
                             c.barrier();
                         } catch (const timeout_error& e) {
                             expect(c.rank() == 0 && e.missing() == std::vector{1}, e.what());
                             expect(e.context().communicator == "world/lane", e.context().communicator);
                             ++timeouts;
                         } catch (const aborted_error&) { ++told; }
                     },
                     {.timeout = timeout});
        expect(timeouts == 1 && told == 1, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "missing ranks are those of the communicator that hangs, and not who is merely slower") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        nccl::launch(4,
                     [&](nccl& c) {
                         const std::vector<int> colors{-1, 0, 0, 0};
                         auto part = c.split(colors, "part");
                         const device_buffer b(c.queue(), 10);
                         const auto reduce = [&](int times) {
                             for (int i = 0; i < times; ++i) { part->all_reduce(b.view(), b.view(), max{}); }
                         };
                         try {
                             if (c.rank() == 1) {
                                 reduce(1);
                                 std::this_thread::sleep_for(timeout / 4);  // the watchdog has put its event behind it
                                 reduce(20);
                             }
                             if (c.rank() == 2) {  // the world's 3 is the part's 2
                                 std::this_thread::sleep_for(timeout / 2);
                                 reduce(5);
                             }
                             until_failed(c);
                         } catch (const timeout_error& e) {
                             expect(e.missing() == std::vector{2}, e.what());
                             expect(e.context().communicator == "world/part", "its communicator");
                             expect(contains(e.what(), "all_reduce: rank 2 did not arrive") &&
                                        contains(e.what(), "'world/part'"),
                                    e.what());
                             ++told;
                         } catch (const aborted_error& e) {
                             expect(contains(e.what(), "all_reduce: rank 2 did not arrive"), e.what());
                             ++told;
                         }
                     },
                     {.timeout = timeout});
        expect(told == 4, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "a capture between two communicators' calls does not undo their order") {
    nccl::launch(1, [](nccl& c) {
        nccl lane = c.duplicate("lane");
        const device_buffer b(c.queue(), 10);
        const auto waits_of = [&](nccl& on) {
            const std::size_t before = cuda::calls("cudaStreamWaitEvent");
            on.all_reduce(b.view(), b.view(), max{});
            return cuda::calls("cudaStreamWaitEvent") - before;
        };
        static_cast<void>(waits_of(c));
        expect(waits_of(c) == 0, "one stream is in order by itself");
        cudaGraph_t graph = nullptr;
        const cudaStream_t stream = c.queue().stream();
        tutti::detail::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
        expect(waits_of(c) == 0, "an event of before the capture");
        tutti::detail::check_cuda(cudaStreamEndCapture(stream, &graph), "end");
        tutti::detail::check_cuda(cudaGraphDestroy(graph), "destroy");
        expect(waits_of(lane) == 1, "behind the call before the capture");
        lane.synchronize();
        const cudaStream_t other = lane.queue().stream();
        tutti::detail::check_cuda(cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal), "begin");
        expect(waits_of(lane) == 0, "an event of another capture");
        tutti::detail::check_cuda(cudaStreamEndCapture(other, &graph), "end");
        tutti::detail::check_cuda(cudaGraphDestroy(graph), "destroy");
        lane.synchronize();
    });
}

TEST_CASE_FIXTURE(fixture, "a graph whose replay never ends fails the family, on all ranks") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        nccl::launch(2,
                     [&](nccl& c) {
                         const device_buffer b(c.queue(), 10);
                         const cudaStream_t stream = c.queue().stream();
                         cudaGraph_t graph = nullptr;
                         cudaGraphExec_t ready = nullptr;
                         tutti::detail::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                                   "begin");
                         c.all_reduce(b.view(), b.view(), max{});
                         tutti::detail::check_cuda(cudaStreamEndCapture(stream, &graph), "end");
                         tutti::detail::check_cuda(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
                         // To the watchdog the calls of the capture have come to an end.
                         std::this_thread::sleep_for(timeout / 3);
                         try {
                             if (c.rank() == 0) { tutti::detail::check_cuda(cudaGraphLaunch(ready, stream), "launch"); }
                             until_failed(c);
                         } catch (const timeout_error& e) {
                             expect(c.rank() == 0 && contains(e.what(), "event: the stream did not"), e.what());
                             told += 1;
                         } catch (const aborted_error& e) {
                             expect(c.rank() == 1 && contains(e.what(), "rank 0: event: the stream did not"), e.what());
                             told += 10;
                         }
                         try {
                             c.barrier();
                             expect(false, "a failed family works");
                         } catch (const aborted_error&) {}
                         tutti::detail::check_cuda(cudaGraphExecDestroy(ready), "destroy");
                         tutti::detail::check_cuda(cudaGraphDestroy(graph), "destroy");
                     },
                     {.timeout = timeout});
        expect(told == 11, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "the caller's stream may end with its communicator, whatever the watchdog is about to do") {
    const auto meeting = std::make_shared<odd_store>();
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    auto first = std::make_unique<nccl>(meeting, 0, 1, cuda_queue(stream));
    nccl lane = first->duplicate("lane");
    meeting->slow_ms = 30;
    std::this_thread::sleep_for(100ms);  // the watchdog is always inside the store now
    first->barrier();
    first.reset();
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
    std::this_thread::sleep_for(100ms);
    lane.barrier();
    CHECK_NOTHROW(lane.synchronize());
}

TEST_CASE_FIXTURE(fixture, "a store that breaks down is a cause, and does not keep the family from ending") {
    const auto meeting = std::make_shared<odd_store>();
    nccl c(meeting, 0, 1, cuda_queue(0));
    meeting->broken = true;
    const auto e = thrown<aborted_error>([&] { until_failed(c); });
    CHECK(contains(e.what(), "rank 0: the disk is gone"));
    CHECK(c.native_handle() == nullptr);

    const auto slow = std::make_shared<odd_store>();
    nccl d(slow, 0, 1, cuda_queue(0));
    slow->slow_ms = 30;
    std::this_thread::sleep_for(50ms);
    slow->breaks_at_fail = true;  // the watchdog finds it broken behind the cause
    d.abort("enough");
    CHECK(contains(thrown<aborted_error>([&] { d.barrier(); }).what(), "rank 0: enough"));
    CHECK(d.native_handle() == nullptr);
}

TEST_CASE_FIXTURE(fixture, "an exception has a tenth of a second to say what happened") {
    struct slow {
        ~slow() { std::this_thread::sleep_for(60ms); }
    };
    std::atomic<int> told = 0;
    // A thread that stands still may miss the tenth of a second, but not always.
    for (int attempt = 0; told == 0 && attempt < 5; ++attempt) {
        CHECK_THROWS_AS(nccl::launch(2,
                                     [&](nccl& c) {
                                         const slow last;  // unwound after the communicator
                                         nccl own = std::move(c);
                                         try {
                                             if (own.rank() == 0) {
                                                 own.barrier();
                                                 own.synchronize();
                                             }
                                         } catch (const aborted_error& e) {
                                             told += contains(e.what(), "rank 1: no such token") ? 1 : 0;
                                             throw;
                                         }
                                         throw std::domain_error("no such token");
                                     }),
                        std::domain_error);
    }
    CHECK(told == 1);
}

TEST_CASE_FIXTURE(fixture, "a communicator left by an exception fails what is left of its family") {
    nccl c(std::make_shared<comm::memory_store>(), 0, 1, cuda_queue(0), {.timeout = 10s});
    CHECK_THROWS_AS(
        [&] {
            const nccl inner = c.duplicate("inner");
            throw std::domain_error("lost");
        }(),
        std::domain_error);
    const auto e = thrown<aborted_error>([&] { until_failed(c); });
    CHECK(contains(e.what(), "rank 0: 'world/inner' was left by an exception"));
}

TEST_CASE_FIXTURE(fixture, "a communicator left by an exception is aborted when its family ends before it has failed") {
    // A tenth of a second later it has failed: that is another test, and this one is tried again.
    bool too_late = true;
    for (int attempt = 0; too_late && attempt < 10; ++attempt) {
        begin();
        const deadline limit = after(100ms);
        {
            nccl c(std::make_shared<comm::memory_store>(), 0, 1, cuda_queue(0));
            CHECK_THROWS_AS(
                [&] {
                    const nccl inner = c.duplicate("inner");
                    throw std::domain_error("lost");
                }(),
                std::domain_error);
        }
        too_late = fake::calls("ncclCommAbort") == 2 && clock_type::now() >= limit;
    }
    CHECK(fake::calls("ncclCommAbort") == 1);
    CHECK(fake::calls("ncclCommDestroy") == 1);
}

TEST_CASE_FIXTURE(fixture, "NCCL's own start has a deadline") {
    const auto meeting = std::make_shared<comm::memory_store>();
    meeting->arrive("half", 1);  // and then never asks NCCL
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 2, cuda_queue(0), {.name = "half", .timeout = 200ms}),
                         doctest::Contains("all ranks came, but ncclCommInitRank did not return within 0.2 s"),
                         timeout_error);
    left_behind = 1;
    CHECK(soon([&] { return fake::live_communicators() >= live + left_behind; }));  // its thread may be late
}

TEST_CASE_FIXTURE(fixture,
                  "what NCCL makes for a start that has failed is ended, by its thread if nobody waits for it") {
    const auto meeting = std::make_shared<comm::memory_store>();
    std::atomic<bool> left{false};
    fake::before("ncclCommInitRank", 1, [&] {
        meeting->fail("start", 0, "no memory");
        static_cast<void>(soon([&] { return left.load(); }));
    });
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 1, cuda_queue(0), {.name = "start"}), doctest::Contains("no memory"),
                         aborted_error);
    left = true;
    CHECK(soon([] { return fake::calls("ncclCommAbort") == 1; }));
    CHECK(soon([&] { return fake::live_communicators() == live; }));

    // It has been made when the failure is heard.
    const auto slow = std::make_shared<odd_store>();
    std::atomic<bool> asked{false};
    slow->asked = [&] {
        asked = true;
        static_cast<void>(soon([&] { return fake::live_communicators() == live + 1; }));
        std::this_thread::sleep_for(50ms);
        slow->fail("start", 0, "no memory");
    };
    fake::before("ncclCommInitRank", 1, [&] { static_cast<void>(soon([&] { return asked.load(); })); });
    CHECK_THROWS_WITH_AS(nccl(slow, 0, 1, cuda_queue(0), {.name = "start"}), doctest::Contains("no memory"),
                         aborted_error);
    CHECK(soon([] { return fake::calls("ncclCommAbort") == 2; }));
    CHECK(soon([&] { return fake::live_communicators() == live; }));
}

TEST_CASE_FIXTURE(fixture, "a capture that begins and ends while the watchdog looks costs it one look") {
    const auto c = std::make_shared<comm::detail::nccl_channel>(cuda_queue(0), "c", 0, std::vector{0}, 1u);
    const cudaStream_t stream = c->queue.stream();
    cudaGraph_t graph = nullptr;
    comm::detail::nccl_watched watched(c);
    c->begin(comm::collective::barrier, 1);
    {
        const cuda::hold work(stream);  // that does not end
        cuda::before("cudaEventRecord", 1,
                     [&] { REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess); });
        cuda::before("cudaStreamGetCaptureInfo", 2,
                     [&] { REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess); });
        const deadline now = clock_type::now();
        CHECK_FALSE(watched.is_late(now, 1s));
        REQUIRE(graph != nullptr);
        CHECK_FALSE(watched.is_late(now, 1s));
        CHECK(watched.is_late(now + 2s, 1s));
    }
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "ranks of one process open their pools to each other, and then meet") {
    nccl::launch(3, [](nccl&) {});
    CHECK(cuda::calls("cudaMemPoolSetAccess") == 3 * 2);
    CHECK(fake::calls("ncclAllGather") == 3 * 2);
}

TEST_CASE_FIXTURE(fixture, "the watchdog does not break a capture, not even one that forbids everything") {
    nccl c(std::make_shared<comm::memory_store>(), 0, 1, cuda_queue(0));
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    c.barrier();  // something to look at
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    std::this_thread::sleep_for(100ms);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK_NOTHROW(c.synchronize());
}

TEST_CASE_FIXTURE(fixture, "sisters and grandchildren are told apart when it is asked who is missing") {
    with_growing_timeouts([&](duration timeout) {
        std::atomic<int> told = 0;
        nccl::launch(4,
                     [&](nccl& c) {
                         auto part = c.split(std::vector{-1, 0, 0, 0}, "part");
                         std::optional<nccl> busy;
                         std::optional<nccl> stuck;
                         if (part) {
                             busy = part->split(std::vector{-1, 0, 0}, "busy");
                             stuck = part->split(std::vector{-1, 0, 0}, "stuck");  // of the world's 2 and 3
                         }
                         try {
                             if (busy) {
                                 for (int i = 0; i < 5; ++i) { busy->barrier(); }
                                 busy->synchronize();
                             }
                             if (c.rank() == 2) { stuck->barrier(); }
                             until_failed(c);
                         } catch (const timeout_error& e) {
                             expect(c.rank() == 2 && e.missing() == std::vector{1}, e.what());
                             ++told;
                         } catch (const aborted_error& e) {
                             expect(contains(e.what(), "barrier: rank 1 did not arrive") &&
                                        contains(e.what(), "'world/part/stuck'"),
                                    e.what());
                             ++told;
                         }
                     },
                     {.timeout = timeout});
        expect(told == 4, "not all were told");
    });
}

TEST_CASE_FIXTURE(fixture, "a call that NCCL does not return from is overdue like work that does not end") {
    const int device = 0;
    ncclComm_t raw = nullptr;
    REQUIRE(ncclCommInitAll(&raw, 1, &device) == ncclSuccess);
    const auto c = std::make_shared<comm::detail::nccl_channel>(cuda_queue(device), "c", 0, std::vector{0}, 1u);
    c->comm.store(raw);
    const auto family = std::make_shared<comm::detail::nccl_family>(nullptr, "family", 0, 1, device, 100ms);
    family->add(c);
    {
        const comm::detail::nccl_channel::use inside(*c);
        const deadline limit = after(10s);
        while (!family->poisoned() && clock_type::now() < limit) { std::this_thread::sleep_for(1ms); }
        const auto e = thrown<timeout_error>([&] { family->raise_if_poisoned({}); });
        CHECK(contains(e.what(), "did not complete within 0.1 s; who is missing is known only with a store"));
    }
    family->close(c, false);
    CHECK(fake::calls("ncclCommAbort") == 1);
}
