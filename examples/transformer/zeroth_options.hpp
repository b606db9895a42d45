// Tuning by forward passes: the options of a step's directions, and of where weights are meanwhile (pipelines zo2 and
// distzo2), and their checks.
// Needs CLI11.
#pragma once

#include <array>        // ways
#include <cmath>        // isfinite
#include <string>       // messages
#include <string_view>  // names
#include <vector>       // names

#include <CLI/CLI.hpp>                      // command line
#include <fmt/format.h>                     // messages
#include <tutti/zeroth/pending_update.hpp>  // max_directions

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct zeroth_options {
    static constexpr const char* pipelines = "mezo, zo2, distzo2";
    static constexpr const char* offloading_pipelines = "zo2, distzo2";  // whose weights are on the host

    static constexpr int usual_slots = 3;  // one block arrives, one is in use, one leaves
    int slot_count = 0;                    // 0: as usual
    int blocks_resident = 0;
    bool sliced = false;
    std::string gather;   // of slices: one of ways_to_gather; empty: the fastest, which is measured
    int upload_bits = 0;  // of a weight on its way, of float masters; 0: as it is computed with
    static constexpr int usual_renewal = 8;
    int renew_every = 0;  // steps between two visits of masters; 0: as usual

    [[nodiscard]] static bool of_forward_passes(std::string_view pipeline) {
        return detail::is_member(pipelines, pipeline);
    }
    /// Are weights on the host?
    [[nodiscard]] static bool offloads(std::string_view pipeline) {
        return detail::is_member(offloading_pipelines, pipeline);
    }
};

/// What a step of forward passes is.
struct estimate_options {
    std::string zo_parallel = "data";  // what ranks share
    double epsilon = 1e-3;             // how far weights are moved
    int directions = 1;                // of a step
    int shards = 0;                    // parts of the batch that losses are averaged over; 0: one a rank or pair
};

/// How ranks gather the slices of a block, in the order in which zeroth_result has their times.
inline constexpr std::array<std::string_view, 3> ways_to_gather{"collective", "messages", "copies"};

inline void declare(command_line& app, estimate_options& o) {
    using detail::within;
    app.begin("Forward passes alone", "mezo, distzo2");
    app.add_option(
           "--zo-parallel", o.zo_parallel,
           "ranks share the two sides of a direction (perturbation, 2 ranks), parts of the batch (data), or both (2d, "
           "an even number)")
        ->capture_default_str();
    app.used_by(zeroth_options::pipelines);
    app.add_option("--epsilon", o.epsilon, "how far weights are moved to either side")->capture_default_str();
    app.add_option("--directions", o.directions, "random directions of a step")
        ->check(within(1, static_cast<long>(tutti::zeroth::max_directions)))
        ->capture_default_str();
    app.add_option("--shards", o.shards,
                   "parts of the batch that losses are averaged over; runs of equal shards and micro-batches have the "
                   "same bits on any number of ranks; default: one a rank, or pair")
        ->check(within(1, 1'000'000));
}
inline void declare(command_line& app, zeroth_options& o) {
    app.begin("Forward passes alone", zeroth_options::offloading_pipelines);
    app.add_option("--slots", o.slot_count,
                   "blocks (layers) that are on the device at a time, arriving, in use or leaving; no more than there "
                   "are; default 3")
        ->check(CLI::Range(1, 1000));
    app.add_option("--blocks-resident", o.blocks_resident,
                   "the first so many blocks stay on the device instead, as the tables do")
        ->check(CLI::Range(0, 1000))
        ->capture_default_str();
    app.add_option("--upload-bits", o.upload_bits,
                   "keep weights as floats, which take every update however small, and bring them to the device in 16 "
                   "or 8 bits; default: kept and brought in --precision")
        ->check(CLI::IsMember({16, 8}));
    app.add_option("--renew-every", o.renew_every,
                   "steps until a block's floats come, take their updates and are encoded anew; in between these are "
                   "applied to what comes; default 8")
        ->check(CLI::Range(1, 1000))
        ->needs("--upload-bits");
    app.used_by("distzo2");
    app.add_flag(
        "--sliced", o.sliced,
        "each rank keeps, uploads and stores one part of a block, and ranks gather the others from each other");
    app.add_option("--gather", o.gather,
                   "by the communicator's collective, by messages, or by copies of what other threads of the process "
                   "have, on GPUs by copy engines; default: all are measured, and the fastest is taken")
        ->check(CLI::IsMember(std::vector<std::string>(ways_to_gather.begin(), ways_to_gather.end())))
        ->needs("--sliced");
}

/// Fills what was not said. Errors: bad_input for what the pipeline cannot do.
/// `threads`: ranks are threads of one process, and their network is none that was stated.
inline void complete(zeroth_options& o, const std::string& pipeline, const std::string& precision, int layers,
                     int ranks, bool threads) {
    using detail::require;
    if (!o.offloads(pipeline)) {
        o = {};  // what was given is for others of a comparison
        return;
    }
    require(!o.sliced || ranks > 1, "--sliced: 1 rank has whole blocks; --ranks or --gpus says how many there are");
    require(o.gather != "copies" || threads,
            "--gather copies: for ranks that are threads of one process, without --network; collective and messages go "
            "over any");
    require(o.upload_bits == 0 || precision != "double",
            "--upload-bits: weights are kept as floats; --precision double needs more");
    require(o.blocks_resident <= layers,
            fmt::format("--blocks-resident: {} blocks of a model of {}", o.blocks_resident, layers));
    require(o.slot_count == 0 || o.blocks_resident < layers,
            "--slots: no block comes to the device, where --blocks-resident has them all");
    if (o.upload_bits != 0 && o.renew_every == 0) { o.renew_every = zeroth_options::usual_renewal; }
    if (o.slot_count == 0) { o.slot_count = zeroth_options::usual_slots; }
}

namespace detail {

/// What pipelines of forward passes can do. `Options` has these and all others. Errors: bad_input.
template <class Options> void expect_estimate(const Options& o) {
    require(o.zo_parallel == "data" || o.zo_parallel == "perturbation" || o.zo_parallel == "2d",
            fmt::format("--zo-parallel: '{}' is not one of perturbation, data, 2d", o.zo_parallel));
    require(std::isfinite(o.epsilon) && o.epsilon > 0 && o.epsilon <= 1000,
            fmt::format("--epsilon: {} is not a positive number up to 1000", o.epsilon));
    require(o.zo_parallel != "perturbation" || o.ranks == 2,
            fmt::format("--zo-parallel: a direction has two sides, for 2 ranks, not {}; 2d has pairs", o.ranks));
    require(o.ranks % o.sides() == 0, fmt::format("--zo-parallel: {} ranks are not pairs", o.ranks));
    require(o.checkpoint.empty(),
            fmt::format("--checkpoint: pipeline '{}' has none; --save writes weights", o.pipeline));
}

}  // namespace detail

}  // namespace transformer
