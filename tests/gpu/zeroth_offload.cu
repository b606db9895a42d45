// The offload pipeline on a GPU: the bits of weights that are computed on the host and of a model that runs on the
// device; page-locked storage, device memory that does not depend on depth, and slices that ranks gather over NCCL.
#include <algorithm>  // min
#include <cstddef>    // size_t
#include <cstdint>    // bytes
#include <stdexcept>  // what a rank finds wrong
#include <string>     // paths
#include <vector>     // losses

#include <cuda_runtime_api.h>  // attributes

#include <doctest/doctest.h>  // checks

#include <support/scratch_folder.hpp>         // a file
#include <tutti/comm/nccl.hpp>                // ranks
#include <tutti/compress/buckets.cuh>         // eight bits on the device
#include <tutti/zeroth/disk_store.hpp>        // a store
#include <tutti/zeroth/gather_by_copies.hpp>  // devices of one process
#include <tutti/zeroth/master_store.hpp>      // a store
#include <tutti/zeroth/offload.hpp>           // under test
#include <tutti/zeroth/perturbation.cuh>      // on the device
#include <zeroth/flipped.hpp>                 // bits that flip
#include <zeroth/renewed.hpp>                 // masters that the device updates
#include <zeroth/trial.hpp>                   // runs of the toy

#include "device.hpp"  // require_device

using namespace tutti;
using namespace tutti::test;

namespace tutti::test {

template <class T> __global__ void run_chain(const chain_operation<T, device_memory> op) {
    if (threadIdx.x == 0) { op(); }
}
template <class T> void launch(const cuda_queue& q, const chain_operation<T, device_memory>& op) {
    tutti::detail::start(q, op.name, run_chain<T>, 1, 32, op);
}

}  // namespace tutti::test

namespace {

__global__ void spin(long long cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {}
}
__global__ void flip_last_bit(float* weight) { *reinterpret_cast<unsigned*>(weight) ^= 1u; }
// Makes the compute stream late now and then.
struct spinning {
    cuda_queue q;
    std::uint32_t state;
    void operator()() {
        state = state * 1664525u + 1013904223u;
        if (state >> 30 == 0) { tutti::detail::start(q, "spin", spin, 1, 1, static_cast<long long>(state >> 14)); }
    }
};

template <class T> using pinned = zeroth::pinned_store<T, cuda_queue>;
// Not a doctest assertion: ranks are threads.
void require(bool holds, const char* what) {
    if (!holds) { throw std::runtime_error(what); }
}
const auto nothing = [](std::size_t, const auto&) {};

template <class T> void expect_equal_bits(const trial& t, std::uint32_t runs) {
    const cuda_queue q(0);
    const auto expected = by_reference<T>(t, nothing, q);
    for (std::uint32_t run = 0; run < runs; ++run) {
        CAPTURE(run);
        pinned<T> store(zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(T)));
        fill(store, chain_reference<T>({t.blocks}));
        const cuda_queue own(0);
        const auto losses = by_pipeline<T>(own, t, store,
                                           {.slot_count = 1 + run % 4,
                                            .blocks_resident = std::min<std::size_t>(run / 4 % 3, t.blocks),
                                            .write_back_every = 1 + run / 8 % 2,
                                            .prefetch = run % 5 != 0,
                                            .piece = run % 3 == 0 ? std::size_t{1} << 25 : run % 3 * 256},
                                           spinning{own, run});
        CHECK(losses == expected.losses);
        CHECK(holds(store, expected.weights));
    }
}

}  // namespace

TEST_CASE("a hundred runs with late streams give the bits of the reference, float and 16 bits") {
    require_device();
    expect_equal_bits<float>({.blocks = 7, .steps = 4}, 100);
    expect_equal_bits<bfloat16>({.blocks = 5, .steps = 4}, 16);
    expect_equal_bits<float16>({.blocks = 5, .steps = 4, .signs = {0, 1}, .kind = zeroth::distribution::rademacher},
                               16);
    expect_equal_bits<float>({.blocks = 1, .steps = 5, .directions = 2}, 16);
}

TEST_CASE("eight bits of masters: encoded, decoded and updated on the device with the bits of the host") {
    require_device();
    const cuda_queue q(0);
    const trial t{.blocks = 5, .steps = 6};
    const auto eight_then_16 = [](const std::vector<float>& v) { return in_16_bits<float16>(in_8_bits(v)); };
    for (std::uint32_t run = 0; run < 24; ++run) {
        CAPTURE(run);
        const std::size_t every = 1 + run % 3, residents = run / 3 % 2;
        renewed_reference<float16, decltype(eight_then_16), std::vector<float16> (*)(const std::vector<float>&)>
            expected(t, eight_then_16, in_16_bits<float16>);
        expected.run(q, every, residents, run % 5 != 0);
        zeroth::renewed_store<float16, cuda_queue, zeroth::float8_wire<>> store(
            zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float16)), 0, {},
            {.piece = run % 2 == 0 ? 128 : std::size_t{1} << 20, .replay = run % 5 != 0});
        fill_masters(store, chain_reference<float>({t.blocks}));
        const cuda_queue own(0);
        const auto losses = by_pipeline<float16>(
            own, t, store, {.slot_count = 1 + run % 4, .blocks_resident = residents, .write_back_every = every},
            spinning{own, run});
        CHECK(losses == expected.losses);
        CHECK(holds_masters(store, expected.masters));
    }
}

TEST_CASE("a bit that flips in a block that stays on one rank's device is found by the next comparison") {
    require_device();
    const auto flip = [](const cuda_queue& q, view<const float, device_memory> w) {
        tutti::detail::start(q, "flip", flip_last_bit, 1, 1, const_cast<float*>(w.data()));
    };
    const mismatch found = flipped<cuda_queue>(4, flip);
    CAPTURE(found.text);
    CHECK(found.text.find("agree: weights after step 5 differs") != std::string::npos);
    CHECK(found.step == 6);
    CHECK(flipped<cuda_queue>(0, flip).text == "nothing");
}

TEST_CASE("every host buffer that a transfer uses is page-locked") {
    require_device();
    const zeroth::model_layout layout(chain_shape{5}.shape(), sizeof(float16));
    const auto expect_locked = [](const void* p) {
        cudaPointerAttributes attributes{};
        REQUIRE(cudaPointerGetAttributes(&attributes, p) == cudaSuccess);
        CHECK(attributes.type == cudaMemoryTypeHost);
        CHECK(reinterpret_cast<std::uintptr_t>(p) % zeroth::model_layout::alignment == 0);
    };
    const auto expect_all_locked = [&](auto& store) {
        store.open(2);
        for (std::size_t m = 1; m <= layout.blocks(); ++m) {
            for (const std::size_t slot : {0u, 1u}) {
                expect_locked(store.source(m, slot).data());
                if (!store.sink(m, slot).empty()) { expect_locked(store.sink(m, slot).data()); }
            }
        }
    };
    pinned<float16> weights(layout);
    expect_all_locked(weights);
    for (std::size_t m = 0; m < layout.modules(); ++m) { expect_locked(weights.image(m).data()); }
    zeroth::renewed_store<float16, cuda_queue, zeroth::float8_wire<>> renewed(layout);
    expect_all_locked(renewed);
    for (std::size_t m = 0; m < layout.modules(); ++m) { expect_locked(renewed.master(m).data()); }
    zeroth::master_store<float16, cuda_queue> masters(layout);
    expect_all_locked(masters);
    const scratch_folder folder;
    zeroth::disk_store<float16, cuda_queue> disk(layout, (folder / "weights").string());
    expect_all_locked(disk);
}

TEST_CASE("device memory is the same at every depth, by the queue's account and by the driver's pool") {
    require_device();
    std::size_t first = 0;
    std::uint64_t first_high = 0;
    const cudaMemPool_t pool = tutti::detail::cuda_pool::of(0).handle();
    for (const std::size_t blocks : {4u, 8u, 16u, 32u}) {
        CAPTURE(blocks);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        std::uint64_t high = 0;
        REQUIRE(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high) == cudaSuccess);
        const trial t{.blocks = blocks, .steps = 2};
        pinned<float> store(zeroth::model_layout(chain_shape{blocks}.shape(), sizeof(float)));
        const cuda_queue q(0);
        chain_model<cuda_queue, float, no_pause> model(q, 2, {});
        zeroth::offload<cuda_queue, float, decltype(model)> p(q, model, store, {.slot_count = 3});
        std::vector<double> losses;
        for (std::size_t step = 0; step < t.steps; ++step) { take_step(p, t, step, losses); }
        p.flush();
        REQUIRE(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high) == cudaSuccess);
        if (first == 0) {
            first = p.peak_device_bytes();
            first_high = high;
        }
        CHECK(p.peak_device_bytes() == first);
        CHECK(high == first_high);
        CHECK(high >= first);
    }
}

TEST_CASE("memory that cannot be page-locked is an error that says which, not ordinary memory") {
    require_device();
    zeroth::model_shape shape = chain_shape{2}.shape();
    shape.blocks[1][0].count = std::size_t{1} << 50;
    CHECK_THROWS_WITH_AS(pinned<float16>(zeroth::model_layout(shape, sizeof(float16))),
                         doctest::Contains("pinned_store: module 2 of 4: 2251799813"), backend_error);
    CHECK(cudaGetLastError() == cudaSuccess);  // the error is gone
    pinned<float16> store(zeroth::model_layout(chain_shape{2}.shape(), sizeof(float16)));
}

TEST_CASE("slices by NCCL's messages and by copies from devices of the process have the bits of its collective") {
    require_device();
    int devices = 0;
    REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
    if (devices < 2) {
        MESSAGE("slices on 2 GPUs are left out: there is one");
        return;
    }
    const trial t{.blocks = 5, .steps = 6};
    const auto expected = by_reference<float>(t, nothing, cuda_queue(0));
    const auto run = [&](int n, auto make) {
        comm::nccl::launch(n, [&](comm::nccl& world) {
            auto gather = make(world);
            pinned<float> store(
                zeroth::model_layout(chain_shape{t.blocks}.shape(), sizeof(float), static_cast<std::size_t>(n)),
                static_cast<std::size_t>(world.rank()));
            fill(store, chain_reference<float>({t.blocks}));
            const cuda_queue q = world.queue();
            using exchange = zeroth::sliced<comm::nccl, decltype(gather)>;
            const auto losses = by_pipeline<float>(q, t, store, {.slot_count = 2},
                                                   spinning{q, static_cast<std::uint32_t>(world.rank())},
                                                   exchange(world.duplicate("slices"), gather));
            require(losses == expected.losses, "a rank has other losses");
            require(holds(store, expected.weights), "a rank has other weights");
        });
    };
    for (const int n : {2, 4}) {
        if (n > devices) { continue; }
        run(n, [](comm::nccl&) { return zeroth::gather_by_messages(); });
        for (int again = 0; again < 8; ++again) {
            run(n, [](comm::nccl& c) { return zeroth::gather_by_copies<cuda_queue>::over(c); });
        }
        run(n, [](comm::nccl& c) {
            auto fastest =
                zeroth::fastest_gather(c, std::size_t{1} << 26, zeroth::gather_collectively(),
                                       zeroth::gather_by_messages(), zeroth::gather_by_copies<cuda_queue>::over(c));
            require(fastest.times()[2] < 1, "GPUs of one process cannot read each other's memory");
            return fastest;
        });
    }
}

TEST_CASE("slices over NCCL give the bits of whole blocks, 1/N up and down a rank") {
    require_device();
    int devices = 0;
    REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
    const trial t{.blocks = 4, .steps = 5};
    const auto expected = by_reference<float>(t, nothing, cuda_queue(0));
    for (const int n : {1, 2, 4}) {
        if (n > devices) {
            MESSAGE("slices on " << n << " GPUs are left out: there are " << devices);
            continue;
        }
        comm::nccl::launch(n, [&](comm::nccl& world) {
            const zeroth::model_layout layout(chain_shape{t.blocks}.shape(), sizeof(float),
                                              static_cast<std::size_t>(n));
            pinned<float> store(layout, static_cast<std::size_t>(world.rank()));
            fill(store, chain_reference<float>({t.blocks}));
            const cuda_queue q = world.queue();
            chain_model<cuda_queue, float, spinning> model(q, 2, {q, static_cast<std::uint32_t>(world.rank())});
            using exchange = zeroth::sliced<comm::nccl>;
            zeroth::offload<cuda_queue, float, decltype(model), exchange> p(q, model, store, {.slot_count = 3},
                                                                            exchange(world.duplicate("slices")));
            std::vector<double> losses;
            const auto before = p.counters();
            for (std::size_t step = 0; step < t.steps; ++step) { take_step(p, t, step, losses); }
            world.agree(p.hash(), "weights");
            require(losses == expected.losses, "a rank has other losses");
            require(holds(store, expected.weights), "a rank has other weights");
            std::uint64_t travelers = 0, all = 0;
            for (std::size_t m = 0; m < layout.modules(); ++m) {
                all += layout.size(m) * sizeof(float);
                travelers += m == 0 || m == layout.tail() ? 0 : layout.size(m) * sizeof(float);
            }
            const auto moved = p.counters() - before;
            const auto parts = static_cast<std::uint64_t>(n);
            // Four steps have updates, the last of which the flush writes; uploads ahead of the next pass: three.
            require(moved.offload_bytes == (4 * travelers + (all - travelers)) / parts, "bytes down");
            require(moved.upload_bytes >= 6 * travelers / parts && moved.upload_bytes < 7 * travelers / parts,
                    "bytes up");
        });
    }
}
