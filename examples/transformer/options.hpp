// What the user may choose, and the checks that everything chosen can be done.
// Needs CLI11. A bad value is one line on stderr and exit code 2, before anything is written.
#pragma once

#include <algorithm>     // find_if, find_first_of
#include <charconv>      // from_chars
#include <cmath>         // isfinite
#include <cstdint>       // seed
#include <filesystem>    // default paths
#include <limits>        // largest seed
#include <string>        // names
#include <string_view>   // parts of them
#include <system_error>  // errc
#include <utility>       // pair
#include <vector>        // data paths

#include <CLI/CLI.hpp>                      // command line
#include <fmt/format.h>                     // messages
#include <tutti/comm/shaped.hpp>            // stated networks
#include <tutti/comm/topology.hpp>          // link
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/optimize/adamw.hpp>         // optimizer
#include <tutti/sequence/placement.hpp>     // no_capacity
#include <tutti/strategy/staleness.hpp>     // gaps
#include <tutti/zeroth/pending_update.hpp>  // max_directions

#include "bad_input.hpp"
#include "documents.hpp"
#include "parallel_options.hpp"
#include "parameters.hpp"
#include "zeroth_options.hpp"

namespace transformer {

struct options : parallel_options {
    std::vector<std::string> data;      // files and folders
    std::string token_file;             // empty: `data` is the text
    std::string validation_token_file;  // empty: the last tenth of the other
    std::string device = "cpu";
    int gpus = 0;   // 0: one, where the device is cuda
    int ranks = 0;  // 0: as many as the backend has, or the default
    std::string backend = "threads";
    std::string pipeline = "ddp";
    std::vector<std::string> compare;  // pipelines that train one after the other; empty: `pipeline` alone
    int steps = 2000;
    int batch = 12;               // sequences of all ranks together
    int micro_batch = 0;          // sequences a rank computes at a time; 0: as many as keep its activations in cache
    std::string model_name;       // a published one; empty: sizes are given one by one
    bool random_weights = false;  // it has none but random ones
    configuration model;
    double learning_rate = 1e-3;
    bool rate_given = false;          // by the user; otherwise mezo has its own
    int bits = 4;                     // ddp-4bit
    double density = 0.01;            // ddp-topk: kept elements
    int rank = 4;                     // ddp-powersgd
    std::string family = "quantize";  // ddp-lgreco: what levels are of; and how they are chosen
    double alpha = 1;
    double level_range = 0;  // 0: what suits the family; error_sum likewise if empty
    int select_every = 100;
    std::string error_sum;
    std::string measure = "local";
    int tau = 8;                 // local updates: steps of a round
    bool automatic_tau = false;  // tau steps at first, then what was measured asks for
    int synchronous_steps = 0;   // before the first round
    int fragments = 1;           // parts of the model whose rounds end in turn
    double beta = -1;            // momentum over rounds; -1: what suits the pipeline
    std::string gap = "scalar";  // co2: none, constant:X, scalar, elementwise
    int nodes = 0;               // 0: as many as there are host names
    std::string network;         // empty: as it is
    std::uint64_t seed = 1;
    std::string precision;  // empty: float, on cuda bf16
    int recompute = -1;     // -1: what suits the device
    std::string lengths;    // of documents: a distribution's name or a file of them; and pipelines of documents only:
    long capacity = 0;      // tokens of documents that a rank holds; 0: any number
    std::string plan_picture;          // where a picture of where they are goes; empty: nowhere
    std::string zo_parallel = "data";  // mezo: what ranks share
    double epsilon = 1e-3;             // likewise: how far weights are moved
    int directions = 1;                // likewise: of a step
    int shards = 0;  // likewise: parts of the batch that losses are averaged over; 0: one a rank or pair
    zeroth_options zeroth;
    int eval_every = 500;
    std::string report = "run/report.json";
    std::string trace;           // empty: beside the report
    std::string plot;            // empty: beside the report
    std::string load;            // weights to start from; empty: random ones
    std::string save;            // where trained weights go; empty: nowhere
    std::string checkpoint;      // folder of checkpoints; empty: none are made
    int checkpoint_every = 500;  // steps
    bool resume = false;         // from the newest of them
    int stop_after = 0;          // steps of the whole run; 0: all
    std::string levels_picture;  // where a picture of levels goes; empty: nowhere
    bool quiet = false;

    /// --density in the units of top_k.
    [[nodiscard]] int kept_in_10000() const { return static_cast<int>(std::lround(density * 10'000)); }
    [[nodiscard]] std::size_t period() const { return static_cast<std::size_t>(tau); }
    [[nodiscard]] double outer_momentum(double usual) const { return beta < 0 ? usual : beta; }
    /// --gap. Errors: bad_input.
    [[nodiscard]] tutti::strategy::staleness_gap staleness() const {
        constexpr std::string_view constant = "constant:";
        if (gap == "none") { return tutti::strategy::no_gap{}; }
        if (gap == "scalar") { return tutti::strategy::scalar_gap{}; }
        if (gap == "elementwise") { return tutti::strategy::elementwise_gap{}; }
        double value = 0;
        const char* const end = gap.data() + gap.size();
        if (gap.starts_with(constant) && std::from_chars(gap.data() + constant.size(), end, value).ptr == end &&
            value >= 1 && value <= 1e30) {
            return tutti::strategy::constant_gap{value};
        }
        throw bad_input(
            fmt::format("--gap: '{}' is not one of none, constant:X (X at least 1), scalar, elementwise", gap));
    }
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
    [[nodiscard]] bool packs_documents() const {
        return pipeline == "packed" || pipeline == "even-ring" || pipeline == "zeppelin";
    }
    /// Does it make forward passes alone?
    [[nodiscard]] bool of_forward_passes() const { return zeroth_options::of_forward_passes(pipeline); }
    /// Do ranks have parts of the model?
    [[nodiscard]] bool of_parts() const { return pipeline == "tp" || pipeline == "pp" || pipeline == "3d"; }
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
    [[nodiscard]] std::int64_t tokens_held() const {
        return capacity == 0 ? tutti::sequence::no_capacity : std::int64_t{capacity};
    }
    /// What a token is, and so what a loss is for.
    [[nodiscard]] const char* unit() const { return token_file.empty() ? "byte" : "token"; }
    /// The files that the run writes, with the options that name them.
    [[nodiscard]] std::vector<std::pair<const char*, std::string>> written() const {
        std::vector<std::pair<const char*, std::string>> files{
            {"--report", report}, {"--trace", trace}, {"--plot", plot}};
        if (!save.empty()) { files.emplace_back("--save", save); }
        if (!levels_picture.empty()) { files.emplace_back("--levels-picture", levels_picture); }
        if (!plan_picture.empty()) { files.emplace_back("--plan-picture", plan_picture); }
        return files;
    }

    /// The step behind which the run ends.
    [[nodiscard]] int last_step() const { return stop_after == 0 ? steps : stop_after; }

    // nanoGPT's schedule and AdamW: linear warm-up, cosine to a tenth; decay of matrices; clipping by the global norm.
    [[nodiscard]] int warmup_steps() const { return std::min(100, steps / 10); }
    [[nodiscard]] double final_learning_rate() const { return learning_rate / 10; }
    [[nodiscard]] tutti::optimize::adamw optimizer() const {
        return {.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1};
    }
    static constexpr double clip_norm = 1.0;
};

/// A --network as a link. Errors: bad_input.
[[nodiscard]] inline tutti::comm::link stated_link(const std::string& text) {
    try {
        return tutti::comm::shaped_network::parse(text).among(2).between();
    } catch (const tutti::usage_error& e) { throw bad_input(fmt::format("--network: {}", e.what())); }
}

/// Sequences per micro-batch when the user does not say: of the divisors of a rank's part, the largest with at most 256
/// tokens. More would push the activations out of the second-level cache and cost about a tenth of the speed.
[[nodiscard]] inline int cached_micro_batch(int part, int context) {
    int best = 1;
    for (int m = 1; m <= part; ++m) {
        if (part % m == 0 && static_cast<long>(m) * context <= 256) { best = m; }
    }
    return best;
}

/// "gpt2-124m, gpt2-350m, ...": for messages.
template <class Sizes> [[nodiscard]] std::string names_of(const Sizes& sizes) {
    std::string text;
    for (const published_size& size : sizes) { text += fmt::format("{}{}", text.empty() ? "" : ", ", size.name); }
    return text;
}

/// Declares every option on `app`. `pipelines` is the help text's list of names, one a line.
inline void declare(CLI::App& app, options& o, const std::string& pipelines) {
    const auto within = [](long least, long most) { return CLI::Range(least, most); };
    const CLI::Validator named(
        [](const std::string& file) { return std::string(file.empty() ? "no file name given" : ""); }, "");
    app.add_option("--data", o.data, "text files, or folders of text files; default: this project's own sources")
        ->type_name("PATH...");
    app.add_option("--tokens", o.token_file, "instead of text: GPT-2 tokens, as llm.c's scripts write them (.bin)")
        ->check(named)
        ->type_name("FILE");
    app.add_option("--validation-tokens", o.validation_token_file,
                   "GPT-2 tokens to validate on; default: the last tenth of --tokens")
        ->check(named)
        ->type_name("FILE");
    app.add_option("--device", o.device, "cpu or cuda")->capture_default_str();
    app.add_option(
           "--gpus", o.gpus,
           "GPUs to train on, a rank each; default with --device cuda: 1, or one for each of mpirun's processes")
        ->check(within(1, 1024));
    app.add_option("--ranks", o.ranks, "number of ranks; default 4 threads, all of mpirun's processes, 1 for 'local'")
        ->check(within(1, 1024));
    app.add_option("--backend", o.backend, "threads; under mpirun mpi, or nccl with a GPU a process")
        ->capture_default_str();
    app.add_option("--pipeline", o.pipeline, "how ranks work together:\n" + pipelines)->capture_default_str();
    app.add_option("--compare", o.compare,
                   "train these pipelines one after the other, each as --pipeline would; ends with a table, a picture "
                   "of their losses (--plot) and a report of all (--report), beside those of each")
        ->delimiter(',')
        ->type_name("NAME,NAME...");
    app.add_option("--steps", o.steps, "optimizer steps")->check(within(1, 100'000'000))->capture_default_str();
    app.add_option("--batch", o.batch, "sequences per step, all ranks together")
        ->check(within(1, 1'000'000))
        ->capture_default_str();
    app.add_option("--micro-batch", o.micro_batch,
                   "sequences a rank computes at a time, accumulating gradients; default: up to 256 tokens, with "
                   "--device cuda all")
        ->check(within(1, 1'000'000));
    app.add_option(
           "--model", o.model_name,
           "sizes of a published model with its positions, 1024 or OPT's 2048; --context is as much unless "
           "given less:\n" +
               names_of(gpt2_sizes) +
               "\nor, to measure mezo, zo2 and distzo2, GPT-2 with random weights of OPT's extents "
               "(vocabulary, positions, layers or the first --layers of them, heads, width; GELU where OPT has ReLU, "
               "so no weights of OPT):\n" +
               names_of(opt_sizes))
        ->type_name("NAME");
    app.add_option("--context", o.model.context, "tokens per sequence")
        ->check(within(1, 65'536))
        ->capture_default_str();
    app.add_option("--layers", o.model.layers, "layers")->check(within(1, 1000))->capture_default_str();
    app.add_option("--heads", o.model.heads, "attention heads")->check(within(1, 1000))->capture_default_str();
    app.add_option("--width", o.model.width, "width of the residual stream")
        ->check(within(1, 65'536))
        ->capture_default_str();
    app.add_option_function<double>(
           "--lr",
           [&o](double rate) {
               o.learning_rate = rate;
               o.rate_given = true;
           },
           "peak learning rate; mezo, zo2, distzo2: that of all steps")
        ->default_str("0.001, those three 0.0001");
    app.add_option("--bits", o.bits,
                   "ddp-4bit: bits of an element, also other than 4; ddp-lgreco: those it starts from")
        ->check(within(1, 8))
        ->capture_default_str();
    app.add_option("--density", o.density, "ddp-topk: kept part of the elements, 0.0001 to 1; ddp-lgreco: as --bits")
        ->capture_default_str();
    app.add_option("--rank", o.rank, "ddp-powersgd: columns of a factor; ddp-lgreco: as --bits")
        ->check(within(1, 1024))
        ->capture_default_str();
    app.add_option("--family", o.family,
                   "ddp-lgreco: what is chosen for each matrix: bits (quantize), densities (topk) or ranks (powersgd)")
        ->capture_default_str();
    app.add_option("--alpha", o.alpha,
                   "ddp-lgreco: errors that levels may have, over those of the level it starts from")
        ->capture_default_str();
    app.add_option("--level-range", o.level_range,
                   "ddp-lgreco: levels are from the one it starts from divided by this to as many times it; default 2, "
                   "topk 4");
    app.add_option("--select-every", o.select_every, "ddp-lgreco: steps from choice to choice, 11 or more")
        ->check(within(11, 100'000'000))
        ->capture_default_str();
    app.add_option("--error-sum", o.error_sum,
                   "ddp-lgreco: errors of matrices add up as norms or as squares; default norms, powersgd squares");
    app.add_option(
           "--measure", o.measure,
           "ddp-lgreco: errors are those of gradients of each rank, with what it owes (local), or of their mean "
           "(averaged)")
        ->capture_default_str();
    app.add_option_function<std::string>(
           "--tau",
           [&o](const std::string& text) {
               o.automatic_tau = text == "auto";
               const char* const end = text.data() + text.size();
               if (o.automatic_tau) { return; }
               const auto [rest, problem] = std::from_chars(text.data(), end, o.tau);
               if (problem != std::errc{} || rest != end || o.tau < 1 || o.tau > 100'000'000) {
                   throw CLI::ValidationError("--tau", fmt::format("'{}' is neither a number of steps nor auto", text));
               }
           },
           "local-sgd, slowmo, co2, co2-zero, cocod, those of diloco: steps between two averages; auto: as few as let "
           "at most 1 % of "
           "the time be waiting, measured in three rounds of 8")
        ->default_str("8")
        ->type_name("INT|auto");
    app.add_option("--sync-steps", o.synchronous_steps,
                   "likewise: steps before the first round, in which ranks average gradients as ddp does")
        ->check(within(0, 100'000'000))
        ->capture_default_str();
    app.add_option(
           "--fragments", o.fragments,
           "likewise: parts of the model, of whole tensors, whose rounds end in turn, so that less is sent at once")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.add_option("--beta", o.beta,
                   "slowmo, co2, co2-zero, diloco, eager-diloco: momentum over rounds, 0 to less than 1; default 0.5, "
                   "co2 0.2, those of diloco 0.9");
    app.add_option(
           "--gap", o.gap,
           "co2, co2-zero: what divides an average that comes a round late: none, constant:X, scalar or elementwise")
        ->capture_default_str();
    app.add_option("--nodes", o.nodes,
                   "machines that the ranks are on, neighbors together: where each has several, gradients but those of "
                   "ddp-powersgd are compressed between machines alone; default: by host names")
        ->check(within(1, 1024));
    app.add_option("--network", o.network,
                   "let the network between machines be as slow as this, bandwidth and latency as in 1Gbit,50us; "
                   "latency 0 if left out; "
                   "without --nodes each rank is a machine")
        ->type_name("LINK");
    app.add_option(
           "--lengths", o.lengths,
           "packed, even-ring, zeppelin, and in each micro-batch tp, pp, 3d: draw documents of these lengths, --batch "
           "times --context tokens a step, each cut to --context: " +
               document_lengths::names() + ", or a file of numbers of tokens")
        ->check(named)
        ->type_name("NAME|FILE");
    app.add_option("--capacity", o.capacity,
                   "likewise: tokens of documents that a rank may hold for attention; default: any number")
        ->check(within(1, 1L << 40))
        ->type_name("TOKENS");
    app.add_option("--plan-picture", o.plan_picture,
                   "packed, even-ring, zeppelin: SVG picture of where the first step's documents are")
        ->check(named)
        ->type_name("FILE");
    app.add_option("--zo-parallel", o.zo_parallel,
                   "mezo, distzo2: ranks share the two sides of a direction (perturbation, 2 ranks), parts of the "
                   "batch (data), or "
                   "both (2d, an even number)")
        ->capture_default_str();
    app.add_option("--epsilon", o.epsilon, "likewise: how far weights are moved to either side")->capture_default_str();
    app.add_option("--directions", o.directions, "likewise: random directions of a step")
        ->check(within(1, static_cast<long>(tutti::zeroth::max_directions)))
        ->capture_default_str();
    app.add_option("--shards", o.shards,
                   "likewise: parts of the batch that losses are averaged over; runs of equal shards and micro-batches "
                   "have the same bits on any number of ranks; default: one a rank, or pair")
        ->check(within(1, 1'000'000));
    declare(app, o.zeroth);
    declare(app, static_cast<parallel_options&>(o));
    app.add_option("--seed", o.seed, "of initial weights, samples and generated text")
        ->check(within(0, std::numeric_limits<long>::max()))
        ->capture_default_str();
    app.add_option(
        "--precision", o.precision,
        "float or double; with --device cuda bf16, float or, for mezo, zo2 and distzo2, float16; default the "
        "first");
    app.add_option(
           "--recompute", o.recompute,
           "what backward computes again instead of keeping it: 0 nothing, 1 GELU, 2 also layer normalization, 3 "
           "(tp, pp, 3d) all but what enters a stage; default 1, with --device cuda and schedules that defer "
           "weights' gradients (zb-h1, zb-v, dualpipe) 0")
        ->check(within(0, 3));
    app.add_option("--eval-every", o.eval_every, "steps between validations")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.add_option("--load", o.load, "start from these GPT-2 weights (safetensors)")->check(named)->type_name("FILE");
    app.add_option("--save", o.save, "write the trained weights there (safetensors, F32)")
        ->check(named)
        ->type_name("FILE");
    app.add_option("--checkpoint", o.checkpoint,
                   "make checkpoints of the run in this folder, now and then and where it ends; the two newest stay")
        ->check(CLI::Validator(
            [](const std::string& folder) { return std::string(folder.empty() ? "no folder given" : ""); }, ""))
        ->type_name("FOLDER");
    app.add_option("--checkpoint-every", o.checkpoint_every, "steps between checkpoints")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.add_flag("--resume", o.resume,
                 "go on from the newest whole checkpoint in --checkpoint; from the beginning where there is none");
    app.add_option("--stop-after", o.stop_after,
                   "end after this many of --steps, as a time limit would: the schedule stays that of --steps")
        ->check(within(1, 100'000'000));
    app.add_option("--report", o.report, "JSON report")->type_name("FILE")->capture_default_str();
    app.add_option("--trace", o.trace, "Chrome trace for ui.perfetto.dev; default: trace.json beside the report")
        ->type_name("FILE");
    app.add_option("--plot", o.plot, "SVG picture of the loss; default: loss.svg beside the report")->type_name("FILE");
    app.add_option("--levels-picture", o.levels_picture, "SVG picture of the levels of compression, by layer and step")
        ->check(named)
        ->type_name("FILE");
    app.add_flag("--quiet", o.quiet, "print nothing but errors");
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

/// The sizes that --model and --tokens stand for. `app` has parsed the command line into `o`.
/// Errors  bad_input for an unknown name, and for a size that contradicts it.
inline void choose_model(const CLI::App& app, options& o) {
    using detail::require;
    const bool named = app.count("--model") > 0;
    if (named || app.count("--tokens") > 0) { o.model.vocabulary = gpt2_vocabulary; }
    if (!named) { return; }
    const auto size_in = [&](const auto& sizes) -> const published_size* {
        const auto at = std::find_if(sizes.begin(), sizes.end(), [&](const auto& s) { return s.name == o.model_name; });
        return at == sizes.end() ? nullptr : &*at;
    };
    const published_size* const opt = size_in(opt_sizes);
    const published_size* const found = opt != nullptr ? opt : size_in(gpt2_sizes);
    require(found != nullptr,
            fmt::format("--model: '{}' is not one of {}, {}", o.model_name, names_of(gpt2_sizes), names_of(opt_sizes)));
    const auto fix = [&](const char* option, int& size, int published) {
        require(app.count(option) == 0 || size == published,
                fmt::format("{}: {} contradicts --model {}, which has {}", option, size, o.model_name, published));
        size = published;
    };
    if (opt == nullptr || app.count("--layers") == 0 || o.model.layers > opt->layers) {
        fix("--layers", o.model.layers, found->layers);
    }
    fix("--heads", o.model.heads, found->heads);
    fix("--width", o.model.width, found->width);
    o.random_weights = opt != nullptr;
    if (opt != nullptr) { o.model.vocabulary = opt_vocabulary; }
    o.model.positions = opt != nullptr ? opt_positions : gpt2_positions;
    if (app.count("--context") == 0) { o.model.context = o.model.positions; }
    require(o.model.context <= o.model.positions,
            fmt::format("--context: {} is more than the {} positions of --model {}", o.model.context, o.model.positions,
                        o.model_name));
}

/// Errors  bad_input for an option that was given and that no pipeline of the run, or of --compare, looks at.
inline void refuse_unused(const CLI::App& app, const options& o) {
    using names = std::vector<std::string_view>;
    const names rounds{"local-sgd", "slowmo", "co2", "co2-zero", "diloco", "eager-diloco", "cocod"},
        chosen{"ddp-lgreco"}, forward{"mezo", "zo2", "distzo2"};
    const std::pair<const char*, names> users[] = {{"--bits", {"ddp-4bit", "ddp-lgreco"}},
                                                   {"--density", {"ddp-topk", "ddp-lgreco"}},
                                                   {"--rank", {"ddp-powersgd", "ddp-lgreco"}},
                                                   {"--family", chosen},
                                                   {"--alpha", chosen},
                                                   {"--level-range", chosen},
                                                   {"--select-every", chosen},
                                                   {"--error-sum", chosen},
                                                   {"--measure", chosen},
                                                   {"--tau", rounds},
                                                   {"--sync-steps", rounds},
                                                   {"--fragments", rounds},
                                                   {"--beta", {"slowmo", "co2", "co2-zero", "diloco", "eager-diloco"}},
                                                   {"--gap", {"co2", "co2-zero"}},
                                                   {"--zo-parallel", forward},
                                                   {"--epsilon", forward},
                                                   {"--directions", forward},
                                                   {"--shards", forward}};
    const std::vector<std::string> asked = o.compare.empty() ? std::vector{o.pipeline} : o.compare;
    for (const auto& [option, by] : users) {
        const bool used = std::find_first_of(asked.begin(), asked.end(), by.begin(), by.end()) != asked.end();
        if (app.count(option) == 0 || used) { continue; }
        std::string list;
        for (const std::string_view name : by) { list += fmt::format("{}{}", list.empty() ? "" : ", ", name); }
        throw bad_input(fmt::format("{}: pipeline '{}' makes no use of it; {} {}", option, asked.front(), list,
                                    by.size() == 1 ? "does" : "do"));
    }
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
/// The name of a file of one of several runs: "run/report.json" becomes "run/report-co2.json".
[[nodiscard]] inline std::string file_of_run(const std::string& file, const std::string& pipeline) {
    const std::filesystem::path path(file);
    const std::string name = path.stem().string() + "-" + pipeline + path.extension().string();
    return (path.parent_path() / name).string();
}

/// Fills what depends on other options and checks what spans options. `processes` is mpirun's, 0 without.
/// Errors  bad_input.
inline void complete(options& o, bool pipeline_is_single_rank, int processes) {
    using detail::require;
    require(o.token_file.empty() || o.data.empty(), "--tokens: not together with --data");
    require(o.validation_token_file.empty() || !o.token_file.empty(), "--validation-tokens: needs --tokens");
    if (!o.rate_given && o.of_forward_passes()) { o.learning_rate = 1e-4; }
    require(std::isfinite(o.learning_rate) && o.learning_rate > 0 && o.learning_rate <= 1e3,
            fmt::format("--lr: {} is not a positive number up to 1000", o.learning_rate));
    require(o.density >= 0.0001 && o.density <= 1,
            fmt::format("--density: {} is not a part from 0.0001 to 1", o.density));
    require(o.family == "quantize" || o.family == "topk" || o.family == "powersgd",
            fmt::format("--family: '{}' is not one of quantize, topk, powersgd", o.family));
    require(std::isfinite(o.alpha) && o.alpha > 0 && o.alpha <= 1000,
            fmt::format("--alpha: {} is not a positive number up to 1000", o.alpha));
    if (o.level_range == 0) { o.level_range = o.family == "topk" ? 4 : 2; }
    if (o.error_sum.empty()) { o.error_sum = o.family == "powersgd" ? "squares" : "norms"; }
    require(std::isfinite(o.level_range) && o.level_range >= 1 && o.level_range <= 10'000,
            fmt::format("--level-range: {} is not a number from 1 to 10000", o.level_range));
    require(o.error_sum == "norms" || o.error_sum == "squares",
            fmt::format("--error-sum: '{}' is not one of norms, squares", o.error_sum));
    require(o.measure == "local" || o.measure == "averaged",
            fmt::format("--measure: '{}' is not one of local, averaged", o.measure));
    require(o.levels_picture.empty() || !o.family_of_levels().empty(),
            fmt::format("--levels-picture: pipeline '{}' does not compress gradients", o.pipeline));
    const std::pair<const char*, bool> of_documents[] = {{"--lengths", !o.lengths.empty()},
                                                         {"--capacity", o.capacity != 0}};
    for (const auto& [option, given] : of_documents) {
        require(!given || o.packs_documents() || o.of_parts(),
                fmt::format("{}: pipeline '{}' trains on sequences of one length; packed, even-ring, zeppelin, tp, pp "
                            "and 3d can do otherwise",
                            option, o.pipeline));
    }
    require(o.plan_picture.empty() || o.packs_documents(),
            fmt::format("--plan-picture: is of packed, even-ring and zeppelin, not of pipeline '{}'", o.pipeline));
    detail::complete_parts(o, processes);
    require(o.device == "cpu" || o.device == "cuda", fmt::format("--device: '{}' is not one of cpu, cuda", o.device));
    const bool on_gpu = o.device == "cuda";
    require(on_gpu || o.gpus == 0, "--gpus: needs --device cuda");
    require(on_gpu || o.backend != "nccl", "--backend: nccl needs --device cuda");
    require(!on_gpu || o.backend != "mpi", "--backend: mpirun's processes on GPUs speak NCCL; use --backend nccl");
    if (on_gpu) {
        if (o.gpus == 0) { o.gpus = processes > 0 ? processes : 1; }
        require(o.ranks == 0 || o.ranks == o.gpus,
                fmt::format("--ranks: {} ranks on {} GPUs; there is one rank a GPU", o.ranks, o.gpus));
        o.ranks = o.gpus;
        const int widest = o.of_forward_passes() ? 16384 : 8192;
        require(o.model.width <= widest, fmt::format("--width: {} is more than the GPU's {}", o.model.width, widest));
    }
    if (o.precision.empty()) { o.precision = on_gpu ? "bf16" : "float"; }
    const bool in_float16 = o.precision == "float16";
    for (const char* const half : {"bf16", "float16"}) {
        require(on_gpu || o.precision != half, fmt::format("--precision: {} needs --device cuda", half));
    }
    require(
        !in_float16 || o.of_forward_passes(),
        fmt::format("--precision: gradients of '{}' leave float16's range, use bf16; mezo, zo2 and distzo2 have none",
                    o.pipeline));
    require(in_float16 || o.precision == "float" || o.precision == (on_gpu ? "bf16" : "double"),
            fmt::format("--precision: '{}' is not one of {}", o.precision,
                        on_gpu ? "bf16, float, float16" : "float, double"));
    if (o.recompute < 0) { o.recompute = on_gpu ? 0 : 1; }
    if (o.ranks == 0) { o.ranks = processes > 0 ? processes : pipeline_is_single_rank ? 1 : 4; }
    require(!pipeline_is_single_rank || o.ranks == 1,
            fmt::format("--ranks: pipeline '{}' is for 1 rank, not {}", o.pipeline, o.ranks));
    require(processes == 0 || o.ranks == processes,
            fmt::format("--ranks: {} asked for, but mpirun started {}", o.ranks, processes));
    require(o.beta == -1 || (o.beta >= 0 && o.beta < 1),
            fmt::format("--beta: {} is not a momentum from 0 to less than 1", o.beta));
    static_cast<void>(o.staleness());  // refuses
    require(
        o.fragments == 1 || (o.fragments <= o.tau && !o.automatic_tau),
        fmt::format("--fragments: {} parts end their rounds in turn, each at a step of its own: --tau must be a number "
                    "of at least as many steps",
                    o.fragments));
    require(!on_gpu || o.network.empty(), "--network: only ranks on the CPU pretend to have another network");
    if (!o.network.empty()) { static_cast<void>(stated_link(o.network)); }  // refuses
    require(o.nodes == 0 || o.ranks % o.nodes == 0,
            fmt::format("--nodes: {} ranks cannot be divided among {} machines", o.ranks, o.nodes));
    require(!o.random_weights || o.of_forward_passes(),
            fmt::format("--model: {} is for measurements of mezo, zo2 and distzo2; pipeline '{}' trains gpt2 models",
                        o.model_name, o.pipeline));
    if (o.of_forward_passes()) {
        require(o.zo_parallel == "data" || o.zo_parallel == "perturbation" || o.zo_parallel == "2d",
                fmt::format("--zo-parallel: '{}' is not one of perturbation, data, 2d", o.zo_parallel));
        require(std::isfinite(o.epsilon) && o.epsilon > 0 && o.epsilon <= 1000,
                fmt::format("--epsilon: {} is not a positive number up to 1000", o.epsilon));
        require(o.zo_parallel != "perturbation" || o.ranks == 2,
                fmt::format("--zo-parallel: a direction has two sides, for 2 ranks, not {}; 2d has pairs", o.ranks));
        require(o.ranks % o.sides() == 0, fmt::format("--zo-parallel: {} ranks are not pairs", o.ranks));
        require(o.checkpoint.empty(),
                fmt::format("--checkpoint: pipeline '{}' has none; --save writes weights", o.pipeline));
    }
    complete(o.zeroth, o.pipeline, o.precision, o.model.layers, o.ranks, o.backend == "threads" && o.network.empty());
    constexpr long most_tokens = 1L << 24;  // extents of matrices are int, and so are CBLAS's
    if (o.of_documents()) {
        require(!o.lengths.empty(), fmt::format("--pipeline: '{}' needs --lengths", o.pipeline));
        static_cast<void>(document_lengths(o.lengths));  // refuses
    }
    if (o.packs_documents()) {
        require(o.micro_batch == 0,
                fmt::format("--micro-batch: pipeline '{}' computes a step's documents at a time", o.pipeline));
        require(o.capacity == 0 || o.tokens_per_step() <= std::int64_t{o.capacity} * o.ranks,
                fmt::format("--capacity: {} ranks of {} tokens do not hold the {} of a step", o.ranks, o.capacity,
                            o.tokens_per_step()));
        require(
            o.capacity == 0 || o.pipeline != "packed" || o.model.context <= o.capacity,
            fmt::format("--capacity: {} tokens are less than a document of --context {}, which 'packed' does not cut",
                        o.capacity, o.model.context));
        require(o.tokens_per_step() <= most_tokens,
                fmt::format("--batch: {} tokens a step are more than {}", o.tokens_per_step(), most_tokens));
    } else {
        const int parts = o.of_forward_passes() ? o.shards_of_batch() : o.of_parts() ? o.dp : o.ranks;
        require(!o.of_forward_passes() || parts % (o.ranks / o.sides()) == 0,
                fmt::format("--shards: {} cannot be divided among {} ranks or pairs", parts, o.ranks / o.sides()));
        require(o.batch % parts == 0, fmt::format("--batch: {} sequences cannot be divided among {} {}", o.batch, parts,
                                                  o.of_parts()    ? "replicas"
                                                  : o.shards == 0 ? "ranks"
                                                                  : "shards"));
        const int part = o.batch / parts;
        if (o.micro_batch == 0) { o.micro_batch = on_gpu ? part : cached_micro_batch(part, o.model.context); }
        require(part % o.micro_batch == 0,
                fmt::format("--micro-batch: a rank's {} sequences cannot be divided into parts of {}", part,
                            o.micro_batch));
        require(static_cast<long>(o.micro_batch) * o.model.context <= most_tokens,
                fmt::format("--micro-batch: {} sequences of {} tokens are more than {} tokens at a time", o.micro_batch,
                            o.model.context, most_tokens));
    }
    detail::expect_shareable_attention(o);
    require(o.model.width % o.model.heads == 0,
            fmt::format("--width: {} cannot be divided among {} heads", o.model.width, o.model.heads));
    require(!o.resume || !o.checkpoint.empty(), "--resume: needs --checkpoint");
    require(o.stop_after <= o.steps,
            fmt::format("--stop-after: {} steps are more than the {} of --steps", o.stop_after, o.steps));
    const std::filesystem::path folder = std::filesystem::path(o.report).parent_path();
    if (o.trace.empty()) { o.trace = (folder / "trace.json").string(); }
    if (o.plot.empty()) { o.plot = (folder / "loss.svg").string(); }
    const auto files = o.written();
    for (auto file = files.begin(); file != files.end(); ++file) {
        detail::require_file_name(file->first, file->second);
        const auto same =
            std::find_if(files.begin(), file, [&](const auto& other) { return other.second == file->second; });
        require(same == file, fmt::format("{} and {} name the same file '{}'", same->first, file->first, file->second));
    }
}

}  // namespace transformer
