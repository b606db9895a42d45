// Tests of strategy/compressed_mean: gradients that are sent compressed, in a whole strategy, over ranks that are
// threads.
#include <algorithm>    // max, copy
#include <atomic>       // counts over ranks
#include <cmath>        // isfinite
#include <cstring>      // memcpy
#include <limits>       // infinity
#include <mutex>        // sums over ranks
#include <optional>     // nodes
#include <string>       // texts
#include <string_view>  // names
#include <type_traits>  // decay
#include <utility>      // move
#include <vector>       // values

#include <doctest/doctest.h>  // test cases

#include <tutti/comm/counted.hpp>              // bytes on the wire
#include <tutti/comm/threads.hpp>              // ranks
#include <tutti/comm/topology.hpp>             // stated networks
#include <tutti/compress/dense.hpp>            // nothing lost
#include <tutti/compress/power_sgd.hpp>        // linear
#include <tutti/compress/quantize.hpp>         // cut among owners
#include <tutti/compress/random_k.hpp>         // compressor
#include <tutti/compress/shards.hpp>           // cut
#include <tutti/compress/top_k.hpp>            // gathered whole
#include <tutti/core/state.hpp>                // hash_bytes
#include <tutti/optimize/adamw.hpp>            // optimizer
#include <tutti/optimize/sgd.hpp>              // optimizer
#include <tutti/strategy/compressed_mean.hpp>  // under test
#include <tutti/strategy/data_parallel.hpp>    // host of it

#include "strategy/toy.hpp"     // trainer
#include "support/failure.hpp"  // expect
#include "support/oracle.hpp"   // same_bytes

namespace {

using namespace tutti;
using comm::counted;
using comm::threads;
using strategy::compressed_mean;
using test::expect;
using test::matrices;
using test::saved;
using test::toy;

template <class X, class Optimizer = optimize::sgd, class Comm = threads>
using compressed = strategy::data_parallel<Comm, Optimizer, float, compressed_mean<X>>;

/// Values after training on n ranks, the same on all; distance(values) of them is what a test judges.
template <class X, class Optimizer = optimize::sgd>
std::vector<float> trained(int n, compressed_mean<X> how, test::recipe r = {.steps = 40}, Optimizer optimizer = {}) {
    std::vector<float> values;
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        compressed<X, Optimizer> s(w.duplicate("training"), optimizer, {.bucket_bytes = 600}, how);
        s.attach(t.parameters);
        test::train(s, w.rank(), n, r);
        s.finish();  // throws where ranks differ
        if (w.rank() == 0) { values = t.values(); }
    });
    return values;
}
std::vector<float> trained_plainly(int n, test::recipe r = {.steps = 40}) {
    std::vector<float> values;
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        strategy::data_parallel<threads, optimize::sgd> s(w.duplicate("training"), {}, {.bucket_bytes = 600});
        s.attach(t.parameters);
        test::train(s, w.rank(), n, r);
        s.finish();
        if (w.rank() == 0) { values = t.values(); }
    });
    return values;
}
comm::topology nodes(int count, int ranks_of_each) { return comm::topology::uniform(count, ranks_of_each); }
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) { sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]); }
    return std::sqrt(sum);
}

TEST_CASE("a compressor that loses nothing trains like plain data parallel") {
    for (const int n : {1, 2, 3}) {
        CAPTURE(n);
        const auto plain = trained_plainly(n);
        CHECK(distance(trained<compress::dense<>>(n, {.level = 1, .worth = 1}), plain) < 1e-5);
    }
}

TEST_CASE("between nodes alone, a compressor that loses nothing trains like plain data parallel") {
    for (const auto& shape : {std::pair(2, 2), std::pair(2, 3), std::pair(3, 2)}) {
        const auto count = shape.first, each = shape.second;
        CAPTURE(count);
        CAPTURE(each);
        const compressed_mean<compress::dense<>> how{.level = 1, .worth = 1, .nodes = nodes(count, each)};
        CHECK(distance(trained(count * each, how), trained_plainly(count * each)) < 1e-5);
    }
}

TEST_CASE("between nodes alone: the links inside carry gradients as they are, those between their wires") {
    comm::traffic_snapshot sent;
    std::uint64_t wires = 0;  // of this rank's share: a part to the other node, and then the other part
    threads::launch(4, [&](threads& w) {
        toy<float> t = matrices();
        counted counting(w.duplicate("training"));
        const auto ledger = counting.traffic_ledger();
        compressed<compress::quantize, optimize::sgd, counted<threads>> s(std::move(counting), {}, {},
                                                                          {.level = 4, .nodes = nodes(2, 2)});
        s.attach(t.parameters);
        const auto before = ledger->snapshot();
        test::train(s, w.rank(), 4, {.steps = 1});
        s.flush();
        if (w.rank() != 0) { return; }
        sent = ledger->snapshot() - before;
        const compress::quantize four_bits;
        const auto shares = compress::cut(s.exchange().tensors(), four_bits.granularity(), 2);
        for (const compress::segment& g : shares.of(0)) {
            if (g.level != compress::dense_level) { wires += four_bits.wire_bytes(g); }
        }
    });
    using enum comm::collective;
    CHECK(sent[reduce_scatter_v].calls == 1);
    CHECK(sent[all_to_all_v].calls == 1);
    // To the other rank of the node its share of the gradients, and then the own share of their mean.
    CHECK(sent[reduce_scatter_v].bytes + sent[all_gather_v].bytes + sent[all_gather].bytes + sent[all_to_all_v].bytes ==
          4 * 451 + wires);
}

TEST_CASE("nodes of one rank, and one node, change no bit") {
    const auto with = [](std::optional<comm::topology> where) {
        return trained(4, compressed_mean<compress::quantize>{.level = 3, .nodes = std::move(where)});
    };
    const auto without = with(std::nullopt);
    CHECK(test::same_bytes(with(nodes(4, 1)), without));
    CHECK(test::same_bytes(with(nodes(1, 4)), without));
    CHECK_FALSE(test::same_bytes(with(nodes(2, 2)), without));
}

TEST_CASE("with feedback, weights and residuals together are where plain steps would be") {
    // Gradients that depend on rank and step alone, and plain steps: after them, weights lack the rate times the mean of
    // what ranks still owe, and nothing else.
    const auto missing = []<class X>(compressed_mean<X> how) {
        const int n = how.nodes ? how.nodes->ranks() : 3;
        const int debtors = how.nodes ? how.nodes->nodes() : n;  // of each element
        constexpr float rate = 0.25f;
        std::vector<double> owed(451), gap(451);
        std::mutex adding;
        threads::launch(n, [&](threads& w) {
            toy<float> t = matrices();
            const auto start = t.values();
            std::vector<double> expected(start.begin(), start.end());
            compressed<X> s(w.duplicate("training"), {.momentum = 0, .weight_decay = 0}, {.bucket_bytes = 600}, how);
            s.attach(t.parameters);
            for (std::uint64_t step = 0; step < 20; ++step) { test::known_step(s, step, w.rank(), n, rate, expected); }
            s.finish();
            const std::lock_guard lock(adding);
            for (const auto& e : s.state()) {
                if (e.name != "residual") { continue; }
                for (std::size_t i = 0; i < owed.size(); ++i) {
                    float x = 0;
                    std::memcpy(&x, e.data.data() + 4 * i, 4);
                    owed[i] += rate * double{x} / debtors;
                }
            }
            const auto values = t.values();
            for (std::size_t i = 0; i < gap.size(); ++i) { gap[i] = values[i] - expected[i]; }
        });
        double most = 0;
        double most_owed = 0;
        for (std::size_t i = 0; i < gap.size(); ++i) {
            most = std::max(most, std::abs(gap[i] - owed[i]));
            most_owed = std::max(most_owed, std::abs(owed[i]));
        }
        CHECK(most_owed > (how.feedback ? 1e-3 : -1.0));  // something was lost on the way
        return most;
    };
    CHECK(missing(compressed_mean<compress::top_k>{.level = 1000}) < 1e-5);
    CHECK(missing(compressed_mean<compress::power_sgd>{.level = 1}) < 1e-5);
    CHECK(missing(compressed_mean<compress::quantize>{.level = 2}) < 1e-5);
    CHECK(missing(compressed_mean<compress::quantize>{.level = 2, .feedback = false}) > 1e-3);
    CHECK(missing(compressed_mean<compress::top_k>{.level = 1000, .nodes = nodes(3, 2)}) < 1e-5);
    CHECK(missing(compressed_mean<compress::power_sgd>{.level = 1, .nodes = nodes(2, 2)}) < 1e-5);
    CHECK(missing(compressed_mean<compress::quantize>{.level = 2, .nodes = nodes(2, 3)}) < 1e-5);
    CHECK(missing(compressed_mean<compress::quantize>{.level = 2, .feedback = false, .nodes = nodes(2, 2)}) > 1e-3);
}

TEST_CASE("vectors, scalars and what would not get smaller go as they are") {
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        t.parameters[3].shape = {33, 1};
        compressed<compress::power_sgd> s(w.duplicate("training"), {}, {}, {.level = 2});
        s.attach(t.parameters);
        std::vector<int> levels;
        for (const compress::segment& g : s.exchange().tensors()) { levels.push_back(g.level); }
        // 8 x 8 at rank 2: 32 floats, worth it; 3 x 43: 92 of 129, not.
        expect(levels == std::vector<int>{0, 2, 0, 0, 2, 0, 0, 0, 0}, "other tensors are compressed");
        s.flush();
    });
}

TEST_CASE("with a stated network, buckets that would not be faster go as they are") {
    constexpr compress::kernel_rates kernels{1e9, 1e-6};
    const auto compressed_over = [&](comm::link l) {
        std::vector<int> levels;
        threads::launch(2, [&](threads& w) {
            toy<float> t = matrices();
            compressed_mean<compress::power_sgd> how{.level = 1};
            how.network = strategy::stated_network{comm::topology::one_node(2, l), kernels};
            compressed<compress::power_sgd> s(w.duplicate("training"), {}, {}, how);
            s.attach(t.parameters);
            test::train(s, w.rank(), 2, {.steps = 2});
            s.flush();
            if (w.rank() == 0) {
                for (const compress::segment& g : s.exchange().tensors()) { levels.push_back(g.level); }
            }
        });
        return levels;
    };
    // One bucket: 424 bytes in two rounds in place of 1704 in one, and seven kernels of a microsecond.
    const std::vector<int> none(9, compress::dense_level);
    CHECK(compressed_over({1e-6, 1e12}) == none);
    CHECK(compressed_over({0, 1e6}) == std::vector<int>{0, 1, 0, 1, 1, 0, 0, 1, 0});
    CHECK(compressed_over({1e-3, 1e6}) == none);  // its second round costs more than the bytes save

    const auto refused = [](compressed_mean<compress::power_sgd> how, const std::string& text) {
        threads::launch(2, [&](threads& w) {
            toy<float> t = matrices();
            threads ranks = w.duplicate("training");
            threads family = ranks.duplicate("beside");
            compressed<compress::power_sgd> s(std::move(ranks), {}, {}, how);
            const auto contains = [](const std::string& all, const std::string& part) {
                expect(all.find(part) != std::string::npos, "{}", all);
            };
            // One that is told by another first has that one's reason.
            contains(test::refusal<error>([&] { s.attach(t.parameters); }), text);
            contains(test::refusal<error>([&] { s.attach(t.parameters); }), text);  // not "attached already"
            contains(test::refusal<error>([&] { family.barrier(); }), text);
            contains(test::refusal([&] { static_cast<void>(s.state()); }), "state: no parameters are attached");
            contains(test::refusal([&] { s.begin({}); }), "begin: no parameters are attached");
        });
    };
    refused({.level = 1, .network = strategy::stated_network{comm::topology::one_node(3), kernels}},
            "the stated network has 3 ranks");
    refused({.level = 1, .nodes = nodes(2, 2)}, "nodes of 4 ranks together");
}

TEST_CASE("bytes on the wire are those of the compressor, tensor by tensor") {
    constexpr std::size_t n = 4;
    std::uint64_t sent[n] = {};
    std::uint64_t plain = 0;
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        counted<threads> counting(w.duplicate("training"));
        const auto ledger = counting.traffic_ledger();
        compressed<compress::power_sgd, optimize::sgd, counted<threads>> s(std::move(counting), {}, {}, {.level = 1});
        s.attach(t.parameters);
        const auto before = ledger->snapshot();
        test::train(s, w.rank(), n, {.steps = 3});
        s.flush();
        sent[w.rank()] = (ledger->snapshot() - before)[comm::collective::all_reduce].bytes;
        if (w.rank() == 0) { plain = s.plan().elements; }
    });
    // One bucket: round 0 has the left factors and all vectors, round 1 the right factors.
    const std::size_t left = 8 + 3 + 10 + 3, right = 8 + 11 + 20 + 43;
    const std::size_t vectors = 8 + 4 + 8 + 12;  // wires are whole times 16 bytes
    std::uint64_t total = 0;
    for (const std::uint64_t bytes : sent) { total += bytes; }
    CHECK(plain == 451);
    CHECK(total == 3 * 4 * 2 * (n - 1) * (left + right + vectors));
}

TEST_CASE("a resume from the saved state continues with the same bits") {
    const auto check = [&]<class X>(compressed_mean<X> how) {
        std::atomic<int> equal = 0;
        const int n = how.nodes ? how.nodes->ranks() : 3;
        threads::launch(n, [&](threads& w) {
            toy<float> straight = matrices();
            compressed<X, optimize::adamw> whole(w.duplicate("whole"), {}, {.bucket_bytes = 600}, how);
            whole.attach(straight.parameters);
            test::train(whole, w.rank(), n, {.steps = 5});
            const auto checkpoint = saved(whole);
            test::train(whole, w.rank(), n, {.steps = 5, .first_step = 5});
            whole.flush();

            toy<float> fresh = matrices();
            compressed<X, optimize::adamw> resumed(w.duplicate("resumed"), {}, {.bucket_bytes = 600}, how);
            resumed.attach(fresh.parameters);
            test::restore(resumed, checkpoint);
            test::train(resumed, w.rank(), n, {.steps = 5, .first_step = 5});
            resumed.flush();
            equal += test::same_bytes(fresh.values(), straight.values()) && saved(resumed) == saved(whole) ? 1 : 0;
            for (const auto& e : whole.state()) {  // a checkpoint puts these together from parts of all ranks
                if (e.whose == ownership::replicated) { w.agree(hash_bytes(e.data), e.name); }
            }
        });
        CHECK(equal == n);
    };
    check(compressed_mean<compress::power_sgd>{.level = 2});
    check(compressed_mean<compress::quantize>{.level = 3, .seed = 7});
    check(compressed_mean<compress::top_k>{.level = 500});
    check(compressed_mean<compress::random_k>{.level = 2500, .seed = 7});
    check(compressed_mean<compress::quantize>{.level = 3, .seed = 7, .nodes = nodes(2, 2)});
    check(compressed_mean<compress::power_sgd>{.level = 2, .nodes = nodes(2, 2)});
    check(compressed_mean<compress::top_k>{.level = 500, .momentum = compress::momentum_options{}});
}

TEST_CASE("momentum of ranks: tensors that go as they are follow SGD with momentum; what is sent stops its own") {
    const test::recipe plain{.steps = 12, .clip_norm = 1e9};
    for (const bool nesterov : {false, true}) {
        CAPTURE(nesterov);
        // 8 bytes an element: everything is sent as it is.
        const compressed_mean<compress::top_k> whole{
            .level = 10000, .momentum = compress::momentum_options{.momentum = 0.9f, .nesterov = nesterov}};
        const auto ranks_keep_it = trained(3, whole, plain, optimize::sgd{.momentum = 0});
        const auto optimizer_keeps_it = trained(3, compressed_mean<compress::top_k>{.level = 10000}, plain,
                                                optimize::sgd{.momentum = 0.9, .nesterov = nesterov});
        const auto without =
            trained(3, compressed_mean<compress::top_k>{.level = 10000}, plain, optimize::sgd{.momentum = 0});
        CHECK(distance(ranks_keep_it, optimizer_keeps_it) < 1e-4 * distance(without, optimizer_keeps_it));
    }
    float u[4] = {}, v[4] = {};
    threads::launch(1, [&](threads& w) {
        std::vector<float> x(4, 0.0f);
        strategy::parameters<float> list{{"x", {2, 2}, true, x, {}}};
        compressed<compress::top_k> s(
            w.duplicate("training"), {.momentum = 0}, {},
            {.level = 2500, .worth = 1, .momentum = compress::momentum_options{.momentum = 0.5f}});
        s.attach(list);
        for (const auto& gradient : {std::vector<float>{8, 3, 0, 0}, {0, 0, 0, 100}}) {
            s.begin({});
            std::copy(gradient.begin(), gradient.end(), s.gradient(0).begin());
            s.gradient_ready(0);
            s.step({1});
        }
        expect(x == std::vector<float>{-8, 0, 0, -100}, "other elements were sent");
        for (const auto& e : s.state()) {
            if (e.name == "momentum") { std::memcpy(u, e.data.data(), sizeof(u)); }
            if (e.name == "residual") { std::memcpy(v, e.data.data(), sizeof(v)); }
        }
    });
    // 8 was sent, with its momentum; of 3 half is momentum, which adds to what is owed.
    const float momentum[] = {0, 1.5f, 0, 0}, owed[] = {0, 4.5f, 0, 0};
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(u[i] == momentum[i]);
        CHECK(v[i] == owed[i]);
    }
}

TEST_CASE("levels change between steps; a strategy that was moved goes on") {
    threads::launch(2, [&](threads& w) {
        toy<float> t = matrices();
        compressed<compress::power_sgd> first(w.duplicate("training"), {}, {.bucket_bytes = 600},
                                              {.level = 1, .largest_level = 3});
        first.attach(t.parameters);
        test::train(first, w.rank(), 2, {.steps = 3});
        compressed<compress::power_sgd> s = std::move(first);
        s.exchange().set_levels(std::vector<int>{0, 3, 0, 2, 1, 0, 0, 3, 0});
        test::train(s, w.rank(), 2, {.steps = 3, .first_step = 3});
        const auto text = [&](std::vector<int> levels) -> std::string {
            try {
                s.exchange().set_levels(levels);
            } catch (const usage_error& e) { return e.what(); }
            return {};
        };
        const std::string texts[] = {text({0, 1}), text({1, 3, 0, 2, 1, 0, 0, 3, 0}), text({0, 4, 0, 2, 1, 0, 0, 3, 0}),
                                     text({0, 0, 0, 2, 1, 0, 0, 3, 0})};
        expect(texts[0] == "set_levels: 2 levels for 9 tensors", "{}", texts[0]);
        expect(texts[1] == "set_levels: level 1 for tensor 0, which is not compressed", "{}", texts[1]);
        expect(texts[2] == "set_levels: level 4 for tensor 1, which has 1 to 3", "{}", texts[2]);
        expect(texts[3] == "set_levels: level 0 for tensor 1, which has 1 to 3", "{}", texts[3]);
        s.finish();
    });
}

TEST_CASE("a gradient that is not finite skips the step on all ranks, and the steps after it are sound") {
    const auto check = [&]<class X>(compressed_mean<X> how) {
        std::atomic<int> sound = 0;
        threads::launch(3, [&](threads& w) {
            toy<float> t = matrices();
            compressed<X> s(w.duplicate("training"), {}, {.bucket_bytes = 600}, how);
            s.attach(t.parameters);
            test::train(s, w.rank(), 3, {.steps = 2});
            const auto before = t.values();
            s.begin({});
            test::backward(s, 5, 2, 1.0, {});
            const auto good = s.step({0.01});
            s.begin({});
            if (w.rank() == 1) { s.gradient(4)[17] = std::numeric_limits<float>::infinity(); }
            test::backward(s, 9, 2, 1.0, {});
            const auto bad = s.step({0.01});
            const auto after = test::train(s, w.rank(), 3, {.steps = 3, .first_step = 4});
            bool finite = !good.skipped && bad.skipped && s.skipped_steps() == 1;
            for (const auto& r : after) { finite = finite && !r.skipped; }
            for (const float x : t.values()) { finite = finite && std::isfinite(x); }
            s.finish();
            sound += finite ? 1 : 0;
        });
        CHECK(sound == 3);
    };
    check(compressed_mean<compress::power_sgd>{.level = 1});
    check(compressed_mean<compress::quantize>{.level = 4});
    check(compressed_mean<compress::top_k>{.level = 1000});
}

TEST_CASE("residuals that follow the learning rate are told it, or the step does not begin") {
    test::toy<float> t = test::matrices();
    strategy::data_parallel s(comm::self<>{}, optimize::sgd{}, {},
                              compressed_mean<compress::quantize>{.level = 4, .rescale = true});
    s.attach(t.parameters);
    const std::string says =
        "compressed mean: rescale needs the learning rate of every step, as in begin({.learning_rate = 1e-3})";
    CHECK(test::refusal([&] { s.begin({0, 2}); }) == says);
    static_cast<void>(s.consensus());
    for (int m = 0; m < 2; ++m) {
        s.begin({m, 2, 0.1});
        test::backward(s, 0, 2, 0.5, {});
    }
    CHECK_FALSE(s.step({0.1}).skipped);
    CHECK(test::refusal([&] { s.begin({}); }) == says);
    s.finish();
}

TEST_CASE("residuals follow a learning rate that changes, if asked to") {
    // One rank and a compressor that keeps one element of each matrix: after the second step the residual of the first
    // one's gradient counts by the ratio of the rates.
    const auto residual_after = [](bool rescale, double second_rate, bool resumed) {
        float left = 0;
        threads::launch(1, [&](threads& w) {
            std::vector<float> x(4, 0.0f), y(4, 0.0f);
            strategy::parameters<float> of_x{{"x", {2, 2}, true, x, {}}}, of_y{{"x", {2, 2}, true, y, {}}};
            const auto start = [&](std::string_view name, strategy::parameters<float>& list) {
                compressed<compress::top_k> s(w.duplicate(name), {.momentum = 0}, {},
                                              {.level = 2500, .rescale = rescale, .worth = 1});
                s.attach(list);
                return s;
            };
            const auto step = [](auto& s, double rate, std::vector<float> gradient) {
                s.begin({0, 1, rate});
                std::copy(gradient.begin(), gradient.end(), s.gradient(0).begin());
                s.gradient_ready(0);
                s.step({rate});
            };
            auto s = start("first", of_x);
            step(s, 0.5, {8, 3, 0, 0});  // 8 is sent, 3 is left
            auto other = start("second", of_y);
            for (std::size_t e = 0; e < s.state().size(); ++e) {
                std::copy(s.state()[e].data.begin(), s.state()[e].data.end(), other.state()[e].data.begin());
            }
            other.restored();
            auto& last = resumed ? other : s;
            step(last, second_rate, {100, 0, 0, 0});  // 100 is sent
            for (const auto& e : last.state()) {
                if (e.name == "residual") { std::memcpy(&left, e.data.data() + 4, 4); }
            }
        });
        return left;
    };
    for (const bool resumed : {false, true}) {
        CAPTURE(resumed);
        CHECK(residual_after(false, 0.25, resumed) == 3.0f);
        CHECK(residual_after(true, 0.5, resumed) == 3.0f);
        CHECK(residual_after(true, 0.25, resumed) == 6.0f);
    }
}

TEST_CASE("options that make no sense are refused before anything is sent") {
    const auto text = [](compressed_mean<compress::power_sgd> how) -> std::string {
        try {
            how.validate();
        } catch (const usage_error& e) { return e.what(); }
        return {};
    };
    CHECK(
        text({.level = 0}) ==
        "compressed mean: level is 0, expected bits, a rank or kept elements in 10,000; 1 for schemes without levels");
    CHECK(text({.level = 4, .largest_level = 2}) == "compressed mean: level 4 of at most 2");
    using four_bits = compressed_mean<compress::quantize>;
    const std::string no_such_level = "quantize: tensor 0 has level 12; bits are 1 to 8";
    CHECK(test::refusal([] { four_bits{.level = 12}.validate(); }) == no_such_level);
    CHECK(test::refusal([] { four_bits{.level = 4, .largest_level = 12}.validate(); }) == no_such_level);
    CHECK(test::refusal([] { four_bits{.level = 4, .largest_level = 8}.validate(); }) == "no such error");
    compressed_mean<compress::random_k> by_chance{.compressor = {.unbiased = true}, .level = 100};
    CHECK(test::refusal([&] { by_chance.validate(); }) ==
          "compressed mean: what an unbiased compressor leaves would grow from step to step; turn feedback off, or "
          "unbiased");
    by_chance.feedback = false;
    CHECK(test::refusal([&] { by_chance.validate(); }) == "no such error");
    CHECK(text({.level = 1, .worth = 0.5}) == "compressed mean: worth is 0.5, expected a number of 1 or more");
    CHECK(text({.level = 1, .feedback = false, .rescale = true}) ==
          "compressed mean: rescale is of what feedback keeps, which is off");
    CHECK(text({.level = 1}).empty());
    CHECK(text({.level = 1, .momentum = compress::momentum_options{}}) ==
          "compressed mean: momentum needs top_k or threshold, which send elements as they are");
    CHECK_THROWS_WITH_AS(
        (compressed_mean<compress::top_k>{.level = 1, .rescale = true, .momentum = compress::momentum_options{}}
             .validate()),
        "compressed mean: with momentum, what is lost is always kept and never rescaled", usage_error);
    compressed_mean<compress::power_sgd> unmeasured{.level = 1};
    unmeasured.network = strategy::stated_network{comm::topology::one_node(2), {}};
    CHECK(text(unmeasured) == "expected_gain: kernels reach 0 B/s and start in 4e-06 s");
    unmeasured.network->kernels.bytes_per_second = 1e12;
    CHECK(text(unmeasured).empty());
    CHECK(unmeasured.describe() != compressed_mean<compress::power_sgd>{.level = 1}.describe());
    compressed_mean<compress::power_sgd> apart{.level = 1, .nodes = comm::topology({.node = {0, 0, 1}})};
    CHECK(text(apart) == "compressed mean: nodes of 1 to 2 ranks; all must have as many");
    apart.nodes = nodes(2, 2);
    CHECK(text(apart).empty());
    CHECK(apart.describe() != compressed_mean<compress::power_sgd>{.level = 1}.describe());
    const std::string neighbors = apart.describe();
    apart.nodes = comm::topology({.node = {0, 1, 0, 1}});
    CHECK(apart.describe() != neighbors);
    apart.network = unmeasured.network;
    CHECK(text(apart) == "compressed mean: `network` judges compression between all ranks; leave out it or `nodes`");
    CHECK_THROWS_WITH_AS(
        (compressed_mean<compress::top_k>{.level = 1, .momentum = compress::momentum_options{}, .nodes = nodes(2, 2)}
             .validate()),
        "compressed mean: momentum is kept of what single ranks send, with `nodes` nodes send", usage_error);
    CHECK(compressed_mean<compress::power_sgd>{.level = 1}.describe() !=
          compressed_mean<compress::power_sgd>{.level = 2}.describe());
}

TEST_CASE("ranks whose compressors differ are told so at attach") {
    const auto refused = [](const auto& one, const auto& other) {
        using X = std::decay_t<decltype(one)>;
        const compressed_mean<X> hows[] = {{.compressor = one, .level = 4, .feedback = false},
                                           {.compressor = other, .level = 4, .feedback = false}};
        const std::string text = test::refusal<mismatch_error>([&] {
            threads::launch(2, [&](threads& w) {
                toy<float> t = matrices();
                compressed<X> s(w.duplicate("training"), {}, {}, hows[w.rank()]);
                s.attach(t.parameters);
            });
        });
        CHECK_MESSAGE(text.find("mean compressed at level 4") != std::string::npos, text);
    };
    refused(compress::quantize(512, compress::rounding::nearest), compress::quantize(512));
    refused(compress::quantize(512), compress::quantize(256));
    refused(compress::random_k{}, compress::random_k{.unbiased = true});
}

}  // namespace
