// Philox against the known answers of its authors; uniforms, normals and bounded integers as functions of position; the
// bits of the normals by one hash. Compiled twice: plain, and for this machine's processor, where a compiler that fuses
// a product into a sum would change the hash.
#include <tutti/core/philox.hpp>  // under test

#include <array>    // words
#include <bit>      // bit_cast
#include <cmath>    // log, sqrt
#include <cstdint>  // words
#include <vector>   // slices

#include <tutti/core/queue.hpp>          // host_queue
#include <tutti/core/virtual_queue.hpp>  // cost of a fill

#include <doctest/doctest.h>   // checks
#include <support/build.hpp>   // full_speed
#include <support/oracle.hpp>  // same_bytes

namespace {

using namespace tutti;
using words = std::array<std::uint32_t, 4>;

// A multiply-free second opinion on the high half of a product: schoolbook in 16-bit digits.
std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
    std::array<std::uint64_t, 8> digit{};
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            const std::uint64_t p = ((a >> (16 * i)) & 0xffff) * ((b >> (16 * j)) & 0xffff);
            digit[static_cast<std::size_t>(i + j)] += p & 0xffff;
            digit[static_cast<std::size_t>(i + j) + 1] += p >> 16;
        }
    }
    for (std::size_t i = 0; i + 1 < digit.size(); ++i) {
        digit[i + 1] += digit[i] >> 16;
        digit[i] &= 0xffff;
    }
    return digit[4] | (digit[5] << 16) | (digit[6] << 32) | (digit[7] << 48);
}

}  // namespace

TEST_CASE("Philox4x32-10 gives the known answers of Random123") {
    static_assert(philox({0, 0, 0, 0}, {0, 0}) == words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    constexpr std::uint32_t ones = 0xffffffff;
    CHECK(philox({ones, ones, ones, ones}, {ones, ones}) == words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a stream addresses the counter by element, stream and step, the key by seed") {
    constexpr random_stream s{0x299f31d0a4093822, 0x13198a2e, 0x03707344};
    CHECK(s.block(0x85a308d3243f6a88) == words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
    const std::uint64_t far = (std::uint64_t{1} << 34) + 4;  // block index beyond 32 bits
    for (std::uint64_t i = 0; i < 4; ++i) {
        CHECK(s.word(far + i) == s.block(far >> 2)[i]);
        CHECK(s.uniform(far + i) == uniform_from(s.block(far >> 2)[i]));
        CHECK(s.normal(far + i) == normals_from(s.block(far >> 2))[i]);
    }
    // Each part of the address matters.
    const words here = s.block(7);
    CHECK(here != s.block(7 + (std::uint64_t{1} << 32)));
    CHECK(here != random_stream{s.seed ^ (std::uint64_t{1} << 40), s.stream, s.step}.block(7));
    CHECK(here != random_stream{s.seed ^ 1, s.stream, s.step}.block(7));
    CHECK(here != random_stream{s.seed, s.stream + 1, s.step}.block(7));
    CHECK(here != random_stream{s.seed, s.stream, s.step + 1}.block(7));
}

TEST_CASE("uniforms stay inside (0, 1) and fill it evenly") {
    CHECK(uniform_from(0) == 0x1p-24f);
    CHECK(uniform_from(0xffffffff) == 1.0f - 0x1p-24f);
    CHECK(uniform_from(0x80000000) == 0.5f + 0x1p-24f);
    constexpr int cells = 64, n = 1 << 18;
    std::array<int, cells> count{};
    const random_stream s{3, 1, 4};
    for (std::uint64_t i = 0; i < n; ++i) { ++count[static_cast<std::size_t>(s.uniform(i) * cells)]; }
    double chi_square = 0;
    for (const int c : count) { chi_square += (c - n / cells) * (c - n / cells) / static_cast<double>(n / cells); }
    CHECK(chi_square < 63 + 5 * std::sqrt(2.0 * 63));  // mean 63, standard deviation sqrt(126): five of them
    CHECK(chi_square > 63 - 5 * std::sqrt(2.0 * 63));
}

TEST_CASE("integers below a bound are the high product of 64 random bits") {
    const random_stream s{11, 5, 6};
    for (const std::uint64_t bound :
         {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{10}, std::uint64_t{1115394}, std::uint64_t{0xffffffff},
          std::uint64_t{1} << 32, (std::uint64_t{1} << 63) + 12345, ~std::uint64_t{0}}) {
        int wrong = 0;
        for (std::uint64_t i = 0; i < 2000; ++i) {
            const words w = s.block(i);
            const std::uint64_t got = s.below(i, bound);
            wrong += got >= bound || got != high_product((std::uint64_t{w[0]} << 32) | w[1], bound);
        }
        CAPTURE(bound);
        CHECK(wrong == 0);
    }
}

TEST_CASE("the bits of the normals are the same everywhere") {
    // The two hashes are of one sequence: a prefix, and 2^26 numbers where the compiler optimizes.
    const random_stream s{20250703, 3, 5};
    std::uint64_t h = 1469598103934665603u;
    const auto extend = [&](std::uint64_t first, std::uint64_t last) {
        for (std::uint64_t j = first; j < last; ++j) {
            for (const float z : normals_from(s.block(j))) {
                h = (h ^ std::bit_cast<std::uint32_t>(z)) * 1099511628211u;
            }
        }
    };
    extend(0, std::uint64_t{1} << 18);
    CHECK(h == 0xdf0324ba9ba0b3c0);
    if (!test::full_speed) { return; }
    extend(std::uint64_t{1} << 18, std::uint64_t{1} << 24);
    CHECK(h == 0x9bb439d4b5ef29f9);
}

TEST_CASE("normals are close to those of the double formula") {
    const random_stream s{8, 8, 8};
    double worst = 0;
    for (std::uint64_t j = 0; j < 50000; ++j) {
        const words w = s.block(j);
        const auto z = normals_from(w);
        for (std::size_t pair = 0; pair < 4; pair += 2) {
            const double radius = std::sqrt(-2 * std::log(static_cast<double>(uniform_from(w[pair]))));
            const double angle = 6.283185307179586 * static_cast<double>(uniform_from(w[pair + 1]));
            worst = std::max(worst, std::fabs(z[pair] - radius * std::cos(angle)) / std::max(radius, 1.0));
            worst = std::max(worst, std::fabs(z[pair + 1] - radius * std::sin(angle)) / std::max(radius, 1.0));
        }
    }
    CHECK(worst < 3e-7);
    CHECK(worst > 0);
    // The extremes of the input: the largest normal is sqrt(48 ln 2).
    CHECK(std::fabs(normals_from({0, 0, 0, 0})[0]) <= 5.77f);
    CHECK(std::fabs(normals_from({0, 0, 0, 0})[0]) > 5.76f);
}

TEST_CASE("normals have the moments of the standard normal") {
    constexpr int n = 1 << 20;
    const random_stream s{42, 0, 1};
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, lag = 0, previous = 0;
    constexpr std::array<double, 9> points{-3, -2, -1, -0.5, 0, 0.25, 1.5, 2.5, 3.5};
    std::array<double, 9> below{};
    for (std::uint64_t j = 0; j < n / 4; ++j) {
        for (const float f : normals_from(s.block(j))) {
            const double z = static_cast<double>(f);
            m1 += z;
            m2 += z * z;
            m3 += z * z * z;
            m4 += z * z * z * z;
            lag += z * previous;
            previous = z;
            for (std::size_t i = 0; i < points.size(); ++i) { below[i] += z < points[i] ? 1 : 0; }
        }
    }
    // Standard errors: 1, sqrt 2, sqrt 15, sqrt 96, 1, over sqrt n. Five of each.
    const double error = 5 / std::sqrt(static_cast<double>(n));
    CHECK(std::fabs(m1 / n) < error);
    CHECK(std::fabs(m2 / n - 1) < error * std::sqrt(2.0));
    CHECK(std::fabs(m3 / n) < error * std::sqrt(15.0));
    CHECK(std::fabs(m4 / n - 3) < error * std::sqrt(96.0));
    CHECK(std::fabs(lag / n) < error);
    for (std::size_t i = 0; i < points.size(); ++i) {
        const double share = 0.5 * std::erfc(-points[i] / std::sqrt(2.0));
        CAPTURE(points[i]);
        CHECK(std::fabs(below[i] / n - share) < 4 * std::sqrt(share * (1 - share) / n));
    }
}

TEST_CASE_TEMPLATE("any slice of a fill equals that part of the whole", T, float, double, float16, bfloat16) {
    const host_queue q;
    const random_stream s{1, 2, 3};
    std::vector<T> whole(67);
    fill_normal(q, view<T>(whole), s, 0.02f, 5);
    for (std::size_t i = 0; i < whole.size(); ++i) {
        CHECK(static_cast<double>(whole[i]) == static_cast<double>(static_cast<T>(0.02f * s.normal(5 + i))));
    }
    for (std::size_t first = 0; first < 9; ++first) {
        for (std::size_t count = 0; count < 12; ++count) {
            std::vector<T> slice(count);
            fill_normal(q, view<T>(slice), s, 0.02f, 5 + first);
            CHECK(test::same_bytes(slice, std::vector<T>(&whole[first], &whole[first] + count)));
        }
    }
    fill_normal(q, view<T>(whole), s);
    CHECK(static_cast<double>(whole[0]) == static_cast<double>(static_cast<T>(s.normal(0))));
}

TEST_CASE("a fill on a virtual queue charges its cost") {
    virtual_queue q({1e9, 1e12});
    fill_normal(q, view<float, phantom_memory>(nullptr, 1000), random_stream{});
    CHECK(resolve(q.recording())[0] == doctest::Approx(4e-6));  // 4000 bytes at 1 GB/s; 40000 flops are less
}
