// probe: what a step asks of whatever holds the weights: forward passes with weights moved along a direction.
// Needs zeroth/pending_update. The seam between steps and pipelines.
#pragma once

#include <concepts>  // same_as
#include <cstddef>   // size_t
#include <cstdint>   // counts, hashes
#include <span>      // probes, losses

#include <tutti/zeroth/direction.hpp>       // direction
#include <tutti/zeroth/pending_update.hpp>  // pending_update

namespace tutti::zeroth {

/// A forward pass to be made: with weights + scale z; with the weights themselves where scale is 0.
struct probe {
    direction z;
    double scale = 0;
};

/// What a forward pass of a micro-batch says: the mean loss, and of how many terms (valid tokens, not samples). A mean
/// of no terms may be anything.
struct loss_value {
    double mean = 0;
    std::uint32_t normalizer = 0;
};

/// Weights somewhere, and a forward pass over them.
///
/// Semantics  evaluate() makes all probes of a step on one micro-batch, with the weights after all updates so far.
///            update() takes those of one step; when they are applied is the pipeline's choice, and no result depends on
///            it. flush() applies all. hash() is of all weights, flushed.
template <class P>
concept pipeline = requires(P& p, std::span<const probe> probes, std::size_t micro_batch, std::span<loss_value> out,
                            std::span<const pending_update> updates) {
    p.evaluate(probes, micro_batch, out);
    p.update(updates);
    p.flush();
    { p.hash() } -> std::same_as<std::uint64_t>;
};

}  // namespace tutti::zeroth
