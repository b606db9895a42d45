// What pictures share: an SVG document with a title, text in it, round distances between ticks.
// Needs fmt. No library, no font that a viewer may lack.
#pragma once

#include <cmath>        // floor, pow
#include <string>       // SVG
#include <string_view>  // texts

#include <fmt/format.h>  // coordinates

namespace transformer::detail {

/// The largest of 1, 2, 5 times a power of ten that gives at least four intervals in `span`.
[[nodiscard]] inline double tick_distance(double span) {
    const double power = std::pow(10.0, std::floor(std::log10(span / 4)));
    const double digits = span / 4 / power;
    return power * (digits >= 5 ? 5 : digits >= 2 ? 2 : 1);
}

[[nodiscard]] inline std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '&') {
            out += "&amp;";
        } else if (c == '<') {
            out += "&lt;";
        } else if (c == '>') {
            out += "&gt;";
        } else {
            out += c;
        }
    }
    return out;
}

/// The head of a document, its white ground and its title. "</svg>" ends it.
[[nodiscard]] inline std::string svg_begin(double width, double height, double left, std::string_view title) {
    return fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
                       "font-family=\"sans-serif\" font-size=\"13\" fill=\"#333\">\n<rect width=\"{0}\" height=\"{1}\" "
                       "fill=\"#fff\"/>\n"
                       "<text x=\"{2}\" y=\"28\" font-size=\"16\">{3}</text>\n",
                       width, height, left, escaped(title));
}

[[nodiscard]] inline std::string svg_text(double x, double y, const char* anchor, std::string_view what,
                                          std::string_view style = "") {
    return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}{}>{}</text>\n", x, y, anchor,
                       style.empty() ? "" : " ", style, escaped(what));
}

}  // namespace transformer::detail
