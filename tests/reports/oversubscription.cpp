// Public bug reports on waiting: pure spinning collapses when there are more threads than processors. Progress is
// counted; the only clock is the communicator's deadline, far above what a sane wait needs.
#include <atomic>   // progress
#include <chrono>   // deadline
#include <cstdint>  // sums
#include <thread>   // processors
#include <vector>   // data

#include <tutti/comm/threads.hpp>  // under test

#include <doctest/doctest.h>  // checks
#include <support/build.hpp>  // full_speed

using namespace tutti;
using comm::threads;

TEST_CASE(
    "ggml-org/llama.cpp#29258, ggml-org/llama.cpp#13079, flame/blis#604, charmplusplus/charm#3283, pika-org/pika#685: "
    "more ranks than processors") {
    const int processors = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (const int factor : {2, 4}) {
        const int ranks = std::min(processors * factor, 16);
        const int rounds = test::full_speed ? 300 : 50;
        std::atomic<std::int64_t> calls = 0;
        CAPTURE(ranks);
        CHECK_NOTHROW(threads::launch(ranks,
                                      [&](threads& c) {
                                          for (int i = 0; i < rounds; ++i) {
                                              std::vector<std::int64_t> small{i}, large(3000, c.rank());
                                              c.all_reduce(small, view<std::int64_t>(small), sum{});
                                              c.all_reduce(large, view<std::int64_t>(large), sum{});
                                              c.barrier();
                                              const std::int64_t n = c.size();
                                              if (small[0] != i * n || large[2999] != n * (n - 1) / 2) {
                                                  throw std::runtime_error("sums are wrong");
                                              }
                                              calls += 3;
                                          }
                                      },
                                      {.name = "crowd", .timeout = std::chrono::seconds(50)}));
        CHECK(calls == std::int64_t{3} * rounds * ranks);
    }
}

TEST_CASE(
    "pmodels/argobots#306, Algorithmiq/monoprop#166: a rank that is late for long costs the others nothing but time") {
    // By then the others are past spinning and yielding: asleep.
    threads::launch(4,
                    [](threads& c) {
                        for (int i = 0; i < 5; ++i) {
                            if (c.rank() == i % 4) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
                            c.barrier();
                        }
                    },
                    {.name = "late", .timeout = std::chrono::seconds(50)});
}
