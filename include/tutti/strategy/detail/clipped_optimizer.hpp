// clipped_optimizer: an optimizer with what it keeps of a rank's elements. Its updates are limited by the norm of the
// gradients, and left out where that is not finite.
// Needs optimize/clip and optimize/optimizer.
#pragma once

#include <cmath>     // isfinite
#include <cstddef>   // size_t
#include <cstdint>   // steps
#include <optional>  // what exists from attach on; a seed
#include <span>      // values
#include <string>    // descriptions
#include <utility>   // move
#include <vector>    // segments

#include <tutti/core/element.hpp>              // master_t
#include <tutti/core/philox.hpp>               // random_stream
#include <tutti/core/view.hpp>                 // view
#include <tutti/optimize/clip.hpp>             // clip_factor
#include <tutti/optimize/optimizer.hpp>        // optimizer_state
#include <tutti/optimize/publication.hpp>      // publication
#include <tutti/strategy/detail/rounding.hpp>  // rounding_noise
#include <tutti/strategy/strategy.hpp>         // hyper, step_result

namespace tutti::strategy::detail {

/// Semantics    attach, then update once a step. Masters, gradients and values stay the caller's.
/// Cost         the optimizer's.
template <class Optimizer, floating_element T, queue Q> class clipped_optimizer {
    using M = typename Q::memory_type;

    Optimizer rule_;
    std::optional<std::uint64_t> rounding_seed_;
    std::vector<optimize::segment> segments_;
    std::optional<optimize::optimizer_state<T, Q>> state_;
    std::uint64_t skipped_ = 0;

public:
    /// Errors: usage_error for an optimizer that makes no sense.
    clipped_optimizer(Optimizer rule, std::optional<std::uint64_t> rounding_seed)
        : rule_((rule.validate(), std::move(rule))), rounding_seed_(rounding_seed) {}

    /// A new state for so many elements; the segments say which of them decay.
    void attach(Q q, std::size_t elements, std::vector<optimize::segment> segments) {
        segments_ = std::move(segments);
        state_.emplace(rule_.template make_state<T>(q, elements));
    }

    /// `norm` is that of the gradients as they are, which the trainer has scaled by loss_scale. `values`, which get the
    /// new masters rounded, are one a segment, or none.
    step_result update(Q q, view<master_t<T>, M> masters, view<const T, M> gradients, double norm, double loss_scale,
                       hyper h, std::span<const view<T, M>> values = {}) {
        const double gradient_factor = 1 / loss_scale;
        step_result result;
        result.norm = gradient_factor * norm;
        result.skipped = !std::isfinite(result.norm);
        if (result.skipped) {
            ++skipped_;
        } else {
            rule_.update(q, masters, gradients, *state_, segments_,
                         {h.learning_rate, gradient_factor * optimize::clip_factor(result.norm, h.clip_norm)},
                         optimize::publication<T, M>{values, noise_of(state_->steps() + 1)});
        }
        return result;
    }

    [[nodiscard]] const std::vector<optimize::segment>& segments() const noexcept { return segments_; }
    [[nodiscard]] const optimize::optimizer_state<T, Q>& state() const noexcept { return *state_; }
    [[nodiscard]] optimize::optimizer_state<T, Q>& state() noexcept { return *state_; }
    /// What rounds values as the last update did.
    [[nodiscard]] std::optional<random_stream> noise() const noexcept { return noise_of(state_->steps()); }
    /// Updates that were left out.
    [[nodiscard]] std::uint64_t skipped() const noexcept { return skipped_; }
    /// Equal exactly when two do the same.
    [[nodiscard]] std::string describe() const { return rule_.describe(); }

private:
    [[nodiscard]] std::optional<random_stream> noise_of(std::uint64_t update) const noexcept {
        return rounding_noise(rounding_seed_, update);
    }
};

}  // namespace tutti::strategy::detail
