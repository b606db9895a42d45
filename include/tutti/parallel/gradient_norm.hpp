// gradient_norm: the norm of all gradients of a model whose parameters are spread over ranks, each counted once.
// Needs optimize/clip. What several ranks have is counted by one: see tensor_group and tied_weights.
#pragma once

#include <cmath>    // sqrt
#include <cstddef>  // size_t
#include <span>     // gradients

#include <tutti/comm/communicator.hpp>  // can_all_reduce
#include <tutti/core/buffer.hpp>        // sums of blocks
#include <tutti/core/element.hpp>       // floating_element
#include <tutti/core/reduce_op.hpp>     // sum
#include <tutti/core/run.hpp>           // run, fetch
#include <tutti/core/view.hpp>          // view
#include <tutti/optimize/clip.hpp>      // square_sums_operation

namespace tutti::parallel {

/// A gradient that this rank has. Exactly one of the ranks that have the same counts it: of whole parameters
/// tensor_group::counts_replicated(), of tied ones tied_weights::counts() says which; parts of cut ones all count.
template <class T, memory M> struct held_gradient {
    view<const T, M> gradient;
    bool counted = true;
};

/// The 2-norm over all parameters of the model, for optimize::clip_factor.
///
/// Semantics    collective over `model`, the ranks that together have the model once: those along the pipeline and
///              tensor dimensions, after gradients of replicas have been reduced. Ranks may have any number of
///              gradients.
/// Determinism  the same bits on all ranks, as far as the communicator's sums are; they depend on how the model is
///              spread.
/// Cost         one read of the gradients counted, one sum of 8 bytes over ranks, one fetch.
template <floating_element T, comm::can_all_reduce<double, sum> C>
[[nodiscard]] double model_norm(C& model, std::span<const held_gradient<T, memory_of<C>>> list) {
    using M = memory_of<C>;
    std::size_t blocks = 0;
    for (const auto& g : list) { blocks += g.counted ? optimize::norm_blocks(g.gradient.size()) : 0; }
    const auto q = model.queue();
    const buffer<double, queue_of<C>> scratch(q, blocks + 1);
    std::size_t first = 0;
    for (const auto& g : list) {
        if (!g.counted || g.gradient.empty()) { continue; }
        const std::size_t count = optimize::norm_blocks(g.gradient.size());
        tutti::run(q, optimize::square_sums_operation<T, M>{g.gradient, scratch.view().sub(first, count)});
        first += count;
    }
    const view<double, M> total = scratch.view().sub(blocks, 1);
    tutti::run(q, optimize::ordered_sum_operation<M>{scratch.view().sub(0, blocks), total});
    model.all_reduce(total, total, sum{});
    return std::sqrt(fetch(q, total, 0.0));
}

}  // namespace tutti::parallel
