// Data parallelism over several ranks: equal to one rank, bits that depend on nothing else, agreement, failures.
#include <doctest/doctest.h>  // checks

#include <atomic>             // counts over ranks
#include <cmath>              // isfinite
#include <limits>             // nan
#include <map>                // launches by rank
#include <memory>             // buffers that can be freed
#include <nlohmann/json.hpp>  // traces
#include <numeric>            // reduce
#include <optional>           // seeds
#include <string>             // texts
#include <vector>             // results

#include <support/build.hpp>                 // TUTTI_TEST_TYPES
#include "toy.hpp"                           // trainer
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/optimize/adamw.hpp>          // adamw
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/strategy/data_parallel.hpp>  // data_parallel

using namespace tutti;
using comm::threads;
using optimize::adamw;
using optimize::sgd;
using strategy::data_parallel;
using test::layout;
using test::recipe;
using test::same_bytes;
using test::toy;
using test::train;

static_assert(strategy::shardable<data_parallel<threads, adamw>>);
static_assert(strategy::shardable<data_parallel<comm::counted<threads>, sgd, bfloat16>>);

namespace {

/// Trains on n ranks; every rank's final values. Checks that all are equal.
template <class T, class Optimizer = adamw>
std::vector<T> trained(int n, recipe r, std::size_t bucket_bytes = 400, layout values = layout::together,
                       layout gradients = layout::none, Optimizer optimizer = {},
                       std::optional<std::uint64_t> rounding = {}) {
    std::vector<std::vector<T>> results(static_cast<std::size_t>(n));
    threads::launch(n, [&](threads& world) {
        toy<T> t(values, gradients);
        data_parallel<threads, Optimizer, T> s(world.duplicate("dp"), optimizer,
                                               {.bucket_bytes = bucket_bytes, .stochastic_rounding_seed = rounding});
        s.attach(t.parameters);
        recipe mine = r;
        if (mine.how.shuffle != 0) { mine.how.shuffle += static_cast<std::uint32_t>(world.rank()) * 1000; }
        train(s, world.rank(), n, mine);
        s.finish();
        results[static_cast<std::size_t>(world.rank())] = t.values();
    });
    for (const auto& other : results) { REQUIRE(same_bytes(other, results[0])); }
    return results[0];
}

template <class T> void check_close(const std::vector<T>& a, const std::vector<T>& b, double bar) {
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) { REQUIRE(a[i] == doctest::Approx(b[i]).epsilon(bar)); }
}

/// Runs f on n ranks and collects the text of the E that each of them throws.
template <class E, class F> std::vector<std::string> refusals(int n, F f) {
    std::vector<std::string> texts(static_cast<std::size_t>(n));
    try {
        threads::launch(n, [&](threads& world) {
            try {
                f(world);
            } catch (const E& e) {
                texts[static_cast<std::size_t>(world.rank())] = e.what();
                throw;
            }
        });
    } catch (const std::exception&) {}
    return texts;
}

}  // namespace

TEST_CASE("any number of ranks trains like one rank on the same global batch") {
    for (const int micro : {1, 3}) {
        const recipe r{.steps = 20, .batch = 12 * static_cast<std::uint64_t>(micro), .micro = micro};
        const auto one = trained<double>(1, r);
        for (const int n : {2, 3, 4}) { check_close(trained<double>(n, r), one, 1e-12); }
    }
    const auto one = trained<float>(1, {.steps = 20});
    for (const int n : {2, 3, 4}) { check_close(trained<float>(n, {.steps = 20}), one, 1e-5); }
    const auto momentum = trained<double, sgd>(1, {.steps = 20}, 400, layout::together, layout::none,
                                               {.weight_decay = 0.1, .nesterov = true});
    check_close(trained<double, sgd>(3, {.steps = 20}, 400, layout::together, layout::none,
                                     {.weight_decay = 0.1, .nesterov = true}),
                momentum, 1e-12);
}

// NVIDIA/nccl#157, ROCm/rocm-systems#11661
TEST_CASE_TEMPLATE("bits do not depend on the bucket size", T, TUTTI_TEST_TYPES(float, bfloat16, float16, double)) {
    for (const int n : {2, 3}) {
        const auto one_bucket = trained<T>(n, {}, std::size_t{1} << 30);
        for (const std::size_t bytes : {sizeof(T), std::size_t{100}, std::size_t{512}, std::size_t{1024}}) {
            CHECK(same_bytes(trained<T>(n, {}, bytes), one_bucket));
        }
        CHECK(same_bytes(trained<T>(n, {}, 300, layout::scattered, layout::scattered), one_bucket));
        CHECK(same_bytes(trained<T>(n, {}, 300, layout::scattered, layout::together), one_bucket));
    }
}

// karpathy/llm.c seeds its rounding by rank, and replicas drift: here `trained` requires those of all ranks to be
// equal.
TEST_CASE_TEMPLATE("stochastic rounding keeps replicas equal and depends on neither buckets nor layout", T,
                   TUTTI_TEST_TYPES(bfloat16, float16)) {
    for (const int n : {2, 3}) {
        const auto reference = trained<T>(n, {}, 1000, layout::together, layout::none, adamw{}, 9);
        CHECK_FALSE(same_bytes(reference, trained<T>(n, {}, 1000)));
        CHECK_FALSE(same_bytes(reference, trained<T>(n, {}, 1000, layout::together, layout::none, adamw{}, 10)));
        for (const std::size_t bytes : {sizeof(T), std::size_t{300}}) {
            CHECK(same_bytes(trained<T>(n, {}, bytes, layout::together, layout::none, adamw{}, 9), reference));
            CHECK(same_bytes(trained<T>(n, {}, bytes, layout::scattered, layout::none, adamw{}, 9), reference));
        }
    }
}

TEST_CASE("ranks that round differently are told so at attach") {
    const auto texts = refusals<mismatch_error>(2, [](threads& world) {
        toy<bfloat16> t;
        data_parallel<threads, adamw, bfloat16> s(
            world.duplicate("dp"), {}, {.stochastic_rounding_seed = static_cast<std::uint64_t>(world.rank())});
        s.attach(t.parameters);
    });
    CHECK(texts[0].find("values rounded stochastically with seed 0") != std::string::npos);
    CHECK(texts[1].find("values rounded stochastically with seed 1") != std::string::npos);
}

// pytorch/pytorch#72843, pytorch/pytorch#45933, deepspeedai/DeepSpeed#1186
TEST_CASE("a random order of ready gradients on each rank, with random delays: same launches, same bits") {
    for (const int n : {2, 4}) {
        const auto in_order = trained<float>(n, {.steps = 4, .micro = 1}, 200);
        for (std::uint32_t seed = 1; seed <= 8; ++seed) {
            CHECK(same_bytes(trained<float>(n, {.steps = 4, .micro = 1, .how = {seed, seed % 2 == 0}}, 200), in_order));
        }
        // Accumulating, the order of the earlier micro-batches is free as well.
        const auto accumulated = trained<float>(n, {.steps = 4, .micro = 3}, 200);
        CHECK(same_bytes(trained<float>(n, {.steps = 4, .micro = 3, .how = {77, true}}, 200), accumulated));
    }
}

TEST_CASE("lanes launch buckets in plan order on every rank, and the trace shows it") {
    schedule::timeline trace;
    constexpr int n = 3;
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"), {}, {.bucket_bytes = 256, .trace = &trace});
        s.attach(t.parameters);
        REQUIRE(s.plan().buckets.size() >= 4);
        train(s, world.rank(), n, {.steps = 5, .how = {static_cast<std::uint32_t>(world.rank()) + 1, true}});
        s.finish();
    });
    const auto document = nlohmann::json::parse(trace.chrome_trace());
    std::map<int, std::vector<std::string>> launches;
    for (const auto& e : document.at("traceEvents")) {
        if (e.at("ph") == "X" && e.at("cat") == "communication") { launches[e.at("pid")].push_back(e.at("name")); }
    }
    REQUIRE(launches.size() == n);
    std::vector<std::string> expected;
    toy<float> t;
    const std::size_t buckets = schedule::plan_buckets(t.sizes, sizeof(float), 256).buckets.size();
    for (int step = 0; step < 5; ++step) {
        for (std::size_t b = 0; b < buckets; ++b) { expected.push_back("all_reduce bucket " + std::to_string(b)); }
    }
    for (const auto& [rank, names] : launches) { CHECK(names == expected); }
    for (int r = 0; r < n; ++r) {
        const auto steps = trace.steps(r);
        CHECK(steps.size() == 5);
        double exposed = 0;
        for (const auto& s : steps) { exposed += s.exposed; }
        CHECK(exposed == doctest::Approx(trace.exposed(r)));
    }
}

TEST_CASE("communication happens on the last micro-batch only, and moves each gradient once") {
    constexpr int n = 3;
    const std::size_t elements = std::reduce(toy<float>::sizes.begin(), toy<float>::sizes.end());
    std::atomic<std::uint64_t> all_ranks{0};
    threads::launch(n, [&](threads& world) {
        comm::counted<threads> counted(world.duplicate("dp"));
        const auto ledger = counted.traffic_ledger();
        toy<float> t;
        data_parallel<comm::counted<threads>, adamw> s(std::move(counted), {}, {.bucket_bytes = 256});
        s.attach(t.parameters);
        const auto attached = ledger->snapshot();
        for (int m = 0; m < 4; ++m) {
            s.begin({m, 4});
            if (m < 3) { CHECK(ledger->snapshot() == attached); }
            test::backward(s, static_cast<std::uint64_t>(m), 1, 0.25);
            s.flush();
        }
        s.step({.learning_rate = 0.1, .clip_norm = 1});
        s.flush();
        const auto step = ledger->snapshot() - attached;
        const std::size_t buckets = s.plan().buckets.size();
        std::uint64_t bytes = 0;
        for (const auto& b : s.plan().buckets) {
            comm::call c;
            c.kind = comm::collective::all_reduce;
            c.element_size = sizeof(float);
            c.in_count = c.out_count = b.size;
            bytes += comm::wire_bytes(c, world.rank(), n);
        }
        CHECK(step[comm::collective::all_reduce].calls == buckets);
        CHECK(step.total() == comm::traffic{buckets, bytes});
        all_ranks += step.total().bytes;
        s.finish();
    });
    CHECK(all_ranks == 2 * (n - 1) * elements * sizeof(float));
}

TEST_CASE("replicas start from rank 0's values") {
    threads::launch(3, [](threads& world) {
        for (const layout values : {layout::together, layout::scattered}) {
            toy<float> t(values, layout::none, 100 + static_cast<std::uint64_t>(world.rank()));
            data_parallel<threads, adamw> s(world.duplicate("dp"));
            s.attach(t.parameters);
            CHECK(same_bytes(t.values(), toy<float>(values, layout::none, 100).values()));
            CHECK(s.owned()[3] == t.values()[3]);
            s.finish();
        }
    });
}

TEST_CASE("the norm is the same on all ranks, and one rank's bad gradient skips the step on all") {
    constexpr int n = 3;
    std::vector<std::vector<strategy::step_result>> results(n);
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"), {}, {.bucket_bytes = 300});
        s.attach(t.parameters);
        auto& mine = results[static_cast<std::size_t>(world.rank())];
        mine = train(s, world.rank(), n, {.steps = 3});
        const auto before = t.values();
        s.begin({});
        if (world.rank() == 1) { s.gradient(7)[100] = std::numeric_limits<float>::quiet_NaN(); }
        for (std::size_t i = t.parameters.size(); i-- > 0;) { s.gradient_ready(i); }
        mine.push_back(s.step({.learning_rate = 0.1, .clip_norm = 1}));
        CHECK(same_bytes(t.values(), before));
        CHECK(s.skipped_steps() == 1);
        s.finish();
    });
    for (const auto& r : results) {
        REQUIRE(r.size() == 4);
        for (std::size_t k = 0; k < 3; ++k) {
            CHECK_FALSE(r[k].skipped);
            CHECK(r[k].norm > 0);
            CHECK(r[k].norm == results[0][k].norm);
        }
        CHECK(r[3].skipped);
        CHECK_FALSE(std::isfinite(r[3].norm));
    }
}

// pytorch/pytorch#45933
TEST_CASE("ranks that differ in what they attach are told, all of them, which parameter it is") {
    const auto attach = [](threads& world, auto change, adamw o = {}, std::size_t bytes = 1000) {
        std::vector<float> a(6), b(6);
        strategy::parameters<float> list{{"a", {2, 3}, true, a, {}}, {"b", {6}, true, b, {}}};
        if (world.rank() == 2) { change(list); }
        data_parallel<threads, adamw> s(world.duplicate("dp"), o, {.bucket_bytes = bytes});
        s.attach(list);
    };
    const auto expect = [](const std::vector<std::string>& texts, std::string_view here, std::string_view there) {
        for (std::size_t r = 0; r < 3; ++r) {
            CAPTURE(texts[r]);
            CHECK(texts[r].starts_with("agree: " + std::string(r == 2 ? there : here) + " differs (rank 0: "));
            CHECK(texts[r].find("rank 2: ") != std::string::npos);
        }
    };
    const auto differing = [&](auto change) {
        return refusals<mismatch_error>(3, [&](threads& world) { attach(world, change); });
    };
    expect(differing([](auto& l) { l[1].name = "c"; }), "parameter 1 (here 'b', float32 [6])",
           "parameter 1 (here 'c', float32 [6])");
    expect(differing([](auto& l) {
               l[0].shape = {3, 2};
           }),
           "parameter 0 (here 'a', float32 [2, 3])", "parameter 0 (here 'a', float32 [3, 2])");
    expect(differing([](auto& l) { l[1].decay = false; }), "parameter 1 (here 'b', float32 [6])",
           "parameter 1 (here 'b', float32 [6], no decay)");
    expect(differing([](auto& l) { std::swap(l[0], l[1]); }), "parameter 0 (here 'a', float32 [2, 3])",
           "parameter 0 (here 'b', float32 [6])");
    expect(differing([](auto& l) { l.pop_back(); }), "number of parameters (here 2)", "number of parameters (here 1)");
    const auto setup = [](double beta, std::size_t bytes) {
        return fmt::format("setup (here adamw(beta1 {}, beta2 0.999, epsilon 1e-08, weight_decay 0.01), plain mean in "
                           "buckets of {} bytes)",
                           beta, bytes);
    };
    expect(
        refusals<mismatch_error>(3, [&](threads& w) { attach(w, [](auto&) {}, {.beta1 = w.rank() == 2 ? 0.5 : 0.9}); }),
        setup(0.9, 1000), setup(0.5, 1000));
    expect(refusals<mismatch_error>(3,
                                    [&](threads& w) {
                                        attach(
                                            w, [](auto&) {}, {}, w.rank() == 2 ? 999 : 1000);
                                    }),
           setup(0.9, 1000), setup(0.9, 999));
}

TEST_CASE("a list that one rank refuses ends attach on all ranks") {
    const auto texts = refusals<error>(3, [](threads& world) {
        std::vector<float> a(6);
        strategy::parameters<float> list{{"a", {world.rank() == 1 ? 7u : 6u}, true, a, {}}};
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(list);
    });
    CHECK(texts[1] == "attach: 'a', float32 [7]: the shape has 7 elements, the value 6");
    CHECK(texts[0].find("the shape has 7 elements") != std::string::npos);
    CHECK(texts[2].find("the shape has 7 elements") != std::string::npos);
}

TEST_CASE("finish finds a replica that went its own way") {
    const auto texts = refusals<mismatch_error>(3, [](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(t.parameters);
        train(s, world.rank(), 3, {.steps = 2});
        if (world.rank() == 1) { t.parameters[3].value[7] = std::nextafter(t.parameters[3].value[7], 1e9f); }
        s.finish();
    });
    for (const auto& text : texts) {
        CHECK(text.starts_with("agree: the hash of all parameters at finish differs (rank 0: "));
        CHECK(text.find(", rank 1: ") != std::string::npos);
        CHECK(text.find(", rank 2: ") == std::string::npos);
    }
}

// pytorch/pytorch#18465, dmlc/xgboost#11217
TEST_CASE("a rank that fails in the middle of backward ends all, and no gradient is written after it was freed") {
    for (int repeat = 0; repeat < 40; ++repeat) {
        const int n = 2 + repeat % 3;
        std::atomic<int> ended{0};
        std::string text;
        try {
            threads::launch(n, [&](threads& world) {
                struct count {
                    std::atomic<int>& of;
                    ~count() { ++of; }
                } counted{ended};
                auto t = std::make_unique<toy<float>>(layout::together, layout::scattered);
                data_parallel<threads, adamw> s(world.duplicate("dp"), {}, {.bucket_bytes = 64});
                s.attach(t->parameters);
                train(s, world.rank(), n, {.steps = 1});
                s.begin({});
                for (std::size_t i = t->parameters.size(); i-- > 0;) {
                    if (world.rank() == repeat % n && i == static_cast<std::size_t>(repeat % 7)) {
                        throw std::runtime_error("backward failed");
                    }
                    s.gradient_ready(i);
                }
                s.step({.learning_rate = 0.1});
            });
        } catch (const std::exception& e) { text = e.what(); }
        CHECK(text.find("backward failed") != std::string::npos);
        CHECK(ended == n);
    }
}

TEST_CASE("a rank that forgets a gradient is told so, and the others do not hang") {
    const auto texts = refusals<error>(2, [](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(t.parameters);
        s.begin({});
        for (std::size_t i = t.parameters.size(); i-- > 0;) {
            if (world.rank() == 0 || i != 4) { s.gradient_ready(i); }
        }
        s.step({.learning_rate = 0.1});
    });
    CHECK(texts[1].starts_with("step: gradients not ready in micro-batch 0 of 1: 'p4'; "));
    // The second, where rank 1 is paused for a second between leaving and telling why.
    const bool told = texts[0].find("'p4'") != std::string::npos;
    CHECK_MESSAGE((told || texts[0].find("rank 1 was left by an exception") != std::string::npos), texts[0]);
}

TEST_CASE("a resumed run on several ranks continues bit by bit, from rank 0's checkpoint") {
    constexpr int n = 3;
    std::vector<std::vector<std::byte>> checkpoint;
    std::vector<float> straight;
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = 4});
        if (world.rank() == 0) {
            for (const auto& e : s.state()) { checkpoint.emplace_back(e.data.begin(), e.data.end()); }
        }
        train(s, world.rank(), n, {.steps = 4, .first_step = 4});
        s.finish();
        if (world.rank() == 0) { straight = t.values(); }
    });
    threads::launch(n, [&](threads& world) {
        toy<float> t(layout::together, layout::none, 55);
        data_parallel<threads, adamw> s(world.duplicate("dp"));
        s.attach(t.parameters);
        for (std::size_t i = 0; i < checkpoint.size(); ++i) {
            std::copy(checkpoint[i].begin(), checkpoint[i].end(), s.state()[i].data.begin());
        }
        s.restored();
        train(s, world.rank(), n, {.steps = 4, .first_step = 4});
        s.finish();
        CHECK(same_bytes(t.values(), straight));
    });
}
