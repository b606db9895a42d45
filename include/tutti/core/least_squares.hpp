// least_squares: coefficients, none below 0, of what was measured: costs that are sums of a few terms, and lines.
// Needs core/error. What planners calibrate themselves by: plan/calibrate, sequence/calibration.
#pragma once

#include <algorithm>    // min, max, all_of
#include <array>        // columns
#include <cmath>        // sqrt, isfinite
#include <cstddef>      // size_t
#include <limits>       // infinity
#include <span>         // measurements
#include <string_view>  // messages
#include <vector>       // columns

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti {

namespace detail {

// Least squares of sum over `used` columns = left, by orthogonalization; 0 for columns that are not used.
template <std::size_t Terms> struct least_squares {
    std::array<double, Terms> solution{};
    double residual = 0;
};
template <std::size_t Terms>
[[nodiscard]] least_squares<Terms> solve_least_squares(std::array<std::vector<double>, Terms> columns,
                                                       std::vector<double> left, unsigned used) {
    std::array<std::array<double, Terms>, Terms> upper{};
    std::array<double, Terms> right{};
    const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
        double sum = 0;
        for (std::size_t i = 0; i < a.size(); ++i) { sum += a[i] * b[i]; }
        return sum;
    };
    const auto subtract = [](std::vector<double>& from, double factor, const std::vector<double>& what) {
        for (std::size_t i = 0; i < from.size(); ++i) { from[i] -= factor * what[i]; }
    };
    for (std::size_t c = 0; c < Terms; ++c) {
        if ((used >> c & 1u) == 0) { continue; }
        upper[c][c] = std::sqrt(dot(columns[c], columns[c]));
        for (double& v : columns[c]) { v /= upper[c][c]; }
        for (std::size_t d = c + 1; d < Terms; ++d) {
            upper[c][d] = dot(columns[c], columns[d]);
            subtract(columns[d], upper[c][d], columns[c]);
        }
        right[c] = dot(columns[c], left);
        subtract(left, right[c], columns[c]);
    }
    least_squares<Terms> result;
    for (std::size_t c = Terms; c-- > 0;) {
        if ((used >> c & 1u) == 0) { continue; }
        double value = right[c];
        for (std::size_t d = c + 1; d < Terms; ++d) { value -= upper[c][d] * result.solution[d]; }
        result.solution[c] = value / upper[c][c];
    }
    result.residual = dot(left, left);
    return result;
}

}  // namespace detail

/// The coefficients x, none below 0, for which the sum of x[c] columns[c] comes closest to `right`.
///
/// Shapes       columns as long as right. One of zeros alone gets 0.
/// Determinism  of the arguments.
/// Cost         2^Terms small least-squares problems: every choice of coefficients that may be other than 0 is tried.
template <std::size_t Terms>
[[nodiscard]] std::array<double, Terms> non_negative_least_squares(
    const std::array<std::vector<double>, Terms>& columns, const std::vector<double>& right) {
    unsigned present = 0;
    for (std::size_t c = 0; c < Terms; ++c) {
        const bool empty = std::all_of(columns[c].begin(), columns[c].end(), [](double v) { return v == 0; });
        present |= empty ? 0u : 1u << c;
    }
    detail::least_squares<Terms> best;
    best.residual = std::numeric_limits<double>::infinity();
    for (unsigned used = 0; used < 1u << Terms; ++used) {
        if ((used & ~present) != 0) { continue; }
        const auto found = detail::solve_least_squares(columns, right, used);
        bool fits = found.residual < best.residual;
        for (const double coefficient : found.solution) { fits = fits && coefficient >= 0; }
        if (fits) { best = found; }
    }
    return best.solution;
}

/// What took how long.
struct measured_work {
    double amount = 0;
    double seconds = 0;
};
/// Seconds of work: `start`, and `each` of a unit.
struct work_line {
    double start = 0;
    double each = 0;
};

/// The line, neither figure below 0, that comes closest: least sum of (line / time - 1)^2, so that little work counts as
/// much as much.
/// Errors  usage_error, which begins with `what`: an amount or a time that is not positive and finite, work of one size,
///         or more work that takes no longer.
[[nodiscard]] inline work_line fitted_line(std::span<const measured_work> points, std::string_view what) {
    double least = std::numeric_limits<double>::infinity(), most = 0;
    for (const measured_work& p : points) {
        if (!(p.amount > 0) || !std::isfinite(p.amount) || !(p.seconds > 0) || !std::isfinite(p.seconds)) {
            throw usage_error(formatted("{}: {} in {} s is no measurement", what, p.amount, p.seconds));
        }
        least = std::min(least, p.amount);
        most = std::max(most, p.amount);
    }
    if (!(least < most)) {
        throw usage_error(formatted("{}: measurements of one size do not tell where the line begins", what));
    }
    std::array<std::vector<double>, 2> columns;
    for (const measured_work& p : points) {
        columns[0].push_back(1 / p.seconds);
        columns[1].push_back(p.amount / most / p.seconds);
    }
    const auto found = non_negative_least_squares(columns, std::vector<double>(points.size(), 1.0));
    if (found[1] == 0) { throw usage_error(formatted("{}: larger ones take no longer", what)); }
    return {found[0], found[1] / most};
}

}  // namespace tutti
