// rings: what ranks that share sequences take for attention beside their share of its products: keys, values, gradients on
// their way, as far as products do not hide them, and what steps of rings do besides.
// Needs plan/machine, plan/model, sequence/cost, sequence/estimate. Closed forms of sequence::ring_attention.
#pragma once

#include <algorithm>  // min

#include <tutti/comm/cost.hpp>           // two_levels
#include <tutti/plan/machine.hpp>        // machine
#include <tutti/plan/model.hpp>          // model_shape, job
#include <tutti/sequence/cost.hpp>       // transfer_cost
#include <tutti/sequence/estimate.hpp>   // time_of_even_rings
#include <tutti/sequence/placement.hpp>  // zone

namespace tutti::plan {

/// What a ring of `j.sequence` ranks passes on in forward and backward of a layer, over which links, and what a step of it
/// takes beside products.
///
/// Semantics  keys and values twice, three times where forward is repeated, in 16 bits, and sums of their gradients in 32
///            (16 where two ranks share a sequence); each in exchanges of its own. Between nodes what leaves one is spread
///            over the NICs of the ring's ranks there, as sequence::routed does, where that is faster. A step passes over
///            the features of its tokens 25 times and launches 22 kernels, a third more where forward is repeated.
/// Source     the step: fitted to rings of two H200s, bench/results/sequence_calibration_2.json, within 3 %.
[[nodiscard]] inline sequence::transfer_cost ring_transfers(const model_shape& m, const job& j, const machine& on) {
    const comm::two_levels ring = on.group_of(j.sequence, j.tensor, j.ranks());
    comm::link inside = ring.inside;
    comm::link between = ring.between;
    if (const double nics = ring.largest_node; nics > 1) {
        const double spread = std::min(nics * between.bytes_per_second, nics / (nics - 1) * inside.bytes_per_second);
        if (spread > between.bytes_per_second) {
            between = {between.latency_seconds + 2 * inside.latency_seconds, spread};
        }
    }
    const bool repeats = repeats_forward(j.recompute);
    for (comm::link* const l : {&inside, &between}) { l->latency_seconds *= repeats ? 3 : 2; }
    const auto features = static_cast<int>(attention_features(m, j));
    const double share = repeats ? 4.0 / 3 : 1;
    const sequence::step_cost step{share * 25 * 2 * features / (on.memory_bandwidth * on.memory_efficiency),
                                   share * 22 * on.launch_seconds};
    sequence::transfer_cost c =
        sequence::training_transfers(features, 1, 2, j.sequence == 2 ? 2 : 4, inside, between, step);
    if (repeats) { c.bytes_per_token += sequence::kv_bytes_per_token(features, 1, 2); }
    return c;
}

/// Seconds that attention of a micro-batch in a layer takes on a rank beside its share of the products.
///
/// Semantics  `whole`: seconds of products of attention of one sequence on one rank. They are counted as if every token saw
///            every other; a ring computes what is visible, half of that, and hides its transfers behind no more. All
///            sequences of a micro-batch go around at once.
[[nodiscard]] inline double time_of_rings(const model_shape& m, const job& j, const machine& on, double whole) {
    if (j.sequence == 1) { return 0; }
    const auto where =
        on.group_of(j.sequence, j.tensor, j.ranks()).nodes == 1 ? sequence::zone::node : sequence::zone::world;
    const sequence::rank_time t =
        sequence::time_of_even_rings(j.sequence, where, whole / 2, m.sequence, j.micro_batch, ring_transfers(m, j, on));
    return t.waiting + t.steps;
}

}  // namespace tutti::plan
