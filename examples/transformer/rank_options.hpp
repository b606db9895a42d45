// Where ranks are and what they compute in: the options of devices, processes, networks and precision, and their checks.
// Needs CLI11.
#pragma once

#include <string>  // names

#include <CLI/CLI.hpp>              // command line
#include <fmt/format.h>             // messages
#include <tutti/comm/shaped.hpp>    // stated networks
#include <tutti/comm/topology.hpp>  // link
#include <tutti/core/error.hpp>     // usage_error

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct rank_options {
    std::string device = "cpu";
    int gpus = 0;   // 0: one, where the device is cuda
    int ranks = 0;  // 0: as many as the backend has, or the default
    std::string backend = "threads";
    int nodes = 0;          // 0: as many as there are host names
    std::string network;    // empty: as it is
    std::string precision;  // empty: float, on cuda bf16
};

inline void declare(command_line& app, rank_options& o) {
    using detail::within;
    app.begin("Ranks");
    app.add_option("--device", o.device, "cpu or cuda")->capture_default_str();
    app.add_option(
           "--gpus", o.gpus,
           "GPUs to train on, a rank each; default with --device cuda: 1, or one for each of mpirun's processes")
        ->check(within(1, 1024));
    app.add_option("--ranks", o.ranks, "number of ranks; default 4 threads, all of mpirun's processes, 1 for 'local'")
        ->check(within(1, 1024));
    app.add_option("--backend", o.backend, "threads; under mpirun mpi, or nccl with a GPU a process")
        ->capture_default_str();
    app.add_option(
           "--precision", o.precision,
           "float or double; with --device cuda bf16, float or, for mezo, zo2 and distzo2, float16; default the first")
        ->check(detail::named("type"));
    app.used_by("all but local, zo2");
    app.add_option("--network", o.network,
                   "let the network between machines be as slow as this, bandwidth and latency as in 1Gbit,50us; "
                   "latency 0 if left out; "
                   "without --nodes each rank is a machine")
        ->type_name("LINK");
    app.used_by("ddp-4bit, ddp-topk, ddp-lgreco --family quantize, ddp-lgreco --family topk, co2-zero, even-ring, "
                "zeppelin, tp, pp, 3d, --network");
    app.add_option("--nodes", o.nodes,
                   "machines that the ranks are on, neighbors together: where each has several, gradients are "
                   "compressed between machines alone; default: by host names")
        ->check(within(1, 1024));
}

/// A --network as a link. Errors: bad_input.
[[nodiscard]] inline tutti::comm::link stated_link(const std::string& text) {
    try {
        return tutti::comm::shaped_network::parse(text).among(2).between();
    } catch (const tutti::usage_error& e) { throw bad_input(fmt::format("--network: {}", e.what())); }
}

namespace detail {

/// `processes` is mpirun's, 0 without. `Options` has these and all others. Errors: bad_input.
template <class Options> void complete_device(Options& o, int processes) {
    require(o.device == "cpu" || o.device == "cuda", fmt::format("--device: '{}' is not one of cpu, cuda", o.device));
    const bool on_gpu = o.device == "cuda";
    require(on_gpu || o.gpus == 0, "--gpus: needs --device cuda");
    require(on_gpu || o.backend != "nccl", "--backend: nccl needs --device cuda");
    require(!on_gpu || o.backend != "mpi", "--backend: mpirun's processes on GPUs speak NCCL; use --backend nccl");
    if (on_gpu) {
        if (o.gpus == 0) { o.gpus = processes > 0 ? processes : 1; }
        require(o.ranks == 0 || o.ranks == o.gpus,
                fmt::format("--ranks: {} ranks on {} GPUs; there is one rank a GPU", o.ranks, o.gpus));
        o.ranks = o.gpus;
        const int widest = o.of_forward_passes() ? 16384 : 8192;
        require(o.model.width <= widest, fmt::format("--width: {} is more than the GPU's {}", o.model.width, widest));
    }
    if (o.precision.empty()) { o.precision = on_gpu ? "bf16" : "float"; }
    const bool in_float16 = o.precision == "float16";
    for (const char* const half : {"bf16", "float16"}) {
        require(on_gpu || o.precision != half, fmt::format("--precision: {} needs --device cuda", half));
    }
    require(
        !in_float16 || o.of_forward_passes(),
        fmt::format("--precision: gradients of '{}' leave float16's range, use bf16; mezo, zo2 and distzo2 have none",
                    o.pipeline));
    require(in_float16 || o.precision == "float" || o.precision == (on_gpu ? "bf16" : "double"),
            fmt::format("--precision: '{}' is not one of {}", o.precision,
                        on_gpu ? "bf16, float, float16" : "float, double"));
}
/// How many there are; the device is known. Errors: bad_input.
template <class Options> void complete_ranks(Options& o, bool pipeline_is_single_rank, int processes) {
    if (o.ranks == 0) { o.ranks = processes > 0 ? processes : pipeline_is_single_rank ? 1 : 4; }
    require(!pipeline_is_single_rank || o.ranks == 1,
            fmt::format("--ranks: pipeline '{}' is for 1 rank, not {}", o.pipeline, o.ranks));
    require(processes == 0 || o.ranks == processes,
            fmt::format("--ranks: {} asked for, but mpirun started {}", o.ranks, processes));
}
/// Between machines; ranks are known. Errors: bad_input.
inline void complete_network(const rank_options& o, bool pipeline_is_single_rank) {
    require(o.device != "cuda" || o.network.empty(),
            "--network: only ranks on the CPU pretend to have another network");
    if (!o.network.empty()) { static_cast<void>(stated_link(o.network)); }  // refuses
    require(o.nodes == 0 || o.ranks % o.nodes == 0,
            fmt::format("--nodes: {} ranks cannot be divided among {} machines", o.ranks, o.nodes));
    require(
        o.network.empty() || o.nodes > 1 || (o.nodes == 0 && o.ranks > 1) || pipeline_is_single_rank,
        fmt::format("--network: is between machines, and there is 1, of {} ranks; --nodes or --ranks says otherwise",
                    o.ranks));
}

}  // namespace detail

}  // namespace transformer
