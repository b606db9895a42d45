// document_steps: what a run over documents does in each step besides what every run does, and what it reports of that.
// Needs documents.hpp and document_attention.hpp.
#pragma once

#include <algorithm>  // max
#include <cstdint>    // tokens
#include <stdexcept>  // a step without a loss
#include <string>     // picture
#include <vector>     // lengths, maxima

#include <fmt/format.h>                  // messages
#include <tutti/comm/topology.hpp>       // link
#include <tutti/core/element.hpp>        // accumulator_t
#include <tutti/core/reduce_op.hpp>      // max
#include <tutti/sequence/cost.hpp>       // transfer_cost
#include <tutti/sequence/estimate.hpp>   // planned seconds
#include <tutti/sequence/placement.hpp>  // pairs_of
#include <tutti/sequence/render.hpp>     // picture

#include "document_attention.hpp"
#include "documents.hpp"
#include "report.hpp"

namespace transformer {

/// The most pairs of a query and a key that a rank has, over their mean: 1 is as even as it gets.
[[nodiscard]] inline double imbalance_of(const tutti::sequence::placement& p) {
    double most = 0, all = 0;
    for (const auto& pieces : p.pieces) {
        double own = 0;
        for (const auto& piece : pieces) { own += tutti::sequence::pairs_of(piece); }
        most = std::max(most, own);
        all += own;
    }
    return all == 0 ? 1 : most * static_cast<double>(p.pieces.size()) / all;
}

/// Semantics    next(step) is collective, before the step's forward. `finish` too, behind the last step.
/// Determinism  documents, rows and bytes are functions of the options and the step; seconds are measured.
template <class T> class document_steps {
    document_attention<T>& attention_;
    const options& o_;
    tokens training_;
    document_lengths lengths_;
    tutti::sequence::attention_cost cost_;  // of one layer forward, the same on all ranks
    batch rows_;
    sequence_result sums_;
    int steps_ = 0;

public:
    template <class Comm>
    document_steps(Comm& world, document_attention<T>& attention, const options& o, tokens training)
        : attention_(attention), o_(o), training_(training), lengths_(o.lengths) {
        double measured[3] = {};
        if (world.rank() == 0) {
            const auto c = attention_.measured_cost();
            measured[0] = c.quadratic;
            measured[1] = c.linear;
            measured[2] = c.constant;
        }
        world.all_reduce(tutti::view<const double>(measured, 3), tutti::view<double>(measured, 3), tutti::sum{});
        cost_ = {measured[0], measured[1], measured[2]};
    }

    /// Places the step's documents and draws this rank's rows of them. Returns what the sum of the rows' losses is to be
    /// multiplied by, so that the mean over ranks is the mean over all tokens that have a target.
    /// Errors  runtime_error, on all ranks, when no token has one; usage_error when the documents find no room.
    [[nodiscard]] double next(int step) {
        const auto lengths = lengths_.of_step(o_.seed, step, o_.tokens_per_step(), o_.model.context);
        attention_.plan(lengths);
        const std::uint64_t valid =
            draw(rows_, training_, o_.seed, step, o_.model.context, lengths, attention_.pieces());
        const double scale = o_.ranks * attention_.loss_scale(valid);
        if (scale == 0) { throw std::runtime_error(fmt::format("step {} has only documents of one token", step + 1)); }
        count();
        return scale;
    }
    [[nodiscard]] document_rows rows() const { return {rows_.in, rows_.targets, attention_.positions()}; }
    [[nodiscard]] shared_attention<T>& attention() { return attention_; }

    /// Means over the steps. Attention's measured time is that of the rank that spent most.
    template <class Comm> [[nodiscard]] sequence_result finish(Comm& world) {
        sequence_result r = sums_;
        double measured[1] = {attention_.take_seconds()};
        world.all_reduce(tutti::view<const double>(measured, 1), tutti::view<double>(measured, 1), tutti::max{});
        r.measured_seconds = measured[0];
        for (double* const figure : {&r.imbalance, &r.planned_seconds, &r.measured_seconds, &r.intra_node_bytes,
                                     &r.inter_node_bytes, &r.remapped_tokens}) {
            *figure /= steps_;
        }
        return r;
    }

private:
    void count() {
        using namespace tutti::sequence;
        const placement& p = attention_.placed();
        const auto layers = static_cast<double>(o_.model.layers);
        const int width = o_.model.width / o_.model.heads;
        const double bytes = kv_bytes_per_token(o_.model.heads, width, sizeof(T));
        const double sums = kv_bytes_per_token(o_.model.heads, width, sizeof(tutti::accumulator_t<T>));
        const tutti::comm::link between = o_.network.empty() ? tutti::comm::link{} : stated_link(o_.network);
        // Backward takes 2.5 times the flops, and gradients of keys and values travel with these, and home at the end.
        sums_.planned_seconds +=
            layers * (estimated(p, cost_, {.bytes_per_token = bytes, .between = between}).attention +
                      estimated(p, cost_.scaled(2.5), {.bytes_per_token = bytes + sums, .between = between}).attention);
        sums_.imbalance += imbalance_of(p);
        const engine_traffic t = attention_.traffic();
        sums_.intra_node_bytes += layers * static_cast<double>(t.inside);
        sums_.inter_node_bytes += layers * static_cast<double>(t.between);
        sums_.remapped_tokens += static_cast<double>(t.moved_tokens);
        if (steps_++ == 0 && !o_.plan_picture.empty()) { sums_.picture = svg_of(p); }
    }
};

}  // namespace transformer
