// How gradients are compressed: the options of levels, given or chosen, and their checks.
// Needs CLI11.
#pragma once

#include <cmath>     // isfinite, lround
#include <optional>  // what may be left to the family
#include <string>    // names

#include <CLI/CLI.hpp>   // command line
#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct compression_options {
    int bits = 4;                     // ddp-4bit
    double density = 0.01;            // ddp-topk: kept elements
    int rank = 4;                     // ddp-powersgd
    std::string family = "quantize";  // ddp-lgreco: what levels are of; and how they are chosen
    double alpha = 1;
    std::optional<double> level_range;  // none: what suits the family; error_sum likewise if empty
    int select_every = 100;
    std::string error_sum;
    std::string measure = "local";
    std::string levels_picture;  // where a picture of levels goes; empty: nowhere

    /// --density in the units of top_k.
    [[nodiscard]] int kept_in_10000() const { return static_cast<int>(std::lround(density * 10'000)); }
};

inline void declare(command_line& app, compression_options& o) {
    using detail::named;
    using detail::within;
    app.begin("Compressed gradients", "ddp-4bit, ddp-lgreco --family quantize");
    app.add_option("--bits", o.bits, "bits of an element, also other than 4; ddp-lgreco starts from them")
        ->check(within(1, 8))
        ->capture_default_str();
    app.used_by("ddp-topk, ddp-lgreco --family topk");
    app.add_option("--density", o.density, "kept part of the elements, 0.0001 to 1; likewise")->capture_default_str();
    app.used_by("ddp-powersgd, ddp-lgreco --family powersgd");
    app.add_option("--rank", o.rank, "columns of a factor; likewise")->check(within(1, 1024))->capture_default_str();
    app.used_by("ddp-lgreco");
    app.add_option("--family", o.family,
                   "what is chosen for each matrix: bits (quantize), densities (topk) or ranks (powersgd)")
        ->capture_default_str();
    app.add_option("--alpha", o.alpha, "errors that levels may have, over those of the level it starts from")
        ->capture_default_str();
    app.add_option("--level-range", o.level_range,
                   "levels are from the one it starts from divided by this to as many times it; default 2, topk 4");
    app.add_option("--select-every", o.select_every, "steps from choice to choice, 11 or more")
        ->check(within(11, 100'000'000))
        ->capture_default_str();
    app.add_option("--error-sum", o.error_sum,
                   "errors of matrices add up as norms or as squares; default norms, powersgd squares")
        ->check(named("sum"));
    app.add_option("--measure", o.measure,
                   "errors are those of gradients of each rank, with what it owes (local), or of their mean (averaged)")
        ->capture_default_str();
    app.used_by("ddp-4bit, ddp-topk, ddp-powersgd, ddp-lgreco");
    app.add_option("--levels-picture", o.levels_picture, "SVG picture of the levels of compression, by layer and step")
        ->check(named("file name"))
        ->type_name("FILE");
}

/// Errors: bad_input.
inline void complete(compression_options& o) {
    using detail::require;
    require(o.density >= 0.0001 && o.density <= 1,
            fmt::format("--density: {} is not a part from 0.0001 to 1", o.density));
    require(o.family == "quantize" || o.family == "topk" || o.family == "powersgd",
            fmt::format("--family: '{}' is not one of quantize, topk, powersgd", o.family));
    require(std::isfinite(o.alpha) && o.alpha > 0 && o.alpha <= 1000,
            fmt::format("--alpha: {} is not a positive number up to 1000", o.alpha));
    if (!o.level_range) { o.level_range = o.family == "topk" ? 4 : 2; }
    if (o.error_sum.empty()) { o.error_sum = o.family == "powersgd" ? "squares" : "norms"; }
    require(std::isfinite(*o.level_range) && *o.level_range >= 1 && *o.level_range <= 10'000,
            fmt::format("--level-range: {} is not a number from 1 to 10000", *o.level_range));
    require(o.error_sum == "norms" || o.error_sum == "squares",
            fmt::format("--error-sum: '{}' is not one of norms, squares", o.error_sum));
    require(o.measure == "local" || o.measure == "averaged",
            fmt::format("--measure: '{}' is not one of local, averaged", o.measure));
}

}  // namespace transformer
