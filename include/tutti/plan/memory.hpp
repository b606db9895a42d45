// memory: bytes that a rank holds: states of the optimizer by ZeRO stage, activations by schedule and recomputation,
// what strategies keep.
// Needs plan/model. Source: Rajbhandari et al. 2020, arXiv:1910.02054 (states); Korthikanti et al. 2022,
// arXiv:2205.05198, table 2 (activations).
#pragma once

#include <algorithm>  // min
#include <cstdint>    // counts

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/model.hpp>    // model_shape, job

namespace tutti::plan {

/// Bytes of one parameter. `optimizer`: master weights and both moments of Adam in float.
struct bytes_per_parameter {
    std::int64_t weight = 2;
    std::int64_t gradient = 2;
    std::int64_t optimizer = 12;
};

/// Bytes of weights, gradients and optimizer states of a rank with `parameters`, sharded over `data` ranks: the
/// optimizer's from stage 1 on, gradients from 2 on, weights in 3. Shards are rounded up.
[[nodiscard]] constexpr std::int64_t state_bytes(std::int64_t parameters, int zero_stage, int data,
                                                 bytes_per_parameter b = {}) noexcept {
    const std::int64_t shard = (parameters + data - 1) / data;
    return (zero_stage >= 3 ? shard : parameters) * b.weight + (zero_stage >= 2 ? shard : parameters) * b.gradient +
           (zero_stage >= 1 ? shard : parameters) * b.optimizer;
}

/// Bytes that one layer keeps of one micro-batch for its backward, on one rank; 16-bit activations.
///
/// With s tokens of a sequence on the rank, S of all of it, b sequences, h hidden, a heads, t tensor ranks, d bytes of
/// masks (model_shape::keeps):
///   none       s b h (8 + d + 24/t + 5 a S / (h t));  sequence-parallel  s b h (32 + d + 5 a S / h) / t
///   selective  the same without 5 a S; so stages      full               2 s b h;  sequence-parallel  2 s b h / t
/// Where heads do not divide, those of the rank that has most of them. Schedules that compute gradients of weights later
/// add what keeps.later says.
[[nodiscard]] constexpr double layer_activation_bytes(const model_shape& m, const job& j) noexcept {
    const auto keys = static_cast<double>(m.sequence);
    const auto h = static_cast<double>(m.hidden);
    const double sbh = static_cast<double>(rank_tokens(m, j) * j.micro_batch) * h;
    const double t = j.tensor;
    if (j.recompute == recomputation::full) { return 2 * sbh / (j.sequence_parallel ? t : 1); }
    const double attended = static_cast<double>(attention_features(m, j)) / h;
    const double scores =
        j.recompute == recomputation::none ? 5 * static_cast<double>(m.heads) * keys / h * attended : 0;
    const bool later = j.splits_backward();
    const double whole = (8 + m.keeps.masks) / (j.sequence_parallel ? t : 1);
    return sbh * (whole + 8 * attended + 16 / t + scores + (later ? m.keeps.later + m.keeps.later_cut / t : 0));
}

/// Micro-batches, of a whole stage each, that a rank of a stage holds at most.
///
///   gpipe m;  1f1b min(m, p - r);  interleaved (2(p - 1 - r) + (v - 1) p + 1)/v, at most m;  zero_bubble and _v min(m,
///   p);  dual_pipe p + 1, of both of its stages together
[[nodiscard]] inline double in_flight(const job& j, int stage) {
    const auto m = static_cast<double>(j.micro_batches);
    const double p = j.pipeline;
    switch (j.schedule) {
    case pipelining::gpipe: return m;
    case pipelining::one_forward_one_backward: return std::min(m, p - stage);
    case pipelining::interleaved: {
        const double v = j.chunks;
        return std::min(m, (2 * (p - 1 - stage) + (v - 1) * p + 1) / v);
    }
    case pipelining::zero_bubble:
    case pipelining::zero_bubble_v: return std::min(m, p);
    case pipelining::dual_pipe: return p + 1;
    }
    throw usage_error("plan: no such schedule");
}

/// Bytes that the strategy over data ranks holds beside states, of a rank with `parameters` in `layers`.
///
/// With o parameters owned, and L bytes of the largest bucket, 16 MiB or the largest tensor:
///   zero<1>  2 o;  zero<2>  3 L, gradients;  zero<3>  6 L, gradients and values: of gradients the words' bucket, to which
///            both ends of the model add, the one at work and the next; of values both that share a layer, and the next
///   local_update  12 o: what is sent, what it was sent from, momentum (slow_mo, co2; local_sgd takes a third of it)
///   secondary_shards of g ranks  2/g a parameter
///   compression   4 a parameter, what was lost; over local_update 4 o
/// Source  the documentation of strategy/zero, strategy/local_update and strategy/compressed_mean.
[[nodiscard]] constexpr double exchange_bytes(const model_shape& m, const job& j, std::int64_t parameters) noexcept {
    const bool sharded = j.zero_stage > 0;
    const auto owned = static_cast<double>(sharded ? (parameters + j.shards() - 1) / j.shards() : parameters);
    const std::int64_t tensor = std::max(4 * m.hidden, m.vocabulary) * m.hidden / j.tensor * 2;
    const auto bucket = static_cast<double>(std::max(std::int64_t{16} << 20, tensor));
    double bytes = j.zero_stage == 1 ? 2 * owned : j.zero_stage == 2 ? 3 * bucket : j.zero_stage == 3 ? 6 * bucket : 0;
    if (j.secondary > 0) { bytes += 2 * static_cast<double>((parameters + j.secondary - 1) / j.secondary); }
    if (j.tau > 0) { bytes += 12 * owned; }
    if (j.compression > 1) { bytes += 4 * (j.tau > 0 ? owned : static_cast<double>(parameters)); }
    return j.averaging() == 1 ? 0 : bytes;
}

/// What a rank holds, in bytes.
struct rank_memory {
    double states = 0;
    double activations = 0;  ///< kept for backward, of all micro-batches in flight
    double inputs = 0;       ///< received from the stage before, this rank's share of each
    double working = 0;   ///< of the layer or stage that is recomputed, of gradients, and of logits on the last stage
    double exchange = 0;  ///< of the strategy
    [[nodiscard]] constexpr double total() const noexcept { return states + activations + inputs + working + exchange; }
};

/// Bytes that rings take at once beside what attention takes on one rank: keys and values of two ranks and gradients of
/// them, as sequence::ring_attention has them where its kernel's results are of 16 bits.
[[nodiscard]] constexpr double ring_bytes(const model_shape& m, const job& j) noexcept {
    const double bytes = j.sequence == 1 ? 0 : j.sequence == 2 ? 16 : 36;  // a token and feature
    return bytes * static_cast<double>(rank_tokens(m, j) * j.micro_batch * attention_features(m, j));
}

/// Memory of a rank of `stage` at its peak.
///
/// Semantics  a closed form: what allocators lose comes on top (`fits`).
/// Errors     usage_error when job and model do not fit each other.
[[nodiscard]] inline rank_memory memory_of_rank(const model_shape& m, const job& j, int stage,
                                                bytes_per_parameter b = {}) {
    rank_memory out;
    const std::int64_t parameters = rank_parameters(m, j, stage);
    out.states = static_cast<double>(state_bytes(parameters, j.zero_stage, j.shards(), b));
    out.exchange = exchange_bytes(m, j, parameters);
    const double held = in_flight(j, stage);
    const auto tokens = static_cast<double>(rank_tokens(m, j));
    const double rows = tokens * static_cast<double>(j.micro_batch);
    const auto h = static_cast<double>(m.hidden);
    const double of_stage = static_cast<double>(m.layers / j.pipeline) * layer_activation_bytes(m, j);
    (j.recompute == recomputation::stages ? out.working : out.activations) =
        (j.recompute == recomputation::stages ? 1 : held) * of_stage;
    const int chunks = j.schedule == pipelining::zero_bubble_v ? 2 : j.chunks;
    // Rank 0's first chunk has no stage before it. Of two copies, both ends hold one micro-batch of their last stage.
    const bool is_end = stage == 0 || stage == j.pipeline - 1;
    const double received = j.copies() == 2 ? (is_end ? 1 : held) : held * (stage == 0 ? chunks - 1 : chunks);
    out.inputs = received * 2 * rows * h / (m.keeps.whole_inputs ? 1 : j.tensor);
    if (j.recompute == recomputation::full) {
        job keeping = j;
        keeping.recompute = recomputation::selective;
        out.working += layer_activation_bytes(m, keeping);
    }
    out.working += rows * h * (m.keeps.working + m.keeps.working_cut / j.tensor) + ring_bytes(m, j);
    if (m.keeps.key_block > 0) {
        out.working +=
            4 * rows * static_cast<double>(attention_features(m, j)) * tokens / static_cast<double>(m.keeps.key_block);
    }
    if (j.has_head(stage)) {
        out.working += rows * (4 * h + m.keeps.logits * static_cast<double>(m.vocabulary)) / j.tensor;
    }
    return out;
}

/// The rank that holds most.
struct peak_memory {
    int stage = 0;
    rank_memory memory{};
};

/// Memory of the rank that holds most; of equal ones the first.
///
/// Cost  three ranks are looked at: the first, the second, from which on ranks hold less and less, and the last.
[[nodiscard]] inline peak_memory peak_of(const model_shape& m, const job& j, bytes_per_parameter b = {}) {
    peak_memory peak{0, memory_of_rank(m, j, 0, b)};
    for (const int stage : {1, j.pipeline - 1}) {
        if (stage <= peak.stage || stage >= j.pipeline) { continue; }
        const rank_memory memory = memory_of_rank(m, j, stage, b);
        if (memory.total() > peak.memory.total()) { peak = {stage, memory}; }
    }
    return peak;
}

/// What a rank may hold when a share, `margin`, of its memory goes to fragments and libraries.
[[nodiscard]] constexpr double usable_bytes(const machine& on, double margin = 0.1) noexcept {
    return (1 - margin) * on.memory_bytes;
}
/// Whether every rank's memory is enough.
[[nodiscard]] inline bool fits(const model_shape& m, const job& j, const machine& on, double margin = 0.1,
                               bytes_per_parameter b = {}) {
    return peak_of(m, j, b).memory.total() <= usable_bytes(on, margin);
}

}  // namespace tutti::plan
