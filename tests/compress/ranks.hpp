// Where cases of compressed collectives run: one rank, ranks as threads, lanes of such ranks; and what they share.
// Needs comm/self, comm/threads, schedule/lane. A case is a body(communicator&) called on every rank.
#pragma once

#include <cmath>        // layouts
#include <cstddef>      // size_t
#include <cstdint>      // seeds
#include <cstring>      // memcmp
#include <string>       // texts
#include <type_traits>  // invoke results
#include <vector>       // data

#include <doctest/doctest.h>  // checks
#include <fmt/format.h>       // texts

#include <tutti/comm/self.hpp>            // one rank
#include <tutti/comm/threads.hpp>         // several
#include <tutti/compress/compressor.hpp>  // segment
#include <tutti/schedule/lane.hpp>        // asynchronous ones

#include <support/build.hpp>    // full_speed
#include <support/failure.hpp>  // failure, expect
#include <support/oracle.hpp>   // random_element, same_bytes

namespace tutti::test {

struct on_self {
    using communicator = comm::self<>;
    static std::vector<int> sizes() { return {1}; }
    template <class Body> static void run(int, Body body) {
        communicator c;
        body(c);
    }
};
struct on_threads {
    using communicator = comm::threads;
    static std::vector<int> sizes() { return {1, 2, 3, 4, 8}; }
    template <class Body> static void run(int ranks, Body body) { communicator::launch(ranks, body); }
};
/// The body is work of a lane, on the lane's communicator.
struct on_lane {
    using communicator = comm::threads;
    static std::vector<int> sizes() { return {1, 3, 4}; }
    template <class Body> static void run(int ranks, Body body) {
        communicator::launch(ranks, [&](communicator& world) {
            schedule::lane<communicator> own(world.duplicate("lane"));
            host_queue q = world.queue();
            const auto done = own.submit(
                "case", [&body](communicator& c) { body(c); }, q);
            done.wait(q);
        });
    }
};

template <class Place, class Body> void for_ranks(Body body) {
    for (const int n : Place::sizes()) {
        CAPTURE(n);
        CHECK_NOTHROW(Place::run(n, body));
    }
}

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// Segments one behind the other, tensor by tensor, from `offset` on; each vector, or a matrix where rows divide.
inline std::vector<compress::segment> layout_of(const std::vector<std::size_t>& sizes, int level,
                                                std::size_t offset = 0) {
    std::vector<compress::segment> all;
    std::uint32_t tensor = 0;
    for (const std::size_t n : sizes) {
        const std::size_t cols = n % 5 == 0 && n > 0 ? 5 : 1;
        all.push_back({tensor++, level, offset, 0, n / cols, cols});
        offset += n;
    }
    return all;
}
inline std::size_t end_of(const std::vector<compress::segment>& all) {
    std::size_t end = 0;
    for (const auto& s : all) { end = std::max(end, s.offset + s.size()); }
    return end;
}

template <class T = float> std::vector<T> gradient(std::size_t count, std::uint64_t rank, std::uint64_t step = 0) {
    std::vector<T> g(count);
    for (std::size_t i = 0; i < count; ++i) { g[i] = random_element<T>(1000 * step + rank + 1, i); }
    return g;
}

/// Throws unless every rank passes the same bytes.
template <class C, class T> void expect_equal_on_all(C& c, const std::vector<T>& mine) {
    const auto all = c.gather_control({hash_bytes(as_bytes(view<const T>(mine))), 0, 0, 0});
    for (std::size_t r = 0; r < all.size(); ++r) {
        expect(all[r][0] == all[0][0], "rank {} has other bits than rank 0", r);
    }
}

}  // namespace tutti::test
