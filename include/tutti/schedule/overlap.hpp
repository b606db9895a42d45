// overlap_metrics: what communication costs the rounds of a run, from a timeline: its time, the part of it that was
// waited for, what it does to the computing beside it; and the shortest round that hides it.
// Needs schedule/timeline. A round is one step where ranks communicate in every step, `period` steps of local updates.
#pragma once

#include <algorithm>  // nth_element, min, max
#include <cmath>      // ceil
#include <cstddef>    // size_t
#include <iterator>   // prev
#include <limits>     // what is not measured
#include <set>        // names
#include <string>     // names
#include <utility>    // move
#include <vector>     // steps

#include <tutti/core/deadline.hpp>      // seconds
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/core/text.hpp>          // formatted
#include <tutti/schedule/timeline.hpp>  // timeline

namespace tutti::schedule {

/// Name of spans that bring replicas together, other than waiting for communication.
inline constexpr const char* outer_update_span = "outer update";

/// In place of a figure.
inline constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();

/// Means over the rounds of one rank.
///
/// Units  seconds; not_measured, a NaN, where there was nothing to measure.
struct overlap_metrics {
    std::size_t period = 1;               ///< steps of a round
    std::size_t rounds = 0;               ///< measured; 0: nothing was
    double step = not_measured;           ///< of a step with no communication beside it: median
    double communication = not_measured;  ///< that lanes took in a round
    double exposed = not_measured;        ///< that steps of a round waited for them
    double outer = not_measured;          ///< that steps of a round took to bring replicas together
    double round = not_measured;          ///< that its steps took

    /// Part of the communication that nobody waited for.
    [[nodiscard]] double efficiency() const noexcept { return 1 - exposed / communication; }
    /// Part of a round in which its steps waited.
    [[nodiscard]] double exposed_share() const noexcept { return exposed / round; }
    /// By how much the steps of a round are longer than steps that have no communication beside them.
    [[nodiscard]] double interference() const noexcept { return (round - exposed - outer) / alone() - 1; }
    /// Speed as a share of that without communication.
    [[nodiscard]] double throughput() const noexcept { return alone() / round; }

private:
    [[nodiscard]] double alone() const noexcept { return static_cast<double>(period) * step; }
};

/// Which steps of a timeline to measure, and how.
struct overlap_question {
    std::size_t period = 1;      ///< steps of a round
    std::size_t skip = 0;        ///< steps in the beginning that belong to no round
    std::string lane{};          ///< whose communication is meant: the name of its communicator; empty: all lanes
    double step = not_measured;  ///< without communication, if that is known
};

namespace detail {

/// Median of the steps that have none of this communication beside them.
[[nodiscard]] inline double quiet_step(const std::vector<step_total>& steps, std::vector<timed_span> communication) {
    std::sort(communication.begin(), communication.end(),
              [](const timed_span& a, const timed_span& b) { return a.begin < b.begin; });
    std::vector<double> quiet;
    auto next = communication.begin();
    deadline last = deadline::min();  // end of what began before the step ended
    for (const step_total& s : steps) {
        for (; next != communication.end() && next->begin < s.end; ++next) { last = std::max(last, next->end); }
        if (last <= s.begin) { quiet.push_back(s.seconds); }
    }
    if (quiet.empty()) { return not_measured; }
    const auto middle = quiet.begin() + static_cast<std::ptrdiff_t>(quiet.size() / 2);
    std::nth_element(quiet.begin(), middle, quiet.end());
    return *middle;
}

}  // namespace detail

/// Measures whole rounds of a rank.
///
/// Semantics  communication is what the lanes finished during the counted rounds; exposed is what steps waited for it
///            (waits of the same names), so evaluations between steps do not count. Where there are two rounds and more
///            the first is left out: in it nothing arrives yet, and caches are cold. Where it is not known how long a
///            step without communication takes, that is measured too, in all rounds.
/// Cost       sorts the rank's spans.
/// Errors     usage_error for a period of 0.
[[nodiscard]] inline overlap_metrics overlap_of(const timeline& trace, int rank, const overlap_question& of = {}) {
    if (of.period == 0) { throw usage_error("overlap_of: the period is 0 steps, expected 1 or more"); }
    overlap_metrics m;
    m.period = of.period;
    m.step = of.step;
    std::vector<step_total> steps = trace.steps(rank);
    steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(std::min(of.skip, steps.size())));

    std::vector<timed_span> communication, waits;
    std::set<std::string> names;
    double outer = 0;
    for (timed_span& s : trace.spans(rank)) {
        if (s.kind == span_kind::communication && (of.lane.empty() || s.track == of.lane)) {
            names.insert(s.name);
            communication.push_back(std::move(s));
        } else if (s.kind == span_kind::wait || s.name == outer_update_span) {
            waits.push_back(std::move(s));
        }
    }
    if (std::isnan(of.step)) { m.step = detail::quiet_step(steps, communication); }

    std::size_t rounds = steps.size() / of.period;
    if (rounds > 1) {
        steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(of.period));
        --rounds;
    }
    if (rounds == 0) { return m; }
    steps.resize(rounds * of.period);

    double stepping = 0, communicating = 0, exposed = 0;
    for (const step_total& s : steps) { stepping += s.seconds; }
    for (const timed_span& c : communication) {
        if (c.end > steps.front().begin && c.end <= steps.back().end) { communicating += seconds(c.end - c.begin); }
    }
    for (const timed_span& w : waits) {
        const auto behind = std::upper_bound(steps.begin(), steps.end(), w.begin,
                                             [](deadline t, const step_total& s) { return t < s.begin; });
        if (behind == steps.begin() || w.begin >= std::prev(behind)->end) { continue; }  // not within a step
        if (w.kind == span_kind::work) {
            outer += seconds(w.end - w.begin);
        } else if (names.contains(w.name)) {
            exposed += seconds(w.end - w.begin);
        }
    }
    const auto each = [rounds](double total) { return total / static_cast<double>(rounds); };
    m.rounds = rounds;
    m.exposed = each(exposed);
    m.round = each(stepping);
    m.communication = each(communicating);
    m.outer = each(outer);
    return m;
}

/// The smallest number of steps of which at most `share` is waiting, if a round's communication takes `communication`
/// seconds and a step `step`; `hidden`: communication runs beside the next round, else everyone waits for it.
/// Errors  usage_error for times that are not finite, negative, or no step at all, and a share outside (0, 1).
[[nodiscard]] inline std::size_t shortest_period(double step, double communication, double share, bool hidden) {
    if (!(step > 0 && std::isfinite(step) && communication >= 0 && std::isfinite(communication))) {
        throw usage_error(formatted("shortest_period: a step of {} s and communication of {} s", step, communication));
    }
    if (!(share > 0 && share < 1)) {
        throw usage_error(formatted("shortest_period: a share of {}, expected a value in (0, 1)", share));
    }
    // waiting / (steps + waiting) <= share, where waiting is max(0, communication - steps), or all communication
    const double steps = (1 - share) * communication / (hidden ? step : share * step);
    constexpr double most = 1e15;
    return static_cast<std::size_t>(std::max(1.0, std::ceil(std::min(steps, most))));
}

}  // namespace tutti::schedule
