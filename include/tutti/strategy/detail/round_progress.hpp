// round_progress: where the rounds of a local-update strategy are, by fragment, and what of that is saved.
// Needs strategy/local_update_rule and core/buffer.
#pragma once

#include <array>     // entries
#include <cstddef>   // size_t
#include <cstdint>   // counters
#include <optional>  // the round that ends
#include <vector>    // fragments

#include <tutti/core/buffer.hpp>                 // saved numbers
#include <tutti/core/elementwise.hpp>            // fill
#include <tutti/core/error.hpp>                  // usage_error
#include <tutti/core/run.hpp>                    // fetch
#include <tutti/core/state.hpp>                  // state_entry
#include <tutti/core/text.hpp>                   // formatted
#include <tutti/strategy/local_update_rule.hpp>  // local_update_rule

namespace tutti::strategy::detail {

/// A part of the elements, and where its rounds are.
struct fragment {
    std::size_t offset = 0, size = 0;
    // Saved.
    std::uint64_t steps = 0;      ///< in this round
    std::uint64_t rounds = 0;     ///< ended
    std::uint64_t adopted = 0;    ///< means
    bool arriving = false;        ///< a payload was sent whose mean is not adopted
    double scale = 0, moved = 0;  ///< of scalar_gap: its c, and the norm of the last outer step
};

/// Synchronous steps, then rounds, those of every fragment by themselves.
///
/// Storage  the numbers are on the host; entries() are copies on the queue, which save() writes.
template <queue Q> class round_progress {
    using M = typename Q::memory_type;
    local_update_rule rule_;
    Q queue_;
    buffer<std::uint64_t, Q> saved_counters_;
    buffer<double, Q> saved_figures_;

public:
    std::vector<fragment> fragments;
    // Saved.
    std::uint64_t made = 0;    ///< steps
    std::uint64_t period;      ///< steps of a round
    bool chosen = false;       ///< by measurement
    double learning_rate = 0;  ///< of the last step
    double gap = 1;            ///< that the last mean was divided by; 1 if every element has one of its own

    round_progress(Q q, const local_update_rule& rule)
        : rule_(rule)
        , queue_(q)
        , saved_counters_(q, 3 + 4 * rule.fragments)
        , saved_figures_(q, 2 + 2 * rule.fragments)
        , period(rule.period) {}

    [[nodiscard]] bool in_synchronous_steps() const noexcept { return made < rule_.synchronous_steps; }
    /// The fragment whose round the coming step ends, if it ends one. No two rounds end together.
    [[nodiscard]] std::optional<std::size_t> ending() const noexcept {
        if (in_synchronous_steps()) { return std::nullopt; }
        for (std::size_t f = 0; f < fragments.size(); ++f) {
            const bool first = fragments[f].rounds == 0;
            const std::uint64_t length = first ? (f + 1) * period / fragments.size() : period;
            if (fragments[f].steps + 1 >= length) { return f; }
        }
        return std::nullopt;
    }
    /// Counts a step.
    void step(double rate) noexcept {
        if (!in_synchronous_steps()) {
            for (fragment& f : fragments) { ++f.steps; }
        }
        ++made;
        learning_rate = rate;
    }
    /// Replicas are equal as they are: no step was made by themselves since they had the same values.
    [[nodiscard]] bool replicas_equal() const noexcept {
        for (const fragment& f : fragments) {
            if (f.steps != 0 || (f.rounds != 0 && !rule_.takes_mean())) { return false; }
        }
        return true;
    }
    /// That have ended.
    [[nodiscard]] std::uint64_t ended() const noexcept {
        std::uint64_t all = 0;
        for (const fragment& f : fragments) { all += f.rounds; }
        return all;
    }

    [[nodiscard]] std::array<state_entry<M>, 2> entries() const {
        return {state_of("local_update/counters", saved_counters_.view()),
                state_of("local_update/figures", saved_figures_.view())};
    }
    /// Writes counters and figures where entries() has them.
    void save() {
        const auto write = [this](const auto& numbers, const auto& to) {
            for (std::size_t i = 0; i < numbers.size(); ++i) { fill(queue_, to.view().sub(i, 1), numbers[i]); }
        };
        write(counters(), saved_counters_);
        write(figures(), saved_figures_);
    }
    /// Reads them. Errors: usage_error when they cannot be this rule's; nothing is changed then.
    void restored() {
        const auto read = [this](auto numbers, const auto& from) {
            for (std::size_t i = 0; i < numbers.size(); ++i) {
                numbers[i] = fetch(queue_, from.view().sub(i, 1), numbers[i]);
            }
            return numbers;
        };
        const std::vector<std::uint64_t> counter = read(counters(), saved_counters_);
        const std::vector<double> figure = read(figures(), saved_figures_);
        const std::size_t n = fragments.size();
        for (std::size_t f = 0; f < n; ++f) {
            const std::uint64_t in_flight = counter[4 * f + 3];
            if (in_flight > (rule_.delay == 1 ? 1u : 0u)) {
                throw usage_error(
                    formatted("restored: {} means in flight with a delay of {}: the state is of another rule, or "
                              "of none",
                              in_flight, rule_.delay));
            }
        }
        const std::uint64_t saved_period = counter[4 * n + 1];
        if (rule_.automatic && saved_period == 0) {
            throw usage_error("restored: a period of 0 steps: the state is of another rule, or of none");
        }
        for (std::size_t f = 0; f < n; ++f) {
            fragment& own = fragments[f];
            own.steps = counter[4 * f];
            own.rounds = counter[4 * f + 1];
            own.adopted = counter[4 * f + 2];
            own.arriving = counter[4 * f + 3] != 0;
            own.scale = figure[2 * f];
            own.moved = figure[2 * f + 1];
        }
        made = counter[4 * n];
        period = rule_.automatic ? saved_period : rule_.period;
        chosen = counter[4 * n + 2] != 0;
        learning_rate = figure[2 * n];
        gap = figure[2 * n + 1];
    }

private:
    [[nodiscard]] std::vector<std::uint64_t> counters() const {
        std::vector<std::uint64_t> all;
        for (const fragment& f : fragments) {
            all.insert(all.end(), {f.steps, f.rounds, f.adopted, f.arriving ? 1u : 0u});
        }
        all.insert(all.end(), {made, period, chosen ? 1u : 0u});
        return all;
    }
    [[nodiscard]] std::vector<double> figures() const {
        std::vector<double> all;
        for (const fragment& f : fragments) { all.insert(all.end(), {f.scale, f.moved}); }
        all.insert(all.end(), {learning_rate, gap});
        return all;
    }
};

}  // namespace tutti::strategy::detail
