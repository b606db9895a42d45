// Philox4x32-10: random numbers as a function of position, and normals that are the same bits on every machine.
// Needs core/config. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Box and Muller 1958.
#pragma once

#include <array>    // counter, key, words
#include <cmath>    // fma, sqrt
#include <cstddef>  // size_t
#include <cstdint>  // 32-bit words

#include <tutti/core/config.hpp>   // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>  // fill targets
#include <tutti/core/run.hpp>      // fills go through the door

namespace tutti {

namespace detail {
// nvcc takes the product for one of two 64-bit numbers and adds their upper halves, which are zero.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint64_t wide_product(std::uint32_t a, std::uint32_t b) noexcept {
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {
        std::uint64_t product = 0;
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
        return product;
    }
#endif
    return std::uint64_t{a} * b;
}
}  // namespace detail

/// Ten rounds of Philox4x32. Cost: about 20 multiplications for 128 random bits.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::array<std::uint32_t, 4> philox(
    std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) noexcept {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = detail::wide_product(0xD2511F53u, counter[0]);
        const std::uint64_t b = detail::wide_product(0xCD9E8D57u, counter[2]);
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    }
    return counter;
}

/// Uniform in (0, 1), never 0 or 1: the middle of one of 2^23 equal cells, exact in float.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr float uniform_from(std::uint32_t word) noexcept {
    return __builtin_bit_cast(float, 0x3f800000u | (word >> 9)) - (1.0f - 0x1p-24f);  // from [1, 2), exactly
}

namespace detail {

// -2 times the natural logarithm of u in (0, 1): exponent split, then the degree-8 polynomial of Cephes' logf. Only
// fma, multiply and add in a fixed order: no product feeds a plain addition, so nothing is left for a compiler to
// contract.
TUTTI_HOST_DEVICE inline float exact_log_times_minus_2(float u) noexcept {
    // Counted from sqrt(1/2), so that the mantissa is in [sqrt(1/2), sqrt(2)).
    constexpr std::uint32_t half_root = 0x3f3504f3u;
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, u) - half_root;
    const std::uint32_t mantissa = bits & 0x7fffffu;
    const auto e = static_cast<float>(static_cast<std::int32_t>(bits - mantissa));  // the exponent, times 2^23
    const float y = __builtin_bit_cast(float, mantissa + half_root) - 1.0f;
    const float yy = y * y;
    constexpr float k = -2.0f;  // powers of two in the constants cost nothing, also no accuracy
    float p = k * 7.0376836292e-2f;
    p = std::fma(p, y, k * -1.1514610310e-1f);
    p = std::fma(p, y, k * 1.1676998740e-1f);
    p = std::fma(p, y, k * -1.2420140846e-1f);
    p = std::fma(p, y, k * 1.4249322787e-1f);
    p = std::fma(p, y, k * -1.6668057665e-1f);
    p = std::fma(p, y, k * 2.0000714765e-1f);
    p = std::fma(p, y, k * -2.4999993993e-1f);
    p = std::fma(p, y, k * 3.3333331174e-1f);
    float r = (p * y) * yy;
    r = std::fma(e, k * -2.12194440e-4f * 0x1p-23f, r);
    r = r + yy;
    r = std::fma(k, y, r);
    return std::fma(e, k * 0.693359375f * 0x1p-23f, r);
}

// The root of a number that is neither tiny nor huge, correctly rounded. On the device this is the sequence that
// __fsqrt_rn takes for such numbers, without its test for the others; all numbers that can come are tested.
TUTTI_HOST_DEVICE inline float exact_root(float x) noexcept {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    const float root = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(r, 0.5f), root);
#else
    return std::sqrt(x);
#endif
}

// Sine and cosine of a random word read as a fraction of a turn: the quarter is cut off in integers, exactly.
TUTTI_HOST_DEVICE inline void exact_sincos(std::uint32_t word, float& sine, float& cosine) noexcept {
    const auto n = static_cast<std::int32_t>(((word >> 9) << 1) | 1u);  // 24-bit turns
    const std::int32_t quarter = (n + (1 << 21)) >> 22;
    const float a = static_cast<float>(n - quarter * (1 << 22)) * (6.283185307179586477f * 0x1p-24f);
    const float aa = a * a;
    float s = -1.9515295891e-4f;
    s = std::fma(s, aa, 8.3321608736e-3f);
    s = std::fma(s, aa, -1.6666654611e-1f);
    s = std::fma(s * aa, a, a);
    float c = 2.443315711809948e-5f;
    c = std::fma(c, aa, -1.388731625493765e-3f);
    c = std::fma(c, aa, 4.166664568298827e-2f);
    c = std::fma(c * aa, aa, std::fma(-0.5f, aa, 1.0f));
    const bool swap = (quarter & 1) != 0;
    const auto q = static_cast<std::uint32_t>(quarter);
    const auto negated_if_2 = [](float magnitude, std::uint32_t of) {
        return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) ^ ((of << 30) & 0x80000000u));
    };
    sine = negated_if_2(swap ? c : s, q);
    cosine = negated_if_2(swap ? s : c, q + 1);
}

}  // namespace detail

/// Four standard normals from four random words (Box-Muller on words 0,1 and 2,3).
///
/// Units        |z| <= 5.77; relative error of the logarithm 8e-8, absolute error of the sine 1.1e-7.
/// Determinism  same bits on every IEEE machine, at every optimization level, host and device: only correctly rounded
///              add, multiply, fma and square root in fixed order. Needs no -ffast-math and no flushing of subnormals.
[[nodiscard]] TUTTI_HOST_DEVICE inline std::array<float, 4> normals_from(std::array<std::uint32_t, 4> words) noexcept {
    std::array<float, 4> z{};
    for (std::size_t pair = 0; pair < 4; pair += 2) {
        const float radius = detail::exact_root(detail::exact_log_times_minus_2(uniform_from(words[pair])));
        float sine = 0;
        float cosine = 0;
        detail::exact_sincos(words[pair + 1], sine, cosine);
        z[pair] = radius * cosine;
        z[pair + 1] = radius * sine;
    }
    return z;
}

/// The random numbers of one purpose: element i depends on (seed, stream, step, i) alone, so any slice can be computed
/// anywhere. Use one `stream` per tensor or purpose.
struct random_stream {
    std::uint64_t seed = 0;
    std::uint32_t stream = 0;
    std::uint32_t step = 0;

    /// Words of elements 4j ... 4j+3.
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::array<std::uint32_t, 4> block(std::uint64_t j) const noexcept {
        return philox({static_cast<std::uint32_t>(j), static_cast<std::uint32_t>(j >> 32), stream, step},
                      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t word(std::uint64_t i) const noexcept {
        return block(i >> 2)[i & 3];
    }
    /// Words of elements i ... i+3: one block where i is a multiple of 4, else two.
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::array<std::uint32_t, 4> words(std::uint64_t i) const noexcept {
        const auto low = block(i >> 2);
        if ((i & 3) == 0) { return low; }
        const auto high = block((i >> 2) + 1);
        if ((i & 3) == 1) { return {low[1], low[2], low[3], high[0]}; }
        if ((i & 3) == 2) { return {low[2], low[3], high[0], high[1]}; }
        return {low[3], high[0], high[1], high[2]};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr float uniform(std::uint64_t i) const noexcept {
        return uniform_from(word(i));
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float normal(std::uint64_t i) const noexcept {
        return normals_from(block(i >> 2))[i & 3];
    }
    /// An integer below `bound` (64-bit multiply-shift; bias below bound / 2^64).
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint64_t below(std::uint64_t i, std::uint64_t bound) const noexcept {
        const auto w = block(i);
        const std::uint64_t r = (std::uint64_t{w[0]} << 32) | w[1];
        // high half of the 128-bit product r * bound, from 32-bit parts
        const std::uint64_t rl = r & 0xffffffffu, rh = r >> 32, bl = bound & 0xffffffffu, bh = bound >> 32;
        const std::uint64_t mid = rh * bl + ((rl * bl) >> 32);
        const std::uint64_t mid2 = rl * bh + (mid & 0xffffffffu);
        return rh * bh + (mid >> 32) + (mid2 >> 32);
    }
};

/// out[i] = T(deviation * normal(first + i)): normals of any slice of a stream.
template <floating_element T, memory M> struct fill_normal_operation {
    static constexpr std::string_view name = "fill_normal";
    view<T, M> out;
    random_stream stream;
    std::uint64_t first;
    float deviation;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(out.size_bytes()), 40.0 * static_cast<double>(out.size())};
    }
    void operator()() const {
        for (std::size_t i = 0; i < out.size();) {
            const std::uint64_t at = first + i;
            const auto z = normals_from(stream.block(at >> 2));
            for (auto lane = static_cast<std::size_t>(at & 3); lane < 4 && i < out.size(); ++lane, ++i) {
                out.data()[i] = static_cast<T>(deviation * z[lane]);
            }
        }
    }
};

/// Fills `out` with normals of the given deviation: element i gets stream position first + i.
template <queue Q, floating_element T>
void fill_normal(Q q, view<T, typename Q::memory_type> out, random_stream stream, float deviation = 1.0f,
                 std::uint64_t first = 0) {
    run(q, fill_normal_operation<T, typename Q::memory_type>{out, stream, first, deviation});
}

}  // namespace tutti
