// A bit that flips on one rank's device, in a block that stays there, while ranks tune the toy: who finds it, and when.
// Needs trial.hpp and comm/threads. Queues may be devices; ranks are threads and talk on the host.
#pragma once

#include <cstddef>  // size_t
#include <cstdint>  // steps

#include <tutti/comm/threads.hpp>      // ranks
#include <tutti/zeroth/offload.hpp>    // under test
#include <tutti/zeroth/replicate.hpp>  // under test

#include "mismatch.hpp"  // who is blamed
#include "trial.hpp"     // the toy

namespace tutti::test {

// flip(queue, weights) is called once for block 0 as it is, when `armed` says so. Of one-sided estimates the first probe
// sees the weights themselves.
template <queue Q, class Flip> class flipping_model : public chain_model<Q, float, no_pause> {
    using base = chain_model<Q, float, no_pause>;
    Flip flip_;

public:
    bool armed = false;
    flipping_model(Q q, Flip flip) : base(q, 2, {}), flip_(flip) {}
    void block(Q q, std::size_t number, zeroth::module_weights<float, typename Q::memory_type> w, std::size_t branch,
               std::size_t micro_batch) {
        base::block(q, number, w, branch, micro_batch);
        if (armed && number == 0 && branch == 0) {
            flip_(q, w[0]);
            armed = false;
        }
    }
};

// What 3 ranks throw that compare weights every 3 steps, where rank 1's flips in step `at`, counted from 1; "nothing" if
// they make all of 7 steps.
template <queue Q, class Flip> mismatch flipped(std::uint64_t at, Flip flip) {
    return mismatch_of(3, 1, 7, [&](comm::threads& world, auto run) {
        zeroth::pinned_store<float, Q> store(zeroth::model_layout(chain_shape{3}.shape(), sizeof(float)));
        fill(store, chain_reference<float>({3}));
        Q q{};
        flipping_model<Q, Flip> model(q, flip);
        zeroth::offload<Q, float, decltype(model)> p(q, model, store, {.slot_count = 2, .blocks_resident = 1});
        zeroth::replicated tuning(world.duplicate("tuning"), p, {.sides = zeroth::estimate::one_sided, .seed = 4},
                                  {.data = 3, .shards = 3, .check_every = 3});
        run([&](std::uint64_t step) {
            model.armed = world.rank() == 1 && step == at;
            tuning.step(1e-4);
        });
    });
}

}  // namespace tutti::test
