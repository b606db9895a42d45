// cut: which part of each parameter a rank of a tensor group has, and where that lies in the whole.
// Needs parameters.hpp. Shoeybi et al. 2019, arXiv:1909.08053, section 3: heads and the wider layers' columns are
// divided, and so is the vocabulary.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <vector>     // declarations

#include "parameters.hpp"

namespace transformer {

/// A rank of those that share the layers.
struct tensor_part {
    int ranks = 1;
    int rank = 0;
    std::size_t words = 0;  // rows of the token table that each rank has; those behind the vocabulary are padding
};

enum class cut {
    whole,    // every rank has all of it
    rows,     // consecutive rows
    columns,  // consecutive columns
    thirds    // consecutive columns of each third: queries, keys and values of the same heads
};

/// Of parameter number i.
[[nodiscard]] inline cut cut_of(std::size_t i, const configuration& c) {
    if (i == token_table) { return cut::rows; }
    if (i == position_table || i >= at(c.layers, in_layer{})) { return cut::whole; }
    switch (static_cast<in_layer>((i - at(0, in_layer{})) % per_layer)) {
    case attention_weight:
    case attention_bias: return cut::thirds;
    case expand_weight:
    case expand_bias: return cut::columns;
    case project_weight:
    case contract_weight: return cut::rows;
    default: return cut::whole;
    }
}

/// All parameters in the shapes that a rank has of them. Heads divide over the ranks.
[[nodiscard]] inline std::vector<declaration> parameters_of(const configuration& c, const tensor_part& part) {
    std::vector<declaration> list = parameters_of(c);
    const auto t = static_cast<std::size_t>(part.ranks);
    for (std::size_t i = 0; i < list.size(); ++i) {
        const cut how = cut_of(i, c);
        if (how == cut::rows) { list[i].shape.front() /= t; }
        if (how == cut::columns || how == cut::thirds) { list[i].shape.back() /= t; }
    }
    list[token_table].shape.front() = part.words;
    return list;
}

/// Calls visit(first in the whole, first in the part, count) for the elements of parameter i that lie one behind the
/// other in both, in ascending order; `whole` and `own` are its declarations.
template <class Visit>
void for_each_run(std::size_t i, const configuration& c, const tensor_part& part, const declaration& whole,
                  const declaration& own, Visit visit) {
    const cut how = cut_of(i, c);
    const auto rank = static_cast<std::size_t>(part.rank);
    const std::size_t columns = whole.shape.back(), own_columns = own.shape.back();
    const std::size_t rows = whole.size() / columns;
    if (how == cut::whole || how == cut::rows) {
        const std::size_t first = how == cut::rows ? rank * own.shape.front() : 0;
        const std::size_t count = first >= rows ? 0 : std::min(own.size() / own_columns, rows - first);
        if (count > 0) { visit(first * columns, std::size_t{0}, count * columns); }
        return;
    }
    const std::size_t parts = how == cut::thirds ? 3 : 1;
    const std::size_t width = columns / parts, own_width = own_columns / parts;
    for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t p = 0; p < parts; ++p) {
            visit(r * columns + p * width + rank * own_width, r * own_columns + p * own_width, own_width);
        }
    }
}

}  // namespace transformer
