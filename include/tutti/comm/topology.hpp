// topology: which ranks share a node, which NIC a rank uses, and how fast the links inside and between nodes are.
// Needs comm/communicator for `discover` alone. One rank is one worker: a GPU, or a process or thread on a CPU.
#pragma once

#include <algorithm>    // find, max, max_element, min_element
#include <array>        // host name
#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <limits>       // a link that costs nothing
#include <span>         // ranks of a node
#include <string>       // host name
#include <string_view>  // host name
#include <utility>      // move
#include <vector>       // tables by rank

#include <unistd.h>  // gethostname

#include <tutti/comm/communicator.hpp>  // can_gather_control
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/core/text.hpp>          // formatted

namespace tutti::comm {

/// A full-duplex link: b bytes take latency + b / bandwidth in each direction. The default costs nothing.
struct link {
    double latency_seconds = 0;
    double bytes_per_second = std::numeric_limits<double>::infinity();
    friend constexpr bool operator==(const link&, const link&) = default;
};

/// This machine's host name. Errors: backend_error when the system does not tell.
[[nodiscard]] inline std::string host_name() {
    std::array<char, 256> text{};
    if (::gethostname(text.data(), text.size() - 1) != 0) {
        throw backend_error("topology: the host name is not known");
    }
    return text.data();
}

/// Ranks on nodes.
///
/// Semantics  an immutable value. Nodes are numbered 0, 1, ... and so are the NICs of each node; every node has the
///            same number of NICs. A node's ranks are in ascending order and its leader is the lowest.
/// Units      seconds, bytes per second.
/// Cost       queries are table look-ups; construction is linear in ranks + nodes * NICs.
/// Errors     usage_error when a table or a link makes no sense, or a rank or node does not exist.
class topology {
public:
    /// What a topology is made from.
    struct layout {
        std::vector<int> node{};  ///< by rank
        std::vector<int> nic{};   ///< by rank; empty: a node's ranks are dealt to its NICs in blocks
        int nics_per_node = 1;
        comm::link inside{};   ///< between two ranks of a node
        comm::link between{};  ///< through one NIC
    };

    explicit topology(layout l) : layout_(std::move(l)) {
        const std::size_t n = layout_.node.size();
        expect(n > 0, [] { return std::string("a topology has at least one rank"); });
        expect(layout_.nics_per_node > 0, [&] { return formatted("{} NICs per node", layout_.nics_per_node); });
        expect(layout_.nic.empty() || layout_.nic.size() == n,
               [&] { return formatted("NICs of {} ranks are given for {} ranks", layout_.nic.size(), n); });
        expect_link(layout_.inside, "inside a node");
        expect_link(layout_.between, "between nodes");
        group_by_node();
        assign_nics();
    }

    /// All ranks on one node.
    [[nodiscard]] static topology one_node(int ranks, comm::link inside = {}) { return uniform(1, ranks, inside); }
    /// Ranks 0 ... ranks_per_node - 1 on node 0, the next as many on node 1, and so on.
    [[nodiscard]] static topology uniform(int nodes, int ranks_per_node, comm::link inside = {},
                                          comm::link between = {}, int nics_per_node = 1) {
        expect(nodes > 0 && ranks_per_node > 0,
               [&] { return formatted("{} nodes of {} ranks; both must be positive", nodes, ranks_per_node); });
        layout l{{}, {}, nics_per_node, inside, between};
        l.node.reserve(static_cast<std::size_t>(nodes) * static_cast<std::size_t>(ranks_per_node));
        for (int node = 0; node < nodes; ++node) {
            l.node.insert(l.node.end(), static_cast<std::size_t>(ranks_per_node), node);
        }
        return topology(std::move(l));
    }
    /// Ranks that report the same host share a node; nodes are numbered by their lowest rank.
    ///
    /// Semantics  collective; all ranks get the same topology, given the same links. Containers usually have host names
    ///            of their own: pass a `host` that the containers of one machine share.
    /// Cost       one control gather.
    template <can_gather_control C>
    [[nodiscard]] static topology discover(C& c, comm::link inside = {}, comm::link between = {}, int nics_per_node = 1,
                                           std::string_view host = {}) {
        const std::string own = host.empty() ? host_name() : std::string(host);
        const auto bytes = as_bytes(view(own.data(), own.size()));
        const auto hosts = c.gather_control({hash_bytes(bytes), hash_bytes(bytes, own.size()), own.size(), 0});
        std::vector<control_record> seen;
        layout l{{}, {}, nics_per_node, inside, between};
        for (const control_record& h : hosts) {
            const auto at = std::find(seen.begin(), seen.end(), h);
            l.node.push_back(static_cast<int>(at - seen.begin()));
            if (at == seen.end()) { seen.push_back(h); }
        }
        return topology(std::move(l));
    }

    [[nodiscard]] int ranks() const noexcept { return static_cast<int>(layout_.node.size()); }
    [[nodiscard]] int nodes() const noexcept { return static_cast<int>(first_.size()) - 1; }
    [[nodiscard]] int nics_per_node() const noexcept { return layout_.nics_per_node; }
    [[nodiscard]] int node_of(int rank) const { return layout_.node[at_rank(rank)]; }
    /// Index of `rank` among the ranks of its node.
    [[nodiscard]] int local_rank(int rank) const { return local_[at_rank(rank)]; }
    /// The NIC of its node that `rank` uses.
    [[nodiscard]] int nic_of(int rank) const { return layout_.nic[at_rank(rank)]; }
    [[nodiscard]] bool same_node(int a, int b) const { return node_of(a) == node_of(b); }
    [[nodiscard]] std::span<const int> ranks_on(int node) const {
        expect(node >= 0 && node < nodes(), [&] { return formatted("node {} is not one of {} nodes", node, nodes()); });
        const auto n = static_cast<std::size_t>(node);
        return std::span(by_node_).subspan(first_[n], first_[n + 1] - first_[n]);
    }
    [[nodiscard]] int leader(int node) const { return ranks_on(node).front(); }

    [[nodiscard]] const comm::link& inside() const noexcept { return layout_.inside; }
    [[nodiscard]] const comm::link& between() const noexcept { return layout_.between; }
    /// The link from a to b, as if nobody else used it. A rank reaches itself for nothing.
    [[nodiscard]] comm::link link(int a, int b) const {
        if (!same_node(a, b)) { return layout_.between; }
        return a == b ? comm::link{} : layout_.inside;
    }

    [[nodiscard]] int largest_node() const noexcept { return largest_; }
    [[nodiscard]] int smallest_node() const noexcept { return smallest_; }
    /// Several nodes of several ranks each, all as many: there is something to do inside nodes, and between them.
    [[nodiscard]] bool has_two_levels() const noexcept { return nodes() > 1 && smallest_ > 1 && smallest_ == largest_; }
    /// The most ranks that share one NIC.
    [[nodiscard]] int ranks_per_nic() const noexcept { return ranks_per_nic_; }

    /// The same machines seen by some of the ranks: member i becomes rank i and keeps its node, NIC and links.
    [[nodiscard]] topology subset(std::span<const int> members) const {
        layout l{{}, {}, layout_.nics_per_node, layout_.inside, layout_.between};
        std::vector<int> renumbered(static_cast<std::size_t>(nodes()), -1);
        int used = 0;
        for (const int m : members) {
            int& node = renumbered[static_cast<std::size_t>(node_of(m))];
            if (node < 0) { node = used++; }
            l.node.push_back(node);
            l.nic.push_back(nic_of(m));
        }
        return topology(std::move(l));
    }

    friend bool operator==(const topology& a, const topology& b) {
        return a.layout_.node == b.layout_.node && a.layout_.nic == b.layout_.nic &&
               a.layout_.nics_per_node == b.layout_.nics_per_node && a.layout_.inside == b.layout_.inside &&
               a.layout_.between == b.layout_.between;
    }

private:
    layout layout_;  // complete: `nic` is filled in
    std::vector<int> local_;
    std::vector<int> by_node_;        // ranks, node after node
    std::vector<std::size_t> first_;  // of a node in by_node_, and the end
    int largest_ = 0;
    int smallest_ = 0;
    int ranks_per_nic_ = 0;

    template <class Text> static void expect(bool holds, Text text) {
        if (!holds) { throw usage_error("topology: " + text()); }
    }
    static void expect_link(const comm::link& l, std::string_view which) {
        expect(std::isfinite(l.latency_seconds) && l.latency_seconds >= 0,
               [&] { return formatted("latency {} s {} is not a finite number >= 0", l.latency_seconds, which); });
        expect(l.bytes_per_second > 0,
               [&] { return formatted("bandwidth {} B/s {} is not positive", l.bytes_per_second, which); });
    }
    [[nodiscard]] std::size_t at_rank(int rank) const {
        expect(rank >= 0 && rank < ranks(), [&] { return formatted("rank {} is not one of {} ranks", rank, ranks()); });
        return static_cast<std::size_t>(rank);
    }
    void group_by_node() {
        std::vector<std::size_t> size;
        for (std::size_t r = 0; r < layout_.node.size(); ++r) {
            const int node = layout_.node[r];
            expect(node >= 0 && node < ranks(), [&] {
                return formatted("rank {} is on node {}; {} ranks have at most as many nodes", r, node, ranks());
            });
            const auto index = static_cast<std::size_t>(node);
            if (size.size() <= index) { size.resize(index + 1, 0); }
            local_.push_back(static_cast<int>(size[index]++));
        }
        first_.push_back(0);
        for (std::size_t node = 0; node < size.size(); ++node) {
            expect(size[node] > 0, [&] { return formatted("node {} of {} has no rank", node, size.size()); });
            first_.push_back(first_.back() + size[node]);
        }
        by_node_.resize(layout_.node.size());
        for (std::size_t r = 0; r < layout_.node.size(); ++r) {
            by_node_[first_[static_cast<std::size_t>(layout_.node[r])] + static_cast<std::size_t>(local_[r])] =
                static_cast<int>(r);
        }
        largest_ = static_cast<int>(*std::max_element(size.begin(), size.end()));
        smallest_ = static_cast<int>(*std::min_element(size.begin(), size.end()));
    }
    void assign_nics() {
        const auto nics = static_cast<std::size_t>(layout_.nics_per_node);
        if (layout_.nic.empty()) {
            for (int r = 0; r < ranks(); ++r) {
                const auto local = static_cast<std::size_t>(local_rank(r));
                layout_.nic.push_back(static_cast<int>(local * nics / ranks_on(node_of(r)).size()));
            }
        }
        std::vector<int> users(nics * static_cast<std::size_t>(nodes()), 0);
        for (int r = 0; r < ranks(); ++r) {
            const int nic = nic_of(r);
            expect(nic >= 0 && nic < layout_.nics_per_node,
                   [&] { return formatted("rank {} uses NIC {} of {}", r, nic, layout_.nics_per_node); });
            int& sharing = users[static_cast<std::size_t>(node_of(r)) * nics + static_cast<std::size_t>(nic)];
            ranks_per_nic_ = std::max(ranks_per_nic_, ++sharing);
        }
    }
};

}  // namespace tutti::comm
