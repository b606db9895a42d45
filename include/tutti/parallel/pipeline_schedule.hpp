// pipeline_schedule: who runs which pass of which micro-batch in which stage, in what order; as data.
// Needs core alone. Generators make it (parallel/schedules), pipeline_check judges it, pipeline runs it.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // passes, units
#include <limits>       // units that can be counted
#include <string>       // names
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // lists

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::parallel {

/// What is computed: `backward` is backward_input and backward_weight in one.
enum class pass : std::uint8_t { forward, backward, backward_input, backward_weight };

[[nodiscard]] constexpr std::string_view name_of(pass w) noexcept {
    constexpr std::string_view names[] = {"forward", "backward", "backward_input", "backward_weight"};
    return names[static_cast<std::size_t>(w)];
}

/// One pass of one micro-batch through one stage.
struct action {
    pass what = pass::forward;
    int stage = 0;
    int micro_batch = 0;
    bool joined = false;  ///< the next action of the rank starts together with this one (DualPipe's overlapped pair)
    friend constexpr bool operator==(const action&, const action&) = default;
};

/// "backward_input of micro-batch 3 in stage 5"
[[nodiscard]] inline std::string describe(const action& a) {
    return formatted("{} of micro-batch {} in stage {}", name_of(a.what), a.micro_batch, a.stage);
}

/// What a chunk of one micro-batch holds, in units of any size: from its forward on, and between its input gradient and
/// its weight gradient. {1, 1} counts chunks.
struct held_units {
    std::int64_t before_backward = 1;
    std::int64_t before_weight = 1;
    friend constexpr bool operator==(const held_units&, const held_units&) = default;
};

/// An order of work for every rank of a pipeline.
///
/// Semantics  the model is cut into stages 0 ... stages() - 1, which micro-batches pass forward in ascending and
///            backward in descending order. routes[d][s] is the rank of stage s on route d: schedules that send
///            micro-batches from both ends have two routes, each with a copy of the model, and the first half of the
///            micro-batches takes the first. What a rank holds, (route, stage), are its chunks, counted in that order.
///            Messages are not listed, they follow: an output goes to the rank of the next stage where that is another.
/// Units      in_flight_limit[r]: what rank r holds at most, in units of `held`.
struct pipeline_schedule {
    std::string name{};
    int ranks = 0;
    int micro_batches = 0;
    std::vector<std::vector<int>> routes{};
    std::vector<std::vector<action>> actions{};  ///< by rank, in the order in which they run
    held_units held{};
    std::vector<std::int64_t> in_flight_limit{};  ///< by rank

    [[nodiscard]] int stages() const noexcept { return routes.empty() ? 0 : static_cast<int>(routes[0].size()); }
    [[nodiscard]] int route_of(int micro_batch) const noexcept {
        return static_cast<int>(static_cast<std::int64_t>(micro_batch) * static_cast<std::int64_t>(routes.size()) /
                                micro_batches);
    }
    [[nodiscard]] int rank_of(int stage, int micro_batch) const {
        return routes[static_cast<std::size_t>(route_of(micro_batch))][static_cast<std::size_t>(stage)];
    }
    /// The place of (route, stage) among what its rank holds.
    [[nodiscard]] int chunk_of(int route, int stage) const {
        const int rank = routes[static_cast<std::size_t>(route)][static_cast<std::size_t>(stage)];
        int chunk = 0;
        for (std::size_t d = 0; d <= static_cast<std::size_t>(route); ++d) {
            const bool last = d == static_cast<std::size_t>(route);
            for (std::size_t s = 0; s < (last ? static_cast<std::size_t>(stage) : routes[d].size()); ++s) {
                chunk += routes[d][s] == rank ? 1 : 0;
            }
        }
        return chunk;
    }
    /// Chunks that `rank` holds.
    [[nodiscard]] int chunks_on(int rank) const {
        int chunks = 0;
        for (const auto& route : routes) {
            for (const int r : route) { chunks += r == rank ? 1 : 0; }
        }
        return chunks;
    }
    friend bool operator==(const pipeline_schedule&, const pipeline_schedule&) = default;
};

namespace detail {

// A schedule of `ranks` empty lists; refuses what no schedule admits.
[[nodiscard]] inline pipeline_schedule empty_schedule(std::string name, int ranks, int micro_batches) {
    if (ranks < 1 || micro_batches < 1) {
        throw usage_error(
            formatted("{}: {} ranks and {} micro-batches; both must be positive", name, ranks, micro_batches));
    }
    pipeline_schedule s{std::move(name), ranks, micro_batches, {}, {}, {}, {}};
    s.actions.resize(static_cast<std::size_t>(ranks));
    s.in_flight_limit.resize(static_cast<std::size_t>(ranks));
    return s;
}

// Refuses units that make no sense, and those of which `chunks` together are more than can be counted.
inline void expect_held(const std::string& name, const held_units& held, std::int64_t chunks) {
    if (held.before_weight < 1 || held.before_backward < held.before_weight) {
        throw usage_error(
            formatted("{}: a chunk holds {} units, and {} before its weight gradient; neither may grow or be 0", name,
                      held.before_backward, held.before_weight));
    }
    if (held.before_backward > std::numeric_limits<std::int64_t>::max() / chunks) {
        throw usage_error(formatted("{}: chunks that hold {} units each are together more than 64 bits count; take a "
                                    "larger unit",
                                    name, held.before_backward));
    }
}

// Stage s on rank s.
[[nodiscard]] inline std::vector<int> straight_route(int ranks) {
    std::vector<int> route;
    for (int r = 0; r < ranks; ++r) { route.push_back(r); }
    return route;
}

}  // namespace detail
}  // namespace tutti::parallel
