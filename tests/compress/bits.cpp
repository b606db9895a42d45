// Packing: every code comes back, at its bit, and nothing else is set.
#include <tutti/compress/detail/bits.hpp>  // under test

#include <cstdint>  // codes
#include <vector>   // arrays

#include <doctest/doctest.h>   // checks
#include <support/oracle.hpp>  // mixed

using namespace tutti;
using namespace tutti::compress::detail;

TEST_CASE("bytes, numbers and single bits agree, for every width") {
    for (unsigned bits = 1; bits <= 8; ++bits) {
        for (const std::size_t chunks : {0ul, 1ul, 2ul, 3ul, 64ul, 128ul}) {
            CAPTURE(bits);
            CAPTURE(chunks);
            std::vector<std::uint8_t> codes(chunks * chunk), packed_bytes(chunks * chunk + chunk, 0);
            for (std::size_t i = 0; i < codes.size(); ++i) {
                codes[i] = static_cast<std::uint8_t>(test::mixed(i + 1000 * bits) & ((1u << bits) - 1));
                if (i % 5 == 0) { codes[i] = static_cast<std::uint8_t>((1u << bits) - 1); }
            }
            std::copy(codes.begin(), codes.end(), packed_bytes.begin());
            pack(packed_bytes.data(), chunks, bits);
            std::size_t wrong = 0;
            for (std::size_t at = 0; at < chunks * chunk * bits; ++at) {
                const unsigned expected = (unsigned{codes[at / bits]} >> (at % bits)) & 1u;
                wrong += ((unsigned{packed_bytes[at / 8]} >> (at % 8)) & 1u) != expected;
            }
            CHECK(wrong == 0);
            for (std::size_t c = 0; c < chunks; ++c) {
                paired_codes pairs;
                joined_codes joined{};
                std::uint64_t expected = 0;
                for (std::size_t j = 0; j < chunk / 2; ++j) {
                    pairs[j] = codes[c * chunk + j] | std::uint32_t{codes[c * chunk + j + 4]} << 16;
                }
                std::memcpy(&expected, packed_bytes.data() + c * bits, bits);
                joined.join(pairs, bits);
                CHECK(joined.number(bits) == expected);
            }
            std::vector<std::uint8_t> back(codes.size(), 0xee);
            unpack(packed_bytes.data(), back.data(), chunks, bits);
            CHECK(back == codes);
        }
    }
}

TEST_CASE("elements that do not fill a chunk take one") {
    CHECK(chunks_of(0) == 0);
    CHECK(chunks_of(1) == 1);
    CHECK(chunks_of(8) == 1);
    CHECK(chunks_of(9) == 2);
}
