// Causal attention of a batch of sequences over GPUs, bfloat16, forward and backward: tokens a second by even rings of
// all GPUs and by Zeppelin's plan, in the same engine; and the ideal, 1/N of what one GPU needs for the whole batch when
// cuDNN reads and writes where it likes, a call a sequence. All measured in the same run, and so is what plans are made
// by: attention on one GPU, links, and rings inside a node; or, with --calibration, read from a file that an earlier run
// has written. A thread a GPU; or, with --rank, --ranks and --meeting, a process a GPU, and with --nodes as many nodes as
// NCCL is to see.
#include <algorithm>    // max, min
#include <cmath>        // sqrt
#include <cstddef>      // size_t
#include <cstdint>      // lengths
#include <cstdlib>      // setenv
#include <exception>    // errors
#include <fstream>      // a calibration
#include <iostream>     // progress, errors
#include <iterator>     // a whole file
#include <memory>       // kernels
#include <optional>     // ideals
#include <string>       // report
#include <string_view>  // names of spans
#include <utility>      // move
#include <vector>       // samples

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/comm/nccl.hpp>
#include <tutti/comm/store.hpp>
#include <tutti/core/buffer.hpp>
#include <tutti/schedule/span.hpp>
#include <tutti/schedule/timeline.hpp>
#include <tutti/sequence/calibration.hpp>
#include <tutti/sequence/calibration_json.hpp>
#include <tutti/sequence/cuda_attention.cuh>
#include <tutti/sequence/estimate.hpp>
#include <tutti/sequence/lengths.hpp>
#include <tutti/sequence/measured_link.hpp>
#include <tutti/sequence/partition/even_ring.hpp>
#include <tutti/sequence/partition/zeppelin.hpp>
#include <tutti/sequence/ring_attention.hpp>

#include "support/environment.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

#if BENCH_WITH_CUDNN
namespace bench {
std::unique_ptr<tutti::sequence::fused_attention> cudnn_kernels(bool deterministic, std::size_t workspace);
}  // namespace bench
#endif

namespace {

using namespace tutti;
using comm::nccl;
using sequence::token_view;
using number = tutti::bfloat16;
template <class T> using memory = buffer<T, cuda_queue>;

struct settings {
    int gpus = 0;
    int nodes = 1;
    int rank = -1;  // of a process; -1: threads of this one
    int ranks = 0;
    std::string meeting;
    std::vector<std::string> only, draws{"prolong", "wikipedia"}, kinds{"fast", "deterministic"};
    std::int64_t tokens = 65536;
    int repetitions = 7;
    std::size_t workspace = 2;  // GiB
    std::size_t query_heads = 32, kv_heads = 32, width = 128;
    std::string calibration, json;
    std::string command = "bench_sequence_attention";
    [[nodiscard]] sequence::attention_heads heads() const { return {query_heads, kv_heads, width}; }
};

struct batch {
    std::string name;
    std::vector<std::int64_t> lengths;
};
std::vector<batch> batches(const settings& s) {
    const auto share = [&](std::int64_t n) { return std::max<std::int64_t>(s.tokens * n / 64, 1); };
    std::vector<batch> all{
        {"one", {share(64)}},
        {"mix A", {share(32), share(16), share(8), share(4), share(1), share(1), share(1), share(1)}},
        {"mix B", {}},
    };
    for (const auto& [count, length] : {std::pair{4, 8}, std::pair{4, 4}, std::pair{4, 2}, std::pair{8, 1}}) {
        all[2].lengths.insert(all[2].lengths.end(), static_cast<std::size_t>(count), share(length));
    }
    for (const std::string& name : s.draws) {
        all.push_back(
            {name, sequence::drawn_lengths(sequence::length_distribution_named(name), {1, 2, 0}, s.tokens, s.tokens)});
    }
    if (!s.only.empty()) {
        std::erase_if(all,
                      [&](const batch& b) { return std::find(s.only.begin(), s.only.end(), b.name) == s.only.end(); });
    }
    return all;
}

[[nodiscard]] std::unique_ptr<sequence::fused_attention> library([[maybe_unused]] bool deterministic,
                                                                 [[maybe_unused]] std::size_t workspace) {
#if BENCH_WITH_CUDNN
    return bench::cudnn_kernels(deterministic, workspace);
#else
    return nullptr;
#endif
}

// Uniform in [-1, 1); after a million numbers again.
void fill(const cuda_queue& q, view<number, device_memory> into, std::uint32_t seed) {
    std::vector<number> host(std::min<std::size_t>(into.size(), 1000003));
    std::uint32_t state = seed * 0x9e3779b1u + 1;
    for (number& x : host) {
        state = state * 1664525u + 1013904223u;
        x = number(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
    }
    upload(q, view<const number>(host), into.sub(0, host.size()));
    for (std::size_t done = host.size(); done < into.size();) {
        const std::size_t more = std::min(done, into.size() - done);
        q.copy(into.data() + done, into.data(), more * sizeof(number), cudaMemcpyDeviceToDevice);
        done += more;
    }
}

struct times {
    std::vector<double> forward, both;  // milliseconds
};
// Each repetition by events on the stream, after two that are not counted; the host does not wait in between.
template <class F, class B> times timed(const cuda_queue& q, int repetitions, F forward, B backward) {
    std::vector<cudaEvent_t> at(static_cast<std::size_t>(2 * repetitions + 1));
    for (cudaEvent_t& e : at) { tutti::detail::check_cuda(cudaEventCreate(&e), "cudaEventCreate"); }
    const auto record = [&](std::size_t i) {
        tutti::detail::check_cuda(cudaEventRecord(at[i], q.stream()), "cudaEventRecord");
    };
    for (int i = 0; i < 2; ++i) {
        forward();
        backward();
        q.record().wait_host(after(default_timeout()));
    }
    record(0);
    for (std::size_t i = 0; i + 2 < at.size(); i += 2) {
        forward();
        record(i + 1);
        backward();
        record(i + 2);
    }
    q.record().wait_host(after(default_timeout()));
    times t;
    const auto between = [&](std::size_t a, std::size_t b) {
        float milliseconds = 0;
        tutti::detail::check_cuda(cudaEventElapsedTime(&milliseconds, at[a], at[b]), "cudaEventElapsedTime");
        return static_cast<double>(milliseconds);
    };
    for (std::size_t i = 0; i + 2 < at.size(); i += 2) {
        t.forward.push_back(between(i, i + 1));
        t.both.push_back(between(i, i + 2));
    }
    for (cudaEvent_t e : at) { cudaEventDestroy(e); }
    return t;
}

// The library by itself on one GPU: all sequences of a batch in one memory of packed rows, a call each.
class alone {
    // The deterministic form may need memory for all scores of a call.
    static constexpr std::size_t most_memory = std::size_t{16} << 30;
    const settings& how_;
    cuda_queue queue_;
    bool deterministic_;
    std::unique_ptr<sequence::fused_attention> library_;

public:
    alone(const settings& s, const cuda_queue& q, bool deterministic)
        : how_(s), queue_(q), deterministic_(deterministic), library_(library(deterministic, most_memory)) {}

    // Nothing where the library has no kernel.
    [[nodiscard]] std::optional<times> measure(const std::vector<std::int64_t>& lengths, int repetitions) {
        if (library_ == nullptr) { return std::nullopt; }
        const std::size_t width = how_.width;
        const std::size_t of_query = how_.query_heads * width;
        const std::size_t of_key = how_.kv_heads * width;
        const std::size_t row = of_query + 2 * of_key;
        std::vector<std::size_t> first;
        std::size_t tokens = 0;
        std::size_t end = 0;  // with the padding of the last rows
        for (const std::int64_t n : lengths) {
            first.push_back(tokens);
            end = std::max(end, tokens + sequence::detail::fused_rows(static_cast<std::size_t>(n)));
            tokens += static_cast<std::size_t>(n);
        }
        memory<number> packed(queue_, end * row), gradients(queue_, end * row);
        memory<number> out(queue_, end * of_query), d_out(queue_, end * of_query);
        memory<float> sums(queue_, end * how_.query_heads);
        memory<std::int32_t> counts(queue_, lengths.size());
        const std::vector<std::int32_t> host_counts(lengths.begin(), lengths.end());
        upload(queue_, view<const std::int32_t>(host_counts), counts.view());
        fill(queue_, packed.view(), 1);
        fill(queue_, d_out.view(), 2);
        bool taken = true;
        const auto call = [&](std::size_t i, std::size_t head, std::size_t heads, bool backward) {
            const auto n = static_cast<std::size_t>(lengths[i]);
            const std::size_t group = how_.query_heads / how_.kv_heads;
            sequence::fused_call c;
            c.heads = {heads * group, heads, width};
            c.scale = 1 / std::sqrt(static_cast<double>(width));
            c.backward = backward;
            c.causal = true;
            c.queries = c.keys = sequence::detail::fused_rows(n);
            if (c.queries != n) { c.seen_queries = c.seen_keys = counts.data() + i; }
            const auto part = [&](const memory<number>& of, std::size_t stride, std::size_t at) {
                return sequence::fused_tensor{of.data() + first[i] * stride + at, stride, width};
            };
            const std::size_t query = head * group * width;
            const std::size_t key = of_query + head * width;
            c.query = part(packed, row, query);
            c.key = part(packed, row, key);
            c.value = part(packed, row, key + of_key);
            c.out = part(out, of_query, query);
            c.log_sum_exp = sums.data() + first[i] * how_.query_heads + head * group * c.queries;
            if (backward) {
                c.d_out = part(d_out, of_query, query);
                c.d_query = part(gradients, row, query);
                c.d_key = part(gradients, row, key);
                c.d_value = part(gradients, row, key + of_key);
            }
            taken = taken && library_->run(queue_, c);
        };
        const auto forward = [&] {
            for (std::size_t i = 0; i < lengths.size(); ++i) { call(i, 0, how_.kv_heads, false); }
        };
        const auto backward = [&] {
            for (std::size_t i = 0; i < lengths.size(); ++i) {
                const std::size_t rows = sequence::detail::fused_rows(static_cast<std::size_t>(lengths[i]));
                const std::size_t scores = 2 * rows * rows * (how_.query_heads / how_.kv_heads);
                const std::size_t heads =
                    deterministic_ ? std::clamp<std::size_t>(most_memory / scores, 1, how_.kv_heads) : how_.kv_heads;
                for (std::size_t h = 0; h < how_.kv_heads; h += heads) {
                    call(i, h, std::min(heads, how_.kv_heads - h), true);
                }
            }
        };
        const times t = timed(queue_, repetitions, forward, backward);
        return taken ? std::optional<times>(t) : std::nullopt;
    }
};

// A library whose calls are spans of a trace while it is asked for one.
class traced : public sequence::fused_attention {
    std::unique_ptr<sequence::fused_attention> of_;
    schedule::timeline& trace_;
    const bool& on_;
    schedule::timeline::track track_;

public:
    static constexpr std::string_view name = "kernels";
    traced(std::unique_ptr<sequence::fused_attention> of, schedule::timeline& trace, int rank, const bool& on)
        : of_(std::move(of)), trace_(trace), on_(on), track_(trace.track_of(rank, name)) {}
    [[nodiscard]] bool run(const cuda_queue& q, const sequence::fused_call& call) override {
        const schedule::scoped_span running(on_ ? &trace_ : nullptr, track_, name, q);
        return of_->run(q, call);
    }
    [[nodiscard]] std::size_t most_scores() const noexcept override { return of_->most_scores(); }
};

// One rank's engine.
class rank_bench {
    using engine = sequence::ring_attention<nccl, sequence::cuda_attention<number>>;
    const settings& how_;
    nccl& comm_;
    cuda_queue queue_;
    schedule::timeline trace_;
    bool tracing_ = false;
    engine engine_;

public:
    rank_bench(nccl& world, const settings& s, bool deterministic)
        : how_(s)
        , comm_(world)
        , queue_(world.queue())
        , engine_(own(world, queue_), s.heads(), {.trace = &trace_},
                  sequence::cuda_attention<number>(kernels(deterministic))) {}

    // Milliseconds of one forward and backward on one rank: of all of it, of the library's calls, of the stream's waits
    // for messages, and of these. The rest is what the engine does to data beside, and pauses.
    struct shares {
        double all = 0, kernels = 0, exposed = 0, sending = 0;
        [[nodiscard]] double rest() const { return all - kernels - exposed; }
    };
    struct result : times {
        std::vector<shares> ranks;
        // The slowest rank's, which are not of one rank where they are of messages.
        [[nodiscard]] double most(double shares::*what) const {
            double m = 0;
            for (const shares& s : ranks) { m = std::max(m, s.*what); }
            return m;
        }
    };
    // Of each repetition the slowest rank.
    result measure(const sequence::placement& where, int repetitions) {
        engine_.plan(where);
        const std::size_t tokens = engine_.tokens();
        const std::size_t of_query = how_.query_heads * how_.width;
        const std::size_t of_key = how_.kv_heads * how_.width;
        const std::size_t row = of_query + 2 * of_key;
        memory<number> packed(queue_, tokens * row), gradients(queue_, tokens * row);
        memory<number> out(queue_, tokens * of_query), d_out(queue_, tokens * of_query);
        memory<float> sums(queue_, tokens * how_.query_heads);
        const auto seed = static_cast<std::uint32_t>(2 * comm_.rank());
        fill(queue_, packed.view(), seed + 1);
        fill(queue_, d_out.view(), seed + 2);
        const auto part = [&](const memory<number>& of, std::size_t first, std::size_t heads) {
            const std::size_t skipped = of.size() == 0 ? 0 : first;
            return token_view<number, device_memory>(of.view().sub(skipped, of.size() - skipped), tokens, heads,
                                                     how_.width, row, how_.width);
        };
        const auto rows = [&](const memory<number>& of) {
            return token_view<number, device_memory>(of.view(), tokens, how_.query_heads, how_.width);
        };
        const auto q = part(packed, 0, how_.query_heads);
        const auto k = part(packed, of_query, how_.kv_heads);
        const auto v = part(packed, of_query + of_key, how_.kv_heads);
        const auto numbers = sequence::numbers_by_head(sums.view(), tokens, how_.query_heads);
        const auto forward = [&] { engine_.forward(q, k, v, rows(out), numbers); };
        const auto backward = [&] {
            engine_.backward(rows(d_out), q, k, v, rows(out), numbers, part(gradients, 0, how_.query_heads),
                             part(gradients, of_query, how_.kv_heads),
                             part(gradients, of_query + of_key, how_.kv_heads));
        };
        comm_.barrier();
        result r{timed(queue_, repetitions, forward, backward)};
        r.forward = slowest(comm_, r.forward);
        r.both = slowest(comm_, r.both);
        // Once more, for the trace alone.
        trace_.clear();
        comm_.barrier();
        tracing_ = true;
        {
            const schedule::scoped_span running(&trace_, trace_.track_of(comm_.rank(), "all"), "all", queue_);
            forward();
            backward();
        }
        tracing_ = false;
        queue_.record().wait_host(after(default_timeout()));
        comm_.synchronize();
        shares own;
        for (const auto& total : trace_.totals(comm_.rank())) {
            const double milliseconds = total.seconds * 1e3;
            if (total.kind == schedule::span_kind::communication) { own.sending += milliseconds; }
            if (total.name == "all") { own.all += milliseconds; }
            if (total.name == traced::name) { own.kernels += milliseconds; }
        }
        own.exposed = trace_.exposed(comm_.rank()) * 1e3;
        r.ranks = of_all(own);
        return r;
    }

    [[nodiscard]] static std::vector<double> slowest(nccl& comm, std::vector<double> own) {
        memory<double> all(comm.queue(), own.size());
        upload(comm.queue(), view<const double>(own), all.view());
        comm.all_reduce(view<const double, device_memory>(all), all.view(), tutti::max{});
        download(comm.queue(), view<const double, device_memory>(all), view<double>(own));
        comm.synchronize();
        return own;
    }

private:
    static nccl own(nccl& world, cuda_queue& queue) {
        nccl c = world.duplicate("attention");
        queue = c.queue();
        return c;
    }
    [[nodiscard]] std::unique_ptr<sequence::fused_attention> kernels(bool deterministic) {
        auto of = library(deterministic, how_.workspace << 30);
        if (of == nullptr) { return nullptr; }
        return std::make_unique<traced>(std::move(of), trace_, comm_.rank(), tracing_);
    }
    [[nodiscard]] std::vector<shares> of_all(const shares& own) {
        memory<double> there(comm_.queue(), 4), all(comm_.queue(), 4 * static_cast<std::size_t>(comm_.size()));
        const std::vector<double> mine{own.all, own.kernels, own.exposed, own.sending};
        std::vector<double> numbers(all.size());
        upload(comm_.queue(), view<const double>(mine), there.view());
        comm_.all_gather(view<const double, device_memory>(there), all.view());
        download(comm_.queue(), view<const double, device_memory>(all), view<double>(numbers));
        comm_.synchronize();
        std::vector<shares> ranks;
        for (std::size_t i = 0; i < numbers.size(); i += 4) {
            ranks.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]});
        }
        return ranks;
    }
};

// What rank 0 has measured, on all ranks.
[[nodiscard]] std::vector<double> told(nccl& comm, std::vector<double> numbers) {
    memory<double> all(comm.queue(), numbers.size());
    upload(comm.queue(), view<const double>(numbers), all.view());
    comm.broadcast(all.view(), 0);
    download(comm.queue(), view<const double, device_memory>(all), view<double>(numbers));
    comm.synchronize();
    return numbers;
}

[[nodiscard]] nlohmann::ordered_json spread(const std::vector<double>& milliseconds) {
    const bench::summary s = bench::summarize(milliseconds);
    return {{"min", s.min}, {"p50", s.p50}, {"max", s.max}, {"cv", s.cv}};
}

// Links between the GPUs, of a node and of neighboring nodes, which are not known on rank 0.
void measure_links(nccl& world, const settings& s, sequence::calibration& known) {
    const int width = world.size() / s.nodes;
    const std::vector<std::size_t> sizes{std::size_t{1} << 16, std::size_t{1} << 20, std::size_t{1} << 26};
    const auto has = told(world, {known.inside ? 1.0 : 0.0, known.between ? 1.0 : 0.0});
    if (width > 1 && has[0] == 0) { known.inside = sequence::measured_link(world, 1, width, sizes); }
    if (s.nodes > 1 && has[1] == 0) { known.between = sequence::measured_link(world, width, world.size(), sizes); }
}

[[nodiscard]] std::optional<sequence::calibration> read_calibration(const std::string& path) {
    std::ifstream file(path);
    if (path.empty() || !file) { return std::nullopt; }
    return sequence::calibration_from(std::string(std::istreambuf_iterator<char>(file), {}));
}

// What rank 0 has of costs and links, on all ranks.
void tell(nccl& world, sequence::calibration& known) {
    const auto number_of = [](const std::optional<comm::link>& l, bool bandwidth) {
        return !l ? -1 : bandwidth ? l->bytes_per_second : l->latency_seconds;
    };
    const auto n = told(world, {known.cost.quadratic, known.cost.linear, known.cost.constant, known.step.linear,
                                known.step.constant, number_of(known.inside, false), number_of(known.inside, true),
                                number_of(known.between, false), number_of(known.between, true)});
    const auto link_of = [&](std::size_t i) {
        return n[i] < 0 ? std::nullopt : std::optional(comm::link{n[i], n[i + 1]});
    };
    known.cost = {n[0], n[1], n[2]};
    known.step = {n[3], n[4]};
    known.inside = link_of(5);
    known.between = link_of(7);
}

[[nodiscard]] sequence::transfer_cost transfers_of(const sequence::calibration& known, const settings& s) {
    return known.transfers(static_cast<int>(s.kv_heads), static_cast<int>(s.width), sizeof(number), sizeof(float));
}

// Rings over the ranks of each node, two at once.
void measure_rings(rank_bench& b, const settings& s, const sequence::cluster& machines, sequence::calibration& known) {
    const int width = machines.ranks_per_node;
    std::vector<std::int64_t> lengths;
    for (std::int64_t n = 2048; n <= 32768; n *= 2) { lengths.push_back(n); }
    sequence::calibrate_rings(known, transfers_of(known, s), width, lengths, 1, [&](std::int64_t n) {
        std::vector<sequence::ring> rings;
        for (int i = 0; i < 2 * machines.nodes; ++i) {
            rings.push_back({i, sequence::zone::node, {}});
            for (int r = 0; r < width; ++r) { rings.back().ranks.push_back(i / 2 * width + r); }
        }
        const std::vector<std::int64_t> all(rings.size(), n);
        return bench::median(b.measure(sequence::assembled(machines, all, rings), 3).both) / 2e3;
    });
}

// The rows of all batches and plans with kernels of one kind. Rank 0 prints them.
void measure_kind(nccl& world, const settings& s, const std::string& kind, nlohmann::ordered_json& report) {
    const bool first = world.rank() == 0;
    const bool deterministic = kind == "deterministic";
    const auto all = batches(s);
    const sequence::cluster machines{s.nodes, world.size() / s.nodes};
    // One GPU: the ideals, and what a sequence costs by its length.
    sequence::calibration known{
        report["device"].get<std::string>() + ", " + kind, sequence::h100_forward.scaled(3.5), {}};
    std::vector<std::optional<times>> ideals(all.size());
    bool measured = false;
    if (first) {
        alone one(s, world.queue(), deterministic);
        for (std::size_t i = 0; i < all.size(); ++i) { ideals[i] = one.measure(all[i].lengths, s.repetitions); }
        std::vector<std::int64_t> lengths;
        for (std::int64_t n = 1024; n <= 32768; n *= 2) { lengths.push_back(n); }
        if (auto file = read_calibration(s.calibration)) {
            known = *std::move(file);
        } else if (one.measure({lengths[0]}, 1)) {
            measured = true;
            known = sequence::calibrated(known.name, lengths, 3, [&](std::int64_t n) {
                // Two at once: launches overlap, as in a batch.
                return one.measure({n, n}, 1)->both[0] / 2e3;
            });
        }
    }
    world.synchronize();
    cuda_queue::trim(world.queue().device());  // another stream is to have what this one had
    measure_links(world, s, known);
    tell(world, known);

    rank_bench b(world, s, deterministic);
    const bool new_rings = told(world, {measured ? 1.0 : 0.0})[0] != 0;
    if (new_rings && machines.ranks_per_node > 1) { measure_rings(b, s, machines, known); }
    const sequence::transfer_cost transfers = transfers_of(known, s);
    const sequence::partition::zeppelin zeppelin(sequence::partition::zeppelin_options::hiding(known.cost, transfers));
    if (first && !known.samples.empty()) {
        const std::string text = json_of(known);
        report["calibrations"].push_back(nlohmann::ordered_json::parse(text));
        if (measured && !s.calibration.empty() && !(std::ofstream(s.calibration) << text << std::flush)) {
            throw usage_error(fmt::format("--calibration: {} cannot be written", s.calibration));
        }
    }

    for (std::size_t i = 0; i < all.size(); ++i) {
        const double tokens = static_cast<double>(s.tokens);
        std::optional<double> ideal;
        if (ideals[i]) { ideal = bench::median(ideals[i]->both) / world.size(); }
        for (const std::string plan : {"even-ring", "zeppelin"}) {
            const auto planned = zeppelin.plan(all[i].lengths, machines);
            const sequence::placement where =
                plan == "zeppelin" ? planned.where : sequence::partition::even_ring{}(all[i].lengths, machines);
            const auto t = b.measure(where, s.repetitions);
            std::uint64_t inside = 0, between = 0;
            using rings = sequence::ring_attention<nccl, sequence::cuda_attention<number>>;
            for (const auto& call : rings::calls_of(where, s.heads())) {
                for (const sequence::flow& f : call) {
                    (machines.node_of(f.source) == machines.node_of(f.destination) ? inside : between) += f.bytes;
                }
            }
            if (!first) { continue; }
            const double both = bench::median(t.both);
            nlohmann::ordered_json row{
                {"kernels", kind},
                {"batch", all[i].name},
                {"sequences", all[i].lengths.size()},
                {"plan", plan},
                {"forward_ms", spread(t.forward)},
                {"ms", spread(t.both)},
                {"tokens_per_second", tokens / both * 1e3},
                {"ideal_ms", nullptr},
                {"of_ideal_time", nullptr},
                {"communication_ms", t.most(&rank_bench::shares::sending)},
                {"exposed_ms", t.most(&rank_bench::shares::exposed)},
                {"ranks", nlohmann::ordered_json::array()},
                {"planned_ms", estimated(where, known.cost, transfers).attention * 1e3},
                {"cut_sequences", std::count_if(where.rings.begin(), where.rings.end(),
                                                [](const auto& r) { return r.ranks.size() > 1; })},
                {"bytes_inside_nodes", inside},
                {"bytes_between_nodes", between}};
            if (ideal) {
                row["ideal_ms"] = *ideal;
                row["of_ideal_time"] = both / *ideal;
            }
            if (plan == "zeppelin") { row["reason"] = std::string(name_of(planned.reason)); }
            for (const auto& r : t.ranks) {
                row["ranks"].push_back({{"ms", r.all},
                                        {"kernels_ms", r.kernels},
                                        {"exposed_ms", r.exposed},
                                        {"rest_ms", r.rest()},
                                        {"communication_ms", r.sending}});
            }
            report["rows"].push_back(row);
            std::cerr << fmt::format("{:<14}{:<11}{:<11}{:>12.2f}{:>12.2f}{:>8.3f}{:>14.0f}{:>12.2f}{:>10.3f}", kind,
                                     all[i].name, plan, bench::median(t.forward), both, bench::summarize(t.both).cv,
                                     tokens / both * 1e3, ideal.value_or(0), ideal ? both / *ideal : 0);
            for (const auto& r : t.ranks) {
                std::cerr << fmt::format("   {:.2f} = {:.2f} + {:.2f} + {:.2f} ({:.2f})", r.all, r.kernels, r.exposed,
                                         r.rest(), r.sending);
            }
            std::cerr << '\n';
        }
    }
}

void measure(nccl& world, const settings& s) {
    if (world.size() % s.nodes != 0) {
        throw usage_error(fmt::format("--nodes: {} GPUs cannot be divided among {}", world.size(), s.nodes));
    }
    nlohmann::ordered_json report{{"bench", "sequence_attention"}, {"environment", bench::environment()}};
    cudaDeviceProp card{};
    tutti::detail::check_cuda(cudaGetDeviceProperties(&card, world.queue().device()), "cudaGetDeviceProperties");
    report["command"] = s.command;
    report["device"] = card.name;
    report["gpus"] = world.size();
    report["nodes"] = s.nodes;
    report["heads"] = {{"query", s.query_heads}, {"kv", s.kv_heads}, {"width", s.width}};
    report["tokens"] = s.tokens;
    report["repetitions"] = s.repetitions;
    report["workspace_gib"] = s.workspace;
    report["cudnn"] = BENCH_WITH_CUDNN != 0;
    report["calibrations"] = nlohmann::ordered_json::array();
    report["rows"] = nlohmann::ordered_json::array();
    if (world.rank() == 0) {
        std::cerr << fmt::format("{:<14}{:<11}{:<11}{:>12}{:>12}{:>8}{:>14}{:>12}{:>10}   {}\n", "kernels", "batch",
                                 "plan", "forward ms", "both ms", "cv", "tokens/s", "ideal ms", "of it",
                                 "by rank: ms = kernels + exposed + rest (messages)");
    }
    for (const std::string& kind : s.kinds) { measure_kind(world, s, kind, report); }
    if (world.rank() != 0) { return; }
    std::uint64_t reserved = 0;
    tutti::detail::check_cuda(cudaMemPoolGetAttribute(tutti::detail::cuda_pool::of(world.queue().device()).handle(),
                                                      cudaMemPoolAttrReservedMemHigh, &reserved),
                              "cudaMemPoolGetAttribute");
    report["peak_bytes"] = reserved;
    bench::print_report(report, s.json);
}

int run(int argc, char** argv) {
    CLI::App app("Causal attention over GPUs, forward and backward: tokens a second, and the ideal");
    settings s;
    app.add_option("-t,--gpus", s.gpus, "threads of this process, one a GPU; 0: all GPUs")->capture_default_str();
    app.add_option("--batch", s.only, "one, 'mix A', 'mix B' or a histogram; all when not given");
    app.add_option("--draws", s.draws, "histograms of lengths")->capture_default_str();
    app.add_option("--kernels", s.kinds, "cuDNN's faster ones, those that give the same bits in every run, or both")
        ->check(CLI::IsMember({"fast", "deterministic"}))
        ->capture_default_str();
    app.add_option("--tokens", s.tokens, "of a batch")->check(CLI::Range(64, 1 << 24))->capture_default_str();
    app.add_option("--repetitions", s.repetitions, "of a row")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--workspace", s.workspace, "GiB that rings give deterministic kernels for scores; one GPU gives 16")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app.add_option("--query-heads", s.query_heads, "")->check(CLI::Range(1, 1024))->capture_default_str();
    app.add_option("--kv-heads", s.kv_heads, "")->check(CLI::Range(1, 1024))->capture_default_str();
    app.add_option("--width", s.width, "of a head")->check(CLI::Range(8, 1024))->capture_default_str();
    const auto rank = app.add_option("--rank", s.rank, "of this process")->check(CLI::Range(0, 1 << 20));
    const auto ranks = app.add_option("--ranks", s.ranks, "processes, each with a GPU")->check(CLI::Range(1, 1 << 20));
    const auto meeting = app.add_option("--meeting", s.meeting, "an empty folder that all processes see");
    const auto nodes = app.add_option("--nodes", s.nodes, "that NCCL is to take the processes for, as many each");
    nodes->check(CLI::Range(1, 1 << 20))->capture_default_str()->needs(rank);
    rank->needs(ranks)->needs(meeting);
    ranks->needs(rank);
    meeting->needs(rank);
    app.add_option("--calibration", s.calibration,
                   "plan by what this file says of attention, links and rings, and by links measured now that it does "
                   "not know; where "
                   "there is none, measure and write it");
    app.add_option("-J,--json", s.json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    for (int i = 1; i < argc; ++i) { s.command += fmt::format(" {}", argv[i]); }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fmt::print("no CUDA device\n");
        return 0;
    }
    if (s.query_heads % s.kv_heads != 0) { throw usage_error("--kv-heads: not a divisor of the query heads"); }
    if (!s.calibration.empty() && s.kinds.size() != 1) { throw usage_error("--calibration: of one of the --kernels"); }
    if (s.rank < 0) {
        nccl::launch(s.gpus == 0 ? devices : s.gpus, [&](nccl& world) { measure(world, s); });
        return 0;
    }
    // NCCL tells hosts apart by this.
    const std::string host = fmt::format("node {}", s.rank * s.nodes / s.ranks);
    if (s.nodes > 1) { setenv("NCCL_HOSTID", host.c_str(), 1); }
    const int device = s.rank % devices;
    tutti::detail::check_cuda(cudaSetDevice(device), "cudaSetDevice");
    nccl world(std::make_shared<comm::file_store>(s.meeting, "attention"), s.rank, s.ranks, cuda_queue(device));
    measure(world, s);
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
