// Quantization against an oracle written apart, bit by bit in double; its error against theory.
#include <tutti/compress/quantize.hpp>  // under test

#include <array>    // random blocks
#include <cmath>    // floor
#include <cstdint>  // words
#include <string>   // messages
#include <vector>   // arrays

#include <doctest/doctest.h>  // checks

#include "bucketed.hpp"        // calls
#include "support/build.hpp"   // full_speed
#include "support/oracle.hpp"  // same_bytes

using namespace tutti;
using namespace tutti::compress;
using test::decode;
using test::encode;
using test::normals;
using test::whole;

namespace {

// Products, sums and quotients of floats in double, rounded once more to float, are those of float arithmetic.
float f32(double x) { return static_cast<float>(x); }
double f64(float x) { return static_cast<double>(x); }

struct oracle_bucket {
    float unit, base;  // base is not on the wire of qsgd
    std::vector<unsigned> codes;
};

// The 16 random bits of an element.
unsigned half_word(draw_key key, std::uint32_t tensor, std::uint32_t purpose, std::uint64_t element) {
    const auto words = key.stream(tensor, purpose).block(element / 8);
    return (words[element % 8 / 2] >> (element % 2 * 16)) & 0xffffu;
}

unsigned rounded(float f, rounding mode, unsigned half) {
    if (mode == rounding::nearest) { return static_cast<unsigned>(std::nearbyint(f)); }
    const double fixed = std::nearbyint(f64(f) * 32768) * 2;  // to 2^-15
    return static_cast<unsigned>(std::floor((fixed + half) / 65536));
}

// One bucket, from its definition. `kind`: 'r' max-min, 'm' max norm, 'l' 2-norm.
oracle_bucket oracle(char kind, const float* x, std::size_t n, unsigned bits, rounding mode, draw_key key,
                     std::uint32_t tensor, std::uint64_t first) {
    float low = x[0], high = x[0], most = 0;
    for (std::size_t i = 0; i < n; ++i) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
        most = std::max(most, std::fabs(x[i]));
    }
    const unsigned levels = kind == 'r' ? (1u << bits) - 1 : (1u << (bits - 1)) - 1;
    float span = kind == 'r' ? f32(f64(high) - f64(low)) : most;
    if (kind == 'l') {
        double partial[256] = {};
        for (std::size_t i = 0; i < n; ++i) { partial[i % 256] += f64(x[i]) * f64(x[i]); }
        double slot[32];
        for (int s = 0; s < 32; ++s) {
            const double* p = partial + 8 * s;
            slot[s] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
        }
        for (int d = 16; d > 0; d /= 2) {
            for (int s = 0; s < d; ++s) { slot[s] += slot[s + d]; }
        }
        span = f32(std::sqrt(slot[0]));
    }
    oracle_bucket b{std::max(f32(f64(span) / levels), 0x1p-126f), kind == 'r' ? low + 0.0f : 0.0f, {}};
    const float inverse = f32(1 / f64(b.unit));
    const float top = static_cast<float>(kind == 'r' ? levels : 2 * levels);
    for (std::size_t i = 0; i < n; ++i) {
        const float f = kind == 'r' ? f32(f64(f32(f64(x[i]) - f64(b.base))) * f64(inverse))
                                    : f32(f64(f32(f64(x[i]) * f64(inverse))) + levels);
        const unsigned half = half_word(key, tensor, kind == 'r' ? 0x7175616eu : 0x71736764u, first + i);
        b.codes.push_back(rounded(std::min(std::max(f, 0.0f), top), mode, half));
    }
    return b;
}

std::vector<std::byte> oracle_wire(char kind, const std::vector<float>& x, std::size_t bucket, unsigned bits,
                                   rounding mode, draw_key key, std::uint32_t tensor, std::uint64_t first) {
    const std::size_t buckets = (x.size() + bucket - 1) / bucket;
    const std::size_t meta = kind == 'r' ? 8 : 4;
    const std::size_t codes = (buckets * meta + 15) / 16 * 16;
    std::vector<std::byte> wire(codes + ((x.size() + 7) / 8 * bits + 15) / 16 * 16);
    for (std::size_t b = 0; b < buckets; ++b) {
        const std::size_t at = b * bucket, n = std::min(bucket, x.size() - at);
        const auto o = oracle(kind, x.data() + at, n, bits, mode, key, tensor, first + at);
        std::memcpy(wire.data() + b * meta, &o.unit, 4);
        if (kind == 'r') { std::memcpy(wire.data() + b * meta + 4, &o.base, 4); }
        for (std::size_t i = 0; i < n * bits; ++i) {
            const std::size_t bit = at * bits + i;
            if (((o.codes[i / bits] >> (i % bits)) & 1u) != 0) {
                wire[codes + bit / 8] |= static_cast<std::byte>(1u << (bit % 8));
            }
        }
    }
    return wire;
}

template <class X> void against_oracle(char kind, const X& x, unsigned bits) {
    for (const std::size_t n : {1ul, 7ul, 9ul, 255ul, 256ul, 257ul, 511ul, 512ul, 513ul, 1024ul, 3001ul}) {
        CAPTURE(kind);
        CAPTURE(bits);
        CAPTURE(n);
        const segment s{.tensor = 6, .level = static_cast<int>(bits), .first = 3 * x.granularity(), .rows = n};
        auto in = normals<float>(n, 1, 0.02);
        for (std::size_t i = 0; i < n; i += 5) { in[i] = std::floor(in[i] * 128) / 64; }  // some on the grid
        const draw_key key{0x123456789abcull, 77, 5};
        const auto e = encode(x, layout(&s, 1), in, {}, key);
        CHECK(test::same_bytes(e.wire, oracle_wire(kind, in, x.granularity(), bits, x.mode(), key, 6, s.first)));
    }
}

double square(double x) { return x * x; }

}  // namespace

TEST_CASE("the bytes are those of the definition") {
    for (const rounding mode : {rounding::stochastic, rounding::nearest}) {
        // torch_cgx's reduction assumes that 64 threads halve evenly: a bucket of 48 loses elements there.
        for (const std::size_t bucket : {512ul, 1024ul, 48ul, 8ul}) {
            for (unsigned bits = 1; bits <= 8; ++bits) {
                against_oracle('r', quantize(bucket, mode), bits);
                if (bits > 1) { against_oracle('m', qsgd<norm::max>(bucket, mode), bits); }
                if (bits > 1) { against_oracle('l', qsgd<norm::l2>(bucket, mode), bits); }
            }
        }
    }
}

TEST_CASE("stochastic rounding is unbiased, and its error is that of theory") {
    constexpr std::size_t n = 512;
    const int draws = test::full_speed ? 20000 : 2000;
    const auto in = normals<float>(n, 1);
    const auto [least, most] = std::minmax_element(in.begin(), in.end());
    const auto try_scheme = [&](const auto& x, int bits, double unit, double base) {
        CAPTURE(bits);
        std::vector<double> sum(n), squares(n);
        for (int t = 0; t < draws; ++t) {
            const auto out = test::round_trip(x, bits, in, {1, static_cast<std::uint32_t>(t), 0});
            for (std::size_t i = 0; i < n; ++i) {
                const double e = f64(out[i]) - f64(in[i]);
                sum[i] += e;
                squares[i] += e * e;
            }
        }
        double worst = 0, measured = 0, exact_square = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const double share = (f64(in[i]) - base) / unit - std::floor((f64(in[i]) - base) / unit);
            const double variance = square(unit) * share * (1 - share);
            measured += squares[i] / draws;
            exact_square += variance;
            if (share > 1e-3 && share < 1 - 1e-3) {
                worst = std::max(worst, std::fabs(sum[i] / draws) / std::sqrt(variance / draws));
            }
        }
        CHECK(worst < 5);
        CHECK(worst > 1);  // and it is drawn at all
        CHECK(measured / exact_square == doctest::Approx(1).epsilon(test::full_speed ? 0.03 : 0.1));
        CHECK(measured < n * square(unit) / 4);
    };
    double squares = 0;
    for (const float v : in) { squares += f64(v) * f64(v); }
    const double magnitude = std::max(std::fabs(f64(*least)), f64(*most));
    for (const int bits : {2, 4, 8}) {
        try_scheme(quantize(), bits, (f64(*most) - f64(*least)) / ((1 << bits) - 1), f64(*least));
        try_scheme(qsgd<norm::max>(), bits, magnitude / ((1 << (bits - 1)) - 1), 0);
    }
    const int levels = 127;
    try_scheme(qsgd<norm::l2>(), 8, std::sqrt(squares) / levels, 0);
    // QSGD, theorem 3.2: at most min(d / s^2, sqrt(d) / s) times the square of the norm.
    double error = 0;
    const auto out = test::round_trip(qsgd<norm::l2>(), 8, in);
    for (std::size_t i = 0; i < n; ++i) { error += square(f64(out[i]) - f64(in[i])); }
    CHECK(error < std::min(n / square(levels), std::sqrt(n) / levels) * squares);
}

TEST_CASE("no element is further off than a unit, or half of one to the nearest") {
    const auto off = [](const auto& x, int bits, const std::vector<float>& in, double unit, double share, float most) {
        const auto out = test::round_trip(x, bits, in);
        const double ulp = std::nextafter(f64(most), 1e300) * 0x1p-23;  // of the largest number there is
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < in.size(); ++i) {
            wrong += std::fabs(f64(out[i]) - f64(in[i])) > share * unit * (1 + 4 * 0x1p-23) + 4 * ulp;
        }
        return wrong;
    };
    for (const double shift : {0.0, 100.0, -1e4}) {
        for (int bits = 1; bits <= 8; ++bits) {
            CAPTURE(bits);
            CAPTURE(shift);
            auto in = normals<float>(512, 3);
            for (float& v : in) { v += static_cast<float>(shift); }
            const auto [least, most] = std::minmax_element(in.begin(), in.end());
            const float magnitude = std::max(std::fabs(*least), std::fabs(*most));
            const double unit = (f64(*most) - f64(*least)) / ((1 << bits) - 1);
            CHECK(off(quantize(), bits, in, unit, 1, magnitude) == 0);
            CHECK(off(quantize(512, rounding::nearest), bits, in, unit, 0.5, magnitude) == 0);
            const auto out = test::round_trip(quantize(), bits, in);
            CHECK(out[static_cast<std::size_t>(least - in.begin())] == *least);
            CHECK(std::fabs(out[static_cast<std::size_t>(most - in.begin())] - *most) <= 2 * magnitude * 0x1p-23f);
            if (bits > 1) {
                const double symmetric = f64(magnitude) / ((1 << (bits - 1)) - 1);
                CHECK(off(qsgd<norm::max>(), bits, in, symmetric, 1, magnitude) == 0);
                CHECK(off(qsgd<norm::max>(512, rounding::nearest), bits, in, symmetric, 0.5, magnitude) == 0);
            }
        }
    }
}

// A stored unit in float16 underflows below 6e-8 (torch_cgx); rint(max * scale) loses a range that is small against the
// largest number, and a range of 1e-7 altogether (BaguaSys/bagua bagua_kernels.cu).
TEST_CASE("small ranges keep their resolution") {
    for (const float size : {1e-8f, 1e-20f}) {
        std::vector<float> in = normals<float>(512, 1, static_cast<double>(size));
        const auto out = test::round_trip(quantize(512, rounding::nearest), 8, in);
        double error = 0, squares = 0;
        for (std::size_t i = 0; i < in.size(); ++i) {
            error += square(f64(out[i]) - f64(in[i]));
            squares += square(f64(in[i]));
        }
        CHECK(error / squares < 1e-4);
        const std::vector<float16> halves = normals<float16>(512, 1, 1e-6);
        CHECK(f64(test::round_trip(quantize(512, rounding::nearest), 8, halves)[5]) ==
              doctest::Approx(f64(static_cast<float>(halves[5]))).epsilon(0.1));
    }
    std::vector<float> in(512, 1e6f);  // a step of 1/16 at a million
    for (std::size_t i = 0; i < in.size(); i += 2) { in[i] = std::nextafter(1e6f, 2e6f); }
    CHECK(test::round_trip(quantize(), 1, in) == in);
}

TEST_CASE("constants and numbers on the grid are exact, whatever is drawn") {
    for (const float c : {0.0f, 1.0f, -3.7f, 1e-30f, 1e30f}) {
        const std::vector<float> constant(600, c);
        for (int bits = 1; bits <= 8; ++bits) { CHECK(test::round_trip(quantize(), bits, constant) == constant); }
    }
    for (std::uint32_t step = 0; step < 50; ++step) {
        for (int bits = 1; bits <= 8; ++bits) {
            CAPTURE(bits);
            std::vector<float> in(512);
            for (std::size_t i = 0; i < in.size(); ++i) {
                in[i] = -3.0f + 0.25f * static_cast<float>(i % (std::size_t{1} << bits));
            }
            CHECK(test::round_trip(quantize(), bits, in, {1, step, 0}) == in);
            if (bits > 1) {
                const int levels = (1 << (bits - 1)) - 1;
                for (std::size_t i = 0; i < in.size(); ++i) {
                    in[i] = 0.5f * static_cast<float>(static_cast<int>(i) % (2 * levels + 1) - levels);
                }
                CHECK(test::round_trip(qsgd<norm::max>(), bits, in, {1, step, 0}) == in);
            }
        }
    }
}

TEST_CASE("a unit is at least the smallest normal number, so that its inverse is finite") {
    for (const float size : {0.0f, 1e-45f, 1e-39f, 0x1p-126f}) {
        std::vector<float> in(100, 0.0f);
        in[50] = size;
        for (const int bits : {2, 8}) {
            const segment s = whole(in.size(), bits);
            float unit = 0;
            std::memcpy(&unit, encode(quantize(), layout(&s, 1), in).wire.data(), sizeof unit);
            CHECK(unit == 0x1p-126f);
            std::memcpy(&unit, encode(qsgd<norm::max>(), layout(&s, 1), in).wire.data(), sizeof unit);
            CHECK(unit == 0x1p-126f);
        }
    }
}

TEST_CASE("the largest element never rounds beyond the last code") {
    // (max - min) / unit comes out above the last code where unit was rounded down: then chance could go one up.
    int above = 0;
    for (std::uint64_t i = 0; i < 20000; ++i) {
        const auto low = test::random_element<float>(1, i), high = low + std::fabs(test::random_element<float>(2, i));
        const auto meta = quantize().measured({low, high}, 2, 8);
        const auto grid = quantize().coder(meta, 8);
        above += (high - low) * grid.inverse > 255.0f;
        REQUIRE(grid.place(high) <= 255.0f);
        REQUIRE(grid.code(high, 0xffff) == 255);
        const auto centered = qsgd<norm::max>().coder(qsgd<norm::max>().measured({high}, 2, 8), 8);
        if (high > 0) {
            REQUIRE(centered.code(std::fabs(high), 0xffff) == 254);
            REQUIRE(centered.code(-std::fabs(high), 0) == 0);
        }
    }
    CHECK(above > 100);
}

// Where codes have few bits, a device limits none: the ends must come out as they are, with every mantissa.
TEST_CASE("steps of the ends of a grid of few bits need no limit") {
    const auto top = [](const auto& grid, float x, std::uint32_t draw) {
        return compress::detail::topped_by(grid.steps(x), draw << 8 | 0xff) >> 24;
    };
    const qsgd<norm::max> symmetric;
    for (unsigned bits = 1; bits <= compress::detail::unlimited_bits; ++bits) {
        const bool all = test::full_speed && (bits == 4 || bits == compress::detail::unlimited_bits);
        std::size_t wrong = 0;
        for (std::uint32_t mantissa = 0; mantissa < 1u << 23; mantissa += all ? 1 : 61) {
            const auto x = __builtin_bit_cast(float, 0x3f800000u | mantissa);
            const auto grid = quantize().coder(quantize().measured({0.0f, x}, 2, bits), bits);
            wrong += top(grid, x, 0xffff) != grid.last;
            if (bits == 1) { continue; }
            const auto centered = symmetric.coder(symmetric.measured({x}, 2, bits), bits);
            wrong += top(centered, x, 0xffff) != centered.last || top(centered, -x, 0xffff) != 0;
            wrong += top(centered, x, 0) != centered.last || top(centered, -x, 0) != 0;
        }
        CHECK(wrong == 0);
    }
}

// A device takes the codes of two elements from sums with their draws, and limits them to the last code only then.
TEST_CASE("codes of two raised elements are those of each") {
    using namespace compress::detail;
    std::size_t wrong = 0;
    const auto compare = [&](const auto& grid, float x, float y, std::uint32_t draw, std::uint32_t other) {
        const std::uint32_t expected = grid.code(x, draw) | grid.code(y, other) << 16;
        wrong += codes_of(grid.raised(x, draw), grid.raised(y, other), grid.last) != expected;
        if (grid.last < 1u << unlimited_bits) {
            const std::array<std::uint32_t, 4> block{draw | other << 16, 0, other | draw << 16, ~0u};
            for (unsigned j = 0; j < 8; ++j) { wrong += half_above(block, j) >> 8 != half_of(block, j); }
            const std::uint32_t a = topped_by(grid.steps(x), half_above(block, 0)),
                                b = topped_by(grid.steps(y), half_above(block, 1)),
                                c = topped_by(grid.steps(x), half_above(block, 5)),
                                d = topped_by(grid.steps(y), half_above(block, 4));
            wrong += tops_of(a, b) != expected || tops_of(c, d) != expected;
        }
    };
    for (int bits = 1; bits <= 8; ++bits) {
        for (std::uint64_t i = 0; i < 4000; ++i) {
            const auto low = test::random_element<float>(1, i),
                       high = low + std::fabs(test::random_element<float>(2, i));
            const float y = low + (high - low) * static_cast<float>(i % 97) / 96;
            const std::uint32_t draw = i % 2 == 0 ? 0xffff : test::mixed(i) & 0xffff;
            const unsigned width = static_cast<unsigned>(bits);
            compare(quantize().coder(quantize().measured({low, high}, 2, width), width), high, y, draw, 0xffff - draw);
            if (bits == 1) { continue; }
            const qsgd<norm::max> symmetric;
            const float most = std::fmax(std::fabs(low), std::fabs(high));
            compare(symmetric.coder(symmetric.measured({most}, 2, width), width), -most, y, 0xffff - draw, draw);
        }
    }
    CHECK(wrong == 0);
    for (const std::uint32_t last : {1u, 15u, 255u}) {
        using compress::detail::codes_of, compress::detail::raised_by;
        const std::uint32_t beyond = raised_by(static_cast<float>(last) + 0x1p-14f, 0xffff),
                            zero = raised_by(0, 0xffff);
        CHECK(codes_of(beyond, zero, last) == last);
        CHECK(codes_of(zero, beyond, last) == last << 16);
    }
}

// deepspeedai/DeepSpeed's symmetric quantizer maps the maximum to 2^(bits - 1) and clips it: 4 bits lose an eighth of
// the largest positive number.
TEST_CASE("both ends of a symmetric grid are reached") {
    for (int bits = 2; bits <= 8; ++bits) {
        std::vector<float> in(512, 0.0f);
        in[3] = 7.0f;
        in[9] = -7.0f;
        const auto out = test::round_trip(qsgd<norm::max>(512, rounding::nearest), bits, in);
        CHECK(out[3] == doctest::Approx(7.0f).epsilon(1e-6));
        CHECK(out[9] == -out[3]);
        CHECK(out[0] == 0);
    }
}

// horovod's fork for torch_cgx begins the sum of squares with the first element itself: the norm of a bucket that
// begins negative is wrong or NaN (IST-DASLab/horovod cuda_compression_functions.cu).
TEST_CASE("the 2-norm is that of all elements") {
    std::vector<float> in(512, 0.0f);
    in[0] = -3.0f;
    in[511] = 4.0f;
    const segment s = whole(512, 8);
    const auto e = encode(qsgd<norm::l2>(), layout(&s, 1), in);
    float unit = 0;
    std::memcpy(&unit, e.wire.data(), sizeof unit);
    CHECK(unit == 5.0f / 127.0f);
    for (const float size : {1e-36f, 1e30f}) {  // squares leave float
        in[0] = -3 * size;
        in[511] = 4 * size;
        const auto out = test::round_trip(qsgd<norm::l2>(512, rounding::nearest), 8, in);
        CHECK(out[511] == doctest::Approx(4 * size).epsilon(0.01));
    }
}

// torch_cgx copies an incomplete bucket raw where asked to; PyTorch's quantization hook adds a whole bucket where
// nothing is left: the last bucket is a bucket.
TEST_CASE("an incomplete bucket is measured alone") {
    std::vector<float> in(512 + 5, 100.0f);
    for (std::size_t i = 512; i < in.size(); ++i) { in[i] = static_cast<float>(i - 512); }
    const auto out = test::round_trip(quantize(), 8, in);
    for (std::size_t i = 512; i < in.size(); ++i) { CHECK(out[i] == doctest::Approx(in[i]).epsilon(0.02)); }
    CHECK(quantize().wire_bytes(whole(512, 4)) == 16 + 256);
}
