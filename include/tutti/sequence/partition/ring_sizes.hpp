// ring_sizes: how many ranks a ring may have: some of a node, or whole nodes.
// Needs sequence/placement.
#pragma once

#include <span>    // sizes
#include <vector>  // sizes

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // cluster

namespace tutti::sequence::partition {

/// 1, 2, ..., the ranks of a node, two nodes, three nodes, ..., all.
[[nodiscard]] inline std::vector<int> all_ring_sizes(const cluster& machines) {
    std::vector<int> sizes;
    for (int k = 1; k <= machines.ranks_per_node; ++k) { sizes.push_back(k); }
    for (int n = 2; n <= machines.nodes; ++n) { sizes.push_back(n * machines.ranks_per_node); }
    return sizes;
}

/// 1, 2, 4, ... below the ranks of a node, then 1, 2, 4, ... whole nodes, and all: the groups of hybrid parallelism.
[[nodiscard]] inline std::vector<int> powers_of_two(const cluster& machines) {
    std::vector<int> sizes;
    for (int k = 1; k < machines.ranks_per_node; k *= 2) { sizes.push_back(k); }
    for (int n = 1; n < machines.nodes; n *= 2) { sizes.push_back(n * machines.ranks_per_node); }
    sizes.push_back(machines.ranks());
    return sizes;
}

/// Errors  usage_error unless sizes ascend and each is of ranks of a node or of whole nodes.
inline void validate_ring_sizes(std::span<const int> sizes, const cluster& machines) {
    if (sizes.empty()) { throw usage_error("ring_sizes: a ring has no size"); }
    int last = 0;
    for (const int k : sizes) {
        const bool whole = k <= machines.ranks() && k % machines.ranks_per_node == 0;
        if (k <= last || (k > machines.ranks_per_node && !whole)) {
            throw usage_error(
                formatted("ring_sizes: {} behind {}; on {} nodes of {} ranks sizes ascend, and rings are of "
                          "ranks of a node or of whole nodes",
                          k, last, machines.nodes, machines.ranks_per_node));
        }
        last = k;
    }
}

}  // namespace tutti::sequence::partition
