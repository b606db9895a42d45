// Timelines on a real card: exposed communication is what a stream was held up; marks tell times that fit the host's.
#include <tutti/schedule/timeline.hpp>  // under test

#include <algorithm>  // max, min
#include <chrono>     // times
#include <cmath>      // abs
#include <cstdint>    // nanoseconds
#include <thread>     // another host thread
#include <utility>    // pair

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>        // one rank
#include <tutti/core/cuda_queue.hpp>  // streams
#include <tutti/schedule/lane.hpp>    // lane
#include <tutti/schedule/span.hpp>    // spans of the main stream

#include "device.hpp"  // require_device

using namespace tutti;
using namespace std::chrono_literals;
using device = comm::self<cuda_queue>;
using schedule::lane;
using schedule::scoped_span;
using schedule::span_kind;
using schedule::timeline;

namespace {

__device__ std::uint64_t nanoseconds_now() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Keeps a stream busy for so long, on one thread of the device: others run beside it.
__global__ void spin(std::uint64_t nanoseconds) {
    const std::uint64_t begin = nanoseconds_now();
    while (nanoseconds_now() - begin < nanoseconds) {}
}

void busy(const cuda_queue& q, double ms) {
    spin<<<1, 1, 0, q.stream()>>>(static_cast<std::uint64_t>(1e6 * ms));
    tutti::detail::check_cuda(cudaGetLastError(), "spin");
}
auto takes(double ms) {
    return [ms](device& c) { busy(c.queue(), ms); };
}
void finish(const cuda_queue& q) { q.record().wait_host(after(10s)); }

// A launch, its marks and the granularity of the device's timer; in milliseconds.
constexpr double tolerance = 0.05;
bool near(double got, double want, int kernels = 1) { return std::abs(got - want) <= kernels * tolerance; }

double work_of(const timeline& t, std::string_view name) {
    for (const auto& total : t.totals(0)) {
        if (total.kind != span_kind::wait && total.name == name) { return 1e3 * total.seconds; }
    }
    return 0;
}

}  // namespace

TEST_CASE("exposed communication is what exceeds the computing beside it") {
    test::require_device();
    cuda_queue q(0);
    device main(q);
    for (const auto& [compute, communicate] :
         {std::pair(1.0, 1.0) /* the first loads the kernel */, std::pair(2.0, 5.0), std::pair(5.0, 2.0),
          std::pair(3.0, 3.0), std::pair(0.2, 4.0), std::pair(4.0, 0.2)}) {
        timeline t;
        lane l(main.duplicate("lane"), {.trace = &t});
        const auto steps = t.track_of(0, "steps"), track = t.track_of(0, "main");
        busy(q, 1);  // meanwhile the host gets ahead: it must not show in the spans
        {
            const scoped_span step(&t, steps, "step", q, span_kind::step);
            auto sent = l.submit("communicate", takes(communicate), q);
            {
                const scoped_span computing(&t, track, "compute", q);
                busy(q, compute);
            }
            sent.wait(q);
            const scoped_span updating(&t, track, "update", q);
            busy(q, 0.5);
        }
        finish(q);
        const auto all = t.steps(0);
        REQUIRE(all.size() == 1);
        const double exposed = 1e3 * all[0].exposed, length = 1e3 * all[0].seconds;
        MESSAGE("compute " << compute << " ms, communicate " << communicate << " ms: exposed " << exposed
                           << " ms, step " << length << " ms, spans " << work_of(t, "compute") << " + " << exposed
                           << " + " << work_of(t, "update") << " ms, lane " << work_of(t, "communicate") << " ms");
        CHECK(t.dropped() == 0);
        CHECK(t.pending() == 0);
        if (compute == 1.0) { continue; }
        CHECK(near(exposed, std::max(0.0, communicate - compute)));
        CHECK(near(work_of(t, "communicate"), communicate));
        CHECK(near(length, std::max(compute, communicate) + 0.5, 2));
        CHECK(near(length, work_of(t, "compute") + exposed + work_of(t, "update")));  // nothing between them
    }
}

TEST_CASE("several tickets share what is exposed") {
    test::require_device();
    cuda_queue q(0);
    device main(q);
    timeline t;
    lane l(main.duplicate("lane"), {.trace = &t});
    busy(q, 1);
    auto first = l.submit("first", takes(2), q);    // 0 .. 2
    auto second = l.submit("second", takes(4), q);  // 2 .. 6
    auto third = l.submit("third", takes(1), q);    // 6 .. 7
    busy(q, 1);
    first.wait(q);   // 1 .. 2
    busy(q, 1);      // 3
    second.wait(q);  // 3 .. 6
    busy(q, 2);      // 8
    third.wait(q);   // at once
    finish(q);
    l.drain();
    CHECK(near(1e3 * t.exposed(0), 4, 3));
    CHECK(near(work_of(t, "first") + work_of(t, "second") + work_of(t, "third"), 7, 3));
    CHECK(t.dropped() + t.pending() == 0);
}

TEST_CASE("nothing is waited for, and a mark costs little") {
    test::require_device();
    cuda_queue q(0);
    device main(q);
    timeline t;
    lane l(main.duplicate("lane"), {.trace = &t});
    const auto round = [&](lane<device>& with) {
        auto work = with.submit(
            "work", [](device&) {}, q);
        work.wait(q);
    };
    round(l);
    finish(q);
    lane plain(main.duplicate("plain"));
    constexpr int rounds = 200;
    const auto measure = [&](lane<device>& with) {
        busy(q, 20);
        const deadline begin = clock_type::now();
        for (int i = 0; i < rounds; ++i) { round(with); }
        const double each = 1e6 * seconds(clock_type::now() - begin) / rounds;
        CHECK_FALSE(q.record().ready());  // the device is still busy with what came before
        finish(q);
        return each;
    };
    const double without = measure(plain), with = measure(l), again = measure(l);
    MESSAGE("submit and wait: " << without << " us of the host without a trace, " << with << " us with one, " << again
                                << " us with its events made");
    MESSAGE("a wait that holds nothing up: " << 1e6 * t.exposed(0) / (2 * rounds + 1) << " us");
    CHECK(t.pending() == 0);
}

TEST_CASE("marks fit the host's clock, and each other in either order") {
    test::require_device();
    const cuda_queue q(0), other = q.sibling();
    const auto first = q.mark();
    finish(q);
    const duration exact = detail::cuda_clock::of(0).uncertainty();
    const auto distance = [&] {  // of the device's clock from the host's, and how wide the host's window was
        const deadline before = clock_type::now();
        const auto m = q.mark();
        while (!m->ready()) {}
        const duration window = clock_type::now() - before;
        return std::pair(m->when() - (before + window / 2), window);
    };
    std::pair<duration, duration> now = distance();
    for (int i = 0; i < 20; ++i) {
        if (const auto next = distance(); next.second < now.second) { now = next; }
    }
    CHECK(std::chrono::abs(now.first) <= exact + now.second);
    busy(q, 3);
    const auto early = other.mark();
    const auto late = q.mark();
    finish(q);
    finish(other);
    CHECK(near(1e3 * seconds(late->since(*early)), 3, 2));
    CHECK(near(1e3 * seconds(early->since(*late)), -3, 2));
    CHECK(near(1e3 * seconds(late->when() - early->when()), 3, 2));
    std::this_thread::sleep_for(4s);
    std::pair<duration, duration> later = distance();
    for (int i = 0; i < 20; ++i) {
        if (const auto next = distance(); next.second < later.second) { later = next; }
    }
    const double drift = 1e6 * seconds(later.first - now.first) / 4;
    MESSAGE("the host's time of the first mark is right within "
            << 1e6 * seconds(exact) << " us; distance " << 1e6 * seconds(now.first) << " us, after 4 s "
            << 1e6 * seconds(later.first) << " us: clocks drift by " << drift << " us a second");
    CHECK(std::abs(drift) < 200);
}

TEST_CASE("a capture goes on while others look at the timeline") {
    test::require_device();
    cuda_queue q(0);
    device main(q);
    timeline t;
    lane l(main.duplicate("lane"), {.trace = &t});
    lane other(main.duplicate("other"), {.trace = &t});
    busy(q, 0.1);
    finish(q);
    auto beside = other.submit("beside", takes(50));
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    {
        auto work = l.submit("captured", takes(1), q);
        work.wait(q);
        CHECK(t.pending() == 1);
        std::thread([&] { CHECK(t.pending() == 1); }).join();
        while (t.pending() != 0) { std::this_thread::sleep_for(1ms); }
        REQUIRE(cudaStreamEndCapture(q.stream(), &graph) == cudaSuccess);
    }
    CHECK(t.dropped() == 2);
    CHECK(near(work_of(t, "beside"), 50));
    cudaGraphExec_t run = nullptr;
    REQUIRE(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
    auto replay = l.submit(
        "replay", [&](device& c) { CHECK(cudaGraphLaunch(run, c.queue().stream()) == cudaSuccess); }, q);
    replay.wait(q);
    finish(q);
    CHECK(work_of(t, "replay") > 0.9);
    CHECK(near(work_of(t, "replay"), 1, 4));
    CHECK(cudaGraphExecDestroy(run) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}
