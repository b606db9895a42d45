// What the conformance cases share: the backend under test, how a case runs on it, buffers with guards, data, judgment.
// Needs TUTTI_CONFORMANCE_BACKEND, set by CMake: the header of one backend. A backend is a struct `backend` with
//   communicator            the type under test
//   name                    for messages
//   deterministic           sums are in rank order: compared by bits with the rank-order oracle
//   keeps_nan               max and min, too, give NaN where one rank brings it
//   sizes()                 numbers of ranks to run with
//   run(ranks, body, timeout)  body(communicator&), a std::function, on every rank of a fresh root; rethrows what a
//                           rank threw
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <cstring>      // memcmp
#include <numeric>      // accumulate
#include <string>       // texts
#include <string_view>  // names
#include <type_traits>  // invoke results
#include <vector>       // data

#include <doctest/doctest.h>  // test cases
#include <fmt/format.h>       // texts

#include <tutti/comm/communicator.hpp>  // concepts
#include <tutti/core/state.hpp>         // hash_bytes

#include <support/build.hpp>    // full_speed
#include <support/failure.hpp>  // failure, expect
#include <support/oracle.hpp>   // reference reductions

#include TUTTI_CONFORMANCE_BACKEND

namespace tutti::test {

/// Runs `body(communicator&)` on every rank, for every number of ranks of the backend.
template <class Body> void for_ranks(Body body) {
    for (const int n : backend::sizes()) {
        CAPTURE(n);
        CHECK_NOTHROW(backend::run(n, body));
    }
}

template <class Comm> std::size_t ranks_of(const Comm& c) { return static_cast<std::size_t>(c.size()); }
template <class Comm> std::size_t me_of(const Comm& c) { return static_cast<std::size_t>(c.rank()); }

/// `count` elements between guards, so that a write outside shows. The first element is not aligned to a cache line.
template <class T> class guarded {
    static constexpr std::size_t guard = 64 / sizeof(T) + 3;
    std::vector<T> storage_;
    std::size_t count_;

public:
    explicit guarded(std::size_t count) : storage_(count + 2 * guard), count_(count) {
        std::memset(static_cast<void*>(storage_.data()), 0xa5, storage_.size() * sizeof(T));
    }
    explicit guarded(const std::vector<T>& values) : guarded(values.size()) {
        if (count_ != 0) { std::memcpy(data(), values.data(), count_ * sizeof(T)); }
    }
    [[nodiscard]] T* data() { return storage_.data() + guard; }
    [[nodiscard]] view<T> all() { return {data(), count_}; }
    [[nodiscard]] view<T> sub(std::size_t first, std::size_t count) { return all().sub(first, count); }
    [[nodiscard]] bool intact() const {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(storage_.data());
        const std::size_t behind = (guard + count_) * sizeof(T);
        for (std::size_t i = 0; i < guard * sizeof(T); ++i) {
            if (bytes[i] != 0xa5 || bytes[behind + i] != 0xa5) { return false; }
        }
        return true;
    }
    /// Nothing was ever written: also the elements still hold the guard's bytes.
    [[nodiscard]] bool untouched() const {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(storage_.data());
        for (std::size_t i = 0; i < storage_.size() * sizeof(T); ++i) {
            if (bytes[i] != 0xa5) { return false; }
        }
        return true;
    }
};

/// Throws unless `got` holds exactly the bytes of `want` and nothing around it was written.
template <class T> void expect_same(guarded<T>& got, const std::vector<T>& want, std::string_view what) {
    expect(got.intact(), "{}: wrote outside of its output", what);
    const view<T> v = got.all();
    expect(v.size() == want.size(), "{}: {} elements, wanted {}", what, v.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
        expect(std::memcmp(&v[i], &want[i], sizeof(T)) == 0, "{}: element {} of {} differs", what, i, want.size());
    }
}
template <class T> void expect_same(const std::vector<T>& got, const std::vector<T>& want, std::string_view what) {
    expect(same_bytes(got, want), "{}: bytes differ", what);
}

/// Throws unless every rank passes the same bytes.
template <class Comm, class T> void expect_equal_on_all(Comm& c, view<T> mine, std::string_view what) {
    const std::uint64_t hash = hash_bytes(as_bytes(view<const T>(mine)));
    const auto all = c.gather_control({hash, 0, 0, 0});
    for (std::size_t r = 0; r < all.size(); ++r) {
        expect(all[r][0] == all[0][0], "{}: rank {} has other bits than rank 0", what, r);
    }
}

/// Counts at which implementations change their mind: nothing, single elements, vector and line widths, the blocks of
/// the reduction loops, and around 8 KiB of T.
template <class T> std::vector<std::size_t> edge_counts() {
    constexpr std::size_t eight = 8192 / sizeof(T);
    std::vector<std::size_t> counts{0, 1, 2, 3, 7, 8, 63, 64, 65, 1000, eight, eight + 1};
    if (full_speed) { counts.insert(counts.end(), {eight - 1, 4099}); }
    return counts;
}
/// Beyond every block and every cache line pairing.
inline std::vector<std::size_t> large_counts() {
    if (!full_speed) { return {65537}; }
    return {65537, 300007};
}

/// Tables of uneven parts for n ranks, with empty parts in every position.
inline std::vector<std::vector<std::size_t>> uneven_tables(std::size_t n) {
    std::vector<std::vector<std::size_t>> tables;
    const auto add = [&](auto part_of) {
        std::vector<std::size_t> t(n);
        for (std::size_t r = 0; r < n; ++r) { t[r] = part_of(r); }
        tables.push_back(t);
    };
    add([](std::size_t) { return std::size_t{0}; });
    add([](std::size_t) { return std::size_t{3}; });
    add([](std::size_t r) { return r; });
    add([](std::size_t r) { return r % 2 == 0 ? 5 + r : 0; });
    add([&](std::size_t r) { return r + 1 == n ? std::size_t{7} : 0; });
    add([](std::size_t r) { return r == 0 ? std::size_t{4099} : 0; });
    add([](std::size_t r) { return 1 + (r * 1733) % 4096; });
    add([](std::size_t r) { return 1000 + 7 * (r % 3); });  // nearly equal
    return tables;
}
inline std::size_t total(const std::vector<std::size_t>& table) {
    return std::accumulate(table.begin(), table.end(), std::size_t{0});
}
inline std::size_t offset(const std::vector<std::size_t>& table, std::size_t rank) {
    return std::accumulate(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(rank), std::size_t{0});
}

}  // namespace tutti::test
