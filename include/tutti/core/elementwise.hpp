// Elementwise operations every module needs: fill, copy (with conversion), scale, add a multiple.
// Needs core/run; on a CUDA queue core/cuda_run.cuh. `element(i)` is the arithmetic, for host loops and device threads.
// Aliasing: inputs may be the output itself (same first element), not shifted against it.
#pragma once

#include <cstddef>  // size_t
#include <cstring>  // memcpy

#include <tutti/core/config.hpp>   // TUTTI_EXACT
#include <tutti/core/element.hpp>  // accumulator_t
#include <tutti/core/exact.hpp>    // products and sums rounded separately
#include <tutti/core/run.hpp>      // run, cost
#include <tutti/core/text.hpp>     // formatted

namespace tutti {

namespace detail {
// Same sizes, and either the very same elements or none in common.
template <class From, class To, memory M>
void expect_pairs(std::string_view operation, view<From, M> in, view<To, M> out) {
    if (in.size() != out.size()) {
        throw usage_error(formatted("{}: sizes differ (in {}, out {})", operation, in.size(), out.size()));
    }
    const bool same = std::same_as<std::remove_const_t<From>, To> && static_cast<const void*>(in.data()) == out.data();
    if (!same && overlaps(in.data(), in.size_bytes(), out.data(), out.size_bytes())) {
        throw usage_error(formatted("{}: in and out overlap without being the same elements", operation));
    }
}

// 16-bit floats are made from float or double. Integers go through double, exactly up to 2^53.
template <class To, class From> TUTTI_HOST_DEVICE constexpr To converted(From x) noexcept {
    using A = accumulator_t<From>;
    if constexpr (std::integral<From> && floating_element<To>) {
        return static_cast<To>(static_cast<std::conditional_t<sizeof(To) == 2, double, To>>(x));
    } else {
        return static_cast<To>(static_cast<A>(x));
    }
}
}  // namespace detail

/// out[i] = value
template <transportable T, memory M> struct fill_operation {
    static constexpr std::string_view name = "fill";
    view<T, M> out;
    T value;
    [[nodiscard]] tutti::cost cost() const noexcept { return {static_cast<double>(out.size_bytes()), 0}; }
    [[nodiscard]] std::size_t size() const noexcept { return out.size(); }
    TUTTI_HOST_DEVICE void element(std::size_t i) const { out.data()[i] = value; }
    void operator()() const {
        const fill_operation k = *this;
        const std::size_t n = size();
        for (std::size_t i = 0; i < n; ++i) { k.element(i); }
    }
};

/// out[i] = To(in[i]), rounded once to nearest even when To is narrower.
template <transportable From, transportable To, memory M> struct copy_operation {
    static constexpr std::string_view name = "copy";
    view<const From, M> in;
    view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), 0};
    }
    [[nodiscard]] std::size_t size() const noexcept { return out.size(); }
    TUTTI_HOST_DEVICE void element(std::size_t i) const { out.data()[i] = detail::converted<To>(in.data()[i]); }
    void operator()() const {
        if (out.empty() || static_cast<const void*>(in.data()) == static_cast<const void*>(out.data())) { return; }
        if constexpr (std::same_as<From, To>) {
            std::memcpy(out.data(), in.data(), out.size_bytes());
        } else {
            const copy_operation k = *this;
            const std::size_t n = size();
            for (std::size_t i = 0; i < n; ++i) { k.element(i); }
        }
    }
};

/// out[i] = factor * in[i]
template <floating_element T, memory M> struct scale_operation {
    static constexpr std::string_view name = "scale";
    view<const T, M> in;
    view<T, M> out;
    master_t<T> factor;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(2 * out.size_bytes()), static_cast<double>(out.size())};
    }
    [[nodiscard]] std::size_t size() const noexcept { return out.size(); }
    TUTTI_HOST_DEVICE void element(std::size_t i) const {
        out.data()[i] = static_cast<T>(factor * static_cast<master_t<T>>(in.data()[i]));
    }
    void operator()() const {
        const scale_operation k = *this;
        const std::size_t n = size();
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) { k.element(i); }
    }
};

/// out[i] += factor * in[i], product and sum rounded separately
template <floating_element T, memory M> struct add_scaled_operation {
    static constexpr std::string_view name = "add_scaled";
    view<const T, M> in;
    view<T, M> out;
    master_t<T> factor;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(3 * out.size_bytes()), 2.0 * static_cast<double>(out.size())};
    }
    [[nodiscard]] std::size_t size() const noexcept { return out.size(); }
    TUTTI_HOST_DEVICE void element(std::size_t i) const {
        using real = master_t<T>;
        const exact x(static_cast<real>(in.data()[i]));
        const exact y(static_cast<real>(out.data()[i]));
        out.data()[i] = static_cast<T>((y + exact(factor) * x).value);
    }
    TUTTI_EXACT void operator()() const {
        TUTTI_EXACT_BODY
        const add_scaled_operation k = *this;
        const std::size_t n = size();
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) { k.element(i); }
    }
};

/// Sets every element of `out`.
template <queue Q, transportable T>
void fill(Q q, view<T, typename Q::memory_type> out, std::type_identity_t<T> value) {
    run(q, fill_operation<T, typename Q::memory_type>{out, value});
}

/// Copies, converting the element type. In place only when the type stays. Errors: usage_error when sizes differ or the
/// views overlap otherwise.
template <queue Q, class From, transportable To>
void copy(Q q, view<From, typename Q::memory_type> in, view<To, typename Q::memory_type> out) {
    detail::expect_pairs("copy", in, out);
    run(q, copy_operation<std::remove_const_t<From>, To, typename Q::memory_type>{in, out});
}

/// out = factor * in. Errors: usage_error when sizes differ or the views overlap shifted.
template <queue Q, floating_element T>
void scale(Q q, view<const std::type_identity_t<T>, typename Q::memory_type> in, view<T, typename Q::memory_type> out,
           master_t<T> factor) {
    detail::expect_pairs("scale", in, out);
    run(q, scale_operation<T, typename Q::memory_type>{in, out, factor});
}

/// out += factor * in. Errors: usage_error when sizes differ or the views overlap shifted.
template <queue Q, floating_element T>
void add_scaled(Q q, view<const std::type_identity_t<T>, typename Q::memory_type> in,
                view<T, typename Q::memory_type> out, master_t<T> factor) {
    detail::expect_pairs("add_scaled", in, out);
    run(q, add_scaled_operation<T, typename Q::memory_type>{in, out, factor});
}

}  // namespace tutti
