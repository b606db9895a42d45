// Draws a trace of the trainer: steps, computing, and which communication was hidden or exposed, as an SVG picture.
// Exit codes: 0 drawn; 2 the user asked for something impossible; 1 anything else.
#include <algorithm>   // max
#include <cstddef>     // step numbers
#include <cstdio>      // stderr
#include <filesystem>  // default path
#include <fstream>     // the trace
#include <sstream>     // its text
#include <string>      // paths
#include <utility>     // pair
#include <vector>      // tracks

#include <CLI/CLI.hpp>   // command line
#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "timeline_plot.hpp"
#include "whole_file.hpp"

namespace {

using namespace transformer;

struct options {
    std::string trace = "run/trace.json";
    std::string out;    // empty: beside the trace
    std::string steps;  // FIRST:LAST; empty: the last three
    std::string title;  // empty: the trace's path
};

std::string content_of(const std::string& path) {
    std::ostringstream text;
    const std::ifstream file(path, std::ios::binary);
    if (!file || !(text << file.rdbuf())) { throw bad_input(fmt::format("cannot read '{}'", path)); }
    return text.str();
}

/// The steps to draw: those asked for, or the last three.
std::pair<std::size_t, std::size_t> range_of(const std::string& asked, const std::vector<traced_track>& tracks) {
    if (asked.empty()) {
        std::size_t count = 0;
        for (const traced_track& t : tracks) { count = std::max(count, t.steps.size()); }
        return {count > 2 ? count - 2 : 1, count};
    }
    std::size_t first = 0, last = 0;
    char colon = 0, rest = 0;
    std::istringstream text(asked);
    text >> first;
    if (text && text.peek() == EOF) { return {first, first}; }
    if (!(text >> colon >> last) || colon != ':' || text >> rest) {
        throw bad_input(fmt::format("--steps: '{}' is neither a step nor FIRST:LAST", asked));
    }
    return {first, last};
}

int run(int argc, char** argv) {
    options o;
    CLI::App app("Draws a few steps of a trace: computing, and which communication was hidden or exposed.", "timeline");
    app.add_option("trace", o.trace, "what the trainer's --trace has written")
        ->type_name("FILE")
        ->capture_default_str();
    app.add_option("--steps", o.steps, "of the trace's steps, counted from 1; default: its last three")
        ->type_name("FIRST:LAST");
    app.add_option("--out", o.out, "SVG picture; default: timeline.svg beside the trace")->type_name("FILE");
    app.add_option("--title", o.title, "of the picture; default: the trace's path");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        fmt::print("{}", app.help());
        return 0;
    } catch (const CLI::ParseError& e) { throw bad_input(e.what()); }
    if (o.out.empty()) { o.out = (std::filesystem::path(o.trace).parent_path() / "timeline.svg").string(); }
    const std::vector<traced_track> tracks = read_trace(content_of(o.trace));
    const auto [first, last] = range_of(o.steps, tracks);
    const std::string picture = timeline_picture(o.title.empty() ? o.trace : o.title, tracks, first, last);
    write_whole(o.out, [&](std::ofstream& out) { out << picture; });
    fmt::print("steps {} to {}: {}\n", first, last, o.out);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const bad_input& e) {
        fmt::print(stderr, "timeline: {}\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        fmt::print(stderr, "timeline: {}\n", e.what());
        return 1;
    }
}
