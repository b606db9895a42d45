// Reference reductions and element helpers for tests: written apart from the library, rank after rank, one element at a
// time, so that a mistake in the library's loops cannot hide in its judge.
// Needs core/element for the types, core/reduce_op for the operators' names.
#pragma once

#include <algorithm>    // max
#include <cmath>        // fabs, isnan
#include <cstddef>      // size_t
#include <cstdint>      // integer types
#include <cstring>      // memcmp
#include <limits>       // epsilon
#include <string_view>  // names
#include <type_traits>  // integral
#include <vector>       // rows

#include <tutti/core/element.hpp>    // element
#include <tutti/core/reduce_op.hpp>  // op_kind

namespace tutti::test {

template <class T> using rows = std::vector<std::vector<T>>;  // one row a rank, all of one size

/// Calls f.template operator()<T>() for each type of the list.
template <class... T, class F> void for_types(F f) { (f.template operator()<T>(), ...); }

/// Calls f(op) with each operator that T can be reduced with.
template <element T, class F> void for_operators(F f) {
    f(sum{});
    f(max{});
    f(min{});
    f(product{});
    if constexpr (reducible<T, mean>) { f(mean{}); }
}

/// One step of a reduction in the accumulator type.
template <class A> A combine(op_kind op, A a, A b) {
    if constexpr (std::is_integral_v<A>) {
        const auto x = static_cast<std::uint64_t>(a);
        const auto y = static_cast<std::uint64_t>(b);
        if (op == op_kind::sum) { return static_cast<A>(x + y); }
        if (op == op_kind::product) { return static_cast<A>(x * y); }
    } else {
        if (op == op_kind::sum || op == op_kind::mean) { return a + b; }
        if (op == op_kind::product) { return a * b; }
        if (std::isnan(a)) { return a; }
        if (std::isnan(b)) { return b; }
    }
    if (op == op_kind::max) { return a < b ? b : a; }
    return b < a ? b : a;
}

/// The deterministic backends' promise: accumulate in accumulator_t in ascending rank order, round once.
template <element T> std::vector<T> reduced_in_rank_order(op_kind op, const rows<T>& in) {
    using A = accumulator_t<T>;
    std::vector<T> out(in.at(0).size());
    for (std::size_t i = 0; i < out.size(); ++i) {
        A acc = static_cast<A>(in[0][i]);
        for (std::size_t r = 1; r < in.size(); ++r) { acc = combine(op, acc, static_cast<A>(in[r][i])); }
        if constexpr (!std::is_integral_v<T>) {
            if (op == op_kind::mean) { acc = acc / static_cast<A>(in.size()); }
        }
        out[i] = static_cast<T>(acc);
    }
    return out;
}

/// The judge of sums in any order: the exact value in long double, and the error that `steps` additions in a type of
/// relative precision `unit`, and one rounding to T, may leave.
struct bounded {
    long double value = 0;
    long double error = 0;
};
/// Unit roundoff of T: half the distance of 1 to its neighbor.
template <element T> constexpr double roundoff() {
    if constexpr (std::same_as<T, float16>) {
        return 0x1p-11;
    } else if constexpr (std::same_as<T, bfloat16>) {
        return 0x1p-8;
    } else {
        return static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
    }
}
/// Sum or mean over ranks of element i. `round_every_step`: the backend may round partial sums to T.
template <element T> bounded summed_exactly(op_kind op, const rows<T>& in, std::size_t i, bool round_every_step) {
    bounded b;
    long double magnitude = 0;
    for (const auto& row : in) {
        const auto x = static_cast<long double>(static_cast<accumulator_t<T>>(row[i]));
        b.value += x;
        magnitude += std::fabs(x);
    }
    const auto n = static_cast<long double>(in.size());
    if (op == op_kind::mean) {
        b.value /= n;
        magnitude /= n;
    }
    const double unit = round_every_step ? roundoff<T>() : roundoff<accumulator_t<T>>();
    // n - 1 additions, a division, a rounding; 1.01 covers products of the errors and the long double sum itself.
    b.error = 1.01L * (n * unit * magnitude + roundoff<T>() * std::fabs(b.value));
    return b;
}

template <class T> bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// A well-mixed word for each index: data that no two places share by accident.
constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
    x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
    x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
    return x ^ (x >> 33);
}

/// Uniform in (-1, 1), rounded to T.
template <element T> T random_element(std::uint64_t seed, std::uint64_t i) {
    const double u = static_cast<double>(mixed(seed * 0x9e3779b97f4a7c15ull + i) >> 11) * 0x1p-52 - 1.0;
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(mixed(seed * 0x9e3779b97f4a7c15ull + i));
    } else {
        return static_cast<T>(u);
    }
}

/// A small whole number: sums, products of a few, minima and maxima are exact in every type and in every order.
template <element T> T small_element(op_kind op, std::uint64_t rank, std::uint64_t i) {
    const std::uint64_t word = mixed(rank * 0x51ed27ull + i);
    int value = static_cast<int>(word % 7) - 3;
    if (op == op_kind::product) { value = (word % 5 == 0 ? 2 : 1) * ((word & 0x100) != 0 ? -1 : 1); }
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(value);
    } else {
        return static_cast<T>(static_cast<float>(value));
    }
}

}  // namespace tutti::test
