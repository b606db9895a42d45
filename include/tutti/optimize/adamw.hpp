// adamw: Adam with decoupled weight decay, moments in master precision.
// Needs optimize/optimizer.
// Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2; order as in PyTorch.
#pragma once

#include <cmath>   // sqrt, pow
#include <limits>  // infinity
#include <string>  // description

#include <tutti/core/config.hpp>                  // TUTTI_EXACT
#include <tutti/core/exact.hpp>                   // products and sums rounded separately
#include <tutti/core/text.hpp>                    // formatted
#include <tutti/optimize/detail/square_root.hpp>  // square_roots
#include <tutti/optimize/optimizer.hpp>           // optimizer_state

namespace tutti::optimize {

/// One pass over a segment. Aliasing: none. Cost: reads gradient, reads and writes value and both moments.
template <floating_element T, memory M> struct adamw_operation {
    static constexpr std::string_view name = "adamw";
    using real = master_t<T>;
    view<real, M> value;
    view<const T, M> gradient;
    view<real, M> first;
    view<real, M> second;
    real gradient_factor;
    real keep;          ///< 1 - learning rate * weight decay
    real beta1, rest1;  ///< rest = 1 - beta
    real beta2, rest2;
    real step;             ///< learning rate / (1 - beta1^t)
    real root_correction;  ///< 1 / sqrt(1 - beta2^t)
    real epsilon;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const auto n = static_cast<double>(value.size());
        return {n * static_cast<double>(sizeof(T) + 6 * sizeof(real)), 15 * n};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(value, gradient, first, second); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(value, first, second); }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<real, real, real> result(std::size_t, real x, T g, real m,
                                                                        real v) const noexcept {
        const auto now = moments(g, m, v);
        return {stepped(x, now.first, root(now.second)), now.first.value, now.second.value};
    }
    TUTTI_EXACT void operator()() const {
        TUTTI_EXACT_BODY
        const adamw_operation k = *this;  // constants in registers: stores through its pointers cannot change them
        real* const x = value.data();
        const T* const g = gradient.data();
        real* const m = first.data();
        real* const v = second.data();
        // Roots in a pass of their own over blocks that stay in cache: a loop that holds one does not vectorize.
        constexpr std::size_t block = 512;
        real roots[block];
        const std::size_t n = value.size();
        for (std::size_t begin = 0; begin < n; begin += block) {
            const std::size_t end = n - begin < block ? n : begin + block;
            TUTTI_INDEPENDENT
            for (std::size_t i = begin; i < end; ++i) {
                const auto now = k.moments(g[i], m[i], v[i]);
                m[i] = now.first.value;
                v[i] = now.second.value;
            }
            detail::square_roots(v + begin, roots, end - begin);
            TUTTI_INDEPENDENT
            for (std::size_t i = begin; i < end; ++i) { x[i] = k.stepped(x[i], exact(m[i]), exact(roots[i - begin])); }
        }
    }

private:
    struct both_moments {
        exact<real> first, second;
    };
    [[nodiscard]] TUTTI_HOST_DEVICE both_moments moments(T g, real m, real v) const noexcept {
        const auto d = exact(gradient_factor) * exact(static_cast<real>(g));
        return {exact(beta1) * exact(m) + exact(rest1) * d, exact(beta2) * exact(v) + exact(rest2) * (d * d)};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE real stepped(real x, exact<real> m, exact<real> root_of_second) const noexcept {
        const auto toward = m / (root_of_second * exact(root_correction) + exact(epsilon));
        return (exact(keep) * exact(x) - exact(step) * toward).value;
    }
};

/// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  x = (1 - lr wd) x - lr m' / (sqrt(v') + eps), m' and v'
/// bias-corrected.
///
/// Semantics    decay is decoupled (not part of the gradient) and skips segments with decay off. Powers and corrections
///              are computed in double, the elementwise part in master_t<T>; epsilon stands outside the root; without
///              any, elements whose gradients were always 0 become NaN.
/// Determinism  elementwise: no result depends on how elements are segmented.
/// Cost         one pass; sizeof(T) + 6 sizeof(master) bytes and 15 flops an element, sizeof(T) more to publish.
/// Errors       usage_error for betas outside [0, 1), negative or non-finite epsilon, decay or learning rate, sizes
///              that differ.
struct adamw {
    static constexpr std::string_view name = "adamw";
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0.01;

    void validate() const {
        constexpr double infinity = std::numeric_limits<double>::infinity();
        detail::expect_between(name, "beta1", beta1, 0, 1);
        detail::expect_between(name, "beta2", beta2, 0, 1);
        detail::expect_between(name, "epsilon", epsilon, 0, infinity);
        detail::expect_between(name, "weight_decay", weight_decay, 0, infinity);
    }
    [[nodiscard]] std::string describe() const {
        return formatted("adamw(beta1 {}, beta2 {}, epsilon {}, weight_decay {})", beta1, beta2, epsilon, weight_decay);
    }

    template <floating_element T, queue Q>
    [[nodiscard]] optimizer_state<T, Q> make_state(Q q, std::size_t elements) const {
        return {q, elements, {"first_moment", "second_moment"}};
    }

    template <floating_element T, queue Q>
    void update(Q q, view<master_t<T>, typename Q::memory_type> value, view<const T, typename Q::memory_type> gradient,
                optimizer_state<T, Q>& state, std::span<const segment> segments, step_values now,
                const publication<T, typename Q::memory_type>& publish = {}) const {
        using real = master_t<T>;
        detail::expect_update_sizes(name, value.size(), gradient.size(), state[0].size(), segments);
        detail::expect_step_values(name, now);
        detail::expect_publishable(name, publish, segments);
        const auto t = static_cast<double>(state.advance(q));
        const double correction1 = 1 - std::pow(beta1, t);
        const double correction2 = 1 - std::pow(beta2, t);
        for (std::size_t k = 0; k < segments.size(); ++k) {
            const segment& s = segments[k];
            const double decay = s.decay ? weight_decay : 0;
            const adamw_operation<T, typename Q::memory_type> update{value.sub(s.first, s.count),
                                                                     gradient.sub(s.first, s.count),
                                                                     state[0].sub(s.first, s.count),
                                                                     state[1].sub(s.first, s.count),
                                                                     static_cast<real>(now.gradient_factor),
                                                                     static_cast<real>(1 - now.learning_rate * decay),
                                                                     static_cast<real>(beta1),
                                                                     static_cast<real>(1 - beta1),
                                                                     static_cast<real>(beta2),
                                                                     static_cast<real>(1 - beta2),
                                                                     static_cast<real>(now.learning_rate / correction1),
                                                                     static_cast<real>(1 / std::sqrt(correction2)),
                                                                     static_cast<real>(epsilon)};
            detail::run_update<T>(q, update, publish, k, s.first);
        }
    }
};

}  // namespace tutti::optimize
