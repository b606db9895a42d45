// pipeline_render: a schedule to look at: as text, and as a picture of what each rank does when.
// Needs parallel/pipeline_replay.
#pragma once

#include <algorithm>    // max
#include <array>        // colors
#include <cstddef>      // size_t
#include <cstdint>      // times
#include <string>       // results
#include <string_view>  // colors

#include <tutti/core/text.hpp>                   // formatted
#include <tutti/parallel/pipeline_replay.hpp>    // replayed
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

namespace tutti::parallel {

namespace detail {
[[nodiscard]] inline std::string heading_of(const pipeline_schedule& s, const pipeline_replay& r) {
    return formatted("{}: {} micro-batches through {} stages on {} ranks, makespan {}, bubble {}", s.name,
                     s.micro_batches, s.stages(), s.ranks, r.makespan(), r.bubble());
}
[[nodiscard]] constexpr std::string_view letter_of(pass what) noexcept {
    constexpr std::string_view letters[] = {"F", "B", "b", "w"};
    return letters[static_cast<std::size_t>(what)];
}
}  // namespace detail

/// A line on the whole, and a line for each rank: what it holds at most, then its actions in order: F forward, B
/// backward, b input gradient, w weight gradient, the micro-batch, ' for each chunk beyond the first; + joins a pair,
/// and . is a wait.
[[nodiscard]] inline std::string text_of(const pipeline_schedule& s, const pass_times& times = {}) {
    const pipeline_replay replay = replayed(s, times);
    std::string text = detail::heading_of(s, replay) + '\n';
    for (std::size_t r = 0; r < s.actions.size(); ++r) {
        text += formatted("rank {}, {} in flight:", r, replay.peak_in_flight[r]);
        bool joined = false;
        for (std::size_t i = 0; i < s.actions[r].size(); ++i) {
            const action& a = s.actions[r][i];
            const std::int64_t before = i == 0 ? replay.spans[r][i].start : replay.spans[r][i - 1].end;
            text += joined ? "+" : replay.spans[r][i].start > before ? " . " : " ";
            text += formatted("{}{}", detail::letter_of(a.what), a.micro_batch);
            text.append(static_cast<std::size_t>(s.chunk_of(s.route_of(a.micro_batch), a.stage)), '\'');
            joined = a.joined;
        }
        text += '\n';
    }
    return text;
}

/// An SVG document: a row for each rank, time from left to right. Forwards are blue, backwards and input gradients
/// green, weight gradients gray; chunks beyond the first are lighter. Of a pair the forward is above the backward. Each
/// action has its micro-batch where it fits, and says what it is when pointed at.
[[nodiscard]] inline std::string svg_of(const pipeline_schedule& s, const pass_times& times = {}) {
    constexpr double width = 1000;
    constexpr double left = 70;
    constexpr double row = 22;
    constexpr double top = 60;
    constexpr std::array<std::string_view, 4> colors{"#3b78b5", "#3f8f5a", "#3f8f5a", "#8a8f96"};  // by pass
    const pipeline_replay replay = replayed(s, times);
    const double scale = (width - left - 20) / static_cast<double>(std::max<std::int64_t>(replay.makespan(), 1));
    std::string svg = formatted("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
                                "height=\"{1}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#333\">\n"
                                "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
                                "<text x=\"10\" y=\"24\" font-size=\"14\">{2}</text>\n",
                                width, top + row * s.ranks + 10, detail::heading_of(s, replay));
    for (std::size_t r = 0; r < s.actions.size(); ++r) {
        const double y = top + row * static_cast<double>(r);
        svg += formatted("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {}</text>\n", left - 8, y + 14, r);
        for (std::size_t i = 0; i < s.actions[r].size(); ++i) {
            const action& a = s.actions[r][i];
            const action_span& span = replay.spans[r][i];
            const bool second = i > 0 && s.actions[r][i - 1].joined;
            const double height = (row - 3) / (a.joined || second ? 2 : 1);
            const double x = left + static_cast<double>(span.start) * scale;
            const double length = static_cast<double>(span.end - span.start) * scale;
            const double y_of = y + (second ? height : 0);
            const int chunk = s.chunk_of(s.route_of(a.micro_batch), a.stage);
            svg += formatted("<g><title>{}, {} to {}</title>", describe(a), span.start, span.end);
            svg +=
                formatted("<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" "
                          "fill-opacity=\"{:.2f}\" stroke=\"#fff\" stroke-width=\"0.5\"/>",
                          x, y_of, length, height, colors[static_cast<std::size_t>(a.what)], 1.0 / (1.0 + 0.8 * chunk));
            if (length > 12) {
                svg += formatted("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\" fill=\"{}\">{}</text>",
                                 x + length / 2, y_of + height / 2 + 4, chunk == 0 ? "#fff" : "#222", a.micro_batch);
            }
            svg += "</g>\n";
        }
    }
    return svg + "</svg>\n";
}

}  // namespace tutti::parallel
