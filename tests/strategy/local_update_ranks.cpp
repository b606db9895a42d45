// Local-update strategies over several ranks: equal to a sequential reference, bit by bit, whatever the timing.
#include <doctest/doctest.h>  // checks

#include <string>   // names
#include <utility>  // pairs
#include <vector>   // trajectories

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
        {"co2, gradients",
         co2_method{.period = tau, .rate = 0.9, .clip = 0.5, .units = outer_units::gradients}.rule()},
        {"diloco", diloco_method{tau}.rule()},
        {"diloco, mixing", diloco_method{.period = tau, .own_weight = 0.3}.rule()},
        {"delayed diloco", delayed_diloco_method{.period = tau, .momentum = 0.5}.rule()},
        {"delayed diloco, gap",
         delayed_diloco_method{.period = tau, .momentum = 0.5, .own_weight = 0.25, .gap = scalar_gap{}}.rule()},
        {"eager diloco", eager_diloco_method{.period = tau, .momentum = 0.5}.rule()},
        {"cocod", co_co_d_method{tau}.rule()},
        {"overlap", overlap_local_sgd_method{tau}.rule()},
    };
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
    for (const int n : {1, 2, 3, 4}) {
        for (const std::size_t tau : {1u, 3u, 8u}) {
            for (const int rest : {0, 2}) {
                for (const named& m : methods(tau)) {
                    CAPTURE(m.name);
                    CAPTURE(n);
                    CAPTURE(tau);
                    const recipe r{.steps = static_cast<int>(4 * tau) + (tau > 2 ? rest : 0), .learning_rate = 0.2};
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
