// Before the rounds of a local-update strategy: synchronous steps, and the rounds that choose the period.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // any_of, copy, min, min_element
#include <chrono>     // pauses
#include <cstddef>    // bytes
#include <cstdint>    // samples
#include <set>        // periods
#include <string>     // texts
#include <thread>     // pauses
#include <utility>    // move
#include <vector>     // trajectories

#include "toy.hpp"                           // trainer
#include <support/build.hpp>                 // sanitized
#include <tutti/comm/call.hpp>               // a call to count
#include <tutti/comm/cost.hpp>               // wire_bytes
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/self.hpp>               // inner strategies
#include <tutti/comm/shaped.hpp>             // slow networks
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/comm/topology.hpp>           // split_by_color
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/schedule/overlap.hpp>        // what is measured
#include <tutti/strategy/data_parallel.hpp>  // local, what it must equal
#include <tutti/strategy/local_update.hpp>   // under test
#include <tutti/strategy/zero.hpp>           // an inner strategy of two ranks

using namespace tutti;
using namespace tutti::strategy;
using comm::threads;
using optimize::adamw;
using optimize::sgd;
using test::recipe;
using test::restore;
using test::same_bytes;
using test::saved;
using test::saved_state;
using test::toy;
using test::train;
using vec = std::vector<float>;
using self = comm::self<host_queue>;
template <class Optimizer = adamw, class C = threads> using engine = local_update<C, local<Optimizer>>;

namespace {

std::vector<local_update_rule> rules(std::size_t tau) {
    return {local_sgd_method{tau}.rule(),
            slow_mo_method{.period = tau, .payload = round_payload::pseudo_gradient}.rule(),
            co2_method{tau}.rule(),
            co2_method{.period = tau, .gap = elementwise_gap{}, .payload = round_payload::parameters}.rule(),
            delayed_diloco_method{.period = tau, .own_weight = 0.25}.rule(),
            eager_diloco_method{tau}.rule(),
            co_co_d_method{tau}.rule(),
            overlap_local_sgd_method{tau}.rule()};
}
std::vector<local_update_rule> rules(std::size_t tau, std::size_t synchronous) {
    auto all = rules(tau);
    for (auto& rule : all) { rule.synchronous_steps = synchronous; }
    return all;
}

/// Values of every rank after each step, and after finish.
using trajectory = std::vector<std::vector<vec>>;
template <class Make> trajectory trained(int n, const recipe& r, Make make) {
    trajectory all(static_cast<std::size_t>(r.steps) + 1, std::vector<vec>(std::size_t(n)));
    threads::launch(n, [&](threads& world) {
        const auto me = static_cast<std::size_t>(world.rank());
        toy<float> t;
        auto s = make(world);
        s.attach(t.parameters);
        recipe one = r;
        one.steps = 1;
        for (int k = 0; k < r.steps; ++k) {
            one.first_step = r.first_step + k;
            train(s, world.rank(), n, one);
            all[std::size_t(k)][me] = t.values();
        }
        s.finish();
        all.back()[me] = t.values();
    });
    return all;
}
auto local_updates(const local_update_rule& rule) {
    return [rule](threads& world) { return engine<>(world.duplicate("across"), local<adamw>(self{}), rule); };
}

/// From step `first` on the rank has the values of a run of one sample a rank and step, to its end.
template <class S> void expect_goes_on(S& s, const toy<float>& t, int rank, int first, const trajectory& all) {
    const auto me = static_cast<std::size_t>(rank);
    const int n = static_cast<int>(all[0].size());
    for (int k = first; k < static_cast<int>(all.size()) - 1; ++k) {
        train(s, rank, n, {.steps = 1, .batch = static_cast<std::uint64_t>(n), .first_step = k});
        REQUIRE(same_bytes(t.values(), all[std::size_t(k)][me]));
    }
    s.finish();
    CHECK(same_bytes(t.values(), all.back()[me]));
}

}  // namespace

TEST_CASE("synchronous steps are those of data parallelism, bit by bit, clipped and accumulated alike") {
    for (const int n : {1, 3}) {
        const recipe r{.steps = 6, .batch = 12, .micro = 2, .clip_norm = 0.5};
        const trajectory ddp =
            trained(n, r, [](threads& world) { return data_parallel<threads, adamw>(world.duplicate("dp")); });
        for (const local_update_rule& rule : rules(4, 6)) {
            CAPTURE(rule.describe());
            const trajectory is = trained(n, r, local_updates(rule));
            for (std::size_t k = 0; k < is.size(); ++k) {
                for (std::size_t g = 0; g < is[k].size(); ++g) { REQUIRE(same_bytes(is[k][g], ddp[k][g])); }
            }
        }
    }
}

TEST_CASE("the first round begins where the synchronous steps end") {
    constexpr int n = 2;
    constexpr int before = 3;
    const recipe r{.steps = 11, .batch = n};
    // What replicas are after the synchronous steps, moments included.
    std::vector<saved_state> start(n);
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = before, .batch = n});
        start[std::size_t(world.rank())] = saved(s);
    });
    for (const auto& plain : rules(4)) {
        local_update_rule rule = plain;
        rule.synchronous_steps = before;
        CAPTURE(rule.describe());
        const trajectory is = trained(n, r, local_updates(rule));
        threads::launch(n, [&](threads& world) {
            const auto me = std::size_t(world.rank());
            toy<float> t;
            {
                local<adamw> before_the_rounds(self{});
                before_the_rounds.attach(t.parameters);
                restore(before_the_rounds, start[me]);
            }
            // attach broadcasts rank 0's values, which are everyone's; the moments come from the state.
            engine<> s(world.duplicate("across"), local<adamw>(self{}), plain);
            s.attach(t.parameters);
            restore(s.inner(), start[me]);
            expect_goes_on(s, t, world.rank(), before, is);
        });
    }
}

TEST_CASE("a synchronous step sends the gradients once, a round behind them the mean once") {
    constexpr int n = 3;
    constexpr std::uint64_t elements = 451;
    threads::launch(n, [&](threads& world) {
        comm::counted across(world.duplicate("across"));
        const auto wire = across.traffic_ledger();
        local_update_rule rule = co2_method{.period = 4}.rule();
        rule.synchronous_steps = 3;
        toy<float> t;
        engine<adamw, comm::counted<threads>> s(std::move(across), local<adamw>(self{}), rule);
        s.attach(t.parameters);
        const auto attached = wire->snapshot();
        comm::call once;
        once.kind = comm::collective::all_reduce;
        once.element_size = sizeof(float);
        once.in_count = once.out_count = elements;
        const std::uint64_t bytes = comm::wire_bytes(once, world.rank(), n);
        for (int k = 0; k < 12; ++k) {
            train(s, world.rank(), n, {.steps = 1, .batch = n, .first_step = k});
            s.flush();
            const int rounds = k < 3 ? 0 : (k - 2) / 4;
            const auto calls = std::uint64_t(std::min(k + 1, 3) + rounds);
            const auto sent = wire->snapshot() - attached;
            CHECK(sent[comm::collective::all_reduce] == comm::traffic{calls, calls * bytes});
            CHECK(sent.total().calls == calls);
            CHECK(s.rounds() == std::uint64_t(rounds));
        }
        s.finish();
    });
}

TEST_CASE("a consensus in the synchronous steps is what replicas have, and a run resumes from any of them") {
    constexpr int n = 2;
    constexpr int steps = 9;
    for (const local_update_rule& rule : rules(3, 4)) {
        CAPTURE(rule.describe());
        const trajectory straight = trained(n, {.steps = steps, .batch = n}, local_updates(rule));
        for (int cut = 0; cut <= 6; ++cut) {
            CAPTURE(cut);
            threads::launch(n, [&](threads& world) {
                const auto me = std::size_t(world.rank());
                saved_state state;
                {
                    toy<float> t;
                    engine<> s = local_updates(rule)(world);
                    s.attach(t.parameters);
                    train(s, world.rank(), n, {.steps = cut, .batch = n});
                    if (cut <= 4) {
                        const auto scope = s.consensus();
                        const vec own = cut == 0 ? toy<float>().values() : straight[std::size_t(cut) - 1][me];
                        CHECK(same_bytes(t.values(), own));
                    }
                    state = saved(s);
                }
                toy<float> t(test::layout::scattered, test::layout::none, 55);
                engine<> s = local_updates(rule)(world);
                s.attach(t.parameters);
                train(s, world.rank(), n, {.steps = cut * 2 % 7, .batch = n});
                restore(s, state);
                expect_goes_on(s, t, world.rank(), cut, straight);
            });
        }
    }
}

TEST_CASE("16-bit values: synchronous steps average them as data parallelism does") {
    constexpr int n = 2;
    threads::launch(n, [&](threads& world) {
        toy<bfloat16> t, u;
        data_parallel<threads, adamw, bfloat16> ddp(world.duplicate("dp"));
        ddp.attach(t.parameters);
        train(ddp, world.rank(), n, {.steps = 5});
        local_update_rule rule = co2_method{.period = 2}.rule();
        rule.synchronous_steps = 5;
        local_update<threads, local<adamw, bfloat16>> s(world.duplicate("across"), local<adamw, bfloat16>(self{}),
                                                        rule);
        s.attach(u.parameters);
        train(s, world.rank(), n, {.steps = 5});
        CHECK(same_bytes(t.values(), u.values()));
    });
}

TEST_CASE("replicas of two ranks that share optimizer state average their shards of the gradients") {
    constexpr int n = 4;
    using inside = zero<2, threads, adamw, double>;
    threads::launch(n, [&](threads& world) {
        auto node = comm::split_by_color(world, world.rank() / 2, "node");
        auto across = comm::split_by_color(world, world.rank() % 2, "across");
        local_update_rule rule = co2_method{.period = 3}.rule();
        rule.synchronous_steps = 8;
        toy<double> t, u;
        local_update<threads, inside> s(std::move(*across), inside(std::move(*node)), rule);
        s.attach(t.parameters);
        data_parallel<threads, adamw, double> ddp(world.duplicate("dp"));
        ddp.attach(u.parameters);
        train(s, world.rank(), n, {.steps = 8});
        train(ddp, world.rank(), n, {.steps = 8});
        s.flush();
        const auto is = t.values(), should = u.values();
        for (std::size_t i = 0; i < is.size(); ++i) {
            REQUIRE(is[i] == doctest::Approx(should[i]).epsilon(1e-11).scale(1));
        }
        s.finish();
    });
}

TEST_CASE("over replicas that share optimizer state, the gap is that of all shards together") {
    using inside = zero<2, threads, adamw, double>;
    const auto gaps = [](int ranks_of_each) {
        const int n = 2 * ranks_of_each;
        std::vector<std::vector<double>> all(static_cast<std::size_t>(n));
        threads::launch(n, [&](threads& world) {
            auto node = comm::split_by_color(world, world.rank() / ranks_of_each, "node");
            auto across = comm::split_by_color(world, world.rank() % ranks_of_each, "across");
            toy<double> t;
            inside shards(std::move(*node), {}, {.bucket_bytes = 512});  // one would belong to a single rank
            local_update<threads, inside> s(std::move(*across), std::move(shards), co2_method{.period = 2}.rule());
            s.attach(t.parameters);
            for (int k = 0; k < 12; ++k) {
                train(s, world.rank(), n, {.steps = 1, .first_step = k});
                all[std::size_t(world.rank())].push_back(s.gap());
            }
            s.finish();
        });
        for (const auto& other : all) { CHECK(other == all[0]); }
        return all[0];
    };
    const auto shared = gaps(2), whole = gaps(1);
    CHECK(shared.back() > 1.01);
    for (std::size_t k = 0; k < whole.size(); ++k) { CHECK(shared[k] == doctest::Approx(whole[k]).epsilon(1e-10)); }
}

namespace {

/// A strategy that keeps its gradients to itself.
struct secretive : local<sgd> {
    using local<sgd>::local;
    step_result update(hyper h) { return local<sgd>::update(h); }
};
static_assert(shardable<secretive> && !shows_gradients<secretive> && shows_gradients<local<sgd>> &&
              shows_gradients<zero<3, threads, sgd>>);

}  // namespace

TEST_CASE("synchronous steps are refused over an inner strategy that does not show its gradients") {
    local_update_rule rule = local_sgd_method{2}.rule();
    toy<float> t;
    local_update<self, secretive> without(self{}, secretive(self{}), rule);
    without.attach(t.parameters);
    rule.synchronous_steps = 1;
    local_update<self, secretive> with(self{}, secretive(self{}), rule);
    CHECK_THROWS_WITH_AS(with.attach(t.parameters),
                         "attach: synchronous steps need an inner strategy that shows its gradients and a communicator "
                         "that averages float32",
                         usage_error);
}

TEST_CASE("an automatic period is chosen behind three rounds, the same on all ranks, from what was measured") {
    constexpr int n = 2;
    for (const int delay : {0, 1}) {
        // 1804 bytes at 10 kB/s: 180 ms a mean, against steps of microseconds. Then 45 ms a mean, and steps of 40 ms on
        // the first rank: the other comes 80 ms early and waits, so that the means differ.
        for (const int pause : {0, 40}) {
            const char* const network = pause == 0 ? "10KB" : "40KB";
            CAPTURE(delay);
            CAPTURE(pause);
            std::vector<std::size_t> periods(n);
            std::vector<double> steps(n);
            std::vector<std::vector<double>> means(n);
            schedule::timeline trace;
            threads::launch(n, [&](threads& world) {
                const auto me = std::size_t(world.rank());
                local_update_rule rule = co2_method{.period = 2, .delay = delay}.rule();
                rule.automatic = automatic_period{.exposed_share = 0.1, .most = 500};
                rule.synchronous_steps = 1;
                toy<float> t;
                using slow = comm::shaped<threads>;
                engine<sgd, slow> s(slow(world.duplicate("across"), comm::shaped_network::parse(network)),
                                    local<sgd>(self{}), rule, {.trace = &trace});
                s.attach(t.parameters);
                for (int k = 0; k < 12; ++k) {
                    s.begin({});
                    if (me == 0) { std::this_thread::sleep_for(std::chrono::milliseconds(pause)); }
                    test::backward(s, std::uint64_t(k), 1, 1.0);
                    s.step({.learning_rate = 0.01});
                    if (k < 6) { CHECK(s.period() == 2); }
                    if (k == 6) {  // a synchronous step and three rounds of two
                        periods[me] = s.period();
                        steps[me] = s.overlap().step;  // as it was measured then
                        const auto made = trace.steps(world.rank());
                        CHECK(std::any_of(made.begin() + 1, made.end(),
                                          [&](const auto& step) { return step.seconds == steps[me]; }));
                        for (const auto& span : trace.spans(world.rank())) {
                            if (span.kind == schedule::span_kind::communication && span.name.starts_with("mean of ") &&
                                span.name != "mean of gradients") {
                                means[me].push_back(seconds(span.end - span.begin));
                            }
                        }
                    }
                }
                CHECK(s.period() == periods[me]);  // once
                s.finish();
            });
            CHECK(periods[0] == periods[1]);
            CHECK(steps[0] >= 1e-3 * pause);
            // The last mean may have been in flight when the period was chosen, and have ended until this was looked at.
            std::set<std::size_t> possible;
            for (std::size_t a = 3 - std::size_t(delay); a <= means[0].size(); ++a) {
                for (std::size_t b = 3 - std::size_t(delay); b <= means[1].size(); ++b) {
                    const auto least = [&](std::size_t r, std::size_t count) {
                        return *std::min_element(means[r].begin(), means[r].begin() + std::ptrdiff_t(count));
                    };
                    const double step = steps[0] / 2 + steps[1] / 2, mean = std::min(least(0, a), least(1, b));
                    possible.insert(std::min<std::size_t>(500, schedule::shortest_period(step, mean, 0.1, delay == 1)));
                }
            }
            CHECK(possible.contains(periods[0]));
        }
    }
}

TEST_CASE("an automatic period without a trace, cut to the most; it is part of the state") {
    constexpr int n = 2;
    using slow = comm::shaped<threads>;
    const auto make = [](threads& world, std::size_t most) {
        local_update_rule rule = co2_method{.period = 2, .delay = 0}.rule();
        rule.automatic = automatic_period{.exposed_share = 1e-6, .most = most};  // a mean's time is 10^6 steps and more
        return engine<sgd, slow>(slow(world.duplicate("across"), comm::shaped_network::parse("2MB")),
                                 local<sgd>(self{}), rule);
    };
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        auto s = make(world, 3);
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = 6, .batch = n});
        REQUIRE(s.period() == 3);  // 0.9 ms a mean, and no step of minutes
        CHECK(s.rounds() == 3);
        train(s, world.rank(), n, {.steps = 2, .batch = n, .first_step = 6});
        CHECK(s.rounds() == 3);
        const saved_state state = saved(s);
        train(s, world.rank(), n, {.steps = 11, .batch = n, .first_step = 8});
        CHECK(s.rounds() == 7);
        s.finish();
        toy<float> u;
        auto resumed = make(world, 5);  // which it would choose
        resumed.attach(u.parameters);
        CHECK(resumed.period() == 2);
        restore(resumed, state);
        CHECK(resumed.period() == 3);
        train(resumed, world.rank(), n, {.steps = 11, .batch = n, .first_step = 8});
        CHECK(resumed.period() == 3);  // not measured again
        resumed.finish();
        CHECK(same_bytes(t.values(), u.values()));
    });
}

TEST_CASE("overlap: the rounds behind the synchronous steps, as the trace has them") {
    constexpr int n = 2;
    schedule::timeline trace;
    threads::launch(n, [&](threads& world) {
        local_update_rule rule = co2_method{.period = 3}.rule();
        rule.synchronous_steps = 2;
        toy<float> t;
        engine<sgd> s(world.duplicate("across"), local<sgd>(self{}), rule, {.trace = &trace});
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = 2 + 4 * 3 + 1, .batch = n});
        s.flush();
        const auto m = s.overlap();
        CHECK(m.period == 3);
        CHECK(m.rounds == 3);
        CHECK(m.communication > 0);
        CHECK(m.outer > 0);
        CHECK(m.round > m.outer + m.exposed);
        const auto same =
            schedule::overlap_of(trace, world.rank(), {.period = 3, .skip = 2, .lane = "world/across/rounds"});
        CHECK(m.communication == same.communication);
        CHECK(m.exposed == same.exposed);
        s.finish();
    });
    toy<float> t;
    local_update<self, local<sgd>> untraced(self{}, local<sgd>(self{}), co2_method{}.rule());
    untraced.attach(t.parameters);
    CHECK_THROWS_WITH_AS(static_cast<void>(untraced.overlap()),
                         "overlap: nothing is recorded; give a timeline to local_update_options::trace", usage_error);
}

TEST_CASE("automatic periods that make no sense are refused") {
    const auto rejects = [](std::size_t period, automatic_period how, const std::string& why) {
        local_update_rule rule = co2_method{.period = period}.rule();
        rule.automatic = how;
        CHECK_THROWS_WITH_AS(rule.validate(), why.c_str(), usage_error);
    };
    rejects(1, {},
            "local update: rounds of 1 step have none without communication to measure an automatic period by; begin "
            "with 2 or more");
    for (const double share : {0.0, 1.0, -0.1}) {
        rejects(2, {.exposed_share = share},
                "local update: an automatic period of at most 10000 steps with a share of " + formatted("{}", share) +
                    " waiting, expected 1 step or more and a share in (0, 1)");
    }
    rejects(2, {.most = 0},
            "local update: an automatic period of at most 0 steps with a share of 0.01 waiting, expected 1 step or "
            "more and a share in (0, 1)");
}

TEST_CASE("ranks that differ in what comes before the rounds are told so at attach") {
    threads::launch(2, [](threads& world) {
        local_update_rule rule = co2_method{.period = 2}.rule();
        rule.synchronous_steps = std::size_t(world.rank());
        toy<float> t;
        engine<sgd> s(world.duplicate("across"), local<sgd>(self{}), rule);
        CHECK_THROWS_AS(s.attach(t.parameters), mismatch_error);
    });
}
