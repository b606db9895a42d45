// What the Google Benchmark programs share: ranks that run a loop together, manual time, defaults of the command line.
// Needs Google Benchmark. Time of a batch is the maximum over ranks; repetitions are interleaved at random.
#pragma once

#include <algorithm>   // min_element
#include <chrono>      // steady_clock
#include <filesystem>  // the name of a program
#include <functional>  // barriers
#include <string>      // arguments
#include <vector>      // arguments

#include <benchmark/benchmark.h>

#include <tutti/comm/threads.hpp>  // ranks

#include "environment.hpp"  // context

namespace bench {

[[nodiscard]] inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Runs `make(communicator)`, which gives each rank its loop body, `batch` times on `ranks` threads.
///
/// Semantics  with as many processors as ranks each rank is tied to one; a tenth of the batch warms up.
template <class Make> [[nodiscard]] double seconds_of_batch(int ranks, int batch, Make make) {
    const std::vector<int> processors = allowed_processors();
    std::vector<double> elapsed(static_cast<std::size_t>(ranks));
    tutti::comm::threads::launch(ranks, [&](tutti::comm::threads& c) {
        const auto me = static_cast<std::size_t>(c.rank());
        if (elapsed.size() <= processors.size()) { bind_to(processors[me]); }
        auto body = make(c);
        for (int i = 0; i < batch / 10; ++i) { body(); }
        c.barrier();
        const double start = seconds_now();
        for (int i = 0; i < batch; ++i) { body(); }
        elapsed[me] = seconds_now() - start;
        c.barrier();
    });
    return *std::max_element(elapsed.begin(), elapsed.end());
}

/// One batch after the other for as long as Google Benchmark wants; its time column is that of one call.
template <class Make> void run_batches(benchmark::State& state, int ranks, int batch, Make make) {
    while (state.KeepRunningBatch(batch)) { state.SetIterationTime(seconds_of_batch(ranks, batch, make)); }
}

inline double minimum(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

inline void apply_defaults(benchmark::internal::Benchmark* b) {
    b->UseManualTime()->ComputeStatistics("min", minimum)->Unit(benchmark::kNanosecond);
}

/// A whole main(): what the command line says overrides the defaults given here.
inline int run_microbenchmarks(int argc, char** argv) {
    std::vector<std::string> words = {argv[0], "--benchmark_repetitions=9", "--benchmark_min_time=0.02",
                                      "--benchmark_report_aggregates_only=true",
                                      "--benchmark_enable_random_interleaving=true"};
    words.insert(words.end(), argv + 1, argv + argc);
    std::vector<char*> pointers;
    for (std::string& w : words) { pointers.push_back(w.data()); }
    int count = static_cast<int>(pointers.size());
    benchmark::Initialize(&count, pointers.data());
    if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) { return 2; }
    const nlohmann::json about = environment();
    for (const auto& [key, value] : about.items()) {
        benchmark::AddCustomContext(key, value.is_string() ? value.get<std::string>() : value.dump());
    }
    std::string command = std::filesystem::path(argv[0]).filename().string();
    for (int i = 1; i < argc; ++i) { command += std::string(" ") + argv[i]; }
    benchmark::AddCustomContext("command", command);
    for (const std::string& w : environment_warnings(1)) { benchmark::AddCustomContext("warning", w); }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}

}  // namespace bench
