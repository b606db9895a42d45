// threshold: the elements above a magnitude that a sample estimates and one count of the others corrects.
// Needs compress/detail/sparsifier; on a CUDA queue compress/threshold.cuh.
// Source: Lin et al., Deep gradient compression, ICLR 2018, section 5 (hierarchical threshold selection).
#pragma once

#include <algorithm>    // min
#include <cstddef>      // size_t
#include <cstdint>      // purpose
#include <string_view>  // name

#include <tutti/compress/compressor.hpp>          // segment
#include <tutti/compress/detail/sparse_wire.hpp>  // sparse_format
#include <tutti/compress/detail/sparsifier.hpp>   // the calls

namespace tutti::compress {

/// A compressor (see the concept). `segment::level`: elements in 10,000 that it aims at.
///
/// Semantics    with k as for top_k: sends between k and 1.3 k elements, all that are not zero if those are fewer; none
///              of a tensor of zeros. A sample of 4096 elements tells a magnitude that about 2 k reach; they are
///              counted by the upper 13 bits of their magnitudes, and the highest such grade that k elements reach is
///              the threshold. Those above that grade are all sent; of those in it, which is 3 % wide, the first as far
///              as there is room. What is not sent stays in the residual: decoded + residual is x in every bit.
///              Magnitudes below 2^-131 count as zero. A sample tells a magnitude that fewer than k reach as good as
///              never (once in 10^9 times); then fewer are sent.
///   wire       16 bytes, of which the first 8 are the number of entries; then room for 1.3 k indices (4 bytes, 8 in a
///              segment of more than 2^32 elements), ascending; as many floats; zeros where there is no entry.
/// Not finite   counts as the largest of all, so at least one such element is sent, as NaN; none stays in the residual.
/// Determinism  a function of the elements, seed, step, rank and tensor. The same bytes and bits on host and device.
/// Cost         host: two passes that mostly skip. Device: one pass, and three more for small tensors, levels above
///              2500, and elements most of which are equal.
/// Errors       as for top_k. A number of entries beyond what there is room for counts as that.
struct threshold : detail::sparsifier<threshold> {
    static constexpr std::string_view name = "threshold";
    static constexpr std::uint32_t purpose = 0x74687265u;  // "thre"
    static constexpr bool exact = false;                   // the k largest, as far as the first digit tells

    /// Entries that there is room for.
    [[nodiscard]] static constexpr std::size_t capacity(std::size_t k) noexcept {
        return k + k / 10 * 3 + k % 10 * 3 / 10;
    }
    [[nodiscard]] static detail::sparse_format format(const segment& s) {
        return {std::min(capacity(kept(s)), s.size()), s.size() > std::size_t{1} << 32, true};
    }
};

}  // namespace tutti::compress
