// Local-update strategies: what goes on the wire and when, what memory it takes, and what failures leave behind.
#include <doctest/doctest.h>  // checks

#include <chrono>    // delays
#include <cstddef>   // size_t
#include <cstdint>   // rounds
#include <limits>    // not finite
#include <memory>    // strategies that are destroyed
#include <optional>  // what was before
#include <string>    // texts
#include <vector>    // values

#include "toy.hpp"                           // trainer
#include <tutti/comm/counted.hpp>            // bytes on the wire
#include <tutti/comm/faulty.hpp>             // failures, delays
#include <tutti/comm/self.hpp>               // inner strategies
#include <tutti/comm/threads.hpp>            // ranks
#include <tutti/optimize/clip.hpp>           // norm_blocks
#include <tutti/optimize/sgd.hpp>            // sgd
#include <tutti/strategy/data_parallel.hpp>  // local
#include <tutti/strategy/local_update.hpp>   // local_update

using namespace tutti;
using namespace tutti::strategy;
using namespace std::chrono_literals;
using comm::fault_rule;
using comm::threads;
using optimize::sgd;
using test::same_bytes;
using test::toy;
using test::train;
using vec = std::vector<float>;
using self = comm::self<host_queue>;
using faulty = comm::faulty<threads>;
using counted = comm::counted<threads>;
namespace fault = comm::fault;
template <class C> using engine = local_update<C, local<sgd>>;

namespace {

constexpr std::size_t elements = 451;  // of the toy
const std::string lane_name = "world/across/rounds";

std::vector<local_update_rule> rules(std::size_t tau) {
    return {local_sgd_method{tau}.rule(),
            slow_mo_method{tau}.rule(),
            co2_method{tau}.rule(),
            co2_method{.period = tau, .payload = round_payload::parameters}.rule(),
            co2_method{.period = tau, .gap = elementwise_gap{}}.rule(),
            diloco_method{tau}.rule(),
            delayed_diloco_method{.period = tau, .own_weight = 0.5}.rule(),
            eager_diloco_method{tau}.rule(),
            co_co_d_method{tau}.rule(),
            overlap_local_sgd_method{tau}.rule()};
}

std::vector<vec> final_values(int n, const local_update_rule& rule, int steps, const std::vector<fault_rule>& plan) {
    std::vector<vec> x(static_cast<std::size_t>(n));
    threads::launch(n, [&](threads& world) {
        toy<float> t;
        engine<faulty> s(faulty(world.duplicate("across"), plan), local<sgd>(self{}), rule);
        s.attach(t.parameters);
        train(s, world.rank(), n, {.steps = steps});
        s.finish();
        x[std::size_t(world.rank())] = t.values();
    });
    return x;
}

}  // namespace

TEST_CASE("a round sends every element once, at its end and never in between; finish sends what is left") {
    constexpr int n = 3;
    for (const std::size_t tau : {1u, 3u, 7u, 50u}) {
        for (const int steps : {0, 7, 12}) {
            for (const local_update_rule& rule : rules(tau)) {
                CAPTURE(rule.describe());
                threads::launch(n, [&](threads& world) {
                    counted across(world.duplicate("across"));
                    const auto ledger = across.traffic_ledger();
                    toy<float> t;
                    engine<counted> s(std::move(across), local<sgd>(self{}), rule);
                    s.attach(t.parameters);
                    const auto attached = ledger->snapshot();
                    CHECK(attached.total().calls == 1);
                    comm::call c;
                    c.kind = comm::collective::all_reduce;
                    c.element_size = sizeof(float);
                    c.in_count = c.out_count = elements;
                    const std::uint64_t bytes = comm::wire_bytes(c, world.rank(), n);
                    const auto sent = [&] {
                        s.flush();
                        const auto now = ledger->snapshot() - attached;
                        CHECK(now.total() == now[comm::collective::all_reduce]);
                        CHECK(now.total().bytes == bytes * now.total().calls);
                        return now.total().calls;
                    };
                    for (int k = 1; k <= steps; ++k) {
                        train(s, world.rank(), n, {.steps = 1, .first_step = k});
                        const auto rounds = static_cast<std::uint64_t>(k) / tau;
                        CHECK(sent() == rounds);
                        CHECK(s.rounds() == rounds);
                    }
                    const bool rest = static_cast<std::size_t>(steps) % tau != 0 && rule.has_outer();
                    const bool average = !rule.common_anchor() && !rule.takes_mean() && steps > 0;
                    const auto before = sent();
                    s.finish();
                    CHECK(sent() == before + (rest ? 1 : 0) + (average ? 1 : 0));
                });
            }
        }
    }
}

TEST_CASE("statistics of forward passes: nothing is sent of them; a trainer that wants their mean takes it where a "
          "round ends") {
    constexpr int n = 3;
    local_update_rule in_parts = co2_method{3}.rule();
    in_parts.fragments = 3;
    for (const local_update_rule& rule : {local_sgd_method{3}.rule(), co2_method{3}.rule(), in_parts}) {
        threads::launch(n, [&](threads& world) {
            counted across(world.duplicate("across"));
            const auto ledger = across.traffic_ledger();
            threads statistics = world.duplicate("statistics");
            toy<float> t;
            engine<counted> s(std::move(across), local<sgd>(self{}), rule);
            s.attach(t.parameters);
            // By rank, what the running mean of a batch norm is: its own, and averaged.
            vec own(2, 0.0f), averaged(2, 0.0f), expected(2, 0.0f);
            std::uint64_t means = 0;
            for (int step = 0; step < 7; ++step) {
                s.flush();  // means of rounds are counted when they are there
                const auto before = ledger->total().calls;
                s.begin({});
                for (std::size_t i = 0; i < toy<float>::sizes.size(); ++i) {
                    static_cast<void>(s.before_use(i));
                    s.after_use(i);
                }
                for (std::size_t k = 0; k < 2; ++k) {
                    const auto batch = static_cast<float>(world.rank() + step * int(k + 1));
                    own[k] = 0.5f * own[k] + 0.5f * batch;
                    averaged[k] = 0.5f * averaged[k] + 0.5f * batch;
                    // All ranks' mean of means that are averaged is the mean's own recursion.
                    expected[k] = 0.5f * expected[k] + 0.5f * static_cast<float>(1 + step * int(k + 1));
                }
                s.flush();
                CHECK(ledger->total().calls == before);
                for (std::size_t i = toy<float>::sizes.size(); i-- > 0;) { s.gradient_ready(i); }
                const auto rounds = s.rounds();
                s.step({0.1});
                if (s.rounds() == rounds) { continue; }
                statistics.all_reduce(averaged, view<float>(averaged), mean{});
                ++means;
                for (std::size_t k = 0; k < 2; ++k) { CHECK(averaged[k] == doctest::Approx(expected[k])); }
            }
            CHECK(means == (rule.fragments == 1 ? 2u : 7u));
            CHECK((own[0] == averaged[0]) == (world.rank() == 1));  // whose batches are the mean
            s.finish();
        });
    }
}

TEST_CASE("accumulation does not send more") {
    threads::launch(2, [&](threads& world) {
        counted across(world.duplicate("across"));
        const auto ledger = across.traffic_ledger();
        toy<float> t;
        engine<counted> s(std::move(across), local<sgd>(self{}), co2_method{3}.rule());
        s.attach(t.parameters);
        train(s, world.rank(), 2, {.steps = 9, .batch = 24, .micro = 4});
        s.flush();
        CHECK(ledger->snapshot()[comm::collective::all_reduce].calls == 3);
    });
}

TEST_CASE("copies of the parameters are those stated, and no more in any step") {
    const auto copies = [](const local_update_rule& rule) {
        std::size_t result = 0;
        threads::launch(2, [&](threads& world) {
            toy<float> t;
            threads across = world.duplicate("across");
            const host_queue q = across.queue();
            local<sgd> inner(self{q}, {.momentum = 0});
            inner.attach(t.parameters);
            const std::size_t alone = q.account().live();
            {
                toy<float> u;
                engine<threads> s(std::move(across), local<sgd>(self{q}, {.momentum = 0}), rule);
                s.attach(u.parameters);
                const std::size_t scalars = 8 * (optimize::norm_blocks(elements) + 1) + 8 * 7 + 8 * 4;
                const std::size_t more = q.account().live() - 2 * alone - scalars;
                CHECK(more % (elements * sizeof(float)) == 0);
                q.account().reset_peak();
                const std::size_t live = q.account().live();
                train(s, world.rank(), 2, {.steps = 9});
                CHECK(q.account().peak() == live);
                {
                    const auto scope = s.consensus();
                    CHECK(q.account().live() == live + elements * sizeof(float));
                }
                CHECK(q.account().live() == live);
                s.finish();
                if (world.rank() == 0) { result = more / (elements * sizeof(float)); }
            }
            CHECK(q.account().live() == alone);
        });
        return result;
    };
    CHECK(copies(local_sgd_method{2}.rule()) == 1);
    CHECK(copies(slow_mo_method{2}.rule()) == 3);
    CHECK(copies(slow_mo_method{.period = 2, .momentum = 0, .rate = 0.9}.rule()) == 2);
    CHECK(copies(co2_method{2}.rule()) == 3);
    CHECK(copies(co2_method{.period = 2, .momentum = 0}.rule()) == 2);
    CHECK(copies(co2_method{.period = 2, .payload = round_payload::parameters}.rule()) == 4);
    CHECK(copies(co2_method{.period = 2, .gap = elementwise_gap{}}.rule()) == 5);
    CHECK(copies(co2_method{.period = 2, .gap = elementwise_gap{}, .delay = 0}.rule()) == 3);
    CHECK(copies(diloco_method{2}.rule()) == 3);
    CHECK(copies(delayed_diloco_method{2}.rule()) == 3);
    CHECK(copies(delayed_diloco_method{.period = 2, .own_weight = 0.5}.rule()) == 4);
    CHECK(copies(eager_diloco_method{2}.rule()) == 4);
    CHECK(copies(co_co_d_method{2}.rule()) == 2);
    CHECK(copies(overlap_local_sgd_method{2}.rule()) == 1);
}

TEST_CASE("bits do not depend on who is late") {
    for (const int n : {2, 3}) {
        for (const local_update_rule& rule : rules(2)) {
            CAPTURE(rule.describe());
            const auto undisturbed = final_values(n, rule, 9, {});
            for (int repeat = 0; repeat < 3; ++repeat) {
                std::vector<fault_rule> plan;
                for (std::uint64_t k = 1; k <= 4; ++k) {
                    plan.push_back({.rank = (repeat + int(k)) % n,
                                    .on = comm::collective::all_reduce,
                                    .nth = k,
                                    .communicator = lane_name,
                                    .action = fault::delay{std::chrono::milliseconds((int(k) * 5 + repeat) % 7)}});
                }
                const auto late = final_values(n, rule, 9, plan);
                for (int g = 0; g < n; ++g) { CHECK(same_bytes(late[std::size_t(g)], undisturbed[std::size_t(g)])); }
            }
        }
    }
}

// weigao266/fairscale-CO2 reduces the live parameters while they are trained.
TEST_CASE("what is in flight is a copy: live parameters may change under it") {
    for (const local_update_rule& rule : rules(2)) {
        if (rule.delay == 0) { continue; }
        CAPTURE(rule.describe());
        const auto undisturbed = final_values(2, rule, 6, {});
        const std::vector<fault_rule> plan{
            {.rank = 1, .on = comm::collective::all_reduce, .communicator = lane_name, .action = fault::delay{20ms}}};
        threads::launch(2, [&](threads& world) {
            toy<float> t;
            engine<faulty> s(faulty(world.duplicate("across"), plan), local<sgd>(self{}), rule);
            s.attach(t.parameters);
            train(s, world.rank(), 2, {.steps = 2});
            const auto own = t.values();
            for (auto& p : t.parameters) { std::fill(p.value.begin(), p.value.end(), 1e6f); }
            s.flush();  // the all_reduce runs over garbage in the live parameters
            auto from = own.begin();
            for (auto& p : t.parameters) {
                std::copy_n(from, p.value.size(), p.value.begin());
                from += static_cast<std::ptrdiff_t>(p.value.size());
            }
            train(s, world.rank(), 2, {.steps = 4, .first_step = 2});
            s.finish();
            CHECK(same_bytes(t.values(), undisturbed[std::size_t(world.rank())]));
        });
    }
}

TEST_CASE("the state holds the mean in flight, not what it was made from") {
    for (const local_update_rule& rule : rules(2)) {
        if (rule.delay == 0) { continue; }
        CAPTURE(rule.describe());
        const std::vector<fault_rule> plan{
            {.rank = 1, .on = comm::collective::all_reduce, .communicator = lane_name, .action = fault::delay{20ms}}};
        threads::launch(2, [&](threads& world) {
            toy<float> t;
            engine<faulty> s(faulty(world.duplicate("across"), plan), local<sgd>(self{}), rule);
            s.attach(t.parameters);
            train(s, world.rank(), 2, {.steps = 2});
            const auto read = [](const auto& entries) {
                std::vector<std::vector<std::byte>> all;
                for (const auto& e : entries) { all.emplace_back(e.data.begin(), e.data.end()); }
                return all;
            };
            const auto early = read(s.state());
            s.flush();
            CHECK(early == read(s.state()));
        });
    }
}

// pytorch/torchft: should_commit can succeed although the all-reduce in flight has failed.
TEST_CASE("an all_reduce that fails leaves the outer level as it was, byte by byte, on every rank") {
    for (const int n : {2, 3}) {
        for (const local_update_rule& rule : rules(2)) {
            CAPTURE(rule.describe());
            const std::vector<fault_rule> plan{{.rank = 1,
                                                .on = comm::collective::all_reduce,
                                                .nth = 3,
                                                .communicator = lane_name,
                                                .action = fault::fail{7, "link down"}}};
            std::vector<std::string> texts(static_cast<std::size_t>(n));
            std::vector<int> failed(static_cast<std::size_t>(n), -1);
            CHECK_THROWS_AS(
                threads::launch(n,
                                [&](threads& world) {
                                    const auto me = std::size_t(world.rank());
                                    toy<float> t;
                                    engine<faulty> s(faulty(world.duplicate("across"), plan), local<sgd>(self{}), rule);
                                    s.attach(t.parameters);
                                    const auto copy_of = [](auto v) { return vec(v.begin(), v.end()); };
                                    for (int k = 0; k < 12; ++k) {
                                        const vec anchor = copy_of(s.anchor()), momentum = copy_of(s.momentum());
                                        const vec owned = copy_of(s.owned());
                                        const auto rounds = s.rounds();
                                        try {
                                            train(s, world.rank(), n, {.steps = 1, .first_step = k});
                                        } catch (const error& e) {
                                            texts[me] = e.what();
                                            failed[me] = k;
                                            CHECK(same_bytes(copy_of(s.anchor()), anchor));
                                            CHECK(same_bytes(copy_of(s.momentum()), momentum));
                                            CHECK(s.rounds() == rounds);
                                            if (rule.delay == 1) { CHECK(same_bytes(copy_of(s.owned()), owned)); }
                                            CHECK_THROWS_AS(static_cast<void>(s.state()), error);
                                            CHECK_THROWS_AS(s.flush(), error);
                                            throw;
                                        }
                                    }
                                },
                                {.timeout = 20s}),
                backend_error);
            for (int g = 0; g < n; ++g) {
                CHECK(failed[std::size_t(g)] == (rule.delay == 1 ? 7 : 5));  // the third round ends with step 5
                CHECK(texts[std::size_t(g)].find("link down") != std::string::npos);
            }
        }
    }
}

TEST_CASE("a replica that diverged is found on all ranks when its mean is due") {
    constexpr int n = 3;
    for (const local_update_rule& rule : rules(2)) {
        CAPTURE(rule.describe());
        std::vector<std::string> texts(n);
        CHECK_THROWS_AS(threads::launch(n,
                                        [&](threads& world) {
                                            toy<float> t;
                                            engine<threads> s(world.duplicate("across"), local<sgd>(self{}), rule);
                                            s.attach(t.parameters);
                                            train(s, world.rank(), n, {.steps = 3});
                                            if (world.rank() == 1) {
                                                s.owned()[450] = std::numeric_limits<float>::quiet_NaN();
                                            }
                                            const vec anchor(s.anchor().begin(), s.anchor().end());
                                            try {
                                                test::blind_steps(s, 3);
                                            } catch (const error& e) {
                                                texts[std::size_t(world.rank())] = e.what();
                                                throw;
                                            }
                                        }),
                        error);
        for (const auto& text : texts) {
            CHECK(text.find("the mean of round 1 is not finite, nothing of it was adopted") != std::string::npos);
        }
    }
}

TEST_CASE("replicas that made different numbers of steps are told so at finish") {
    std::vector<std::string> texts(2);
    CHECK_THROWS_AS(threads::launch(2,
                                    [&](threads& world) {
                                        toy<float> t;
                                        engine<threads> s(world.duplicate("across"), local<sgd>(self{}),
                                                          co2_method{3}.rule());
                                        s.attach(t.parameters);
                                        try {
                                            train(s, world.rank(), 2, {.steps = world.rank() == 0 ? 7 : 10});
                                            s.finish();
                                        } catch (const error& e) {
                                            texts[std::size_t(world.rank())] = e.what();
                                            throw;
                                        }
                                    },
                                    {.timeout = 20s}),
                    mismatch_error);
    CHECK(texts[0].find("number of steps (here 7) at finish; replicas must make the same number") != std::string::npos);
    CHECK(texts[1].find("number of steps (here 10)") != std::string::npos);
}

TEST_CASE("a strategy is destroyed with a mean in flight, by the end of its scope or by an exception") {
    for (int repeat = 0; repeat < 60; ++repeat) {
        const bool throws = repeat % 2 == 1;
        std::string text;
        try {
            threads::launch(3, [&](threads& world) {
                auto t = std::make_unique<toy<float>>();
                engine<threads> s(world.duplicate("across"), local<sgd>(self{}), rules(2)[std::size_t(2 + repeat % 8)]);
                s.attach(t->parameters);
                train(s, world.rank(), 3, {.steps = 1});
                if (throws && world.rank() == repeat % 3) { throw std::runtime_error("training failed"); }
                train(s, world.rank(), 3, {.steps = 1, .first_step = 1});
            });
        } catch (const std::exception& e) { text = e.what(); }
        CHECK((text.find("training failed") != std::string::npos) == throws);
    }
}
