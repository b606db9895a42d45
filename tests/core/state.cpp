// State entries, and the hash that tells equal bytes from different ones.
#include <tutti/core/state.hpp>  // under test

#include <cstdint>  // hashes
#include <set>      // distinct hashes
#include <vector>   // data

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;

std::uint64_t hash(const std::vector<unsigned char>& v) { return hash_bytes(as_bytes(view<const unsigned char>(v))); }

TEST_CASE("an entry describes this rank's piece of a tensor") {
    std::vector<float> piece(6);
    const state_entry<> whole = state_of("w", view<float>(piece));
    CHECK(whole.name == "w");
    CHECK(whole.shape == std::vector<std::size_t>{6});
    CHECK(whole.offset == 0);
    CHECK(whole.type == dtype::float32);
    CHECK(whole.data.size() == 24);
    CHECK(static_cast<void*>(whole.data.data()) == piece.data());

    const state_entry<> shard = state_of("m", view<float>(piece), {4, 3}, 6);
    CHECK(shard.shape == std::vector<std::size_t>{4, 3});
    CHECK(shard.offset == 6);

    struct moments {
        float mean, variance;
    };
    std::vector<moments> records(2);
    CHECK(state_of("r", view<moments>(records)).type == dtype::byte);
    const auto phantom = state_of("p", view<bfloat16, phantom_memory>(nullptr, 5));
    CHECK(phantom.type == dtype::bfloat16);
    CHECK(phantom.data.size() == 10);
}

TEST_CASE("every byte, its place and the length change the hash") {
    std::set<std::uint64_t> seen;
    std::size_t inserted = 0;
    const auto expect_new = [&](const std::vector<unsigned char>& v) {
        seen.insert(hash(v));
        CHECK(seen.size() == ++inserted);
    };
    for (std::size_t length = 0; length <= 40; ++length) {
        std::vector<unsigned char> v(length, 0);
        expect_new(v);
        for (std::size_t i = 0; i < length; ++i) {
            for (const int bit : {0, 3, 7}) {
                v[i] = static_cast<unsigned char>(1 << bit);
                expect_new(v);
            }
            v[i] = 0;
        }
    }
}

TEST_CASE("the order of words matters, also of words that differ in their highest bits alone") {
    const auto of = [](std::vector<std::uint64_t> words) {
        return hash_bytes(as_bytes(view<const std::uint64_t>(words)));
    };
    CHECK(of({1, 2, 3}) != of({3, 2, 1}));
    CHECK(of({1, 2, 3}) != of({2, 1, 3}));
    constexpr std::uint64_t top = std::uint64_t{1} << 63;
    CHECK(of({top, 0, 0, 0}) != of({0, top, 0, 0}));
    CHECK(of({top, 0, 0, 0}) != of({0, 0, top, 0}));
    CHECK(of({top, top, 0, 0}) != of({0, 0, 0, 0}));  // they must not cancel
    CHECK(of({top, top, 0, 0}) != of({0, 0, top, top}));
    CHECK(of({top | 1, top | 2}) != of({top | 2, top | 1}));
}

TEST_CASE("one hash can start from another") {
    const std::vector<unsigned char> a{1, 2, 3, 4, 5, 6, 7, 8}, b{9, 10};
    std::vector<unsigned char> ab = a;
    ab.insert(ab.end(), b.begin(), b.end());
    const auto bytes = [](const std::vector<unsigned char>& v) { return as_bytes(view<const unsigned char>(v)); };
    CHECK(hash_bytes(bytes(b), hash_bytes(bytes(a))) == hash(ab));
    CHECK(hash_bytes(bytes(a), 1) != hash_bytes(bytes(a), 2));
    CHECK(hash_bytes({}) == 14695981039346656037u);  // nothing hashed: the seed
    CHECK(hash({0x61}) == 0xaf63dc4c8601ec8c);       // FNV-1a of "a", published with the algorithm
}

}  // namespace
