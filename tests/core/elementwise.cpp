// Elementwise operations: values against plain loops, conversions rounded once, aliasing, costs.
#include <tutti/core/elementwise.hpp>  // under test

#include <cstdint>  // integers
#include <vector>   // data

#include <tutti/core/virtual_queue.hpp>  // costs

#include <doctest/doctest.h>   // checks
#include <support/oracle.hpp>  // random elements, comparison by bytes

namespace {

using namespace tutti;
using test::same_bytes;

const host_queue q;

template <class T> std::vector<T> random_vector(std::size_t count, std::uint64_t seed) {
    std::vector<T> v(count);
    for (std::size_t i = 0; i < count; ++i) { v[i] = test::random_element<T>(seed, i); }
    return v;
}

TEST_CASE_TEMPLATE("fill sets exactly its elements", T, float, double, float16, bfloat16, std::int8_t, std::uint64_t) {
    const T value = test::random_element<T>(1, 2);
    for (const std::size_t count : {0u, 1u, 17u}) {
        std::vector<T> v(count + 2, T{});
        fill(q, view<T>(&v[1], count), value);
        std::vector<T> want(count + 2, value);
        want.front() = want.back() = T{};
        CHECK(same_bytes(v, want));
    }
}

TEST_CASE("fill works on any transportable type") {
    struct pair {
        int a, b;
    };
    std::vector<pair> v(3, pair{0, 0});
    fill(q, view<pair>(v), {4, 5});
    CHECK(v[2].a == 4);
    CHECK(v[2].b == 5);
    std::vector<std::byte> bytes(3);
    fill(q, view<std::byte>(bytes), std::byte{7});
    CHECK(bytes[1] == std::byte{7});
}

TEST_CASE_TEMPLATE("copy keeps every bit of its own type", T, float, double, float16, bfloat16, std::int64_t, char) {
    const auto in = random_vector<T>(1001, 3);
    std::vector<T> out(1001);
    copy(q, view<const T>(in), view<T>(out));
    CHECK(same_bytes(in, out));
    copy(q, view<T>(out), view<T>(out));  // in place: nothing to do
    CHECK(same_bytes(in, out));
    copy(q, view<const T>(), view<T>());
    const view<T> whole = out;
    copy(q, whole.sub(0, 500), whole.sub(500, 500));  // neighbors do not overlap
    CHECK(std::memcmp(&out[500], &in[0], 500 * sizeof(T)) == 0);
}

TEST_CASE("copy converts, rounding once") {
    // 1 + 2^-11 + 2^-30: a double just above the middle between two float16; through float it would be the middle.
    const std::vector<double> in{1.0 + 0x1p-11 + 0x1p-30, 1.0 + 0x1p-8 + 0x1p-30, -2.5, 1e300};
    std::vector<float16> half(4);
    std::vector<bfloat16> brain(4);
    std::vector<float> single(4);
    copy(q, view<const double>(in), view<float16>(half));
    copy(q, view<const double>(in), view<bfloat16>(brain));
    copy(q, view<const double>(in), view<float>(single));
    CHECK(half[0].bits == 0x3c01);
    CHECK(brain[1].bits == 0x3f81);
    CHECK(static_cast<float>(half[2]) == -2.5f);
    CHECK(half[3].bits == 0x7c00);
    CHECK(single[3] == std::numeric_limits<float>::infinity());

    std::vector<double> back(4);
    copy(q, view<const float16>(half), view<double>(back));
    CHECK(back[0] == 1.0 + 0x1p-10);
    copy(q, view<float16>(half).sub(0, 3), view<bfloat16>(brain).sub(0, 3));
    CHECK(static_cast<float>(brain[2]) == -2.5f);
}

TEST_CASE("copy converts integers to floats and floats to integers") {
    const std::vector<std::int32_t> whole{0, -3, 2049, 2051, 1 << 30};
    std::vector<float16> half(5);
    std::vector<float> single(5);
    copy(q, view<const std::int32_t>(whole), view<float16>(half));
    copy(q, view<const std::int32_t>(whole), view<float>(single));
    CHECK(static_cast<float>(half[1]) == -3.0f);
    CHECK(static_cast<float>(half[2]) == 2048.0f);  // ties go to even
    CHECK(static_cast<float>(half[3]) == 2052.0f);
    CHECK(half[4].bits == 0x7c00);
    CHECK(single[4] == 0x1p30f);
    // An integer just above the middle of two bfloat16, which float would round to the middle.
    const std::vector<std::int64_t> large{(std::int64_t{1} << 40) + (std::int64_t{1} << 32) + 1};
    std::vector<bfloat16> brain(1);
    copy(q, view<const std::int64_t>(large), view<bfloat16>(brain));
    CHECK(static_cast<float>(brain[0]) == 0x1.02p40f);
    const std::vector<bfloat16> numbers{bfloat16(-7.75f), bfloat16(100.0f)};
    std::vector<std::int8_t> small(2);
    copy(q, view<const bfloat16>(numbers), view<std::int8_t>(small));
    CHECK(small[0] == -7);
    CHECK(small[1] == 100);
}

TEST_CASE_TEMPLATE("scale and add_scaled round as written", T, float, double, float16, bfloat16) {
    using M = master_t<T>;
    const M factor = static_cast<M>(-0.3);
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1000}}) {
        const auto in = random_vector<T>(count, 4);
        const auto start = random_vector<T>(count, 5);
        std::vector<T> scaled(count), in_place = in, added = start, doubled = in;
        std::vector<T> want_scaled(count), want_added(count), want_doubled(count);
        for (std::size_t i = 0; i < count; ++i) {
            // volatile: the product is rounded before anything is added to it
            const volatile M product = factor * static_cast<M>(in[i]);
            want_scaled[i] = static_cast<T>(M{product});
            want_added[i] = static_cast<T>(static_cast<M>(start[i]) + product);
            want_doubled[i] = static_cast<T>(static_cast<M>(in[i]) + product);
        }
        scale(q, in, view<T>(scaled), factor);
        scale(q, in_place, view<T>(in_place), factor);
        add_scaled(q, in, view<T>(added), factor);
        add_scaled(q, doubled, view<T>(doubled), factor);
        CHECK(same_bytes(scaled, want_scaled));
        CHECK(same_bytes(in_place, want_scaled));
        CHECK(same_bytes(added, want_added));
        CHECK(same_bytes(doubled, want_doubled));
    }
}

TEST_CASE("sizes must agree") {
    std::vector<float> two(2), three(3);
    CHECK_THROWS_WITH_AS(copy(q, view<float>(two), view<float>(three)), "copy: sizes differ (in 2, out 3)",
                         usage_error);
    CHECK_THROWS_WITH_AS(scale(q, two, view<float>(three), 1), "scale: sizes differ (in 2, out 3)", usage_error);
    CHECK_THROWS_WITH_AS(add_scaled(q, three, view<float>(two), 1), "add_scaled: sizes differ (in 3, out 2)",
                         usage_error);
}

TEST_CASE("shifted views, and one storage read as two types, are refused before anything is written") {
    std::vector<float> v{1, 2, 3, 4, 5};
    const std::vector<float> before = v;
    const view<float> w = v;
    CHECK_THROWS_WITH_AS(copy(q, w.sub(0, 4), w.sub(1, 4)), "copy: in and out overlap without being the same elements",
                         usage_error);
    CHECK_THROWS_AS(copy(q, w.sub(1, 4), w.sub(0, 4)), usage_error);
    CHECK_THROWS_AS(scale(q, w.sub(0, 4), w.sub(1, 4), 2), usage_error);
    CHECK_THROWS_AS(add_scaled(q, w.sub(1, 4), w.sub(0, 4), 2), usage_error);
    CHECK_THROWS_AS(copy(q, w, view<std::int32_t>(reinterpret_cast<std::int32_t*>(v.data()), 5)), usage_error);
    CHECK(v == before);
}

TEST_CASE("costs count each stream once") {
    const virtual_queue v({1, 1e-3});  // flops are so dear that they decide where there are any
    using phantom = view<float, phantom_memory>;
    const phantom x(nullptr, 10);
    const view<double, phantom_memory> y(nullptr, 10);
    auto next = [&, last = 0.0]() mutable {
        const double now = resolve(v.recording())[0];
        return now - std::exchange(last, now);
    };
    fill(v, x, 0);
    CHECK(next() == 40);
    copy(v, x, y);
    CHECK(next() == 120);
    scale(v, x, x, 2);
    CHECK(next() == 10e3);
    add_scaled(v, x, x, 2);
    CHECK(next() == 20e3);
    CHECK(scale_operation<float, phantom_memory>{x, x, 2}.cost().bytes == 80);
    CHECK(add_scaled_operation<float, phantom_memory>{x, x, 2}.cost().bytes == 120);
}

}  // namespace
