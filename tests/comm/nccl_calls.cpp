// comm::nccl as NCCL sees it: which calls in which order, what happens when one of them fails or never ends, who is
// aborted, what the host waits for. Over fakes of CUDA and NCCL.
#include <atomic>  // outcomes
#include <chrono>  // deadlines
#include <string>  // texts
#include <vector>  // logs

#include <doctest/doctest.h>

#include <tutti/comm/nccl.hpp>      // under test
#include <tutti/core/buffer.hpp>    // device memory
#include <tutti/schedule/lane.hpp>  // lanes

#include <support/fake_cuda.hpp>  // counts of waits
#include <support/fake_nccl.hpp>  // log, failures

using namespace tutti;
using namespace std::chrono_literals;
using comm::nccl;
namespace fake = tutti::test::fake_nccl;
namespace cuda = tutti::test::fake_cuda;

namespace {

using device_buffer = buffer<float, cuda_queue>;

struct fixture {
    std::size_t left_behind = 0;  // by starts that failed: NCCL has no way to end one that waits for a rank
    std::size_t live = fake::live_communicators();

    fixture() {
        fake::reset();
        cuda::reset();
    }
    ~fixture() {
        for (const std::string& p : fake::problems()) { FAIL_CHECK(p); }
        CHECK(fake::live_communicators() == live + left_behind);
        CHECK(fake::calls("ncclGroupStart") == fake::calls("ncclGroupEnd"));
    }
};

void expect(bool holds, const std::string& text) {
    if (!holds) { throw std::logic_error(text); }
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
    CHECK(with([](nccl& c, auto in, auto out) { c.scatter(in, out.sub(0, 4), 1); }) ==
          words{"GroupStart", "Recv:16", "GroupEnd"});
    const std::vector<std::size_t> uneven{5, 0};
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.all_gather_v(in.sub(0, uneven[static_cast<std::size_t>(c.rank())]), out.sub(0, 5), uneven);
          }) == words{"GroupStart", "Broadcast:20", "GroupEnd"});
    CHECK(with([&](nccl& c, auto in, auto out) {
              c.reduce_scatter_v(in.sub(0, 5), out.sub(0, uneven[static_cast<std::size_t>(c.rank())]), uneven, sum{});
          }) == words{"GroupStart", "Reduce:20", "GroupEnd"});
    CHECK(with([](nccl& c, auto in, auto out) {
              const int peer = 1 - c.rank();
              c.exchange(std::vector{comm::send_to(peer, in.sub(0, 3)), comm::receive_from(peer, out.sub(0, 3)),
                                     comm::send_to(c.rank(), in.sub(4, 1)),
                                     comm::receive_from(c.rank(), out.sub(4, 1))});
          }) == words{"GroupStart", "Send:12", "Recv:12", "GroupEnd"});
}

TEST_CASE_FIXTURE(fixture, "a start that fails on one rank fails on all, with its cause") {
    fake::fail("ncclCommInitRank", 1, ncclSystemError, {.rank = 1});
    std::atomic<int> told = 0;
    CHECK_THROWS_AS(nccl::launch(2, [](nccl&) {}, {.timeout = 5s}), backend_error);
    fake::fail("ncclCommInitRank", 1, ncclSystemError, {.rank = 1});
    comm::threads::launch(2, [&](comm::threads& world) {
        try {
            const nccl c = nccl::over(world, cuda_queue(world.rank()), {.timeout = 5s});
        } catch (const backend_error& e) {
            told += contains(e.what(), "nccl: ncclCommInitRank failed: ") && world.rank() == 1 ? 1 : 0;
            expect(e.context().backend_code == ncclSystemError, "NCCL's code");
        } catch (const aborted_error& e) {
            told += contains(e.what(), "rank 1: nccl: ncclCommInitRank failed") && world.rank() == 0 ? 1 : 0;
        }
    });
    CHECK(told == 2);
    left_behind = 2;
}

TEST_CASE_FIXTURE(fixture, "a call that fails inside a group ends the group and the family") {
    std::atomic<int> told = 0;
    nccl::launch(3, [&](nccl& c) {
        const device_buffer b(c.queue(), 6);
        const device_buffer d(c.queue(), 6);
        c.barrier();
        c.synchronize();
        if (c.rank() == 2) { fake::fail("ncclRecv", 2, ncclInternalError, {.rank = 2}); }
        try {
            c.all_to_all(b.view(), d.view());
            c.synchronize();
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
    std::atomic<int> told = 0;
    const auto begin = clock_type::now();
    nccl::launch(3, [&](nccl& c) {
        const device_buffer b(c.queue(), 6);
        if (c.rank() == 1) { fake::async_error(3, ncclRemoteError, {.rank = 1}); }
        c.agree(1, "planned");  // the first operation from now
        try {
            for (int i = 0; i < 4; ++i) { c.all_reduce(b.view(), b.view(), sum{}); }
            c.synchronize();
        } catch (const error& e) {
            // The rank itself may hear of it from its next call first.
            expect(contains(e.what(), "asynchronous work failed") || contains(e.what(), "ncclAllReduce failed"),
                   e.what());
            ++told;
        }
    });
    CHECK(told == 3);
    CHECK(clock_type::now() - begin < 20s);
}

TEST_CASE_FIXTURE(fixture, "an operation that never completes though all ranks came") {
    std::atomic<int> told = 0;
    CHECK_THROWS_WITH_AS(nccl::launch(2,
                                      [&](nccl& c) {
                                          const device_buffer b(c.queue(), 6);
                                          if (c.rank() == 0) { fake::stall(2, {.rank = 0}); }
                                          c.agree(1, "planned");
                                          try {
                                              c.all_reduce(b.view(), b.view(), sum{});
                                              c.synchronize();
                                          } catch (const error& e) {
                                              ++told;
                                              throw;
                                          }
                                      },
                                      {.timeout = 300ms}),
                         doctest::Contains("all_reduce: all ranks are there, but it did not complete within 0.3 s"),
                         timeout_error);
    CHECK(told == 2);
}

TEST_CASE_FIXTURE(fixture, "an abort is one ncclCommAbort for every communicator of the family on every rank") {
    std::size_t made = 0;
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
        if (c.rank() == 1) { c.abort("enough"); }
        try {
            for (;;) { part->synchronize(); }
        } catch (const aborted_error& e) { expect(contains(e.what(), "rank 1: enough"), e.what()); }
    });
    CHECK(made > 0);
    CHECK(fake::calls("ncclCommAbort") == 4 * 3);
    CHECK(fake::calls("ncclCommDestroy") == 0);
}

TEST_CASE_FIXTURE(fixture, "the steady state of lanes has no host wait, and orders launches by events") {
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
        // A watchdog looks at an event a communicator, rank and 20 ms, which counts too.
        const auto begin = clock_type::now();
        const std::size_t waits = cuda::host_waits();
        const std::size_t orders = cuda::calls("cudaStreamWaitEvent");
        for (int i = 0; i < 500; ++i) { round(); }
        const std::size_t waited = cuda::host_waits() - waits;
        const double looks = 8 * (seconds(clock_type::now() - begin) / 0.02 + 2);
        expect(static_cast<double>(waited) <= looks, std::to_string(waited) + " host waits in 500 rounds");
        expect(cuda::calls("cudaStreamWaitEvent") - orders >= 3 * 500, "launches are not ordered");
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
