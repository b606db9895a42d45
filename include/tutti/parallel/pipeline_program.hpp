// pipeline_program: a schedule with its messages in place: what each rank computes, sends and receives, one after the
// other. Needs parallel/pipeline_replay. All ranks keep to one order of all events, so no rank can wait for ever.
#pragma once

#include <algorithm>  // sort
#include <cstddef>    // size_t
#include <cstdint>    // kinds, times
#include <string>     // descriptions
#include <tuple>      // keys
#include <utility>    // pair
#include <vector>     // lists

#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_replay.hpp>    // replayed
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

enum class step_kind : std::uint8_t { compute, send, receive };

/// One step of a rank: it computes `what`, or sends what that gave to `peer`, or receives what that gave on `peer`.
/// What a forward gives is an activation, what an input gradient gives is a gradient.
struct pipeline_step {
    step_kind kind = step_kind::compute;
    action what{};
    int peer = -1;
    friend constexpr bool operator==(const pipeline_step&, const pipeline_step&) = default;
};

[[nodiscard]] inline std::string describe(const pipeline_step& s) {
    if (s.kind == step_kind::compute) { return describe(s.what); }
    return formatted("{} of the result of {} {} rank {}", s.kind == step_kind::send ? "send" : "receive",
                     describe(s.what), s.kind == step_kind::send ? "to" : "from", s.peer);
}

using pipeline_program = std::vector<std::vector<pipeline_step>>;  ///< by rank

/// Where a message that comes while its receiver computes is received.
enum class delivery : std::uint8_t {
    between,  ///< after that: a rank computes or exchanges
    ahead     ///< before that: an exchange beside the computation brings it
};

namespace detail {

// Stage to which the result of `a` goes; -1: nowhere.
[[nodiscard]] inline int consumer_of(const pipeline_schedule& s, const action& a) {
    if (a.what == pass::backward_weight) { return -1; }
    const int stage = a.what == pass::forward ? a.stage + 1 : a.stage - 1;
    return stage < s.stages() ? stage : -1;
}
// Rank to which the result of `a` travels; -1: none, or its own.
[[nodiscard]] inline int destination_of(const pipeline_schedule& s, const action& a) {
    const int stage = consumer_of(s, a);
    if (stage < 0) { return -1; }
    const int to = s.rank_of(stage, a.micro_batch);
    return to == s.rank_of(a.stage, a.micro_batch) ? -1 : to;
}

}  // namespace detail

/// The steps of every rank.
///
/// Semantics    every message has one place in time, the end of the pass it comes from if passes take `times`; a rank's
///              steps are what it takes part in, in the order of time. So of all steps not yet made the earliest can
///              always be made: with messages one by one or in groups between computations, whether or not a sender
///              waits for its receiver, and however long passes really take.
/// Determinism  a pure function; all ranks derive the same.
/// Cost         n log n in the actions of a rank.
/// Errors       usage_error when the schedule cannot be replayed.
[[nodiscard]] inline pipeline_program program_of(const pipeline_schedule& s, delivery when = delivery::between,
                                                 const pass_times& times = {}) {
    // time; whether a computation comes behind (between) or before (ahead) the messages of its time; who; which
    using event_key = std::tuple<std::int64_t, int, int, int, int, int>;
    const pipeline_replay replay = replayed(s, times);
    std::vector<std::vector<std::pair<event_key, pipeline_step>>> events(s.actions.size());
    for (std::size_t r = 0; r < s.actions.size(); ++r) {
        const int rank = static_cast<int>(r);
        for (std::size_t i = 0; i < s.actions[r].size(); ++i) {
            const action& a = s.actions[r][i];
            const action_span& span = replay.spans[r][i];
            const bool between = when == delivery::between;
            events[r].push_back(
                {event_key{between ? span.start : span.end, between ? 2 : 0, rank, static_cast<int>(i), 0, 0},
                 {step_kind::compute, a}});
            const int to = detail::destination_of(s, a);
            if (to < 0) { continue; }
            const event_key key{span.end, 1, rank, to, static_cast<int>(i), 0};
            action result = a;
            result.joined = false;
            events[r].push_back({key, {step_kind::send, result, to}});
            events[static_cast<std::size_t>(to)].push_back({key, {step_kind::receive, result, rank}});
        }
    }
    pipeline_program program(events.size());
    for (std::size_t r = 0; r < events.size(); ++r) {
        std::sort(events[r].begin(), events[r].end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        for (const auto& e : events[r]) { program[r].push_back(e.second); }
    }
    return program;
}

}  // namespace tutti::parallel
