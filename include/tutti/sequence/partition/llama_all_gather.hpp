// llama_all_gather: the batch as one row of tokens, cut into 2D chunks of which each of D ranks has two, while keys and
// values are gathered by all. Even in tokens to the last one; work is even only as far as sequences are long.
// Needs sequence/placement.
// Source: context parallelism of the Llama 3 report, arXiv 2407.21783, section 3.3.2.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <span>       // lengths

#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence::partition {

/// Semantics    rank r has chunks r and 2D - 1 - r of all sequences behind each other. The placement has no rings:
///              every rank receives all keys and values, so this is for comparing, and for engines that gather.
/// Determinism  of the arguments alone.
/// Cost         sequences + ranks.
/// Errors       usage_error when lengths make no sense, or a chunk pair is more than the capacity.
struct llama_all_gather {
    [[nodiscard]] placement operator()(std::span<const std::int64_t> lengths, const cluster& machines,
                                       std::int64_t capacity = no_capacity) const {
        const std::int64_t total = sequence::detail::expect_placeable("llama_all_gather", lengths, machines, capacity);
        placement p{machines, {lengths.begin(), lengths.end()}, {}, {}};
        p.pieces.resize(static_cast<std::size_t>(machines.ranks()));
        const int ranks = machines.ranks();
        std::size_t s = 0;
        std::int64_t start = 0;  // of sequence s in the row
        for (int chunk = 0; chunk < 2 * ranks; ++chunk) {
            const piece c = chunk_of(0, total, chunk, ranks);
            const auto rank = static_cast<std::size_t>(std::min(chunk, 2 * ranks - 1 - chunk));
            for (std::int64_t at = c.begin; at < c.end;) {
                while (start + lengths[s] <= at) { start += lengths[s++]; }
                const std::int64_t end = std::min(c.end, start + lengths[s]);
                p.pieces[rank].push_back({static_cast<int>(s), at - start, end - start});
                at = end;
            }
        }
        for (std::size_t r = 0; r < p.pieces.size(); ++r) {
            if (tokens_of(p.pieces[r]) > capacity) {
                throw usage_error(formatted("llama_all_gather: rank {} gets {} tokens, its capacity is {}", r,
                                            tokens_of(p.pieces[r]), capacity));
            }
        }
        return p;
    }
};

}  // namespace tutti::sequence::partition
