// Data parallelism on queues that do not run inline: the same bits on a device-like stream; exact times on a virtual
// queue.
#include <doctest/doctest.h>  // checks

#include <chrono>  // delays
#include <span>    // ranks of a child
#include <thread>  // delays
#include <vector>  // values

#include "schedule/stream_queue.hpp"         // a device-like queue
#include "stream_toy.hpp"                    // its backward on a stream
#include "toy.hpp"                           // trainer
#include <tutti/comm/decorator.hpp>          // a link
#include <tutti/comm/self.hpp>               // one rank
#include <tutti/core/virtual_queue.hpp>      // exact times
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/schedule/timeline.hpp>       // timeline
#include <tutti/strategy/data_parallel.hpp>  // data_parallel

using namespace tutti;
using optimize::adamw;
using optimize::sgd;
using strategy::data_parallel;
using strategy::local;
using test::slope_operation;
using test::stream_memory;
using test::stream_queue;
using test::toy;

namespace {

// A virtual communicator whose reductions take one second a byte.
class slow_link : public comm::decorator<slow_link, comm::self<virtual_queue>> {
    using base = comm::decorator<slow_link, comm::self<virtual_queue>>;
    friend base;

public:
    explicit slow_link(comm::self<virtual_queue> inner) : base(std::move(inner)) {}
    void execute(const comm::call& c) {
        if (c.kind == comm::collective::all_reduce) { queue().charge("all_reduce", {double(c.in_bytes()), 0}); }
        inner().execute(c);
    }

private:
    void before(const typename base::control_call&) noexcept {}
    [[nodiscard]] slow_link wrap(comm::self<virtual_queue> child, std::span<const int>) {
        return slow_link(std::move(child));
    }
};

}  // namespace

TEST_CASE("a stream gives the bits of the host") {
    for (const bool scattered : {false, true}) {
        const auto how = scattered ? test::layout::scattered : test::layout::together;
        toy<float> t(how), u(how, scattered ? how : test::layout::none);
        local<adamw> on_host(comm::self<host_queue>{}, {}, {.bucket_bytes = 256});
        on_host.attach(t.parameters);

        using device = comm::self<stream_queue>;
        strategy::parameters<float, stream_memory> list;
        for (const auto& p : u.parameters) {
            list.push_back(
                {p.name, p.shape, p.decay, {p.value.data(), p.value.size()}, {p.gradient.data(), p.gradient.size()}});
        }
        data_parallel<device, adamw> on_stream(device{}, {}, {.bucket_bytes = 256});
        on_stream.attach(list);
        const stream_queue q = on_stream.queue();
        for (std::uint64_t step = 0; step < 5; ++step) {
            on_host.begin({});
            test::backward(on_host, step, 1, 1.0);
            const auto expected = on_host.step({.learning_rate = 0.05, .clip_norm = 1});
            on_stream.begin({});
            for (std::size_t i = list.size(); i-- > 0;) {
                run(q, slope_operation{on_stream.before_use(i), on_stream.gradient(i), i, step});
                on_stream.after_use(i);
                on_stream.gradient_ready(i);
            }
            const auto result = on_stream.step({.learning_rate = 0.05, .clip_norm = 1});
            CHECK(result.norm == expected.norm);
        }
        on_stream.finish();
        on_host.finish();
        CHECK(test::same_bytes(u.values(), t.values()));
    }
}

TEST_CASE("a virtual step takes exactly the time of what it overlaps and what it cannot") {
    // One byte a second. Two parameters of 100 and 300 floats, a bucket each: {p1}, {p0}.
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    strategy::parameters<float, phantom_memory> list{{"p0", {100}, true, {nullptr, 100}, {}},
                                                     {"p1", {300}, true, {nullptr, 300}, {}}};
    const auto step_time = [&](auto& s) {
        const double before = resolve(q.recording())[0];
        s.begin({});
        for (const std::size_t i : {1ul, 0ul}) {
            static_cast<void>(s.before_use(i));
            q.charge("backward", {1000, 0});
            s.after_use(i);
            s.gradient_ready(i);
        }
        CHECK(s.step({.learning_rate = 0.1, .clip_norm = 1}).norm == 0);
        return resolve(q.recording())[0] - before;
    };
    const double n = 400;
    const double zero = 4 * n;
    const double norm = 4 * n + 8 + 16;  // gradients, one block's sum written, read and written
    const double update = 8 + 20 * n;    // step count; gradient, value and velocity
    {
        local<sgd, float, virtual_queue> s(comm::self<virtual_queue>(q), {}, {.bucket_bytes = 4});
        s.attach(list);
        CHECK(s.plan().buckets.size() == 2);
        for (int k = 0; k < 3; ++k) { CHECK(step_time(s) == zero + 2000 + norm + update); }
        CHECK(q.account().live() == std::size_t{4 * 400 + 4 * 400 + 2 * 8 + 8});  // gradient, velocity, norm, count
        s.finish();
    }
    CHECK(q.account().live() == 0);
    {
        // The trainer's own gradients: packed and unpacked on the lane, 8 bytes an element each way. Only p0 is.
        list[0].gradient = {nullptr, 100};
        list[1].gradient = {nullptr, 0};
        local<sgd, float, virtual_queue> s(comm::self<virtual_queue>(q), {}, {.bucket_bytes = 4});
        s.attach(list);
        const double lane = 2000 + 2 * 8 * 100;  // p1 needs no packing, p0 is ready at 2000
        CHECK(step_time(s) == zero + 4 * 100 + lane + norm + update);
        s.finish();
    }
    {
        list[1].gradient = {nullptr, 300};  // all of the trainer's: taken as one run, nothing is packed
        local<sgd, float, virtual_queue> s(comm::self<virtual_queue>(q), {}, {.bucket_bytes = 4});
        s.attach(list);
        CHECK(step_time(s) == zero + 2000 + norm + update);
        s.finish();
    }
    {
        // p1 is ready at 1000 and takes 1200 s on the lane, p0 is ready at 2000, starts at 2200 and takes 400.
        list[0].gradient = list[1].gradient = {};
        data_parallel<slow_link, sgd> s(slow_link(comm::self<virtual_queue>(q)), {}, {.bucket_bytes = 4});
        s.attach(list);
        CHECK(step_time(s) == zero + 2600 + norm + update);
        CHECK(step_time(s) == zero + 2600 + norm + update);
        s.finish();
    }
    {
        // In one bucket nothing overlaps.
        data_parallel<slow_link, sgd> s(slow_link(comm::self<virtual_queue>(q)), {}, {.bucket_bytes = 1600});
        s.attach(list);
        CHECK(s.plan().buckets.size() == 1);
        CHECK(step_time(s) == zero + 2000 + 1600 + norm + update);
        s.finish();
    }
}

TEST_CASE("on a stream a step begins and ends where the stream is, and its collectives lie inside") {
    using device = comm::self<stream_queue>;
    toy<float> t(test::layout::together);
    strategy::parameters<float, stream_memory> list;
    for (const auto& p : t.parameters) {
        list.push_back({p.name, p.shape, p.decay, {p.value.data(), p.value.size()}, {}});
    }
    schedule::timeline trace;
    data_parallel<device, sgd> s(device{}, {}, {.bucket_bytes = 256, .trace = &trace});
    s.attach(list);
    const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    s.queue().enqueue(sleep);  // before the step, although the host begins the step meanwhile
    const auto before = s.queue().mark();
    s.begin({0, 1});
    for (std::size_t i = 0; i < list.size(); ++i) { s.gradient_ready(i); }
    CHECK_FALSE(s.step({.learning_rate = 0.1}).skipped);
    const auto behind = s.queue().mark();
    s.queue().enqueue(sleep);
    s.flush();
    CHECK(trace.pending() == 0);
    CHECK(trace.dropped() == 0);
    const auto steps = trace.steps(0);
    REQUIRE(steps.size() == 1);
    CHECK(steps[0].begin >= before->when());
    CHECK(steps[0].end <= behind->when());
    CHECK(steps[0].exposed > 0);
    double work = 0;
    for (const auto& total : trace.totals(0)) {
        if (total.kind == schedule::span_kind::communication) { work += total.seconds; }
    }
    CHECK(work > 0);
    CHECK(work < steps[0].seconds);
}
