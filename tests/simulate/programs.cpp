// The library's own programs on virtual ranks: what real ranks send, and take on a stated network; pipelines to the
// second.
#include <doctest/doctest.h>

#include <array>    // sizes
#include <chrono>   // deadlines
#include <limits>   // computing that takes no time
#include <memory>   // clocks shared by lanes
#include <mutex>    // lanes sleep too
#include <numeric>  // sums
#include <string>   // names
#include <utility>  // move
#include <vector>   // ranks

#include <tutti/comm/counted.hpp>                    // bytes on the wire
#include <tutti/comm/shaped.hpp>                     // a stated network
#include <tutti/comm/threads.hpp>                    // real ranks
#include <tutti/core/elementwise.hpp>                // fill
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/optimize/adamw.hpp>                  // adamw
#include <tutti/parallel/pipeline.hpp>               // pipeline
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules
#include <tutti/simulate/simulate.hpp>               // tested
#include <tutti/strategy/data_parallel.hpp>          // data_parallel
#include <tutti/strategy/local_update.hpp>           // co2
#include <tutti/strategy/zero.hpp>                   // zero

using namespace tutti;
using comm::collective;
using comm::counted;
using comm::threads;
using comm::topology;
using optimize::adamw;

namespace {

constexpr std::array<std::size_t, 5> sizes{5000, 300, 9000, 77, 4100};
constexpr std::size_t elements = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
constexpr int all_steps = 5;

// A trainer of no model: values and gradients are what `fill` leaves. It is the same on every queue.
template <class S> void train(S& s) {
    using Q = typename S::queue_type;
    using M = typename S::memory_type;
    Q q = s.queue();
    const buffer<float, Q> values(q, elements);
    fill(q, values.view(), 1.0F);
    strategy::parameters<float, M> list;
    std::size_t offset = 0;
    for (const std::size_t n : sizes) {
        list.push_back({formatted("p{}", list.size()), {n}, true, values.view().sub(offset, n), {}});
        offset += n;
    }
    s.attach(list);
    for (int step = 0; step < all_steps; ++step) {
        s.begin({});
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            static_cast<void>(s.before_use(i));
            s.after_use(i);
        }
        for (std::size_t i = sizes.size(); i-- > 0;) {
            static_cast<void>(s.before_use(i));
            fill(q, s.gradient(i), 0.01F);
            s.after_use(i);
            s.gradient_ready(i);
        }
        s.step({.learning_rate = 0.1, .clip_norm = 1});
    }
    s.flush();
    s.finish();
}

template <class C> void data_parallel_program(C& world) {
    strategy::data_parallel<C, adamw> s(world.duplicate("dp"), {}, {.bucket_bytes = 16384});
    train(s);
}
// Two replicas of two ranks: ZeRO-3 inside, CO2 across.
template <class C> void co2_program(C& world) {
    const std::vector<int> inside{0, 0, 1, 1}, across{0, 1, 0, 1};
    strategy::zero<3, C, adamw> inner(*world.split(inside, "inside"), {}, {.bucket_bytes = 16384});
    strategy::co2<C, strategy::zero<3, C, adamw>> s(*world.split(across, "across"), std::move(inner), {.period = 2});
    train(s);
}

// Time passes only while somebody sleeps. Copies, those of a rank's lanes, are one clock.
class jumping_clock {
    struct state {
        std::mutex mutex;
        deadline now{};
    };
    std::shared_ptr<state> state_ = std::make_shared<state>();

public:
    [[nodiscard]] deadline now() const {
        const std::lock_guard lock(state_->mutex);
        return state_->now;
    }
    void sleep_until(deadline until) {
        const std::lock_guard lock(state_->mutex);
        state_->now = std::max(state_->now, until);
    }
};

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("data parallelism takes on virtual ranks what it takes on real ones over the same network") {
    const topology network = topology::uniform(2, 2, {1e-6, 1e9}, {1e-5, 1e8}, 2);
    std::vector<comm::traffic_snapshot> sent(4);
    std::vector<double> elapsed(4);
    threads::launch(4, [&](threads& t) {
        const auto rank = static_cast<std::size_t>(t.rank());
        jumping_clock clock;
        counted world(comm::shaped(std::move(t), comm::shaped_network(network), std::chrono::hours(1), clock));
        data_parallel_program(world);
        sent[rank] = world.traffic_ledger()->snapshot();
        elapsed[rank] = seconds(clock.now() - deadline{});
    });
    const simulate::cluster machines(network, {infinity, infinity});
    const auto virtual_run = machines.run([](simulate::communicator& world) { data_parallel_program(world); });
    CHECK(virtual_run.passes == 1);
    double modelled = comm::time_of(collective::broadcast, 4.0 * elements, network).seconds();
    const auto plan = schedule::plan_buckets(sizes, 4, 16384);
    for (const auto& b : plan.buckets) {
        modelled += all_steps * comm::time_of(collective::all_reduce, 4.0 * double(b.size), network).seconds();
    }
    for (std::size_t r = 0; r < 4; ++r) {
        CAPTURE(r);
        CHECK(virtual_run.ranks[r].traffic == sent[r]);
        CHECK(sent[r][collective::all_reduce].calls == all_steps * plan.buckets.size());
        CHECK(virtual_run.ranks[r].end == doctest::Approx(modelled).epsilon(1e-12));
        CHECK(elapsed[r] == doctest::Approx(modelled).epsilon(1e-6));  // whole nanoseconds
    }
    // A counted communicator counts the same on virtual ranks.
    std::vector<comm::traffic> counts(4);
    static_cast<void>(machines.run([&](simulate::communicator& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        counted<simulate::communicator> c(std::move(world));
        data_parallel_program(c);
        counts[rank] = c.traffic_ledger()->total();
    }));
    for (std::size_t r = 0; r < 4; ++r) { CHECK(counts[r] == sent[r].total()); }
}

TEST_CASE("CO2 over ZeRO-3 sends on virtual ranks what it sends on real ones, and holds the same memory") {
    std::vector<comm::traffic_snapshot> sent(4);
    std::vector<std::size_t> peaks(4);
    threads::launch(4, [&](threads& t) {
        const auto rank = static_cast<std::size_t>(t.rank());
        counted world(std::move(t));
        co2_program(world);
        sent[rank] = world.traffic_ledger()->snapshot();
        peaks[rank] = world.queue().account().peak();
    });
    const auto o =
        simulate::cluster(topology::uniform(2, 2, {}, {1e-5, 1e8}, 2)).run([](simulate::communicator& world) {
            co2_program(world);
        });
    for (std::size_t r = 0; r < 4; ++r) {
        CAPTURE(r);
        CHECK(o.ranks[r].traffic == sent[r]);
        CHECK(sent[r][collective::all_gather_v].calls > 0);
        CHECK(o.ranks[r].peak_bytes == peaks[r]);
    }
}

namespace {

// Stages whose passes take stated times on the pipeline's queue.
struct timed_stage {
    virtual_queue queue;
    parallel::pass_times times;
    using in = view<const float, phantom_memory>;
    using out = view<float, phantom_memory>;
    void forward(const parallel::stage_call&, in, out) { charge("forward", times.forward); }
    void backward_input(const parallel::stage_call&, in, in, out) { charge("input gradient", times.backward_input); }
    void backward_weight(const parallel::stage_call&, in, in) { charge("weight gradient", times.backward_weight); }

private:
    void charge(const char* name, std::int64_t t) { queue.charge(name, {double(t), 0}); }
};

simulate::outcome run_pipeline(const parallel::pipeline_schedule& s, const parallel::pass_times& times, comm::link l) {
    parallel::pipeline_options options;
    options.elements = {100};
    options.overlap = true;
    options.times = times;
    const auto shared = parallel::plan_pipeline(s, parallel::delivery::ahead, times);
    return simulate::cluster(topology::uniform(s.ranks, 1, {}, l), {1, 1}).run([&](simulate::communicator& world) {
        parallel::pipeline<simulate::communicator, float> pipe(std::move(world), shared, options);
        timed_stage stage{pipe.queue(), times};
        const auto counts = pipe.run(stage);
        CHECK(counts.bytes_sent == 400 * counts.messages_sent);
    });
}

}  // namespace

TEST_CASE("pipelines take what their schedules say: bubbles and messages, exactly") {
    using namespace parallel;
    const pass_times unit{};
    CHECK(run_pipeline(gpipe(4, 8), unit, {}).seconds == (8 + 3) * 3);
    CHECK(run_pipeline(one_forward_one_backward(4, 8), unit, {}).seconds == 33);
    CHECK(run_pipeline(interleaved(4, 8, 2), unit, {}).seconds == 57);  // in units of a chunk
    const auto o = run_pipeline(one_forward_one_backward(4, 8), unit, {});
    for (const auto& r : o.ranks) { CHECK(r.work == 24); }
    CHECK(o.ranks[1].traffic[collective::exchange].bytes == 2 * 8 * 400);
    pass_times times{.forward = 10, .backward_input = 12, .backward_weight = 8};
    for (const auto& s : {gpipe(3, 7), one_forward_one_backward(5, 9), interleaved(3, 9, 3), zero_bubble(8, 24),
                          zero_bubble_v(4, 12), dual_pipe(8, 20)}) {
        CAPTURE(s.name);
        CHECK(run_pipeline(s, times, {}).seconds == double(replayed(s, times).makespan()));
    }
    // Messages of 400 bytes at 100 B/s, and a second of latency: what `transfer` is in the replay.
    times.transfer = 5;
    CHECK(run_pipeline(gpipe(3, 2), times, {1, 100}).seconds == double(replayed(gpipe(3, 2), times).makespan()));
    CHECK_THROWS_WITH_AS((simulate::cluster(topology::one_node(3)).run([](simulate::communicator& world) {
                             const parallel::pipeline<simulate::communicator, float> pipe(
                                 std::move(world), plan_pipeline(gpipe(3, 2)), {.elements = {100}, .overlap = true});
                         })),
                         "pipeline: the plan is for messages between computations, overlap is on", usage_error);
}
