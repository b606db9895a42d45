// local_update_rule: what a local-update strategy does at the end of a round, as data; the named methods as such rules.
// Needs strategy/outer_optimizer and strategy/staleness. The engine that follows them is strategy/local_update.
// Sources stand beside each method.
#pragma once

#include <concepts>     // method
#include <cstddef>      // size_t
#include <cstdint>      // choices
#include <limits>       // infinity
#include <optional>     // automatic period
#include <string>       // descriptions
#include <string_view>  // names
#include <variant>      // gaps

#include <tutti/core/error.hpp>                // usage_error
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/strategy/outer_optimizer.hpp>  // outer_optimizer
#include <tutti/strategy/staleness.hpp>        // staleness_gap

namespace tutti::strategy {

/// What replicas average: parameters, or anchor - parameters, which saves a copy where the mean comes late.
enum class round_payload : std::uint8_t { parameters, pseudo_gradient };

/// What replicas go on from in the next round.
enum class round_merge : std::uint8_t {
    anchor,           ///< the anchor, which the outer optimizer moves: equal on all replicas
    interpolation,    ///< (1 - weight) anchor + weight own parameters
    delay_corrected,  ///< the late mean + what this replica did since it was sent (CoCoD)
    pull_back,        ///< (1 - weight) own parameters + weight the late mean (overlap local SGD)
    eager,            ///< an anchor of their own, moved by their own part now and by the others' a round late
};

/// What happens to the inner optimizer's moments at the end of a round.
enum class inner_state : std::uint8_t { keep, reset, average };

/// Chooses the period while training: the shortest of which at most this share is waiting for communication.
struct automatic_period {
    double exposed_share = 0.01;
    std::size_t most = 10'000;  ///< a longer one is cut to this
};

/// Semantics  a round is `period` steps, skipped ones included: they are counted alike on all ranks. With a delay of 1
///            the mean of what replicas send at the end of round t is adopted at the end of round t + 1, always.
struct local_update_rule {
    std::size_t period = 1;
    int delay = 0;
    round_payload payload = round_payload::parameters;
    round_merge merge = round_merge::anchor;
    double weight = 0;        ///< of interpolation and pull_back
    outer_optimizer outer{};  ///< of merges that have an anchor
    staleness_gap gap = no_gap{};
    inner_state inner = inner_state::keep;
    /// Steps before the first round in which replicas average their gradients instead, and so stay equal.
    std::size_t synchronous_steps = 0;
    std::optional<automatic_period> automatic{};  ///< `period` is then that of the first rounds, which are measured
    /// Parts of the model, of whole tensors, whose rounds end in turn: what is sent at once is that much less.
    /// Source: Douillard et al., Streaming DiLoCo with overlapping communication, 2025.
    std::size_t fragments = 1;

    [[nodiscard]] const local_update_rule& rule() const noexcept { return *this; }

    [[nodiscard]] bool has_outer() const noexcept {
        return merge == round_merge::anchor || merge == round_merge::interpolation || merge == round_merge::eager;
    }
    /// All replicas have one anchor.
    [[nodiscard]] bool common_anchor() const noexcept {
        return (merge == round_merge::anchor && !takes_mean()) || merge == round_merge::interpolation;
    }
    /// The mean of the parameters is the result: no anchor is kept.
    [[nodiscard]] bool takes_mean() const noexcept {
        return merge == round_merge::anchor && delay == 0 && payload == round_payload::parameters && outer.plain() &&
               (!std::holds_alternative<constant_gap>(gap) || std::get<constant_gap>(gap).value == 1);
    }
    [[nodiscard]] bool keeps_anchor() const noexcept { return !takes_mean() && merge != round_merge::pull_back; }
    [[nodiscard]] bool keeps_momentum() const noexcept { return outer.momentum != 0; }
    /// The anchor of the round before is needed.
    [[nodiscard]] bool keeps_previous() const noexcept {
        return delay == 1 && (merge == round_merge::interpolation ||
                              (merge == round_merge::anchor && payload == round_payload::parameters));
    }
    [[nodiscard]] bool scalar() const noexcept { return delay == 1 && std::holds_alternative<scalar_gap>(gap); }
    [[nodiscard]] bool elementwise() const noexcept {
        return delay == 1 && std::holds_alternative<elementwise_gap>(gap);
    }

    void validate() const {
        outer.validate();
        detail::expect_valid(gap);
        if (period < 1) { throw usage_error("local update: the period is 0 steps, expected 1 or more"); }
        if (automatic && !(automatic->exposed_share > 0 && automatic->exposed_share < 1 && automatic->most >= 1)) {
            throw usage_error(formatted(
                "local update: an automatic period of at most {} steps with a share of {} waiting, expected 1 "
                "step or more and a share in (0, 1)",
                automatic->most, automatic->exposed_share));
        }
        if (automatic && period < 2) {
            throw usage_error(
                "local update: rounds of 1 step have none without communication to measure an automatic period by; "
                "begin with 2 or more");
        }
        if (fragments < 1 || fragments > period) {
            throw usage_error(
                formatted("local update: {} fragments whose rounds of {} steps end in turn, expected 1 to {}",
                          fragments, period, period));
        }
        if (fragments > 1 && (automatic || inner != inner_state::keep)) {
            throw usage_error(
                "local update: with fragments the period is stated and the inner state is kept: rounds have no common "
                "end to choose a period or to change moments at");
        }
        if (delay != 0 && delay != 1) {
            throw usage_error(formatted("local update: the delay is {} rounds, expected 0 or 1", delay));
        }
        const bool weighted = merge == round_merge::interpolation || merge == round_merge::pull_back;
        if (!(weight >= 0 && weight <= 1) || (!weighted && weight != 0)) {
            throw usage_error(
                formatted("local update: weight is {}, expected a value in [0, 1], and 0 unless the merge "
                          "interpolates or pulls back",
                          weight));
        }
        const bool late = merge != round_merge::anchor && merge != round_merge::interpolation;
        if (late && delay != 1) {
            throw usage_error(
                formatted("local update: the merge '{}' corrects for a late mean, set the delay to 1", name(merge)));
        }
        if (late && !std::holds_alternative<no_gap>(gap)) {
            throw usage_error(formatted(
                "local update: the merge '{}' has no common anchor to tell staleness by, set no_gap", name(merge)));
        }
        if (!has_outer() && !outer.plain()) {
            throw usage_error(
                formatted("local update: the merge '{}' has no outer optimizer, leave rate 1, momentum 0 and no clip",
                          name(merge)));
        }
        if (merge == round_merge::eager && payload != round_payload::pseudo_gradient) {
            throw usage_error("local update: the merge 'eager' sends pseudo-gradients, set the payload");
        }
        if (!has_outer() && payload != round_payload::parameters) {
            throw usage_error(formatted("local update: the merge '{}' sends parameters, set the payload", name(merge)));
        }
    }
    /// Equal exactly when ranks do the same with the same parameters.
    [[nodiscard]] std::string describe() const {
        const std::string how_often = automatic ? formatted("{} steps at first, then so that {} is waiting, {} at most",
                                                            period, automatic->exposed_share, automatic->most)
                                                : formatted("{} steps", period);
        return formatted("local update every {}{} behind {} synchronous ones, {} {} rounds late, ", how_often,
                         fragments == 1 ? std::string() : formatted(" in {} fragments", fragments), synchronous_steps,
                         payload == round_payload::parameters ? "parameters" : "pseudo-gradients", delay) +
               formatted("merge '{}' of weight {}, {}, {}, inner state {}", name(merge), weight, outer.describe(),
                         detail::describe(gap),
                         inner == inner_state::keep    ? "kept"
                         : inner == inner_state::reset ? "reset"
                                                       : "averaged");
    }
    [[nodiscard]] static constexpr std::string_view name(round_merge m) noexcept {
        constexpr std::string_view names[] = {"anchor", "interpolation", "delay corrected", "pull back", "eager"};
        return names[static_cast<std::size_t>(m)];
    }
};

/// A set of hyper-parameters that makes a rule.
template <class M>
concept local_update_method = std::copyable<M> && requires(const M& m) {
    { m.rule() } -> std::convertible_to<local_update_rule>;
};

/// Replicas take the mean of their parameters every `period` steps. Source: Stich, Local SGD Converges Fast, ICLR 2019.
struct local_sgd_method {
    std::size_t period = 12;
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const { return {.period = period, .inner = inner}; }
};

/// Momentum over rounds. Source: Wang et al., SlowMo, ICLR 2020; momentum by its code: 0.2 for 4 replicas, 0.5 for 8,
/// 0.6 for 16.
struct slow_mo_method {
    std::size_t period = 48;
    double momentum = 0.5;
    double rate = 1;
    outer_units units = outer_units::parameters;
    round_payload payload = round_payload::parameters;
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        return {.period = period,
                .payload = payload,
                .outer = {.rate = rate, .momentum = momentum, .units = units},
                .inner = inner};
    }
};

/// SlowMo whose all-reduce takes the whole next round. Source: Sun et al., CO2, ICLR 2024.
///
/// Semantics  the pseudo-code of the paper, with the gap that `gap` says (see staleness_gap). On a quadratic, where a
///            round contracts a replica's error by 1 - s, it is stable exactly for rate s / gap < 1 - momentum: longer
///            rounds need less momentum or a larger gap.
struct co2_method {
    std::size_t period = 48;
    double momentum = 0.2;
    double rate = 1;
    staleness_gap gap = scalar_gap{};
    double clip = std::numeric_limits<double>::infinity();
    outer_units units = outer_units::parameters;
    round_payload payload = round_payload::pseudo_gradient;
    int delay = 1;  ///< 0: SlowMo, and the payload is sent while everyone waits
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        return {.period = period,
                .delay = delay,
                .payload = payload,
                .outer = {.rate = rate, .momentum = momentum, .clip = clip, .units = units},
                .gap = gap,
                .inner = inner};
    }
};

/// Source: Douillard et al., DiLoCo, 2023, algorithm 1: adamw inside, Nesterov outside.
struct diloco_method {
    std::size_t period = 500;
    double rate = 0.7;
    double momentum = 0.9;
    bool nesterov = true;
    double own_weight = 0;  ///< that replicas keep of their own parameters (streaming DiLoCo's mixing)
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        return {.period = period,
                .payload = round_payload::pseudo_gradient,
                .merge = own_weight == 0 ? round_merge::anchor : round_merge::interpolation,
                .weight = own_weight,
                .outer = {.rate = rate, .momentum = momentum, .nesterov = nesterov},
                .inner = inner};
    }
};

/// DiLoCo with the mean a round late. Source: Kale et al., Eager Updates for Overlapped Communication, 2025, which finds
/// it to converge worse than the eager form.
struct delayed_diloco_method {
    std::size_t period = 500;
    double rate = 0.7;
    double momentum = 0.9;
    bool nesterov = true;
    double own_weight = 0;
    staleness_gap gap = no_gap{};
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        local_update_rule r = diloco_method{period, rate, momentum, nesterov, own_weight, inner}.rule();
        r.delay = 1;
        r.gap = gap;
        return r;
    }
};

/// A replica applies its own n-th part of the mean at once and that of the others a round late. In the first round, when
/// nothing is known of the others, it applies its own pseudo-gradient whole. Source: as above.
struct eager_diloco_method {
    std::size_t period = 500;
    double rate = 0.7;
    double momentum = 0.9;
    bool nesterov = true;
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        local_update_rule r = diloco_method{period, rate, momentum, nesterov, 0, inner}.rule();
        r.delay = 1;
        r.merge = round_merge::eager;
        return r;
    }
};

/// Source: Shen et al., Faster Distributed Deep Net Training: Computation and Communication Decoupled SGD, IJCAI 2019.
struct co_co_d_method {
    std::size_t period = 12;
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        return {.period = period, .delay = 1, .merge = round_merge::delay_corrected, .inner = inner};
    }
};

/// Source: Wang et al., Overlap Local-SGD, ICASSP 2020, without momentum of the anchor.
struct overlap_local_sgd_method {
    std::size_t period = 12;
    double pull = 0.6;
    inner_state inner = inner_state::keep;
    [[nodiscard]] local_update_rule rule() const {
        return {.period = period, .delay = 1, .merge = round_merge::pull_back, .weight = pull, .inner = inner};
    }
};

}  // namespace tutti::strategy
