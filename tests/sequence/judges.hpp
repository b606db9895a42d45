// Judges of placements that share no code with the library: every token looked up, every pair of query and key counted.
// Needs sequence/placement for its types, doctest for what it finds.
#pragma once

#include <algorithm>    // max
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <span>         // lengths
#include <string_view>  // corpora
#include <vector>       // owners

#include <doctest/doctest.h>  // checks

#include <tutti/sequence/lengths.hpp>    // batches
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::test {

namespace sequence = tutti::sequence;
using lengths_t = std::vector<std::int64_t>;

/// Batch `number` of a corpus.
inline lengths_t batch_of(std::string_view corpus, std::uint32_t number, std::int64_t tokens) {
    return drawn_lengths(sequence::length_distribution_named(corpus), {2024, 9, number}, tokens);
}

/// The rank of each token of each sequence; -1 where there is none. Finds a token that is on two.
inline std::vector<std::vector<int>> owners_of(const sequence::placement& p) {
    std::vector<std::vector<int>> owners;
    for (const std::int64_t s : p.lengths) { owners.emplace_back(static_cast<std::size_t>(s), -1); }
    bool twice = false;
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        for (const sequence::piece& q : p.pieces[rank]) {
            for (std::int64_t t = q.begin; t < q.end; ++t) {
                int& owner = owners.at(static_cast<std::size_t>(q.sequence)).at(static_cast<std::size_t>(t));
                twice = twice || owner != -1;
                owner = static_cast<int>(rank);
            }
        }
    }
    CHECK(!twice);
    return owners;
}

/// All promises of a placement with rings, each looked at by itself.
inline void expect_kept(const sequence::placement& p, std::int64_t capacity) {
    const auto owners = owners_of(p);
    std::vector<std::int64_t> tokens(p.pieces.size());
    bool as_said = p.rings.size() == p.lengths.size();
    std::vector<int> rings(p.lengths.size());
    for (std::size_t i = 0; i < p.rings.size(); ++i) {
        const sequence::ring& r = p.rings[i];
        const auto size = static_cast<std::int64_t>(r.ranks.size());
        const std::int64_t length = p.lengths.at(static_cast<std::size_t>(r.sequence));
        ++rings[static_cast<std::size_t>(r.sequence)];
        std::vector<int> of_node(static_cast<std::size_t>(p.machines.nodes));
        for (const int rank : r.ranks) {
            as_said = as_said && std::count(r.ranks.begin(), r.ranks.end(), rank) == 1;
            ++of_node.at(static_cast<std::size_t>(rank / p.machines.ranks_per_node));
        }
        const auto nodes = std::count_if(of_node.begin(), of_node.end(), [](int n) { return n > 0; });
        using sequence::zone;
        as_said = as_said && r.where == (size == 1 ? zone::local : nodes == 1 ? zone::node : zone::world);
        if (nodes > 1) {
            for (const int n : of_node) { as_said = as_said && (n == 0 || n == p.machines.ranks_per_node); }
        }
        // Token t is in the chunk c with floor(c length / 2 size) <= t.
        for (std::int64_t c = 0; c < 2 * size; ++c) {
            const std::int64_t position = c < size ? c : 2 * size - 1 - c;
            for (std::int64_t t = c * length / (2 * size); t < (c + 1) * length / (2 * size); ++t) {
                const int rank = r.ranks[static_cast<std::size_t>(position)];
                ++tokens[static_cast<std::size_t>(rank)];
                as_said = as_said && owners[static_cast<std::size_t>(r.sequence)][static_cast<std::size_t>(t)] == rank;
            }
        }
        if (i > 0) {
            const sequence::ring& before = p.rings[i - 1];
            as_said = as_said && (before.where > r.where || (before.where == r.where && before.sequence < r.sequence));
        }
    }
    for (const int n : rings) { as_said = as_said && n == 1; }
    for (const std::int64_t n : tokens) { as_said = as_said && n <= capacity; }
    CHECK(as_said);
}

/// The rank with the most pairs of a query and a key it sees, over the average.
inline double imbalance_by_pairs(const sequence::placement& p) {
    double all = 0;
    double most = 0;
    for (const auto& pieces : p.pieces) {
        std::uint64_t pairs = 0;
        for (const sequence::piece& q : pieces) {
            const auto begin = static_cast<std::uint64_t>(q.begin);
            const auto end = static_cast<std::uint64_t>(q.end);
            pairs += end * (end + 1) / 2 - begin * (begin + 1) / 2;
        }
        all += static_cast<double>(pairs);
        most = std::max(most, static_cast<double>(pairs));
    }
    return most / (all / static_cast<double>(p.pieces.size()));
}

/// The rank with the most work over the average, a ring's ranks having even shares of its cost.
template <class Cost> double imbalance_by_shares(const sequence::placement& p, const Cost& cost) {
    std::vector<double> load(p.pieces.size());
    double all = 0;
    for (const sequence::ring& r : p.rings) {
        const double w = cost(p.lengths[static_cast<std::size_t>(r.sequence)]);
        all += w;
        for (const int rank : r.ranks) {
            load[static_cast<std::size_t>(rank)] += w / static_cast<double>(r.ranks.size());
        }
    }
    return *std::max_element(load.begin(), load.end()) / (all / static_cast<double>(load.size()));
}

}  // namespace tutti::test
