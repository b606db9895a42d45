// manifest: what makes a folder of shards a checkpoint; and the header of a shard.
// Needs checkpoint/detail/{layout,checksum}. All numbers are little-endian.
//
//   manifest  "TUTTIMAN" u32 version  u32 ranks  u64 generation  u64 step  u64 bytes of the file
//             for each rank: u64 bytes of its shard  u32 its checksum  u64 bytes of its table, the table
//             u32 checksum of all before
//   shard     "TUTTISHD" u32 version  u32 rank  u32 ranks  u32 0  u64 generation  u64 step  u64 bytes of the file
//             u64 bytes of the table, the table, zeros to a multiple of 64; the pieces, each filled up likewise
//   table     u64 pieces; for each: u32 bytes of the name  u8 type  u8 local  u16 dimensions  u64 offset  u64 count
//             u64 extents..., the name
#pragma once

#include <cstddef>      // byte
#include <cstdint>      // numbers of the files
#include <span>         // bytes
#include <string_view>  // what files start with
#include <utility>      // move
#include <vector>       // shards

#include <tutti/checkpoint/detail/checksum.hpp>  // checksum
#include <tutti/checkpoint/detail/codec.hpp>     // encoder, decoder
#include <tutti/checkpoint/detail/layout.hpp>    // piece
#include <tutti/checkpoint/error.hpp>            // damaged_error
#include <tutti/core/text.hpp>                   // formatted

namespace tutti::checkpoint::detail {

inline constexpr std::uint32_t format_version = 1;
inline constexpr std::string_view manifest_magic = "TUTTIMAN";
inline constexpr std::string_view shard_magic = "TUTTISHD";
inline constexpr std::size_t shard_prefix = 56;
inline constexpr std::size_t shard_record = 20;  // in a manifest, without the table

struct shard {
    std::uint64_t bytes = 0;
    std::uint32_t sum = 0;
    std::vector<piece> table;
};

struct manifest {
    std::uint64_t generation = 0;
    std::uint64_t step = 0;
    std::vector<shard> shards;
};

/// Where the data of a shard begins.
[[nodiscard]] inline std::uint64_t data_begin(std::span<const piece> table) {
    return aligned(shard_prefix + encoded(table).size());
}

[[nodiscard]] inline std::vector<std::byte> shard_header(std::uint64_t generation, std::uint64_t step, std::size_t rank,
                                                         std::size_t ranks, std::span<const piece> table) {
    const std::vector<std::byte> lines = encoded(table);
    encoder out;
    out.text(shard_magic).number(format_version);
    out.number(static_cast<std::uint32_t>(rank)).number(static_cast<std::uint32_t>(ranks)).number(std::uint32_t{0});
    out.number(generation).number(step).number(aligned(shard_prefix + lines.size()) + data_bytes(table));
    out.number(std::uint64_t{lines.size()}).block(lines).pad(piece_alignment);
    return out.take();
}

[[nodiscard]] inline std::vector<std::byte> encoded(const manifest& m) {
    encoder shards;
    for (const shard& s : m.shards) {
        const std::vector<std::byte> table = encoded(s.table);
        shards.number(s.bytes).number(s.sum).number(std::uint64_t{table.size()}).block(table);
    }
    constexpr std::uint64_t around = 8 + 4 + 4 + 3 * 8 + 4;
    encoder out;
    out.text(manifest_magic).number(format_version).number(static_cast<std::uint32_t>(m.shards.size()));
    out.number(m.generation).number(m.step).number(around + shards.bytes().size()).block(shards.bytes());
    out.number(checksum(out.bytes()));
    return out.take();
}

/// Errors  damaged_error for bytes that are no manifest, whatever they are.
[[nodiscard]] inline manifest decoded_manifest(std::span<const std::byte> bytes) {
    decoder in(bytes, "the manifest");
    if (in.text(manifest_magic.size()) != manifest_magic) { throw damaged_error("the manifest is none"); }
    const auto version = in.number<std::uint32_t>();
    if (version != format_version) {
        throw damaged_error(formatted("the manifest has version {}, not {}", version, format_version));
    }
    const auto ranks = in.number<std::uint32_t>();
    manifest m;
    m.generation = in.number<std::uint64_t>();
    m.step = in.number<std::uint64_t>();
    const auto size = in.number<std::uint64_t>();
    if (size != bytes.size()) {
        throw damaged_error(formatted("the manifest has {} bytes, and says {}", bytes.size(), size));
    }
    if (in.left() < sizeof(std::uint32_t)) { throw damaged_error("the manifest has no checksum"); }
    const std::size_t end = bytes.size() - sizeof(std::uint32_t);
    decoder last(bytes.subspan(end), "the manifest");
    if (last.number<std::uint32_t>() != checksum(bytes.first(end))) {
        throw damaged_error("the manifest's checksum is wrong");
    }
    if (ranks == 0 || ranks > in.left() / shard_record) {
        throw damaged_error(formatted("the manifest has {} ranks in {} bytes", ranks, in.left()));
    }
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        shard s;
        s.bytes = in.number<std::uint64_t>();
        s.sum = in.number<std::uint32_t>();
        const auto table = in.number<std::uint64_t>();
        s.table = decoded_table(in.block(table));
        std::uint64_t needed = aligned(shard_prefix + table);
        try {
            needed += data_bytes(s.table);
        } catch (const usage_error& e) { throw damaged_error(e.what()); }
        if (s.bytes != needed) {
            throw damaged_error(
                formatted("the manifest gives the shard of rank {} {} bytes, not {}", rank, s.bytes, needed));
        }
        m.shards.push_back(std::move(s));
    }
    if (in.left() != sizeof(std::uint32_t)) { throw damaged_error("the manifest has bytes that belong to no rank"); }
    return m;
}

}  // namespace tutti::checkpoint::detail
