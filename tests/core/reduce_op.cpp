// Reductions over rows: every element type with every operator against the rank-order oracle, by bits.
#include <tutti/core/reduce_op.hpp>  // under test

#include <cmath>    // isnan
#include <cstdint>  // integer types
#include <limits>   // extremes, NaN
#include <vector>   // rows

#include <doctest/doctest.h>   // checks
#include <support/oracle.hpp>  // reference reductions

namespace {

using namespace tutti;
using test::rows;

template <class T> std::vector<const void*> pointers(const rows<T>& in) {
    std::vector<const void*> p;
    for (const auto& row : in) { p.push_back(row.data()); }
    return p;
}

template <class T> rows<T> random_rows(int ranks, std::size_t count, std::uint64_t seed) {
    rows<T> in(static_cast<std::size_t>(ranks));
    for (std::size_t r = 0; r < in.size(); ++r) {
        for (std::size_t i = 0; i < count; ++i) { in[r].push_back(test::random_element<T>(seed + r, i)); }
    }
    return in;
}

// Around the block of the many-row loop for every accumulator width, and around vector widths.
constexpr std::size_t counts[] = {0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2049, 4099};

template <class T> void matches_oracle(op_kind op, reduce_function reduce) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
        for (const std::size_t count : counts) {
            CAPTURE(name_of(dtype_of<T>));
            CAPTURE(name_of(op));
            CAPTURE(ranks);
            CAPTURE(count);
            const rows<T> in = random_rows<T>(ranks, count, count);
            const std::vector<T> want = test::reduced_in_rank_order(op, in);
            const T guard = test::random_element<T>(99, count);

            std::vector<T> out(count + 1, guard);
            reduce(out.data(), pointers(in).data(), ranks, count);
            const bool guarded = std::memcmp(&out[count], &guard, sizeof(T)) == 0;
            out.pop_back();
            CHECK(test::same_bytes(out, want));
            CHECK(guarded);

            for (std::size_t target = 0; target < in.size(); ++target) {
                rows<T> rows_in_place = in;
                reduce(rows_in_place[target].data(), pointers(rows_in_place).data(), ranks, count);
                for (std::size_t r = 0; r < in.size(); ++r) {
                    CHECK(test::same_bytes(rows_in_place[r], r == target ? want : in[r]));
                }
            }
        }
    }
}

template <class T, class Op> T reduce(std::initializer_list<T> values) {
    std::vector<const void*> p;
    for (const T& v : values) { p.push_back(&v); }
    T out{};
    reduce_function_of<T, Op>()(&out, p.data(), static_cast<int>(p.size()), 1);
    return out;
}

}  // namespace

TEST_CASE("floats reduce in rank order, rounded once") {
    test::for_types<float, double, float16, bfloat16>([]<class T>() {
        test::for_operators<T>([]<class Op>(Op) { matches_oracle<T>(Op::kind, reduce_function_of<T, Op>()); });
    });
}

TEST_CASE("integers reduce modulo their width") {
    test::for_types<std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t, std::uint16_t, std::uint32_t,
                    std::uint64_t>([]<class T>() {
        test::for_operators<T>([]<class Op>(Op) { matches_oracle<T>(Op::kind, reduce_function_of<T, Op>()); });
    });
}

TEST_CASE_TEMPLATE("integer overflow wraps", T, std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t,
                   std::uint16_t, std::uint32_t, std::uint64_t) {
    constexpr T most = std::numeric_limits<T>::max();
    constexpr T least = std::numeric_limits<T>::min();
    CHECK(reduce<T, sum>({most, T{1}}) == least);
    CHECK(reduce<T, sum>({most, T{1}, T{1}}) == static_cast<T>(least + 1));
    CHECK(reduce<T, product>({most, most}) == T{1});  // (-1)^2, or (2^(w-1) - 1)^2
    CHECK(reduce<T, product>({most, T{2}, T{1}}) == static_cast<T>(-2));
    CHECK(reduce<T, max>({least, most, T{0}}) == most);
    CHECK(reduce<T, min>({most, least, T{1}}) == least);
}

TEST_CASE_TEMPLATE("a NaN on any rank reaches the result of every operator", T, float, double, float16, bfloat16) {
    const T nan = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    const T one = static_cast<T>(1.0f);
    const auto lost = [&]<class Op>(Op) {
        int n = 0;
        n += !std::isnan(static_cast<float>(reduce<T, Op>({nan})));
        n += !std::isnan(static_cast<float>(reduce<T, Op>({nan, one})));
        n += !std::isnan(static_cast<float>(reduce<T, Op>({one, nan})));
        n += !std::isnan(static_cast<float>(reduce<T, Op>({nan, one, one})));
        n += !std::isnan(static_cast<float>(reduce<T, Op>({one, nan, one})));
        n += !std::isnan(static_cast<float>(reduce<T, Op>({one, one, nan})));
        return n;
    };
    test::for_operators<T>([&](auto op) {
        CAPTURE(name_of(decltype(op)::kind));
        CHECK(lost(op) == 0);
    });
}

TEST_CASE("the order is that of ranks") {
    // ((1 + 2^60) - 2^60) is 0 in float and 1 in any order that adds the large ones first.
    CHECK(reduce<float, sum>({1.0f, 0x1p60f, -0x1p60f}) == 0.0f);
    CHECK(reduce<float, sum>({0x1p60f, -0x1p60f, 1.0f}) == 1.0f);
    CHECK(reduce<float, sum>({0x1p60f, 1.0f, -0x1p60f, 1.0f}) == 1.0f);
    // Of equal zeros the first rank's stays.
    CHECK(std::signbit(reduce<float, max>({-0.0f, 0.0f})));
    CHECK(std::signbit(reduce<float, min>({-0.0f, 0.0f, 0.0f})));
    CHECK(!std::signbit(reduce<float, max>({0.0f, -0.0f})));
}

TEST_CASE("16-bit floats accumulate in float and round once") {
    // Partial sums above 2048 need more than float16's 11 bits: rounding at each step would lose every 1.
    const float16 one(1.0f);
    CHECK(static_cast<float>(reduce<float16, sum>({float16(2048.0f), one, one, one, one})) == 2052.0f);
    // The same for bfloat16's 8 bits.
    CHECK(static_cast<float>(reduce<bfloat16, sum>({bfloat16(256.0f), bfloat16(1.0f), bfloat16(1.0f)})) == 258.0f);
    // A partial sum beyond the largest float16 that comes back.
    CHECK(static_cast<float>(reduce<float16, sum>({float16(60000.0f), float16(60000.0f), float16(-60000.0f)})) ==
          60000.0f);
    CHECK(static_cast<float>(reduce<float16, mean>({float16(65504.0f), float16(65504.0f)})) == 65504.0f);
    CHECK(static_cast<float>(reduce<float16, product>({float16(256.0f), float16(512.0f), float16(0.25f)})) == 32768.0f);
}

TEST_CASE("mean divides by the number of ranks, once, after the sum") {
    CHECK(reduce<double, mean>({1.0, 2.0, 4.0}) == 7.0 / 3.0);
    CHECK(reduce<float, mean>({1.0f, 2.0f}) == 1.5f);
    CHECK(reduce<float, mean>({5.0f}) == 5.0f);
    CHECK(reduce<float, mean>({1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}) == 1.0f);
}

TEST_CASE_TEMPLATE("sums stay within the error bound of the exact sum", T, float, double, float16, bfloat16) {
    for (const int ranks : {2, 3, 8}) {
        const rows<T> in = random_rows<T>(ranks, 4096, 5);
        std::vector<T> out(4096);
        reduce_function_of<T, sum>()(out.data(), pointers(in).data(), ranks, out.size());
        int outside = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            const test::bounded want = test::summed_exactly(op_kind::sum, in, i, false);
            outside +=
                std::fabs(static_cast<long double>(static_cast<accumulator_t<T>>(out[i])) - want.value) > want.error;
        }
        CHECK(outside == 0);
    }
}

TEST_CASE("only what has one meaning can be reduced") {
    static_assert(reducible<float, sum> && reducible<bfloat16, mean> && reducible<std::int8_t, sum>);
    static_assert(!reducible<int, mean> && !reducible<std::uint64_t, mean>);
    static_assert(!reducible<bool, sum> && !reducible<bool, mean> && !reducible<std::byte, sum>);
    static_assert(!reducible<float, int> && !reducible<float*, sum>);
    CHECK(name_of(op_kind::none) == "none");
    CHECK(name_of(sum::kind) == "sum");
    CHECK(name_of(mean::kind) == "mean");
    CHECK(name_of(max::kind) == "max");
    CHECK(name_of(min::kind) == "min");
    CHECK(name_of(product::kind) == "product");
}
