// The partition rule: parts cover the range in order, are balanced, and keep to grains.
#include <tutti/core/partition.hpp>  // under test

#include <cstddef>  // size_t
#include <limits>   // large totals

#include <doctest/doctest.h>  // checks

namespace {

using tutti::part;
using tutti::partition;

TEST_CASE("parts cover the range, in order, without gaps, and differ by at most one") {
    int wrong = 0;
    for (std::size_t total = 0; total <= 130; ++total) {
        for (std::size_t parts = 1; parts <= 17; ++parts) {
            std::size_t next = 0;
            for (std::size_t i = 0; i < parts; ++i) {
                const part p = partition(total, parts, i);
                // Balanced, the longer ones in front.
                wrong += p.first != next || p.count != total / parts + (i < total % parts ? 1 : 0);
                next += p.count;
            }
            wrong += next != total;
        }
    }
    CHECK(wrong == 0);
    CHECK(partition(10, 4, 0) == part{0, 3});
    CHECK(partition(10, 4, 1) == part{3, 3});
    CHECK(partition(10, 4, 2) == part{6, 2});
    CHECK(partition(10, 4, 3) == part{8, 2});
}

TEST_CASE("with a grain, every inner border is a multiple of it") {
    int wrong = 0;
    for (const std::size_t grain : {1u, 2u, 5u, 16u}) {
        for (std::size_t total = 0; total <= 130; ++total) {
            for (std::size_t parts = 1; parts <= 9; ++parts) {
                const std::size_t grains = (total + grain - 1) / grain;
                std::size_t next = 0;
                for (std::size_t i = 0; i < parts; ++i) {
                    const part p = partition(total, parts, i, grain);
                    const bool at_grain = p.first % grain == 0 || p.first == total;
                    const bool balanced = p.count <= (grains / parts + 1) * grain;
                    wrong += p.first != next || !at_grain || !balanced;
                    // Nobody gets two grains while somebody has none.
                    wrong += grains >= parts && p.count == 0;
                    next += p.count;
                }
                wrong += next != total;
            }
        }
    }
    CHECK(wrong == 0);
    CHECK(partition(100, 3, 0, 32) == part{0, 64});
    CHECK(partition(100, 3, 1, 32) == part{64, 32});
    CHECK(partition(100, 3, 2, 32) == part{96, 4});
    CHECK(partition(10, 3, 1, 32) == part{10, 0});
}

TEST_CASE("totals up to the address space work") {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    static_assert(partition(most, 3, 2) == part{most / 3 * 2, most / 3});
    CHECK(partition(most, 2, 1) == part{(most - 1) / 2 + 1, (most - 1) / 2});
    CHECK(partition(most, 2, 1, 64) == part{std::size_t{1} << 63, (most - 1) / 2});
}

}  // namespace
