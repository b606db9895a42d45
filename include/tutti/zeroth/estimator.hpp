// estimator: the derivative along random directions from losses of perturbed weights (SPSA), and what a step does with
// it. Needs zeroth/pending_update and zeroth/probe. Scalars alone: which probes a step makes, what their losses say, which
// updates follow.
// Source: MeZO, arXiv 2305.17333, definition 1 and section 2; Spall, Multivariate stochastic approximation using a
// simultaneous perturbation gradient approximation, 1992. Rules beside plain descent are those that Zhang et al.
// compare, arXiv 2402.11592. The record of a shard, and sums in the order of shards, are ours.
#pragma once

#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // seeds, counts
#include <span>         // probes, records
#include <string>       // descriptions
#include <string_view>  // names
#include <vector>       // probes, updates

#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/text.hpp>              // formatted
#include <tutti/zeroth/direction.hpp>       // direction
#include <tutti/zeroth/pending_update.hpp>  // pending_update
#include <tutti/zeroth/probe.hpp>           // loss_value

namespace tutti::zeroth {

enum class estimate : std::uint8_t {
    two_sided,  ///< (L(w + eps z) - L(w - eps z)) / 2 eps: two forward passes a direction
    one_sided   ///< (L(w + eps z) - L(w)) / eps: one, and one for all; its error is of the order of eps
};

enum class update_rule : std::uint8_t {
    descent,      ///< along -g z
    sign,         ///< along -z or z: by the sign of g, a scalar
    conservative  ///< to the best of w, w - lr g z and w + lr g z: three forward passes more; without decay
};

/// How a derivative is estimated, and what is done with it.
///
/// Units   epsilon is a length in weights. MeZO fine-tunes whole models with epsilon 1e-3 and learning rates of 1e-7 to
///         1e-6; those for prefixes (1e-1, 1e-2) or low-rank factors (1e-2, 1e-4) destroy a whole model. `step_result`
///         says how far a step went in units of epsilon.
/// Errors  validate() throws usage_error.
struct estimator {
    double epsilon = 1e-3;
    std::uint32_t directions = 1;  ///< a step's estimate is the mean over them (n-SPSA)
    estimate sides = estimate::two_sided;
    update_rule rule = update_rule::descent;
    distribution draws = distribution::normal;
    std::uint64_t seed = 0;
    double weight_decay = 0;  ///< decoupled from the estimate, times the learning rate

    void validate() const {
        if (!(epsilon > 0) || !std::isfinite(epsilon)) {
            throw usage_error(formatted("zeroth: epsilon is {}, expected a positive number", epsilon));
        }
        if (directions == 0 || directions > max_directions) {
            throw usage_error(formatted("zeroth: {} directions, expected 1 to {}", directions, max_directions));
        }
        if (!(weight_decay >= 0) || !std::isfinite(weight_decay)) {
            throw usage_error(formatted("zeroth: weight decay is {}, expected 0 or more", weight_decay));
        }
        if (rule == update_rule::conservative && directions != 1) {
            throw usage_error(formatted("zeroth: the conservative rule has one direction, not {}", directions));
        }
        if (rule == update_rule::conservative && weight_decay != 0) {
            throw usage_error(formatted(
                "zeroth: a weight decay of {} would lead the conservative rule to a point that it did not probe",
                weight_decay));
        }
    }
    /// Equal exactly when the estimator is.
    [[nodiscard]] std::string describe() const {
        constexpr std::string_view rules[] = {"descent", "sign", "conservative"};
        return formatted("epsilon {}, directions {}, {}-sided, {}, {}, seed {}, weight decay {}", epsilon, directions,
                         sides == estimate::two_sided ? "two" : "one", rules[static_cast<std::size_t>(rule)],
                         name_of(draws), seed, weight_decay);
    }
    [[nodiscard]] direction direction_of(std::uint64_t step, std::uint32_t index) const noexcept {
        return {seed, step, index, draws};
    }
    /// The other end of a direction's difference, as a multiple of epsilon.
    [[nodiscard]] double other_side() const noexcept { return sides == estimate::two_sided ? -1 : 0; }
    [[nodiscard]] double distance() const noexcept { return sides == estimate::two_sided ? 2 * epsilon : epsilon; }
};

/// Refuses a learning rate before anything moved.
inline void expect_learning_rate(double rate) {
    if (!(rate >= 0) || !std::isfinite(rate)) {
        throw usage_error(formatted("zeroth: the learning rate is {}, expected 0 or more", rate));
    }
}

/// One direction's losses on one shard of the batch: all that ranks exchange. L+ - L- keeps its 53 bits, so the estimate
/// has them; the loss itself, for reports, is rounded.
struct shard_record {
    double difference = 0;         ///< L(w + eps z) minus the other side
    float loss = 0;                ///< L(w + eps z)
    std::uint32_t normalizer = 0;  ///< 0: the shard says nothing, its losses are 0
};

/// The most terms a shard may have: the rest of the word carries a check.
inline constexpr std::uint32_t max_normalizer = (1u << 24) - 1;

/// A weighted mean over shards.
struct batch_losses {
    double difference = 0;
    double loss_plus = 0;
    double loss_other = 0;
    double normalizer = 0;
    bool finite = false;  ///< all losses are, and there is a shard with terms
};

/// Sums in the order of the shards: the same bits wherever they came from.
[[nodiscard]] inline batch_losses combined(std::span<const shard_record> shards) noexcept {
    batch_losses all;
    all.finite = true;
    for (const shard_record& s : shards) {
        const auto n = static_cast<double>(s.normalizer);
        const auto loss = static_cast<double>(s.loss);
        all.finite = all.finite && std::isfinite(s.difference) && std::isfinite(loss);
        all.difference += n * s.difference;
        all.loss_plus += n * loss;
        all.loss_other += n * (loss - s.difference);
        all.normalizer += n;
    }
    all.finite = all.finite && all.normalizer != 0;
    all.difference /= all.normalizer;
    all.loss_plus /= all.normalizer;
    all.loss_other /= all.normalizer;
    return all;
}

/// Sums of one shard's micro-batches, for each probe. Terms of no weight are not looked at.
class shard_sums {
    std::vector<double> sums_;
    std::uint64_t normalizer_ = 0;

public:
    explicit shard_sums(std::size_t probes) : sums_(probes, 0.0) {}

    void add(std::span<const loss_value> losses) {
        const std::uint32_t n = losses.front().normalizer;
        for (const loss_value& l : losses) {
            if (l.normalizer != n) {
                throw usage_error(formatted("zeroth: one micro-batch has {} and {} loss terms", n, l.normalizer));
            }
        }
        normalizer_ += n;
        if (normalizer_ > max_normalizer) {
            throw usage_error(
                formatted("zeroth: a shard of {} loss terms, {} are the most", normalizer_, max_normalizer));
        }
        for (std::size_t k = 0; k < sums_.size() && n != 0; ++k) {
            sums_[k] += static_cast<double>(n) * losses[k].mean;
        }
    }
    [[nodiscard]] std::uint32_t normalizer() const noexcept { return static_cast<std::uint32_t>(normalizer_); }
    [[nodiscard]] double mean(std::size_t probe) const noexcept {
        return normalizer_ == 0 ? 0.0 : sums_[probe] / static_cast<double>(normalizer_);
    }
};

/// The updates of a step with these derivatives along its directions; one may be 0.
[[nodiscard]] inline std::vector<pending_update> updates_of(const estimator& how, std::uint64_t step,
                                                            std::span<const double> derivatives, double learning_rate) {
    std::vector<pending_update> updates;
    const auto n = static_cast<double>(derivatives.size());
    for (std::size_t k = 0; k < derivatives.size(); ++k) {
        double g = derivatives[k];
        if (how.rule == update_rule::sign) { g = g > 0 ? 1 : g < 0 ? -1 : 0; }
        updates.push_back(
            {how.direction_of(step, static_cast<std::uint32_t>(k)), g / n, learning_rate, how.weight_decay});
    }
    return updates;
}

}  // namespace tutti::zeroth
