// folds: what a scheme needs to know of a bucket before it can code it: extremes and sums, in one order everywhere.
// Needs core/exact. Element i of a bucket goes to partial i mod 256; eight partials i ... i + 7 are added as a tree of
// distances 4, 2, 1, and the 32 sums as one of distances 16, 8, 4, 2, 1: a device thread has eight partials of its own.
#pragma once

#include <cmath>    // fabs
#include <cstddef>  // size_t
#include <limits>   // infinity
#include <tuple>    // results

#include <tutti/core/config.hpp>  // TUTTI_EXACT
#include <tutti/core/exact.hpp>   // sums rounded separately

namespace tutti::compress::detail {

/// Magnitudes from here on count as infinite: below, no difference, scale or rounding overflows.
inline constexpr float infinite_from = 0x1p126f;

// A fold is: type; identity; lift, of an element; combine, of two results. NaN of any element reaches the result.

struct lowest {
    using type = float;
    static constexpr bool ordered = false;
    static constexpr float identity = std::numeric_limits<float>::infinity();
    [[nodiscard]] TUTTI_HOST_DEVICE static float lift(float x) noexcept { return x; }
    [[nodiscard]] TUTTI_HOST_DEVICE static float combine(float a, float b) noexcept {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        float least = 0;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
        return least;
#else
        return a < b || a != a ? a : b;
#endif
    }
};
struct highest {
    using type = float;
    static constexpr bool ordered = false;
    static constexpr float identity = -std::numeric_limits<float>::infinity();
    [[nodiscard]] TUTTI_HOST_DEVICE static float lift(float x) noexcept { return x; }
    [[nodiscard]] TUTTI_HOST_DEVICE static float combine(float a, float b) noexcept {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        float most = 0;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
        return most;
#else
        return a > b || a != a ? a : b;
#endif
    }
};
struct largest_magnitude : highest {
    static constexpr float identity = 0;
    [[nodiscard]] TUTTI_HOST_DEVICE static float lift(float x) noexcept { return std::fabs(x); }
};
struct sum_of_magnitudes {
    using type = float;
    static constexpr bool ordered = true;
    static constexpr float identity = 0;
    [[nodiscard]] TUTTI_HOST_DEVICE static float lift(float x) noexcept { return std::fabs(x); }
    [[nodiscard]] TUTTI_HOST_DEVICE static float combine(float a, float b) noexcept {
        return (exact(a) + exact(b)).value;
    }
};
struct sum_of_squares {
    using type = double;  // squares of floats are exact in it, and neither overflow nor vanish
    static constexpr bool ordered = true;
    static constexpr double identity = 0;
    [[nodiscard]] TUTTI_HOST_DEVICE static double lift(float x) noexcept {
        const exact d(static_cast<double>(x));
        return (d * d).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static double combine(double a, double b) noexcept {
        return (exact(a) + exact(b)).value;
    }
};

/// The fold of x[0], ..., x[n - 1], each taken as a float.
template <class Fold, class R> [[nodiscard]] TUTTI_EXACT typename Fold::type folded(const R* x, std::size_t n) {
    TUTTI_EXACT_BODY
    constexpr std::size_t lanes = Fold::ordered ? 256 : 32;  // as many as vectorize well where the order is free
    typename Fold::type partial[lanes];
    for (auto& p : partial) { p = Fold::identity; }
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (std::size_t l = 0; l < lanes; ++l) {
            partial[l] = Fold::combine(partial[l], Fold::lift(static_cast<float>(x[i + l])));
        }
    }
    for (std::size_t l = 0; i < n; ++i, ++l) {
        partial[l] = Fold::combine(partial[l], Fold::lift(static_cast<float>(x[i])));
    }
    const auto halve = [&](auto* from, std::size_t distance) {  // combines without sums: nothing to contract
        for (std::size_t d = distance; d > 0; d /= 2) {
            for (std::size_t l = 0; l < d; ++l) { from[l] = Fold::combine(from[l], from[l + d]); }
        }
    };
    if constexpr (!Fold::ordered) {
        halve(partial, lanes / 2);
        return partial[0];
    }
    constexpr std::size_t groups = lanes / 8;
    typename Fold::type group[groups];
    for (std::size_t s = 0; s < groups; ++s) {
        halve(partial + 8 * s, 4);
        group[s] = partial[8 * s];
    }
    halve(group, groups / 2);
    return group[0];
}

/// The folds that a scheme asks for.
template <class... Fold> struct folds {
    using results = std::tuple<typename Fold::type...>;
    template <class R> [[nodiscard]] static results of(const R* x, std::size_t n) {
        return results(folded<Fold>(x, n)...);
    }
};

}  // namespace tutti::compress::detail
