// The wire of indices and values: both widths of indices, and bytes that no encoder wrote: decoding stays inside of its
// views, whatever they are.
#include <doctest/doctest.h>  // checks

#include <vector>  // storage

#include <tutti/compress/threshold.hpp>  // a scheme with a header
#include <tutti/compress/top_k.hpp>      // one without

#include "compress/sparse.hpp"  // layouts

using namespace tutti;
using compress::segment;
using compress::threshold;
using compress::top_k;
using compress::detail::for_each_entry;
using compress::detail::sparse_format;
using namespace tutti::test;

TEST_CASE("entries come back, of both widths, with and without a header") {
    for (const bool wide : {false, true}) {
        for (const bool counted : {false, true}) {
            const sparse_format f{5, wide, counted};
            std::vector<std::byte> wire(f.bytes(), std::byte{0xff});
            CHECK(wire.size() == (counted ? 16u : 0u) + (wide ? 64u : 48u));
            const std::size_t entries = counted ? 3 : 5;
            for (std::size_t e = 0; e < entries; ++e) {
                f.put(wire.data(), e, wide ? (std::size_t{1} << 40) + e : 10 * e, static_cast<float>(e) - 1);
            }
            f.finish(wire.data(), entries);
            CHECK(f.entries(wire.data()) == entries);
            for (std::size_t e = 0; e < 5; ++e) {
                const bool there = e < entries;
                CHECK(f.index(wire.data(), e) == (there ? (wide ? (std::size_t{1} << 40) + e : 10 * e) : 0));
                CHECK(f.value(wire.data(), e) == (there ? static_cast<float>(e) - 1 : 0));
            }
            for (std::size_t at = f.end(); at < wire.size(); ++at) { CHECK(wire[at] == std::byte{0}); }
        }
    }
    CHECK(sparse_format{0, false, true}.bytes() == 0);
}

TEST_CASE("entries outside of the segment are ignored, of a count too large as many as there is room for") {
    const segment s{0, 5000, 0, 0, 10, 1};
    const auto format = threshold::format(s);  // room for 6
    std::vector<std::byte> wire(format.bytes());
    for (std::size_t e = 0; e < 6; ++e) {
        format.put(wire.data(), e, 2 * e, static_cast<float>(e + 1));
    }  // 10 is outside
    format.finish(wire.data(), 6);
    const std::uint64_t count = ~std::uint64_t{0};
    std::memcpy(wire.data(), &count, sizeof(count));
    CHECK(decoded<float>(threshold{}, {s}, wire, 10) == std::vector<float>{1, 0, 2, 0, 3, 0, 4, 0, 5, 0});
    std::vector<float> sum(10, 1);
    threshold{}.decode_add(host_queue{}, {&s, 1}, view<const std::byte>(wire), 1, view<float>(sum));
    CHECK(sum == std::vector<float>{2, 1, 3, 1, 4, 1, 5, 1, 6, 1});
}

// Exactly sized storage, so that the address sanitizer sees the first byte beside it.
TEST_CASE_TEMPLATE("arbitrary bytes", X, top_k, threshold) {
    const random_stream draws{.seed = 31, .stream = 1};
    std::uint64_t next = 0;
    for (int round = 0; round < 2000; ++round) {
        std::vector<segment> all;
        std::size_t at = 0;
        for (std::uint32_t t = 0; t < 1 + draws.below(next, 3); ++t) {
            const std::size_t n = draws.below(next + 1, 50);
            all.push_back({t, static_cast<int>(1 + draws.below(next + 2, 10000)), at, 0, n, 1});
            at += n;
            next += 3;
        }
        const std::size_t bytes = compress::detail::wire_bytes(X{}, all);
        const std::size_t count = draws.below(next++, 4);
        std::vector<std::byte> wires(count * bytes);
        const std::uint64_t style = draws.below(next++, 4);  // of its bytes: any, small, huge, mostly zero
        for (std::byte& b : wires) {
            const std::uint32_t w = draws.word(next++);
            const std::uint32_t of[] = {w, w % 3 == 0 ? (w >> 8) % 60 : 0, w % 5 == 0 ? w >> 8 : 0xff,
                                        w % 16 == 0 ? w >> 8 : 0};
            b = static_cast<std::byte>(of[style]);
        }
        std::vector<float> sum(at, 1);
        X{}.decode_add(host_queue{}, all, view<const std::byte>(wires), count, view<float>(sum));
        if (count > 0) {
            const std::vector<std::byte> one(wires.begin(), wires.begin() + static_cast<std::ptrdiff_t>(bytes));
            CHECK(decoded<bfloat16>(X{}, all, one, at).size() == at);
            // Twice the same, if nothing is drawn from elsewhere.
            CHECK(same_bits(decoded<float>(X{}, all, one, at), decoded<float>(X{}, all, one, at)));
        }
    }
}
