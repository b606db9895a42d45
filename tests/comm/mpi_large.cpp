// mpi: more than 2^31 bytes for real. What the limit does is tested with small data in mpi.cpp.
// kamping-site/kamping#113, merthidayetoglu/CommBench#2, open-mpi/ompi#9942
#include <doctest/doctest.h>  // test cases

#include <tutti/comm/mpi.hpp>  // what is tested

#include <array>    // transfers
#include <chrono>   // deadlines
#include <cstdint>  // bytes
#include <vector>   // data

using namespace std::chrono_literals;
using namespace tutti;
using comm::mpi;
using comm::mpi_options;

namespace {

constexpr std::size_t n = (std::size_t{1} << 31) + 1;

mpi_options patient() {
    mpi_options o;
    o.timeout = 300s;
    o.on_failure = comm::failure_policy::end_job;
    return o;
}
// Looks at both ends, both sides of 2^30 and 2^31, and every 4093rd byte.
template <class Expected> bool all_are(const std::vector<std::int8_t>& v, Expected expected) {
    bool good = true;
    for (const std::size_t i : {std::size_t{0}, (n >> 1) - 1, n >> 1, n - 3, n - 2, n - 1}) {
        good = good && v[i] == expected(i);
    }
    for (std::size_t i = 0; i < v.size(); i += 4093) { good = good && v[i] == expected(i); }
    return good;
}
std::int8_t pattern(std::size_t i) { return static_cast<std::int8_t>(i % 101); }

}  // namespace

TEST_CASE("mpi: 2^31 + 1 bytes in one call") {
    mpi world(patient());
    std::vector<std::int8_t> data(n);
    const bool first = world.rank() == 0;

    if (first) {
        for (std::size_t i = 0; i < n; ++i) { data[i] = pattern(i); }
    }
    world.broadcast(view(data), 0);
    CHECK(all_are(data, pattern));

    // One message.
    if (!first) { std::fill(data.begin(), data.end(), std::int8_t{0}); }
    if (first) {
        world.exchange(std::array{comm::send_to(1, view(data))});
    } else {
        world.exchange(std::array{comm::receive_from(0, view(data))});
    }
    CHECK(all_are(data, pattern));

    world.all_reduce(view(data), view(data), tutti::max{});
    CHECK(all_are(data, pattern));

    // In place, the second part longer than the first.
    const std::vector<std::size_t> counts{n / 3, n - n / 3};
    const std::size_t begin = first ? 0 : counts[0];
    const std::size_t mine = counts[static_cast<std::size_t>(world.rank())];
    std::fill(data.begin(), data.end(), std::int8_t{0});
    for (std::size_t i = begin; i < begin + mine; ++i) { data[i] = pattern(i); }
    world.all_gather_v(view(data).sub(begin, mine), view(data), counts);
    CHECK(all_are(data, pattern));
}
