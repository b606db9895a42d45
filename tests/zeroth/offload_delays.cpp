// The offload pipeline where everything may be late: threads of lanes that sleep, and streams with events alone. A
// hundred runs give the bits of the reference; a wait that is missing shows here, and under the thread sanitizer.
#include <tutti/zeroth/offload.hpp>  // under test

#include <cstdint>  // seeds

#include <doctest/doctest.h>  // checks

#include "delayed.hpp"  // late queues and stores
#include "trial.hpp"    // runs of the toy

using namespace tutti;
using namespace tutti::test;

TEST_CASE("a hundred runs with late lanes, transfers and modules give the same bits") {
    const trial t{.blocks = 5, .steps = 3};
    const auto expected = by_reference<float>(t);
    for (std::uint32_t run = 0; run < 100; ++run) {
        CAPTURE(run);
        late_store<float, host_queue> store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)), run);
        fill(store, chain_reference<float>({t.blocks}));
        const auto losses = by_pipeline<float>(host_queue{}, t, store,
                                               {.slot_count = 1 + run % 4,
                                                .blocks_resident = run / 4 % 2,
                                                .write_back_every = 1 + run / 8 % 2,
                                                .piece = run % 3 == 0 ? std::size_t{1} << 25 : run % 3 * 256},
                                               nap(run));
        CHECK(losses == expected.losses);
        CHECK(holds(store, expected.weights));
    }
}

TEST_CASE("a hundred runs on streams that are ordered by events give the same bits") {
    for (const std::size_t blocks : {1u, 2u, 5u}) {
        const trial t{.blocks = blocks, .steps = 3};
        const auto expected = by_reference<bfloat16>(t);
        for (std::uint32_t run = 0; run < 34; ++run) {
            CAPTURE(blocks);
            CAPTURE(run);
            zeroth::pinned_store<bfloat16, stream_queue> store(
                zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(bfloat16)));
            fill(store, chain_reference<bfloat16>({t.blocks}));
            const auto losses = by_pipeline<bfloat16>(stream_queue{}, t, store,
                                                      {.slot_count = 1 + run % 4,
                                                       .blocks_resident = run / 4 % 2,
                                                       .write_back_every = 1 + run / 8 % 2,
                                                       .piece = run % 3 == 0 ? std::size_t{1} << 25 : run % 3 * 256},
                                                      no_pause{});
            CHECK(losses == expected.losses);
            CHECK(holds(store, expected.weights));
        }
    }
}

TEST_CASE("an offload that outlasts the next pass holds up its block") {
    const trial t{.blocks = 5, .steps = 5};
    const auto expected = by_reference<float>(t);
    late_store<float, host_queue> store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)), 1,
                                        std::chrono::milliseconds(100));
    fill(store, chain_reference<float>({t.blocks}));
    CHECK(by_pipeline<float>(host_queue{}, t, store, {.slot_count = 2, .write_back_every = 2, .piece = 512},
                             no_pause{}) == expected.losses);
    CHECK(holds(store, expected.weights));
}

TEST_CASE("a model that throws ends its pipeline, wherever it does, and leaves no memory and no thread behind") {
    const trial t{.blocks = 5, .steps = 3};
    const host_queue q;
    for (std::size_t call = 1; call <= 14 * 2; call += 3) {
        CAPTURE(call);
        late_store<float, host_queue> store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float)), 1);
        fill(store, chain_reference<float>({t.blocks}));
        CHECK_THROWS_WITH_AS(by_pipeline<float>(q, t, store, {.slot_count = 2}, nap(1, call)),
                             "the model has had enough", std::runtime_error);
        CHECK(q.account().live() == 0);
    }
}
