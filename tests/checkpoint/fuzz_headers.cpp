// Reads manifests, and headers of safetensors, that nobody wrote: whatever the bytes are, they are refused, or all that
// they say can be relied on.
// For libFuzzer (clang++ -fsanitize=fuzzer,address,undefined), and linked with a driver that draws the bytes.
#include <tutti/checkpoint/detail/manifest.hpp>            // under test
#include <tutti/checkpoint/detail/safetensors_header.hpp>  // under test

#include <cstddef>  // size_t
#include <cstdint>  // bytes
#include <cstdlib>  // abort
#include <cstring>  // memcpy
#include <memory>   // arrays of exactly the size
#include <string>   // headers
#include <vector>   // tables

using namespace tutti;
using namespace tutti::checkpoint::detail;

namespace {

void demand(bool holds) {
    if (!holds) { std::abort(); }
}

void read_table(std::span<const std::byte> bytes) {
    const std::vector<piece> table = decoded_table(bytes);
    const std::vector<std::byte> again = encoded(table);
    demand(again.size() == bytes.size() && std::memcmp(again.data(), bytes.data(), bytes.size()) == 0);
    for (const piece& p : table) {
        const std::uint64_t all = elements_of(p);
        demand(p.count <= all && p.offset <= all - p.count && p.bytes() <= most_bytes);
    }
}

void read_manifest(std::span<const std::byte> bytes) {
    const manifest m = decoded_manifest(bytes);
    const std::vector<std::byte> again = encoded(m);
    demand(again.size() == bytes.size() && std::memcmp(again.data(), bytes.data(), bytes.size()) == 0);
    std::vector<std::vector<piece>> tables;
    for (const shard& s : m.shards) { tables.push_back(s.table); }
    const layout whole = merged(tables);
    for (const auto& [name, t] : whole.common) {
        std::uint64_t next = 0;
        for (const extent_of& e : t.extents) {
            const shard& s = m.shards.at(e.shard);
            demand(e.offset == next);
            demand(data_begin(s.table) + e.position + e.count * size_of(t.type) <= s.bytes);
            next += e.count;
        }
    }
}

void read_safetensors(std::string_view text, std::uint64_t data_bytes) {
    const safetensors_header h = decoded_safetensors(text, data_bytes);
    std::uint64_t sum = 0;
    for (const auto& [name, t] : h.tensors) {
        demand(t.first <= t.last && t.last <= data_bytes);
        sum += t.last - t.first;
        if (t.element) { demand(t.elements * size_of(*t.element) == t.last - t.first); }
        std::uint64_t all = 1;
        for (const std::uint64_t extent : t.shape) { all *= extent; }
        demand(all == t.elements);
    }
    demand(sum == data_bytes);
    const std::string again = encoded(h);
    const safetensors_header same = decoded_safetensors(std::string_view(again).substr(8), data_bytes);
    demand(same.metadata == h.metadata && same.tensors.size() == h.tensors.size() && encoded(same) == again);
}

// A header of pieces that headers are made of, one a byte: bytes as they are would seldom get past the first brace.
std::string composed(const std::uint8_t* data, std::size_t size) {
    static constexpr std::string_view pieces[] = {"{",
                                                  "}",
                                                  "[",
                                                  "]",
                                                  ",",
                                                  ":",
                                                  "0",
                                                  "1",
                                                  "8",
                                                  "\"a\"",
                                                  "\"b\"",
                                                  "\"\\u0061\"",
                                                  "\"__metadata__\"",
                                                  "\"dtype\"",
                                                  "\"shape\"",
                                                  "\"data_offsets\"",
                                                  "\"F32\"",
                                                  "\"F4\"",
                                                  "\"BOOL\"",
                                                  "4294967296",
                                                  "-1",
                                                  "1.5",
                                                  "null",
                                                  "\"\xff\"",
                                                  "\"dtype\":\"F32\",",
                                                  "\"dtype\":\"U8\",",
                                                  "\"shape\":[],",
                                                  "\"shape\":[2],",
                                                  "\"shape\":[0,8],",
                                                  "\"data_offsets\":[0,4]",
                                                  "\"data_offsets\":[4,8]",
                                                  "\"data_offsets\":[0,0]",
                                                  "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}",
                                                  "\"b\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[4,8]}",
                                                  "\"__metadata__\":{\"a\":\"b\"}"};
    std::string text = "{";
    for (std::size_t i = 0; i < size; ++i) { text += pieces[data[i] % std::size(pieces)]; }
    return text + "}";
}

}  // namespace

// The first byte chooses: a table, a manifest as it is, or one whose start, size and checksum are put right; a header of
// safetensors as it is, or of pieces.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 1) { return 0; }
    const unsigned kind = data[0] % 6;
    if (kind >= 4) {
        const std::string text =
            kind == 4 ? std::string(reinterpret_cast<const char*>(data + 1), size - 1) : composed(data + 1, size - 1);
        for (const std::uint64_t bytes : {0u, 4u, 8u}) {
            try {
                read_safetensors(text, bytes);
            } catch (const checkpoint::damaged_error&) {}
        }
        return 0;
    }
    // Exactly as many bytes as there are, so that a sanitizer sees one too many.
    std::size_t n = size - 1;
    if (kind >= 2) { n += 44; }
    const auto bytes = std::make_unique<std::byte[]>(n);
    std::byte* const body = bytes.get() + (kind >= 2 ? 40 : 0);
    if (size > 1) { std::memcpy(body, data + 1, size - 1); }
    if (kind >= 2) {
        encoder start;
        start.text(manifest_magic).number(format_version).number(std::uint32_t{kind == 2 ? 1u : 2u});
        start.number(std::uint64_t{5}).number(std::uint64_t{6}).number(std::uint64_t{n});
        std::memcpy(bytes.get(), start.bytes().data(), 40);
        // The size of one rank's shard is put right too, where the rest can be read.
        if (kind == 2 && n > 64) {
            const std::uint64_t table = n - 64;
            std::memcpy(body + 12, &table, sizeof table);
            try {
                const auto lines = decoded_table({body + 20, n - 64});
                const std::uint64_t shard_bytes = data_begin(lines) + data_bytes(lines);
                std::memcpy(body, &shard_bytes, sizeof shard_bytes);
            } catch (const error&) {}
        }
        const std::uint32_t sum = checksum({bytes.get(), n - 4});
        std::memcpy(bytes.get() + n - 4, &sum, sizeof sum);
    }
    try {
        if (kind == 0) {
            read_table({bytes.get(), n});
        } else {
            read_manifest({bytes.get(), n});
        }
    } catch (const checkpoint::damaged_error&) {
    } catch (const usage_error&) {}
    return 0;
}
