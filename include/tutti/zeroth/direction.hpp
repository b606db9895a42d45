// direction: which random direction z, and its elements as a function of (seed, step, index, tensor, element).
// Needs core/philox. No state: any slice of z can be made anywhere, in any order, as often as wanted.
// Source: Malladi et al., Fine-tuning language models with just forward passes (MeZO), arXiv 2305.17333, section 2 (z by
// seed); that z does not depend on other tensors or on the launch is ours, by a counter in place of a generator's state.
#pragma once

#include <array>        // four elements
#include <cstdint>      // seeds, steps
#include <string_view>  // names

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE
#include <tutti/core/philox.hpp>  // random_stream, normals_from

namespace tutti::zeroth {

/// Of the elements of z, which are independent of each other; mean 0 and variance 1.
enum class distribution : std::uint8_t {
    normal,     ///< MeZO's
    rademacher  ///< +1 or -1, one random bit an element: a tenth of the arithmetic
};

[[nodiscard]] constexpr std::string_view name_of(distribution d) noexcept {
    return d == distribution::normal ? "normal" : "rademacher";
}

namespace detail {
// A bijection that leaves 0 alone: pairs (high half of the step, index) give different keys for a seed.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint64_t spread(std::uint64_t x) noexcept {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}
}  // namespace detail

/// A direction in the space of all weights.
///
/// Semantics  `index` tells the directions of one step apart (n-SPSA). Element e of tensor t is element e of
///            stream(t); with index 0 and a step below 2^32 that is random_stream{seed, t, step}.
struct direction {
    std::uint64_t seed = 0;
    std::uint64_t step = 0;
    std::uint32_t index = 0;
    distribution kind = distribution::normal;

    [[nodiscard]] constexpr random_stream stream(std::uint32_t tensor) const noexcept {
        return {seed ^ detail::spread((step >> 32 << 32) | index), tensor, static_cast<std::uint32_t>(step)};
    }
    friend constexpr bool operator==(const direction&, const direction&) = default;
};

namespace detail {

/// The signs of elements from `at` on, as bits from the lowest, up to the next multiple of 32: a block of the generator
/// has 128.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t sign_bits(const random_stream& s, std::uint64_t at) noexcept {
    const auto words = s.block(at >> 7);
    // Chosen by comparing, not by an index: words stay in registers.
    const auto which = static_cast<std::uint32_t>(at >> 5) & 3u;
    const std::uint32_t low = (which & 1u) != 0 ? words[1] : words[0];
    const std::uint32_t high = (which & 1u) != 0 ? words[3] : words[2];
    return ((which & 2u) != 0 ? high : low) >> (static_cast<std::uint32_t>(at) & 31u);
}
[[nodiscard]] TUTTI_HOST_DEVICE constexpr float sign_of(std::uint32_t bits, std::uint32_t lane) noexcept {
    return __builtin_bit_cast(float, 0x3f800000u | ((bits >> lane) << 31));
}

/// Elements 4 group ... 4 group + 3 of a stream.
template <distribution kind>
[[nodiscard]] TUTTI_HOST_DEVICE inline std::array<float, 4> four_of(const random_stream& s, std::uint64_t group) {
    if constexpr (kind == distribution::normal) {
        return normals_from(s.block(group));
    } else {
        const std::uint32_t bits = sign_bits(s, 4 * group);
        std::array<float, 4> z{};
        for (std::uint32_t lane = 0; lane < 4; ++lane) { z[lane] = sign_of(bits, lane); }
        return z;
    }
}

/// The same with its kind known at run time.
[[nodiscard]] inline std::array<float, 4> four_of(distribution kind, const random_stream& s, std::uint64_t group) {
    return kind == distribution::normal ? four_of<distribution::normal>(s, group)
                                        : four_of<distribution::rademacher>(s, group);
}

}  // namespace detail

/// Element `at` of tensor `tensor` of z: what the operations add up, for checks and for tensors of a few elements.
[[nodiscard]] inline float element_of(const direction& z, std::uint32_t tensor, std::uint64_t at) {
    return detail::four_of(z.kind, z.stream(tensor), at >> 2)[at & 3];
}

}  // namespace tutti::zeroth
