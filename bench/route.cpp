// What routes gain: eight ranks, two nodes of four with a NIC each, over a network of stated bandwidth and latency.
// Rows: one message from node to node by its size, for links inside that are 10, 4 and 2 times as fast as a NIC; and a
// step of a ring over both nodes, where one message crosses each way. Time is that of `fastest`; counters: the same
// directly and spread in one chunk, the gain and what links allow (`bound`), what the model of route_time says
// (`expected_ms`), the size from which one chunk pays (`break_even_kb`), and whether the messages were spread.
#include <algorithm>  // min, max
#include <cstddef>    // byte
#include <mutex>      // results of ranks
#include <vector>     // messages

#include <tutti/comm/shaped.hpp>
#include <tutti/sequence/route.hpp>

#include "support/microbenchmark.hpp"

namespace {

namespace sequence = tutti::sequence;
using network = tutti::comm::shaped<tutti::comm::threads>;
using messages = std::vector<tutti::comm::transfer<tutti::host_memory>>;

constexpr int nics = 4;
constexpr double nic_speed = 50e6;  // bytes a second: memory and two processors must keep up with eight ranks

tutti::comm::topology machine(double ratio) {
    return tutti::comm::topology::uniform(2, 4, {200e-6, ratio * nic_speed}, {400e-6, nic_speed}, nics);
}

/// The quickest of some exchanges, each the maximum over ranks.
double seconds_of(const sequence::route& r, const tutti::comm::topology& t, int repetitions) {
    std::vector<double> longest(static_cast<std::size_t>(repetitions), 0);
    std::mutex mutex;
    tutti::comm::threads::launch(t.ranks(), [&](tutti::comm::threads& world) {
        network slow(world.duplicate("slow"), tutti::comm::shaped_network(t));
        std::vector<std::vector<std::byte>> memory;
        memory.reserve(2 * r.flows().size());
        messages own;
        for (const sequence::flow& f : r.flows()) {
            if (f.source == world.rank()) {
                memory.emplace_back(f.bytes, std::byte{1});
                own.push_back(tutti::comm::send_to(f.destination, tutti::view<std::byte>(memory.back())));
            }
            if (f.destination == world.rank()) {
                memory.emplace_back(f.bytes, std::byte{0});
                own.push_back(tutti::comm::receive_from(f.source, tutti::view<std::byte>(memory.back())));
            }
        }
        for (double& all : longest) {
            world.barrier();
            const double start = bench::seconds_now();
            r.exchange(slow, own);
            const double mine = bench::seconds_now() - start;
            const std::lock_guard lock(mutex);
            all = std::max(all, mine);
        }
    });
    return *std::min_element(longest.begin(), longest.end());
}

void measure(benchmark::State& state, const std::vector<sequence::flow>& list, double ratio) {
    const tutti::comm::topology t = machine(ratio);
    const sequence::crossing c = sequence::single_crossing(static_cast<double>(list.front().bytes), nics);
    constexpr int repetitions = 3;
    for (auto _ : state) {
        const auto fastest = sequence::route::fastest(t, list);
        const double direct = seconds_of(sequence::route::direct(t, list), t, repetitions);
        const double spread = seconds_of(sequence::route::spread(t, list, 1), t, repetitions);
        const double chosen = seconds_of(fastest, t, repetitions);
        state.SetIterationTime(chosen);
        state.counters["direct_ms"] = 1e3 * direct;
        state.counters["one_chunk_ms"] = 1e3 * spread;
        state.counters["gain"] = direct / chosen;
        state.counters["bound"] = std::min<double>(nics, ratio / (1 - 1.0 / nics));
        state.counters["expected_ms"] =
            1e3 * std::min(sequence::direct_seconds(c, t), sequence::routed_seconds(c, sequence::best_chunks(c, t), t));
        state.counters["break_even_kb"] = 1e-3 * sequence::break_even_bytes(nics, t);
        state.counters["spread"] = fastest.steps() > 1 ? 1 : 0;
    }
}

// Arguments: KiB of the message; how many times as fast as a NIC a link inside a node is.
void one_message(benchmark::State& state) {
    measure(state, {{0, 5, static_cast<std::size_t>(state.range(0)) * 1024}}, static_cast<double>(state.range(1)));
}
void ring_step(benchmark::State& state) {
    std::vector<sequence::flow> ring;
    for (int r = 0; r < 8; ++r) {
        const int from = (r + 3) % 8;  // first the one that crosses
        ring.push_back({from, (from + 1) % 8, static_cast<std::size_t>(state.range(0)) * 1024});
    }
    measure(state, ring, static_cast<double>(state.range(1)));
}

void once(benchmark::internal::Benchmark* b) {
    b->Apply(bench::apply_defaults)->Unit(benchmark::kMillisecond)->Iterations(1)->Repetitions(3);
}
void sizes(benchmark::internal::Benchmark* b) {
    for (const int kilobytes : {4, 16, 64, 256, 1024, 8192, 65536}) { b->Args({kilobytes, 10}); }
    for (const int ratio : {4, 2}) { b->Args({65536, ratio}); }
    once(b);
}
void steps_of_a_ring(benchmark::internal::Benchmark* b) {
    for (const int kilobytes : {16, 1024, 65536}) { b->Args({kilobytes, 10}); }
    once(b);
}

BENCHMARK(one_message)->Apply(sizes);
BENCHMARK(ring_step)->Apply(steps_of_a_ring);

}  // namespace

int main(int argc, char** argv) { return bench::run_microbenchmarks(argc, argv); }
