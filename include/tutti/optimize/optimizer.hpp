// optimizer: what strategies require of an optimizer, and optimizer_state, the moments and the step count it keeps.
// Needs core/buffer and core/elementwise. State is master_t<T> (double for double, else float), in queue memory.
// An optimizer is a value: hyper-parameters and an update rule; all that changes is in the state, which can be saved.
#pragma once

#include <concepts>          // optimizer
#include <cstdint>           // step count
#include <initializer_list>  // moment names
#include <span>              // segments
#include <string>            // description
#include <string_view>       // names
#include <vector>            // moments

#include <tutti/core/buffer.hpp>           // moments
#include <tutti/core/elementwise.hpp>      // fill
#include <tutti/core/text.hpp>             // formatted
#include <tutti/optimize/publication.hpp>  // publication

namespace tutti::optimize {

/// Elements [first, first + count) that weight decay applies to, or not.
struct segment {
    std::size_t first = 0;
    std::size_t count = 0;
    bool decay = true;
};

/// What changes from step to step.
struct step_values {
    double learning_rate = 0;
    double gradient_factor = 1;  ///< multiplies every gradient inside the update: clipping, loss scale
};

/// Moments of `elements` elements, zero at first, and the number of updates made.
template <floating_element T, queue Q> class optimizer_state {
    using M = typename Q::memory_type;

public:
    using value_type = master_t<T>;
    struct moment {
        std::string_view name;  ///< a literal
        buffer<value_type, Q> values;
    };

    optimizer_state(Q q, std::size_t elements, std::initializer_list<std::string_view> names) : counter_(q, 1) {
        for (const std::string_view name : names) {
            moments_.push_back({name, buffer<value_type, Q>(q, elements)});
            fill(q, moments_.back().values.view(), value_type{0});
        }
        fill(q, counter_.view(), std::uint64_t{0});
    }

    [[nodiscard]] std::span<const moment> moments() const noexcept { return moments_; }
    [[nodiscard]] view<value_type, M> operator[](std::size_t i) const { return moments_[i].values.view(); }
    [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
    /// The step count as memory, for saving.
    [[nodiscard]] view<std::uint64_t, M> counter() const noexcept { return counter_.view(); }

    /// Counts one more update and gives its number, from 1.
    std::uint64_t advance(Q q) {
        fill(q, counter_.view(), ++steps_);
        return steps_;
    }
    /// No update was made yet.
    void reset(Q q) {
        for (const moment& m : moments_) { fill(q, m.values.view(), value_type{0}); }
        steps_ = 0;
        fill(q, counter_.view(), steps_);
    }
    /// Reads the step count again after its memory was written (a resume).
    void restored(Q q) { steps_ = fetch(q, counter_.view(), steps_); }

private:
    std::vector<moment> moments_;
    buffer<std::uint64_t, Q> counter_;
    std::uint64_t steps_ = 0;  // what counter_ holds: known on the host without a wait
};

/// An update rule for elements of type T on queue Q.
///
/// Semantics  validate() throws usage_error for values that make no sense; describe() is equal exactly when the rule
///            is. update() is called once a step, with segments in ascending order that do not overlap; elements
///            outside them are left alone. `value` and the state hold master_t<T>, `gradient` holds T, all of one size.
///            The publication, which may be left out, gets the new values as well.
template <class O, class T, class Q>
concept optimizer = std::copyable<O> && floating_element<T> && queue<Q> &&
    requires(const O& o, Q q, view<master_t<T>, typename Q::memory_type> value,
             view<const T, typename Q::memory_type> gradient, optimizer_state<T, Q>& s,
             std::span<const segment> segments, step_values v, const publication<T, typename Q::memory_type>& p) {
    o.validate();
    { o.describe() } -> std::same_as<std::string>;
    { o.template make_state<T>(q, std::size_t{}) } -> std::same_as<optimizer_state<T, Q>>;
    o.update(q, value, gradient, s, segments, v);
    o.update(q, value, gradient, s, segments, v, p);
};

namespace detail {
// value, gradient and state of an update, and each segment, must agree in size.
inline void expect_update_sizes(std::string_view name, std::size_t value, std::size_t gradient, std::size_t moment,
                                std::span<const segment> segments) {
    if (value != gradient || value != moment) {
        throw usage_error(
            formatted("{}: sizes differ (value {}, gradient {}, state {})", name, value, gradient, moment));
    }
    for (const segment& s : segments) {
        if (s.first > value || s.count > value - s.first) {
            throw usage_error(formatted("{}: segment ({}, {}) leaves {} elements", name, s.first, s.count, value));
        }
    }
}
template <class T, memory M>
void expect_publishable(std::string_view name, const publication<T, M>& p, std::span<const segment> segments) {
    if (p.values.empty()) { return; }
    if (p.values.size() != segments.size()) {
        throw usage_error(
            formatted("{}: values to publish: {} views for {} segments", name, p.values.size(), segments.size()));
    }
    for (std::size_t k = 0; k < segments.size(); ++k) {
        if (p.values[k].size() == segments[k].count) { continue; }
        throw usage_error(formatted("{}: values to publish: {} elements for segment {} of {}", name, p.values[k].size(),
                                    k, segments[k].count));
    }
    if (p.noise && !half_element<T>) {
        throw usage_error(
            formatted("{}: stochastic rounding is for values of 16 bits, these are {}", name, name_of(dtype_of<T>)));
    }
}
inline void expect_step_values(std::string_view name, const step_values& v) {
    // Comparisons are false for nan. Infinity minus itself is nan.
    if (!(v.learning_rate >= 0) || !(v.learning_rate - v.learning_rate == 0)) {
        throw usage_error(formatted("{}: learning rate {} is negative or not finite", name, v.learning_rate));
    }
    if (!(v.gradient_factor - v.gradient_factor == 0)) {
        throw usage_error(formatted("{}: gradient factor {} is not finite", name, v.gradient_factor));
    }
}
inline void expect_between(std::string_view name, std::string_view what, double value, double low, double below) {
    if (!(value >= low && value < below)) {
        throw usage_error(formatted("{}: {} is {}, expected a value in [{}, {})", name, what, value, low, below));
    }
}
}  // namespace detail

}  // namespace tutti::optimize
