// secondary_shards: over another shard exchange, a second copy of stage 3's values, shared inside each node: what was
// gathered among all ranks once is gathered again over the links of the node alone. Needs comm/node_groups.
// Source: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023, section 3.2
// (hpZ: hierarchical partitioning).
#pragma once

#include <concepts>  // same_as
#include <cstddef>   // size_t
#include <cstdint>   // updates
#include <memory>    // shared with work in flight
#include <string>    // descriptions
#include <utility>   // move

#include <tutti/comm/communicator.hpp>           // can_all_gather
#include <tutti/comm/node_groups.hpp>            // split_inside
#include <tutti/comm/topology.hpp>               // nodes
#include <tutti/core/buffer.hpp>                 // the second copy
#include <tutti/core/detail/detour.hpp>          // between two queues
#include <tutti/core/elementwise.hpp>            // copy
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/schedule/bucket.hpp>             // bucket_plan
#include <tutti/strategy/detail/shard_plan.hpp>  // shard_plan
#include <tutti/strategy/shard_exchange.hpp>     // gathers_again, plain_shards
#include <tutti/strategy/strategy.hpp>           // parameters

namespace tutti::strategy {

struct node_shards;

/// As `primary`, which is among all ranks, but for gathers of values that have not changed since they were gathered.
///
/// Semantics    stage 3 alone gathers anything twice. The first gather of a bucket behind a step is that of `primary`:
///              in training that of forward. Of what it brings, every rank keeps its part of a cut among the ranks of
///              its node, and later gathers, those of backward and of further micro-batches, are of these parts, as
///              they are. Values that `primary` compresses are compressed and decoded once a step then.
///   nodes      where the ranks are. They need not have as many ranks each. On one node this saves no link anything,
///              and with one rank a node a gather copies.
///   primary    plain_shards, or compressed_shards: then all three parts of ZeRO++ work together, the compressed
///              gradients in one hop. Not node_shards, which gathers inside nodes as it is.
/// Shapes       the second cut is the plan's of as many ranks as the node has. It is no state: a resume begins with a
///              gather among all.
/// Determinism  the bits are those of `primary` alone.
/// Cost         n ranks in nodes of g; P elements of s bytes, of which this rank owns p, and of the second cut q, about
///              P/g. Of what zero says:
///     memory     s q bytes more.
///     sent       a step gathers each bucket among all ranks once, however many micro-batches there are: s p (n - 1)
///                together, of which s p (n - g) leave the node, or as `primary` has it. Each of the others of zero's
///                2k gathers of a bucket sends s (g - 1) for every element of the second cut, inside the node.
///     passes     a copy of q elements a step.
///     attach     a communicator more.
/// Errors       usage_error from attach for nodes of other ranks than the communicator's; those of `primary`. Where a
///              rank leaves the order of use in a gather of its node, the others may notice at the next reduction.
template <class Primary = plain_shards> struct secondary_shards {
    static_assert(!std::same_as<Primary, node_shards>,
                  "node_shards shares values inside nodes already: a second copy there saves nothing");

    comm::topology nodes;
    Primary primary{};

    template <communicator C, floating_element T>
    requires shard_exchange<Primary, C, T> && comm::can_all_gather<C, T>
    class state_type : public shard_state_of<Primary, C, T> {
        using Q = queue_of<C>;
        using M = memory_of<C>;
        using base = shard_state_of<Primary, C, T>;
        static_assert(!gathers_again<base, C, T>, "there is a second copy already");

        std::shared_ptr<C> inside_;  // the ranks of this node; used on the values' lane alone
        std::shared_ptr<const detail::shard_plan> cut_;
        buffer<T, Q> copy_;

    public:
        state_type(base primary, const Q& q, std::shared_ptr<C> inside)
            : base(std::move(primary))
            , inside_(std::move(inside))
            , cut_(
                  std::make_shared<const detail::shard_plan>(this->plan()->buckets(), inside_->size(), inside_->rank()))
            , copy_(q, cut_->owned()) {}

        [[nodiscard]] auto gather(std::size_t b, std::uint64_t updates) const {
            return [first = base::gather(b, updates), cut = cut_, kept = cut_->kept_part(b, copy_.view()),
                    b](C& c, view<gathered_t<base, T>, M> mine, view<T, M> whole) {
                first(c, mine, whole);
                copy(c.queue(), view<const T, M>(cut->own_part(b, whole)), kept);
            };
        }
        [[nodiscard]] auto gather_again(std::size_t b) const {
            return [inside = inside_, cut = cut_, kept = view<const T, M>(cut_->kept_part(b, copy_.view())),
                    b](C& c, view<T, M> whole) {
                const tutti::detail::detour there(c.queue(), inside->queue());
                inside->all_gather_v(kept, whole, cut->counts(b));
            };
        }
        /// The second cut: which elements of each bucket this rank keeps for its node.
        [[nodiscard]] const detail::shard_plan& cut() const noexcept { return *cut_; }
    };

    void validate() const { primary.validate(); }
    [[nodiscard]] std::string describe() const {
        return formatted("{}, kept inside nodes{}", primary.describe(), comm::list_of_nodes(nodes));
    }
    template <communicator C, floating_element T>
    requires shard_exchange<Primary, C, T> && comm::can_all_gather<C, T>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>& list,
                                              const schedule::bucket_plan& plan) const {
        comm::expect_nodes_of(comm, nodes, "secondary shards");
        auto inside = std::make_shared<C>(comm::split_inside(comm, nodes));
        return state_type<C, T>(primary.template make_state<C, T>(comm, list, plan), comm.queue(), std::move(inside));
    }
};

}  // namespace tutti::strategy
