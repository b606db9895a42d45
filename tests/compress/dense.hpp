// dense: small matrices in double, one element at a time: the judges of low-rank approximations.
// Needs core/philox for content and compress/power_sgd for the names of draws.
// Source: one-sided Jacobi after Hestenes, SIAM J. 6 (1958).
#pragma once

#include <algorithm>  // sort
#include <cmath>      // sqrt, fabs
#include <cstddef>    // size_t
#include <cstdint>    // streams
#include <vector>     // elements

#include <tutti/core/philox.hpp>  // normals

namespace tutti::test {

/// rows x cols, row after row.
struct dense {
    std::size_t rows = 0, cols = 0;
    std::vector<double> of;

    dense(std::size_t n, std::size_t m) : rows(n), cols(m), of(n * m) {}
    template <class T> dense(std::size_t n, std::size_t m, const T* from) : dense(n, m) {
        for (std::size_t i = 0; i < n * m; ++i) { of[i] = static_cast<double>(from[i]); }
    }
    double& operator()(std::size_t i, std::size_t j) { return of[i * cols + j]; }
    double operator()(std::size_t i, std::size_t j) const { return of[i * cols + j]; }
};

inline dense transposed(const dense& a) {
    dense t(a.cols, a.rows);
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t j = 0; j < a.cols; ++j) { t(j, i) = a(i, j); }
    }
    return t;
}
inline dense operator*(const dense& a, const dense& b) {
    dense c(a.rows, b.cols);
    for (std::size_t i = 0; i < a.rows; ++i) {
        for (std::size_t k = 0; k < a.cols; ++k) {
            for (std::size_t j = 0; j < b.cols; ++j) { c(i, j) += a(i, k) * b(k, j); }
        }
    }
    return c;
}
/// a + factor * b
inline dense plus(dense a, const dense& b, double factor) {
    for (std::size_t i = 0; i < a.of.size(); ++i) { a.of[i] += factor * b.of[i]; }
    return a;
}
inline double norm(const dense& a) {
    double squares = 0;
    for (const double x : a.of) { squares += x * x; }
    return std::sqrt(squares);
}
/// ||a - b|| / ||b||
inline double distance(const dense& a, const dense& b) { return norm(plus(a, b, -1)) / norm(b); }

inline dense normal_matrix(std::size_t n, std::size_t m, std::uint32_t stream, double deviation = 1) {
    dense a(n, m);
    const random_stream draws{.seed = 20191210, .stream = stream};
    for (std::size_t i = 0; i < a.of.size(); ++i) { a.of[i] = deviation * static_cast<double>(draws.normal(i)); }
    return a;
}

/// Gram-Schmidt, twice. A column of which less than 1e-9 is left becomes zero.
inline dense orthonormal(dense a) {
    for (std::size_t j = 0; j < a.cols; ++j) {
        const auto length = [&] {
            double squares = 0;
            for (std::size_t i = 0; i < a.rows; ++i) { squares += a(i, j) * a(i, j); }
            return std::sqrt(squares);
        };
        const double before = length();
        for (int pass = 0; pass < 2; ++pass) {
            for (std::size_t k = 0; k < j; ++k) {
                double share = 0;
                for (std::size_t i = 0; i < a.rows; ++i) { share += a(i, k) * a(i, j); }
                for (std::size_t i = 0; i < a.rows; ++i) { a(i, j) -= share * a(i, k); }
            }
        }
        const double after = length();
        const double scale = after > 1e-9 * before ? 1 / after : 0.0;
        for (std::size_t i = 0; i < a.rows; ++i) { a(i, j) *= scale; }
    }
    return a;
}

/// The singular values, largest first.
inline std::vector<double> singular_values(dense a) {
    if (a.rows < a.cols) { a = transposed(a); }
    for (bool turned = true; turned;) {
        turned = false;
        for (std::size_t p = 0; p < a.cols; ++p) {
            for (std::size_t q = p + 1; q < a.cols; ++q) {
                double pp = 0, qq = 0, pq = 0;
                for (std::size_t i = 0; i < a.rows; ++i) {
                    pp += a(i, p) * a(i, p);
                    qq += a(i, q) * a(i, q);
                    pq += a(i, p) * a(i, q);
                }
                if (std::fabs(pq) <= 1e-15 * std::sqrt(pp * qq)) { continue; }
                turned = true;
                const double zeta = (qq - pp) / (2 * pq);
                const double t = (zeta < 0 ? -1.0 : 1.0) / (std::fabs(zeta) + std::sqrt(1 + zeta * zeta));
                const double c = 1 / std::sqrt(1 + t * t);
                for (std::size_t i = 0; i < a.rows; ++i) {
                    const double x = a(i, p);
                    a(i, p) = c * x - c * t * a(i, q);
                    a(i, q) = c * t * x + c * a(i, q);
                }
            }
        }
    }
    std::vector<double> values;
    for (std::size_t j = 0; j < a.cols; ++j) {
        double squares = 0;
        for (std::size_t i = 0; i < a.rows; ++i) { squares += a(i, j) * a(i, j); }
        values.push_back(std::sqrt(squares));
    }
    std::sort(values.rbegin(), values.rend());
    return values;
}

/// U diag(values) V' with random orthonormal U and V.
inline dense with_singular_values(std::size_t n, std::size_t m, const std::vector<double>& values,
                                  std::uint32_t stream) {
    dense u = orthonormal(normal_matrix(n, values.size(), stream));
    const dense v = orthonormal(normal_matrix(m, values.size(), stream + 1));
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t j = 0; j < values.size(); ++j) { u(i, j) *= values[j]; }
    }
    return u * transposed(v);
}

template <class T = float> std::vector<T> rounded(const dense& a) {
    std::vector<T> r;
    for (const double x : a.of) { r.push_back(static_cast<T>(x)); }
    return r;
}

}  // namespace tutti::test
