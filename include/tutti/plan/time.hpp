// time: seconds of a step by closed forms: products, what passes through memory, collectives, bubbles. And their
// calibration. Needs plan/machine, plan/model, comm/cost.
#pragma once

#include <cstdint>  // passes
#include <span>     // measurements
#include <vector>   // terms

#include <tutti/comm/cost.hpp>     // time_of
#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/model.hpp>    // model_shape, job

namespace tutti::plan {

/// Where the seconds of a step go; of the rank that takes longest.
struct step_time {
    double products = 0;  ///< of matrices
    double memory = 0;    ///< norms, activation functions, softmax: what memory bandwidth limits
    double tensor = 0;    ///< collectives inside layers
    double bubble = 0;    ///< waiting of the pipeline
    double data = 0;      ///< gradients and weights over replicas, none of it hidden
    [[nodiscard]] constexpr double total() const noexcept { return products + memory + tensor + bubble + data; }
};

namespace detail {

// Work of one micro-batch on a rank.
struct rank_work {
    double layer_flops = 0;
    double head_flops = 0;
    double memory_bytes = 0;
    double sums = 0;  // over tensor ranks, of rows x hidden; a gather and a scatter count as one
};

[[nodiscard]] inline rank_work work_of(const model_shape& m, const job& j, bool kept_scores) {
    const auto h = static_cast<double>(m.hidden);
    const auto s = static_cast<double>(m.sequence);
    const double t = j.tensor;
    const double rows = s * static_cast<double>(j.micro_batch);
    const double layers = static_cast<double>(m.layers / j.pipeline);
    const double passes = j.recompute == recomputation::full ? 4 : 3;  // forwards that forward and backward are worth
    const double of_scores = passes + (j.recompute == recomputation::selective ? 1 : 0);
    // Whole rows pass through memory 12 times in norms, dropout and residual sums, cut ones 24 times hidden, scores 8
    // times.
    const double row_bytes = rows * h * 2 * (12 / (j.sequence_parallel ? t : 1) + 24 / t);
    const double score_bytes = kept_scores ? rows * s * static_cast<double>(m.heads) * 2 * 8 / t : 0;
    rank_work w;
    w.layer_flops = layers * (24 * rows * h * h / t * passes + 4 * rows * s * h / t * of_scores);
    w.head_flops = 6 * rows * h * static_cast<double>(m.vocabulary) / t;
    w.memory_bytes = layers * (row_bytes * passes + score_bytes * of_scores);
    // Two each way, two more where forwards are repeated. Where rows are cut, two inputs are gathered again.
    w.sums = layers * ((j.recompute == recomputation::full ? 6 : 4) + (j.sequence_parallel ? 1 : 0));
    return w;
}

// What a rank waits for the pipeline to fill and drain, in times of a micro-batch on a rank.
[[nodiscard]] inline double bubble_share(const job& j) {
    const double others = j.pipeline - 1;
    switch (j.schedule) {
    case pipelining::gpipe:
    case pipelining::one_forward_one_backward: return others;
    case pipelining::interleaved: return others / j.chunks;
    case pipelining::zero_bubble:  // F + Bi - W of F, Bi, W alike; a forward that is repeated is part of Bi
        return others * (j.recompute == recomputation::full ? 2.0 / 4 : 1.0 / 3);
    case pipelining::zero_bubble_v: return 0;
    }
    throw usage_error("plan: no such schedule");
}

}  // namespace detail

/// Seconds of a step. `kept_scores`: attention writes its scores to memory, as kernels before FlashAttention do.
///
/// Semantics  a closed form for ranks that are alike but for the head on the last; messages between stages are taken to
///            be hidden, collectives not to be. Zero-bubble forms are for m >= 2p. A sum within layers counts as gather
///            and scatter in the sequence-parallel form, of the same bytes.
/// Errors     usage_error when job and model do not fit each other.
[[nodiscard]] inline step_time time_of_step(const model_shape& m, const job& j, const machine& on,
                                            bool kept_scores = false) {
    validate(m, j);
    const detail::rank_work w = detail::work_of(m, j, kept_scores);
    const auto count = static_cast<double>(j.micro_batches);
    const double rate = on.flops * on.product_efficiency;
    const double row_bytes = static_cast<double>(2 * m.sequence * j.micro_batch * m.hidden);
    const auto sum = comm::time_of(comm::collective::all_reduce, row_bytes, j.tensor, on.link_of(j.tensor, 1));
    const double layer_products = w.layer_flops / rate;
    const double memory = w.memory_bytes / (on.memory_bandwidth * on.memory_efficiency);
    const double tensor = w.sums * sum.seconds();
    step_time out;
    out.products = count * (layer_products + w.head_flops / rate);
    out.memory = count * memory;
    out.tensor = count * tensor;
    out.bubble = detail::bubble_share(j) * (layer_products + memory + tensor);
    const double weights = 2 * static_cast<double>(rank_parameters(m, j, 0));
    const auto over_data = comm::time_of(comm::collective::all_reduce, weights, j.data, on.link_of(j.data, j.tensor));
    const double rounds = j.zero_stage == 3 ? 1.5 : 1;
    out.data = rounds * over_data.seconds();
    return out;
}

/// One measured step.
struct measured_step {
    model_shape model;
    job how;
    double seconds = 0;
    bool kept_scores = false;
};

/// The machine with the efficiencies, in whole percent, that predict `steps` with the least sum of squared relative
/// errors.
///
/// Determinism  exhaustive; of equal ones the smallest.
/// Cost         a million evaluations of a sum a step.
/// Errors       usage_error without steps, or with one that took no time.
[[nodiscard]] inline machine calibrated(machine on, std::span<const measured_step> steps) {
    if (steps.empty()) { throw usage_error("plan: nothing measured to calibrate with"); }
    // Times are sums of terms each inversely proportional to one efficiency; bubbles and latency are split alike.
    struct terms {
        double product, memory, link, fixed, seconds;
    };
    std::vector<terms> all;
    for (const measured_step& s : steps) {
        if (!(s.seconds > 0)) { throw usage_error(formatted("plan: a step of {} s", s.seconds)); }
        const auto with = [&](double product, double memory, double link) {
            machine trial = on;
            trial.product_efficiency = product;
            trial.memory_efficiency = memory;
            trial.link_efficiency = link;
            return time_of_step(s.model, s.how, trial, s.kept_scores).total();
        };
        // Differences between an efficiency of 1 and of 1/2 are the terms.
        const double base = with(1, 1, 1);
        terms t{with(0.5, 1, 1) - base, with(1, 0.5, 1) - base, with(1, 1, 0.5) - base, 0, s.seconds};
        t.fixed = base - t.product - t.memory - t.link;
        all.push_back(t);
    }
    double least = -1;
    for (int p = 1; p <= 100; ++p) {
        for (int b = 1; b <= 100; ++b) {
            for (int l = 1; l <= 100; ++l) {
                double sum = 0;
                for (const terms& t : all) {
                    const double predicted = t.fixed + 100 * (t.product / p + t.memory / b + t.link / l);
                    const double error = predicted / t.seconds - 1;
                    sum += error * error;
                }
                if (least < 0 || sum < least) {
                    least = sum;
                    on.product_efficiency = p / 100.0;
                    on.memory_efficiency = b / 100.0;
                    on.link_efficiency = l / 100.0;
                }
            }
        }
    }
    return on;
}

}  // namespace tutti::plan
