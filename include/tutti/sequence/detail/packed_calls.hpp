// packed_calls: sequences that lie one behind the other, divided into calls of sequences of like length.
// Needs the standard library alone.
#pragma once

#include <algorithm>   // max
#include <bit>         // bit_width
#include <cstddef>     // size_t
#include <cstdint>     // offsets, counts
#include <functional>  // greater
#include <map>         // calls by length
#include <span>        // lengths
#include <utility>     // move
#include <vector>      // calls

namespace tutti::sequence::detail {

/// n, or up to a quarter more: all numbers up to 8, then four an octave, so that calls of all sizes have few shapes.
[[nodiscard]] constexpr std::size_t in_steps(std::size_t n) noexcept {
    const std::size_t step = n <= 8 ? 1 : std::size_t{1} << (std::bit_width(n - 1) - 3);
    return (n + step - 1) / step * step;
}
/// Rows that a fused call for n rows has: tiles of 128, their number in steps.
[[nodiscard]] constexpr std::size_t fused_rows(std::size_t n) noexcept { return 128 * in_steps((n + 127) / 128); }

/// Some of the sequences: they have none or more than half as many tiles of 256 rows as the longest of them.
struct packed_call {
    std::size_t rows = 0;              ///< of the longest, as a fused call has them
    std::vector<std::size_t> firsts;   ///< rows, ascending
    std::vector<std::size_t> lengths;  ///< of the same sequences
    /// Sequences with those that are added, of no rows, so that calls have few shapes.
    [[nodiscard]] std::size_t sequences() const noexcept { return in_steps(firsts.size()); }
    /// Appends where each sequence begins, those added at the end of the last, and their end, in numbers of a tensor.
    void append_offsets(std::size_t token_stride, std::vector<std::int64_t>& to) const {
        for (std::size_t i = 0; i <= sequences(); ++i) {
            const std::size_t row = i < firsts.size() ? firsts[i] : firsts.back() + lengths.back();
            to.push_back(static_cast<std::int64_t>(row * token_stride));
        }
    }
    void append_lengths(std::vector<std::int32_t>& to) const {
        for (std::size_t i = 0; i < sequences(); ++i) {
            to.push_back(i < lengths.size() ? static_cast<std::int32_t>(lengths[i]) : 0);
        }
    }
};

/// Calls of all sequences that have rows, those of the longest first.
[[nodiscard]] inline std::vector<packed_call> packed_calls(std::span<const std::size_t> lengths) {
    std::map<std::size_t, packed_call, std::greater<>> by_length;
    std::size_t row = 0;
    for (const std::size_t n : lengths) {
        if (n != 0) {
            packed_call& c = by_length[static_cast<std::size_t>(std::bit_width((n - 1) / 256))];
            c.rows = std::max(c.rows, fused_rows(n));
            c.firsts.push_back(row);
            c.lengths.push_back(n);
        }
        row += n;
    }
    std::vector<packed_call> calls;
    for (auto& [length, call] : by_length) { calls.push_back(std::move(call)); }
    return calls;
}

}  // namespace tutti::sequence::detail
