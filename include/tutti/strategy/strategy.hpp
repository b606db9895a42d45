// The strategy concept: how a trainer hands parameters and gradients to whatever keeps its replicas in step.
// Needs core/state and core/view. `shardable` is what an outer strategy needs of an inner one, so that strategies nest.
// A strategy owns the communicators moved into it.
#pragma once

#include <concepts>  // move_constructible
#include <cstddef>   // size_t
#include <limits>    // a rate that was not given
#include <span>      // state
#include <string>    // names
#include <vector>    // parameter list

#include <tutti/core/queue.hpp>  // queue
#include <tutti/core/state.hpp>  // state_entry
#include <tutti/core/view.hpp>   // view

namespace tutti::strategy {

/// Part `index` of the `count` parts whose gradients one step adds up.
struct micro_batch {
    int index = 0;
    int count = 1;
    /// Of the step it belongs to, if that is known already; step must be given the same. Feedback of errors may be
    /// scaled by its change.
    double learning_rate = std::numeric_limits<double>::quiet_NaN();
    double loss_scale = 1;  ///< what the trainer multiplied the loss by besides 1 / count; one for the whole step
};

/// What a step is told.
struct hyper {
    double learning_rate = std::numeric_limits<double>::quiet_NaN();  ///< has no default: a step without it throws
    double clip_norm = 0;  ///< global gradient norm is limited to this; 0: no clipping
};

/// What a step tells.
struct step_result {
    bool skipped = false;  ///< the gradient was not finite: nothing changed, on no rank
    double norm = 0;       ///< global gradient norm before clipping
};

/// A tensor of the trainer.
///
/// Lifetime  `value` and `gradient` stay the trainer's and must outlive the strategy.
template <class T, memory M = host_memory> struct parameter {
    std::string name;                ///< not empty, unique
    std::vector<std::size_t> shape;  ///< its product is value.size(); empty: a scalar
    bool decay = true;               ///< weight decay applies
    view<T, M> value;                ///< initial value at attach; publish() writes new values here
    view<T, M> gradient;             ///< where backward accumulates; empty: the strategy brings the storage
};

template <class T, memory M = host_memory> using parameters = std::vector<parameter<T, M>>;

/// Keeps replicas of a model in step while a trainer runs forward and backward.
///
/// Semantics
///   attach    once, before all others; collective. Ranks agree on the list or it throws. Replicas start equal.
///   begin     micro-batch m.index of m.count; index 0 zeroes the gradients. The loss is scaled by 1 / count by the
///             trainer, and by m.loss_scale, for gradients of few exponent bits (optimize/loss_scale): the norm and the
///             update are of gradients divided by it again.
///   before_use, after_use   around each use of parameter i in forward and backward; the view is valid between the two.
///   gradient  where backward adds (+=) the gradient of parameter i.
///   gradient_ready   exactly once per micro-batch and parameter, after the last write of that micro-batch:
///             communication of it may start.
///   step      after the last micro-batch: averages over ranks, updates, publishes.
///   flush     waits for all that is in flight; never changes the trajectory.
///   finish    replicas are equal afterwards, or it throws; terminal, except for reading values and state. Collective.
///   state     all a bit-exact resume needs. To resume: attach, write the saved bytes into the entries, restored().
///   consensus the parameters that replicas have in common. While the returned scope lives, before_use(i) gives these:
///             for evaluation and for saving weights in the middle of a run. Collective.
/// Order      every rank makes the same calls; only gradient_ready may come in a different order on each.
/// Threads    one thread uses a strategy.
template <class S>
concept strategy = std::move_constructible<S> && queue<typename S::queue_type> &&
    requires(S& s, parameters<typename S::element_type, typename S::memory_type>& p, std::size_t i, micro_batch m,
             hyper h) {
    s.attach(p);
    s.begin(m);
    { s.before_use(i) } -> std::same_as<view<const typename S::element_type, typename S::memory_type>>;
    s.after_use(i);
    { s.gradient(i) } -> std::same_as<view<typename S::element_type, typename S::memory_type>>;
    s.gradient_ready(i);
    { s.step(h) } -> std::same_as<step_result>;
    s.flush();
    s.finish();
    { s.state() } -> std::same_as<std::span<const state_entry<typename S::memory_type>>>;
    s.restored();
    s.consensus();
    { s.queue() } -> std::same_as<typename S::queue_type>;
};

/// What consensus() gives where replicas are equal between steps: there is nothing to restore.
struct [[nodiscard]] equal_replicas {
    ~equal_replicas() {}  // NOLINT: marks the scope as used
};

/// A strategy that an outer one can work on.
///
/// Semantics  step(h) == update(h); publish(). Between the two an outer strategy may change owned().
///   owned    this rank's authoritative elements, in master_t<T>; all ranks' inside the strategy make up the model.
///   publish  owned -> the trainer's values.
///   sum_over_shards   adds the view over the ranks that own different elements: what a global norm needs.
template <class S>
concept shardable = strategy<S> && requires(S& s, hyper h, view<double, typename S::memory_type> x) {
    { s.owned() } -> std::same_as<view<master_t<typename S::element_type>, typename S::memory_type>>;
    { s.update(h) } -> std::same_as<step_result>;
    s.publish();
    s.sum_over_shards(x);
};

/// A shardable strategy that shows its gradients before it uses them.
///
/// Semantics  update(h, change) is update(h) of what `change` leaves in the gradients of owned()'s elements, which it is
///            given once, averaged over the ranks inside the strategy, multiplied by the loss scale and not clipped.
template <class S>
concept shows_gradients = shardable<S> &&
    requires(S& s, hyper h, void (*change)(view<typename S::element_type, typename S::memory_type>)) {
    { s.update(h, change) } -> std::same_as<step_result>;
};

/// A shardable strategy that shows what its optimizer keeps.
///
/// Semantics  moments are of owned()'s elements and may be changed between steps; reset_moments makes them, and the
///            number of updates that the optimizer counts, those of a new optimizer.
template <class S>
concept has_moments = shardable<S> && requires(S& s) {
    { s.moments() } -> std::same_as<std::vector<view<master_t<typename S::element_type>, typename S::memory_type>>>;
    s.reset_moments();
};

}  // namespace tutti::strategy
