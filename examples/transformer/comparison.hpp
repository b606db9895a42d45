// What --compare leaves behind: one table, one report and one picture of several pipelines that trained on the same.
// Needs report.hpp and chart.hpp.
#pragma once

#include <algorithm>  // min, max, minmax_element
#include <cmath>      // isfinite
#include <cstddef>    // size_t
#include <string>     // SVG, table
#include <utility>    // pair
#include <vector>     // runs

#include <fmt/format.h>       // numbers
#include <nlohmann/json.hpp>  // report

#include "chart.hpp"
#include "options.hpp"
#include "report.hpp"

namespace transformer {

/// A pipeline's options and what it did.
struct compared_run {
    options how;
    result what;
};

/// The table's name for an option's value that was not measured.
[[nodiscard]] inline std::string table_figure(double value, int digits) {
    return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

/// Columns: speed, the step's time and the part of it spent waiting; steps of a round, the time of a round's
/// communication and the hidden part of it; bytes sent; memory; losses.
[[nodiscard]] inline std::string comparison_table(const std::vector<compared_run>& runs) {
    std::string text =
        fmt::format("{:<14}{:>10}{:>10}{:>10}{:>6}{:>10}{:>9}{:>12}{:>10}{:>9}{:>12}\n", "# pipeline", "tokens/s",
                    "step", "exposed", "tau", "t_comm", "hidden", "sent/step", "peak", "loss", "validation");
    text += fmt::format("{:<14}{:>10}{:>10}{:>10}{:>6}{:>10}{:>9}{:>12}{:>10}{:>9}{:>12}\n", "#", "", "(ms)", "(%)", "",
                        "(ms)", "(%)", "(bytes)", "(MiB)", "(nats)", "(nats)");
    for (const auto& [how, what] : runs) {
        const curve mean = running_mean(what.training);
        text +=
            fmt::format("{:<14}{:>10.0f}{:>10.2f}{:>10.1f}{:>6}{:>10}{:>9}{:>12}{:>10.1f}{:>9.4f}{:>12.4f}\n",
                        how.pipeline, tokens_of(how, what) / what.total_seconds,
                        1e3 * what.total_seconds / static_cast<double>(what.training.size()),
                        100 * what.exposed_seconds / what.total_seconds, what.overlap.period,
                        table_figure(1e3 * what.overlap.communication, 2),
                        table_figure(100 * what.overlap.efficiency(), 1), what.wire_bytes_per_step,
                        static_cast<double>(what.peak_bytes) / (1 << 20), mean.back().second, what.validation_loss());
    }
    return text;
}

/// Losses against tokens and against the time spent in steps: lines are running means, dots validations.
[[nodiscard]] inline std::string comparison_picture(const std::string& title, const std::vector<compared_run>& runs) {
    constexpr double width = 1180, height = 520, left = 64, panel = 500, gap = 76, top = 84, bottom = 56;
    constexpr const char* colors[] = {"#1f5f99", "#d1631f", "#2f8f4e", "#8a4fa3", "#b8324a", "#6b6b00", "#0f8b8d"};
    double low = 1e300, high = -1e300, last_token = 0, last_second = 0;
    std::vector<curve> means;
    std::vector<std::vector<double>> ends;  // seconds at the end of each step
    for (const auto& [how, what] : runs) {
        means.push_back(running_mean(what.training));
        ends.emplace_back();
        double now = 0;
        for (const double s : what.step_seconds) { ends.back().push_back(now += s); }
        last_second = std::max(last_second, now);
        last_token = std::max(last_token, tokens_of(how, what));
        for (const auto& point : means.back()) { low = std::min(low, point.second); }
        for (const auto& point : what.validation) { low = std::min(low, point.second); }
        high = std::max(high, means.back()[means.back().size() / 10].second);  // what comes before is alike
    }
    const detail::chart by_tokens(left, top, left + panel, height - bottom, last_token / 1e6, low, high);
    const detail::chart by_time(left + panel + gap, top, left + 2 * panel + gap, height - bottom, last_second, low,
                                high);
    const std::string unit = fmt::format("loss, nats per {}", runs.front().how.unit());
    std::string svg = detail::svg_begin(width, height, left, title);
    svg += by_tokens.axes("million tokens", unit);
    svg += by_time.axes("seconds in training steps", unit);
    for (const auto& [chart, name] : {std::pair(&by_tokens, "tokens"), std::pair(&by_time, "time")}) {
        svg += chart->clip_begin(name);
        for (std::size_t i = 0; i < runs.size(); ++i) {
            const auto& [how, what] = runs[i];
            const char* const color = colors[i % std::size(colors)];
            const auto place = [&, c = chart, k = i](std::size_t index) {
                return c == &by_tokens ? static_cast<double>(index + 1) * tokens_of(runs[k].how, runs[k].what) /
                                             static_cast<double>(runs[k].what.training.size()) / 1e6
                                       : ends[k][index];
            };
            std::vector<std::pair<double, double>> points;
            for (std::size_t step = 0; step < means[i].size(); ++step) {
                points.emplace_back(place(step), means[i][step].second);
            }
            svg += chart->line(points, fmt::format("stroke=\"{}\" stroke-width=\"1.8\"", color));
            for (const auto& [step, loss] : what.validation) {
                const int index = step - what.first_step - 1;
                svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n",
                                   chart->x(place(static_cast<std::size_t>(index))), chart->y(loss), color);
            }
        }
        svg += detail::chart::clip_end();
    }
    double x = left;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const std::string label = fmt::format("{} ({:.3f})", runs[i].how.pipeline, runs[i].what.validation_loss());
        svg += fmt::format("<path d=\"M{} 56h22\" stroke=\"{}\" stroke-width=\"2.5\"/>\n", x,
                           colors[i % std::size(colors)]);
        svg += detail::svg_text(x + 28, 60, "start", label);
        x += 50 + 7.2 * static_cast<double>(label.size());
    }
    return svg + "</svg>\n";
}

/// `o` is what was asked for, its files those of the comparison.
inline void write_comparison(const options& o, const std::vector<compared_run>& runs) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const auto& [how, what] : runs) { all.push_back(report_of(how, what)); }
    const std::string network = o.network.empty() ? "" : fmt::format(" over {}", o.network);
    const auto [fewest, most] = std::minmax_element(
        runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.how.ranks < b.how.ranks; });
    const std::string ranks = fewest->how.ranks == most->how.ranks
                                  ? fmt::format("{}", most->how.ranks)
                                  : fmt::format("{} to {}", fewest->how.ranks, most->how.ranks);
    const std::string title =
        fmt::format("{} {} ({}){}, {} steps of {} sequences", ranks, most->how.ranks == 1 ? "rank" : "ranks", o.backend,
                    network, runs.front().how.last_step(), o.batch);
    write_text(o.plot, comparison_picture(title, runs));
    write_text(o.report, nlohmann::ordered_json{{"runs", std::move(all)}}.dump(2) + "\n");
}

}  // namespace transformer
