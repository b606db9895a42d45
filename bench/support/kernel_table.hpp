// A table of kernels of one GPU: time, bandwidth, and the share of the bandwidth of a copy measured in the same run; and
// the report that such a bench writes.
// Needs CUDA, CLI11, fmt, nlohmann-json and tutti.
#pragma once

#include <algorithm>  // max, clamp
#include <cstddef>    // sizes
#include <cstdio>     // flush
#include <fstream>    // report
#include <stdexcept>  // a report that cannot be written
#include <string>     // names
#include <vector>     // samples

#include <cuda_runtime_api.h>  // events with times, properties

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/core/buffer.hpp>      // what is copied
#include <tutti/core/cuda_queue.hpp>  // cuda_queue
#include <tutti/core/cuda_run.cuh>    // copy
#include <tutti/core/run.hpp>         // run

#include "environment.hpp"  // environment
#include "statistics.hpp"   // summarize

namespace bench {

/// An event that knows when.
struct timer {
    cudaEvent_t event = nullptr;
    timer() { tutti::detail::check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
    timer(const timer&) = delete;
    timer& operator=(const timer&) = delete;
    ~timer() { cudaEventDestroy(event); }
};

/// Rows of kernels: time, bandwidth, and its share of a copy's, measured first. Prints each as it is known.
class kernel_table {
    tutti::cuda_queue q_{0};
    timer begin_, end_;
    int samples_;
    std::string only_;
    double copy_bandwidth_ = 0;
    nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();

    // Seconds of one of `repeats` runs in a row.
    template <class Run> double seconds(int repeats, Run& enqueue) {
        tutti::detail::check_cuda(cudaEventRecord(begin_.event, q_.stream()), "cudaEventRecord");
        for (int i = 0; i < repeats; ++i) { enqueue(); }
        tutti::detail::check_cuda(cudaEventRecord(end_.event, q_.stream()), "cudaEventRecord");
        tutti::detail::check_cuda(cudaEventSynchronize(end_.event), "cudaEventSynchronize");
        float milliseconds = 0;
        tutti::detail::check_cuda(cudaEventElapsedTime(&milliseconds, begin_.event, end_.event),
                                  "cudaEventElapsedTime");
        return static_cast<double>(milliseconds) * 1e-3 / repeats;
    }
    template <class Run> summary measure(Run enqueue) {
        const double once = std::max(seconds(2, enqueue), 1e-7);
        const int repeats = std::clamp(static_cast<int>(2e-3 / once), 1, 200);
        seconds(repeats, enqueue);
        std::vector<double> times;
        for (int s = 0; s < samples_; ++s) { times.push_back(seconds(repeats, enqueue)); }
        return summarize(times);
    }

public:
    kernel_table(int samples, std::string only) : samples_(samples), only_(std::move(only)) {
        constexpr std::size_t bytes = std::size_t{1} << 30;
        const tutti::buffer<std::byte, tutti::cuda_queue> from(q_, bytes), to(q_, bytes);
        const auto copies = measure([&] { copy(q_, from.view(), to.view()); });
        copy_bandwidth_ = 2 * static_cast<double>(bytes) / copies.p50;
        fmt::print("# copy of 1 GiB: {:.0f} GB/s, read and written\n", copy_bandwidth_ * 1e-9);
        fmt::print("# {:<22} {:<22} {:>10} {:>12} {:>10} {:>8} {:>6}\n", "operation", "elements of type", "elements",
                   "bytes", "us", "GB/s", "share");
    }
    [[nodiscard]] const tutti::cuda_queue& queue() const { return q_; }
    [[nodiscard]] double copy_bandwidth() const { return copy_bandwidth_; }
    [[nodiscard]] const nlohmann::ordered_json& rows() const { return rows_; }

    template <class O> void row(const std::string& name, const std::string& type, std::size_t elements, const O& op) {
        if (!only_.empty() && name.find(only_) == std::string::npos) { return; }
        const auto times = measure([&] { tutti::run(q_, op); });
        const double bytes = op.cost().bytes;
        const double rate = bytes / times.p50;
        fmt::print("{:<24} {:<22} {:>10} {:>12.0f} {:>10.2f} {:>8.0f} {:>6.2f}\n", name, type, elements, bytes,
                   times.p50 * 1e6, rate * 1e-9, rate / copy_bandwidth_);
        std::fflush(stdout);
        rows_.push_back({{"operation", name},
                         {"type", type},
                         {"elements", elements},
                         {"bytes", bytes},
                         {"us", {{"min", times.min * 1e6}, {"p50", times.p50 * 1e6}, {"max", times.max * 1e6}}},
                         {"gb_per_s", rate * 1e-9},
                         {"share_of_copy", rate / copy_bandwidth_}});
    }
};

/// The command line of such a bench.
struct kernel_options {
    std::string json, only;
    std::vector<std::size_t> exponents{20, 24, 28};
    int samples = 11;

    void add_to(CLI::App& app, int least_exponent) {
        app.add_option("-e,--exponents", exponents, "powers of two: numbers of elements")
            ->check(CLI::Range(least_exponent, 30));
        app.add_option("--samples", samples, "timed samples of a row")
            ->check(CLI::Range(1, 1000))
            ->capture_default_str();
        app.add_option("--only", only, "rows whose operation contains this");
        app.add_option("-J,--json", json, "write the report here, besides printing it");
    }
};

/// Where the bench runs, and on which card; prints that.
inline nlohmann::ordered_json card_environment() {
    cudaDeviceProp card{};
    tutti::detail::check_cuda(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
    int driver = 0, runtime = 0;
    tutti::detail::check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    tutti::detail::check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    nlohmann::ordered_json environment = bench::environment();
    environment["card"] = card.name;
    environment["multiprocessors"] = card.multiProcessorCount;
    environment["cuda_driver"] = driver;
    environment["cuda_runtime"] = runtime;
    fmt::print("# {}, {} multiprocessors, driver {}, runtime {}, tutti {}\n", card.name, card.multiProcessorCount,
               driver, runtime, environment["commit"].get<std::string>());
    return environment;
}

[[nodiscard]] inline std::string command_line(int argc, char** argv) {
    std::string command = argv[0];
    command.erase(0, command.find_last_of('/') + 1);
    for (int i = 1; i < argc; ++i) { command += fmt::format(" {}", argv[i]); }
    return command;
}

/// Nothing without a path.
inline void write_report(const std::string& path, const nlohmann::ordered_json& report) {
    if (path.empty()) { return; }
    std::ofstream file(path);
    file << report.dump(1) << '\n';
    file.close();
    if (!file) { throw std::runtime_error("--json: cannot write " + path); }
}

}  // namespace bench
