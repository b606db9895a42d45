// Local-update strategies: rules, outer arithmetic by hand, oracles between methods, misuse.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max, fill
#include <array>      // two runs
#include <cmath>      // log, sqrt
#include <cstdint>    // counters
#include <limits>     // nan, infinity
#include <string>     // texts
#include <vector>     // values

#include "toy.hpp"                             // trainer
#include <tutti/comm/self.hpp>                 // one replica
#include <tutti/optimize/adamw.hpp>            // adamw
#include <tutti/optimize/sgd.hpp>              // sgd
#include <tutti/strategy/data_parallel.hpp>    // local
#include <tutti/strategy/local_update.hpp>     // local_update
#include <tutti/strategy/outer_optimizer.hpp>  // outer steps
#include <tutti/strategy/staleness.hpp>        // gaps

using namespace tutti;
using namespace tutti::strategy;
using optimize::adamw;
using optimize::sgd;
using test::refusal;
using test::same_bytes;
using test::toy;
using test::train;
using self = comm::self<host_queue>;
template <class T = float, class Optimizer = sgd> using engine = local_update<self, local<Optimizer, T>>;

static_assert(strategy::strategy<local_sgd<self, local<adamw>>> && strategy::strategy<slow_mo<self, local<adamw>>>);
static_assert(strategy::strategy<co2<self, local<adamw>>> && strategy::strategy<co2<self, local<sgd, bfloat16>>>);
static_assert(strategy::strategy<diloco<self, local<adamw>>> && strategy::strategy<delayed_diloco<self, local<adamw>>>);
static_assert(strategy::strategy<eager_diloco<self, local<adamw>>> && strategy::strategy<co_co_d<self, local<adamw>>>);
static_assert(strategy::strategy<overlap_local_sgd<self, local<adamw, double>>>);
static_assert(!shardable<engine<>>);  // replicas differ between rounds: owned() is not the model's

namespace {

std::string refusal_of(local_update_rule r) {
    return refusal([&] { r.validate(); });
}

/// One replica with one parameter of one element of curvature h: a step of SGD multiplies it by 1 - rate h.
struct quadratic {
    std::vector<double> x{1};
    parameters<double> list{{"x", {1}, true, x, {}}};
    engine<double> s;
    explicit quadratic(const local_update_rule& rule)
        : s(self{}, local<sgd, double>(self{}, sgd{.momentum = 0}), rule) {
        s.attach(list);
    }
    void step(double h, double rate = 1) {
        s.begin({});
        s.gradient(0)[0] = h * s.before_use(0)[0];
        s.gradient_ready(0);
        s.step({.learning_rate = rate});
    }
    /// The gradient itself.
    void push(double g, double rate = 1) {
        s.begin({});
        s.gradient(0)[0] = g;
        s.gradient_ready(0);
        s.step({.learning_rate = rate});
    }
};

/// Growth a round of (x_t, x_(t-1), momentum) over the last two thirds of up to 600 rounds: as many as a double that
/// shrinks by `predicted` a round allows.
double growth(const local_update_rule& rule, double s, double predicted) {
    const int rounds = predicted < 1 ? static_cast<int>(std::min(600.0, 640 / -std::log(predicted))) : 600;
    quadratic q(rule);
    double first = 0;
    double last = 0;
    for (int t = 0; t < rounds; ++t) {
        const double x = q.s.anchor()[0];
        q.step(s);
        const double m = rule.outer.momentum == 0 ? 0 : q.s.momentum()[0];
        last = std::log(std::hypot(q.s.anchor()[0], x, m));
        if (t == rounds / 3) { first = last; }
    }
    return std::exp((last - first) / (rounds - 1 - rounds / 3));
}
/// The larger root of z^2 - trace z + determinant.
double root_of(double trace, double determinant) {
    const double d = trace * trace - 4 * determinant;
    return d < 0 ? std::sqrt(determinant) : (std::fabs(trace) + std::sqrt(d)) / 2;
}

template <class Optimizer> std::vector<float> trained(const local_update_rule& rule, int steps, Optimizer o) {
    toy<float> t;
    engine<float, Optimizer> s(self{}, local<Optimizer>(self{}, o), rule);
    s.attach(t.parameters);
    train(s, 0, 1, {.steps = steps});
    s.finish();
    return t.values();
}

}  // namespace

// Stability of a delayed outer step: stable exactly for rate s / gap < 1 - momentum.
TEST_CASE("on a quadratic, growth is the root of the characteristic polynomial, late or not") {
    for (const double s : {0.3, 0.6, 0.9, 0.99}) {
        for (const double beta : {0.0, 0.2, 0.5}) {
            for (const double gap : {1.0, 2.0}) {
                CAPTURE(s);
                CAPTURE(beta);
                CAPTURE(gap);
                const double predicted = root_of(1 + beta, beta + s / gap);
                const auto rule = [&](int delay) {
                    return co2_method{.period = 1, .momentum = beta, .gap = constant_gap{gap}, .delay = delay}.rule();
                };
                const double late = growth(rule(1), s, predicted);
                CHECK(std::fabs(late - predicted) <= 3e-3);
                CHECK((late < 1) == (s / gap < 1 - beta));
                const double at_once = root_of(1 + beta - s / gap, beta);
                CHECK(std::fabs(growth(rule(0), s, at_once) - at_once) <= 3e-3);
            }
        }
    }
}

TEST_CASE("rounds of CO2 by hand") {
    // Rate 1, momentum 1/2, no gap. Anchors: 1, 1 (nothing arrived), then from the means of round 0 and 1.
    quadratic q(co2_method{.period = 2, .momentum = 0.5, .gap = no_gap{}}.rule());
    q.push(0.25);
    CHECK(q.x[0] == 0.75);
    CHECK(q.s.rounds() == 0);
    q.push(0.25);  // d0 = 0.5
    CHECK(q.x[0] == 1);
    CHECK(q.s.rounds() == 1);
    q.push(1);
    CHECK(q.x[0] == 0);
    q.push(1);  // d1 = 2; adopts d0: m = 0.5
    CHECK(q.x[0] == 0.5);
    CHECK(q.s.momentum()[0] == 0.5);
    q.push(0);
    q.push(0);  // d2 = 0; adopts d1: m = 2.25
    CHECK(q.x[0] == -1.75);
    CHECK(q.s.anchor()[0] == -1.75);
    q.push(4);     // d3 = 4, in a round of one step
    q.s.finish();  // adopts d2: m = 1.125; then d3: m = 4.5625
    CHECK(q.x[0] == -1.75 - 1.125 - 4.5625);
}

TEST_CASE("a single replica with the mean of parameters is the inner optimizer, bit by bit") {
    toy<float> t;
    local<adamw> alone(self{});
    alone.attach(t.parameters);
    train(alone, 0, 1, {.steps = 20});
    for (const std::size_t tau : {1u, 3u, 50u}) {
        CHECK(same_bytes(trained(local_sgd_method{tau}.rule(), 20, adamw{}), t.values()));
        CHECK(same_bytes(trained(slow_mo_method{.period = tau, .momentum = 0}.rule(), 20, adamw{}), t.values()));
        // Units and a gap cannot matter where the mean is the result and nothing is late.
        CHECK(same_bytes(
            trained(slow_mo_method{.period = tau, .momentum = 0, .units = outer_units::gradients}.rule(), 20, adamw{}),
            t.values()));
    }
    // A late mean is another recursion, even of one replica.
    CHECK_FALSE(same_bytes(trained(co2_method{.period = 1, .momentum = 0}.rule(), 20, adamw{}), t.values()));
}

TEST_CASE("CO2 without delay is SlowMo; without a gap a constant gap of 1; an infinite clip is none") {
    for (const round_payload p : {round_payload::parameters, round_payload::pseudo_gradient}) {
        for (const double momentum : {0.0, 0.5}) {
            const auto slow =
                trained(slow_mo_method{.period = 3, .momentum = momentum, .payload = p}.rule(), 20, sgd{});
            for (const staleness_gap& g : {staleness_gap(no_gap{}), staleness_gap(constant_gap{1}),
                                           staleness_gap(scalar_gap{}), staleness_gap(elementwise_gap{})}) {
                CHECK(same_bytes(
                    trained(co2_method{.period = 3, .momentum = momentum, .gap = g, .payload = p, .delay = 0}.rule(),
                            20, sgd{}),
                    slow));
            }
            CHECK_FALSE(same_bytes(
                trained(co2_method{.period = 3, .momentum = momentum, .gap = no_gap{}, .payload = p}.rule(), 20, sgd{}),
                slow));
            const auto late = [&](staleness_gap g, double clip) {
                return trained(
                    co2_method{.period = 3, .momentum = momentum, .gap = g, .clip = clip, .payload = p}.rule(), 20,
                    sgd{});
            };
            const double inf = std::numeric_limits<double>::infinity();
            CHECK(same_bytes(late(constant_gap{1}, inf), late(no_gap{}, inf)));
            CHECK(same_bytes(late(no_gap{}, 1e30), late(no_gap{}, inf)));
            CHECK_FALSE(same_bytes(late(constant_gap{2}, inf), late(no_gap{}, inf)));
            CHECK_FALSE(same_bytes(late(scalar_gap{}, inf), late(no_gap{}, inf)));
            CHECK_FALSE(same_bytes(late(elementwise_gap{}, inf), late(no_gap{}, inf)));
        }
    }
    CHECK_FALSE(same_bytes(trained(diloco_method{.period = 3, .nesterov = true}.rule(), 20, sgd{}),
                           trained(diloco_method{.period = 3, .nesterov = false}.rule(), 20, sgd{})));
    const auto heavy =
        trained(diloco_method{.period = 3, .rate = 1, .momentum = 0.5, .nesterov = false}.rule(), 20, sgd{});
    CHECK(same_bytes(
        heavy, trained(slow_mo_method{.period = 3, .payload = round_payload::pseudo_gradient}.rule(), 20, sgd{})));
}

TEST_CASE("clip: a limit of 0 freezes the anchor, any other bounds every element of the momentum") {
    toy<float> t;
    const auto start = t.values();
    for (const double momentum : {0.0, 0.4}) {
        const auto frozen =
            trained(co2_method{.period = 2, .momentum = momentum, .gap = no_gap{}, .clip = 0}.rule(), 9, sgd{});
        CHECK(same_bytes(frozen, start));
    }
    engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 2, .momentum = 0.4, .clip = 0.003}.rule());
    s.attach(t.parameters);
    std::size_t at = 0, below = 0;
    for (int k = 0; k < 20; ++k) {
        train(s, 0, 1, {.steps = 1, .first_step = k});
        for (const float m : s.momentum()) {
            REQUIRE(std::fabs(m) <= 0.003f);
            ++(std::fabs(m) == 0.003f ? at : below);
        }
    }
    CHECK(at > 100);
    CHECK(below > 100);
    // Values just under, at and over the limit.
    std::vector<float> x(3, 0.0f), u(3, 0.0f), d{std::nextafter(0.5f, 0.0f), 0.5f, std::nextafter(0.5f, 1.0f)};
    for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> v = d;
        for (float& e : v) { e *= sign; }
        std::fill(u.begin(), u.end(), 0.0f);
        run(host_queue{},
            strategy::detail::outer_step_operation<float, host_memory, true>{x, u, v, 1, 0, 0.5f, 1, false});
        CHECK(u == std::vector<float>{sign * d[0], sign * 0.5f, sign * 0.5f});
    }
}

TEST_CASE("the scalar gap is finite and at least 1, and 1 where nothing moved or nothing came") {
    using strategy::detail::gap_of;
    CHECK(gap_of(0, 0) == 1);
    CHECK(gap_of(5, 0) == 1);
    CHECK(gap_of(0, 5) == 1);
    CHECK(gap_of(2, 4) == 1.5);
    CHECK(gap_of(1e300, 1e-300) == 1e30);
    CHECK(gap_of(std::numeric_limits<double>::infinity(), 1) == 1e30);
    // By hand: period 1, momentum 0. c = max(0.9 c, |d|), moved = |d| / gap.
    quadratic q(co2_method{.period = 1, .momentum = 0}.rule());
    q.push(1);
    CHECK(q.s.gap() == 1);  // nothing has arrived
    q.push(4);
    CHECK(q.s.gap() == 1);  // d = 1 arrived, nothing had moved
    CHECK(q.x[0] == 0);
    q.push(1);
    CHECK(q.s.gap() == 1.25);  // d = 4, c = 4, moved 1
    CHECK(q.x[0] == doctest::Approx(-3.2).epsilon(1e-14));
    q.push(0);
    CHECK(q.s.gap() == doctest::Approx(1 + 3.2 / 3.6).epsilon(1e-14));  // d = 1, c = 3.6, moved 3.2
    q.push(0);
    q.push(0);
    q.push(0);  // nothing came, so nothing moved
    CHECK(q.s.gap() == 1);
    // A rate that rises in cycles.
    toy<float> t;
    engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 2}.rule());
    s.attach(t.parameters);
    double largest = 1;
    for (int k = 0; k < 60; ++k) {
        train(s, 0, 1, {.steps = 1, .learning_rate = 0.01 * (1 + k % 7) * (1 + k), .first_step = k});
        REQUIRE(std::isfinite(s.gap()));
        REQUIRE(s.gap() >= 1);
        largest = std::max(largest, s.gap());
    }
    CHECK(largest > 1.1);
}

TEST_CASE("the elementwise gap by hand") {
    std::vector<float> mean{2, 2, 0, 2, 1e-30f}, squares{0, 0, 0, 0, 0}, moved{0, -3, 5, 1e30f, 1e-30f};
    run(host_queue{}, strategy::detail::elementwise_gap_operation<float, host_memory>{mean, squares, moved, 0.5f, 0.5});
    // The running mean of squares, corrected, is the square itself: c = 2.
    CHECK(mean[0] == 2);
    CHECK(mean[1] == doctest::Approx(2 / 2.5));
    CHECK(mean[2] == 0);
    CHECK(mean[3] > 0);
    CHECK(mean[3] < 1e-28f);
    CHECK(mean[4] == 1e-30f);  // its square is nothing in float: no scale, no gap
    CHECK(squares == std::vector<float>{2, 2, 0, 2, 0});
}

TEST_CASE("units: the same at a constant rate, apart by the ratio of rates when it changes") {
    const auto run_with = [](outer_units units, double second_rate) {
        quadratic q(slow_mo_method{.period = 1, .momentum = 0.5, .units = units}.rule());
        q.push(1, 0.25);
        q.push(0, second_rate);  // only old momentum moves the anchor
        return q.x[0];
    };
    CHECK(run_with(outer_units::parameters, 0.25) == 1 - 0.25 - 0.125);
    CHECK(run_with(outer_units::gradients, 0.25) == 1 - 0.25 - 0.125);
    CHECK(run_with(outer_units::parameters, 0.5) == 1 - 0.25 - 0.125);
    CHECK(run_with(outer_units::gradients, 0.5) == 1 - 0.25 - 0.25);
    // At a constant rate within a few units of the last place a step.
    std::array<std::vector<float>, 2> x;
    for (const outer_units units : {outer_units::parameters, outer_units::gradients}) {
        toy<float> t;
        engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 2, .gap = no_gap{}, .units = units}.rule());
        s.attach(t.parameters);
        for (int k = 0; k < 12; ++k) {
            s.begin({});
            test::backward(s, 12 * static_cast<std::uint64_t>(k), 12, 1.0);
            s.step({.learning_rate = 0.003});
        }
        x[units == outer_units::gradients] = t.values();
    }
    for (std::size_t i = 0; i < x[0].size(); ++i) {
        REQUIRE(x[0][i] == doctest::Approx(x[1][i]).epsilon(12 * 4 * 6e-8).scale(1));
    }
}

TEST_CASE("16-bit values are those of their masters after every step, and the outer step acts on the masters") {
    toy<bfloat16> t;
    engine<bfloat16> s(self{}, local<sgd, bfloat16>(self{}), co2_method{.period = 3}.rule());
    s.attach(t.parameters);
    bool finer = false;
    for (int k = 0; k < 30; ++k) {
        train(s, 0, 1, {.steps = 1, .first_step = k});
        const auto values = t.values();
        for (std::size_t i = 0; i < values.size(); ++i) {
            REQUIRE(static_cast<float>(values[i]) == static_cast<float>(static_cast<bfloat16>(s.owned()[i])));
            finer = finer || s.owned()[i] != static_cast<float>(values[i]);
        }
    }
    CHECK(finer);
    s.finish();
}

TEST_CASE("moments are kept, or reset at the end of a round with the count of updates") {
    for (const inner_state policy : {inner_state::keep, inner_state::reset}) {
        toy<float> t;
        engine<float, adamw> s(self{}, local<adamw>(self{}), local_sgd_method{.period = 3, .inner = policy}.rule());
        s.attach(t.parameters);
        for (int k = 0; k < 7; ++k) {
            train(s, 0, 1, {.steps = 1, .first_step = k});
            const bool reset = policy == inner_state::reset;
            double sum = 0;
            for (const auto& m : s.inner().moments()) {
                for (const float v : m) { sum += std::fabs(v); }
            }
            CHECK((sum == 0) == (reset && k % 3 == 2));
            for (const auto& e : s.state()) {
                if (e.name != "optimizer/steps") { continue; }
                const auto n = *reinterpret_cast<const std::uint64_t*>(e.data.data());
                CHECK(n == static_cast<std::uint64_t>(reset ? (k + 1) % 3 : k + 1));
            }
        }
    }
}

TEST_CASE("skipped steps count: rounds end where they end on other ranks") {
    quadratic q(local_sgd_method{2}.rule());
    q.push(std::numeric_limits<double>::quiet_NaN());
    CHECK(q.s.rounds() == 0);
    q.push(1);
    CHECK(q.s.rounds() == 1);
    CHECK(q.x[0] == 0);
}

TEST_CASE("micro-batches do not end rounds, optimizer steps do") {
    for (const int micro : {1, 4}) {
        toy<float> t;
        engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 3}.rule());
        s.attach(t.parameters);
        for (int k = 0; k < 10; ++k) {
            train(s, 0, 1, {.steps = 1, .micro = micro, .first_step = k});
            CHECK(s.rounds() == static_cast<std::uint64_t>((k + 1) / 3));
        }
    }
}

TEST_CASE("a mean that is not finite is refused, names its round, and nothing of it is adopted") {
    for (const int delay : {0, 1}) {
        quadratic q(co2_method{.period = 1, .momentum = 0.5, .delay = delay}.rule());
        q.push(0.5);
        q.push(0.5);
        const double anchor = q.s.anchor()[0], momentum = q.s.momentum()[0];
        q.s.owned()[0] = std::numeric_limits<double>::infinity();
        const auto bad = [&] { q.push(0.5); };
        if (delay == 1) { bad(); }  // sent, and looked at when it is due
        const double adopted = delay == 1 ? q.s.anchor()[0] : anchor;
        const double moving = delay == 1 ? q.s.momentum()[0] : momentum;
        const auto text = refusal<error>(bad);
        CHECK(text.starts_with("local update: the mean of round 2 is not finite, nothing of it was adopted: "));
        CHECK(text.find("lower the learning rate") != std::string::npos);
        CHECK(q.s.anchor()[0] == adopted);
        CHECK(q.s.momentum()[0] == moving);
        CHECK(q.s.rounds() == (delay == 1 ? 3 : 2));
    }
}

TEST_CASE("rules that make no sense are refused, and the text says what to do") {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(refusal_of({.period = 0}) == "local update: the period is 0 steps, expected 1 or more");
    CHECK(refusal_of({.delay = 2}) == "local update: the delay is 2 rounds, expected 0 or 1");
    CHECK(refusal_of({.outer = {.rate = 0}}) == "outer optimizer: rate is 0, expected a finite value above 0");
    CHECK(refusal_of({.outer = {.rate = nan}}) == "outer optimizer: rate is nan, expected a finite value above 0");
    CHECK(refusal_of({.outer = {.momentum = 1}}) == "outer optimizer: momentum is 1, expected a value in [0, 1)");
    CHECK(refusal_of({.outer = {.clip = -1}}) == "outer optimizer: clip is -1, expected 0 or more; infinity is off");
    CHECK(refusal_of({.outer = {.nesterov = true}}) == "outer optimizer: nesterov needs a momentum");
    CHECK(
        refusal_of({.outer = {.momentum = 0.5, .nesterov = true, .clip = 1}}).ends_with("switch nesterov or clip off"));
    CHECK(refusal_of({.gap = constant_gap{0}}) == "staleness gap: the constant is 0, expected 1 or more");
    CHECK(refusal_of({.gap = constant_gap{nan}}) == "staleness gap: the constant is nan, expected 1 or more");
    CHECK(refusal_of({.gap = scalar_gap{1}}) == "staleness gap: the decay is 1, expected a value in [0, 1)");
    CHECK(refusal_of({.gap = elementwise_gap{-1}}) == "staleness gap: the decay is -1, expected a value in [0, 1)");
    CHECK(refusal_of({.weight = 0.5}).find("weight is 0.5") != std::string::npos);
    CHECK(refusal_of({.merge = round_merge::interpolation, .weight = 2}).find("weight is 2") != std::string::npos);
    CHECK(refusal_of({.merge = round_merge::eager}) ==
          "local update: the merge 'eager' corrects for a late mean, set the delay to 1");
    CHECK(refusal_of({.delay = 1, .merge = round_merge::eager}) ==
          "local update: the merge 'eager' sends pseudo-gradients, set the payload");
    CHECK(refusal_of({.delay = 1, .merge = round_merge::delay_corrected, .gap = scalar_gap{}}) ==
          "local update: the merge 'delay corrected' has no common anchor to tell staleness by, set no_gap");
    CHECK(refusal_of({.delay = 1, .merge = round_merge::pull_back, .outer = {.momentum = 0.5}}) ==
          "local update: the merge 'pull back' has no outer optimizer, leave rate 1, momentum 0 and no clip");
    CHECK(refusal_of({.delay = 1, .payload = round_payload::pseudo_gradient, .merge = round_merge::delay_corrected}) ==
          "local update: the merge 'delay corrected' sends parameters, set the payload");
    CHECK_THROWS_AS(engine<>(self{}, local<sgd>(self{}), local_update_rule{.period = 0}), usage_error);
    CHECK(co2_method{.clip = 1}.rule().describe() == "local update every 48 steps behind 0 synchronous ones, "
                                                     "pseudo-gradients 1 rounds late, merge 'anchor' of weight "
                                                     "0, heavy ball of rate 1 and momentum 0.2, clipped at 1, in units "
                                                     "of parameters, scalar gap of decay 0.9, inner "
                                                     "state kept");
}

TEST_CASE("misuse is refused, and the run stays intact") {
    toy<float> t;
    engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 2, .units = outer_units::gradients}.rule());
    CHECK(refusal([&] { s.begin({}); }) == "begin: no parameters are attached");
    CHECK(refusal([&] { s.step({}); }) == "step: no parameters are attached");
    CHECK(refusal([&] { s.finish(); }) == "finish: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.state()); }) == "state: no parameters are attached");
    CHECK(refusal([&] { s.restored(); }) == "restored: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.consensus()); }) == "consensus: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.rounds()); }) == "rounds: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.anchor()); }) == "anchor: no parameters are attached");
    s.attach(t.parameters);
    CHECK(refusal([&] { s.attach(t.parameters); }) == "attach: parameters are attached already");
    CHECK(refusal([&] { s.step({0.1}); }) == "step: no micro-batch has begun");
    train(s, 0, 1, {.steps = 1});
    const auto before = t.values();
    s.begin({});
    CHECK(refusal([&] { s.finish(); }) == "finish: in the middle of a step");
    CHECK(refusal([&] { s.restored(); }) == "restored: in the middle of a step");
    CHECK(refusal([&] { static_cast<void>(s.consensus()); }) == "consensus: in the middle of a step");
    test::backward(s, 12, 12, 1.0);
    CHECK(refusal([&] { s.step({.learning_rate = 0}); }) == "step: learning rate 0 at the end of a round, by which "
                                                            "outer momentum in units of gradients is divided; keep the "
                                                            "rate above 0 or take units of parameters");
    CHECK(same_bytes(t.values(), before));
    s.step({.learning_rate = 0.025, .clip_norm = 1});
    {
        const auto scope = s.consensus();
        CHECK(refusal([&] { s.begin({}); }) == "begin: inside a consensus, end its scope first");
        CHECK(refusal([&] { s.finish(); }) == "finish: inside a consensus, end its scope first");
        CHECK(refusal([&] { static_cast<void>(s.state()); }) == "state: inside a consensus, end its scope first");
        CHECK(refusal([&] { static_cast<void>(s.consensus()); }) ==
              "consensus: inside a consensus, end its scope first");
    }
    train(s, 0, 1, {.steps = 5, .first_step = 2});
    s.finish();
    CHECK(same_bytes(t.values(), trained(co2_method{.period = 2, .units = outer_units::gradients}.rule(), 7, sgd{})));
    CHECK(refusal([&] { s.begin({}); }) == "begin: the strategy is finished");
    CHECK(refusal([&] { s.step({}); }) == "step: the strategy is finished");
    CHECK(refusal([&] { s.finish(); }) == "finish: the strategy is finished");
    { const auto scope = s.consensus(); }
    CHECK(s.state().size() > 4);
}

TEST_CASE("bytes of another rule are refused when they are restored") {
    toy<float> t;
    engine<> s(self{}, local<sgd>(self{}), local_sgd_method{2}.rule());
    s.attach(t.parameters);
    for (const auto& e : s.state()) {
        if (e.name == "local_update/counters") { reinterpret_cast<std::uint64_t*>(e.data.data())[3] = 1; }
    }
    CHECK(refusal([&] { s.restored(); }) ==
          "restored: 1 means in flight with a delay of 0: the state is of another rule, or of none");
    local_update_rule rule = co2_method{.period = 2}.rule();
    rule.automatic.emplace();
    toy<float> u;
    engine<> automatic(self{}, local<sgd>(self{}), rule);
    automatic.attach(u.parameters);
    for (const auto& e : automatic.state()) {
        if (e.name == "local_update/counters") { reinterpret_cast<std::uint64_t*>(e.data.data())[5] = 0; }
    }
    CHECK(refusal([&] { automatic.restored(); }) ==
          "restored: a period of 0 steps: the state is of another rule, or of none");
    CHECK(automatic.period() == 2);
}

TEST_CASE("a stated period is the rule's, whatever the state that a run resumes from had") {
    toy<float> t, u;
    engine<> before(self{}, local<sgd>(self{}), co2_method{.period = 2}.rule());
    before.attach(t.parameters);
    train(before, 0, 1, {.steps = 2});
    engine<> s(self{}, local<sgd>(self{}), co2_method{.period = 3}.rule());
    s.attach(u.parameters);
    test::restore(s, test::saved(before));
    CHECK(s.period() == 3);
    train(s, 0, 1, {.steps = 2, .first_step = 2});
    CHECK(s.rounds() == 1);
    train(s, 0, 1, {.steps = 1, .first_step = 4});
    CHECK(s.rounds() == 2);
}

TEST_CASE("strategies move between steps and with a mean in flight; one that was moved from says so") {
    toy<float> t;
    const auto rule = co2_method{.period = 2}.rule();
    engine<> a(self{}, local<sgd>(self{}), rule);
    a.attach(t.parameters);
    train(a, 0, 1, {.steps = 3});
    engine<> b(std::move(a));
    CHECK(refusal([&] { a.begin({}); }) == "begin: no parameters are attached");
    train(b, 0, 1, {.steps = 4, .first_step = 3});
    b.finish();
    CHECK(same_bytes(t.values(), trained(rule, 7, sgd{})));
}

TEST_CASE("named methods are types, with their own hyper-parameters") {
    toy<float> t, u;
    co2<self, local<adamw>> s(self{}, local<adamw>(self{}), {.period = 4, .momentum = 0.3});
    s.attach(t.parameters);
    train(s, 0, 1, {.steps = 10});
    s.finish();
    CHECK(same_bytes(t.values(), trained(co2_method{.period = 4, .momentum = 0.3}.rule(), 10, adamw{})));
    local_sgd<self, local<adamw>> l(self{}, local<adamw>(self{}));
    CHECK(l.rule().period == 12);
    CHECK(l.rule().takes_mean());
}

TEST_CASE("a model without parameters, and one of empty parameters, have rounds too") {
    for (const bool empty : {true, false}) {
        parameters<float> list;
        if (empty) { list.push_back({"e", {0}, true, {}, {}}); }
        for (const auto& rule : {local_sgd_method{2}.rule(), co2_method{2}.rule(), eager_diloco_method{2}.rule(),
                                 co2_method{.period = 2, .gap = elementwise_gap{}}.rule()}) {
            engine<> s(self{}, local<sgd>(self{}), rule);
            s.attach(list);
            for (int k = 0; k < 5; ++k) {
                s.begin({});
                if (empty) { s.gradient_ready(0); }
                s.step({0.1});
            }
            CHECK(s.rounds() == 2);
            s.finish();
        }
    }
}
