// The loss curve as an SVG picture: every step, their running mean, and the validations.
// Needs fmt. One function from numbers to text; no library, no font that a viewer may lack.
#pragma once

#include <algorithm>  // min, max
#include <cmath>      // floor, ceil
#include <string>     // SVG
#include <utility>    // pair
#include <vector>     // curves

#include <fmt/format.h>  // coordinates

#include "svg.hpp"

namespace transformer {

/// (step, loss in nats per token or byte) in ascending order of steps.
using curve = std::vector<std::pair<int, double>>;

/// Both curves are finite; `validation` is not empty. `unit` is what a loss is for: a byte, a token.
[[nodiscard]] inline std::string loss_picture(const std::string& title, const curve& training, const curve& validation,
                                              const char* unit) {
    constexpr double width = 860, height = 500, left = 64, right = 28, top = 56, bottom = 56;
    double low = 1e300, high = -1e300;
    int last_step = 1;
    for (const curve* c : {&training, &validation}) {
        for (const auto& [step, loss] : *c) {
            last_step = std::max(last_step, step);
            low = std::min(low, loss);
            high = std::max(high, loss);
        }
    }
    const double y_tick = detail::tick_distance(std::max(high - low, 1e-3));
    low = std::floor(low / y_tick) * y_tick;
    high = std::max(std::ceil(high / y_tick) * y_tick, low + y_tick);
    const auto x_of = [&](double step) { return left + (width - left - right) * step / last_step; };
    const auto y_of = [&](double loss) { return top + (height - top - bottom) * (high - loss) / (high - low); };

    std::string svg = detail::svg_begin(width, height, left, title);
    const auto text = [&](double x, double y, const char* anchor, const std::string& what) {
        svg += detail::svg_text(x, y, anchor, what);
    };
    for (int i = 0; low + i * y_tick <= high + y_tick / 2; ++i) {
        const double loss = low + i * y_tick;
        svg += fmt::format("<path d=\"M{} {:.1f}H{}\" stroke=\"#e4e4e4\"/>\n", left, y_of(loss), width - right);
        text(left - 8, y_of(loss) + 4, "end", fmt::format("{:.{}f}", loss, y_tick < 0.1 ? 2 : 1));
    }
    const double x_tick = std::max(1.0, detail::tick_distance(last_step));
    for (double step = 0; step <= last_step; step += x_tick) {
        svg += fmt::format("<path d=\"M{0:.1f} {1}v5\" stroke=\"#888\"/>\n", x_of(step), height - bottom);
        text(x_of(step), height - bottom + 20, "middle", fmt::format("{:.0f}", step));
    }
    svg += fmt::format("<path d=\"M{} {}H{}\" stroke=\"#888\"/>\n", left, height - bottom, width - right);
    text((left + width - right) / 2, height - 14, "middle", "step");
    svg += fmt::format(
        "<text transform=\"translate(18 {:.1f}) rotate(-90)\" text-anchor=\"middle\">loss, nats per {}</text>\n",
        (top + height - bottom) / 2, unit);

    const auto line = [&](const curve& c, const char* style) {
        std::string path;
        for (const auto& [step, loss] : c) {
            path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x_of(step), y_of(loss));
        }
        svg += fmt::format("<path d=\"{}\" fill=\"none\" {}/>\n", path, style);
    };
    curve mean;  // over the 2 % of all steps around each
    const std::size_t half = training.size() / 100;
    std::vector<double> sums{0};
    for (const auto& point : training) { sums.push_back(sums.back() + point.second); }
    for (std::size_t i = 0; i < training.size(); ++i) {
        const std::size_t reach = std::min({half, i, training.size() - 1 - i});  // as far on both sides: no lag
        mean.emplace_back(training[i].first,
                          (sums[i + reach + 1] - sums[i - reach]) / static_cast<double>(2 * reach + 1));
    }
    line(training, "stroke=\"#9ec5e8\" stroke-width=\"0.8\"");
    line(mean, "stroke=\"#1f5f99\" stroke-width=\"2\"");
    line(validation, "stroke=\"#d1631f\" stroke-width=\"1.5\" stroke-dasharray=\"4 3\"");
    for (const auto& [step, loss] : validation) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#d1631f\"/>\n", x_of(step), y_of(loss));
    }
    const auto legend = [&](double x, const char* color, double stroke, const std::string& what) {
        svg += fmt::format("<path d=\"M{} 45h22\" stroke=\"{}\" stroke-width=\"{}\"/>\n", x, color, stroke);
        text(x + 28, 49, "start", what);
    };
    legend(left, "#9ec5e8", 1.5, "each step");
    legend(left + 120, "#1f5f99", 2, "running mean");
    legend(left + 260, "#d1631f", 2, fmt::format("validation, {:.3f} at the end", validation.back().second));
    return svg + "</svg>\n";
}

}  // namespace transformer
