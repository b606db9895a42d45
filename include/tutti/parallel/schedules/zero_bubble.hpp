// zero_bubble: backward in two parts, of which weight gradients wait for no other rank and fill what would be bubbles.
// Needs parallel/detail/zero_bubble_search. Source: Qi et al. 2024, arXiv:2401.10241 (ZB-H1, ZB-H2) and
// arXiv:2405.15362 (ZB-V); the search is ours.
#pragma once

#include <algorithm>  // max
#include <cstdint>    // times, units held
#include <optional>   // best so far
#include <utility>    // move
#include <vector>     // rules

#include <tutti/core/error.hpp>                          // usage_error
#include <tutti/core/text.hpp>                           // formatted
#include <tutti/parallel/detail/zero_bubble_search.hpp>  // the search
#include <tutti/parallel/pipeline_replay.hpp>            // pass_times
#include <tutti/parallel/pipeline_schedule.hpp>          // pipeline_schedule

namespace tutti::parallel {

namespace detail {

// What `chunks` hold, as the limit of every rank.
inline void limit_to_chunks(pipeline_schedule& s, std::int64_t chunks) {
    // The search adds to what is held what it would like to begin; whoever checks the schedule sums up all chunks.
    expect_held(s.name, s.held, std::max(2 * chunks, std::int64_t{s.stages()} * s.micro_batches));
    s.in_flight_limit.assign(s.in_flight_limit.size(), chunks * s.held.before_backward);
}

// The schedule of the smallest bubble over all rules; of equal ones the shortest, then the first. Ends at `enough`.
[[nodiscard]] inline pipeline_schedule best_zero_bubble(const pipeline_schedule& empty, const pass_times& times,
                                                        const std::vector<zero_bubble_rule>& rules,
                                                        std::int64_t enough) {
    if (times.forward < 1 || times.backward_input < 1 || times.backward_weight < 1 || times.transfer < 0) {
        throw usage_error(formatted("{}: passes of {}, {} and {} and a transfer of {}; no time may be negative, and "
                                    "passes take some",
                                    empty.name, times.forward, times.backward_input, times.backward_weight,
                                    times.transfer));
    }
    std::optional<pipeline_schedule> best;
    std::int64_t bubble = 0;
    std::int64_t makespan = 0;
    for (const zero_bubble_rule& rule : rules) {
        auto found = zero_bubble_search(empty, times, rule).found();
        if (!found.has_value()) { continue; }
        const pipeline_replay replay = replayed(*found, times);
        const std::int64_t b = replay.bubble();
        const std::int64_t span = replay.makespan();
        if (!best.has_value() || b < bubble || (b == bubble && span < makespan)) {
            best = std::move(found);
            bubble = b;
            makespan = span;
        }
        if (bubble <= enough) { break; }
    }
    if (!best.has_value()) { throw usage_error(formatted("{}: no rule finds a schedule", empty.name)); }
    return *std::move(best);
}

}  // namespace detail

/// 1F1B with backwards in two parts, one stage a rank, at most `limit` micro-batches in flight.
///
/// Semantics  limit p (the default) is ZB-H1: no more memory than 1F1B. 2p - 1 is ZB-H2. `held` says how much of its
///            memory a micro-batch keeps between its two backward parts; all of it if not told.
/// Determinism  a pure function of its arguments: all ranks find the same.
/// Cost       bubble (p - 1)(F + Bi - W) at limit p for m >= 2p, none at 2p - 1 where all passes take the same. A
///            search over 10 rules, each linear in p m.
/// Errors     usage_error for numbers that are not positive, a limit below p, or units of which it takes too many to
///            count in 64 bits.
[[nodiscard]] inline pipeline_schedule zero_bubble(int ranks, int micro_batches, pass_times times = {}, int limit = 0,
                                                   held_units held = {}) {
    pipeline_schedule s = detail::empty_schedule("zero_bubble", ranks, micro_batches);
    limit = limit == 0 ? ranks : limit;
    if (limit < ranks) {
        throw usage_error(
            formatted("zero_bubble: {} micro-batches in flight on {} ranks; at least as many as ranks", limit, ranks));
    }
    s.held = held;
    s.routes.push_back(detail::straight_route(ranks));
    detail::limit_to_chunks(s, limit);
    std::vector<detail::zero_bubble_rule> rules;
    // Keeping to 1F1B's order is best where memory is short, letting forwards run ahead where it is not.
    for (const bool in_order : {limit == ranks, limit != ranks}) {
        if (in_order) {
            for (const int steady : {0, 8}) { rules.push_back({steady, steady, 0, 1, true, -1}); }
        } else {
            for (const int slope : {0, 2}) {
                for (const int steady : {0, 8}) {
                    for (const int first : {0, 7}) { rules.push_back({steady, steady, first, slope, false, -1}); }
                }
            }
        }
    }
    const std::int64_t least = times.forward + times.backward_input - times.backward_weight;
    return detail::best_zero_bubble(s, times, rules, limit == ranks && least > 0 ? (ranks - 1) * least : 0);
}

/// ZB-V: stages r and 2p - 1 - r on rank r, so that the loss is where micro-batches began; the memory of 1F1B.
///
/// Semantics  chunks are half as long as stages of zero_bubble, and `times` are those of a chunk. At most 2p chunks are
///            in flight; `held` as for zero_bubble, by default what the weight gradient needs is a third.
/// Determinism  a pure function of its arguments: all ranks find the same.
/// Cost       no bubble for m >= 2p where all passes take the same. Twice the messages. A search over 21 rules.
/// Errors     usage_error for numbers that are not positive, or units as for zero_bubble.
[[nodiscard]] inline pipeline_schedule zero_bubble_v(int ranks, int micro_batches, pass_times times = {},
                                                     held_units held = {3, 1}) {
    pipeline_schedule s = detail::empty_schedule("zero_bubble_v", ranks, micro_batches);
    s.held = held;
    s.routes.push_back(detail::straight_route(ranks));
    for (int r = ranks; r-- > 0;) { s.routes[0].push_back(r); }
    detail::limit_to_chunks(s, 2 * std::int64_t{ranks});
    std::vector<detail::zero_bubble_rule> rules;
    for (const int look_ahead : {0, 1, 5}) {
        for (const int steady : {0, 5, 8}) {
            for (const int tail : {steady, 3}) { rules.push_back({steady, tail, 0, 0, false, look_ahead}); }
        }
    }
    rules.push_back({0, 5, 0, 0, false, 5});
    rules.push_back({0, 0, 0, 0, false, -1});
    rules.push_back({8, 8, 0, 0, false, -1});
    return detail::best_zero_bubble(s, times, rules, 0);
}

}  // namespace tutti::parallel
