// shard_exchange: how buckets of gradients become means of which each rank has its part, and how ranks get each other's
// values; `plain_shards`, which sends both as they are, among all ranks. Needs strategy/strategy and schedule/bucket.
// zero takes one as its policy. Like an optimizer, it is a value: hyper-parameters. What changes is in its state.
#pragma once

#include <concepts>     // copyable
#include <cstddef>      // size_t
#include <cstdint>      // updates
#include <memory>       // plans shared with work in flight
#include <span>         // state
#include <string>       // descriptions
#include <string_view>  // names of communicators
#include <type_traits>  // decay, conditional
#include <utility>      // declval

#include <tutti/comm/communicator.hpp>           // can_reduce_scatter, can_all_gather
#include <tutti/core/element.hpp>                // master_t
#include <tutti/core/reduce_op.hpp>              // mean
#include <tutti/core/state.hpp>                  // state_entry
#include <tutti/schedule/bucket.hpp>             // bucket_plan
#include <tutti/strategy/detail/shard_plan.hpp>  // shard_plan
#include <tutti/strategy/strategy.hpp>           // parameters, micro_batch

namespace tutti::strategy {

/// The state that a shard exchange E makes for a communicator C and parameters of T.
template <class E, class C, class T>
using shard_state_of = std::decay_t<decltype(std::declval<const E&>().template make_state<C, T>(
    std::declval<C&>(), std::declval<const parameters<T, memory_of<C>>&>(),
    std::declval<const schedule::bucket_plan&>()))>;

/// What is gathered: values of T as they are used, or their masters, from which the exchange makes them.
template <class S, class T> using gathered_t = std::conditional_t<S::gathers_masters, const master_t<T>, const T>;

namespace detail {
struct any_work {
    template <class C> void operator()(C&) const noexcept {}
};
}  // namespace detail

/// What changes in a shard exchange. The ranks that share a model are all of the communicator's or groups of them, each
/// with all of the model; a part has one owner in each group, and the owners of a part are its replicas.
///
/// Semantics
///   gathers_masters   see gather.
///   plan        which elements of each bucket belong to which rank of this rank's group.
///   duplicate   a communicator of this rank's group: the ranks that the plan counts, in its order. For a lane.
///   among       f(communicator of this rank's group), in the order of comm's queue.
///   begin       a micro-batch begins.
///   reduce      work for a lane of the group, once for each reduction of bucket b, in the plan's order:
///               (comm, whole, mine), mine = the mean over the group of this rank's part of `whole`, which may be where
///               that part is in `whole`; else `whole` is overwritten at most there.
///   replicate   likewise, behind the last reduction of bucket b in a step: (comm, mine), mine = its mean over replicas.
///   gather      work for a lane of the group: (comm, mine, whole), whole = bucket b's values, the same bits on all
///               ranks, from the parts: masters if gathers_masters, else values, which may be where they are in `whole`.
///               A function of the masters and the number of updates made so far, for each call with these the same.
///   expect_replicas   collective: mismatch_error unless the replicas of each part have the same masters.
///   entries     what a bit-exact resume needs; restored() after they were written.
/// Work captures what it needs by value; memory that the state owns stays where it is until the lanes have drained.
template <class S, class C, class T>
concept shard_exchange_state = std::move_constructible<S> &&
    requires(S& state, C& comm, std::size_t b, micro_batch m, std::uint64_t updates, std::string_view name,
             view<T, memory_of<C>> whole, view<gathered_t<S, T>, memory_of<C>> mine,
             view<const master_t<T>, memory_of<C>> owned) {
    { state.plan() } -> std::same_as<const std::shared_ptr<const detail::shard_plan>&>;
    { state.duplicate(comm, name) } -> std::same_as<C>;
    state.among(comm, detail::any_work{});
    state.begin(m);
    state.reduce(b)(comm, whole, whole);
    state.replicate(b)(comm, whole);
    state.gather(b, updates)(comm, mine, whole);
    state.expect_replicas(comm, owned);
    { state.entries() } -> std::same_as<std::span<const state_entry<memory_of<C>>>>;
    state.restored();
};

/// An exchange that keeps what a gather brings, to bring it again for less.
///
/// Semantics
///   gather_again  work for a lane of the group, behind gather's on the same lane: (comm, whole), whole = the bits that
///                 the last gather of bucket b brought. All ranks of the group ask for it alike.
template <class S, class C, class T>
concept gathers_again = shard_exchange_state<S, C, T> &&
    requires(const S& state, C& comm, std::size_t b, view<T, memory_of<C>> whole) {
    state.gather_again(b)(comm, whole);
};

/// How ranks of a communicator C that share parameters of T exchange them and their gradients.
///
/// Semantics
///   validate    throws usage_error for values that make no sense.
///   describe    equal exactly when ranks do the same with the same data; begins with ", " if it is not empty.
///   make_state  for parameters in the order of the plan. Collective: may split or duplicate the communicator, and
///               communicates nothing else. usage_error on all ranks alike.
/// Not finite    an element that is not finite on any rank leaves one that is not finite in the mean, of some part of
///               every group, so that all skip the step; the state stays finite.
template <class E, class C, class T>
concept shard_exchange = std::copyable<E> && shard_exchange_state<shard_state_of<E, C, T>, C, T> &&
    requires(const E& e) {
    e.validate();
    { e.describe() } -> std::same_as<std::string>;
};

/// One reduce_scatter_v a bucket, and one all_gather_v, among all ranks.
struct plain_shards {
    template <communicator C, floating_element T>
    requires comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T>
    class state_type {
        using M = memory_of<C>;
        std::shared_ptr<const detail::shard_plan> plan_;

    public:
        static constexpr bool gathers_masters = false;
        state_type(const C& group, const schedule::bucket_plan& plan)
            : plan_(std::make_shared<const detail::shard_plan>(plan, group.size(), group.rank())) {}

        [[nodiscard]] const std::shared_ptr<const detail::shard_plan>& plan() const noexcept { return plan_; }
        [[nodiscard]] C duplicate(C& comm, std::string_view name) const { return comm.duplicate(name); }
        template <class F> decltype(auto) among(C& comm, F f) const { return f(comm); }
        void begin(const micro_batch&) const noexcept {}
        [[nodiscard]] auto reduce(std::size_t b) const {
            return [plan = plan_, b](C& c, view<T, M> whole, view<T, M> mine) {
                c.reduce_scatter_v(whole, mine, plan->counts(b), mean{});
            };
        }
        [[nodiscard]] auto replicate(std::size_t) const noexcept {
            return [](C&, view<T, M>) {};
        }
        [[nodiscard]] auto gather(std::size_t b, std::uint64_t) const {
            return [plan = plan_, b](C& c, view<const T, M> mine, view<T, M> whole) {
                c.all_gather_v(mine, whole, plan->counts(b));
            };
        }
        void expect_replicas(C&, view<const master_t<T>, M>) const noexcept {}
        [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return {}; }
        void restored() const noexcept {}
    };

    void validate() const noexcept {}
    [[nodiscard]] std::string describe() const { return {}; }
    template <communicator C, floating_element T>
    requires comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>&,
                                              const schedule::bucket_plan& plan) const {
        return state_type<C, T>(comm, plan);
    }
};

}  // namespace tutti::strategy
