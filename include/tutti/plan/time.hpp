// time: seconds of a step by closed forms: products, what passes through memory, collectives, bubbles, updates.
// Needs plan/machine, plan/model, plan/exchange, plan/rings, comm/cost. Source: Narayanan et al. 2021, arXiv:2104.04473,
// section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.
#pragma once

#include <algorithm>  // max
#include <cstdint>    // counts

#include <tutti/comm/cost.hpp>      // time_of
#include <tutti/core/error.hpp>     // usage_error
#include <tutti/plan/exchange.hpp>  // time_of_exchange
#include <tutti/plan/machine.hpp>   // machine
#include <tutti/plan/model.hpp>     // model_shape, job
#include <tutti/plan/rings.hpp>     // time_of_rings

namespace tutti::plan {

/// Where the seconds of a step go; of the rank that takes longest.
struct step_time {
    double products = 0;  ///< of matrices
    double memory = 0;    ///< norms, activation functions, softmax: what memory bandwidth limits
    double tensor = 0;    ///< collectives inside layers
    double sequence = 0;  ///< rings of attention: waiting, and what their steps do beside products
    double bubble = 0;    ///< waiting of the pipeline
    double messages = 0;  ///< waiting for what stages send each other
    double data = 0;      ///< waiting for gradients and weights of equal ranks, and their cost beside computing
    double updates = 0;   ///< the optimizer, and what strategies compute
    double hidden = 0;    ///< communication of data ranks beside computing: not part of the total
    /// Of all micro-batches on a rank.
    [[nodiscard]] constexpr double working() const noexcept { return products + memory + tensor + sequence; }
    [[nodiscard]] constexpr double total() const noexcept { return working() + bubble + messages + data + updates; }
};

namespace detail {

// Of a micro-batch's rows of the residual stream, of 16 bits.
[[nodiscard]] inline double row_bytes(const model_shape& m, const job& j) {
    return static_cast<double>(2 * rank_tokens(m, j) * j.micro_batch * m.hidden);
}

// Work of one micro-batch on a rank.
struct rank_work {
    double layer_flops = 0;
    double sequence_flops = 0;  // of them, attention of one sequence in a layer, of all ranks that share it
    double head_flops = 0;
    double memory_bytes = 0;
    double kernels = 0;  // products, and as many of other kinds
    double sums = 0;     // over tensor ranks, of rows x hidden; a gather and a scatter count as one
    double forward = 0;  // share of the time that is forward's
};

[[nodiscard]] inline rank_work work_of(const model_shape& m, const job& j, const machine& on, bool kept_scores) {
    const auto h = static_cast<double>(m.hidden);
    const auto s = static_cast<double>(m.sequence);
    const double t = j.tensor;
    const auto attended = static_cast<double>(attention_features(m, j));
    const auto rows = static_cast<double>(rank_tokens(m, j) * j.micro_batch);
    const double layers = static_cast<double>(m.layers / j.pipeline);
    const double passes = repeats_forward(j.recompute) ? 4 : 3;  // forwards that forward and backward are worth
    const double forwards = passes - 2;
    const bool scores_again = j.recompute == recomputation::selective || j.recompute == recomputation::stages;
    const double of_scores = passes + (scores_again ? 1 : 0);
    // Whole rows pass through memory 8 times in norms, dropout and residual sums, cut ones 14 times hidden in biases,
    // activation functions and what attention reads and writes, scores 5 times.
    const double row_bytes = rows * h * 2 * (8 / (j.sequence_parallel ? t : 1) + 14 / t);
    const double score_bytes = kept_scores ? rows * s * static_cast<double>(m.heads) * 2 * 5 / t : 0;
    rank_work w;
    // Half a wave for each of four products, whose inner sizes are these in forward, and in both of backward.
    const double inner = forwards * (2 * h + attended + 4 * h / t) + 2 * h + 3 * attended + 4 * h / t + 4 * rows;
    w.layer_flops = layers * (rows * h * (8 * attended + 16 * h / t) * passes + 4 * rows * s * attended * of_scores +
                              on.wave * inner);
    w.sequence_flops = 4 * s * s * attended * of_scores;
    w.head_flops = 6 * rows * h * static_cast<double>(m.vocabulary) / t;
    w.memory_bytes = layers * (row_bytes * passes + score_bytes * of_scores);
    w.kernels = layers * passes * 6;  // four products of weights, two of attention
    // Two each way, two more where forwards are repeated. Where rows are cut, two inputs are gathered again.
    w.sums = layers * ((repeats_forward(j.recompute) ? 6 : 4) + (j.sequence_parallel ? 1 : 0));
    w.forward = 1 / passes;
    return w;
}

// What a rank waits for the pipeline to fill and drain, in times of a micro-batch on a rank: until all ranks are done,
// since the norm of gradients is of all ranks.
[[nodiscard]] inline double bubble_share(const job& j) {
    const double others = j.pipeline - 1;
    const bool repeats = repeats_forward(j.recompute);  // a forward that is repeated is part of Bi
    switch (j.schedule) {
    case pipelining::gpipe:
    case pipelining::one_forward_one_backward: return others;
    case pipelining::interleaved: return others / j.chunks;
    case pipelining::zero_bubble: return others * (repeats ? 2.0 / 4 : 1.0 / 3);  // F + Bi - W of F, Bi, W alike
    case pipelining::zero_bubble_v: return others * (repeats ? 1.0 / 2 : 1.0 / 6);
    // (p/2 - 1)(F + 2 Bi - W), of which Bi - W is filled where Bi is longer
    case pipelining::dual_pipe: return j.pipeline == 2 ? 0 : repeats ? (2 * others - 3) / 4 : (others - 1) / 3;
    }
    throw usage_error("plan: no such schedule");
}

// Messages between neighbors that are waited for, one behind the other: where a schedule has an input's forward follow
// at once on the backward before, each micro-batch waits for one to go and one to come back.
[[nodiscard]] inline double waited_messages(const job& j) {
    const double p = j.pipeline;
    const auto m = static_cast<double>(j.micro_batches);
    if (j.pipeline == 1) { return 0; }
    switch (j.schedule) {
    case pipelining::gpipe: return 2 * (p - 1);
    case pipelining::one_forward_one_backward: return 2 * (p - 1) / p * m + 2 * (p - 2);
    case pipelining::interleaved: return 2 * (p * j.chunks - 1);
    case pipelining::zero_bubble: return 4 * (p - 1);
    case pipelining::zero_bubble_v: return 6 * (p - 1);
    case pipelining::dual_pipe:  // within one
        return (p - 1) / p * m + std::max(1.0, (repeats_forward(j.recompute) ? 4 : 3) * (p / 2 - 1));
    }
    throw usage_error("plan: no such schedule");
}

// What a rank works on a step: a step's time without the pipeline's and data ranks'. Of any job, whether valid or not.
struct working_time {
    step_time step{};
    double micro_batch = 0;  // seconds of one, without the head
    double forward = 0;      // share of them
};
[[nodiscard]] inline working_time time_of_working(const model_shape& m, const job& j, const machine& on,
                                                  bool kept_scores) {
    const rank_work w = work_of(m, j, on, kept_scores);
    const auto count = static_cast<double>(j.micro_batches);
    const double rate = on.flops * on.product_efficiency;
    const auto sum = comm::time_of(comm::collective::all_reduce, row_bytes(m, j), on.group_of(j.tensor, 1, j.ranks()));
    const double launches = w.kernels * on.launch_seconds;
    const double layer_products = w.layer_flops / rate + launches;
    const double memory = w.memory_bytes / (on.memory_bandwidth * on.memory_efficiency) + launches;
    const double tensor = w.sums * sum.seconds();
    const double rings = static_cast<double>(m.layers / j.pipeline) * time_of_rings(m, j, on, w.sequence_flops / rate);
    working_time out;
    out.step.products = count * (layer_products + w.head_flops / rate / j.copies());
    out.step.memory = count * memory;
    out.step.tensor = count * tensor;
    out.step.sequence = count * rings;
    out.micro_batch = layer_products + memory + tensor + rings;
    out.forward = w.forward;
    return out;
}

}  // namespace detail

/// Seconds of a step. `kept_scores`: attention writes its scores to memory, as kernels before FlashAttention do.
///
/// Semantics  a closed form for ranks that are alike but for the head on the last and the words on the first. Nothing
///            hides collectives inside layers. Forms of pipelines are those that parallel/pipeline_replay has of this
///            library's schedules, zero-bubble forms for m >= 2p. A sum within layers counts as gather and scatter in
///            the sequence-parallel form, of the same bytes. Data ranks: plan/exchange; rings: plan/rings. Of dual_pipe
///            each end has the head for half of the micro-batches; gradients of the two copies are added up behind the
///            last of them, and averaged then.
/// Errors     usage_error when job and model do not fit each other, or the machine lacks a figure.
[[nodiscard]] inline step_time time_of_step(const model_shape& m, const job& j, const machine& on,
                                            bool kept_scores = false) {
    validate(on);
    const std::int64_t parameters = rank_parameters(m, j, 0);
    const detail::working_time working = detail::time_of_working(m, j, on, kept_scores);
    const double micro_batch = working.micro_batch;
    step_time out = working.step;
    out.bubble = detail::bubble_share(j) * micro_batch;
    // Each tensor rank sends its share of the rows.
    const comm::link neighbors = on.link_of(j.pipeline, j.tensor * j.averaging());
    out.messages = detail::waited_messages(j) *
                   (neighbors.latency_seconds + detail::row_bytes(m, j) / j.tensor / neighbors.bytes_per_second);
    const rank_passes passes{working.forward * micro_batch, (1 - working.forward) * micro_batch, out.total()};
    const exchange_time data = time_of_exchange(m, j, on, parameters, passes);
    out.data = data.exposed;
    if (j.copies() > 1) {
        const double gradients = 2 * static_cast<double>(parameters);
        out.data += comm::time_of(comm::collective::all_reduce, gradients, j.copies(), neighbors).seconds();
    }
    out.hidden = std::max(0.0, data.sent - data.exposed);
    out.updates = data.updates;
    return out;
}

}  // namespace tutti::plan
