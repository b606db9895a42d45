// Views: what converts to what, sub-views and their limits, overlap of byte ranges.
#include <tutti/core/view.hpp>  // under test

#include <array>        // containers a view is made from
#include <cstddef>      // byte
#include <limits>       // largest size_t
#include <span>         // borrowed range
#include <string>       // contiguous range
#include <type_traits>  // convertibility
#include <vector>       // containers a view is made from

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;

template <class From, class To> constexpr bool converts = std::is_convertible_v<From, To>;

TEST_CASE("a view adds const and never removes it") {
    static_assert(converts<view<float>, view<const float>>);
    static_assert(!converts<view<const float>, view<float>>);
    static_assert(!converts<view<float>, view<double>> && !converts<view<float>, view<const double>>);
    static_assert(!converts<view<int>, view<unsigned>>);
    struct base {};
    struct derived : base {
        int more;
    };
    static_assert(!converts<view<derived>, view<base>>);  // elements have another size
    std::vector<float> v{1, 2, 3};
    const view<float> w = v;
    const view<const float> c = w;
    CHECK(c.data() == v.data());
    CHECK(c.size() == 3);
    w[1] = 7;
    CHECK(c[1] == 7);
}

TEST_CASE("a view is made from what owns its elements elsewhere, not from what dies") {
    using vector = std::vector<float>;
    static_assert(converts<vector&, view<float>> && converts<vector&, view<const float>>);
    static_assert(converts<const vector&, view<const float>> && !converts<const vector&, view<float>>);
    static_assert(!converts<vector, view<float>> && !converts<vector, view<const float>>);
    static_assert(!converts<const vector, view<const float>>);
    static_assert(!converts<std::array<float, 3>, view<const float>> && converts<std::array<float, 3>&, view<float>>);
    static_assert(converts<std::span<float>, view<float>> && converts<std::span<float>, view<const float>>);
    static_assert(!converts<std::vector<bool>&, view<bool>>);  // packed: there are no elements to point to

    std::array<float, 2> a{5, 6};
    const std::string text = "tutti";
    const view from_array = a;
    const view from_text = text;
    static_assert(std::is_same_v<decltype(from_array), const view<float>>);
    static_assert(std::is_same_v<decltype(from_text), const view<const char>>);
    CHECK(from_array.data() == a.data());
    CHECK(from_text.size() == 5);
    float x = 3;
    const view from_pointer(&x, 1);
    static_assert(std::is_same_v<decltype(from_pointer), const view<float>>);
    float sum = 0;
    for (const float f : from_array) { sum += f; }
    CHECK(sum == 11);
}

template <class V>
concept indexable = requires(V v) {
    v[0];
};
template <class V>
concept iterable = requires(V v) {
    v.begin();
    v.end();
};

TEST_CASE("only memory the host can reach is dereferenced or made from containers") {
    static_assert(indexable<view<float>> && iterable<view<float>> && indexable<view<float, pinned_memory>>);
    static_assert(!indexable<view<float, device_memory>> && !iterable<view<float, device_memory>>);
    static_assert(!indexable<view<float, phantom_memory>> && !iterable<view<float, phantom_memory>>);
    static_assert(!converts<std::vector<float>&, view<float, device_memory>>);
    static_assert(!converts<view<float>, view<float, device_memory>>);
    static_assert(!converts<view<float, device_memory>, view<float>>);
    static_assert(converts<view<float, device_memory>, view<const float, device_memory>>);
    static_assert(std::is_trivially_copyable_v<view<float>> && sizeof(view<float>) == 2 * sizeof(void*));
    CHECK(host_memory::name == "host");
    CHECK(pinned_memory::name == "pinned");
    CHECK(device_memory::name == "device");
    CHECK(phantom_memory::name == "phantom");
}

TEST_CASE("sub-views are cut exactly and may not leave the view") {
    std::vector<int> v{0, 1, 2, 3, 4};
    const view<int> w = v;
    CHECK(w.sub(1, 3).data() == &v[1]);
    CHECK(w.sub(1, 3).size() == 3);
    CHECK(w.sub(0, 5).size() == 5);
    CHECK(w.sub(5, 0).empty());
    CHECK_THROWS_WITH_AS(static_cast<void>(w.sub(3, 3)), "view: sub(3, 3) leaves a view of 5 elements", usage_error);
    CHECK_THROWS_AS(static_cast<void>(w.sub(6, 0)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(w.sub(1, std::numeric_limits<std::size_t>::max())), usage_error);  // would wrap

    const view<int, phantom_memory> phantom(nullptr, 5);
    CHECK(phantom.sub(2, 3).data() == nullptr);
    CHECK(phantom.sub(2, 3).size() == 3);
    CHECK_THROWS_AS(static_cast<void>(phantom.sub(2, 4)), usage_error);
}

TEST_CASE("bytes of a view") {
    std::vector<int> v{1, 2};
    const auto bytes = as_bytes(view<int>(v));
    const auto constant = as_bytes(view<const int>(v));
    static_assert(std::is_same_v<decltype(bytes), const view<std::byte>>);
    static_assert(std::is_same_v<decltype(constant), const view<const std::byte>>);
    CHECK(bytes.size() == 8);
    CHECK(static_cast<void*>(bytes.data()) == v.data());
    CHECK(view<int>(v).size_bytes() == 8);
    CHECK(view<int>().empty());
    CHECK(view<int>().data() == nullptr);
}

TEST_CASE("ranges overlap when they share a byte") {
    std::array<char, 16> a{};
    const auto shared = [&](int p, std::size_t p_bytes, int q, std::size_t q_bytes) {
        const bool forward = overlaps(a.data() + p, p_bytes, a.data() + q, q_bytes);
        CHECK(forward == overlaps(a.data() + q, q_bytes, a.data() + p, p_bytes));
        return forward;
    };
    CHECK(shared(0, 4, 3, 4));
    CHECK(!shared(0, 4, 4, 4));  // neighbors
    CHECK(shared(0, 16, 5, 1));
    CHECK(shared(2, 3, 2, 3));
    CHECK(!shared(0, 16, 5, 0));  // an empty range shares nothing
    CHECK(!overlaps(nullptr, 4, nullptr, 4));
    CHECK(!overlaps(nullptr, 4, a.data(), 4));
}

}  // namespace
