// matrix: the tensors that are worth compressing, as the matrices that they are read as.
// Needs compress/compressor. One rule for all that choose tensors by themselves.
// Source: Vogels et al., PowerSGD, NeurIPS 2019, section 3 (a tensor as a matrix; vectors go as they are).
#pragma once

#include <concepts>  // invocable
#include <cstddef>   // size_t
#include <optional>  // tensors that are no matrices
#include <span>      // shapes

#include <tutti/compress/compressor.hpp>  // segment
#include <tutti/core/error.hpp>           // usage_error

namespace tutti::compress {

/// A tensor as a matrix: its first extent by all others. Nothing for what has not two rows and two columns, such as
/// vectors: these are few elements, and they go as they are.
/// Errors  usage_error: the product of the extents overflows.
[[nodiscard]] inline std::optional<segment> matrix_of(std::span<const std::size_t> shape) {
    if (shape.size() < 2) { return std::nullopt; }
    segment s;
    s.rows = shape.front();
    std::size_t all = s.rows;
    for (const std::size_t extent : shape.subspan(1)) {
        if (__builtin_mul_overflow(all, extent, &all)) {
            throw usage_error("matrix_of: the elements of a shape are more than can be counted");
        }
        s.cols *= extent;
    }
    if (s.rows < 2 || s.cols < 2) { return std::nullopt; }
    return s;
}

/// Whether a tensor of that shape, or a segment of it, is to be sent compressed: it is a matrix, and the wire, of
/// wire_bytes(s) bytes, has at most 1/worth of those of its floats.
template <std::invocable<const segment&> Bytes>
[[nodiscard]] bool worth_compressing(std::span<const std::size_t> shape, const segment& s, Bytes wire_bytes,
                                     double worth = 1) {
    return matrix_of(shape) &&
           static_cast<double>(wire_bytes(s)) * worth <= static_cast<double>(s.size() * sizeof(float));
}

}  // namespace tutti::compress
