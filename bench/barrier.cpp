// Synchronization of threads: tutti's barrier and its all_reduce of 8 bytes against std::barrier, with as many ranks as
// processors, twice, and four times as many. `flags` is the floor: two threads that do nothing but tell each other.
#include <algorithm>  // max
#include <array>      // 8 bytes
#include <atomic>     // flags
#include <barrier>    // std::barrier
#include <cstdint>    // epochs

#include "support/microbenchmark.hpp"

namespace {

// Oversubscribed, every call costs context switches.
int batch_of(int ranks) { return ranks <= tutti::comm::detail::usable_processors() ? 20000 : 500; }

void barrier_tutti(benchmark::State& state) {
    const int ranks = static_cast<int>(state.range(0));
    bench::run_batches(state, ranks, batch_of(ranks), [](tutti::comm::threads& c) { return [&c] { c.barrier(); }; });
}

void barrier_std(benchmark::State& state) {
    const int ranks = static_cast<int>(state.range(0));
    std::barrier<> shared(ranks);
    bench::run_batches(state, ranks, batch_of(ranks),
                       [&shared](tutti::comm::threads&) { return [&shared] { shared.arrive_and_wait(); }; });
}

void all_reduce_8_bytes(benchmark::State& state) {
    const int ranks = static_cast<int>(state.range(0));
    bench::run_batches(state, ranks, batch_of(ranks), [](tutti::comm::threads& c) {
        return [&c, in = std::array<float, 2>{1, 2}, out = std::array<float, 2>{}]() mutable {
            c.all_reduce(tutti::view<const float>(in), tutti::view<float>(out), tutti::sum{});
            benchmark::DoNotOptimize(out);
        };
    });
}

// One word each in a line of its own; no errors, no deadlines, no sleep, nothing said by arriving.
void flags(benchmark::State& state) {
    struct alignas(128) flag {
        std::atomic<std::uint32_t> epoch{0};
    };
    std::array<flag, 2> both{};
    bench::run_batches(state, 2, batch_of(2), [&both](tutti::comm::threads& c) {
        flag& mine = both[static_cast<std::size_t>(c.rank())];
        flag& other = both[static_cast<std::size_t>(1 - c.rank())];
        mine.epoch = 0;
        c.barrier();  // both start at 0, also in the second batch
        return [&mine, &other, epoch = std::uint32_t{0}]() mutable {
            mine.epoch.store(++epoch, std::memory_order_release);
            while (static_cast<std::int32_t>(other.epoch.load(std::memory_order_acquire) - epoch) < 0) {}
        };
    });
}

void ranks_of_interest(benchmark::internal::Benchmark* b) {
    const int processors = tutti::comm::detail::usable_processors();
    for (const int factor : {1, 2, 4}) { b->Arg(std::max(2, processors) * factor); }
}

BENCHMARK(flags)->Apply(bench::apply_defaults);
BENCHMARK(barrier_tutti)->Apply(bench::apply_defaults)->Apply(ranks_of_interest);
BENCHMARK(barrier_std)->Apply(bench::apply_defaults)->Apply(ranks_of_interest);
BENCHMARK(all_reduce_8_bytes)->Apply(bench::apply_defaults)->Apply(ranks_of_interest);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
