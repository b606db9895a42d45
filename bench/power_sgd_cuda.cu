// PowerSGD on GPT-2's matrices, one GPU: each of its operations and a whole step without communication, against the
// time in which the bytes that it cannot avoid could be copied. power_sgd_cuda_torch.py times PyTorch's hook on the same
// shapes; run the two after each other on one card.
#include <cstddef>    // size_t
#include <exception>  // errors
#include <iostream>   // errors
#include <string>     // report
#include <vector>     // samples

#include <cuda_runtime_api.h>  // events with times, graphs, properties

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/compress/power_sgd.cuh>
#include <tutti/core/buffer.hpp>
#include <tutti/core/philox.cuh>

#include "support/environment.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace tutti;
using compress::power_sgd;
using compress::segment;
using tutti::detail::check_cuda;
using array = buffer<float, cuda_queue>;

// The matrices of GPT-2 in the order of its parameters, one behind the other.
std::vector<segment> gpt2(int level, std::size_t layers, std::size_t width) {
    std::vector<segment> all;
    std::size_t offset = 0;
    const auto add = [&](std::size_t rows, std::size_t cols) {
        all.push_back({.tensor = static_cast<std::uint32_t>(all.size()),
                       .level = level,
                       .offset = offset,
                       .rows = rows,
                       .cols = cols});
        offset += rows * cols;
    };
    add(50257, width);
    add(1024, width);
    for (std::size_t l = 0; l < layers; ++l) {
        add(width, 3 * width);
        add(width, width);
        add(width, 4 * width);
        add(4 * width, width);
    }
    return all;
}

class stopwatch {
    cuda_queue q_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;

public:
    explicit stopwatch(cuda_queue q) : q_(std::move(q)) {
        check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    stopwatch(const stopwatch&) = delete;
    stopwatch& operator=(const stopwatch&) = delete;
    ~stopwatch() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }
    void start() { check_cuda(cudaEventRecord(begin_, q_.stream()), "cudaEventRecord"); }
    /// Milliseconds of the device since start(). The host waits.
    double stop() {
        check_cuda(cudaEventRecord(end_, q_.stream()), "cudaEventRecord");
        check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return static_cast<double>(milliseconds);
    }
};

// A step as a graph, which shows the device's time alone.
class captured {
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;

public:
    template <class Step> captured(const cuda_queue& q, Step step) {
        check_cuda(cudaStreamBeginCapture(q.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        step();
        check_cuda(cudaStreamEndCapture(q.stream(), &graph_), "cudaStreamEndCapture");
        check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    }
    captured(const captured&) = delete;
    captured& operator=(const captured&) = delete;
    ~captured() {
        cudaGraphExecDestroy(executable_);
        cudaGraphDestroy(graph_);
    }
    void launch(const cuda_queue& q) const { check_cuda(cudaGraphLaunch(executable_, q.stream()), "cudaGraphLaunch"); }
};

nlohmann::ordered_json milliseconds(const std::vector<double>& samples) {
    const bench::summary s = bench::summarize(samples);
    return {{"min", s.min}, {"p50", s.p50}, {"max", s.max}};
}

}  // namespace

int main(int argc, char** argv) try {
    std::string json;
    std::vector<int> ranks{1, 2, 4, 8, 16, 32};
    int samples = 30;
    std::size_t layers = 12, width = 768;
    CLI::App app("PowerSGD's computation on GPT-2's matrices, one GPU");
    app.add_option("-r,--ranks", ranks, "ranks of the factors")->check(CLI::Range(1, 1024))->capture_default_str();
    app.add_option("--samples", samples, "timed steps")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--layers", layers, "transformer blocks")->capture_default_str();
    app.add_option("--width", width, "channels")->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);

    const cuda_queue q(0);
    stopwatch watch(q);
    const std::vector<segment> shapes = gpt2(1, layers, width);
    const std::size_t elements = shapes.back().offset + shapes.back().size();
    const array gradient(q, elements), residual(q, elements), out(q, elements);
    fill_normal(q, gradient.view(), random_stream{.seed = 1, .stream = 1}, 1e-3f);

    std::vector<double> copies;
    for (int s = 0; s < samples; ++s) {
        watch.start();
        copy(q, view<const float, device_memory>(gradient.view()), out.view());
        copies.push_back(watch.stop());
    }
    const double copied = 8 * static_cast<double>(elements);
    const double bandwidth = copied / bench::summarize(copies).p50;  // bytes a millisecond
    // Read gradient and residual and write their sum; read it; read it, and write the result and the residual.
    const double floor = 28 * static_cast<double>(elements) / bandwidth;

    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    std::cerr << fmt::format("{} elements, copied at {:.0f} GB/s; floor {:.3f} ms\n", elements, bandwidth * 1e-6,
                             floor);
    for (const int rank : ranks) {
        const std::vector<segment> all = gpt2(rank, layers, width);
        const power_sgd x;
        auto state = x.make_state(q, all);
        fill(q, residual.view(), 0.0f);
        const array left(q, compress::detail::wire_count(x, all, 0));
        const array right(q, compress::detail::wire_count(x, all, 1));
        const view<const float, device_memory> in = gradient.view();
        compress::draw_key key{1, 0, 0};
        const auto contribute = [&](int round) {
            x.contribute(q, all, state, round, in, residual.view(), (round == 0 ? left : right).view(), key);
        };
        const auto absorb = [&](int round) { x.absorb(q, all, state, round, (round == 0 ? left : right).view(), 1); };
        const auto finish = [&] { x.finish(q, all, state, in, residual.view(), out.view()); };
        const auto step = [&] {
            contribute(0);
            absorb(0);
            contribute(1);
            absorb(1);
            finish();
        };
        for (int s = 0; s < 3; ++s, ++key.step) { step(); }
        std::vector<double> enqueued, parts[5];
        for (int s = 0; s < samples; ++s, ++key.step) {
            watch.start();
            step();
            enqueued.push_back(watch.stop());
        }
        for (int s = 0; s < samples; ++s, ++key.step) {
            const auto part = [&](int p, auto call) {
                watch.start();
                call();
                parts[p].push_back(watch.stop());
            };
            part(0, [&] { contribute(0); });
            part(1, [&] { absorb(0); });
            part(2, [&] { contribute(1); });
            part(3, [&] { absorb(1); });
            part(4, finish);
        }
        const captured graph(q, step);
        std::vector<double> replayed;
        for (int s = 0; s < samples + 2; ++s) {
            watch.start();
            graph.launch(q);
            const double time = watch.stop();
            if (s >= 2) { replayed.push_back(time); }
        }
        const double best = bench::summarize(replayed).p50;
        rows.push_back({{"rank", rank},
                        {"step_ms", milliseconds(enqueued)},
                        {"captured_step_ms", milliseconds(replayed)},
                        {"floor_share", floor / best},
                        {"contribute_0_ms", milliseconds(parts[0])},
                        {"absorb_0_ms", milliseconds(parts[1])},
                        {"contribute_1_ms", milliseconds(parts[2])},
                        {"absorb_1_ms", milliseconds(parts[3])},
                        {"finish_ms", milliseconds(parts[4])},
                        {"wire_floats", left.size() + right.size()}});
        std::cerr << fmt::format("rank {:>2}: {:.3f} ms, captured {:.3f} ms ({:.2f} of the floor's rate); left {:.3f}, "
                                 "orthogonalized {:.3f}, "
                                 "right {:.3f}, mean {:.3f}, finished {:.3f}\n",
                                 rank, bench::summarize(enqueued).p50, best, floor / best,
                                 bench::summarize(parts[0]).p50, bench::summarize(parts[1]).p50,
                                 bench::summarize(parts[2]).p50, bench::summarize(parts[3]).p50,
                                 bench::summarize(parts[4]).p50);
    }

    cudaDeviceProp card{};
    check_cuda(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
    nlohmann::ordered_json environment = bench::environment();
    environment["card"] = card.name;
    std::string command = argv[0];
    command.erase(0, command.find_last_of('/') + 1);
    for (int i = 1; i < argc; ++i) { command += fmt::format(" {}", argv[i]); }
    bench::print_report({{"bench", "power_sgd_cuda"},
                         {"command", command},
                         {"elements", elements},
                         {"matrices", shapes.size()},
                         {"copy_gb_per_s", bandwidth * 1e-6},
                         {"floor_ms", floor},
                         {"samples", samples},
                         {"rows", rows},
                         {"environment", environment}},
                        json);
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
