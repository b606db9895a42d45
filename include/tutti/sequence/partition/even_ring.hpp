// even_ring: every sequence on one ring over all ranks, as in TransformerEngine's context parallelism. The yardstick.
// Needs sequence/placement. Balanced whatever the lengths; short sequences pay for transfers that they cannot hide.
#pragma once

#include <algorithm>  // sort
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <numeric>    // iota
#include <span>       // lengths
#include <utility>    // move
#include <vector>     // ranks

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence::partition {

/// Semantics    one ring over all ranks a sequence. Instead of padding to a multiple of 2G, the positions that get a
///              token more go to the nodes, and in them to the ranks, that have the fewest so far.
/// Guarantee    no rank has more than two tokens above the average: so where the tokens fit into the capacities
///              together, no rank exceeds its own by more than that.
/// Determinism  of the arguments alone.
/// Cost         sequences * ranks * log(ranks).
/// Errors       usage_error when lengths make no sense, or there are more tokens than all ranks hold.
class even_ring {
public:
    [[nodiscard]] placement operator()(std::span<const std::int64_t> lengths, const cluster& machines,
                                       std::int64_t capacity = no_capacity) const {
        const std::int64_t total = sequence::detail::expect_placeable("even_ring", lengths, machines, capacity);
        const int ranks = machines.ranks();
        if (total / ranks + (total % ranks != 0 ? 1 : 0) > capacity) {
            throw usage_error(
                formatted("even_ring: {} tokens are more than {} ranks hold at {} each", total, ranks, capacity));
        }
        const auto width = static_cast<std::size_t>(machines.ranks_per_node);
        const auto nodes = static_cast<std::size_t>(machines.nodes);
        std::vector<std::int64_t> tokens(width * nodes);  // by rank
        std::vector<std::int64_t> in_node(nodes);         // by node
        std::vector<std::int64_t> by_position(tokens.size());
        std::vector<std::int64_t> by_block(nodes);  // positions of a node
        std::vector<std::size_t> node_order(nodes), block_order(nodes), rank_order(width), place_order(width);
        std::vector<ring> rings;
        rings.reserve(lengths.size());
        for (std::size_t s = 0; s < lengths.size(); ++s) {
            for (std::size_t i = 0; i < by_position.size(); ++i) {
                by_position[i] = tokens_at(lengths[s], ranks, static_cast<int>(i));
            }
            for (std::size_t b = 0; b < nodes; ++b) {
                const auto from = by_position.begin() + static_cast<std::ptrdiff_t>(b * width);
                by_block[b] = std::accumulate(from, from + static_cast<std::ptrdiff_t>(width), std::int64_t{0});
            }
            ring r{static_cast<int>(s), zone::world, std::vector<int>(by_position.size())};
            order_by(node_order, in_node, 0, 1);
            order_by(block_order, by_block, 0, -1);
            for (std::size_t b = 0; b < nodes; ++b) {
                const std::size_t node = node_order[b];
                const std::size_t block = block_order[b];
                order_by(rank_order, tokens, node * width, 1);
                order_by(place_order, by_position, block * width, -1);
                for (std::size_t i = 0; i < width; ++i) {
                    r.ranks[place_order[i]] = static_cast<int>(rank_order[i]);
                    tokens[rank_order[i]] += by_position[place_order[i]];
                }
                in_node[node] += by_block[block];
            }
            r.where = zone_of(machines, r.ranks);
            rings.push_back(std::move(r));
        }
        return assembled(machines, lengths, std::move(rings));
    }

private:
    // order = first, first + 1, ..., by ascending sign * value; equal ones as they come.
    static void order_by(std::vector<std::size_t>& order, std::span<const std::int64_t> values, std::size_t first,
                         int sign) {
        std::iota(order.begin(), order.end(), first);
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            return values[a] != values[b] ? sign * values[a] < sign * values[b] : a < b;
        });
    }
};

}  // namespace tutti::sequence::partition
