// Which layout trains a model fastest on a machine's GPUs, what each of them then holds, and why not another; or how long
// given jobs take. Exit codes: 0 answered; 2 the user asked for something impossible (nothing was written); 1 the rest.
#include <cstdint>   // sizes
#include <cstdio>    // stderr
#include <fstream>   // files
#include <optional>  // exit code
#include <span>      // plans
#include <string>    // names
#include <utility>   // move
#include <vector>    // plans

#include <CLI/CLI.hpp>        // command line
#include <fmt/format.h>       // messages
#include <nlohmann/json.hpp>  // report

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/plan/plan.hpp>   // search

#include <transformer/bad_input.hpp>   // refusals
#include <transformer/whole_file.hpp>  // files that appear whole

#include "files.hpp"

namespace {

using namespace plan_a_job;

constexpr double gib = 1 << 30;

struct options {
    std::string machine = "frontier";
    std::string model;
    std::string trainer = "megatron";
    std::string report;   // empty: none
    std::string picture;  // empty: none
    std::string predict;  // jobs; empty: search
    std::vector<std::string> schedules;
    std::vector<std::string> recomputations;
    plan::search_space space;
    std::size_t best = 8;
};

std::optional<int> parse(int argc, char** argv, options& o) {
    CLI::App app("Plans a training job: layouts of a model over GPUs, fastest first, with memory and reasons.",
                 "plan_a_job");
    app.add_option("--machine", o.machine, machine_help)->capture_default_str();
    const CLI::Range ranks(1, 1 << 24);
    const CLI::Range sequences(std::int64_t{1}, std::int64_t{1} << 40);
    app.add_option("--gpus", o.space.ranks, "how many")->check(ranks);
    app.add_option("--model", o.model,
                   "gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m, gpt-22b, gpt-175b, gpt-530b, gpt-1t, "
                   "or LAYERS,HIDDEN,HEADS,VOCABULARY,SEQUENCE");
    auto* const batch =
        app.add_option("--batch", o.space.sequences, "sequences a step, of all GPUs; default: one a GPU")
            ->check(sequences);
    app.add_option("--tp", o.space.tensor,
                   "tensor ranks to try; default: all that divide; they, and --tp times --sp, divide a node "
                   "or are whole ones")
        ->check(ranks);
    app.add_option("--pp", o.space.pipeline, "pipeline stages to try")->check(ranks);
    app.add_option("--sp", o.space.sequence,
                   "ranks that share every sequence, in rings, to try; default: all that divide")
        ->check(ranks);
    app.add_option("--micro-batch", o.space.micro_batches, "sequences of a micro-batch to try")->check(sequences);
    app.add_option("--zero", o.space.zero_stages, "ZeRO stages to try; 2 and 3 without a pipeline")
        ->check(CLI::Range(0, 3))
        ->capture_default_str();
    app.add_option("--schedule", o.schedules,
                   "of pipelines, to try: gpipe, 1f1b, interleaved, zero_bubble, zero_bubble_v, dual_pipe; "
                   "default: all");
    app.add_option("--recompute", o.recomputations,
                   "what to try: none, selective (scores of attention, or a kernel that "
                   "keeps none), full (layers), stages (of a pipeline); default: selective full; of --trainer "
                   "tutti selective stages");
    app.add_option("--trainer", o.trainer,
                   "whose activations are counted: megatron, as published, or tutti, this project's trainer, "
                   "of which only what it runs is planned")
        ->capture_default_str();
    app.add_option("--allow-compression", o.space.compressions,
                   "ratios by which gradients may be compressed, which changes them");
    app.add_option("--allow-tau", o.space.taus, "rounds of so many local steps may be made, which changes training");
    app.add_flag("--allow-delayed", o.space.delayed, "rounds may be adopted late as well (CO2)");
    app.add_flag("--kept-scores", o.space.kept_scores, "attention writes its scores to memory");
    app.add_option("--margin", o.space.margin, "share of the memory that fragments and libraries take")
        ->capture_default_str();
    app.add_option("--best", o.best, "plans to show")->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--report", o.report, "JSON: the best plan, the others, and why not their neighbors")
        ->type_name("FILE");
    app.add_option("--picture", o.picture, "SVG: where their seconds go, and memory against the limit")
        ->type_name("FILE");
    app.add_option("--predict", o.predict,
                   "JSON with a list 'steps' of jobs: say how long each takes, and do not search")
        ->type_name("FILE");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        fmt::print("{}", app.help());
        return 0;
    } catch (const CLI::ParseError& e) { throw bad_input(e.what()); }
    if (!(o.space.margin >= 0 && o.space.margin < 1)) {  // nor what is no number
        throw bad_input(fmt::format("--margin: {} is not a share, of 0 to below 1", o.space.margin));
    }
    if (!o.report.empty() && o.report == o.picture) {
        throw bad_input(fmt::format("--report and --picture name the same file '{}'", o.report));
    }
    if (!o.predict.empty()) {
        for (const CLI::Option* const other : app.get_options()) {
            const std::string name = other->get_name();
            const bool goes_along =
                name == "--predict" || name == "--machine" || name == "--margin" || name == "--report";
            if (!goes_along && other->count() != 0) {
                throw bad_input(fmt::format("{} and --predict exclude each other", name));
            }
        }
        return std::nullopt;
    }
    for (const char* const needed : {"--gpus", "--model"}) {
        if (app.count(needed) == 0) { throw bad_input(fmt::format("{} is missing", needed)); }
    }
    if (batch->count() == 0) { o.space.sequences = o.space.ranks; }
    if (!o.schedules.empty()) {
        o.space.schedules.clear();
        for (const std::string& s : o.schedules) { o.space.schedules.push_back(schedule_named(s, "--schedule")); }
    }
    o.space.of_trainer = o.trainer == "tutti";
    if (o.space.of_trainer) { o.space.recomputations = {plan::recomputation::selective, plan::recomputation::stages}; }
    if (!o.recomputations.empty()) {
        o.space.recomputations.clear();
        for (const std::string& r : o.recomputations) {
            o.space.recomputations.push_back(recomputation_named(r, "--recompute"));
        }
    }
    if (o.space.delayed && o.space.taus.empty()) { throw bad_input("--allow-delayed needs --allow-tau"); }
    return std::nullopt;
}

std::string parts_of(const plan::job& j) {
    return fmt::format("tp {} pp {} dp {}{}", j.tensor, j.pipeline, j.data,
                       j.sequence > 1 ? fmt::format(" sp {}", j.sequence) : "");
}

json json_of(const plan::model_shape& m, const plan::machine& on, const plan::planned& p) {
    const plan::job& j = p.how;
    const plan::utilization u = utilization_of(m, on, p);
    const plan::step_time& t = p.time;
    const plan::rank_memory& held = p.peak.memory;
    return {{"tp", j.tensor},
            {"pp", j.pipeline},
            {"dp", j.data},
            {"sp", j.sequence},
            {"micro_batch", j.micro_batch},
            {"micro_batches", j.micro_batches},
            {"zero_stage", j.zero_stage},
            {"schedule", name_of(j.schedule)},
            {"chunks", j.chunks},
            {"recompute", name_of(j.recompute)},
            {"sequence_parallel", j.sequence_parallel},
            {"replicas", j.replicas},
            {"tau", j.tau},
            {"delayed", j.delayed},
            {"compression", j.compression},
            {"secondary", j.secondary},
            {"strategy", strategy_of(j)},
            {"memory_gib_per_gpu", held.total() / gib},
            {"memory_gib",
             {{"states", held.states / gib},
              {"activations", (held.activations + held.inputs) / gib},
              {"working", held.working / gib},
              {"exchange", held.exchange / gib}}},
            {"seconds_per_step", p.seconds()},
            {"seconds",
             {{"products", t.products},
              {"memory", t.memory},
              {"tensor", t.tensor},
              {"rings", t.sequence},
              {"bubble", t.bubble},
              {"messages", t.messages},
              {"data", t.data},
              {"updates", t.updates},
              {"hidden", t.hidden}}},
            {"mfu", u.model},
            {"hfu", u.hardware}};
}
json json_of(const plan::machine& on) {
    json figures = json::array();
    for (const plan::machine_figure& f : figures_of(on)) {
        figures.push_back({{"name", f.name}, {"value", f.value}, {"evidence", name_of(f.from)}});
    }
    return {{"name", on.name},
            {"figures", std::move(figures)},
            {"flops", on.flops},
            {"memory_bytes", on.memory_bytes},
            {"product_efficiency", on.product_efficiency},
            {"memory_efficiency", on.memory_efficiency},
            {"link_efficiency", on.link_efficiency},
            {"launch_seconds", on.launch_seconds}};
}

void write(const std::string& path, const std::string& what) {
    if (!path.empty()) {
        transformer::write_whole(path, [&](std::ofstream& out) { out << what; });
    }
}

int predict(const options& o, const plan::machine& on) {
    json rows = json::array();
    for (const plan::measured_step& s : steps_of(o.predict)) {
        const plan::planned p{s.how, time_of_step(s.model, s.how, on, s.kept_scores), peak_of(s.model, s.how)};
        json row = json_of(s.model, on, p);
        row["fits"] = fits(s.model, s.how, on, o.space.margin);
        if (s.seconds > 0) { row["measured_seconds"] = s.seconds; }
        fmt::print("{}, {} x {}: {:.4g} s{}, {:.1f} GiB{}\n", parts_of(s.how), s.how.micro_batches, s.how.micro_batch,
                   p.seconds(), s.seconds > 0 ? fmt::format(" ({:.4g} measured)", s.seconds) : "",
                   p.peak.memory.total() / gib, row["fits"] ? "" : ", which does not fit");
        rows.push_back(std::move(row));
    }
    write(o.report, json{{"machine", json_of(on)}, {"steps", std::move(rows)}}.dump(1) + '\n');
    return 0;
}

int search(const options& o, const plan::machine& on) {
    plan::model_shape model = model_of(o.model);
    model.keeps = keeping_of(o.trainer, "--trainer");
    const plan::search_result found = plan::search(model, on, o.space, o.best);
    if (found.best.empty()) {
        const plan::planned& p = found.lightest;
        throw bad_input(fmt::format("nothing fits: even {}{} takes {:.1f} GiB on a GPU, of which {:.1f} may be used; "
                                    "it takes more --gpus, or fewer restrictions",
                                    parts_of(p.how),
                                    p.how.averaging() == 1 ? "" : fmt::format(" with {}", strategy_of(p.how)),
                                    p.peak.memory.total() / gib, usable_bytes(on, o.space.margin) / gib));
    }
    const plan::planned& best = found.best[0];
    const std::vector<plan::alternative> others = alternatives(model, on, o.space, best);
    const std::string title = fmt::format("{} on {} GPUs of {}, {} sequences of {} tokens a step", o.model,
                                          o.space.ranks, on.name, o.space.sequences, model.sequence);
    fmt::print("{}: {} layouts\n\n{}\nwhy the first, and not with\n{}\nwhat this rests on\n{}", title, found.layouts,
               text_of(model, on, found.best), text_of(others, o.space), text_of(on));

    json report = json_of(model, on, best);
    report["machine"] = json_of(on);
    report["model"] = o.model;
    report["parameters"] = model.parameters();
    report["gpus"] = o.space.ranks;
    report["batch"] = o.space.sequences;
    report["memory_limit_gib"] = usable_bytes(on, o.space.margin) / gib;
    for (const plan::planned& p : found.best) { report["plans"].push_back(json_of(model, on, p)); }
    report["alternatives"] = json::array();
    for (const plan::alternative& a : others) {
        report["alternatives"].push_back({{"dimension", a.dimension}, {"value", a.value}, {"verdict", a.verdict}});
    }
    write(o.report, report.dump(1) + '\n');
    write(o.picture, svg_of(on, found.best, title, o.space.margin));
    return 0;
}

int complain(const char* what, int code) {
    fmt::print(stderr, "plan_a_job: {}\n", what);
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        options o;
        if (const auto code = parse(argc, argv, o)) { return *code; }
        std::string name;
        const plan::machine on = machine_of(o.machine, name);
        return o.predict.empty() ? search(o, on) : predict(o, on);
    } catch (const bad_input& e) { return complain(e.what(), 2); } catch (const tutti::usage_error& e) {
        return complain(e.what(), 2);
    } catch (const std::exception& e) { return complain(e.what(), 1); }
}
