// hierarchical all_reduce: dense inside a node, where links are fast, compressed between nodes, where they are not.
// Needs compress/all_reduce and two communicators: this rank's node, and the ranks of its place on all nodes.
// Wang et al., ZeRO++, 2023, section 3.3; Markov et al., CGX, 2022, section 4.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <vector>       // counts

#include <tutti/comm/communicator.hpp>    // capabilities
#include <tutti/compress/all_reduce.hpp>  // between nodes
#include <tutti/compress/shards.hpp>      // cut among the ranks of a node
#include <tutti/core/detail/detour.hpp>   // between two queues
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/reduce_op.hpp>       // sum, mean
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress {

/// all_reduce over all ranks of all nodes: reduce_scatter inside each node, compressed all_reduce of a rank's shard
/// among the ranks of its place on all nodes, all_gather inside. Every rank has the same bits.
///
/// Semantics    `inside` has the ranks of one node, `across` one rank of each node, the same place everywhere; every
///              node has as many. Inside, sums and copies are of T and nothing is lost but their rounding. `state` and
///              residual belong to this rank's shard of the layout, cut at the compressor's granularity (between whole
///              tensors for linear ones): what was lost of the node's sum. The rest of the residual is not touched.
/// Shapes       the layout's segments lie one behind the other. Residual: of the views' size, or empty.
/// Aliasing     out may be in.
/// Order        `inside`'s queue; `across` works between two points of it. On a lane that owns `inside`, `across` is
///              used by this work alone.
/// Determinism  as for all_reduce. Keys of ranks that meet in `across` must differ in `rank`.
/// Cost         inside: 2 (g-1)/g of the elements; between nodes: that of a compressed all_reduce of 1/g of them. No
///              scratch besides its own.
/// Errors       usage_error before anything is sent, also when segments do not follow each other.
template <communicator Inside, communicator Across, class Scheme, class State, floating_element T,
          sum_or_mean Op = tutti::mean>
requires reducible_by<Scheme, Across, T> && std::same_as<queue_of<Inside>, queue_of<Across>> &&
    comm::can_reduce_scatter<Inside, T, Op> && comm::can_all_gather<Inside, T>
void all_reduce(Inside& inside, Across& across, const Scheme& x, State& state, layout all,
                view<const std::type_identity_t<T>, memory_of<Inside>> in, view<T, memory_of<Inside>> out,
                view<float, memory_of<Inside>> residual, draw_key key, Op op = {}) {
    constexpr std::string_view name = "hierarchical all_reduce";
    detail::expect_all_reduce<Inside, T>(name, all, in, out, residual);
    std::size_t granularity = 0;
    if constexpr (!linear_compressor<Scheme, queue_of<Across>, T>) { granularity = x.granularity(); }
    for (std::size_t i = 1; i < all.size(); ++i) {
        if (all[i].offset != all[i - 1].offset + all[i - 1].size()) {
            throw usage_error(formatted("{}: tensor {} is at element {}, not behind tensor {}, which ends at {}", name,
                                        all[i].tensor, all[i].offset, all[i - 1].tensor,
                                        all[i - 1].offset + all[i - 1].size()));
        }
    }
    detail::expect_agreement(inside, x, all, key, Op::kind, name);
    const shards parts = cut(all, granularity, inside.size());
    std::vector<std::size_t> counts;
    for (int r = 0; r < inside.size(); ++r) { counts.push_back(detail::extent_of(parts.of(r)).count); }

    const part whole = detail::extent_of(all);
    const layout own = parts.of(inside.rank());
    const part shard = own.empty() ? part{whole.first, 0} : detail::extent_of(own);
    const auto mine = out.sub(shard.first, shard.count);
    inside.reduce_scatter_v(in.sub(whole.first, whole.count), mine, counts, op);
    {
        const tutti::detail::detour between(inside.queue(), across.queue());
        const std::vector<segment> here = detail::rebased(own, shard.first);
        all_reduce(across, x, state, layout(here), mine, mine, detail::part_of(residual, shard.first, shard.count), key,
                   op);
    }
    inside.all_gather_v(mine, out.sub(whole.first, whole.count), counts);
}

}  // namespace tutti::compress
