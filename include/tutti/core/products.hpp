// products: the products of matrices that work on the host is made of; in plain loops here, through CBLAS in
// sequence/blas_products. Needs nothing. Algorithms take such a policy, so that none needs a CBLAS itself.
#pragma once

#include <concepts>     // conversions
#include <cstddef>      // size_t
#include <type_traits>  // conversions that only add const

namespace tutti {

/// rows x columns numbers, a row `stride` behind the one before.
template <class T> struct matrix {
    T* data = nullptr;
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::size_t stride = 0;
    [[nodiscard]] constexpr T* row(std::size_t i) const noexcept { return data + i * stride; }
    [[nodiscard]] constexpr matrix top(std::size_t count) const noexcept { return {data, count, columns, stride}; }
    template <std::same_as<const T> U>
    requires(!std::is_const_v<T>) constexpr operator matrix<U>() const noexcept {
        return {data, rows, columns, stride};
    }
};

/// A factor as stored, or transposed without moving anything.
template <class T> struct factor {
    matrix<const T> stored;
    bool transposed = false;
    [[nodiscard]] constexpr std::size_t rows() const noexcept { return transposed ? stored.columns : stored.rows; }
    [[nodiscard]] constexpr std::size_t columns() const noexcept { return transposed ? stored.rows : stored.columns; }
};

/// c = scale * a * b + keep * c, in loops that need no library.
///
/// Shapes       (m x k) * (k x n) into (m x n); sizes are the caller's promise. keep = 0 does not read c.
/// Aliasing     c overlaps neither a nor b.
/// Determinism  exact: sums over k in ascending order.
/// Cost         2 m n k flops.
struct plain_products {
    template <class P> static void multiply(factor<P> a, factor<P> b, matrix<P> c, P scale, P keep) {
        const std::size_t inner = a.columns();
        for (std::size_t i = 0; i < c.rows; ++i) {
            P* const y = c.row(i);
            for (std::size_t j = 0; j < c.columns; ++j) { y[j] = keep == 0 ? P{0} : keep * y[j]; }
            const P* const x = a.transposed ? a.stored.data + i : a.stored.row(i);
            const std::size_t step = a.transposed ? a.stored.stride : 1;
            if (b.transposed) {
                for (std::size_t j = 0; j < c.columns; ++j) {
                    const P* const z = b.stored.row(j);
                    P total = 0;
                    for (std::size_t l = 0; l < inner; ++l) { total += x[l * step] * z[l]; }
                    y[j] += scale * total;
                }
            } else {
                for (std::size_t l = 0; l < inner; ++l) {
                    const P factor_of_row = scale * x[l * step];
                    const P* const z = b.stored.row(l);
                    for (std::size_t j = 0; j < c.columns; ++j) { y[j] += factor_of_row * z[j]; }
                }
            }
        }
    }
};

}  // namespace tutti
