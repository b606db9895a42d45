// Data parallelism on one rank: storage, order of calls, clipping, resuming.
#include <doctest/doctest.h>  // checks

#include <cmath>    // sqrt
#include <cstring>  // memcmp
#include <limits>   // nan
#include <memory>   // strategies that are destroyed
#include <string>   // texts

#include "toy.hpp"                             // trainer
#include <tutti/comm/counted.hpp>              // calls made
#include <tutti/core/stochastic_rounding.hpp>  // neighbors
#include <tutti/core/virtual_queue.hpp>        // concept
#include <tutti/optimize/adamw.hpp>            // adamw
#include <tutti/optimize/sgd.hpp>              // sgd
#include <tutti/strategy/data_parallel.hpp>    // data_parallel

using namespace tutti;
using optimize::adamw;
using optimize::sgd;
using strategy::data_parallel;
using strategy::local;
using test::layout;
using test::recipe;
using test::refusal;
using test::saved;
using test::toy;
using test::train;
using self = comm::self<host_queue>;

static_assert(strategy::shardable<local<adamw>> && strategy::shardable<local<adamw, double>>);
static_assert(strategy::shardable<local<sgd, bfloat16>> && strategy::shardable<local<sgd, float16>>);
static_assert(strategy::shardable<local<adamw, float, virtual_queue>>);
static_assert(!strategy::strategy<int>);
static_assert(!std::copy_constructible<local<adamw>> && std::move_constructible<local<adamw>>);

namespace {

// A strategy over one parameter of one element: everything can be worked out by hand.
template <class Optimizer, class T = double> struct single {
    std::vector<T> x;
    strategy::parameters<T> list{{"x", {1}, true, x, {}}};
    local<Optimizer, T> s;
    single(T start, Optimizer o) : x{start}, s(self{}, o) {
        list[0].value = x;
        s.attach(list);
    }
    strategy::step_result step(T gradient, strategy::hyper h) {
        s.begin({});
        s.gradient(0)[0] = gradient;
        s.gradient_ready(0);
        return s.step(h);
    }
};

}  // namespace

TEST_CASE("a step by hand") {
    single<sgd> a(2, {.momentum = 0});
    auto r = a.step(3, {.learning_rate = 0.1});
    CHECK(a.x[0] == doctest::Approx(1.7).epsilon(1e-15));
    CHECK(r.norm == 3);
    CHECK_FALSE(r.skipped);
    // Clipped to norm 1: the factor is 1 / (4 + 1e-6).
    r = a.step(4, {.learning_rate = 0.1, .clip_norm = 1});
    CHECK(a.x[0] == doctest::Approx(1.7 - 0.4 / (4 + 1e-6)).epsilon(1e-15));
    CHECK(r.norm == 4);
    r = a.step(0.5, {.learning_rate = 0.1, .clip_norm = 1});
    CHECK(r.norm == 0.5);
}

TEST_CASE_TEMPLATE("where tensors lie does not change a bit", T, float, double, bfloat16, float16) {
    std::vector<T> reference;
    for (const layout values : {layout::together, layout::scattered}) {
        for (const layout gradients : {layout::none, layout::together, layout::scattered}) {
            for (const std::size_t bucket : {sizeof(T), std::size_t{300}, std::size_t{1} << 20}) {
                toy<T> t(values, gradients);
                local<adamw, T> s(self{}, {.weight_decay = 0.1}, {.bucket_bytes = bucket});
                s.attach(t.parameters);
                train(s, 0, 1, {.micro = 2});
                s.finish();
                if (reference.empty()) { reference = t.values(); }
                CHECK(test::same_bytes(t.values(), reference));
            }
        }
    }
}

TEST_CASE("no copies where tensors lie one behind the other in parameter order") {
    host_queue q;
    const std::size_t n = std::reduce(toy<float>::sizes.begin(), toy<float>::sizes.end());
    const auto bytes_of = [&](auto tag, layout values, layout gradients) {
        using T = decltype(tag);
        toy<T> t(values, gradients);
        local<sgd, T> s(self{q}, {.momentum = 0});
        s.attach(t.parameters);
        const bool same = static_cast<const void*>(s.owned().data()) == t.parameters[0].value.data();
        CHECK(s.owned().size() == n);
        CHECK(same == (values == layout::together && !std::same_as<T, bfloat16>));
        CHECK((s.gradient(1).data() == t.parameters[1].gradient.data()) == (gradients != layout::none));
        return q.account().live();
    };
    const std::size_t least = bytes_of(1.0f, layout::together, layout::together);  // norm scratch, step count
    CHECK(least == 3 * 8);
    CHECK(bytes_of(1.0f, layout::together, layout::none) == least + 4 * n);
    CHECK(bytes_of(1.0f, layout::together, layout::scattered) == least + 4 * n);
    CHECK(bytes_of(1.0f, layout::scattered, layout::together) == least + 4 * n);
    CHECK(bytes_of(1.0, layout::together, layout::together) == least);
    CHECK(bytes_of(bfloat16{}, layout::together, layout::together) == least + 4 * n);  // float master
    CHECK(q.account().live() == 0);
}

TEST_CASE("tensors in another order than the list are not taken for one run") {
    std::vector<float> memory(6, 1.0f);
    const view<float> v(memory);
    strategy::parameters<float> list{{"b", {3}, true, v.sub(3, 3), {}}, {"a", {3}, true, v.sub(0, 3), {}}};
    local<sgd> s(self{}, {.momentum = 0});
    s.attach(list);
    CHECK(s.owned().data() != memory.data());
    s.begin({});
    s.gradient(0)[0] = 1;
    s.gradient_ready(1);
    s.gradient_ready(0);
    s.step({.learning_rate = 1});
    CHECK(memory == std::vector<float>{1, 1, 1, 0, 1, 1});
}

TEST_CASE("16-bit parameters: small updates add up in the master copy") {
    single<sgd, bfloat16> a(bfloat16(1.0f), {.momentum = 0});
    for (int k = 0; k < 100; ++k) { a.step(bfloat16(1.0f), {.learning_rate = 1e-3}); }
    CHECK(a.s.owned()[0] ==
          doctest::Approx(0.9).epsilon(1e-5));  // 1 - 1e-3 is 1 in bfloat16: its spacing there is 2^-8
    CHECK(float(a.x[0]) == float(bfloat16(a.s.owned()[0])));
}

TEST_CASE("accumulated micro-batches equal one big batch") {
    std::vector<double> whole;
    for (const int micro : {1, 2, 3, 12}) {
        toy<double> t;
        local<adamw, double> s(self{});
        s.attach(t.parameters);
        train(s, 0, 1, {.micro = micro});
        const auto now = t.values();
        if (micro == 1) { whole = now; }
        for (std::size_t i = 0; i < now.size(); ++i) { REQUIRE(now[i] == doctest::Approx(whole[i]).epsilon(1e-12)); }
    }
}

TEST_CASE("buckets are launched in plan order, when they and all before them are complete, on the last micro-batch") {
    std::vector<float> memory(8, 1.0f);
    const view<float> v(memory);
    strategy::parameters<float> list;
    for (std::size_t i = 0; i < 4; ++i) {
        list.push_back({std::string(1, char('a' + i)), {2}, true, v.sub(2 * i, 2), {}});
    }
    comm::counted<self> counted{self{}};
    const auto ledger = counted.traffic_ledger();
    data_parallel<comm::counted<self>, sgd> s(std::move(counted), {}, {.bucket_bytes = 16});  // {c, d}, {a, b}
    s.attach(list);
    const auto launched = [&] {
        s.flush();
        return ledger->snapshot()[comm::collective::all_reduce].calls;
    };
    s.begin({0, 2});
    for (const std::size_t i : {0ul, 3ul, 2ul, 1ul}) { s.gradient_ready(i); }
    CHECK(launched() == 0);
    s.begin({1, 2});
    s.gradient_ready(0);
    s.gradient_ready(1);
    CHECK(launched() == 0);  // complete, but not its turn
    s.gradient_ready(3);
    CHECK(launched() == 0);
    s.gradient_ready(2);
    CHECK(launched() == 2);
    s.step({0.1});
    s.begin({});
    s.gradient_ready(2);
    s.gradient_ready(3);
    CHECK(launched() == 3);
    s.gradient_ready(1);
    s.gradient_ready(0);
    CHECK(launched() == 4);
    s.step({0.1});
    CHECK(ledger->snapshot()[comm::collective::all_reduce].calls == 4);
}

TEST_CASE("a gradient that is not finite skips the step and changes nothing") {
    toy<float> t;
    local<adamw> s(self{});
    s.attach(t.parameters);
    train(s, 0, 1, {.steps = 2});
    const auto before = saved(s);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const double clip : {0.0, 1.0}) {
            s.begin({});
            s.gradient(4)[17] = bad;
            for (std::size_t i = 0; i < t.parameters.size(); ++i) { s.gradient_ready(i); }
            const auto r = s.step({.learning_rate = 0.1, .clip_norm = clip});
            CHECK(r.skipped);
            CHECK_FALSE(std::isfinite(r.norm));
            CHECK(saved(s) == before);
        }
    }
    CHECK(s.skipped_steps() == 4);
    toy<float> clean;
    local<adamw> never_skipped(self{});
    never_skipped.attach(clean.parameters);
    train(never_skipped, 0, 1, {.steps = 2});
    train(never_skipped, 0, 1, {.steps = 2, .first_step = 2});
    train(s, 0, 1, {.steps = 2, .first_step = 2});
    CHECK(test::same_bytes(t.values(), clean.values()));
}

TEST_CASE_TEMPLATE("a resumed run continues bit by bit", T, float, double, bfloat16) {
    for (const layout values : {layout::together, layout::scattered}) {
        toy<T> straight(values);
        local<adamw, T> whole(self{});
        whole.attach(straight.parameters);
        train(whole, 0, 1, {.steps = 5});
        const auto checkpoint = saved(whole);
        train(whole, 0, 1, {.steps = 5, .first_step = 5});

        toy<T> fresh(values, layout::none, 99);  // other initial values
        local<adamw, T> resumed(self{});
        resumed.attach(fresh.parameters);
        REQUIRE(resumed.state().size() == checkpoint.size());
        test::restore(resumed, checkpoint);
        train(resumed, 0, 1, {.steps = 5, .first_step = 5});
        CHECK(test::same_bytes(fresh.values(), straight.values()));
        CHECK(saved(resumed) == saved(whole));
    }
}

TEST_CASE("state lists names, shapes and types") {
    std::vector<bfloat16> a(6), b(1);
    strategy::parameters<bfloat16> list{{"w", {2, 3}, true, a, {}}, {"scale", {}, false, b, {}}};
    local<adamw, bfloat16> s(self{});
    s.attach(list);
    std::vector<std::string> names;
    for (const auto& e : s.state()) { names.push_back(e.name); }
    CHECK(names == std::vector<std::string>{"w/value", "scale/value", "w/first_moment", "scale/first_moment",
                                            "w/second_moment", "scale/second_moment", "optimizer/steps"});
    CHECK(s.state()[0].shape == std::vector<std::size_t>{2, 3});
    CHECK(s.state()[0].type == dtype::float32);
    CHECK(s.state()[0].data.size() == 24);
    CHECK(s.state()[0].data.data() == static_cast<void*>(s.owned().data()));
    CHECK(s.state()[1].shape == std::vector<std::size_t>{1});
    CHECK(s.state()[6].type == dtype::uint64);
    CHECK(s.state()[6].data.size() == 8);
}

TEST_CASE("calls in the wrong order are refused, with the parameter's name, and leave the step intact") {
    std::vector<float> x(4, 1.0f), y(2, 1.0f);
    strategy::parameters<float> list{{"x", {2, 2}, true, x, {}}, {"y", {2}, true, y, {}}};
    local<sgd> s(self{}, {.momentum = 0});
    CHECK(refusal([&] { s.begin({}); }) == "begin: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.before_use(0)); }) == "before_use: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.gradient(0)); }) == "gradient: no parameters are attached");
    CHECK(refusal([&] { s.gradient_ready(0); }) == "gradient_ready: no parameters are attached");
    CHECK(refusal([&] { s.step({0.1}); }) == "step: no parameters are attached");
    CHECK(refusal([&] { s.finish(); }) == "finish: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.state()); }) == "state: no parameters are attached");
    CHECK(refusal([&] { static_cast<void>(s.owned()); }) == "owned: no parameters are attached");
    CHECK(refusal([&] { s.restored(); }) == "restored: no parameters are attached");
    s.attach(list);
    CHECK(refusal([&] { s.attach(list); }) == "attach: parameters are attached already");
    CHECK(refusal([&] { static_cast<void>(s.before_use(2)); }) == "before_use: parameter 2 of 2 parameters");
    CHECK(refusal([&] { s.after_use(9); }) == "after_use: parameter 9 of 2 parameters");
    CHECK(refusal([&] { s.gradient_ready(1); }) == "gradient_ready: 'y' outside a micro-batch, expected begin");
    CHECK(refusal([&] { s.step({0.1}); }) == "step: no micro-batch has begun");
    CHECK(refusal([&] { s.begin({1, 2}); }) == "begin: micro-batch 1 of 2, expected 0 of 2");
    CHECK(refusal([&] { s.begin({0, 0}); }) == "begin: micro-batch 0 of 0 does not exist");
    CHECK(refusal([&] { s.begin({-1, 2}); }) == "begin: micro-batch -1 of 2 does not exist");
    CHECK(refusal([&] { s.begin({2, 2}); }) == "begin: micro-batch 2 of 2 does not exist");

    s.begin({0, 2});
    s.gradient(0)[3] += 1;
    CHECK(refusal([&] { s.gradient_ready(2); }) == "gradient_ready: parameter 2 of 2 parameters");
    s.gradient_ready(0);
    CHECK(refusal([&] { s.gradient_ready(0); }) == "gradient_ready: 'x' a second time in micro-batch 0 of 2");
    const std::string unused =
        "gradients not ready in micro-batch 0 of 2: 'y'; parameters that a model does not use must be left out "
        "of the list, or reported with a zero gradient";
    CHECK(refusal([&] { s.begin({1, 2}); }) == "begin: " + unused);
    CHECK(refusal([&] { s.step({0.1}); }) == "step: micro-batch 0 of 2 was the last one begun");
    CHECK(refusal([&] { s.finish(); }) == "finish: in the middle of a step");
    CHECK(refusal([&] { s.restored(); }) == "restored: in the middle of a step");
    CHECK(refusal([&] { s.publish(); }) == "publish: in the middle of a step");
    CHECK(refusal([&] { static_cast<void>(s.consensus()); }) == "consensus: in the middle of a step");
    s.gradient_ready(1);
    CHECK(refusal([&] { s.begin({0, 2}); }) == "begin: micro-batch 0 of 2, expected 1 of 2");
    CHECK(refusal([&] { s.begin({1, 3}); }) == "begin: micro-batch 1 of 3, expected 1 of 2");
    s.begin({1, 2});
    s.gradient(1)[0] += 2;
    s.gradient_ready(1);
    CHECK(refusal([&] { s.step({0.1}); }).starts_with("step: gradients not ready in micro-batch 1 of 2: 'x'; "));
    s.gradient_ready(0);
    CHECK(refusal([&] { s.begin({0, 2}); }) == "begin: all 2 micro-batches are done, expected a step");
    CHECK(refusal([&] { s.step({-0.1}); }) == "step: learning rate is -0.1, expected a number of 0 or more");
    CHECK(refusal([&] { s.step({}); }) ==
          "step: no learning rate, or not a number; give it as in step({.learning_rate = 1e-3})");
    CHECK(refusal([&] { s.step({std::numeric_limits<double>::infinity()}); }) ==
          "step: learning rate is inf, expected a number of 0 or more");
    CHECK(refusal([&] { s.step({0.1, -1}); }) == "step: clip_norm is -1, expected a norm, or 0 for none");
    CHECK(refusal([&] {
              s.step({0.1, std::numeric_limits<double>::quiet_NaN()});
          }) == "step: clip_norm is nan, expected a norm, or 0 for none");
    s.step({1});  // none of it did harm
    CHECK(x == std::vector<float>{1, 1, 1, 0});
    CHECK(y == std::vector<float>{-1, 1});
    CHECK(refusal([&] { s.step({0.1}); }) == "step: no micro-batch has begun");
    s.finish();
    CHECK(refusal([&] { s.begin({}); }) == "begin: the strategy is finished");
    CHECK(refusal([&] { s.finish(); }) == "finish: the strategy is finished");
    CHECK(s.before_use(0).data() == x.data());  // values stay readable
    CHECK(s.state().size() == 3);
}

TEST_CASE("unused parameters are listed, the first few of many") {
    std::vector<float> x(20);
    strategy::parameters<float> list;
    for (std::size_t i = 0; i < 20; ++i) {
        list.push_back({"p" + std::to_string(i), {1}, true, view<float>(x).sub(i, 1), {}});
    }
    local<sgd> s(self{});
    s.attach(list);
    s.begin({});
    s.gradient_ready(2);
    CHECK(refusal([&] { s.step({0.1}); }).find(": 'p0', 'p1', 'p3', 'p4', 'p5', 'p6', 'p7', 'p8' and 11 more; ") !=
          std::string::npos);
}

TEST_CASE("lists that make no sense are refused before anything moved") {
    std::vector<float> x(6), y(6);
    const auto attached = [&](strategy::parameters<float> list, strategy::data_parallel_options o = {}) {
        local<sgd> s(self{}, {}, o);
        return refusal([&] { s.attach(list); });
    };
    CHECK(attached({{"x", {6}, true, x, {}}, {"x", {6}, true, y, {}}}) == "attach: two parameters are named 'x'");
    CHECK(attached({{"", {6}, true, x, {}}}) == "attach: parameter 0 has no name");
    CHECK(attached({{"x", {2, 2}, true, x, {}}}) ==
          "attach: 'x', float32 [2, 2]: the shape has 4 elements, the value 6");
    CHECK(attached({{"x", {}, true, x, {}}}) == "attach: 'x', float32 []: the shape has 1 elements, the value 6");
    CHECK(attached({{"x", {~std::size_t{0}, 3}, true, x, {}}}).find("the shape overflows") != std::string::npos);
    CHECK(attached({{"x", {6}, false, x, view<float>(y).sub(0, 5)}}) ==
          "attach: 'x', float32 [6], no decay: the value has 6 elements, the gradient 5");
    CHECK(attached({{"x", {3}, true, view<float>(nullptr, 3), {}}}) == "attach: 'x', float32 [3]: the value is null");
    CHECK(attached({{"x", {6}, true, x, view<float>(nullptr, 6)}}) == "attach: 'x', float32 [6]: the gradient is null");
    CHECK(attached({{"x", {6}, true, x, {}}}, {.bucket_bytes = 3}) == "attach: bucket_bytes is 3");
    const std::string once = " share memory; list a tensor that is used twice once";
    const view<float> in_x(x), in_y(y);
    CHECK(attached({{"x", {6}, true, x, x}}) == "attach: the value of 'x' and the gradient of 'x'" + once);
    CHECK(
        attached(
            {{"in", {6}, true, x, {}}, {"b", {1}, true, in_y.sub(0, 1), {}}, {"out", {2}, true, in_x.sub(4, 2), {}}}) ==
        "attach: the value of 'in' and the value of 'out'" + once);
    CHECK(attached({{"in", {4}, true, in_x.sub(0, 4), in_y.sub(0, 4)},
                    {"out", {2}, true, in_x.sub(4, 2), in_y.sub(3, 2)}}) ==
          "attach: the gradient of 'in' and the gradient of 'out'" + once);
    CHECK_THROWS_AS(local<adamw>(self{}, {.beta1 = 2}), usage_error);
}

TEST_CASE("a model without parameters, and one of empty parameters, can be stepped") {
    strategy::parameters<float> none;
    local<adamw> s(self{});
    s.attach(none);
    s.begin({});
    CHECK(s.step({0.1, 1.0}).norm == 0);
    s.finish();
    strategy::parameters<float> empty{{"e", {0}, true, {}, {}}};
    local<adamw> t(self{});
    t.attach(empty);
    t.begin({});
    t.gradient_ready(0);
    CHECK(t.step({0.1}).norm == 0);
    t.finish();
}

TEST_CASE("the gradients that a trainer brings hold the average after the step, and are zeroed by begin") {
    for (const layout gradients : {layout::together, layout::scattered}) {
        toy<float> t(layout::scattered, gradients);
        local<sgd> s(self{});
        s.attach(t.parameters);
        s.begin({});
        for (std::size_t i = t.parameters.size(); i-- > 0;) {
            for (float& g : s.gradient(i)) { g = static_cast<float>(i); }
            s.gradient_ready(i);
        }
        s.step({0.1});
        for (std::size_t i = 0; i < t.parameters.size(); ++i) {
            for (const float g : t.parameters[i].gradient) { REQUIRE(g == static_cast<float>(i)); }
        }
        s.begin({});
        for (const auto& p : t.parameters) {
            for (const float g : p.gradient) { REQUIRE(g == 0); }
        }
    }
}

TEST_CASE("strategies move, also in the middle of a step; one that was moved from says so") {
    toy<float> t, u;
    local<adamw> a(self{}), reference(self{});
    a.attach(t.parameters);
    reference.attach(u.parameters);
    train(a, 0, 1, {.steps = 1});
    a.begin({0, 1});
    local<adamw> b(std::move(a));
    CHECK(refusal([&] { a.begin({}); }) == "begin: no parameters are attached");
    test::backward(b, 12, 12, 1.0);
    auto c = std::make_unique<local<adamw>>(std::move(b));
    c->step({0.05 / 2, 1.0});
    train(*c, 0, 1, {.steps = 1, .first_step = 2});
    train(reference, 0, 1, {.steps = 3});
    CHECK(test::same_bytes(t.values(), u.values()));
}

TEST_CASE("update and publish make a step; an outer strategy may change owned() between them") {
    toy<bfloat16> t;
    local<sgd, bfloat16> s(self{});
    s.attach(t.parameters);
    const auto start = t.values();
    s.begin({});
    test::backward(s, 0, 4, 1.0);
    s.update({0.1});
    CHECK(test::same_bytes(t.values(), start));  // not yet
    for (float& x : s.owned()) { x = 0.25f; }
    s.publish();
    for (const bfloat16 x : t.values()) { REQUIRE(float(x) == 0.25f); }
    double unchanged = 5;
    s.sum_over_shards(view<double>(&unchanged, 1));
    CHECK(unchanged == 5);
}

TEST_CASE_TEMPLATE("stochastic rounding: a step is update and publish, and is resumed bit by bit", T, bfloat16,
                   float16) {
    const strategy::data_parallel_options rounding{.bucket_bytes = 300, .stochastic_rounding_seed = 5};
    for (const layout values : {layout::together, layout::scattered}) {
        toy<T> t(values), u, w, nearest;
        local<adamw, T> whole(self{}, {}, rounding), parts(self{}, {}, rounding), resumed(self{}, {}, rounding);
        local<adamw, T> plain(self{}, {}, {.bucket_bytes = 300});
        whole.attach(t.parameters);
        parts.attach(u.parameters);
        plain.attach(nearest.parameters);
        train(plain, 0, 1, {.steps = 1});
        train(whole, 0, 1, {.steps = 1});
        CHECK_FALSE(test::same_bytes(t.values(), nearest.values()));  // the option does something
        CHECK(std::memcmp(whole.owned().data(), plain.owned().data(), whole.owned().size() * sizeof(float)) == 0);
        train(whole, 0, 1, {.steps = 2, .first_step = 1});
        for (std::uint64_t step = 0; step < 3; ++step) {
            parts.begin({});
            test::backward(parts, step * 12, 12, 1.0);
            const auto before = u.values();
            parts.update({.learning_rate = 0.05 / (1.0 + static_cast<double>(step)), .clip_norm = 1});
            CHECK(test::same_bytes(u.values(), before));  // not published yet
            parts.publish();
            const auto after = u.values();
            parts.publish();
            CHECK(test::same_bytes(u.values(), after));
        }
        CHECK(test::same_bytes(t.values(), u.values()));
        // Only the masters and moments are saved, and the values come out of them again.
        resumed.attach(w.parameters);
        for (std::size_t k = 0; k < whole.state().size(); ++k) {
            const auto& from = whole.state()[k];
            std::memcpy(resumed.state()[k].data.data(), from.data.data(), from.data.size());
            CHECK(from.type == (from.name == "optimizer/steps" ? dtype::uint64 : dtype::float32));
        }
        resumed.restored();
        CHECK(test::same_bytes(w.values(), t.values()));
        train(whole, 0, 1, {.steps = 2, .first_step = 3});
        train(resumed, 0, 1, {.steps = 2, .first_step = 3});
        CHECK(test::same_bytes(w.values(), t.values()));
        // Every value is a neighbor of its master.
        std::size_t i = 0;
        for (const T value : t.values()) {
            const float master = whole.owned()[i++];
            const bool neighbor = value.bits == rounded_stochastically<T>(master, 0).bits ||
                                  value.bits == rounded_stochastically<T>(master, 0xffffffffu).bits;
            REQUIRE(neighbor);
        }
    }
}

TEST_CASE("a skipped step publishes as publish does, and rounding what is not rounded is refused") {
    toy<bfloat16> t;
    local<adamw, bfloat16> s(self{}, {}, {.stochastic_rounding_seed = 5});
    s.attach(t.parameters);
    train(s, 0, 1, {.steps = 1});
    const auto before = t.values();
    s.begin({});
    for (std::size_t i = 0; i < t.parameters.size(); ++i) { s.gradient_ready(i); }
    s.gradient(0)[0] = static_cast<bfloat16>(std::numeric_limits<float>::infinity());
    CHECK(s.step({.learning_rate = 1}).skipped);
    CHECK(test::same_bytes(t.values(), before));
    // An outer strategy's change of owned() is published also by a step that is skipped.
    s.owned()[0] = 3;
    s.begin({});
    for (std::size_t i = 0; i < t.parameters.size(); ++i) { s.gradient_ready(i); }
    s.gradient(0)[0] = static_cast<bfloat16>(std::numeric_limits<float>::infinity());
    CHECK(s.step({.learning_rate = 1}).skipped);
    CHECK(static_cast<float>(t.values()[0]) == 3);

    toy<float> u;
    local<adamw> plain(self{}, {}, {.stochastic_rounding_seed = 5});
    CHECK(refusal([&] { plain.attach(u.parameters); }) ==
          "attach: stochastic rounding is for values of 16 bits, these are float32");
}

TEST_CASE("consensus is what the trainer has") {
    toy<float> t;
    local<adamw> s(self{});
    s.attach(t.parameters);
    train(s, 0, 1, {.steps = 1});
    const auto before = t.values();
    {
        const auto common = s.consensus();
        CHECK(s.before_use(1)[3] == before[8]);
    }
    CHECK(test::same_bytes(t.values(), before));
}
