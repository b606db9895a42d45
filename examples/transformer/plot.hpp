// The loss curve as an SVG picture: every step, their running mean, and the validations.
// Needs chart.hpp. One function from numbers to text; no library, no font that a viewer may lack.
#pragma once

#include <algorithm>  // min, max
#include <string>     // SVG

#include <fmt/format.h>  // coordinates

#include "chart.hpp"

namespace transformer {

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
    const detail::chart chart(left, top, width - right, height - bottom, last_step, low, high);
    std::string svg = detail::svg_begin(width, height, left, title);
    svg += chart.axes("step", fmt::format("loss, nats per {}", unit), 1);
    svg += chart.line(training, "stroke=\"#9ec5e8\" stroke-width=\"0.8\"");
    svg += chart.line(running_mean(training), "stroke=\"#1f5f99\" stroke-width=\"2\"");
    svg += chart.line(validation, "stroke=\"#d1631f\" stroke-width=\"1.5\" stroke-dasharray=\"4 3\"");
    for (const auto& [step, loss] : validation) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#d1631f\"/>\n", chart.x(step),
                           chart.y(loss));
    }
    const auto legend = [&](double x, const char* color, double stroke, const std::string& what) {
        svg += fmt::format("<path d=\"M{} 45h22\" stroke=\"{}\" stroke-width=\"{}\"/>\n", x, color, stroke);
        svg += detail::svg_text(x + 28, 49, "start", what);
    };
    legend(left, "#9ec5e8", 1.5, "each step");
    legend(left + 120, "#1f5f99", 2, "running mean");
    legend(left + 260, "#d1631f", 2, fmt::format("validation, {:.3f} at the end", validation.back().second));
    return svg + "</svg>\n";
}

}  // namespace transformer
