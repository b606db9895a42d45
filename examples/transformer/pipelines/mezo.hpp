// Pipelines `mezo`, `zo2` and `distzo2`: fine-tuning by forward passes alone. No gradient, no optimizer state, no
// activations kept for them. Needs zeroth.
// Source: Malladi et al., arXiv 2305.17333; weights on the host: ZO2, arXiv 2503.12668; several ranks: DistZO2, arXiv
// 2507.03211.
#pragma once

#include <cstddef>      // shards
#include <cstdint>      // directions
#include <string_view>  // names

#include <tutti/zeroth/division.hpp>   // division
#include <tutti/zeroth/estimator.hpp>  // estimator

#include "options.hpp"

namespace transformer::pipelines {

/// A pipeline of forward passes has no strategy; it says how slopes are estimated and how ranks share that.
struct mezo {
    static constexpr std::string_view name = "mezo";
    static constexpr std::string_view summary =
        "fine-tuning by forward passes alone (MeZO); ranks share them as --zo-parallel says";
    static constexpr bool single_rank = false;

    [[nodiscard]] static tutti::zeroth::estimator estimator_of(const options& o) {
        return {.epsilon = o.epsilon, .directions = static_cast<std::uint32_t>(o.directions), .seed = o.seed};
    }
    [[nodiscard]] static tutti::zeroth::division division_of(const options& o) {
        const auto shards = static_cast<std::size_t>(o.shards_of_batch());
        const auto micro_batches = static_cast<std::size_t>(o.batch / o.micro_batch) / shards;
        return {.sides = o.sides(), .data = o.ranks / o.sides(), .shards = shards, .micro_batches = micro_batches};
    }
};

struct zo2 : mezo {
    static constexpr std::string_view name = "zo2";
    static constexpr std::string_view summary =
        "the same on one rank, weights on the host; --slots blocks at a time come to the device (ZO2)";
    static constexpr bool single_rank = true;
};
struct distzo2 : mezo {
    static constexpr std::string_view name = "distzo2";
    static constexpr std::string_view summary =
        "the same on several, which share passes as --zo-parallel says, and with --sliced the transfers (DistZO2)";
};

template <class P>
concept of_forward_passes = requires(const options& o) {
    P::estimator_of(o);
};

}  // namespace transformer::pipelines
