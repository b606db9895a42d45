// magnitude: numbers in the order of their absolute values, and which of a segment's elements a sparsifier sends.
// Needs core/philox. Grades are the leading bits of a float without its sign: they are ordered as magnitudes are.
// A search refines the grade digit by digit, as a radix sort does from its highest digit, and never moves an element.
#pragma once

#include <algorithm>  // max, min, fill
#include <cstddef>    // size_t
#include <cstdint>    // bits
#include <limits>     // nothing selected
#include <vector>     // counters

#include <tutti/core/config.hpp>     // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>    // floating_element
#include <tutti/core/partition.hpp>  // strata of the sample
#include <tutti/core/philox.hpp>     // random_stream

namespace tutti::compress::detail {

/// Bits of an absolute value, 31 of them; all that is not finite is one magnitude, the largest.
inline constexpr std::uint32_t infinite_magnitude = 0x7f800000u;
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t magnitude(float x) noexcept {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x) & 0x7fffffffu;
    return bits < infinite_magnitude ? bits : infinite_magnitude;
}

/// What is encoded: an element and what is owed to it.
template <floating_element T> [[nodiscard]] TUTTI_HOST_DEVICE constexpr float formed(T in, float owed) noexcept {
    using real = master_t<T>;
    return static_cast<float>(static_cast<real>(in) + static_cast<real>(owed));
}
template <floating_element T> [[nodiscard]] TUTTI_HOST_DEVICE constexpr float formed(T in) noexcept {
    return static_cast<float>(static_cast<master_t<T>>(in));
}
/// What goes on the wire for x: one NaN for all that is not finite, since machines differ in what a sum of NaNs is.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr float sent_value(float x) noexcept {
    return magnitude(x) < infinite_magnitude ? x : __builtin_bit_cast(float, 0x7fc00000u);
}

/// The elements of one segment that are sent: those above a grade, and of that grade the first `quota` by position.
struct selection {
    std::uint32_t grade = std::numeric_limits<std::uint32_t>::max();
    unsigned shift = 0;  ///< the grade of a magnitude is magnitude >> shift
    std::size_t quota = 0;
};

/// Bits [shift, shift + bits) of a magnitude.
struct digit {
    unsigned shift;
    unsigned bits;
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t of(std::uint32_t m) const noexcept {
        return (m >> shift) & ((1u << bits) - 1);
    }
};
/// The first tells magnitudes apart that differ by 3 %; with the others they are told apart exactly.
inline constexpr digit digits[] = {{18, 13}, {9, 9}, {0, 9}};
inline constexpr std::size_t most_bins = std::size_t{1} << 13;

/// The bin that holds the wanted-th element from above, not below `lowest`; `wanted` becomes its place inside the bin.
template <class Count>
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::uint32_t bin_of(const Count* bins, std::uint32_t bin,
                                                               std::uint32_t lowest, std::size_t& wanted) noexcept {
    for (; bin > lowest && bins[bin] < wanted; --bin) { wanted -= bins[bin]; }
    return bin;
}

/// A sample that tells where to look: positions are a function of the stream, one in each part of the segment.
inline constexpr std::size_t sample_size = 4096;
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t sample_position(random_stream s, std::size_t n,
                                                                      std::size_t j) noexcept {
    const part p = partition(n, sample_size, j);
    return p.first + static_cast<std::size_t>(s.below(j, p.count));
}
/// The place in the sample, from above, of a grade that about twice the wanted elements reach; 0: all are looked at. Of
/// m elements in the sample that are expected to be among the wanted, 2 m + 16 are so less than once in 10^9 times.
[[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t sample_rank(std::size_t n, std::size_t wanted) noexcept {
    if (n < 16 * sample_size || wanted > n / 4) { return 0; }
    return static_cast<std::size_t>(static_cast<double>(wanted) / static_cast<double>(n) * (2 * sample_size)) + 16;
}

/// Calls f(i, magnitude) for elements of at least the magnitude `low`, in order. Most blocks have none, and are passed
/// over with one comparison; in the others no branch depends on a single element.
template <class At, class F> void for_each_from(const At& at, std::size_t n, std::uint32_t low, F f) {
    constexpr std::size_t block = 32;
    // Signed, and not cut off at infinite_magnitude: every instruction set has this comparison.
    const auto bound = static_cast<std::int32_t>(low);
    const auto reaches = [&at, bound](std::size_t i) {
        return static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, at(i)) & 0x7fffffffu) >= bound ? 1 : 0;
    };
    std::size_t i = 0;
    for (; i + block <= n; i += block) {
        int any = 0;
        for (std::size_t j = 0; j < block; ++j) { any |= reaches(i + j); }
        if (any == 0) { continue; }
        std::uint32_t places[block];
        std::size_t hits = 0;
        for (std::uint32_t j = 0; j < block; ++j) {
            places[hits] = j;
            hits += static_cast<std::size_t>(reaches(i + j));
        }
        for (std::size_t h = 0; h < hits; ++h) { f(i + places[h], magnitude(at(i + places[h]))); }
    }
    for (; i < n; ++i) {
        if (const std::uint32_t m = magnitude(at(i)); m >= low) { f(i, m); }
    }
}

/// The search on the host. Counters are kept from segment to segment.
class grade_search {
    std::vector<std::size_t> bins_ = std::vector<std::size_t>(most_bins);

    template <class At> void count(const At& at, std::size_t n, std::uint32_t low, std::uint32_t prefix, digit d) {
        std::fill(bins_.begin(), bins_.begin() + (std::ptrdiff_t{1} << d.bits), std::size_t{0});
        const unsigned above = d.shift + d.bits;
        for_each_from(at, n, low, [&](std::size_t, std::uint32_t m) {
            if (m >> above == prefix) { ++bins_[d.of(m)]; }
        });
    }

public:
    /// A grade of the first digit that about twice the wanted elements reach. The estimate is too high, so that fewer
    /// than the wanted reach it, as good as never.
    template <class At>
    [[nodiscard]] std::uint32_t estimate(const At& at, std::size_t n, std::size_t wanted, random_stream s) {
        std::size_t rank = sample_rank(n, wanted);
        if (rank == 0) { return 0; }
        std::fill(bins_.begin(), bins_.end(), std::size_t{0});
        for (std::size_t j = 0; j < sample_size; ++j) {
            ++bins_[digits[0].of(magnitude(at(sample_position(s, n, j))))];
        }
        return bin_of(bins_.data(), most_bins - 1, 0, rank);
    }

    /// The first digit: grades from `lowest` on. True when the wanted-th element is among them.
    template <class At>
    [[nodiscard]] bool first(const At& at, std::size_t n, std::uint32_t lowest, std::size_t wanted, selection& found) {
        count(at, n, lowest << digits[0].shift, 0, digits[0]);
        found = {bin_of(bins_.data(), most_bins - 1, lowest, wanted), digits[0].shift, wanted};
        return bins_[found.grade] >= wanted;
    }
    /// The digits after it: quota becomes the place among elements of exactly one magnitude.
    template <class At> void refine(const At& at, std::size_t n, selection& found) {
        for (const digit d : {digits[1], digits[2]}) {
            count(at, n, found.grade << found.shift, found.grade, d);
            const std::uint32_t bin = bin_of(bins_.data(), (1u << d.bits) - 1, 0, found.quota);
            found = {found.grade << d.bits | bin, d.shift, found.quota};
        }
    }
};

}  // namespace tutti::compress::detail
