// How training jobs scale, on virtual ranks: a table, and on request a picture, a report and a trace.
#include <sys/resource.h>  // memory of this process

#include <chrono>      // time of this process
#include <cstdio>      // progress
#include <filesystem>  // files that can be written
#include <fstream>     // files
#include <iterator>    // size
#include <string>      // names
#include <vector>      // points

#include <CLI/CLI.hpp>        // command line
#include <fmt/format.h>       // table
#include <nlohmann/json.hpp>  // report

#include <plan_a_job/files.hpp>       // machines
#include <transformer/bad_input.hpp>  // refusals
#include <transformer/chart.hpp>      // pictures

#include <tutti/schedule/timeline.hpp>  // traces

#include "recipes.hpp"

namespace {

using namespace simulate_cluster;
using namespace tutti;

struct request {
    std::string recipe = "175b";
    std::string machine;
    std::string picture, report, trace;
    int sequences = 0;
    int largest = 0;
};

struct point {
    int ranks = 0;
    double seconds = 0;     // a step
    double efficiency = 0;  // of linear
    double teraflops = 0;   // a rank, with what is computed again; 0: not known
    simulate::outcome outcome{};
};
// Large recipes take a minute and more.
void announce(const point& p) { fmt::print(stderr, "{} ranks: {} operations\n", p.ranks, p.outcome.operations); }

struct curve {
    std::string name;
    std::vector<point> points{};
};
struct study {
    std::string title;
    std::string linear;  // what efficiency is measured against
    std::vector<curve> curves{};
};

// Weak scaling: each replica has the same work.
study frontier(const request& r, const plan::machine& on, const char* model,
               parallel_job (*job)(int, const plan::machine&), const std::vector<int>& replicas) {
    study s{fmt::format("{} on {}, weak scaling", model, on.name), "the fewest ranks", {{fmt::format("{}", model)}}};
    for (const int data : replicas) {
        parallel_job j = job(data, on);
        if (r.largest != 0 && j.how.ranks() > r.largest) { continue; }
        if (r.sequences != 0) { j.how.micro_batches = r.sequences; }
        // Of the fewest ranks the first and the last stage are drawn.
        schedule::timeline trace{deadline{}};
        simulate::trace_options traced;
        const auto ranks = static_cast<int>(j.how.ranks());
        if (!r.trace.empty() && s.curves[0].points.empty()) { traced = {&trace, {0, ranks - 1}}; }
        point p{ranks};
        p.outcome = run(j, 1, traced);
        if (traced.into != nullptr) { trace.write(r.trace); }
        p.seconds = p.outcome.seconds;
        p.teraflops = plan::hardware_flops(j.model, j.how) / p.seconds / ranks / 1e12;
        auto& points = s.curves[0].points;
        p.efficiency = points.empty() ? 1 : points[0].seconds / p.seconds;
        announce(p);
        points.push_back(std::move(p));
    }
    return s;
}

study co2(const request& r) {
    study s{"7 billion parameters, nodes of 8 A100 on 80 Gb/s: local updates over nodes", "one node", {}};
    const double alone = steady_seconds(co2_7b(1, 48));
    struct kind {
        const char* name;
        std::size_t period;
        bool late;
    };
    for (const kind& k : {kind{"a mean every step", 1, false}, kind{"CO2, 12 steps a round", 12, true},
                          kind{"CO2, 48 steps a round", 48, true}}) {
        curve c{k.name};
        for (const int nodes : {1, 2, 4, 8, 16}) {
            replica_job j = co2_7b(nodes, k.period, k.late);
            if (r.largest != 0 && j.network.ranks() > r.largest) { continue; }
            point p{j.network.ranks()};
            p.seconds = steady_seconds(j);
            p.efficiency = alone / p.seconds;
            schedule::timeline trace{deadline{}};
            const bool traced = !r.trace.empty() && k.period == 12;  // of the most nodes
            if (traced) { j.trace = &trace; }
            p.outcome = run(j, static_cast<int>(2 * k.period));
            if (traced) { trace.write(r.trace); }
            announce(p);
            c.points.push_back(std::move(p));
        }
        s.curves.push_back(std::move(c));
    }
    return s;
}

study co2_over_zero(const request& r, const plan::machine& on) {
    study s{
        fmt::format("22 billion parameters on {}: ZeRO-3 in nodes of {}, CO2 over nodes", on.name, on.ranks_per_node),
        "the fewest ranks",
        {{"CO2, ZeRO-3"}}};
    auto& points = s.curves[0].points;
    for (const int nodes : {2, 16, 128}) {
        replica_job j = co2_22b(nodes, on);
        if (r.largest != 0 && j.network.ranks() > r.largest) { continue; }
        schedule::timeline trace{deadline{}};
        const bool traced = !r.trace.empty() && points.empty();
        if (traced) { j.trace = &trace; }
        constexpr int steps = 10;
        point p{j.network.ranks()};
        p.outcome = run(j, steps);
        if (traced) { trace.write(r.trace); }
        p.seconds = p.outcome.seconds / steps;
        p.efficiency = points.empty() ? 1 : points[0].seconds / p.seconds;
        announce(p);
        points.push_back(std::move(p));
    }
    return s;
}

[[nodiscard]] std::string picture_of(const study& s) {
    constexpr double width = 760, height = 440, left = 80;
    constexpr const char* colors[] = {"#d1631f", "#1f5f99", "#3a8a4d"};
    double most = 0;
    for (const curve& c : s.curves) {
        for (const point& p : c.points) { most = std::max(most, static_cast<double>(p.ranks)); }
    }
    const transformer::detail::chart chart(left, 70, width - 30, height - 60, most * 1.05, 0, 105);
    std::string svg = transformer::detail::svg_begin(width, height, left, s.title);
    svg += chart.axes("GPUs", fmt::format("% of linear, from {}", s.linear), 1);
    double legend = left;
    for (std::size_t i = 0; i < s.curves.size(); ++i) {
        const char* const color = colors[i % std::size(colors)];
        std::vector<std::pair<int, double>> line;
        for (const point& p : s.curves[i].points) { line.emplace_back(p.ranks, 100 * p.efficiency); }
        svg += chart.line(line, fmt::format("stroke=\"{}\" stroke-width=\"2\"", color));
        for (const auto& [ranks, share] : line) {
            svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", chart.x(ranks),
                               chart.y(share), color);
        }
        svg += fmt::format("<path d=\"M{} 45h22\" stroke=\"{}\" stroke-width=\"2\"/>\n", legend, color);
        svg += transformer::detail::svg_text(legend + 28, 49, "start", s.curves[i].name);
        legend += 60 + 7.5 * static_cast<double>(s.curves[i].name.size());
    }
    return svg + "</svg>\n";
}

[[nodiscard]] double resident_gib() {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return static_cast<double>(u.ru_maxrss) / (1 << 20);
}

[[nodiscard]] nlohmann::ordered_json report_of(const study& s, const request& r, double seconds) {
    nlohmann::ordered_json curves = nlohmann::ordered_json::array();
    for (const curve& c : s.curves) {
        nlohmann::ordered_json points = nlohmann::ordered_json::array();
        for (const point& p : c.points) {
            const simulate::rank_outcome& first = p.outcome.ranks.front();
            nlohmann::ordered_json out{{"ranks", p.ranks},
                                       {"seconds_per_step", p.seconds},
                                       {"efficiency", p.efficiency},
                                       {"hardware_teraflops_per_rank", nullptr},
                                       {"operations", p.outcome.operations},
                                       {"steps_recorded", p.outcome.steps}};
            if (p.teraflops != 0) { out["hardware_teraflops_per_rank"] = p.teraflops; }
            out["rank_0"] = {{"seconds", first.end},
                             {"work", first.work},
                             {"communication", first.communication},
                             {"waiting", first.waiting},
                             {"sent_bytes", first.traffic.total().bytes},
                             {"peak_bytes", first.peak_bytes}};
            points.push_back(std::move(out));
        }
        curves.push_back({{"name", c.name}, {"points", std::move(points)}});
    }
    return {{"recipe", r.recipe},
            {"title", s.title},
            {"linear_from", s.linear},
            {"curves", std::move(curves)},
            {"simulated_in_seconds", seconds},
            {"resident_gib", resident_gib()}};
}

/// Refuses what cannot become a file, before anything takes time.
void expect_file_name(const std::string& path) {
    namespace fs = std::filesystem;
    if (path.empty()) { return; }
    const fs::path folder = fs::absolute(path).parent_path();
    if (!fs::is_directory(folder)) {
        throw transformer::bad_input(
            fmt::format("'{}' cannot be written: '{}' is not a folder", path, folder.string()));
    }
    if (fs::is_directory(path)) { throw transformer::bad_input(fmt::format("'{}' is a folder", path)); }
}
void write(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    if (!(file << text) || !file.flush()) { throw backend_error(fmt::format("cannot write '{}'", path)); }
}

void print(const study& s) {
    fmt::print("{}\n{:<24} {:>6} {:>12} {:>9} {:>14} {:>14}\n", s.title, "", "ranks", "s a step", "linear",
               "TFLOP/s a rank", "operations");
    for (const curve& c : s.curves) {
        for (const point& p : c.points) {
            fmt::print("{:<24} {:>6} {:>12.4f} {:>8.1f}% {:>14} {:>14}\n", c.name, p.ranks, p.seconds,
                       100 * p.efficiency, p.teraflops == 0 ? "" : fmt::format("{:.1f}", p.teraflops),
                       p.outcome.operations);
        }
    }
}

void answer(const request& r) {
    for (const std::string& file : {r.picture, r.report, r.trace}) { expect_file_name(file); }
    std::string name;
    const plan::machine on = plan_a_job::machine_of(r.machine, name);
    const auto start = std::chrono::steady_clock::now();
    const study s = r.recipe == "175b"     ? frontier(r, on, "175 billion parameters", frontier_175b, {2, 4, 8, 16})
                    : r.recipe == "1t"     ? frontier(r, on, "1 trillion parameters", frontier_1t, {1, 2, 4, 6})
                    : r.recipe == "co2-7b" ? co2(r)
                                           : co2_over_zero(r, on);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (s.curves[0].points.empty()) {
        throw transformer::bad_input(fmt::format("--largest {}: the recipe's fewest ranks are more", r.largest));
    }
    print(s);
    fmt::print("simulated in {:.1f} s and {:.2f} GiB\n", seconds, resident_gib());
    if (!r.picture.empty()) { write(r.picture, picture_of(s)); }
    if (!r.report.empty()) { write(r.report, report_of(s, r, seconds).dump(2) + "\n"); }
}

int complain(const std::exception& e, int code) {
    fmt::print(stderr, "simulate_cluster: {}\n", e.what());
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    request r;
    CLI::App app("Trains on virtual ranks: the library's own pipelines and strategies, in virtual time.");
    app.add_option("--recipe", r.recipe, "what is trained")
        ->check(CLI::IsMember({"175b", "1t", "co2-7b", "co2-22b"}))
        ->capture_default_str();
    const auto* const machine = app.add_option(
        "--machine", r.machine,
        fmt::format("of 175b, 1t and co2-22b, as of plan_a_job: {}; default: frontier, of co2-22b hgx-h200",
                    plan_a_job::machine_help));
    app.add_option("--picture", r.picture, "SVG file of how it scales");
    app.add_option("--report", r.report, "JSON file of all figures");
    app.add_option("--trace", r.trace, "Chrome trace of some ranks, for Perfetto");
    app.add_option("--largest", r.largest, "leaves out points of more ranks")->check(CLI::Range(1, 1 << 20));
    const auto* const sequences = app.add_option("--sequences", r.sequences, "175b and 1t: of a replica in a step")
                                      ->check(CLI::Range(1, 1 << 20));
    try {
        app.parse(argc, argv);
        if (sequences->count() != 0 && r.recipe.starts_with("co2")) {
            throw transformer::bad_input(fmt::format("--sequences: recipe '{}' has what was published", r.recipe));
        }
        if (machine->count() != 0 && r.recipe == "co2-7b") {
            throw transformer::bad_input(
                "--machine: recipe 'co2-7b' has what was published; 175b, 1t and co2-22b take it");
        }
        if (machine->count() == 0) { r.machine = r.recipe == "co2-22b" ? "hgx-h200" : "frontier"; }
        answer(r);
    } catch (const CLI::CallForHelp&) { fmt::print("{}", app.help()); } catch (const CLI::ParseError& e) {
        return complain(e, 2);
    } catch (const transformer::bad_input& e) { return complain(e, 2); } catch (const usage_error& e) {
        return complain(e, 2);
    } catch (const std::exception& e) { return complain(e, 1); }
    return 0;
}
