// staleness: by how much a mean that arrives a round late is trusted less, the gap of CO2, as a choice of rules.
// Needs core/elementwise. Every rule reads only what is the same on all ranks, so replicas cannot drift apart by it.
// Source: Sun et al., CO2, ICLR 2024, the staleness gap; Barkai et al., Gap-Aware Mitigation, ICLR 2020.
#pragma once

#include <algorithm>    // max, min
#include <cstddef>      // size_t
#include <string>       // descriptions
#include <string_view>  // names
#include <tuple>        // inputs and outputs
#include <variant>      // one rule of several

#include <tutti/core/elementwise.hpp>  // elementwise operations
#include <tutti/core/error.hpp>        // usage_error
#include <tutti/core/exact.hpp>        // products and sums rounded separately
#include <tutti/core/text.hpp>         // formatted

namespace tutti::strategy {

/// No penalty: the gap is 1.
struct no_gap {};
/// The same gap always. What the released code of CO2 has.
struct constant_gap {
    double value = 1;
};
/// gap = 1 + |x - y| / c:  x the anchor now, y the one that the late mean started from, c the larger of decay times its
/// last value and the norm of the late mean. 1 when nothing moved and when nothing ever arrived.
struct scalar_gap {
    double decay = 0.9;
};
/// The same for every element by itself, c being the root of a running mean of squares (Gap-Aware's form). Costs two
/// copies of the parameters.
struct elementwise_gap {
    double decay = 0.999;
};

/// How the penalty of a late mean is found; the mean is divided by it.
///
/// Semantics  always finite and at least 1. For a mean that is not late scalar_gap and elementwise_gap are 1.
///            None of these is known to be equation 3 of the CO2 paper, which no public code computes: they follow what
///            the paper says of the gap, that it quantifies the discrepancy of model versions and divides the update.
using staleness_gap = std::variant<no_gap, constant_gap, scalar_gap, elementwise_gap>;

namespace detail {

inline constexpr double largest_gap = 1e30;  // a float still, and no update at all

[[nodiscard]] inline double gap_of(double moved, double scale) noexcept {
    return scale > 0 ? std::min(1 + moved / scale, largest_gap) : 1;
}

inline void expect_valid(const staleness_gap& gap) {
    if (const auto* const g = std::get_if<constant_gap>(&gap)) {
        if (!(g->value >= 1 && g->value <= largest_gap)) {
            throw usage_error(formatted("staleness gap: the constant is {}, expected 1 or more", g->value));
        }
    }
    const auto* const scalar = std::get_if<scalar_gap>(&gap);
    const auto* const elements = std::get_if<elementwise_gap>(&gap);
    const double decay = scalar != nullptr ? scalar->decay : elements != nullptr ? elements->decay : 0;
    if (!(decay >= 0 && decay < 1)) {
        throw usage_error(formatted("staleness gap: the decay is {}, expected a value in [0, 1)", decay));
    }
}
[[nodiscard]] inline std::string describe(const staleness_gap& gap) {
    if (const auto* const c = std::get_if<constant_gap>(&gap)) { return formatted("constant gap {}", c->value); }
    if (const auto* const s = std::get_if<scalar_gap>(&gap)) { return formatted("scalar gap of decay {}", s->decay); }
    if (const auto* const e = std::get_if<elementwise_gap>(&gap)) {
        return formatted("elementwise gap of decay {}", e->decay);
    }
    return "no gap";
}

/// squares = decay squares + (1 - decay) mean^2;  mean /= 1 + |moved| / sqrt(squares / correction)
template <floating_element R, memory M> struct elementwise_gap_operation {
    static constexpr std::string_view name = "elementwise_gap";
    view<R, M> mean;
    view<R, M> squares;
    view<const R, M> moved;  ///< by the last outer step
    R decay;
    double correction;  ///< 1 - decay^n in the n-th round: the running mean began at 0

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(5 * mean.size_bytes()), 10.0 * static_cast<double>(mean.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(mean, squares, moved); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(mean, squares); }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<R, R> result(std::size_t, R d, R s, R by) const noexcept {
        const exact k(decay);
        const exact now = k * exact(s) + (exact(R{1}) - k) * (exact(d) * exact(d));
        if (by == R{0} || !(now.value > R{0})) { return {d, now.value}; }
        const exact typical = root(exact(static_cast<double>(now.value)) / exact(correction));
        const exact ratio = exact(static_cast<double>(by < R{0} ? -by : by)) / typical;
        const exact gap = exact(1.0) + (ratio.value < largest_gap ? ratio : exact(largest_gap));
        return {static_cast<R>((exact(static_cast<double>(d)) / gap).value), now.value};
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

}  // namespace detail
}  // namespace tutti::strategy
