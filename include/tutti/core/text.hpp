// formatted: the texts of messages. fmt's format strings, checked at compile time, at a fraction of the compile time.
// Needs fmt. Arguments are reduced to five kinds before fmt sees them, so that its templates are instantiated once.
#pragma once

#include <concepts>     // kinds of arguments
#include <cstddef>      // size_t
#include <cstdint>      // kinds
#include <string>       // results
#include <string_view>  // formats, arguments

#include <fmt/core.h>  // vformat

namespace tutti {

namespace detail {

/// One argument. Refers to strings; lives as long as the call.
class text_argument {
    enum class kind : std::uint8_t { integer, natural, single, real, words };
    kind kind_;
    long long integer_ = 0;
    unsigned long long natural_ = 0;
    double real_ = 0;
    std::string_view words_;

public:
    template <std::signed_integral T> text_argument(const T& v) noexcept : kind_(kind::integer), integer_(v) {}
    template <std::unsigned_integral T> text_argument(const T& v) noexcept : kind_(kind::natural), natural_(v) {}
    text_argument(const bool& v) noexcept : text_argument(std::string_view(v ? "true" : "false")) {}
    text_argument(const char& v) noexcept : text_argument(std::string_view(&v, 1)) {}
    text_argument(const float& v) noexcept : kind_(kind::single), real_(static_cast<double>(v)) {}
    text_argument(const double& v) noexcept : kind_(kind::real), real_(v) {}
    text_argument(std::string_view v) noexcept : kind_(kind::words), words_(v) {}
    text_argument(const std::string& v) noexcept : text_argument(std::string_view(v)) {}
    text_argument(const char* v) noexcept : text_argument(std::string_view(v)) {}

    /// Appends it as "{<specification>}" says.
    void append_to(std::string& out, std::string_view specification) const {
        const auto write = [&](const auto& value) {
            const std::string format = '{' + std::string(specification) + '}';
            out += fmt::vformat(fmt::string_view(format.data(), format.size()), fmt::make_format_args(value));
        };
        switch (kind_) {
        case kind::integer: return write(integer_);
        case kind::natural: return write(natural_);
        case kind::single: return write(static_cast<float>(real_));  // as many digits as a float has
        case kind::real: return write(real_);
        case kind::words: return write(fmt::string_view(words_.data(), words_.size()));
        }
    }
};

/// A format string whose placeholders fit `Count` arguments: {} in turn, each used, or {0}, {1}, ... below Count.
template <std::size_t Count> struct checked_format {
    std::string_view text;

    consteval checked_format(const char* format) : text(format) {
        std::size_t in_turn = 0;
        bool by_number = false;
        for (std::size_t i = 0; i < text.size(); ++i) {
            if (text[i] != '{' && text[i] != '}') { continue; }
            if (i + 1 < text.size() && text[i + 1] == text[i]) {
                ++i;
                continue;
            }
            if (text[i] == '}') { throw "formatted: a single } in the format"; }
            std::size_t number = 0;
            const std::size_t first = ++i;
            for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
                number = number * 10 + static_cast<std::size_t>(text[i] - '0');
            }
            by_number = by_number || i != first;
            if (i != first && number >= Count) { throw "formatted: a placeholder has no argument"; }
            in_turn += i == first ? 1 : 0;
            while (i < text.size() && text[i] != '}') { ++i; }
            if (i == text.size()) { throw "formatted: a placeholder does not end"; }
        }
        if (by_number ? in_turn != 0 : in_turn != Count) {
            throw "formatted: placeholders and arguments differ in number";
        }
    }
};

// Behind a member type: nvcc's front end wants to deduce a bare sizeof...(pack).
template <class... Arguments> struct format_for { using type = checked_format<sizeof...(Arguments)>; };

// One argument at a time: fmt's way to take a list whose length is known at run time costs as much to compile as all of
// this header.
[[nodiscard]] inline std::string compose(std::string_view format, const text_argument* arguments) {
    std::string out;
    std::size_t in_turn = 0;
    for (std::size_t i = 0; i < format.size(); ++i) {
        const char c = format[i];
        if (c != '{' || format[i + 1] == '{') {
            out += c;
            i += c == '{' || c == '}' ? 1 : 0;
            continue;
        }
        const std::size_t close = format.find('}', i);
        std::size_t number = 0;
        std::size_t at = i + 1;
        for (; format[at] >= '0' && format[at] <= '9'; ++at) {
            number = number * 10 + static_cast<std::size_t>(format[at] - '0');
        }
        arguments[at == i + 1 ? in_turn++ : number].append_to(out, format.substr(at, close - at));
        i = close;
    }
    return out;
}

}  // namespace detail

/// The format with its placeholders replaced, in fmt's syntax. For messages, not for inner loops.
///
/// Cost    a pass over the format, and one call of fmt an argument.
/// Errors  a number of arguments that does not fit the format does not compile; a specification that does not fit its
///         argument ("{:d}" of words) throws fmt::format_error.
template <class... Arguments>
[[nodiscard]] std::string formatted(typename detail::format_for<Arguments...>::type format,
                                    const Arguments&... arguments) {
    const detail::text_argument list[] = {detail::text_argument(arguments)..., detail::text_argument(0)};
    return detail::compose(format.text, list);
}

}  // namespace tutti
