// placement: where the tokens of a batch of sequences live: which ranks share a sequence, and what each of them holds.
// Needs comm/topology, core/state for the hash. Pure host code: every rank makes the same placement from the lengths.
// Source: chunks i and 2G - 1 - i of a sequence on one rank, as in the Llama 3 report (arXiv 2407.21783, 3.3.2) and in
// TransformerEngine; zones as in Zeppelin (arXiv 2509.21841). Boundaries that need no padding are ours.
#pragma once

#include <algorithm>    // sort
#include <concepts>     // partitioner
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <limits>       // no capacity
#include <span>         // lengths
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // rings, pieces

#include <tutti/comm/topology.hpp>  // topology
#include <tutti/core/error.hpp>     // usage_error
#include <tutti/core/state.hpp>     // hash_bytes
#include <tutti/core/text.hpp>      // formatted
#include <tutti/core/view.hpp>      // bytes to hash

namespace tutti::sequence {

/// The farthest that a ring reaches.
enum class zone : unsigned char {
    local,  ///< one rank: attention needs nobody else
    node,   ///< some ranks of one node
    world   ///< all ranks of several nodes
};

[[nodiscard]] constexpr std::string_view name_of(zone z) noexcept {
    switch (z) {
    case zone::local: return "local";
    case zone::node: return "node";
    case zone::world: return "world";
    }
    return "unknown";
}

/// The ranks that share one sequence, in the order in which keys and values travel; ranks of a node are neighbors.
/// Of the sequence's 2G chunks, chunk i and chunk 2G - 1 - i belong to ranks[i], so that each does the same work.
struct ring {
    int sequence = 0;
    zone where = zone::local;
    std::vector<int> ranks{};
    friend bool operator==(const ring&, const ring&) = default;
};

/// Tokens [begin, end) of a sequence.
struct piece {
    int sequence = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    [[nodiscard]] constexpr std::int64_t size() const noexcept { return end - begin; }
    friend bool operator==(const piece&, const piece&) = default;
};

/// Ranks 0 ... ranks_per_node - 1 are on node 0, the next as many on node 1, and so on.
struct cluster {
    int nodes = 1;
    int ranks_per_node = 1;
    [[nodiscard]] constexpr int ranks() const noexcept { return nodes * ranks_per_node; }
    [[nodiscard]] constexpr int node_of(int rank) const noexcept { return rank / ranks_per_node; }
    friend bool operator==(const cluster&, const cluster&) = default;
};

/// The cluster of a topology. Errors: usage_error when nodes have different numbers of ranks, or not successive ones.
[[nodiscard]] inline cluster cluster_of(const comm::topology& t) {
    const cluster c{t.nodes(), t.largest_node()};
    for (int r = 0; r < t.ranks(); ++r) {
        if (c.ranks() != t.ranks() || t.node_of(r) != c.node_of(r)) {
            throw usage_error(
                formatted("placement: rank {} is on node {}; sequences are placed on nodes of equal size, "
                          "the first of which has the first ranks, and so on",
                          r, t.node_of(r)));
        }
    }
    return c;
}

/// Where the sequences of one batch are.
///
/// rings   one a sequence, in one total order, the same on all ranks: zone world, then node, then local, each by
///         sequence. Ranks that run their rings in this order cannot wait for each other in a circle. Empty where
///         attention gathers all keys and values instead (partition::llama_all_gather).
/// pieces  of each rank, in the order of its memory: for each of its rings, in that order, chunk i, then chunk
///         2G - 1 - i, also where they are empty. A token's position in its sequence is that in its piece plus `begin`.
struct placement {
    cluster machines{};
    std::vector<std::int64_t> lengths{};  ///< tokens of each sequence
    std::vector<ring> rings{};
    std::vector<std::vector<piece>> pieces{};
    friend bool operator==(const placement&, const placement&) = default;
};

/// Tokens a rank may hold, where it does not matter.
inline constexpr std::int64_t no_capacity = std::numeric_limits<std::int64_t>::max();

/// A rule that places sequences: given the lengths, the machines, and the tokens that a rank can hold.
template <class P>
concept partitioner = requires(const P& p, std::span<const std::int64_t> lengths, const cluster& machines,
                               std::int64_t capacity) {
    { p(lengths, machines, capacity) } -> std::same_as<placement>;
};

/// floor(chunk * length / chunks), for any length: nothing is multiplied that could overflow.
[[nodiscard]] constexpr std::int64_t chunk_begin(std::int64_t length, std::int64_t chunk,
                                                 std::int64_t chunks) noexcept {
    return length / chunks * chunk + length % chunks * chunk / chunks;
}

/// Chunk `chunk` of the 2 * ring_size chunks of a sequence. Empty ones occur where the sequence is shorter than that.
[[nodiscard]] constexpr piece chunk_of(int sequence, std::int64_t length, int chunk, int ring_size) noexcept {
    const std::int64_t chunks = 2 * std::int64_t{ring_size};
    return {sequence, chunk_begin(length, chunk, chunks), chunk_begin(length, chunk + 1, chunks)};
}

/// Tokens of the two chunks at a position of a ring.
[[nodiscard]] constexpr std::int64_t tokens_at(std::int64_t length, int ring_size, int position) noexcept {
    return chunk_of(0, length, position, ring_size).size() +
           chunk_of(0, length, 2 * ring_size - 1 - position, ring_size).size();
}

/// No position of a ring gets more tokens than this.
[[nodiscard]] constexpr std::int64_t most_tokens(std::int64_t length, int ring_size) noexcept {
    if (ring_size == 1) { return length; }
    const std::int64_t chunks = 2 * std::int64_t{ring_size};
    return 2 * (length / chunks + (length % chunks != 0 ? 1 : 0));
}

/// Tokens of all pieces together.
[[nodiscard]] inline std::int64_t tokens_of(std::span<const piece> pieces) noexcept {
    std::int64_t tokens = 0;
    for (const piece& p : pieces) { tokens += p.size(); }
    return tokens;
}

/// Pairs of a query in `p` and a key that it sees: the work of causal attention. Exact below 2^53.
[[nodiscard]] constexpr double pairs_of(const piece& p) noexcept {
    return static_cast<double>(p.size()) * (static_cast<double>(p.begin) + static_cast<double>(p.end) + 1) / 2;
}

/// The smallest zone that has all these ranks.
[[nodiscard]] inline zone zone_of(const cluster& machines, std::span<const int> ranks) noexcept {
    if (ranks.size() == 1) { return zone::local; }
    for (const int r : ranks) {
        if (machines.node_of(r) != machines.node_of(ranks.front())) { return zone::world; }
    }
    return zone::node;
}

/// The order in which all ranks run rings: the farthest first, since their keys and values are the longest under way.
[[nodiscard]] constexpr bool runs_before(const ring& a, const ring& b) noexcept {
    return a.where != b.where ? a.where > b.where : a.sequence < b.sequence;
}

/// A placement from its rings: brings them into order and gives each rank its two chunks of each of its rings.
/// Cost  a sort of the rings, and a step for each rank of each ring.
[[nodiscard]] inline placement assembled(const cluster& machines, std::span<const std::int64_t> lengths,
                                         std::vector<ring> rings) {
    placement p{machines, {lengths.begin(), lengths.end()}, std::move(rings), {}};
    std::sort(p.rings.begin(), p.rings.end(), runs_before);
    p.pieces.resize(static_cast<std::size_t>(machines.ranks()));
    for (const ring& r : p.rings) {
        const int size = static_cast<int>(r.ranks.size());
        for (std::size_t i = 0; i < r.ranks.size(); ++i) {
            auto& pieces = p.pieces[static_cast<std::size_t>(r.ranks[i])];
            const std::int64_t length = p.lengths[static_cast<std::size_t>(r.sequence)];
            const int position = static_cast<int>(i);
            pieces.push_back(chunk_of(r.sequence, length, position, size));
            pieces.push_back(chunk_of(r.sequence, length, 2 * size - 1 - position, size));
        }
    }
    return p;
}

/// All that a placement says, as one number: for `agree`, so that no rank starts on a plan of its own.
/// Determinism  of the contents alone.
[[nodiscard]] inline std::uint64_t hash_of(const placement& p) {
    std::vector<std::int64_t> words{p.machines.nodes, p.machines.ranks_per_node};
    const auto count = [&](std::size_t n) { words.push_back(static_cast<std::int64_t>(n)); };
    count(p.lengths.size());
    words.insert(words.end(), p.lengths.begin(), p.lengths.end());
    count(p.rings.size());
    for (const ring& r : p.rings) {
        words.push_back(r.sequence);
        words.push_back(static_cast<std::int64_t>(r.where));
        count(r.ranks.size());
        words.insert(words.end(), r.ranks.begin(), r.ranks.end());
    }
    count(p.pieces.size());
    for (const auto& pieces : p.pieces) {
        count(pieces.size());
        for (const piece& q : pieces) { words.insert(words.end(), {q.sequence, q.begin, q.end}); }
    }
    return hash_bytes(as_bytes(view<const std::int64_t>(words.data(), words.size())));
}

namespace detail {
// What every partitioner demands of its arguments; returns the sum of the lengths.
inline std::int64_t expect_placeable(std::string_view who, std::span<const std::int64_t> lengths,
                                     const cluster& machines, std::int64_t capacity) {
    if (machines.nodes < 1 || machines.ranks_per_node < 1 ||
        machines.nodes > std::numeric_limits<int>::max() / 4 / machines.ranks_per_node) {
        throw usage_error(
            formatted("{}: {} nodes of {} ranks are no cluster", who, machines.nodes, machines.ranks_per_node));
    }
    if (capacity < 1) { throw usage_error(formatted("{}: a capacity of {} tokens a rank", who, capacity)); }
    if (lengths.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
        throw usage_error(formatted("{}: {} sequences are too many", who, lengths.size()));
    }
    std::int64_t total = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] < 0) { throw usage_error(formatted("{}: sequence {} has {} tokens", who, i, lengths[i])); }
        // Half the range: twice a chunk, rounded up, still fits.
        if (lengths[i] > no_capacity / 2 - total) {
            throw usage_error(formatted("{}: up to sequence {} the tokens are too many to count", who, i));
        }
        total += lengths[i];
    }
    return total;
}
}  // namespace detail

}  // namespace tutti::sequence
