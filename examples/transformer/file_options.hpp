// What a run leaves behind: the options of reports, pictures, weights and checkpoints, and their checks.
// Needs CLI11.
#pragma once

#include <filesystem>    // paths
#include <string>        // names
#include <system_error>  // what is not there

#include <CLI/CLI.hpp>   // command line
#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct file_options {
    std::string report = "run/report.json";
    std::string trace;           // empty: beside the report
    std::string plot;            // empty: beside the report
    std::string save;            // where trained weights go; empty: nowhere
    std::string checkpoint;      // folder of checkpoints; empty: none are made
    int checkpoint_every = 500;  // steps
    bool resume = false;         // from the newest of them
    bool quiet = false;
};

inline void declare(command_line& app, file_options& o) {
    using detail::named;
    using detail::within;
    app.begin("Results");
    app.add_option("--report", o.report, "JSON report")->type_name("FILE")->capture_default_str();
    app.add_option("--trace", o.trace, "Chrome trace for ui.perfetto.dev; default: trace.json beside the report")
        ->check(named("file name"))
        ->type_name("FILE");
    app.add_option("--plot", o.plot, "SVG picture of the loss; default: loss.svg beside the report")
        ->check(named("file name"))
        ->type_name("FILE");
    app.add_option("--save", o.save, "write the trained weights there (safetensors, F32)")
        ->check(named("file name"))
        ->type_name("FILE");
    app.add_option("--checkpoint", o.checkpoint,
                   "make checkpoints of the run in this folder, now and then and where it ends; the two newest stay")
        ->check(named("folder"))
        ->type_name("FOLDER");
    app.add_option("--checkpoint-every", o.checkpoint_every, "steps between checkpoints")
        ->needs("--checkpoint")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.add_flag("--resume", o.resume,
                 "go on from the newest whole checkpoint in --checkpoint; from the beginning where there is none")
        ->needs("--checkpoint");
    app.add_flag("--quiet", o.quiet, "print nothing but errors");
}

/// Errors: bad_input.
inline void complete(file_options& o) {
    std::error_code ignored;
    detail::require(o.checkpoint.empty() || !std::filesystem::exists(o.checkpoint, ignored) ||
                        std::filesystem::is_directory(o.checkpoint, ignored),
                    fmt::format("--checkpoint: '{}' is not a folder", o.checkpoint));
    const std::filesystem::path folder = std::filesystem::path(o.report).parent_path();
    if (o.trace.empty()) { o.trace = (folder / "trace.json").string(); }
    if (o.plot.empty()) { o.plot = (folder / "loss.svg").string(); }
}

namespace detail {

/// What may become a file: not a folder, nor below a file.
inline void require_file_name(const char* option, const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    require(!path.empty(), fmt::format("{}: no file name given", option));
    require(!fs::is_directory(path, ignored), fmt::format("{}: '{}' is a folder", option, path));
    fs::path folder = fs::absolute(path).parent_path();
    while (!fs::exists(folder, ignored) && folder.has_relative_path()) { folder = folder.parent_path(); }
    require(fs::is_directory(folder, ignored),
            fmt::format("{}: '{}' cannot be written: '{}' is not a folder", option, path, folder.string()));
}

}  // namespace detail

/// The name of a file of one of several runs: "run/report.json" becomes "run/report-co2.json".
[[nodiscard]] inline std::string file_of_run(const std::string& file, const std::string& pipeline) {
    const std::filesystem::path path(file);
    const std::string name = path.stem().string() + "-" + pipeline + path.extension().string();
    return (path.parent_path() / name).string();
}

}  // namespace transformer
