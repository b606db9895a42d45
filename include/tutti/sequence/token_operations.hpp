// token_operations: what attention does to its data beside attending: fill, copy, add, sums, dot products, and the merge
// of partial attentions. Needs sequence/token_view and core/run; each is an operation with a host body.
#pragma once

#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <limits>       // infinity
#include <string_view>  // names
#include <type_traits>  // type_identity

#include <tutti/core/config.hpp>          // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>         // accumulator_t
#include <tutti/core/exact.hpp>           // bits of merges and dot products
#include <tutti/core/run.hpp>             // run, cost
#include <tutti/sequence/token_view.hpp>  // token_view

namespace tutti::sequence {

namespace detail {

// f(token, head) for all of them, in the order of memory for [tokens][heads][width].
template <class V, class F> void for_each_head(const V& of, F f) {
    for (std::size_t t = 0; t < of.tokens; ++t) {
        for (std::size_t h = 0; h < of.heads; ++h) { f(t, h); }
    }
}

template <class V, class W> void expect_same_shape(std::string_view operation, const V& in, const W& out) {
    if (!in.same_shape(out)) {
        throw usage_error(formatted("{}: shapes differ (in {} x {} x {}, out {} x {} x {})", operation, in.tokens,
                                    in.heads, in.width, out.tokens, out.heads, out.width));
    }
}

}  // namespace detail

/// out = value
template <transportable T, memory M> struct fill_tokens_operation {
    static constexpr std::string_view name = "fill tokens";
    token_view<T, M> out;
    T value;
    [[nodiscard]] tutti::cost cost() const noexcept { return {static_cast<double>(out.size() * sizeof(T)), 0}; }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            T* const y = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { y[c] = value; }
        });
    }
};

/// out = To(in), or out += To(in) where `adds`; rounded once to nearest even when To is narrower.
template <floating_element From, floating_element To, memory M> struct copy_tokens_operation {
    static constexpr std::string_view name = "copy tokens";
    token_view<const From, M> in;
    token_view<To, M> out;
    bool adds = false;
    [[nodiscard]] tutti::cost cost() const noexcept {
        const std::size_t passes = sizeof(From) + (adds ? 2 : 1) * sizeof(To);
        return {static_cast<double>(in.size() * passes), adds ? static_cast<double>(in.size()) : 0};
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE To copied(From x) noexcept {
        return static_cast<To>(static_cast<accumulator_t<From>>(x));
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE To added(To sum, From x) noexcept {
        return static_cast<To>(static_cast<accumulator_t<To>>(sum) + static_cast<accumulator_t<From>>(x));
    }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            const From* const x = in.at(t, h);
            To* const y = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { y[c] = adds ? added(y[c], x[c]) : copied(x[c]); }
        });
    }
};

/// out = To(a + b): the sum of two partial results, rounded once.
template <floating_element P, floating_element To, memory M> struct sum_tokens_operation {
    static constexpr std::string_view name = "sum tokens";
    token_view<const P, M> a, b;
    token_view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(out.size() * (2 * sizeof(P) + sizeof(To))), static_cast<double>(out.size())};
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE To summed(P x, P y) noexcept {
        return static_cast<To>(static_cast<accumulator_t<P>>(x) + static_cast<accumulator_t<P>>(y));
    }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            const P* const x = a.at(t, h);
            const P* const y = b.at(t, h);
            To* const z = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { z[c] = summed(x[c], y[c]); }
        });
    }
};

/// out(t, h) = sum over c of a(t, h, c) * b(t, h, c), in the precision of sums.
template <floating_element T, memory M> struct dot_tokens_operation {
    static constexpr std::string_view name = "dot tokens";
    using P = accumulator_t<T>;
    token_view<const T, M> a, b;
    token_view<P, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(2 * a.size() * sizeof(T) + out.size() * sizeof(P)),
                2 * static_cast<double>(a.size())};
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE P added_product(P total, T x, T y) noexcept {
        return (exact(total) + exact(static_cast<P>(x)) * exact(static_cast<P>(y))).value;
    }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            const T* const x = a.at(t, h);
            const T* const y = b.at(t, h);
            P total = 0;
            for (std::size_t c = 0; c < a.width; ++c) { total = added_product(total, x[c], y[c]); }
            *out.at(t, h) = total;
        });
    }
};

/// Makes (out, log_sum_exp) the attention over what it and (other_out, other_log_sum_exp) attended to.
///
/// Semantics    a row that attended to nothing is out 0, log_sum_exp -inf: merged with another it changes nothing, and
///              two of them stay one. Weights are exp(lse - larger lse), so none overflows, however far the two are
///              apart.
/// Determinism  exact; merging in another order gives the same to rounding.
/// Source       Dao et al. 2022, arXiv:2205.14135; Liu, Zaharia, Abbeel 2023, arXiv:2310.01889.
template <floating_element P, memory M> struct merge_operation {
    static constexpr std::string_view name = "merge attention";
    token_view<const P, M> other_out, other_log_sum_exp;
    token_view<P, M> out, log_sum_exp;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {3.0 * static_cast<double>((out.size() + log_sum_exp.size()) * sizeof(P)),
                3.0 * static_cast<double>(out.size())};
    }
    /// How a row is merged, by its log_sum_exp and the other one.
    class weights {
        P larger_, keep_, take_, total_;

    public:
        TUTTI_HOST_DEVICE weights(P mine, P other) noexcept
            : larger_(mine > other ? mine : other)
            , keep_(std::exp(mine - larger_))
            , take_(std::exp(other - larger_))
            , total_(keep_ + take_) {}
        /// Neither attended to anything: the row stays.
        [[nodiscard]] TUTTI_HOST_DEVICE bool nothing() const noexcept {
            return larger_ == -std::numeric_limits<P>::infinity();
        }
        [[nodiscard]] TUTTI_HOST_DEVICE P out(P mine, P other) const noexcept {
            return ((exact(keep_) * exact(mine) + exact(take_) * exact(other)) / exact(total_)).value;
        }
        [[nodiscard]] TUTTI_HOST_DEVICE P log_sum_exp() const noexcept { return larger_ + std::log(total_); }
    };
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            P& mine = *log_sum_exp.at(t, h);
            const weights w(mine, *other_log_sum_exp.at(t, h));
            if (w.nothing()) { return; }
            const P* const x = other_out.at(t, h);
            P* const y = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { y[c] = w.out(y[c], x[c]); }
            mine = w.log_sum_exp();
        });
    }
};

/// Sets every number to `value`.
template <queue Q, class T>
void fill_tokens(Q q, token_view<T, typename Q::memory_type> out, std::type_identity_t<T> value) {
    run(q, fill_tokens_operation<T, typename Q::memory_type>{out, value});
}

/// Aliasing  out is in, or they have no element in common. Errors: usage_error when shapes differ.
template <queue Q, class From, class To>
void copy_tokens(Q q, token_view<From, typename Q::memory_type> in, token_view<To, typename Q::memory_type> out) {
    detail::expect_same_shape("copy_tokens", in, out);
    run(q, copy_tokens_operation<std::remove_const_t<From>, To, typename Q::memory_type>{in, out, false});
}
/// Adds `in` to `out`, otherwise as copy_tokens.
template <queue Q, class From, class To>
void add_tokens(Q q, token_view<From, typename Q::memory_type> in, token_view<To, typename Q::memory_type> out) {
    detail::expect_same_shape("add_tokens", in, out);
    run(q, copy_tokens_operation<std::remove_const_t<From>, To, typename Q::memory_type>{in, out, true});
}
/// out = a + b, rounded once.
template <queue Q, class P, class To>
void sum_tokens(Q q, token_view<P, typename Q::memory_type> a, token_view<P, typename Q::memory_type> b,
                token_view<To, typename Q::memory_type> out) {
    detail::expect_same_shape("sum_tokens", a, out);
    detail::expect_same_shape("sum_tokens", b, out);
    run(q, sum_tokens_operation<std::remove_const_t<P>, To, typename Q::memory_type>{a, b, out});
}

}  // namespace tutti::sequence
