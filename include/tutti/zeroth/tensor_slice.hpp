// tensor_slice: parts of tensors in a view: which elements of which tensor stand where.
// Needs core/error. Blocks, parts of blocks that ranks hold, and whole models are lists of slices.
#pragma once

#include <algorithm>    // sort
#include <cstddef>      // size_t
#include <cstdint>      // tensors
#include <span>         // slices
#include <string_view>  // names
#include <vector>       // sorted slices

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::zeroth {

/// Elements [first, first + count) of a tensor, which stand in a view from `offset` on.
struct tensor_slice {
    std::uint32_t tensor = 0;  ///< the same for a tensor wherever it is; tied weights are one tensor, listed once
    std::size_t first = 0;
    std::size_t offset = 0;
    std::size_t count = 0;
    bool decayed = true;  ///< weight decay applies
    bool frozen = false;  ///< neither perturbed nor updated
};

namespace detail {

inline void expect_slices(std::string_view operation, std::span<const tensor_slice> slices, std::size_t elements) {
    for (const tensor_slice& s : slices) {
        if (s.offset > elements || s.count > elements - s.offset) {
            throw usage_error(formatted("{}: a slice of tensor {} ends at {} of a view of {} elements", operation,
                                        s.tensor, s.offset + s.count, elements));
        }
    }
}

[[nodiscard]] inline double elements_of(std::span<const tensor_slice> slices) noexcept {
    double n = 0;
    for (const tensor_slice& s : slices) { n += static_cast<double>(s.count); }
    return n;
}

}  // namespace detail

/// Refuses a layout that names an element twice: it would be perturbed and updated twice. Tied weights are listed once,
/// where they are first.
///
/// Cost    O(slices log slices): for when a layout is made, not for every step.
/// Errors  usage_error naming the tensors, also for slices beyond `elements`.
inline void expect_each_once(std::span<const tensor_slice> slices, std::size_t elements) {
    detail::expect_slices("zeroth", slices, elements);
    std::vector<const tensor_slice*> sorted;
    for (const tensor_slice& s : slices) {
        if (s.count != 0) { sorted.push_back(&s); }
    }
    std::sort(sorted.begin(), sorted.end(),
              [](const tensor_slice* a, const tensor_slice* b) { return a->offset < b->offset; });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
        const tensor_slice &a = *sorted[i - 1], &b = *sorted[i];
        if (a.offset + a.count > b.offset) {
            throw usage_error(
                formatted("zeroth: tensors {} and {} share element {} of the weights; tied weights are listed once",
                          a.tensor, b.tensor, b.offset));
        }
    }
    std::sort(sorted.begin(), sorted.end(), [](const tensor_slice* a, const tensor_slice* b) {
        return a->tensor != b->tensor ? a->tensor < b->tensor : a->first < b->first;
    });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
        const tensor_slice &a = *sorted[i - 1], &b = *sorted[i];
        if (a.tensor == b.tensor && a.first + a.count > b.first) {
            throw usage_error(formatted(
                "zeroth: element {} of tensor {} is in two slices; tied weights are listed once", b.first, b.tensor));
        }
    }
}

}  // namespace tutti::zeroth
