// Runs of the trainer inside the test's own process, and how two loss curves are compared.
// Needs the trainer's headers. Threads only; tests under mpirun bring their own communicator.
#pragma once

#include <algorithm>  // max
#include <cmath>      // abs
#include <cstdint>    // bytes
#include <mutex>      // results of ranks
#include <vector>     // text

#include <tutti/comm/threads.hpp>  // ranks
#include <tutti/core/philox.hpp>   // text

#include "blas.hpp"
#include "options.hpp"
#include "run_on_cpu.hpp"

namespace trainer_test {

/// Text with something to learn: sixteen words in random order.
[[nodiscard]] inline transformer::corpus some_text(int context) {
    std::vector<std::uint8_t> text;
    for (std::uint64_t i = 0; text.size() < 20'000; ++i) {
        const auto word = tutti::random_stream{.seed = 5}.below(i, 16);
        for (std::uint64_t k = 0; k < 2 + word % 5; ++k) {
            text.push_back(static_cast<std::uint8_t>('a' + (word * 7 + k * 3) % 26));
        }
        text.push_back(' ');
    }
    return {std::move(text), context};
}

/// nanoGPT's CPU configuration for a few steps.
[[nodiscard]] inline transformer::options short_run(const char* pipeline, int ranks, int steps = 20) {
    transformer::options o;
    o.pipeline = pipeline;
    o.ranks = ranks;
    o.steps = steps;
    o.quiet = true;
    transformer::complete(o, std::string_view(pipeline) == "local", 0);
    return o;
}

template <class T>
[[nodiscard]] transformer::result train_on_threads(const transformer::options& o, const transformer::corpus& text) {
    transformer::one_thread_per_rank();
    transformer::result first;
    std::mutex mutex;
    tutti::comm::threads::launch(o.ranks, [&](tutti::comm::threads& rank) {
        transformer::any_ranks world(rank);
        auto r = transformer::run_on_cpu<T>(world, o, text, tutti::clock_type::now());
        const std::lock_guard lock(mutex);
        if (world.rank() == 0) { first = std::move(r); }
    });
    return first;
}

/// Largest relative difference of two loss curves, and of the validation at their ends.
[[nodiscard]] inline double distance(const transformer::result& a, const transformer::result& b) {
    if (a.training.size() != b.training.size()) { return HUGE_VAL; }
    double worst = std::abs(a.validation_loss() / b.validation_loss() - 1);
    for (std::size_t i = 0; i < a.training.size(); ++i) {
        worst = std::max(worst, std::abs(a.training[i].second / b.training[i].second - 1));
    }
    return worst;
}

}  // namespace trainer_test
