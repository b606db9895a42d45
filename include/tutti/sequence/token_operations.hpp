// token_operations: what attention does to its data beside attending: fill, copy, add, sums, dot products, and the merge
// of partial attentions. Needs sequence/token_view and core/run; each is an operation with a host body.
#pragma once

#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <limits>       // infinity
#include <string_view>  // names
#include <type_traits>  // is_same, type_identity

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

/// out = To(in), rounded once to nearest even when To is narrower.
template <floating_element From, floating_element To, memory M> struct copy_tokens_operation {
    static constexpr std::string_view name = "copy tokens";
    token_view<const From, M> in;
    token_view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size() * (sizeof(From) + sizeof(To))), 0};
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE To copied(From x) noexcept {
        return static_cast<To>(static_cast<accumulator_t<From>>(x));
    }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            const From* const x = in.at(t, h);
            To* const y = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { y[c] = copied(x[c]); }
        });
    }
};

/// out = To(a + b), rounded once from the precision of sums.
template <floating_element A, floating_element B, floating_element To, memory M> struct sum_tokens_operation {
    static constexpr std::string_view name = "sum tokens";
    using P = accumulator_t<A>;
    static_assert(std::is_same_v<P, accumulator_t<B>>, "sums of tokens have one precision");
    token_view<const A, M> a;
    token_view<const B, M> b;
    token_view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(out.size() * (sizeof(A) + sizeof(B) + sizeof(To))),
                static_cast<double>(out.size())};
    }
    [[nodiscard]] static TUTTI_HOST_DEVICE To summed(A x, B y) noexcept {
        return static_cast<To>(static_cast<P>(x) + static_cast<P>(y));
    }
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            const A* const x = a.at(t, h);
            const B* const y = b.at(t, h);
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

/// Makes (out, log_sum_exp) the attention over what (kept, log_sum_exp) and (other_out, other_log_sum_exp) attended to.
///
/// Semantics    a row that attended to nothing is out 0, log_sum_exp -inf: merged with another it changes nothing, and
///              two of them stay one. Weights are exp(lse - larger lse), so none overflows, however far the two are
///              apart. log_sum_exp is replaced.
/// Units        sums, and what is computed with, are of P; each of the three results may be rounded.
/// Aliasing     out is kept, or they have no element in common.
/// Determinism  exact; merging in another order gives the same to rounding.
/// Source       Dao et al. 2022, arXiv:2205.14135; Liu, Zaharia, Abbeel 2023, arXiv:2310.01889.
template <floating_element P, memory M, floating_element Other = P, floating_element Kept = P, floating_element To = P>
struct merge_operation {
    static constexpr std::string_view name = "merge attention";
    token_view<const Other, M> other_out;
    token_view<const P, M> other_log_sum_exp;
    token_view<const Kept, M> kept;
    token_view<P, M> log_sum_exp;
    token_view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(out.size() * (sizeof(Other) + sizeof(Kept) + sizeof(To)) +
                                    3 * log_sum_exp.size() * sizeof(P)),
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
        [[nodiscard]] TUTTI_HOST_DEVICE To out(Kept mine, Other other) const noexcept {
            const P x = static_cast<P>(mine);
            if (nothing()) { return static_cast<To>(x); }
            const auto merged = exact(keep_) * exact(x) + exact(take_) * exact(static_cast<P>(other));
            return static_cast<To>((merged / exact(total_)).value);
        }
        [[nodiscard]] TUTTI_HOST_DEVICE P log_sum_exp() const noexcept {
            return nothing() ? larger_ : larger_ + std::log(total_);
        }
    };
    void operator()() const {
        detail::for_each_head(out, [&](std::size_t t, std::size_t h) {
            P& mine = *log_sum_exp.at(t, h);
            const weights w(mine, *other_log_sum_exp.at(t, h));
            const Other* const x = other_out.at(t, h);
            const Kept* const y = kept.at(t, h);
            To* const z = out.at(t, h);
            for (std::size_t c = 0; c < out.width; ++c) { z[c] = w.out(y[c], x[c]); }
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
    run(q, copy_tokens_operation<std::remove_const_t<From>, To, typename Q::memory_type>{in, out});
}
/// out = a + b, rounded once. Aliasing: out is a or b, or has no element in common with them.
template <queue Q, class A, class B, class To>
void sum_tokens(Q q, token_view<A, typename Q::memory_type> a, token_view<B, typename Q::memory_type> b,
                token_view<To, typename Q::memory_type> out) {
    detail::expect_same_shape("sum_tokens", a, out);
    detail::expect_same_shape("sum_tokens", b, out);
    run(q,
        sum_tokens_operation<std::remove_const_t<A>, std::remove_const_t<B>, To, typename Q::memory_type>{a, b, out});
}
template <queue Q, class From, class To>
void add_tokens(Q q, token_view<From, typename Q::memory_type> in, token_view<To, typename Q::memory_type> out) {
    sum_tokens(q, out, in, out);
}

}  // namespace tutti::sequence
