// gain: both times by hand, and what the rule says of links and tensors that people have.
#include <doctest/doctest.h>  // checks

#include <cmath>    // infinity
#include <limits>   // infinity
#include <utility>  // pair
#include <vector>   // layouts

#include "ranks.hpp"                  // layouts
#include "schemes.hpp"                // compressors
#include <tutti/compress/dense.hpp>   // dense_level
#include <tutti/compress/gain.hpp>    // tested
#include <tutti/compress/matrix.hpp>  // tested

using namespace tutti;
using namespace tutti::test;
using compress::expected_gain;
using compress::gain;
using comm::topology;

namespace {

/// 4 bits in buckets of 512 with two floats each, as CGX: only the sizes.
struct four_bits {
    [[nodiscard]] std::size_t granularity() const { return 512; }
    [[nodiscard]] std::size_t wire_bytes(const segment& s) const {
        return compress::aligned_wire((s.size() + 511) / 512 * 8 + s.size() / 2);
    }
};

const topology nvlink = topology::one_node(8, {2e-6, 450e9});
const topology ethernet = topology::uniform(8, 1, {}, {10e-6, 12.5e9});  // 100 Gbit/s for each rank
constexpr compress::kernel_rates kernels{2.3e12, 4e-6};                  // 70 % of 3.35 TB/s

/// Weights of GPT-2 124M in 25 MiB buckets of bf16, as DDP would send them.
const std::vector<segment> bucket{{0, 4, 0, 0, 25 * 1024 * 1024 / 2, 1}};

}  // namespace

TEST_CASE("the times of each form are those of its kernels and its collectives") {
    // Powers of two: every number below is exact. 4 ranks, latency 2^-10 s, 2^20 B/s; kernels 2^24 B/s.
    const topology flat = topology::uniform(4, 1, {}, {0x1p-10, 0x1p20});
    const compress::kernel_rates rates{0x1p24, 0x1p-8};
    const double n = 4096;
    const std::vector<segment> all{{0, 4, 0, 0, 4096, 1}};
    const double dense = 4 * 0x1p-10 + 1.5 * 4 * n / 0x1p20;

    const double w = 4096 + 8 * 128;  // bucketed
    const gain cut = expected_gain(bucketed{}, all, 4, false, flat, rates);
    CHECK(cut.dense == dense);
    CHECK(cut.wire == (3 + 2) * 0x1p-10 + 2 * 0.75 * w / 0x1p20);
    CHECK(cut.encode == 2 * 0x1p-8 + (n * 4 * 0.75 + n * 4 / 4 + w) / 0x1p24);
    CHECK(cut.decode == 5 * 0x1p-8 + (n * (24 + 4) / 4 + 0.75 * w + w + n * 4) / 0x1p24);
    CHECK(cut.compressed() == cut.encode + cut.wire + cut.decode);
    const gain kept = expected_gain(bucketed{}, all, 2, true, flat, rates);
    CHECK(kept.encode == 2 * 0x1p-8 + (n * (2 + 8) * 0.75 + n * (4 + 8) / 4 + w) / 0x1p24);
    CHECK(kept.decode == 5 * 0x1p-8 + (n * (24 + 2 + 8) / 4 + 0.75 * w + w + n * 2) / 0x1p24);
    CHECK(kept.wire == cut.wire);
    CHECK(kept.dense == 4 * 0x1p-10 + 1.5 * 2 * n / 0x1p20);

    std::vector<segment> some = all;
    some[0].level = 1250;
    const gain whole = expected_gain(largest{}, some, 4, true, flat, rates);
    CHECK(whole.dense == dense);
    CHECK(whole.wire == 2 * 0x1p-10 + 0.75 * 4 * (512 * 8) / 0x1p20);
    CHECK(whole.encode == 0x1p-8 + (n * (4 + 8) + 512 * 8) / 0x1p24);
    CHECK(whole.decode == 3 * 0x1p-8 + (n * (16 + 4) + 4 * 512 * 8) / 0x1p24);

    some[0].level = 8;
    const gain linear = expected_gain(sampled{}, some, 4, true, flat, rates);  // 256 floats in each of two rounds
    CHECK(linear.wire == 2 * (4 * 0x1p-10 + 1.5 * 256 * 4 / 0x1p20));
    CHECK(linear.encode == 2 * 0x1p-8 + (n * (4 + 8 + 4) + 512 * 4) / 0x1p24);
    CHECK(linear.decode == 3 * 0x1p-8 + (n * (4 + 8 + 4) + 2 * 512 * 4) / 0x1p24);
    const gain forgetful = expected_gain(sampled{}, some, 2, false, flat, rates);
    CHECK(forgetful.encode == 2 * 0x1p-8 + (n * (2 + 2) + 512 * 4) / 0x1p24);
    CHECK(forgetful.decode == 3 * 0x1p-8 + (n * 2 + 2 * 512 * 4) / 0x1p24);
}

// deepspeedai/DeepSpeed#4852: no speed-up. sands-lab/grace#17, epfml/powersgd#17: slower than dense.
TEST_CASE("4 bits do not pay over NVLink for a bucket of GPT-2, and pay over 100 Gbit/s") {
    for (const bool with_residual : {false, true}) {
        const gain fast = expected_gain(four_bits{}, bucket, 2, with_residual, nvlink, kernels);
        MESSAGE("NVLink: dense ", fast.dense * 1e6, " us, 4 bits ", fast.encode * 1e6, " + ", fast.wire * 1e6, " + ",
                fast.decode * 1e6);
        CHECK_FALSE(fast.worth_it());
        const gain slow = expected_gain(four_bits{}, bucket, 2, with_residual, ethernet, kernels);
        MESSAGE("100 Gbit/s: dense ", slow.dense * 1e6, " us, 4 bits ", slow.encode * 1e6, " + ", slow.wire * 1e6,
                " + ", slow.decode * 1e6);
        CHECK(slow.worth_it());
        CHECK(slow.dense / slow.compressed() > 2.5);
        CHECK(slow.dense / slow.compressed() < 4);  // of 16 bits, 4 and the buckets' floats remain
    }
}

TEST_CASE("a vector by itself does not pay over either link") {
    for (const std::size_t n : {768u, 2304u, 3072u}) {
        const std::vector<segment> vector{{0, 4, 0, 0, n, 1}};
        for (const topology* t : {&nvlink, &ethernet}) {
            CHECK_FALSE(expected_gain(four_bits{}, vector, 4, true, *t, kernels).worth_it());
        }
    }
}

TEST_CASE("dense segments count on neither side; one rank has nothing to gain; rates must make sense") {
    auto mixed = bucket;
    mixed.push_back({1, compress::dense_level, mixed[0].size(), 0, 1 << 20, 1});
    CHECK(expected_gain(four_bits{}, mixed, 2, true, ethernet, kernels) ==
          expected_gain(four_bits{}, bucket, 2, true, ethernet, kernels));
    mixed.erase(mixed.begin());
    CHECK(expected_gain(four_bits{}, mixed, 2, true, ethernet, kernels) == gain{});
    CHECK_FALSE(gain{}.worth_it());
    const gain alone = expected_gain(four_bits{}, bucket, 2, true, topology::one_node(1), kernels);
    CHECK(alone.dense == 0);
    CHECK(alone.wire == 0);
    CHECK_FALSE(alone.worth_it());
    for (const compress::kernel_rates bad :
         {compress::kernel_rates{}, {-1.0, 0.0}, {1e12, -1e-6}, {1e12, std::numeric_limits<double>::infinity()}}) {
        CHECK_THROWS_AS(static_cast<void>(expected_gain(four_bits{}, bucket, 2, true, nvlink, bad)), usage_error);
    }
}

TEST_CASE("tensors of two rows and two columns or more are matrices, of their first extent by all others") {
    const auto matrix = [](std::vector<std::size_t> shape) {
        const auto s = compress::matrix_of(shape);
        return s ? std::pair(s->rows, s->cols) : std::pair(std::size_t{0}, std::size_t{0});
    };
    CHECK(matrix({2, 2}) == std::pair(std::size_t{2}, std::size_t{2}));
    CHECK(matrix({64, 3, 7, 7}) == std::pair(std::size_t{64}, std::size_t{147}));
    CHECK(matrix({4, 1, 5}) == std::pair(std::size_t{4}, std::size_t{5}));
    for (const auto& shape :
         std::vector<std::vector<std::size_t>>{{}, {1000}, {1, 1000}, {1000, 1}, {8, 1, 1}, {4, 0}, {0, 4}}) {
        CHECK_FALSE(compress::matrix_of(shape));
    }
    const std::size_t large = std::size_t{1} << 32;
    for (const auto& shape :
         std::vector<std::vector<std::size_t>>{{2, large, large}, {large, large}, {large, large, 3}}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(compress::matrix_of(shape)),
                             "matrix_of: the elements of a shape are more than can be counted", usage_error);
    }
}

TEST_CASE("what is worth compressing: matrices whose wire is at most a stated part of their floats") {
    const std::vector<std::size_t> matrix{4, 100}, vector{400};
    const compress::segment whole{0, 4, 0, 0, 4, 100}, part{0, 4, 0, 0, 100, 1};
    const auto bytes = [](std::size_t n) { return [n](const compress::segment&) { return n; }; };
    CHECK(compress::worth_compressing(matrix, whole, bytes(1600)));
    CHECK_FALSE(compress::worth_compressing(matrix, whole, bytes(1601)));
    CHECK(compress::worth_compressing(matrix, part, bytes(400)));
    CHECK_FALSE(compress::worth_compressing(matrix, part, bytes(401)));
    CHECK(compress::worth_compressing(matrix, whole, bytes(800), 2));
    CHECK_FALSE(compress::worth_compressing(matrix, whole, bytes(801), 2));
    CHECK_FALSE(compress::worth_compressing(vector, part, bytes(0)));
}
