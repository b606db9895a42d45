// Public bug reports on counts that an int does not hold: kamping-site/kamping#113, merthidayetoglu/CommBench#2,
// open-mpi/ompi#9942, pmodels/mpich#2317, NVIDIA/nccl-tests#37, NVIDIA/nccl#184. 2^31 + 1 bytes are moved and summed
// for real, by two ranks that are threads: 2 GiB each. Processes do the same in comm/mpi_large.cpp.
#include <chrono>  // timeout

#include <tutti/core/buffer.hpp>  // memory counted by rank

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;

namespace {

constexpr std::size_t count = (std::size_t{1} << 31) + 1;
// Around the places where a 32-bit number would wrap or become negative, and where slices and pieces meet.
constexpr std::size_t places[] = {0,
                                  1,
                                  4095,
                                  count / 2 - 1,
                                  count / 2,
                                  count / 2 + 1,
                                  (std::size_t{1} << 30) + 7,
                                  (std::size_t{1} << 31) - 1,
                                  std::size_t{1} << 31};

std::int8_t value(std::size_t rank, std::size_t place) { return static_cast<std::int8_t>(rank * 3 + place % 11 + 1); }

// Gigabytes through one core take a while on a busy machine.
constexpr std::chrono::seconds patience{280};

// Only the places are set and looked at: the rest is zero, and stays zero.
void mark(view<std::int8_t> v, std::size_t rank) {
    for (const std::size_t at : places) { v[at] = value(rank, at); }
}

}  // namespace

TEST_CASE("kamping-site/kamping#113: sum of 2^31 + 1 bytes") {
    CHECK_NOTHROW(backend::run(
        2,
        [](auto& c) {
            buffer<std::int8_t> data(c.queue(), count);
            const view<std::int8_t> v = data;
            std::memset(v.data(), 0, count);
            mark(v, me_of(c));
            c.all_reduce(v, v, sum{});
            for (const std::size_t at : places) {
                std::int8_t want = 0;
                for (std::size_t r = 0; r < ranks_of(c); ++r) { want = static_cast<std::int8_t>(want + value(r, at)); }
                expect(v[at] == want, "element {} is {}, not {}", at, int{v[at]}, int{want});
            }
            expect(v[places[2] + 1] == 0 && v[count - 3] == 0, "something was written between the marks");
            // Broadcast over the same memory.
            std::memset(v.data(), 0, count);
            if (c.rank() == c.size() - 1) { mark(v, 5); }
            c.broadcast(v, c.size() - 1);
            for (const std::size_t at : places) {
                expect(v[at] == value(5, at), "broadcast: element {} is {}", at, int{v[at]});
            }
        },
        patience));
}

TEST_CASE("merthidayetoglu/CommBench#2: a message of 2^31 + 1 bytes") {
    CHECK_NOTHROW(backend::run(
        2,
        [](auto& c) {
            buffer<std::int8_t> data(c.queue(), count);
            const view<std::int8_t> v = data;
            std::memset(v.data(), 0, count);
            if (c.rank() == 0) {
                mark(v, 7);
                c.exchange(std::vector{comm::send_to(1, v)});
            }
            if (c.rank() == 1) {
                c.exchange(std::vector{comm::receive_from(0, v)});
                for (const std::size_t at : places) {
                    expect(v[at] == value(7, at), "element {} is {}", at, int{v[at]});
                }
            }
        },
        patience));
}
