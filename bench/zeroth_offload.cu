// Zeroth-order steps of models of OPT's shapes in float16 whose blocks stream through one GPU, as 16 bits or as 8 of float
// masters, against what the link and the matrix products take alone, measured in the same run: step time, tokens a second,
// memory, and what eight bits change.
#include <algorithm>  // max, min
#include <chrono>     // host times
#include <cmath>      // sqrt
#include <cstdio>     // flush
#include <exception>  // errors
#include <iostream>   // errors
#include <map>        // by distribution
#include <string>     // names
#include <vector>     // times

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/compress/buckets.cuh>
#include <tutti/core/philox.cuh>
#include <tutti/zeroth/float8_wire.hpp>
#include <tutti/zeroth/offload.hpp>
#include <tutti/zeroth/perturbation.cuh>
#include <tutti/zeroth/renewed_store.hpp>

#include "support/kernel_table.hpp"
#include "support/opt_model.cuh"

namespace zeroth_bench {

double now() { return seconds(clock_type::now().time_since_epoch()); }
void settle(const cuda_queue& q) { q.record().wait_host(after(default_timeout())); }
// Seconds of each of `count` calls, the host waiting once.
// `other`: a second queue, if the work is on two.
template <class Enqueue>
double each_of(const cuda_queue& q, int count, Enqueue enqueue, const cuda_queue* other = nullptr) {
    const auto settle_all = [&] {
        settle(q);
        if (other != nullptr) { settle(*other); }
    };
    enqueue();
    settle_all();
    const double begin = now();
    for (int i = 0; i < count; ++i) { enqueue(); }
    settle_all();
    return (now() - begin) / count;
}

// What the parts of a step take alone, a block: the first two for its bytes in 16 bits.
struct alone {
    double bytes, up, duplex, products, compute, decode, update, tail;
    // Of what goes up, and of what goes down meanwhile.
    [[nodiscard]] double link(double up_bytes, double down_bytes) const {
        return (std::max(up_bytes, down_bytes) - std::min(up_bytes, down_bytes)) / bytes * up +
               std::min(up_bytes, down_bytes) / bytes * duplex;
    }
};

using eight_bits = zeroth::float8_wire<>;
using store16 = zeroth::pinned_store<number, cuda_queue>;
using store8 = zeroth::renewed_store<number, cuda_queue, eight_bits>;

alone measure_alone(const shape& s, std::size_t tokens, zeroth::distribution kind) {
    const cuda_queue q(0);
    const zeroth::model_layout layout(model_of({s.name, 1, s.width, s.heads, 1}), sizeof(number));
    const std::size_t n = layout.size(1);
    const array<number> a(q, n), b(q, n), scratch(q, std::max(n, words * s.width));
    fill_normal(q, a.view(), random_stream{.seed = 2}, 0.02f);
    fill_normal(q, b.view(), random_stream{.seed = 3}, 0.02f);
    fill_normal(q, scratch.view(), random_stream{.seed = 4}, 0.02f);
    opt_model model(q, s, tokens, 2);
    alone t{};
    t.bytes = static_cast<double>(n * sizeof(number));
    {
        const pinned_queue memory;
        const buffer<number, pinned_queue> from(memory, n), to(memory, n);
        std::fill_n(from.data(), n, number{});
        const cuda_queue other = q.sibling();
        settle(q);
        const auto up = [&] { upload(q, view<const number, pinned_memory>(from.view()), a.view()); };
        t.up = each_of(q, 8, up);
        const auto both = [&] {
            up();
            download(other, b.view(), to.view());
        };
        t.duplex = each_of(q, 8, both, &other);
        fill_normal(q, a.view(), random_stream{.seed = 2}, 0.02f);
    }
    t.products = 2 * each_of(q, 10, [&] { model.multiply_block(a.data()); });
    t.tail = 2 * each_of(q, 10, [&] { model.multiply_tail(scratch.data()); });
    std::vector<view<const number, D>> weights;
    for (const auto& p : layout.places(1)) { weights.push_back(scratch.view().sub(p.copied, p.at.count)); }
    std::vector<zeroth::pending_update> updates;
    for (std::uint64_t step = 0; step < 9; ++step) {
        updates.push_back({{.seed = 1, .step = step, .kind = kind}, 0.1, 1e-7, 0});
    }
    const auto compute = [&](std::size_t count) {
        return each_of(q, 10, [&] {
            const zeroth::direction z{.seed = 1, .step = 20, .kind = kind};
            zeroth::update_then_perturb(q, a.view(), scratch.view().sub(0, n), layout.slices(1),
                                        std::span<const zeroth::pending_update>(updates).first(count), z, 1e-3);
            model.block(q, 0, weights, 0, 0);
            zeroth::perturb(q, a.view(), scratch.view().sub(0, n), layout.slices(1), z, -1e-3);
            model.block(q, 0, weights, 1, 0);
        });
    };
    t.compute = compute(1);
    t.update = (compute(9) - t.compute) / 8;
    const eight_bits wire;
    const array<std::byte> encoded(q, wire.bytes(n));
    wire.encode(q, view<const number, D>(a.view()), encoded.view());
    t.decode = each_of(q, 10, [&] { wire.decode(q, view<const std::byte, D>(encoded.view()), b.view()); });
    return t;
}

// What eight bits make of weights: the error's share of their size, by root mean squares, and the largest error of a
// weight as a share of the largest of its block.
nlohmann::ordered_json error_of_eight_bits() {
    constexpr std::size_t n = std::size_t{1} << 20;
    std::vector<float> w(n), seen(n);
    for (std::size_t i = 0; i < n; ++i) {
        w[i] = static_cast<float>(number(0.02f * random_stream{.seed = 1}.normal(i)));
    }
    const eight_bits wire;
    std::vector<std::byte> bytes(wire.bytes(n));
    wire.encode(host_queue(), view<const float>(w), view<std::byte>(bytes));
    wire.decode(host_queue(), view<const std::byte>(bytes), view<float>(seen));
    double error = 0, size = 0, worst = 0;
    for (std::size_t i = 0; i < n; i += 32) {
        double largest = 0, off = 0;
        for (std::size_t k = i; k < i + 32; ++k) {
            const double e = static_cast<double>(seen[k]) - static_cast<double>(w[k]);
            error += e * e;
            size += static_cast<double>(w[k]) * static_cast<double>(w[k]);
            off = std::max(off, std::fabs(e));
            largest = std::max(largest, std::fabs(static_cast<double>(w[k])));
        }
        worst = std::max(worst, off / largest);
    }
    return {{"rms_share", std::sqrt(error / size)}, {"worst_share_of_block", worst}};
}

struct setting {
    int bits;
    std::string directions;
    std::size_t slot_count, every;
    bool replay = true;      // updates on what travels in 8 bits
    std::size_t piece = 32;  // MiB that move at once, of 16 bits
};
struct first_losses {
    double plus = 0, minus = 0;
};

class report {
    std::size_t tokens_;
    int steps_;
    nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();

public:
    report(std::size_t tokens, int steps) : tokens_(tokens), steps_(steps) {
        fmt::print("# {:<9} {:>4} {:>10} {:>5} {:>5} {:>5} {:>9} {:>9} {:>7} {:>9} {:>8} {:>9} {:>6} {:>6} {:>6}\n",
                   "model", "bits", "z", "slots", "every", "piece", "step ms", "bound ms", "ratio", "tokens/s",
                   "overlap", "loss", "GiB", "model", "pipe");
    }
    [[nodiscard]] const nlohmann::ordered_json& rows() const noexcept { return rows_; }

    // Steps of a pipeline over `store`. `exact`: the first losses of 16 bits, which are set there and compared with here.
    template <class Store>
    void measure(const shape& s, Store& store, const setting& how, const alone& t, first_losses& exact) {
        const auto kind = how.directions == "normal" ? zeroth::distribution::normal : zeroth::distribution::rademacher;
        const cuda_queue q(0);
        opt_model model(q, s, tokens_, 2);
        const std::size_t of_model = q.account().live();
        zeroth::offload<cuda_queue, number, opt_model> pipeline(
            q, model, store, {.slot_count = how.slot_count, .write_back_every = how.every, .piece = how.piece << 20});
        const std::size_t of_pipeline = q.account().live() - of_model;
        std::vector<double> times;
        std::vector<zeroth::loss_value> losses(2);
        first_losses first;
        // At first masters come without updates, and what travels is made.
        const int untimed = how.bits == 8 ? 3 : 2;
        zeroth::transfer_counters moved;
        for (int step = 0; step < steps_ + untimed; ++step) {
            if (step == untimed) { moved = pipeline.counters(); }
            const zeroth::direction z{.seed = 42, .step = static_cast<std::uint64_t>(step), .kind = kind};
            const zeroth::probe probes[] = {{z, 1e-3}, {z, -1e-3}};
            const double begin = now();
            pipeline.evaluate(probes, 0, losses);
            const double g = (losses[0].mean - losses[1].mean) / 2e-3;
            const zeroth::pending_update u{z, g, 1e-7, 0};
            pipeline.update({&u, 1});
            if (step == 0) { first = {losses[0].mean, losses[1].mean}; }
            if (step >= untimed) { times.push_back(now() - begin); }
        }
        moved = pipeline.counters() - moved;
        if (how.bits == 16 && exact.plus == 0) { exact = first; }
        double total = 0;  // of whole periods where there are: steps that write back are dearer
        for (const double x : times) { total += x; }
        const auto count = static_cast<double>(times.size());
        const double mean = total / count;
        const auto layers = static_cast<double>(s.blocks);
        // The floor: what a step must move at the rates of copies alone, or its products; with 8 bits also the masters of
        // what stays.
        const auto period = static_cast<double>(how.every);
        const auto weights = static_cast<double>(store.layout().size(1));
        const double wire = static_cast<double>(store.wire_bytes(1));
        double up = wire, down = wire / period, stays = 0, compute = t.compute;
        if (how.bits == 8) {
            up = (wire * (period - 1) + weights * sizeof(float)) / period;
            down = (weights * sizeof(float) + wire) / period;
            const double resident = static_cast<double>(store.layout().size(0) + store.layout().size(s.blocks + 1));
            stays = t.link(resident * sizeof(float) / period, resident * sizeof(float) / period);
            // Of the K updates of a period one a step is drawn for masters; 0 to K - 1 are replayed.
            compute += t.decode + (how.replay ? t.update * (period - 1) / 2 : 0);
        }
        const double link = t.link(up, down);
        const double bound = layers * std::max(link, t.products) + stays + t.tail;
        const double busy = layers * std::max(link, compute) + stays;
        const double rate = static_cast<double>(tokens_) / mean;
        const auto gib = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
        fmt::print(
            "{:<11} {:>4} {:>10} {:>5} {:>5} {:>5} {:>9.2f} {:>9.2f} {:>7.3f} {:>9.0f} {:>8.3f} {:>9.5f} {:>6.2f} "
            "{:>6.2f} {:>6.2f}\n",
            s.name, how.bits, how.directions, how.slot_count, how.every, how.piece, mean * 1e3, bound * 1e3,
            mean / bound, rate, busy / mean, first.plus, gib(pipeline.peak_device_bytes()), gib(of_model),
            gib(of_pipeline));
        std::fflush(stdout);
        rows_.push_back({{"model", s.name},
                         {"blocks", s.blocks},
                         {"of_blocks", s.layers},
                         {"bits", how.bits},
                         {"directions", how.directions},
                         {"slots", how.slot_count},
                         {"write_back_every", how.every},
                         {"replay", how.replay},
                         {"piece_mib", how.piece},
                         {"step_ms", mean * 1e3},
                         {"bound_ms", bound * 1e3},
                         {"ratio", mean / bound},
                         {"tokens_per_s", rate},
                         {"overlap_efficiency", busy / mean},
                         {"peak_device_gib", gib(pipeline.peak_device_bytes())},
                         {"model_gib", gib(of_model)},
                         {"pipeline_gib", gib(of_pipeline)},
                         {"first_loss", first.plus},
                         {"first_slope", (first.plus - first.minus) / 2e-3},
                         {"upload_bytes_a_step", static_cast<double>(moved.upload_bytes) / count},
                         {"offload_bytes_a_step", static_cast<double>(moved.offload_bytes) / count},
                         {"block_link_ms", link * 1e3},
                         {"block_upload_ms", t.link(up, 0) * 1e3},
                         {"block_products_ms", t.products * 1e3},
                         {"block_compute_ms", compute * 1e3},
                         {"upload_gb_per_s", t.bytes / t.up * 1e-9},
                         {"duplex_gb_per_s", t.bytes / t.duplex * 1e-9}});
        if (how.bits == 8 && exact.plus != 0) {
            rows_.back()["loss_error"] = std::fabs(first.plus - exact.plus);
            rows_.back()["slope_of_16_bits"] = (exact.plus - exact.minus) / 2e-3;
        }
    }
};

}  // namespace zeroth_bench

int main(int argc, char** argv) try {
    using namespace zeroth_bench;
    std::string json;
    std::vector<std::string> names{"opt-1.3b", "opt-6.7b", "opt-13b", "opt-175b"};
    std::vector<std::size_t> slot_count{2, 3, 4}, every{1, 8}, renew_every{8}, pieces{32};
    std::vector<std::string> kinds{"normal", "rademacher"};
    std::vector<int> bits{16, 8};
    std::size_t tokens = 2048;
    int steps = 8;
    bool late = false;
    CLI::App app("Zeroth-order steps with offloaded blocks against the link and the products alone, on one GPU");
    app.add_option("-m,--models", names, "opt-1.3b opt-6.7b opt-13b opt-175b (8 of its 96 blocks)")
        ->capture_default_str();
    app.add_option("--bits", bits, "of a weight that travels: 16; 8, of float masters")
        ->check(CLI::IsMember({16, 8}))
        ->capture_default_str();
    app.add_option("--slots", slot_count, "blocks on the device, or on their way to it")->capture_default_str();
    app.add_option("--write-back-every", every, "steps, of 16 bits")->capture_default_str();
    app.add_option("--renew-every", renew_every, "steps between updates of masters, of 8 bits")->capture_default_str();
    app.add_option("--pieces", pieces, "MiB of a block that move at once, of 16 bits")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_flag("--late", late, "see 8 bits without the updates that their masters lack, instead of replaying them");
    app.add_option("--directions", kinds, "normal, rademacher")->check(CLI::IsMember({"normal", "rademacher"}));
    app.add_option("--tokens", tokens, "of the one sample")->check(CLI::Range(128, 2048))->capture_default_str();
    app.add_option("--steps", steps, "timed, after two or three")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    const nlohmann::ordered_json environment = bench::card_environment();
    report all(tokens, steps);
    for (const shape& s : shapes) {
        if (std::find(names.begin(), names.end(), s.name) == names.end()) { continue; }
        std::map<std::string, alone> parts;
        std::map<std::string, first_losses> exact;
        for (const std::string& kind : kinds) {
            parts[kind] = measure_alone(
                s, tokens, kind == "normal" ? zeroth::distribution::normal : zeroth::distribution::rademacher);
        }
        const zeroth::model_layout layout(model_of(s), sizeof(number));
        const auto measure = [&](auto& store, int width, const std::vector<std::size_t>& periods, bool replay) {
            const std::vector<std::size_t> sizes = width == 16 ? pieces : std::vector<std::size_t>{pieces.front()};
            for (const std::string& kind : kinds) {
                for (const std::size_t k : slot_count) {
                    for (const std::size_t p : periods) {
                        for (const std::size_t size : sizes) {
                            all.measure(s, store, {width, kind, k, p, replay, size}, parts[kind], exact[kind]);
                        }
                    }
                }
            }
        };
        for (const int width : bits) {
            if (width == 16) {
                store16 store(layout);
                for (std::size_t m = 0; m < layout.modules(); ++m) { randomize(store.image(m)); }
                measure(store, width, every, true);
            } else {
                store8 store(layout, 0, {}, {.replay = !late});
                for (std::size_t m = 0; m < layout.modules(); ++m) { randomize(store.master(m)); }
                measure(store, width, renew_every, !late);
            }
        }
    }
    bench::write_report(json, {{"bench", "zeroth_offload"},
                               {"command", bench::command_line(argc, argv)},
                               {"environment", environment},
                               {"tokens", tokens},
                               {"steps", steps},
                               {"error_of_8_bits", error_of_eight_bits()},
                               {"rows", all.rows()}});
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
