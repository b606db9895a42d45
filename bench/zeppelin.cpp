// Placing a batch of sequences: time of a plan on one core, by number of sequences and of ranks (nodes of eight). Bars:
// 1 ms for 64 sequences on 64 ranks, 10 ms for 600. 32 batches of ProLong's lengths, capacity 1.25 times the average.
// `imbalance` is the slowest rank over the lower bound, on average: of computing alone, or, in rows "transfers", with
// what links of 300 GB/s in a node and 25 GB/s between do not hide; `of_even` is then the time of even rings over that
// of the plan.
#include <cstdint>  // lengths
#include <vector>   // batches

#include <tutti/sequence/estimate.hpp>             // of even rings
#include <tutti/sequence/lengths.hpp>              // batches
#include <tutti/sequence/partition/even_ring.hpp>  // even_ring
#include <tutti/sequence/partition/zeppelin.hpp>   // zeppelin

#include "support/microbenchmark.hpp"

namespace {

namespace sequence = tutti::sequence;
using sequence::partition::zeppelin;
using sequence::partition::zeppelin_options;

struct batch {
    std::vector<std::int64_t> lengths;
    std::int64_t capacity;
};

std::vector<batch> make_batches(std::size_t sequences, int ranks) {
    std::vector<batch> all(32);
    for (std::size_t b = 0; b < all.size(); ++b) {
        std::int64_t total = 0;
        for (std::size_t i = 0; i < sequences; ++i) {
            all[b].lengths.push_back(
                length_at(sequence::length_distribution_named("prolong"), {1, 2, static_cast<std::uint32_t>(b)}, i));
            total += all[b].lengths.back();
        }
        all[b].capacity = total / ranks * 5 / 4;
    }
    return all;
}

void plan(benchmark::State& state, bool transfers) {
    const int ranks = static_cast<int>(state.range(1));
    const sequence::cluster machines{ranks / 8, 8};
    const auto batches = make_batches(static_cast<std::size_t>(state.range(0)), ranks);
    const sequence::transfer_cost links{sequence::kv_bytes_per_token(8, 128, 2), {5e-6, 300e9}, {10e-6, 25e9}};
    const zeppelin planner(transfers ? zeppelin_options::hiding(sequence::h100_forward, links) : zeppelin_options{});
    std::size_t next = 0;
    for (auto _ : state) {
        const batch& b = batches[next++ % batches.size()];
        auto p = planner.plan(b.lengths, machines, b.capacity);
        benchmark::DoNotOptimize(p);
    }
    double imbalance = 0;
    double of_even = 0;
    for (const batch& b : batches) {
        const auto p = planner.plan(b.lengths, machines, b.capacity);
        imbalance += p.imbalance / static_cast<double>(batches.size());
        if (!transfers) { continue; }
        const auto even = sequence::partition::even_ring{}(b.lengths, machines, b.capacity);
        of_even += estimated(even, sequence::h100_forward, links).attention /
                   estimated(p.where, sequence::h100_forward, links).attention / static_cast<double>(batches.size());
    }
    state.counters["imbalance"] = imbalance;
    if (transfers) { state.counters["of_even"] = of_even; }
}

void for_sizes(benchmark::internal::Benchmark* b) {
    b->Unit(benchmark::kMillisecond)->UseRealTime()->ComputeStatistics("min", bench::minimum);
    b->ArgNames({"sequences", "ranks"});
    b->Args({64, 16})->Args({64, 64})->Args({600, 64})->Args({5000, 1024});
}

BENCHMARK_CAPTURE(plan, computing, false)->Apply(for_sizes);
BENCHMARK_CAPTURE(plan, transfers, true)->Apply(for_sizes);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
