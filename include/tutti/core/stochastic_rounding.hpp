// stochastic_rounding: floats to 16 bits, up or down by chance, so that the mean over many roundings is the float.
// Needs core/elementwise and core/philox; on a CUDA queue core/cuda_run.cuh.
// Source: Gupta et al., Deep learning with limited numerical precision, ICML 2015, section 3.
#pragma once

#include <array>        // words
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // bits
#include <string_view>  // names
#include <tuple>        // inputs and outputs

#include <tutti/core/elementwise.hpp>  // expect_pairs
#include <tutti/core/philox.hpp>       // random_stream

namespace tutti {

/// A type that floats can be rounded to stochastically.
template <class T>
concept half_element = std::same_as<T, float16> || std::same_as<T, bfloat16>;

namespace detail {

// `word` is a uniform random number. It is added below the last place that stays, and the sum is truncated: so x goes
// up with the probability of how far it is on the way. Exact in bfloat16, where 16 bits are cut off.
TUTTI_HOST_DEVICE constexpr std::uint16_t bfloat16_bits(float x, std::uint32_t word) noexcept {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : (bits + (word >> 16)) >> 16);
}

TUTTI_HOST_DEVICE constexpr std::uint16_t float16_bits(float x, std::uint32_t word) noexcept {
    const auto all = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t sign = (all >> 16) & 0x8000u;
    const std::uint32_t bits = all & 0x7fffffffu;
    if (bits > 0x7f800000u) { return static_cast<std::uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu)); }
    if (bits >= 0x47800000u) { return static_cast<std::uint16_t>(sign | 0x7c00u); }
    if (bits >= 0x38800000u) { return static_cast<std::uint16_t>(sign | ((bits - 0x38000000u + (word >> 19)) >> 13)); }
    // Subnormal results are numbers of 2^-24, and the smaller x is, the more bits are cut off: 14 below 2^-14. From 57
    // on the probability of going up is below 2^-32, that of a single word.
    const std::uint32_t cut = 126u - (bits >> 23);
    if (cut >= 57) { return static_cast<std::uint16_t>(sign); }
    const std::uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
    const std::uint64_t random = (std::uint64_t{word} << 32) >> (64u - cut);
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>((mantissa + random) >> cut));
}

}  // namespace detail

/// x rounded to one of its two neighbors in T, which `word` chooses.
///
/// Semantics    over uniform random words the mean is x; for float16 within 2^-32 of its last place. What T holds
///              exactly stays. Beyond the largest number of T the upper neighbor is infinity. NaN stay NaN.
template <half_element T>
[[nodiscard]] TUTTI_HOST_DEVICE constexpr T rounded_stochastically(float x, std::uint32_t word) noexcept {
    T result;
    if constexpr (std::same_as<T, float16>) {
        result.bits = detail::float16_bits(x, word);
    } else {
        result.bits = detail::bfloat16_bits(x, word);
    }
    return result;
}

/// out[i] = in[i], rounded by word first + i of the stream.
template <half_element T, memory M> struct stochastic_copy_operation {
    static constexpr std::string_view name = "stochastic_copy";
    view<const float, M> in;
    view<T, M> out;
    random_stream stream;
    std::uint64_t first;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + out.size_bytes()), 20.0 * static_cast<double>(out.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(out); }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::array<std::uint32_t, 4> words(std::size_t i) const noexcept {
        return stream.words(first + i);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(std::uint32_t word, float x) const noexcept {
        return rounded_stochastically<T>(x, word);
    }
    void operator()() const {
        const stochastic_copy_operation k = *this;
        for (std::size_t i = 0; i < k.out.size();) {  // one block of the generator at a time: four words
            const std::uint64_t at = k.first + i;
            const auto words = k.stream.block(at >> 2);
            for (auto lane = static_cast<std::size_t>(at & 3); lane < 4 && i < k.out.size(); ++lane, ++i) {
                k.out.data()[i] = rounded_stochastically<T>(k.in.data()[i], words[lane]);
            }
        }
    }
};

/// Copies floats to 16 bits with stochastic rounding.
///
/// Semantics    element i takes word first + i of the stream: use a stream of its own, and a step for each time.
/// Aliasing     none. Determinism: of values and positions alone, the same bits on host and device.
/// Errors       usage_error when sizes differ or the views overlap.
template <queue Q, half_element T>
void copy_stochastically(Q q, view<const float, typename Q::memory_type> in, view<T, typename Q::memory_type> out,
                         random_stream stream, std::uint64_t first = 0) {
    detail::expect_pairs("copy_stochastically", in, out);
    run(q, stochastic_copy_operation<T, typename Q::memory_type>{in, out, stream, first});
}

}  // namespace tutti
