// How long, how fast and in what portions a run trains: the options of steps, batches and rates, and their checks.
// Needs CLI11.
#pragma once

#include <algorithm>  // min
#include <cmath>      // isfinite
#include <cstdint>    // seed
#include <limits>     // largest seed

#include <CLI/CLI.hpp>               // command line
#include <fmt/format.h>              // messages
#include <tutti/optimize/adamw.hpp>  // optimizer

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct training_options {
    int steps = 2000;
    int stop_after = 0;   // steps of the whole run; 0: all
    int batch = 12;       // sequences of all ranks together
    int micro_batch = 0;  // sequences a rank computes at a time; 0: as many as keep its activations in cache
    int recompute = -1;   // -1: what suits the device
    double learning_rate = 1e-3;
    bool rate_given = false;  // by the user; otherwise forward passes have their own
    int eval_every = 500;
    std::uint64_t seed = 1;

    /// The step behind which the run ends.
    [[nodiscard]] int last_step() const { return stop_after == 0 ? steps : stop_after; }

    // nanoGPT's schedule and AdamW: linear warm-up, cosine to a tenth; decay of matrices; clipping by the global norm.
    [[nodiscard]] int warmup_steps() const { return std::min(100, steps / 10); }
    [[nodiscard]] double final_learning_rate() const { return learning_rate / 10; }
    [[nodiscard]] tutti::optimize::adamw optimizer() const {
        return {.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1};
    }
    static constexpr double clip_norm = 1.0;
};

inline void declare(command_line& app, training_options& o) {
    using detail::within;
    app.begin("Training");
    app.add_option("--steps", o.steps, "optimizer steps")->check(within(1, 100'000'000))->capture_default_str();
    app.add_option("--stop-after", o.stop_after,
                   "end after this many of --steps, as a time limit would: the schedule stays that of --steps")
        ->check(within(1, 100'000'000));
    app.add_option("--batch", o.batch, "sequences per step, all ranks together")
        ->check(within(1, 1'000'000))
        ->capture_default_str();
    app.add_option_function<double>(
           "--lr",
           [&o](double rate) {
               o.learning_rate = rate;
               o.rate_given = true;
           },
           "peak learning rate; mezo, zo2, distzo2: that of all steps")
        ->default_str("0.001, those three 0.0001");
    app.add_option("--eval-every", o.eval_every, "steps between validations")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.add_option("--seed", o.seed, "of initial weights, samples and generated text")
        ->check(within(0, std::numeric_limits<long>::max()))
        ->capture_default_str();
    app.used_by("all but packed, even-ring, zeppelin");
    app.add_option("--micro-batch", o.micro_batch,
                   "sequences a rank computes at a time, accumulating gradients; default: up to 256 tokens, with "
                   "--device cuda all")
        ->check(within(1, 1'000'000));
    app.used_by("all but mezo, zo2, distzo2");
    app.add_option(
           "--recompute", o.recompute,
           "what backward computes again instead of keeping it: 0 nothing, 1 GELU, 2 also layer normalization, 3 (tp, "
           "pp, 3d) all but what enters a stage; default 1, with --device cuda and schedules that defer weights' "
           "gradients (zb-h1, zb-v, dualpipe) 0")
        ->check(within(0, 3));
}

/// Errors: bad_input.
inline void complete(training_options& o, bool of_forward_passes) {
    using detail::require;
    if (!o.rate_given && of_forward_passes) { o.learning_rate = 1e-4; }
    require(std::isfinite(o.learning_rate) && o.learning_rate > 0 && o.learning_rate <= 1e3,
            fmt::format("--lr: {} is not a positive number up to 1000", o.learning_rate));
    require(o.stop_after <= o.steps,
            fmt::format("--stop-after: {} steps are more than the {} of --steps", o.stop_after, o.steps));
}

/// Sequences per micro-batch when the user does not say: of the divisors of a rank's part, the largest with at most 256
/// tokens. More would push the activations out of the second-level cache and cost about a tenth of the speed.
[[nodiscard]] inline int cached_micro_batch(int part, int context) {
    int best = 1;
    for (int m = 1; m <= part; ++m) {
        if (part % m == 0 && static_cast<long>(m) * context <= 256) { best = m; }
    }
    return best;
}

namespace detail {

inline constexpr long most_tokens_at_a_time = 1L << 24;  // extents of matrices are int, and so are CBLAS's

/// Among ranks, and into micro-batches. `Options` has these and all others. Errors: bad_input.
template <class Options> void divide_batch(Options& o) {
    const int parts = o.of_forward_passes() ? o.shards_of_batch() : o.of_parts() ? o.dp : o.ranks;
    require(!o.of_forward_passes() || parts % (o.ranks / o.sides()) == 0,
            fmt::format("--shards: {} cannot be divided among {} ranks or pairs", parts, o.ranks / o.sides()));
    require(o.batch % parts == 0, fmt::format("--batch: {} sequences cannot be divided among {} {}", o.batch, parts,
                                              o.of_parts()     ? "replicas"
                                              : o.shards != 0  ? "shards"
                                              : o.sides() == 2 ? "pairs of ranks"
                                                               : "ranks"));
    const int part = o.batch / parts;
    if (o.micro_batch == 0) { o.micro_batch = o.device == "cuda" ? part : cached_micro_batch(part, o.model.context); }
    require(
        part % o.micro_batch == 0,
        fmt::format("--micro-batch: a rank's {} sequences cannot be divided into parts of {}", part, o.micro_batch));
    require(static_cast<long>(o.micro_batch) * o.model.context <= most_tokens_at_a_time,
            fmt::format("--micro-batch: {} sequences of {} tokens are more than {} tokens at a time", o.micro_batch,
                        o.model.context, most_tokens_at_a_time));
}

}  // namespace detail

}  // namespace transformer
