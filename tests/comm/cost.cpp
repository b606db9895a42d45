// cost: exact wire bytes, alpha-beta times against hand-computed numbers, bus factors.
#include <doctest/doctest.h>

#include <cstdint>  // exact sums
#include <numeric>  // accumulate
#include <vector>   // counts

#include <tutti/comm/cost.hpp>  // tested

using namespace tutti;
using namespace tutti::comm;
using enum comm::collective;

namespace {

constexpr std::size_t word = 4;

call make(collective kind, std::size_t in, std::size_t out, int root = -1) {
    call c;
    c.kind = kind;
    c.type = dtype::float32;
    c.element_size = word;
    c.in_count = in;
    c.out_count = out;
    c.root = root;
    return c;
}
// Sum over ranks; `of(rank)` is that rank's call.
template <class Of> std::uint64_t total(int n, Of of) {
    std::uint64_t sum = 0;
    for (int r = 0; r < n; ++r) { sum += wire_bytes(of(r), r, n); }
    return sum;
}
constexpr std::uint64_t others(int n) { return static_cast<std::uint64_t>(n - 1); }

// Powers of two: every product and sum below is exact.
constexpr comm::link slow{0x1p-10, 0x1p20};
constexpr comm::link fast{0x1p-20, 0x1p30};

}  // namespace

TEST_CASE("wire bytes: sums over ranks are exact for any count and any number of ranks") {
    for (int n = 1; n <= 9; ++n) {
        const auto un = static_cast<std::size_t>(n);
        for (const std::size_t count : {0u, 1u, 2u, 5u, 17u, 1000u, 1023u}) {
            CAPTURE(n);
            CAPTURE(count);
            const std::uint64_t bytes = count * word;
            CHECK(total(n, [&](int) { return make(all_reduce, count, count); }) == 2 * others(n) * bytes);
            CHECK(total(n, [&](int) { return make(reduce_scatter, un * count, count); }) == others(n) * un * bytes);
            CHECK(total(n, [&](int) { return make(all_gather, count, un * count); }) == others(n) * un * bytes);
            CHECK(total(n, [&](int) { return make(all_to_all, un * count, un * count); }) == others(n) * un * bytes);
            CHECK(total(n, [&](int) { return make(broadcast, count, count, n - 1); }) == (n > 1 ? bytes : 0));
            CHECK(total(n, [&](int r) { return make(reduce, count, r == 0 ? count : 0, 0); }) == others(n) * bytes);
            CHECK(total(n, [&](int r) { return make(gather, count, r == 0 ? un * count : 0, 0); }) ==
                  others(n) * bytes);
            CHECK(total(n, [&](int r) { return make(scatter, r == 0 ? un * count : 0, count, 0); }) ==
                  others(n) * bytes);
            CHECK(total(n, [&](int) { return make(barrier, 0, 0); }) == 0);
        }
    }
}

TEST_CASE("wire bytes: one rank at a time") {
    // 10 elements for 3 ranks: slices of 4, 3, 3.
    const call ar = make(all_reduce, 10, 10);
    CHECK(wire_bytes(ar, 0, 3) == (6 + 4 * 2) * word);
    CHECK(wire_bytes(ar, 1, 3) == (7 + 3 * 2) * word);
    CHECK(wire_bytes(ar, 2, 3) == (7 + 3 * 2) * word);
    CHECK(wire_bytes(ar, 0, 1) == 0);

    CHECK(wire_bytes(make(broadcast, 10, 10, 1), 0, 3) == 0);
    CHECK(wire_bytes(make(broadcast, 10, 10, 1), 1, 3) == 40);
    CHECK(wire_bytes(make(reduce, 10, 0, 1), 0, 3) == 40);
    CHECK(wire_bytes(make(reduce, 10, 10, 1), 1, 3) == 0);
    CHECK(wire_bytes(make(gather, 10, 0, 1), 2, 3) == 40);
    CHECK(wire_bytes(make(gather, 10, 30, 1), 1, 3) == 0);
    CHECK(wire_bytes(make(scatter, 30, 10, 1), 1, 3) == 80);
    CHECK(wire_bytes(make(scatter, 0, 10, 1), 0, 3) == 0);
    CHECK(wire_bytes(make(all_to_all, 30, 30), 2, 3) == 80);
}

TEST_CASE("wire bytes: uneven parts and messages") {
    const std::vector<std::size_t> counts{5, 0, 2};
    std::uint64_t scattered = 0;
    std::uint64_t gathered = 0;
    for (int r = 0; r < 3; ++r) {
        const std::size_t own = counts[static_cast<std::size_t>(r)];
        call c = make(reduce_scatter_v, 7, own);
        c.send_counts = counts;
        scattered += wire_bytes(c, r, 3);
        c = make(all_gather_v, own, 7);
        c.send_counts = counts;
        gathered += wire_bytes(c, r, 3);
    }
    CHECK(scattered == 2 * 7 * word);
    CHECK(gathered == 2 * 7 * word);

    const std::vector<std::size_t> received{1, 3, 1};
    call c = make(all_to_all_v, 7, 5);
    c.send_counts = counts;
    c.recv_counts = received;
    CHECK(wire_bytes(c, 0, 3) == 2 * word);
    CHECK(wire_bytes(c, 1, 3) == 7 * word);

    const std::vector<message> messages{
        {true, 1, nullptr, 100}, {false, 1, nullptr, 50}, {true, 0, nullptr, 7}, {true, 2, nullptr, 1}};
    call e = make(exchange, 0, 0);
    e.messages = messages;
    CHECK(wire_bytes(e, 0, 3) == 101);  // the message to itself stays at home
    CHECK(wire_bytes(e, 1, 3) == 8);
}

// merthidayetoglu/CommBench#2, kamping-site/kamping#113: sizes beyond 32 bits
TEST_CASE("wire bytes: beyond 32 bits") {
    const std::size_t count = (std::size_t{1} << 33) + 1;
    CHECK(total(5, [&](int) { return make(all_reduce, count, count); }) == 8 * std::uint64_t{count} * word);
}

TEST_CASE("message size is that of the whole buffer") {
    CHECK(message_bytes(make(all_reduce, 10, 10), 4) == 40);
    CHECK(message_bytes(make(reduce_scatter, 40, 10), 4) == 160);
    CHECK(message_bytes(make(all_gather, 10, 40), 4) == 160);
    CHECK(message_bytes(make(gather, 10, 0, 0), 4) == 160);
    CHECK(message_bytes(make(gather, 10, 40, 0), 4) == 160);
    CHECK(message_bytes(make(scatter, 0, 10, 0), 4) == 160);
    CHECK(message_bytes(make(scatter, 40, 10, 0), 4) == 160);
    CHECK(message_bytes(make(reduce, 10, 0, 0), 4) == 40);
    CHECK(message_bytes(make(broadcast, 10, 10, 0), 4) == 40);
    CHECK(message_bytes(make(all_to_all, 40, 40), 4) == 160);
}

TEST_CASE("bus factors are those of nccl-tests") {
    CHECK(bus_factor(all_reduce, 8) == 1.75);
    for (const collective k :
         {reduce_scatter, reduce_scatter_v, all_gather, all_gather_v, gather, scatter, all_to_all, all_to_all_v}) {
        CHECK(bus_factor(k, 8) == 0.875);
    }
    for (const collective k : {broadcast, reduce, exchange}) { CHECK(bus_factor(k, 8) == 1); }
    CHECK(bus_factor(barrier, 8) == 0);
    CHECK(bus_factor(all_reduce, 1) == 0);
}

TEST_CASE("flat network: hand-computed times") {
    const double bytes = 0x1p20;  // one second of link
    CHECK(time_of(all_reduce, bytes, 4, slow) == call_time{4 * 0x1p-10, 0, 1.5});
    CHECK(time_of(all_reduce, bytes, 5, slow).latency == 6 * 0x1p-10);  // ceil(log2 5) = 3
    CHECK(time_of(all_reduce, bytes, 2, slow) == call_time{2 * 0x1p-10, 0, 1});
    CHECK(time_of(reduce_scatter, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 0.75});
    CHECK(time_of(all_gather, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 0.75});
    CHECK(time_of(all_gather_v, bytes, 4, slow) == time_of(all_gather, bytes, 4, slow));
    CHECK(time_of(reduce_scatter_v, bytes, 4, slow) == time_of(reduce_scatter, bytes, 4, slow));
    CHECK(time_of(gather, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 0.75});
    CHECK(time_of(scatter, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 0.75});
    CHECK(time_of(broadcast, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 1});
    CHECK(time_of(reduce, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 1});
    CHECK(time_of(all_to_all, bytes, 4, slow) == call_time{3 * 0x1p-10, 0, 0.75});
    CHECK(time_of(exchange, bytes, 4, slow) == call_time{0x1p-10, 0, 1});
    CHECK(time_of(barrier, bytes, 4, slow) == call_time{2 * 0x1p-10, 0, 0});
    CHECK(time_of(all_reduce, bytes, 4, slow).seconds() == 1.5 + 4 * 0x1p-10);
    for (int k = 0; k <= static_cast<int>(barrier); ++k) {
        CHECK(time_of(static_cast<collective>(k), bytes, 1, slow) == call_time{});
        CHECK(time_of(static_cast<collective>(k), bytes, 8, {}) == call_time{});  // a link that costs nothing
    }
}

TEST_CASE("two levels: one of them alone is the flat network") {
    for (int k = 0; k <= static_cast<int>(barrier); ++k) {
        const auto kind = static_cast<collective>(k);
        CAPTURE(name_of(kind));
        for (const int n : {1, 2, 3, 8}) {
            const call_time flat = time_of(kind, 12345, n, slow);
            CHECK(time_of(kind, 12345, topology::uniform(n, 1, fast, slow)) == flat);
            CHECK(time_of(kind, 12345, topology::one_node(n, slow)) == call_time{flat.latency, flat.between, 0});
        }
    }
}

TEST_CASE("two levels: hand-computed times") {
    // 2 nodes of 4 ranks with 2 NICs: two ranks share a NIC, so that each gets half of 2^20 bytes per second.
    const topology t = topology::uniform(2, 4, fast, slow, 2);
    const double bytes = 0x1p30;  // one second inside
    const double a1 = 0x1p-20;
    const double a2 = 0x1p-10;
    CHECK(time_of(all_reduce, bytes, t) == call_time{2 * a1 + 2 * a2 + 2 * a1, 2 * 0.75, 0x1p28 / 0x1p19});
    CHECK(time_of(reduce_scatter, bytes, t) == call_time{2 * a1 + a2, 0.75, 0.5 * 0x1p28 / 0x1p19});
    CHECK(time_of(reduce_scatter_v, bytes, t) == time_of(reduce_scatter, bytes, t));
    CHECK(time_of(all_gather, bytes, t) == time_of(reduce_scatter, bytes, t));
    CHECK(time_of(all_gather_v, bytes, t) == time_of(all_gather, bytes, t));
    CHECK(time_of(broadcast, bytes, t) == call_time{a2 + 2 * a1, 1, 0x1p30 / 0x1p20});
    CHECK(time_of(reduce, bytes, t) == time_of(broadcast, bytes, t));
    CHECK(time_of(gather, bytes, t) == call_time{a2 + 2 * a1, 0.75 * 0.5, 0.5 * 0x1p30 / 0x1p20});
    CHECK(time_of(scatter, bytes, t) == time_of(gather, bytes, t));
    CHECK(time_of(all_to_all, bytes, t) == call_time{3 * a1 + 4 * a2, 3.0 / 8, 0.5 * 0x1p30 / 0x1p19});
    CHECK(time_of(exchange, bytes, t) == call_time{a2, 0, 0x1p30 / 0x1p20});
    CHECK(time_of(barrier, bytes, t) == call_time{4 * a1 + a2, 0, 0});
    // As many NICs as ranks: the whole link each.
    CHECK(time_of(all_reduce, bytes, topology::uniform(2, 4, fast, slow, 4)).between == 0x1p28 / 0x1p20);
    // A node of 4 and one of 2: inside like 4, and 1/2 of the bytes goes between.
    const topology uneven({.node = {0, 0, 0, 0, 1, 1}, .nics_per_node = 4, .inside = fast, .between = slow});
    CHECK(time_of(all_reduce, bytes, uneven) == call_time{4 * a1 + 2 * a2, 1.5, 0x1p29 / 0x1p20});
}

TEST_CASE("a rank's own messages: all_to_all_v and exchange") {
    // Ranks 0, 1 on node 0 and 2, 3 on node 1; one NIC for two ranks.
    const topology t = topology::uniform(2, 2, fast, slow);
    call c = make(all_to_all_v, 0, 0);
    const std::vector<std::size_t> sent{100, 1 << 10, 1 << 12, 0};
    const std::vector<std::size_t> received{100, 1 << 9, 1 << 13, 0};
    c.send_counts = sent;
    c.recv_counts = received;
    // Rank 1 costs 2^12 bytes inside (sending), rank 2 2^15 between (receiving) through half a NIC; rank 3 nothing.
    CHECK(time_of(c, 0, t) == call_time{0x1p-20 + 0x1p-10, 0x1p12 / 0x1p30, 0x1p15 / 0x1p19});

    call e = make(exchange, 0, 0);
    const std::vector<message> messages{{true, 0, nullptr, 999},
                                        {true, 1, nullptr, 1 << 10},
                                        {false, 1, nullptr, 1 << 11},
                                        {true, 2, nullptr, 1 << 12},
                                        {true, 3, nullptr, 1 << 12}};
    e.messages = messages;
    CHECK(time_of(e, 0, t) == call_time{0x1p-10, 0x1p11 / 0x1p30, 0x1p13 / 0x1p20, true});
    CHECK(time_of(e, 0, t).seconds() == 0x1p-10 + 0x1p13 / 0x1p20);  // the messages inside pass meanwhile
    CHECK(call_time{0x1p-10, 0x1p-9, 0x1p-8}.seconds() == 0x1p-10 + 0x1p-9 + 0x1p-8);
    CHECK(call_time{0, 0x1p-8, 0x1p-9, true}.seconds() == 0x1p-8);
    e.messages = std::span(messages).first(3);
    CHECK(time_of(e, 0, t) == call_time{0x1p-20, 0x1p11 / 0x1p30, 0, true});
    e.messages = std::span(messages).first(1);
    CHECK(time_of(e, 0, t) == call_time{0, 0, 0, true});

    const call ar = make(all_reduce, 1 << 10, 1 << 10);
    CHECK(time_of(ar, 0, t) == time_of(all_reduce, 0x1p12, t));
    const call part = make(gather, 1 << 10, 0, 1);
    CHECK(time_of(part, 0, t) == time_of(gather, 0x1p14, t));
}
