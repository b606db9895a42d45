// pipeline_replay: when each action of a schedule runs if every pass takes a stated time, and what follows: bubbles,
// activations held. Needs parallel/pipeline_schedule. Whole numbers of any unit, so figures are exact.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <cstdint>    // times, units held
#include <optional>   // time of a pair
#include <string>     // messages
#include <vector>     // times

#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

/// What one chunk takes for one micro-batch, in any unit. `pair`: a forward and a backward that run together.
struct pass_times {
    std::int64_t forward = 1;
    std::int64_t backward_input = 1;
    std::int64_t backward_weight = 1;
    std::int64_t transfer = 0;  ///< from the end of a pass to where its output can be used on another rank
    std::optional<std::int64_t> pair{};

    [[nodiscard]] constexpr std::int64_t of(pass what) const noexcept {
        switch (what) {
        case pass::forward: return forward;
        case pass::backward: return backward_input + backward_weight;
        case pass::backward_input: return backward_input;
        case pass::backward_weight: return backward_weight;
        }
        return 0;
    }
};

/// An action from `start` to `end`.
struct action_span {
    std::int64_t start = 0;
    std::int64_t end = 0;
};

/// A schedule with times. `spans` are as `actions` of the schedule; joined actions have the same.
struct pipeline_replay {
    std::vector<std::vector<action_span>> spans{};
    std::vector<std::int64_t> busy{};       ///< by rank: time in which it computes
    std::vector<int> peak_in_flight{};      ///< by rank: chunks between a forward and its weight gradient
    std::vector<std::int64_t> peak_held{};  ///< by rank: in units of the schedule's `held`

    /// From the first start to the last end of all ranks.
    [[nodiscard]] std::int64_t makespan() const noexcept {
        std::int64_t last = 0;
        for (const auto& rank : spans) {
            if (!rank.empty()) { last = std::max(last, rank.back().end); }
        }
        return last;
    }
    /// From the first start to the last end of a rank: what a step takes where the next one follows at once.
    [[nodiscard]] std::int64_t span_of(std::size_t rank) const noexcept {
        return spans[rank].empty() ? 0 : spans[rank].back().end - spans[rank].front().start;
    }
    /// The longest span.
    [[nodiscard]] std::int64_t longest_span() const noexcept {
        std::int64_t longest = 0;
        for (std::size_t r = 0; r < spans.size(); ++r) { longest = std::max(longest, span_of(r)); }
        return longest;
    }
    /// What the rank that waits most waits within its span. Over all of the makespan: makespan() - busy.
    [[nodiscard]] std::int64_t bubble() const noexcept {
        std::int64_t most = 0;
        for (std::size_t r = 0; r < spans.size(); ++r) { most = std::max(most, span_of(r) - busy[r]); }
        return most;
    }
};

namespace detail {

// Ends of passes, by stage and micro-batch; -1: not yet.
class pass_ends {
    const pipeline_schedule& schedule_;
    std::vector<std::int64_t> forward_, input_, weight_;

    [[nodiscard]] std::size_t at(int stage, int micro_batch) const {
        return static_cast<std::size_t>(stage) * static_cast<std::size_t>(schedule_.micro_batches) +
               static_cast<std::size_t>(micro_batch);
    }

public:
    explicit pass_ends(const pipeline_schedule& s)
        : schedule_(s)
        , forward_(static_cast<std::size_t>(s.stages()) * static_cast<std::size_t>(s.micro_batches), -1)
        , input_(forward_)
        , weight_(forward_) {}

    void set(const action& a, std::int64_t end) {
        if (a.what == pass::forward) { forward_[at(a.stage, a.micro_batch)] = end; }
        if (a.what == pass::backward || a.what == pass::backward_input) { input_[at(a.stage, a.micro_batch)] = end; }
        if (a.what == pass::backward || a.what == pass::backward_weight) { weight_[at(a.stage, a.micro_batch)] = end; }
    }
    [[nodiscard]] std::int64_t forward(int stage, int b) const { return forward_[at(stage, b)]; }
    [[nodiscard]] std::int64_t input(int stage, int b) const { return input_[at(stage, b)]; }

    /// When the inputs of `a` are there; -1: not known yet.
    [[nodiscard]] std::int64_t ready(const action& a, std::int64_t transfer) const {
        const auto from = [&](std::int64_t end, int stage) {
            const bool travels = schedule_.rank_of(stage, a.micro_batch) != schedule_.rank_of(a.stage, a.micro_batch);
            return end < 0 || !travels ? end : end + transfer;
        };
        if (a.what == pass::backward_weight) { return input(a.stage, a.micro_batch); }
        if (a.what == pass::forward) {
            return a.stage == 0 ? 0 : from(forward(a.stage - 1, a.micro_batch), a.stage - 1);
        }
        const std::int64_t own = forward(a.stage, a.micro_batch);
        if (own < 0 || a.stage == schedule_.stages() - 1) { return own; }
        const std::int64_t next = from(input(a.stage + 1, a.micro_batch), a.stage + 1);
        return next < 0 ? next : std::max(own, next);
    }
};

[[nodiscard]] inline std::string stuck_text(const pipeline_schedule& s, const pass_ends& ends, std::size_t rank,
                                            const action& a) {
    std::string text = formatted("{}: rank {} waits for ever at {}: ", s.name, rank, describe(a));
    action missing = a;
    if (a.what == pass::backward_weight) {
        missing.what = pass::backward_input;
    } else if (a.what == pass::forward) {
        missing.stage = a.stage - 1;
    } else if (ends.forward(a.stage, a.micro_batch) < 0) {
        missing.what = pass::forward;
    } else {
        missing.stage = a.stage + 1;
    }
    return text + formatted("{} never comes before it", describe(missing));
}

}  // namespace detail

/// Runs a schedule by the clock: each rank takes its actions in order, each as soon as its inputs are there.
///
/// Semantics  a pure function. Time begins at 0; messages take `transfer` and no part of any rank's time.
/// Cost       linear in the actions.
/// Errors     usage_error, naming rank and action, when some action's input never comes: the schedule is not possible
///            with any number of buffers.
[[nodiscard]] inline pipeline_replay replayed(const pipeline_schedule& s, const pass_times& times) {
    const auto n = static_cast<std::size_t>(s.ranks);
    pipeline_replay out;
    out.spans.resize(n);
    out.busy.assign(n, 0);
    out.peak_in_flight.assign(n, 0);
    out.peak_held.assign(n, 0);
    std::vector<int> in_flight(n, 0);
    std::vector<std::int64_t> held(n, 0);
    detail::pass_ends ends(s);

    const auto take = [&](std::size_t r) {  // one action or pair; false: not ready
        const auto& list = s.actions[r];
        const std::size_t next = out.spans[r].size();
        const std::size_t count = next < list.size() && list[next].joined && next + 1 < list.size() ? 2 : 1;
        if (next == list.size()) { return false; }
        std::int64_t start = next == 0 ? 0 : out.spans[r].back().end;
        std::int64_t duration = 0;
        for (std::size_t i = next; i < next + count; ++i) {
            const std::int64_t ready = ends.ready(list[i], times.transfer);
            if (ready < 0) { return false; }
            start = std::max(start, ready);
            duration += times.of(list[i].what);
        }
        if (count == 2) { duration = times.pair.value_or(duration); }
        for (std::size_t i = next; i < next + count; ++i) {
            const action& a = list[i];
            ends.set(a, start + duration);
            out.spans[r].push_back({start, start + duration});
            const bool forward = a.what == pass::forward;
            in_flight[r] += forward ? 1 : 0;
            held[r] += forward ? s.held.before_backward : 0;
            out.peak_in_flight[r] = std::max(out.peak_in_flight[r], in_flight[r]);
            out.peak_held[r] = std::max(out.peak_held[r], held[r]);
            const bool input = a.what == pass::backward || a.what == pass::backward_input;
            const bool weight = a.what == pass::backward || a.what == pass::backward_weight;
            in_flight[r] -= weight ? 1 : 0;
            held[r] -=
                (input ? s.held.before_backward - s.held.before_weight : 0) + (weight ? s.held.before_weight : 0);
        }
        out.busy[r] += duration;
        return true;
    };

    // An action can only make its own rank and those of the neighboring stages go on.
    std::vector<std::size_t> awake;
    for (std::size_t r = n; r-- > 0;) { awake.push_back(r); }
    while (!awake.empty()) {
        const std::size_t r = awake.back();
        awake.pop_back();
        const std::size_t before = out.spans[r].size();
        while (take(r)) {}
        for (std::size_t i = before; i < out.spans[r].size(); ++i) {
            const action& a = s.actions[r][i];
            const int other = a.what == pass::forward ? a.stage + 1 : a.stage - 1;
            if (a.what == pass::backward_weight || other < 0 || other >= s.stages()) { continue; }
            const auto to = static_cast<std::size_t>(s.rank_of(other, a.micro_batch));
            if (to != r) { awake.push_back(to); }
        }
    }
    for (std::size_t r = 0; r < n; ++r) {
        const std::size_t done = out.spans[r].size();
        if (done == s.actions[r].size()) { continue; }
        // Of a pair the one that cannot run.
        const bool first = ends.ready(s.actions[r][done], 0) < 0 || done + 1 == s.actions[r].size();
        throw usage_error(detail::stuck_text(s, ends, r, s.actions[r][first ? done : done + 1]));
    }
    return out;
}

}  // namespace tutti::parallel
