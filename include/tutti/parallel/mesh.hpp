// mesh: which rank does what in training of several dimensions, and the communicators along them.
// Needs comm/topology. Rank order: tensor fastest, then sequence, data, replicate, pipeline: neighbors exchange most.
#pragma once

#include <array>             // one entry a dimension
#include <cstddef>           // size_t
#include <cstdint>           // dimensions, hashes
#include <initializer_list>  // several dimensions
#include <string>            // descriptions
#include <string_view>       // names
#include <vector>            // ranks by position

#include <tutti/comm/communicator.hpp>  // communicator
#include <tutti/comm/topology.hpp>      // topology
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/core/text.hpp>          // formatted
#include <tutti/core/view.hpp>          // bytes to hash

namespace tutti::parallel {

/// What ranks can differ in, from the one that varies slowest with the rank to the one that varies fastest.
///
///   pipeline   other layers of the same model           replicate  the same shard of another replica (or CO2 group)
///   data       other samples; ZeRO shards over it       sequence   other tokens of the same samples
///   tensor     other parts of the same layers; one or two collectives a layer each way
enum class dimension : std::uint8_t { pipeline, replicate, data, sequence, tensor };

[[nodiscard]] constexpr std::string_view name_of(dimension d) noexcept {
    constexpr std::string_view names[] = {"pipeline", "replicate", "data", "sequence", "tensor"};
    return names[static_cast<std::size_t>(d)];
}

/// Ranks along each dimension; those not named are 1.
struct mesh_sizes {
    int pipeline = 1;
    int replicate = 1;
    int data = 1;
    int sequence = 1;
    int tensor = 1;
    friend constexpr bool operator==(const mesh_sizes&, const mesh_sizes&) = default;
};

/// Ranks on a grid.
///
/// Semantics  an immutable value; all ranks make the same. Position (p, r, d, s, t) of the grid has the number
///            (((p * replicate + r) * data + d) * sequence + s) * tensor + t. Without a topology that is its rank. With
///            one, the ranks of a node have consecutive numbers, nodes in the order of their lowest ranks, so that a
///            tensor group is inside a node, or made of whole nodes, however ranks were dealt to them.
/// Cost       construction is linear in ranks; queries are look-ups.
/// Errors     usage_error when a size is not positive, sizes do not multiply to the ranks, a tensor group and the ranks
///            of a node do not divide one another, or a tensor group would take a part of a node and ranks of others.
/// Source     rank order as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, section 3).
class mesh {
public:
    static constexpr std::size_t dimensions = 5;
    using coordinates = std::array<int, dimensions>;

    mesh(mesh_sizes sizes, int ranks) : extent_(array_of(sizes)) {
        expect_product(ranks);
        for (int r = 0; r < ranks; ++r) { rank_at_.push_back(r); }
        number_of_ = rank_at_;
    }
    mesh(mesh_sizes sizes, const comm::topology& nodes) : extent_(array_of(sizes)) {
        expect_product(nodes.ranks());
        number_of_.resize(static_cast<std::size_t>(nodes.ranks()));
        std::vector<bool> placed(static_cast<std::size_t>(nodes.nodes()), false);
        for (int r = 0; r < nodes.ranks(); ++r) {
            const int node = nodes.node_of(r);
            if (placed[static_cast<std::size_t>(node)]) { continue; }
            placed[static_cast<std::size_t>(node)] = true;
            const auto on_node = nodes.ranks_on(node);
            const int count = static_cast<int>(on_node.size());
            const int tensor = size(dimension::tensor);
            if (count % tensor != 0 && tensor % count != 0) {
                throw usage_error(formatted("mesh: tensor groups of {} ranks and the {} ranks of node {} do not divide "
                                            "one another",
                                            tensor, count, node));
            }
            const int at = static_cast<int>(rank_at_.size()) % tensor;  // in the group that this node goes on with
            if (at != 0 && at + count > tensor) {
                throw usage_error(formatted("mesh: a tensor group of {} ranks has {} on nodes before and would take a "
                                            "part of the {} of node {}; let nodes that fill a group follow one another",
                                            tensor, at, count, node));
            }
            for (const int member : on_node) {
                number_of_[static_cast<std::size_t>(member)] = static_cast<int>(rank_at_.size());
                rank_at_.push_back(member);
            }
        }
    }

    [[nodiscard]] int ranks() const noexcept { return static_cast<int>(rank_at_.size()); }
    [[nodiscard]] int size(dimension d) const noexcept { return extent_[static_cast<std::size_t>(d)]; }
    /// Of `rank`, in the order of the enumeration.
    [[nodiscard]] coordinates position(int rank) const {
        int number = number_of_[at_rank(rank)];
        coordinates at{};
        for (std::size_t d = dimensions; d-- > 0;) {
            at[d] = number % extent_[d];
            number /= extent_[d];
        }
        return at;
    }
    [[nodiscard]] int coordinate(int rank, dimension d) const { return position(rank)[static_cast<std::size_t>(d)]; }
    [[nodiscard]] int rank_at(const coordinates& at) const {
        int number = 0;
        for (std::size_t d = 0; d < dimensions; ++d) {
            if (at[d] < 0 || at[d] >= extent_[d]) {
                throw usage_error(
                    formatted("mesh: {} {} of {}", name_of(static_cast<dimension>(d)), at[d], extent_[d]));
            }
            number = number * extent_[d] + at[d];
        }
        return rank_at_[static_cast<std::size_t>(number)];
    }

    /// By rank, the color of its group along `along`: ranks that differ in nothing else have the same.
    ///
    /// Semantics  a split keeps the order of ranks; so that a rank's place in its group is its coordinate (of several
    ///            dimensions: the earlier one of the enumeration slower), the order of positions must agree with it.
    /// Errors     usage_error when ranks were dealt to nodes so that it does not, or a dimension is named twice.
    [[nodiscard]] std::vector<int> colors(std::initializer_list<dimension> along) const {
        std::array<bool, dimensions> varies{};
        for (const dimension d : along) {
            bool& chosen = varies[static_cast<std::size_t>(d)];
            if (chosen) { throw usage_error(formatted("mesh: the dimension {} is named twice", name_of(d))); }
            chosen = true;
        }
        std::vector<int> color(rank_at_.size());
        std::vector<int> last(rank_at_.size(), -1);  // by color: the rank before
        for (const int rank : rank_at_) {            // in the order of positions
            coordinates first = position(rank);
            for (std::size_t d = 0; d < dimensions; ++d) { first[d] = varies[d] ? 0 : first[d]; }
            const int group = rank_at(first);  // named after its first rank
            int& before = last[static_cast<std::size_t>(group)];
            if (before > rank) {
                throw usage_error(formatted("mesh: in a group of {}, rank {} would come behind rank {}; start ranks "
                                            "node by node",
                                            names_of(along), rank, before));
            }
            before = rank;
            color[static_cast<std::size_t>(rank)] = group;
        }
        return color;
    }

    /// "pipeline 2, data 4, tensor 8": what is not 1.
    [[nodiscard]] std::string describe() const {
        std::string text;
        for (std::size_t d = 0; d < dimensions; ++d) {
            if (extent_[d] == 1) { continue; }
            text += formatted("{}{} {}", text.empty() ? "" : ", ", name_of(static_cast<dimension>(d)), extent_[d]);
        }
        return text.empty() ? "one rank" : text;
    }
    /// The same on all ranks that may use it together.
    [[nodiscard]] std::uint64_t hash() const {
        return hash_bytes(as_bytes(view<const int>(rank_at_)),
                          hash_bytes(as_bytes(view<const int>(extent_.data(), dimensions))));
    }
    [[nodiscard]] static std::string names_of(std::initializer_list<dimension> along) {
        std::string text;
        for (const dimension d : along) { text += formatted("{}{}", text.empty() ? "" : "_", name_of(d)); }
        return text;
    }
    friend bool operator==(const mesh&, const mesh&) = default;

private:
    coordinates extent_;
    std::vector<int> rank_at_;    // by number of the position
    std::vector<int> number_of_;  // by rank

    static coordinates array_of(const mesh_sizes& s) { return {s.pipeline, s.replicate, s.data, s.sequence, s.tensor}; }
    void expect_product(int ranks) const {
        std::int64_t product = 1;
        for (std::size_t d = 0; d < dimensions; ++d) {
            if (extent_[d] < 1) {
                throw usage_error(formatted("mesh: size {} along {} is not positive", extent_[d],
                                            name_of(static_cast<dimension>(d))));
            }
            product = product > ranks ? product : product * extent_[d];  // larger is wrong however much larger
        }
        if (product != ranks) {
            throw usage_error(formatted("mesh: {} does not multiply to {} ranks", describe(), ranks));
        }
    }
    [[nodiscard]] std::size_t at_rank(int rank) const {
        if (rank < 0 || rank >= ranks()) {
            throw usage_error(formatted("mesh: rank {} is not one of {} ranks", rank, ranks()));
        }
        return static_cast<std::size_t>(rank);
    }
};

/// This rank's group along one dimension, or along several taken together.
///
/// Semantics  collective, with the same mesh on all ranks. The rank there is the coordinate.
/// Cost       one agreement and one split.
/// Errors     usage_error when the mesh is of another number of ranks; mismatch_error when ranks have other meshes.
template <communicator C> [[nodiscard]] C split_along(C& world, const mesh& m, std::initializer_list<dimension> along) {
    if (world.size() != m.ranks()) {
        throw usage_error(
            formatted("mesh: {} ranks on a communicator of {}, '{}'", m.ranks(), world.size(), world.name()));
    }
    const std::string name = mesh::names_of(along);
    world.agree(hash_bytes(as_bytes(view<const char>(name)), m.hash()), "mesh and dimension");
    return *world.split(m.colors(along), name.empty() ? "alone" : name);
}
template <communicator C> [[nodiscard]] C split_along(C& world, const mesh& m, dimension d) {
    return split_along(world, m, {d});
}

}  // namespace tutti::parallel
