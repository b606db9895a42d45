// Tests of compress/level_errors: against every level compressed by itself, and against arithmetic by other means.
#include <algorithm>    // sort
#include <cmath>        // sqrt
#include <cstddef>      // size_t
#include <cstdint>      // bits
#include <limits>       // NaN, infinity
#include <span>         // levels
#include <string>       // texts
#include <string_view>  // names
#include <utility>      // swap
#include <vector>       // values

#include <doctest/doctest.h>  // test cases

#include <tutti/compress/level_errors.hpp>  // under test

#include "compress/level_measures.hpp"  // gradients, tensors, what is lost
#include "support/oracle.hpp"           // same_bytes

namespace {

using namespace tutti;
using namespace tutti::test;
using compress::draw_key;
using compress::power_sgd;
using compress::quantize;
using compress::segment;
using compress::top_k;

template <class X, class T>
std::vector<double> measured(const X& x, const std::vector<segment>& all, const std::vector<int>& levels,
                             const std::vector<T>& in, draw_key key = {1, 2, 3}) {
    std::vector<double> out(all.size() * compress::error_row(levels), -1);
    compress::squared_errors(host_queue(), x, all, levels, view<const T>(in), view<double>(out), key);
    return out;
}

/// Squared errors of encoding and decoding, the mean over `draws` keys.
template <class X, class T>
double lost_by(const X& x, segment s, int level, const std::vector<T>& in, std::uint32_t draws = 1) {
    s.level = level;
    const std::vector<segment> one{s};
    double sum = 0;
    for (std::uint32_t d = 0; d < draws; ++d) {
        buffer<std::byte> wire(host_queue(), x.wire_bytes(s));
        std::vector<float> out(in.size());
        x.encode(host_queue(), one, view<const T>(in), view<float>(), wire.view(), draw_key{7, d, 0});
        x.decode(host_queue(), one, view<const std::byte>(wire.view()), view<float>(out), 1.0f);
        for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
            const double e = double{static_cast<float>(in[i])} - double{out[i]};
            sum += e * e / draws;
        }
    }
    return sum;
}

TEST_CASE_TEMPLATE("top_k: what encoding loses, at every level", T, float, bfloat16, float16) {
    const auto all = three_tensors();
    const auto in = heavy_tailed<T>(elements_of(all));
    const std::vector<int> levels{1, 10, 100, 101, 1000, 5000, 9999, 10000};
    const auto rows = measured(top_k(), all, levels, in);
    for (std::size_t t = 0; t < all.size(); ++t) {
        for (std::size_t l = 0; l < levels.size(); ++l) {
            CAPTURE(t);
            CAPTURE(levels[l]);
            const double lost = lost_by(top_k(), all[t], levels[l], in);
            CHECK(rows[t * 9 + l + 1] == doctest::Approx(lost).epsilon(1e-12));
        }
        CHECK(rows[t * 9] == doctest::Approx(squares(in, all[t])).epsilon(1e-12));
        CHECK(rows[t * 9 + 8] == 0);  // all are kept
    }
}

TEST_CASE_TEMPLATE("quantize: the mean over draws, and to the nearest exactly", T, float, bfloat16) {
    const auto all = three_tensors();
    const auto in = heavy_tailed<T>(elements_of(all));
    const std::vector<int> levels{1, 2, 3, 4, 8};
    const quantize by_chance(64), nearest(64, compress::rounding::nearest);
    const auto rows = measured(by_chance, all, levels, in);
    const auto nearest_rows = measured(nearest, all, levels, in);
    for (std::size_t t = 0; t < all.size(); ++t) {
        for (std::size_t l = 0; l < levels.size(); ++l) {
            CAPTURE(t);
            CAPTURE(levels[l]);
            const double mean = lost_by(by_chance, all[t], levels[l], in, 200);
            CHECK(rows[t * 6 + l + 1] == doctest::Approx(mean).epsilon(0.02));
            const double exact = lost_by(nearest, all[t], levels[l], in);
            CHECK(nearest_rows[t * 6 + l + 1] == doctest::Approx(exact).epsilon(1e-4));
        }
        CHECK(rows[t * 6] == doctest::Approx(squares(in, all[t])).epsilon(1e-12));
    }
}

TEST_CASE("qsgd: a grid around zero, by its own norm") {
    const auto all = three_tensors();
    const auto in = heavy_tailed<float>(elements_of(all));
    const std::vector<int> levels{2, 4, 8};
    const auto rows = measured(compress::qsgd<compress::norm::l2>(64), all, levels, in);
    for (std::size_t l = 0; l < levels.size(); ++l) {
        const double mean = lost_by(compress::qsgd<compress::norm::l2>(64), all[0], levels[l], in, 200);
        CHECK(rows[l + 1] == doctest::Approx(mean).epsilon(0.02));
    }
}

TEST_CASE("power_sgd: the prefixes of one iteration are the iterations of all ranks") {
    const auto all = three_tensors();
    const auto in = heavy_tailed<float>(elements_of(all));
    const std::vector<int> levels{1, 2, 3, 5, 8, 64};
    const draw_key key{5, 6, 0};
    const auto rows = measured(power_sgd(), all, levels, in, key);
    for (std::size_t t = 0; t < all.size(); ++t) {
        const double norm = squares(in, all[t]);
        CHECK(rows[t * 7] == doctest::Approx(norm).epsilon(1e-12));
        for (std::size_t l = 0; l < levels.size(); ++l) {
            CAPTURE(t);
            CAPTURE(levels[l]);
            // Steps of the compressor itself at that rank, from the same draws, and what it decodes.
            segment s = all[t];
            s.level = levels[l];
            const std::vector<segment> one{s};
            const power_sgd x;
            auto state = x.make_state(host_queue(), one);
            std::vector<float> wire(std::max(x.wire_count(s, 0), x.wire_count(s, 1))), out(in.size());
            for (int step = 0; step < compress::power_iterations; ++step) {
                for (int round = 0; round < 2; ++round) {
                    const view<float> own = view<float>(wire).sub(0, x.wire_count(s, round));
                    x.contribute(host_queue(), one, state, round, view<const float>(in), {}, own, key);
                    x.absorb(host_queue(), one, state, round, own, 1);
                }
            }
            x.finish(host_queue(), one, state, view<const float>(in), {}, view<float>(out));
            double lost = 0;
            for (std::size_t i = s.offset; i < s.offset + s.size(); ++i) {
                lost += (double{in[i]} - double{out[i]}) * (double{in[i]} - double{out[i]});
            }
            CHECK(std::abs(rows[t * 7 + l + 1] - lost) <= 2e-6 * norm);
        }
        CHECK(rows[t * 7 + 6] <= 1e-6 * norm);  // 64 columns are more than there are
    }
}

TEST_CASE("power_sgd: close to the best approximation where singular values fall") {
    const segment s{0, 0, 0, 0, 40, 30};
    std::vector<double> singular;
    for (int i = 0; i < 30; ++i) { singular.push_back(std::pow(0.6, i)); }
    const std::vector<float> in = with_singular_values(s.rows, s.cols, singular);
    const std::vector<int> levels{1, 2, 4, 8};
    const auto rows = measured(power_sgd(), {s}, levels, in);
    for (std::size_t l = 0; l < levels.size(); ++l) {
        double best = 0;
        for (std::size_t i = static_cast<std::size_t>(levels[l]); i < singular.size(); ++i) {
            best += singular[i] * singular[i];
        }
        CAPTURE(levels[l]);
        CHECK(rows[l + 1] >= best * (1 - 1e-4) - 1e-6);
        CHECK(rows[l + 1] <= best * 1.05 + 1e-6);
    }
}

TEST_CASE("errors fall as levels rise, whatever the scheme; segments do not see each other") {
    const auto all = three_tensors();
    const auto in = heavy_tailed<float>(elements_of(all));
    const auto check = [&](const auto& x, const std::vector<int>& levels) {
        const auto rows = measured(x, all, levels, in);
        const std::size_t width = levels.size() + 1;
        for (std::size_t t = 0; t < all.size(); ++t) {
            for (std::size_t l = 2; l < width; ++l) { CHECK(rows[t * width + l] <= rows[t * width + l - 1]); }
            const auto alone = measured(x, {all[t]}, levels, in);
            CHECK(std::equal(alone.begin(), alone.end(), rows.begin() + static_cast<std::ptrdiff_t>(t * width)));
        }
    };
    check(top_k(), {10, 20, 500, 9000});
    check(quantize(), {1, 2, 3, 4, 5, 6, 7, 8});
    check(power_sgd(), {1, 3, 4, 9});
}

TEST_CASE("what is not finite makes the errors of its segment NaN, and of no other") {
    const auto all = three_tensors();
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        auto in = heavy_tailed<float>(elements_of(all));
        in[all[1].offset + 5] = bad;
        const auto check = [&](const auto& x, const std::vector<int>& levels) {
            const auto rows = measured(x, all, levels, in);
            const std::size_t width = levels.size() + 1;
            for (std::size_t l = 1; l < width; ++l) {
                CHECK(std::isfinite(rows[l]));
                CHECK(std::isnan(rows[width + l]));
                CHECK(std::isfinite(rows[2 * width + l]));
            }
        };
        check(top_k(), {10, 1000});
        check(quantize(), {2, 4});
        check(power_sgd(), {1, 4});
    }
}

TEST_CASE("zeros lose nothing; tensors without elements have rows of zeros") {
    const std::vector<segment> all{{0, 0, 0, 0, 6, 5}, {1, 0, 30, 0, 0, 7}};
    const std::vector<float> in(30, 0.0f);
    CHECK(measured(top_k(), all, {100, 1000}, in) == std::vector<double>(6, 0.0));
    CHECK(measured(quantize(), all, {2, 4}, in) == std::vector<double>(6, 0.0));
    CHECK(measured(power_sgd(), all, {1, 2}, in) == std::vector<double>(6, 0.0));
}

TEST_CASE("what cannot be measured is refused before anything is written") {
    const std::vector<segment> one{{3, 0, 0, 0, 4, 5}};
    const std::vector<float> in(20, 1.0f);
    const auto text = [&](const auto& x, const std::vector<int>& levels, std::size_t size) -> std::string {
        std::vector<double> out(size, -1);
        try {
            compress::squared_errors(host_queue(), x, one, levels, view<const float>(in), view<double>(out));
        } catch (const usage_error& e) {
            CHECK(out == std::vector<double>(size, -1));
            return e.what();
        }
        return {};
    };
    CHECK(text(top_k(), {1, 2}, 2) == "squared_errors: out has 2 elements instead of 3");
    CHECK(text(top_k(), {}, 1) == "squared_errors: 0 levels, not 1 to 256");
    CHECK(text(quantize(), {3, 3}, 3) == "squared_errors: level 3 comes after 3; levels must ascend");
    CHECK(text(quantize(), {4, 9}, 3).find("bits are 1 to 8") != std::string::npos);
    CHECK(text(top_k(), {0, 9}, 3).find("kept elements in 10,000 are 1 to 10000") != std::string::npos);
    CHECK(text(power_sgd(), {0, 9}, 3) == "squared_errors: level 0 of power_sgd, expected ranks");
}

}  // namespace
