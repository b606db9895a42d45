// round_times: what the steps and rounds of a local-update strategy take, and the period that is chosen by it.
// Needs schedule/overlap and detail/step_trace; the outer level says where rounds are and who agrees.
#pragma once

#include <algorithm>  // min
#include <bit>        // figures among ranks
#include <cstddef>    // size_t
#include <cstdint>    // figures as words
#include <limits>     // infinity
#include <memory>     // a timeline
#include <string>     // lanes

#include <tutti/core/buffer.hpp>                 // figures inside a replica
#include <tutti/core/deadline.hpp>               // seconds
#include <tutti/core/elementwise.hpp>            // fill
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/queue.hpp>                  // queue
#include <tutti/core/run.hpp>                    // fetch
#include <tutti/schedule/overlap.hpp>            // overlap_of, shortest_period
#include <tutti/schedule/timeline.hpp>           // timeline
#include <tutti/strategy/detail/step_trace.hpp>  // steps
#include <tutti/strategy/local_update_rule.hpp>  // automatic_period

namespace tutti::strategy::detail {

/// Semantics  begin and end for every step, choose_period behind those that end a round.
/// Storage    spans on the caller's timeline; without one, for an automatic period, on one of its own until the period
///            is chosen.
template <queue Q> class round_times {
    static constexpr std::size_t measured_rounds = 3;  // before an automatic period is chosen

    local_update_rule rule_;
    std::unique_ptr<schedule::timeline> own_;
    schedule::timeline* trace_;
    int rank_;
    step_trace<Q> steps_;
    std::size_t made_ = 0, before_ = 0;           // steps; those before the rounds of the period in use
    std::size_t rounds_ = 0;                      // measured
    double quiet_step_ = schedule::not_measured;  // as measured for an automatic period

public:
    /// `trace` may be null.
    round_times(const local_update_rule& rule, schedule::timeline* trace, int rank)
        : rule_(rule)
        , own_(rule.automatic && trace == nullptr ? std::make_unique<schedule::timeline>() : nullptr)
        , trace_(own_ ? own_.get() : trace)
        , rank_(rank)
        , steps_(trace_, rank) {}

    /// Where lanes are to record; null: nowhere.
    [[nodiscard]] schedule::timeline* trace() const noexcept { return trace_; }
    [[nodiscard]] int rank() const noexcept { return rank_; }

    void begin(const Q& q) { steps_.begin(q); }
    /// `synchronous`: a step before the first round.
    void end(const Q& q, bool synchronous) {
        steps_.end(q);
        ++made_;
        if (synchronous) { before_ = made_; }
    }

    /// At the end of a round of an automatic period: chooses it once enough rounds are there, the same on all ranks.
    /// Collective then. Waits for the queue, once.
    template <class Level, class Inner> void choose_period(Level& level, Inner& inner) {
        auto& progress = level.rounds();
        if (!progress.chosen && ++rounds_ == measured_rounds) {
            Q q = inner.queue();
            if constexpr (!Q::executes_inline) {
                auto reached = q.record();  // and with it the marks of steps
                reached.wait_host(after(level.timeout()));
            }
            double mean_time = std::numeric_limits<double>::infinity();
            for (const schedule::timed_span& s : trace_->spans(rank_)) {
                if (s.kind == schedule::span_kind::communication && s.track == level.lane_name() &&
                    s.name == level.mean_name()) {
                    mean_time = std::min(mean_time, seconds(s.end - s.begin));
                }
            }
            const double step_time =
                schedule::overlap_of(*trace_, rank_, {rule_.period, before_, level.lane_name()}).step;
            progress.period = agreed_period(q, level.comm(), inner, step_time, mean_time);
            progress.chosen = true;
            quiet_step_ = step_time;
            before_ = made_;
        }
        if (own_ && progress.chosen) { own_->clear(); }
    }

    /// Errors  usage_error without a timeline of the caller's.
    [[nodiscard]] schedule::overlap_metrics overlap(std::size_t period, const std::string& lane) const {
        if (trace_ == nullptr || own_) {
            throw usage_error("overlap: nothing is recorded; give a timeline to local_update_options::trace");
        }
        return schedule::overlap_of(*trace_, rank_, {period, before_, lane, quiet_step_});
    }

private:
    /// By the mean over a replica's ranks; over replicas the mean step, and the mean that waited for nobody.
    template <class C, class Inner>
    [[nodiscard]] std::size_t agreed_period(const Q& q, C& across, Inner& inner, double step_time,
                                            double mean_time) const {
        const buffer<double, Q> inside(q, 3);
        const double own[] = {step_time, mean_time, 1};
        for (std::size_t i = 0; i < 3; ++i) { fill(q, inside.view().sub(i, 1), own[i]); }
        inner.sum_over_shards(inside.view());
        const auto total = [&](std::size_t i) { return fetch(q, inside.view().sub(i, 1), 0.0); };
        const auto all = across.gather_control({std::bit_cast<std::uint64_t>(total(0) / total(2)),
                                                std::bit_cast<std::uint64_t>(total(1) / total(2)), 0, 0});
        double step_mean = 0, least = std::numeric_limits<double>::infinity();
        for (const auto& replica : all) {
            step_mean += std::bit_cast<double>(replica[0]) / static_cast<double>(all.size());
            least = std::min(least, std::bit_cast<double>(replica[1]));
        }
        const automatic_period& wanted = *rule_.automatic;
        return std::min(wanted.most,
                        schedule::shortest_period(step_mean, least, wanted.exposed_share, rule_.delay == 1));
    }
};

}  // namespace tutti::strategy::detail
