// square_roots: the roots of an array, vectorized whatever the compiler's flags.
// Needs nothing. Compilers keep std::sqrt in a loop scalar unless -fno-math-errno is given, which a header cannot ask
// for. Exact: IEEE 754 rounds roots correctly, so scalar and vector code give the same bits.
#pragma once

#include <cmath>    // sqrt
#include <cstddef>  // size_t

#if defined(__SSE2__)
#include <emmintrin.h>  // _mm_sqrt_ps, _mm_sqrt_pd; wider registers have no higher throughput
#endif

namespace tutti::optimize::detail {

/// out[i] = sqrt(in[i]). Aliasing: none.
inline void square_roots(const float* in, float* out, std::size_t n) noexcept {
    std::size_t i = 0;
#if defined(__SSE2__)
    for (; i + 4 <= n; i += 4) { _mm_storeu_ps(out + i, _mm_sqrt_ps(_mm_loadu_ps(in + i))); }
#endif
    for (; i < n; ++i) { out[i] = std::sqrt(in[i]); }
}
inline void square_roots(const double* in, double* out, std::size_t n) noexcept {
    std::size_t i = 0;
#if defined(__SSE2__)
    for (; i + 2 <= n; i += 2) { _mm_storeu_pd(out + i, _mm_sqrt_pd(_mm_loadu_pd(in + i))); }
#endif
    for (; i < n; ++i) { out[i] = std::sqrt(in[i]); }
}

}  // namespace tutti::optimize::detail
