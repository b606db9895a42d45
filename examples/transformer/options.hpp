// What the user may choose, and the checks that everything chosen can be done. Each concern has a header of its own.
// Needs CLI11. A bad value is one line on stderr and exit code 2, before anything is written.
#pragma once

#include <algorithm>  // find_if
#include <cstdint>    // tokens
#include <string>     // names
#include <utility>    // pair
#include <vector>     // pipelines

#include <CLI/CLI.hpp>   // command line
#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "compression_options.hpp"
#include "data_options.hpp"
#include "document_options.hpp"
#include "documents.hpp"
#include "file_options.hpp"
#include "model_options.hpp"
#include "parallel_options.hpp"
#include "rank_options.hpp"
#include "round_options.hpp"
#include "training_options.hpp"
#include "zeroth_options.hpp"

namespace transformer {

struct options : data_options,
                 model_options,
                 training_options,
                 rank_options,
                 compression_options,
                 round_options,
                 document_options,
                 parallel_options,
                 estimate_options,
                 file_options {
    std::string pipeline = "ddp";
    std::vector<std::string> compare;  // pipelines that train one after the other; empty: `pipeline` alone
    zeroth_options zeroth;

    /// co2-zero: --nodes, or pairs of ranks.
    [[nodiscard]] int replicas() const { return nodes != 0 ? nodes : ranks % 2 == 0 ? ranks / 2 : ranks; }
    /// What the pipeline's levels of compression are of; empty for those that do not compress.
    [[nodiscard]] std::string family_of_levels() const {
        if (pipeline == "ddp-4bit") { return "quantize"; }
        if (pipeline == "ddp-topk") { return "topk"; }
        if (pipeline == "ddp-powersgd") { return "powersgd"; }
        return pipeline == "ddp-lgreco" ? family : "";
    }
    /// Does it train on documents of --lengths, instead of sequences of --context tokens?
    [[nodiscard]] bool of_documents() const { return packs_documents() || (of_parts() && !lengths.empty()); }
    /// Do all ranks together have a step's documents?
    [[nodiscard]] bool packs_documents() const { return detail::is_member(packing_pipelines, pipeline); }
    /// Does it make forward passes alone?
    [[nodiscard]] bool of_forward_passes() const { return zeroth_options::of_forward_passes(pipeline); }
    /// Do ranks have parts of the model?
    [[nodiscard]] bool of_parts() const { return detail::is_member(pipelines_of_parts, pipeline); }
    /// Do ranks share the attention of sequences: how many, and of how many tokens at a time?
    [[nodiscard]] bool shares_attention() const { return of_documents() || (of_parts() && sp > 1); }
    [[nodiscard]] int attention_ranks() const { return of_parts() ? sp : ranks; }
    [[nodiscard]] std::int64_t attention_tokens() const {
        return of_parts() ? std::int64_t{micro_batch} * model.context : tokens_per_step();
    }
    /// Ranks that share the forward passes of a part of the batch: pairs.
    [[nodiscard]] int sides() const { return of_forward_passes() && zo_parallel != "data" ? 2 : 1; }
    [[nodiscard]] int shards_of_batch() const { return shards == 0 ? ranks / sides() : shards; }
    [[nodiscard]] std::int64_t tokens_per_step() const { return std::int64_t{batch} * model.context; }
    /// The files that the run writes, with the options that name them.
    [[nodiscard]] std::vector<std::pair<const char*, std::string>> written() const {
        std::vector<std::pair<const char*, std::string>> files{
            {"--report", report}, {"--trace", trace}, {"--plot", plot}};
        if (!save.empty()) { files.emplace_back("--save", save); }
        if (!levels_picture.empty()) { files.emplace_back("--levels-picture", levels_picture); }
        if (!plan_picture.empty()) { files.emplace_back("--plan-picture", plan_picture); }
        return files;
    }
};

/// Declares every option on `app`. `pipelines` is the help text's list of names, one a line.
inline void declare(command_line& app, options& o, const std::string& pipelines) {
    app.add_option("--pipeline", o.pipeline, "how ranks work together:\n" + pipelines)->capture_default_str();
    app.add_option("--compare", o.compare,
                   "train these pipelines one after the other, each as --pipeline would; ends with a table, a picture "
                   "of their losses (--plot) and a report of all (--report), beside those of each")
        ->delimiter(',')
        ->type_name("NAME,NAME...")
        ->excludes("--pipeline");
    declare(app, static_cast<data_options&>(o));
    declare(app, static_cast<model_options&>(o));
    declare(app, static_cast<training_options&>(o));
    declare(app, static_cast<rank_options&>(o));
    declare(app, static_cast<compression_options&>(o));
    declare(app, static_cast<round_options&>(o));
    declare(app, static_cast<document_options&>(o));
    declare(app, static_cast<parallel_options&>(o));
    declare(app, static_cast<estimate_options&>(o));
    declare(app, o.zeroth);
    declare(app, static_cast<file_options&>(o));
}

/// Errors  bad_input for an option that was given and that no pipeline of the run, or of --compare, looks at.
inline void refuse_unused(const command_line& app, const options& o) {
    std::vector<std::string> runs = o.compare.empty() ? std::vector{o.pipeline} : o.compare;
    for (std::string& run : runs) {
        if (run == "ddp-lgreco") { run += " --family " + o.family; }
    }
    app.refuse_unused(runs);
}

/// The runs that `o` asks for: one, or one of each of --compare's pipelines, whose files are to carry its name.
/// Errors  bad_input.
[[nodiscard]] inline std::vector<options> runs_of(const options& o) {
    if (o.compare.empty()) { return {o}; }
    const std::pair<const char*, bool> one_only[] = {{"--save", !o.save.empty()},
                                                     {"--checkpoint", !o.checkpoint.empty()},
                                                     {"--levels-picture", !o.levels_picture.empty()},
                                                     {"--plan-picture", !o.plan_picture.empty()}};
    for (const auto& [option, given] : one_only) {
        detail::require(!given, fmt::format("{}: is of one run; not together with --compare", option));
    }
    std::vector<options> runs;
    for (const std::string& name : o.compare) {
        for (const options& other : runs) {
            detail::require(other.pipeline != name, fmt::format("--compare: '{}' is there twice", name));
        }
        runs.push_back(o);
        runs.back().pipeline = name;
    }
    return runs;
}

/// Fills what depends on other options and checks what spans options. `processes` is mpirun's, 0 without.
/// Errors  bad_input.
inline void complete(options& o, bool pipeline_is_single_rank, int processes) {
    using detail::require;
    complete(static_cast<const data_options&>(o));
    complete(o, o.of_forward_passes());
    complete(static_cast<compression_options&>(o));
    detail::complete_parts(o, processes);
    detail::complete_device(o, processes);
    if (o.recompute < 0) { o.recompute = o.device == "cuda" ? 0 : 1; }
    detail::complete_ranks(o, pipeline_is_single_rank, processes);
    complete(static_cast<const round_options&>(o));
    detail::complete_network(o, pipeline_is_single_rank);
    require(!o.random_weights || o.of_forward_passes(),
            fmt::format("--model: {} is for measurements of mezo, zo2 and distzo2; pipeline '{}' trains gpt2 models",
                        o.model_name, o.pipeline));
    if (o.of_forward_passes()) { detail::expect_estimate(o); }
    complete(o.zeroth, o.pipeline, o.precision, o.model.layers, o.ranks, o.backend == "threads" && o.network.empty());
    require(o.lengths.empty() || o.of_documents(),
            fmt::format("--lengths: pipeline '{}' trains on sequences of one length", o.pipeline));
    if (o.of_documents()) {
        require(!o.lengths.empty(), fmt::format("--pipeline: '{}' needs --lengths", o.pipeline));
        static_cast<void>(document_lengths(o.lengths));  // refuses
    }
    if (o.packs_documents()) {
        detail::expect_placeable(o);
    } else {
        detail::divide_batch(o);
    }
    detail::expect_shareable_attention(o);
    require(o.model.width % o.model.heads == 0,
            fmt::format("--width: {} cannot be divided among {} heads", o.model.width, o.model.heads));
    complete(static_cast<file_options&>(o));
    const auto files = o.written();
    for (auto file = files.begin(); file != files.end(); ++file) {
        detail::require_file_name(file->first, file->second);
        const auto same =
            std::find_if(files.begin(), file, [&](const auto& other) { return other.second == file->second; });
        require(same == file, fmt::format("{} and {} name the same file '{}'", same->first, file->first, file->second));
    }
}

}  // namespace transformer
