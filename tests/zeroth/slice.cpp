// Sliced transfers: each rank moves its part of every block, updates it, and all gather it. The bits of the reference
// on 1 to 8 ranks, of sizes that do not divide; bytes up, down and between ranks, exactly.
#include <tutti/zeroth/gather_by_copies.hpp>  // under test
#include <tutti/zeroth/slice.hpp>             // under test

#include <algorithm>  // min_element
#include <chrono>     // naps
#include <cmath>      // isinf
#include <cstddef>    // size_t
#include <cstdint>    // bytes
#include <string>     // texts
#include <thread>     // naps
#include <tuple>      // ways
#include <vector>     // hashes

#include <doctest/doctest.h>  // checks

#include <support/failure.hpp>       // expect
#include <tutti/comm/counted.hpp>    // ledger
#include <tutti/comm/threads.hpp>    // ranks
#include <tutti/zeroth/offload.hpp>  // pipeline

#include "delayed.hpp"  // naps
#include "renewed.hpp"  // masters that the device updates
#include "trial.hpp"    // runs of the toy

using namespace tutti;
using namespace tutti::test;
using comm::collective;
using comm::threads;
using zeroth::tensor_slice;

namespace {

using ranks = comm::counted<threads>;

bool same(const tensor_slice& a, const tensor_slice& b) {
    return a.tensor == b.tensor && a.first == b.first && a.offset == b.offset && a.count == b.count &&
           a.decayed == b.decayed && a.frozen == b.frozen;
}

// A way that ranks do not have, and that must not be called.
struct not_here {
    [[nodiscard]] bool available() const noexcept { return false; }
    template <communicator C, class T> void operator()(C&, view<T, memory_of<C>>, part) const {
        throw usage_error("called though it is not available");
    }
};

// `gather(communicator)` is a way; `gathering` its collective.
template <class Make>
void run_on(int n, const trial& t, const trace_of<float>& expected, std::uint32_t seed, collective gathering,
            Make gather) {
    threads::launch(n, [&](threads& world) {
        ranks counting(world.duplicate("slices"));
        const auto ledger = counting.traffic_ledger();
        const auto each = static_cast<std::size_t>(n);
        const zeroth::model_layout layout(chain_shape{t.blocks}.shape(), sizeof(float), each);
        const auto rank = static_cast<std::size_t>(world.rank());
        zeroth::pinned_store<float, host_queue> store(layout, rank);
        fill(store, chain_reference<float>({t.blocks}));
        const host_queue q = world.queue();
        using model_type = chain_model<host_queue, float, nap>;
        model_type model(q, 2, nap(seed + static_cast<std::uint32_t>(rank)));
        auto way = gather(counting);
        using exchange = zeroth::sliced<ranks, decltype(way)>;
        const bool ahead = seed == 1;  // then uploads belong to no step
        std::uint64_t residents = 0, travelers = 0;
        for (std::size_t m = 0; m < layout.modules(); ++m) {
            const std::size_t padded = layout.size(m) * sizeof(float);
            std::size_t used = 0;
            for (const tensor_slice& s : layout.slices(m)) { used += (s.count * sizeof(float) + 255) / 256 * 256; }
            expect(padded % (256 * each) == 0 && padded - used < 256 * each, "module {} has {} bytes of {}", m, padded,
                   used);
            (m <= 1 || m == layout.tail() ? residents : travelers) += padded;
        }
        std::vector<double> losses;
        {
            zeroth::offload<host_queue, float, model_type, exchange> p(
                q, model, store, {.slot_count = 2, .blocks_resident = 1, .prefetch = ahead},
                exchange(std::move(counting), std::move(way)));
            expect(p.counters().upload_bytes == residents / each, "{} bytes loaded", p.counters().upload_bytes);
            auto counted = p.counters();
            auto sent = ledger->snapshot();
            for (std::size_t step = 0; step < t.steps; ++step) {
                take_step(p, t, step, losses);
                const auto moved = p.counters() - counted;
                counted = p.counters();
                // step 2 leaves nothing to write back in step 3
                const std::uint64_t down = step == 0 || step == 3 ? 0 : travelers / each;
                expect(ahead || moved.upload_bytes == travelers / each, "step {}: {} bytes up", step,
                       moved.upload_bytes);
                expect(moved.offload_bytes == down, "step {}: {} bytes down", step, moved.offload_bytes);
                expect(moved.gathered_bytes == travelers - travelers / each, "step {}: {} bytes from other ranks", step,
                       moved.gathered_bytes);
                const auto on_wire = ledger->snapshot() - sent;
                sent = ledger->snapshot();
                const bool copies = seed == 8;  // which are no messages
                expect(on_wire[gathering].bytes == (copies ? 0 : travelers - travelers / each),
                       "step {}: {} bytes sent", step, on_wire[gathering].bytes);
                expect(on_wire.total().bytes == on_wire[gathering].bytes, "step {}: something else was sent", step);
            }
            const std::uint64_t hash = p.hash();
            world.agree(hash, "weights");
            expect(holds(store, expected.weights), "rank {} has other weights", rank);
            expect(p.hash() == hash, "the hash changed");
        }
        expect(losses == expected.losses, "rank {} has other losses", rank);
        expect(holds(store, expected.weights), "rank {} has other weights at the end", rank);
    });
}

}  // namespace

TEST_CASE("a part of a module's slices is what lies within, by its place in the tensor") {
    const std::vector<tensor_slice> all{{1, 0, 0, 100}, {2, 0, 128, 50, false, true}, {3, 40, 192, 60}};
    const auto middle = zeroth::slices_within(all, {90, 110});
    REQUIRE(middle.size() == 3);
    CHECK(same(middle[0], {1, 90, 0, 10}));
    CHECK(same(middle[1], {2, 0, 38, 50, false, true}));
    CHECK(same(middle[2], {3, 40, 102, 8}));
    CHECK(zeroth::slices_within(all, {100, 28}).empty());
    const auto last = zeroth::slices_within(all, {200, 100});
    REQUIRE(last.size() == 1);
    CHECK(same(last[0], {3, 48, 0, 52}));
}

TEST_CASE("slices give the bits of whole blocks and move 1/N each way, on any number of ranks") {
    const trial t{.blocks = 4, .steps = 5};
    const auto expected = by_reference<float>(t);
    for (const int n : {1, 2, 3, 4, 8}) {
        CAPTURE(n);
        for (std::uint32_t seed = 0; seed < 3; ++seed) {
            run_on(n, t, expected, seed, collective::all_gather, [](ranks&) { return zeroth::gather_collectively(); });
        }
        run_on(n, t, expected, 7, collective::exchange, [](ranks&) { return zeroth::gather_by_messages(); });
        run_on(n, t, expected, 8, collective::exchange,
               [](ranks& c) { return zeroth::gather_by_copies<host_queue>::over(c); });
    }
}

TEST_CASE("eight bits of masters in slices: the bits of whole blocks, masters and what travels 1/N each way") {
    const trial t{.blocks = 4, .steps = 6};
    const auto as_it_is = [](const std::vector<float>& v) { return v; };
    constexpr std::size_t every = 2, residents = 1;
    renewed_reference<float, std::vector<float> (*)(std::vector<float>), decltype(as_it_is)> expected(t, in_8_bits,
                                                                                                      as_it_is);
    expected.run(host_queue(), every, residents);
    for (const int n : {2, 3}) {
        CAPTURE(n);
        threads::launch(n, [&](threads& world) {
            const auto rank = static_cast<std::size_t>(world.rank());
            using store_type = zeroth::renewed_store<float, host_queue, zeroth::float8_wire<>>;
            store_type store(
                zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float), static_cast<std::size_t>(n)), rank,
                {}, {.piece = 128});
            fill_masters(store, chain_reference<float>({t.blocks}));
            const auto losses = by_pipeline<float>(
                world.queue(), t, store, {.slot_count = 2, .blocks_resident = residents, .write_back_every = every},
                nap(static_cast<std::uint32_t>(rank)), zeroth::sliced<threads>(world.duplicate("slices")));
            expect(losses == expected.losses, "rank {} has other losses", rank);
            expect(holds_masters(store, expected.masters), "rank {} has other masters", rank);
        });
    }
}

TEST_CASE("the fastest gather is the same on all ranks, and gives the bits of any") {
    for (const int n : {1, 3}) {
        std::vector<std::size_t> chosen(static_cast<std::size_t>(n));
        threads::launch(n, [&](threads& world) {
            const auto rank = static_cast<std::size_t>(world.rank());
            // One that is late on another rank each: the slowest decides.
            const auto late = [](int who) {
                return [who](threads& c, view<float>, part) {
                    if (c.rank() == who) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
                };
            };
            const auto gather = zeroth::fastest_gather(world, 5000, late(0), zeroth::gather_by_messages(), late(n - 1));
            const auto expect_fastest = [](const auto& of) {
                expect(of.times()[of.chosen()] == *std::min_element(of.times().begin(), of.times().end()), "not it");
            };
            expect_fastest(gather);
            expect(gather.times()[0] >= 0.02 && gather.times()[2] >= 0.02, "times are not the slowest rank's");
            const auto copies = zeroth::gather_by_copies<host_queue>::over(world);
            expect(copies.available(), "threads of one process");
            const auto any = zeroth::fastest_gather(world, 5000, zeroth::gather_collectively(),
                                                    zeroth::gather_by_messages(), copies);
            chosen[rank] = any.chosen();
            expect_fastest(any);
            const auto expect_gathers = [&](const auto& way) {
                std::vector<int> all(static_cast<std::size_t>(3 * n), -1);
                for (std::size_t i = 0; i < 3; ++i) { all[3 * rank + i] = static_cast<int>(10 * rank + i); }
                way(world, view<int>(all), part{3 * rank, 3});
                for (std::size_t i = 0; i < all.size(); ++i) {
                    expect(all[i] == static_cast<int>(10 * (i / 3) + i % 3), "element {} is {}", i, all[i]);
                }
            };
            expect_gathers(any);
            // By the caller's choice: that way alone, and it must be there.
            const auto broken = [](threads&, view<int>, part) { throw usage_error("another way than the one given"); };
            expect_gathers(zeroth::gather_by_one_of(std::tuple(broken, copies, broken), 1));
            const auto refused = [](auto make) {
                try {
                    make();
                } catch (const usage_error& e) { return std::string(e.what()); }
                return std::string();
            };
            const not_here nothing;
            expect(refused([&] { zeroth::gather_by_one_of(std::tuple(copies, nothing), 1); }) ==
                       "gather_by_one_of: way 1 is not available here",
                   "a way that is not available was taken");
            expect(!refused([&] { zeroth::gather_by_one_of(std::tuple(copies), 1); }).empty(),
                   "there is no second way");
            const auto without = zeroth::fastest_gather(world, 5000, nothing, late(0));
            expect(without.chosen() == 1 && std::isinf(without.times()[0]), "what is not available was measured");
        });
        for (const std::size_t c : chosen) { CHECK(c == chosen[0]); }
    }
}

TEST_CASE("ranks that meet over a board: everyone's words of the round, and an end when one has failed") {
    constexpr int n = 4;
    zeroth::peer_board<host_queue> board(n);
    static const int marks[64] = {};
    threads::launch(n, [&](threads& world) {
        for (std::size_t round = 0; round < 40; ++round) {
            const auto rank = static_cast<std::size_t>(world.rank());
            if ((round + rank) % 5 == 0) { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
            const auto words = board.exchange(world.rank(), {&marks[(round + rank) % 64], host_queue().record()});
            for (std::size_t r = 0; r < n; ++r) {
                expect(words[r].data == &marks[(round + r) % 64], "round {}: another word of rank {}", round, r);
            }
        }
        if (world.rank() == 2) { return board.abort("it was enough"); }
        std::string why;
        try {
            static_cast<void>(board.exchange(world.rank(), {}));
        } catch (const aborted_error& e) { why = e.what(); }
        expect(why == "gather_by_copies: another rank: it was enough", "rank {} ends with '{}'", world.rank(), why);
    });
}

TEST_CASE("a rank whose model throws, and which goes on without the others, ends them") {
    const trial t{.blocks = 4, .steps = 3};
    threads::launch(2, [&](threads& world) {
        ranks slices(world.duplicate("slices"));
        const auto rank = static_cast<std::size_t>(world.rank());
        zeroth::pinned_store<float, host_queue> store(
            zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float), 2), rank);
        fill(store, chain_reference<float>({t.blocks}));
        using exchange = zeroth::sliced<ranks, zeroth::gather_collectively>;
        const host_queue q = world.queue();
        chain_model<host_queue, float, nap> model(q, 2, nap(1, rank == 1 ? 17 : 0));
        zeroth::offload<host_queue, float, decltype(model), exchange> p(q, model, store, {.slot_count = 2},
                                                                        exchange(std::move(slices)));
        std::vector<double> losses;
        std::string why;
        try {
            for (std::size_t step = 0; step < t.steps; ++step) { take_step(p, t, step, losses); }
        } catch (const std::exception& e) { why = e.what(); }
        expect(why.find("the model has had enough") != std::string::npos, "rank {} ends with '{}'", rank, why);
    });
}
