// manifest, layout: what is encoded is decoded; anything else is refused, whatever it claims.
#include <doctest/doctest.h>  // test cases

#include <cstdint>  // claims
#include <string>   // texts
#include <vector>   // bytes

#include <support/oracle.hpp>                    // mixed
#include <tutti/checkpoint/detail/manifest.hpp>  // under test

using namespace tutti;
using namespace tutti::checkpoint::detail;
using tutti::checkpoint::damaged_error;

namespace {

template <class E, class F> std::string text_of(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); }
    return "no error";
}

std::vector<piece> table_of(std::size_t rank) {
    return {{"w", dtype::float32, false, {4, 5}, rank * 10, 10},
            {"own", dtype::uint64, true, {rank + 1}, 0, rank + 1},
            {"s", dtype::bfloat16, false, {}, 0, rank == 0 ? 1u : 0u}};
}

manifest example() {
    manifest m{7, 1234, {}};
    for (std::size_t r = 0; r < 2; ++r) {
        const auto table = table_of(r);
        m.shards.push_back(
            {data_begin(table) + data_bytes(table), 0x01020304u * static_cast<std::uint32_t>(r + 1), table});
    }
    return m;
}

// With the size and the checksum that its bytes have.
std::vector<std::byte> sealed(std::vector<std::byte> bytes) {
    const auto put = [&](std::size_t at, std::uint64_t value, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) { bytes[at + i] = static_cast<std::byte>(value >> (8 * i)); }
    };
    put(32, bytes.size(), 8);
    put(bytes.size() - 4, checksum(std::span(bytes).first(bytes.size() - 4)), 4);
    return bytes;
}
std::vector<std::byte> with(std::vector<std::byte> bytes, std::size_t at, std::uint64_t value, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) { bytes[at + i] = static_cast<std::byte>(value >> (8 * i)); }
    return bytes;
}

std::string refusal(const std::vector<std::byte>& bytes) {
    return text_of<damaged_error>([&] { static_cast<void>(decoded_manifest(bytes)); });
}

}  // namespace

TEST_CASE("checksum: that of zlib and PNG, in any number of parts") {
    const std::string text = "123456789";
    const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
    CHECK(checksum(bytes) == 0xcbf43926u);
    CHECK(checksum(bytes.subspan(4), checksum(bytes.first(4))) == 0xcbf43926u);
    CHECK(checksum({}, 5) == 5);
}

TEST_CASE("manifest: comes back as it was, from these bytes") {
    const manifest m = example();
    const auto bytes = encoded(m);
    const manifest back = decoded_manifest(bytes);
    CHECK(back.generation == 7);
    CHECK(back.step == 1234);
    REQUIRE(back.shards.size() == 2);
    for (std::size_t r = 0; r < 2; ++r) {
        CHECK(back.shards[r].bytes == m.shards[r].bytes);
        CHECK(back.shards[r].sum == m.shards[r].sum);
        CHECK(back.shards[r].table == m.shards[r].table);
    }
    // Files of this version must stay readable: the format may not drift.
    CHECK(bytes.size() == 302);
    CHECK(checksum(bytes) == 0x2144df1cu);  // of any bytes that end in their own checksum
    CHECK(checksum(std::span(bytes).first(bytes.size() - 4)) == 0x82e7b567u);
    const auto header = shard_header(7, 1234, 1, 2, table_of(1));
    CHECK(header.size() == data_begin(table_of(1)));
    CHECK(checksum(header) == 0xc3d9cbc7u);
}

TEST_CASE("manifest: a byte less, a byte more, a bit turned") {
    const auto bytes = encoded(example());
    for (std::size_t n = 0; n < bytes.size(); ++n) {
        CAPTURE(n);
        CHECK_THROWS_AS(static_cast<void>(decoded_manifest(std::span(bytes).first(n))), damaged_error);
    }
    auto more = bytes;
    more.push_back(std::byte{0});
    CHECK(refusal(more) == "the manifest has 303 bytes, and says 302");
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        auto turned = bytes;
        turned[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
        CAPTURE(bit);
        CHECK_THROWS_AS(static_cast<void>(decoded_manifest(turned)), damaged_error);
    }
}

TEST_CASE("manifest: says what is wrong") {
    const auto bytes = encoded(example());
    CHECK(refusal(with(bytes, 0, 'X', 1)) == "the manifest is none");
    CHECK(refusal(with(bytes, 8, 2, 4)) == "the manifest has version 2, not 1");
    CHECK(refusal(with(bytes, 32, 5, 8)) == "the manifest has 302 bytes, and says 5");
    CHECK(refusal(with(bytes, 16, 8, 8)) == "the manifest's checksum is wrong");
    CHECK(refusal({}) == "the manifest ends too early: 0 bytes are left where 8 belong");
    CHECK(refusal(sealed({bytes.begin(), bytes.begin() + 44})) == "the manifest has 2 ranks in 4 bytes");
}

// Checksums keep out accidents, not authors.
TEST_CASE("manifest: hostile numbers under a right checksum") {
    const auto bytes = encoded(example());
    constexpr std::size_t shard = 40;        // bytes, checksum, bytes of the table
    constexpr std::size_t table = 60;        // pieces
    constexpr std::size_t line = table + 8;  // name bytes, type, local, dimensions, offset, count, extents
    const auto hostile = [&](std::size_t at, std::uint64_t value, std::size_t n) {
        return refusal(sealed(with(bytes, at, value, n)));
    };
    constexpr std::uint64_t negative = std::uint64_t(-1);
    REQUIRE(refusal(sealed(bytes)) == "no error");
    CHECK(hostile(12, 0, 4) == "the manifest has 0 ranks in 262 bytes");
    CHECK(hostile(12, 0xffffffffu, 4) == "the manifest has 4294967295 ranks in 262 bytes");
    CHECK(hostile(12, 1, 4) == "the manifest has bytes that belong to no rank");
    CHECK(hostile(12, 3, 4) == "the manifest ends too early: 4 bytes are left where 8 belong");
    CHECK(hostile(shard, negative, 8) == "the manifest gives the shard of rank 0 18446744073709551615 bytes, not 384");
    CHECK(hostile(shard, 0, 8) == "the manifest gives the shard of rank 0 0 bytes, not 384");
    CHECK(hostile(shard + 12, negative, 8) ==
          "the manifest ends too early: 242 bytes are left where 18446744073709551615 belong");
    CHECK(hostile(table, negative, 8) == "a table ends too early: 0 bytes are left where 4 belong");
    CHECK(hostile(table, 2, 8) == "a table has 25 bytes too many");
    CHECK(hostile(line, 0xffffffffu, 4) == "a table ends too early: 61 bytes are left where 4294967295 belong");
    CHECK(hostile(line, 0, 4).starts_with("an entry has no name"));
    CHECK(hostile(line + 4, 13, 1) == "a table has type 13, locality 0 and 2 dimensions");
    CHECK(hostile(line + 5, 2, 1) == "a table has type 1, locality 2 and 2 dimensions");
    CHECK(hostile(line + 6, 0xffff, 2) == "a table has type 1, locality 0 and 65535 dimensions");
    CHECK(hostile(line + 8, negative, 8) == "'w': 10 elements from 18446744073709551615 leave shape [4, 5]");
    CHECK(hostile(line + 16, negative, 8) == "'w': 18446744073709551615 elements from 0 leave shape [4, 5]");
    CHECK(hostile(line + 16, negative - 8, 8) == "'w': 18446744073709551607 elements from 0 leave shape [4, 5]");
    CHECK(hostile(line + 24, negative, 8) == "'w' of shape [18446744073709551615, 5] is too large");
    CHECK(hostile(line + 24, std::uint64_t{1} << 62, 8) == "'w' of shape [4611686018427387904, 5] is too large");
    // Its bytes would wrap around to those of 20 elements.
    CHECK(hostile(line + 24, (std::uint64_t{1} << 62) + 4, 8).ends_with("is too large"));
}

TEST_CASE("manifest: numbers drawn for every place, under a right checksum, never do more than throw") {
    const auto bytes = encoded(example());
    int accepted = 0;
    for (std::uint64_t i = 0; i < 20000; ++i) {
        auto drawn = bytes;
        for (std::uint64_t k = 0; k <= i % 3; ++k) {
            const std::uint64_t word = test::mixed(3 * i + k);
            const std::size_t n = std::size_t{1} << word % 4;
            const std::size_t at = 8 + (word >> 8) % (bytes.size() - 8 - n);
            const std::uint64_t values[] = {0, 1, word >> 32, ~std::uint64_t{0}, std::uint64_t{1} << 63, 0x7fffffff};
            drawn = with(drawn, at, values[(word >> 4) % 6], n);
        }
        try {
            const manifest m = decoded_manifest(sealed(drawn));
            ++accepted;
            for (const auto& s : m.shards) { CHECK(data_begin(s.table) + data_bytes(s.table) == s.bytes); }
            std::vector<std::vector<piece>> tables;
            for (const auto& s : m.shards) { tables.push_back(s.table); }
            static_cast<void>(merged(tables));
        } catch (const damaged_error&) {
        } catch (const usage_error&) {}
    }
    CHECK(accepted > 100);
    CHECK(accepted < 19000);
}

TEST_CASE("layout: tensors of all ranks in order, own entries by rank") {
    const std::vector<std::vector<piece>> tables{table_of(0), table_of(1)};
    const layout whole = merged(tables);
    REQUIRE(whole.common.size() == 2);
    const tensor& w = whole.common.at("w");
    REQUIRE(w.extents.size() == 2);
    CHECK(w.extents[1].offset == 10);
    CHECK(w.extents[1].shard == 1);
    CHECK(w.extents[1].position == 0);
    CHECK(whole.common.at("s").extents.at(0).position == 128);
    CHECK(whole.local[1].at("own").extents.at(0).position == 64);
    CHECK(whole.local[1].at("own").shape == std::vector<std::uint64_t>{2});
}

TEST_CASE("layout: every element is one rank's") {
    const auto of = [](std::vector<std::vector<piece>> tables) {
        return text_of<usage_error>([&] { static_cast<void>(merged(tables)); });
    };
    const auto w = [](std::uint64_t offset, std::uint64_t count) {
        return std::vector<piece>{{"w", dtype::int8, false, {10}, offset, count}};
    };
    CHECK(of({w(0, 4), w(4, 6)}) == "no error");
    CHECK(of({w(4, 6), w(0, 4)}) == "no error");
    CHECK(of({w(4, 0), w(0, 10), w(10, 0)}) == "no error");
    CHECK(of({w(0, 5), w(4, 6)}) == "element 4 of 'w' is rank 0's and rank 1's");
    CHECK(of({w(0, 10), w(0, 10)}) == "element 0 of 'w' is rank 0's and rank 1's");
    CHECK(of({w(0, 10), w(3, 2)}) == "element 3 of 'w' is rank 0's and rank 1's");
    CHECK(of({w(1, 9)}) == "elements 0 to 1 of 'w' are no rank's");
    CHECK(of({w(0, 9)}) == "elements 9 to 10 of 'w' are no rank's");
    CHECK(of({w(0, 0)}) == "elements 0 to 10 of 'w' are no rank's");
    CHECK(of({{w(0, 5)[0], w(5, 5)[0]}}) == "'w' is there twice on rank 0");
    CHECK(of({{{"a", dtype::int8, true, {1}, 0, 1}, {"a", dtype::int8, true, {1}, 0, 1}}}) ==
          "'a' is there twice on rank 0");
    CHECK(of({{{"a\x01\xff", dtype::int8, false, {1}, 0, 0}}}) == "elements 0 to 1 of 'a?"
                                                                  "?' are no rank's");
    std::vector<piece> huge(1, {"a", dtype::byte, false, {std::uint64_t{1} << 59}, 0, std::uint64_t{1} << 59});
    huge.push_back(huge[0]);
    huge.push_back(huge[0]);
    CHECK(of({huge}) == "a rank's entries are too large");
}
