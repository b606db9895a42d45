// calibration: attention timed on the machine at hand, the cost fitted to it, and both as a text that can be kept.
// Needs sequence/cost. The caller says how attention of a length is timed; nothing is run here by itself.
#pragma once

#include <algorithm>    // sort, max
#include <array>        // columns
#include <charconv>     // numbers in texts
#include <cmath>        // fabs, isfinite, sqrt
#include <concepts>     // what measures
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <limits>       // infinity
#include <span>         // samples
#include <string>       // texts
#include <string_view>  // lines
#include <utility>      // move
#include <vector>       // samples

#include <tutti/core/error.hpp>     // usage_error
#include <tutti/core/text.hpp>      // formatted
#include <tutti/sequence/cost.hpp>  // attention_cost, attention_sample

namespace tutti::sequence {

/// The largest |cost / time - 1| over the samples.
[[nodiscard]] inline double worst_relative_error(const attention_cost& cost,
                                                 std::span<const attention_sample> samples) {
    double worst = 0;
    for (const attention_sample& s : samples) { worst = std::max(worst, std::fabs(cost(s.tokens) / s.seconds - 1)); }
    return worst;
}

namespace detail {
inline void expect_samples(std::span<const attention_sample> samples) {
    std::vector<std::int64_t> lengths;
    for (const attention_sample& s : samples) {
        if (s.tokens < 1 || !std::isfinite(s.seconds) || s.seconds <= 0) {
            throw usage_error(formatted("calibration: {} s for {} tokens is no measurement", s.seconds, s.tokens));
        }
        lengths.push_back(s.tokens);
    }
    std::sort(lengths.begin(), lengths.end());
    const auto distinct = std::unique(lengths.begin(), lengths.end()) - lengths.begin();
    if (distinct < 3) {
        throw usage_error(formatted("calibration: {} lengths; three coefficients need at least 3", distinct));
    }
}

// Least squares of sum over `used` columns = 1, by orthogonalization; 0 for columns that are not used.
struct least_squares {
    std::array<double, 3> solution{};
    double residual = 0;
};
[[nodiscard]] inline least_squares solve_least_squares(std::array<std::vector<double>, 3> columns, unsigned used) {
    std::vector<double> left(columns[0].size(), 1.0);
    std::array<std::array<double, 3>, 3> upper{};
    std::array<double, 3> right{};
    const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
        double sum = 0;
        for (std::size_t i = 0; i < a.size(); ++i) { sum += a[i] * b[i]; }
        return sum;
    };
    const auto subtract = [](std::vector<double>& from, double factor, const std::vector<double>& what) {
        for (std::size_t i = 0; i < from.size(); ++i) { from[i] -= factor * what[i]; }
    };
    for (std::size_t c = 0; c < 3; ++c) {
        if ((used >> c & 1u) == 0) { continue; }
        upper[c][c] = std::sqrt(dot(columns[c], columns[c]));
        for (double& v : columns[c]) { v /= upper[c][c]; }
        for (std::size_t d = c + 1; d < 3; ++d) {
            upper[c][d] = dot(columns[c], columns[d]);
            subtract(columns[d], upper[c][d], columns[c]);
        }
        right[c] = dot(columns[c], left);
        subtract(left, right[c], columns[c]);
    }
    least_squares result;
    for (std::size_t c = 3; c-- > 0;) {
        if ((used >> c & 1u) == 0) { continue; }
        double value = right[c];
        for (std::size_t d = c + 1; d < 3; ++d) { value -= upper[c][d] * result.solution[d]; }
        result.solution[c] = value / upper[c][c];
    }
    result.residual = dot(left, left);
    return result;
}
}  // namespace detail

/// The cost that comes closest to the samples: least sum of (cost / time - 1)^2, so that short sequences count as much
/// as long ones, with no coefficient below 0.
///
/// Determinism  of the samples alone.
/// Cost         7 small least-squares problems: every choice of coefficients that may be other than 0 is tried.
/// Errors       usage_error: fewer than 3 lengths, or a time that is not positive and finite.
[[nodiscard]] inline attention_cost fitted(std::span<const attention_sample> samples) {
    detail::expect_samples(samples);
    double longest = 0;
    for (const attention_sample& s : samples) { longest = std::max(longest, static_cast<double>(s.tokens)); }
    std::array<std::vector<double>, 3> columns;
    for (const attention_sample& s : samples) {
        const double share = static_cast<double>(s.tokens) / longest;
        columns[0].push_back(share * share / s.seconds);
        columns[1].push_back(share / s.seconds);
        columns[2].push_back(1 / s.seconds);
    }
    detail::least_squares best;
    best.residual = std::numeric_limits<double>::infinity();
    for (unsigned used = 1; used < 8; ++used) {
        const auto found = detail::solve_least_squares(columns, used);
        bool fits = found.residual < best.residual;
        for (const double coefficient : found.solution) { fits = fits && coefficient >= 0; }
        if (fits) { best = found; }
    }
    return {best.solution[0] / (longest * longest), best.solution[1] / longest, best.solution[2]};
}

/// A machine's attention: what was measured, and the cost fitted to it.
struct calibration {
    std::string name{};  ///< of machine and kernel, one line
    attention_cost cost{};
    std::vector<attention_sample> samples{};
    friend bool operator==(const calibration&, const calibration&) = default;
};

/// Times attention at the given lengths and fits the cost.
///
/// Semantics  seconds_of(tokens) runs attention once and returns what a sequence took; it is called once without being
///            counted, then `repeats` times, and the median counts. Where a call holds many sequences, as in training,
///            divide by their number: a launch then weighs as little as it will.
/// Errors     usage_error: as of `fitted`, or no repeats. What seconds_of throws passes through.
template <std::invocable<std::int64_t> Measure>
[[nodiscard]] calibration calibrated(std::string name, std::span<const std::int64_t> lengths, int repeats,
                                     Measure seconds_of) {
    if (repeats < 1) { throw usage_error(formatted("calibration: {} repeats measure nothing", repeats)); }
    calibration c{std::move(name), {}, {}};
    for (const std::int64_t tokens : lengths) {
        (void)seconds_of(tokens);
        std::vector<double> times;
        for (int i = 0; i < repeats; ++i) { times.push_back(static_cast<double>(seconds_of(tokens))); }
        std::sort(times.begin(), times.end());
        const std::size_t half = times.size() / 2;
        c.samples.push_back({tokens, times.size() % 2 != 0 ? times[half] : (times[half - 1] + times[half]) / 2});
    }
    c.cost = fitted(c.samples);
    return c;
}

/// A calibration as lines of a word and its numbers; numbers are as long as it takes to read the same ones back.
/// Errors  usage_error when the name is empty or has more than one line.
[[nodiscard]] inline std::string text_of(const calibration& c) {
    if (c.name.empty() || c.name.find('\n') != std::string::npos) {
        throw usage_error(formatted("calibration: '{}' is no name of one line", c.name));
    }
    std::string text = formatted("tutti attention cost 1\nname {}\nquadratic {}\nlinear {}\nconstant {}\n", c.name,
                                 c.cost.quadratic, c.cost.linear, c.cost.constant);
    for (const attention_sample& s : c.samples) { text += formatted("sample {} {}\n", s.tokens, s.seconds); }
    return text;
}

namespace detail {
// Takes the first word, up to a blank, off a line.
[[nodiscard]] inline std::string_view take_word(std::string_view& line) noexcept {
    const std::string_view word = line.substr(0, line.find(' '));
    line.remove_prefix(std::min(line.size(), word.size() + 1));
    return word;
}
template <class Number> [[nodiscard]] bool read_number(std::string_view word, Number& value) noexcept {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    return error == std::errc() && end == word.data() + word.size() && !word.empty();
}
}  // namespace detail

/// Reads what text_of wrote; lines may come in any order behind the first.
/// Errors  usage_error that names the line, or what is missing.
[[nodiscard]] inline calibration calibration_from(std::string_view text) {
    calibration c;
    const std::array<std::string_view, 3> names{"quadratic", "linear", "constant"};
    std::array<double*, 3> coefficients{&c.cost.quadratic, &c.cost.linear, &c.cost.constant};
    std::array<bool, 3> read{};
    for (int number = 1; !text.empty(); ++number) {
        std::string_view line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(text.size(), line.size() + 1));
        const std::string whole(line);
        bool good = number != 1 || line == "tutti attention cost 1";
        if (number != 1 && !line.empty()) {
            const std::string_view word = detail::take_word(line);
            const auto known = static_cast<std::size_t>(std::find(names.begin(), names.end(), word) - names.begin());
            if (word == "name") {
                good = c.name.empty() && !line.empty();
                c.name = line;
            } else if (word == "sample") {
                attention_sample s;
                good = detail::read_number(detail::take_word(line), s.tokens) && detail::read_number(line, s.seconds);
                c.samples.push_back(s);
            } else if (known < names.size()) {
                good = !read[known] && detail::read_number(line, *coefficients[known]) &&
                       std::isfinite(*coefficients[known]) && *coefficients[known] >= 0;
                read[known] = true;
            } else {
                good = false;
            }
        }
        if (!good) { throw usage_error(formatted("calibration: line {} makes no sense: '{}'", number, whole)); }
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (!read[i]) { throw usage_error(formatted("calibration: no line says '{}'", names[i])); }
    }
    if (c.name.empty()) { throw usage_error("calibration: no line says 'name'"); }
    detail::expect_samples(c.samples);
    return c;
}

}  // namespace tutti::sequence
