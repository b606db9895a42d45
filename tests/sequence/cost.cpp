// cost, calibration, estimate: thresholds against the inequality they come from and the published table, fits against
// known coefficients, and estimates against rounds walked one by one.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // replace
#include <cmath>      // fabs
#include <limits>     // infinity
#include <random>     // noise
#include <string>     // texts
#include <vector>     // samples

#include <tutti/sequence/calibration.hpp>       // fitted, calibrated
#include <tutti/sequence/calibration_json.hpp>  // json_of
#include <tutti/sequence/cost.hpp>              // thresholds
#include <tutti/sequence/estimate.hpp>          // estimated

#include "sequence/judges.hpp"  // lengths_t

using namespace tutti;
using namespace tutti::test;
using sequence::attention_cost;
using sequence::attention_sample;
using sequence::cluster;
using sequence::h100_forward;
using sequence::transfer_cost;
using sequence::zone;

namespace {
bool near(double a, double b, double relative) { return std::fabs(a - b) <= relative * std::fabs(b); }
}  // namespace

TEST_CASE("thresholds of two models on an H100") {
    struct row {
        int query_heads, kv_heads;
        double bytes, at_300, at_25, at_100;
    };
    for (const row& r : {row{32, 32, 16384, 2280, 27400, 6850}, row{64, 8, 4096, 286, 3430, 857}}) {
        const double bytes = sequence::kv_bytes_per_token(r.kv_heads, 128, 2);
        const double a2 =
            h100_forward.scaled(static_cast<double>(r.query_heads) / sequence::h100_query_heads).quadratic;
        CHECK(bytes == r.bytes);
        CHECK(near(sequence::tokens_that_hide(a2, bytes, 300e9), r.at_300, 5e-3));
        CHECK(near(sequence::tokens_that_hide(a2, bytes, 25e9), r.at_25, 5e-3));
        CHECK(near(sequence::tokens_that_hide(a2, bytes, 100e9), r.at_100, 5e-3));
    }
}

TEST_CASE("a step hides its transfer from the threshold on, whatever the ring") {
    const double a2 = 3e-11;
    const double bytes = 8192;
    const double bandwidth = 50e9;
    const double least = sequence::tokens_that_hide(a2, bytes, bandwidth);
    for (const int size : {2, 3, 8, 64}) {
        for (const double share : {0.5, 0.99, 1.01, 3.0}) {
            const double s = least * share * size;
            CHECK((a2 * s * s / size / size >= bytes * s / size / bandwidth) == (share > 1));
        }
    }
    const transfer_cost transfers{bytes, {0, 2 * bandwidth}, {0, bandwidth}};
    const auto both = sequence::least_tokens_that_hide({a2, 1, 1}, transfers);
    CHECK(both.world == static_cast<std::int64_t>(std::ceil(least)));
    CHECK(both.node == static_cast<std::int64_t>(std::ceil(least / 2)));
    CHECK(both.of(zone::local) == 0);
    CHECK(both.of(zone::node) == both.node);
    CHECK(both.of(zone::world) == both.world);
    CHECK(sequence::least_tokens_that_hide({a2}, {bytes, {}, {}}) == sequence::least_tokens{0, 0});
    // Free transfers are hidden by anything.
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(sequence::tokens_that_hide(0, 0, bandwidth) == 0);
    CHECK(sequence::tokens_that_hide(0, bytes, infinity) == 0);
    CHECK(sequence::tokens_that_hide(0, bytes, bandwidth) == infinity);
    CHECK(sequence::least_tokens_that_hide({0, 1, 1}, {bytes, {}, {}}) == sequence::least_tokens{0, 0});
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::least_tokens_that_hide({0, 1, 1}, transfers)),
                         "cost: attention of 0 s/token^2 hides no transfer of 8192 bytes a token at 100000000000 B/s",
                         usage_error);
}

TEST_CASE("the built-in cost is the fit of the built-in table") {
    const attention_cost fit = sequence::fitted(sequence::h100_forward_samples);
    CHECK(near(fit.quadratic, h100_forward.quadratic, 1e-3));
    CHECK(near(fit.linear, h100_forward.linear, 1e-3));
    CHECK(near(fit.constant, h100_forward.constant, 1e-3));
    CHECK(sequence::worst_relative_error(h100_forward, sequence::h100_forward_samples) <= 0.085);
    CHECK(h100_forward(0) == 0);
    CHECK(near(h100_forward(65536), 206.28664e-3, 0.085));
}

TEST_CASE("a fit finds the coefficients that made the times") {
    for (const attention_cost& truth :
         {attention_cost{5e-11, 6e-8, 2e-5}, attention_cost{5e-11, 0, 2e-5}, attention_cost{1, 0, 0},
          attention_cost{0, 3e-7, 0}, attention_cost{2e-10, 7e-8, 0}, attention_cost{0, 0, 4}}) {
        std::vector<attention_sample> samples;
        for (const std::int64_t s : {100, 300, 1000, 5000, 20000, 100000}) { samples.push_back({s, truth(s)}); }
        const attention_cost found = sequence::fitted(samples);
        CHECK(sequence::worst_relative_error(found, samples) <= 1e-12);
        CHECK(near(found.quadratic, truth.quadratic, 1e-9));
    }
}

TEST_CASE("no fit within the constraints is closer, and none has a negative coefficient") {
    std::mt19937_64 random(5);
    std::uniform_real_distribution<double> unit(0, 1);
    const auto error_of = [](const attention_cost& c, const std::vector<attention_sample>& samples) {
        double sum = 0;
        for (const attention_sample& s : samples) {
            sum += (c(s.tokens) / s.seconds - 1) * (c(s.tokens) / s.seconds - 1);
        }
        return sum;
    };
    int clamped = 0;
    for (int repeat = 0; repeat < 100; ++repeat) {
        std::vector<attention_sample> samples;
        for (const std::int64_t s : {64, 256, 1024, 4096, 16384}) {
            samples.push_back({s, attention_cost{4e-11, 5e-8, 2e-5}(s) * (0.5 + unit(random))});
        }
        const attention_cost fit = sequence::fitted(samples);
        CHECK((fit.quadratic >= 0 && fit.linear >= 0 && fit.constant >= 0));
        clamped += fit.quadratic == 0 || fit.linear == 0 || fit.constant == 0 ? 1 : 0;
        const double least = error_of(fit, samples);
        for (const double step : {0.99, 1.01}) {
            CHECK(error_of({fit.quadratic * step, fit.linear, fit.constant}, samples) >= least);
            CHECK(error_of({fit.quadratic, fit.linear * step, fit.constant}, samples) >= least);
            CHECK(error_of({fit.quadratic, fit.linear, fit.constant * step}, samples) >= least);
        }
        for (const attention_cost& up :
             {attention_cost{1e-14, 0, 0}, attention_cost{0, 1e-11, 0}, attention_cost{0, 0, 1e-8}}) {
            CHECK(error_of({fit.quadratic + up.quadratic, fit.linear + up.linear, fit.constant + up.constant},
                           samples) >= least);
        }
    }
    CHECK(clamped > 0);
}

TEST_CASE("calibration takes the median of the runs that count") {
    std::vector<std::int64_t> called;
    const auto c = sequence::calibrated("made up", std::vector<std::int64_t>{10, 100, 1000}, 4, [&](std::int64_t s) {
        called.push_back(s);
        // The first run of each length is slow; then 1, 2, 3 and 100 times the time.
        const double factors[] = {1000, 3, 1, 100, 2};
        return factors[(called.size() - 1) % 5] * static_cast<double>(s * s);
    });
    CHECK(called.size() == 15);
    for (const attention_sample& s : c.samples) { CHECK(s.seconds == 2.5 * static_cast<double>(s.tokens * s.tokens)); }
    CHECK(near(c.cost.quadratic, 2.5, 1e-12));
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::calibrated("x", called, 0, [](std::int64_t) { return 1.0; })),
                         "calibration: 0 repeats measure nothing", usage_error);
    const std::vector<std::int64_t> two{10, 10, 20};
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::calibrated("x", two, 1, [](std::int64_t) { return 1.0; })),
                         "calibration: 2 lengths; three coefficients need at least 3", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::calibrated("x", two, 1, [](std::int64_t) { return 0.0; })),
                         "calibration: 0 s for 10 tokens is no measurement", usage_error);
}

TEST_CASE("what forward and backward pass on") {
    // Keys and values of 2 heads of 8 in 2 bytes: 64 a token, twice; gradients in 4 bytes.
    const auto t = sequence::training_transfers(2, 8, 2, 4, {1, 2}, {3, 4}, {5, 6});
    CHECK(t.bytes_per_token == 2 * 64 + 128);
    CHECK(t.inside == comm::link{1, 2});
    CHECK(t.between == comm::link{3, 4});
    CHECK(t.step(10) == 56);
}

TEST_CASE("a link is found from the times that it made") {
    for (const comm::link& truth : {comm::link{2e-5, 3e11}, comm::link{0, 5e9}, comm::link{1e-3, 1e8}}) {
        std::vector<sequence::link_sample> samples;
        for (const std::size_t bytes : {1u << 10, 1u << 16, 1u << 20, 1u << 26}) {
            samples.push_back({bytes, truth.latency_seconds + static_cast<double>(bytes) / truth.bytes_per_second});
        }
        const comm::link found = sequence::fitted_link(samples);
        CHECK(std::fabs(found.latency_seconds - truth.latency_seconds) <= 1e-12);
        CHECK(near(found.bytes_per_second, truth.bytes_per_second, 1e-9));
    }
    const auto says = [](std::vector<sequence::link_sample> samples) {
        try {
            (void)sequence::fitted_link(samples);
        } catch (const usage_error& e) { return std::string(e.what()); }
        return std::string("accepted");
    };
    CHECK(says({{1, 1.0}, {2, 0.0}}) == "calibration of a link: 2 in 0 s is no measurement");
    CHECK(says({{0, 1.0}, {2, 1.0}}) == "calibration of a link: 0 in 1 s is no measurement");
    CHECK(says({{2, 1.0}, {2, 1.5}}) ==
          "calibration of a link: measurements of one size do not tell where the line begins");
    CHECK(says({}) == "calibration of a link: measurements of one size do not tell where the line begins");
    CHECK(says({{1, 1.0}, {100, 1.0}}) == "calibration of a link: larger ones take no longer");
}

TEST_CASE("steps of rings are found from the times of rings that they are in") {
    const attention_cost cost{5e-11, 4e-8, 6e-5};
    for (const auto& truth : {sequence::step_cost{9e-8, 8e-5}, sequence::step_cost{0, 2e-4},
                              sequence::step_cost{4e-7, 0}, sequence::step_cost{}}) {
        for (const int ranks : {2, 4}) {
            const auto transfers = sequence::training_transfers(32, 128, 2, 4, {5e-6, 250e9}, {1e-5, 5e9}, truth);
            sequence::calibration c;
            c.cost = cost;
            int called = 0;
            sequence::calibrate_rings(
                c, transfers, ranks, std::vector<std::int64_t>{4096, 16384, 65536}, 2, [&](std::int64_t n) {
                    ++called;
                    std::vector<int> all;
                    for (int r = 0; r < ranks; ++r) { all.push_back(r); }
                    const auto p = sequence::assembled(cluster{1, ranks}, lengths_t{n}, {{0, zone::node, all}});
                    return sequence::estimated(p, cost, transfers).attention;
                });
            CHECK(called == 9);
            CHECK(c.rings.size() == 3);
            CHECK(c.rings[1].tokens == 16384);
            CHECK(c.rings[1].ranks == ranks);
            // The shortest ring waits for its messages.
            CHECK(std::fabs(c.step.linear - truth.linear) <= 1e-12);
            CHECK(std::fabs(c.step.constant - truth.constant) <= 1e-9);
        }
    }
    const auto says = [&](std::vector<sequence::ring_sample> rings) {
        try {
            (void)sequence::fitted_steps(cost, {}, rings);
        } catch (const usage_error& e) { return std::string(e.what()); }
        return std::string("accepted");
    };
    CHECK(says({}) == "calibration: no rings were measured");
    CHECK(says({{10, 1, 1.0}}) == "calibration: 1 s for 10 tokens on a ring of 1 is no measurement");
    CHECK(says({{0, 2, 1.0}}) == "calibration: 1 s for 0 tokens on a ring of 2 is no measurement");
    CHECK(says({{10, 2, -1.0}}) == "calibration: -1 s for 10 tokens on a ring of 2 is no measurement");
    // Rings that are faster than the model has no steps that cost less than nothing.
    CHECK(sequence::fitted_steps({1, 0, 0}, {}, std::vector<sequence::ring_sample>{{10, 2, 20.0}}) ==
          sequence::step_cost{});
}

TEST_CASE("the built-in calibration of training is the fit of its samples") {
    const auto c = sequence::h200_training();
    const attention_cost cost = sequence::fitted(c.samples);
    CHECK(near(cost.quadratic, c.cost.quadratic, 1e-3));
    CHECK(near(cost.linear, c.cost.linear, 1e-3));
    CHECK(near(cost.constant, c.cost.constant, 1e-3));
    CHECK(sequence::worst_relative_error(c.cost, c.samples) <= 0.06);
    const auto step = sequence::fitted_steps(c.cost, c.transfers(32, 128, 2, 4), c.rings);
    CHECK(near(step.linear, c.step.linear, 5e-3));
    CHECK(near(step.constant, c.step.constant, 5e-3));
    // The rings that the steps were fitted to, by the model that has them.
    for (const auto& s : c.rings) {
        const auto ring = sequence::assembled(cluster{1, 2}, lengths_t{s.tokens}, {{0, zone::node, {0, 1}}});
        CHECK(near(sequence::estimated(ring, c.cost, c.transfers(32, 128, 2, 4)).attention, s.seconds, 0.12));
    }
    CHECK(sequence::calibration_from(json_of(c)) == c);
}

TEST_CASE("a calibration comes back from its JSON, bit for bit") {
    const sequence::calibration c{R"(H100, "FlashAttention" \ forward)",
                                  sequence::fitted(sequence::h100_forward_samples),
                                  {sequence::h100_forward_samples.begin(), sequence::h100_forward_samples.end()}};
    const std::string text = json_of(c);
    CHECK(sequence::calibration_from(text) == c);
    CHECK(text.starts_with("{\n  \"format\": \"tutti attention cost 1\",\n"
                           "  \"name\": \"H100, \\\"FlashAttention\\\" \\\\ forward\",\n  \"quadratic\": "));
    CHECK(text.ends_with("[65536, 0.20628664]\n  ]\n}\n"));
    // With links and rings, of which any may be missing.
    sequence::calibration all = c;
    all.inside = comm::link{1.0 / 3e5, 2e11 / 3};
    CHECK(sequence::calibration_from(json_of(all)) == all);
    all.between = comm::link{0, 1e9 / 7};
    all.step = {1e-7 / 3, 1e-4 / 7};
    all.rings = {{4096, 2, 1e-3 / 3}, {8192, 4, 1e-3 / 7}};
    CHECK(sequence::calibration_from(json_of(all)) == all);
    CHECK(json_of(all).find("\n  \"rings\": [\n    [4096, 2, ") != std::string::npos);
    const auto transfers = all.transfers(2, 8, 2, 4);
    CHECK(transfers.inside == *all.inside);
    CHECK(transfers.between == *all.between);
    CHECK(transfers.step == all.step);
    CHECK(transfers.bytes_per_token == 256);
    CHECK(c.transfers(2, 8, 2, 4).inside == comm::link{});
    all.between = comm::link{};
    CHECK_THROWS_WITH_AS(static_cast<void>(json_of(all)), "calibration: a link of 0 s and inf B/s was not measured",
                         usage_error);
    const auto says = [](std::string t) {
        try {
            (void)sequence::calibration_from(t);
        } catch (const usage_error& e) { return std::string(e.what()); }
        return std::string("accepted");
    };
    // Single quotes for double ones.
    const auto with = [&](std::string more, const char* format = "tutti attention cost 1") {
        std::string t = "{'linear' : 0,'name':'a',\n'quadratic':1, 'format':'" + std::string(format) + "'" + more + "}";
        std::replace(t.begin(), t.end(), '\'', '"');
        return says(t);
    };
    const std::string rest = ", 'constant': 0, 'samples': ";
    CHECK(with(rest + "[[1,1e0],[2,4.0], [ 3 , 9]]") == "accepted");
    CHECK(with(rest + "[[1,1],[2,4],[3,9]]", "tutti attention cost 2") ==
          "calibration: 'tutti attention cost 2' is another format");
    CHECK(with(rest + "[[1]]") == "calibration: ',' is missing, in front of ']]}'");
    CHECK(with(rest + "[[1,2,3]]") == "calibration: ']' is missing, in front of ',3]]}'");
    CHECK(with(rest + "[[1.5,2]]") == "calibration: ',' is missing, in front of '.5,2]]}'");
    CHECK(with(rest + "[[1,2],]") == "calibration: '[' is missing, in front of ']}'");
    CHECK(with(rest + "[") == "calibration: '[' is missing, in front of '}'");
    CHECK(with(", 'linear': 0") == "calibration: 'linear' is unknown, or there twice, in front of ': 0}'");
    CHECK(with(", 'speed': 0") == "calibration: 'speed' is unknown, or there twice, in front of ': 0}'");
    CHECK(with(", 'constant': -1") == "calibration: 'constant' is negative, in front of '}'");
    for (const char* const no_number : {"nan", "inf", ".5", "'1'", "+1", "1e999", "true"}) {
        CHECK(with(std::string(", 'constant': ") + no_number).starts_with("calibration: no number, in front of '"));
    }
    const std::string three = rest + "[[1,1],[2,4],[3,9]]";
    CHECK(with(three + ",'inside':[0,1e9],'between': [ 1e-5 , 2 ], 'rings':[[5,2,1]],'step':[0,0]") == "accepted");
    CHECK(with(three + ",'inside':[0,0]") == "calibration: 'inside' has no bandwidth, in front of '}'");
    CHECK(with(three + ",'between':[-1,1]") == "calibration: 'between' is negative, in front of ',1]}'");
    CHECK(with(three + ",'inside':[1]") == "calibration: ',' is missing, in front of ']}'");
    CHECK(with(three + ",'step':[0,0]") == "calibration: steps and rings come together");
    CHECK(with(three + ",'rings':[[5,2,1]]") == "calibration: steps and rings come together");
    CHECK(with(three + ",'rings':[],'step':[0,0]") == "calibration: no rings were measured");
    CHECK(with(three + ",'rings':[[5,1,1]],'step':[0,0]") ==
          "calibration: 1 s for 5 tokens on a ring of 1 is no measurement");
    CHECK(with("") == "calibration: there is no 'constant'");
    CHECK(with(rest + "[[1,1]]") == "calibration: 1 lengths; three coefficients need at least 3");
    CHECK(with(rest + "[[1,1],[2,-1]]") == "calibration: -1 s for 2 tokens is no measurement");
    CHECK(says("") == "calibration: '{' is missing, in front of ''");
    CHECK(says("{}") == "calibration: there is no 'format'");
    CHECK(says("{\"name\": \"a") == "calibration: '\"' is missing, in front of ''");
    CHECK(says("{\"name\": \"a\\n\"}") == "calibration: another escape, in front of 'n\"}'");
    CHECK(says("{\"name\": \"a\n\"}").starts_with("calibration: a string of more than one line"));
    CHECK(says(text + "x") == "calibration: more text than one object, in front of 'x'");
    CHECK_THROWS_WITH_AS(static_cast<void>(json_of(sequence::calibration{"a\nb", {}, {}})),
                         "calibration: 'a\nb' is no name of one line", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(json_of(sequence::calibration{"", {}, {}})),
                         "calibration: '' is no name of one line", usage_error);
}

TEST_CASE("a calibration that its reader would refuse is not written") {
    const auto says = [](auto change) {
        sequence::calibration c = sequence::h200_training();
        change(c);
        try {
            (void)json_of(c);
        } catch (const usage_error& e) { return std::string(e.what()); }
        return std::string("accepted");
    };
    using sequence::calibration;
    CHECK(says([](calibration&) {}) == "accepted");
    CHECK(says([](calibration& c) { c.samples.clear(); }) ==
          "calibration: 0 lengths; three coefficients need at least 3");
    CHECK(says([](calibration& c) { c.samples[1].seconds = 0; }) ==
          "calibration: 0 s for 2048 tokens is no measurement");
    CHECK(says([](calibration& c) { c.cost.quadratic = -1; }) == "calibration: -1 is no coefficient of a cost");
    CHECK(says([](calibration& c) { c.cost.linear = -1; }) == "calibration: -1 is no coefficient of a cost");
    CHECK(says([](calibration& c) { c.cost.constant = std::numeric_limits<double>::infinity(); }) ==
          "calibration: inf is no coefficient of a cost");
    CHECK(says([](calibration& c) { c.step.linear = -2; }) == "calibration: -2 is no coefficient of a cost");
    CHECK(says([](calibration& c) { c.step.constant = -2; }) == "calibration: -2 is no coefficient of a cost");
    CHECK(says([](calibration& c) { c.inside->bytes_per_second = 0; }) ==
          "calibration: a link of 1.342e-05 s and 0 B/s was not measured");
    CHECK(says([](calibration& c) {
              c.between = comm::link{-1, 1};
          }) == "calibration: a link of -1 s and 1 B/s was not measured");
    CHECK(says([](calibration& c) { c.rings.clear(); }) == "calibration: steps and rings come together");
    CHECK(says([](calibration& c) { c.rings[0].ranks = 1; }) ==
          "calibration: 0.00049816 s for 2048 tokens on a ring of 1 is no measurement");
    CHECK(says([](calibration& c) {
              c.rings.clear();
              c.step = {};
          }) == "accepted");
}

namespace {

// One rank's rings of a zone, walked round by round.
double walked(const std::vector<sequence::detail::ring_step>& rings, double latency) {
    int rounds = 0;
    for (const auto& r : rings) { rounds = std::max(rounds, r.size); }
    double seconds = 0;
    for (int t = 0; t < rounds; ++t) {
        double computing = 0;
        double sending = 0;
        for (const auto& r : rings) {
            computing += t < r.size ? r.computing : 0;
            sending += t + 1 < r.size ? r.sending : 0;
        }
        seconds += std::max(computing, t + 1 < rounds ? latency + sending : 0);
    }
    return seconds;
}

}  // namespace

TEST_CASE("rounds of rings of any sizes take what walking through them takes") {
    std::mt19937_64 random(6);
    std::uniform_real_distribution<double> unit(0, 1);
    for (int repeat = 0; repeat < 300; ++repeat) {
        std::vector<sequence::detail::ring_step> rings(random() % 6);
        for (auto& r : rings) { r = {2 + static_cast<int>(random() % 7), unit(random), unit(random)}; }
        const double latency = random() % 2 == 0 ? 0 : unit(random);
        const double expected = walked(rings, latency);
        CHECK(near(sequence::detail::seconds_of_rounds(rings, latency), expected, 1e-12));
    }
}

TEST_CASE("an estimate by hand") {
    // Two nodes of two ranks. A step of the ring over both computes 160^2/16 = 1600 and sends 40 tokens of 100 bytes.
    const auto p = sequence::assembled(
        cluster{2, 2}, lengths_t{160, 20, 30, 0},
        {{0, zone::world, {0, 1, 2, 3}}, {1, zone::node, {0, 1}}, {2, zone::local, {2}}, {3, zone::local, {3}}});
    const auto t = sequence::estimated(p, attention_cost{}, {100, {7, 10}, {3, 1}}, {0.5});
    REQUIRE(t.ranks.size() == 4);
    // Over nodes: 3 rounds of 3 + 4000 and a last of 1600. In the node: a round of 7 + 10 * 100 / 10, and 100.
    CHECK(t.ranks[0].computing == 6400 + 200);
    CHECK(t.ranks[0].waiting == (3 * 4003 + 1600 - 6400) + (107 + 100 - 200));
    CHECK(t.ranks[2].computing == 6400 + 900);
    CHECK(t.ranks[2].waiting == 3 * 4003 + 1600 - 6400);
    CHECK(t.ranks[3].seconds() == 3 * 4003 + 1600);
    CHECK(t.attention == t.ranks[2].seconds());
    CHECK(t.lower_bound == (160 * 160 + 20 * 20 + 30 * 30) / 4.0);
    CHECK(t.ranks[2].tokens == 70);
    CHECK(t.linear == 35);
    CHECK(t.linear_remapped == 0.5 * 53);  // 210 tokens
    // Steps beside: 2 a token and 1, of 4 steps of 40 tokens and of 2 of 10. In the node transfers hide them.
    const auto with_steps = sequence::estimated(p, attention_cost{}, {100, {7, 10}, {3, 1}, {2, 1}});
    CHECK(with_steps.ranks[0].computing == t.ranks[0].computing);
    CHECK(with_steps.ranks[0].steps == 4 * 81 + 2 * 21);
    CHECK(with_steps.ranks[0].waiting == (3 * 4003 + 1681 - 4 * 1681) + (121 + 121 - 2 * 121));
    CHECK(with_steps.ranks[1].seconds() == with_steps.ranks[0].seconds());
    CHECK(with_steps.ranks[2].waiting == 3 * 4003 + 1681 - 4 * 1681);
    CHECK(with_steps.ranks[3].seconds() == 3 * 4003 + 1681);
    CHECK(with_steps.lower_bound == t.lower_bound);
    // Nothing waits where transfers cost nothing.
    for (const auto& r : sequence::estimated(p, attention_cost{}).ranks) { CHECK(r.waiting == 0); }
}

TEST_CASE("costs that are none are refused") {
    const auto p = sequence::assembled(cluster{1, 1}, lengths_t{3, 5}, {{0, zone::local, {0}}, {1, zone::local, {0}}});
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::estimated(p, [](std::int64_t s) { return s > 3 ? -1.0 : 1.0; })),
                         "cost: sequence 1 of 5 tokens costs -1", usage_error);
    CHECK_THROWS_AS(static_cast<void>(sequence::estimated(p, [](std::int64_t) { return HUGE_VAL; })), usage_error);
    auto none = p;
    none.rings.clear();
    CHECK_THROWS_WITH_AS(static_cast<void>(sequence::estimated(none, attention_cost{})),
                         "estimate: 0 rings for 2 sequences; only rings have a time", usage_error);
}
