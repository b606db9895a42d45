// calibration_json: a calibration as a JSON text that can be kept, and back.
// Needs sequence/calibration, and no JSON library.
#pragma once

#include <algorithm>     // find, min
#include <array>         // keys
#include <charconv>      // numbers in texts
#include <cmath>         // isfinite
#include <cstddef>       // size_t
#include <cstdint>       // tokens
#include <optional>      // links that were measured
#include <string>        // texts
#include <string_view>   // parts of them
#include <system_error>  // errc
#include <tuple>         // tie
#include <utility>       // pair

#include <tutti/comm/topology.hpp>         // link
#include <tutti/core/error.hpp>            // usage_error
#include <tutti/core/text.hpp>             // formatted
#include <tutti/sequence/calibration.hpp>  // calibration

namespace tutti::sequence {

/// A calibration as a JSON object; numbers are as long as it takes to read the same ones back. Links are
/// [latency_seconds, bytes_per_second], samples [tokens, seconds], rings [tokens, ranks, seconds]; what was not measured
/// is left out.
/// Errors  usage_error when the name is empty or has control characters, such as another line, or calibration_from would
///         refuse the text: too few samples, a number that is negative or not finite, a link without bandwidth, steps
///         without the rings that they were fitted to.
[[nodiscard]] inline std::string json_of(const calibration& c) {
    std::string name;
    bool printable = !c.name.empty();
    for (const char letter : c.name) {
        if (letter == '"' || letter == '\\') { name += '\\'; }
        name += letter;
        printable = printable && (static_cast<unsigned char>(letter) >= 0x20 && letter != 0x7f);
    }
    if (!printable) { throw usage_error(formatted("calibration: '{}' is no name of one line", c.name)); }
    for (const double number : {c.cost.quadratic, c.cost.linear, c.cost.constant, c.step.linear, c.step.constant}) {
        if (!std::isfinite(number) || number < 0) {
            throw usage_error(formatted("calibration: {} is no coefficient of a cost", number));
        }
    }
    detail::expect_samples(c.samples);
    if (!c.rings.empty()) {
        detail::expect_rings(c.rings);
    } else if (c.step != step_cost{}) {
        throw usage_error("calibration: steps and rings come together");
    }
    std::string text =
        formatted("{{\n  \"format\": \"tutti attention cost 1\",\n  \"name\": \"{}\",\n  \"quadratic\": {},\n"
                  "  \"linear\": {},\n  \"constant\": {},\n",
                  name, c.cost.quadratic, c.cost.linear, c.cost.constant);
    const auto put_link = [&](std::string_view key, const std::optional<comm::link>& l) {
        if (!l) { return; }
        if (!std::isfinite(l->latency_seconds) || l->latency_seconds < 0 || !std::isfinite(l->bytes_per_second) ||
            l->bytes_per_second <= 0) {
            throw usage_error(formatted("calibration: a link of {} s and {} B/s was not measured", l->latency_seconds,
                                        l->bytes_per_second));
        }
        text += formatted("  \"{}\": [{}, {}],\n", key, l->latency_seconds, l->bytes_per_second);
    };
    put_link("inside", c.inside);
    put_link("between", c.between);
    const auto put_list = [&](std::string_view key, const auto& list, auto entry) {
        text += formatted("  \"{}\": [", key);
        for (std::size_t i = 0; i < list.size(); ++i) {
            text += formatted("{}\n    {}", i == 0 ? "" : ",", entry(list[i]));
        }
        text += "\n  ]";
    };
    if (!c.rings.empty()) {
        text += formatted("  \"step\": [{}, {}],\n", c.step.linear, c.step.constant);
        put_list("rings", c.rings,
                 [](const ring_sample& s) { return formatted("[{}, {}, {}]", s.tokens, s.ranks, s.seconds); });
        text += ",\n";
    }
    put_list("samples", c.samples,
             [](const attention_sample& s) { return formatted("[{}, {}]", s.tokens, s.seconds); });
    return text + "\n}\n";
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
    // The first six are always there; steps come with the rings that they were fitted to.
    const std::array<std::string_view, 10> names{"format",  "name",   "quadratic", "linear", "constant",
                                                 "samples", "inside", "between",   "step",   "rings"};
    constexpr std::size_t required = 6;
    std::array<bool, names.size()> read{};
    detail::calibration_reader r(json);
    const auto value_of = [&](std::string_view key) {
        const double value = r.number<double>();
        if (value < 0) { r.refuse(formatted("'{}' is negative", key)); }
        return value;
    };
    const auto pair_of = [&](std::string_view key) {
        r.expect('[');
        const double first = value_of(key);
        r.expect(',');
        const double second = value_of(key);
        r.expect(']');
        return std::pair(first, second);
    };
    const auto link_of = [&](std::string_view key) {
        const auto [latency, bandwidth] = pair_of(key);
        if (bandwidth == 0) { r.refuse(formatted("'{}' has no bandwidth", key)); }
        return comm::link{latency, bandwidth};
    };
    r.list('{', '}', [&] {
        const std::string key = r.string();
        const auto known = static_cast<std::size_t>(std::find(names.begin(), names.end(), key) - names.begin());
        if (known == names.size() || read[known]) { r.refuse(formatted("'{}' is unknown, or there twice", key)); }
        read[known] = true;
        r.expect(':');
        switch (known) {
        case 0: format = r.string(); break;
        case 1: c.name = r.string(); break;
        case 2: c.cost.quadratic = value_of(key); break;
        case 3: c.cost.linear = value_of(key); break;
        case 4: c.cost.constant = value_of(key); break;
        case 5:
            r.list('[', ']', [&] {
                r.expect('[');
                attention_sample& s = c.samples.emplace_back();
                s.tokens = r.number<std::int64_t>();
                r.expect(',');
                s.seconds = r.number<double>();
                r.expect(']');
            });
            break;
        case 6: c.inside = link_of(key); break;
        case 7: c.between = link_of(key); break;
        case 8: std::tie(c.step.linear, c.step.constant) = pair_of(key); break;
        default:
            r.list('[', ']', [&] {
                r.expect('[');
                ring_sample& s = c.rings.emplace_back();
                s.tokens = r.number<std::int64_t>();
                r.expect(',');
                s.ranks = r.number<int>();
                r.expect(',');
                s.seconds = r.number<double>();
                r.expect(']');
            });
        }
    });
    r.end();
    for (std::size_t i = 0; i < required; ++i) {
        if (!read[i]) { throw usage_error(formatted("calibration: there is no '{}'", names[i])); }
    }
    if (format != "tutti attention cost 1") {
        throw usage_error(formatted("calibration: '{}' is another format", format));
    }
    if (c.name.empty()) { throw usage_error("calibration: the name is empty"); }
    detail::expect_samples(c.samples);
    if (read[8] != read[9]) { throw usage_error("calibration: steps and rings come together"); }
    if (read[9]) { detail::expect_rings(c.rings); }
    return c;
}

}  // namespace tutti::sequence
