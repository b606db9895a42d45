// node_groups: the ranks of a communicator by node: those of one node, and those of one place on all nodes.
// Needs comm/{communicator, topology}. For what works inside nodes in one way and between them in another.
#pragma once

#include <string>       // texts
#include <string_view>  // names
#include <vector>       // colors

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/comm/topology.hpp>      // nodes
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/text.hpp>          // formatted

namespace tutti::comm {

/// Refuses nodes that are not those of a communicator's ranks. Errors: usage_error that begins with `who`.
template <communicator C> void expect_nodes_of(const C& c, const topology& nodes, std::string_view who) {
    if (nodes.ranks() != c.size()) {
        throw usage_error(formatted("{}: nodes of {} ranks together, '{}' has {}", who, nodes.ranks(),
                                    std::string_view(c.name()), c.size()));
    }
}
/// Refuses nodes that do not have as many ranks each. Errors: likewise.
inline void expect_equal_nodes(const topology& nodes, std::string_view who) {
    if (nodes.smallest_node() != nodes.largest_node()) {
        throw usage_error(formatted("{}: nodes of {} to {} ranks; all must have as many", who, nodes.smallest_node(),
                                    nodes.largest_node()));
    }
}
/// Each rank's node, for descriptions: equal exactly where the nodes are.
[[nodiscard]] inline std::string list_of_nodes(const topology& nodes) {
    std::string list;
    for (int r = 0; r < nodes.ranks(); ++r) { list += formatted(" {}", nodes.node_of(r)); }
    return list;
}

/// The ranks of this rank's node, in their order: rank r of `c` is nodes.local_rank(r) there.
///
/// Semantics  collective, with the same nodes on all ranks, which are those of `c`.
/// Cost       one split.
template <communicator C> [[nodiscard]] C split_inside(C& c, const topology& nodes) {
    std::vector<int> node;
    for (int r = 0; r < nodes.ranks(); ++r) { node.push_back(nodes.node_of(r)); }
    return *c.split(node, "node");
}
/// The ranks that have this rank's place on their nodes, in their order. Otherwise likewise; where nodes are not of one
/// size, not every node is there.
template <communicator C> [[nodiscard]] C split_across(C& c, const topology& nodes) {
    std::vector<int> place;
    for (int r = 0; r < nodes.ranks(); ++r) { place.push_back(nodes.local_rank(r)); }
    return *c.split(place, "place");
}

}  // namespace tutti::comm
