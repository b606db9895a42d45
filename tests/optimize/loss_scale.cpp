// Tests of optimize/loss_scale: how it moves.
#include <cstring>  // memcpy
#include <limits>   // infinity
#include <string>   // texts
#include <vector>   // values

#include <doctest/doctest.h>

#include <tutti/optimize/loss_scale.hpp>  // under test

namespace {

using tutti::usage_error;
using tutti::optimize::loss_scale;
using tutti::optimize::loss_scale_options;

TEST_CASE("it halves at a skipped step, doubles after an interval of good ones, and stays within its limits") {
    loss_scale s({.initial = 8, .interval = 3, .least = 4, .most = 16, .patience = 3});
    const auto after = [&](std::vector<bool> skipped) {
        for (const bool each : skipped) { s.stepped(each); }
        return s.value();
    };
    CHECK(s.value() == 8);
    CHECK(after({false, false}) == 8);
    CHECK(after({false}) == 16);
    CHECK(after({false, false, false}) == 16);  // the most
    CHECK(after({false, false, true}) == 8);
    CHECK(after({false, false}) == 8);  // counted anew
    CHECK(after({true}) == 4);
    CHECK(after({true, true}) == 4);  // the least
    CHECK(s.skipped() == 4);
    CHECK_THROWS_WITH_AS(s.stepped(true), doctest::Contains("3 steps in a row were not finite at the least scale, 4"),
                         usage_error);
    loss_scale patient({.initial = 8, .patience = 2});
    patient.stepped(true);
    CHECK(patient.value() == 4);
    loss_scale hopeful({.initial = 1, .interval = 1000, .patience = 2});
    hopeful.stepped(true);
    hopeful.stepped(false);
    CHECK_NOTHROW(hopeful.stepped(true));
}

TEST_CASE("with hysteresis a few skipped steps are forgiven, until it grows") {
    loss_scale s({.initial = 8, .interval = 2, .hysteresis = 2});
    s.stepped(true);
    CHECK(s.value() == 8);
    s.stepped(false);
    s.stepped(true);
    CHECK(s.value() == 4);
    s.stepped(true);
    CHECK(s.value() == 2);  // no more forgiveness
    s.stepped(false);
    s.stepped(false);
    CHECK(s.value() == 4);
    s.stepped(true);
    CHECK(s.value() == 4);
}

TEST_CASE("what makes no sense is refused") {
    const auto text = [](loss_scale_options o) -> std::string {
        try {
            loss_scale s(o);
        } catch (const usage_error& e) { return e.what(); }
        return {};
    };
    CHECK(text({}).empty());
    CHECK(text({.initial = 3}) == "loss_scale: initial is 3, which is not a power of two");
    CHECK(text({.initial = -2}) == "loss_scale: initial is -2, which is not a power of two");
    CHECK(text({.growth = 1.5}) == "loss_scale: growth is 1.5, which is not a power of two");
    CHECK(text({.backoff = 0.3}) == "loss_scale: backoff is 0.3, which is not a power of two");
    CHECK(text({.least = 0}) == "loss_scale: least is 0, which is not a power of two");
    CHECK(text({.most = std::numeric_limits<double>::infinity()}) ==
          "loss_scale: most is inf, which is not a power of two");
    CHECK(text({.growth = 0.5}) == "loss_scale: grows by 0.5 and backs off by 0.5");
    CHECK(text({.backoff = 1}) == "loss_scale: grows by 2 and backs off by 1");
    CHECK(text({.initial = 1, .least = 2}) == "loss_scale: initial 1 is not between 2 and 16777216");
    CHECK(text({.initial = 4, .most = 2}) == "loss_scale: initial 4 is not between 1 and 2");
    CHECK(text({.interval = 0}) == "loss_scale: interval, hysteresis and patience are at least 1");
}

TEST_CASE("a resume goes on where it was") {
    const loss_scale_options how{.initial = 8, .interval = 3, .hysteresis = 2};
    const std::vector<bool> steps{false, true, false, false, true, true, false, false, false, true};
    for (std::size_t cut = 0; cut < steps.size(); ++cut) {
        CAPTURE(cut);
        loss_scale whole(how), first(how), second(how);
        for (std::size_t i = 0; i < steps.size(); ++i) {
            whole.stepped(steps[i]);
            if (i < cut) { first.stepped(steps[i]); }
        }
        const auto from = first.entries(), to = second.entries();
        for (std::size_t e = 0; e < from.size(); ++e) {
            CHECK(from[e].name == to[e].name);
            std::memcpy(to[e].data.data(), from[e].data.data(), from[e].data.size());
        }
        for (std::size_t i = cut; i < steps.size(); ++i) { second.stepped(steps[i]); }
        CHECK(second.value() == whole.value());
        CHECK(second.skipped() == whole.skipped());
    }
}

TEST_CASE("a job that is restarted again and again still hears that the scale is not why its steps are skipped") {
    const loss_scale_options how{.initial = 1, .patience = 3};
    loss_scale first(how), second(how);
    first.stepped(true);
    first.stepped(true);
    const auto from = first.entries(), to = second.entries();
    for (std::size_t e = 0; e < from.size(); ++e) {
        std::memcpy(to[e].data.data(), from[e].data.data(), from[e].data.size());
    }
    CHECK_THROWS_AS(second.stepped(true), usage_error);
}

}  // namespace
