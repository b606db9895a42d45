// A picture of a trace: what streams and threads did in a few steps, and which communication was hidden or exposed.
// Needs svg.hpp and nlohmann-json. Reads the Chrome traces that tutti::schedule::timeline writes.
#pragma once

#include <algorithm>    // sort, min, max
#include <cstddef>      // size_t
#include <map>          // tracks by number
#include <string>       // SVG
#include <string_view>  // texts
#include <utility>      // pair
#include <vector>       // spans

#include <fmt/format.h>       // coordinates
#include <nlohmann/json.hpp>  // traces

#include "bad_input.hpp"
#include "svg.hpp"

namespace transformer {

/// A span of a trace; milliseconds.
struct traced_span {
    std::string name;
    double begin = 0;
    double end = 0;
};

/// One row of a trace.
struct traced_track {
    int rank = 0;
    std::string name;
    std::vector<traced_span> work, waits, steps;  // each in the order of time
};

/// The tracks of a trace by rank; of a rank, "steps" and "main" before the lanes.
/// Errors  bad_input for what is no trace, or one without steps.
[[nodiscard]] inline std::vector<traced_track> read_trace(const std::string& text) {
    std::map<std::pair<int, int>, traced_track> by_number;
    bool any = false;
    try {
        const auto whole = nlohmann::json::parse(text);
        for (const auto& e : whole.at("traceEvents")) {
            traced_track& track = by_number[{e.at("pid").get<int>(), e.at("tid").get<int>()}];
            track.rank = e.at("pid");
            if (e.at("ph") == "M" && e.at("name") == "thread_name") { track.name = e.at("args").at("name"); }
            if (e.at("ph") != "X") { continue; }
            const std::string kind = e.at("cat");
            const double begin = e.at("ts").get<double>() / 1e3;
            auto& spans = kind == "step" ? track.steps : kind == "wait" ? track.waits : track.work;
            spans.push_back({e.at("name"), begin, begin + e.at("dur").get<double>() / 1e3});
            any = any || kind == "step";
        }
    } catch (const nlohmann::json::exception& e) { throw bad_input(fmt::format("not a trace: {}", e.what())); }
    if (!any) { throw bad_input("the trace has no steps"); }
    std::vector<traced_track> all;
    for (auto& [number, track] : by_number) {
        for (auto* const spans : {&track.work, &track.waits, &track.steps}) {
            std::sort(spans->begin(), spans->end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
        }
        all.push_back(std::move(track));
    }
    const auto place = [](const traced_track& t) {
        return std::pair(t.rank, !t.steps.empty() ? 0 : t.name == "main" ? 1 : 2);
    };
    std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
    return all;
}

/// Steps `first` to `last`, counted from 1, as an SVG picture: a row a track, spans of lanes in the color of hidden
/// communication, and in that of exposed communication where their rank waited meanwhile.
/// Errors  bad_input when the trace has no such steps.
[[nodiscard]] inline std::string timeline_picture(const std::string& title, const std::vector<traced_track>& tracks,
                                                  std::size_t first, std::size_t last) {
    constexpr const char *computed = "#9ec5e8", *hidden = "#4f9d7c", *exposed = "#d1631f", *band = "#eceff2";
    constexpr double width = 1200, left = 150, right = 24, top = 74, row = 26, between = 12, bottom = 52;
    double begin = 1e300, end = -1e300, height = top + bottom;
    int rank = tracks.front().rank;
    for (const traced_track& t : tracks) {
        height += row + (t.rank == rank ? 0 : between);
        rank = t.rank;
        if (t.steps.empty()) { continue; }
        if (first < 1 || first > last || last > t.steps.size()) {
            throw bad_input(
                fmt::format("--steps: {}:{}, but the trace has steps 1 to {}", first, last, t.steps.size()));
        }
        begin = std::min(begin, t.steps[first - 1].begin);
        end = std::max(end, t.steps[last - 1].end);
    }
    const double scale = (width - left - right) / (end - begin);
    const auto x_of = [&](double ms) { return left + scale * (std::clamp(ms, begin, end) - begin); };

    std::string svg = detail::svg_begin(width, height, 24, title);
    double y = top;
    // A span, or the part of it that is in the picture.
    const auto bar = [&](const traced_span& s, const char* color) {
        const double x = x_of(s.begin), w = std::max(x_of(s.end) - x, 0.6);
        svg +=
            fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"{}><title>{}: "
                        "{:.3f} ms</title></rect>\n",
                        x, y + 3, w, row - 6, color, w > 4 ? " stroke=\"#fff\" stroke-width=\"0.8\"" : "",
                        detail::escaped(s.name), s.end - s.begin);
    };
    // What it is called, where that fits.
    const auto label = [&](const traced_span& s, std::string_view text, const char* ink) {
        const double x = x_of(s.begin), w = x_of(s.end) - x;
        if (6.6 * static_cast<double>(text.size()) + 6 > w) { return; }
        svg += detail::svg_text(x + w / 2, y + row / 2 + 4, "middle", text,
                                fmt::format("font-size=\"11\" fill=\"{}\"", ink));
    };
    const auto visible = [&](const traced_span& s) { return s.end > begin && s.begin < end; };
    const auto overlap = [](const traced_span& a, const traced_span& b) {
        return traced_span{a.name, std::max(a.begin, b.begin), std::min(a.end, b.end)};
    };
    double shown_exposed = 0, stepping = 0;
    rank = tracks.front().rank;
    bool first_of_rank = true;
    for (const traced_track& t : tracks) {
        if (t.rank != rank) {
            y += between;
            first_of_rank = true;
        }
        rank = t.rank;
        if (first_of_rank) { svg += detail::svg_text(24, y + row / 2 + 4, "start", fmt::format("rank {}", rank)); }
        first_of_rank = false;
        svg +=
            detail::svg_text(left - 10, y + row / 2 + 4, "end", t.name.substr(t.name.rfind('/') + 1), "fill=\"#777\"");
        std::vector<traced_span> waits;  // of the whole rank
        for (const traced_track& other : tracks) {
            for (const traced_span& w : other.waits) {
                if (other.rank == rank && visible(w)) { waits.push_back(w); }
            }
        }
        for (std::size_t i = 0; i < t.steps.size(); ++i) {
            if (i + 1 < first || i + 1 > last) { continue; }
            double waited = 0;
            for (const traced_span& w : waits) {
                const traced_span both = overlap(w, t.steps[i]);
                waited += std::max(both.end - both.begin, 0.0);
            }
            const double length = t.steps[i].end - t.steps[i].begin;
            stepping += length;
            shown_exposed += waited;
            bar(t.steps[i], band);
            label(t.steps[i], fmt::format("step {}: {:.2f} ms, {:.1f} % exposed", i + 1, length, 100 * waited / length),
                  "#555");
        }
        const bool is_lane = t.steps.empty() && t.waits.empty() && t.name != "main";
        for (const traced_span& s : t.work) {
            if (!visible(s)) { continue; }
            bar(s, is_lane ? hidden : computed);
            for (const traced_span& w : waits) {
                const traced_span both = overlap(s, w);
                if (is_lane && both.begin < both.end) { bar(both, exposed); }
            }
            label(s, s.name, is_lane ? "#fff" : "#1d3a57");
        }
        for (const traced_span& w : t.waits) {
            if (!visible(w)) { continue; }
            bar(w, exposed);
            label(w, "wait", "#fff");
        }
        y += row;
    }

    const double tick = detail::tick_distance(end - begin);
    svg += fmt::format("<path d=\"M{} {:.1f}H{}\" stroke=\"#888\"/>\n", left, y + 4, width - right);
    for (double ms = 0; ms <= end - begin; ms += tick) {
        svg += fmt::format("<path d=\"M{0:.1f} {1:.1f}v5\" stroke=\"#888\"/>\n", x_of(begin + ms), y + 4);
        svg += detail::svg_text(x_of(begin + ms), y + 22, "middle", fmt::format("{:g}", ms));
    }
    svg += detail::svg_text((left + width - right) / 2, y + 42, "middle", "milliseconds");
    double x = left;
    for (const auto& [color, what] :
         {std::pair(computed, std::string("computing")), std::pair(hidden, std::string("communication, hidden")),
          std::pair(exposed,
                    fmt::format("communication, exposed: {:.1f} % of these steps", 100 * shown_exposed / stepping))}) {
        svg += fmt::format("<rect x=\"{:.1f}\" y=\"42\" width=\"14\" height=\"14\" fill=\"{}\"/>\n", x, color);
        svg += detail::svg_text(x + 20, 54, "start", what);
        x += 44 + 7.2 * static_cast<double>(what.size());
    }
    return svg + "</svg>\n";
}

}  // namespace transformer
