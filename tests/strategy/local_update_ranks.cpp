// Local-update strategies over several ranks: equal to a sequential reference, bit by bit, whatever the timing.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // copy, find_if
#include <bit>        // ulp
#include <cmath>      // fabs
#include <cstddef>    // bytes
#include <cstdint>    // batches
#include <cstdlib>    // abs
#include <set>        // unique names
#include <string>     // names
#include <utility>    // move, pair
#include <vector>     // trajectories

#include <support/build.hpp>                // TUTTI_TEST_TYPES
#include "local_reference.hpp"              // the judge
#include <tutti/comm/self.hpp>              // inner strategies
#include <tutti/comm/threads.hpp>           // ranks
#include <tutti/optimize/adamw.hpp>         // adamw
#include <tutti/optimize/sgd.hpp>           // sgd
#include <tutti/strategy/local_update.hpp>  // local_update

using namespace tutti;
using namespace tutti::strategy;
using comm::threads;
using optimize::adamw;
using optimize::sgd;
using test::recipe;
using test::same_bytes;
using test::sequential;
using test::toy;
using test::train;
using test::vec;
using self = comm::self<host_queue>;
template <class Optimizer = sgd> using engine = local_update<threads, local<Optimizer>>;

static_assert(strategy::strategy<engine<>> && strategy::strategy<co2<threads, local<adamw, bfloat16>>>);

namespace {

struct named {
    std::string name;
    local_update_rule rule;
};

/// All methods, and the choices that change their arithmetic.
std::vector<named> methods(std::size_t tau) {
    std::vector<named> all{
        {"local sgd", local_sgd_method{tau}.rule()},
        {"slow mo", slow_mo_method{tau}.rule()},
        {"slow mo, gradients", slow_mo_method{.period = tau, .rate = 0.8, .units = outer_units::gradients}.rule()},
        {"slow mo, pseudo", slow_mo_method{.period = tau, .payload = round_payload::pseudo_gradient}.rule()},
        {"co2", co2_method{tau}.rule()},
        {"co2, parameters", co2_method{.period = tau, .payload = round_payload::parameters}.rule()},
        {"co2, constant, clip", co2_method{.period = tau, .gap = constant_gap{1.7}, .clip = 0.01}.rule()},
        {"co2, elementwise", co2_method{.period = tau, .gap = elementwise_gap{0.9}}.rule()},
        {"co2, plain", co2_method{.period = tau, .momentum = 0, .gap = no_gap{}}.rule()},
        {"co2, gradients", co2_method{.period = tau, .rate = 0.9, .clip = 0.5, .units = outer_units::gradients}.rule()},
        {"diloco", diloco_method{tau}.rule()},
        {"diloco, mixing", diloco_method{.period = tau, .own_weight = 0.3}.rule()},
        {"delayed diloco", delayed_diloco_method{.period = tau, .momentum = 0.5}.rule()},
        {"delayed diloco, gap",
         delayed_diloco_method{.period = tau, .momentum = 0.5, .own_weight = 0.25, .gap = scalar_gap{}}.rule()},
        {"eager diloco", eager_diloco_method{.period = tau, .momentum = 0.5}.rule()},
        {"cocod", co_co_d_method{tau}.rule()},
        {"overlap", overlap_local_sgd_method{tau}.rule()},
    };
    // Parts of the model whose rounds end in turn.
    for (const auto& [name, fragments] : {std::pair{"co2", 2u},
                                          {"local sgd", 3u},
                                          {"eager diloco", 2u},
                                          {"cocod", 3u},
                                          {"delayed diloco, gap", 3u},
                                          {"co2, elementwise", 2u},
                                          {"slow mo", 2u}}) {
        if (fragments > tau) { continue; }
        named in_parts = *std::find_if(all.begin(), all.end(), [n = name](const named& m) { return m.name == n; });
        in_parts.name += ", fragments";
        in_parts.rule.fragments = fragments;
        all.push_back(in_parts);
    }
    return all;
}

/// The trajectory of all replicas: values after each step, and after finish.
template <class Optimizer>
std::vector<std::vector<vec>> trained(const local_update_rule& rule, int n, const recipe& r, Optimizer optimizer) {
    std::vector<std::vector<vec>> all(static_cast<std::size_t>(r.steps) + 1, std::vector<vec>(std::size_t(n)));
    threads::launch(n, [&](threads& world) {
        const auto me = static_cast<std::size_t>(world.rank());
        toy<float> t;
        engine<Optimizer> s(world.duplicate("across"), local<Optimizer>(self{}, optimizer), rule);
        s.attach(t.parameters);
        recipe one = r;
        one.steps = 1;
        for (int k = 0; k < r.steps; ++k) {
            one.first_step = k;
            train(s, world.rank(), n, one);
            all[std::size_t(k)][me] = t.values();
        }
        s.finish();
        all.back()[me] = t.values();
        CHECK(same_bytes(all.back()[me], vec(s.owned().begin(), s.owned().end())));
        // What goes on from this state begins a round here.
        if (!s.anchor().empty()) { CHECK(same_bytes(all.back()[me], vec(s.anchor().begin(), s.anchor().end()))); }
    });
    return all;
}
template <class Optimizer>
std::vector<std::vector<vec>> expected(const local_update_rule& rule, int n, const recipe& r, Optimizer optimizer) {
    std::vector<std::vector<vec>> all;
    sequential<Optimizer> s(rule, n, r, optimizer);
    for (int k = 0; k < r.steps; ++k) {
        s.step();
        all.push_back(s.values());
    }
    s.finish();
    all.push_back(s.values());
    return all;
}

}  // namespace

TEST_CASE("every method gives the bits of its sequential reference, after each step and after finish") {
    for (const int n : test::sanitized ? std::vector{3} : std::vector{1, 2, 3, 4}) {
        for (const std::size_t tau : {1u, 3u, 8u}) {
            for (const int rest : {0, 2}) {
                if (tau == 1 && rest != 0) { continue; }
                for (const named& m : methods(tau)) {
                    CAPTURE(m.name);
                    CAPTURE(n);
                    CAPTURE(tau);
                    const recipe r{.steps = static_cast<int>((tau == 8 ? 3 : 5) * tau) + rest,
                                   .batch = static_cast<std::uint64_t>(n),
                                   .learning_rate = 0.2};
                    const auto is = trained<sgd>(m.rule, n, r, {});
                    const auto should = expected<sgd>(m.rule, n, r, {});
                    for (std::size_t k = 0; k < is.size(); ++k) {
                        CAPTURE(k);
                        for (std::size_t g = 0; g < is[k].size(); ++g) { REQUIRE(same_bytes(is[k][g], should[k][g])); }
                    }
                    for (const vec& x : is.back()) { REQUIRE(same_bytes(x, is.back()[0])); }
                }
            }
        }
    }
}

TEST_CASE("adamw inside: the same") {
    for (const named& m : methods(3)) {
        CAPTURE(m.name);
        const recipe r{.steps = 11};
        const auto is = trained<adamw>(m.rule, 3, r, {});
        const auto should = expected<adamw>(m.rule, 3, r, {});
        for (std::size_t k = 0; k < is.size(); ++k) {
            for (std::size_t g = 0; g < is[k].size(); ++g) { REQUIRE(same_bytes(is[k][g], should[k][g])); }
        }
    }
}

TEST_CASE("no two methods are the same by accident") {
    std::vector<std::vector<vec>> ends;
    for (const named& m : methods(3)) { ends.push_back(trained<sgd>(m.rule, 3, {.steps = 11}, sgd{}).back()); }
    for (std::size_t a = 0; a < ends.size(); ++a) {
        for (std::size_t b = a + 1; b < ends.size(); ++b) { CHECK_FALSE(same_bytes(ends[a][0], ends[b][0])); }
    }
}

TEST_CASE("what is common is equal on all replicas after every step, and the anchor is the reference's") {
    constexpr int n = 3;
    for (const named& m : methods(2)) {
        if (!m.rule.common_anchor()) { continue; }
        CAPTURE(m.name);
        struct common {
            vec anchor, momentum;
            double gap = 0;
        };
        std::vector<std::vector<common>> seen(n);
        threads::launch(n, [&](threads& world) {
            toy<float> t;
            engine<> s(world.duplicate("across"), local<sgd>(self{}), m.rule);
            s.attach(t.parameters);
            for (int k = 0; k < 12; ++k) {
                train(s, world.rank(), n, {.steps = 1, .first_step = k});
                seen[std::size_t(world.rank())].push_back({vec(s.anchor().begin(), s.anchor().end()),
                                                           vec(s.momentum().begin(), s.momentum().end()), s.gap()});
            }
        });
        sequential<sgd> reference(m.rule, n, {.steps = 12}, {});
        for (std::size_t k = 0; k < 12; ++k) {
            reference.step();
            for (const auto& rank : seen) {
                REQUIRE(same_bytes(rank[k].anchor, reference.anchor()));
                REQUIRE(same_bytes(rank[k].momentum, seen[0][k].momentum));
                if (m.rule.keeps_momentum()) { REQUIRE(same_bytes(rank[k].momentum, reference.momentum())); }
                REQUIRE(rank[k].gap == reference.gap());
            }
        }
    }
}

// pytorch/pytorch#74157: with one step a round, averaging parameters must be data parallelism.
TEST_CASE_TEMPLATE("local SGD of one step a round is data parallelism", T, TUTTI_TEST_TYPES(float, double)) {
    constexpr int n = 4;
    const recipe r{.steps = 1000, .batch = 4, .clip_norm = 0};
    std::vector<T> plain, rounds;
    threads::launch(n, [&](threads& world) {
        toy<T> t;
        data_parallel<threads, sgd, T> s(world.duplicate("dp"), {.weight_decay = 0.01});
        s.attach(t.parameters);
        train(s, world.rank(), n, r);
        s.finish();
        if (world.rank() == 0) { plain = t.values(); }
    });
    threads::launch(n, [&](threads& world) {
        toy<T> t;
        local_update<threads, local<sgd, T>> s(world.duplicate("across"), local<sgd, T>(self{}, {.weight_decay = 0.01}),
                                               local_sgd_method{1}.rule());
        s.attach(t.parameters);
        train(s, world.rank(), n, r);
        s.finish();
        if (world.rank() == 0) { rounds = t.values(); }
    });
    double worst = 0, scale = 0;
    for (std::size_t i = 0; i < plain.size(); ++i) {
        worst = std::max(worst, std::fabs(static_cast<double>(plain[i]) - static_cast<double>(rounds[i])));
        scale = std::max(scale, std::fabs(static_cast<double>(plain[i])));
    }
    CHECK(worst / scale <= (sizeof(T) == 4 ? 1e-5 : 1e-13));
}

TEST_CASE("where every sum is exact, it is data parallelism bit by bit") {
    constexpr int n = 4;
    const auto run = [](auto& s, threads& world, parameters<float>& list) {
        s.attach(list);
        for (int k = 0; k < 5; ++k) {
            s.begin({});
            for (std::size_t e = 0; e < 8; ++e) {
                s.gradient(0)[e] = static_cast<float>((world.rank() * 7 + k * 3 + int(e)) % 11 - 5);
            }
            s.gradient_ready(0);
            s.step({.learning_rate = 0.25});
        }
        s.finish();
    };
    threads::launch(n, [&](threads& world) {
        vec a(8, 1.0f), b(8, 1.0f);
        parameters<float> first{{"x", {8}, true, a, {}}}, second{{"x", {8}, true, b, {}}};
        data_parallel<threads, sgd> plain(world.duplicate("dp"), {.momentum = 0.5});
        run(plain, world, first);
        engine<> rounds(world.duplicate("across"), local<sgd>(self{}, {.momentum = 0.5}), local_sgd_method{1}.rule());
        run(rounds, world, second);
        CHECK(same_bytes(a, b));
        CHECK_FALSE(same_bytes(a, vec(8, 1.0f)));
    });
}

// PrimeIntellect-ai/prime-diloco#13
TEST_CASE("replicas start from the first one's values") {
    threads::launch(3, [](threads& world) {
        toy<bfloat16> t(test::layout::scattered, test::layout::none, 100 + static_cast<std::uint64_t>(world.rank()));
        co2<threads, local<sgd, bfloat16>> s(world.duplicate("across"), local<sgd, bfloat16>(self{}));
        s.attach(t.parameters);
        CHECK(same_bytes(t.values(), toy<bfloat16>(test::layout::scattered, test::layout::none, 100).values()));
        s.finish();
    });
}

TEST_CASE("ranks that differ in rule or parameters are told so at attach") {
    const auto texts = [](auto change) {
        std::vector<std::string> all(3);
        try {
            threads::launch(3, [&](threads& world) {
                vec a(6);
                parameters<float> list{{"a", {2, 3}, true, a, {}}};
                co2_method method{.period = 4};
                if (world.rank() == 2) { change(method, list); }
                co2<threads, local<sgd>> s(world.duplicate("across"), local<sgd>(self{}), method);
                try {
                    s.attach(list);
                } catch (const error& e) {
                    all[std::size_t(world.rank())] = e.what();
                    throw;
                }
            });
        } catch (const error&) {}
        return all;
    };
    for (const auto& text : texts([](co2_method&m, auto&) { m.period = 5; })) {
        CHECK(text.find("local update every ") != std::string::npos);
        CHECK(text.find("rank 2: ") != std::string::npos);
    }
    for (const auto& text : texts([](auto&, auto& list) { list[0].name = "b"; })) {
        CHECK(text.find("parameter 0 (here '") != std::string::npos);
    }
    // One that is refused alone does not leave the others waiting.
    const auto bad = texts([](auto&, auto& list) { list[0].name = ""; });
    CHECK(bad[2] == "attach: parameter 0 has no name");
    CHECK(bad[0].find("parameter 0 has no name") != std::string::npos);
}

// pytorch/torchft#277, #238: the anchor, the momentum and the mean in flight must be in the state.
TEST_CASE("a run resumes bit by bit from every step of a round, also with a mean in flight") {
    constexpr int n = 2;
    constexpr int steps = 9;
    const auto some = [](int count, int first) { return recipe{.steps = count, .batch = n, .first_step = first}; };
    for (const named& m : methods(3)) {
        CAPTURE(m.name);
        const auto straight = trained<adamw>(m.rule, n, some(steps, 0), adamw{});
        for (int cut = 0; cut <= steps; ++cut) {
            CAPTURE(cut);
            std::vector<test::saved_state> saved(n);
            std::vector<double> gaps(n);
            threads::launch(n, [&](threads& world) {
                toy<float> t;
                engine<adamw> s(world.duplicate("across"), local<adamw>(self{}), m.rule);
                s.attach(t.parameters);
                train(s, world.rank(), n, some(cut, 0));
                saved[std::size_t(world.rank())] = test::saved(s);
                gaps[std::size_t(world.rank())] = s.gap();
                // Saving changed nothing.
                train(s, world.rank(), n, some(steps - cut, cut));
                s.finish();
                CHECK(same_bytes(t.values(), straight.back()[std::size_t(world.rank())]));
            });
            threads::launch(n, [&](threads& world) {
                const auto me = std::size_t(world.rank());
                toy<float> t(test::layout::scattered, test::layout::none, 55);
                engine<adamw> s(world.duplicate("across"), local<adamw>(self{}), m.rule);
                s.attach(t.parameters);
                train(s, world.rank(), n, some(cut % 5, 0));  // what is overwritten may be in any phase
                test::restore(s, saved[me]);
                CHECK(s.gap() == gaps[me]);
                for (int k = cut; k < steps; ++k) {
                    train(s, world.rank(), n, some(1, k));
                    REQUIRE(same_bytes(t.values(), straight[std::size_t(k)][me]));
                }
                s.finish();
                CHECK(same_bytes(t.values(), straight.back()[me]));
            });
        }
    }
}

TEST_CASE("names of the state are unique, and every entry is its replica's own") {
    for (const named& m : methods(3)) {
        toy<float> t;
        local_update<self, local<sgd>> s(self{}, local<sgd>(self{}), m.rule);
        s.attach(t.parameters);
        std::set<std::string> names;
        for (const auto& e : s.state()) {
            CHECK(names.insert(e.name).second);
            CHECK(e.whose == ownership::local);
        }
    }
}

TEST_CASE("flush at any time changes nothing, nor does a consensus") {
    constexpr int n = 3;
    for (const named& m : methods(3)) {
        CAPTURE(m.name);
        const auto straight = trained<sgd>(m.rule, n, {.steps = 10}, sgd{});
        std::vector<std::vector<vec>> common(10, std::vector<vec>(n));
        threads::launch(n, [&](threads& world) {
            const auto me = std::size_t(world.rank());
            toy<float> t(test::layout::scattered);
            engine<> s(world.duplicate("across"), local<sgd>(self{}), m.rule);
            s.attach(t.parameters);
            for (std::size_t k = 0; k < 10; ++k) {
                train(s, world.rank(), n, {.steps = 1, .first_step = int(k)});
                s.flush();
                {
                    const auto scope = s.consensus();
                    for (std::size_t i = 0; i < t.parameters.size(); ++i) {
                        const auto x = s.before_use(i);
                        common[k][me].insert(common[k][me].end(), x.begin(), x.end());
                        s.after_use(i);
                    }
                }
                REQUIRE(same_bytes(t.values(), straight[k][me]));
            }
            s.finish();
            CHECK(same_bytes(t.values(), straight.back()[me]));
            const auto scope = s.consensus();
            CHECK(same_bytes(t.values(), straight.back()[me]));
        });
        sequential<sgd> reference(m.rule, n, {.steps = 10}, {});
        for (std::size_t k = 0; k < 10; ++k) {
            reference.step();
            const bool equal = m.rule.takes_mean() && m.rule.fragments == 1 && k % 3 == 2;
            const vec mean = equal ? reference.values()[0] : test::mean_over(reference.values());
            for (const vec& x : common[k]) {
                REQUIRE(same_bytes(x, m.rule.common_anchor() ? reference.anchor() : mean));
            }
        }
    }
}

TEST_CASE("moments are averaged at the end of a round") {
    constexpr int n = 3;
    for (const int delay : {0, 1}) {
        std::vector<std::vector<vec>> moments(n);
        local_update_rule kept = co2_method{.period = 4, .delay = delay}.rule();
        local_update_rule averaged = kept;
        averaged.inner = inner_state::average;
        std::vector<std::vector<vec>> before(2);
        for (const auto& rule : {kept, averaged}) {
            threads::launch(n, [&](threads& world) {
                toy<float> t;
                engine<adamw> s(world.duplicate("across"), local<adamw>(self{}), rule);
                s.attach(t.parameters);
                train(s, world.rank(), n, {.steps = 4});
                auto& mine = moments[std::size_t(world.rank())];
                mine.clear();
                for (const auto& m : s.inner().moments()) { mine.emplace_back(m.begin(), m.end()); }
                s.finish();
            });
            if (rule.inner == inner_state::keep) {
                CHECK_FALSE(same_bytes(moments[0][0], moments[1][0]));
                for (std::size_t i = 0; i < 2; ++i) {
                    for (const auto& rank : moments) { before[i].push_back(rank[i]); }
                }
            }
        }
        for (const auto& rank : moments) {
            REQUIRE(rank.size() == 2);
            for (std::size_t i = 0; i < 2; ++i) { CHECK(same_bytes(rank[i], test::mean_over(before[i]))); }
        }
    }
}

TEST_CASE("inside a node data parallelism, across nodes CO2: replicas of two ranks each") {
    constexpr int n = 4;
    using inside = data_parallel<threads, sgd, double>;
    using two_level = co2<threads, inside>;
    std::vector<std::vector<double>> x(n);
    const co2_method method{.period = 3, .momentum = 0.4};
    threads::launch(n, [&](threads& world) {
        auto node = comm::split_by_color(world, world.rank() / 2, "node");
        auto across = comm::split_by_color(world, world.rank() % 2, "across");
        toy<double> t;
        two_level s(std::move(*across), inside(std::move(*node)), method);
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = 100});
        s.finish();
        x[std::size_t(world.rank())] = t.values();
    });
    for (const auto& other : x) { CHECK(same_bytes(other, x[0])); }
    std::vector<double> replicas;
    threads::launch(2, [&](threads& world) {
        toy<double> t;
        co2<threads, local<sgd, double>> s(world.duplicate("across"), local<sgd, double>(self{}), method);
        s.attach(t.parameters);
        train(s, world.rank(), 2, {.steps = 100});
        s.finish();
        if (world.rank() == 0) { replicas = t.values(); }
    });
    for (std::size_t i = 0; i < replicas.size(); ++i) {
        REQUIRE(x[0][i] == doctest::Approx(replicas[i]).epsilon(1e-10).scale(1));
    }
}

TEST_CASE(
    "replicas with the same data: the bits of one where sums of their number are exact, else 2 ulp a mean at most") {
    const auto train_alike = [](int n, const local_update_rule& rule, int steps, auto make) {
        std::vector<vec> all(static_cast<std::size_t>(n));
        threads::launch(n, [&](threads& world) {
            toy<float> t;
            auto s = make(world, rule);
            s.attach(t.parameters);
            train(s, 0, 1, {.steps = steps});
            s.finish();
            all[static_cast<std::size_t>(world.rank())] = t.values();
        });
        for (const vec& other : all) { REQUIRE(same_bytes(other, all[0])); }
        return all[0];
    };
    const auto flat = [](threads& world, const local_update_rule& rule) {
        return engine<>(world.duplicate("across"), local<sgd>(self{}, {.momentum = 0.9}), rule);
    };
    // Two ranks and four add up exactly in any order; nodes of two make a tree of eight.
    const auto in_nodes = [](threads& world, const local_update_rule& rule) {
        using inside = data_parallel<threads, sgd>;
        auto node = comm::split_by_color(world, world.rank() / 2, "node");
        auto across = comm::split_by_color(world, world.rank() % 2, "across");
        return local_update<threads, inside>(std::move(*across), inside(std::move(*node), {.momentum = 0.9}), rule);
    };
    for (const named& m : methods(3)) {
        if (m.name.starts_with("eager")) { continue; }  // a replica's own part counts by the number of replicas
        CAPTURE(m.name);
        const vec one = train_alike(1, m.rule, 7, flat);
        for (const int n : {2, 4}) { CHECK(same_bytes(train_alike(n, m.rule, 7, flat), one)); }
        CHECK(same_bytes(train_alike(8, m.rule, 7, in_nodes), one));
    }
    const auto bits = [](float x) {  // neighbors are one apart; 0 and -0 are not
        const auto i = std::bit_cast<std::int32_t>(x);
        return i < 0 ? -std::int64_t{i & 0x7fffffff} : std::int64_t{i};
    };
    std::int64_t farthest = 0;
    const vec one = train_alike(1, local_sgd_method{1}.rule(), 1, flat);
    for (const int n : {3, 5, 6, 7, 8}) {
        const vec mean = train_alike(n, local_sgd_method{1}.rule(), 1, flat);
        for (std::size_t i = 0; i < one.size(); ++i) {
            farthest = std::max(farthest, std::abs(bits(mean[i]) - bits(one[i])));
        }
    }
    CHECK(farthest <= 2);
    CHECK(farthest > 0);
}
