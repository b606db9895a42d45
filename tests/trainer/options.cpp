// --model and what contradicts it; the sizes that follow from --model and --tokens; the command lines of the documents.
#include <algorithm>   // set_difference
#include <cmath>       // lround
#include <cstddef>     // counts
#include <filesystem>  // pipelines
#include <fstream>     // documents
#include <iterator>    // inserter
#include <set>         // names
#include <sstream>     // files
#include <string>      // command lines
#include <utility>     // pairs
#include <vector>      // published counts

#include <CLI/CLI.hpp>
#include <doctest/doctest.h>

#include "device.hpp"
#include "options.hpp"
#include "parameters.hpp"

namespace {

using namespace transformer;

options parsed(const std::string& line) {
    command_line app;
    options o;
    declare(app, o, "");
    app.parse(line);
    choose_model(app, o);
    return o;
}
/// As the program takes it.
options taken(const std::string& line) {
    command_line app;
    options o;
    declare(app, o, "");
    app.parse(line);
    choose_model(app, o);
    refuse_unused(app, o);
    return o;
}

/// Why a command line is refused; empty if it is not. `processes` are mpirun's.
std::string refusal(const std::string& line, int processes = 0) {
    try {
        for (options& o : runs_of(taken(line))) {
            complete(o, o.pipeline == "local" || o.pipeline == "zo2", o.backend == "threads" ? 0 : processes);
        }
    } catch (const std::exception& e) { return e.what(); }
    return {};
}

std::size_t parameter_count(const configuration& c) {
    std::size_t count = 0;
    for (const declaration& d : parameters_of(c)) { count += d.size(); }
    return count;
}

TEST_CASE("published models have their published numbers of parameters, heads of 64, and 1024 positions") {
    const std::vector<std::size_t> counts{124'439'808, 354'823'168, 774'030'080, 1'557'611'200};
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const configuration c = parsed("--model " + std::string(gpt2_sizes[i].name)).model;
        CHECK(parameter_count(c) == counts[i]);
        CHECK(c.width / c.heads == 64);
        CHECK(c.context == 1024);
        CHECK(c.vocabulary == 50257);
    }
}

TEST_CASE("OPT's extents: a layer has its published number of parameters, heads are of 64, 80 or 128") {
    const std::vector<double> millions{50.358, 78.676, 201.380, 314.639, 616.656, 1019.336, 1812.099};  // of a layer
    for (std::size_t i = 0; i < millions.size(); ++i) {
        const std::string name(opt_sizes[i].name);
        CAPTURE(name);
        const options o = parsed("--model " + name);
        const configuration& c = o.model;
        const std::size_t tables =
            static_cast<std::size_t>(c.vocabulary + c.positions + 2) *  // and the last gain, bias
            static_cast<std::size_t>(c.width);
        const std::size_t layer = (parameter_count(c) - tables) / static_cast<std::size_t>(c.layers);
        CHECK(std::lround(static_cast<double>(layer) / 1e3) == std::lround(millions[i] * 1e3));
        CHECK(c.width % c.heads == 0);
        CHECK(c.width / c.heads == (i == 0 ? 64 : i == 1 ? 80 : 128));
        CHECK(c.context == 2048);
        CHECK(c.vocabulary == 50272);
        CHECK(o.random_weights);
    }
    CHECK(parsed("--model opt-13b --context 64").model.position_rows() == 2048);
    CHECK(parsed("--model opt-175b --layers 8").model.layers == 8);
    CHECK_THROWS_WITH_AS((void)parsed("--model opt-175b --layers 97"),
                         "--layers: 97 contradicts --model opt-175b, which has 96", bad_input);
    CHECK_FALSE(parsed("--model gpt2-124m").random_weights);
}

TEST_CASE("--context shortens sequences and leaves a model's position table; without --model the table is as long") {
    const configuration c = parsed("--model gpt2-124m --context 64").model;
    CHECK(c.context == 64);
    CHECK(parameter_count(c) == 124'439'808);
    CHECK(parameters_of(parsed("--context 32").model)[position_table].shape[0] == 32);
}

TEST_CASE("the vocabulary is bytes' unless --model or --tokens says otherwise") {
    CHECK(parsed("").model.vocabulary == 256);
    CHECK(parsed("--layers 2").model.vocabulary == 256);
    CHECK(parsed("--tokens x").model.vocabulary == 50257);
    CHECK(parsed("--tokens x").model.layers == configuration().layers);
}

TEST_CASE("what --model contradicts is refused; what it repeats is not") {
    const auto refused = [](const char* line, const char* says) {
        CAPTURE(line);
        CHECK_THROWS_WITH_AS((void)parsed(line), says, bad_input);
    };
    refused("--model gpt2-124m --layers 6", "--layers: 6 contradicts --model gpt2-124m, which has 12");
    refused("--heads 12 --model gpt2-350m", "--heads: 12 contradicts --model gpt2-350m, which has 16");
    refused("--model gpt2-774m --width 768", "--width: 768 contradicts --model gpt2-774m, which has 1280");
    refused("--model gpt2-124m --context 1025", "--context: 1025 is more than the 1024 positions of --model gpt2-124m");
    refused("--model gpt3",
            "--model: 'gpt3' is not one of gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m, opt-1.3b, opt-2.7b, opt-6.7b, "
            "opt-13b, opt-30b, opt-66b, opt-175b");
    CHECK(parsed("--model gpt2-1558m --layers 48 --heads 25 --width 1600 --context 1024").model.layers == 48);
}

TEST_CASE("momentum over rounds and the gap of a late average are checked") {
    const auto refusal = [](double beta, const char* gap) -> std::string {
        auto o = parsed("");
        o.beta = beta;
        o.gap = gap;
        try {
            complete(o, false, 0);
        } catch (const bad_input& e) { return e.what(); }
        return {};
    };
    for (const char* gap : {"none", "scalar", "elementwise", "constant:1", "constant:2.5"}) {
        CHECK(refusal(0.9, gap).empty());
    }
    CHECK(refusal(1, "none") == "--beta: 1 is not a momentum from 0 to less than 1");
    CHECK(refusal(-0.5, "none") == "--beta: -0.5 is not a momentum from 0 to less than 1");
    for (const char* gap : {"", "constant", "constant:", "constant:0.5", "constant:2x", "constant:inf", "2"}) {
        CAPTURE(gap);
        CHECK(refusal(0, gap) == fmt::format("--gap: '{}' is not one of none, constant:X (X at least 1), scalar, "
                                             "elementwise",
                                             gap));
    }
    CHECK(std::get<tutti::strategy::constant_gap>(parsed("--gap constant:2.5").staleness()).value == 2.5);
}

TEST_CASE("steps of a round are a number, or chosen") {
    CHECK(parsed("").tau == 8);
    CHECK_FALSE(parsed("").automatic_tau);
    CHECK(parsed("--tau 24").tau == 24);
    CHECK_FALSE(parsed("--tau 24").automatic_tau);
    CHECK(parsed("--tau auto").automatic_tau);
    CHECK(parsed("--tau auto").tau == 8);
    CHECK(parsed("").synchronous_steps == 0);
    CHECK(parsed("--sync-steps 300").synchronous_steps == 300);
    CHECK(parsed("").fragments == 1);
    CHECK(parsed("--fragments 8").fragments == 8);
    const auto fragments_refused = [](const std::string& text) {
        options o = parsed(text);
        try {
            complete(o, false, 0);
        } catch (const bad_input& e) { return std::string(e.what()); }
        return std::string();
    };
    CHECK(fragments_refused("--fragments 8").empty());
    const std::string in_turn =
        " parts end their rounds in turn, each at a step of its own: --tau must be a number of at "
        "least as many steps";
    CHECK(fragments_refused("--fragments 9") == "--fragments: 9" + in_turn);
    CHECK(fragments_refused("--fragments 2 --tau auto") == "--fragments: 2" + in_turn);
    for (const char* text : {"0", "-1", "8x", "automatic", "1.5", "100000001", "99999999999999999999"}) {
        CAPTURE(text);
        command_line app;
        options o;
        declare(app, o, "");
        CHECK_THROWS_WITH_AS(app.parse(fmt::format("--tau {}", text)),
                             fmt::format("--tau: '{}' is neither a number of steps nor auto", text).c_str(),
                             CLI::ValidationError);
    }
}

TEST_CASE("a comparison is a run for each of its pipelines, whose files carry its name") {
    const auto runs = runs_of(parsed("--compare ddp,local-sgd,co2 --steps 7"));
    REQUIRE(runs.size() == 3);
    CHECK(runs[1].pipeline == "local-sgd");
    for (const options& o : runs) { CHECK(o.steps == 7); }
    CHECK(runs_of(parsed("--pipeline co2")).size() == 1);
    CHECK(file_of_run("run/report.json", "co2") == "run/report-co2.json");
    CHECK(file_of_run("trace", "ddp") == "trace-ddp");
    CHECK(file_of_run("/a.b/c.d.svg", "ddp") == "/a.b/c.d-ddp.svg");
    const auto refusal = [](const std::string& line) -> std::string {
        try {
            static_cast<void>(runs_of(parsed(line)));
        } catch (const bad_input& e) { return e.what(); }
        return {};
    };
    CHECK(refusal("--compare ddp,co2,ddp") == "--compare: 'ddp' is there twice");
    CHECK(refusal("--compare ddp,co2 --save x") == "--save: is of one run; not together with --compare");
    CHECK(refusal("--compare ddp,co2 --checkpoint x") == "--checkpoint: is of one run; not together with --compare");
    CHECK(refusal("--compare ddp --levels-picture x") ==
          "--levels-picture: is of one run; not together with --compare");
}

/// As the pipelines' files give them.
std::set<std::string> names_of_pipelines() {
    std::set<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(TUTTI_SOURCE_DIR "/examples/transformer/pipelines")) {
        std::stringstream text;
        text << std::ifstream(file.path()).rdbuf();
        const std::string before = " name = \"", all = text.str();
        for (auto at = all.find(before); at != std::string::npos; at = all.find(before, at + 1)) {
            const auto from = at + before.size();
            names.insert(all.substr(from, all.find('"', from) - from));
        }
    }
    return names;
}

TEST_CASE("an option is for the pipelines that look at it, and refused where the run has none of them") {
    using names = std::set<std::string>;
    const names pipelines = names_of_pipelines();
    const std::string topk = "ddp-lgreco --family topk", powersgd = "ddp-lgreco --family powersgd";
    const names chosen{"ddp-lgreco", topk, powersgd}, parts{"tp", "pp", "3d"},
        packing{"packed", "even-ring", "zeppelin"};
    const names rounds{"local-sgd", "slowmo", "co2", "co2-zero", "diloco", "eager-diloco", "cocod"};
    const names passes{"mezo", "zo2", "distzo2"}, offloading{"zo2", "distzo2"};
    names runs = pipelines;
    runs.insert(chosen.begin(), chosen.end());
    const auto all_but = [&](const names& few) {
        names others;
        std::set_difference(runs.begin(), runs.end(), few.begin(), few.end(), std::inserter(others, others.end()));
        return others;
    };
    // Values are those without the option: giving them counts.
    const std::pair<std::string, names> table[] = {
        {"--data x, --tokens x, --tokens x --validation-tokens x, --model gpt2-124m, --context 64, --layers 6, --heads "
         "6, --width 96, --load x, --steps 9, --stop-after 9, --batch 12, --lr 1e-3, --eval-every 9, --seed 1, "
         "--device cpu, --gpus 1, --ranks 4, --backend threads, --precision float, --report x, --trace x, --plot x, "
         "--save x, --checkpoint x, --checkpoint x --checkpoint-every 9, --resume --checkpoint x, --quiet",
         runs},
        {"--bits 4", {"ddp-4bit", "ddp-lgreco"}},
        {"--density 0.01", {"ddp-topk", topk}},
        {"--rank 4", {"ddp-powersgd", powersgd}},
        {"--family quantize, --alpha 1, --level-range 2, --select-every 100, --error-sum norms, --measure local",
         chosen},
        {"--levels-picture x", {"ddp-4bit", "ddp-topk", "ddp-powersgd", "ddp-lgreco", topk, powersgd}},
        {"--tau 8, --sync-steps 0, --fragments 1", rounds},
        {"--beta 0.5", {"slowmo", "co2", "co2-zero", "diloco", "eager-diloco"}},
        {"--gap scalar", {"co2", "co2-zero"}},
        {"--lengths magi, --capacity 64", {"packed", "even-ring", "zeppelin", "tp", "pp", "3d"}},
        {"--plan-picture x", packing},
        {"--micro-batch 1", all_but(packing)},
        {"--recompute 1", all_but(passes)},
        {"--nodes 1",
         {"ddp-4bit", "ddp-topk", "ddp-lgreco", topk, "co2-zero", "even-ring", "zeppelin", "tp", "pp", "3d"}},
        {"--network 1Gbit, --network 1Gbit --nodes 2", all_but({"local", "zo2"})},
        {"--tp 1, --pp 1, --dp 1, --sp 1, --zero 0", parts},
        {"--sequence-parallel", {"tp", "3d"}},
        {"--pipeline-schedule 1f1b", {"pp", "3d"}},
        {"--zo-parallel data", {"mezo", "distzo2"}},
        {"--epsilon 1e-3, --directions 1, --shards 1", passes},
        {"--slots 3, --blocks-resident 0, --upload-bits 8, --renew-every 8 --upload-bits 8", offloading},
        {"--sliced, --gather messages --sliced", {"distzo2"}}};
    std::string known = " --help --pipeline --compare ";
    for (const auto& [lines, users] : table) {
        known += lines + ' ';
        const auto expect = [&, users = users](std::string_view option) {
            for (const std::string& run : runs) {
                if (run.find(option.substr(0, option.find(' '))) != std::string::npos) { continue; }
                const std::string says = refusal(fmt::format("--pipeline {} {}", run, option));
                const bool unused = says.find(" makes no use of it; ") != std::string::npos;
                CHECK_MESSAGE(unused != users.contains(run), run, ' ', option, ": ", says);
            }
            return false;  // on to the next
        };
        CHECK_FALSE(detail::any_member(lines, expect));
    }
    command_line app;
    options o;
    declare(app, o, "");
    for (const CLI::Option* const option : app.get_options()) {  // a new one belongs in the table, or above it
        CHECK_MESSAGE(known.find(' ' + option->get_name() + ' ') != std::string::npos, option->get_name());
    }
}

TEST_CASE("an option that would do nothing beside others is refused, with what to do") {
    const std::pair<const char*, const char*> table[] = {
        {"--pipeline ddp-lgreco --family topk --bits 3",
         "--bits: pipeline 'ddp-lgreco --family topk' makes no use of it; ddp-4bit, ddp-lgreco --family quantize do"},
        {"--pipeline ddp-4bit --alpha 2", "--alpha: pipeline 'ddp-4bit' makes no use of it; ddp-lgreco does"},
        {"--pipeline mezo --recompute 2",
         "--recompute: pipeline 'mezo' makes no use of it; all but mezo, zo2, distzo2 do"},
        {"--compare ddp,zero1 --epsilon 1e-3", "--epsilon: pipeline 'ddp' makes no use of it; mezo, zo2, distzo2 do"},
        {"--compare ddp,co2 --tp 2", "--tp: pipeline 'ddp' makes no use of it; tp, pp, 3d do"},
        {"--compare ddp,co2 --tau 8 --gap none", ""},
        {"--compare mezo,zo2 --slots 2", ""},
        {"--compare local,ddp --network 1Gbit", ""},
        {"--compare ddp,ddp-4bit --nodes 2", ""},
        {"--compare ddp,ddp-lgreco --family topk --bits 3",
         "--bits: pipeline 'ddp' makes no use of it; ddp-4bit, ddp-lgreco --family quantize do"},
        {"--compare ddp,zeppelin --lengths magi", "--lengths: pipeline 'ddp' trains on sequences of one length"},
        {"--compare ddp,tp --tp 2 --recompute 3",
         "--recompute 3: pipeline 'ddp' has the whole model on every rank; tp, pp, 3d do not"},
        {"--compare ddp,co2 --pipeline co2", "--pipeline excludes --compare"},
        {"--checkpoint-every 5", "--checkpoint-every requires --checkpoint"},
        {"--checkpoint /dev/null", "--checkpoint: '/dev/null' is not a folder"},
        {"--pipeline co2 --beta -1", "--beta: -1 is not a momentum from 0 to less than 1"},
        {"--pipeline ddp-lgreco --level-range 0", "--level-range: 0 is not a number from 1 to 10000"},
        {"--pipeline mezo --zo-parallel 2d --batch 7 --ranks 4",
         "--batch: 7 sequences cannot be divided among 2 pairs of ranks"},
        {"--resume", "--resume requires --checkpoint"},
        {"--validation-tokens x", "--validation-tokens requires --tokens"},
        {"--pipeline distzo2 --gather copies", "--gather requires --sliced"},
        {"--pipeline zo2 --renew-every 8", "--renew-every requires --upload-bits"},
        {"--pipeline zo2 --blocks-resident 4 --layers 4 --slots 2",
         "--slots: no block comes to the device, where --blocks-resident has them all"},
        {"--network 1Gbit --ranks 1",
         "--network: is between machines, and there is 1, of 1 ranks; --nodes or --ranks says otherwise"},
        {"--network 1Gbit --nodes 1",
         "--network: is between machines, and there is 1, of 4 ranks; --nodes or --ranks says otherwise"},
        {"--pipeline pp --nodes 2",
         "--nodes: makes a difference to --sp ranks that share sequences, and with --network"},
        {"--pipeline pp --pp 2 --sp 2 --nodes 2", ""}};
    for (const auto& row : table) {
        CAPTURE(row.first);
        CHECK(refusal(row.first) == std::string(row.second));
    }
    // What is for others of a comparison does not change a run.
    auto compared = runs_of(taken("--compare mezo,distzo2 --ranks 2 --sliced"));
    for (options& o : compared) { complete(o, false, 0); }
    CHECK(!compared[0].zeroth.sliced);
    CHECK(compared[1].zeroth.sliced);
}

TEST_CASE("a stated network is bandwidth and latency, and for ranks on the CPU") {
    const auto refusal = [](const char* network, const char* device) -> std::string {
        auto o = parsed("");
        o.network = network;
        o.device = device;
        try {
            complete(o, false, 0);
        } catch (const bad_input& e) { return e.what(); }
        return {};
    };
    CHECK(refusal("1Gbit,50us", "cpu").empty());
    CHECK(refusal("1Gbit", "cpu").empty());
    CHECK(refusal("50us", "cpu") ==
          "--network: shaped_network: '50us' has '50us' for a bandwidth, whose unit is not one "
          "of bit Kbit Mbit Gbit B KB MB GB; write bandwidth,latency such as 1Gbit,50us");
    CHECK(refusal("1Gbit,50us", "cuda") == "--network: only ranks on the CPU pretend to have another network");
    CHECK(stated_link("8Mbit,2ms").bytes_per_second == 1e6);
    CHECK(stated_link("8Mbit,2ms").latency_seconds == 2e-3);
}

TEST_CASE("without --ranks there are as many as share the model, and as usual where that leaves some") {
    const auto completed = [](const std::string& line) {
        options o = parsed(line);
        complete(o, false, 0);
        return o;
    };
    CHECK(completed("--pipeline 3d --tp 4 --pp 2").ranks == 8);
    CHECK(completed("--pipeline 3d --tp 2 --pp 1").dp == 2);
    CHECK(completed("--pipeline 3d --tp 3").ranks == 3);
    CHECK(completed("--pipeline 3d --device cuda --tp 2 --pp 2").gpus == 4);
    CHECK(completed("--pipeline 3d --device cuda --gpus 8 --tp 2 --pp 2").dp == 2);
    CHECK(completed("--pipeline tp --tp 2 --sequence-parallel").sequence_parallel);
    CHECK_THROWS_WITH_AS(completed("--pipeline 3d --pp 2 --sequence-parallel"),
                         "--sequence-parallel: rows are divided among the ranks that share layers, --tp of them: 2 or "
                         "more",
                         transformer::bad_input);
}

/// What a document tells the trainer, a line each: without comments, continued lines joined.
std::vector<std::string> command_lines(const std::string& document) {
    std::ifstream in(std::string(TUTTI_SOURCE_DIR "/") + document);
    std::vector<std::string> lines;
    std::string part, whole;
    while (std::getline(in, part)) {
        whole += part.substr(0, part.find(" #"));
        if (whole.ends_with("\\")) {
            whole.back() = ' ';
            continue;
        }
        const std::string program = whole.starts_with("./dev train") ? "./dev train" : "/transformer/transformer ";
        const bool runs = whole.starts_with("./dev") || whole.starts_with("mpirun") || whole.starts_with("srun");
        if (const auto at = whole.find(program); runs && at != std::string::npos) {
            lines.push_back(whole.substr(at + program.size()));
        }
        whole.clear();
    }
    return lines;
}
TEST_CASE("the documents' command lines are accepted") {
    const std::pair<const char*, std::size_t> documents[] = {{"README.md", 6}, {"examples/transformer/README.md", 30}};
    for (const auto& document : documents) {
        const auto lines = command_lines(document.first);
        CHECK_MESSAGE(lines.size() >= document.second, document.first);
        for (const std::string& line : lines) {
            CAPTURE(line);
            CHECK(refusal(line, 8) == "");
        }
    }
}

// karpathy/llm.c#796: a card that was not listed had a utilization of -100 %.
TEST_CASE("how busy a card is kept: by its maker's peak, and unknown where there is none") {
    CHECK(datasheet_flops("NVIDIA H100 80GB HBM3") == 989e12);
    CHECK(datasheet_flops("NVIDIA H100 PCIe") == 756e12);
    CHECK(datasheet_flops("NVIDIA A100-SXM4-80GB") == 312e12);
    CHECK(datasheet_flops("NVIDIA GeForce RTX 5090") == 0);
    CHECK(utilization_text(494.5e12, 989e12) == "MFU 50.0 %");
    CHECK(utilization_text(494.5e12, datasheet_flops("NVIDIA B200")) == "MFU unknown");
    // llm.c's formula for GPT-2 124M, with positions and a padded vocabulary.
    CHECK(flops_per_token({.vocabulary = 50304, .context = 1024, .layers = 12, .heads = 12, .width = 768}, 124475904) ==
          6.0 * 124475904 + 6.0 * 12 * 768 * 1024);
}

}  // namespace
