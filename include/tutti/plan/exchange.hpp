// exchange: what ranks with the same weights send in a step, how long it takes, and how much of it computing hides.
// Needs plan/machine, plan/model, comm/cost. Closed forms of strategy/data_parallel, zero, node_shards, local_update and
// the compressed collectives, whose documentation they follow.
#pragma once

#include <algorithm>  // max
#include <cstdint>    // counts

#include <tutti/comm/cost.hpp>     // time_of
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/model.hpp>    // job

namespace tutti::plan {

/// Seconds of a step.
struct exchange_time {
    double sent = 0;     ///< links are busy, or wait for their latency
    double exposed = 0;  ///< of that, what ranks wait for; and what the rest costs computing beside it
    double updates = 0;  ///< the optimizer, local_update's copies, and encoding and decoding
};

/// Seconds of one micro-batch on a rank, and of the whole step without data ranks.
struct rank_passes {
    double forward = 0;
    double backward = 0;
    double step = 0;
};

namespace detail {

// What is waited for of `count` messages of `each` seconds, which become ready at even distances in `window` and are sent
// one after the other.
[[nodiscard]] constexpr double waited(double each, double count, double window) noexcept {
    return std::max(each, count * each - window * (count - 1) / count);
}

// A collective over ranks whose part of the bytes may be compressed where it is slowest: between nodes, or, on one,
// among all. `bytes` are of elements of `size`.
struct coded_time {
    double sent = 0;
    double coding = 0;
};
[[nodiscard]] inline coded_time coded(comm::collective kind, double bytes, double size, const comm::two_levels& g,
                                      double ratio, double memory_rate) noexcept {
    using enum comm::collective;
    if (g.ranks == 1) { return {}; }
    if (ratio == 1 || kind == all_gather) { return {comm::time_of(kind, bytes, g).seconds(), 0}; }
    const bool inside_first = g.nodes > 1 && g.largest_node > 1 && g.largest_node == g.smallest_node;
    coded_time t;
    comm::two_levels across = g;
    if (inside_first) {
        comm::two_levels node = g;
        node.ranks = g.largest_node;
        node.nodes = 1;
        t.sent = comm::time_of(reduce_scatter, bytes, node).seconds();
        if (kind == all_reduce) { t.sent += comm::time_of(all_gather, bytes, node).seconds(); }
        bytes /= g.largest_node;
        across.ranks = across.nodes;
        across.largest_node = across.smallest_node = 1;
    }
    const double n = across.ranks;
    const double wire = bytes / ratio;
    const double elements = bytes / size;
    // Encoding reads the elements and what was lost before, decoding adds up the wires of all ranks in float.
    double passed = elements * (size + 8) * (n - 1) / n + elements * 12 / n + wire;
    passed += elements * (24 + size + 8) / n + wire * (n - 1) / n;
    t.sent += comm::time_of(all_to_all, wire, across).seconds();
    if (kind == all_reduce) {
        t.sent += comm::time_of(all_gather, wire, across).seconds();
        passed += wire + elements * size;
    }
    t.coding = passed / memory_rate;
    return t;
}

}  // namespace detail

/// What data and sequence ranks take in a step, of a rank with `parameters` in as many messages as it has layers.
///
/// Semantics  P parameters of 2 bytes; AR, RS, AG: the collectives over them, by comm/cost on two levels; k micro-batches
///            of forward F and backward B; "beside X" is waited for as far as it does not fit.
///   stage 0      AR beside the last B
///   zero<1>      RS beside the last B; AG of values beside the first F
///   zero<2>      RS beside the next micro-batch, k - 1 times, then as zero<1>
///   zero<3>      AG beside F, AG and RS beside B, k times; the first gather and the last reduction are waited for
///   two copies of the model  gradients are complete when both are added up: nothing of them is sent beside B
///   secondary_shards  the second AG inside the node
///   node_shards  these inside a replica, and AR of a rank's part over replicas, once, beside the last B
///   tau > 0      inside a replica as above; AR of owned masters, 4 bytes each, once in tau steps: waited for, or, if
///                delayed, beside the tau steps
///   compression  of stage 0 between nodes (inside, everything is sent), of zero's gradients, or of rounds; as
///                compress::all_reduce does it, in one pass to encode and one a wire to decode
///   updates      28 bytes an owned parameter for AdamW over float masters and 2 for the norm; a round: 40
///   the rest     what is not waited for costs computing `interference` of its time
/// Determinism a function of the arguments.
[[nodiscard]] inline exchange_time time_of_exchange(const model_shape& m, const job& j, const machine& on,
                                                    std::int64_t parameters, const rank_passes& passes) {
    using enum comm::collective;
    const double memory_rate = on.memory_bandwidth * on.memory_efficiency;
    const auto count = static_cast<double>(rank_layers(m, j));
    const auto k = static_cast<double>(j.micro_batches);
    const int shards = j.shards();
    const auto all = static_cast<double>(parameters);
    const double owned = j.zero_stage > 0 ? static_cast<double>((parameters + shards - 1) / shards) : all;
    const comm::two_levels inside = on.group_of(shards, j.tensor, j.ranks());
    const comm::two_levels across = on.group_of(j.replicas, j.tensor * shards, j.ranks());
    const double bytes = 2 * all / count;  // of a message
    const double ratio = j.tau > 0 ? 1 : j.compression;
    const auto each = [&](comm::collective kind) { return detail::coded(kind, bytes, 2, inside, ratio, memory_rate); };
    const double last_backward = j.copies() > 1 ? 0 : passes.backward;  // beside which gradients can be sent
    exchange_time out;
    out.updates = 30 * owned / memory_rate;
    const auto beside = [&](const detail::coded_time& message, double window, double times = 1) {
        out.sent += times * count * message.sent;
        out.exposed += times * detail::waited(message.sent, count, window);
        out.updates += times * count * message.coding;
    };
    detail::coded_time over_replicas;
    if (j.tau == 0 && j.replicas > 1) {
        over_replicas = detail::coded(all_reduce, bytes / shards, 2, across, 1, memory_rate);
    }
    if (j.zero_stage == 0) {
        beside(each(all_reduce), last_backward);
    } else {
        const detail::coded_time reduce = each(reduce_scatter);
        const detail::coded_time gather = each(all_gather);
        detail::coded_time last = reduce;
        last.sent += over_replicas.sent;
        if (j.zero_stage < 3) {
            if (j.zero_stage == 2) {
                out.sent += (k - 1) * count * reduce.sent;
                out.exposed += (k - 1) * std::max(0.0, count * reduce.sent - passes.forward - passes.backward);
                out.updates += (k - 1) * count * reduce.coding;
            }
            beside(last, last_backward);
            beside(gather, passes.forward);
        } else {
            const detail::coded_time again =
                j.secondary == 0 ? gather
                                 : detail::coded(all_gather, bytes, 2, on.group_of(j.secondary, j.tensor, j.ranks()), 1,
                                                 memory_rate);
            out.sent = count * (k * (gather.sent + again.sent + reduce.sent) + over_replicas.sent);
            out.exposed = gather.sent + last.sent + k * std::max(0.0, count * gather.sent - passes.forward) +
                          (k - 1) * std::max(0.0, count * (again.sent + reduce.sent) - passes.backward) +
                          std::max(0.0, count * (again.sent + last.sent) - passes.backward);
            out.updates += k * count * reduce.coding;
        }
    }
    if (j.tau > 0) {
        const detail::coded_time round = detail::coded(all_reduce, 4 * owned, 4, across, j.compression, memory_rate);
        out.sent += round.sent / j.tau;
        out.updates += (40 * owned / memory_rate + round.coding) / j.tau;
        const double window = j.delayed ? j.tau * (passes.step + out.exposed + out.updates) : 0;
        out.exposed += std::max(0.0, round.sent - window) / j.tau;
    }
    out.exposed += on.interference * std::max(0.0, out.sent - out.exposed);
    return out;
}

}  // namespace tutti::plan
