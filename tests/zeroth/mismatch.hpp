// Steps of ranks one of which comes to differ: who is blamed, when, and in what words.
// Needs comm/threads.
#pragma once

#include <atomic>   // steps
#include <cstdint>  // steps
#include <string>   // messages
#include <vector>   // blamed ranks

#include <support/failure.hpp>     // expect
#include <tutti/comm/threads.hpp>  // ranks

namespace tutti::test {

struct mismatch {
    std::string text = "nothing";  // that was thrown
    std::uint64_t step = 0;        // in which, counted from 1; 0: in none
};

// body(world, run) makes what a rank has and calls run(step), which calls step(k) for steps 1 to `steps`. A mismatch in
// one of them must blame rank `blamed` alone.
template <class Body> mismatch mismatch_of(int ranks, int blamed, std::uint64_t steps, Body body) {
    std::string text = "nothing";
    std::atomic<std::uint64_t> at{0};
    const auto run = [&](auto step) {
        for (std::uint64_t k = 1; k <= steps; ++k) {
            try {
                step(k);
            } catch (const mismatch_error& e) {
                expect(e.ranks() == std::vector<int>{blamed}, "other ranks than {} are blamed: {}", blamed, e.what());
                at = k;
                throw;
            }
        }
    };
    try {
        comm::threads::launch(ranks, [&](comm::threads& world) { body(world, run); });
    } catch (const mismatch_error& e) { text = e.what(); }
    return {text, at};
}

}  // namespace tutti::test
