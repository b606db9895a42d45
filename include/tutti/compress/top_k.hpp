// top_k: the largest elements of each tensor by magnitude, exactly k of them.
// Needs compress/detail/sparsifier; on a CUDA queue compress/top_k.cuh.
// Source: Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Alistarh et al., The
// convergence of sparsified gradient methods, NeurIPS 2018 (with error feedback).
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // largest 32-bit index
#include <string_view>  // name

#include <tutti/compress/compressor.hpp>          // segment
#include <tutti/compress/detail/sparse_wire.hpp>  // sparse_format
#include <tutti/compress/detail/sparsifier.hpp>   // the calls

namespace tutti::compress {

/// A compressor (see the concept). `segment::level`: kept elements in 10,000; 10000 keeps all.
///
/// Semantics    k = max(1, floor(size * level / 10000)) elements of the largest |x| are sent as they are, of equal ones
///              the first; the others are 0. So |x - decoded|^2 <= (1 - k / size) |x|^2, and decoded + residual is x
///              in every bit. x is a float: in + residual, rounded from double where `in` is double.
///   wire       k indices of 4 bytes (8 in a segment of more than 2^32 elements), ascending; k floats; zeros up to a
///              multiple of 16 bytes. 8 bytes a kept element: no gain at levels of 5000 and more.
/// Not finite   counts as the largest of all, so at least one such element is sent, as NaN; none stays in the residual.
/// Determinism  a function of the elements; the key is not part of it. The same bytes and bits on host and device.
/// Cost         host: a sample, and four passes that mostly skip; O(size) whatever the elements. Device: one pass, and
///              five more for small tensors, levels above 2500, and elements most of which are equal.
/// Errors       usage_error for a level that is not in 1 to 10000, a tensor in several segments, sizes that do not fit.
///              decode and decode_add ignore entries of a damaged wire that are outside of their segment; where it
///              has an index twice, either entry may count. On a device also for a wire that is not aligned.
struct top_k : detail::sparsifier<top_k> {
    static constexpr std::string_view name = "top_k";
    static constexpr std::uint32_t purpose = 0x746f706bu;  // "topk"
    static constexpr bool exact = true;                    // the k largest, to the last bit

    /// Entries that there is room for.
    [[nodiscard]] static constexpr std::size_t capacity(std::size_t k) noexcept { return k; }
    [[nodiscard]] static detail::sparse_format format(const segment& s) {
        return {kept(s), s.size() > std::size_t{1} << 32, false};
    }
};

}  // namespace tutti::compress
