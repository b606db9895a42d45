// The dynamic programs behind choose_levels: a multiple-choice knapsack over layers, the error budget cut into bins.
// Needs the standard library. Pure functions of their arguments; no validation, choose_levels did that.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357), Algorithm 1. Other than there, errors may be carried.
#pragma once

#include <algorithm>  // sort, min
#include <array>      // tiles
#include <cmath>      // ceil, floor, round, ldexp
#include <cstddef>    // size_t
#include <cstdint>    // rounded costs, stored choices
#include <limits>     // infinity
#include <optional>   // no choice fits
#include <span>       // layers
#include <utility>    // swap
#include <vector>     // rows, choices

namespace tutti::compress::detail {

/// One option of a layer.
struct level_candidate {
    double error;
    double cost;
    std::size_t option;
};
using layer_candidates = std::vector<level_candidate>;

/// Errors ascending, costs strictly descending: nobody wants an option that another one beats in both.
[[nodiscard]] inline layer_candidates without_dominated(layer_candidates all) {
    std::sort(all.begin(), all.end(), [](const level_candidate& a, const level_candidate& b) {
        if (a.error != b.error) { return a.error < b.error; }
        return a.cost != b.cost ? a.cost < b.cost : a.option < b.option;
    });
    std::size_t kept = 0;
    for (const level_candidate& c : all) {
        if (kept == 0 || c.cost < all[kept - 1].cost) { all[kept++] = c; }
    }
    all.resize(kept);
    return all;
}

// Sums of errors are compared with this relative tolerance; conversions into bins use half of it, so that errors which
// are multiples of a bin in exact arithmetic are so here.
inline constexpr double tolerance = 1e-12;

// --- bins of rounded errors ------------------------------------------------------------------------------------------
/// How an error becomes a number of bins.
enum class bin_rounding : std::uint8_t {
    up,       ///< whatever fits by bins fits by error
    nearest,  ///< errors of rounding cancel; what fits by bins is to be checked
    down      ///< whatever fits by error fits by bins: the least cost is a lower bound
};

struct rounded_level {
    std::size_t bins;
    std::int32_t cost;
    std::size_t option;
};

// Costs become integers whose sum over any choice is below 2^29: sums are exact, in any order, and never overflow.
inline constexpr std::int32_t unreachable = std::int32_t{1} << 30;
inline constexpr int cost_bits = 29;

/// Table of the rounded program. Memory: a byte for each layer and bin when choices are kept, 16 bytes a bin besides.
struct rounded_program {
    std::vector<std::vector<rounded_level>> layers;
    std::size_t bins = 0;
    std::size_t stride = 0;               ///< of `choices`
    std::vector<std::int32_t> row;        ///< behind as many unreachable cells as there are bins: see least()
    std::vector<std::uint8_t> choices{};  ///< [layer * stride + j]: index in layers[layer]; empty unless kept

    /// Least cost within j bins; from `unreachable` on, there is no choice.
    [[nodiscard]] std::int32_t least(std::size_t j) const noexcept { return row[bins + j]; }
};

/// `exponent`: an integer cost of 1 stands for 2^-exponent.
[[nodiscard]] inline std::vector<rounded_level> rounded(std::span<const level_candidate> layer, double budget,
                                                        std::size_t bins, bin_rounding rounding, int exponent) {
    std::vector<rounded_level> levels;
    const auto most = static_cast<double>(bins);
    for (const level_candidate& c : layer) {
        const double exact = c.error / budget * most;
        const double share = rounding == bin_rounding::up        ? std::ceil(exact * (1 - tolerance / 2))
                             : rounding == bin_rounding::nearest ? std::round(exact)
                                                                 : std::floor(exact * (1 + tolerance / 2));
        if (!(share <= most)) { break; }  // so do all that follow
        const auto width = static_cast<std::size_t>(share);
        if (!levels.empty() && levels.back().bins == width) { levels.pop_back(); }  // as many bins, and dearer
        levels.push_back({width, static_cast<std::int32_t>(std::ldexp(c.cost, exponent)), c.option});
    }
    return levels;
}

// Cells that are worked on together: they and their choices stay in the first-level cache, or in registers, while all
// options of the layer pass. The count is a constant so that the loops are vectorized at any level of optimization.
inline constexpr std::size_t rounded_tile = 128;
inline constexpr std::size_t carried_tile = 64;

[[nodiscard]] inline std::size_t in_tiles(std::size_t cells, std::size_t tile) noexcept {
    return (cells + tile - 1) / tile * tile;
}

/// next[j] = min over levels of previous[j - bins] + cost, for j in [0, width); `previous` has `pad` unreachable cells
/// in front. With Keep, choices[j] is the first level that reaches it.
template <bool Keep>
void relax(const std::int32_t* previous, std::int32_t* next, std::uint8_t* choices,
           std::span<const rounded_level> levels, std::size_t pad, std::size_t width) {
    for (std::size_t at = 0; at < width; at += rounded_tile) {
        std::array<std::int32_t, rounded_tile> best;
        std::array<std::int32_t, rounded_tile> index;
        best.fill(unreachable);
        index.fill(0);
        for (std::size_t k = 0; k < levels.size() && levels[k].bins < at + rounded_tile; ++k) {
            const std::int32_t* from = previous + (pad + at - levels[k].bins);
            const std::int32_t cost = levels[k].cost;
            const auto self = static_cast<std::int32_t>(k);
            for (std::size_t i = 0; i < rounded_tile; ++i) {
                const std::int32_t t = from[i] + cost;
                const bool less = t < best[i];
                best[i] = less ? t : best[i];
                if constexpr (Keep) { index[i] = less ? self : index[i]; }
            }
        }
        std::copy(best.begin(), best.end(), next + pad + at);
        if constexpr (Keep) {
            for (std::size_t i = 0; i < rounded_tile; ++i) { choices[at + i] = static_cast<std::uint8_t>(index[i]); }
        }
    }
}

/// Cost: layers * options * bins additions and comparisons of 32 bits, vectorized; half the time without choices.
[[nodiscard]] inline rounded_program solve_rounded(std::span<const layer_candidates> layers, double budget,
                                                   std::size_t bins, bin_rounding rounding, int exponent, bool keep) {
    const std::size_t width = in_tiles(bins + 1, rounded_tile);
    rounded_program p{{}, bins, width, std::vector<std::int32_t>(bins + width, unreachable)};
    if (keep) { p.choices.resize(layers.size() * width); }
    std::vector<std::int32_t> next = p.row;
    // Nothing spent yet, within any number of bins: so a row is non-increasing.
    std::fill(p.row.begin() + static_cast<std::ptrdiff_t>(bins), p.row.end(), 0);
    for (std::size_t l = 0; l < layers.size(); ++l) {
        p.layers.push_back(rounded(layers[l], budget, bins, rounding, exponent));
        if (keep) {
            relax<true>(p.row.data(), next.data(), p.choices.data() + l * width, p.layers.back(), bins, width);
        } else {
            relax<false>(p.row.data(), next.data(), nullptr, p.layers.back(), bins, width);
        }
        p.row.swap(next);
    }
    return p;
}

/// The options, by layer, of the cheapest choice that `fits` (a predicate over them), or nothing. Of equally cheap
/// choices that with the fewest bins.
///
/// Cost  a walk over the layers for each number of bins that is tried: one under `up`, at most half as many as there
///       are layers under `nearest`, a quarter as a rule.
template <class Fits>
[[nodiscard]] std::optional<std::vector<std::size_t>> cheapest_fitting(const rounded_program& p, Fits fits) {
    std::vector<std::size_t> options(p.layers.size());
    for (std::size_t j = p.bins + 1; j-- > 0;) {
        if (p.least(j) >= unreachable) { break; }
        if (j > 0 && p.least(j - 1) == p.least(j)) { continue; }
        std::size_t left = j;
        for (std::size_t l = p.layers.size(); l-- > 0;) {
            const rounded_level& level = p.layers[l][p.choices[l * p.stride + left]];
            options[l] = level.option;
            left -= level.bins;
        }
        if (fits(options)) { return options; }
    }
    return std::nullopt;
}

// --- bins that carry their exact error -------------------------------------------------------------------------------
/// A way from bin b - shift of the previous row into bin b. An option has two: with and without a carry of fractions.
struct carried_way {
    std::size_t shift;
    double error;  ///< in bins
    double cost;
};

/// A row: of the choices whose error falls into a bin, the cheapest, with its error in bins.
struct carried_row {
    std::vector<double> cost;
    std::vector<double> error;
};

inline void relax(const carried_row& previous, carried_row& next, std::uint16_t* choices,
                  std::span<const carried_way> ways, const std::vector<double>& ends, std::size_t pad) {
    for (std::size_t at = 0; at < ends.size(); at += carried_tile) {
        std::array<double, carried_tile> cost;
        std::array<double, carried_tile> error;
        std::array<double, carried_tile> begin;
        std::array<double, carried_tile> index;  // of the type of the lanes: the oldest vector units select it too
        cost.fill(std::numeric_limits<double>::infinity());
        error.fill(0);
        index.fill(0);
        for (std::size_t i = 0; i < carried_tile; ++i) { begin[i] = static_cast<double>(at + i); }
        const double* end = ends.data() + at;
        for (std::size_t k = 0; k < ways.size() && ways[k].shift < at + carried_tile; ++k) {
            const double* from_cost = previous.cost.data() + (pad + at - ways[k].shift);
            const double* from_error = previous.error.data() + (pad + at - ways[k].shift);
            const double more_cost = ways[k].cost;
            const double more_error = ways[k].error;
            const auto self = static_cast<double>(k);
            for (std::size_t i = 0; i < carried_tile; ++i) {
                const double c = from_cost[i] + more_cost;
                const double e = from_error[i] + more_error;
                // On integers and without branches, so that compilers vectorize it.
                const int cheaper = int(c < cost[i]) | (int(c == cost[i]) & int(e < error[i]));
                const int better = int(e >= begin[i]) & int(e < end[i]) & cheaper;
                cost[i] = better ? c : cost[i];
                error[i] = better ? e : error[i];
                index[i] = better ? self : index[i];
            }
        }
        std::copy(cost.begin(), cost.end(), next.cost.data() + pad + at);
        std::copy(error.begin(), error.end(), next.error.data() + pad + at);
        for (std::size_t i = 0; i < carried_tile; ++i) { choices[at + i] = static_cast<std::uint16_t>(index[i]); }
    }
}

/// The options, by layer, of a choice whose error is within the budget, or nothing: in each bin the cheapest choice goes
/// on with its own error, so rounding does not add up. Of equally cheap choices that with the least error.
///
/// Cost  twice that of solve_rounded in operations on doubles. Memory: two bytes for each layer and bin, 64 bytes a bin
///       besides.
[[nodiscard]] inline std::optional<std::vector<std::size_t>> solve_carried(std::span<const layer_candidates> layers,
                                                                           double budget, std::size_t bins) {
    const std::size_t pad = bins + 1;
    const std::size_t width = in_tiles(bins + 1, carried_tile);
    const auto most = static_cast<double>(bins);
    // The last bin holds what spends the budget exactly, up to the tolerance; those behind it stay empty.
    std::vector<double> ends(width);
    for (std::size_t b = 0; b < width; ++b) { ends[b] = std::min(static_cast<double>(b + 1), most * (1 + tolerance)); }
    carried_row row{std::vector<double>(pad + width, std::numeric_limits<double>::infinity()),
                    std::vector<double>(pad + width, 0.0)};
    carried_row next = row;
    row.cost[pad] = 0;
    std::vector<std::uint16_t> choices(layers.size() * width);
    std::vector<std::vector<carried_way>> ways(layers.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
        for (const level_candidate& c : layers[l]) {
            const double error = c.error / budget * most * (1 + tolerance / 2);
            if (!(error < ends[bins])) { break; }  // so do all that follow
            const auto shift = static_cast<std::size_t>(error);
            ways[l].push_back({shift, error, c.cost});
            ways[l].push_back({shift + 1, error, c.cost});
        }
        relax(row, next, choices.data() + l * width, ways[l], ends, pad);
        std::swap(row, next);
    }
    const auto first = row.cost.begin() + static_cast<std::ptrdiff_t>(pad);
    const auto cheapest = std::min_element(first, first + static_cast<std::ptrdiff_t>(bins + 1));
    if (!(*cheapest < std::numeric_limits<double>::infinity())) { return std::nullopt; }
    std::vector<std::size_t> options(layers.size());
    auto b = static_cast<std::size_t>(cheapest - first);
    for (std::size_t l = layers.size(); l-- > 0;) {
        const std::size_t k = choices[l * width + b];
        options[l] = layers[l][k / 2].option;
        b -= ways[l][k].shift;
    }
    return options;
}

}  // namespace tutti::compress::detail
