// The library's own programs on virtual ranks: what real ranks call, in their order, send, hold, and take on a stated
// network; pipelines to the second; what overlap hides.
#include <doctest/doctest.h>

#include <array>    // sizes
#include <chrono>   // deadlines
#include <limits>   // computing that takes no time
#include <map>      // calls by communicator
#include <memory>   // clocks shared by lanes
#include <mutex>    // lanes sleep too
#include <numeric>  // sums
#include <span>     // members
#include <string>   // names
#include <utility>  // move
#include <vector>   // ranks

#include <tutti/comm/counted.hpp>                    // bytes on the wire
#include <tutti/comm/decorator.hpp>                  // logs of calls
#include <tutti/comm/shaped.hpp>                     // a stated network
#include <tutti/comm/threads.hpp>                    // real ranks
#include <tutti/core/elementwise.hpp>                // fill
#include <tutti/core/text.hpp>                       // formatted
#include <tutti/optimize/adamw.hpp>                  // adamw
#include <tutti/parallel/pipeline.hpp>               // pipeline
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules
#include <tutti/parallel/tensor_group.hpp>           // tensor_group
#include <tutti/parallel/tied_weights.hpp>           // tied_weights
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
doctest::Approx exactly(double x) { return doctest::Approx(x).epsilon(1e-10).scale(1); }

// Every call of a rank in its order, by communicator: what it is, its sizes, and to whom.
struct call_log {
    std::mutex mutex;  // lanes call too
    std::map<std::string, std::vector<std::string>> lines;
};
template <comm::decoratable C> class logged : public comm::decorator<logged<C>, C> {
    using base = comm::decorator<logged<C>, C>;
    friend base;
    std::shared_ptr<call_log> log_;

public:
    explicit logged(C inner, std::shared_ptr<call_log> into) : base(std::move(inner)), log_(std::move(into)) {}
    void execute(const comm::call& c) {
        std::string line =
            formatted("{} {} of {} to {}, {}", name_of(c.kind), c.in_count, name_of(c.type), c.out_count, c.root);
        for (const comm::message& m : c.messages) {
            line += formatted(" {}{}: {}", m.sends ? "to " : "from ", m.peer, m.bytes);
        }
        add(line);
        this->inner().execute(c);
    }

private:
    void add(const std::string& line) {
        const std::lock_guard lock(log_->mutex);
        log_->lines[std::string(this->name())].push_back(line);
    }
    void before(const typename base::control_call& c) { add(std::string(name_of(comm::operation(c.kind)))); }
    [[nodiscard]] logged wrap(C child, std::span<const int>) { return logged(std::move(child), log_); }
};
std::vector<std::shared_ptr<call_log>> logs(std::size_t ranks) {
    std::vector<std::shared_ptr<call_log>> all;
    for (std::size_t r = 0; r < ranks; ++r) { all.push_back(std::make_shared<call_log>()); }
    return all;
}

}  // namespace

TEST_CASE("data parallelism takes on virtual ranks what it takes on real ones over the same network") {
    const topology network = topology::uniform(2, 2, {1e-6, 1e9}, {1e-5, 1e8}, 2);
    std::vector<comm::traffic_snapshot> sent(4);
    std::vector<double> elapsed(4);
    const auto called = logs(4), foretold = logs(4);
    threads::launch(4, [&](threads& t) {
        const auto rank = static_cast<std::size_t>(t.rank());
        jumping_clock clock;
        logged world(counted(comm::shaped(std::move(t), comm::shaped_network(network), std::chrono::hours(1), clock)),
                     called[rank]);
        data_parallel_program(world);
        sent[rank] = world.inner().traffic_ledger()->snapshot();
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
    // A counted communicator counts the same on virtual ranks, which make the same calls in the same order.
    std::vector<comm::traffic> counts(4);
    static_cast<void>(machines.run([&](simulate::communicator& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        logged c(counted(std::move(world)), foretold[rank]);
        data_parallel_program(c);
        counts[rank] = c.inner().traffic_ledger()->total();
    }));
    for (std::size_t r = 0; r < 4; ++r) {
        CHECK(counts[r] == sent[r].total());
        CHECK(foretold[r]->lines == called[r]->lines);
        CHECK(called[r]->lines.at("world/dp/gradients").size() == all_steps * plan.buckets.size());
    }
}

TEST_CASE("CO2 over ZeRO-3 sends on virtual ranks what it sends on real ones, and holds the same memory") {
    std::vector<comm::traffic_snapshot> sent(4);
    std::vector<std::size_t> peaks(4);
    const auto called = logs(4), foretold = logs(4);
    threads::launch(4, [&](threads& t) {
        const auto rank = static_cast<std::size_t>(t.rank());
        logged world(counted(std::move(t)), called[rank]);
        co2_program(world);
        sent[rank] = world.inner().traffic_ledger()->snapshot();
        peaks[rank] = world.queue().account().peak();
    });
    const auto o =
        simulate::cluster(topology::uniform(2, 2, {}, {1e-5, 1e8}, 2)).run([&](simulate::communicator& world) {
            const auto rank = static_cast<std::size_t>(world.rank());
            logged c(std::move(world), foretold[rank]);
            co2_program(c);
        });
    CHECK(o.passes == 1);
    for (std::size_t r = 0; r < 4; ++r) {
        CAPTURE(r);
        CHECK(foretold[r]->lines == called[r]->lines);
        CHECK(called[r]->lines.size() > 4);
        CHECK(o.ranks[r].traffic == sent[r]);
        CHECK(sent[r][collective::all_gather_v].calls > 0);
        CHECK(o.ranks[r].peak_bytes == peaks[r]);
    }
}

namespace {

// Stages whose passes take stated times on the pipeline's queue, if it is virtual; they give zeros.
template <queue Q> struct timed_stage {
    Q queue;
    parallel::pass_times times;
    using in = view<const float, typename Q::memory_type>;
    using out = view<float, typename Q::memory_type>;
    void forward(const parallel::stage_call&, in, out y) { pass("forward", times.forward, y); }
    void backward_input(const parallel::stage_call&, in, in, out d) { pass("input gradient", times.backward_input, d); }
    void backward_weight(const parallel::stage_call&, in, in) { pass("weight gradient", times.backward_weight, {}); }

private:
    void pass(const char* name, std::int64_t t, out y) {
        if constexpr (charging_queue<Q>) {
            queue.charge(name, {double(t), 0});
        } else {
            fill(queue, y, 0.0F);
        }
    }
};

simulate::outcome run_pipeline(const parallel::pipeline_schedule& s, const parallel::pass_times& times, comm::link l,
                               bool overlap = true) {
    parallel::pipeline_options options;
    options.elements = {100};
    options.overlap = overlap;
    options.times = times;
    const auto shared =
        parallel::plan_pipeline(s, overlap ? parallel::delivery::ahead : parallel::delivery::between, times);
    return simulate::cluster(topology::uniform(s.ranks, 1, {}, l), {1, 1}).run([&](simulate::communicator& world) {
        parallel::pipeline<simulate::communicator, float> pipe(std::move(world), shared, options);
        timed_stage<virtual_queue> stage{pipe.queue(), times};
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

TEST_CASE("gradients of tied weights are added up behind what the pipeline's queue did, and before what it does next") {
    using namespace parallel;
    const view<float, phantom_memory> gradient{nullptr, 100};
    const auto o = simulate::cluster(topology::uniform(4, 1, {}, {0, 100}), {1, 1}).run([&](simulate::communicator& c) {
        tied_weights<simulate::communicator> ends(c, one_forward_one_backward(4, 4), {0, 3});
        virtual_queue q = c.queue();
        q.charge("backward", {double(c.rank() + 1), 0});
        if (!ends.held()) { return; }
        ends.add_up(gradient);
        q.charge("update", {1, 0});
    });
    // The last rank's backward, 400 bytes to one other rank at 100 a second, and an update.
    CHECK(o.ranks[0].end == 4 + 4 + 1);
    CHECK(o.ranks[3].end == 9);
    CHECK(o.ranks[2].end == 3);
}

TEST_CASE("pipelines on virtual ranks: the messages of real ones, call by call, and what they hold") {
    using namespace parallel;
    constexpr int p = 4;
    const auto run = [](auto& world, const pipeline_schedule& s, bool overlap) {
        using C = std::remove_reference_t<decltype(world)>;
        pipeline_options options;
        options.elements = {100};
        options.overlap = overlap;
        pipeline<C, float> pipe(std::move(world), s, options);
        timed_stage<queue_of<C>> stage{pipe.queue(), {}};
        const pipeline_counts counts = pipe.run(stage);
        return std::pair(counts, pipe.queue().account().peak());
    };
    for (const auto& s : {one_forward_one_backward(p, 8), interleaved(p, 8, 2), zero_bubble_v(p, 8), dual_pipe(p, 8)}) {
        for (const bool overlap : {false, true}) {
            CAPTURE(s.name);
            CAPTURE(overlap);
            std::vector<std::pair<pipeline_counts, std::size_t>> real(p), virtual_ones(p);
            const auto called = logs(p), foretold = logs(p);
            threads::launch(p, [&](threads& t) {
                const auto rank = static_cast<std::size_t>(t.rank());
                logged world(std::move(t), called[rank]);
                real[rank] = run(world, s, overlap);
            });
            static_cast<void>(simulate::cluster(topology::one_node(p)).run([&](simulate::communicator& own) {
                const auto rank = static_cast<std::size_t>(own.rank());
                logged world(std::move(own), foretold[rank]);
                virtual_ones[rank] = run(world, s, overlap);
            }));
            for (std::size_t r = 0; r < p; ++r) {
                CHECK(virtual_ones[r].first == real[r].first);
                CHECK(foretold[r]->lines == called[r]->lines);
                CHECK(virtual_ones[r].second == real[r].second);
            }
        }
    }
}

namespace {

constexpr std::size_t layers = 8;
constexpr std::size_t layer_elements = 1 << 20;
constexpr double second = 1e12;  // FLOPs

// Seconds of a step, when many have been made, that two ranks wait for each other, where a layer takes a second to go one
// way: `program` makes so many steps.
template <class Program> double exposed(Program program) {
    const auto step = [&](comm::link between) {
        const auto took = [&](int steps) {
            return simulate::cluster(topology::uniform(2, 1, {}, between), {infinity, second})
                .run([&](simulate::communicator& world) { program(world, steps); })
                .seconds;
        };
        return took(5) - took(4);
    };
    return step({0, 4.0 * layer_elements}) - step({});
}
// Layers whose forward takes a second and whose backward takes two; in buckets of a layer, or all in one, which leaves
// nothing to hide it.
template <class S> double exposed_of(bool overlap) {
    return exposed([&](simulate::communicator& world, int steps) {
        const std::size_t bytes = 4 * layer_elements;
        S s(world.duplicate("dp"), {}, {.bucket_bytes = overlap ? bytes : layers * bytes});
        virtual_queue q = s.queue();
        strategy::parameters<float, phantom_memory> list;
        for (std::size_t i = 0; i < layers; ++i) {
            list.push_back({formatted("p{}", i), {layer_elements}, true, {nullptr, layer_elements}, {}});
        }
        s.attach(list);
        for (int step = 0; step < steps; ++step) {
            s.begin({});
            for (std::size_t i = 0; i < layers; ++i) {
                static_cast<void>(s.before_use(i));
                q.charge("forward", {0, second});
                s.after_use(i);
            }
            for (std::size_t i = layers; i-- > 0;) {
                static_cast<void>(s.before_use(i));
                q.charge("backward", {0, 2 * second});
                s.after_use(i);
                s.gradient_ready(i);
            }
            s.step({.learning_rate = 0.1});
        }
        s.finish();
    });
}
// A layer over two ranks goes backward, as parallel/linear does it: half of the rows come, and half of the sums go, beside
// a product each.
double exposed_of_tensor(bool overlap, double product) {
    return exposed([&](simulate::communicator& world, int steps) {
        parallel::tensor_group<simulate::communicator> group(world.duplicate("tp"),
                                                             {.sequence_parallel = true, .overlap = overlap});
        virtual_queue q = group.queue();
        const view<float, phantom_memory> all(nullptr, 2 * layer_elements), share(nullptr, layer_elements);
        for (int step = 0; step < steps; ++step) {
            const auto rows = group.gather_rows(2, layer_elements, view<const float, phantom_memory>(share), all);
            q.charge("gradient of inputs", {0, product * second});
            const auto sums = group.sum_to_rows(2, layer_elements, view<const float, phantom_memory>(all), share);
            rows.wait(q);
            q.charge("gradient of weights", {0, product * second});
            sums.wait(q);
        }
    });
}

}  // namespace

TEST_CASE("overlap hides at least half of what is waited for without it, where computing takes as long") {
    using virtual_rank = simulate::communicator;
    constexpr double norm = 8.0 * layers * layer_elements / 4096 / (4 * layer_elements);  // of shards: blocks' sums
    using data_parallel = strategy::data_parallel<virtual_rank, adamw>;
    CHECK(exposed_of<data_parallel>(false) == exactly(layers));
    CHECK(exposed_of<data_parallel>(true) == exactly(1));  // the last gradient to be ready
    using shared_gradients = strategy::zero<2, virtual_rank, adamw>;
    CHECK(exposed_of<shared_gradients>(false) == exactly(layers + norm));  // half of it each way
    CHECK(exposed_of<shared_gradients>(true) == exactly(1 + norm));
    using shared_values = strategy::zero<3, virtual_rank, adamw>;
    CHECK(exposed_of<shared_values>(false) == exactly(layers + norm));
    CHECK(exposed_of<shared_values>(true) == exactly(1 + norm));
    CHECK(exposed_of_tensor(false, 1) == exactly(2));
    CHECK(exposed_of_tensor(true, 1) == exactly(0));
    CHECK(exposed_of_tensor(true, 0.75) == exactly(0.5));

    using namespace parallel;
    const pass_times times{.forward = 10, .backward_input = 10, .backward_weight = 10, .transfer = 5};
    const auto waits = [&](const pipeline_schedule& s, bool overlap) {
        return run_pipeline(s, times, {1, 100}, overlap).seconds - run_pipeline(s, times, {}, overlap).seconds;
    };
    for (const auto& s : {interleaved(4, 16, 2), zero_bubble(4, 16, times), zero_bubble_v(4, 16, times)}) {
        CAPTURE(s.name);
        CHECK(waits(s, true) <= 0.5 * waits(s, false));
    }
    // 1F1B sends the next micro-batch on when the one before has come back: most of that is on its way.
    CHECK(waits(one_forward_one_backward(4, 16), true) < waits(one_forward_one_backward(4, 16), false));
}
