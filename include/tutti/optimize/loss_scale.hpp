// loss_scale: what a loss is multiplied by so that gradients of float16 neither vanish nor overflow; it follows them.
// Needs core/state. A trainer scales its loss, tells begin() by how much, and tells this what step() said.
// Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.2 and 4.
#pragma once

#include <algorithm>  // max, min
#include <array>      // state
#include <cmath>      // frexp
#include <cstdint>    // counts
#include <vector>     // entries

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/state.hpp>  // state_entry
#include <tutti/core/text.hpp>   // formatted
#include <tutti/core/view.hpp>   // view

namespace tutti::optimize {

/// How a loss scale moves. All but counts are powers of two, so that scaling changes no bit of a gradient.
struct loss_scale_options {
    double initial = 65536;
    double growth = 2;     ///< after `interval` steps in a row that were not skipped
    double backoff = 0.5;  ///< after `hysteresis` steps that were, since it last grew
    std::uint64_t interval = 2000;
    std::uint64_t hysteresis = 1;
    double least = 1;
    double most = 1 << 24;
    std::uint64_t patience = 20;  ///< steps in a row that may be skipped at the least scale
};

/// A dynamic loss scale.
///
/// Semantics    value() multiplies the loss of the next step; strategies are told in micro_batch::loss_scale and divide
///              by it again. stepped(skipped), with what the strategy's step said, moves it: a skipped step, whose
///              gradients were not finite on some rank, makes it smaller, many good steps make it larger. A strategy
///              skips on all ranks or none, so all ranks have the same scale.
///   entries    what a resume restores; their memory is this object's, which must stay where it is meanwhile.
/// Determinism  of the calls alone.
/// Errors       usage_error for options that make no sense; and from stepped(), once steps at the least scale were
///              skipped for too long: then the scale is not why gradients are not finite.
class loss_scale {
    loss_scale_options options_;
    double value_;
    // Good steps in a row, skipped ones since growth, skipped ones in all, skipped in a row at the least scale.
    std::array<std::uint64_t, 4> counts_{};

    static void expect_power_of_two(const char* what, double x) {
        int exponent = 0;
        if (!(x > 0) || std::frexp(x, &exponent) != 0.5) {
            throw usage_error(formatted("loss_scale: {} is {}, which is not a power of two", what, x));
        }
    }

public:
    explicit loss_scale(loss_scale_options o = {}) : options_(o), value_(o.initial) {
        expect_power_of_two("initial", o.initial);
        expect_power_of_two("growth", o.growth);
        expect_power_of_two("backoff", o.backoff);
        expect_power_of_two("least", o.least);
        expect_power_of_two("most", o.most);
        if (o.growth < 1 || o.backoff >= 1) {
            throw usage_error(formatted("loss_scale: grows by {} and backs off by {}", o.growth, o.backoff));
        }
        if (o.least > o.initial || o.initial > o.most) {
            throw usage_error(formatted("loss_scale: initial {} is not between {} and {}", o.initial, o.least, o.most));
        }
        if (o.interval == 0 || o.hysteresis == 0 || o.patience == 0) {
            throw usage_error("loss_scale: interval, hysteresis and patience are at least 1");
        }
    }

    [[nodiscard]] double value() const noexcept { return value_; }
    /// Steps that were skipped.
    [[nodiscard]] std::uint64_t skipped() const noexcept { return counts_[2]; }

    void stepped(bool was_skipped) {
        auto& [good, strikes, all, hopeless] = counts_;
        if (!was_skipped) {
            hopeless = 0;
            if (++good < options_.interval) { return; }
            good = strikes = 0;
            value_ = std::min(value_ * options_.growth, options_.most);
            return;
        }
        good = 0;
        ++all;
        if (value_ == options_.least && ++hopeless >= options_.patience) {
            throw usage_error(
                formatted("loss_scale: {} steps in a row were not finite at the least scale, {}: something "
                          "else makes them so, try a smaller learning rate",
                          hopeless, value_));
        }
        if (++strikes < options_.hysteresis) { return; }
        value_ = std::max(value_ * options_.backoff, options_.least);
    }

    [[nodiscard]] std::vector<state_entry<>> entries() noexcept {
        return {
            state_of("loss_scale/value", view<double>(&value_, 1), ownership::replicated),
            state_of("loss_scale/steps", view<std::uint64_t>(counts_.data(), counts_.size()), ownership::replicated)};
    }
};

}  // namespace tutti::optimize
