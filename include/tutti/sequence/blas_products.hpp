// blas_products: the products of attention on the host through CBLAS (link tutti::blas).
// Needs sequence/products and any CBLAS; let a threaded one use one thread where ranks share a machine.
#pragma once

#include <algorithm>  // max
#include <concepts>   // same_as
#include <cstddef>    // size_t

#include <cblas.h>  // sgemm, dgemm

#include <tutti/core/error.hpp>         // narrow
#include <tutti/sequence/products.hpp>  // matrix, factor

namespace tutti::sequence {

/// c = scale * a * b + keep * c, in one CBLAS call; otherwise as plain_products.
///
/// Determinism  the library's: OpenBLAS on one thread gives the same bits for the same shapes.
struct blas_products {
    template <class P>
    requires std::same_as<P, float> || std::same_as<P, double>
    static void multiply(factor<P> a, factor<P> b, matrix<P> c, P scale, P keep) {
        if (c.rows == 0 || c.columns == 0) { return; }
        const auto size = [](std::size_t n) { return narrow<int>(n, "size of a product"); };
        // A stride counts for one row too, where strides of data may be anything.
        const auto stride = [&](matrix<const P> m) {
            return size(m.rows > 1 ? m.stride : std::max<std::size_t>(m.columns, 1));
        };
        const auto of = [](const factor<P>& f) { return f.transposed ? CblasTrans : CblasNoTrans; };
        const int m = size(c.rows);
        const int n = size(c.columns);
        const int k = size(a.columns());
        if constexpr (std::same_as<P, float>) {
            cblas_sgemm(CblasRowMajor, of(a), of(b), m, n, k, scale, a.stored.data, stride(a.stored), b.stored.data,
                        stride(b.stored), keep, c.data, stride(c));
        } else {
            cblas_dgemm(CblasRowMajor, of(a), of(b), m, n, k, scale, a.stored.data, stride(a.stored), b.stored.data,
                        stride(b.stored), keep, c.data, stride(c));
        }
    }
};

}  // namespace tutti::sequence
