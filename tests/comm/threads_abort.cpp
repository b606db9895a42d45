// Aborts at random points: ranks leave collectives by exceptions, and unwinding frees what peers were reading and
// writing a moment ago. AddressSanitizer is the judge of memory; here the errors are judged: one cause, all ranks told.
#include <atomic>     // which ranks ended how
#include <chrono>     // bound of a launch
#include <cstdint>    // random words
#include <stdexcept>  // the cause
#include <string>     // texts
#include <thread>     // aborts from outside
#include <vector>     // buffers

#include <tutti/comm/threads.hpp>  // under test
#include <tutti/core/philox.hpp>   // random points

#include <doctest/doctest.h>  // checks

namespace {

using namespace tutti;
using namespace std::chrono_literals;

constexpr int ranks = 4;
constexpr int aborts = 200;

struct cause : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A sum that gives up after a number of elements, so that the exception leaves from the middle of a data phase, or
// takes a nap there, so that the others' exceptions find this rank in the middle of theirs.
thread_local int additions_until_error = 0;
thread_local int additions_until_nap = 0;
struct sum_that_fails {
    static constexpr op_kind kind = op_kind::sum;
    template <class A> A operator()(A a, A b) const {
        if (--additions_until_error == 0) { throw cause("addition failed"); }
        if (--additions_until_nap == 0) { std::this_thread::sleep_for(500us); }
        return a + b;
    }
};

// One call of a random kind, the same on all ranks, over buffers and tables that live for this call only.
void random_call(comm::threads& c, comm::threads& other, std::uint32_t word) {
    const auto n = static_cast<std::size_t>(c.size());
    const auto me = static_cast<std::size_t>(c.rank());
    // Below and above what is staged.
    const std::size_t part = (word >> 8) % 3 == 0 ? 16 : 4096 + (word >> 8) % 4096;
    std::vector<float> small(part, 1.0f), large(part * n, 2.0f);
    std::vector<std::size_t> table(n, part);
    const view<float> s = small, l = large;
    comm::threads& k = (word & 0x80) != 0 ? other : c;
    switch (word % 9) {
    case 0: return k.all_reduce(l, l, sum_that_fails{});
    case 1: {
        std::vector<float> out(part * n);
        return k.all_reduce(l, view<float>(out), mean{});
    }
    case 2: return k.reduce_scatter(l, s, sum_that_fails{});
    case 3: return k.all_gather_v(s, l, table);
    case 4: return k.broadcast(l, 1);
    case 5: {
        std::vector<float> out(part * n);
        return k.all_to_all_v(l, table, view<float>(out), std::vector<std::size_t>(n, part));
    }
    case 6: {
        const auto next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
        std::vector<float> in(part * n);
        return k.exchange(std::vector{comm::send_to(next, l), comm::receive_from(previous, view<float>(in))});
    }
    case 7: return k.reduce(l, l, sum_that_fails{}, 2);
    default: return k.gather(s, l, 3);
    }
}

// Ends within `calls` calls, how and where is a function of the seed.
void until_it_fails(std::uint64_t seed) {
    const random_stream random{seed, 0, 0};
    const auto culprit = static_cast<int>(random.word(0) % ranks);
    const std::uint32_t way = random.word(1) % 3;
    const std::uint32_t at = random.word(2) % 40;
    std::atomic<int> told = 0;
    std::string want;
    const auto start = std::chrono::steady_clock::now();
    try {
        comm::threads::launch(ranks,
                              [&](comm::threads& c) {
                                  std::thread killer;
                                  struct join {
                                      std::thread& t;
                                      ~join() {
                                          if (t.joinable()) { t.join(); }
                                      }
                                  } const joined{killer};
                                  additions_until_error = 1 << 30;
                                  additions_until_nap = 1 << 30;
                                  auto other = c.duplicate("other");
                                  if (c.rank() == culprit && way == 1) {
                                      killer = std::thread([&c, delay = random.word(3) % 2000] {
                                          std::this_thread::sleep_for(std::chrono::microseconds(delay));
                                          c.abort("killed from outside");
                                      });
                                  }
                                  try {
                                      for (std::uint32_t i = 0;; ++i) {
                                          if (c.rank() == culprit && i == at) {
                                              if (way == 0) { throw cause("no more data"); }
                                              if (way == 2) {
                                                  additions_until_error = static_cast<int>(random.word(4) % 20000) + 1;
                                              }
                                          }
                                          const std::uint64_t own =
                                              1000 + 64 * i + static_cast<std::uint64_t>(c.rank());
                                          if (way == 1 || i >= at) {
                                              additions_until_nap = static_cast<int>(random.word(own) % 20000) + 1;
                                          }
                                          random_call(c, other, random.word(100 + i));
                                      }
                                  } catch (const aborted_error&) {
                                      ++told;
                                      throw;
                                  }
                              },
                              {.name = "dp", .timeout = 100s});
    } catch (const cause& e) { want = e.what(); } catch (const aborted_error& e) {
        want = e.what();
    }
    const auto took = std::chrono::steady_clock::now() - start;
    CAPTURE(seed);
    CAPTURE(way);
    if (way == 0) { CHECK(want == "no more data"); }
    if (way == 1) { CHECK(want.find("killed from outside") != std::string::npos); }
    if (way == 2) { CHECK(want == "addition failed"); }
    CHECK(told == (way == 1 ? ranks : ranks - 1));
    CHECK(took < 100s);
}

TEST_CASE("200 aborts at random points leave no peer in freed memory and no peer waiting") {
    for (std::uint64_t seed = 1; seed <= aborts; ++seed) { until_it_fails(seed); }
}

}  // namespace
