// model: the shape of a transformer and of a job that trains it: parameters by rank, FLOPs of a step.
// Needs core alone. Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1 (FLOPs).
#pragma once

#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // counts
#include <string>       // messages
#include <string_view>  // names

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::plan {

/// What programs keep beside what all of them must; bytes for each element of the residual stream of a micro-batch, of a
/// tensor rank's share where they are `cut`.
struct kept_bytes {
    double masks = 2;  ///< in a layer, of dropout
    double later = 0;  ///< in a layer, where gradients of weights come later: gradients that they need
    double later_cut = 0;
    double working = 0;  ///< once: gradients at work, and what comes from and goes to other stages
    double working_cut = 0;
    double logits = 4;           ///< of each
    std::int64_t key_block = 0;  ///< attention's backward adds up a float for every so many keys of a row; 0: in place
    bool whole_inputs = false;   ///< tensor ranks receive all that the stage before sends, not a share of it
};
/// Megatron-LM, as published in Korthikanti et al. 2022, arXiv:2205.05198.
inline constexpr kept_bytes megatron_keeps{};
/// This library's trainer, examples/transformer: no dropout; logits in 16 bits, which their gradients replace. Its blocks
/// of keys are those of cuDNN's deterministic kernel, and measured: by steps of GPT-2 124M of 32 and of 64 sequences.
inline constexpr kept_bytes trainer_keeps{.masks = 0,
                                          .later = 4,
                                          .later_cut = 14,
                                          .working = 8,
                                          .working_cut = 8,
                                          .logits = 2,
                                          .key_block = 128,
                                          .whole_inputs = true};

/// A decoder of the GPT kind: feed-forward of 4 hidden, biases, two norms a layer, learned positions, the table of
/// words used at both ends.
struct model_shape {
    std::int64_t layers = 1;
    std::int64_t hidden = 1;
    std::int64_t heads = 1;
    std::int64_t vocabulary = 1;  ///< with padding
    std::int64_t sequence = 1;    ///< tokens
    kept_bytes keeps{};

    /// Each counted once.
    [[nodiscard]] constexpr std::int64_t parameters() const noexcept {
        return layers * (12 * hidden * hidden + 13 * hidden) + (vocabulary + sequence) * hidden + 2 * hidden;
    }
};

enum class recomputation : std::uint8_t {
    none,
    selective,  ///< scores of attention, or a kernel that does not keep them
    full,       ///< whole layers, from their inputs
    stages      ///< whole stages, from their inputs, as parallel::pipeline does; and scores as in selective
};
enum class pipelining : std::uint8_t {
    gpipe,
    one_forward_one_backward,
    interleaved,
    zero_bubble,
    zero_bubble_v,
    dual_pipe  ///< two copies of the model, of which each rank has two stages
};

[[nodiscard]] constexpr std::string_view name_of(recomputation r) noexcept {
    constexpr std::string_view names[] = {"none", "selective", "full", "stages"};
    return names[static_cast<std::size_t>(r)];
}
[[nodiscard]] constexpr std::string_view name_of(pipelining s) noexcept {
    constexpr std::string_view names[] = {"gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dual_pipe"};
    return names[static_cast<std::size_t>(s)];
}

/// How a model is trained. Ranks: tensor * pipeline * data * sequence. The ranks of `sequence` have parts of the same
/// sequences, to which they attend in rings (sequence::ring_attention, over partition::even_ring). Those of data and
/// sequence together have the same weights; they are `replicas` groups, inside which ZeRO shards.
///
/// What groups do with each other is this library's: strategy::data_parallel (stage 0), zero<stage>, over node_shards
/// (`replicas`, tau 0) or secondary_shards, and local_update over any of them (tau > 0), at once (local_sgd, slow_mo) or
/// `delayed` (co2).
struct job {
    int tensor = 1;
    int pipeline = 1;
    int data = 1;
    int sequence = 1;  ///< ranks that share every sequence
    int chunks = 1;    ///< a rank, of an interleaved pipeline
    pipelining schedule = pipelining::one_forward_one_backward;
    int zero_stage = 0;
    bool sequence_parallel = false;
    recomputation recompute = recomputation::none;
    std::int64_t micro_batch = 1;    ///< sequences
    std::int64_t micro_batches = 1;  ///< of a data rank, a step
    int replicas = 1;                ///< groups of data ranks, and theirs of sequences, each with all of the states
    int tau = 0;                     ///< steps of a round, at whose end replicas meet; 0: they do in every step
    bool delayed = false;            ///< what they agree on is adopted a round later
    double compression = 1;          ///< bytes of gradients, or of what replicas meet with, over bytes sent
    int secondary = 0;  ///< data ranks of a node that keep what stage 3 gathered, shared among them; 0: nobody does

    /// Ranks with the same weights, which average gradients.
    [[nodiscard]] constexpr int averaging() const noexcept { return data * sequence; }
    /// Those of them that share states.
    [[nodiscard]] constexpr int shards() const noexcept { return data / replicas * sequence; }
    [[nodiscard]] constexpr std::int64_t ranks() const noexcept {
        return std::int64_t{1} * tensor * pipeline * data * sequence;
    }
    /// Copies of the model in a pipeline. The two that there may be add up their gradients when all are complete.
    [[nodiscard]] constexpr int copies() const noexcept { return schedule == pipelining::dual_pipe ? 2 : 1; }
    /// Whether a rank of the pipeline has the last stage, and so the head.
    [[nodiscard]] constexpr bool has_head(int rank) const noexcept {
        return schedule == pipelining::zero_bubble_v ? rank == 0 : rank == pipeline - 1 || (copies() == 2 && rank == 0);
    }
    /// Do gradients of weights come later than those of inputs?
    [[nodiscard]] constexpr bool splits_backward() const noexcept {
        return schedule == pipelining::zero_bubble || schedule == pipelining::zero_bubble_v || copies() == 2;
    }
    [[nodiscard]] constexpr std::int64_t sequences() const noexcept { return micro_batch * micro_batches * data; }
};

/// Is every forward pass made twice?
[[nodiscard]] constexpr bool repeats_forward(recomputation r) noexcept {
    return r == recomputation::full || r == recomputation::stages;
}

namespace detail {
template <class Why> constexpr void expect(bool holds, Why why) {
    if (!holds) { throw usage_error("plan: " + why()); }
}
}  // namespace detail

/// Errors  usage_error naming what does not fit: sizes that are not positive, do not divide or are too large to be
///         counted, too few micro-batches to hide a pipeline's bubble behind, what no strategy does.
inline void validate(const model_shape& m, const job& j) {
    using detail::expect;
    expect(m.layers > 0 && m.hidden > 0 && m.heads > 0 && m.vocabulary > 0 && m.sequence > 0,
           [] { return std::string("every size of a model is positive"); });
    expect(j.tensor > 0 && j.pipeline > 0 && j.data > 0 && j.sequence > 0 && j.chunks > 0 && j.micro_batch > 0 &&
               j.micro_batches > 0 && j.replicas > 0 && j.tau >= 0,
           [] { return std::string("every size of a job is positive"); });
    expect(static_cast<double>(j.tensor) * j.pipeline * j.data * j.sequence <= 1 << 30,
           [] { return std::string("more ranks than can be counted"); });
    const auto hidden = static_cast<double>(m.hidden);
    constexpr double countable = 1e18;  // also as what a rank holds of it in bytes, and sends
    expect(hidden * (12 * hidden * static_cast<double>(m.layers) + static_cast<double>(m.vocabulary + m.sequence)) <=
               countable / 16,
           [] { return std::string("a model of more parameters than can be counted"); });
    expect(hidden * static_cast<double>(m.sequence) * static_cast<double>(j.micro_batch) <= countable / 16 &&
               static_cast<double>(j.micro_batch) * static_cast<double>(j.micro_batches) * j.data <= countable,
           [] { return std::string("a batch of more numbers than can be counted"); });
    expect(j.zero_stage >= 0 && j.zero_stage <= 3, [&] { return formatted("ZeRO stage {} of 0 to 3", j.zero_stage); });
    expect(m.hidden % m.heads == 0,
           [&] { return formatted("hidden {} does not divide over {} heads", m.hidden, m.heads); });
    expect(m.heads >= j.tensor, [&] { return formatted("{} heads do not divide over {} ranks", m.heads, j.tensor); });
    expect(m.vocabulary % j.tensor == 0,
           [&] { return formatted("{} words do not divide over {} ranks", m.vocabulary, j.tensor); });
    expect(j.sequence == 1 || m.sequence >= 2 * std::int64_t{j.sequence}, [&] {
        return formatted("{} ranks have two chunks each of a sequence, of {} tokens", j.sequence, m.sequence);
    });
    const int chunks = j.schedule == pipelining::zero_bubble_v ? 2 : j.chunks;
    expect(m.layers % (std::int64_t{j.pipeline} * chunks) == 0, [&] {
        return formatted("{} layers do not divide over {} stages of {} chunks", m.layers, j.pipeline, chunks);
    });
    expect((j.chunks > 1) == (j.schedule == pipelining::interleaved),
           [&] { return formatted("{} chunks a rank under this schedule", j.chunks); });
    expect(j.schedule != pipelining::interleaved || j.micro_batches % j.pipeline == 0,
           [&] { return formatted("{} micro-batches are not a multiple of {} ranks", j.micro_batches, j.pipeline); });
    expect(!j.splits_backward() || j.pipeline == 1 || j.micro_batches >= 2 * j.pipeline,
           [&] { return formatted("{} micro-batches are fewer than twice {} ranks", j.micro_batches, j.pipeline); });
    expect(j.copies() == 1 || (j.pipeline % 2 == 0 && j.micro_batches % 2 == 0), [&] {
        return formatted("{} micro-batches from both ends of {} ranks; both must be even", j.micro_batches, j.pipeline);
    });
    expect(j.copies() == 1 || j.zero_stage <= 1, [&] {
        return formatted("ZeRO stage {} shares gradients, which two copies of the model add up whole", j.zero_stage);
    });
    expect(j.data % j.replicas == 0,
           [&] { return formatted("{} data ranks do not divide over {} replicas", j.data, j.replicas); });
    expect(j.replicas == 1 || j.tau > 0 || j.zero_stage > 0,
           [] { return std::string("replicas that average gradients share nothing without ZeRO"); });
    expect(j.tau == 0 || j.replicas > 1, [] { return std::string("rounds need replicas"); });
    expect(j.tau > 0 || !j.delayed, [] { return std::string("what is not a round is not delayed"); });
    expect(j.compression >= 1 && std::isfinite(j.compression),
           [&] { return formatted("compression {}; at least 1, and finite", j.compression); });
    expect(j.secondary >= 0 &&
               (j.secondary == 0 || (j.zero_stage == 3 && j.replicas == 1 && j.averaging() % j.secondary == 0)),
           [&] {
               return formatted("secondary shards of {} ranks; stage 3 has them, of a divisor of {}", j.secondary,
                                j.averaging());
           });
    expect(j.compression == 1 || j.replicas == 1 || j.tau > 0,
           [] { return std::string("node_shards sends gradients as they are"); });
}

/// Whether this library's strategies run a job. Stages 2 and 3 cut gradients after every micro-batch. A pipeline takes many
/// of them, to hide its bubble, and has several under way; its two ends, which add up the gradients of the words' table,
/// would wait for one another in each. So its replicas share the optimizer's state alone, as DeepSpeed's do. Jobs of other
/// programs, which do otherwise, have a time and a memory all the same.
[[nodiscard]] constexpr bool can_run(const job& j) noexcept { return j.zero_stage <= 1 || j.pipeline == 1; }

/// Features of attention, of `hidden`, on the tensor rank that has most heads.
[[nodiscard]] constexpr std::int64_t attention_features(const model_shape& m, const job& j) noexcept {
    return (m.heads + j.tensor - 1) / j.tensor * (m.hidden / m.heads);
}

/// Tokens of each sequence on the rank that has most of it.
[[nodiscard]] constexpr std::int64_t rank_tokens(const model_shape& m, const job& j) noexcept {
    return (m.sequence + j.sequence - 1) / j.sequence;
}
/// Layers whose weights a rank has.
[[nodiscard]] constexpr std::int64_t rank_layers(const model_shape& m, const job& j) noexcept {
    return m.layers / j.pipeline * j.copies();
}

/// Parameters of a rank of a stage: weights and their biases cut by tensor ranks; norms, biases of whole rows and
/// positions on each; the last stage has its own table and positions where its rank is not that of the first.
/// Schedules of several chunks a rank, or of two copies: `stage` is the rank. Under zero_bubble_v rank 0 has the first and
/// the last chunk, under dual_pipe both ends have the first and the last stage.
[[nodiscard]] inline std::int64_t rank_parameters(const model_shape& m, const job& j, int stage) {
    validate(m, j);
    if (stage < 0 || stage >= j.pipeline) { throw usage_error(formatted("plan: stage {} of {}", stage, j.pipeline)); }
    const std::int64_t h = m.hidden;
    const std::int64_t t = j.tensor;
    const std::int64_t attended = attention_features(m, j);
    const std::int64_t layer = 4 * h * attended + 8 * h * h / t + 3 * attended + 4 * h / t + 6 * h;
    std::int64_t count = rank_layers(m, j) * layer;
    const bool last = j.has_head(stage);
    if (stage == 0 || last) { count += m.vocabulary / t * h + m.sequence * h; }
    return count + (last ? 2 * h : 0);
}

/// FLOPs of a step that the model needs: forward and backward once. What recomputation adds is not the model's.
[[nodiscard]] constexpr double model_flops(const model_shape& m, const job& j) noexcept {
    const auto h = static_cast<double>(m.hidden);
    const auto s = static_cast<double>(m.sequence);
    const double tokens = static_cast<double>(j.sequences()) * s;
    return tokens * (static_cast<double>(m.layers) * h * (72 * h + 12 * s) + 6 * h * static_cast<double>(m.vocabulary));
}
/// FLOPs of a step that are computed, a recomputed forward included: for utilization of the hardware.
[[nodiscard]] constexpr double hardware_flops(const model_shape& m, const job& j) noexcept {
    const auto h = static_cast<double>(m.hidden);
    const auto s = static_cast<double>(m.sequence);
    const double tokens = static_cast<double>(j.sequences()) * s;
    const double layers = tokens * static_cast<double>(m.layers);
    const double again = j.recompute == recomputation::full        ? layers * h * (24 * h + 4 * s)
                         : j.recompute == recomputation::stages    ? layers * h * (24 * h + 8 * s)
                         : j.recompute == recomputation::selective ? layers * h * 4 * s
                                                                   : 0;
    return model_flops(m, j) + again;
}

}  // namespace tutti::plan
