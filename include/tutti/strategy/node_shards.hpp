// node_shards: a shard exchange inside nodes. Each node has all of the model, shared among its ranks.
// Needs strategy/shard_exchange and comm/topology. What leaves a node is a rank's part of the gradients, once a step.
// Source: Zhang et al., MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud, VLDB 2022, sections 3.2
// (partition groups) and 3.4 (2-hop gradient synchronization).
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <memory>       // shared with work in flight
#include <span>         // state
#include <string>       // descriptions
#include <string_view>  // names of communicators
#include <utility>      // move
#include <vector>       // hashes

#include <tutti/comm/communicator.hpp>               // capabilities
#include <tutti/comm/node_groups.hpp>                // split_inside, split_across
#include <tutti/comm/topology.hpp>                   // nodes
#include <tutti/core/detail/detour.hpp>              // between two queues
#include <tutti/core/hash.hpp>                       // hash_of
#include <tutti/core/reduce_op.hpp>                  // mean
#include <tutti/core/state.hpp>                      // hash_bytes
#include <tutti/schedule/bucket.hpp>                 // bucket_plan
#include <tutti/strategy/detail/parameter_list.hpp>  // what strategies share
#include <tutti/strategy/detail/shard_plan.hpp>      // shard_plan
#include <tutti/strategy/shard_exchange.hpp>         // plain_shards
#include <tutti/strategy/strategy.hpp>               // parameters

namespace tutti::strategy {

/// Ranks of a node share the model; nodes are replicas.
///
/// Semantics    reductions and gathers of zero stay inside a node. Behind the last reduction of a step, a rank's part of
///              each bucket is averaged with those of the ranks of its place on the other nodes, on the same lane:
///              beside backward. All nodes make the same updates, and finish() compares their masters.
///   nodes      where the ranks are; every node has as many. On one node this is plain_shards; with one rank a node
///              nothing is shared.
/// Shapes       owned() and state() are those of a rank's part of its node's model: the ranks of one node have all of
///              it, ranks of the same place have the same. To save, one node is enough.
/// Determinism  on deterministic backends the bits depend on data and nodes, not on bucket size nor timing: means inside
///              nodes are in T, their mean over nodes too. With one rank a node, and one micro-batch, they are those of
///              data_parallel.
/// Cost         N nodes of g ranks: formulas of zero with n = g, p elements owned, and
///     memory     none more.
///     sent       between nodes, a step: an all_reduce of the part of each bucket, 2(N-1)/N s p bytes together, however
///                many micro-batches there are. Everything else stays in the node, the norm too.
///     attach     two communicators more.
/// Errors       usage_error from attach for nodes that are not of one size, or of other ranks than the communicator's;
///              mismatch_error from finish naming the ranks of nodes that differ.
struct node_shards {
    comm::topology nodes;

    template <communicator C, floating_element T>
    requires comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T> && comm::can_all_reduce<C, T, mean> &&
        comm::can_gather_control<C>
    class state_type {
        using M = memory_of<C>;
        std::shared_ptr<C> inside_;  // the ranks of this node
        std::shared_ptr<C> across_;  // those of this rank's place, on all nodes; used on the gradients' lane alone
        plain_shards::state_type<C, T> shards_;

    public:
        static constexpr bool gathers_masters = false;
        state_type(std::shared_ptr<C> inside, std::shared_ptr<C> across, const schedule::bucket_plan& plan)
            : inside_(std::move(inside)), across_(std::move(across)), shards_(*inside_, plan) {}

        [[nodiscard]] const std::shared_ptr<const detail::shard_plan>& plan() const noexcept { return shards_.plan(); }
        [[nodiscard]] C duplicate(C&, std::string_view name) const { return inside_->duplicate(name); }
        template <class F> decltype(auto) among(C& comm, F f) const {
            const tutti::detail::detour there(comm.queue(), inside_->queue());
            return f(*inside_);
        }
        void begin(const micro_batch&) const noexcept {}
        [[nodiscard]] auto reduce(std::size_t b) const { return shards_.reduce(b); }
        [[nodiscard]] auto replicate(std::size_t) const {
            return [across = across_](C& c, view<T, M> mine) {
                if (across->size() == 1 || mine.empty()) { return; }
                const tutti::detail::detour there(c.queue(), across->queue());
                across->all_reduce(mine, mine, mean{});
            };
        }
        [[nodiscard]] auto gather(std::size_t b, std::uint64_t updates) const { return shards_.gather(b, updates); }
        void expect_replicas(C& comm, view<const master_t<T>, M> owned) const {
            if (across_->size() == 1) { return; }
            const auto parts = inside_->gather_control({hash_of(comm.queue(), owned), 0, 0, 0});
            std::vector<std::uint64_t> hashes;
            for (const comm::control_record& part : parts) { hashes.push_back(part[0]); }
            const std::uint64_t node = hash_bytes(as_bytes(view<const std::uint64_t>(hashes.data(), hashes.size())));
            comm.agree(node, "the hash of a node's masters at finish");
        }
        [[nodiscard]] std::span<const state_entry<M>> entries() const noexcept { return {}; }
        void restored() const noexcept {}
    };

    void validate() const { comm::expect_equal_nodes(nodes, "node shards"); }
    [[nodiscard]] std::string describe() const { return ", shared inside nodes" + comm::list_of_nodes(nodes); }
    template <communicator C, floating_element T>
    requires comm::can_reduce_scatter<C, T, mean> && comm::can_all_gather<C, T> && comm::can_all_reduce<C, T, mean> &&
        comm::can_gather_control<C>
    [[nodiscard]] state_type<C, T> make_state(C& comm, const parameters<T, memory_of<C>>&,
                                              const schedule::bucket_plan& plan) const {
        comm::expect_nodes_of(comm, nodes, "node shards");
        auto inside = std::make_shared<C>(comm::split_inside(comm, nodes));
        auto across = std::make_shared<C>(comm::split_across(comm, nodes));
        return state_type<C, T>(std::move(inside), std::move(across), plan);
    }
};

}  // namespace tutti::strategy
