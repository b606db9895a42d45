// learning_rate: schedules as values: constant, warm-up then linear decay, warm-up then cosine decay.
// Needs core/error. A schedule is a function of the step alone, so it needs no state to resume.
// Source: the rule of karpathy/nanoGPT (train.py, get_lr); Loshchilov and Hutter, SGDR, ICLR 2017, eq. 5.
#pragma once

#include <cmath>    // cos, isfinite
#include <cstdint>  // steps
#include <numbers>  // pi

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::optimize {

/// A learning rate by step, counted from 0.
///
/// Semantics    steps below `warmup` rise linearly: peak * (step + 1) / (warmup + 1). From there to `end` the rate
///              falls from peak to minimum along a line or half a cosine; after `end` it stays at minimum.
/// Determinism  of the arguments alone, computed in double.
/// Errors       usage_error when a rate is negative or not finite, minimum > peak, or warmup > end.
class learning_rate {
    enum class shape : std::uint8_t { constant, linear, cosine };

public:
    struct decay {
        double peak = 0;
        double minimum = 0;
        std::uint64_t warmup = 0;  ///< steps of rising
        std::uint64_t end = 0;     ///< step at which minimum is reached
    };

    [[nodiscard]] static learning_rate constant(double rate) { return {shape::constant, {rate, rate, 0, 0}}; }
    [[nodiscard]] static learning_rate linear(const decay& d) { return {shape::linear, d}; }
    [[nodiscard]] static learning_rate cosine(const decay& d) { return {shape::cosine, d}; }

    [[nodiscard]] double operator()(std::uint64_t step) const noexcept {
        if (shape_ == shape::constant) { return decay_.peak; }
        if (step < decay_.warmup) {
            return decay_.peak * static_cast<double>(step + 1) / static_cast<double>(decay_.warmup + 1);
        }
        if (step >= decay_.end) { return decay_.minimum; }
        const double done = static_cast<double>(step - decay_.warmup) / static_cast<double>(decay_.end - decay_.warmup);
        const double left = shape_ == shape::linear ? 1 - done : 0.5 * (1 + std::cos(std::numbers::pi * done));
        return decay_.minimum + left * (decay_.peak - decay_.minimum);
    }

private:
    learning_rate(shape s, const decay& d) : shape_(s), decay_(d) {
        if (!std::isfinite(d.peak) || d.peak < 0) {
            throw usage_error(formatted("learning_rate: {} is not a rate", d.peak));
        }
        if (!std::isfinite(d.minimum) || d.minimum < 0 || d.minimum > d.peak) {
            throw usage_error(
                formatted("learning_rate: minimum {} is not between 0 and the peak {}", d.minimum, d.peak));
        }
        if (d.warmup > d.end) {
            throw usage_error(formatted("learning_rate: warm-up of {} steps ends behind step {}, the end of the decay",
                                        d.warmup, d.end));
        }
    }

    shape shape_;
    decay decay_;
};

}  // namespace tutti::optimize
