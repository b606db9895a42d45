// zero_bubble_search: one schedule of split backwards by list scheduling, for one rule of choice.
// Needs parallel/pipeline_replay. parallel/schedules/zero_bubble tries rules and takes the best.
#pragma once

#include <algorithm>  // min, max
#include <array>      // one entry a chunk
#include <cstddef>    // size_t, ptrdiff_t
#include <cstdint>    // times, units held
#include <deque>      // orders
#include <limits>     // never
#include <optional>   // choices
#include <utility>    // exchange, move
#include <vector>     // state of ranks

#include <tutti/parallel/pipeline_replay.hpp>    // pass_times, pass_ends
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel::detail {

/// How a rank chooses among what it could do. Eighths are of the pass that it could begin.
struct zero_bubble_rule {
    int steady_eighths = 0;      ///< begins a weight gradient if nothing else comes within so much of it ...
    int tail_eighths = 0;        ///< ... and so much once it has no more forwards of its first chunk
    int first_eighths = 0;       ///< no forward if its first input gradient comes within so much of it
    int slope = 0;               ///< rank r lets forwards run ahead of input gradients by so many times r less
    bool forward_first = false;  ///< one chunk: forwards, as far as they may run ahead, before input gradients
    int look_ahead = -1;         ///< two chunks: keeps to the order of dual_pipe but for so many places; -1: no order
};

/// In the order of time, every idle rank begins what its rule prefers: input gradients, then forwards as far as memory
/// allows, then weight gradients.
class zero_bubble_search {
    struct rank_state {
        std::int64_t free = 0;
        std::array<int, 2> forwards{}, inputs{}, weights{};  // done, by chunk
        std::deque<action> order{};  // forwards and input gradients still to come; taken from near the front
        [[nodiscard]] int ahead() const { return forwards[0] + forwards[1] - inputs[0] - inputs[1]; }
        [[nodiscard]] int put_off() const { return inputs[0] + inputs[1] - weights[0] - weights[1]; }
    };
    static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

    pipeline_schedule schedule_;
    pass_times times_;
    zero_bubble_rule rule_;
    int chunks_;
    pass_ends ends_;
    std::vector<rank_state> ranks_;
    std::size_t left_;

public:
    zero_bubble_search(pipeline_schedule empty, const pass_times& times, zero_bubble_rule rule)
        : schedule_(std::move(empty))
        , times_(times)
        , rule_(rule)
        , chunks_(schedule_.stages() / schedule_.ranks)
        , ends_(schedule_)
        , ranks_(static_cast<std::size_t>(schedule_.ranks))
        , left_(3 * static_cast<std::size_t>(schedule_.stages()) * static_cast<std::size_t>(schedule_.micro_batches)) {
        for (std::size_t r = 0; rule_.look_ahead >= 0 && r < ranks_.size(); ++r) { ranks_[r].order = usual_order(r); }
    }

    /// nullopt where the rule leads into a dead end.
    [[nodiscard]] std::optional<pipeline_schedule> found() {
        std::int64_t now = 0;
        while (left_ > 0) {
            std::int64_t later = never;
            for (std::size_t r = 0; r < ranks_.size(); ++r) {
                if (ranks_[r].free <= now) { later = std::min(later, step(r, now)); }
                if (ranks_[r].free > now) { later = std::min(later, ranks_[r].free); }
            }
            if (left_ > 0 && later == never) { return std::nullopt; }
            now = later;
        }
        return std::move(schedule_);
    }

private:
    [[nodiscard]] int stage_of(std::size_t rank, int chunk) const {
        const int r = static_cast<int>(rank);
        return chunk == 0 ? r : 2 * schedule_.ranks - 1 - r;
    }
    [[nodiscard]] static std::size_t chunk_of(std::size_t rank, const action& a) {
        return a.stage == static_cast<int>(rank) ? 0 : 1;
    }
    // A first chunk leaves room for a second one, without which memory would never be free again.
    [[nodiscard]] bool has_room(std::size_t rank, const action& a) const {
        const rank_state& state = ranks_[rank];
        const held_units& held = schedule_.held;
        const std::int64_t needed = (chunks_ == 2 && chunk_of(rank, a) == 0 ? 2 : 1) * held.before_backward;
        const std::int64_t limit = schedule_.in_flight_limit[rank];
        const std::int64_t used = state.ahead() * held.before_backward + state.put_off() * held.before_weight;
        const std::int64_t lead = limit / held.before_backward - rule_.slope * static_cast<int>(rank);
        return used + needed <= limit && state.ahead() < std::max<std::int64_t>(chunks_, lead);
    }

    // The order of forwards and input gradients of dual_pipe's ranks, for micro-batches of one direction.
    [[nodiscard]] std::deque<action> usual_order(std::size_t rank) const {
        std::deque<action> list;
        const int m = schedule_.micro_batches;
        std::array<int, 2> forwards{}, inputs{};
        const auto add = [&](pass what, std::array<int, 2>& done, std::size_t chunk) {
            if (done[chunk] < m) { list.push_back({what, stage_of(rank, static_cast<int>(chunk)), done[chunk]++}); }
        };
        const auto f = [&](std::size_t chunk) { add(pass::forward, forwards, chunk); };
        const auto b = [&](std::size_t chunk) { add(pass::backward_input, inputs, chunk); };
        const int r = static_cast<int>(rank);
        const int inner = schedule_.ranks - 1 - r;
        for (int i = 0; i < 2 * inner; ++i) { f(0); }
        for (int i = 0; i < r + 1; ++i) { f(0), f(1); }
        for (int i = 0; i < inner; ++i) { b(1), f(1); }
        for (int i = 0; i < m - 2 * schedule_.ranks + r + 1; ++i) { f(0), b(1), f(1), b(0); }
        for (int i = 0; i < m; ++i) { b(1), f(1), b(0); }  // the rest
        return list;
    }

    struct choice {
        std::optional<action> now{};
        std::int64_t soonest = never;  // when another becomes possible, as far as is known
        std::size_t place = 0;         // in the order
    };
    // Takes `a` if it is the first that can begin. True while none is chosen.
    bool consider(choice& c, std::size_t rank, const action& a, std::int64_t now) const {
        if (a.what == pass::forward && !has_room(rank, a)) { return true; }
        const std::int64_t ready = ends_.ready(a, times_.transfer);
        if (ready < 0) { return true; }
        if (ready > now) {
            c.soonest = std::min(c.soonest, ready);
            return true;
        }
        c.now = a;
        return false;
    }
    [[nodiscard]] choice by_priority(std::size_t rank, std::int64_t now) const {
        choice c;
        const rank_state& state = ranks_[rank];
        const pass last = rule_.forward_first ? pass::backward_input : pass::forward;
        for (const pass what : {rule_.forward_first ? pass::forward : pass::backward_input, last}) {
            for (int chunk = chunks_ - 1; chunk >= 0; --chunk) {
                const auto i = static_cast<std::size_t>(chunk);
                const int b = what == pass::forward ? state.forwards[i] : state.inputs[i];
                if (b == schedule_.micro_batches) { continue; }
                if (!consider(c, rank, {what, stage_of(rank, chunk), b}, now)) { return c; }
            }
        }
        return c;
    }
    // The first of the order that can begin; of either kind none overtakes another.
    [[nodiscard]] choice by_order(std::size_t rank, std::int64_t now) const {
        choice c;
        const auto& order = ranks_[rank].order;
        bool forward_seen = false;
        bool input_seen = false;
        for (; c.place < order.size() && c.place <= static_cast<std::size_t>(rule_.look_ahead); ++c.place) {
            bool& seen = order[c.place].what == pass::forward ? forward_seen : input_seen;
            if (std::exchange(seen, true)) { continue; }
            if (!consider(c, rank, order[c.place], now)) { return c; }
        }
        return c;
    }
    // The weight gradient that has waited longest.
    [[nodiscard]] std::optional<action> put_off(std::size_t rank) const {
        const rank_state& state = ranks_[rank];
        std::optional<action> oldest;
        for (int c = 0; c < chunks_; ++c) {
            const auto i = static_cast<std::size_t>(c);
            const int b = state.weights[i];
            if (b < state.inputs[i] && (!oldest.has_value() || b < oldest->micro_batch)) {
                oldest = action{pass::backward_weight, stage_of(rank, c), b};
            }
        }
        return oldest;
    }

    // Begins what the rule prefers, or says when to look again.
    std::int64_t step(std::size_t rank, std::int64_t now) {
        rank_state& state = ranks_[rank];
        const bool ordered = rule_.look_ahead >= 0;
        const choice c = ordered ? by_order(rank, now) : by_priority(rank, now);
        if (c.now.has_value()) {
            if (c.now->what == pass::forward && state.inputs[0] == 0 && state.inputs[1] == 0 &&
                c.soonest < now + times_.forward * rule_.first_eighths / 8) {
                return c.soonest;
            }
            if (ordered) { state.order.erase(state.order.begin() + static_cast<std::ptrdiff_t>(c.place)); }
            begin(rank, *c.now, now);
            return never;
        }
        const bool tail = state.forwards[0] == schedule_.micro_batches;
        const std::int64_t patience = times_.backward_weight * (tail ? rule_.tail_eighths : rule_.steady_eighths) / 8;
        const auto weight = put_off(rank);
        if (weight.has_value() && (c.soonest == never || c.soonest >= now + patience)) {
            begin(rank, *weight, now);
            return never;
        }
        return c.soonest;
    }
    void begin(std::size_t rank, const action& a, std::int64_t now) {
        rank_state& state = ranks_[rank];
        state.free = now + times_.of(a.what);
        ends_.set(a, state.free);
        schedule_.actions[rank].push_back(a);
        auto& done = a.what == pass::forward          ? state.forwards
                     : a.what == pass::backward_input ? state.inputs
                                                      : state.weights;
        ++done[chunk_of(rank, a)];
        --left_;
    }
};

}  // namespace tutti::parallel::detail
