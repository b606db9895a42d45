// What a lane costs, and what it hides. Micro rows: submit and wait on an idle lane, a burst of submissions, waiting
// for finished work, a hand-over through mutex and condition variable as yardstick. Then data_parallel over a slow
// network of stated bandwidth and latency: a step against the same step without communication. Ranks sleep while the
// network is busy, and while a layer is computed.
#include <algorithm>           // min, max
#include <condition_variable>  // yardstick
#include <limits>              // infinity
#include <mutex>               // yardstick
#include <thread>              // yardstick
#include <vector>              // tickets, parameters

#include <tutti/comm/self.hpp>
#include <tutti/comm/shaped.hpp>
#include <tutti/optimize/sgd.hpp>
#include <tutti/schedule/lane.hpp>
#include <tutti/strategy/data_parallel.hpp>

#include "support/microbenchmark.hpp"

namespace {

using lane = tutti::schedule::lane<tutti::comm::self<>>;
using ticket = tutti::schedule::ticket<tutti::host_queue>;

lane make_lane() { return lane(tutti::comm::self<>()); }

void submit_and_wait(benchmark::State& state) {
    lane l = make_lane();
    const tutti::host_queue consumer;
    for (auto _ : state) {
        const ticket t = l.submit("nothing", [](tutti::comm::self<>&) {});
        t.wait(consumer);
    }
}

// Time per submission when many are in flight.
void submit_burst(benchmark::State& state) {
    constexpr int burst = 64;
    lane l = make_lane();
    std::vector<ticket> tickets(burst);
    while (state.KeepRunningBatch(burst)) {
        for (ticket& t : tickets) {
            t = l.submit("nothing", [](tutti::comm::self<>&) {});
        }
        l.drain();
    }
}

void wait_for_finished(benchmark::State& state) {
    lane l = make_lane();
    const tutti::host_queue consumer;
    const ticket t = l.submit("nothing", [](tutti::comm::self<>&) {});
    l.drain();
    for (auto _ : state) { t.wait(consumer); }
}

// What a thread behind a mutex and two condition variables takes to do nothing.
void condition_variable(benchmark::State& state) {
    std::mutex mutex;
    std::condition_variable changed;
    bool asked = false;
    bool ended = false;
    std::thread worker([&] {
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return asked || ended; });
            if (ended) { return; }
            asked = false;
            changed.notify_all();
        }
    });
    for (auto _ : state) {
        std::unique_lock lock(mutex);
        asked = true;
        changed.notify_all();
        changed.wait(lock, [&] { return !asked; });
    }
    {
        const std::lock_guard lock(mutex);
        ended = true;
    }
    changed.notify_all();
    worker.join();
}

// --- data_parallel over a slow network -------------------------------------------------------------------------------
using network = tutti::comm::shaped<tutti::comm::threads>;

constexpr int layers = 16;
constexpr std::size_t elements = 64 * 1024;          // a layer's: 256 KiB, 4 MiB in all
constexpr auto work = std::chrono::milliseconds(2);  // backward pass of a layer

/// The quickest of several steps, the maximum over ranks: other work on the machine only adds time.
struct step_time {
    double with = 0;           ///< backward, gradients averaged meanwhile, update
    double computation = 0;    ///< the same on one rank
    double communication = 0;  ///< one all_reduce after the other, nothing beside
};

// An accelerator computes and a network card sends: processors are needed for neither, and are left to the lanes.
void compute_layer() { std::this_thread::sleep_for(work); }

/// Shortest time of `body`.
template <class Body> double quickest(int times, Body body) {
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < times; ++i) {
        const double start = bench::seconds_now();
        body();
        least = std::min(least, bench::seconds_now() - start);
    }
    return least;
}

template <class Strategy> double seconds_of_step(Strategy& s, int steps) {
    std::vector<std::vector<float>> values(layers, std::vector<float>(elements));
    tutti::strategy::parameters<float> list;
    for (int i = 0; i < layers; ++i) {
        list.push_back({"layer " + std::to_string(i), {elements}, true, values[static_cast<std::size_t>(i)], {}});
    }
    s.attach(list);
    const double seconds = quickest(steps, [&] {
        s.begin({});
        for (std::size_t i = layers; i-- > 0;) {
            compute_layer();
            s.gradient_ready(i);
        }
        s.step({.learning_rate = 0.1});
    });
    s.flush();
    return seconds;
}

step_time measure_steps(int ranks, const tutti::comm::shaped_network& slow, std::size_t bucket_bytes, int steps) {
    step_time result;
    std::mutex mutex;
    const auto keep = [&](double& longest, double mine) {
        const std::lock_guard lock(mutex);
        longest = std::max(longest, mine);
    };
    tutti::comm::threads::launch(ranks, [&](tutti::comm::threads& c) {
        {
            tutti::strategy::data_parallel<network, tutti::optimize::sgd> s(network(c.duplicate("slow"), slow), {},
                                                                            {.bucket_bytes = bucket_bytes});
            keep(result.with, seconds_of_step(s, steps));
        }
        c.barrier();
        tutti::strategy::local<tutti::optimize::sgd> alone{tutti::comm::self<>()};
        keep(result.computation, seconds_of_step(alone, steps));
        network n(c.duplicate("alone"), slow);
        std::vector<float> gradient(layers * elements);
        const tutti::view<float> g(gradient);
        const std::size_t bucket = bucket_bytes / sizeof(float);
        c.barrier();
        keep(result.communication, quickest(steps, [&] {
                 for (std::size_t at = 0; at < g.size(); at += bucket) {
                     const auto part = g.sub(at, std::min(bucket, g.size() - at));
                     n.all_reduce(part, part, tutti::mean{});
                 }
             }));
    });
    return result;
}

// The argument is the bandwidth of the network in MB/s. `exposed` is the part of the communication that a step still
// waits for: 0 when the lane hides all, 1 when it hides nothing. The last bucket starts when nothing is left to hide
// it.
void data_parallel_overlap(benchmark::State& state) {
    const tutti::comm::shaped_network slow(
        tutti::comm::link{.latency_seconds = 50e-6, .bytes_per_second = static_cast<double>(state.range(0)) * 1e6});
    constexpr int steps = 20;
    step_time t;
    for (auto _ : state) {
        t = measure_steps(2, slow, 512 * 1024, steps);
        state.SetIterationTime(t.with);
    }
    state.counters["compute_ms"] = t.computation * 1e3;
    state.counters["communicate_ms"] = t.communication * 1e3;
    state.counters["exposed"] = (t.with - t.computation) / t.communication;
}

void for_lanes(benchmark::internal::Benchmark* b) {
    b->UseRealTime()->ComputeStatistics("min", bench::minimum)->Unit(benchmark::kNanosecond);
}

BENCHMARK(submit_and_wait)->Apply(for_lanes);
BENCHMARK(submit_burst)->Apply(for_lanes);
BENCHMARK(wait_for_finished)->Apply(for_lanes);
BENCHMARK(condition_variable)->Apply(for_lanes);
BENCHMARK(data_parallel_overlap)
    ->Apply(bench::apply_defaults)
    ->Unit(benchmark::kMillisecond)
    ->Arg(1000)
    ->Arg(200)
    ->Iterations(1)
    ->Repetitions(3);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
