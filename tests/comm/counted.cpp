// counted: exact bytes by collective, one ledger for all lanes, control traffic and failures left out.
#include <doctest/doctest.h>

#include <chrono>   // timeouts
#include <cstdint>  // counts
#include <memory>   // shared ledgers
#include <thread>   // lanes
#include <utility>  // move
#include <vector>   // data

#include <tutti/comm/connect.hpp>  // connect_all
#include <tutti/comm/counted.hpp>  // tested
#include <tutti/comm/self.hpp>     // one rank
#include <tutti/comm/threads.hpp>  // many ranks

#include "comm/probe.hpp"  // nesting

using namespace tutti;
using comm::counted;
using comm::threads;
using comm::traffic;
using enum comm::collective;

TEST_CASE("every collective is counted under its own name") {
    for (const int n : {1, 2, 3, 4}) {
        std::vector<comm::traffic_snapshot> seen(static_cast<std::size_t>(n));
        threads::launch(n, [&](threads& t) {
            counted c(std::move(t));
            const auto un = static_cast<std::size_t>(n);
            const auto r = static_cast<std::size_t>(c.rank());
            std::vector<double> in(3 * un + 1, 1.0);
            std::vector<double> out(3 * un + 1);
            const view<double> whole = view<double>(in).sub(0, 3 * un);
            const view<double> result = view<double>(out).sub(0, 3 * un);
            const view<double> part = view<double>(out).sub(0, 3);
            const view<double> nothing;
            c.all_reduce(view<double>(in), view<double>(out), sum{});
            c.reduce_scatter(whole, part, sum{});
            c.all_gather(whole.sub(0, 3), result);
            // Rank r has r + 1 elements of n (n + 1) / 2.
            std::vector<std::size_t> counts(un);
            std::size_t total = 0;
            for (std::size_t p = 0; p < un; ++p) { total += counts[p] = p + 1; }
            c.reduce_scatter_v(view<double>(in).sub(0, total), view<double>(out).sub(0, r + 1), counts, sum{});
            c.all_gather_v(view<double>(in).sub(0, r + 1), view<double>(out).sub(0, total), counts);
            c.broadcast(whole, 0);
            c.reduce(whole, r == 0 ? result : nothing, sum{}, 0);
            c.gather(whole.sub(0, 3), r == 0 ? result : nothing, 0);
            c.scatter(r == 0 ? whole : nothing, part, 0);
            c.all_to_all(whole, result);
            const std::vector<std::size_t> same(un, 3);
            c.all_to_all_v(whole, same, result, same);
            const int next = (c.rank() + 1) % n;
            const int last = (c.rank() + n - 1) % n;
            const comm::transfer<host_memory> ring[] = {comm::send_to(next, whole), comm::receive_from(last, result)};
            c.exchange(ring);
            c.barrier();
            seen[r] = c.traffic_ledger()->snapshot();
        });
        CAPTURE(n);
        comm::traffic_snapshot sum;
        for (const auto& s : seen) {
            for (int k = 0; k <= static_cast<int>(barrier); ++k) {
                const auto kind = static_cast<comm::collective>(k);
                CHECK(s[kind].calls == 1);
                sum[kind] = sum[kind] + s[kind];
            }
        }
        const auto un = static_cast<std::uint64_t>(n);
        const std::uint64_t others = un - 1;
        const std::uint64_t whole = 3 * un * sizeof(double);
        CHECK(sum[all_reduce].bytes == 2 * others * (3 * un + 1) * sizeof(double));
        CHECK(sum[reduce_scatter].bytes == others * whole);
        CHECK(sum[all_gather].bytes == others * whole);
        CHECK(sum[reduce_scatter_v].bytes == others * un * (un + 1) / 2 * sizeof(double));
        CHECK(sum[all_gather_v].bytes == others * un * (un + 1) / 2 * sizeof(double));
        CHECK(sum[broadcast].bytes == (n > 1 ? whole : 0));
        CHECK(sum[reduce].bytes == others * whole);
        CHECK(sum[gather].bytes == others * 3 * sizeof(double));
        CHECK(sum[scatter].bytes == others * 3 * sizeof(double));
        CHECK(sum[all_to_all].bytes == others * whole);
        CHECK(sum[all_to_all_v].bytes == others * whole);
        CHECK(sum[exchange].bytes == (n > 1 ? un * whole : 0));
        CHECK(sum[barrier].bytes == 0);
    }
}

TEST_CASE("differences of snapshots leave out what lies outside") {
    threads::launch(2, [](threads& t) {
        counted c(std::move(t));
        std::vector<float> data(10);
        const auto& ledger = c.traffic_ledger();
        c.all_reduce(view<float>(data), view<float>(data), sum{});
        const auto before = ledger->snapshot();
        c.all_reduce(view<float>(data).sub(0, 4), view<float>(data).sub(0, 4), sum{});
        c.barrier();
        const auto during = ledger->snapshot() - before;
        c.all_reduce(view<float>(data), view<float>(data), sum{});
        CHECK(during[all_reduce] == traffic{1, 16});
        CHECK(during[barrier] == traffic{1, 0});
        CHECK(during.total() == traffic{2, 16});
        CHECK(ledger->total() == traffic{4, 16 + 2 * 40});
        ledger->reset();
        CHECK(ledger->snapshot() == comm::traffic_snapshot{});
        c.all_reduce(view<float>(data).sub(0, 0), view<float>(data).sub(0, 0), sum{});
        CHECK(ledger->total() == traffic{1, 0});  // a call of no elements is a call
    });
}

TEST_CASE("connect_all: one call, a byte for each of the other ranks") {
    for (const int n : {1, 2, 3, 4}) {
        threads::launch(n, [&](threads& t) {
            counted c(std::move(t));
            comm::connect_all(c);
            const auto others = static_cast<std::uint64_t>(n - 1);
            CHECK(c.traffic_ledger()->snapshot()[exchange] == traffic{n == 1 ? 0u : 1u, others});
            CHECK(c.traffic_ledger()->total() == c.traffic_ledger()->snapshot()[exchange]);
        });
    }
}

TEST_CASE("children share the ledger, control traffic is not counted") {
    threads::launch(4, [](threads& t) {
        counted c(std::move(t), std::make_shared<comm::ledger>());
        std::vector<int> data(8);
        auto lane = c.duplicate("lane");
        const std::vector<int> colors{0, 1, 0, 1};
        auto half = c.split(colors, "half");
        const std::vector<int> left_out{0, -1, -1, -1};
        CHECK(c.split(left_out, "one").has_value() == (c.rank() == 0));
        c.agree(1, "x");
        static_cast<void>(c.gather_control({}));
        CHECK(c.traffic_ledger()->total() == traffic{});
        REQUIRE(half.has_value());
        CHECK(lane.traffic_ledger() == c.traffic_ledger());
        std::vector<int> part(4);
        half->all_gather(view<int>(part), view<int>(data));  // ranks of the child count: two
        CHECK(c.traffic_ledger()->snapshot()[all_gather] == traffic{1, 16});
        lane.broadcast(view<int>(data), 3);
        CHECK(c.traffic_ledger()->snapshot()[broadcast] == traffic{1, c.rank() == 3 ? 32u : 0u});
        CHECK(half->traffic_ledger()->total() == c.traffic_ledger()->total());
    });
}

TEST_CASE("lanes count at the same time, and the ledger is read meanwhile") {
    constexpr int rounds = 200;
    threads::launch(2, [](threads& t) {
        counted c(std::move(t));
        auto lane = c.duplicate("lane");
        const auto work = [](counted<threads>& on) {
            std::vector<float> data(6, 1.0f);
            for (int i = 0; i < rounds; ++i) { on.all_reduce(view<float>(data), view<float>(data), max{}); }
        };
        std::thread other([&] { work(lane); });
        std::uint64_t last = 0;
        for (int i = 0; i < rounds; ++i) {
            const auto now = c.traffic_ledger()->snapshot()[all_reduce];
            CHECK(now.bytes == now.calls * 24);  // of one moment
            CHECK(now.calls >= last);
            last = now.calls;
        }
        work(c);
        other.join();
        CHECK(c.traffic_ledger()->total() == traffic{2 * rounds, 2 * rounds * 24});
    });
}

TEST_CASE("a call that fails is not counted") {
    threads::launch(2, [](threads& t) {
        counted c(std::move(t));
        std::vector<float> data(c.rank() == 0 ? 4 : 5);
        CHECK_THROWS_AS(c.all_reduce(view<float>(data), view<float>(data), sum{}), mismatch_error);
        CHECK_THROWS_AS(c.all_reduce(view<float>(data), view<float>(data).sub(0, 2), sum{}), usage_error);
        CHECK(c.traffic_ledger()->total() == traffic{});
    });
}

TEST_CASE("the ledger outlives the communicator; without a ledger there is no counting") {
    std::shared_ptr<comm::ledger> kept;
    {
        counted c(comm::self<>{});
        c.barrier();
        kept = c.traffic_ledger();
    }
    CHECK(kept->total() == traffic{1, 0});
    CHECK_THROWS_WITH_AS(counted(comm::self<>{}, nullptr), "counted: no ledger to count into", usage_error);
}

TEST_CASE("names, numbers and queues are those of the communicator inside") {
    comm::self<> alone(host_queue{}, {.name = "alone"});
    counted c{tutti::test::probe(std::move(alone))};
    static_assert(comm::decoratable<decltype(c)>);
    CHECK(c.rank() == 0);
    CHECK(c.size() == 1);
    CHECK(c.name() == "alone");
    CHECK(&c.queue().account() == &c.inner().inner().queue().account());
    static_cast<void>(c.duplicate("x"));
    c.barrier();
    CHECK(c.inner().counts().last_sequence == 2);  // the duplicate was call 1
    c.abort("enough");
    CHECK_THROWS_WITH_AS(c.synchronize(), "synchronize: aborted: enough, on 'alone'", aborted_error);
}
