// level_table: what each option of each layer costs, and what it loses. The input of choose_levels.
// Needs core/error. Whoever measures errors writes them in place.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357).
#pragma once

#include <algorithm>  // copy
#include <cmath>      // isfinite
#include <cstddef>    // size_t
#include <limits>     // not measured
#include <span>       // rows
#include <vector>     // storage

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::compress {

/// What each option of each layer costs, and what it loses. Layers may differ in their number of options: ranks end at
/// the smaller side of a matrix, and a layer may have an option "dense" that loses nothing.
///
/// Semantics  a cost is anything that adds up: bytes, or seconds that nothing hides. An error is the L2 norm of what the
///            option loses of the layer's gradient; it stays nan until it is written. All errors lie in one span, layer
///            after layer, so that ranks can sum them before they choose: then all ranks decide on the same table.
/// Errors     usage_error when a layer has no options or more than 256, or a cost is negative or not finite.
class level_table {
    std::vector<std::size_t> first_{0};  // layer l has [first_[l], first_[l + 1])
    std::vector<double> costs_;
    std::vector<double> errors_;

public:
    static constexpr std::size_t most_options = 256;

    void add_layer(std::span<const double> costs) {
        if (costs.empty() || costs.size() > most_options) {
            throw usage_error(
                formatted("level_table: layer {} has {} options, not 1 to {}", layers(), costs.size(), most_options));
        }
        for (std::size_t o = 0; o < costs.size(); ++o) {
            if (!std::isfinite(costs[o]) || costs[o] < 0) {
                throw usage_error(
                    formatted("level_table: layer {}, option {}: {} is not a cost", layers(), o, costs[o]));
            }
        }
        for (const double c : costs) {
            costs_.push_back(c);
            errors_.push_back(std::numeric_limits<double>::quiet_NaN());
        }
        first_.push_back(costs_.size());
    }
    void add_layer(std::span<const double> costs, std::span<const double> errors) {
        if (costs.size() != errors.size()) {
            throw usage_error(
                formatted("level_table: layer {} has {} costs and {} errors", layers(), costs.size(), errors.size()));
        }
        add_layer(costs);
        std::copy(errors.begin(), errors.end(), this->errors(layers() - 1).begin());
    }

    [[nodiscard]] std::size_t layers() const noexcept { return first_.size() - 1; }
    [[nodiscard]] std::size_t options(std::size_t layer) const noexcept { return first_[layer + 1] - first_[layer]; }
    [[nodiscard]] std::span<const double> costs(std::size_t layer) const noexcept {
        return std::span(costs_).subspan(first_[layer], options(layer));
    }
    [[nodiscard]] std::span<const double> errors(std::size_t layer) const noexcept {
        return std::span(errors_).subspan(first_[layer], options(layer));
    }
    [[nodiscard]] std::span<double> errors(std::size_t layer) noexcept {
        return std::span(errors_).subspan(first_[layer], options(layer));
    }
    [[nodiscard]] std::span<double> errors() noexcept { return errors_; }
};

}  // namespace tutti::compress
