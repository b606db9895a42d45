// How a model, its batch and its sequences are divided over ranks: the options of pipelines tp, pp and 3d, their checks.
// Needs CLI11.
#pragma once

#include <algorithm>    // find, max, min
#include <cstdint>      // tokens
#include <iterator>     // begin, end
#include <limits>       // numbers of micro-batches
#include <string>       // messages
#include <string_view>  // names
#include <vector>       // members

#include <CLI/CLI.hpp>                   // command line
#include <fmt/format.h>                  // messages
#include <tutti/comm/topology.hpp>       // machines
#include <tutti/core/error.hpp>          // usage_error
#include <tutti/sequence/placement.hpp>  // cluster_of

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct parallel_options {
    static constexpr const char* pipelines_of_parts = "tp, pp, 3d";

    int tp = 0;  // ranks along each dimension; 0: what is left of --ranks, or 1
    int pp = 0;
    int dp = 0;
    int sp = 0;
    int zero = 0;  // the stage among the ranks that have the same part of the model
    bool sequence_parallel = false;
    std::string pipeline_schedule = "1f1b";

    /// Do ranks share gradients, whose parts they then keep, after every micro-batch?
    [[nodiscard]] bool shares_gradients() const { return zero >= 2; }
};

inline void declare(command_line& app, parallel_options& o) {
    app.begin("Parts of the model", parallel_options::pipelines_of_parts);
    const CLI::Range ranks(1, 1024);
    app.add_option("--tp", o.tp,
                   "ranks that share every layer: heads, the wider layers and the vocabulary are divided; pp: 1")
        ->check(ranks);
    app.add_option("--pp", o.pp, "ranks that have some of the layers each; tp: 1")->check(ranks);
    app.add_option("--dp", o.dp,
                   "replicas, which have parts of the batch; --ranks is --tp times --pp times --dp times --sp; those "
                   "not given are 1, but what is left for tp's --tp, pp's --pp, 3d's --dp")
        ->check(ranks);
    app.add_option("--sp", o.sp,
                   "ranks that have parts of every sequence, two chunks each, and attend to it in a ring; with "
                   "--lengths documents are where zeppelin places them")
        ->check(ranks);
    app.add_option("--zero", o.zero,
                   "--dp times --sp ranks, which have the same part of the model, share 1: the optimizer's state, as "
                   "zero1 does, 2: also gradients, 3: also parameters; 2 and 3 with --pp 1")
        ->check(CLI::Range(0, 3))
        ->capture_default_str();
    app.used_by("tp, 3d");
    app.add_flag("--sequence-parallel", o.sequence_parallel,
                 "ranks that share layers divide the rows between them: each normalizes and keeps its share");
    app.used_by("pp, 3d");
    app.add_option("--pipeline-schedule", o.pipeline_schedule,
                   "gpipe, 1f1b, interleaved (two stages a rank), zb-h1, zb-v (two stages a rank) or dualpipe (two "
                   "copies of the model)")
        ->capture_default_str();
}

namespace detail {

/// Ranks along the dimensions, and their product. `Options` has these and all others. Errors: bad_input.
template <class Options> void complete_parts(Options& o, int processes) {
    require(o.recompute != 3 || o.of_parts(),
            fmt::format("--recompute 3: pipeline '{}' has the whole model on every rank; {} do not", o.pipeline,
                        o.pipelines_of_parts));
    if (!o.of_parts()) { return; }
    require(o.pipeline != "tp" || o.pp <= 1, "--pp: pipeline 'tp' has all layers on every rank; 3d divides them too");
    require(o.pipeline != "tp" || o.pipeline_schedule == "1f1b",
            "--pipeline-schedule: pipeline 'tp' has all layers on every rank, and no pipeline of them");
    require(o.pipeline != "pp" || o.tp <= 1, "--tp: pipeline 'pp' has whole layers; 3d divides them too");
    int& rest = o.pipeline == "tp" ? o.tp : o.pipeline == "pp" ? o.pp : o.dp;
    const bool on_gpu = o.device == "cuda";
    if (o.ranks == 0) { o.ranks = on_gpu && o.gpus != 0 ? o.gpus : processes; }
    const auto or_one = [](int n) { return n == 0 ? 1L : static_cast<long>(n); };
    if (rest == 0) {
        const long others = or_one(o.tp) * or_one(o.pp) * or_one(o.dp) * or_one(o.sp);
        const long ranks = o.ranks != 0 ? o.ranks : on_gpu ? 1 : 4;
        rest = static_cast<int>(std::max(1L, ranks / others));
    }
    for (int* const n : {&o.tp, &o.pp, &o.dp, &o.sp}) { *n = static_cast<int>(or_one(*n)); }
    const long product = static_cast<long>(o.tp) * o.pp * o.dp * o.sp;
    if (o.ranks == 0) { o.ranks = static_cast<int>(std::min(product, 1L << 20)); }
    require(o.ranks == product, fmt::format("--ranks: {} ranks, but --tp {} x --pp {} x --dp {} x --sp {} are {}",
                                            o.ranks, o.tp, o.pp, o.dp, o.sp, product));
    if (on_gpu && o.gpus == 0) { o.gpus = o.ranks; }
    require(!o.sequence_parallel || o.tp > 1,
            "--sequence-parallel: rows are divided among the ranks that share layers, --tp of them: 2 or more");
    require(o.model.heads >= o.tp, fmt::format("--tp: {} heads cannot be divided among {} ranks", o.model.heads, o.tp));
    constexpr std::string_view schedules[] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"};
    require(std::find(std::begin(schedules), std::end(schedules), o.pipeline_schedule) != std::end(schedules),
            fmt::format("--pipeline-schedule: '{}' is not one of gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe",
                        o.pipeline_schedule));
    require(!o.shares_gradients() || o.pp == 1,
            fmt::format("--zero: {} shares gradients after every micro-batch, of which the {} stages of --pp have "
                        "several under way; --zero 1 goes with them, or --pp 1 and more of --tp, --dp or --sp",
                        o.zero, o.pp));
    require(
        !o.shares_gradients() || o.pipeline_schedule == "1f1b",
        fmt::format("--pipeline-schedule: --zero {} has one micro-batch at a time, which is 1f1b on one rank", o.zero));
    const bool defers = o.pipeline_schedule.starts_with("zb-") || o.pipeline_schedule == "dualpipe";
    require(!defers || o.recompute < 0 || o.recompute == 0 || o.recompute == 3,
            fmt::format("--recompute: '{}' computes weights' gradients later, from what forward kept: 0 or 3",
                        o.pipeline_schedule));
    if (defers && o.recompute < 0) { o.recompute = 0; }
}

/// That attention can be shared; --micro-batch is known. Errors: bad_input.
template <class Options> void expect_shareable_attention(const Options& o) {
    if (!o.of_parts()) { return; }
    require(o.capacity == 0 || !o.lengths.empty(),
            "--capacity: sequences of one length are divided evenly; --lengths draws documents");
    require(o.nodes == 0 || !o.network.empty() || o.shares_attention() || !o.compare.empty(),
            "--nodes: makes a difference to --sp ranks that share sequences, and with --network");
    if (!o.shares_attention()) { return; }
    require(o.model.context >= 2 * o.sp,
            fmt::format("--sp: {} ranks have two chunks each of a sequence, which are more than the {} tokens of "
                        "--context",
                        o.sp, o.model.context));
    if (o.nodes != 0 || !o.network.empty()) {
        const int nodes = o.nodes == 0 ? o.ranks : o.nodes;
        const auto machines = tutti::comm::topology::uniform(nodes, o.ranks / nodes);
        for (int first = 0; first < o.ranks; ++first) {
            if (first / o.tp % o.sp != 0) { continue; }
            std::vector<int> members;
            for (int s = 0; s < o.sp; ++s) { members.push_back(first + s * o.tp); }
            try {
                static_cast<void>(tutti::sequence::cluster_of(machines.subset(members)));
            } catch (const tutti::usage_error&) {
                throw bad_input(fmt::format("--nodes: the {} ranks that share sequences, every --tp {} ranks one, "
                                            "would be unevenly on machines of {} ranks; --tp times --sp and the ranks "
                                            "of a machine should divide one another",
                                            o.sp, o.tp, o.ranks / nodes));
            }
        }
    }
    if (!o.of_documents()) { return; }
    const std::int64_t all = o.attention_tokens();
    require(all % o.sp == 0,
            fmt::format("--sp: the {} tokens of a micro-batch cannot be divided among {} ranks", all, o.sp));
    require(o.capacity == 0 || all <= std::int64_t{o.capacity} * o.sp,
            fmt::format("--capacity: --sp {} ranks of {} tokens do not hold the {} of a micro-batch", o.sp, o.capacity,
                        all));
    require(std::int64_t{o.steps} * (o.batch / o.micro_batch) <= std::numeric_limits<int>::max(),
            fmt::format("--steps: documents of {} steps of {} micro-batches are more than can be drawn", o.steps,
                        o.batch / o.micro_batch));
}

}  // namespace detail

}  // namespace transformer
