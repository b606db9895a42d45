// Products of matrices through CBLAS, and the vectorizable exp.
// Needs any CBLAS; where it is a threaded one, one_thread_per_rank() must be called once before the first product.
#pragma once

#include <bit>          // bit_cast in the float exp
#include <cmath>        // exp of the double build
#include <cstddef>      // size_t
#include <cstdint>      // exponent bits
#include <type_traits>  // element types

#include <cblas.h>  // matrix products

#include "matrix.hpp"

// Thread controls of the common CBLAS libraries: null where the linked one does not have them.
extern "C" {
__attribute__((weak)) void openblas_set_num_threads(int threads);
__attribute__((weak)) void MKL_Set_Num_Threads(int threads);
__attribute__((weak)) void bli_thread_set_num_threads(std::int64_t threads);
}

namespace transformer {

/// Keeps every product on its calling thread: a rank is one thread, and ranks share the machine.
inline void one_thread_per_rank() {
    if (openblas_set_num_threads != nullptr) { openblas_set_num_threads(1); }
    if (MKL_Set_Num_Threads != nullptr) { MKL_Set_Num_Threads(1); }
    if (bli_thread_set_num_threads != nullptr) { bli_thread_set_num_threads(1); }
}

/// Factors of a product: as stored, or transposed without moving anything.
template <class T> struct factor {
    matrix<const T> stored;
    CBLAS_TRANSPOSE transpose = CblasNoTrans;
    factor(matrix<const T> m) : stored(m) {}
    factor(matrix<T> m) : stored(m) {}
    factor(matrix<const T> m, CBLAS_TRANSPOSE t) : stored(m), transpose(t) {}
};
template <class T> [[nodiscard]] factor<std::remove_const_t<T>> transposed(matrix<T> m) { return {m, CblasTrans}; }

/// c = scale * a * b + keep * c.
///
/// Shapes    (m x k) * (k x n) into (m x n), after transposition; sizes are the caller's promise.
/// Aliasing  c overlaps neither a nor b.
/// Cost      2 m n k flops, in one CBLAS call.
template <class T>
void multiply(std::type_identity_t<factor<T>> a, std::type_identity_t<factor<T>> b, matrix<T> c, T keep = 0,
              T scale = 1) {
    const int inner = a.transpose == CblasNoTrans ? a.stored.columns : a.stored.rows;
    if constexpr (std::is_same_v<T, float>) {
        cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, c.rows, c.columns, inner, scale, a.stored.data,
                    a.stored.stride, b.stored.data, b.stored.stride, keep, c.data, c.stride);
    } else {
        cblas_dgemm(CblasRowMajor, a.transpose, b.transpose, c.rows, c.columns, inner, scale, a.stored.data,
                    a.stored.stride, b.stored.data, b.stored.stride, keep, c.data, c.stride);
    }
}

/// e^x, in a form that loops over float vectorize with: no branch, no table, no call.
///
/// Units  float: within 2 units in the last place for x in [-87, 88], saturated outside; NaN stays NaN.
///        double: std::exp.
template <class T> [[nodiscard]] inline T exponential(T x) {
    if constexpr (std::is_same_v<T, float>) {
        constexpr float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits
        x = x < -87.0f ? -87.0f : x;
        x = x > 88.0f ? 88.0f : x;
        const float shifted = x * 1.44269504f + round_to_integer;
        const float n = shifted - round_to_integer;
        const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // x - n ln 2, |r| <= ln 2 / 2
        float q = 1.39189640e-3f;                                      // minimax on that interval: error 5.4e-9 of e^r
        q = q * r + 8.37061065e-3f;
        q = q * r + 4.16664662e-2f;
        q = q * r + 1.66665005e-1f;
        q = q * r + 5.00000018e-1f;
        const auto exponent =
            std::bit_cast<std::int32_t>(shifted) + (127 - std::bit_cast<std::int32_t>(round_to_integer));
        return (q * (r * r) + r + 1.0f) * std::bit_cast<float>(exponent << 23);
    } else {
        return std::exp(x);
    }
}

}  // namespace transformer
