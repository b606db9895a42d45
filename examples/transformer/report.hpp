// What a run leaves behind: report.json, trace.json and the picture, each written whole or not at all.
// Needs nlohmann-json, plot.hpp and levels_plot.hpp. Losses are nats per token (of text, a byte); seconds are means
// over ranks.
#pragma once

#include <array>         // bytes by dimension
#include <cmath>         // isfinite
#include <cstdint>       // counts
#include <filesystem>    // folders
#include <fstream>       // files
#include <optional>      // parts that not every run has
#include <string>        // names
#include <system_error>  // why a file could not be written
#include <vector>        // folders made, sample

#include <fmt/format.h>                // hash
#include <nlohmann/json.hpp>           // report
#include <tutti/schedule/overlap.hpp>  // overlap_metrics

#include "device.hpp"
#include "levels_plot.hpp"
#include "options.hpp"
#include "plot.hpp"
#include "whole_file.hpp"
#include "zeroth_report.hpp"

namespace transformer {

/// What attention over the ranks cost: means over the steps, of all layers, forward and backward.
struct sequence_result {
    double imbalance = 0;        // the most pairs of query and key on a rank, over their mean
    double planned_seconds = 0;  // of attention on the slowest rank, by what it took on one rank and the stated network
    double measured_seconds = 0;  // on the rank that spent most, waiting included
    double intra_node_bytes = 0;  // sent by all ranks
    double inter_node_bytes = 0;
    double remapped_tokens = 0;  // which attention has on another rank than the rest of the model
    std::string picture{};       // SVG of where the first step's documents are, if asked for
};

/// What came of ranks that have parts of the model.
struct parallel_result {
    int stages = 1;                        // of the pipeline
    int micro_batches = 1;                 // of a replica in a step
    double bubble_fraction = 0;            // of the ranks' time, by the schedule: forward takes half of backward
    std::array<std::uint64_t, 5> bytes{};  // per rank and step, the most: tensor, pipeline, data, norms, sequence
};

/// The same on every rank, except for the trace, which is complete on rank 0.
struct result {
    std::string device = "cpu";
    double peak_flops = 0;  // of one device, 0: not known
    std::size_t parameters = 0;
    std::uint64_t parameter_hash = 0;
    int first_step = 0;                      // where the run went on
    std::uint64_t wire_bytes_per_step = 0;   // maximum over ranks, evaluation excluded
    std::uint64_t dense_bytes_per_step = 0;  // what gradients as they are would have been
    curve training;                          // every step, mean over ranks
    curve validation;                        // every evaluation; the last is the run's
    std::vector<std::string> tensors;        // names, in the order of levels
    level_history levels;                    // of compression, by tensor
    double total_seconds = 0;                // in training steps: compute + exposed communication
    double step_median = 0;
    double compute_seconds = 0;
    double exposed_seconds = 0;
    tutti::schedule::overlap_metrics overlap;  // means over ranks
    std::vector<double> step_seconds;          // of every step, likewise
    std::optional<sequence_result> sequence;   // of documents
    std::optional<zeroth_result> zeroth;       // of forward passes alone
    std::optional<parallel_result> parallel;   // of parts of the model
    std::uint64_t peak_bytes = 0;              // maximum over ranks
    std::vector<std::uint16_t> sample;         // tokens that the trained model wrote
    std::string trace;                         // Chrome trace of all ranks, the last 1000 steps

    [[nodiscard]] double validation_loss() const { return validation.back().second; }
};

/// Of this run: a resumed one leaves out what was done before.
[[nodiscard]] inline double tokens_of(const options& o, const result& r) {
    return static_cast<double>(r.training.size()) * static_cast<double>(o.batch) * static_cast<double>(o.model.context);
}

/// Per second, all devices together.
[[nodiscard]] inline double model_flops(const options& o, const result& r) {
    // Forward is a third of a training step.
    const double parts = o.of_forward_passes() ? 2.0 * o.directions / 3 : 1.0;
    return parts * flops_per_token(o.model, r.parameters) * tokens_of(o, r) / r.total_seconds;
}

/// null where nothing was measured.
[[nodiscard]] inline nlohmann::ordered_json known(double figure) {
    return std::isfinite(figure) ? nlohmann::ordered_json(figure) : nlohmann::ordered_json();
}

[[nodiscard]] inline nlohmann::ordered_json report_of(const options& o, const result& r) {
    nlohmann::ordered_json points = nlohmann::ordered_json::array();
    for (const auto& [step, loss] : r.training) { points.push_back({step, loss}); }
    nlohmann::ordered_json validations = nlohmann::ordered_json::array();
    for (const auto& [step, loss] : r.validation) { validations.push_back({step, loss}); }
    const auto trained = static_cast<std::uint64_t>(tokens_of(o, r));
    nlohmann::ordered_json utilization;  // null where there is no peak to compare with
    if (r.peak_flops > 0) { utilization = model_flops(o, r) / (r.peak_flops * o.ranks); }
    nlohmann::ordered_json ratio;  // null where no gradient is sent
    if (r.wire_bytes_per_step > 0 && r.dense_bytes_per_step > 0) {
        ratio = static_cast<double>(r.dense_bytes_per_step) / static_cast<double>(r.wire_bytes_per_step);
    }
    nlohmann::ordered_json levels;  // null where gradients are not compressed
    if (!r.levels.back().second.empty()) {
        const std::vector<int>& last = r.levels.back().second;
        levels["unit"] = level_unit(o.family_of_levels());
        for (std::size_t i = 0; i < last.size(); ++i) {
            if (last[i] != 0) { levels["by_layer"][r.tensors[i]] = last[i]; }
        }
        levels["changes"] = nlohmann::ordered_json::array();
        for (const auto& [step, all] : r.levels) {
            nlohmann::ordered_json compressed = nlohmann::ordered_json::array();
            for (const int level : all) {
                if (level != 0) { compressed.push_back(level); }
            }
            levels["changes"].push_back({step, std::move(compressed)});
        }
    }
    nlohmann::ordered_json sequence;  // null where sequences are of one length
    if (r.sequence) {
        sequence = {{"imbalance", r.sequence->imbalance},
                    {"planned_seconds", r.sequence->planned_seconds},
                    {"measured_seconds", r.sequence->measured_seconds},
                    {"intra_node_bytes", r.sequence->intra_node_bytes},
                    {"inter_node_bytes", r.sequence->inter_node_bytes},
                    {"remapped_tokens", r.sequence->remapped_tokens}};
    }
    nlohmann::ordered_json zeroth;  // null where there are gradients
    if (r.zeroth) { zeroth = report_of(*r.zeroth); }
    nlohmann::ordered_json parallel;  // null where every rank has the whole model
    if (r.parallel) {
        const auto& bytes = r.parallel->bytes;
        parallel = {{"tp", o.tp},
                    {"pp", o.pp},
                    {"dp", o.dp},
                    {"sp", o.sp},
                    {"sequence_parallel", o.sequence_parallel},
                    {"zero", o.zero},
                    {"schedule", o.pipeline_schedule},
                    {"stages", r.parallel->stages},
                    {"micro_batches", r.parallel->micro_batches},
                    {"bubble_fraction", r.parallel->bubble_fraction},
                    {"bytes_per_rank_per_step",
                     {{"tensor", bytes[0]},
                      {"pipeline", bytes[1]},
                      {"sequence", bytes[4]},
                      {"data", bytes[2]},
                      {"norm", bytes[3]}}}};
    }
    return {
        {"pipeline", o.pipeline},
        {"backend", o.backend},
        {"device", r.device},
        {"precision", o.precision},
        {"ranks", o.ranks},
        {"parameters", r.parameters},
        {"steps", o.last_step()},
        {"resumed_from_step", r.first_step},
        {"tokens", trained},
        {"tokens_per_second", tokens_of(o, r) / r.total_seconds},
        {"model_flops_per_second", model_flops(o, r)},
        {"model_flop_utilization", std::move(utilization)},
        {"wire_bytes_per_rank_per_step", r.wire_bytes_per_step},
        {"peak_bytes_per_rank", r.peak_bytes},
        {"compression_ratio", std::move(ratio)},
        {"levels", std::move(levels)},
        {"sequence", std::move(sequence)},
        {"zeroth", std::move(zeroth)},
        {"parallel", std::move(parallel)},
        {"parameter_hash", fmt::format("{:016x}", r.parameter_hash)},
        {"loss",
         {{"unit", fmt::format("nats per {}", o.unit())},
          {"first", r.training.front().second},
          {"last", r.training.back().second},
          {"validation", r.validation_loss()},
          {"curve", std::move(points)},
          {"validations", std::move(validations)}}},
        {"seconds",
         {{"total", r.total_seconds},
          {"step_median", r.step_median},
          {"compute", r.compute_seconds},
          {"exposed_communication", r.exposed_seconds},
          {"steps", r.step_seconds}}},
        {"overlap",
         {{"tau", r.overlap.period},
          {"rounds", r.overlap.rounds},
          {"t_step", known(r.overlap.step)},
          {"t_round", known(r.overlap.round)},
          {"t_all_reduce", known(r.overlap.communication)},
          {"t_outer_update", known(r.overlap.outer)},
          {"exposed", known(r.overlap.exposed)},
          {"efficiency", known(r.overlap.efficiency())},
          {"interference", known(r.overlap.interference())},
          {"throughput_vs_no_communication", known(r.overlap.throughput())}}},
    };
}

/// Makes sure, before the training, that its results can be written: makes the folders, opens and removes a neighbor of
/// each file.
/// Errors  bad_input names the option; folders made until then are gone again.
inline void claim_files(const options& o) {
    namespace fs = std::filesystem;
    if (!o.checkpoint.empty() && !o.resume) {
        std::error_code absent;
        for (const auto& entry : fs::directory_iterator(o.checkpoint, absent)) {
            if (entry.path().filename().string().starts_with("checkpoint-")) {
                throw bad_input(fmt::format("--checkpoint: '{}' has checkpoints of another run: add --resume to go on "
                                            "from them, or name another folder",
                                            o.checkpoint));
            }
        }
    }
    std::vector<fs::path> made;
    for (const auto& [option, path] : o.written()) {
        std::error_code failed;
        std::vector<fs::path> missing;
        for (fs::path f = fs::absolute(path).parent_path(); !fs::exists(f); f = f.parent_path()) {
            missing.push_back(f);
        }
        for (auto f = missing.rbegin(); f != missing.rend() && !failed; ++f) {
            if (fs::create_directory(*f, failed)) { made.push_back(*f); }
        }
        const std::string neighbor = neighbor_of(path);
        if (!failed && !std::ofstream(neighbor)) { failed = std::error_code(errno, std::generic_category()); }
        if (failed) {
            std::error_code ignored;
            for (auto f = made.rbegin(); f != made.rend(); ++f) { fs::remove(*f, ignored); }
            throw bad_input(fmt::format("{}: cannot write '{}': {}", option, path, failed.message()));
        }
        fs::remove(neighbor);
    }
}

inline void write_text(const std::string& path, const std::string& text) {
    write_whole(path, [&](std::ofstream& out) { out << text; });
}

inline void write_results(const options& o, const result& r) {
    const std::string title =
        fmt::format("{} on {} {} ({}): {:.0f} tokens/s", o.pipeline, o.ranks, o.ranks == 1 ? "rank" : "ranks",
                    o.backend, tokens_of(o, r) / r.total_seconds);
    write_text(o.trace, r.trace);
    write_text(o.plot, loss_picture(title, r.training, r.validation, o.unit()));
    if (!o.levels_picture.empty()) {
        write_text(o.levels_picture, levels_picture(fmt::format("{}, {}: levels by layer, {}", o.pipeline,
                                                                o.family_of_levels(), level_unit(o.family_of_levels())),
                                                    r.tensors, r.levels, o.last_step()));
    }
    if (!o.plan_picture.empty()) { write_text(o.plan_picture, r.sequence->picture); }
    write_text(o.report, report_of(o, r).dump(2) + "\n");  // last: where there is a report, there is all of it
}

}  // namespace transformer
