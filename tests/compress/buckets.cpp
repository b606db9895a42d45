// What all compressors of buckets promise: sizes, zeros between, cuts that change nothing, residuals, what is not
// finite, errors before anything is written.
#include <tutti/compress/buckets.hpp>  // under test

#include <array>    // segments
#include <cfloat>   // FLT_MAX
#include <cmath>    // isnan
#include <cstdint>  // hashes
#include <limits>   // infinity
#include <map>      // hashes
#include <string>   // messages
#include <vector>   // arrays

#include <doctest/doctest.h>             // checks
#include <tutti/compress/dense_or.hpp>   // mixed layouts
#include <tutti/core/virtual_queue.hpp>  // costs

#include "bucketed.hpp"        // schemes
#include "support/oracle.hpp"  // same_bytes

using namespace tutti;
using namespace tutti::compress;
using test::decode;
using test::encode;
using test::for_bucketed;
using test::normals;
using test::whole;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
const std::vector<std::size_t> sizes{0, 1, 7, 8, 9, 47, 48, 49, 511, 512, 513, 1000, 2051};

template <class Error = usage_error, class Call> std::string message_of(Call call) {
    try {
        call();
    } catch (const Error& e) { return e.what(); }
    return "nothing was thrown";
}

// x as the schemes take it.
template <class T> std::vector<float> floats(const std::vector<T>& in, const std::vector<float>& residual) {
    using real = master_t<T>;
    std::vector<float> x(in.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        const real r = residual.empty() ? real(0) : static_cast<real>(residual[i]);
        x[i] = static_cast<float>(static_cast<real>(in[i]) + r);
    }
    return x;
}

}  // namespace

static_assert(compressor<quantize, host_queue, float> && compressor<quantize, host_queue, double>);
static_assert(compressor<qsgd<norm::l2>, host_queue, float16> && compressor<sign, host_queue, bfloat16>);
static_assert(compressor<ternary, virtual_queue> && compressor<natural, virtual_queue>);
static_assert(compressor<float8<float8_format::e5m2>, virtual_queue, bfloat16>);

TEST_CASE_TEMPLATE("whole life of a wire", T, float, double, float16, bfloat16) {
    for (const std::size_t bucket : {512ul, 48ul, 8ul, 1024ul}) {
        for_bucketed(
            [&](const std::string& name, const auto& x, int level) {
                CAPTURE(name);
                for (const std::size_t n : sizes) {
                    CAPTURE(n);
                    const segment s = whole(n, level);
                    const layout all(&s, 1);
                    const std::vector<T> in = normals<T>(n, 1, 0.02);
                    const std::vector<float> before = normals<float>(n, 2, 0.01);
                    const auto e = encode(x, all, in, before);
                    const auto out = decode(x, all, e.wire, n);
                    // Decoding loses nothing that the residual does not keep.
                    std::size_t wrong = 0;
                    using real = master_t<T>;
                    for (std::size_t i = 0; i < n; ++i) {
                        const real sum = static_cast<real>(in[i]) + static_cast<real>(before[i]);
                        wrong += static_cast<float>(sum - static_cast<real>(out[i])) != e.residual[i];
                    }
                    CHECK(wrong == 0);
                    // The same sent as floats without a residual gives the same wire; and again the same.
                    if constexpr (std::same_as<T, float>) {
                        CHECK(test::same_bytes(encode(x, all, floats(in, before)).wire, e.wire));
                    }
                    CHECK(test::same_bytes(encode(x, all, in, before).wire, e.wire));
                }
            },
            bucket);
    }
}

TEST_CASE("decode scales and rounds once; decode_add adds in the order of the wires") {
    constexpr std::size_t n = 1500;
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        const segment s = whole(n, level);
        const layout all(&s, 1);
        std::vector<std::byte> wires;
        std::vector<std::vector<float>> decoded;
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
            const auto e = encode(x, all, normals<float>(n, rank), {}, {1, 2, rank});
            wires.insert(wires.end(), e.wire.begin(), e.wire.end());
            decoded.push_back(decode(x, all, e.wire, n));
        }
        const std::vector<std::byte> first(wires.begin(),
                                           wires.begin() + static_cast<std::ptrdiff_t>(wires.size() / 3));
        const auto scaled = decode(x, all, first, n, 0.3f);
        const auto halves = decode<bfloat16>(x, all, first, n, 0.3f);
        const auto doubles = decode<double>(x, all, first, n, 0.3f);
        const std::vector<float> start = normals<float>(n, 7);
        std::vector<float> sum = start;
        x.decode_add(host_queue{}, all, view<const std::byte>(wires), 3, view<float>(sum));
        std::vector<float> none = start;
        x.decode_add(host_queue{}, all, view<const std::byte>(), 0, view<float>(none));
        CHECK(none == start);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
            wrong += scaled[i] != 0.3f * decoded[0][i];
            wrong += halves[i].bits != bfloat16(0.3f * decoded[0][i]).bits;
            wrong += doubles[i] != static_cast<double>(0.3f) * static_cast<double>(decoded[0][i]);
            wrong += sum[i] != ((start[i] + decoded[0][i]) + decoded[1][i]) + decoded[2][i];
        }
        CHECK(wrong == 0);
    });
}

// torch_cgx restarts buckets at every chunk boundary, so that results depend on the number of ranks:
// IST-DASLab/torch_cgx src/common/compression.
TEST_CASE("neither cuts of a tensor nor its neighbors change what is sent") {
    constexpr std::size_t n = 5 * 512 + 77;
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        const auto in = normals<float>(n, 1);
        const auto before = normals<float>(n, 2);
        const segment one = whole(n, level);
        const auto e = encode(x, layout(&one, 1), in, before);
        const auto expected = decode(x, layout(&one, 1), e.wire, n);
        // The pieces in another order in memory, at odd places, with another tensor between them.
        const std::size_t cut = 2 * 512, gap = 3, other = 100;
        std::vector<segment> parts{
            {.tensor = 3, .level = level, .offset = gap, .first = cut, .rows = n - cut},
            {.tensor = 9, .level = level, .offset = gap + n - cut + 1, .first = 0, .rows = 10, .cols = 10},
            {.tensor = 3, .level = level, .offset = gap + n - cut + 1 + other, .first = 0, .rows = cut},
            {.tensor = 5, .level = level, .offset = 0, .first = 0, .rows = 0}};
        std::vector<float> moved(n + gap + 1 + other, 5.0f), rest(moved.size(), 6.0f);
        const auto place = [&](std::size_t i) { return i < cut ? parts[2].offset + i : parts[0].offset + i - cut; };
        for (std::size_t i = 0; i < n; ++i) {
            moved[place(i)] = in[i];
            rest[place(i)] = before[i];
        }
        const auto pieces = encode(x, parts, moved, rest);
        const auto out = decode(x, parts, pieces.wire, moved.size());
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < n; ++i) {
            wrong += out[place(i)] != expected[i];
            wrong += pieces.residual[place(i)] != e.residual[i];
        }
        CHECK(wrong == 0);
        // What lies between the segments is not touched.
        for (const std::size_t i : {std::size_t{0}, gap - 1, gap + n - cut}) {
            CHECK(out[i] == -77.0f);
            CHECK(pieces.residual[i] == 6.0f);
        }
    });
}

TEST_CASE("wires have their stated size, and zeros where nothing is") {
    CHECK(quantize().wire_bytes(whole(0, 4)) == 0);
    CHECK(quantize().wire_bytes(whole(1, 4)) == 16 + 16);
    CHECK(quantize().wire_bytes(whole(512 * 2, 4)) == 16 + 512);
    CHECK(quantize().wire_bytes(whole(512 * 2 + 1, 3)) == 32 + 400);
    CHECK(qsgd<norm::max>().wire_bytes(whole(512 * 4, 8)) == 16 + 2048);
    CHECK(sign().wire_bytes(whole(1024 * 8, 1)) == 32 + 1024);
    CHECK(ternary().wire_bytes(whole(9, 2)) == 16 + 16);
    CHECK(natural().wire_bytes(whole(17, 8)) == 16 + 32);
    CHECK(float8<>().wire_bytes(whole(32 * 17, 8)) == 32 + 544);
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        for (const std::size_t n : sizes) {
            CAPTURE(n);
            const segment s = whole(n, level);
            const auto wire = encode(x, layout(&s, 1), std::vector<float>(n, 3.0f)).wire;
            CHECK(wire.size() % 16 == 0);
            const unsigned bits = x.bits(s);
            const compress::detail::wire_shape shape = compress::detail::shape_of(x, s);
            CHECK(shape.code_bytes == (n + 7) / 8 * bits);
            std::size_t wrong = 0;
            for (std::size_t i = shape.meta_bytes; i < shape.codes; ++i) { wrong += wire[i] != std::byte{0}; }
            for (std::size_t bit = n * bits; bit < 8 * (shape.bytes - shape.codes); ++bit) {
                wrong += ((std::to_integer<unsigned>(wire[shape.codes + bit / 8]) >> (bit % 8)) & 1u) != 0;
            }
            CHECK(wrong == 0);
        }
    });
}

// flashinfer-ai/flashinfer#2440, huggingface/kernels-community#681, THUDM/slime#2256: NaN from zeros and from 1e-36.
TEST_CASE("zeros, tiny, subnormal and huge numbers stay finite and near") {
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        const bool single = level == 1;  // between min and max nothing
        for (const float size : {0.0f, 1e-45f, 1e-40f, 1e-38f, 1e-36f, 1e-30f, 1.0f, 1e30f, 1e34f}) {
            CAPTURE(size);
            std::vector<float> in(700);
            for (std::size_t i = 0; i < in.size(); ++i) {
                in[i] = size * (i % 3 == 0 ? -1.0f : static_cast<float>(i % 2));
            }
            std::vector<float> residual(in.size());
            const segment s = whole(in.size(), level);
            const auto e = encode(x, layout(&s, 1), in, residual);
            const auto out = decode(x, layout(&s, 1), e.wire, in.size());
            const float bound = (single || name.find("l2") != std::string::npos ? 32 : 2) * size + 0x1.1p-126f;
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < in.size(); ++i) {
                wrong += !(std::fabs(out[i] - in[i]) <= bound);
                wrong += size == 0 && !(out[i] == 0 && e.residual[i] == 0);
                wrong += !std::isfinite(e.residual[i]);
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("minus zero is zero on the wire") {
    const segment s = whole(64, 4);
    const layout all(&s, 1);
    const auto plus = encode(quantize(), all, std::vector<float>(64, 0.0f)).wire;
    CHECK(test::same_bytes(encode(quantize(), all, std::vector<float>(64, -0.0f)).wire, plus));
}

TEST_CASE("what is not finite spoils its bucket, not others, and not the residual") {
    constexpr std::size_t n = 4 * 512;
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        for (const float bad : {not_a_number, -not_a_number, infinity, -infinity, FLT_MAX, -FLT_MAX, 0x1p126f}) {
            CAPTURE(bad);
            for (const std::size_t at : {512ul, 700ul, 1023ul}) {
                auto in = normals<float>(n, 1);
                in[at] = bad;
                const auto before = normals<float>(n, 2);
                const segment s = whole(n, level);
                const auto e = encode(x, layout(&s, 1), in, before);
                const auto out = decode(x, layout(&s, 1), e.wire, n);
                std::vector<float> sum(n, 1.0f);
                x.decode_add(host_queue{}, layout(&s, 1), view<const std::byte>(e.wire), 1, view<float>(sum));
                std::size_t wrong = 0;
                for (std::size_t i = 0; i < n; ++i) {
                    const bool spoiled = i / 512 == 1;
                    wrong += std::isnan(out[i]) != spoiled || std::isnan(sum[i]) != spoiled;
                    wrong += !std::isfinite(e.residual[i]) || (spoiled && e.residual[i] != before[i]);
                }
                CHECK(wrong == 0);
            }
        }
        // A residual that somebody spoiled is dropped.
        std::vector<float> before(n, 0.25f);
        before[5] = not_a_number;
        before[6] = -infinity;
        const segment s = whole(n, level);
        const auto e = encode(x, layout(&s, 1), normals<float>(n, 1), before);
        CHECK(std::isnan(decode(x, layout(&s, 1), e.wire, n)[0]));
        CHECK(e.residual[5] == 0);
        CHECK(e.residual[6] == 0);
        CHECK(e.residual[7] == 0.25f);
    });
}

TEST_CASE("the largest magnitudes below 2^126 are coded") {
    const float most = std::nextafter(0x1p126f, 0.0f);
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        CAPTURE(name);
        std::vector<float> in(40, most);
        for (std::size_t i = 0; i < in.size(); i += 2) { in[i] = -most; }
        if (name.find("l2") != std::string::npos || name == "sign") { in.assign(1, most); }  // sums would overflow
        std::vector<float> before(in.size());
        const segment s = whole(in.size(), level);
        const auto e = encode(x, layout(&s, 1), in, before);
        for (const float v : decode(x, layout(&s, 1), e.wire, in.size())) {
            CHECK(std::fabs(std::fabs(v) / most - 1.0f) < 0.07f);
        }
        for (const float v : e.residual) { CHECK(std::isfinite(v)); }
    });
}

TEST_CASE("a double that no float holds counts as infinite; others are rounded to one, and the residual keeps that") {
    const segment s = whole(8, 8);
    std::vector<double> in(8, 1e60);
    CHECK(std::isnan(decode(quantize(), layout(&s, 1), encode(quantize(), layout(&s, 1), in).wire, 8)[0]));
    in.assign(8, 1.0 + 0x1p-30);
    const auto e = encode(quantize(), layout(&s, 1), in, std::vector<float>(8));
    CHECK(decode(quantize(), layout(&s, 1), e.wire, 8)[0] == 1.0f);
    CHECK(e.residual[0] == 0x1p-30f);
}

TEST_CASE("draws depend on seed, step, rank, tensor and element") {
    constexpr std::size_t n = 4096;
    const auto in = normals<float>(n, 1);
    const auto wire_of = [&](draw_key key, std::uint32_t tensor) {
        const segment s = whole(n, 2, tensor);
        return encode(quantize(), layout(&s, 1), in, {}, key).wire;
    };
    const auto base = wire_of({1, 2, 3}, 4);
    CHECK(test::same_bytes(base, wire_of({1, 2, 3}, 4)));
    CHECK_FALSE(test::same_bytes(base, wire_of({2, 2, 3}, 4)));
    CHECK_FALSE(test::same_bytes(base, wire_of({1, 3, 3}, 4)));
    CHECK_FALSE(test::same_bytes(base, wire_of({1, 2, 4}, 4)));
    CHECK_FALSE(test::same_bytes(base, wire_of({1, 2, 3}, 5)));
}

// torch_cgx seeds its generators with the time and the thread's index, so that all ranks of one second draw the same
// numbers, and errors that should cancel add up; bytedance/byteps#299 shares one seed.
TEST_CASE("ranks draw independent numbers: errors are not correlated") {
    constexpr std::size_t n = 1 << 16;
    const auto in = normals<float>(n, 1);
    std::vector<std::vector<double>> errors;
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
        const auto out = test::round_trip(quantize(), 4, in, {1, 2, rank});
        std::vector<double> e(n);
        for (std::size_t i = 0; i < n; ++i) { e[i] = static_cast<double>(out[i]) - static_cast<double>(in[i]); }
        errors.push_back(e);
    }
    for (std::size_t a = 0; a < 4; ++a) {
        for (std::size_t b = 0; b < a; ++b) {
            double ab = 0, aa = 0, bb = 0;
            for (std::size_t i = 0; i < n; ++i) {
                ab += errors[a][i] * errors[b][i];
                aa += errors[a][i] * errors[a][i];
                bb += errors[b][i] * errors[b][i];
            }
            CHECK(std::fabs(ab / std::sqrt(aa * bb)) < 5 / std::sqrt(static_cast<double>(n)));
        }
    }
}

TEST_CASE("costs are the bytes that move, and a virtual queue charges them") {
    const segment parts[] = {whole(1 << 20, 4), whole(100, 4)};
    const quantize x;
    const std::size_t wire = compress::detail::wire_bytes(x, parts);
    const std::size_t n = (1 << 20) + 100;
    using P = phantom_memory;
    using encode_op = encode_buckets<quantize, bfloat16, P>;
    const view<std::byte, P> w(nullptr, wire);
    const view<const bfloat16, P> in(nullptr, n);
    CHECK(encode_op{x, parts, in, {}, w, {}}.cost().bytes == 2.0 * n + static_cast<double>(wire));
    CHECK(encode_op{x, parts, in, view<float, P>(nullptr, n), w, {}}.cost().bytes ==
          10.0 * n + static_cast<double>(wire));
    CHECK(decode_buckets<quantize, bfloat16, P>{x, parts, w, view<bfloat16, P>(nullptr, n), 1}.cost().bytes ==
          2.0 * n + static_cast<double>(wire));
    const view<const std::byte, P> three(nullptr, 3 * wire);
    CHECK(add_buckets<quantize, P>{x, parts, three, 3, view<float, P>(nullptr, n)}.cost().bytes ==
          8.0 * n + 3.0 * static_cast<double>(wire));
    const virtual_queue q;
    x.encode(q, parts, in, {}, w, {});
    x.decode(q, parts, view<const std::byte, P>(w), view<bfloat16, P>(nullptr, n));
    x.decode_add(q, parts, three, 3, view<float, P>(nullptr, n));
    const auto& steps = q.recording().streams.at(0);
    REQUIRE(steps.size() == 3);
    CHECK(q.recording().name_of(steps[0]) == "quantize");
    CHECK(q.recording().name_of(steps[2]) == "dequantize_add");
    CHECK(steps[0].seconds > 0);
}

// bitsandbytes-foundation/bitsandbytes#1071 (a bad block size divides by zero), #565 (blocks from 1024 on are wrong).
TEST_CASE("buckets that there are not are refused at once") {
    for (const std::size_t bucket : {0ul, 1ul, 7ul, 12ul, 100ul, 1032ul, 4096ul}) {
        CHECK(message_of([&] { static_cast<void>(quantize(bucket)); }) ==
              "quantize: a bucket of " + std::to_string(bucket) +
                  " elements; it must be a multiple of 8, at most 1024");
    }
    CHECK_NOTHROW(quantize(1024));
    CHECK_NOTHROW(sign(8));
    CHECK(quantize(48).granularity() == 48);
}

TEST_CASE("levels that a scheme does not have are refused") {
    CHECK(message_of([] { static_cast<void>(quantize().wire_bytes(whole(5, 0))); }) ==
          "quantize: tensor 3 has level 0; bits are 1 to 8");
    CHECK_THROWS_AS(static_cast<void>(quantize().wire_bytes(whole(5, 9))), usage_error);
    CHECK_THROWS_AS(static_cast<void>(quantize().wire_bytes(whole(5, -1))), usage_error);
    CHECK_THROWS_AS(static_cast<void>(qsgd<norm::max>().wire_bytes(whole(5, 1))), usage_error);
    CHECK_THROWS_AS(static_cast<void>(sign().wire_bytes(whole(5, 2))), usage_error);
    CHECK(message_of([] { static_cast<void>(ternary().wire_bytes(whole(5, 8))); }) ==
          "ternary: tensor 3 has level 8; bits are 2, or 0 for the same");
    CHECK_THROWS_AS(static_cast<void>(natural().wire_bytes(whole(5, 7))), usage_error);
    CHECK_THROWS_AS(static_cast<void>(float8<>().wire_bytes(whole(5, 4))), usage_error);
}

TEST_CASE("sizes that do not fit are refused before anything is written") {
    const quantize x;
    const host_queue q;
    alignas(16) std::byte storage[256] = {};
    const view<std::byte> all_bytes(storage, sizeof storage);
    const std::vector<float> in(40, 1.0f);
    std::vector<float> out(40, 2.0f), short_residual(39);
    const segment good = whole(40, 4);
    const layout all(&good, 1);
    const std::size_t bytes = x.wire_bytes(good);
    const auto wire = all_bytes.sub(0, bytes);
    const auto encoding = [&](layout l, view<const float> from, view<float> residual, view<std::byte> to) {
        return message_of([&] { x.encode(q, l, from, residual, to, {}); });
    };
    CHECK(encoding(all, in, {}, all_bytes.sub(0, 32)) == "quantize: 1 wires of 48 bytes do not fit in 32");
    CHECK(encoding(all, in, {}, all_bytes.sub(8, bytes)) ==
          "quantize: the wire does not begin at a multiple of 16 bytes");
    CHECK(encoding(all, in, short_residual, wire) == "quantize: residual has 39 elements instead of 40");
    CHECK(encoding(all, view<const float>(in).sub(0, 39), {}, wire) ==
          "quantize: tensor 3 is at elements 0 to 40 of 39");
    segment odd = good;
    odd.first = 8;
    CHECK(encoding(layout(&odd, 1), in, {}, wire) ==
          "quantize: a segment begins at element 8 of tensor 3, which is not a multiple of the bucket, 512");
    const segment bad[] = {good, whole(40, 9)};
    CHECK(encoding(bad, in, {}, wire) == "quantize: tensor 3 has level 9; bits are 1 to 8");
    const auto unsent = view<const std::byte>(wire);
    CHECK_THROWS_AS(x.decode(q, all, unsent.sub(0, 32), view<float>(out)), usage_error);
    CHECK_THROWS_AS(x.decode(q, all, unsent, view<float>(out).sub(0, 39)), usage_error);
    CHECK_THROWS_AS(x.decode_add(q, all, unsent, 2, view<float>(out)), usage_error);
    CHECK(message_of([&] { x.decode_add(q, all, unsent, 2, view<float>(out)); }) ==
          "dequantize_add: 2 wires of 48 bytes do not fit in 48");
    // So many that the product with their bytes is 0 again.
    const std::size_t wrapping = std::size_t{1} << 60;
    const std::string refusal = ": 1152921504606846976 wires of 48 bytes do not fit in 0";
    CHECK(message_of([&] { x.decode_add(q, all, {}, wrapping, view<float>(out)); }) == "dequantize_add" + refusal);
    CHECK(message_of([&] { dense_or(x).decode_add(q, all, {}, wrapping, view<float>(out)); }) ==
          "decode_add" + refusal);
    for (const std::byte b : storage) { CHECK(b == std::byte{0}); }
    for (const float v : out) { CHECK(v == 2.0f); }
}

// A change of these numbers is a change of the wire: processes of both versions no longer understand each other.
// Also run with -march=native: the compiler then could fuse products into sums.
TEST_CASE("wires are what they were") {
    std::map<std::string, std::uint64_t> hashes;  // of all widths together
    for_bucketed([&](const std::string& name, const auto& x, int level) {
        const std::size_t n = 3 * 512 + 91;
        const segment s = whole(n, level);
        const auto e = encode(x, layout(&s, 1), normals<float>(n, 1), normals<float>(n, 2, 0.1));
        const auto out = decode(x, layout(&s, 1), e.wire, n, 0.7f);
        const bool numbered = name.find("quantize") == 0 || name.find("qsgd") == 0;
        std::uint64_t& h = hashes[numbered ? std::string(name).erase(name.find(',') - 2, 2) : name];
        for (const std::byte b : e.wire) { h = test::mixed(h ^ std::to_integer<std::uint64_t>(b)); }
        for (const float v : e.residual) { h = test::mixed(h ^ __builtin_bit_cast(std::uint32_t, v)); }
        for (const float v : out) { h = test::mixed(h ^ __builtin_bit_cast(std::uint32_t, v)); }
    });
    const std::map<std::string, std::uint64_t> expected{
        {"float8 e4m3, nearest", 0x890a2b12277e5f20u},
        {"float8 e4m3, stochastic", 0x9c70d11823255f02u},
        {"float8 e5m2, nearest", 0xbfda823eecc06238u},
        {"float8 e5m2, stochastic", 0x41094d28e70eecb1u},
        {"natural, nearest", 0x2a06f809418cc075u},
        {"natural, stochastic", 0x97cd938f8c59e3e1u},
        {"qsgd l2, nearest", 0x056a2689c3bd53d2u},
        {"qsgd l2, stochastic", 0x49835159382aded9u},
        {"qsgd max, nearest", 0xf26e1dfa8ebea4d0u},
        {"qsgd max, stochastic", 0x70a3ccbe024422ffu},
        {"quantize, nearest", 0xca5e5b8ff3ecbc59u},
        {"quantize, stochastic", 0xc6ab46d17b6b6ccbu},
        {"sign", 0xcc9725fc93f0bdc2u},
        {"ternary, nearest", 0xd155b76c2966585du},
        {"ternary, stochastic", 0x33bfebadd35d20c2u},
    };
    CHECK(hashes.size() == expected.size());
    for (const auto& entry : hashes) {
        CAPTURE(entry.first);
        CHECK(entry.second == (expected.contains(entry.first) ? expected.at(entry.first) : 0));
    }
}
