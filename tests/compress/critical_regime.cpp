// critical_regime: the rule at its edges, what is remembered, and the budget it gives.
#include <doctest/doctest.h>  // checks

#include <limits>  // nan
#include <vector>  // norms, options

#include <tutti/compress/critical_regime.hpp>  // critical_regime
#include <tutti/compress/level_choice.hpp>     // choose_levels

using namespace tutti;
using compress::critical_regime;
using options = std::vector<std::size_t>;

namespace {
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
const options low{0, 0, 0};
const options high{2, 3, 4};
}  // namespace

TEST_CASE("a layer is critical until its norm changes by less than eta") {
    critical_regime r(3);
    CHECK(r.update(std::vector<double>{8, 8, 8}, low, high) == high);  // nothing to compare with
    // 50 % down, just under 50 % down, 50 % up
    CHECK(r.update(std::vector<double>{4, 4.01, 12}, low, high) == options{2, 0, 4});
    // unchanged, slightly up, slightly down: against the last norm, not the first
    CHECK(r.update(std::vector<double>{4, 5, 11}, low, high) == low);
    CHECK(r.update(std::vector<double>{100, 0, 11}, low, high) == options{2, 3, 0});
    // the middle one was 0: whatever comes is critical
    CHECK(r.update(std::vector<double>{100, 0, 11}, low, high) == options{0, 3, 0});
    CHECK(r.update(std::vector<double>{100, 1, 11}, low, high) == options{0, 3, 0});
    CHECK(r.update(std::vector<double>{100, 1, 11}, low, high) == low);
}

TEST_CASE("eta") {
    critical_regime strict(1, 0.1);
    critical_regime loose(1, 2.0);
    const options relaxed{0};
    const options careful{1};
    for (critical_regime* r : {&strict, &loose}) {
        static_cast<void>(r->update(std::vector<double>{10}, relaxed, careful));
    }
    CHECK(strict.update(std::vector<double>{12}, relaxed, careful) == careful);
    CHECK(loose.update(std::vector<double>{29}, relaxed, careful) == relaxed);
    CHECK(loose.update(std::vector<double>{87}, relaxed, careful) == careful);
    CHECK(loose.update(std::vector<double>{0}, relaxed, careful) == careful);  // a change by less than 200 %, but to 0
}

TEST_CASE("a norm that is not finite is critical and is forgotten") {
    critical_regime r(3);
    static_cast<void>(r.update(std::vector<double>{8, 8, 8}, low, high));
    CHECK(r.update(std::vector<double>{not_a_number, infinity, 8}, low, high) == options{2, 3, 0});
    CHECK(r.norms()[0] == 8);
    CHECK(r.norms()[1] == 8);
    CHECK(r.update(std::vector<double>{8, 8, 8}, low, high) == low);
}

TEST_CASE("the norms are all of its state") {
    critical_regime a(3);
    static_cast<void>(a.update(std::vector<double>{8, 2, 8}, low, high));
    critical_regime b(3);
    std::copy(a.norms().begin(), a.norms().end(), b.norms().begin());
    for (const std::vector<double>& norms : {std::vector<double>{8, 4, 7}, std::vector<double>{1, 4, 7}}) {
        CHECK(a.update(norms, low, high) == b.update(norms, low, high));
    }
}

TEST_CASE("as a budget: critical layers buy more error for no one") {
    compress::level_table t;
    for (int l = 0; l < 3; ++l) {
        t.add_layer(std::vector<double>{1, 2, 4, 8, 16}, std::vector<double>{16, 8, 4, 2, 1});
    }
    critical_regime r(3);
    const options rank_2{1, 1, 1};
    const options rank_8{3, 3, 3};
    const auto first = choose_levels(t, r.update(std::vector<double>{1, 1, 1}, rank_2, rank_8));
    CHECK(first.budget == 6);
    CHECK(first.uniform_cost == 24);
    const auto later = choose_levels(t, r.update(std::vector<double>{1.1, 1.1, 0.9}, rank_2, rank_8));
    CHECK(later.budget == 24);
    CHECK(later.uniform_cost == 6);
    const auto mixed = choose_levels(t, r.update(std::vector<double>{9, 1.1, 0.9}, rank_2, rank_8));
    CHECK(mixed.budget == 2 + 8 + 8);
    CHECK(mixed.cost <= mixed.uniform_cost);
    CHECK(mixed.error <= mixed.budget);
}

TEST_CASE("arguments that cannot be meant are refused") {
    for (const double eta : {0.0, -0.5, not_a_number, infinity}) {
        CHECK_THROWS_AS(critical_regime(3, eta), usage_error);
    }
    critical_regime r(3);
    const std::vector<double> norms{1, 2, 3};
    const options two{0, 0};
    CHECK_THROWS_WITH_AS(static_cast<void>(r.update(norms, two, high)),
                         "critical_regime: 3 norms, 2 relaxed and 3 careful options for 3 layers", usage_error);
    CHECK_THROWS_AS(static_cast<void>(r.update(norms, low, two)), usage_error);
    CHECK_THROWS_AS(static_cast<void>(r.update(std::vector<double>{1, 2}, low, high)), usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(r.update(std::vector<double>{1, -2, 3}, low, high)),
                         "critical_regime: -2 is not a norm", usage_error);
    CHECK(r.norms()[0] == 0);  // nothing of the refused calls stays
}
