// The picture of a trace: what is hidden, what is exposed, which steps; and what the program that draws it refuses.
#include <chrono>   // times
#include <regex>    // shapes of the picture
#include <string>   // texts
#include <utility>  // pair
#include <vector>   // shapes

#include <doctest/doctest.h>  // checks

#include <tutti/schedule/timeline.hpp>  // who writes traces

#include "program.hpp"        // the program in a folder
#include "timeline_plot.hpp"  // under test

using namespace std::chrono_literals;
using tutti::schedule::span_kind;
using tutti::schedule::timeline;
using trainer_test::outcome;
using trainer_test::run_program;
using trainer_test::scratch_folder;

namespace {

constexpr const char *computed = "#9ec5e8", *hidden = "#4f9d7c", *exposed = "#d1631f";

// Two ranks, two steps of 10 ms: 8 of forward and backward, communication from 5 to 9, its last millisecond exposed.
// Rank 1 runs a tenth of a millisecond later.
std::string trace(tutti::deadline start = tutti::clock_type::now()) {
    timeline t(start);
    for (const int rank : {0, 1}) {
        const auto lane = t.track_of(rank, "world/gradients"), main = t.track_of(rank, "main");
        const auto steps = t.track_of(rank, "steps");
        for (const int step : {0, 1}) {
            const auto at = [&](std::chrono::microseconds time) { return start + step * 10ms + rank * 100us + time; };
            t.add(main, "forward & so on", span_kind::work, at(0ms), at(3ms));
            t.add(main, "backward", span_kind::work, at(3ms), at(8ms));
            t.add(lane, "all_reduce", span_kind::communication, at(5ms), at(9ms));
            t.add(main, "all_reduce", span_kind::wait, at(8ms), at(9ms));
            t.add(steps, "step", span_kind::step, at(0ms), at(10ms));
        }
    }
    return t.chrome_trace();
}

struct shape {
    double x, y, width;
};
// The bars of one color, in the order of the picture; not the legend's squares.
std::vector<shape> bars(const std::string& picture, const std::string& color) {
    const std::regex pattern("<rect x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\" height=\"20.0\" fill=\"" +
                             color);
    std::vector<shape> all;
    for (std::sregex_iterator i(picture.begin(), picture.end(), pattern), end; i != end; ++i) {
        all.push_back({std::stod((*i)[1]), std::stod((*i)[2]), std::stod((*i)[3])});
    }
    return all;
}

}  // namespace

TEST_CASE("tracks come by rank, steps and main before lanes") {
    const auto tracks = transformer::read_trace(trace());
    REQUIRE(tracks.size() == 6);
    const std::vector<std::pair<int, std::string>> expected{{0, "steps"}, {0, "main"}, {0, "world/gradients"},
                                                            {1, "steps"}, {1, "main"}, {1, "world/gradients"}};
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK(tracks[i].rank == expected[i].first);
        CHECK(tracks[i].name == expected[i].second);
    }
    CHECK(tracks[0].steps.size() == 2);
    CHECK(tracks[1].work.size() == 4);
    CHECK(tracks[1].waits.size() == 2);
    CHECK(tracks[2].work[1].begin == doctest::Approx(15));
    CHECK(tracks[2].work[1].end == doctest::Approx(19));
}

TEST_CASE("communication is hidden but where its rank waits") {
    const std::string picture = transformer::timeline_picture("a < b", transformer::read_trace(trace()), 1, 2);
    CHECK(picture.starts_with("<svg"));
    CHECK(picture.ends_with("</svg>\n"));
    CHECK(picture.find("a &lt; b") != std::string::npos);
    CHECK(picture.find("forward &amp; so on") != std::string::npos);
    CHECK(picture.find("exposed: 10.0 % of these steps") != std::string::npos);
    CHECK(picture.find("step 2: 10.00 ms, 10.0 % exposed") != std::string::npos);
    CHECK(bars(picture, computed).size() == 8);
    const auto green = bars(picture, hidden), orange = bars(picture, exposed);
    REQUIRE(green.size() == 4);
    REQUIRE(orange.size() == 8);  // a piece of each collective, and each wait
    const double ms = green[0].width / 4;
    CHECK(green[0].x == doctest::Approx(150 + 5 * ms).epsilon(1e-3));
    int on_lanes = 0;
    for (const shape& o : orange) {
        CHECK(o.width == doctest::Approx(ms).epsilon(1e-3));
        for (const shape& g : green) {
            if (o.y == g.y && o.x > g.x && o.x < g.x + g.width) {
                CHECK(o.x == doctest::Approx(g.x + 3 * ms).epsilon(1e-3));
                ++on_lanes;
            }
        }
    }
    CHECK(on_lanes == 4);
}

TEST_CASE("a range of steps is drawn alone") {
    const auto tracks = transformer::read_trace(trace());
    const std::string picture = transformer::timeline_picture("x", tracks, 2, 2);
    CHECK(picture.find("step 2:") != std::string::npos);
    CHECK(picture.find("step 1:") == std::string::npos);
    CHECK(bars(picture, hidden).size() == 2);
    for (const auto& [first, last] : {std::pair(0, 1), std::pair(2, 1), std::pair(1, 3)}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(transformer::timeline_picture(
                                 "x", tracks, static_cast<std::size_t>(first), static_cast<std::size_t>(last))),
                             fmt::format("--steps: {}:{}, but the trace has steps 1 to 2", first, last).c_str(),
                             transformer::bad_input);
    }
}

TEST_CASE("the program draws beside the trace, or says in one line why not") {
    const scratch_folder folder;
    std::ofstream(folder / "trace.json") << trace();
    std::ofstream(folder / "steps.json") << timeline().chrome_trace();
    std::ofstream(folder / "text") << "no trace";
    const outcome drawn = run_program(folder, "trace.json --title T");
    CHECK(drawn.code == 0);
    CHECK(drawn.out == "steps 1 to 2: timeline.svg\n");
    CHECK(trainer_test::content_of(folder / "timeline.svg").find(">T</text>") != std::string::npos);
    CHECK(run_program(folder, "trace.json --steps 2 --out two.svg").out == "steps 2 to 2: two.svg\n");
    CHECK(run_program(folder, "trace.json --steps 1:2 --out both.svg").out == "steps 1 to 2: both.svg\n");
    for (const auto& [arguments, says] :
         std::vector<std::pair<std::string, std::string>>{{"trace.json --steps 3", "the trace has steps 1 to 2"},
                                                          {"trace.json --steps 1:2:3", "--steps"},
                                                          {"trace.json --steps x", "--steps"},
                                                          {"trace.json --steps -1", "--steps"},
                                                          {"steps.json", "the trace has no steps"},
                                                          {"text", "not a trace"},
                                                          {"nothing", "cannot read 'nothing'"},
                                                          {"--unknown", "--unknown"}}) {
        CAPTURE(arguments);
        const outcome o = run_program(folder, arguments);
        CHECK(o.code == 2);
        CHECK(o.out.empty());
        CHECK(o.err.starts_with("timeline: "));
        CHECK(o.err.find(says) != std::string::npos);
    }
    CHECK(run_program(folder, "trace.json --out text/picture.svg").code == 1);
}
