// Ranks that share the work of a step and the transfers of its blocks: perturbation, data and both, with slices. Losses and
// weights have the bits of one rank that does everything; what ranks tell each other is 16 bytes; a bit that flips in a
// block on a device is found.
#include <cmath>    // nextafter
#include <cstddef>  // size_t
#include <cstdint>  // bytes
#include <string>   // texts
#include <vector>   // weights

#include <doctest/doctest.h>  // checks

#include <support/failure.hpp>         // expect
#include <tutti/comm/threads.hpp>      // ranks
#include <tutti/zeroth/offload.hpp>    // under test
#include <tutti/zeroth/replicate.hpp>  // steps

#include "delayed.hpp"  // naps
#include "flipped.hpp"  // bits that flip
#include "trial.hpp"    // the toy

using namespace tutti;
using namespace tutti::test;
using comm::threads;

namespace {

struct outcome {
    std::vector<double> losses;
    std::vector<std::vector<float>> weights;
    friend bool operator==(const outcome&, const outcome&) = default;
};

constexpr std::size_t blocks = 4;
constexpr std::size_t steps = 4;

// All ranks of `how` by threads; each moves 1/N of every block.
outcome tuned(const zeroth::division& how) {
    const int n = how.sides * how.data * how.directions;
    outcome result;
    const zeroth::model_layout whole(chain_shape{blocks}.shape(), sizeof(float));
    for (std::size_t m = 0; m < whole.modules(); ++m) {
        for (const zeroth::tensor_slice& s : whole.slices(m)) { result.weights.emplace_back(s.count); }
    }
    std::vector<std::vector<double>> losses(static_cast<std::size_t>(n));
    threads::launch(n, [&](threads& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        zeroth::pinned_store<float, host_queue> store(
            zeroth::model_layout(chain_shape{blocks}.shape(), sizeof(float), static_cast<std::size_t>(n)), rank);
        fill(store, chain_reference<float>({blocks}));
        const host_queue q = world.queue();
        chain_model<host_queue, float, nap> model(q, 4, nap(static_cast<std::uint32_t>(rank)));
        using exchange = zeroth::sliced<threads>;
        zeroth::offload<host_queue, float, decltype(model), exchange> p(
            q, model, store, {.slot_count = 2, .write_back_every = 2}, exchange(world.duplicate("slices")));
        zeroth::replicated tuning(world.duplicate("tuning"), p, {.epsilon = 1e-2, .directions = 2, .seed = 4}, how);
        for (std::size_t step = 0; step < steps; ++step) {
            const auto r = tuning.step(0.01);
            losses[rank].push_back(r.loss_plus);
            losses[rank].push_back(r.loss_other);
        }
        p.flush();
        std::size_t k = 0;
        for (std::size_t m = 0; m < whole.modules(); ++m) {
            for (std::size_t i = 0; i < whole.slices(m).size(); ++i, ++k) { store.read(m, i, result.weights[k]); }
        }
        // Two directions of a gather each, a shard at a time.
        expect(tuning.scalar_bytes() <= 16 * steps * 2 * how.shards, "{} bytes told", tuning.scalar_bytes());
    });
    for (const auto& other : losses) { CHECK(other == losses[0]); }
    result.losses = losses[0];
    return result;
}

}  // namespace

TEST_CASE("perturbation, data and both, with slices: the bits of one rank") {
    const outcome one = tuned({.shards = 2});
    CHECK(one.losses[0] != one.losses[1]);
    CHECK(one.losses[0] != one.losses[2]);
    CHECK(tuned({.sides = 2, .shards = 2}) == one);
    CHECK(tuned({.data = 2, .shards = 2}) == one);
    CHECK(tuned({.sides = 2, .data = 2, .shards = 2}) == one);
    CHECK(tuned({.sides = 2, .directions = 2, .shards = 2}) == one);
}

TEST_CASE("a bit that flips in a block on one rank's device is found by the next comparison") {
    const auto flip = [](const host_queue&, view<const float> w) {
        auto* const first = const_cast<float*>(w.data());
        *first = std::nextafter(*first, 9.0f);
    };
    for (const std::uint64_t at : {1u, 3u, 4u, 6u}) {
        CAPTURE(at);
        const mismatch found = flipped<host_queue>(at, flip);
        CAPTURE(found.text);
        CHECK(found.text.find(at <= 3 ? "agree: weights after step 2 differs"
                                      : "agree: weights after step 5 differs") != std::string::npos);
        CHECK(found.step == (at <= 3 ? 3 : 6));
    }
    CHECK(flipped<host_queue>(7, flip).text == "nothing");  // the next comparison would be after step 9
    CHECK(flipped<host_queue>(0, flip).text == "nothing");
}
