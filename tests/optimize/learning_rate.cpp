// Learning-rate schedules against a table computed by hand and the shape they promise.
#include <doctest/doctest.h>  // checks

#include <limits>  // nan

#include <tutti/optimize/learning_rate.hpp>  // learning_rate

using namespace tutti;
using optimize::learning_rate;

TEST_CASE("constant") {
    const auto rate = learning_rate::constant(0.25);
    CHECK(rate(0) == 0.25);
    CHECK(rate(1'000'000'000'000) == 0.25);
    CHECK(learning_rate::constant(0)(5) == 0);
}

TEST_CASE("cosine: nanoGPT's rule at its public settings") {
    // peak 1e-3, minimum 1e-4, warm-up 100, decay until 2000: values of the rule written out in a calculator
    const auto rate = learning_rate::cosine({.peak = 1e-3, .minimum = 1e-4, .warmup = 100, .end = 2000});
    CHECK(rate(0) == doctest::Approx(1e-3 / 101).epsilon(1e-14));
    CHECK(rate(49) == doctest::Approx(50e-3 / 101).epsilon(1e-14));
    CHECK(rate(99) == doctest::Approx(100e-3 / 101).epsilon(1e-14));
    CHECK(rate(100) == doctest::Approx(1e-3).epsilon(1e-14));
    CHECK(rate(575) == doctest::Approx(8.681980515339464e-4).epsilon(1e-13));   // a quarter: (1 + cos 45 deg) / 2
    CHECK(rate(1050) == doctest::Approx(5.5e-4).epsilon(1e-13));                // half way
    CHECK(rate(1525) == doctest::Approx(2.318019484660536e-4).epsilon(1e-13));  // three quarters
    CHECK(rate(2000) == doctest::Approx(1e-4).epsilon(1e-14));
    CHECK(rate(2001) == 1e-4);
    CHECK(rate(~std::uint64_t{0}) == 1e-4);
}

TEST_CASE("linear") {
    const auto rate = learning_rate::linear({.peak = 1, .minimum = 0.2, .warmup = 4, .end = 12});
    CHECK(rate(0) == doctest::Approx(0.2));
    CHECK(rate(3) == doctest::Approx(0.8));
    CHECK(rate(4) == 1);
    CHECK(rate(6) == doctest::Approx(0.8));
    CHECK(rate(8) == doctest::Approx(0.6));
    CHECK(rate(12) == 0.2);
    CHECK(rate(100) == 0.2);
}

TEST_CASE("schedules rise through the warm-up, fall to the end, and stay") {
    for (const auto& rate : {learning_rate::linear({.peak = 1, .minimum = 0.1, .warmup = 30, .end = 200}),
                             learning_rate::cosine({.peak = 1, .minimum = 0.1, .warmup = 30, .end = 200})}) {
        for (std::uint64_t s = 0; s < 250; ++s) {
            if (s < 30) { CHECK(rate(s) < rate(s + 1)); }
            if (s >= 30 && s < 200) { CHECK(rate(s) > rate(s + 1)); }
            if (s >= 200) { CHECK(rate(s) == 0.1); }
            CHECK(rate(s) > 0);
            CHECK(rate(s) <= 1);
        }
    }
}

TEST_CASE("no warm-up, no decay") {
    const auto rate = learning_rate::cosine({.peak = 1, .minimum = 0.5, .warmup = 0, .end = 0});
    CHECK(rate(0) == 0.5);
    const auto warm_up_only = learning_rate::linear({.peak = 1, .minimum = 1, .warmup = 2, .end = 2});
    CHECK(warm_up_only(1) == doctest::Approx(2.0 / 3));
    CHECK(warm_up_only(2) == 1);
}

TEST_CASE("values that make no sense are refused") {
    const double bad[] = {-1e-9, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
    for (const double b : bad) {
        CHECK_THROWS_AS(static_cast<void>(learning_rate::constant(b)), usage_error);
        CHECK_THROWS_AS(static_cast<void>(learning_rate::cosine({.peak = b, .end = 10})), usage_error);
        CHECK_THROWS_AS(static_cast<void>(learning_rate::linear({.peak = 1, .minimum = b, .end = 10})), usage_error);
    }
    CHECK_THROWS_AS(static_cast<void>(learning_rate::linear({.peak = 1, .minimum = 1.1, .end = 10})), usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(learning_rate::cosine({.peak = 1, .warmup = 11, .end = 10})),
                         "learning_rate: warm-up of 11 steps ends behind step 10, the end of the decay", usage_error);
}
