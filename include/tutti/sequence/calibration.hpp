// calibration: attention timed on the machine at hand, the cost fitted to it, and both as JSON that can be kept.
// Needs sequence/cost, and no JSON library. The caller says how attention of a length is timed; nothing is run here by
// itself.
#pragma once

#include <algorithm>     // sort, max
#include <array>         // columns
#include <charconv>      // numbers in texts
#include <cmath>         // fabs, isfinite, sqrt
#include <concepts>      // what measures
#include <cstddef>       // size_t
#include <cstdint>       // tokens
#include <limits>        // infinity
#include <span>          // samples
#include <string>        // texts
#include <string_view>   // parts of them
#include <system_error>  // errc
#include <utility>       // move
#include <vector>        // samples

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

/// A calibration as a JSON object; numbers are as long as it takes to read the same ones back.
/// Errors  usage_error when the name is empty or has control characters, such as another line.
[[nodiscard]] inline std::string json_of(const calibration& c) {
    std::string name;
    bool printable = !c.name.empty();
    for (const char letter : c.name) {
        if (letter == '"' || letter == '\\') { name += '\\'; }
        name += letter;
        printable = printable && (static_cast<unsigned char>(letter) >= 0x20 && letter != 0x7f);
    }
    if (!printable) { throw usage_error(formatted("calibration: '{}' is no name of one line", c.name)); }
    std::string text =
        formatted("{{\n  \"format\": \"tutti attention cost 1\",\n  \"name\": \"{}\",\n  \"quadratic\": {},\n"
                  "  \"linear\": {},\n  \"constant\": {},\n  \"samples\": [",
                  name, c.cost.quadratic, c.cost.linear, c.cost.constant);
    for (std::size_t i = 0; i < c.samples.size(); ++i) {
        text += formatted("{}\n    [{}, {}]", i == 0 ? "" : ",", c.samples[i].tokens, c.samples[i].seconds);
    }
    return text + "\n  ]\n}\n";
}

namespace detail {
/// Takes a JSON text apart, of which it knows what json_of writes: objects, lists, strings with two escapes, numbers.
class calibration_reader {
    std::string_view text_;
    std::size_t at_ = 0;

    void skip_blanks() noexcept { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

public:
    explicit calibration_reader(std::string_view text) noexcept : text_(text) {}

    [[noreturn]] void refuse(std::string_view why) const {
        throw usage_error(formatted("calibration: {}, in front of '{}'", why, text_.substr(at_, 20)));
    }
    [[nodiscard]] bool take(char c) noexcept {
        skip_blanks();
        const bool there = at_ < text_.size() && text_[at_] == c;
        at_ += there ? 1 : 0;
        return there;
    }
    void expect(char c) {
        if (!take(c)) { refuse(formatted("'{}' is missing", c)); }
    }
    [[nodiscard]] std::string string() {
        expect('"');
        std::string value;
        for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
            if (text_[at_] == '\\') {
                ++at_;
                if (at_ == text_.size() || (text_[at_] != '"' && text_[at_] != '\\')) { refuse("another escape"); }
            }
            if (static_cast<unsigned char>(text_[at_]) < 0x20) { refuse("a string of more than one line"); }
            value += text_[at_];
        }
        expect('"');
        return value;
    }
    template <class Number> [[nodiscard]] Number number() {
        skip_blanks();
        Number value{};
        const char* const begin = text_.data() + at_;
        const bool starts = at_ < text_.size() && (text_[at_] == '-' || (text_[at_] >= '0' && text_[at_] <= '9'));
        const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
        if (!starts || error != std::errc() || !std::isfinite(static_cast<double>(value))) { refuse("no number"); }
        at_ += static_cast<std::size_t>(end - begin);
        return value;
    }
    /// each() for every element, or key with its value, between the brackets.
    template <class Each> void list(char open, char close, Each each) {
        expect(open);
        if (take(close)) { return; }
        do { each(); } while (take(','));
        expect(close);
    }
    void end() {
        skip_blanks();
        if (at_ != text_.size()) { refuse("more text than one object"); }
    }
};
}  // namespace detail

/// Reads what json_of wrote; keys may come in any order, each once, with blanks as JSON allows them.
/// Errors  usage_error that says what is missing or makes no sense, and where.
[[nodiscard]] inline calibration calibration_from(std::string_view json) {
    calibration c;
    std::string format;
    const std::array<std::string_view, 6> names{"format", "name", "quadratic", "linear", "constant", "samples"};
    const std::array<double*, 3> coefficients{&c.cost.quadratic, &c.cost.linear, &c.cost.constant};
    std::array<bool, 6> read{};
    detail::calibration_reader r(json);
    r.list('{', '}', [&] {
        const std::string key = r.string();
        const auto known = static_cast<std::size_t>(std::find(names.begin(), names.end(), key) - names.begin());
        if (known == names.size() || read[known]) { r.refuse(formatted("'{}' is unknown, or there twice", key)); }
        read[known] = true;
        r.expect(':');
        if (known == 0) {
            format = r.string();
        } else if (known == 1) {
            c.name = r.string();
        } else if (known == 5) {
            r.list('[', ']', [&] {
                r.expect('[');
                c.samples.emplace_back();
                c.samples.back().tokens = r.number<std::int64_t>();
                r.expect(',');
                c.samples.back().seconds = r.number<double>();
                r.expect(']');
            });
        } else if ((*coefficients[known - 2] = r.number<double>()) < 0) {
            r.refuse(formatted("'{}' is negative", key));
        }
    });
    r.end();
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (!read[i]) { throw usage_error(formatted("calibration: there is no '{}'", names[i])); }
    }
    if (format != "tutti attention cost 1") {
        throw usage_error(formatted("calibration: '{}' is another format", format));
    }
    if (c.name.empty()) { throw usage_error("calibration: the name is empty"); }
    detail::expect_samples(c.samples);
    return c;
}

}  // namespace tutti::sequence
