// render: plans to look at: where the seconds of each go, and what its fullest rank holds against the limit.
// Needs plan/explain.
#pragma once

#include <algorithm>    // max
#include <array>        // colors
#include <cstddef>      // size_t
#include <span>         // plans
#include <string>       // SVG
#include <string_view>  // colors

#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/explain.hpp>  // strategy_of
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/memory.hpp>   // usable_bytes
#include <tutti/plan/search.hpp>   // planned

namespace tutti::plan {

namespace detail {

struct bar_part {
    std::string_view name;
    std::string_view color;
    double value;
};

[[nodiscard]] inline std::array<bar_part, 8> parts_of(const step_time& t) {
    return {{{"products", "#3b78b5", t.products},
             {"memory traffic", "#8ab4dc", t.memory},
             {"tensor collectives", "#d98032", t.tensor},
             {"rings", "#e8b96a", t.sequence},
             {"bubble", "#c9cdd2", t.bubble},
             {"messages", "#8a8f96", t.messages},
             {"data exchange", "#b5443b", t.data},
             {"updates", "#3f8f5a", t.updates}}};
}
[[nodiscard]] inline std::array<bar_part, 4> parts_of(const rank_memory& m) {
    return {{{"states", "#3b78b5", m.states},
             {"activations", "#d98032", m.activations + m.inputs},
             {"working", "#8ab4dc", m.working},
             {"data exchange", "#b5443b", m.exchange}}};
}

// A panel of bars, one a plan, from (left, top) on; `scale` in pixels a unit of what the parts have.
template <class PartsOf>
[[nodiscard]] std::string bars_of(std::span<const planned> plans, double left, double top, double row, double scale,
                                  std::string_view unit, double per_unit, PartsOf parts) {
    std::string svg;
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const double y = top + row * static_cast<double>(i);
        double x = left;
        for (const bar_part& p : parts(plans[i])) {
            const double width = p.value * scale;
            if (!(width > 0)) { continue; }
            svg += formatted("<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\">", x, y + 4, width,
                             row - 8, p.color);
            svg += formatted("<title>{}: {:.4g} {}</title></rect>\n", p.name, p.value / per_unit, unit);
            x += width;
        }
        double total = 0;
        for (const bar_part& p : parts(plans[i])) { total += p.value; }
        svg += formatted("<text x=\"{:.2f}\" y=\"{}\">{:.4g}</text>\n", x + 4, y + row / 2 + 4, total / per_unit);
    }
    return svg;
}

template <class Parts> [[nodiscard]] std::string legend_of(const Parts& parts, double left, double y) {
    std::string svg;
    for (const bar_part& p : parts) {
        svg += formatted("<rect x=\"{}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>\n", left, y - 9, p.color);
        svg += formatted("<text x=\"{}\" y=\"{}\">{}</text>\n", left + 14, y, p.name);
        left += 26 + 5.7 * static_cast<double>(p.name.size());
    }
    return svg;
}

[[nodiscard]] inline std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) { out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c); }
    return out;
}

}  // namespace detail

/// An SVG document: a row for each plan, on the left the seconds of a step, on the right the memory of its fullest rank
/// with a line for what may be used of `on`. Each part says what it is when pointed at.
[[nodiscard]] inline std::string svg_of(const machine& on, std::span<const planned> plans, std::string_view title,
                                        double margin = 0.1) {
    constexpr double width = 1300;
    constexpr double label = 300;
    constexpr double time_width = 560;
    constexpr double memory_left = label + time_width + 90;
    constexpr double memory_width = 260;
    constexpr double row = 34;
    constexpr double top = 92;
    const double limit = usable_bytes(on, margin);
    double longest = 0;
    double fullest = limit;
    for (const planned& p : plans) {
        longest = std::max(longest, p.seconds());
        fullest = std::max(fullest, p.peak.memory.total());
    }
    const double bottom = top + row * static_cast<double>(plans.size());
    std::string svg = formatted("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
                                "height=\"{1}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#333\">\n"
                                "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
                                "<text x=\"10\" y=\"26\" font-size=\"15\">{2}</text>\n",
                                width, bottom + 24, detail::escaped(title));
    svg += formatted("<text x=\"{}\" y=\"54\" font-weight=\"bold\">seconds a step</text>\n", label);
    svg += formatted("<text x=\"{}\" y=\"54\" font-weight=\"bold\">GiB on the fullest rank</text>\n", memory_left);
    svg += detail::legend_of(detail::parts_of(step_time{}), label - 40, 74);
    svg += detail::legend_of(detail::parts_of(rank_memory{}), memory_left, 74);
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const job& j = plans[i].how;
        const double y = top + row * static_cast<double>(i) + row / 2;
        const auto line = [&](double at, std::string_view text) {
            svg += formatted("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", label - 8, at,
                             detail::escaped(text));
        };
        line(y - 2, formatted("tp {}{} · pp {} · dp {} · sp {} · {} x {}", j.tensor, j.sequence_parallel ? "+rows" : "",
                              j.pipeline, j.data, j.sequence, j.micro_batches, j.micro_batch));
        line(y + 11, formatted("{} · {} · {}", schedule_of(j), name_of(j.recompute), strategy_of(j)));
    }
    svg += detail::bars_of(plans, label, top, row, longest > 0 ? time_width / longest : 0, "s", 1,
                           [](const planned& p) { return detail::parts_of(p.time); });
    const double scale = memory_width / fullest;
    svg += detail::bars_of(plans, memory_left, top, row, scale, "GiB", 1 << 30,
                           [](const planned& p) { return detail::parts_of(p.peak.memory); });
    const double at = memory_left + limit * scale;
    svg +=
        formatted("<path d=\"M{0:.2f} {1}V{2}\" stroke=\"#b00\" stroke-dasharray=\"4 3\"/>\n", at, top - 4, bottom + 4);
    svg += formatted("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\" fill=\"#b00\">{} may be used</text>\n", at,
                     bottom + 16, detail::gibibytes(limit));
    return svg + "</svg>\n";
}

}  // namespace tutti::plan
