// Collectives that only move bytes, for element types of 1, 3, 4, 8 and 24 bytes, on the backend under test.
#include <array>  // odd element types

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;

namespace {

using rgb = std::array<std::uint8_t, 3>;      // transportable, not a power of two
using triple = std::array<std::uint64_t, 3>;  // larger than any number

// Element i of what `source` sends to `destination` (or to all): bytes that occur nowhere else.
template <class T> T tagged(std::size_t source, std::size_t destination, std::size_t i) {
    std::array<std::uint64_t, (sizeof(T) + 7) / 8> words{};
    for (std::size_t w = 0; w < words.size(); ++w) {
        words[w] = mixed((source << 40) ^ (destination << 32) ^ (i << 2) ^ w);
    }
    T value;
    std::memcpy(&value, words.data(), sizeof(T));
    return value;
}
constexpr std::size_t to_all = 200;

template <class T> std::vector<T> row(std::size_t source, std::size_t destination, std::size_t count) {
    std::vector<T> v(count);
    for (std::size_t i = 0; i < count; ++i) { v[i] = tagged<T>(source, destination, i); }
    return v;
}
template <class T> void append(std::vector<T>& to, const std::vector<T>& part) {
    to.insert(to.end(), part.begin(), part.end());
}

template <class T, class Comm> void all_gather_conforms(Comm& c, std::size_t count) {
    const std::string what = fmt::format("all_gather of {} elements of {} bytes", count, sizeof(T));
    std::vector<T> want;
    for (std::size_t r = 0; r < ranks_of(c); ++r) { append(want, row<T>(r, to_all, count)); }
    const std::vector<T> in = row<T>(me_of(c), to_all, count);
    guarded<T> out(want.size());
    c.all_gather(in, out.all());
    expect_same(out, want, what);

    guarded<T> both(want.size());
    const view<T> mine = both.sub(me_of(c) * count, count);
    std::copy(in.begin(), in.end(), mine.begin());
    c.all_gather(mine, both.all());
    expect_same(both, want, what + " in place");
}

template <class T, class Comm> void all_gather_v_conforms(Comm& c, const std::vector<std::size_t>& table) {
    const std::string what = fmt::format("all_gather_v of {} elements of {} bytes", total(table), sizeof(T));
    std::vector<T> want;
    for (std::size_t r = 0; r < ranks_of(c); ++r) { append(want, row<T>(r, to_all, table[r])); }
    const std::vector<T> in = row<T>(me_of(c), to_all, table[me_of(c)]);
    guarded<T> out(want.size());
    c.all_gather_v(in, out.all(), table);
    expect_same(out, want, what);

    guarded<T> both(want.size());
    const view<T> mine = both.sub(offset(table, me_of(c)), in.size());
    std::copy(in.begin(), in.end(), mine.begin());
    c.all_gather_v(mine, both.all(), table);
    expect_same(both, want, what + " in place");
}

template <class T, class Comm> void broadcast_conforms(Comm& c, std::size_t count) {
    for (int root = 0; root < c.size(); ++root) {
        const auto source = static_cast<std::size_t>(root);
        const std::vector<T> want = row<T>(source, to_all, count);
        guarded<T> data(c.rank() == root ? want : row<T>(me_of(c), me_of(c), count));
        c.broadcast(data.all(), root);
        expect_same(data, want,
                    fmt::format("broadcast of {} elements of {} bytes from rank {}", count, sizeof(T), root));
    }
}

template <class T, class Comm> void gather_conforms(Comm& c, std::size_t count) {
    const std::vector<T> in = row<T>(me_of(c), to_all, count);
    std::vector<T> want;
    for (std::size_t r = 0; r < ranks_of(c); ++r) { append(want, row<T>(r, to_all, count)); }
    for (int root = 0; root < c.size(); ++root) {
        const std::string what = fmt::format("gather of {} elements of {} bytes to rank {}", count, sizeof(T), root);
        guarded<T> out(want.size());
        c.gather(in, out.all(), root);
        if (c.rank() == root) {
            expect_same(out, want, what);
        } else {
            expect(out.untouched(), "{}: rank {} was given an output", what, c.rank());
        }

        guarded<T> both(want.size());
        const view<T> mine = both.sub(me_of(c) * count, count);
        std::copy(in.begin(), in.end(), mine.begin());
        if (c.rank() == root) {
            c.gather(mine, both.all(), root);
        } else {
            c.gather(in, view<T>(), root);
        }
        if (c.rank() == root) { expect_same(both, want, what + " in place"); }
    }
}

template <class T, class Comm> void scatter_conforms(Comm& c, std::size_t count) {
    for (int root = 0; root < c.size(); ++root) {
        const std::string what = fmt::format("scatter of {} elements of {} bytes from rank {}", count, sizeof(T), root);
        const auto source = static_cast<std::size_t>(root);
        std::vector<T> in;
        for (std::size_t r = 0; r < ranks_of(c); ++r) { append(in, row<T>(source, r, count)); }
        const std::vector<T> want = row<T>(source, me_of(c), count);

        guarded<T> out(count);
        if (c.rank() == root) {
            c.scatter(in, out.all(), root);
        } else {
            c.scatter(view<const T>(), out.all(), root);
        }  // elsewhere no input is needed
        expect_same(out, want, what);

        guarded<T> both(in);
        guarded<T> again(count);
        const std::vector<T> unread = row<T>(me_of(c), 77, in.size());
        if (c.rank() == root) {
            c.scatter(both.all(), both.sub(me_of(c) * count, count), root);
        } else {
            c.scatter(unread, again.all(), root);
        }
        if (c.rank() == root) {
            expect_same(both, in, what + " in place");
        } else {
            expect_same(again, want, what + " with inputs everywhere");
        }
    }
}

template <class T, class Comm> void all_to_all_conforms(Comm& c, std::size_t count) {
    std::vector<T> in, want;
    for (std::size_t r = 0; r < ranks_of(c); ++r) {
        append(in, row<T>(me_of(c), r, count));
        append(want, row<T>(r, me_of(c), count));
    }
    const std::vector<T> before = in;
    guarded<T> out(want.size());
    c.all_to_all(in, out.all());
    expect_same(out, want, fmt::format("all_to_all of {} elements of {} bytes", count, sizeof(T)));
    expect_same(in, before, "all_to_all, the input");
}

// `count_of(s, d)`: elements that s sends to d.
template <class T, class Comm, class CountOf> void all_to_all_v_conforms(Comm& c, CountOf count_of) {
    std::vector<T> in, want;
    std::vector<std::size_t> sends, receives;
    for (std::size_t r = 0; r < ranks_of(c); ++r) {
        sends.push_back(count_of(me_of(c), r));
        receives.push_back(count_of(r, me_of(c)));
        append(in, row<T>(me_of(c), r, sends.back()));
        append(want, row<T>(r, me_of(c), receives.back()));
    }
    guarded<T> out(want.size());
    c.all_to_all_v(in, sends, out.all(), receives);
    expect_same(out, want, fmt::format("all_to_all_v of {} elements of {} bytes", in.size(), sizeof(T)));
}

template <class T> void all_movements_conform() {
    for_ranks([](auto& c) {
        for (const std::size_t count : edge_counts<T>()) {
            all_gather_conforms<T>(c, count);
            all_to_all_conforms<T>(c, count);
        }
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{65}, 8192 / sizeof(T) + 1}) {
            broadcast_conforms<T>(c, count);
            gather_conforms<T>(c, count);
            scatter_conforms<T>(c, count);
        }
        for (const auto& table : uneven_tables(ranks_of(c))) { all_gather_v_conforms<T>(c, table); }
        const std::size_t last = ranks_of(c) - 1;
        all_to_all_v_conforms<T>(c, [](std::size_t, std::size_t) { return std::size_t{0}; });
        all_to_all_v_conforms<T>(c, [](std::size_t s, std::size_t d) { return s + 2 * d; });
        all_to_all_v_conforms<T>(c, [](std::size_t s, std::size_t d) { return s == d ? std::size_t{9} : 0; });
        all_to_all_v_conforms<T>(c, [](std::size_t s, std::size_t d) { return s != d ? 1 + s * d : 0; });
        all_to_all_v_conforms<T>(c, [&](std::size_t s, std::size_t) { return s == last ? std::size_t{5} : 0; });
        all_to_all_v_conforms<T>(c, [](std::size_t, std::size_t d) { return d == 0 ? std::size_t{3001} : 0; });
        all_to_all_v_conforms<T>(c, [](std::size_t s, std::size_t d) { return mixed(s * 64 + d) % 4099; });
    });
}

}  // namespace

TEST_CASE("1 byte: movement") { all_movements_conform<std::byte>(); }
TEST_CASE("3 bytes: movement") { all_movements_conform<rgb>(); }
TEST_CASE("4 bytes: movement") { all_movements_conform<float>(); }
TEST_CASE("8 bytes: movement") { all_movements_conform<double>(); }
TEST_CASE("24 bytes: movement") { all_movements_conform<triple>(); }

TEST_CASE("large movements") {
    for_ranks([](auto& c) {
        const std::size_t count = large_counts().back();
        broadcast_conforms<float>(c, count);
        all_gather_conforms<rgb>(c, count / ranks_of(c));
        all_to_all_conforms<float>(c, count / ranks_of(c));
        gather_conforms<float>(c, count / ranks_of(c));
        scatter_conforms<float>(c, count / ranks_of(c));
    });
}
