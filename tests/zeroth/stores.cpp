// Where weights are when they are not on the device: in a file, with a few blocks in memory; in float on the host, so
// that transfers of 16 and 8 bits lose no update, which stored in 16 bits they would.
#include <tutti/zeroth/disk_store.hpp>    // under test
#include <tutti/zeroth/master_store.hpp>  // under test

#include <algorithm>  // max, copy_n
#include <chrono>     // a late upload
#include <cmath>      // fabs
#include <cstring>    // memcmp
#include <cstddef>    // size_t
#include <string>     // paths
#include <thread>     // sleep
#include <vector>     // weights

#include <unistd.h>  // truncate

#include <doctest/doctest.h>  // checks

#include <support/scratch_folder.hpp>      // a file
#include <tutti/comm/self.hpp>             // a lane
#include <tutti/schedule/lane.hpp>         // lane
#include <tutti/zeroth/float8_wire.hpp>    // eight bits
#include <tutti/zeroth/offload.hpp>        // pipeline
#include <tutti/zeroth/renewed_store.hpp>  // under test

#include "renewed.hpp"  // masters that the device updates
#include "trial.hpp"    // runs of the toy

using namespace tutti;
using namespace tutti::test;

namespace {

const host_queue q;

using disk = zeroth::disk_store<float, host_queue>;
zeroth::model_layout layout_of(std::size_t blocks, std::size_t element) {
    return {chain_shape{blocks}.shape(), element};
}

// Masters in float, losses of what travels.
template <class T, class Wire, class Convert> void expect_masters(const trial& t, Wire wire, Convert convert) {
    chain_reference<float> masters({t.blocks});
    std::vector<double> expected;
    for (std::size_t step = 0; step < t.steps; ++step) {
        std::vector<zeroth::loss_value> losses;
        const chain_reference<T> seen(masters, convert);
        for (const zeroth::probe& p : t.probes(step)) {
            losses.push_back({seen.loss(q, p, step), 1});
            expected.push_back(losses.back().mean);
        }
        masters.update(t.updates(step, losses));
    }
    for (const std::size_t slot_count : {1u, 2u, 3u}) {
        for (const std::size_t workers : {1u, 3u}) {
            CAPTURE(slot_count);
            CAPTURE(workers);
            zeroth::master_store<T, host_queue, Wire> store(layout_of(t.blocks, sizeof(T)), 0, wire, workers);
            const chain_reference<float> first({t.blocks});
            const auto& layout = store.layout();
            for (std::size_t m = 0; m < layout.modules(); ++m) {
                for (std::size_t k = 0; k < layout.slices(m).size(); ++k) {
                    store.write_master(m, k, view<const float>(first.values(layout.slices(m)[k].tensor)));
                }
            }
            CHECK(
                by_pipeline<T>(host_queue{}, t, store,
                               {.slot_count = slot_count, .blocks_resident = slot_count - 1, .piece = slot_count * 256},
                               no_pause{}) == expected);
            for (std::size_t m = 0; m < layout.modules(); ++m) {
                for (const zeroth::tensor_slice& s : layout.slices(m)) {
                    const auto found = store.master(m).sub(s.offset, s.count);
                    CHECK(std::memcmp(found.data(), masters.values(s.tensor).data(), s.count * sizeof(float)) == 0);
                }
            }
        }
    }
}

// Losses of what travels, masters that have taken every update, for any slots and pieces.
template <class T, class Wire, class Convert, class Round>
void expect_renewed(const trial& t, Convert convert, Round round) {
    for (const std::size_t every : {1u, 3u}) {
        for (const std::size_t residents : {0u, 1u}) {
            const bool replay = every == 1 || residents == 0;
            renewed_reference<T, Convert, Round> expected(t, convert, round);
            expected.run(q, every, residents, replay);
            for (const std::size_t slot_count : {1u, 2u, 3u}) {
                for (const std::size_t piece : {std::size_t{128}, std::size_t{1} << 20}) {
                    CAPTURE(every);
                    CAPTURE(residents);
                    CAPTURE(slot_count);
                    CAPTURE(piece);
                    zeroth::renewed_store<T, host_queue, Wire> store(layout_of(t.blocks, sizeof(T)), 0, {},
                                                                     {.piece = piece, .replay = replay});
                    fill_masters(store, chain_reference<float>({t.blocks}));
                    CHECK(by_pipeline<T>(
                              host_queue{}, t, store,
                              {.slot_count = slot_count, .blocks_resident = residents, .write_back_every = every},
                              no_pause{}) == expected.losses);
                    CHECK(holds_masters(store, expected.masters));
                }
            }
        }
    }
}

// One block of many weights of deviation 0.02, and a model that does nothing with it.
constexpr std::size_t many = 1 << 14;
struct idle_model {
    template <class W> void head(host_queue, W, std::size_t, std::size_t) {}
    template <class W> void block(host_queue, std::size_t, W, std::size_t, std::size_t) {}
    template <class W> void tail(host_queue, W, std::size_t, std::size_t, view<double> loss) {
        loss[0] = 0;
        loss[1] = 1;
    }
};
std::vector<float> first_weights() {
    std::vector<float> w(many);
    for (std::size_t i = 0; i < many; ++i) { w[i] = 0.02f * random_stream{.seed = 3}.normal(i); }
    return w;
}
// How much of one intended update the stored weights have taken: its projection on what was intended.
template <class T, class Read> double survival(zeroth::block_store<T, host_queue>& store, double rate, Read read) {
    const zeroth::pending_update u{{.seed = 8, .step = 1}, 3.0, rate, 0};
    const std::vector<float> before = read();
    idle_model model;
    {
        zeroth::offload<host_queue, T, idle_model> p({}, model, store);
        p.update({&u, 1});
    }
    const std::vector<float> now = read();
    double product = 0, square = 0;
    for (std::size_t i = 0; i < many; ++i) {
        const double intended = -rate * 3.0 * static_cast<double>(element_of(u.z, 1, i));
        product += (static_cast<double>(now[i]) - static_cast<double>(before[i])) * intended;
        square += intended * intended;
    }
    return product / square;
}
template <class T> double stored_survival(double rate) {
    zeroth::pinned_store<T, host_queue> store(zeroth::model_layout({{}, {{{1, many}}}, {}}, sizeof(T)));
    std::vector<T> w;
    for (const float x : first_weights()) { w.push_back(static_cast<T>(x)); }
    store.write(1, 0, view<const T>(w));
    return survival(store, rate, [&] {
        store.read(1, 0, view<T>(w));
        return std::vector<float>(w.begin(), w.end());
    });
}
double renewed_survival(double rate) {
    zeroth::renewed_store<float16, host_queue, zeroth::float8_wire<>> store(
        zeroth::model_layout({{}, {{{1, many}}}, {}}, sizeof(float16)));
    const std::vector<float> w = first_weights();
    std::copy_n(w.data(), many, store.master(1).data());
    return survival(store, rate, [&] {
        const view<float> now = store.master(1);
        return std::vector<float>(now.begin(), now.begin() + many);
    });
}
template <class T> double master_survival(double rate) {
    zeroth::master_store<T, host_queue> store(zeroth::model_layout({{}, {{{1, many}}}, {}}, sizeof(T)));
    const std::vector<float> w = first_weights();
    store.write_master(1, 0, view<const float>(w));
    return survival(store, rate, [&] { return std::vector<float>(store.master(1).begin(), store.master(1).end()); });
}

}  // namespace

TEST_CASE("weights in a file: the bits of the reference, bounded memory, and the file has them all afterwards") {
    std::size_t memory = 0;
    for (const std::size_t blocks : {3u, 4u, 16u}) {
        const trial t{.blocks = blocks};
        const auto expected = by_reference<float>(t);
        for (const std::size_t slot_count : {1u, 3u}) {
            CAPTURE(blocks);
            CAPTURE(slot_count);
            const scratch_folder folder;
            const std::string file = (folder / "weights").string();
            {
                disk store(layout_of(blocks, sizeof(float)), file);
                fill(store, chain_reference<float>({blocks}));
                CHECK(store.bytes() == 0);
                CHECK(by_pipeline<float>(
                          host_queue{}, t, store,
                          {.slot_count = slot_count, .write_back_every = slot_count, .piece = slot_count * 256},
                          no_pause{}) == expected.losses);
                if (slot_count == 3 && blocks >= 4) {
                    if (memory == 0) { memory = store.bytes(); }
                    CHECK(store.bytes() == memory);
                }
            }
            disk again(layout_of(blocks, sizeof(float)), file);
            CHECK(holds(again, expected.weights));
        }
    }
}

TEST_CASE("a block that is still on its way to the file is not read from it") {
    constexpr std::size_t large = 1 << 18;  // long enough for the next read to come before the write's end
    const zeroth::model_layout layout({{}, {{{1, large}}}, {}}, sizeof(float));
    const auto train = [](zeroth::block_store<float, host_queue>& store) {
        idle_model model;
        zeroth::offload<host_queue, float, idle_model> p({}, model, store);
        for (std::uint64_t step = 0; step < 4; ++step) {
            const zeroth::direction z{.seed = 8, .step = step, .kind = zeroth::distribution::rademacher};
            const zeroth::probe pristine{z, 0};
            zeroth::loss_value loss;
            p.evaluate({&pristine, 1}, 0, {&loss, 1});
            const zeroth::pending_update u{z, 1.0, 1.0, 0};
            p.update({&u, 1});
        }
    };
    const scratch_folder folder;
    const std::string file = (folder / "weights").string();
    disk store(layout, file);
    train(store);
    zeroth::pinned_store<float, host_queue> expected(layout);
    train(expected);
    CHECK(store.hash(1, 0) == expected.hash(1, 0));
}

TEST_CASE("buffers of a file stay until what was taken ahead for the pipeline before has come") {
    const scratch_folder folder;
    disk store(layout_of(3, sizeof(float)), (folder / "weights").string());
    store.open(2);
    const std::size_t held = store.bytes();
    std::size_t meanwhile = 0;
    schedule::lane<comm::self<host_queue>> uploads(comm::self<>{});
    auto before = uploads.submit("upload", [&](auto&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the next pipeline has opened the store
        meanwhile = store.bytes();
    });
    store.fetch(1, 0, {}, before);
    store.open(3);
    CHECK(held != 0);
    CHECK(meanwhile == held);
    CHECK(store.bytes() != held);
}

TEST_CASE("a file that cannot be had, or is cut meanwhile, is an error with the system's reason") {
    CHECK_THROWS_WITH_AS(disk(layout_of(1, sizeof(float)), "/nowhere/weights"),
                         "disk_store: cannot open '/nowhere/weights': No such file or directory (2)", backend_error);
    const scratch_folder folder;
    const std::string file = (folder / "weights").string();
    disk store(layout_of(3, sizeof(float)), file);
    chain_model<host_queue, float, no_pause> model({}, 2, {});
    zeroth::offload<host_queue, float, decltype(model)> p({}, model, store, {.slot_count = 1, .prefetch = false});
    std::vector<double> losses;
    const trial t;
    take_step(p, t, 0, losses);
    REQUIRE(::truncate(file.c_str(), 4096) == 0);
    CHECK_THROWS_AS(take_step(p, t, 1, losses), backend_error);
    CHECK_THROWS_WITH_AS(p.flush(), "offload: used after an error", usage_error);
}

TEST_CASE("masters of float with transfers of 16 and 8 bits: updated in float, seen as they travel") {
    expect_masters<bfloat16>(trial{.steps = 5}, zeroth::rounded_wire<bfloat16>{}, in_16_bits<bfloat16>);
    const trial eight{.blocks = 4, .steps = 3, .kind = zeroth::distribution::rademacher};
    expect_masters<float>(eight, zeroth::float8_wire<>{}, in_8_bits);
}

TEST_CASE("masters are set of tensors that there are, whole, on each rank its part") {
    const zeroth::model_layout layout({{}, {{{1, 300}, {2, 3}}}, {}}, sizeof(bfloat16), 2);
    std::vector<float> w(300);
    for (std::size_t i = 0; i < w.size(); ++i) { w[i] = static_cast<float>(i) + 0.001f; }
    for (const std::size_t rank : {0u, 1u}) {
        zeroth::master_store<bfloat16, host_queue> store(layout, rank);
        store.write_master(1, 0, view<const float>(w));
        const part own = store.own(1);
        for (std::size_t i = 0; i < own.count; ++i) {
            CHECK(store.master(1)[i] == (own.first + i < w.size() ? w[own.first + i] : 0.0f));
        }
        const auto refused = [&](std::size_t m, std::size_t k, const char* why) {
            CHECK_THROWS_WITH_AS(store.write_master(m, k, view<const float>(w)), why, usage_error);
        };
        refused(1, 2, "block_store: write_master of tensor 2 of module 1, which there is not");
        refused(0, 0, "block_store: write_master of tensor 0 of module 0, which there is not");
        refused(9, 0, "block_store: write_master of tensor 0 of module 9, which there is not");
        refused(1, 1, "block_store: write_master of 300 elements, but tensor 1 of module 1 has 3");
    }
}

TEST_CASE("masters that the device updates: eight bits travel and updates are replayed on them, masters take all") {
    const auto as_it_is = [](const std::vector<float>& v) { return v; };
    expect_renewed<float, zeroth::float8_wire<>>({.blocks = 4, .steps = 7}, in_8_bits, as_it_is);
    const auto eight_then_16 = [](const std::vector<float>& v) { return in_16_bits<bfloat16>(in_8_bits(v)); };
    expect_renewed<bfloat16, zeroth::float8_wire<>>({.blocks = 3, .steps = 6, .kind = zeroth::distribution::rademacher},
                                                    eight_then_16, in_16_bits<bfloat16>);
    expect_renewed<bfloat16, zeroth::rounded_wire<bfloat16>>({.blocks = 3, .steps = 5}, in_16_bits<bfloat16>,
                                                             in_16_bits<bfloat16>);
    CHECK_THROWS_WITH_AS(
        (zeroth::renewed_store<float, host_queue, zeroth::float8_wire<>>(layout_of(1, 4), 0, {}, {.piece = 1000})),
        "renewed_store: pieces of 1000 weights, expected a multiple of 128", usage_error);
}

TEST_CASE("masters move as rarely as they are due, in a part of the blocks each step; else what travels, up alone") {
    constexpr std::size_t blocks = 8, every = 4, steps = 12;
    zeroth::renewed_store<float, host_queue, zeroth::float8_wire<>> store(layout_of(blocks, sizeof(float)));
    chain_model<host_queue, float, no_pause> model({}, 2, {});
    zeroth::offload<host_queue, float, decltype(model)> p(
        {}, model, store, {.slot_count = 2, .write_back_every = every, .prefetch = false});
    const auto& layout = store.layout();
    const trial t{.blocks = blocks, .steps = steps};
    std::vector<double> losses;
    std::uint64_t updates = 0;
    std::vector<std::uint64_t> done(layout.modules(), 0);
    for (std::size_t step = 0; step < steps; ++step) {
        const auto before = p.counters();
        take_step(p, t, step, losses);
        const auto moved = p.counters() - before;
        std::uint64_t up = 0, down = 0, renewals = 0;
        for (std::size_t m = 0; m < layout.modules(); ++m) {
            const bool stays = m == 0 || m == layout.tail();
            const std::uint64_t behind = updates - done[m];
            const bool due = behind != 0 && (behind >= every || (updates + m) % every == 0);
            const std::uint64_t masters = layout.size(m) * sizeof(float);
            const std::uint64_t encoded = stays ? 0 : store.wire_bytes(m);
            const bool first = step == 0 && !stays;  // masters come without updates, and what travels is made
            up += (first ? masters : encoded) + (due ? masters : 0);
            down += (first ? encoded : 0) + (due ? masters + encoded : 0);
            if (due) {
                done[m] = updates;
                ++renewals;
            }
        }
        CHECK(moved.upload_bytes == up);
        CHECK(moved.offload_bytes == down);
        CHECK(renewals <= layout.modules() / every + 1);
        updates += step == 2 ? 0 : 1;
    }
}

TEST_CASE("a master keeps small updates that weights of 16 bits round away") {
    for (const double rate : {1e-7, 1e-6}) {
        CHECK(master_survival<float16>(rate) >= 0.99);
        CHECK(master_survival<bfloat16>(rate) >= 0.99);
        CHECK(renewed_survival(rate) >= 0.99);
    }
    CHECK(stored_survival<float>(1e-7) >= 0.99);
    CHECK(stored_survival<float16>(1e-7) < 0.2);
    CHECK(stored_survival<bfloat16>(1e-7) < 0.05);
    CHECK(stored_survival<bfloat16>(1e-6) < 0.2);
}

TEST_CASE("what travels is near its master: 2^-11 in float16, 2^-8 in bfloat16, 2^-4 in eight bits of a block") {
    const std::vector<float> w = first_weights();
    const std::vector<float> eight = in_8_bits(w);
    double worst16 = 0, worst = 0, worst8 = 0;
    for (std::size_t i = 0; i < many; i += 32) {
        double largest = 0;
        for (std::size_t k = i; k < i + 32; ++k) { largest = std::max(largest, std::fabs(static_cast<double>(w[k]))); }
        for (std::size_t k = i; k < i + 32; ++k) {
            const auto x = static_cast<double>(w[k]);
            const double size = std::fabs(x);
            if (size > 0x1p-14) {
                worst16 = std::max(
                    worst16, std::fabs(static_cast<double>(static_cast<float>(static_cast<float16>(w[k]))) - x) / size);
            }
            worst = std::max(
                worst, std::fabs(static_cast<double>(static_cast<float>(static_cast<bfloat16>(w[k]))) - x) / size);
            worst8 = std::max(worst8, std::fabs(static_cast<double>(eight[k]) - x) / std::max(size, largest * 0x1p-13));
        }
    }
    CHECK(worst16 <= 0x1p-11);
    CHECK(worst <= 0x1p-8);
    CHECK(worst8 <= 0x1p-4);
    CHECK(worst8 > 0x1p-5);
}
