// comm::nccl beyond the conformance suite: start-up, deadlines and who is missing, graphs, lanes beside the main
// communicator, the caller's own communicator. Compiled twice: for devices, and against the fakes of CUDA and NCCL.
#include <atomic>   // arrivals
#include <barrier>  // a common start
#include <chrono>   // deadlines
#include <memory>   // stores
#include <string>   // texts
#include <thread>   // ranks without launch
#include <vector>   // data

#include <doctest/doctest.h>

#include <tutti/comm/nccl.hpp>      // under test
#include <tutti/comm/threads.hpp>   // a host communicator to start from
#include <tutti/core/buffer.hpp>    // device memory
#include <tutti/core/philox.hpp>    // delays
#include <tutti/schedule/lane.hpp>  // lanes

#include "gpu/device.hpp"                // require_device
#include "support/build.hpp"             // full_speed
#include "support/growing_timeouts.hpp"  // deadlines
#include "support/soon.hpp"              // until_failed

using namespace tutti;
using namespace std::chrono_literals;
using comm::nccl;
using test::until_failed;

namespace {

using device_buffer = buffer<float, cuda_queue>;

int devices() {
    test::require_device();
    int n = 0;
    static_cast<void>(cudaGetDeviceCount(&n));
    return n;
}
std::vector<int> sizes() {
    std::vector<int> list;
    for (const int n : {1, 2, 4}) {
        if (n <= devices()) { list.push_back(n); }
    }
    return list;
}

void put(const cuda_queue& q, const device_buffer& b, float value) {
    const std::vector<float> host(b.size(), value);
    upload(q, view<const float>(host), b.view());
}
std::vector<float> get(const cuda_queue& q, const device_buffer& b) {
    std::vector<float> host(b.size());
    download(q, view<const float, device_memory>(b.view()), view<float>(host));
    return host;
}
// Ranks are threads: an assertion that fails must end them all.
void expect(bool holds, const std::string& text) {
    if (!holds) { throw std::logic_error(text); }
}
void pause(std::uint64_t seed, std::uint32_t rank, std::uint64_t at) {
    const random_stream stream{.seed = seed, .stream = rank};
    std::this_thread::sleep_for(std::chrono::microseconds(stream.block(at)[0] % 400));
}

}  // namespace

TEST_CASE("launch: a rank a device, sums that are right, names and handles") {
    for (const int n : sizes()) {
        CAPTURE(n);
        nccl::launch(n, [&](nccl& c) {
            expect(c.size() == n && c.rank() == c.queue().device(), "rank or device");
            expect(c.name() == "world" && c.native_handle() != nullptr, "name or handle");
            const device_buffer b(c.queue(), 1000);
            put(c.queue(), b, static_cast<float>(c.rank() + 1));
            c.all_reduce(b.view(), b.view(), sum{});
            const float want = static_cast<float>(n * (n + 1)) / 2;
            for (const float x : get(c.queue(), b)) { expect(x == want, "the sum"); }
        });
    }
    CHECK_THROWS_WITH_AS(nccl::launch(1000, [](nccl&) {}), doctest::Contains("nccl: 1000 ranks need as many GPUs"),
                         usage_error);
}

TEST_CASE("the rank must be one of the ranks, and come once") {
    static_cast<void>(devices());
    const auto meeting = std::make_shared<comm::memory_store>();
    CHECK_THROWS_WITH_AS(nccl(meeting, 2, 2), doctest::Contains("nccl: rank 2 is not one of 2 ranks"), usage_error);
    const nccl alone(meeting, 0, 1, cuda_queue(0), {.name = "alone"});
    CHECK(alone.size() == 1);
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 1, cuda_queue(0), {.name = "alone"}),
                         doctest::Contains("rank 0 has arrived at 'alone' before"), usage_error);
}

TEST_CASE("who does not come to the start is named") {
    static_cast<void>(devices());
    const auto meeting = std::make_shared<comm::memory_store>();
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 3, cuda_queue(0), {.name = "late", .timeout = 200ms}),
                         doctest::Contains("rank 1, 2 did not arrive at 'late'"), timeout_error);
}

TEST_CASE("a rank that fails at the start ends the others at once") {
    if (devices() < 2) { return; }
    const auto meeting = std::make_shared<comm::memory_store>();
    meeting->arrive("start", 1);
    std::thread failing([&] {
        std::this_thread::sleep_for(50ms);
        meeting->fail("start", 1, "out of memory");
    });
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 3, cuda_queue(0), {.name = "start"}),
                         doctest::Contains("rank 1: out of memory"), aborted_error);
    failing.join();
}

TEST_CASE("a rank that is given no time ends the others at once") {
    if (devices() < 2) { return; }
    const auto meeting = std::make_shared<comm::memory_store>();
    CHECK_THROWS_WITH_AS(nccl(meeting, 1, 2, cuda_queue(1), {.name = "hurried", .timeout = 0s}),
                         doctest::Contains("nccl: the timeout is 0 s, expected more than 0"), usage_error);
    CHECK_THROWS_WITH_AS(nccl(meeting, 0, 2, cuda_queue(0), {.name = "hurried"}),
                         doctest::Contains("rank 1: nccl: the timeout is 0 s"), aborted_error);
}

TEST_CASE("an identity of another version is refused") {
    static_cast<void>(devices());
    const auto meeting = std::make_shared<comm::memory_store>();
    const std::byte short_one[3] = {};
    meeting->set("old", short_one);
    meeting->arrive("old", 0);
    CHECK_THROWS_WITH_AS(nccl(meeting, 1, 2, cuda_queue(0), {.name = "old"}),
                         doctest::Contains("ranks use different versions"), mismatch_error);
}

TEST_CASE("over a host communicator, through files") {
    const int n = devices() < 2 ? 1 : 2;
    char pattern[] = "/tmp/tutti-nccl-XXXXXX";
    REQUIRE(::mkdtemp(pattern) != nullptr);
    const std::string directory = pattern;
    const auto body = [&](int r) {
        const auto meeting = std::make_shared<comm::file_store>(directory, "job 7");
        nccl c(meeting, r, n, cuda_queue(r), {.name = "files"});
        const device_buffer b(c.queue(), 10);
        put(c.queue(), b, 1);
        c.all_reduce(b.view(), b.view(), sum{});
        expect(get(c.queue(), b)[9] == static_cast<float>(n), "the sum");
    };
    std::thread other;
    if (n == 2) {
        other = std::thread([&] { body(1); });
    }
    CHECK_NOTHROW(body(0));
    if (n == 2) { other.join(); }
    CHECK(::rmdir(directory.c_str()) == 0);  // nothing was left behind
}

TEST_CASE("who does not arrive is named, on every rank, and then the family stays failed") {
    for (const int n : sizes()) {
        if (n == 1) { continue; }
        CAPTURE(n);
        test::with_growing_timeouts([&](duration timeout) {
            std::atomic<int> timeouts = 0;
            std::atomic<int> told = 0;
            nccl::launch(n,
                         [&](nccl& c) {
                             auto lane = c.duplicate("lane");
                             const device_buffer b(c.queue(), 100000);
                             put(c.queue(), b, 1);
                             const int absent = n - 1;
                             std::string text;
                             try {
                                 if (c.rank() == absent) { until_failed(lane); }  // on another stream of the family
                                 c.all_reduce(b.view(), b.view(), sum{});
                                 until_failed(c);
                             } catch (const timeout_error& e) {
                                 ++timeouts;
                                 expect(c.rank() != absent && e.missing() == std::vector<int>{absent},
                                        "who is missing: '" + std::string(e.what()) + "'");
                                 text = e.what();
                             } catch (const aborted_error& e) { text = e.what(); }
                             const std::string fact =
                                 "all_reduce: rank " + std::to_string(absent) + " did not arrive within";
                             expect(text.find(fact) != std::string::npos, "unexpected: '" + text + "'");
                             expect(text.find("is at call") != std::string::npos, "how far it came: '" + text + "'");
                             ++told;
                             for (int again = 0; again < 2; ++again) {
                                 try {
                                     lane.barrier();
                                     expect(false, "a failed family works");
                                 } catch (const aborted_error&) {}
                             }
                             expect(c.native_handle() == nullptr, "the handle is still there");
                         },
                         {.name = "world", .timeout = timeout});
            expect(timeouts >= 1 && told == n, "not all were told");
        });
    }
}

TEST_CASE("an exception on one rank ends the others in the middle of a collective, with its text") {
    for (const int n : sizes()) {
        if (n == 1) { continue; }
        CAPTURE(n);
        const auto begin = clock_type::now();
        std::atomic<int> told = 0;
        std::atomic<int> late = 0;
        do {
            told = late = 0;
            CHECK_THROWS_WITH_AS(nccl::launch(n,
                                              [&](nccl& c) {
                                                  const nccl own = std::move(c);  // unwinding meets a communicator
                                                  nccl& mine = const_cast<nccl&>(own);
                                                  const device_buffer b(mine.queue(), 1 << 20);
                                                  try {  // all of it: a rank may hear of it in its first wait
                                                      mine.all_reduce(b.view(), b.view(), sum{});
                                                      mine.synchronize();
                                                      if (mine.rank() == 1) {
                                                          throw std::domain_error("no such token");
                                                      }
                                                      mine.all_reduce(b.view(), b.view(), sum{});
                                                      until_failed(mine);
                                                  } catch (const aborted_error& e) {
                                                      const std::string text = e.what();
                                                      told += text.find("rank 1: no such token") != std::string::npos;
                                                      late += text.find("left by an exception") != std::string::npos;
                                                      throw;
                                                  }
                                              }),
                                 "no such token", std::domain_error);
            // Rank 1 may stand still for a tenth of a second on its way out: then nobody waits for its text.
        } while (late != 0 && clock_type::now() - begin < 20s);
        CHECK(told == n - 1);
        CHECK(clock_type::now() - begin < 60s);  // not the ten minutes of the timeout
    }
}

TEST_CASE("device work that waits for the host of a failed family is cut short too: fetch throws the cause") {
    for (const int n : sizes()) {
        if (n == 1) { continue; }
        std::atomic<int> told = 0;
        std::barrier together(n);  // in front of what may throw
        nccl::launch(n, [&](nccl& c) {
            const device_buffer b(c.queue(), 4);
            put(c.queue(), b, 1);
            together.arrive_and_wait();
            if (c.rank() == 0) {
                std::this_thread::sleep_for(100ms);
                c.abort("the disk is full");
                ++told;
                return;
            }
            try {
                c.all_reduce(b.view(), b.view(), sum{});
                for (const deadline limit = after(20s); clock_type::now() < limit;) {
                    static_cast<void>(get(c.queue(), b));
                }
            } catch (const aborted_error& e) {
                if (std::string(e.what()).find("rank 0: the disk is full") != std::string::npos) { ++told; }
            }
        });
        CHECK(told == n);
    }
}

TEST_CASE("collectives are captured once and replayed") {
    for (const int n : sizes()) {
        CAPTURE(n);
        nccl::launch(n, [&](nccl& c) {
            auto lane = c.duplicate("lane");  // a second communicator inside the same graph
            const cuda_queue q = c.queue();
            const device_buffer a(q, 5000);
            const device_buffer b(q, 5000);
            put(q, a, 1);
            put(q, b, 1);
            c.all_reduce(a.view(), a.view(), max{});  // connections are made outside of the capture
            lane.all_reduce(b.view(), b.view(), max{});
            lane.synchronize();
            c.synchronize();
            tutti::detail::check_cuda(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeThreadLocal), "begin");
            c.all_reduce(a.view(), a.view(), sum{});
            auto forked = q.record();
            lane.queue().wait(forked);
            lane.all_reduce(b.view(), b.view(), sum{});
            auto joined = lane.queue().record();
            q.wait(joined);
            c.barrier();
            bool refused = false;
            try {
                c.agree(1, "hash");
            } catch (const usage_error& e) {
                refused = std::string(e.what()).find("a graph that is being captured") != std::string::npos;
            }
            expect(refused, "agree waits for the host, in a capture");
            try {
                c.synchronize();
                expect(false, "synchronize waits for the host, in a capture");
            } catch (const usage_error&) {}
            cudaGraph_t graph = nullptr;
            cudaGraphExec_t ready = nullptr;
            tutti::detail::check_cuda(cudaStreamEndCapture(q.stream(), &graph), "end");
            tutti::detail::check_cuda(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
            float want = 1;
            for (int i = 0; i < 100; ++i) {
                want = n == 1 ? 1.0f : want * static_cast<float>(n);
                tutti::detail::check_cuda(cudaGraphLaunch(ready, q.stream()), "launch");
                if (want > 1e6f || i == 99) {  // 2^24 and its multiples are exact; start again before
                    expect(get(q, a)[4999] == want && get(q, b)[0] == want, "replay " + std::to_string(i));
                    put(q, a, 1);
                    put(q, b, 1);
                    want = 1;
                }
            }
            c.synchronize();
            tutti::detail::check_cuda(cudaGraphExecDestroy(ready), "destroy");
            tutti::detail::check_cuda(cudaGraphDestroy(graph), "destroy");
            c.agree(1, "hash");
        });
    }
}

TEST_CASE("a lane and the main communicator in flight together, whatever the hosts' delays") {
    for (const int n : sizes()) {
        CAPTURE(n);
        nccl::launch(n, [&](nccl& c) {
            schedule::lane<nccl> first(c.duplicate("first"));
            schedule::lane<nccl> second(c.duplicate("second"));
            cuda_queue q = c.queue();
            std::vector<device_buffer> x;
            for (int i = 0; i < 3; ++i) { x.emplace_back(q, 300000); }
            const auto me = static_cast<std::uint32_t>(c.rank());
            for (int round = 0; round < (test::full_speed ? 60 : 10); ++round) {
                for (const auto& b : x) { put(q, b, 1); }
                const auto reduce = [](view<float, device_memory> v) {
                    return [v](nccl& on) { on.all_reduce(v, v, sum{}); };
                };
                pause(1, me, static_cast<std::uint64_t>(4 * round));
                auto a = first.submit("a", reduce(x[0].view()), q);
                pause(1, me, static_cast<std::uint64_t>(4 * round + 1));
                c.all_reduce(x[1].view(), x[1].view(), sum{});
                pause(1, me, static_cast<std::uint64_t>(4 * round + 2));
                auto b = second.submit("b", reduce(x[2].view()), q, a);
                a.wait(q);
                b.wait(q);
                for (const auto& v : x) {
                    expect(get(q, v)[299999] == static_cast<float>(n), "round " + std::to_string(round));
                }
            }
        });
    }
}

TEST_CASE("the caller's communicator is used, and left alive") {
    static_cast<void>(devices());
    ncclComm_t theirs = nullptr;
    const int device = 0;
    REQUIRE(ncclCommInitAll(&theirs, 1, &device) == ncclSuccess);
    {
        nccl c(theirs, cuda_queue(0), {.name = "theirs"});
        CHECK(c.size() == 1);
        CHECK(c.native_handle() == theirs);
        const device_buffer b(c.queue(), 8);
        put(c.queue(), b, 3);
        c.all_reduce(b.view(), b.view(), sum{});
        CHECK(get(c.queue(), b)[7] == 3);
        auto child = c.duplicate("child");
        child.barrier();
        child.synchronize();
    }
    int count = 0;
    CHECK(ncclCommCount(theirs, &count) == ncclSuccess);
    CHECK(count == 1);
    CHECK(ncclCommDestroy(theirs) == ncclSuccess);
    CHECK_THROWS_WITH_AS(nccl(static_cast<ncclComm_t>(nullptr)), doctest::Contains("the communicator is null"),
                         usage_error);
    if (devices() > 1) {
        REQUIRE(ncclCommInitAll(&theirs, 1, &device) == ncclSuccess);
        CHECK_THROWS_WITH_AS(nccl(theirs, cuda_queue(1)), doctest::Contains("on device 0, its queue on device 1"),
                             usage_error);
        CHECK(ncclCommDestroy(theirs) == ncclSuccess);
    }
}

TEST_CASE("the caller's stream is used") {
    static_cast<void>(devices());
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    {
        const auto meeting = std::make_shared<comm::memory_store>();
        nccl c(meeting, 0, 1, cuda_queue(stream));
        CHECK(c.queue().stream() == stream);
        c.barrier();
    }
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("a message to oneself needs its partner") {
    static_cast<void>(devices());
    nccl::launch(1, [](nccl& c) {
        const device_buffer b(c.queue(), 8);
        const std::vector only_sent{comm::send_to(0, b.view().sub(0, 4))};
        try {
            c.exchange(only_sent);
            expect(false, "accepted");
        } catch (const usage_error& e) {
            expect(std::string(e.what()).find("1 sends to itself and 0 receives") != std::string::npos, e.what());
        }
        c.barrier();
        c.synchronize();  // nothing had moved: it works on
    });
}
