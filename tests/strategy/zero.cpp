// ZeRO on one rank and on queues that do not run inline: order of calls, misuse, moves; exact times.
#include <doctest/doctest.h>  // checks

#include <cstring>  // memcmp
#include <memory>   // strategies that are destroyed
#include <new>      // bad_alloc
#include <span>     // ranks of a child
#include <string>   // texts
#include <utility>  // move
#include <vector>   // values

#include <support/build.hpp>                 // TUTTI_TEST_TYPES
#include "schedule/stream_queue.hpp"         // a device-like queue
#include "sharded_toy.hpp"                   // trainer
#include "stream_toy.hpp"                    // its backward on a stream
#include <tutti/comm/decorator.hpp>          // a link
#include <tutti/comm/self.hpp>               // one rank
#include <tutti/core/virtual_queue.hpp>      // exact times
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/schedule/timeline.hpp>       // timeline
#include <tutti/strategy/data_parallel.hpp>  // what it has to equal
#include <tutti/strategy/zero.hpp>           // zero

using namespace tutti;
using optimize::adamw;
using optimize::sgd;
using strategy::zero;
using test::for_stages;
using test::refusal;
using test::same_bytes;
using test::sized_toy;
using test::slope_operation;
using test::stream_memory;
using test::stream_queue;
using self = comm::self<host_queue>;

template <int Stage, class C, class O, class T = float>
concept exists = requires {
    typename zero<Stage, C, O, T>;
};
static_assert(strategy::shardable<zero<1, self, adamw>> && strategy::shardable<zero<3, self, sgd, float16>>);
static_assert(strategy::shardable<zero<1, comm::self<virtual_queue>, adamw, bfloat16>>);
static_assert(strategy::shardable<zero<3, comm::self<virtual_queue>, adamw, bfloat16>>);
static_assert(!std::copy_constructible<zero<2, self, adamw>> && std::move_constructible<zero<2, self, adamw>>);
static_assert(exists<1, self, adamw> && !exists<0, self, adamw> && !exists<4, self, adamw>);

namespace {

constexpr std::size_t count = 10;  // parameters of several_blocks

// A virtual communicator whose reductions and gathers take one second a byte of the whole.
class slow_link : public comm::decorator<slow_link, comm::self<virtual_queue>> {
    using base = comm::decorator<slow_link, comm::self<virtual_queue>>;
    friend base;

public:
    explicit slow_link(comm::self<virtual_queue> inner) : base(std::move(inner)) {}
    void execute(const comm::call& c) {
        if (c.kind == comm::collective::reduce_scatter_v || c.kind == comm::collective::all_gather_v) {
            queue().charge(name_of(c.kind), {double(c.in_bytes()), 0});
        }
        inner().execute(c);
    }

private:
    void before(const typename base::control_call&) noexcept {}
    [[nodiscard]] slow_link wrap(comm::self<virtual_queue> child, std::span<const int>) {
        return slow_link(std::move(child));
    }
};

}  // namespace

TEST_CASE_TEMPLATE("one rank is plain training", T, TUTTI_TEST_TYPES(float, double, bfloat16, float16)) {
    sized_toy<T> reference(test::several_blocks);
    strategy::local<adamw, T> plain(self{});
    plain.attach(reference.parameters);
    const auto norms = test::train_sharded(plain, count, 0, 1, {});
    for_stages([&](auto stage) {
        sized_toy<T> t(test::several_blocks);
        zero<stage, self, adamw, T> s(self{}, {}, {.bucket_bytes = 20000});
        s.attach(t.parameters);
        CHECK(test::train_sharded(s, count, 0, 1, {}) == norms);
        CHECK(same_bytes(test::values_of(s, count), test::values_of(plain, count)));
        s.finish();
        CHECK(same_bytes(test::values_of(s, count), test::values_of(plain, count)));  // values stay readable
    });
}

TEST_CASE("16-bit values rounded stochastically have the bits of data parallelism") {
    sized_toy<bfloat16> reference(test::several_blocks), u(test::several_blocks);
    strategy::local<adamw, bfloat16> plain(self{}, {}, {.stochastic_rounding_seed = 5});
    strategy::local<adamw, bfloat16> nearest(self{});
    plain.attach(reference.parameters);
    nearest.attach(u.parameters);
    test::train_sharded(plain, count, 0, 1, {});
    test::train_sharded(nearest, count, 0, 1, {});
    CHECK_FALSE(same_bytes(test::values_of(plain, count), test::values_of(nearest, count)));
    for_stages([&](auto stage) {
        sized_toy<bfloat16> t(test::several_blocks);
        zero<stage, self, adamw, bfloat16> s(self{}, {}, {.bucket_bytes = 20000, .stochastic_rounding_seed = 5});
        s.attach(t.parameters);
        test::train_sharded(s, count, 0, 1, {});
        const auto values = test::values_of(s, count);
        CHECK(same_bytes(values, test::values_of(plain, count)));
        s.publish();
        CHECK(same_bytes(test::values_of(s, count), values));
    });
}

TEST_CASE("16-bit parameters: small updates add up in the masters") {
    for_stages([&](auto stage) {
        std::vector<bfloat16> x{bfloat16(1.0f)};
        strategy::parameters<bfloat16> list{{"x", {1}, true, x, {}}};
        zero<stage, self, sgd, bfloat16> s(self{}, {.momentum = 0});
        s.attach(list);
        for (int k = 0; k < 100; ++k) {
            s.begin({});
            s.gradient(0)[0] = bfloat16(1.0f);
            s.gradient_ready(0);
            s.step({.learning_rate = 1e-3});
        }
        CHECK(s.owned()[0] == doctest::Approx(0.9).epsilon(1e-5));
        CHECK(float(s.before_use(0)[0]) == float(bfloat16(s.owned()[0])));
    });
}

TEST_CASE("calls in the wrong order are refused, with the parameter's name, and leave the step intact") {
    for_stages([&](auto stage) {
        CAPTURE(int(stage));
        std::vector<float> x(4, 1.0f), y(2, 1.0f);
        strategy::parameters<float> list{{"x", {2, 2}, true, x, {}}, {"y", {2}, true, y, {}}};
        zero<stage, self, sgd> s(self{}, {.momentum = 0}, {.bucket_bytes = 8});
        CHECK(refusal([&] { s.begin({}); }) == "begin: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.before_use(0)); }) == "before_use: no parameters are attached");
        CHECK(refusal([&] { s.after_use(0); }) == "after_use: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.gradient(0)); }) == "gradient: no parameters are attached");
        CHECK(refusal([&] { s.gradient_ready(0); }) == "gradient_ready: no parameters are attached");
        CHECK(refusal([&] { s.step({0.1}); }) == "step: no parameters are attached");
        CHECK(refusal([&] { s.finish(); }) == "finish: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.state()); }) == "state: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.owned()); }) == "owned: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.shards()); }) == "shards: no parameters are attached");
        CHECK(refusal([&] { s.restored(); }) == "restored: no parameters are attached");
        CHECK(refusal([&] { s.publish(); }) == "publish: no parameters are attached");
        CHECK(refusal([&] { static_cast<void>(s.consensus()); }) == "consensus: no parameters are attached");
        s.flush();
        s.attach(list);
        CHECK(refusal([&] { s.attach(list); }) == "attach: parameters are attached already");
        CHECK(refusal([&] { static_cast<void>(s.before_use(2)); }) == "before_use: parameter 2 of 2 parameters");
        CHECK(refusal([&] { s.after_use(9); }) == "after_use: parameter 9 of 2 parameters");
        CHECK(refusal([&] { static_cast<void>(s.gradient(2)); }) == "gradient: parameter 2 of 2 parameters");
        CHECK(refusal([&] { s.step({0.1}); }) == "step: no micro-batch has begun");
        if (stage != 1) {
            CHECK(refusal([&] { static_cast<void>(s.gradient(1)); }) ==
                  "gradient: 'y' outside a micro-batch, expected begin");
        }
        if (stage == 3) {
            CHECK(refusal([&] { s.after_use(1); }) == "after_use: 'y' is not in use");
        }
        s.begin({0, 2});
        static_cast<void>(s.before_use(0));
        s.gradient(0)[3] += 1;
        s.gradient_ready(0);
        if (stage != 1) {
            CHECK(refusal([&] { static_cast<void>(s.gradient(0)); }) ==
                  "gradient: 'x' is ready already in micro-batch 0 of 2");
        }
        CHECK(refusal([&] { s.gradient_ready(0); }) == "gradient_ready: 'x' a second time in micro-batch 0 of 2");
        s.gradient_ready(1);
        if (stage == 3) {
            CHECK(refusal([&] { s.begin({1, 2}); }) == "begin: 'x' is still in use");
            CHECK(refusal([&] { s.step({0.1}); }) == "step: 'x' is still in use");
        }
        s.after_use(0);
        CHECK(refusal([&] { s.step({0.1}); }) == "step: micro-batch 0 of 2 was the last one begun");
        CHECK(refusal([&] { s.finish(); }) == "finish: in the middle of a step");
        CHECK(refusal([&] { s.restored(); }) == "restored: in the middle of a step");
        CHECK(refusal([&] { s.publish(); }) == "publish: in the middle of a step");
        CHECK(refusal([&] { static_cast<void>(s.consensus()); }) == "consensus: in the middle of a step");
        s.begin({1, 2});
        static_cast<void>(s.before_use(0));
        s.after_use(0);
        s.gradient(1)[0] += 2;
        s.gradient_ready(1);
        CHECK(refusal([&] { s.step({0.1}); }).starts_with("step: gradients not ready in micro-batch 1 of 2: 'x'; "));
        s.gradient_ready(0);
        CHECK(refusal([&] { s.step({-0.1}); }) == "step: learning rate is -0.1, expected a number of 0 or more");
        CHECK(refusal([&] { s.step({0.1, -1}); }) == "step: clip_norm is -1, expected a norm, or 0 for none");
        s.step({1});  // none of it did harm
        CHECK(test::values_of(s, 2) == std::vector<float>{1, 1, 1, 0, -1, 1});
        if (stage == 3) {
            static_cast<void>(s.before_use(1));
            CHECK(refusal([&] { s.publish(); }) == "publish: 'y' is still in use");
            CHECK(refusal([&] { s.begin({}); }) == "begin: 'y' is still in use");
            s.after_use(1);
        }
        s.finish();
        CHECK(refusal([&] { s.begin({}); }) == "begin: the strategy is finished");
        CHECK(refusal([&] { s.finish(); }) == "finish: the strategy is finished");
        CHECK(test::values_of(s, 2) == std::vector<float>{1, 1, 1, 0, -1, 1});
    });
}

TEST_CASE("lists and options that make no sense are refused") {
    std::vector<float> x(6);
    strategy::parameters<float> good{{"x", {6}, true, x, {}}}, bad{{"x", {2, 2}, true, x, {}}};
    for_stages([&](auto stage) {
        using S = zero<stage, self, adamw>;
        S a(self{}), b(self{}, {}, {.bucket_bytes = 3}), c(self{}, {}, {.stochastic_rounding_seed = 1});
        CHECK(refusal([&] { a.attach(bad); }) == "attach: 'x', float32 [2, 2]: the shape has 4 elements, the value 6");
        CHECK(refusal([&] { b.attach(good); }) == "attach: bucket_bytes is 3");
        CHECK(refusal([&] { c.attach(good); }) ==
              "attach: stochastic rounding is for values of 16 bits, these are float32");
        CHECK_THROWS_AS(S(self{}, {.beta1 = 2}), usage_error);
    });
    zero<3, self, adamw> failed(self{});
    CHECK_THROWS_AS(failed.attach(good, [] { throw std::bad_alloc(); }), std::bad_alloc);
    CHECK(refusal([&] { failed.begin({}); }) == "begin: no parameters are attached");
}

TEST_CASE("state lists names, shapes and types") {
    std::vector<bfloat16> a(6), b(1);
    strategy::parameters<bfloat16> list{{"w", {2, 3}, true, a, {}}, {"scale", {}, false, b, {}}};
    zero<3, self, adamw, bfloat16> s(self{});
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
}

TEST_CASE("strategies move, also in the middle of a step; one that was moved from says so") {
    for_stages([&](auto stage) {
        sized_toy<float> t(test::several_blocks), u(test::several_blocks);
        using S = zero<stage, self, adamw>;
        S a(self{}, {}, {.bucket_bytes = 20000}), reference(self{}, {}, {.bucket_bytes = 20000});
        a.attach(t.parameters);
        reference.attach(u.parameters);
        test::train_sharded(a, count, 0, 1, {.steps = 1});
        a.begin({0, 1});
        S b(std::move(a));
        CHECK(refusal([&] { a.begin({}); }) == "begin: no parameters are attached");
        test::pass(b, count, 1, 1.0);
        auto c = std::make_unique<S>(std::move(b));
        c->step({0.05 / 2, 20});
        test::train_sharded(*c, count, 0, 1, {.steps = 1, .first_step = 2});
        test::train_sharded(reference, count, 0, 1, {.steps = 3});
        CHECK(same_bytes(test::values_of(*c, count), test::values_of(reference, count)));
    });
}

TEST_CASE("uses may overlap, and buckets in use stay") {
    sized_toy<float> t({4, 4, 4, 4});
    zero<3, self, adamw> s(self{}, {}, {.bucket_bytes = 16});
    s.attach(t.parameters);
    std::vector<view<const float>> seen;
    for (const std::size_t i : {0ul, 2ul, 1ul, 3ul, 0ul}) { seen.push_back(s.before_use(i)); }
    CHECK(seen[0].data() == seen[4].data());
    const std::size_t places[] = {0, 2, 1, 3, 0};
    for (std::size_t k = 0; k < 5; ++k) {
        for (std::size_t e = 0; e < 4; ++e) { CHECK(seen[k][e] == t.parameters[places[k]].value[e]); }
    }
    for (const std::size_t i : {0ul, 2ul, 1ul, 3ul}) { s.after_use(i); }
    static_cast<void>(s.before_use(1));  // others go; parameter 0 is in use for the second time
    for (std::size_t e = 0; e < 4; ++e) { CHECK(seen[0][e] == t.parameters[0].value[e]); }
    CHECK(refusal([&] { s.begin({}); }) == "begin: 'p0' is still in use");
    s.after_use(0);
    s.after_use(1);
    s.begin({});
}

TEST_CASE("a stream gives the bits of the host") {
    for_stages([&](auto stage) {
        for (const auto how : {test::layout::together, test::layout::scattered}) {
            sized_toy<float> t(test::several_blocks, how),
                u(test::several_blocks, how, how == test::layout::scattered ? how : test::layout::none);
            zero<stage, self, adamw> on_host(self{}, {}, {.bucket_bytes = 20000});
            on_host.attach(t.parameters);
            using device = comm::self<stream_queue>;
            auto list = test::on_stream_of(u);
            zero<stage, device, adamw> on_stream(device{}, {}, {.bucket_bytes = 20000});
            on_stream.attach(list);
            test::check_same_bits(on_host, on_stream, count);
            if (stage != 3) {
                std::vector<float> values;
                for (const auto& p : u.parameters) { values.insert(values.end(), p.value.begin(), p.value.end()); }
                CHECK(same_bytes(values, test::values_of(on_host, count)));
            }
            on_stream.finish();
            on_host.finish();
        }
    });
}

TEST_CASE("a virtual step takes exactly the time of what it overlaps and what it cannot") {
    // One byte a second. Two parameters of 100 and 300 floats, a bucket each: {p1}, {p0}. Gathers and reductions take
    // 400 s for p0 and 1200 s for p1.
    virtual_queue q(virtual_rates{.bytes_per_second = 1, .flops_per_second = 1e30});
    strategy::parameters<float, phantom_memory> list{{"p0", {100}, true, {nullptr, 100}, {}},
                                                     {"p1", {300}, true, {nullptr, 300}, {}}};
    const auto time_of_step = [&](auto& s, double work) {
        const double before = resolve(q.recording())[0];
        s.begin({});
        for (const std::size_t i : {0ul, 1ul}) {
            static_cast<void>(s.before_use(i));
            q.charge("forward", {work, 0});
            s.after_use(i);
        }
        for (const std::size_t i : {1ul, 0ul}) {
            static_cast<void>(s.before_use(i));
            static_cast<void>(s.gradient(i));
            q.charge("backward", {work, 0});
            s.after_use(i);
            s.gradient_ready(i);
        }
        CHECK(s.step({.learning_rate = 0.1, .clip_norm = 1}).norm == 0);
        return resolve(q.recording())[0] - before;
    };
    const auto times = [&](auto stage, double work) {
        zero<stage, slow_link, sgd> s(slow_link(comm::self<virtual_queue>(q)), {}, {.bucket_bytes = 4});
        s.attach(list);
        std::vector<double> all;
        for (int k = 0; k < 4; ++k) { all.push_back(time_of_step(s, work)); }
        s.finish();
        return all;
    };
    // Block sums of the norm: zeroed, made of all gradients, added up. Update: step count, gradient, value, velocity.
    const double norm = 8 + 4 * 400 + 8 + 16;
    const double behind = norm + 8 + 20 * 400;
    const double zero_p0 = 400, zero_p1 = 1200;
    {
        // What the passes hide: all but the reduction of the last bucket, and, where nothing else comes before the
        // first use of p0, its gather. Stage 3 gathers on demand in its first step: p0, p1, and p0 again.
        const double work = 100000;
        const double all = 4 * work + zero_p0 + zero_p1 + 400 + behind;
        CHECK(times(std::integral_constant<int, 1>{}, work) == std::vector{all, all, all, all});
        CHECK(times(std::integral_constant<int, 2>{}, work) == std::vector{all, all + 400, all + 400, all + 400});
        CHECK(times(std::integral_constant<int, 3>{}, work) ==
              std::vector{all + 2000, all + 400, all + 400, all + 400});
    }
    {
        // Passes that take no time hide nothing, but the lanes run side by side, and beside what is zeroed: p0 is, and
        // in stage 3 gathered again in the first step, while p1 is reduced; stage 1 zeroes while values are gathered.
        const double all = zero_p1 + 1200 + 400 + behind;
        const double first = all + zero_p0;
        CHECK(times(std::integral_constant<int, 1>{}, 0) == std::vector{first, first, first, first});
        const double gathered = all + 1600;
        CHECK(times(std::integral_constant<int, 2>{}, 0) == std::vector{all, gathered, gathered, gathered});
        CHECK(times(std::integral_constant<int, 3>{}, 0) == std::vector{gathered, gathered, gathered, gathered});
    }
    CHECK(q.account().live() == 0);
}
