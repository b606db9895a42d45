// dense: the compressor that leaves elements as they are: contract, rounding of 16-bit wires, not finite, refusals.
#include <doctest/doctest.h>  // checks

#include <cmath>    // isfinite
#include <cstdint>  // SIZE_MAX
#include <cstring>  // memcpy
#include <limits>   // NaN
#include <vector>   // data

#include "ranks.hpp"                     // layouts, data
#include <tutti/compress/dense.hpp>      // tested
#include <tutti/core/virtual_queue.hpp>  // launches

using namespace tutti;
using namespace tutti::test;
using compress::dense;
using compress::segment;

static_assert(compress::compressor<dense<>, host_queue> && compress::compressor<dense<>, virtual_queue, double>);
static_assert(compress::compressor<dense<bfloat16>, host_queue, bfloat16>);

namespace {

const std::vector<segment> all{{4, 8, 3, 0, 7, 3}, {5, 8, 30, 32, 1, 1}, {6, 8, 24, 0, 0, 1}, {7, 8, 32, 0, 64, 1}};
constexpr std::size_t size = 100;

template <class Wire> std::vector<std::byte> encoded(const std::vector<float>& in, view<float> residual = {}) {
    std::vector<std::byte> wire(compress::detail::wire_bytes(dense<Wire>(), all), std::byte{0xa5});
    dense<Wire>().encode(host_queue(), all, view<const float>(in), residual, view<std::byte>(wire), {});
    return wire;
}

}  // namespace

TEST_CASE_TEMPLATE("wires hold the elements of segments in order, padded with zeros", Wire, float, float16, bfloat16) {
    const auto in = gradient(size, 1);
    const auto wire = encoded<Wire>(in);
    std::size_t at = 0;
    for (const segment& s : all) {
        CHECK(dense<Wire>::wire_bytes(s) == (s.size() * sizeof(Wire) + 15) / 16 * 16);
        for (std::size_t i = 0; i < dense<Wire>::wire_bytes(s) / sizeof(Wire); ++i) {
            Wire e{};
            std::memcpy(&e, wire.data() + at + i * sizeof(Wire), sizeof(Wire));
            REQUIRE(static_cast<float>(e) == (i < s.size() ? static_cast<float>(Wire(in[s.offset + i])) : 0.0f));
        }
        at += dense<Wire>::wire_bytes(s);
    }
    CHECK(at == wire.size());
}

TEST_CASE_TEMPLATE("decode gives factor times the wire, decode_add adds wires in order; nothing else is touched", Wire,
                   float, float16, bfloat16) {
    std::vector<std::byte> wires;
    rows<float> in;
    for (std::uint64_t r = 0; r < 3; ++r) {
        in.push_back(gradient(size, r));
        const auto wire = encoded<Wire>(in.back());
        wires.insert(wires.end(), wire.begin(), wire.end());
    }
    const std::size_t one = wires.size() / 3;
    std::vector<float> out(size, 5.0f);
    dense<Wire>().decode(host_queue(), all, view<const std::byte>(wires).sub(one, one), view<float>(out), 0.25f);
    std::vector<float> total(size, 5.0f);
    dense<Wire>().decode_add(host_queue(), all, view<const std::byte>(wires), 3, view<float>(total));
    std::vector<bool> inside(size);
    for (const segment& s : all) { std::fill_n(inside.begin() + static_cast<long>(s.offset), s.size(), true); }
    for (std::size_t i = 0; i < size; ++i) {
        const auto v = [&](std::size_t r) { return static_cast<float>(Wire(in[r][i])); };
        CHECK(out[i] == (inside[i] ? 0.25f * v(1) : 5.0f));
        CHECK(total[i] == (inside[i] ? ((5.0f + v(0)) + v(1)) + v(2) : 5.0f));
    }
    dense<Wire>().decode_add(host_queue(), all, view<const std::byte>(), 0, view<float>(out));  // of no wires
    CHECK(out[0] == 5.0f);
}

TEST_CASE("with a residual the wire holds the sum, and what it rounds off stays: nothing, for float") {
    const auto in = gradient(size, 1);
    std::vector<float> residual = gradient(size, 2);
    const std::vector<float> before = residual;
    const auto check = [&]<class Wire>(Wire, float bound) {
        residual = before;
        const auto wire = encoded<Wire>(in, residual);
        std::vector<float> out(size);
        dense<Wire>().decode(host_queue(), all, view<const std::byte>(wire), view<float>(out), 1.0f);
        for (const segment& s : all) {
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
                REQUIRE(out[i] + residual[i] == in[i] + before[i]);
                REQUIRE(std::fabs(residual[i]) <= bound * std::fabs(in[i] + before[i]));
            }
        }
        CHECK(residual[0] == before[0]);
        CHECK(residual[size - 1] == before[size - 1]);
    };
    check(float{}, 0.0f);
    check(float16{}, 0x1p-11f + 1e-7f);
    check(bfloat16{}, 0x1p-8f);
}

TEST_CASE("a gradient of 16 bits goes through a wire of its own type bit by bit") {
    std::vector<bfloat16> in;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        bfloat16 x;
        x.bits = static_cast<std::uint16_t>(bits);
        if (std::isfinite(static_cast<float>(x))) { in.push_back(x); }
    }
    const std::vector<segment> whole{{0, 16, 0, 0, in.size(), 1}};
    const dense<bfloat16> x;
    std::vector<std::byte> wire(x.wire_bytes(whole[0]));
    x.encode(host_queue(), whole, view<const bfloat16>(in), {}, view<std::byte>(wire), {});
    std::vector<bfloat16> out(in.size());
    x.decode(host_queue(), whole, view<const std::byte>(wire), view<bfloat16>(out), 1.0f);
    CHECK(same_bytes(in, out));
}

TEST_CASE("what is not finite arrives as it is, what is too large as an infinity, and residuals stay finite") {
    std::vector<float> in(size, 1.0f);
    in[3] = std::numeric_limits<float>::quiet_NaN();
    in[4] = -std::numeric_limits<float>::infinity();
    in[5] = 70000.0f;  // beyond float16
    std::vector<float> residual(size, 0.5f);
    const auto wire = encoded<float16>(in, residual);
    std::vector<float> out(size);
    dense<float16>().decode(host_queue(), all, view<const std::byte>(wire), view<float>(out), 1.0f);
    CHECK(std::isnan(out[3]));
    CHECK(out[4] == -std::numeric_limits<float>::infinity());
    CHECK(out[5] == std::numeric_limits<float>::infinity());
    CHECK(out[6] == 1.5f);
    for (std::size_t i = 3; i < 7; ++i) { CHECK(residual[i] == 0.0f); }
}

TEST_CASE("views that do not fit are refused") {
    const dense<> x;
    std::vector<float> v(size);
    std::vector<std::byte> wire(compress::detail::wire_bytes(x, all));
    const host_queue q;
    const view<float> none;
    CHECK_THROWS_WITH_AS(x.encode(q, all, view<const float>(v).sub(0, 95), none, view<std::byte>(wire), {}),
                         "dense encode: tensor 7 is at elements 32 to 96 of 95", usage_error);
    CHECK_THROWS_WITH_AS(x.encode(q, all, view<const float>(v), none, view<std::byte>(wire).sub(0, 16), {}),
                         "dense encode: 1 wires of 368 bytes do not fit in 16", usage_error);
    CHECK_THROWS_WITH_AS(x.encode(q, all, view<const float>(v), view<float>(v).sub(0, 3), view<std::byte>(wire), {}),
                         "dense encode: residual has 3 elements instead of 100", usage_error);
    CHECK_THROWS_AS(x.decode(q, all, view<const std::byte>(wire).sub(16, 16), view<float>(v), 1.0f), usage_error);
    CHECK_THROWS_WITH_AS(x.encode(q, {}, view<const float>(v), none, view<std::byte>(wire), {}),
                         "dense encode: the wire has 368 elements instead of 0", usage_error);
    CHECK_THROWS_AS(x.decode_add(q, all, view<const std::byte>(wire), 2, view<float>(v)), usage_error);
    for (const segment& s : {segment{0, 4, 0, 0, std::size_t{1} << 33, std::size_t{1} << 31},
                             segment{0, 4, 1, 0, SIZE_MAX, 1}}) {  // as much as 0 elements
        CHECK_THROWS_WITH_AS(
            x.encode(q, {&s, 1}, view<const float>(v), none, view<std::byte>(), {}),
            formatted("dense encode: tensor 0 is {} x {} elements from {} on, of 100", s.rows, s.cols, s.offset)
                .c_str(),
            usage_error);
    }
    // So many that the product with their bytes is 0 again.
    CHECK_THROWS_WITH_AS(x.decode_add(q, all, {}, std::size_t{1} << 60, view<float>(v)),
                         "dense decode_add: 1152921504606846976 wires of 368 bytes do not fit in 0", usage_error);
}

TEST_CASE("on a virtual queue it charges the bytes that it moves") {
    virtual_queue q({1.0, 1e30});  // a byte a second
    using M = phantom_memory;
    const std::vector<segment> one{{0, 8, 0, 0, 64, 1}};
    const view<std::byte, M> wire(nullptr, 256);
    dense<>().encode(q, one, view<const float, M>(nullptr, 64), view<float, M>(nullptr, 64), wire, {});
    CHECK(resolve(q.recording())[0] == 64 * 16);
    dense<>().decode(q, one, view<const std::byte, M>(wire), view<float, M>(nullptr, 64), 1.0f);
    CHECK(resolve(q.recording())[0] == 64 * (16 + 8));
    dense<>().decode_add(q, one, view<const std::byte, M>(nullptr, 512), 2, view<float, M>(nullptr, 64));
    CHECK(resolve(q.recording())[0] == 64 * (16 + 8 + 16));
}
