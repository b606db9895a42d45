// memory_account: live and peak bytes, alone and from many threads.
#include <tutti/core/memory.hpp>  // under test

#include <cstddef>  // size_t
#include <thread>   // contention
#include <vector>   // threads

#include <doctest/doctest.h>  // checks

TEST_CASE("the account knows what is live and what was the most") {
    tutti::memory_account a;
    CHECK(a.live() == 0);
    CHECK(a.peak() == 0);
    a.allocated(100);
    a.allocated(50);
    CHECK(a.live() == 150);
    CHECK(a.peak() == 150);
    a.released(100);
    CHECK(a.live() == 50);
    CHECK(a.peak() == 150);
    a.allocated(60);  // 110: below the peak
    CHECK(a.peak() == 150);
    a.reset_peak();
    CHECK(a.peak() == 110);
    a.allocated(1);
    CHECK(a.peak() == 111);
    a.released(111);
    CHECK(a.live() == 0);
    CHECK(a.peak() == 111);
}

TEST_CASE("threads share an account") {
    tutti::memory_account a;
    a.allocated(1000);  // stays: the peak is at least this and all that threads hold at once
    constexpr std::size_t threads = 4;
    std::vector<std::thread> pool;
    for (std::size_t t = 0; t < threads; ++t) {
        pool.emplace_back([&a, t] {
            for (int i = 0; i < 20000; ++i) {
                a.allocated(t + 1);
                a.released(t + 1);
            }
            a.allocated(10);
        });
    }
    for (auto& t : pool) { t.join(); }
    CHECK(a.live() == 1000 + 10 * threads);
    CHECK(a.peak() >= 1000 + 10 * threads);
    CHECK(a.peak() <= 1000 + 10 * threads + 4);  // the largest that one thread held besides
}
