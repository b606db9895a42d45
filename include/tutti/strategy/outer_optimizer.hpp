// outer_optimizer: how a local-update strategy moves the common parameters by the mean of what replicas did.
// Needs core/elementwise. Heavy ball or Nesterov, clipped or not, in units of parameters or of gradients.
// Source: Wang et al., SlowMo, ICLR 2020, algorithm 1; Sun et al., CO2, ICLR 2024; Douillard et al., DiLoCo, 2023.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // units
#include <limits>       // infinity
#include <string>       // descriptions
#include <string_view>  // names
#include <tuple>        // inputs and outputs

#include <tutti/core/elementwise.hpp>  // elementwise operations
#include <tutti/core/error.hpp>        // usage_error
#include <tutti/core/exact.hpp>        // products and sums rounded separately
#include <tutti/core/text.hpp>         // formatted

namespace tutti::strategy {

/// What outer momentum is kept in. The same at a constant learning rate; when the rate changes, momentum in units of
/// gradients changes its effect with it, momentum in units of parameters does not.
enum class outer_units : std::uint8_t { parameters, gradients };

/// u = momentum u + d / (gap r);  u = clip(u);  x = x - rate r u,  or with Nesterov  x = x - rate r (d/(gap r) + momentum
/// u).  d: the mean of anchor - parameters over the replicas;  r: 1 in units of parameters, else the learning rate.
///
/// Semantics  the clip is element by element, of the momentum after d was added and before it is used (CO2). A rate of 1
///            without momentum and clip takes the mean of the parameters as it is.
/// Errors     usage_error for values that make no sense.
struct outer_optimizer {
    double rate = 1;
    double momentum = 0;
    bool nesterov = false;
    double clip = std::numeric_limits<double>::infinity();  ///< largest magnitude of an element of u
    outer_units units = outer_units::parameters;

    [[nodiscard]] bool clips() const noexcept { return clip < std::numeric_limits<double>::infinity(); }
    /// The mean itself is the result.
    [[nodiscard]] bool plain() const noexcept { return rate == 1 && momentum == 0 && !clips(); }

    void validate() const {
        if (!(rate > 0) || !(rate < std::numeric_limits<double>::infinity())) {
            throw usage_error(formatted("outer optimizer: rate is {}, expected a finite value above 0", rate));
        }
        if (!(momentum >= 0 && momentum < 1)) {
            throw usage_error(formatted("outer optimizer: momentum is {}, expected a value in [0, 1)", momentum));
        }
        if (!(clip >= 0)) {
            throw usage_error(formatted("outer optimizer: clip is {}, expected 0 or more; infinity is off", clip));
        }
        if (nesterov && momentum == 0) { throw usage_error("outer optimizer: nesterov needs a momentum"); }
        if (nesterov && clips()) {
            throw usage_error("outer optimizer: clip limits the step of a heavy ball; switch nesterov or clip off");
        }
    }
    [[nodiscard]] std::string describe() const {
        return formatted("{} of rate {} and momentum {}, clipped at {}, in units of {}",
                         nesterov ? "nesterov" : "heavy ball", rate, momentum, clip,
                         units == outer_units::parameters ? "parameters" : "gradients");
    }
};

namespace detail {

/// out = a - b
template <floating_element R, memory M> struct difference_operation {
    static constexpr std::string_view name = "difference";
    view<const R, M> a;
    view<const R, M> b;
    view<R, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(3 * out.size_bytes()), static_cast<double>(out.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(a, b); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE R result(std::size_t, R x, R y) const noexcept {
        return (exact(x) - exact(y)).value;
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// out = (1 - weight) a + weight b
template <floating_element R, memory M> struct mix_operation {
    static constexpr std::string_view name = "mix";
    view<const R, M> a;
    view<const R, M> b;
    view<R, M> out;
    R weight;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(3 * out.size_bytes()), 3.0 * static_cast<double>(out.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(a, b); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE R result(std::size_t, R x, R y) const noexcept {
        const exact w(weight);
        return ((exact(R{1}) - w) * exact(x) + w * exact(y)).value;
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// value = mean + (value - sent)
template <floating_element R, memory M> struct correct_delay_operation {
    static constexpr std::string_view name = "correct_delay";
    view<R, M> value;
    view<const R, M> mean;
    view<const R, M> sent;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(4 * value.size_bytes()), 2.0 * static_cast<double>(value.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(value, mean, sent); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(value); }
    [[nodiscard]] TUTTI_HOST_DEVICE R result(std::size_t, R x, R m, R s) const noexcept {
        return (exact(m) + (exact(x) - exact(s))).value;
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// d = anchor - value;  value = d/n + (mean - own/n);  own = d
template <floating_element R, memory M> struct eager_operation {
    static constexpr std::string_view name = "eager";
    view<R, M> value;
    view<R, M> own;
    view<const R, M> anchor;
    view<const R, M> mean;
    R ranks;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(6 * value.size_bytes()), 5.0 * static_cast<double>(value.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(value, own, anchor, mean); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(value, own); }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<R, R> result(std::size_t, R x, R o, R a, R m) const noexcept {
        const exact n(ranks);
        const exact d = exact(a) - exact(x);
        return {(d / n + (exact(m) - exact(o) / n)).value, d.value};
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// One outer step: anchor -= step; `mean` comes in as the mean pseudo-gradient and leaves as the step. `momentum` is
/// empty when there is none.
template <floating_element R, memory M, bool moving> struct outer_step_operation {
    static constexpr std::string_view name = "outer_step";
    view<R, M> anchor;
    view<R, M> momentum;
    view<R, M> mean;
    R divisor;  ///< gap and units
    R beta;
    R limit;
    R scale;  ///< rate and units
    bool nesterov;

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>((moving ? 6 : 4) * anchor.size_bytes()),
                (moving ? 7.0 : 4.0) * static_cast<double>(anchor.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept {
        if constexpr (moving) {
            return std::tuple(anchor, mean, momentum);
        } else {
            return std::tuple(anchor, mean);
        }
    }
    [[nodiscard]] constexpr auto outputs() const noexcept {
        if constexpr (moving) {
            return std::tuple(anchor, mean, momentum);
        } else {
            return std::tuple(anchor, mean);
        }
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<R, R> result(std::size_t, R x, R d) const noexcept {
        const exact step = exact(scale) * exact(clipped((exact(d) / exact(divisor)).value));
        return {(exact(x) - step).value, step.value};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::tuple<R, R, R> result(std::size_t, R x, R d, R u) const noexcept {
        const exact g = exact(d) / exact(divisor);
        const exact v(clipped((exact(beta) * exact(u) + g).value));
        const exact step = exact(scale) * (nesterov ? g + exact(beta) * v : v);
        return {(exact(x) - step).value, step.value, v.value};
    }
    void operator()() const { tutti::detail::for_each_element(*this); }

private:
    [[nodiscard]] TUTTI_HOST_DEVICE R clipped(R v) const noexcept {
        return v < -limit ? -limit : v > limit ? limit : v;
    }
};

}  // namespace detail
}  // namespace tutti::strategy
