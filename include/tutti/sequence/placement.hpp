// placement: which ranks attend to which pieces of which sequences; what partitioners make and attention follows.
// Needs nothing. A sequence on a ring of G ranks is cut into 2G chunks, of which each rank holds one early and one late.
#pragma once

#include <cstdint>  // positions
#include <vector>   // rings, pieces

namespace tutti::sequence {

/// The farthest that a ring reaches: one rank, the ranks of a node, ranks of several nodes.
enum class zone : unsigned char { local, node, world };

/// The ranks that share one sequence, in the order in which keys and values travel: ranks[i] sends to ranks[i + 1].
/// Chunk c of its s tokens is [floor(c s / 2G), floor((c + 1) s / 2G)) and may be empty; chunks i and 2G - 1 - i belong
/// to ranks[i].
struct ring {
    int sequence;
    zone where;
    std::vector<int> ranks;
    friend bool operator==(const ring&, const ring&) = default;
};

/// Tokens [begin, end) of a sequence.
struct piece {
    int sequence;
    std::int64_t begin;
    std::int64_t end;
    friend bool operator==(const piece&, const piece&) = default;
};

struct cluster {
    int nodes;
    int ranks_per_node;
    friend bool operator==(const cluster&, const cluster&) = default;
};

/// Where the sequences of one batch are, the same on all ranks.
///
/// rings   in one total order: zone world, node, local; then sequence.
/// pieces  of each rank, in the order of its memory: for each of its rings, in that order, its chunk i, then 2G - 1 - i.
struct placement {
    cluster machines;
    std::vector<std::int64_t> lengths;  ///< tokens of each sequence
    std::vector<ring> rings;
    std::vector<std::vector<piece>> pieces;
    friend bool operator==(const placement&, const placement&) = default;
};

}  // namespace tutti::sequence
