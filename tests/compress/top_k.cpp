// top_k: the bytes of a selection by sorting, for every distribution, type, size and level; what is sent and what is
// left are the input in every bit; what is not finite; errors; and what public reports say goes wrong.
#include <doctest/doctest.h>  // checks

#include <cmath>    // isnan
#include <limits>   // infinity
#include <random>   // the global generator that must not be touched
#include <utility>  // pairs
#include <vector>   // storage

#include <tutti/compress/top_k.hpp>      // under test
#include <tutti/core/virtual_queue.hpp>  // costs

#include "compress/sparse.hpp"  // gradients, the judge

using namespace tutti;
using compress::draw_key;
using compress::segment;
using compress::top_k;
using namespace tutti::test;

static_assert(compress::compressor<top_k, host_queue> && compress::compressor<top_k, host_queue, bfloat16>);
static_assert(compress::compressor<top_k, virtual_queue, float16> && compress::compressor<top_k, host_queue, double>);

namespace {

std::size_t kept_of(std::size_t n, int level) {
    return n == 0 ? 0 : std::max<std::size_t>(1, n * static_cast<std::size_t>(level) / 10000);
}

// The wire, written down from its description.
std::vector<std::byte> expected(const std::vector<float>& x, const std::vector<segment>& all) {
    std::vector<std::byte> wire;
    const auto append = [&](const auto& word) {
        const auto* const bytes = reinterpret_cast<const std::byte*>(&word);
        wire.insert(wire.end(), bytes, bytes + sizeof(word));
    };
    for (const segment& s : all) {
        const float* const own = x.data() + s.offset;
        const auto places = largest(own, s.size(), kept_of(s.size(), s.level));
        for (const std::size_t i : places) { append(static_cast<std::uint32_t>(i)); }
        for (const std::size_t i : places) {
            const std::uint32_t nan = 0x7fc00000u;
            std::isfinite(own[i]) ? append(own[i]) : append(nan);
        }
        while (wire.size() % 16 != 0) { wire.push_back(std::byte{0}); }
    }
    return wire;
}

template <class T> void check_all(const std::vector<T>& in, const std::vector<segment>& all) {
    for (const bool with_residual : {false, true}) {
        CAPTURE(with_residual);
        const std::vector<float> before =
            with_residual ? gradient<float>("gaussian", in.size(), 9) : std::vector<float>{};
        std::vector<float> residual = before;
        const auto x = sums(in, before);
        const auto wire = encoded(top_k{}, all, in, residual);
        REQUIRE(same_bits(wire, expected(x, all)));
        const auto out = decoded<float>(top_k{}, all, wire, in.size());
        std::vector<bool> sent(in.size());
        for (const segment& s : all) {
            double left = 0, whole = 0;
            std::size_t wrong = 0;
            for (const std::size_t i : largest(x.data() + s.offset, s.size(), kept_of(s.size(), s.level))) {
                sent[s.offset + i] = true;
            }
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
                const float other = sent[i] ? 0.0f : x[i];
                wrong += out[i] == (sent[i] ? x[i] : 0.0f) ? 0u : 1u;
                wrong += with_residual && std::memcmp(&residual[i], &other, sizeof(other)) != 0 ? 1u : 0u;
                left += (static_cast<double>(x[i]) - out[i]) * (static_cast<double>(x[i]) - out[i]);
                whole += static_cast<double>(x[i]) * x[i];
            }
            CHECK(wrong == 0);
            const auto n = static_cast<double>(s.size());
            CHECK(left <= (1 - static_cast<double>(kept_of(s.size(), s.level)) / n) * whole * (1 + 1e-12));
        }
    }
}

}  // namespace

TEST_CASE_TEMPLATE("what is sent is what sorting finds", T, float, bfloat16, float16, double) {
    for (const std::string_view distribution : distributions) {
        CAPTURE(distribution);
        for (const std::size_t n : {1ul, 2ul, 31ul, 32ul, 33ul, 1000ul, 4099ul}) {
            CAPTURE(n);
            for (const int level : {1, 100, 2500, 9999, 10000}) {
                CAPTURE(level);
                check_all(gradient<T>(distribution, n), laid_out({{n, level}}));
            }
        }
    }
}

TEST_CASE("large tensors, in which a sample tells where to look") {
    for (const std::string_view distribution : distributions) {
        CAPTURE(distribution);
        for (const int level : {1, 10, 100, 2000}) {
            CAPTURE(level);
            check_all(gradient<float>(distribution, 65536 + 77), laid_out({{65536 + 77, level}}));
        }
    }
}

TEST_CASE("a sample that misleads costs time and no element") {
    constexpr std::size_t n = 65536;
    const std::vector<segment> all = laid_out({{n, 100}});
    std::vector<float> in = gradient<float>("gaussian", n);
    const draw_key key{1, 2, 3};
    // 4096 huge elements are more than k = 655: the sample would see nothing else. Of 300 it sees all, and takes the
    // 300th for what twice as many as wanted reach.
    for (const std::size_t huge : {300ul, 4096ul}) {
        for (std::size_t j = 0; j < huge; ++j) {
            in[compress::detail::sample_position(key.stream(0, top_k::purpose), n, j)] = 1e6f;
        }
        std::vector<float> none;
        CHECK(same_bits(encoded(top_k{}, all, in, none, key), expected(in, all)));
    }
}

TEST_CASE("ties go to the first, whatever their signs") {
    const std::vector<float> in{1, -2, 2, 0.5f, 2, -2, 1, 3};
    std::vector<float> none;
    const std::vector<segment> all = laid_out({{8, 3750}});  // 3
    CHECK(decoded<float>(top_k{}, all, encoded(top_k{}, all, in, none), 8) ==
          std::vector<float>{0, -2, 2, 0, 0, 0, 0, 3});
    // Zeros are sent, if there is nothing else.
    const std::vector<float> zeros(8);
    CHECK(same_bits(encoded(top_k{}, all, zeros, none), expected(zeros, all)));
}

TEST_CASE("equal magnitudes leave exactly 1 - k/d: the bound is met") {
    const std::vector<segment> all = laid_out({{1000, 1000}});
    std::vector<float> residual(1000);
    static_cast<void>(encoded(top_k{}, all, gradient<float>("constant", 1000), residual));
    double left = 0;
    for (const float r : residual) { left += static_cast<double>(r) * r; }
    CHECK(left == 0.9 * 1000 * 0.0625);
}

TEST_CASE("the wire, byte by byte") {
    const std::vector<float> in{0.5f, -4, 0, 1};
    std::vector<float> none;
    const auto wire = encoded(top_k{}, laid_out({{4, 7500}}), in, none);
    const std::vector<unsigned> want{0, 0, 0,    0,    1, 0, 0,    0,    3, 0, 0, 0, 0, 0, 0, 0x3f,
                                     0, 0, 0x80, 0xc0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0};
    REQUIRE(wire.size() == want.size());
    for (std::size_t i = 0; i < wire.size(); ++i) { CHECK_MESSAGE(wire[i] == std::byte(want[i]), i); }
}

TEST_CASE("sizes: at least one element, and 64-bit indices where 32 are too few") {
    const auto bytes = [](std::size_t n, int level) { return top_k::wire_bytes({0, level, 0, 0, n, 1}); };
    CHECK(bytes(0, 100) == 0);
    CHECK(bytes(1, 1) == 16);
    CHECK(bytes(99, 100) == 16);
    CHECK(bytes(299, 100) == 16);
    CHECK(bytes(300, 100) == 32);
    CHECK(bytes(std::size_t{1} << 32, 1) == 429496ul * 8);
    CHECK(bytes((std::size_t{1} << 32) + 1, 1) == 429496ul * 12 + 0);
    CHECK(top_k::kept({0, 9999, 0, 0, std::size_t{1} << 60, 1}) == 1152806212456386291ul);  // no overflow
    CHECK(top_k::wire_bytes({0, 100, 0, 0, 20, 30}) == 48);                                 // a matrix: 6
}

TEST_CASE("many tensors are encoded as each of them alone, and nothing beside them is touched") {
    const std::vector<tensor> tensors{{700, 100}, {0, 100}, {1, 1}, {70000, 50}, {33, 10000}, {0, 1}, {5000, 1}};
    const auto all = laid_out(tensors);
    const std::size_t n = all.back().offset + all.back().size();
    const auto in = gradient<float>("laplace", n);
    std::vector<float> residual(n, 0.5f);
    const auto wire = encoded(top_k{}, all, in, residual);
    std::vector<std::byte> joined;
    for (segment s : all) {
        const std::vector<float> own(in.begin() + static_cast<std::ptrdiff_t>(s.offset),
                                     in.begin() + static_cast<std::ptrdiff_t>(s.offset + s.size()));
        std::vector<float> rest(own.size(), 0.5f);
        s.offset = 0;
        const auto part = encoded(top_k{}, {s}, own, rest);
        joined.insert(joined.end(), part.begin(), part.end());
    }
    CHECK(same_bits(wire, joined));
    // Only the tensors given: the others keep what they had.
    const std::vector<segment> some{all[0], all[3]};
    std::vector<float> kept = in, out(n, 7), sum(n, 7);
    const auto part = encoded(top_k{}, some, in, kept);
    top_k{}.decode(host_queue{}, some, view<const std::byte>(part), view<float>(out), 1.0f);
    top_k{}.decode_add(host_queue{}, some, view<const std::byte>(part), 1, view<float>(sum));
    for (const std::size_t i : {700ul, 70701ul, n - 1}) {
        CHECK(kept[i] == in[i]);
        CHECK(out[i] == 7);
        CHECK(sum[i] == 7);
    }
}

TEST_CASE_TEMPLATE("decode multiplies, rounded once", T, float, bfloat16, float16, double) {
    const std::vector<segment> all = laid_out({{1000, 500}});
    std::vector<float> none;
    const auto wire = encoded(top_k{}, all, gradient<float>("gaussian", 1000), none);
    const auto plain = decoded<float>(top_k{}, all, wire, 1000);
    const auto third = decoded<T>(top_k{}, all, wire, 1000, 1.0f / 3);
    for (std::size_t i = 0; i < 1000; ++i) {
        CHECK(static_cast<float>(third[i]) == static_cast<float>(static_cast<T>(plain[i] * (1.0f / 3))));
    }
}

TEST_CASE("decode_add adds wires in their order") {
    const auto all = laid_out({{900, 1000}, {3, 10000}});
    constexpr int ranks = 5;
    std::vector<std::byte> wires;
    std::vector<float> want(903, 1e-3f), sum = want;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        std::vector<float> none;
        const auto wire = encoded(top_k{}, all, gradient<float>("t(2)", 903, r), none);
        const auto out = decoded<float>(top_k{}, all, wire, 903);
        for (std::size_t i = 0; i < 903; ++i) { want[i] += out[i]; }
        wires.insert(wires.end(), wire.begin(), wire.end());
    }
    top_k{}.decode_add(host_queue{}, all, view<const std::byte>(wires), ranks, view<float>(sum));
    CHECK(same_bits(sum, want));
}

TEST_CASE("what is not finite is sent as NaN, and none of it stays") {
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
        for (const std::size_t count : {1ul, 3ul, 50ul}) {  // k is 10
            std::vector<float> in = gradient<float>("gaussian", 1000), residual(1000);
            for (std::size_t j = 0; j < count; ++j) { in[991 - 7 * j] = bad; }
            const auto all = laid_out({{1000, 100}});
            const auto before = in;
            const auto wire = encoded(top_k{}, all, in, residual);
            CHECK(same_bits(wire, expected(before, all)));
            const auto out = decoded<float>(top_k{}, all, wire, 1000);
            std::size_t seen = 0;
            for (std::size_t i = 0; i < 1000; ++i) {
                seen += std::isnan(out[i]) ? 1u : 0u;
                CHECK(std::isfinite(residual[i]));
            }
            CHECK(seen == std::min<std::size_t>(count, 10));
        }
    }
    // Two finite numbers may overflow together.
    std::vector<float> in{3e38f, 1}, residual{3e38f, 1};
    const auto all = laid_out({{2, 5000}});
    CHECK(std::isnan(decoded<float>(top_k{}, all, encoded(top_k{}, all, in, residual), 2)[0]));
    CHECK(residual == std::vector<float>{0, 2});
}

TEST_CASE("bad levels and sizes are refused before anything is written") {
    std::vector<float> in(10, 1), residual(10, 2), out(10, 3);
    std::vector<std::byte> wire(16, std::byte{5});
    const host_queue q;
    const auto encode = [&](segment s, std::size_t elements, std::size_t owed, std::size_t bytes) {
        const std::vector<segment> all{{0, 100, 0, 0, 3, 1}, s};
        top_k{}.encode(q, all, view<const float>(in).sub(0, elements), view<float>(residual).sub(0, owed),
                       view<std::byte>(wire).sub(0, bytes), {});
    };
    std::vector<std::byte> two(32);
    CHECK_THROWS_WITH_AS(encode({3, 0, 3, 0, 5, 1}, 10, 10, 16),
                         "top_k: level 0 of tensor 3: kept elements in 10,000 are 1 to 10000", usage_error);
    CHECK_THROWS_WITH_AS(encode({3, 10001, 3, 0, 5, 1}, 10, 10, 16),
                         "top_k: level 10001 of tensor 3: kept elements in 10,000 are 1 to 10000", usage_error);
    CHECK_THROWS_WITH_AS(encode({3, 1, 3, 4, 5, 1}, 10, 10, 16),
                         "top_k: a segment of tensor 3 begins at its element 4: give the tensor as one", usage_error);
    CHECK_THROWS_WITH_AS(encode({3, 1, 3, 0, 5, 1}, 10, 10, 16), "top_k: 1 wires of 32 bytes do not fit in 16",
                         usage_error);
    CHECK_THROWS_WITH_AS(encode({3, 1, 3, 0, 8, 1}, 10, 10, 16), "top_k: tensor 3 is at elements 3 to 11 of 10",
                         usage_error);
    CHECK_THROWS_WITH_AS(top_k{}.encode(q, laid_out({{10, 1}}), view<const float>(in), view<float>(residual).sub(0, 9),
                                        view<std::byte>(wire), {}),
                         "top_k: the residual has 9 elements instead of 10", usage_error);
    CHECK_THROWS_AS(top_k{}.decode(q, laid_out({{10, 0}}), view<const std::byte>(wire), view<float>(out), 1.0f),
                    usage_error);
    CHECK_THROWS_WITH_AS(top_k{}.decode_add(q, laid_out({{10, 1}}), view<const std::byte>(wire), 2, view<float>(out)),
                         "top_k: 2 wires of 16 bytes do not fit in 16", usage_error);
    CHECK(in == std::vector<float>(10, 1));
    CHECK(residual == std::vector<float>(10, 2));
    CHECK(out == std::vector<float>(10, 3));
    CHECK(wire == std::vector<std::byte>(16, std::byte{5}));
}

TEST_CASE("a virtual queue is charged what a device moves") {
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    const auto all = laid_out({{10000, 100}});
    const view<float, phantom_memory> x(nullptr, 10000);
    const view<std::byte, phantom_memory> wire(nullptr, 800);
    top_k{}.encode(q, all, view<const float, phantom_memory>(x), view<float, phantom_memory>{}, wire, {});
    top_k{}.encode(q, all, view<const float, phantom_memory>(x), x, wire, {});
    top_k{}.decode(q, all, view<const std::byte, phantom_memory>(wire), x, 1.0f);
    top_k{}.decode_add(q, all, view<const std::byte, phantom_memory>(wire), 1, x);
    const auto& steps = q.recording().streams[0];
    REQUIRE(steps.size() == 4);
    CHECK(steps[0].seconds == 40000 + 800);
    CHECK(steps[1].seconds == 3 * 40000 + 800);
    CHECK(steps[2].seconds == 40000 + 800);
    CHECK(steps[3].seconds == 2 * 800);
}

// github.com/sands-lab/grace/issues/16: what selects nothing, or is given nothing, must neither hang nor fail.
// github.com/deepspeedai/DeepSpeed/pull/5652, github.com/ggml-org/llama.cpp/pull/22489: tensors without elements.
TEST_CASE("nothing at all") {
    std::vector<float> none;
    CHECK(encoded(top_k{}, {}, none, none).empty());
    const auto all = laid_out({{0, 100}, {0, 10000}});
    CHECK(encoded(top_k{}, all, none, none).empty());
    CHECK(decoded<float>(top_k{}, all, {}, 0).empty());
}

// github.com/bytedance/byteps/pull/299: indices of fp16 tensors were 16-bit.
TEST_CASE_TEMPLATE("indices of 16-bit elements reach beyond 2^16", T, float16, bfloat16) {
    constexpr std::size_t n = 70001;
    std::vector<T> in(n);
    in[n - 1] = static_cast<T>(3.0f);
    in[65536] = static_cast<T>(-2.0f);
    std::vector<float> none;
    const auto all = laid_out({{n, 1}});  // 7
    const auto out = decoded<T>(top_k{}, all, encoded(top_k{}, all, in, none), n);
    CHECK(static_cast<float>(out[n - 1]) == 3);
    CHECK(static_cast<float>(out[65536]) == -2);
}

// Shigangli/Ok-Topk, VGG/compression.py: absolute values were kept, and so signs lost.
TEST_CASE("signs stay") {
    const std::vector<float> in{-5, -1, -3, -2};
    std::vector<float> residual{-1, -1, -1, -1};
    const auto all = laid_out({{4, 5000}});
    CHECK(decoded<float>(top_k{}, all, encoded(top_k{}, all, in, residual), 4) == std::vector<float>{-6, 0, -4, 0});
    CHECK(residual == std::vector<float>{0, -2, 0, -3});
}

// github.com/sands-lab/grace/issues/2: element types other than float.
TEST_CASE("doubles are rounded to float once, before the selection") {
    const std::vector<double> in{1.0 + 1e-12, -1.0, 1e300, 1e-300};
    std::vector<float> residual(4);
    const auto all = laid_out({{4, 5000}});
    const auto out = decoded<double>(top_k{}, all, encoded(top_k{}, all, in, residual), 4);
    CHECK(out[0] == 1);  // before -1, which is as large as it in float
    CHECK(std::isnan(out[2]));
    CHECK(residual == std::vector<float>{0, -1, 0, 0});
}
