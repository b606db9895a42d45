// sgd: stochastic gradient descent with momentum, optionally Nesterov's, and L2 decay.
// Needs optimize/optimizer. Conventions are PyTorch's.
// Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013, section 2.
#pragma once

#include <limits>  // infinity
#include <string>  // description

#include <tutti/core/exact.hpp>          // products and sums rounded separately
#include <tutti/core/text.hpp>           // formatted
#include <tutti/optimize/optimizer.hpp>  // optimizer_state

namespace tutti::optimize {

enum class momentum_kind { none, classic, nesterov };

/// One pass over a segment. Aliasing: none. `velocity` is empty when there is no momentum.
template <floating_element T, memory M, momentum_kind kind> struct sgd_operation {
    static constexpr std::string_view name = "sgd";
    static constexpr bool moving = kind != momentum_kind::none;
    using real = master_t<T>;
    view<real, M> value;
    view<const T, M> gradient;
    view<real, M> velocity;
    real gradient_factor;
    real decay;
    real momentum;
    real learning_rate;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const auto n = static_cast<double>(value.size());
        const double state = moving ? 4 : 2;
        return {n * (static_cast<double>(sizeof(T)) + state * static_cast<double>(sizeof(real))), (moving ? 9 : 5) * n};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept {
        if constexpr (moving) {
            return std::tuple(value, gradient, velocity);
        } else {
            return std::tuple(value, gradient);
        }
    }
    [[nodiscard]] constexpr auto outputs() const noexcept {
        if constexpr (moving) {
            return std::tuple(value, velocity);
        } else {
            return std::tuple(value);
        }
    }
    [[nodiscard]] TUTTI_HOST_DEVICE real result(std::size_t, real x, T g) const noexcept {
        return (exact(x) - exact(learning_rate) * decayed(x, g)).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<real, real> result(std::size_t, real x, T g, real v) const noexcept {
        const auto d = decayed(x, g);
        const auto u = exact(momentum) * exact(v) + d;
        if constexpr (kind == momentum_kind::nesterov) {
            return {(exact(x) - exact(learning_rate) * (d + exact(momentum) * u)).value, u.value};
        } else {
            return {(exact(x) - exact(learning_rate) * u).value, u.value};
        }
    }
    void operator()() const { tutti::detail::for_each_element(*this); }

private:
    [[nodiscard]] TUTTI_HOST_DEVICE exact<real> decayed(real x, T g) const noexcept {
        return exact(gradient_factor) * exact(static_cast<real>(g)) + exact(decay) * exact(x);
    }
};

/// d = g + wd x;  u = momentum u + d;  x = x - lr u,  or with Nesterov  x = x - lr (d + momentum u).
///
/// Semantics    as torch.optim.SGD without dampening: decay is L2, part of the gradient and so of the momentum
///              (decoupled decay is adamw's); it skips segments with decay off. The learning rate stands outside the
///              velocity.
/// Determinism  elementwise: no result depends on how elements are segmented.
/// Cost         one pass; sizeof(T) + 4 sizeof(master) bytes and 9 flops an element; without momentum no state, and 2
///              and 5.
/// Errors       usage_error for momentum outside [0, 1), negative or non-finite decay or learning rate, Nesterov
///              without momentum, sizes that differ.
struct sgd {
    static constexpr std::string_view name = "sgd";
    double momentum = 0.9;
    double weight_decay = 0;
    bool nesterov = false;

    void validate() const {
        detail::expect_between(name, "momentum", momentum, 0, 1);
        detail::expect_between(name, "weight_decay", weight_decay, 0, std::numeric_limits<double>::infinity());
        if (nesterov && momentum == 0) { throw usage_error("sgd: nesterov needs a momentum"); }
    }
    [[nodiscard]] std::string describe() const {
        return formatted("sgd(momentum {}, weight_decay {}, nesterov {})", momentum, weight_decay, nesterov);
    }

    template <floating_element T, queue Q>
    [[nodiscard]] optimizer_state<T, Q> make_state(Q q, std::size_t elements) const {
        if (momentum == 0) { return {q, 0, {}}; }
        return {q, elements, {"velocity"}};
    }

    template <floating_element T, queue Q>
    void update(Q q, view<master_t<T>, typename Q::memory_type> value, view<const T, typename Q::memory_type> gradient,
                optimizer_state<T, Q>& state, std::span<const segment> segments, step_values now,
                const publication<T, typename Q::memory_type>& publish = {}) const {
        using real = master_t<T>;
        using M = typename Q::memory_type;
        const bool moving = !state.moments().empty();
        detail::expect_update_sizes(name, value.size(), gradient.size(), moving ? state[0].size() : value.size(),
                                    segments);
        detail::expect_step_values(name, now);
        detail::expect_publishable(name, publish, segments);
        state.advance(q);
        const auto with = [&]<momentum_kind kind>() {
            for (std::size_t k = 0; k < segments.size(); ++k) {
                const segment& s = segments[k];
                const sgd_operation<T, M, kind> update{value.sub(s.first, s.count),
                                                       gradient.sub(s.first, s.count),
                                                       moving ? state[0].sub(s.first, s.count) : view<real, M>{},
                                                       static_cast<real>(now.gradient_factor),
                                                       static_cast<real>(s.decay ? weight_decay : 0),
                                                       static_cast<real>(momentum),
                                                       static_cast<real>(now.learning_rate)};
                detail::run_update<T>(q, update, publish, k, s.first);
            }
        };
        if (!moving) {
            with.template operator()<momentum_kind::none>();
        } else if (nesterov) {
            with.template operator()<momentum_kind::nesterov>();
        } else {
            with.template operator()<momentum_kind::classic>();
        }
    }
};

}  // namespace tutti::optimize
