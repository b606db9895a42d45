// Stochastic rounding: one of two neighbors, chosen with the right probability; exact numbers stay; a function of
// position.
#include <tutti/core/stochastic_rounding.hpp>  // under test

#include <array>    // sizes
#include <cmath>    // fabs, isnan
#include <cstdint>  // words
#include <cstring>  // memcmp
#include <limits>   // infinity
#include <vector>   // slices

#include <tutti/core/queue.hpp>          // host_queue
#include <tutti/core/virtual_queue.hpp>  // costs

#include <doctest/doctest.h>   // checks
#include <support/oracle.hpp>  // same_bytes

using namespace tutti;

namespace {

constexpr std::uint32_t ones = 0xffffffffu;
constexpr random_stream stream{.seed = 4, .stream = 5, .step = 6};

// The magnitude of a pattern's neighbor away from zero.
template <class T> T above(T x) {
    T y = x;
    ++y.bits;
    return y;
}

}  // namespace

TEST_CASE_TEMPLATE("what the type holds stays, whatever the word", T, float16, bfloat16) {
    int wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 1u << 16; ++pattern) {
        T x;
        x.bits = static_cast<std::uint16_t>(pattern);
        const auto value = static_cast<float>(x);
        if (std::isnan(value)) {
            wrong += !std::isnan(static_cast<float>(rounded_stochastically<T>(value, ones)));
            continue;
        }
        for (const std::uint32_t word : {0u, 0x80000000u, ones}) {
            wrong += rounded_stochastically<T>(value, word).bits != x.bits;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("the word decides at the fraction of the way", T, float16, bfloat16) {
    // Between each two neighbors, at an eighth, the middle and 15/16 of the way: up from the word of that share on.
    int wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 0x7bffu; pattern += 7) {
        T low;
        low.bits = static_cast<std::uint16_t>(pattern);
        const auto from = static_cast<double>(static_cast<float>(low));
        const auto to = static_cast<double>(static_cast<float>(above(low)));
        for (const double share : {0.125, 0.5, 0.9375}) {
            const auto x = static_cast<float>(from + share * (to - from));
            // Truncation after the addition: words of 1 - share and more go up.
            const auto least = static_cast<std::uint32_t>((1 - share) * 0x1p32);
            for (const float sign : {1.0f, -1.0f}) {
                const auto magnitude = [&](std::uint32_t word) {
                    return rounded_stochastically<T>(sign * x, word).bits & 0x7fffu;
                };
                const bool up = magnitude(least) == pattern + 1 && magnitude(ones) == pattern + 1;
                const bool down = magnitude(least - 1) == pattern && magnitude(0) == pattern;
                wrong += !(up && down);
            }
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("the mean of many roundings is the number", T, float16, bfloat16) {
    constexpr int n = 1 << 16;
    for (const float x : {1.001f, -0.3f, 1234.5678f, 3.1e-5f, -2.7e-6f, 1.3e-8f}) {  // the last three: subnormal halves
        double sum = 0;
        for (std::uint64_t i = 0; i < n; ++i) {
            sum += static_cast<double>(static_cast<float>(rounded_stochastically<T>(x, stream.word(i))));
        }
        const auto down = static_cast<double>(static_cast<float>(rounded_stochastically<T>(x, 0)));
        const auto up = static_cast<double>(static_cast<float>(rounded_stochastically<T>(x, ones)));
        // A rounding has the standard deviation sqrt(p (1 - p)) of a step; five of the mean's.
        const double p = (static_cast<double>(x) - down) / (up - down);
        CAPTURE(x);
        CHECK(p > 0);
        CHECK(p < 1);
        CHECK(std::fabs(sum / n - static_cast<double>(x)) < 5 * std::fabs(up - down) * std::sqrt(p * (1 - p) / n));
        // To nearest the mean is off by more than that, so the bar can tell them apart.
        const auto nearest = static_cast<double>(static_cast<float>(static_cast<T>(x)));
        CHECK(std::fabs(nearest - static_cast<double>(x)) > 5 * std::fabs(up - down) * std::sqrt(p * (1 - p) / n));
    }
}

TEST_CASE("the ends of the range") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(rounded_stochastically<float16>(infinity, ones).bits == 0x7c00);
    CHECK(rounded_stochastically<bfloat16>(-infinity, ones).bits == 0xff80);
    CHECK(rounded_stochastically<float16>(65519.0f, 0).bits == 0x7bff);
    CHECK(rounded_stochastically<float16>(65519.0f, ones).bits == 0x7c00);
    CHECK(rounded_stochastically<float16>(65536.0f, 0).bits == 0x7c00);
    CHECK(rounded_stochastically<float16>(1e30f, 0).bits == 0x7c00);
    CHECK(rounded_stochastically<bfloat16>(std::numeric_limits<float>::max(), 0).bits == 0x7f7f);
    CHECK(rounded_stochastically<float16>(0x1p-40f, ones).bits == 1);
    CHECK(rounded_stochastically<float16>(0x1p-40f, 0u - (1u << 16)).bits == 1);  // 2^-16 of a step
    CHECK(rounded_stochastically<float16>(0x1p-40f, 0u - (1u << 16) - 1).bits == 0);
    CHECK(rounded_stochastically<float16>(0x1p-60f, ones).bits == 0);
    CHECK(rounded_stochastically<float16>(-0x1p-140f, ones).bits == 0x8000);
}

TEST_CASE_TEMPLATE("any slice of a copy equals that part of the whole", T, float16, bfloat16) {
    const host_queue q;
    std::vector<float> in(67);
    for (std::size_t i = 0; i < in.size(); ++i) { in[i] = random_stream{.seed = 1}.normal(i); }
    std::vector<T> whole(in.size());
    copy_stochastically(q, in, view<T>(whole), stream, 5);
    for (std::size_t i = 0; i < whole.size(); ++i) {
        CHECK(whole[i].bits == rounded_stochastically<T>(in[i], stream.word(5 + i)).bits);
    }
    for (std::size_t first = 0; first < 9; ++first) {
        for (std::size_t count = 0; count < 12; ++count) {
            std::vector<T> slice(count);
            copy_stochastically(q, view<const float>(in).sub(first, count), view<T>(slice), stream, 5 + first);
            CHECK(test::same_bytes(slice, std::vector<T>(&whole[first], &whole[first] + count)));
        }
    }
    CHECK_THROWS_AS(copy_stochastically(q, in, view<T>(whole).sub(0, 3), stream), usage_error);
}

TEST_CASE("a copy on a virtual queue charges its cost") {
    virtual_queue q({1e9, 1e12});
    copy_stochastically(q, view<const float, phantom_memory>(nullptr, 1000),
                        view<bfloat16, phantom_memory>(nullptr, 1000), stream);
    CHECK(resolve(q.recording())[0] == doctest::Approx(6e-6));
}
