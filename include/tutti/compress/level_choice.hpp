// choose_levels: one level of compression a layer, at the least cost, losing no more than a choice that is trusted.
// Needs core/error, core/state for the hash. Pure host code; ranks that hold the same table make the same choice.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357), Algorithm 1.
#pragma once

#include <algorithm>    // max_element
#include <cmath>        // isfinite, frexp, ldexp
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <limits>       // infinity
#include <optional>     // lower bound
#include <span>         // rows
#include <string>       // descriptions
#include <string_view>  // reasons
#include <utility>      // move
#include <vector>       // choice

#include <tutti/compress/detail/level_solver.hpp>  // dynamic programs
#include <tutti/compress/level_table.hpp>          // level_table
#include <tutti/core/error.hpp>                    // usage_error
#include <tutti/core/state.hpp>                    // hash_bytes
#include <tutti/core/text.hpp>                     // formatted
#include <tutti/core/view.hpp>                     // bytes of a choice

namespace tutti::compress {

/// How the errors of layers become one number.
enum class error_sum : std::uint8_t {
    norms,   ///< sum of L2 norms: the published code; cautious, as if all errors pointed the same way
    squares  ///< sum of squared norms: the true squared error of the whole gradient
};

/// What finds the choice. All keep the promises of choose_levels; they differ in time and in how close they come.
enum class level_solver : std::uint8_t {
    rounded_up,       ///< errors rounded up to bins, as published: never dearer under a larger budget, but each layer
                      ///< gives away part of a bin; in bench/level_choice.cpp 0.7 % of the cost at 200 layers, 4 % at
                      ///< 1000
    rounded_nearest,  ///< to nearest, and tried on the true errors: as fast, and there within 0.5 % of `carried`
    carried           ///< each bin goes on with the exact error of its choice: the closest, ten times slower
};

struct choice_options {
    double alpha = 1;  ///< budget over what the uniform choice loses (of its square, under error_sum::squares)
    error_sum sum = error_sum::norms;
    level_solver solver = level_solver::rounded_nearest;
    std::size_t bins = 10'000;  ///< the budget is cut into
    bool lower_bound = false;   ///< also compute what no choice within the budget can undercut: another half the time
};

/// Why a choice is what it is. All but `solved` mean that it is the uniform choice.
enum class choice_reason : std::uint8_t {
    solved,            ///< the solver's, within the budget and no dearer than uniform
    error_not_finite,  ///< an error, or their sum, is nan or infinite: the table says nothing
    no_budget,         ///< the uniform choice loses nothing, as when all gradients are 0: nothing to trade
    over_budget,       ///< the solver found no choice within the budget
    dearer             ///< the solver's choice would cost more than uniform
};

[[nodiscard]] constexpr std::string_view name_of(choice_reason r) noexcept {
    switch (r) {
    case choice_reason::solved: return "solved";
    case choice_reason::error_not_finite: return "an error is not finite";
    case choice_reason::no_budget: return "the uniform choice loses nothing";
    case choice_reason::over_budget: return "no choice was found within the budget";
    case choice_reason::dearer: return "the cheapest choice found within the budget is dearer";
    }
    return "unknown";
}

/// A choice, in the numbers of the table as given.
struct level_choice {
    std::vector<std::size_t> options;  ///< by layer
    double cost = 0;
    double error = 0;         ///< summed as choice_options::sum says; may be nan or infinite under error_not_finite
    double budget = 0;        ///< alpha * what the uniform choice loses
    double uniform_cost = 0;  ///< what cost / uniform_cost compares with
    /// No choice within the budget costs less. Infinite when there is none; absent when not asked for, or when the
    /// solver did not run.
    std::optional<double> lower_bound{};
    choice_reason reason = choice_reason::solved;
    std::size_t layer = 0;  ///< error_not_finite: the first layer where it happens

    [[nodiscard]] bool fell_back() const noexcept { return reason != choice_reason::solved; }
};

/// The same on all ranks and machines that made the same choice; for comm.agree() before it is used.
[[nodiscard]] inline std::uint64_t hash_of(const level_choice& choice) {
    const std::vector<std::uint64_t> words(choice.options.begin(), choice.options.end());
    return hash_bytes(as_bytes(view<const std::uint64_t>(words.data(), words.size())));
}

/// One line for a log: `levels: solved; cost 3.1e+06, 41.2 % of uniform; error 0.998 of budget 1`.
[[nodiscard]] inline std::string describe(const level_choice& c) {
    std::string text = c.fell_back() ? formatted("levels: uniform, as {}", name_of(c.reason)) : "levels: solved";
    if (c.reason == choice_reason::error_not_finite) { text += formatted(" (layer {})", c.layer); }
    text += formatted("; cost {:.6g}", c.cost);
    if (c.uniform_cost > 0) { text += formatted(", {:.1f} % of uniform", 100 * c.cost / c.uniform_cost); }
    text += formatted("; error {:.6g} of budget {:.6g}", c.error, c.budget);
    if (c.lower_bound) { text += formatted("; cost at least {:.6g}", *c.lower_bound); }
    return text;
}

namespace detail {

/// sum over layers of row(layer)[options[layer]], in the order of layers.
template <class Row> [[nodiscard]] double sum_over(std::span<const std::size_t> options, Row row) {
    double sum = 0;
    for (std::size_t l = 0; l < options.size(); ++l) { sum += row(l)[options[l]]; }
    return sum;
}

/// The power of two by which costs become integers: their dearest choice just below 2^cost_bits.
[[nodiscard]] inline int cost_exponent(const level_table& table) {
    double most = 0;
    for (std::size_t l = 0; l < table.layers(); ++l) {
        const auto costs = table.costs(l);
        most += *std::max_element(costs.begin(), costs.end());
    }
    if (!std::isfinite(most)) { throw usage_error("choose_levels: the sum of the largest costs is infinite"); }
    int exponent = 0;
    std::frexp(most, &exponent);  // most < 2^exponent
    return cost_bits - exponent;
}

inline void check_arguments(const level_table& table, std::span<const std::size_t> uniform,
                            const choice_options& options) {
    if (uniform.size() != table.layers()) {
        throw usage_error(
            formatted("choose_levels: the uniform choice has {} layers, the table {}", uniform.size(), table.layers()));
    }
    for (std::size_t l = 0; l < uniform.size(); ++l) {
        if (uniform[l] >= table.options(l)) {
            throw usage_error(
                formatted("choose_levels: layer {}: the uniform option is {} of {}", l, uniform[l], table.options(l)));
        }
        for (const double e : table.errors(l)) {
            if (e < 0) { throw usage_error(formatted("choose_levels: layer {}: {} is not an error", l, e)); }
        }
    }
    if (!std::isfinite(options.alpha) || options.alpha <= 0) {
        throw usage_error(formatted("choose_levels: alpha is {}, not positive and finite", options.alpha));
    }
    if (options.bins == 0 || options.bins > (std::size_t{1} << 20)) {
        throw usage_error(formatted("choose_levels: {} bins, not 1 to {}", options.bins, std::size_t{1} << 20));
    }
}

}  // namespace detail

/// Chooses an option a layer: the sum of costs as small as the solver finds, the sum of errors within
/// alpha * that of the `uniform` choice.
///
/// Semantics    `uniform` names the option of each layer that the user would take without this: the yardstick of error
///              and cost, and what is returned when nothing better is certain; level_choice::reason then says why.
///              Whatever solver and numbers: error <= budget * (1 + 1e-12) and cost <= uniform_cost, both summed again
///              from the table. alpha < 1 may leave nothing that keeps both: then the choice is uniform with
///              over_budget or dearer, the only case in which an error exceeds the budget.
/// Determinism  of the arguments alone, so ranks with equal tables agree; compare hash_of() to be sure. Costs enter
///              the rounded solvers as integers, 2^-29 of the dearest choice: exact where costs are integers whose
///              largest sum is below 2^29. There, `rounded_up` finds the same cost whatever the order of layers.
/// Cost         layers * options * bins additions. 200 layers, 30 options and 10,000 bins take a core 4 ms
///              rounded and 50 ms carried with AVX-512, 10 ms and 120 ms with the SSE2 of a build without -march.
///              Memory: a byte (carried: two) for each layer and bin.
/// Errors       usage_error when `uniform` does not fit the table, an error is negative, alpha or bins make no sense,
///              or costs sum to infinity. Errors that are nan or infinite happen in training and are no mistake: the
///              choice is uniform.
[[nodiscard]] inline level_choice choose_levels(const level_table& table, std::span<const std::size_t> uniform,
                                                const choice_options& options = {}) {
    detail::check_arguments(table, uniform, options);
    const int exponent = detail::cost_exponent(table);
    level_choice result;
    result.options.assign(uniform.begin(), uniform.end());
    const auto total_cost = [&](std::span<const std::size_t> o) {
        return detail::sum_over(o, [&](std::size_t l) { return table.costs(l); });
    };
    result.cost = result.uniform_cost = total_cost(uniform);

    std::vector<std::vector<double>> errors(table.layers());  // as they are summed
    for (std::size_t l = 0; l < table.layers(); ++l) {
        bool finite = true;
        for (const double e : table.errors(l)) {
            errors[l].push_back(options.sum == error_sum::squares ? e * e : e);
            finite = finite && std::isfinite(errors[l].back());
        }
        result.error += errors[l][uniform[l]];
        result.budget = options.alpha * result.error;
        if (result.reason == choice_reason::solved && !(finite && std::isfinite(result.budget))) {
            result.reason = choice_reason::error_not_finite;
            result.layer = l;
        }
    }
    if (result.fell_back()) { return result; }
    if (!(result.budget > 0)) {
        result.reason = choice_reason::no_budget;
        return result;
    }

    std::vector<detail::layer_candidates> layers(table.layers());
    for (std::size_t l = 0; l < layers.size(); ++l) {
        for (std::size_t o = 0; o < errors[l].size(); ++o) {
            layers[l].push_back({errors[l][o], table.costs(l)[o], o});
        }
        layers[l] = detail::without_dominated(std::move(layers[l]));
    }
    const auto solve = [&](detail::bin_rounding rounding, bool keep) {
        return detail::solve_rounded(layers, result.budget, options.bins, rounding, exponent, keep);
    };
    if (options.lower_bound) {
        const std::int32_t least = solve(detail::bin_rounding::down, false).least(options.bins);
        result.lower_bound = least < detail::unreachable ? std::ldexp(static_cast<double>(least), -exponent)
                                                         : std::numeric_limits<double>::infinity();
    }
    const auto total_error = [&](std::span<const std::size_t> o) {
        return detail::sum_over(o, [&](std::size_t l) { return std::span(errors[l]); });
    };
    const auto fits = [&](std::span<const std::size_t> o) {
        return total_error(o) <= result.budget * (1 + detail::tolerance);
    };
    std::optional<std::vector<std::size_t>> found;
    if (options.solver == level_solver::carried) {
        found = detail::solve_carried(layers, result.budget, options.bins);
    } else {
        const bool up = options.solver == level_solver::rounded_up;
        found =
            detail::cheapest_fitting(solve(up ? detail::bin_rounding::up : detail::bin_rounding::nearest, true), fits);
    }
    if (!found || !fits(*found)) {
        result.reason = choice_reason::over_budget;
    } else if (total_cost(*found) > result.uniform_cost) {
        result.reason = choice_reason::dearer;
    } else {
        result.options = std::move(*found);
        result.cost = total_cost(result.options);
        result.error = total_error(result.options);
    }
    return result;
}

}  // namespace tutti::compress
