// Estimates and what steps make of them, on one rank: exact on quadratics, unbiased, converging at the rate that theory
// gives, in fixed order over micro-batches; every rule against its definition; bad numbers.
#include <doctest/doctest.h>  // checks

#include <cmath>    // fabs, log, sqrt
#include <cstdint>  // steps
#include <limits>   // nan
#include <set>      // distinct values
#include <vector>   // weights

#include <support/build.hpp>           // full_speed
#include <tutti/optimize/adamw.hpp>    // ZO-Adam
#include <tutti/optimize/sgd.hpp>      // momentum
#include <tutti/zeroth/in_memory.hpp>  // under test
#include <tutti/zeroth/replicate.hpp>  // under test

#include "quadratic.hpp"  // toy

using namespace tutti;
using test::quadratic;
using test::same_run;
using test::toy_size;
using test::toy_slices;
using test::toy_steps;
using test::toy_weights;
using zeroth::direction;
using zeroth::distribution;
using zeroth::estimator;
using zeroth::loss_value;
using zeroth::tensor_slice;
using zeroth::update_rule;

namespace {

double along(const direction& z, const tensor_slice& s, std::size_t i) {
    return static_cast<double>(element_of(z, s.tensor, s.first + i));
}

// z . gradient of the toy's loss at w, on one micro-batch.
double slope(const std::vector<double>& w, const direction& z, std::size_t micro_batch) {
    double sum = 0;
    for (const tensor_slice& s : toy_slices()) {
        for (std::size_t i = 0; i < s.count; ++i) {
            const std::size_t at = s.offset + i;
            sum += along(z, s, i) * quadratic<double>::curvature(at) *
                   (w[at] - quadratic<double>::target(at, micro_batch)) / static_cast<double>(toy_size);
        }
    }
    return sum;
}

template <class T, class F> struct driver {
    std::vector<T> w;
    zeroth::in_memory<T, host_queue, F> weights;
    zeroth::replicated<comm::self<>, zeroth::in_memory<T, host_queue, F>> steps;
    driver(std::vector<T> start, F loss, const estimator& how)
        : w(std::move(start))
        , weights(host_queue(), view<T>(w), {{.count = w.size()}}, loss)
        , steps(comm::self<>(), weights, how) {}
};

double loss_at(const std::vector<double>& w) { return quadratic<double>()(view<const double>(w), 0).mean; }

// |w|^2 / 2
loss_value half_square(view<const double> w, std::size_t) {
    double sum = 0;
    for (const double x : w) { sum += 0.5 * x * x; }
    return {sum, 1};
}
double square(const std::vector<double>& w) {
    double sum = 0;
    for (const double x : w) { sum += x * x; }
    return sum;
}

}  // namespace

TEST_CASE("on a quadratic the two-sided difference is the slope, the one-sided one is off by half of epsilon") {
    for (const distribution draws : {distribution::normal, distribution::rademacher}) {
        const estimator how{.draws = draws, .seed = 9};
        const auto two = toy_steps<double>(comm::self<>(), 1, how).steps[0];
        const auto w = toy_weights<double>();
        const double exact = slope(w, how.direction_of(0, 0), 0);
        CHECK(two.derivatives[0] == doctest::Approx(exact).epsilon(1e-9));
        estimator one_sided = how;
        one_sided.sides = zeroth::estimate::one_sided;
        const auto one = toy_steps<double>(comm::self<>(), 1, one_sided).steps[0];
        double bend = 0;  // z . Hessian . z
        for (const tensor_slice& s : toy_slices()) {
            for (std::size_t i = 0; i < s.count; ++i) {
                const double z = along(how.direction_of(0, 0), s, i);
                bend += z * z * quadratic<double>::curvature(s.offset + i) / static_cast<double>(toy_size);
            }
        }
        CHECK(one.derivatives[0] == doctest::Approx(exact + 0.5 * how.epsilon * bend).epsilon(1e-9));
        CHECK(one.loss_plus == doctest::Approx(two.loss_plus).epsilon(1e-12));
        const double here = loss_at(w);
        CHECK(one.loss_other == doctest::Approx(here).epsilon(1e-7));
        CHECK(two.loss_other != one.loss_other);
    }
}

TEST_CASE("the mean of g z over draws is the gradient") {
    constexpr std::size_t n = 6000, d = 8;
    const std::vector<double> w = toy_weights<double>(d);
    std::vector<double> mean(d);
    driver run(w, half_square, {.seed = 3});
    for (std::uint64_t k = 0; k < n; ++k) {
        const double g = run.steps.step(0).derivatives[0];
        for (std::size_t i = 0; i < d; ++i) {
            mean[i] += g * static_cast<double>(element_of(estimator{.seed = 3}.direction_of(k, 0), 0, i)) / n;
        }
    }
    double error = 0;
    for (std::size_t i = 0; i < d; ++i) { error += (mean[i] - w[i]) * (mean[i] - w[i]); }
    CHECK(std::sqrt(error / square(w)) <= 3 * std::sqrt((d + 1.0) / n));
    CHECK(test::same_bytes(run.w, w));  // a learning rate of 0
}

TEST_CASE("descent on a square converges at the rate of theory, and diverges beyond 2 / (d + 2)") {
    const std::size_t d = test::full_speed ? 1000 : 100;
    const std::size_t steps = test::full_speed ? 5000 : 500;
    const std::uint64_t seeds = test::full_speed ? 2 : 16;
    const auto dimension = static_cast<double>(d);
    double after = 0, before = 0;
    for (std::uint64_t s = 0; s < seeds; ++s) {
        driver run(toy_weights<double>(d), half_square, {.seed = 50 + s});
        before += square(run.w);
        for (std::size_t k = 0; k < steps; ++k) { run.steps.step(1 / (dimension + 2)); }
        after += square(run.w);
    }
    const double predicted = static_cast<double>(steps) * std::log(1 - 1 / (dimension + 2));
    CHECK(std::log(after / before) == doctest::Approx(predicted).epsilon(0.05));
    driver run(toy_weights<double>(50), half_square, {.seed = 1});
    const double start = square(run.w);
    for (std::size_t k = 0; k < 400; ++k) { run.steps.step(4.0 / 52); }
    CHECK(square(run.w) > 100 * start);
}

TEST_CASE("micro-batches of a shard are averaged by their terms, in order; one direction for all") {
    const estimator how{.seed = 2};
    const auto w = toy_weights<double>();
    const auto run = toy_steps<double>(comm::self<>(), 1, how, {.micro_batches = 4}).steps[0];
    const quadratic<double> loss;
    std::vector<double> plus(w), minus(w);
    const view<const double> start(w);
    perturb(host_queue(), start, view<double>(plus), toy_slices(), how.direction_of(0, 0), how.epsilon);
    perturb(host_queue(), start, view<double>(minus), toy_slices(), how.direction_of(0, 0), -how.epsilon);
    double sums[2] = {0, 0}, terms = 0, slopes = 0;
    for (std::size_t m = 0; m < 4; ++m) {
        const auto n = static_cast<double>(loss.terms(m));
        sums[0] += n * loss(view<const double>(plus), m).mean;
        sums[1] += n * loss(view<const double>(minus), m).mean;
        slopes += n * slope(w, how.direction_of(0, 0), m);
        terms += n;
    }
    // The same operations in the same order: the same bits.
    const double difference = terms * (sums[0] / terms - sums[1] / terms) / terms;
    CHECK(run.derivatives[0] == difference / (2 * how.epsilon));
    CHECK(run.derivatives[0] == doctest::Approx(slopes / terms).epsilon(1e-9));
    // As many shards of one micro-batch: another order of the same mean.
    const auto shards = toy_steps<double>(comm::self<>(), 1, how, {.shards = 4}).steps[0];
    CHECK(shards.derivatives[0] == doctest::Approx(run.derivatives[0]).epsilon(1e-10));
}

TEST_CASE("steps are those of the double formula, applied at once or with the next probe") {
    for (const std::uint32_t directions : {1u, 3u}) {
        const estimator how{.directions = directions, .seed = 77, .weight_decay = 0.05};
        const auto run = toy_steps<double>(comm::self<>(), 25, how);
        std::vector<double> w = toy_weights<double>();
        for (std::size_t k = 0; k < 25; ++k) {
            const double rate = 0.02 / (1 + 0.1 * static_cast<double>(k % 10));
            const std::vector<double> before = w;
            for (const tensor_slice& s : toy_slices()) {
                for (std::size_t i = 0; i < s.count; ++i) {
                    double sum = 0;
                    for (std::uint32_t j = 0; j < directions; ++j) {
                        const direction z = how.direction_of(k, j);
                        sum += slope(before, z, 0) * along(z, s, i) / directions;
                    }
                    w[s.offset + i] -= rate * (sum + (s.decayed ? 0.05 : 0) * before[s.offset + i]);
                }
            }
        }
        for (std::size_t i = 0; i < w.size(); ++i) { CHECK(std::fabs(run.weights[i] - w[i]) < 1e-9); }
        CHECK(
            same_run(run, toy_steps<double>(comm::self<>(), 25, how, {}, 0.02, {}, zeroth::applied::with_next_probe)));
        const auto narrow = toy_steps<float>(comm::self<>(), 25, how);
        CHECK(same_run(narrow,
                       toy_steps<float>(comm::self<>(), 25, how, {}, 0.02, {}, zeroth::applied::with_next_probe)));
        CHECK(same_run(narrow, toy_steps<float>(comm::self<>(), 25, how)));
        CHECK(narrow.weights[0] == doctest::Approx(w[0]).epsilon(1e-3));
    }
}

TEST_CASE("no result depends on when updates are applied: directions of either kind, a step twice") {
    using zeroth::applied;
    const auto normal = distribution::normal, signs = distribution::rademacher;
    const auto left = [&](applied when) {
        std::vector<float> w = toy_weights<float>();
        test::toy_pipeline<float> weights(host_queue(), view<float>(w), toy_slices(), {}, when);
        std::vector<double> losses;
        const auto update = [&](std::uint64_t step, distribution kind) {
            const zeroth::pending_update u{{.seed = 3, .step = step, .kind = kind}, 1.5, 0.1, 0.5};
            weights.update({&u, 1});
        };
        const auto look = [&](distribution kind) {
            const zeroth::probe p{{.seed = 4, .kind = kind}, 1e-2};
            loss_value l;
            weights.evaluate({&p, 1}, 0, {&l, 1});
            losses.push_back(l.mean);
        };
        update(0, normal);
        update(1, signs);
        update(2, signs);
        look(normal);
        update(3, signs);
        CHECK_THROWS_WITH_AS(update(3, signs), "update: step 3 of seed 3 again; a step's updates come together",
                             usage_error);
        look(signs);
        CHECK_THROWS_WITH_AS(update(3, normal), "update: step 3 of seed 3 again; a step's updates come together",
                             usage_error);
        update(4, normal);
        weights.flush();
        losses.insert(losses.end(), w.begin(), w.end());
        return losses;
    };
    const std::vector<double> at_once = left(applied::at_once);
    CHECK(test::same_bytes(left(applied::with_next_probe), at_once));
    // As five updates one after another.
    std::vector<float> w = toy_weights<float>();
    for (const std::uint64_t step : {0u, 1u, 2u, 3u, 4u}) {
        const zeroth::pending_update u{
            {.seed = 3, .step = step, .kind = step == 0 || step == 4 ? normal : signs}, 1.5, 0.1, 0.5};
        apply_updates(host_queue(), view<float>(w), toy_slices(), {&u, 1});
    }
    CHECK(test::same_bytes(std::vector<double>(at_once.begin() + 2, at_once.end()),
                           std::vector<double>(w.begin(), w.end())));
}

TEST_CASE("derivatives of float weights do not fall on a coarse grid") {
    const auto run = toy_steps<float>(comm::self<>(), 1000, {.seed = 4}, {}, 1e-4);
    std::set<double> values;
    for (const auto& s : run.steps) { values.insert(s.derivatives[0]); }
    CHECK(values.size() > 900);
    CHECK(run.flat == 0);
    CHECK(toy_steps<float>(comm::self<>(), 5, {.epsilon = 1e-12}).flat == 5);  // nothing moves: said, not hidden
}

TEST_CASE("the sign rule goes the same way whatever the slope") {
    const estimator how{.rule = update_rule::sign, .seed = 6};
    const auto run = toy_steps<double>(comm::self<>(), 1, how);
    const auto start = toy_weights<double>();
    const double way = run.steps[0].derivatives[0] > 0 ? 1 : -1;
    for (const tensor_slice& s : toy_slices()) {
        for (std::size_t i = 0; i < s.count; ++i) {
            const double expected = start[s.offset + i] - 0.02 * way * along(how.direction_of(0, 0), s, i);
            CHECK(run.weights[s.offset + i] == doctest::Approx(expected).epsilon(1e-13));
        }
    }
    CHECK(run.steps[0].move == doctest::Approx(20));  // 0.02 / 0.001
}

TEST_CASE("the conservative rule never makes the loss of its batch larger, and says what it kept") {
    estimator how{.rule = update_rule::conservative, .seed = 6};
    std::set<int> kept;
    for (const double rate : {0.5, 4.0, 30.0}) {
        const auto run = toy_steps<double>(comm::self<>(), 40, how, {}, rate);
        const double loss = loss_at(toy_weights<double>());
        for (const auto& s : run.steps) { kept.insert(s.kept); }
        CHECK(loss_at(run.weights) <= loss);
        if (rate < 1) { CHECK(loss_at(run.weights) < 0.9 * loss); }
    }
    CHECK(kept == std::set<int>{0, 1});
    // A slope with the wrong sign, as noise may give it: then the step back is the better one.
    quadratic<double> turned;
    int calls = 0;
    turned.spoiled = [&calls](std::size_t, double loss) { return ++calls <= 2 ? -loss : loss; };
    const auto back = toy_steps<double>(comm::self<>(), 1, how, {}, 0.5, turned);
    CHECK(back.steps[0].kept == -1);
    CHECK(loss_at(back.weights) < loss_at(toy_weights<double>()));
}

TEST_CASE("momentum and Adam are those of the optimizers, of the mean of g z") {
    const estimator how{.directions = 2, .seed = 12};
    const auto check = [&](auto optimizer, auto reference) {
        const auto run = toy_steps<double>(comm::self<>(), 12, how, {}, 0.02, {}, zeroth::applied::at_once, optimizer);
        std::vector<double> w = toy_weights<double>(), m(toy_size), v(toy_size);
        for (std::size_t k = 0; k < 12; ++k) {
            const double rate = 0.02 / (1 + 0.1 * static_cast<double>(k % 10));
            const std::vector<double> before = w;
            for (const tensor_slice& s : toy_slices()) {
                for (std::size_t i = 0; i < s.count; ++i) {
                    const std::size_t at = s.offset + i;
                    double g = 0;
                    for (std::uint32_t j = 0; j < 2; ++j) {
                        const direction z = how.direction_of(k, j);
                        g += slope(before, z, 0) * along(z, s, i) / 2;
                    }
                    reference(w[at], g, m[at], v[at], rate, static_cast<double>(k + 1), s.decayed);
                }
            }
        }
        for (std::size_t i = 0; i < toy_size; ++i) { CHECK(std::fabs(run.weights[i] - w[i]) < 1e-8); }
    };
    check(optimize::sgd{.momentum = 0.9, .weight_decay = 0.1},
          [](double& w, double g, double& m, double&, double rate, double, bool decayed) {
              m = 0.9 * m + g + (decayed ? 0.1 * w : 0);
              w -= rate * m;
          });
    check(optimize::adamw{.weight_decay = 0},
          [](double& w, double g, double& m, double& v, double rate, double t, bool) {
              m = 0.9 * m + 0.1 * g;
              v = 0.999 * v + 0.001 * g * g;
              w -= rate * (m / (1 - std::pow(0.9, t))) / (std::sqrt(v / (1 - std::pow(0.999, t))) + 1e-8);
          });
    CHECK_THROWS_WITH_AS(toy_steps<double>(comm::self<>(), 1, {.weight_decay = 0.1}, {}, 0.02, {},
                                           zeroth::applied::at_once, optimize::sgd{}),
                         "zeroth: the weight decay of an optimizer is its own", usage_error);
}

TEST_CASE("a run with an optimizer resumes with the same bits from weights, moments and counts that were saved") {
    const estimator how{.directions = 2, .seed = 13};
    const auto check = [&](auto optimizer) {
        using pipeline = test::toy_pipeline<float, decltype(optimizer)>;
        using stepping = zeroth::replicated<comm::self<>, pipeline>;
        std::vector<float> w = toy_weights<float>(), whole = w;
        const auto pipeline_on = [&](std::vector<float>& weights) {
            return pipeline(host_queue(), view<float>(weights), toy_slices(), {}, zeroth::applied::at_once, optimizer);
        };
        pipeline all = pipeline_on(whole);
        stepping uninterrupted(comm::self<>(), all, how);
        for (int k = 0; k < 8; ++k) { uninterrupted.step(0.02); }

        std::vector<std::vector<float>> moments;
        std::uint64_t count = 0;
        {
            pipeline first = pipeline_on(w);
            stepping steps(comm::self<>(), first, how);
            for (int k = 0; k < 3; ++k) { steps.step(0.02); }
            for (const auto& m : first.state().moments()) {
                const view<float> values = m.values.view();
                moments.emplace_back(values.begin(), values.end());
            }
            count = first.state().counter()[0];
        }
        CHECK(!moments.empty());
        CHECK(count == 3);
        pipeline second = pipeline_on(w);
        for (std::size_t i = 0; i < moments.size(); ++i) {
            copy(host_queue(), view<const float>(moments[i]), second.state()[i]);
        }
        second.state().counter()[0] = count;
        second.state().restored(host_queue());
        stepping steps(comm::self<>(), second, how);
        steps.resume(3);
        for (int k = 3; k < 8; ++k) { steps.step(0.02); }
        CHECK(test::same_bytes(w, whole));
    };
    check(optimize::sgd{.momentum = 0.9});
    check(optimize::adamw{});
}

TEST_CASE("a loss that is not finite moves nothing and is counted; shards without terms do not speak") {
    const auto clean = toy_steps<float>(comm::self<>(), 3, {.seed = 8}, {.shards = 2});
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        quadratic<float> loss;
        int calls = 0;
        loss.spoiled = [&calls, bad](std::size_t, double l) { return ++calls == 6 ? bad : l; };  // in the second step
        const auto run = toy_steps<float>(comm::self<>(), 2, {.seed = 8}, {.shards = 2}, 0.02, loss);
        CHECK(run.skipped == 1);
        CHECK(!run.steps[0].skipped);
        CHECK(run.steps[1].skipped);
        const auto one = toy_steps<float>(comm::self<>(), 1, {.seed = 8}, {.shards = 2});
        CHECK(test::same_bytes(run.weights, one.weights));
    }
    // The second micro-batch has no terms and a loss of 0 / 0.
    std::vector<float> w = toy_weights<float>(), expected = w;
    const auto empty = [](view<const float> x, std::size_t m) {
        const loss_value l = quadratic<float>()(x, 0);
        return m == 1 ? loss_value{std::numeric_limits<double>::quiet_NaN(), 0} : l;
    };
    const auto all_empty = [](view<const float>, std::size_t) { return loss_value{1.0, 0}; };
    const auto one_step = [](std::vector<float>& x, auto loss, const zeroth::division& how) {
        zeroth::in_memory weights(host_queue(), view<float>(x), toy_slices(), loss);
        zeroth::replicated driver(comm::self<>(), weights, estimator{}, how);
        return driver.step(0.1);
    };
    CHECK(!one_step(w, empty, {.shards = 2}).skipped);
    CHECK(!one_step(expected, quadratic<float>(), {}).skipped);
    CHECK(test::same_bytes(w, expected));
    CHECK(one_step(w, all_empty, {}).skipped);
    CHECK(test::same_bytes(w, expected));
}

TEST_CASE("numbers that make no sense are refused before anything moves") {
    const auto refused = [](const estimator& how, const zeroth::division& divided, double rate) {
        std::string text = "nothing";
        try {
            toy_steps<float>(comm::self<>(), 1, how, divided, rate);
        } catch (const usage_error& e) { text = e.what(); }
        return text;
    };
    CHECK(refused({.epsilon = 0}, {}, 1) == "zeroth: epsilon is 0, expected a positive number");
    CHECK(refused({.epsilon = -1e-3}, {}, 1) == "zeroth: epsilon is -0.001, expected a positive number");
    CHECK(refused({.directions = 0}, {}, 1) == "zeroth: 0 directions, expected 1 to 64");
    CHECK(refused({.directions = 65}, {}, 1) == "zeroth: 65 directions, expected 1 to 64");
    CHECK(refused({.weight_decay = -1}, {}, 1) == "zeroth: weight decay is -1, expected 0 or more");
    CHECK(refused({.directions = 2, .rule = update_rule::conservative}, {}, 1) ==
          "zeroth: the conservative rule has one direction, not 2");
    CHECK(refused({.rule = update_rule::conservative, .weight_decay = 0.5}, {}, 1) ==
          "zeroth: a weight decay of 0.5 would lead the conservative rule to a point that it did not probe");
    CHECK(refused({}, {}, -1) == "zeroth: the learning rate is -1, expected 0 or more");
    CHECK(refused({}, {}, std::numeric_limits<double>::infinity()) ==
          "zeroth: the learning rate is inf, expected 0 or more");
    CHECK(refused({}, {.sides = 2}, 1) == "zeroth: 2 sides times 1 data times 1 directions are not 1 ranks");
    CHECK(refused({}, {.shards = 0}, 1) == "zeroth: 0 shards cannot be dealt to 1");
    CHECK(refused({}, {.micro_batches = 0}, 1) == "zeroth: a shard has no micro-batch");
    CHECK(refused({}, {.order = {1}}, 1) == "zeroth: the order is not one of 1 ranks");
    CHECK_THROWS_AS((zeroth::division{.data = 2, .shards = 3}.validate(2, 1)), usage_error);
    CHECK_THROWS_AS((zeroth::division{.directions = 2}.validate(2, 3)), usage_error);
    CHECK_THROWS_AS((zeroth::division{.data = 3, .shards = 3, .order = {0, 1, 1}}.validate(3, 1)), usage_error);
    // Tied weights listed twice.
    std::vector<float> w(8);
    const auto tied = [&w] {
        zeroth::in_memory twice(host_queue(), view<float>(w), {{.tensor = 0, .count = 8}, {.tensor = 1, .count = 8}},
                                quadratic<float>());
    };
    CHECK_THROWS_AS(tied(), usage_error);
    // Numbers of terms that differ between two passes over one micro-batch, or are too many.
    std::uint32_t terms = 5;
    const auto odd = [&terms](view<const float>, std::size_t) { return loss_value{1.0, terms++}; };
    const auto huge = [](view<const float>, std::size_t) { return loss_value{1.0, 1u << 24}; };
    const auto step = [&w](auto loss) {
        zeroth::in_memory weights(host_queue(), view<float>(w), {{.count = 8}}, loss);
        zeroth::replicated(comm::self<>(), weights, estimator{}).step(1);
    };
    CHECK_THROWS_WITH_AS(step(odd), "zeroth: one micro-batch has 5 and 6 loss terms", usage_error);
    CHECK_THROWS_WITH_AS(step(huge), "zeroth: a shard of 16777216 loss terms, 16777215 are the most", usage_error);
}
