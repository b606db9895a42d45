// division: which rank makes which forward passes of a step: sides of the difference, shards of the batch, directions.
// Needs zeroth/estimator. Pure arithmetic.
// Source: perturbation, data and two-dimensional parallelism: DistZO2, arXiv 2507.03211; directions over ranks: as in
// evolution strategies, Salimans et al., arXiv 1703.03864. Shards apart from ranks, so that results do not depend on the
// number of ranks, are ours.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <cstdint>    // directions
#include <string>     // descriptions
#include <vector>     // orders

#include <tutti/core/error.hpp>        // usage_error
#include <tutti/core/text.hpp>         // formatted
#include <tutti/zeroth/estimator.hpp>  // estimator

namespace tutti::zeroth {

/// How a step's forward passes are dealt. The same on all ranks.
///
/// Semantics  the batch has `shards` shards of `micro_batches` micro-batches each; micro-batch m of shard s has number
///            s * micro_batches + m. Losses are averaged inside a shard, then over shards in their order: a step's
///            result depends on these two numbers, not on the ranks.
///   sides       1: a rank makes both forward passes of a direction. 2: two ranks make one each (perturbation
///               parallelism).
///   data        so many ranks, or pairs of them, have shards / data shards each (data parallelism; both: 2D).
///   directions  so many groups of those have an equal part of the step's directions each.
///   order       rank r does the work of place order[r]; empty: of place r. Places count sides first, then data, then
///               directions, so that a pair are neighbors.
///   check_every steps between two comparisons of the replicas' weights by a hash; 0: never.
/// Errors     validate() throws usage_error.
struct division {
    int sides = 1;
    int data = 1;
    int directions = 1;
    std::size_t shards = 1;
    std::size_t micro_batches = 1;
    std::vector<int> order{};
    std::uint64_t check_every = 100;

    void validate(int ranks, std::uint32_t all_directions) const {
        if (sides < 1 || sides > 2 || data < 1 || directions < 1 || sides * data * directions != ranks) {
            throw usage_error(formatted("zeroth: {} sides times {} data times {} directions are not {} ranks", sides,
                                        data, directions, ranks));
        }
        if (shards == 0 || shards % static_cast<std::size_t>(data) != 0) {
            throw usage_error(formatted("zeroth: {} shards cannot be dealt to {}", shards, data));
        }
        if (all_directions % static_cast<std::uint32_t>(directions) != 0) {
            throw usage_error(formatted("zeroth: {} directions cannot be dealt to {}", all_directions, directions));
        }
        if (micro_batches == 0) { throw usage_error("zeroth: a shard has no micro-batch"); }
        if (order.empty()) { return; }
        std::vector<bool> seen(static_cast<std::size_t>(ranks));
        for (const int place : order) {
            if (order.size() != seen.size() || place < 0 || place >= ranks || seen[static_cast<std::size_t>(place)]) {
                throw usage_error(formatted("zeroth: the order is not one of {} ranks", ranks));
            }
            seen[static_cast<std::size_t>(place)] = true;
        }
    }
    [[nodiscard]] std::string describe() const {
        std::string text = formatted("sides {}, data {}, directions {}, shards {}, micro-batches {}, checks every {}",
                                     sides, data, directions, shards, micro_batches, check_every);
        for (const int place : order) { text += formatted(", {}", place); }
        return text;
    }
    [[nodiscard]] int place_of(int rank) const { return order.empty() ? rank : order[static_cast<std::size_t>(rank)]; }
    /// The rank at (side, data, direction).
    [[nodiscard]] std::size_t rank_at(int side, std::size_t part, std::size_t group) const {
        const int place = static_cast<int>(group * static_cast<std::size_t>(data) + part) * sides + side;
        if (order.empty()) { return static_cast<std::size_t>(place); }
        std::size_t rank = 0;
        while (order[rank] != place) { ++rank; }
        return rank;
    }
};

/// Forward passes that a rank makes of a micro-batch at a time: of so many branches a block_model has activations.
[[nodiscard]] inline std::size_t branches_of(const estimator& how, const division& divided = {}) {
    const std::size_t own = how.directions / static_cast<std::size_t>(divided.directions);
    const bool base = how.sides == estimate::one_sided;  // one pass for all directions, on one of the sides
    const std::size_t both = base ? own + 1 : 2 * own;
    const std::size_t of_steps = divided.sides == 2 ? own : both;
    return how.rule == update_rule::conservative ? std::max<std::size_t>(of_steps, 3) : of_steps;
}

}  // namespace tutti::zeroth
