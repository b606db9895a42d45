// Reduction operators (sum, mean, max, min, product) and the one loop that applies them over ranks.
// Needs core/element. The order is always rank 0, 1, 2, ...: the bits do not depend on slicing, bucketing or timing.
#pragma once

#include <algorithm>    // min
#include <cstddef>      // size_t
#include <cstdint>      // op_kind
#include <string_view>  // names
#include <type_traits>  // make_unsigned_t

#include <tutti/core/config.hpp>   // TUTTI_EXACT, TUTTI_INDEPENDENT
#include <tutti/core/element.hpp>  // element, accumulator_t

namespace tutti {

enum class op_kind : std::uint8_t { none, sum, mean, max, min, product };

[[nodiscard]] constexpr std::string_view name_of(op_kind k) noexcept {
    constexpr std::string_view names[] = {"none", "sum", "mean", "max", "min", "product"};
    return names[static_cast<std::size_t>(k)];
}

namespace detail {
// Signed overflow wraps, as unsigned arithmetic does; below 32 bits the promotion to int already cannot overflow.
template <class A, class F> TUTTI_HOST_DEVICE constexpr A wrapping(A a, A b, F f) noexcept {
    if constexpr (std::integral<A>) {
        using wide = std::conditional_t<sizeof(A) < 4, std::uint32_t, std::make_unsigned_t<A>>;
        return static_cast<A>(f(static_cast<wide>(a), static_cast<wide>(b)));
    } else {
        return f(a, b);
    }
}
}  // namespace detail

/// a + b; integers wrap.
struct sum {
    static constexpr op_kind kind = op_kind::sum;
    template <class A> TUTTI_HOST_DEVICE constexpr A operator()(A a, A b) const noexcept {
        return detail::wrapping(a, b, [](auto x, auto y) { return x + y; });
    }
};
/// The sum over the communicator's ranks divided by their number; floating point only.
struct mean {
    static constexpr op_kind kind = op_kind::mean;
    template <class A> TUTTI_HOST_DEVICE constexpr A operator()(A a, A b) const noexcept { return a + b; }
};
/// The larger one; NaN if either is NaN.
struct max {
    static constexpr op_kind kind = op_kind::max;
    template <class A> TUTTI_HOST_DEVICE constexpr A operator()(A a, A b) const noexcept {
        return (b > a || b != b) ? b : a;
    }
};
/// The smaller one; NaN if either is NaN.
struct min {
    static constexpr op_kind kind = op_kind::min;
    template <class A> TUTTI_HOST_DEVICE constexpr A operator()(A a, A b) const noexcept {
        return (b < a || b != b) ? b : a;
    }
};
/// a * b; integers wrap.
struct product {
    static constexpr op_kind kind = op_kind::product;
    template <class A> TUTTI_HOST_DEVICE constexpr A operator()(A a, A b) const noexcept {
        return detail::wrapping(a, b, [](auto x, auto y) { return x * y; });
    }
};

template <class Op>
concept reduction = requires {
    { Op::kind } -> std::convertible_to<op_kind>;
};

/// T can be reduced with Op: any element type with any operator, except the mean of integers, which has no one
/// rounding.
template <class T, class Op>
concept reducible = reduction<Op> && element<T> &&(Op::kind != op_kind::mean || floating_element<T>);

/// Byte-level reduction: out[i] = rows[0][i] op rows[1][i] op ... for `count` elements; `out` may be one of the rows.
using reduce_function = void (*)(void* out, const void* const* rows, int ranks, std::size_t count);

namespace detail {

// Two rows need no accumulator array. Kept apart because most machines in tests and many in use have two ranks.
template <element T, reduction Op> TUTTI_EXACT void reduce_two(T* out, const T* a, const T* b, std::size_t count) {
    TUTTI_EXACT_BODY
    using A = accumulator_t<T>;
    const Op op{};
    TUTTI_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        A acc = op(static_cast<A>(a[i]), static_cast<A>(b[i]));
        if constexpr (Op::kind == op_kind::mean) { acc = acc / A{2}; }
        out[i] = static_cast<T>(acc);
    }
}

template <element T, reduction Op>
TUTTI_EXACT void reduce_many(T* out, const void* const* rows, int ranks, std::size_t count) {
    TUTTI_EXACT_BODY
    using A = accumulator_t<T>;
    constexpr std::size_t block = 4096 / sizeof(A);  // accumulators stay in the first-level cache
    alignas(64) A acc[block];
    const Op op{};
    for (std::size_t first = 0; first < count; first += block) {
        const std::size_t n = std::min(block, count - first);
        const T* row = static_cast<const T*>(rows[0]) + first;
        for (std::size_t i = 0; i < n; ++i) { acc[i] = static_cast<A>(row[i]); }
        for (int p = 1; p < ranks; ++p) {
            row = static_cast<const T*>(rows[p]) + first;
            for (std::size_t i = 0; i < n; ++i) { acc[i] = op(acc[i], static_cast<A>(row[i])); }
        }
        if constexpr (Op::kind == op_kind::mean) {
            for (std::size_t i = 0; i < n; ++i) { acc[i] = acc[i] / static_cast<A>(ranks); }
        }
        for (std::size_t i = 0; i < n; ++i) { out[first + i] = static_cast<T>(acc[i]); }
    }
}

template <element T, reduction Op> void reduce_rows(void* out, const void* const* rows, int ranks, std::size_t count) {
    if (ranks == 2) {
        reduce_two<T, Op>(static_cast<T*>(out), static_cast<const T*>(rows[0]), static_cast<const T*>(rows[1]), count);
    } else {
        reduce_many<T, Op>(static_cast<T*>(out), rows, ranks, count);
    }
}

}  // namespace detail

/// The byte-level loop of (T, Op). Cost: reads ranks * count, writes count elements.
template <class T, class Op>
requires reducible<T, Op>
[[nodiscard]] constexpr reduce_function reduce_function_of() noexcept { return &detail::reduce_rows<T, Op>; }

}  // namespace tutti
