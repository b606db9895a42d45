// add_products: the host's products with few columns, row by row, so that compilers vectorize them without any BLAS.
// Needs core/element.
// Source: none; four sources and two targets keep a load for every two multiplications.
#pragma once

#include <cstddef>  // size_t

#include <tutti/core/config.hpp>   // TUTTI_INDEPENDENT
#include <tutti/core/element.hpp>  // master_t

namespace tutti::compress::detail {

template <floating_element T> TUTTI_HOST_DEVICE constexpr float as_float(T x) noexcept {
    return static_cast<float>(static_cast<master_t<T>>(x));
}

/// target c += sum over s of factor(c, s) * source s, each a row of `count` elements: four sources with two targets at a
/// time, whatever is left alone.
template <class Element>
void add_products(float* targets, std::size_t target_stride, std::size_t target_count, const Element* sources,
                  std::size_t source_stride, std::size_t source_count, const float* factors, std::size_t by_target,
                  std::size_t by_source, std::size_t count) {
    std::size_t s = 0;
    for (; s + 4 <= source_count; s += 4) {
        const Element* const x0 = sources + s * source_stride;
        const Element* const x1 = x0 + source_stride;
        const Element* const x2 = x1 + source_stride;
        const Element* const x3 = x2 + source_stride;
        std::size_t c = 0;
        for (; c + 2 <= target_count; c += 2) {
            const float* const f = factors + c * by_target + s * by_source;
            const float u0 = f[0], u1 = f[by_source], u2 = f[2 * by_source], u3 = f[3 * by_source];
            const float* const g = f + by_target;
            const float v0 = g[0], v1 = g[by_source], v2 = g[2 * by_source], v3 = g[3 * by_source];
            float* const t = targets + c * target_stride;
            float* const w = t + target_stride;
            TUTTI_INDEPENDENT
            for (std::size_t l = 0; l < count; ++l) {
                const float y0 = as_float(x0[l]), y1 = as_float(x1[l]), y2 = as_float(x2[l]), y3 = as_float(x3[l]);
                t[l] += (u0 * y0 + u1 * y1) + (u2 * y2 + u3 * y3);
                w[l] += (v0 * y0 + v1 * y1) + (v2 * y2 + v3 * y3);
            }
        }
        if (c < target_count) {
            const float* const f = factors + c * by_target + s * by_source;
            const float u0 = f[0], u1 = f[by_source], u2 = f[2 * by_source], u3 = f[3 * by_source];
            float* const t = targets + c * target_stride;
            TUTTI_INDEPENDENT
            for (std::size_t l = 0; l < count; ++l) {
                t[l] += (u0 * as_float(x0[l]) + u1 * as_float(x1[l])) + (u2 * as_float(x2[l]) + u3 * as_float(x3[l]));
            }
        }
    }
    for (; s < source_count; ++s) {
        const Element* const x = sources + s * source_stride;
        for (std::size_t c = 0; c < target_count; ++c) {
            const float u = factors[c * by_target + s * by_source];
            float* const t = targets + c * target_stride;
            TUTTI_INDEPENDENT
            for (std::size_t l = 0; l < count; ++l) { t[l] += u * as_float(x[l]); }
        }
    }
}

}  // namespace tutti::compress::detail
