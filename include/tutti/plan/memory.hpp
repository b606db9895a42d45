// memory: bytes that a rank holds: states of the optimizer by ZeRO stage, activations by schedule and recomputation.
// Needs plan/model. Source: Rajbhandari et al. 2020, arXiv:1910.02054 (states); Korthikanti et al. 2022,
// arXiv:2205.05198, table 2 (activations).
#pragma once

#include <algorithm>  // min
#include <cstdint>    // counts

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
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

/// Bytes that one layer keeps of one micro-batch for its backward, on one rank; 16-bit activations, masks of one byte.
///
/// With s tokens, b sequences, h hidden, a heads, t tensor ranks:
///   none       s b h (10 + 24/t + 5 a s / (h t));  sequence-parallel  s b h (34 + 5 a s / h) / t
///   selective  the same without 5 a s              full               2 s b h
[[nodiscard]] constexpr double layer_activation_bytes(const model_shape& m, const job& j) noexcept {
    const auto s = static_cast<double>(m.sequence);
    const double sbh = s * static_cast<double>(j.micro_batch * m.hidden);
    const double t = j.tensor;
    if (j.recompute == recomputation::full) { return 2 * sbh; }
    const double scores = j.recompute == recomputation::selective
                              ? 0
                              : 5 * static_cast<double>(m.heads) * s / static_cast<double>(m.hidden) / t;
    return sbh * ((j.sequence_parallel ? 34 / t : 10 + 24 / t) + scores);
}

/// Micro-batches, of a whole stage each, that a rank of a stage holds at most.
///
///   gpipe m;  1f1b min(m, p - r);  interleaved (2(p - 1 - r) + (v - 1) p + 1)/v, at most m;  zero_bubble and _v min(m,
///   p)
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
    }
    throw usage_error("plan: no such schedule");
}

/// What a rank holds, in bytes.
struct rank_memory {
    double states = 0;
    double activations = 0;  ///< kept for backward, of all micro-batches in flight
    double inputs = 0;       ///< received from the stage before, this rank's share of each
    double working = 0;      ///< of the layer that is recomputed, and of logits on the last stage
    [[nodiscard]] constexpr double total() const noexcept { return states + activations + inputs + working; }
};

/// Memory of a rank of `stage` at its peak.
///
/// Semantics  a closed form: what allocators lose comes on top (`fits`). Logits are in float.
/// Errors     usage_error when job and model do not fit each other.
[[nodiscard]] inline rank_memory memory_of_rank(const model_shape& m, const job& j, int stage,
                                                bytes_per_parameter b = {}) {
    rank_memory out;
    out.states = static_cast<double>(state_bytes(rank_parameters(m, j, stage), j.zero_stage, j.data, b));
    const double held = in_flight(j, stage);
    const double rows = static_cast<double>(m.sequence * j.micro_batch);
    const auto h = static_cast<double>(m.hidden);
    out.activations = held * static_cast<double>(m.layers / j.pipeline) * layer_activation_bytes(m, j);
    out.inputs = stage == 0 ? 0 : held * j.chunks * 2 * rows * h / j.tensor;
    if (j.recompute == recomputation::full) {
        job keeping = j;
        keeping.recompute = recomputation::selective;
        out.working += layer_activation_bytes(m, keeping);
    }
    if (stage == j.pipeline - 1) { out.working += 4 * rows * (h + static_cast<double>(m.vocabulary)) / j.tensor; }
    return out;
}

/// Whether every rank's memory is enough when `margin` of it goes to fragments and libraries.
[[nodiscard]] inline bool fits(const model_shape& m, const job& j, const machine& on, double margin = 0.1,
                               bytes_per_parameter b = {}) {
    for (int stage = 0; stage < j.pipeline; ++stage) {
        if (memory_of_rank(m, j, stage, b).total() > (1 - margin) * on.memory_bytes) { return false; }
    }
    return true;
}

}  // namespace tutti::plan
