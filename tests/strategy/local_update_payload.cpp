// Local-update strategies: payloads that are compressed, and fragments of the model whose rounds end in turn.
#include <algorithm>  // copy
#include <cmath>      // fabs
#include <cstddef>    // bytes
#include <cstring>    // memcpy
#include <limits>     // nan
#include <mutex>      // sums over ranks
#include <set>        // names
#include <string>     // texts
#include <utility>    // move
#include <vector>     // values

#include <doctest/doctest.h>  // checks

#include "sharded_toy.hpp"                       // several blocks
#include "toy.hpp"                               // trainer
#include <tutti/comm/communicator.hpp>           // split_by_color
#include <tutti/comm/counted.hpp>                // bytes on the wire
#include <tutti/comm/self.hpp>                   // inner strategies
#include <tutti/comm/threads.hpp>                // ranks
#include <tutti/compress/dense.hpp>              // nothing lost
#include <tutti/compress/power_sgd.hpp>          // low rank
#include <tutti/compress/quantize.hpp>           // few bits
#include <tutti/compress/shards.hpp>             // cut
#include <tutti/compress/top_k.hpp>              // few elements
#include <tutti/optimize/sgd.hpp>                // inner optimizer
#include <tutti/strategy/compressed_mean.hpp>    // exchange
#include <tutti/strategy/data_parallel.hpp>      // local
#include <tutti/strategy/detail/fragments.hpp>   // cut_into_fragments
#include <tutti/strategy/local_update.hpp>       // under test
#include <tutti/strategy/local_update_rule.hpp>  // rules
#include <tutti/strategy/selected_mean.hpp>      // exchange that measures
#include <tutti/strategy/zero.hpp>               // replicas of several ranks

using namespace tutti;
using namespace tutti::strategy;
using comm::threads;
using optimize::sgd;
using test::matrices;
using test::refusal;
using test::same_bytes;
using test::toy;
using test::train;
using vec = std::vector<float>;
using self = comm::self<host_queue>;
using counted = comm::counted<threads>;
template <class X, class C = threads>
using compressed = local_update<C, local<sgd>, local_update_rule, compressed_mean<X>>;

namespace {

/// All ranks' values after training and finish.
template <class X>
vec trained(int n, const local_update_rule& rule, const compressed_mean<X>& how, const test::recipe& r) {
    vec values;
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        compressed<X> s(w.duplicate("across"), local<sgd>(self{}, {.momentum = 0}), rule, {}, how);
        s.attach(t.parameters);
        train(s, w.rank(), n, r);
        s.finish();  // throws where ranks differ
        if (w.rank() == 0) { values = t.values(); }
    });
    return values;
}
vec trained_plainly(int n, const local_update_rule& rule, const test::recipe& r) {
    vec values;
    threads::launch(n, [&](threads& w) {
        toy<float> t = matrices();
        local_update<threads, local<sgd>> s(w.duplicate("across"), local<sgd>(self{}, {.momentum = 0}), rule);
        s.attach(t.parameters);
        train(s, w.rank(), n, r);
        s.finish();
        if (w.rank() == 0) { values = t.values(); }
    });
    return values;
}
double distance(const vec& a, const vec& b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) { most = std::max(most, std::fabs(double{a[i]} - double{b[i]})); }
    return most;
}
std::vector<std::size_t> ends(const schedule::bucket_plan& plan) {
    std::vector<std::size_t> all;
    std::size_t tensors = 0, at = 0;
    for (const schedule::bucket& b : plan.buckets) {
        CHECK(b.first == tensors);
        CHECK(b.offset == at);
        tensors += b.count;
        at += b.size;
        all.push_back(at);
    }
    CHECK(tensors == plan.offsets.size());
    CHECK(at == plan.elements);
    return all;
}

}  // namespace

TEST_CASE("fragments are whole tensors of about the same size; of a shard they are rows of blocks") {
    const auto of = [](const std::vector<std::size_t>& sizes, std::size_t owned, std::size_t count) {
        std::vector<float> x(owned), payload(owned);
        parameters<float> list;
        std::vector<float> all(22'000);
        for (const std::size_t n : sizes) {
            list.push_back({"p" + std::to_string(list.size()), {n}, true, view<float>(all).sub(0, n), {}});
        }
        const auto cut = strategy::detail::cut_into_fragments(list, view<float>(x), view<float>(payload), count);
        for (std::size_t i = 0; i < cut.tensors.size(); ++i) {
            CHECK(cut.tensors[i].value.data() == x.data() + cut.plan.offsets[i]);
            CHECK(cut.tensors[i].gradient.data() == payload.data() + cut.plan.offsets[i]);
            std::size_t product = 1;
            for (const std::size_t d : cut.tensors[i].shape) { product *= d; }
            CHECK(product == cut.tensors[i].value.size());
        }
        return cut;
    };
    using sizes = std::vector<std::size_t>;
    CHECK(ends(of({10, 10, 10, 10}, 40, 1).plan) == sizes{40});
    CHECK(ends(of({10, 10, 10, 10}, 40, 2).plan) == sizes{20, 40});
    CHECK(ends(of({10, 10, 10, 10}, 40, 4).plan) == sizes{10, 20, 30, 40});
    CHECK(ends(of({1, 1, 1000, 1}, 1003, 3).plan) == sizes{2, 2 + 1000, 1003});
    CHECK(ends(of({1000, 1}, 1001, 4).plan) == sizes{0, 1000, 1000, 1001});
    CHECK(ends(of({0, 0}, 0, 2).plan) == sizes{0, 0});
    CHECK(ends(of({}, 0, 2).plan) == sizes{0, 0});
    CHECK(of({10, 30}, 40, 2).tensors[1].name == "p1");

    const auto shard = of({22'000}, 5 * 512 + 7, 2);
    CHECK(ends(shard.plan) == sizes{2 * 512, 5 * 512 + 7});
    CHECK(shard.tensors[0].shape == sizes{2, 512});
    CHECK(shard.tensors[1].shape == sizes{3, 512});
    CHECK(shard.tensors[2].shape == sizes{7});
    CHECK(ends(of({22'000}, 9, 2).plan) == sizes{0, 9});
    CHECK(ends(of({22'000}, 0, 3).plan) == sizes{0, 0, 0});
}

TEST_CASE("a fragment is sent whole at the end of its round, and nothing at other steps") {
    constexpr int n = 3;
    constexpr std::size_t tau = 7;
    for (const int delay : {0, 1}) {
        threads::launch(n, [&](threads& w) {
            counted across(w.duplicate("across"));
            const auto ledger = across.traffic_ledger();
            toy<float> t;
            local_update_rule rule = co2_method{.period = tau, .delay = delay}.rule();
            rule.fragments = 3;
            local_update<counted, local<sgd>> s(std::move(across), local<sgd>(self{}), rule);
            s.attach(t.parameters);
            for (std::size_t k = 1; k <= 3 * tau; ++k) {
                s.flush();
                const auto before = ledger->snapshot();
                train(s, w.rank(), n, {.steps = 1, .first_step = static_cast<int>(k)});
                s.flush();
                const auto sent = ledger->snapshot() - before;
                // Rounds end at steps 2, 4 and 7, and then every seven.
                const std::size_t place = (k - 1) % tau + 1;
                comm::call c;
                c.kind = comm::collective::all_reduce;
                c.element_size = sizeof(float);
                c.in_count = c.out_count = place == 2 ? 103 : place == 4 ? 200 : place == 7 ? 148 : 0;
                CHECK(sent.total().calls == (c.in_count == 0 ? 0 : 1));
                CHECK(sent.total().bytes == (c.in_count == 0 ? 0 : comm::wire_bytes(c, w.rank(), n)));
            }
            CHECK(s.rounds() == 9);
            s.finish();
        });
    }
}

TEST_CASE("a compressor that loses nothing rounds like none") {
    for (const std::size_t fragments : {1u, 2u}) {
        for (local_update_rule rule :
             {co2_method{.period = 3}.rule(), diloco_method{.period = 2}.rule(), eager_diloco_method{3}.rule()}) {
            rule.fragments = fragments;
            CAPTURE(rule.describe());
            const test::recipe r{.steps = 14};
            const auto is = trained<compress::dense<>>(3, rule, {.level = 1, .worth = 1}, r);
            CHECK(distance(is, trained_plainly(3, rule, r)) < 1e-5);
        }
    }
}

TEST_CASE("compressed rounds converge, hidden ones too, and ranks stay equal") {
    const test::recipe r{.steps = 150, .learning_rate = 0.5, .clip_norm = 0};
    for (const std::size_t fragments : {1u, 3u}) {
        local_update_rule rule = co2_method{.period = 3}.rule();
        rule.fragments = fragments;
        const auto plain = trained_plainly(3, rule, r);
        const double start = distance(matrices().values(), plain);
        CHECK(distance(trained<compress::quantize>(3, rule, {.level = 4}, r), plain) < 0.05 * start);
        CHECK(distance(trained<compress::power_sgd>(3, rule, {.level = 2}, r), plain) < 0.1 * start);
        CHECK(distance(trained<compress::top_k>(3, rule, {.level = 2500}, r), plain) < 0.2 * start);
    }
}

TEST_CASE("a compressed round sends its wire and no more") {
    constexpr int n = 2;
    std::vector<std::uint64_t> sent(n);
    std::uint64_t wires = 0, dense = 0;
    threads::launch(n, [&](threads& w) {
        counted across(w.duplicate("across"));
        const auto ledger = across.traffic_ledger();
        toy<float> t = matrices();
        compressed<compress::quantize, counted> s(std::move(across), local<sgd>(self{}), co2_method{3}.rule(), {},
                                                  {.level = 4});
        s.attach(t.parameters);
        s.flush();
        const auto before = ledger->snapshot();
        train(s, w.rank(), n, {.steps = 3});
        s.flush();
        sent[std::size_t(w.rank())] = (ledger->snapshot() - before).total().bytes;
        if (w.rank() != 0) { return; }
        const compress::quantize four_bits;
        const auto shares = compress::cut(s.exchange().tensors(), four_bits.granularity(), n);
        for (int owner = 0; owner < n; ++owner) {
            for (const compress::segment& g : shares.of(owner)) {
                if (g.level != compress::dense_level) { wires += four_bits.wire_bytes(g); }
            }
        }
        for (const compress::segment& g : s.exchange().tensors()) {
            if (g.level == compress::dense_level) { dense += (4 * g.size() + 15) / 16 * 16; }
        }
    });
    CHECK(dense == 32 + 16 + 32 + 48);  // vectors of 5, 1, 7 and 12 floats; a segment of a wire is aligned
    // Every part goes to its owner and back, from one of two ranks each time; a sum of floats sends them once a rank.
    CHECK(sent[0] + sent[1] == 2 * wires + 2 * dense);
}

TEST_CASE("what compression lost is owed: anchors and residuals together are where plain rounds would be") {
    constexpr int n = 3;
    constexpr float rate = 0.25f;
    constexpr int steps = 12;
    for (const std::size_t fragments : {1u, 2u}) {
        // Gradients that depend on rank and step alone; outer steps of rate 1 adopt the mean as it is.
        local_update_rule rule = co2_method{.period = 2, .momentum = 0, .gap = no_gap{}, .delay = 0}.rule();
        rule.fragments = fragments;
        vec values;
        std::vector<double> expected, owed(451);
        std::mutex adding;
        threads::launch(n, [&](threads& w) {
            toy<float> t = matrices();
            const auto start = t.values();
            std::vector<double> plain(start.begin(), start.end());
            compressed<compress::quantize> s(
                w.duplicate("across"), local<sgd>(self{}, {.momentum = 0, .weight_decay = 0}), rule, {}, {.level = 2});
            s.attach(t.parameters);
            for (std::uint64_t step = 0; step < steps; ++step) { test::known_step(s, step, w.rank(), n, rate, plain); }
            s.finish();
            const std::lock_guard lock(adding);
            for (const auto& e : s.state()) {
                if (e.name != "local_update/residual") { continue; }
                REQUIRE(e.data.size() == 4 * owed.size());
                for (std::size_t i = 0; i < owed.size(); ++i) {
                    float x = 0;
                    std::memcpy(&x, e.data.data() + 4 * i, 4);
                    owed[i] += double{x} / n;
                }
            }
            if (w.rank() == 0) {
                values = t.values();
                expected = std::move(plain);
            }
        });
        double most = 0;
        for (std::size_t i = 0; i < owed.size(); ++i) {
            most = std::max(most, std::fabs(owed[i]));
            REQUIRE(double{values[i]} - owed[i] == doctest::Approx(expected[i]).epsilon(1e-4).scale(1));
        }
        CHECK(most > 0.01);
    }
}

TEST_CASE("compressed rounds resume bit by bit from every step, with means in flight") {
    constexpr int n = 2;
    constexpr int steps = 9;
    local_update_rule rule = co2_method{.period = 4}.rule();
    rule.fragments = 2;
    const compressed_mean<compress::quantize> how{.level = 3};
    const auto some = [](int count, int first) { return test::recipe{.steps = count, .first_step = first}; };
    const vec straight = trained(n, rule, how, some(steps, 0));
    for (int cut = 0; cut < steps; ++cut) {
        std::vector<test::saved_state> saved(n);
        const auto run = [&](threads& w, auto work) {
            toy<float> t = matrices();
            compressed<compress::quantize> s(w.duplicate("across"), local<sgd>(self{}, {.momentum = 0}), rule, {}, how);
            s.attach(t.parameters);
            work(s, saved[std::size_t(w.rank())]);
            train(s, w.rank(), n, some(steps - cut, cut));
            s.finish();
            CHECK(same_bytes(t.values(), straight));
        };
        threads::launch(n, [&](threads& w) {
            run(w, [&](auto& s, auto& own) {
                train(s, w.rank(), n, some(cut, 0));
                own = test::saved(s);
            });
        });
        threads::launch(n, [&](threads& w) {
            run(w, [&](auto& s, auto& own) {
                train(s, w.rank(), n, some(7, 1));
                test::restore(s, own);
            });
        });
    }
}

TEST_CASE("over an inner strategy that compresses as well, names of the state are unique") {
    using quantized = compressed_mean<compress::quantize>;
    using inside = data_parallel<self, sgd, float, quantized>;
    const quantized how{.level = 4};
    toy<float> t = matrices();
    local_update<self, inside, local_update_rule, quantized> s(self{}, inside(self{}, {}, {}, how),
                                                               co2_method{2}.rule(), {}, how);
    s.attach(t.parameters);
    std::set<std::string> names;
    for (const auto& e : s.state()) { CHECK_MESSAGE(names.insert(e.name).second, e.name); }
    for (const std::string kept : {"residual", "exchange/steps", "exchange/loss_scale"}) {
        CHECK_MESSAGE(names.contains(kept), kept);
        CHECK_MESSAGE(names.contains("local_update/" + kept), kept);
    }
}

TEST_CASE("over replicas that shard, shards are compressed") {
    using inside = zero<2, threads, sgd>;
    using across_nodes = local_update<counted, inside, local_update_rule, compressed_mean<compress::quantize>>;
    std::vector<std::size_t> tensors(4), compressed_ones(4);
    vec plain, few_bits;
    for (const bool compressing : {false, true}) {
        threads::launch(4, [&](threads& world) {
            auto node = comm::split_by_color(world, world.rank() / 2, "node");
            auto across = comm::split_by_color(world, world.rank() % 2, "across");
            test::sized_toy<float> t(test::several_blocks);
            inside shards(std::move(*node), sgd{.momentum = 0}, {.bucket_bytes = 1 << 16});
            local_update_rule rule = co2_method{.period = 2}.rule();
            rule.fragments = 2;
            const auto training = [&](auto s) {
                s.attach(t.parameters);
                for (std::uint64_t k = 0; k < 8; ++k) {
                    s.begin({});
                    test::pass(s, t.parameters.size(), 4 * k + static_cast<std::uint64_t>(world.rank()), 1.0,
                               [](auto...) {});
                    s.step({.learning_rate = 0.1});
                }
                s.finish();
                if constexpr (requires { s.exchange().tensors(); }) {
                    const auto me = std::size_t(world.rank());
                    tensors[me] = s.exchange().tensors().size();
                    for (const auto& g : s.exchange().tensors()) { compressed_ones[me] += g.level == 4 ? 1 : 0; }
                }
            };
            if (compressing) {
                training(across_nodes(counted(std::move(*across)), std::move(shards), rule, {}, {.level = 4}));
            } else {
                training(local_update<counted, inside>(counted(std::move(*across)), std::move(shards), rule));
            }
            if (world.rank() != 0) { return; }
            vec& values = compressing ? few_bits : plain;
            for (const auto& p : t.parameters) { values.insert(values.end(), p.value.begin(), p.value.end()); }
        });
    }
    CHECK(tensors == std::vector<std::size_t>{3, 3, 3, 3});  // rows of two fragments, and a rest
    CHECK(compressed_ones == std::vector<std::size_t>{2, 2, 2, 2});
    CHECK(distance(few_bits, plain) > 0);
    CHECK(distance(few_bits, plain) < 0.1);
}

TEST_CASE("a replica that diverged is found on all ranks, compressed or not") {
    std::vector<std::string> texts(2);
    CHECK_THROWS_AS(threads::launch(2,
                                    [&](threads& w) {
                                        toy<float> t = matrices();
                                        compressed<compress::quantize> s(w.duplicate("across"), local<sgd>(self{}),
                                                                         co2_method{2}.rule(), {}, {.level = 4});
                                        s.attach(t.parameters);
                                        train(s, w.rank(), 2, {.steps = 3});
                                        if (w.rank() == 1) { s.owned()[100] = std::numeric_limits<float>::quiet_NaN(); }
                                        try {
                                            test::blind_steps(s, 3);
                                        } catch (const error& e) {
                                            texts[std::size_t(w.rank())] = e.what();
                                            throw;
                                        }
                                    }),
                    error);
    for (const auto& text : texts) { CHECK(text.find("the mean of round 1 is not finite") != std::string::npos); }
}

TEST_CASE("what makes no sense is refused") {
    using quantized = compressed<compress::quantize, self>;
    const auto with = [](local_update_rule rule, compressed_mean<compress::quantize> how) {
        return refusal([&] { quantized(self{}, local<sgd>(self{}), rule, {}, how); });
    };
    CHECK(with(local_sgd_method{2}.rule(), {.level = 4})
              .starts_with("local update: parameters go as they are, not by 'mean compressed at level 4"));
    CHECK(
        with(co2_method{2}.rule(), {.level = 0}) ==
        "compressed mean: level is 0, expected bits, a rank or kept elements in 10,000; 1 for schemes without levels");
    CHECK(with(co2_method{2}.rule(), {.level = 4}) == "no such error");
    local_update_rule rule = co2_method{4}.rule();
    const auto choosing = [&] {
        using chosen = selected_mean<compress::quantize>;
        return refusal([&] {
            local_update<self, local<sgd>, local_update_rule, chosen>(self{}, local<sgd>(self{}), rule, {},
                                                                      {.mean = {.level = 4}, .levels = {2, 4}});
        });
    };
    CHECK(choosing() == "no such error");
    rule.fragments = 2;
    CHECK(choosing().starts_with("local update: 2 fragments, whose rounds end in turn, but 'mean compressed at level"));
    rule.fragments = 5;
    CHECK(refusal([&] { rule.validate(); }) ==
          "local update: 5 fragments whose rounds of 4 steps end in turn, expected 1 to 4");
    rule.fragments = 0;
    CHECK(refusal([&] { rule.validate(); }).starts_with("local update: 0 fragments"));
    rule.fragments = 2;
    rule.inner = inner_state::reset;
    CHECK(refusal([&] { rule.validate(); }).starts_with("local update: with fragments the period is stated"));
    rule.inner = inner_state::keep;
    CHECK(refusal([&] { rule.validate(); }) == "no such error");
    CHECK(rule.describe().starts_with("local update every 4 steps in 2 fragments behind"));
    rule.automatic.emplace();
    CHECK(refusal([&] { rule.validate(); }).starts_with("local update: with fragments the period is stated"));

    const std::string differ = refusal<mismatch_error>([] {
        threads::launch(2, [](threads& w) {
            toy<float> t = matrices();
            compressed<compress::quantize> s(w.duplicate("across"), local<sgd>(self{}), co2_method{2}.rule(), {},
                                             {.level = 3 + w.rank()});
            s.attach(t.parameters);
        });
    });
    CHECK(differ.find("mean compressed at level") != std::string::npos);
}
