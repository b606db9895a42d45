// Tests of strategy/selected_mean: levels that are chosen as training goes on, over ranks that are threads.
#include <algorithm>  // max, copy
#include <cmath>      // sqrt
#include <cstring>    // memcpy
#include <limits>     // infinity
#include <string>     // texts
#include <utility>    // move
#include <vector>     // values

#include <doctest/doctest.h>  // test cases

#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/compress/power_sgd.hpp>      // linear
#include <tutti/compress/quantize.hpp>       // cut among owners
#include <tutti/compress/top_k.hpp>          // gathered whole
#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/optimize/sgd.hpp>            // optimizer
#include <tutti/strategy/data_parallel.hpp>  // host of it
#include <tutti/strategy/selected_mean.hpp>  // under test

#include "strategy/toy.hpp"     // trainer
#include "support/failure.hpp"  // expect
#include "support/oracle.hpp"   // same_bytes

namespace {

using namespace tutti;
using comm::counted;
using comm::threads;
using compress::power_sgd;
using compress::quantize;
using compress::top_k;
using strategy::selected_mean;
using test::expect;
using test::matrices;
using test::saved;
using test::toy;

template <class X> using selected = strategy::data_parallel<counted<threads>, optimize::adamw, float, selected_mean<X>>;

constexpr compress::level_schedule::steps often{.warmup = 0, .period = 5, .window = 2};
selected_mean<quantize> bits() {
    return {.mean = {.compressor = quantize(16), .level = 4, .worth = 1}, .levels = {2, 3, 4, 5, 6, 8}, .steps = often};
}
selected_mean<top_k> densities() {
    return {.mean = {.level = 1000, .worth = 1}, .levels = {100, 300, 600, 1000, 1500, 3000}, .steps = often};
}
selected_mean<power_sgd> ranks() {
    return {.mean = {.level = 2, .worth = 1}, .levels = {1, 2, 3, 4, 5, 6}, .steps = often};
}

template <class S> std::vector<int> levels_of(S& s) {
    std::vector<int> levels;
    for (const auto& t : s.exchange().tensors()) { levels.push_back(t.level); }
    return levels;
}

/// What a run leaves: values, the levels that each step was sent at, and bytes sent by rank.
struct outcome {
    std::vector<float> values;
    std::vector<std::vector<int>> levels;
    std::vector<std::uint64_t> bytes;
    bool operator==(const outcome&) const = default;
};
template <class X> outcome trained(int n, const selected_mean<X>& how, int steps, test::announcing announce = {}) {
    outcome result;
    result.bytes.resize(static_cast<std::size_t>(n));
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        counted<threads> counting(w.duplicate("training"));
        const auto ledger = counting.traffic_ledger();
        selected<X> s(std::move(counting), {}, {.bucket_bytes = 600}, how);
        s.attach(t.parameters);
        const auto before = ledger->total().bytes;
        for (int step = 0; step < steps; ++step) {
            test::train(s, w.rank(), n, {.steps = 1, .how = announce, .first_step = step});
            if (w.rank() == 0) { result.levels.push_back(levels_of(s)); }
        }
        s.flush();
        result.bytes[static_cast<std::size_t>(w.rank())] = ledger->total().bytes - before;
        s.finish();  // throws where ranks differ
        if (w.rank() == 0) { result.values = t.values(); }
    });
    return result;
}

TEST_CASE("levels change in the agreed step, and only then; none is dearer than the uniform one") {
    const auto check = []<class X>(selected_mean<X> how, int n) {
        const outcome run = trained(n, how, 18);
        const std::vector<int> first = run.levels[0];
        const std::vector<int> uniform{0, how.mean.level, 0, how.mean.level, how.mean.level, 0, 0, how.mean.level, 0};
        CHECK(first == uniform);
        bool changed = false;
        for (std::size_t step = 1; step < run.levels.size(); ++step) {
            CAPTURE(step);
            // Windows end with steps 4, 9, 14; their levels are used one step after the next, as `delay` says.
            const bool may = step == 6 || step == 11 || step == 16;
            if (!may) { CHECK(run.levels[step] == run.levels[step - 1]); }
            changed = changed || run.levels[step] != uniform;
            double cost = 0, uniform_cost = 0;
            const auto shapes = matrices();
            for (std::size_t i = 0; i < uniform.size(); ++i) {
                if (uniform[i] == 0) {
                    CHECK(run.levels[step][i] == 0);
                    continue;
                }
                const auto& shape = shapes.parameters[i].shape;
                compress::segment s{0, uniform[i], 0, 0, shape[0], shape[1]};
                uniform_cost += static_cast<double>(how.mean.bytes_of(s));
                s.level = run.levels[step][i];
                cost += static_cast<double>(how.mean.bytes_of(s));
            }
            CHECK(cost <= uniform_cost);
        }
        CHECK(changed);
    };
    check(bits(), 3);
    check(densities(), 2);
    check(ranks(), 3);
    check(ranks(), 1);
}

TEST_CASE("no delay: levels of the very next step; the largest delay that windows leave: those of the last") {
    for (const unsigned delay : {0u, 3u}) {
        auto how = ranks();
        how.delay = delay;
        const outcome run = trained(2, how, 12);
        for (std::size_t step = 1; step < 12; ++step) {
            const bool may = step == 5 + delay || step == 10 + delay;
            if (!may) { CHECK(run.levels[step] == run.levels[step - 1]); }
        }
        CHECK(run.levels[4 + delay] != run.levels[5 + delay]);
    }
}

TEST_CASE("flush waits for a selection under way: its tables have been sent") {
    std::uint64_t sent[2] = {};
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        counted<threads> counting(w.duplicate("training"));
        const auto ledger = counting.traffic_ledger();
        selected<power_sgd> s(std::move(counting), {}, {.bucket_bytes = 600}, ranks());
        s.attach(t.parameters);
        test::train(s, w.rank(), 2, {.steps = 5});  // to the end of a window
        s.flush();
        const auto before = ledger->total().bytes;
        s.begin({});
        s.flush();
        sent[w.rank()] = ledger->total().bytes - before;
        test::backward(s, 5, 2, 1.0, {});
        s.step({0.01});
        s.finish();
    });
    const std::uint64_t tables = 4 * 7 * sizeof(double);  // of four tensors
    for (const std::uint64_t bytes : sent) { CHECK(bytes == tables); }
}

TEST_CASE("a run is a function of its arguments, whatever the order and the delays of gradients") {
    const auto check = [](const auto& how) {
        const outcome calm = trained(3, how, 14);
        CHECK(calm == trained(3, how, 14));
        CHECK(calm == trained(3, how, 14, {.shuffle = 7, .delays = true}));
    };
    check(bits());
    check(densities());
    check(ranks());
}

TEST_CASE("a resume from any step continues with the same bits and levels") {
    const auto check = [](auto how) {
        using X = decltype(how.mean.compressor);
        how.critical = strategy::critical_levels{how.levels.front(), how.levels.back()};
        for (int cut = 3; cut <= 12; ++cut) {
            CAPTURE(cut);
            threads::launch(2, [&](threads& w) {
                const auto start = [&](toy<float>& t, std::string_view name) {
                    selected<X> s(counted<threads>(w.duplicate(name)), {}, {.bucket_bytes = 600}, how);
                    s.attach(t.parameters);
                    return s;
                };
                toy<float> straight = matrices(), fresh = matrices();
                auto whole = start(straight, "whole");
                test::train(whole, w.rank(), 2, {.steps = cut});
                whole.flush();
                const auto checkpoint = saved(whole);
                test::train(whole, w.rank(), 2, {.steps = 8, .first_step = cut});
                whole.flush();

                auto resumed = start(fresh, "resumed");
                test::restore(resumed, checkpoint);
                test::train(resumed, w.rank(), 2, {.steps = 8, .first_step = cut});
                resumed.flush();
                expect(test::same_bytes(fresh.values(), straight.values()), "cut {}: other values", cut);
                expect(levels_of(resumed) == levels_of(whole), "cut {}: other levels", cut);
                expect(saved(resumed) == saved(whole), "cut {}: other state", cut);

                expect(!resumed.exchange().choice().options.empty(), "cut {}: nothing was chosen", cut);
                test::restore(resumed, checkpoint);
                expect(resumed.exchange().choice().options.empty(), "cut {}: the choice of another run", cut);
                resumed.flush();
            });
        }
    };
    check(ranks());
    check(bits());
}

TEST_CASE("steps that are refused, for want of a learning rate, neither start a selection nor adopt one") {
    auto how = bits();
    how.mean.rescale = true;
    for (const unsigned delay : {0u, 2u}) {
        CAPTURE(delay);
        how.delay = delay;
        const auto values_of = [&](bool refused) {
            std::vector<float> values;
            threads::launch(2, [&](threads& w) {
                toy<float> t = matrices();
                selected<quantize> s(counted<threads>(w.duplicate("training")), {}, {.bucket_bytes = 600}, how);
                s.attach(t.parameters);
                for (std::uint64_t step = 0; step < 14; ++step) {
                    const auto state = saved(s);
                    const auto levels = levels_of(s);
                    for (int times = 0; refused && times < 2; ++times) {
                        expect(test::refusal([&] { s.begin({}); }).find("learning rate") != std::string::npos,
                               "step {}: not refused", step);
                        expect(saved(s) == state && levels_of(s) == levels, "step {}: something moved", step);
                    }
                    s.begin({0, 1, 0.01});
                    test::backward(s, 4 * step + 2 * static_cast<std::uint64_t>(w.rank()), 2, 1.0, {});
                    static_cast<void>(s.step({0.01}));
                }
                s.finish();
                if (w.rank() == 0) { values = t.values(); }
            });
            return values;
        };
        CHECK(test::same_bytes(values_of(true), values_of(false)));
    }
}

/// Trains on gradients that depend on rank and step alone, so that a test can do the same by hand.
float known_gradient(int rank, std::uint64_t step, std::size_t at) {
    const auto scale = static_cast<float>(1 + at / 64 % 5);  // tensors differ
    return scale * test::random_element<float>(1000 * (step + 1) + static_cast<std::uint64_t>(rank), at);
}

TEST_CASE("the choice is that of tables measured on each rank's window and averaged") {
    const auto check = []<class X>(selected_mean<X> how, bool averaged) {
        constexpr int n = 3;
        how.measured = averaged ? strategy::measured_gradient::averaged : strategy::measured_gradient::local;
        how.delay = 0;
        const std::size_t width = how.levels.size() + 1;
        std::vector<std::vector<float>> windows(n, std::vector<float>(451));
        std::vector<int> chosen;
        std::vector<compress::segment> tensors;
        threads::launch(n, [&](threads& w) {
            toy<float> t = matrices();
            selected<X> s(counted<threads>(w.duplicate("training")), {}, {.bucket_bytes = 600}, how);
            s.attach(t.parameters);
            std::vector<float>& window = windows[static_cast<std::size_t>(w.rank())];
            for (std::uint64_t step = 0; step < 6; ++step) {
                const bool measured = step == 3 || step == 4;
                s.begin({});
                for (const auto& e : s.state()) {
                    if (e.name != "residual" || averaged || !measured) { continue; }
                    for (std::size_t i = 0; i < window.size(); ++i) {
                        float owed = 0;
                        std::memcpy(&owed, e.data.data() + 4 * i, 4);
                        window[i] += owed;
                    }
                }
                std::size_t at = 0;
                for (std::size_t p = 0; p < t.parameters.size(); ++p) {
                    for (std::size_t e = 0; e < t.parameters[p].value.size(); ++e, ++at) {
                        s.gradient(p)[e] = known_gradient(w.rank(), step, at);
                        if (measured) { window[at] += s.gradient(p)[e]; }
                    }
                    s.gradient_ready(p);
                }
                s.step({0.01});
            }
            s.flush();
            if (w.rank() == 0) {
                chosen = levels_of(s);
                for (const auto& g : s.exchange().tensors()) {
                    if (g.level != 0) { tensors.push_back(g); }
                }
                expect(!s.exchange().choice().fell_back(), "{}", describe(s.exchange().choice()));
            }
        });
        std::vector<double> rows(tensors.size() * width, 0.0), own(rows.size());
        if (averaged) {
            std::vector<float> mean(451);
            for (const auto& x : windows) {
                for (std::size_t i = 0; i < mean.size(); ++i) { mean[i] += x[i]; }
            }
            for (float& x : mean) { x /= n; }
            windows.assign(1, mean);
        }
        for (const auto& x : windows) {
            compress::squared_errors(host_queue(), how.mean.compressor, tensors, how.levels, view<const float>(x),
                                     view<double>(own), {how.mean.seed, 4, 0});
            for (std::size_t i = 0; i < rows.size(); ++i) { rows[i] += own[i] / static_cast<double>(windows.size()); }
        }
        compress::level_table table;
        for (std::size_t t = 0; t < tensors.size(); ++t) {
            std::vector<double> costs, errors;
            for (std::size_t l = 0; l + 1 < width; ++l) {
                tensors[t].level = how.levels[l];
                if (how.mean.bytes_of(tensors[t]) > 4 * tensors[t].size()) { break; }  // no option
                costs.push_back(static_cast<double>(how.mean.bytes_of(tensors[t])));
                errors.push_back(std::sqrt(rows[t * width + l + 1]));
            }
            table.add_layer(costs, errors);
        }
        const auto expected =
            compress::choose_levels(table, std::vector<std::size_t>(tensors.size(), how.option_of(how.mean.level)));
        std::size_t t = 0;
        for (const int level : chosen) {
            CAPTURE(t);
            CAPTURE(describe(expected));
            if (level != 0) { CHECK(level == how.levels[expected.options[t++]]); }
        }
        CHECK(t == tensors.size());
    };
    for (const bool averaged : {false, true}) {
        CAPTURE(averaged);
        check(densities(), averaged);
        check(ranks(), averaged);
        check(bits(), averaged);
    }
}

TEST_CASE("a larger budget sends less; the wire is that of the levels") {
    auto how = ranks();
    const auto uniform = [&] {
        auto same = how;
        same.levels = {2};
        return trained(4, same, 30).bytes;
    }();
    const auto at_one = trained(4, how, 30).bytes;
    how.choice.alpha = 1.3;
    const auto larger = trained(4, how, 30).bytes;
    const std::uint64_t tables = 6 * 2 * 3 * 8 * 4 * 7;  // selections of 4 tensors with 7 numbers, at most
    CHECK(at_one[0] <= uniform[0] + tables);
    CHECK(larger[0] < uniform[0]);
}

TEST_CASE("one level is no choice: the bits and state of a compressed mean") {
    auto how = bits();
    how.levels = {4};
    const outcome run = trained(2, how, 12);
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        strategy::data_parallel<threads, optimize::adamw, float, strategy::compressed_mean<quantize>> plain(
            w.duplicate("plain"), {}, {.bucket_bytes = 600}, how.mean);
        plain.attach(t.parameters);
        test::train(plain, w.rank(), 2, {.steps = 1});
        for (int step = 1; step < 12; ++step) { test::train(plain, w.rank(), 2, {.steps = 1, .first_step = step}); }
        plain.finish();
        expect(test::same_bytes(t.values(), run.values), "other values");
        toy<float> other = matrices();
        selected<quantize> s(counted<threads>(w.duplicate("x")), {}, {.bucket_bytes = 600}, how);
        s.attach(other.parameters);
        expect(s.state().size() == plain.state().size(), "{} entries", s.state().size());
        s.restored();
        s.flush();
    });
    CHECK(run.levels.back() == run.levels.front());
}

TEST_CASE("steps of the warm-up are dense, and measure nothing") {
    auto how = densities();
    how.steps.warmup = 4;
    std::vector<float> plain;
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        strategy::data_parallel<threads, optimize::adamw> s(w.duplicate("plain"), {}, {.bucket_bytes = 600});
        s.attach(t.parameters);
        test::train(s, w.rank(), 2, {.steps = 4});
        s.finish();
        if (w.rank() == 0) { plain = t.values(); }
    });
    CHECK(trained(2, how, 4).values == plain);
    CHECK(trained(2, how, 5).values != plain);
    const outcome run = trained(2, how, 12);
    CHECK(run.levels[9] == run.levels[0]);
    CHECK(run.levels[10] != run.levels[0]);  // 4 dense steps and 5 of a round, and one more as delay
}

TEST_CASE("time: the bytes of late buckets count more") {
    auto how = ranks();
    const outcome by_bytes = trained(2, how, 8);
    how.cost = strategy::level_cost::exposed;
    const outcome by_time = trained(2, how, 8);
    CHECK(by_time.levels.back() != by_bytes.levels.back());
    // The last bucket to start holds the first tensors: theirs are the dearest bytes.
    CHECK(by_time.levels.back()[1] <= by_bytes.levels.back()[1]);
}

TEST_CASE("critical: while gradients change the budget is that of the careful level") {
    auto how = ranks();
    how.mean.level = 3;
    how.critical = strategy::critical_levels{.relaxed = 1, .careful = 3, .eta = 1e9};
    const outcome calm = trained(2, how, 12);  // after a first selection that knows nothing no change is fast
    how.critical->eta = 1e-9;
    const outcome fast = trained(2, how, 12);
    const auto sum = [](const std::vector<int>& levels) {
        int total = 0;
        for (const int l : levels) { total += l; }
        return total;
    };
    CHECK(calm.levels[6] == fast.levels[6]);
    CHECK(sum(calm.levels[11]) <= 4);
    CHECK(sum(fast.levels[11]) > 4);
}

TEST_CASE("a window that is not finite keeps the levels in use, and the next one chooses again") {
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        auto how = bits();
        how.delay = 0;
        selected<quantize> s(counted<threads>(w.duplicate("training")), {}, {.bucket_bytes = 600}, how);
        s.attach(t.parameters);
        std::vector<std::vector<int>> levels;
        for (std::uint64_t step = 0; step < 12; ++step) {
            s.begin({});
            std::size_t at = 0;
            for (std::size_t p = 0; p < t.parameters.size(); ++p) {
                for (std::size_t e = 0; e < t.parameters[p].value.size(); ++e, ++at) {
                    s.gradient(p)[e] = known_gradient(w.rank(), step, at);
                }
                if (step == 8 && w.rank() == 1 && p == 4) { s.gradient(p)[3] = std::numeric_limits<float>::infinity(); }
                s.gradient_ready(p);
            }
            s.step({0.01});
            levels.push_back(levels_of(s));
            if (step == 10) {
                const auto reason = s.exchange().choice().reason;
                expect(reason == compress::choice_reason::error_not_finite, "reason {}", name_of(reason));
            }
        }
        s.flush();
        expect(levels[5] != levels[0], "the first window chose nothing");
        expect(levels[10] == levels[9], "levels of a window that was not finite");
        test::train(s, w.rank(), 2, {.steps = 5, .first_step = 12});
        expect(!s.exchange().choice().fell_back(), "{}", describe(s.exchange().choice()));
        s.finish();
    });
}

TEST_CASE("a strategy that was moved while a selection was under way adopts it") {
    const outcome expected = trained(2, ranks(), 12);
    std::vector<float> values;
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        selected<power_sgd> first(counted<threads>(w.duplicate("training")), {}, {.bucket_bytes = 600}, ranks());
        first.attach(t.parameters);
        test::train(first, w.rank(), 2, {.steps = 1});
        for (int step = 1; step < 6; ++step) { test::train(first, w.rank(), 2, {.steps = 1, .first_step = step}); }
        selected<power_sgd> s = std::move(first);
        for (int step = 6; step < 12; ++step) { test::train(s, w.rank(), 2, {.steps = 1, .first_step = step}); }
        s.finish();
        if (w.rank() == 0) { values = t.values(); }
    });
    CHECK(values == expected.values);
}

TEST_CASE("ranks whose choices differ are told so, by name, before levels are used") {
    std::string text;
    try {
        threads::launch(3, [&](threads& w) {
            auto how = densities();
            how.choice.alpha = 2;
            compress::level_table table;
            const double cheap = w.rank() == 1 ? 100 : 1;  // a cost that only one rank believes
            table.add_layer(std::vector<double>{cheap, 2, 3, 4, 5, 6});
            strategy::detail::level_selection<threads, selected_mean<top_k>> selection(how, w, {{0, 0, 0, 0, 10, 20}},
                                                                                       std::move(table), 200, {});
            for (std::size_t i = 0; i < 200; ++i) { selection.window()[i] = 1.0f; }
            selection.start(w.queue(), 0);
            static_cast<void>(selection.finish(w.queue()));
        });
    } catch (const mismatch_error& e) { text = e.what(); }
    CAPTURE(text);
    CHECK(text.find("the chosen levels") != std::string::npos);
    CHECK(text.find("rank 1") != std::string::npos);
}

TEST_CASE("options that make no sense are refused before anything is sent") {
    const auto text = [](const auto& change) -> std::string {
        auto how = ranks();
        change(how);
        try {
            how.validate();
        } catch (const usage_error& e) { return e.what(); }
        return {};
    };
    using how_type = selected_mean<power_sgd>;
    CHECK(text([](how_type&) {}).empty());
    CHECK(text([](how_type& h) { h.levels = {1, 3}; }) == "selected mean: level 2 is none of the 2 to choose among");
    CHECK(text([](how_type& h) { h.levels = {1}; }) == "selected mean: level 2 is none of the 1 to choose among");
    CHECK(text([](how_type& h) { h.levels = {2, 2}; }) == "selected mean: level 2 comes after 2; levels must ascend");
    CHECK(text([](how_type& h) {
              h.levels.clear();
              for (int level = 1; level <= 257; ++level) { h.levels.push_back(level); }
          }) == "selected mean: 257 levels to choose among, at most 256");
    CHECK(text([](how_type& h) { h.levels.insert(h.levels.begin(), 0); }).find("level 0") != std::string::npos);
    CHECK(text([](how_type& h) { h.mean.largest_level = 6; }) ==
          "selected mean: mean.largest_level is 6; it is the last of `levels`: leave it 0");
    CHECK(text([](how_type& h) { h.delay = 4; }) ==
          "selected mean: levels chosen 4 steps after a window; the next begins after 3");
    CHECK(text([](how_type& h) { h.steps.window = 9; }).find("longer than the period") != std::string::npos);
    CHECK(text([](how_type& h) { h.choice.alpha = 0; }) == "selected mean: alpha is 0, not positive and finite");
    CHECK(text([](how_type& h) {
              h.critical = strategy::critical_levels{9, 2};
          }) == "selected mean: level 9 is none of the 6 to choose among");
    // Ranks that would choose differently are told at attach.
    CHECK_THROWS_AS(threads::launch(2,
                                    [](threads& w) {
                                        toy<float> t = matrices();
                                        auto how = ranks();
                                        how.choice.alpha = 1 + w.rank();
                                        selected<power_sgd> s(counted<threads>(w.duplicate("x")), {}, {}, how);
                                        s.attach(t.parameters);
                                    }),
                    mismatch_error);
}

}  // namespace
