// What rounds of local steps hide: replicas that sleep while they compute a step, over a network of stated bandwidth.
// The mean of a round takes a given part of the round's computing; CO2 sends it beside the next round, local SGD while
// everyone waits. Rows: hidden and awaited means, the setting of the CO2 paper, and the period that is chosen by itself.
#include <algorithm>  // max
#include <chrono>     // a step
#include <cmath>      // ceil
#include <mutex>      // results of ranks
#include <thread>     // sleep_for
#include <vector>     // parameters

#include <tutti/comm/self.hpp>
#include <tutti/comm/shaped.hpp>
#include <tutti/optimize/sgd.hpp>
#include <tutti/schedule/overlap.hpp>
#include <tutti/strategy/data_parallel.hpp>
#include <tutti/strategy/local_update.hpp>

#include "support/microbenchmark.hpp"

namespace {

namespace strategy = tutti::strategy;
using network = tutti::comm::shaped<tutti::comm::threads>;
using replica = strategy::local<tutti::optimize::sgd>;
using engine = strategy::local_update<network, replica>;

constexpr int ranks = 2;
constexpr std::size_t elements = 64 * 1024;
constexpr double computing = 4e-3;  // seconds of a step, of which ranks sleep this long

struct measured {
    tutti::schedule::overlap_metrics rounds;  // mean over ranks
    std::size_t period = 0;
};

/// Steps whose mean takes `mean_seconds` on the network.
measured run(const strategy::local_update_rule& rule, double mean_seconds, int steps) {
    // An all_reduce of two ranks sends as many bytes as it has.
    const tutti::comm::shaped_network slow(tutti::comm::link{0, elements * sizeof(float) / mean_seconds});
    tutti::schedule::timeline trace;
    measured all;
    auto& sum = all.rounds;
    sum.step = sum.communication = sum.exposed = sum.outer = sum.round = 0;
    std::mutex mutex;
    tutti::comm::threads::launch(ranks, [&](tutti::comm::threads& world) {
        std::vector<float> values(elements);
        strategy::parameters<float> list{{"layer", {elements}, true, values, {}}};
        engine s(network(world.duplicate("across"), slow), replica(tutti::comm::self<>()), rule, {.trace = &trace});
        s.attach(list);
        for (int i = 0; i < steps; ++i) {
            s.begin({});
            std::this_thread::sleep_for(std::chrono::duration<double>(computing));
            s.gradient_ready(0);
            s.step({.learning_rate = 0.1});
        }
        s.flush();
        const auto own = s.overlap();
        const std::lock_guard lock(mutex);
        all.period = s.period();
        sum.period = own.period;
        sum.step += own.step / ranks;
        sum.communication += own.communication / ranks;
        sum.exposed += own.exposed / ranks;
        sum.outer += own.outer / ranks;
        sum.round += own.round / ranks;
    });
    return all;
}

void report(benchmark::State& state, const measured& m, double expected_throughput) {
    state.SetIterationTime(m.rounds.round);
    state.counters["step_ms"] = 1e3 * m.rounds.step;
    state.counters["mean_ms"] = 1e3 * m.rounds.communication;
    state.counters["exposed_ms"] = 1e3 * m.rounds.exposed;
    state.counters["outer_ms"] = 1e3 * m.rounds.outer;
    state.counters["hidden"] = m.rounds.efficiency();
    state.counters["interference"] = m.rounds.interference();
    state.counters["throughput"] = m.rounds.throughput();
    state.counters["expected"] = expected_throughput;
}

/// Of computing that takes `steps` steps, beside or before communication of `mean` steps.
double throughput_of(double steps, double mean, bool hidden) {
    return steps / (hidden ? std::max(steps, mean) : steps + mean);
}

/// The step as it is: what ranks sleep, and what sleeping and the update add.
double step_seconds() {
    static const double seconds = run(strategy::local_sgd_method{.period = 50}.rule(), 1e-3, 100).rounds.step;
    return seconds;
}

// Arguments: steps of a round, and what its mean takes in percent of them.
void mean_of_a_round(benchmark::State& state, bool hidden) {
    const auto period = static_cast<std::size_t>(state.range(0));
    const double part = static_cast<double>(state.range(1)) / 100 * static_cast<double>(period);
    const auto rule =
        hidden ? strategy::co2_method{.period = period}.rule() : strategy::local_sgd_method{.period = period}.rule();
    for (auto _ : state) {
        const auto m = run(rule, part * step_seconds(), static_cast<int>(period) * 10);
        report(state, m, throughput_of(static_cast<double>(period), part, hidden));
    }
}
void hidden_mean(benchmark::State& state) { mean_of_a_round(state, true); }
void awaited_mean(benchmark::State& state) { mean_of_a_round(state, false); }

// The paper's 128 GPUs at 80 Gbit/s, as far as its tables tell: a mean takes as long as 13.95 steps. Argument: steps of
// a round; 1: everyone waits for a mean in every step.
void paper_setting(benchmark::State& state) {
    constexpr double mean = 13.95;
    const auto period = static_cast<std::size_t>(state.range(0));
    for (auto _ : state) {
        const auto rule = period == 1 ? strategy::local_sgd_method{.period = 1}.rule()
                                      : strategy::co2_method{.period = period}.rule();
        auto m = run(rule, mean * step_seconds(), static_cast<int>(period) * 8);
        m.rounds.step = step_seconds();
        report(state, m, throughput_of(static_cast<double>(period), mean, period != 1));
    }
}

// Argument: what a mean takes in percent of a step. `wanted`: the steps that hide it.
void automatic_period(benchmark::State& state) {
    const double mean = static_cast<double>(state.range(0)) / 100;
    for (auto _ : state) {
        auto rule = strategy::co2_method{.period = 8}.rule();
        rule.automatic.emplace();
        const auto m = run(rule, mean * step_seconds(), 24 + 10 * static_cast<int>(std::ceil(mean)));
        report(state, m, 1);
        state.counters["period"] = static_cast<double>(m.period);
        state.counters["wanted"] = std::ceil(mean);
    }
}

void once(benchmark::internal::Benchmark* b) {
    b->Apply(bench::apply_defaults)->Unit(benchmark::kMillisecond)->Iterations(1)->Repetitions(3);
}
void parts_of_a_round(benchmark::internal::Benchmark* b) {
    for (const int part : {25, 50, 90, 100, 110, 150, 200}) { b->Args({8, part}); }
    once(b);
}

BENCHMARK(hidden_mean)->Apply(parts_of_a_round);
BENCHMARK(awaited_mean)->Apply(parts_of_a_round);
BENCHMARK(paper_setting)->Arg(1)->Arg(12)->Arg(48)->Apply(once);
BENCHMARK(automatic_period)->Arg(200)->Arg(400)->Arg(720)->Arg(880)->Arg(1200)->Arg(1600)->Apply(once);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
