// Choosing levels of compression: time of choose_levels on one core, by number of layers, for its solvers and its lower
// bound. 30 options a layer, 10,000 bins, sizes and errors over orders of magnitude. Bars: rounded solvers 10 ms at 200
// layers and 50 ms at 1000, carried 300 ms and 1 s. `of_uniform` is the cost found, as a share of the uniform choice.
// Rows "every_cell": errors fall so slowly that all options fit into the budget nearly everywhere, the slowest case.
#include <cmath>   // exp, pow
#include <random>  // sizes, errors
#include <vector>  // rows

#include <tutti/compress/level_choice.hpp>

#include "support/microbenchmark.hpp"

namespace {

using tutti::compress::level_solver;

struct problem {
    tutti::compress::level_table table;
    std::vector<std::size_t> uniform;
};

// Errors fall with the level at a rate of the layer's own, between `fastest` and fastest + spread a level.
problem make_problem(std::size_t layers, double fastest, double spread) {
    constexpr int options = 30;
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> unit(0, 1);
    problem p;
    for (std::size_t l = 0; l < layers; ++l) {
        const double size = std::floor(1000 * std::exp(9 * unit(random)));
        const double scale = std::exp(4 * unit(random));
        const double decay = fastest + spread * unit(random);
        std::vector<double> costs;
        std::vector<double> errors;
        for (int level = 1; level <= options; ++level) {
            costs.push_back(size * level);
            errors.push_back(scale * std::pow(decay, 0.7 * level));
        }
        p.table.add_layer(costs, errors);
        p.uniform.push_back(options / 3);
    }
    return p;
}

void choose(benchmark::State& state, level_solver solver, bool lower_bound, bool every_cell = false) {
    const auto layers = static_cast<std::size_t>(state.range(0));
    const problem p = every_cell ? make_problem(layers, 0.85, 0.1) : make_problem(layers, 0.3, 0.6);
    tutti::compress::level_choice c;
    for (auto _ : state) {
        c = choose_levels(p.table, p.uniform, {.solver = solver, .lower_bound = lower_bound});
        benchmark::DoNotOptimize(c);
    }
    state.counters["of_uniform"] = c.cost / c.uniform_cost;
    if (c.lower_bound) { state.counters["bound_of_uniform"] = *c.lower_bound / c.uniform_cost; }
}

void for_sizes(benchmark::internal::Benchmark* b) {
    b->Unit(benchmark::kMillisecond)->UseRealTime()->ComputeStatistics("min", bench::minimum);
    for (const int layers : {50, 200, 1000}) { b->Arg(layers); }
}

BENCHMARK_CAPTURE(choose, rounded_up, level_solver::rounded_up, false)->Apply(for_sizes);
BENCHMARK_CAPTURE(choose, rounded_nearest, level_solver::rounded_nearest, false)->Apply(for_sizes);
BENCHMARK_CAPTURE(choose, with_lower_bound, level_solver::rounded_nearest, true)->Apply(for_sizes);
BENCHMARK_CAPTURE(choose, carried, level_solver::carried, false)->Apply(for_sizes);
BENCHMARK_CAPTURE(choose, rounded_nearest_every_cell, level_solver::rounded_nearest, false, true)->Apply(for_sizes);
BENCHMARK_CAPTURE(choose, carried_every_cell, level_solver::carried, false, true)->Apply(for_sizes);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
