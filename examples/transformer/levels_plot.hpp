// Levels of compression by layer over time, as an SVG picture; and how they are called.
// Needs fmt. One function from numbers to text; no library, no font that a viewer may lack.
#pragma once

#include <algorithm>    // min, max
#include <cmath>        // log, pow, lround
#include <cstddef>      // size_t
#include <string>       // SVG
#include <string_view>  // units
#include <utility>      // pair
#include <vector>       // levels

#include <fmt/format.h>  // coordinates

#include "svg.hpp"

namespace transformer {

/// (step from which on, levels by tensor) in ascending order; 0 for a tensor that is sent as it is.
using level_history = std::vector<std::pair<int, std::vector<int>>>;

[[nodiscard]] constexpr std::string_view level_unit(std::string_view family) noexcept {
    return family == "quantize" ? "bits" : family == "topk" ? "kept of 10,000 elements" : "rank";
}

/// A row a tensor that is compressed, darker where its level is higher. `history` is not empty.
[[nodiscard]] inline std::string levels_picture(const std::string& title, const std::vector<std::string>& tensors,
                                                const level_history& history, int steps) {
    std::vector<std::size_t> shown;
    int low = 1 << 30, high = 1;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
        if (history.front().second.at(t) == 0) { continue; }
        shown.push_back(t);
        for (const auto& [step, levels] : history) {
            low = std::min(low, levels[t]);
            high = std::max(high, levels[t]);
        }
    }
    constexpr double width = 860, left = 190, right = 110, top = 56, bottom = 56, row = 22;
    const double height = top + bottom + row * static_cast<double>(shown.size());
    const auto x_of = [&](double step) { return left + (width - left - right) * step / steps; };
    // By ratio, since levels are chosen from parts to multiples of one. From a light blue to a dark one.
    const auto color = [&](int level) {
        const double at =
            high == low ? 0.5 : std::log(static_cast<double>(level) / low) / std::log(static_cast<double>(high) / low);
        const auto mix = [at](int light, int dark) { return static_cast<int>(light + at * (dark - light)); };
        return fmt::format("#{:02x}{:02x}{:02x}", mix(0xde, 0x08), mix(0xeb, 0x30), mix(0xf7, 0x6b));
    };

    std::string svg = detail::svg_begin(width, height, left, title);
    for (std::size_t i = 0; i < shown.size(); ++i) {
        const double y = top + row * static_cast<double>(i);
        svg += detail::svg_text(left - 8, y + row / 2 + 4, "end", tensors[shown[i]]);
        for (std::size_t h = 0; h < history.size();) {  // neighbors of one level are one box
            const int level = history[h].second[shown[i]];
            const int first = history[h].first - 1;
            while (h < history.size() && history[h].second[shown[i]] == level) { ++h; }
            const int end = h < history.size() ? history[h].first - 1 : steps;
            svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>{}, "
                               "steps {} to {}: {}</title></rect>\n",
                               x_of(first), y + 1, x_of(end) - x_of(first), row - 2, color(level),
                               detail::escaped(tensors[shown[i]]), first + 1, end, level);
        }
    }
    const double x_tick = std::max(1.0, detail::tick_distance(steps));
    for (double step = 0; step <= steps; step += x_tick) {
        svg += fmt::format("<path d=\"M{0:.1f} {1}v5\" stroke=\"#888\"/>\n", x_of(step), height - bottom);
        svg += detail::svg_text(x_of(step), height - bottom + 20, "middle", fmt::format("{:.0f}", step));
    }
    svg += detail::svg_text((left + width - right) / 2, height - 14, "middle", "step");
    constexpr int shades = 5;
    double y = top;
    for (int k = 0, before = 0; k < shades; ++k) {
        const auto level =
            static_cast<int>(std::lround(high * std::pow(static_cast<double>(low) / high, k / (shades - 1.0))));
        if (level == before) { continue; }
        svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"16\" height=\"16\" fill=\"{}\"/>\n", width - right + 20, y,
                           color(level));
        svg += detail::svg_text(width - right + 44, y + 13, "start", fmt::format("{}", level));
        y += row;
        before = level;
    }
    return svg + "</svg>\n";
}

}  // namespace transformer
