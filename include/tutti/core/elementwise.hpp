// Elementwise operations every module needs: fill, copy (with conversion), scale, add a multiple.
// Needs core/run. Aliasing: inputs may be the output itself (same first element), not shifted against it.
#pragma once

#include <cstddef>  // size_t
#include <cstring>  // memcpy, memmove

#include <tutti/core/config.hpp>   // TUTTI_EXACT
#include <tutti/core/element.hpp>  // accumulator_t
#include <tutti/core/run.hpp>      // run, cost

namespace tutti {

namespace detail {
inline void expect_same_size(std::string_view operation, std::size_t in, std::size_t out) {
    if (in != out) { throw usage_error(fmt::format("{}: sizes differ (in {}, out {})", operation, in, out)); }
}
}  // namespace detail

/// out[i] = value
template <transportable T, memory M>
struct fill_operation {
    static constexpr std::string_view name = "fill";
    view<T, M> out;
    T value;
    [[nodiscard]] tutti::cost cost() const noexcept { return {static_cast<double>(out.size_bytes()), 0}; }
    void operator()() const {
        for (std::size_t i = 0; i < out.size(); ++i) { out.data()[i] = value; }
    }
};

/// out[i] = To(in[i]), rounded once to nearest even when To is narrower.
template <transportable From, transportable To, memory M>
struct copy_operation {
    static constexpr std::string_view name = "copy";
    view<const From, M> in;
    view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), 0};
    }
    void operator()() const {
        if (out.empty() || static_cast<const void*>(in.data()) == static_cast<const void*>(out.data())) { return; }
        if constexpr (std::same_as<From, To>) { std::memcpy(out.data(), in.data(), out.size_bytes()); }
        else {
            for (std::size_t i = 0; i < out.size(); ++i) {
                out.data()[i] = static_cast<To>(static_cast<accumulator_t<From>>(in.data()[i]));
            }
        }
    }
};

/// out[i] = factor * in[i]
template <floating_element T, memory M>
struct scale_operation {
    static constexpr std::string_view name = "scale";
    view<const T, M> in;
    view<T, M> out;
    master_t<T> factor;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(2 * out.size_bytes()), static_cast<double>(out.size())};
    }
    void operator()() const {
        const T* const x = in.data();
        T* const y = out.data();
        const std::size_t n = out.size();
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) {
            y[i] = static_cast<T>(factor * static_cast<master_t<T>>(x[i]));
        }
    }
};

/// out[i] += factor * in[i], product and sum rounded separately
template <floating_element T, memory M>
struct add_scaled_operation {
    static constexpr std::string_view name = "add_scaled";
    view<const T, M> in;
    view<T, M> out;
    master_t<T> factor;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(3 * out.size_bytes()), 2.0 * static_cast<double>(out.size())};
    }
    TUTTI_EXACT void operator()() const {
        TUTTI_EXACT_BODY
        const T* const x = in.data();
        T* const y = out.data();
        const std::size_t n = out.size();
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) {
            y[i] = static_cast<T>(static_cast<master_t<T>>(y[i]) + factor * static_cast<master_t<T>>(x[i]));
        }
    }
};

/// Sets every element of `out`.
template <queue Q, transportable T>
void fill(Q q, view<T, typename Q::memory_type> out, std::type_identity_t<T> value) {
    run(q, fill_operation<T, typename Q::memory_type>{out, value});
}

/// Copies, converting the element type. Errors: usage_error when sizes differ.
template <queue Q, class From, transportable To>
void copy(Q q, view<From, typename Q::memory_type> in, view<To, typename Q::memory_type> out) {
    detail::expect_same_size("copy", in.size(), out.size());
    run(q, copy_operation<std::remove_const_t<From>, To, typename Q::memory_type>{in, out});
}

/// out = factor * in. Errors: usage_error when sizes differ.
template <queue Q, floating_element T>
void scale(Q q, view<const std::type_identity_t<T>, typename Q::memory_type> in, view<T, typename Q::memory_type> out,
           master_t<T> factor) {
    detail::expect_same_size("scale", in.size(), out.size());
    run(q, scale_operation<T, typename Q::memory_type>{in, out, factor});
}

/// out += factor * in. Errors: usage_error when sizes differ.
template <queue Q, floating_element T>
void add_scaled(Q q, view<const std::type_identity_t<T>, typename Q::memory_type> in,
                view<T, typename Q::memory_type> out, master_t<T> factor) {
    detail::expect_same_size("add_scaled", in.size(), out.size());
    run(q, add_scaled_operation<T, typename Q::memory_type>{in, out, factor});
}

}  // namespace tutti
