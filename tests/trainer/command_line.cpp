// The trainer as a program: what it refuses (one line, exit code 2, nothing written), and what it leaves behind.
#include <algorithm>  // count
#include <cmath>      // abs, log
#include <cstdint>    // tokens
#include <numeric>    // reduce
#include <sstream>    // numbers
#include <string>     // arguments
#include <vector>     // cases

#include <doctest/doctest.h>
#include <sys/resource.h>  // memory of programs

#include "bytes.hpp"
#include "program.hpp"

namespace {

using namespace trainer_test;

/// A run of a second, on a text of its own.
const std::string small = "--batch 12 --context 16 --layers 1 --heads 2 --width 16 ";
const std::string quick = small + "--steps 6 ";

std::size_t files_in(const scratch_folder& folder) {
    const std::filesystem::recursive_directory_iterator all(folder.path());
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST_CASE("what cannot be done is refused: exit code 2, one line, nothing written") {
    struct refusal {
        std::string arguments;
        std::string says;  // part of the line
    };
    std::vector<refusal> cases{
        {"--unknown 3", "--unknown"},
        {"stray", "stray"},
        {"--steps", "--steps"},
        {"--pipeline nonsense", "ddp"},
        {"--backend nonsense", "threads"},
        {"--backend ''", "--backend"},
        {"--precision half", "double"},
        {"--precision bf16", "--device cuda"},
        {"--precision double --device cuda", "bf16"},
        {"--device nonsense", "cpu"},
        {"--device ''", "--device"},
        {"--gpus 1", "--device cuda"},
        {"--backend nccl", "--device cuda"},
        {"--backend mpi --device cuda", "--backend nccl"},
        {"--recompute 3", "--recompute"},
        {"--recompute -1", "--recompute"},
        {"--data text --device cuda --ranks 2", "--ranks"},
        {"--data text --device cuda --width 8200 --heads 1", "--width"},
        {"--data text --device cuda --gpus 1000 --batch 1000", "--"},  // no build, no machine has that many
        {"--lr nan", "--lr"},
        {"--lr inf", "--lr"},
        {"--lr 0", "--lr"},
        {"--lr -0.001", "--lr"},
        {"--lr fast", "--lr"},
        {"--lr 1e-3x", "--lr"},
        {"--seed -1", "--seed"},
        {"--seed nan", "--seed"},
        {"--data missing", "missing"},
        {"--data text missing", "missing"},
        {"--data empty", "--data"},
        {"--data short", "--data"},
        {"--data folder_without_text", "--data"},
        {"--context 64 --data nearly", "--data"},
        {"--data text --width 130 --heads 4", "--width"},
        {"--data text --batch 13", "--batch"},
        {"--data text --batch 12 --ranks 5", "--batch"},
        {"--data text --ranks 24", "--batch"},
        {"--data text --batch 12 --ranks 2 --micro-batch 4", "--micro-batch"},
        {"--data text --batch 12 --ranks 2 --micro-batch 7", "--micro-batch"},
        {"--data text --pipeline local --ranks 2", "--ranks"},
        {"--data text --report ''", "--report"},
        {"--data text --report folder_without_text", "--report"},
        {"--data text --report text/report.json", "--report"},
        {"--data text --trace /proc/nowhere/trace.json", "--trace"},
        {"--data text --plot folder_without_text", "--plot"},
        {"--data text --report same --trace same", "same"},
        {"--data text --save same --plot same", "--plot and --save"},
        {"--data text --save ''", "--save"},
        {"--data text --save folder_without_text", "--save"},
        {"--data text --save text/weights", "--save"},
        {"--data text --save /proc/nowhere/weights", "--save"},
        {"--data text --load ''", "--load"},
        {"--data text --load missing", "--load: 'missing'"},
        {"--data text --load text", "--load: 'text'"},
        {"--tokens ''", "--tokens"},
        {"--tokens missing", "--tokens: 'missing'"},
        {"--tokens text", "--tokens: 'text': magic number"},
        {"--tokens tokens --data text", "--tokens: not together with --data"},
        {"--tokens tokens --context 64", "--tokens: 100 tokens are too few"},
        {"--tokens tokens --validation-tokens ''", "--validation-tokens"},
        {"--tokens tokens --validation-tokens text", "--validation-tokens: 'text': magic number"},
        {"--tokens foreign", "token number 1 is 50257"},
        {"--data text --validation-tokens tokens", "--validation-tokens requires --tokens"},
        {"--data text --model gpt3", "gpt2-124m"},
        {"--data text --model ''", "gpt2-124m"},
        {"--data text --model gpt2-124m --layers 6", "--layers: 6 contradicts"},
        {"--data text --model gpt2-124m --context 2048", "--context"},
        {"--data text --pipeline zeppelin", "'zeppelin' needs --lengths"},
        {"--data text --lengths prolong", "packed, even-ring, zeppelin, tp, pp, 3d do"},
        {"--data text --pipeline packed --lengths missing", "prolong, wlb, wikipedia, magi, arxiv-surrogate"},
        {"--data text --pipeline packed --lengths .", "is a folder"},
        {"--data text --pipeline packed --lengths text", "'line' is not a number of tokens"},
        {"--data text --pipeline packed --lengths ''", "--lengths"},
        {"--data text --pipeline even-ring --lengths wlb --capacity 0", "--capacity"},
        {"--data text --pipeline even-ring --lengths wlb --capacity 191", "4 ranks of 191 tokens do not hold the 768"},
        {"--data text --pipeline packed --lengths wlb --batch 1 --capacity 63", "--context 64"},
        {"--data text --pipeline zeppelin --lengths wlb --micro-batch 1", "--micro-batch"},
        {"--data text --model opt-1.3b", "pipeline 'ddp' trains gpt2 models"},
        {"--data text --model opt-175b --pipeline zo2 --precision double", "GiB are available"},
        {"--data text --pipeline zeppelin --lengths wlb --plan-picture .", "--plan-picture"},
        {"--data text --compare packed,zeppelin --lengths wlb --plan-picture p.svg", "--plan-picture"},
        {"--data text --compare ddp,zeppelin --lengths wlb", "pipeline 'ddp'"},
    };
    for (const char* const option : {"--ranks", "--steps", "--batch", "--micro-batch", "--context", "--layers",
                                     "--heads", "--width", "--eval-every"}) {
        for (const char* const value : {"0", "-1", "nan", "2.5", "many", "99999999999999999999", "''"}) {
            cases.push_back({std::string("--data text ") + option + " " + value, option});
        }
    }
    for (const refusal& c : cases) {
        CAPTURE(c.arguments);
        scratch_folder folder;
        with_text(folder);
        std::ofstream(folder / "empty").close();
        std::ofstream(folder / "short") << "too short";
        std::ofstream(folder / "nearly") << std::string(640, 'x');  // 64 to validate: a target short of one window
        std::filesystem::create_directory(folder / "folder_without_text");
        write_bytes(folder / "tokens", token_bytes(std::vector<std::uint16_t>(100, 50256)));
        write_bytes(folder / "foreign", token_bytes({1, 50257}));
        const auto files = files_in(folder);
        const outcome o = run_program(folder, c.arguments);
        CHECK(o.code == 2);
        CHECK(o.out.empty());
        CHECK(o.err.starts_with("transformer: "));
        CHECK(o.err.find(c.says) != std::string::npos);
        CHECK(std::count(o.err.begin(), o.err.end(), '\n') == 1);
        CHECK(files_in(folder) == files);
    }
}

TEST_CASE("the text that just suffices is accepted") {
    scratch_folder folder;
    std::ofstream(folder / "text") << std::string(
        641, 'x');  // 576 to train on, 65 to validate: one window of 64 and its target
    CHECK(run_program(folder, "--steps 1 --layers 1 --heads 1 --width 8 --ranks 1 --quiet --data text").code == 0);
}

TEST_CASE("--help lists options and pipelines") {
    const scratch_folder folder;
    const outcome o = run_program(folder, "--help");
    CHECK(o.code == 0);
    for (const char* const word : {"--device",      "--gpus",     "--recompute", "--tokens",     "--validation-tokens",
                                   "--model",       "gpt2-1558m", "--load",      "--save",       "--data",
                                   "--ranks",       "--backend",  "--pipeline",  "--steps",      "--batch",
                                   "--micro-batch", "--context",  "--layers",    "--heads",      "--width",
                                   "--lr",          "--seed",     "--precision", "--eval-every", "--report",
                                   "--trace",       "--quiet",    "local",       "ddp"}) {
        CHECK_MESSAGE(o.out.find(word) != std::string::npos, word);
    }
    CHECK(files_in(folder) == 0);
}

void check_report(const nlohmann::json& r, int ranks, int steps, const std::string& backend,
                  const std::string& pipeline) {
    CHECK(r.at("pipeline") == pipeline);
    CHECK(r.at("backend") == backend);
    CHECK(r.at("device") == "cpu");
    CHECK(r.at("loss").at("unit") == "nats per byte");
    CHECK(r.at("ranks") == ranks);
    CHECK(r.at("steps") == steps);
    CHECK(r.at("tokens") == steps * 12 * 16);
    // tables (256 + 16) * 16; layer: 2 norms, qkv, projection, MLP; final norm
    const std::uint64_t parameters =
        272 * 16 + (2 * 32 + 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16) + 32;
    CHECK(r.at("parameters") == parameters);
    CHECK(r.at("parameter_hash").get<std::string>().size() == 16);
    CHECK(r.at("parameter_hash").get<std::string>().find_first_not_of("0123456789abcdef") == std::string::npos);
    CHECK(r.at("wire_bytes_per_rank_per_step").is_number_unsigned());
    const auto wire = r.at("wire_bytes_per_rank_per_step").get<std::uint64_t>();
    const auto n = static_cast<std::uint64_t>(ranks);
    CHECK(wire * n <= 2 * (n - 1) * (parameters + 16 * n) * 4);
    CHECK(wire * n >= 2 * (n - 1) * parameters * 4);
    const auto& loss = r.at("loss");
    const auto& curve = loss.at("curve");
    REQUIRE(curve.size() == static_cast<std::size_t>(steps));
    for (int i = 0; i < steps; ++i) { CHECK(curve[static_cast<std::size_t>(i)][0] == i + 1); }
    CHECK(loss.at("first") == curve.front()[1]);
    CHECK(loss.at("last") == curve.back()[1]);
    CHECK(loss.at("first").get<double>() == doctest::Approx(std::log(256.0)).epsilon(0.02));  // knows nothing yet
    CHECK(loss.at("validation").get<double>() < loss.at("first").get<double>());
    CHECK(loss.at("validations").back() == nlohmann::json{steps, loss.at("validation")});
    const auto& seconds = r.at("seconds");
    const double total = seconds.at("total");
    CHECK(total > 0);
    CHECK(seconds.at("exposed_communication").get<double>() >= 0);
    CHECK(seconds.at("compute").get<double>() > 0);
    CHECK(seconds.at("compute").get<double>() + seconds.at("exposed_communication").get<double>() ==
          doctest::Approx(total));
    CHECK(seconds.at("step_median").get<double>() > 0);
    CHECK(seconds.at("step_median").get<double>() < total);
    const auto each = seconds.at("steps").get<std::vector<double>>();
    CHECK(each.size() == static_cast<std::size_t>(steps));
    CHECK(std::reduce(each.begin(), each.end()) == doctest::Approx(total));
    const auto& overlap = r.at("overlap");
    CHECK(overlap.at("tau") == 1);
    CHECK(overlap.at("rounds") == steps - 1);
    CHECK(overlap.at("exposed").get<double>() >= 0);
    CHECK(overlap.at("t_round").get<double>() > 0);
    CHECK(overlap.at("t_all_reduce").get<double>() >= 0);
    CHECK(overlap.contains("efficiency"));
    CHECK(overlap.contains("interference"));
    CHECK(overlap.contains("throughput_vs_no_communication"));
    // Values, gradients and two moments of each parameter at least; and not a hundred times that.
    CHECK(r.at("peak_bytes_per_rank").get<std::uint64_t>() > 4 * 4 * parameters);
    CHECK(r.at("peak_bytes_per_rank").get<std::uint64_t>() < 400 * 4 * parameters);
    const double rate = r.at("tokens_per_second");
    CHECK(rate == doctest::Approx(r.at("tokens").get<double>() / total));
    // The same tokens: 6 FLOPs a parameter, and 6 a pair of width and context for the causal half of attention.
    CHECK(r.at("model_flops_per_second").get<double>() ==
          doctest::Approx((6.0 * static_cast<double>(parameters) + 6.0 * 16 * 16) * rate));
    CHECK(r.at("model_flop_utilization").is_null());  // nobody states a processor's peak
}

void check_trace(const nlohmann::json& trace, int ranks, int steps) {
    std::vector<int> marks(static_cast<std::size_t>(ranks));
    for (const auto& e : trace.at("traceEvents")) {
        if (e.at("ph") == "X" && e.at("name") == "step") { ++marks.at(e.at("pid").get<std::size_t>()); }
    }
    for (const int m : marks) { CHECK(m == steps); }
}

TEST_CASE("a run leaves report, trace and picture, and says where") {
    scratch_folder folder;
    const outcome o = run_program(with_text(folder), quick + "--data text --ranks 3 --eval-every 2");
    REQUIRE(o.code == 0);
    check_report(report_in(folder), 3, 6, "threads", "ddp");
    check_trace(nlohmann::json::parse(content_of(folder / "run/trace.json")), 3, 6);
    const std::string picture = content_of(folder / "run/loss.svg");
    CHECK(picture.starts_with("<svg"));
    CHECK(picture.find("<circle") != std::string::npos);
    CHECK(picture.find("nats per byte") != std::string::npos);
    CHECK(picture.ends_with("</svg>\n"));
    for (const char* const word :
         {"run/report.json", "run/trace.json", "run/loss.svg", "bits per byte", "the model writes"}) {
        CHECK_MESSAGE(o.out.find(word) != std::string::npos, word);
    }
    CHECK(o.err.find("tokens/s") != std::string::npos);
    CHECK(o.err.find("exposed") != std::string::npos);
    CHECK(o.err.find("validation") != std::string::npos);
    CHECK(files_in(folder) == 5);  // text, run, and three files in it
}

TEST_CASE("the trace of a long run holds its last thousand steps") {
    scratch_folder folder;
    REQUIRE(
        run_program(with_text(folder),
                    "--steps 1200 --batch 1 --context 2 --layers 1 --heads 1 --width 2 --data text --ranks 1 --quiet")
            .code == 0);
    check_trace(nlohmann::json::parse(content_of(folder / "run/trace.json")), 1, 1000);
    CHECK(report_in(folder).at("loss").at("curve").size() == 1200);
}

/// The number behind `name` in the last line of progress.
double last_shown(const outcome& o, const std::string& name) {
    const auto at = o.err.rfind(" " + name + " ");
    CAPTURE(o.err);
    REQUIRE(at != std::string::npos);
    return std::stod(o.err.substr(at + name.size() + 2));
}

TEST_CASE("the progress line shows what the report will say: waiting in steps alone, and the loss of all ranks") {
    scratch_folder folder;
    // The round has not ended; what evaluations wait for is no step's.
    const outcome rounds = run_program(
        with_text(folder),
        quick + "--data text --ranks 2 --pipeline local-sgd --tau 6 --stop-after 5 --eval-every 1 --network 1Gbit,2ms "
                "--checkpoint kept");
    REQUIRE(rounds.code == 0);
    CHECK(last_shown(rounds, "exposed") == 0);
    // Ranks with parts wait for one another: in each of three steps for two messages at least, of 200 us.
    const outcome parts = run_program(folder, "--data text --batch 12 --context 16 --layers 2 --heads 2 --width 16 "
                                              "--steps 3 --pipeline 3d --tp 2 --pp 2 --network 1Gbit,200us");
    REQUIRE(parts.code == 0);
    CHECK(last_shown(parts, "exposed") > 0);
    CHECK(report_in(folder).at("seconds").at("exposed_communication").get<double>() >= 3 * 2 * 200e-6);
    std::ofstream(folder / "lengths") << "2 5 9\n16 16";
    const outcome documents =
        run_program(folder, small + "--steps 1 --data text --ranks 4 --pipeline even-ring --lengths lengths --lr 0.01");
    REQUIRE(documents.code == 0);
    CHECK(last_shown(documents, "loss") ==
          doctest::Approx(report_in(folder).at("loss").at("first").get<double>()).epsilon(2e-4));
}

TEST_CASE("a rank that sends nothing waits for nobody") {
    scratch_folder folder;
    std::ofstream(folder / "text") << std::string(100, 'x') << std::string(100, 'y');
    // Gradients of many elements to clear, and few tokens.
    const outcome o =
        run_program(folder, "--data text --batch 1 --context 2 --layers 4 --heads 1 --width 512 --steps 4 "
                            "--pipeline 3d --ranks 1 --quiet");
    REQUIRE(o.code == 0);
    const auto report = report_in(folder);
    CHECK(report.at("wire_bytes_per_rank_per_step") == 0);
    // Its own lane apart, as the trace has it; what else took time was not waiting.
    const auto trace = nlohmann::json::parse(content_of(folder / "run/trace.json"));
    double waited = 0;
    for (const auto& step : trace.at("traceEvents")) {
        if (step.value("cat", "") != "step") { continue; }
        const double begin = step.at("ts"), end = begin + step.at("dur").get<double>();
        for (const auto& e : trace.at("traceEvents")) {
            if (e.value("cat", "") == "wait" && e.at("ts") >= begin && e.at("ts") < end) {
                waited += 1e-6 * e.at("dur").get<double>();
            }
        }
    }
    CHECK(std::abs(report.at("seconds").at("exposed_communication").get<double>() - waited) < 1e-9);
}

TEST_CASE("parameters that ranks share are not put together at the end: memory is what the report says") {
    scratch_folder folder;
    std::ofstream(folder / "text") << std::string(100, 'x') << std::string(100, 'y');
    const outcome o =
        run_program(folder, "--data text --batch 4 --context 2 --layers 8 --heads 1 --width 416 --steps 1 "
                            "--pipeline zero3 --ranks 4 --quiet --save weights");
    REQUIRE(o.code == 0);
    rusage used{};  // the most of all programs so far, of which this is the largest
    REQUIRE(getrusage(RUSAGE_CHILDREN, &used) == 0);
    const auto report = report_in(folder);
    const double values = 4 * report.at("parameters").get<double>();
    CHECK(1024.0 * static_cast<double>(used.ru_maxrss) <
          4 * report.at("peak_bytes_per_rank").get<double>() + 2 * values);
}

TEST_CASE("documents: a report of their attention, and a picture of where they are") {
    scratch_folder folder;
    std::ofstream(folder / "lengths") << "2 5 9\n16 16";
    const outcome o =
        run_program(with_text(folder), quick + "--data text --pipeline zeppelin --lengths lengths --nodes 2 "
                                               "--capacity 60 --quiet --plan-picture run/plan.svg");
    CHECK(o.err.empty());
    REQUIRE(o.code == 0);
    CHECK(content_of(folder / "run/plan.svg").starts_with("<svg"));
    const auto r = report_in(folder);
    CHECK(r["tokens"] == 6 * 12 * 16);
    CHECK(r["sequence"]["imbalance"] >= 1.0);
    for (const char* const figure : {"planned_seconds", "measured_seconds"}) { CHECK(r["sequence"][figure] > 0.0); }
    for (const char* const figure : {"intra_node_bytes", "inter_node_bytes", "remapped_tokens"}) {
        CHECK(r["sequence"][figure] >= 0.0);
    }
    const outcome all =
        run_program(folder, quick + "--data text --compare packed,even-ring,zeppelin --lengths lengths");
    CHECK(all.code == 0);
    CHECK(report_in(folder, "run/report-packed.json")["sequence"]["remapped_tokens"] == 0.0);
    CHECK(report_in(folder, "run/report-even-ring.json")["sequence"]["intra_node_bytes"] > 0.0);
    CHECK(run_program(folder, quick + "--data text --quiet").code == 0);
    CHECK(report_in(folder)["sequence"].is_null());
}

TEST_CASE("files go where they are told to; --quiet says nothing") {
    scratch_folder folder;
    const outcome o =
        run_program(with_text(folder),
                    quick + "--data text --pipeline local --quiet --report a/b/r.json --trace t.json --plot c/p.svg");
    CHECK(o.code == 0);
    CHECK(o.out.empty());
    CHECK(o.err.empty());
    check_report(report_in(folder, "a/b/r.json"), 1, 6, "threads", "local");
    check_trace(nlohmann::json::parse(content_of(folder / "t.json")), 1, 6);
    CHECK(std::filesystem::exists(folder / "c/p.svg"));
    CHECK_FALSE(std::filesystem::exists(folder / "run"));
}

TEST_CASE("--compare trains one pipeline after the other; ends with a table, a report of all and a picture") {
    scratch_folder folder;
    const outcome o = run_program(with_text(folder),
                                  quick + "--data text --ranks 2 --compare ddp,local-sgd,co2 --tau 2 --network 1Gbit");
    REQUIRE(o.code == 0);
    const auto all = report_in(folder).at("runs");
    REQUIRE(all.size() == 3);
    for (const char* const name : {"ddp", "local-sgd", "co2"}) {
        const std::string report = fmt::format("run/report-{}.json", name);
        CHECK(std::filesystem::exists(folder / fmt::format("run/trace-{}.json", name)));
        CHECK(std::filesystem::exists(folder / fmt::format("run/loss-{}.svg", name)));
        CHECK(o.out.find(fmt::format("\n{} ", name)) != std::string::npos);
        CHECK(report_in(folder, report).at("pipeline") == name);
    }
    CHECK(all[2] == report_in(folder, "run/report-co2.json"));
    CHECK(all[0].at("loss").at("first") == all[2].at("loss").at("first"));
    CHECK(o.out.find("# pipeline") != std::string::npos);
    CHECK(o.err.find("2 of 3: local-sgd") != std::string::npos);
    const std::string picture = content_of(folder / "run/loss.svg");
    CHECK(picture.starts_with("<svg"));
    CHECK(picture.find("co2 (") != std::string::npos);
    CHECK(picture.find("seconds in training steps") != std::string::npos);
    CHECK(picture.find("2 ranks (threads) over 1Gbit, 6 steps of 12 sequences") != std::string::npos);
    CHECK(files_in(folder) == 2 + 3 * 3 + 2);
    // The same parameters as alone.
    const outcome alone =
        run_program(folder, quick + "--data text --ranks 2 --pipeline co2 --tau 2 --report one/r.json");
    REQUIRE(alone.code == 0);
    CHECK(report_in(folder, "one/r.json").at("parameter_hash") == all[2].at("parameter_hash"));
    // Pipeline local has one rank, ddp as many as there are usually.
    REQUIRE(run_program(folder, small + "--steps 2 --data text --compare local,ddp --quiet").code == 0);
    CHECK(content_of(folder / "run/loss.svg").find(">1 to 4 ranks (threads), 2 steps of 12") != std::string::npos);
    scratch_folder other;
    const outcome refused = run_program(with_text(other), quick + "--data text --compare ddp,nothing");
    CHECK(refused.code == 2);
    CHECK(refused.err.find("--compare: 'nothing' is not one of local, ddp") != std::string::npos);
    CHECK(files_in(other) == 1);
}

TEST_CASE("GPT-2 tokens: losses are per token, and the sample is numbers") {
    scratch_folder folder;
    std::vector<std::uint16_t> tokens(400);
    for (std::size_t i = 0; i < tokens.size(); ++i) { tokens[i] = static_cast<std::uint16_t>(50'000 + i % 5); }
    write_bytes(folder / "train.bin", token_bytes(tokens));
    write_bytes(folder / "validate.bin", token_bytes({tokens.begin(), tokens.begin() + 40}));
    const outcome o = run_program(folder, quick + "--ranks 2 --eval-every 3 --lr 1e-2 --tokens train.bin");
    REQUIRE(o.code == 0);
    CHECK(o.out.find("400 tokens (360 to train on)") != std::string::npos);
    CHECK(o.out.find("bits per token") != std::string::npos);
    CHECK((o.out + o.err).find("per byte") == std::string::npos);
    CHECK(o.err.find("nats per token") != std::string::npos);
    CHECK(content_of(folder / "run/loss.svg").find("nats per token") != std::string::npos);
    const auto loss = report_in(folder).at("loss");
    CHECK(loss.at("unit") == "nats per token");
    CHECK(loss.at("first").get<double>() == doctest::Approx(std::log(50257.0)).epsilon(0.02));
    CHECK(loss.at("last").get<double>() < loss.at("first").get<double>());
    const std::string title = "---- the model writes, as numbers of GPT-2 tokens ----\n";
    REQUIRE(o.out.find(title) != std::string::npos);
    std::istringstream sample(o.out.substr(o.out.find(title) + title.size()));
    int numbers = 0;
    for (int token = 0; sample >> token; ++numbers) { CHECK((0 <= token && token < 50257)); }
    CHECK(numbers == 64);

    // A validation file takes nothing away from the other.
    const outcome apart = run_program(folder, quick + "--ranks 2 --tokens train.bin --validation-tokens validate.bin");
    REQUIRE(apart.code == 0);
    CHECK(apart.out.find("440 tokens (400 to train on)") != std::string::npos);
    CHECK(report_in(folder).at("loss").at("validation") != loss.at("validation"));
}

TEST_CASE("weights that are saved and loaded are the same to the last bit, on any number of ranks") {
    scratch_folder folder;
    with_text(folder);
    const std::string data = quick + "--data text ";
    const outcome o = run_program(folder, data + "--ranks 3 --save new/trained");
    REQUIRE(o.code == 0);
    CHECK(o.out.find("new/trained") != std::string::npos);
    CHECK(files_in(folder) == 7);  // text, new and the weights, run and three files in it
    const auto report = report_in(folder);
    const std::string trained = content_of(folder / "new/trained");
    const auto check_same = [&] {
        CHECK(report_in(folder).at("parameter_hash") == report.at("parameter_hash"));
        CHECK(content_of(folder / "again") == trained);
        std::filesystem::remove(folder / "again");
    };
    // A step so small that it changes nothing: what is saved is what was loaded.
    const std::string stay =
        small + "--data text --quiet --load new/trained --save again --steps 1 --lr 1e-300 --seed 9 ";
    for (const char* const ranks : {"--ranks 1", "--ranks 2", "--ranks 4", "--pipeline local"}) {
        CAPTURE(ranks);
        REQUIRE(run_program(folder, stay + ranks).code == 0);
        check_same();
    }
    REQUIRE(run_program(folder, stay + "--precision double").code == 0);
    CHECK(content_of(folder / "again") == trained);
    if (const std::string mpirun = MPIRUN; !mpirun.empty()) {
        REQUIRE(run_program(folder, stay + "--backend mpi", 120, mpirun + " 3").code == 0);
        check_same();
    }
    // What was learned goes on from there.
    REQUIRE(run_program(folder, data + "--quiet --load new/trained --save new/trained").code == 0);
    CHECK(report_in(folder).at("loss").at("first").get<double>() < report.at("loss").at("first").get<double>() - 0.01);
    CHECK(content_of(folder / "new/trained") != trained);

    // Other sizes are other weights.
    const std::string other = "--quiet --data text --load new/trained --context 16 ";
    const outcome refused = run_program(folder, other + "--layers 2 --heads 2 --width 16");
    CHECK(refused.code == 2);
    CHECK(refused.err.find("has no tensor 'h.1.ln_1.weight' of shape [16]") != std::string::npos);
    if (const std::string mpirun = MPIRUN; !mpirun.empty()) {
        const outcome once =
            run_program(folder, other + "--layers 1 --heads 2 --width 32 --backend mpi", 120, mpirun + " 3");
        CHECK(once.code == 2);
        CHECK(once.err.find("shape [256, 16], the model needs [256, 32]") != std::string::npos);
        CHECK(once.err.find("transformer: ") == once.err.rfind("transformer: "));
    }
}

TEST_CASE("the same command gives the same parameters; seed and precision change them, evaluation does not") {
    scratch_folder folder;
    with_text(folder);
    const auto hash = [&](const std::string& more) {
        REQUIRE(run_program(folder, quick + "--data text --ranks 2 --quiet " + more).code == 0);
        return report_in(folder).at("parameter_hash").get<std::string>();
    };
    const std::string once = hash("");
    CHECK(hash("") == once);
    CHECK(hash("--eval-every 1") == once);
    CHECK(hash("--seed 2") != once);
    CHECK(hash("--precision double") != once);
    CHECK(hash("--lr 2e-3") != once);
}

TEST_CASE("folders are read by path, hidden files and other kinds left out") {
    scratch_folder folder;
    with_text(folder);
    std::filesystem::create_directories(folder / "d/sub");
    std::filesystem::create_directories(folder / "d/.git");
    const std::string text = content_of(folder / "text");
    std::ofstream(folder / "d/sub/b.md") << text.substr(9000);
    std::ofstream(folder / "d/a.txt") << text.substr(0, 9000);
    std::ofstream(folder / "d/image.png") << "not text";
    std::ofstream(folder / "d/.hidden.txt") << "not read";
    std::ofstream(folder / "d/.git/config.txt") << "not read";
    const auto hash = [&](const std::string& data) {
        REQUIRE(run_program(folder, quick + "--ranks 1 --quiet " + data).code == 0);
        return report_in(folder).at("parameter_hash").get<std::string>();
    };
    const std::string whole = hash("--data text");
    CHECK(hash("--data d") == whole);
    CHECK(hash("--data d/a.txt d/sub/b.md") == whole);
    CHECK(hash("--data d/a.txt --data d/sub/b.md") == whole);
    CHECK(hash("--data d/sub/b.md d/a.txt") != whole);
}

TEST_CASE("--backend mpi under mpirun: rank 0 alone speaks and writes; what is refused is refused once") {
    const std::string mpirun = MPIRUN;
    if (mpirun.empty()) {
        MESSAGE("skipped: no MPI with its mpirun was found at configure time");
        return;
    }
    scratch_folder folder;
    with_text(folder);
    const outcome o = run_program(folder, quick + "--data text --backend mpi", 120, mpirun + " 4");
    REQUIRE(o.code == 0);
    check_report(report_in(folder), 4, 6, "mpi", "ddp");
    check_trace(nlohmann::json::parse(content_of(folder / "run/trace.json")), 4, 6);
    CHECK(o.out.find("bits per byte") != std::string::npos);
    CHECK(o.out.find("bits per byte") == o.out.rfind("bits per byte"));
    CHECK(files_in(folder) == 5);

    std::filesystem::remove_all(folder / "run");
    // The first process speaks however late it is.
    const std::string late =
        mpirun + " 3 sh -c 'test ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} != 0 || sleep 1; exec \"$@\"' sh";
    const outcome alone = run_program(folder, "--data text --backend nonsense", 120, late);
    CHECK(alone.code == 2);
    CHECK(alone.err.find("transformer: --backend: 'nonsense'") != std::string::npos);

    for (const char* const wrong : {"--data text --backend mpi --ranks 3", "--data text --backend mpi --batch 13",
                                    "--data text --backend mpi --lr nan", "--backend mpi --data missing",
                                    "--data text --backend mpi --pipeline local", "--data text --backend threads"}) {
        CAPTURE(std::string(wrong));
        const outcome refused = run_program(folder, quick + wrong, 120, mpirun + " 4");
        CHECK(refused.code == 2);
        const auto first = refused.err.find("transformer: ");
        CHECK(first != std::string::npos);
        CHECK(first == refused.err.rfind("transformer: "));
        CHECK_FALSE(std::filesystem::exists(folder / "run"));
    }
}

}  // namespace
