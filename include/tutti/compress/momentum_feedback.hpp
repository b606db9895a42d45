// momentum_feedback: error feedback that keeps what is not sent as momentum keeps it (momentum correction, factor
// masking), and the warm-up of the density that goes with it. Needs compress/compressor, core/elementwise, core/state.
// Source: Lin et al., Deep gradient compression, ICLR 2018, sections 3.2 and 3.3.
#pragma once

#include <algorithm>    // clamp
#include <cmath>        // isfinite, lround, pow
#include <cstddef>      // size_t
#include <string_view>  // names
#include <tuple>        // inputs and outputs
#include <type_traits>  // remove_const_t
#include <vector>       // entries

#include <tutti/compress/compressor.hpp>        // layout
#include <tutti/compress/dense.hpp>             // dense_level
#include <tutti/compress/detail/magnitude.hpp>  // infinite_magnitude
#include <tutti/core/buffer.hpp>                // momentum, residual
#include <tutti/core/element.hpp>               // floating_element
#include <tutti/core/elementwise.hpp>           // operations, fill, scale
#include <tutti/core/error.hpp>                 // usage_error
#include <tutti/core/exact.hpp>                 // products and sums rounded separately
#include <tutti/core/run.hpp>                   // run, cost
#include <tutti/core/state.hpp>                 // state_entry
#include <tutti/core/text.hpp>                  // formatted
#include <tutti/core/view.hpp>                  // view

namespace tutti::compress {

namespace detail {

/// u = m u + g; with Nesterov's  u = m (u + g), v = v + g.
template <floating_element T, memory M, bool nesterov> struct correct_momentum_operation {
    static constexpr std::string_view name = "correct_momentum";
    view<const T, M> gradient;
    view<float, M> momentum;
    view<float, M> residual;
    float factor;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const auto n = static_cast<double>(momentum.size());
        return {n * (static_cast<double>(sizeof(T)) + (nesterov ? 16 : 8)), n * (nesterov ? 3 : 2)};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept {
        if constexpr (nesterov) {
            return std::tuple(gradient, momentum, residual);
        } else {
            return std::tuple(gradient, momentum);
        }
    }
    [[nodiscard]] constexpr auto outputs() const noexcept {
        if constexpr (nesterov) {
            return std::tuple(momentum, residual);
        } else {
            return std::tuple(momentum);
        }
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float result(std::size_t, T g, float u) const noexcept {
        return (exact(factor) * exact(u) + exact(formed(g))).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<float, float> result(std::size_t, T g, float u, float v) const noexcept {
        return {(exact(factor) * (exact(u) + exact(formed(g)))).value, (exact(v) + exact(formed(g))).value};
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// u = 0 where nothing is owed, if `masking`, and where u is not finite.
template <memory M> struct drop_momentum_operation {
    static constexpr std::string_view name = "drop_momentum";
    view<float, M> momentum;
    view<const float, M> residual;
    bool masking;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const auto n = static_cast<double>(momentum.size());
        return {12 * n, 2 * n};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(momentum, residual); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(momentum); }
    [[nodiscard]] TUTTI_HOST_DEVICE float result(std::size_t, float u, float v) const noexcept {
        return (masking && v == 0) || magnitude(u) == infinite_magnitude ? 0.0f : u;
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

}  // namespace detail

/// How momentum_feedback accumulates.
struct momentum_options {
    float momentum = 0.9f;
    bool nesterov = false;
    bool masking = true;  ///< momentum stops where an element was sent

    void validate() const {
        if (!(momentum >= 0 && momentum < 1)) {
            throw usage_error(formatted("momentum_feedback: momentum is {}, expected a value in [0, 1)", momentum));
        }
    }
};

/// One rank's momentum u and residual v, for any compressor that sends elements as they are (top_k, threshold,
/// random_k), in place of error feedback and of the optimizer's momentum.
///
/// Semantics    a step: add(gradient); then the compressor encodes (or contributes) in() with residual(), which sends
///              from u + v; then sent(layout). The mean of what the ranks sent goes to an optimizer without momentum.
///              Local clipping by the norm comes before it, the limit divided by the root of the number of ranks.
///   add        u = m u + g, so that u + v is what the paper calls v; with Nesterov's  u = m (u + g) and v = v + g.
///   sent       after the compressor: momentum stops (u = 0) where nothing is owed any longer (v == 0), which are the
///              elements that were sent. What is sent whole in every step is never late: segments of level 10000, and
///              those of dense_level, keep their momentum, and so follow SGD with momentum, classic or Nesterov's.
///   rescale    when what gradients are multiplied by changes (the scale of a loss): rescale(new / old).
/// Not finite   a gradient that is not finite is sent as such, and gone from u and v after sent().
/// Determinism  elementwise; the same bits on host and device.
/// Cost         8 bytes of state an element. add: sizeof(T) + 8 bytes and 2 flops (Nesterov 16 and 3), sent: 12 bytes.
/// Errors       usage_error for a momentum outside of [0, 1), sizes that differ, a layout beyond the elements.
template <queue Q> class momentum_feedback {
    using M = typename Q::memory_type;
    buffer<float, Q> momentum_;
    buffer<float, Q> residual_;
    momentum_options options_;

public:
    momentum_feedback(Q q, std::size_t elements, momentum_options options = {})
        : momentum_((options.validate(), q), elements), residual_(q, elements), options_(options) {
        fill(q, momentum_.view(), 0.0f);
        fill(q, residual_.view(), 0.0f);
    }

    [[nodiscard]] view<const float, M> in() const noexcept { return momentum_.view(); }
    [[nodiscard]] view<float, M> residual() const noexcept { return residual_.view(); }
    /// What a bit-exact resume needs; of this rank alone.
    [[nodiscard]] std::vector<state_entry<M>> entries() const {
        return {state_of("momentum", momentum_.view()), state_of("residual", residual_.view())};
    }

    template <class T> void add(Q q, view<T, M> gradient) {
        detail::expect_size("momentum_feedback", "the gradient", gradient.size(), momentum_.size());
        add_part(q, gradient, 0);
    }
    /// The same for elements `first` to first + gradient.size().
    template <class T> void add_part(Q q, view<T, M> gradient, std::size_t first) {
        using element = std::remove_const_t<T>;
        if (first > momentum_.size() || gradient.size() > momentum_.size() - first) {
            throw usage_error(formatted("momentum_feedback: elements {} to {} of {}", first, first + gradient.size(),
                                        momentum_.size()));
        }
        const auto u = momentum_.view().sub(first, gradient.size());
        const auto v = residual_.view().sub(first, gradient.size());
        if (options_.nesterov) {
            run(q, detail::correct_momentum_operation<element, M, true>{gradient, u, v, options_.momentum});
        } else {
            run(q, detail::correct_momentum_operation<element, M, false>{gradient, u, v, options_.momentum});
        }
    }

    void rescale(Q q, double factor) {
        if (!std::isfinite(static_cast<float>(factor)) || factor < 0) {
            throw usage_error(formatted("momentum_feedback: rescale by {}, expected a finite float >= 0", factor));
        }
        for (const auto& x : {momentum_.view(), residual_.view()}) { scale(q, x, x, static_cast<float>(factor)); }
    }

    void sent(Q q, layout all) {
        detail::expect_inside("momentum_feedback", all, momentum_.size());
        const auto masked = [this](const segment& s) {
            return options_.masking && s.level != 10000 && s.level != dense_level;
        };
        for (std::size_t i = 0; i < all.size();) {
            const segment& first = all[i];
            std::size_t count = first.size();
            // Neighbors that are treated alike, as one.
            for (++i; i < all.size() && all[i].offset == first.offset + count && masked(all[i]) == masked(first); ++i) {
                count += all[i].size();
            }
            run(q, detail::drop_momentum_operation<M>{momentum_.view().sub(first.offset, count),
                                                      residual_.view().sub(first.offset, count), masked(first)});
        }
    }
};

/// The density of a period of the warm-up, in 10,000: falls by one factor from period to period, and is `level` from
/// period `periods` on. Four periods down to 10: 2512, 631, 158, 40, 10.
///
/// Errors  usage_error for a level that is not in 1 to 10000.
[[nodiscard]] inline int warm_up_level(int level, std::size_t period, std::size_t periods) {
    if (level < 1 || level > 10000) {
        throw usage_error(formatted("warm_up_level: level {}: kept elements in 10,000 are 1 to 10000", level));
    }
    if (period >= periods) { return level; }
    const double share = static_cast<double>(period + 1) / static_cast<double>(periods + 1);
    return std::clamp(static_cast<int>(std::lround(1e4 * std::pow(level / 1e4, share))), level, 10000);
}

}  // namespace tutti::compress
