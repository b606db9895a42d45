// zero and local_update on a GPU, one rank: the bits of the same strategies on the host, over whole steps with clipping,
// several micro-batches, state that is read and restored, and a consensus.
#include <tutti/strategy/local_update.cuh>  // under test
#include <tutti/strategy/zero.cuh>          // under test

#include <algorithm>  // copy
#include <cstddef>    // size_t
#include <cstdint>    // samples
#include <cstring>    // memcmp
#include <optional>   // seeds
#include <string>     // names
#include <utility>    // pair
#include <vector>     // values

#include <doctest/doctest.h>  // checks

#include <tutti/comm/self.hpp>               // one rank
#include <tutti/core/buffer.hpp>             // storage
#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/strategy/data_parallel.cuh>  // replicas of one rank

#include "device.hpp"  // require_device
#include "toy.hpp"     // what is trained

using namespace tutti;
using optimize::adamw;
using strategy::local_update_rule;
using test::slope_operation;
using test::toy_sizes;

namespace {

constexpr std::size_t bucket_bytes = 8192;

template <class T> struct outcome {
    std::vector<std::vector<T>> values;
    std::vector<double> norms;
};

// Six steps of two micro-batches each with the strategy that make(queue) gives.
template <class T, queue Q, class Make> outcome<T> train(Q q, Make make, bool own_gradients) {
    using M = typename Q::memory_type;
    std::vector<buffer<T, Q>> values;
    std::vector<buffer<T, Q>> gradients;
    strategy::parameters<T, M> list;
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        values.emplace_back(q, toy_sizes[p]);
        gradients.emplace_back(q, own_gradients ? toy_sizes[p] : 0);
        const std::vector<T> first = test::initial<T>(p);
        if constexpr (Q::executes_inline) {
            std::copy(first.begin(), first.end(), values.back().data());
        } else {
            upload(q, view<const T>(first), values.back().view());
        }
        list.push_back(
            {"p" + std::to_string(p), {toy_sizes[p]}, p % 2 == 0, values.back().view(), gradients.back().view()});
    }
    auto s = make(q);
    s.attach(list);
    outcome<T> result;
    for (std::uint32_t step = 0; step < 6; ++step) {
        for (std::uint32_t m = 0; m < 2; ++m) {
            s.begin({static_cast<int>(m), 2});
            for (std::size_t p = toy_sizes.size(); p-- > 0;) {
                const auto sample = 100 * step + 10 * static_cast<std::uint32_t>(p) + m;
                run(s.queue(), slope_operation<T, M>{s.before_use(p), s.gradient(p), sample});
                s.after_use(p);
                s.gradient_ready(p);
            }
        }
        result.norms.push_back(s.step({.learning_rate = 0.01, .clip_norm = 1}).norm);
        if (step == 2) {
            static_cast<void>(s.state());
            s.restored();
        }
        if (step == 3) { const auto common = s.consensus(); }
    }
    s.finish();
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        std::vector<T>& to = result.values.emplace_back(toy_sizes[p]);
        const view<const T, M> value = s.before_use(p);
        if constexpr (Q::executes_inline) {
            std::copy_n(value.data(), value.size(), to.begin());
        } else {
            download(q, value, view<T>(to));
        }
        s.after_use(p);
    }
    return result;
}

// On the host and on the device: equal to the last bit.
template <class T, class Make> void expect_equal_bits(Make make) {
    for (const bool own_gradients : {false, true}) {
        CAPTURE(own_gradients);
        const auto host = train<T>(host_queue{}, make, own_gradients);
        const auto device = train<T>(cuda_queue(0), make, own_gradients);
        CHECK(host.norms == device.norms);
        for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
            CAPTURE(p);
            CHECK(std::memcmp(host.values[p].data(), device.values[p].data(), toy_sizes[p] * sizeof(T)) == 0);
        }
        CHECK(host.norms.front() > 1);  // clipping took part
    }
}

template <int Stage, class T> struct make_zero {
    std::optional<std::uint64_t> seed{};
    template <queue Q> auto operator()(Q q) const {
        return strategy::zero<Stage, comm::self<Q>, adamw, T>(
            comm::self<Q>(q), {}, {.bucket_bytes = bucket_bytes, .stochastic_rounding_seed = seed});
    }
};
// Inner makes the replica.
template <class Inner> struct make_rounds {
    local_update_rule rule;
    Inner inner{};
    template <queue Q> auto operator()(Q q) const {
        return strategy::local_update<comm::self<Q>, decltype(inner(q))>(comm::self<Q>(q), inner(q), rule);
    }
};
struct make_local {
    template <queue Q> auto operator()(Q q) const {
        return strategy::local<adamw, float, Q>(comm::self<Q>(q), {}, {.bucket_bytes = bucket_bytes});
    }
};

}  // namespace

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
