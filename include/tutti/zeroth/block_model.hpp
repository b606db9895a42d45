// block_model: what a model that is tuned by forward passes shows: a chain of modules, each given its weights.
// Needs core/view. Pipelines of zeroth run it; it says how modules work, they where weights are.
#pragma once

#include <cstddef>  // size_t
#include <span>     // weights

#include <tutti/core/queue.hpp>  // queue
#include <tutti/core/view.hpp>   // view

namespace tutti::zeroth {

/// One view for each tensor of a module, in the order in which its shape lists them. The list itself lives as long as
/// the call, what it refers to until the queue has got there.
template <class T, memory M> using module_weights = std::span<const view<const T, M>>;

/// A model that runs module by module on a queue.
///
/// Semantics  a pass calls head, all blocks in order and tail, each once for every branch; `branch` counts the probes of
///            the pass from 0, and the model keeps activations of each, all of one micro-batch: `branches_of` says of how
///            many where `replicated` makes the steps. Calls only enqueue.
///            `tail` leaves two numbers in `loss`: the mean loss, and by what it is to be weighted beside other
///            micro-batches and ranks (the tokens that counted). Losses are computed in float or wider.
template <class F, class Q, class T>
concept block_model = queue<Q> && requires(F& f, Q q, module_weights<T, typename Q::memory_type> w, std::size_t number,
                                           view<double, typename Q::memory_type> loss) {
    f.head(q, w, number, number);           // weights, branch, micro_batch
    f.block(q, number, w, number, number);  // block, weights, branch, micro_batch
    f.tail(q, w, number, number, loss);
};

}  // namespace tutti::zeroth
