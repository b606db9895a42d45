// Bucket plans: every parameter once, in one piece, in reverse order, as full as the limit allows.
#include <doctest/doctest.h>  // checks

#include <cstdint>  // random words
#include <limits>   // overflow
#include <random>   // random lists
#include <vector>   // sizes

#include <tutti/schedule/bucket.hpp>  // plan_buckets

using namespace tutti;
using schedule::bucket;
using schedule::plan_buckets;

TEST_CASE("a plan by hand") {
    // 4-byte elements, 40 bytes: 10 elements a bucket.
    const std::vector<std::size_t> sizes{4, 25, 3, 3, 4, 6};
    const auto plan = plan_buckets(sizes, 4, 40);
    CHECK(plan.elements == 45);
    CHECK(plan.offsets == std::vector<std::size_t>{0, 4, 29, 32, 35, 39});
    CHECK(plan.buckets == std::vector<bucket>{
                              {4, 2, 35, 10},  // 6 + 4 fill it exactly
                              {2, 2, 29, 6},   // 25 more would not fit
                              {1, 1, 4, 25},   // larger than the limit: by itself
                              {0, 1, 0, 4},    // nothing joins a bucket above the limit
                          });
    CHECK(plan.bucket_of == std::vector<std::size_t>{3, 2, 1, 1, 0, 0});
}

TEST_CASE("no parameters, empty parameters, one parameter") {
    CHECK(plan_buckets({}, 4, 4).buckets.empty());
    const std::vector<std::size_t> empty{0, 0};
    const auto none = plan_buckets(empty, 4, 4);
    CHECK(none.buckets == std::vector<bucket>{{0, 2, 0, 0}});
    CHECK(none.elements == 0);
    const std::vector<std::size_t> mixed{0, 1, 0};
    CHECK(plan_buckets(mixed, 4, 4).buckets == std::vector<bucket>{{0, 3, 0, 1}});
    const std::vector<std::size_t> one{7};
    CHECK(plan_buckets(one, 8, 8).buckets == std::vector<bucket>{{0, 1, 0, 7}});
}

TEST_CASE("what cannot be planned is refused") {
    const std::vector<std::size_t> sizes{1};
    CHECK_THROWS_AS(static_cast<void>(plan_buckets(sizes, 4, 3)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(plan_buckets(sizes, 4, 0)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(plan_buckets(sizes, 0, 8)), usage_error);
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    const std::vector<std::size_t> huge{most / 8, most / 8, 1};
    CHECK_THROWS_AS(static_cast<void>(plan_buckets(huge, 8, 64)), usage_error);
    const std::vector<std::size_t> just{most / 8};
    CHECK_NOTHROW(static_cast<void>(plan_buckets(just, 8, 64)));
}

TEST_CASE("random lists: the properties that launch order and storage rely on") {
    std::mt19937 random(1);
    for (int repeat = 0; repeat < 300; ++repeat) {
        std::vector<std::size_t> sizes(random() % 40);
        for (auto& s : sizes) { s = random() % 5 == 0 ? random() % 3000 : random() % 100; }
        const std::size_t element = std::size_t{2} << (random() % 3);
        const std::size_t bytes = element * (1 + random() % 500);
        const auto plan = plan_buckets(sizes, element, bytes);
        CHECK(plan == plan_buckets(sizes, element, bytes));
        std::size_t next = sizes.size();  // buckets cover the list from its end to its beginning without gaps
        std::size_t end = plan.elements;
        for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
            const bucket& k = plan.buckets[b];
            REQUIRE(k.count > 0);
            CHECK(k.first + k.count == next);
            CHECK(k.offset + k.size == end);
            std::size_t offset = k.offset;
            for (std::size_t i = k.first; i < k.first + k.count; ++i) {
                CHECK(plan.offsets[i] == offset);
                CHECK(plan.bucket_of[i] == b);
                offset += sizes[i];
            }
            CHECK(offset == end);
            CHECK((k.size * element <= bytes || k.count == 1 || k.size == sizes[k.first + k.count - 1]));
            if (b > 0) {  // greedy: the previous bucket had no room for this one's last parameter
                CHECK((plan.buckets[b - 1].size + sizes[next - 1]) * element > bytes);
            }
            next = k.first;
            end = k.offset;
        }
        CHECK(next == 0);
        CHECK(end == 0);
    }
}
