// Zeroth-order steps of a model whose blocks stream through several GPUs: whole blocks to each GPU, of a host copy each, and
// slices of one host copy that the GPUs gather by NCCL's collective, by its messages and by copies; sides of the difference,
// shards of the batch, or both dealt to them. Tokens a second, over those of one GPU with one shard and with as many; bytes;
// how long blocks and slices take to come when all GPUs' do at once, and each way to gather alone. The report is written anew
// after every row.
#include <algorithm>  // find_if, max
#include <chrono>     // host times
#include <cstdint>    // counts
#include <cstdio>     // flush
#include <exception>  // errors
#include <iostream>   // errors
#include <map>        // by shards
#include <memory>     // stores
#include <set>        // shards
#include <string>     // names
#include <utility>    // move
#include <vector>     // plans

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tutti/comm/nccl.hpp>
#include <tutti/core/cuda_run.cuh>
#include <tutti/zeroth/gather_by_copies.hpp>
#include <tutti/zeroth/offload.hpp>
#include <tutti/zeroth/perturbation.cuh>
#include <tutti/zeroth/replicate.hpp>

#include "support/kernel_table.hpp"
#include "support/opt_model.cuh"

namespace zeroth_bench {

struct plan {
    std::string uploads;  // naive, sliced
    std::string gather;   // collective, messages, copies
    std::string work;     // one, data, perturbation, 2d
    zeroth::division how;
};
struct outcome {
    double seconds = 0;
    std::uint64_t up = 0, down = 0, gathered = 0;  // a step and GPU
    double loss = 0;
    double gib = 0;
};

double now() { return seconds(clock_type::now().time_since_epoch()); }

// Ranks' steps; the slowest rank's time.
template <class Exchange>
outcome measure(comm::nccl& world, const shape& s, zeroth::pinned_store<number, cuda_queue>& store, const plan& p,
                Exchange exchange, std::size_t slot_count, std::size_t tokens, int steps) {
    const cuda_queue q = world.queue().sibling();
    opt_model model(q, s, tokens, zeroth::branches_of({}, p.how));
    using pipeline_type = zeroth::offload<cuda_queue, number, opt_model, Exchange>;
    pipeline_type pipeline(q, model, store, {.slot_count = slot_count}, std::move(exchange));
    zeroth::division how = p.how;
    how.check_every = 0;
    zeroth::replicated<comm::nccl, pipeline_type> tuning(world.duplicate("tuning"), pipeline,
                                                         {.epsilon = 1e-3, .seed = 42}, how);
    outcome r;
    zeroth::transfer_counters before;
    double begin = 0;
    for (int step = 0; step < steps + 2; ++step) {
        if (step == 2) {
            world.barrier();
            world.synchronize();
            before = pipeline.counters();
            begin = now();
        }
        r.loss = tuning.step(1e-7).loss_plus;
    }
    const double mine = (now() - begin) / steps;
    const auto moved = pipeline.counters() - before;
    const auto count = static_cast<std::uint64_t>(steps);
    r.up = moved.upload_bytes / count;
    r.down = moved.offload_bytes / count;
    r.gathered = moved.gathered_bytes / count;
    for (const comm::control_record& of : world.gather_control({static_cast<std::uint64_t>(mine * 1e9), 0, 0, 0})) {
        r.seconds = std::max(r.seconds, static_cast<double>(of[0]) * 1e-9);
    }
    pipeline.flush();
    r.gib = static_cast<double>(pipeline.peak_device_bytes()) / (1 << 30);
    return r;
}

// What a rank has of a block comes alone, while the others' comes to them; the slowest rank's seconds.
double upload_seconds(comm::nccl& world, const zeroth::pinned_store<number, cuda_queue>& store) {
    constexpr int repeats = 8;
    const part own = store.own(1);
    const auto from = store.image(1);
    const cuda_queue q = world.queue();
    const buffer<number, cuda_queue> to(q, own.count);
    double begin = 0;
    for (int i = 0; i <= repeats; ++i) {
        if (i == 1) {
            world.barrier();
            world.synchronize();
            begin = now();
        }
        upload(q, view<const number, pinned_memory>(from.data(), own.count), to.view());
    }
    world.synchronize();
    const auto mine = static_cast<std::uint64_t>((now() - begin) / repeats * 1e9);
    std::uint64_t most = 0;
    for (const comm::control_record& of : world.gather_control({mine, 0, 0, 0})) { most = std::max(most, of[0]); }
    return static_cast<double>(most) * 1e-9;
}

template <class Way>
outcome measure_slices(comm::nccl& world, const shape& s, zeroth::pinned_store<number, cuda_queue>& store,
                       const plan& p, Way way, std::size_t slot_count, std::size_t tokens, int steps) {
    return measure(world, s, store, p, zeroth::sliced<comm::nccl, Way>(world.duplicate("slices"), std::move(way)),
                   slot_count, tokens, steps);
}

}  // namespace zeroth_bench

int main(int argc, char** argv) try {
    using namespace zeroth_bench;
    std::string json, name = "opt-66b";
    std::size_t tokens = 2048, slot_count = 3, blocks = 0;
    int steps = 4;
    std::vector<int> gpus;
    CLI::App app("Zeroth-order steps with offloaded blocks on several GPUs, beside one");
    app.add_option("-m,--model", name, "opt-1.3b opt-6.7b opt-13b opt-66b opt-175b")->capture_default_str();
    app.add_option("--blocks", blocks, "of the model; 0: 16 of opt-66b's 64, 8 of opt-175b's 96, all others");
    app.add_option("--gpus", gpus, "beside one; default: all there are")->check(CLI::Range(2, 1024));
    app.add_option("--slots", slot_count, "blocks on a device")->capture_default_str();
    app.add_option("--tokens", tokens, "of a shard of the batch")->check(CLI::Range(128, 2048))->capture_default_str();
    app.add_option("--steps", steps, "timed, after two")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("-J,--json", json, "write the report here, besides printing it");
    CLI11_PARSE(app, argc, argv);
    const auto found = std::find_if(shapes.begin(), shapes.end(), [&](const shape& s) { return s.name == name; });
    if (found == shapes.end()) { throw usage_error(fmt::format("there is no model '{}'", name)); }
    shape s = *found;
    if (blocks != 0) { s.blocks = blocks; }
    int present = 0;
    tutti::detail::check_cuda(cudaGetDeviceCount(&present), "cudaGetDeviceCount");
    if (gpus.empty() && present > 1) {
        gpus = {present};
    }
    for (const int n : gpus) {
        if (n > present) { throw usage_error(fmt::format("--gpus: {} asked for, but there are {}", n, present)); }
    }
    const nlohmann::ordered_json environment = bench::card_environment();

    nlohmann::ordered_json rows = nlohmann::ordered_json::array(), gathers = nlohmann::ordered_json::array(),
                           uploads = nlohmann::ordered_json::array();
    const auto write = [&] {
        bench::write_report(json, {{"bench", "zeroth_offload_gpus"},
                                   {"command", bench::command_line(argc, argv)},
                                   {"environment", environment},
                                   {"slots", slot_count},
                                   {"tokens_a_shard", tokens},
                                   {"steps", steps},
                                   {"uploading", uploads},
                                   {"gathering", gathers},
                                   {"rows", rows}});
    };
    std::map<std::size_t, double> of_one;  // tokens a second, by shards
    fmt::print("# {:<9} {:>4} {:>8} {:>11} {:>13} {:>9} {:>10} {:>9} {:>7} {:>8} {:>7} {:>7} {:>9} {:>6}\n", "model",
               "gpus", "uploads", "gather", "work", "tokens", "step ms", "tokens/s", "x one", "x equal", "GB up",
               "GB down", "GB others", "GiB");
    const auto report = [&](int n, const plan& p, const outcome& r) {
        const double batch = static_cast<double>(tokens * p.how.shards);
        const double rate = batch / r.seconds;
        if (n == 1) { of_one[p.how.shards] = rate; }
        const double one = of_one.at(1), equal = of_one.at(p.how.shards);
        const auto gb = [](std::uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; };
        fmt::print("{:<11} {:>4} {:>8} {:>11} {:>13} {:>9} {:>10.1f} {:>9.0f} {:>7.2f} {:>8.2f} {:>7.2f} {:>7.2f} "
                   "{:>9.2f} {:>6.2f}\n",
                   s.name, n, p.uploads, p.gather, p.work, batch, r.seconds * 1e3, rate, rate / one, rate / equal,
                   gb(r.up), gb(r.down), gb(r.gathered), r.gib);
        std::fflush(stdout);
        rows.push_back({{"model", s.name},
                        {"blocks", s.blocks},
                        {"of_blocks", s.layers},
                        {"gpus", n},
                        {"uploads", p.uploads},
                        {"gather", p.gather},
                        {"work", p.work},
                        {"tokens_a_step", batch},
                        {"step_ms", r.seconds * 1e3},
                        {"tokens_per_s", rate},
                        {"over_one_gpu", rate / one},
                        {"over_one_gpu_at_equal_batch", rate / equal},
                        {"upload_bytes", r.up},
                        {"offload_bytes", r.down},
                        {"gathered_bytes", r.gathered},
                        {"host_copies", p.uploads == "sliced" ? 1 : n},
                        {"peak_device_gib", r.gib},
                        {"loss", r.loss}});
        write();
    };
    const auto model = model_of(s);
    const auto filled = [&](std::size_t ranks, std::size_t rank) {
        auto store = std::make_unique<zeroth::pinned_store<number, cuda_queue>>(
            zeroth::model_layout(model, sizeof(number), ranks), rank);
        for (std::size_t m = 0; m < store->layout().modules(); ++m) { randomize(store->image(m)); }
        return store;
    };
    const auto divided = [](int sides, int data) {
        zeroth::division how;
        how.sides = sides;
        how.data = data;
        how.shards = static_cast<std::size_t>(data);
        return how;
    };
    // What n GPUs can share; one makes all batches that several will, one shard after the other.
    const auto works = [&](int n) {
        std::vector<plan> all;
        if (n > 1) {
            all.push_back({"naive", "-", "data", divided(1, n)});
            if (n % 2 == 0) { all.push_back({"naive", "-", n == 2 ? "perturbation" : "2d", divided(2, n / 2)}); }
            return all;
        }
        std::set<std::size_t> batches{1};
        for (const int several : gpus) {
            batches.insert(static_cast<std::size_t>(several));
            if (several % 2 == 0) { batches.insert(static_cast<std::size_t>(several) / 2); }
        }
        for (const std::size_t shards : batches) {
            all.push_back({"naive", "-", "one", divided(1, 1)});
            all.back().how.shards = shards;
        }
        return all;
    };
    gpus.insert(gpus.begin(), 1);
    for (const int n : std::vector<int>(gpus)) {
        double whole_block = 0;
        for (const bool slices : {false, true}) {
            if (slices && n == 1) { continue; }
            comm::nccl::launch(n, [&](comm::nccl& world) {
                const auto rank = static_cast<std::size_t>(world.rank());
                const auto store = slices ? filled(static_cast<std::size_t>(n), rank) : filled(1, 0);
                world.barrier();
                const double alone = upload_seconds(world, *store);
                if (world.rank() == 0) {
                    whole_block = slices ? whole_block : alone;
                    uploads.push_back({{"gpus", n}, {"slices", slices}, {"ms", alone * 1e3}});
                    if (slices) { uploads.back()["of_whole"] = alone / whole_block; }
                    fmt::print("# {} GPUs upload a {} each: {:.3f} ms{}\n", n, slices ? "slice of a block" : "block",
                               alone * 1e3, slices ? fmt::format(", {:.3f} of whole ones", alone / whole_block) : "");
                    std::fflush(stdout);
                }
                const auto tell = [&](const plan& p, const outcome& r) {
                    if (world.rank() == 0) { report(n, p, r); }
                };
                if (!slices) {
                    for (const plan& p : works(n)) {
                        tell(p, measure(world, s, *store, p, zeroth::whole(), slot_count, tokens, steps));
                    }
                    return world.synchronize();
                }
                const auto copies = zeroth::gather_by_copies<cuda_queue>::over(world);
                const auto fastest =
                    zeroth::fastest_gather(world, store->layout().size(1) * sizeof(number),
                                           zeroth::gather_collectively(), zeroth::gather_by_messages(), copies);
                if (world.rank() == 0) {
                    const char* const names[] = {"collective", "messages", "copies"};
                    gathers.push_back({{"gpus", n},
                                       {"block_bytes", store->layout().size(1) * sizeof(number)},
                                       {"fastest", names[fastest.chosen()]}});
                    for (std::size_t i = 0; i < 3; ++i) {
                        gathers.back()[fmt::format("{}_ms", names[i])] = fastest.times()[i] * 1e3;  // null: not there
                        fmt::print("# {} GPUs gather a block by {}: {:.3f} ms{}\n", n, names[i],
                                   fastest.times()[i] * 1e3, i == fastest.chosen() ? ", the fastest" : "");
                    }
                    std::fflush(stdout);
                }
                for (plan p : works(n)) {
                    const auto by = [&](const char* gather, const auto& way) {
                        p.uploads = "sliced";
                        p.gather = gather;
                        tell(p, measure_slices(world, s, *store, p, way, slot_count, tokens, steps));
                    };
                    by("collective", zeroth::gather_collectively());
                    by("messages", zeroth::gather_by_messages());
                    if (copies.available()) { by("copies", copies); }
                }
                world.synchronize();
            });
        }
    }
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
