// Tests of scaled losses behind a strategy: what scaling must not change, and gradients that overflow.
#include <atomic>       // ranks that agree
#include <cmath>        // sqrt
#include <cstdint>      // samples
#include <cstring>      // memcpy
#include <limits>       // NaN
#include <string>       // texts
#include <type_traits>  // stages
#include <vector>       // values

#include <doctest/doctest.h>

#include <tutti/comm/threads.hpp>              // ranks
#include <tutti/compress/quantize.hpp>         // feedback of scaled gradients
#include <tutti/compress/top_k.hpp>            // momentum of scaled gradients
#include <tutti/core/element.hpp>              // float16
#include <tutti/optimize/adamw.hpp>            // optimizer
#include <tutti/optimize/loss_scale.hpp>       // under test
#include <tutti/optimize/sgd.hpp>              // optimizer
#include <tutti/strategy/compressed_mean.hpp>  // exchange
#include <tutti/strategy/data_parallel.hpp>    // under test
#include <tutti/strategy/selected_mean.hpp>    // exchange
#include <tutti/strategy/zero.hpp>             // strategy

#include "strategy/toy.hpp"     // trainer
#include "support/failure.hpp"  // expect
#include "support/oracle.hpp"   // same_bytes

namespace {

using namespace tutti;
using comm::threads;
using optimize::loss_scale;
using test::expect;
using test::toy;

/// Steps of a toy whose loss is scaled, by scales[step].
template <class S> void train_scaled(S& s, int rank, int ranks, const std::vector<double>& scales) {
    std::uint64_t first = static_cast<std::uint64_t>(rank);
    for (std::size_t step = 0; step < scales.size(); ++step) {
        for (int m = 0; m < 2; ++m, first += static_cast<std::uint64_t>(ranks)) {
            s.begin({m, 2, 0.05, scales[step]});
            test::backward(s, first, 1, 0.5 * scales[step]);
        }
        s.step({0.05, 1.0});
    }
    s.flush();
}

TEST_CASE("a scale changes no bit of what is trained, however it moves, whatever carries the gradients") {
    const auto trained = []<class Exchange>(Exchange how, const std::vector<double>& scales) {
        std::vector<float> values;
        threads::launch(3, [&](threads& w) {
            toy<float> t = test::matrices();
            strategy::data_parallel<threads, optimize::sgd, float, Exchange> s(w.duplicate("training"), {.momentum = 0},
                                                                               {.bucket_bytes = 600}, how);
            s.attach(t.parameters);
            train_scaled(s, w.rank(), 3, scales);
            s.finish();
            if (w.rank() == 0) { values = t.values(); }
        });
        return values;
    };
    const std::vector<double> ones(14, 1.0);
    const std::vector<double> moving{1, 1024, 1024, 2048, 65536, 0.5, 4, 4, 8, 1024, 32768, 1, 2, 2};
    const auto check = [&](auto how) { CHECK(test::same_bytes(trained(how, moving), trained(how, ones))); };
    check(strategy::plain_mean{});
    check(strategy::compressed_mean<compress::quantize>{.level = 3});
    check(strategy::compressed_mean<compress::quantize>{.level = 3, .rescale = true});
    check(strategy::compressed_mean<compress::top_k>{.level = 500, .momentum = compress::momentum_options{}});
    strategy::selected_mean<compress::top_k> chosen;
    chosen.mean.level = 1000;
    for (int level = 100; level <= 4000; level += 100) { chosen.levels.push_back(level); }
    chosen.steps = {.warmup = 0, .period = 6, .window = 4};
    check(chosen);
}

TEST_CASE_TEMPLATE("nor does it behind a strategy that shards", Stage, std::integral_constant<int, 1>,
                   std::integral_constant<int, 2>, std::integral_constant<int, 3>) {
    const auto trained = [](const std::vector<double>& scales) {
        std::vector<float> values;
        threads::launch(3, [&](threads& w) {
            toy<float> t;
            strategy::zero<Stage::value, threads, optimize::adamw, float> s(w.duplicate("training"), {},
                                                                            {.bucket_bytes = 600});
            s.attach(t.parameters);
            train_scaled(s, w.rank(), 3, scales);
            const auto common = s.consensus();
            for (std::size_t i = 0; i < t.parameters.size(); ++i) {
                const auto x = s.before_use(i);
                if (w.rank() == 0) { values.insert(values.end(), x.begin(), x.end()); }
                s.after_use(i);
            }
        });
        return values;
    };
    CHECK(test::same_bytes(trained({1, 1024, 1024, 2048, 0.5, 4}), trained({1, 1, 1, 1, 1, 1})));
}

TEST_CASE("gradients that overflow on one rank alone: all skip, the scale halves, and nothing else changes") {
    std::atomic<int> sound = 0;
    threads::launch(3, [&](threads& w) {
        toy<float16> t;
        strategy::data_parallel<threads, optimize::adamw, float16> s(w.duplicate("training"));
        s.attach(t.parameters);
        loss_scale scale({.initial = 1024, .interval = 100});
        const auto step = [&](bool overflows) {
            s.begin({.loss_scale = scale.value()});
            const double too_large = overflows && w.rank() == 1 ? 1e6 : 1;  // 65504 is the largest float16
            test::backward(s, static_cast<std::uint64_t>(w.rank()), 1, scale.value() * too_large);
            const auto result = s.step({0.01, 1.0});
            scale.stepped(result.skipped);
            return result;
        };
        const auto saved = [&] {
            std::vector<std::byte> all;
            for (const auto& e : s.state()) { all.insert(all.end(), e.data.begin(), e.data.end()); }
            for (const auto& p : t.parameters) {
                const auto bytes = as_bytes(p.value);
                all.insert(all.end(), bytes.begin(), bytes.end());
            }
            return all;
        };
        const auto at_first = saved();
        expect(!step(false).skipped && saved() != at_first, "a good step was skipped");
        const auto before = saved();
        expect(step(true).skipped, "a gradient that is not finite was used");
        expect(scale.value() == 512 && scale.skipped() == 1, "the scale is {}", scale.value());
        expect(s.skipped_steps() == 1, "the strategy counts {} steps", s.skipped_steps());
        expect(saved() == before, "a skipped step changed something");
        expect(!step(false).skipped && scale.value() == 512 && saved() != before, "the next step is not sound");
        ++sound;
    });
    CHECK(sound == 3);
}

TEST_CASE("one scale a step, positive and finite") {
    toy<float> t;
    threads::launch(1, [&](threads& w) {
        strategy::data_parallel<threads, optimize::sgd> s(w.duplicate("training"));
        s.attach(t.parameters);
        const auto refusal = [&](strategy::micro_batch m) -> std::string {
            try {
                s.begin(m);
            } catch (const usage_error& e) { return e.what(); }
            return {};
        };
        expect(refusal({0, 1, 0, 0}) == "begin: loss scale is 0, expected a number above 0", "0 was taken");
        expect(refusal({0, 1, 0, std::numeric_limits<double>::quiet_NaN()}) ==
                   "begin: loss scale is nan, expected a number above 0",
               "NaN was taken");
        expect(refusal({0, 1, -0.1}) == "begin: learning rate is -0.1, expected a number of 0 or more",
               "a negative rate was taken");
        expect(refusal({0, 2, 0, 8}).empty(), "8 was not taken");
        for (std::size_t i = 0; i < t.parameters.size(); ++i) { s.gradient_ready(i); }
        expect(refusal({1, 2, 0, 4}) == "begin: micro-batch 1 of 2 has loss scale 4, those before it 8",
               "two scales were taken");
    });
}

TEST_CASE("one learning rate a step, if begin is told of it") {
    toy<float> t;
    threads::launch(1, [&](threads& w) {
        strategy::data_parallel<threads, optimize::sgd> s(w.duplicate("training"));
        s.attach(t.parameters);
        const auto ready = [&] {
            for (std::size_t i = 0; i < t.parameters.size(); ++i) { s.gradient_ready(i); }
        };
        const auto refusal = [](auto call) -> std::string {
            try {
                call();
            } catch (const usage_error& e) { return e.what(); }
            return {};
        };
        s.begin({0, 2});
        ready();
        s.begin({1, 2, 0.5});
        ready();
        expect(refusal([&] { s.step({.learning_rate = 0.25}); }) ==
                   "step: learning rate is 0.25, but begin was told 0.5",
               "another rate than begin's was taken");
        s.step({.learning_rate = 0.5});  // what was refused changed nothing
        s.begin({0, 2, 0.25});
        ready();
        expect(refusal([&] {
                   s.begin({1, 2, 0.5});
               }) == "begin: learning rate is 0.5, but begin was told 0.25",
               "two rates were taken");
        s.begin({1, 2});
        ready();
        s.step({.learning_rate = 0.25});
        s.begin({0, 1});
        ready();
        s.step({.learning_rate = 1});
    });
}

// Two ranks have a part of a model each, twice: only the norm of both parts, over `all`, says whether a step is sound.
template <class S> void expect_parts_to_skip_together(threads& world, S s, threads& all) {
    toy<float> t;
    s.attach(t.parameters);
    loss_scale scale({.initial = 1024, .interval = 100});
    const auto saved = [&] {
        s.flush();
        std::vector<std::byte> bytes;
        for (const auto& e : s.state()) { bytes.insert(bytes.end(), e.data.begin(), e.data.end()); }
        return bytes;
    };
    double own = 0;
    const auto norm = [&](view<float> gradient) {
        double squares[1] = {};
        for (const float g : gradient) { squares[0] += static_cast<double>(g) * static_cast<double>(g); }
        own = squares[0];
        all.all_reduce(view<const double>(squares, 1), view<double>(squares, 1), sum{});
        return std::sqrt(squares[0]);
    };
    for (int step = 0; step < 4; ++step) {
        const auto before = saved();
        s.begin({.loss_scale = scale.value()});
        const bool overflows = step == 2 && world.rank() == 3;
        test::backward(s, static_cast<std::uint64_t>(world.rank() + 4 * step), 1,
                       overflows ? std::numeric_limits<double>::infinity() : scale.value());
        const auto result = s.step({0.01, 1.0}, norm);
        scale.stepped(result.skipped);
        expect(result.skipped == (step == 2), "step {} of rank {}: skipped {}", step, world.rank(), result.skipped);
        expect((saved() == before) == result.skipped, "step {} of rank {}: changed", step, world.rank());
        expect(scale.value() == (step < 2 ? 1024 : 512), "step {}: scale {}", step, scale.value());
        if (!result.skipped) {
            expect(result.norm * scale.value() > std::sqrt(own), "step {}: the norm of a part alone", step);
            std::uint64_t bits = 0;
            std::memcpy(&bits, &result.norm, sizeof bits);
            world.agree(bits, "norm");
        }
    }
    expect(s.skipped_steps() == 1 && scale.skipped() == 1, "{} and {} steps skipped", s.skipped_steps(),
           scale.skipped());
}

TEST_CASE("ranks that have parts of a model: what overflows on one of them is skipped by all") {
    threads::launch(4, [](threads& w) {
        threads replicas = *w.split(std::vector{0, 1, 0, 1}, "replicas");
        threads model = *w.split(std::vector{0, 0, 1, 1}, "model");
        expect_parts_to_skip_together(
            w, strategy::data_parallel<threads, optimize::adamw, float>(replicas.duplicate("training")), model);
        expect_parts_to_skip_together(
            w, strategy::zero<1, threads, optimize::adamw, float>(replicas.duplicate("training")), w);
    });
}

}  // namespace
