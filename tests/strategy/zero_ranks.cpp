// ZeRO over several ranks: bits equal to data parallelism, whatever the buckets; exact traffic and memory; failures.
#include <doctest/doctest.h>  // checks

#include <atomic>    // counts over ranks
#include <chrono>    // deadlines
#include <cmath>     // isfinite
#include <limits>    // nan
#include <optional>  // seeds
#include <string>    // texts
#include <tuple>     // what a run gives
#include <vector>    // results

#include <support/build.hpp>                 // TUTTI_TEST_TYPES
#include "sharded_toy.hpp"                   // trainer
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/strategy/data_parallel.hpp>  // what it has to equal
#include <tutti/strategy/zero.hpp>           // zero

using namespace tutti;
using namespace std::chrono_literals;
using comm::threads;
using optimize::adamw;
using strategy::data_parallel;
using strategy::zero;
using test::layout;
using test::plan_of_steps;
using test::for_stages;
using test::outcome;
using test::several_blocks;
using test::sized_toy;
using test::train_sharded;

static_assert(strategy::shardable<zero<1, threads, adamw>> && strategy::shardable<zero<2, threads, adamw, bfloat16>>);
static_assert(strategy::shardable<zero<3, comm::counted<threads>, optimize::sgd, double>>);

namespace {

struct setup {
    std::size_t bucket_bytes = 20000;
    layout values = layout::together;
    layout gradients = layout::none;
    std::optional<std::uint64_t> rounding{};
};

/// Trains a strategy that make(comm) gives on n ranks.
template <class T, class Make>
outcome<T> trained(int n, const std::vector<std::size_t>& sizes, const plan_of_steps& r, const setup& how, Make make) {
    return test::of_all_ranks<T>(n, [&](threads& world) {
        sized_toy<T> t(sizes, how.values, how.gradients, 1);
        return test::train_to_the_end(make(world.duplicate("dp")), t, world, r);
    });
}
template <int Stage, class T>
outcome<T> sharded(int n, const std::vector<std::size_t>& sizes, const plan_of_steps& r, const setup& how) {
    return trained<T>(n, sizes, r, how, [&](threads c) {
        return zero<Stage, threads, adamw, T>(
            std::move(c), {}, {.bucket_bytes = how.bucket_bytes, .stochastic_rounding_seed = how.rounding});
    });
}
template <class T>
outcome<T> replicated(int n, const std::vector<std::size_t>& sizes, const plan_of_steps& r, const setup& how) {
    return trained<T>(n, sizes, r, how, [&](threads c) {
        return data_parallel<threads, adamw, T>(
            std::move(c), {}, {.bucket_bytes = how.bucket_bytes, .stochastic_rounding_seed = how.rounding});
    });
}
template <class T>
outcome<T> averaged_every_time(int n, const std::vector<std::size_t>& sizes, const plan_of_steps& r) {
    return trained<T>(n, sizes, r, {},
                      [](threads c) { return test::mean_of_every_micro_batch<threads, T>(std::move(c)); });
}

const std::vector<int> counts = test::sanitized ? std::vector{2, 3} : std::vector{1, 2, 3, 4};  // of ranks

}  // namespace

// deepspeedai/DeepSpeed#966, #757, #4298; pytorch/pytorch#88621, #170862
TEST_CASE_TEMPLATE("with one micro-batch all stages have the bits of data parallelism, whatever the buckets", T,
                   TUTTI_TEST_TYPES(float, bfloat16, double)) {
    for (const int n : counts) {
        const auto expected = replicated<T>(n, several_blocks, {}, {});
        for (const double norm : expected.norms) { REQUIRE(norm > plan_of_steps{}.clip_norm); }  // clipping does happen
        for (const std::size_t bytes : {sizeof(T), std::size_t{5000}, std::size_t{40000}, std::size_t{1} << 30}) {
            CAPTURE(n);
            CAPTURE(bytes);
            for_stages([&](auto stage) { CHECK(sharded<stage, T>(n, several_blocks, {}, {bytes}) == expected); });
        }
    }
}

// deepspeedai/DeepSpeed#1488, #4815
TEST_CASE_TEMPLATE("accumulated: stage 1 is data parallelism, stages 2 and 3 average every micro-batch", T,
                   TUTTI_TEST_TYPES(float, bfloat16, double)) {
    for (const int n : counts) {
        const plan_of_steps four{.micro = 4};
        const auto once = replicated<T>(n, several_blocks, four, {});
        const auto every_time = averaged_every_time<T>(n, several_blocks, four);
        for (const std::size_t bytes : {sizeof(T), std::size_t{30000}, std::size_t{1} << 30}) {
            CAPTURE(n);
            CAPTURE(bytes);
            CHECK(sharded<1, T>(n, several_blocks, four, {bytes}) == once);
            CHECK(sharded<2, T>(n, several_blocks, four, {bytes}) == every_time);
            CHECK(sharded<3, T>(n, several_blocks, four, {bytes}) == every_time);
        }
        if constexpr (std::same_as<T, double>) {
            for (std::size_t e = 0; e < once.values.size(); ++e) {
                REQUIRE(once.values[e] == doctest::Approx(every_time.values[e]).epsilon(1e-12));
            }
        }
    }
}

TEST_CASE_TEMPLATE("where the trainer's tensors lie does not change a bit", T, TUTTI_TEST_TYPES(float, float16)) {
    constexpr int n = 3;
    const plan_of_steps r{.steps = 2, .micro = 2};
    const auto once = replicated<T>(n, several_blocks, r, {});
    const auto every_time = averaged_every_time<T>(n, several_blocks, r);
    for (const layout values : {layout::together, layout::scattered}) {
        for (const layout gradients : {layout::none, layout::together, layout::scattered}) {
            for (const std::size_t bytes : {std::size_t{300}, std::size_t{40000}}) {
                const setup how{bytes, values, gradients};
                for_stages([&](auto stage) {
                    CHECK(sharded<stage, T>(n, several_blocks, r, how) == (stage == 1 ? once : every_time));
                });
            }
        }
    }
}

TEST_CASE("more ranks than elements, and parameters of one element") {
    for (const int n : {2, 3, 4}) {
        const plan_of_steps r{.micro = 2, .clip_norm = 0.5};
        const auto once = replicated<double>(n, test::tiny, r, {});
        const auto every_time = averaged_every_time<double>(n, test::tiny, r);
        for (const std::size_t bytes : {sizeof(double), std::size_t{1} << 20}) {
            for_stages([&](auto stage) {
                CHECK(sharded<stage, double>(n, test::tiny, r, {bytes}) == (stage == 1 ? once : every_time));
                // One parameter, and none at all.
                CHECK(sharded<stage, double>(n, {1}, {}, {bytes}) == replicated<double>(n, {1}, {}, {}));
                CHECK(sharded<stage, double>(n, {}, {}, {bytes}) == replicated<double>(n, {}, {}, {}));
                CHECK(sharded<stage, double>(n, {0, 0}, {}, {bytes}) == replicated<double>(n, {0, 0}, {}, {}));
            });
        }
    }
}
