// hybrid: just as many ranks a sequence as its tokens need, in aligned groups of powers of two.
// Needs partition/ring_sizes. As hybrid data parallelism does: groups by capacity, not by work.
// Source: ByteScale (arXiv 2502.21231) and the hybrid context parallelism of Megatron-LM, for one batch on all ranks.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <span>       // lengths
#include <utility>    // move
#include <vector>     // loads

#include <tutti/core/error.hpp>                     // usage_error
#include <tutti/core/text.hpp>                      // formatted
#include <tutti/sequence/packing.hpp>               // heaviest_first
#include <tutti/sequence/partition/ring_sizes.hpp>  // powers_of_two
#include <tutti/sequence/placement.hpp>             // placement

namespace tutti::sequence::partition {

/// Semantics    a sequence takes the least power of two of ranks at which each has at most `tokens_per_rank` of it (the
///              capacity, where none is given). Sequences go, the longest first, to the group of that size of which the
///              fullest rank has the least work (squares of lengths over ranks) and all have room; where none has room,
///              to the next larger size.
/// Determinism  of the arguments alone; ties go to the lower ranks.
/// Cost         sequences * ranks * the number of sizes.
/// Errors       usage_error when lengths or tokens_per_rank make no sense, or a sequence finds no group with room.
class hybrid {
    std::int64_t tokens_per_rank_;

public:
    explicit hybrid(std::int64_t tokens_per_rank = no_capacity) : tokens_per_rank_(tokens_per_rank) {
        if (tokens_per_rank < 1) { throw usage_error(formatted("hybrid: {} tokens a rank", tokens_per_rank)); }
    }

    [[nodiscard]] placement operator()(std::span<const std::int64_t> lengths, const cluster& machines,
                                       std::int64_t capacity = no_capacity) const {
        (void)sequence::detail::expect_placeable("hybrid", lengths, machines, capacity);
        const std::vector<int> sizes = powers_of_two(machines);
        const std::int64_t share = std::min(tokens_per_rank_, capacity);
        const auto ranks = static_cast<std::size_t>(machines.ranks());
        std::vector<double> work(ranks);
        std::vector<std::int64_t> tokens(ranks);
        std::vector<ring> rings;
        for (const std::size_t sequence : sequence::detail::heaviest_first(lengths)) {
            const std::int64_t length = lengths[sequence];
            std::size_t at = 0;
            while (at + 1 < sizes.size() && length / sizes[at] + (length % sizes[at] != 0 ? 1 : 0) > share) { ++at; }
            int first = -1;  // rank of the group
            for (; at < sizes.size() && first < 0; ++at) {
                double least = 0;
                for (int group = 0; group >= 0; group = next_group(group, sizes[at], machines)) {
                    double fullest = 0;
                    bool room = true;
                    for (int r = group; r < group + sizes[at]; ++r) {
                        const auto rank = static_cast<std::size_t>(r);
                        room = room && tokens[rank] <= capacity - most_tokens(length, sizes[at]);
                        fullest = std::max(fullest, work[rank]);
                    }
                    if (room && (first < 0 || fullest < least)) {
                        first = group;
                        least = fullest;
                    }
                }
            }
            if (first < 0) {
                throw usage_error(
                    formatted("hybrid: sequence {} of {} tokens finds no group of ranks with room; {} hold "
                              "{} each",
                              sequence, length, ranks, capacity));
            }
            const int size = sizes[at - 1];
            ring r{static_cast<int>(sequence), zone::local, {}};
            for (int i = 0; i < size; ++i) {
                r.ranks.push_back(first + i);
                const auto rank = static_cast<std::size_t>(first + i);
                work[rank] += static_cast<double>(length) * static_cast<double>(length) / size;
                tokens[rank] += tokens_at(length, size, i);
            }
            r.where = zone_of(machines, r.ranks);
            rings.push_back(std::move(r));
        }
        return assembled(machines, lengths, std::move(rings));
    }

private:
    // The next aligned group of `size` ranks inside one node, or of whole nodes; -1 behind the last.
    [[nodiscard]] static int next_group(int group, int size, const cluster& machines) noexcept {
        const int width = machines.ranks_per_node;
        int next = group + size;
        if (size < width && next % width + size > width) { next += width - next % width; }
        return next + size <= machines.ranks() ? next : -1;
    }
};

}  // namespace tutti::sequence::partition
