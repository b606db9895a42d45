// whole: every sequence on one rank, as in plain data parallelism. Nothing is sent; the longest sequence sets the pace.
// Needs sequence/packing.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // tokens
#include <span>     // lengths
#include <utility>  // move
#include <vector>   // weights

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/packing.hpp>    // packed_longest_first
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence::partition {

/// What ranks get evenly.
enum class even_in : unsigned char {
    tokens,  ///< linear modules
    squares  ///< attention
};

/// Semantics    sequences go, the longest first, to the rank with the least tokens, or the least squares of lengths,
///              that has room.
/// Determinism  of the arguments alone.
/// Cost         sequences * ranks.
/// Errors       usage_error when lengths make no sense, or a sequence finds no rank with room.
class whole {
    even_in even_;

public:
    explicit whole(even_in even = even_in::squares) : even_(even) {}

    [[nodiscard]] placement operator()(std::span<const std::int64_t> lengths, const cluster& machines,
                                       std::int64_t capacity = no_capacity) const {
        (void)sequence::detail::expect_placeable("whole", lengths, machines, capacity);
        std::vector<double> weights;
        for (const std::int64_t s : lengths) {
            const auto tokens = static_cast<double>(s);
            weights.push_back(even_ == even_in::squares ? tokens * tokens : tokens);
        }
        const auto ranks = packed_longest_first(weights, lengths, machines.ranks(), capacity);
        std::vector<ring> rings;
        for (std::size_t s = 0; s < ranks.size(); ++s) {
            if (ranks[s] == no_bin) {
                throw usage_error(formatted("whole: sequence {} of {} tokens finds no rank with room; {} hold {} each",
                                            s, lengths[s], machines.ranks(), capacity));
            }
            rings.push_back({static_cast<int>(s), zone::local, {ranks[s]}});
        }
        return assembled(machines, lengths, std::move(rings));
    }
};

}  // namespace tutti::sequence::partition
