// The one rule by which a range is cut into parts: slices of a collective, shards, batches.
// Needs nothing.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t

namespace tutti {

/// Elements [first, first + count).
struct part {
    std::size_t first = 0;
    std::size_t count = 0;
    friend constexpr bool operator==(const part&, const part&) = default;
};

/// Part `index` of `total` elements cut into `parts` as equal as possible: the first total % parts get one more.
[[nodiscard]] constexpr part partition(std::size_t total, std::size_t parts, std::size_t index) noexcept {
    const std::size_t base = total / parts;
    const std::size_t extra = total % parts;
    return {index * base + std::min(index, extra), base + (index < extra ? 1u : 0u)};
}

/// The same in units of `grain` elements, so that no two parts share a cache line; the last parts may be short or
/// empty.
[[nodiscard]] constexpr part partition(std::size_t total, std::size_t parts, std::size_t index,
                                       std::size_t grain) noexcept {
    const std::size_t grains = total / grain + (total % grain != 0 ? 1 : 0);
    const part p = partition(grains, parts, index);
    const std::size_t first = std::min(p.first * grain, total);
    return {first, std::min(p.count * grain, total - first)};
}

}  // namespace tutti
