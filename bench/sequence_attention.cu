// Attention of sequences over rings of GPUs, forward and backward, bfloat16, causal: tokens a second, and the share of
// the ideal, which is 1/N of what one GPU needs for the whole batch, measured in the same run. Rings of all GPUs for every
// sequence, and Zeppelin's plan. A thread a GPU.
#include <algorithm>  // max_element, min
#include <barrier>    // ranks start together
#include <cstddef>    // size_t
#include <cstdint>    // lengths
#include <exception>  // errors
#include <iostream>   // errors
#include <memory>     // kernels
#include <string>     // report
#include <vector>     // samples

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/comm/nccl.hpp>
#include <tutti/core/buffer.hpp>
#include <tutti/sequence/cuda_attention.cuh>
#include <tutti/sequence/partition/even_ring.hpp>
#include <tutti/sequence/partition/zeppelin.hpp>
#include <tutti/sequence/ring_attention.hpp>

#include "support/environment.hpp"
#include "support/measure.hpp"  // now
#include "support/report.hpp"
#include "support/statistics.hpp"

#if BENCH_WITH_CUDNN
namespace bench {
std::unique_ptr<tutti::sequence::fused_attention> cudnn_kernels(bool deterministic);
}  // namespace bench
#endif

namespace {

using namespace tutti;
using comm::nccl;
using sequence::token_view;
using number = tutti::bfloat16;

struct settings {
    int ranks = 0;
    std::vector<std::string> only;
    int repetitions = 7;
    std::size_t query_heads = 32, kv_heads = 32, width = 128;
    std::size_t divisor = 1;
    bool deterministic = false;
    std::string json;
};

struct batch {
    std::string name;
    std::vector<std::int64_t> lengths;
};
std::vector<batch> batches(const settings& s) {
    const auto k = [&](std::int64_t n) { return n * 1024 / static_cast<std::int64_t>(s.divisor); };
    std::vector<batch> all{
        {"one 64k", {k(64)}},
        {"mix A", {k(32), k(16), k(8), k(4), k(1), k(1), k(1), k(1)}},
        {"mix B", {}},
    };
    for (const auto& [count, length] : {std::pair{4, 8}, std::pair{4, 4}, std::pair{4, 2}, std::pair{8, 1}}) {
        for (int i = 0; i < count; ++i) { all[2].lengths.push_back(k(length)); }
    }
    std::erase_if(all, [&](const batch& b) {
        return !s.only.empty() && std::find(s.only.begin(), s.only.end(), b.name) == s.only.end();
    });
    return all;
}

sequence::cuda_attention<number> kernel([[maybe_unused]] bool deterministic) {
#if BENCH_WITH_CUDNN
    return sequence::cuda_attention<number>(bench::cudnn_kernels(deterministic));
#else
    return {};
#endif
}

// Milliseconds of each repetition on this rank's stream, after two that are not counted; ranks start together.
class rank_bench {
    using engine = sequence::ring_attention<nccl, sequence::cuda_attention<number>>;
    template <class T> using memory = buffer<T, cuda_queue>;
    const settings& how_;
    std::barrier<>& together_;
    std::vector<double>& slots_;
    nccl& comm_;
    cuda_queue queue_;
    engine engine_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;

public:
    rank_bench(nccl& world, const settings& s, std::barrier<>& together, std::vector<double>& slots)
        : how_(s)
        , together_(together)
        , slots_(slots)
        , comm_(world)
        , queue_(world.queue())
        , engine_(own(world, queue_), {s.query_heads, s.kv_heads, s.width}, {}, kernel(s.deterministic)) {
        tutti::detail::check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        tutti::detail::check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    rank_bench(const rank_bench&) = delete;
    rank_bench& operator=(const rank_bench&) = delete;
    ~rank_bench() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }

    struct times {
        std::vector<double> forward, both;  // milliseconds, the slowest rank of each repetition
    };
    times measure(const sequence::placement& where) {
        engine_.plan(where);
        const std::size_t tokens = engine_.tokens();
        const std::size_t query_numbers = how_.query_heads * how_.width;
        const std::size_t kv_numbers = how_.kv_heads * how_.width;
        // Rows of queries, keys and values, as a projection gives them.
        const std::size_t row = query_numbers + 2 * kv_numbers;
        memory<number> packed(queue_, tokens * row), gradients(queue_, tokens * row);
        memory<number> out(queue_, tokens * query_numbers), d_out(queue_, tokens * query_numbers);
        memory<float> sums(queue_, tokens * how_.query_heads);
        fill(packed.view(), 1);
        fill(d_out.view(), 2);
        const auto part = [&](const memory<number>& of, std::size_t first, std::size_t heads) {
            return token_view<number, device_memory>(of.view().sub(first, of.size() - first), tokens, heads, how_.width,
                                                     row, how_.width);
        };
        const auto rows = [&](const memory<number>& of) {
            return token_view<number, device_memory>(of.view(), tokens, how_.query_heads, how_.width);
        };
        const auto q = part(packed, 0, how_.query_heads);
        const auto k = part(packed, query_numbers, how_.kv_heads);
        const auto v = part(packed, query_numbers + kv_numbers, how_.kv_heads);
        const auto numbers = sequence::numbers_by_head(sums.view(), tokens, how_.query_heads);
        times t;
        for (int i = -2; i < how_.repetitions; ++i) {
            const double forward = time([&] { engine_.forward(q, k, v, rows(out), numbers); });
            const double backward = time([&] {
                engine_.backward(rows(d_out), q, k, v, rows(out), numbers, part(gradients, 0, how_.query_heads),
                                 part(gradients, query_numbers, how_.kv_heads),
                                 part(gradients, query_numbers + kv_numbers, how_.kv_heads));
            });
            if (i < 0) { continue; }
            t.forward.push_back(forward);
            t.both.push_back(forward + backward);
        }
        return t;
    }

private:
    static nccl own(nccl& world, cuda_queue& queue) {
        nccl c = world.duplicate("attention");
        queue = c.queue();
        return c;
    }
    void fill(view<number, device_memory> into, std::uint32_t stream) {
        // Uniform in [-1, 1); after a million numbers again.
        std::vector<number> host(std::min<std::size_t>(into.size(), 1000003));
        std::uint32_t state = stream * 0x9e3779b1u + static_cast<std::uint32_t>(comm_.rank()) + 1;
        for (number& x : host) {
            state = state * 1664525u + 1013904223u;
            x = number(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
        }
        upload(queue_, view<const number>(host), into.sub(0, host.size()));
        for (std::size_t done = host.size(); done < into.size(); done *= 2) {
            const std::size_t more = std::min(done, into.size() - done);
            queue_.copy(into.data() + done, into.data(), more * sizeof(number), cudaMemcpyDeviceToDevice);
        }
    }
    void wait() const { tutti::detail::check_cuda(cudaStreamSynchronize(queue_.stream()), "cudaStreamSynchronize"); }
    template <class F> double time(F f) {
        wait();
        together_.arrive_and_wait();
        tutti::detail::check_cuda(cudaEventRecord(begin_, queue_.stream()), "cudaEventRecord");
        f();
        tutti::detail::check_cuda(cudaEventRecord(end_, queue_.stream()), "cudaEventRecord");
        wait();
        float milliseconds = 0;
        tutti::detail::check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        slots_[static_cast<std::size_t>(comm_.rank())] = static_cast<double>(milliseconds);
        together_.arrive_and_wait();
        const double slowest = *std::max_element(slots_.begin(), slots_.begin() + comm_.size());
        together_.arrive_and_wait();
        return slowest;
    }
};

struct row {
    std::string batch, plan;
    int ranks;
    bench::summary forward, both;
};

// All batches on that many GPUs by these plans.
std::vector<row> measured(const settings& s, int ranks, const std::vector<std::string>& plans) {
    std::vector<row> all;
    std::barrier<> together(ranks);
    std::vector<double> slots(static_cast<std::size_t>(ranks));
    const sequence::cluster machines{1, ranks};
    nccl::launch(ranks, [&](nccl& world) {
        rank_bench b(world, s, together, slots);
        for (const batch& of : batches(s)) {
            for (const std::string& plan : plans) {
                const sequence::placement where = plan == "zeppelin"
                                                      ? sequence::partition::zeppelin{}(of.lengths, machines)
                                                      : sequence::partition::even_ring{}(of.lengths, machines);
                const auto t = b.measure(where);
                if (world.rank() != 0) { continue; }
                all.push_back({of.name, plan, ranks, bench::summarize(t.forward), bench::summarize(t.both)});
            }
        }
    });
    return all;
}

int run(int argc, char** argv) {
    CLI::App app("Attention over rings of GPUs, forward and backward: tokens a second and the share of the ideal");
    settings s;
    app.add_option("-t,--gpus", s.ranks, "GPUs; 0: all")->capture_default_str();
    app.add_option("--batch", s.only, "one 64k, mix A, mix B; all when not given");
    app.add_option("--repetitions", s.repetitions, "of a row")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--query-heads", s.query_heads, "")->capture_default_str();
    app.add_option("--kv-heads", s.kv_heads, "")->capture_default_str();
    app.add_option("--width", s.width, "of a head")->capture_default_str();
    app.add_option("--divisor", s.divisor, "of all lengths")->check(CLI::Range(1, 64))->capture_default_str();
    app.add_flag("--deterministic", s.deterministic, "the same bits in every run");
    app.add_option("--json", s.json, "also write the report into this file");
    CLI11_PARSE(app, argc, argv);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fmt::print("no CUDA device\n");
        return 0;
    }
    if (s.ranks == 0) { s.ranks = devices; }
    cudaDeviceProp card{};
    tutti::detail::check_cuda(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");

    const std::vector<row> alone = measured(s, 1, {"one GPU"});
    const std::vector<row> together =
        s.ranks > 1 ? measured(s, s.ranks, {"even ring", "zeppelin"}) : std::vector<row>();
    nlohmann::ordered_json report{{"bench", "sequence_attention"}, {"environment", bench::environment()}};
    report["card"] = card.name;
    report["gpus"] = s.ranks;
    report["heads"] = {s.query_heads, s.kv_heads, s.width};
    report["deterministic"] = s.deterministic;
    report["cudnn"] = BENCH_WITH_CUDNN != 0;
    fmt::print("{:<10}{:<12}{:>6}{:>14}{:>14}{:>8}{:>14}{:>14}{:>10}\n", "batch", "plan", "GPUs", "forward ms",
               "both ms", "cv", "tokens/s", "ideal ms", "of ideal");
    for (const auto* list : {&alone, &together}) {
        for (const row& r : *list) {
            double ideal = 0;
            for (const row& one : alone) {
                if (one.batch == r.batch) { ideal = one.both.p50 / r.ranks; }
            }
            double tokens = 0;
            for (const batch& b : batches(s)) {
                if (b.name != r.batch) { continue; }
                for (const std::int64_t n : b.lengths) { tokens += static_cast<double>(n); }
            }
            fmt::print("{:<10}{:<12}{:>6}{:>14.2f}{:>14.2f}{:>8.3f}{:>14.0f}{:>14.2f}{:>10.3f}\n", r.batch, r.plan,
                       r.ranks, r.forward.p50, r.both.p50, r.both.cv, tokens / r.both.p50 * 1e3, ideal,
                       ideal / r.both.p50);
            report["rows"].push_back({{"batch", r.batch},
                                      {"plan", r.plan},
                                      {"gpus", r.ranks},
                                      {"forward_ms", r.forward.p50},
                                      {"both_ms", r.both.p50},
                                      {"min_ms", r.both.min},
                                      {"max_ms", r.both.max},
                                      {"tokens_per_second", tokens / r.both.p50 * 1e3},
                                      {"ideal_ms", ideal},
                                      {"of_ideal", ideal / r.both.p50}});
        }
    }
    bench::print_report(report, s.json);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& e) {
        std::cerr << "sequence_attention: " << e.what() << '\n';
        return 1;
    }
}
