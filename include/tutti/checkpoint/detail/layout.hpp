// layout: which rank's shard holds which elements of which tensor; the same checks for what is saved and what is read.
// Needs checkpoint/detail/codec. `piece` is a line of a shard's table, `layout` all ranks' tables put together.
#pragma once

#include <algorithm>  // sort
#include <cstddef>    // size_t
#include <cstdint>    // numbers of the files
#include <map>        // tensors by name
#include <span>       // tables
#include <string>     // names
#include <utility>    // move
#include <vector>     // shapes, tables

#include <tutti/checkpoint/detail/codec.hpp>  // encoder, decoder
#include <tutti/checkpoint/error.hpp>         // damaged_error
#include <tutti/core/element.hpp>             // dtype
#include <tutti/core/error.hpp>               // usage_error
#include <tutti/core/text.hpp>                // formatted

namespace tutti::checkpoint::detail {

/// Pieces start at multiples of this in a shard.
inline constexpr std::uint64_t piece_alignment = 64;
inline constexpr std::size_t longest_name = 4096;
inline constexpr std::size_t most_dimensions = 64;
/// Far above every real size, and far enough below 2^64 that sums of a few need no care.
inline constexpr std::uint64_t most_bytes = std::uint64_t{1} << 60;

[[nodiscard]] constexpr std::uint64_t aligned(std::uint64_t bytes) noexcept {
    return (bytes + piece_alignment - 1) / piece_alignment * piece_alignment;
}

/// A rank's part of an entry: elements [offset, offset + count) of a tensor of this shape.
struct piece {
    std::string name;
    dtype type = dtype::byte;
    bool local = false;  ///< the rank's own: others have something else of this name
    std::vector<std::uint64_t> shape;
    std::uint64_t offset = 0;
    std::uint64_t count = 0;
    [[nodiscard]] std::uint64_t bytes() const noexcept { return count * size_of(type); }
    friend bool operator==(const piece&, const piece&) = default;
};

[[nodiscard]] inline std::string shape_text(const std::vector<std::uint64_t>& shape) {
    std::string text;
    for (const std::uint64_t extent : shape) { text += formatted("{}{}", text.empty() ? "" : ", ", extent); }
    return shown("[" + text + "]");
}

/// Number of elements. Errors  usage_error when that many elements of the type are more than there can be.
[[nodiscard]] inline std::uint64_t elements_of(const piece& p) {
    bool empty = false;
    for (const std::uint64_t extent : p.shape) { empty = empty || extent == 0; }
    std::uint64_t bytes = size_of(p.type);
    bool overflows = false;
    for (const std::uint64_t extent : p.shape) {
        overflows = overflows || __builtin_mul_overflow(bytes, extent, &bytes) || bytes > most_bytes;
    }
    if (empty) { return 0; }
    if (overflows) {
        throw usage_error(formatted("'{}' of shape {} is too large", shown(p.name), shape_text(p.shape)));
    }
    return bytes / size_of(p.type);
}

/// Errors  usage_error saying what is wrong with the piece as such.
inline void demand_sound(const piece& p) {
    if (p.name.empty()) { throw usage_error("an entry has no name"); }
    if (p.name.size() > longest_name) {
        throw usage_error(
            formatted("'{}' has a name of {} bytes; {} are the most", shown(p.name), p.name.size(), longest_name));
    }
    if (p.shape.size() > most_dimensions) {
        throw usage_error(
            formatted("'{}' has {} dimensions; {} are the most", shown(p.name), p.shape.size(), most_dimensions));
    }
    const std::uint64_t all = elements_of(p);
    if (p.offset > all || p.count > all - p.offset) {
        throw usage_error(formatted("'{}': {} elements from {} leave shape {}", shown(p.name), p.count, p.offset,
                                    shape_text(p.shape)));
    }
    if (p.local && p.count != all) {
        throw usage_error(formatted("'{}' is a rank's own, but has {} of {} elements", shown(p.name), p.count, all));
    }
}

[[nodiscard]] inline std::vector<std::byte> encoded(std::span<const piece> table) {
    encoder out;
    out.number(std::uint64_t{table.size()});
    for (const piece& p : table) {
        out.number(static_cast<std::uint32_t>(p.name.size())).number(static_cast<std::uint8_t>(p.type));
        out.number(static_cast<std::uint8_t>(p.local)).number(static_cast<std::uint16_t>(p.shape.size()));
        out.number(p.offset).number(p.count);
        for (const std::uint64_t extent : p.shape) { out.number(extent); }
        out.text(p.name);
    }
    return out.take();
}

/// Errors  damaged_error for bytes that `encoded` does not give.
[[nodiscard]] inline std::vector<piece> decoded_table(std::span<const std::byte> bytes) {
    decoder in(bytes, "a table");
    std::vector<piece> table;  // grows with the bytes that are there, not with the number that they claim
    for (auto pieces = in.number<std::uint64_t>(); pieces > 0; --pieces) {
        piece p;
        const auto name_bytes = in.number<std::uint32_t>();
        const auto type = in.number<std::uint8_t>();
        const auto local = in.number<std::uint8_t>();
        const auto dimensions = in.number<std::uint16_t>();
        if (type > static_cast<std::uint8_t>(dtype::uint64) || local > 1 || dimensions > most_dimensions) {
            throw damaged_error(
                formatted("a table has type {}, locality {} and {} dimensions", type, local, dimensions));
        }
        p.type = static_cast<dtype>(type);
        p.local = local == 1;
        p.offset = in.number<std::uint64_t>();
        p.count = in.number<std::uint64_t>();
        for (unsigned d = 0; d < dimensions; ++d) { p.shape.push_back(in.number<std::uint64_t>()); }
        p.name = in.text(name_bytes);
        try {
            demand_sound(p);
        } catch (const usage_error& e) { throw damaged_error(e.what()); }
        table.push_back(std::move(p));
    }
    if (in.left() != 0) { throw damaged_error(formatted("a table has {} bytes too many", in.left())); }
    return table;
}

/// Bytes of a shard behind its header. Errors  usage_error when they are more than there can be.
[[nodiscard]] inline std::uint64_t data_bytes(std::span<const piece> table) {
    std::uint64_t sum = 0;
    for (const piece& p : table) {
        sum += aligned(p.bytes());
        if (sum > most_bytes) { throw usage_error("a rank's entries are too large"); }
    }
    return sum;
}

/// Elements [offset, offset + count) of a tensor, from byte `position` of the data of a rank's shard on.
struct extent_of {
    std::uint64_t offset = 0;
    std::uint64_t count = 0;
    std::size_t shard = 0;
    std::uint64_t position = 0;
};

struct tensor {
    dtype type = dtype::byte;
    std::vector<std::uint64_t> shape;
    std::vector<extent_of> extents;  ///< in order, one behind the other, none empty
};

struct layout {
    std::map<std::string, tensor, std::less<>> common;              ///< tensors of all ranks together
    std::vector<std::map<std::string, tensor, std::less<>>> local;  ///< by rank: its own
};

namespace merging {

inline void take(layout& whole, const piece& p, std::size_t rank, std::uint64_t position) {
    if (p.local) {
        tensor t{p.type, p.shape, {}};
        if (p.count > 0) { t.extents.push_back({0, p.count, rank, position}); }
        if (!whole.local[rank].emplace(p.name, std::move(t)).second) {
            throw usage_error(formatted("'{}' is there twice on rank {}", shown(p.name), rank));
        }
        return;
    }
    const auto at = whole.common.try_emplace(p.name, tensor{p.type, p.shape, {}}).first;
    tensor& t = at->second;
    if (t.type != p.type || t.shape != p.shape) {
        throw usage_error(formatted("'{}' is {} {} on rank {}, but {} {} before", shown(p.name), name_of(p.type),
                                    shape_text(p.shape), rank, name_of(t.type), shape_text(t.shape)));
    }
    if (p.count > 0) { t.extents.push_back({p.offset, p.count, rank, position}); }
}

/// Every element must belong to one rank.
inline void demand_covered(const std::string& name, tensor& t) {
    std::sort(t.extents.begin(), t.extents.end(),
              [](const extent_of& a, const extent_of& b) { return a.offset < b.offset; });
    std::uint64_t next = 0;
    std::size_t before = 0;
    const auto lost = [&](std::uint64_t end) {
        throw usage_error(formatted("elements {} to {} of '{}' are no rank's", next, end, shown(name)));
    };
    for (const extent_of& e : t.extents) {
        if (e.offset < next) {
            throw usage_error(
                formatted("element {} of '{}' is rank {}'s and rank {}'s", e.offset, shown(name), before, e.shard));
        }
        if (e.offset > next) { lost(e.offset); }
        next = e.offset + e.count;
        before = e.shard;
    }
    const std::uint64_t all = elements_of({name, t.type, false, t.shape, 0, 0});
    if (next != all) { lost(all); }
}

}  // namespace merging

/// Puts the ranks' tables together.
/// Errors  usage_error: a name is there twice on a rank, or local on one rank and not on another; ranks differ in type
///         or shape; an element belongs to two ranks, or to none.
[[nodiscard]] inline layout merged(std::span<const std::vector<piece>> tables) {
    layout whole;
    whole.local.resize(tables.size());
    for (std::size_t rank = 0; rank < tables.size(); ++rank) {
        static_cast<void>(data_bytes(tables[rank]));
        std::vector<std::string_view> names;
        std::uint64_t position = 0;
        for (const piece& p : tables[rank]) {
            names.push_back(p.name);
            merging::take(whole, p, rank, position);
            position += aligned(p.bytes());
        }
        std::sort(names.begin(), names.end());
        const auto twice = std::adjacent_find(names.begin(), names.end());
        if (twice != names.end()) {
            throw usage_error(formatted("'{}' is there twice on rank {}", shown(*twice), rank));
        }
    }
    for (std::size_t rank = 0; rank < tables.size(); ++rank) {
        for (const auto& own : whole.local[rank]) {
            if (whole.common.contains(own.first)) {
                throw usage_error(
                    formatted("'{}' is rank {}'s own, and a tensor of all ranks elsewhere", shown(own.first), rank));
            }
        }
    }
    for (auto& [name, t] : whole.common) { merging::demand_covered(name, t); }
    return whole;
}

}  // namespace tutti::checkpoint::detail
