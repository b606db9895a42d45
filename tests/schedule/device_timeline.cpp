// Lanes of CUDA queues with a trace: spans lie where the stream ran, waits are what held a stream up; over a fake of CUDA.
#include <tutti/schedule/timeline.hpp>  // under test

#include <chrono>     // times
#include <cmath>      // llround
#include <map>        // spans by name
#include <optional>   // a hold that ends early
#include <stdexcept>  // an exception
#include <string>     // names
#include <thread>     // a second host
#include <utility>    // pair

#include <doctest/doctest.h>  // checks
#include <nlohmann/json.hpp>  // the trace

#include <tutti/comm/self.hpp>        // one rank
#include <tutti/core/cuda_queue.hpp>  // streams
#include <tutti/schedule/lane.hpp>    // lane
#include <tutti/schedule/span.hpp>    // spans of the main stream

#include <support/failure.hpp>           // expect
#include <support/fake_cuda.hpp>         // virtual time, captures, failures
#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace std::chrono_literals;
using schedule::lane;
using schedule::scoped_span;
using schedule::span_kind;
using schedule::timeline;
namespace fake = tutti::test::fake_cuda;
using device = comm::self<cuda_queue>;

namespace {

struct fixture {
    fixture() {
        fake::reset();
        static_cast<void>(cuda_queue(0).mark());  // ties the device's clock to the host's, before times are virtual
    }
    ~fixture() { fake::reset(); }
};

auto takes(std::chrono::nanoseconds length) {
    return [length](device& c) { fake::spend(c.queue().stream(), length); };
}
void compute(const cuda_queue& q, std::chrono::nanoseconds length) { fake::spend(q.stream(), length); }
void finish(const cuda_queue& q) { q.record().wait_host(after(10s)); }

// Begin and end of each span by category and name, in microseconds after the step's begin.
std::map<std::string, std::pair<double, double>> places(const timeline& t) {
    std::map<std::string, std::pair<double, double>> all;
    const auto whole = nlohmann::json::parse(t.chrome_trace());
    for (const auto& e : whole.at("traceEvents")) {
        if (e.at("ph") != "X") { continue; }
        const double begin = e.at("ts"), length = e.at("dur");
        all[e.at("cat").get<std::string>() + " " + e.at("name").get<std::string>()] = {begin, begin + length};
    }
    const double zero = all.at("step step").first;
    for (auto& [name, span] : all) {
        span.first -= zero;
        span.second -= zero;
    }
    return all;
}

}  // namespace

TEST_CASE_FIXTURE(fixture, "exposed is what the stream was held up, and spans lie where streams ran") {
    const fake::virtual_time virtual_time;
    fake::delay(3, 200us);  // of the host's time, which must not matter
    timeline t;
    cuda_queue q(0);
    device main(q);
    lane l(main.duplicate("lane"), {.trace = &t});
    const auto steps = t.track_of(0, "steps");
    {
        const scoped_span step(&t, steps, "step", q, span_kind::step);
        compute(q, 2ms);
        auto longer = l.submit("longer", takes(5ms), q);    // 2 .. 7
        compute(q, 3ms);                                    // 5
        longer.wait(q);                                     // 5 .. 7
        auto shorter = l.submit("shorter", takes(1ms), q);  // 7 .. 8
        compute(q, 2500us);                                 // 9.5
        shorter.wait(q);                                    // at once
        auto first = l.submit("first", takes(2ms), q);      // 9.5 .. 11.5
        auto second = l.submit("second", takes(4ms));       // 11.5 .. 15.5: behind the first, on its stream
        compute(q, 1ms);                                    // 10.5
        first.wait(q);                                      // .. 11.5
        compute(q, 1ms);                                    // 12.5
        second.wait(q);                                     // .. 15.5
        second.wait(q);                                     // at once
        compute(q, 500us);                                  // 16
    }
    finish(q);
    CHECK(t.dropped() == 0);
    CHECK(t.pending() == 0);
    const auto of_steps = t.steps(0);
    REQUIRE(of_steps.size() == 1);
    const auto microseconds = [](double seconds) { return std::llround(1e6 * seconds); };
    CHECK(microseconds(of_steps[0].seconds) == 16000);
    CHECK(microseconds(of_steps[0].exposed) == 2000 + 1000 + 3000);
    CHECK(microseconds(t.exposed(0)) == 6000);
    double work = 0;
    std::size_t waits = 0;
    for (const auto& total : t.totals(0)) {
        if (total.kind != span_kind::wait) { work += total.seconds; }
        if (total.kind == span_kind::wait) { waits += total.count; }
    }
    CHECK(microseconds(work) == 12000);
    CHECK(waits == 5);
    auto at = places(t);
    const auto lies = [&](const char* what, double begin, double end) {
        CAPTURE(what);
        CHECK(std::llround(at.at(what).first) == std::llround(begin));
        CHECK(std::llround(at.at(what).second) == std::llround(end));
    };
    lies("communication longer", 2000, 7000);
    lies("wait longer", 5000, 7000);
    lies("communication shorter", 7000, 8000);
    lies("wait shorter", 9500, 9500);
    lies("communication first", 9500, 11500);
    lies("wait first", 10500, 11500);
    lies("communication second", 11500, 15500);
    lies("step step", 0, 16000);
}

TEST_CASE_FIXTURE(fixture, "times are the host's as well") {
    const auto attempt = [](duration length) {
        timeline t;
        cuda_queue q(0);
        device main(q);
        lane l(main.duplicate("lane"), {.trace = &t});
        finish(q);
        const deadline before = clock_type::now();
        { const scoped_span step(&t, t.track_of(0, "steps"), "step", q, span_kind::step); }
        auto work = l.submit("work", takes(length), q);
        work.wait(q);
        finish(q);
        const deadline done = clock_type::now();
        const auto steps = t.steps(0);
        REQUIRE(steps.size() == 1);
        const duration exact = 2 * detail::cuda_clock::of(0).uncertainty() + 1us;
        CHECK(steps[0].begin >= before - exact);
        CHECK(steps[0].begin + length <= done + exact);
        CHECK(t.exposed(0) <= seconds(done + exact - before));
        // Unless the wait came late.
        test::expect(t.exposed(0) >= 0.95 * seconds(length), "{} s of {} s", t.exposed(0), seconds(length));
    };
    test::with_growing_timeouts(attempt, {20ms, 200ms, 2s});
}

TEST_CASE_FIXTURE(fixture,
                  "nothing waits: spans stay pending until their stream has got there; events come from a pool") {
    timeline t;
    cuda_queue q(0);
    device main(q);
    lane l(main.duplicate("lane"), {.trace = &t});
    const auto round = [&] {
        auto work = l.submit("work", takes(0ms), q);
        work.wait(q);
    };
    {
        const fake::hold held(l.queue().stream());
        for (int i = 0; i < 10; ++i) { round(); }  // would not end if the host waited
        CHECK(t.size() == 0);
        CHECK(t.pending() == 20);
    }
    finish(q);
    CHECK(t.size() == 20);
    const auto made = fake::calls("cudaEventCreate");
    for (int i = 0; i < 10; ++i) { round(); }
    CHECK(fake::calls("cudaEventCreate") == made);
    finish(q);
    CHECK(t.size() == 40);
    CHECK(t.pending() == 0);
    CHECK(fake::calls("cudaStreamSynchronize") + fake::calls("cudaEventSynchronize") == 0);
}

TEST_CASE_FIXTURE(fixture, "without a timeline there are no marks") {
    cuda_queue q(0);
    device main(q);
    const auto records_of = [&](timeline* trace) {
        lane l(main.duplicate("lane"), {.trace = trace});
        const auto before = fake::calls("cudaEventRecord");
        auto work = l.submit("work", takes(0ms), q);
        work.wait(q);
        const auto after_it = fake::calls("cudaEventRecord");
        finish(q);
        return after_it - before;
    };
    timeline t;
    static_cast<void>(records_of(&t));  // makes the events
    const auto made = fake::calls("cudaEventCreate");
    CHECK(records_of(nullptr) == 2);  // behind q; the ticket's
    CHECK(fake::calls("cudaEventCreate") == made);
    CHECK(records_of(&t) == 6);
}

TEST_CASE_FIXTURE(fixture, "a lane that an exception ends while its stream is stuck leaves nothing behind") {
    timeline t;
    cuda_queue q(0);
    device main(q, {.name = "main", .timeout = 50ms});
    std::optional<cuda_queue> stuck;
    std::optional<fake::hold> held;
    try {
        lane l(main.duplicate("lane"), {.timeout = 50ms, .trace = &t});
        auto done = l.submit("done", takes(0ms));
        finish(l.queue());
        stuck = l.queue();
        held.emplace(stuck->stream());
        auto work = l.submit("stuck", takes(1ms), q);
        work.wait(q);
        throw std::runtime_error("x");
    } catch (const std::runtime_error&) {}
    CHECK_THROWS_AS(main.barrier(), aborted_error);
    CHECK(t.size() == 1);     // done
    CHECK(t.dropped() == 1);  // stuck
    CHECK(t.pending() == 1);  // q, which is not the lane's, still waits
    held.reset();
    finish(q);
    CHECK(t.pending() == 0);
    CHECK(t.size() == 2);
    CHECK(t.dropped() == 1);
}

TEST_CASE_FIXTURE(fixture, "what a lost device never reaches is dropped and counted") {
    timeline t;
    cuda_queue q(1);
    device main(q);
    lane l(main.duplicate("lane"), {.trace = &t});
    auto before = l.submit("before", takes(0ms), q);
    before.wait(q);
    finish(q);
    CHECK(t.size() == 2);
    {
        const fake::hold held(l.queue().stream());
        auto work = l.submit("work", takes(0ms), q);
        work.wait(q);
        CHECK(t.pending() == 2);
        fake::fault(1);
    }
    CHECK(t.dropped() == 2);
    CHECK(t.pending() == 0);
    CHECK_THROWS_AS(static_cast<void>(l.submit("later", takes(0ms), q)), backend_error);
    CHECK(t.size() == 2);
}

TEST_CASE_FIXTURE(fixture, "what is captured has no times; looking at a timeline spoils no capture") {
    timeline t;
    cuda_queue q(0);
    device main(q);
    lane l(main.duplicate("lane"), {.trace = &t});
    lane other(main.duplicate("other"), {.trace = &t});
    int runs = 0;
    cudaGraph_t graph = nullptr;
    std::optional<fake::hold> held(other.queue().stream());
    auto beside = other.submit("beside", takes(0ms));
    REQUIRE(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    {
        auto work = l.submit(
            "captured", [&runs](device& c) { fake::launch(c.queue().stream(), [&runs] { ++runs; }); }, q);
        work.wait(q);
        CHECK(t.pending() == 1);
        std::thread([&] { CHECK(t.pending() == 1); }).join();
        auto more = other.submit("more", takes(0ms));
        held.reset();
        while (t.pending() != 0) { std::this_thread::sleep_for(1ms); }
        CHECK(t.size() == 2);
        REQUIRE(cudaStreamEndCapture(q.stream(), &graph) == cudaSuccess);
    }
    CHECK(t.dropped() == 2);  // the captured work and the wait for it
    cudaGraphExec_t run = nullptr;
    REQUIRE(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
    auto replay = l.submit(
        "replay", [&](device& c) { CHECK(cudaGraphLaunch(run, c.queue().stream()) == cudaSuccess); }, q);
    replay.wait(q);
    finish(q);
    CHECK(runs == 1);
    CHECK(t.size() == 4);
    CHECK(t.dropped() == 2);
    CHECK(cudaGraphExecDestroy(run) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}
