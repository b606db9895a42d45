// cut: which part of each parameter a rank of a tensor group has, and where that lies in the whole.
// Needs parameters.hpp. Shoeybi et al. 2019, arXiv:1909.08053, section 3: heads and the wider layers' columns are
// divided, and so is the vocabulary.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <vector>     // declarations

#include <tutti/core/partition.hpp>  // heads of a rank

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

/// Is parameter i one of layer normalization, which a rank's rows alone give a gradient where ranks have shares of them?
[[nodiscard]] inline bool is_of_norm(std::size_t i, const configuration& c) {
    if (i < at(0, in_layer{})) { return false; }
    if (i >= at(c.layers, in_layer{})) { return true; }  // the final one
    switch (static_cast<in_layer>((i - at(0, in_layer{})) % per_layer)) {
    case norm1_gain:
    case norm1_bias:
    case norm2_gain:
    case norm2_bias: return true;
    default: return false;
    }
}

/// Where the rank's part of the extent that is cut lies: heads as equal as possible, and columns; `whole` is parameter
/// i's declaration. Of thirds, in each of them.
[[nodiscard]] inline tutti::part part_of_extent(std::size_t i, const configuration& c, const tensor_part& part,
                                                const declaration& whole) {
    const auto ranks = static_cast<std::size_t>(part.ranks), rank = static_cast<std::size_t>(part.rank);
    const cut how = cut_of(i, c);
    const std::size_t extent = how == cut::rows ? whole.shape.front() : whole.shape.back();
    if (how == cut::whole) { return {0, extent}; }
    if (i == token_table) { return {rank * part.words, part.words}; }
    const auto heads = static_cast<std::size_t>(c.heads);
    const bool of_heads = static_cast<in_layer>((i - at(0, in_layer{})) % per_layer) <= project_weight;
    if (!of_heads) { return tutti::partition(extent, ranks, rank); }
    const std::size_t unit = static_cast<std::size_t>(c.width) / heads;
    const tutti::part own = tutti::partition(heads, ranks, rank);
    return {own.first * unit, own.count * unit};
}

/// All parameters in the shapes that a rank has of them. Every rank has a head.
[[nodiscard]] inline std::vector<declaration> parameters_of(const configuration& c, const tensor_part& part) {
    std::vector<declaration> list = parameters_of(c);
    for (std::size_t i = 0; i < list.size(); ++i) {
        const std::size_t own = part_of_extent(i, c, part, list[i]).count;
        switch (cut_of(i, c)) {
        case cut::whole: break;
        case cut::rows: list[i].shape.front() = own; break;
        case cut::columns: list[i].shape.back() = own; break;
        case cut::thirds: list[i].shape.back() = 3 * own; break;
        }
    }
    return list;
}

/// Calls visit(first in the whole, first in the part, count) for the elements of parameter i that lie one behind the
/// other in both, in ascending order; `whole` is its declaration.
template <class Visit>
void for_each_run(std::size_t i, const configuration& c, const tensor_part& part, const declaration& whole,
                  Visit visit) {
    const cut how = cut_of(i, c);
    const tutti::part own = part_of_extent(i, c, part, whole);
    const std::size_t columns = whole.shape.back(), rows = whole.size() / columns;
    if (how == cut::whole) { return visit(std::size_t{0}, std::size_t{0}, whole.size()); }
    if (how == cut::rows) {
        const std::size_t count = own.first >= rows ? 0 : std::min(own.count, rows - own.first);
        if (count > 0) { visit(own.first * columns, std::size_t{0}, count * columns); }
        return;
    }
    const std::size_t parts = how == cut::thirds ? 3 : 1, width = columns / parts;
    for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t p = 0; p < parts; ++p) {
            visit(r * columns + p * width + own.first, (r * parts + p) * own.count, own.count);
        }
    }
}

}  // namespace transformer
