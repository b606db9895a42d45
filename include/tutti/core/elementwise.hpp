// elementwise: what an operation on independent elements is, and those every module needs: fill, copy, scale, add.
// Needs core/run; on a CUDA queue core/cuda_run.cuh. `result` is the arithmetic, for host loops and device threads.
// Aliasing: inputs may be the output itself (same first element), not shifted against it.
#pragma once

#include <cstddef>  // size_t
#include <cstring>  // memcpy
#include <tuple>    // inputs and outputs
#include <utility>  // index_sequence

#include <tutti/core/config.hpp>   // TUTTI_EXACT
#include <tutti/core/element.hpp>  // accumulator_t
#include <tutti/core/exact.hpp>    // products and sums rounded separately
#include <tutti/core/run.hpp>      // run, cost
#include <tutti/core/text.hpp>     // formatted

namespace tutti {

/// An operation on independent elements: element i of each output is a function of i and of element i of each input.
///
/// Semantics    inputs() and outputs() are tuples of views of one size. result(i, inputs...) only computes: the value
///              of the output, or a tuple with one for each output. Who calls it loads and stores, so a device thread
///              has many elements in flight, and vectors of them where addresses allow, without the operation's doing.
/// Aliasing     an output may be an input; all inputs of an element are read before its outputs are written.
/// Determinism  result(i, ...) must give the same bits on host and device: `exact` numbers, or single operations.
template <class O>
concept elementwise_operation = operation<O> && requires(const O& o) {
    std::tuple_size<decltype(o.inputs())>::value;
    std::get<0>(o.outputs()).data();
};

/// An operation that draws: result(word, inputs...) takes a random word of its element instead of its place. words(i)
/// are those of elements i to i + 3, which come cheaper together.
template <class O>
concept drawing_operation = elementwise_operation<O> && requires(const O& o, std::size_t i) {
    o.words(i)[0];
};

namespace detail {

template <class O> using inputs_of = decltype(std::declval<const O&>().inputs());
template <class O> using outputs_of = decltype(std::declval<const O&>().outputs());
template <class O> using input_indices = std::make_index_sequence<std::tuple_size_v<inputs_of<O>>>;
template <class O> using output_indices = std::make_index_sequence<std::tuple_size_v<outputs_of<O>>>;

// What result() takes first.
template <class O> TUTTI_HOST_DEVICE constexpr auto key_of(const O& op, std::size_t i) {
    if constexpr (drawing_operation<O>) {
        return op.words(i)[0];
    } else {
        return i;
    }
}

template <class O, std::size_t... In, std::size_t... Out>
TUTTI_HOST_DEVICE inline void do_element(const O& op, const inputs_of<O>& in, const outputs_of<O>& out, std::size_t i,
                                         std::index_sequence<In...>, std::index_sequence<Out...>) {
    if constexpr (std::tuple_size_v<outputs_of<O>> == 1) {
        std::get<0>(out).data()[i] = op.result(key_of(op, i), std::get<In>(in).data()[i]...);
    } else {
        const auto r = op.result(key_of(op, i), std::get<In>(in).data()[i]...);
        ((std::get<Out>(out).data()[i] = std::get<Out>(r)), ...);
    }
}

// The host's loop.
template <class O> TUTTI_EXACT void for_each_element(const O& op) {
    TUTTI_EXACT_BODY
    const O k = op;  // constants in registers: stores through its pointers cannot change them
    const auto in = k.inputs();
    const auto out = k.outputs();
    const std::size_t n = std::get<0>(out).size();
    TUTTI_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) { do_element(k, in, out, i, input_indices<O>(), output_indices<O>()); }
}

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

// 16-bit floats are made from float or double. Integers go through double, which rounds those above 2^53.
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
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(std::size_t) const noexcept { return value; }
    void operator()() const { detail::for_each_element(*this); }
};

/// out[i] = To(in[i]), rounded once to nearest even when To is narrower. 64-bit integers above 2^53 are rounded twice on
/// their way to 16 bits: to double first.
template <transportable From, transportable To, memory M> struct copy_operation {
    static constexpr std::string_view name = "copy";
    view<const From, M> in;
    view<To, M> out;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), 0};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE To result(std::size_t, From x) const noexcept { return detail::converted<To>(x); }
    void operator()() const {
        if (out.empty() || static_cast<const void*>(in.data()) == static_cast<const void*>(out.data())) { return; }
        if constexpr (std::same_as<From, To>) {
            std::memcpy(out.data(), in.data(), out.size_bytes());
        } else {
            detail::for_each_element(*this);
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
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(std::size_t, T x) const noexcept {
        return static_cast<T>(factor * static_cast<master_t<T>>(x));
    }
    void operator()() const { detail::for_each_element(*this); }
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
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in, out); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(std::size_t, T x, T y) const noexcept {
        using real = master_t<T>;
        return static_cast<T>((exact(static_cast<real>(y)) + exact(factor) * exact(static_cast<real>(x))).value);
    }
    void operator()() const { detail::for_each_element(*this); }
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
