// gradient_exchange: how buckets of gradients become their mean over the ranks; `plain_mean`, which sends them as they
// are. Needs strategy/strategy and schedule/bucket. A strategy takes one as its policy and runs its work on a lane.
// Like an optimizer, an exchange is a value: hyper-parameters. What changes is in its state, which can be saved.
#pragma once

#include <concepts>     // copyable
#include <cstddef>      // size_t
#include <span>         // state
#include <string>       // descriptions
#include <type_traits>  // decay
#include <utility>      // declval, as_const

#include <tutti/comm/communicator.hpp>  // can_all_reduce
#include <tutti/core/reduce_op.hpp>     // mean
#include <tutti/core/state.hpp>         // state_entry
#include <tutti/schedule/bucket.hpp>    // bucket_plan
#include <tutti/schedule/lane.hpp>      // lane_options
#include <tutti/strategy/strategy.hpp>  // parameters

namespace tutti::strategy {

/// The state that an exchange E makes for a communicator C and gradients of T.
template <class E, class C, class T>
using exchange_state_of = std::decay_t<decltype(std::declval<const E&>().template make_state<C, T>(
    std::declval<C&>(), std::declval<const parameters<T, memory_of<C>>&>(),
    std::declval<const schedule::bucket_plan&>(), std::declval<const schedule::lane_options&>()))>;

/// What changes in an exchange.
///
/// Semantics
///   begin       a step begins; `rate` is its learning rate, NaN when that is not known yet, and `loss_scale` what its
///               gradients are multiplied by. May communicate, and wait for what began in earlier steps.
///   expect_rate throws usage_error for a rate that begin cannot use; asked first, since a step that is refused has not
///               begun.
///   average     work for a lane that makes bucket b of the flat gradient its mean over the ranks, in place. Submitted
///               once a step and bucket, in the plan's order. It captures what it needs by value; the memory that the
///               state owns stays where it is until the lane has drained.
///   flush       waits for what it has in flight beside the buckets.
///   entries     what a bit-exact resume needs; restored() after they were written.
template <class S, class C, class T>
concept exchange_state = std::move_constructible<S> &&
    requires(S& state, std::size_t b, view<T, memory_of<C>> flat, double rate, double loss_scale, C& comm) {
    std::as_const(state).expect_rate(rate);
    state.begin(rate, loss_scale);
    state.average(b, flat)(comm);
    state.flush();
    { state.entries() } -> std::same_as<std::span<const state_entry<memory_of<C>>>>;
    state.restored();
};

/// How gradients of T become their mean over the ranks of a communicator C.
///
/// Semantics
///   validate    throws usage_error for values that make no sense.
///   describe    equal exactly when ranks do the same with the same gradients.
///   make_state  for parameters whose gradients lie in one flat view as the plan says. Collective: may duplicate the
///               communicator for lanes of its own, made with these options, and communicates nothing else.
///   needs_all_buckets  a static bool, if there: each begin must be followed by all buckets. A strategy whose parts are
///               sent in turn refuses such an exchange.
/// Not finite    an element that is not finite on any rank leaves an element that is not finite in the mean, on every
///               rank, so that all skip the step; the state stays finite.
template <class E, class C, class T>
concept gradient_exchange = std::copyable<E> && exchange_state<exchange_state_of<E, C, T>, C, T> &&
    requires(const E& e) {
    e.validate();
    { e.describe() } -> std::same_as<std::string>;
};

/// One all_reduce a bucket. Cost: 2(n-1)/n * sizeof(T) bytes sent per element.
struct plain_mean {
    template <communicator C, floating_element T>
    requires comm::can_all_reduce<C, T, mean>
    class state_type {
        using M = memory_of<C>;
        schedule::bucket_plan plan_;

    public:
        explicit state_type(schedule::bucket_plan plan) : plan_(std::move(plan)) {}
        void expect_rate(double) const noexcept {}
        void begin(double, double) const noexcept {}
        [[nodiscard]] auto average(std::size_t b, view<T, M> flat) const {
            return [g = flat.sub(plan_.buckets[b].offset, plan_.buckets[b].size)](C& c) { c.all_reduce(g, g, mean{}); };
        }
        void flush() const noexcept {}
        [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return {}; }
        void restored() const noexcept {}
    };

    void validate() const noexcept {}
    [[nodiscard]] std::string describe() const { return "plain mean"; }
    template <communicator C, floating_element T>
    requires comm::can_all_reduce<C, T, mean>
    [[nodiscard]] state_type<C, T> make_state(C&, const parameters<T, memory_of<C>>&, const schedule::bucket_plan& plan,
                                              const schedule::lane_options&) const {
        return state_type<C, T>(plan);
    }
};

}  // namespace tutti::strategy
