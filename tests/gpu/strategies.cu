// Strategies on a GPU, one rank: the bits of the same strategies on the host.
#include <tutti/strategy/data_parallel.cuh>  // under test
#include <tutti/strategy/local_update.cuh>   // under test
#include <tutti/strategy/zero.cuh>           // under test

#include <cstddef>   // size_t
#include <cstdint>   // seeds
#include <optional>  // seeds
#include <utility>   // move

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>       // one rank
#include <tutti/optimize/adamw.hpp>  // optimizer

#include "device.hpp"    // require_device
#include "training.hpp"  // train

using namespace tutti;
using comm::self;
using optimize::adamw;
using strategy::local_update_rule;

namespace {

template <class T, class Make> void expect_equal_bits(Make make) {
    for (const bool own_gradients : {false, true}) {
        CAPTURE(own_gradients);
        test::expect_same_bits(test::train<T>(self<host_queue>(), make, own_gradients),
                               test::train<T>(self<cuda_queue>(cuda_queue(0)), make, own_gradients));
    }
}

constexpr std::size_t bucket_bytes = 8192;
template <class T> struct make_replica {
    std::optional<std::uint64_t> seed{};
    template <communicator C> auto operator()(C c) const {
        return strategy::data_parallel<C, adamw, T>(std::move(c), {},
                                                    {.bucket_bytes = bucket_bytes, .stochastic_rounding_seed = seed});
    }
};
template <int Stage, class T> struct make_zero {
    std::optional<std::uint64_t> seed{};
    template <communicator C> auto operator()(C c) const {
        return strategy::zero<Stage, C, adamw, T>(std::move(c), {},
                                                  {.bucket_bytes = bucket_bytes, .stochastic_rounding_seed = seed});
    }
};
// Inner makes the replica.
template <class Inner> struct make_rounds {
    local_update_rule rule;
    Inner inner{};
    template <communicator C> auto operator()(C c) const {
        auto within = inner(c.duplicate("inner"));
        return strategy::local_update<C, decltype(within)>(std::move(c), std::move(within), rule);
    }
};
struct make_local {
    template <communicator C> auto operator()(C c) const {
        return strategy::local<adamw, float, queue_of<C>>(std::move(c), {}, {.bucket_bytes = bucket_bytes});
    }
};

}  // namespace

TEST_CASE("replicas on a GPU have the bits of the host") {
    test::require_device();
    expect_equal_bits<float>(make_replica<float>{});
    expect_equal_bits<bfloat16>(make_replica<bfloat16>{});
    expect_equal_bits<bfloat16>(make_replica<bfloat16>{.seed = 77});
}

TEST_CASE("the stages of zero on a GPU give the bits of the host") {
    test::require_device();
    expect_equal_bits<float>(make_zero<1, float>{});
    expect_equal_bits<bfloat16>(make_zero<2, bfloat16>{});
    expect_equal_bits<bfloat16>(make_zero<3, bfloat16>{});
    expect_equal_bits<bfloat16>(make_zero<3, bfloat16>{.seed = 77});
}

TEST_CASE("rounds of every kind on a GPU give the bits of the host") {
    test::require_device();
    using namespace strategy;
    for (const local_update_rule& rule :
         {local_sgd_method{2}.rule(), slow_mo_method{.period = 2, .inner = inner_state::average}.rule(),
          co2_method{2}.rule(), co2_method{.period = 2, .gap = elementwise_gap{}, .inner = inner_state::reset}.rule(),
          delayed_diloco_method{.period = 2, .own_weight = 0.5}.rule(), eager_diloco_method{2}.rule(),
          co_co_d_method{2}.rule(), overlap_local_sgd_method{2}.rule()}) {
        CAPTURE(rule.describe());
        expect_equal_bits<float>(make_rounds<make_local>{rule});
    }
    local_update_rule late = co2_method{2}.rule();
    late.synchronous_steps = 2;
    expect_equal_bits<float>(make_rounds<make_local>{late});
}

TEST_CASE("rounds between replicas that share their state give the bits of the host") {
    test::require_device();
    expect_equal_bits<bfloat16>(make_rounds<make_zero<2, bfloat16>>{strategy::co2_method{2}.rule()});
}
