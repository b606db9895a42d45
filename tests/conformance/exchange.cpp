// Grouped point-to-point on the backend under test: rings, pairs, orders, sizes, ranks that take no part.
#include <array>  // messages

#include <conformance/suite.hpp>  // backend, helpers

using namespace tutti;
using namespace tutti::test;
using comm::receive_from;
using comm::send_to;

namespace {

using transfers = std::vector<comm::transfer<host_memory>>;

// What rank s sends to rank d as its k-th message.
std::vector<std::uint32_t> letter(std::size_t s, std::size_t d, std::size_t k, std::size_t count) {
    std::vector<std::uint32_t> v(count);
    for (std::size_t i = 0; i < count; ++i) {
        v[i] = static_cast<std::uint32_t>(mixed((s << 40) + (d << 32) + (k << 24) + i));
    }
    return v;
}

constexpr std::size_t counts[] = {0, 1, 7, 1000, 2049, 70001};

}  // namespace

TEST_CASE("a ring passes data around") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c), next = (me + 1) % n, previous = (me + n - 1) % n;
        for (const std::size_t count : counts) {
            const auto out = letter(me, next, 0, count);
            guarded<std::uint32_t> in(count);
            c.exchange(transfers{send_to(static_cast<int>(next), view<const std::uint32_t>(out)),
                                 receive_from(static_cast<int>(previous), in.all())});
            expect_same(in, letter(previous, me, 0, count), fmt::format("ring of {}", count));
        }
    });
}

TEST_CASE("everybody sends to everybody, itself too, with sizes of their own") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        const auto count_of = [](std::size_t s, std::size_t d) {
            return mixed(s * 100 + d) % 3000 * (mixed(s + d) % 3);
        };
        for (int round = 0; round < 20; ++round) {
            std::vector<std::vector<std::uint32_t>> out;
            std::vector<guarded<std::uint32_t>> in;
            for (std::size_t r = 0; r < n; ++r) {
                out.push_back(letter(me, r, 0, count_of(me, r)));
                in.emplace_back(count_of(r, me));
            }
            transfers group;
            // The order between different peers is free: each rank starts elsewhere, receives before or behind sends.
            for (std::size_t k = 0; k < n; ++k) {
                const std::size_t r = (me * 3 + k) % n;
                const auto send = send_to(static_cast<int>(r), view<const std::uint32_t>(out[r]));
                const auto receive = receive_from(static_cast<int>(r), in[r].all());
                if ((me + k) % 2 == 0) {
                    group.insert(group.end(), {send, receive});
                } else {
                    group.insert(group.end(), {receive, send});
                }
            }
            c.exchange(group);
            for (std::size_t r = 0; r < n; ++r) { expect_same(in[r], letter(r, me, 0, count_of(r, me)), "all pairs"); }
        }
    });
}

TEST_CASE("messages of one pair match in order, empty ones among them") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c), next = (me + 1) % n, previous = (me + n - 1) % n;
        constexpr std::size_t sizes[] = {5, 0, 3000, 1, 0, 5};
        std::vector<std::vector<std::uint32_t>> out;
        std::vector<guarded<std::uint32_t>> in;
        transfers group;
        for (std::size_t k = 0; k < std::size(sizes); ++k) {
            out.push_back(letter(me, next, k, sizes[k]));
            in.emplace_back(sizes[k]);
        }
        for (std::size_t k = 0; k < std::size(sizes); ++k) {
            group.push_back(receive_from(static_cast<int>(previous), in[k].all()));
            group.push_back(send_to(static_cast<int>(next), view<const std::uint32_t>(out[k])));
        }
        c.exchange(group);
        for (std::size_t k = 0; k < std::size(sizes); ++k) {
            expect_same(in[k], letter(previous, me, k, sizes[k]), fmt::format("message {} of the pair", k));
        }
    });
}

TEST_CASE("messages of one pair match in order while they are still being sent") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        const auto next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
        std::array<std::uint64_t, 12> out{}, in{};
        for (std::uint64_t round = 0; round < (full_speed ? 1000 : 100); ++round) {
            transfers group;
            for (std::size_t k = 0; k < out.size(); ++k) {
                out[k] = round * 100 + k;
                in[k] = 0;
                group.push_back(receive_from(previous, view<std::uint64_t>(&in[k], 1)));
                group.push_back(send_to(next, view<const std::uint64_t>(&out[k], 1)));
            }
            c.exchange(group);
            expect(in == out, "round {}: a message overtook another", round);
        }
    });
}

TEST_CASE("order also holds across calls") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c);
        if (n == 1) { return; }
        // Rank 0 sends two messages in one call, rank 1 takes them in two.
        const auto first = letter(0, 1, 1, 50), second = letter(0, 1, 2, 50);
        if (me == 0) {
            c.exchange(
                transfers{send_to(1, view<const std::uint32_t>(first)), send_to(1, view<const std::uint32_t>(second))});
        } else if (me == 1) {
            guarded<std::uint32_t> a(50), b(50);
            c.exchange(transfers{receive_from(0, a.all())});
            c.exchange(transfers{receive_from(0, b.all())});
            expect_same(a, first, "first of two calls");
            expect_same(b, second, "second of two calls");
        }
    });
}

TEST_CASE("only the ranks named take part") {
    for_ranks([](auto& c) {
        const int last = c.size() - 1;
        for (std::uint64_t round = 0; round < 50; ++round) {
            const std::uint64_t token = 17 + round;
            std::uint64_t got = 0;
            transfers group;
            if (c.rank() == 0) { group.push_back(send_to(last, view<const std::uint64_t>(&token, 1))); }
            if (c.rank() == last) { group.push_back(receive_from(0, view<std::uint64_t>(&got, 1))); }
            if (!group.empty()) { c.exchange(group); }
            expect(c.rank() != last || got == token, "the token is {}", got);
        }
        c.exchange(transfers{});  // nobody named: nothing to wait for
        std::vector<float> one(1, 1.0f);
        c.all_reduce(one, view<float>(one), sum{});  // collectives stay in step
        expect(one[0] == static_cast<float>(c.size()), "the sum is {}", one[0]);
    });
}

TEST_CASE("megabytes pass in both directions at once") {
    for_ranks([](auto& c) {
        const std::size_t n = ranks_of(c), me = me_of(c), peer = n - 1 - me;
        constexpr std::size_t count = 1 << 18;
        const auto out = letter(me, peer, 0, count);
        guarded<std::uint32_t> in(count);
        c.exchange(transfers{send_to(static_cast<int>(peer), view<const std::uint32_t>(out)),
                             receive_from(static_cast<int>(peer), in.all())});
        expect_same(in, letter(peer, me, 0, count), "a megabyte");
    });
}
