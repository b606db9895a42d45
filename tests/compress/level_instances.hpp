// Tables of costs and errors for the tests of choose_levels, and judges that share no code with it: all choices counted
// out, and the exact list of undominated sums.
// Needs compress/level_choice for its types alone.
#pragma once

#include <algorithm>  // sort, max
#include <cmath>      // exp, pow, floor
#include <cstddef>    // size_t
#include <limits>     // infinity
#include <random>     // instances
#include <vector>     // rows

#include <tutti/compress/level_choice.hpp>  // level_table, error_sum

namespace tutti::test {

using compress::error_sum;
using compress::level_solver;

inline constexpr level_solver all_solvers[] = {level_solver::rounded_up, level_solver::rounded_nearest,
                                               level_solver::carried};
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// Rows as written down, before they become a table.
struct instance {
    std::vector<std::vector<double>> costs;
    std::vector<std::vector<double>> errors;
    std::vector<std::size_t> uniform;

    [[nodiscard]] std::size_t layers() const { return costs.size(); }
    [[nodiscard]] compress::level_table table() const {
        compress::level_table t;
        for (std::size_t l = 0; l < layers(); ++l) { t.add_layer(costs[l], errors[l]); }
        return t;
    }
    [[nodiscard]] double cost(const std::vector<std::size_t>& options) const {
        double sum = 0;
        for (std::size_t l = 0; l < layers(); ++l) { sum += costs[l].at(options.at(l)); }
        return sum;
    }
    [[nodiscard]] double error(const std::vector<std::size_t>& options, error_sum how) const {
        double sum = 0;
        for (std::size_t l = 0; l < layers(); ++l) {
            const double e = errors[l].at(options.at(l));
            sum += how == error_sum::squares ? e * e : e;
        }
        return sum;
    }
    /// Least cost of all choices with an error up to `budget`; infinity if there is none. Counts them all out.
    [[nodiscard]] double least_cost(double budget, error_sum how) const {
        std::vector<std::size_t> options(layers(), 0);
        double least = infinity;
        for (;;) {
            if (error(options, how) <= budget) { least = std::min(least, cost(options)); }
            std::size_t l = 0;
            while (l < layers() && ++options[l] == costs[l].size()) { options[l++] = 0; }
            if (l == layers()) { return least; }
        }
    }
    /// The same by the list of sums that no other sum beats in both: exact, for instances too large to count out.
    [[nodiscard]] double least_cost_by_list(double budget) const {
        struct sums {
            double error, cost;
        };
        std::vector<sums> list{{0, 0}};
        for (std::size_t l = 0; l < layers(); ++l) {
            std::vector<sums> grown;
            for (const sums& s : list) {
                for (std::size_t o = 0; o < costs[l].size(); ++o) {
                    if (s.error + errors[l][o] <= budget) {
                        grown.push_back({s.error + errors[l][o], s.cost + costs[l][o]});
                    }
                }
            }
            std::sort(grown.begin(), grown.end(), [](const sums& a, const sums& b) {
                return a.error < b.error || (a.error == b.error && a.cost < b.cost);
            });
            list.clear();
            for (const sums& s : grown) {
                if (list.empty() || s.cost < list.back().cost) { list.push_back(s); }
            }
        }
        return list.empty() ? infinity : list.back().cost;
    }
};

/// Layers as in a network: sizes and gradient norms over orders of magnitude, errors falling with the level.
inline instance network_like(std::mt19937_64& random, std::size_t layers, std::size_t options) {
    std::uniform_real_distribution<double> unit(0, 1);
    instance i;
    for (std::size_t l = 0; l < layers; ++l) {
        const double size = std::floor(1000 * std::exp(9 * unit(random)));
        const double scale = std::exp(4 * unit(random));
        const double decay = 0.3 + 0.6 * unit(random);
        i.costs.emplace_back();
        i.errors.emplace_back();
        for (std::size_t o = 0; o < options; ++o) {
            const auto level = static_cast<double>(o + 1);
            i.costs.back().push_back(size * level);
            i.errors.back().push_back(scale * std::pow(decay, 0.7 * level));
        }
        i.uniform.push_back(options / 3);
    }
    return i;
}

/// No order in anything: options that others dominate, rows of different lengths, ties, zeros.
inline instance disorderly(std::mt19937_64& random, std::size_t layers, std::size_t options) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    instance i;
    for (std::size_t l = 0; l < layers; ++l) {
        const std::size_t count = 1 + below(options);
        i.costs.emplace_back();
        i.errors.emplace_back();
        for (std::size_t o = 0; o < count; ++o) {
            i.costs.back().push_back(static_cast<double>(below(8)) * (below(2) == 0 ? 1 : 0.37));
            i.errors.back().push_back(below(5) == 0 ? 0 : std::exp(static_cast<double>(below(1000)) / 100));
        }
        i.uniform.push_back(below(count));
    }
    return i;
}

/// Errors that are multiples of `unit`.
inline instance multiples(std::mt19937_64& random, std::size_t layers, std::size_t options, double unit) {
    instance i;
    for (std::size_t l = 0; l < layers; ++l) {
        i.costs.emplace_back();
        i.errors.emplace_back();
        for (std::size_t o = 0; o < options; ++o) {
            i.costs.back().push_back(static_cast<double>(random() % 1000));
            i.errors.back().push_back(static_cast<double>(random() % 12) * unit);
        }
        i.uniform.push_back(random() % options);
    }
    return i;
}

/// All layers nearly alike, the uniform choice optimal: every loss by rounding shows.
inline instance homogeneous(std::mt19937_64& random, std::size_t layers, double spread) {
    std::uniform_real_distribution<double> unit(0, 1);
    instance i;
    for (std::size_t l = 0; l < layers; ++l) {
        const double scale = 1 + spread * unit(random);
        i.costs.push_back({1000, 2000, 3000});
        i.errors.push_back({2 * scale, scale, scale / 2});
        i.uniform.push_back(1);
    }
    return i;
}

}  // namespace tutti::test
