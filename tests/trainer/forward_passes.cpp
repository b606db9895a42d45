// Fine-tuning by forward passes alone: it lowers the loss of a trained model on a text of another kind, with the same
// bits however ranks share the work; what is reported and what is refused.
#include <fstream>  // texts
#include <string>   // command lines

#include <doctest/doctest.h>

#include "program.hpp"

namespace {

using trainer_test::report_in;
using trainer_test::run_program;
using trainer_test::scratch_folder;

// Two kinds of text that share words.
scratch_folder& with_texts(scratch_folder& folder) {
    std::ofstream first(folder / "first", std::ios::binary), second(folder / "second", std::ios::binary);
    for (int i = 0; i < 600; ++i) {
        first << "line " << i * i << " of a text that a model can learn\n";
        second << "A MODEL can learn line " << i * i << " of a text\n";
    }
    return folder;
}
constexpr const char* model = " --layers 2 --heads 2 --width 32 --context 32 --quiet ";

nlohmann::json report_of(const scratch_folder& folder, const std::string& arguments) {
    const auto run = run_program(folder, arguments + model);
    REQUIRE_MESSAGE(run.code == 0, run.err);
    return report_in(folder);
}

}  // namespace

TEST_CASE("it lowers the loss of a trained model on a new text; every way to share the work has the same bits") {
    scratch_folder folder;
    with_texts(folder);
    report_of(folder, "--pipeline local --data first --steps 300 --batch 8 --save first.safetensors");
    const std::string tuning =
        "--pipeline mezo --data second --load first.safetensors --batch 8 --micro-batch 2 --seed 3 ";
    const auto alone = report_of(folder, tuning + "--steps 600 --eval-every 1 --stop-after 2 --ranks 1 --shards 2");
    const double before = alone["loss"]["validations"][0][1];
    const auto whole = report_of(folder, tuning + "--steps 600 --ranks 2");
    const double after = whole["loss"]["validation"];
    CAPTURE(before);
    CAPTURE(after);
    CHECK(after < before - 0.3);

    const auto& figures = whole["zeroth"];
    CHECK(figures["scalar_bytes"] == 16);
    CHECK(figures["skipped"] == 0);
    const double plus = figures["loss_plus"], minus = figures["loss_minus"], gradient = figures["gradient"];
    CHECK(gradient == doctest::Approx((plus - minus) / 2e-3).epsilon(1e-3));
    CHECK(figures["largest_move"] > 0);
    CHECK(whole["wire_bytes_per_rank_per_step"] == 16);

    const std::string few = tuning + "--steps 12 --shards 2 --directions 2 ";
    const auto one = report_of(folder, few + "--ranks 1");
    for (const char* const shared :
         {"--ranks 2 --zo-parallel data", "--ranks 2 --zo-parallel perturbation", "--ranks 4 --zo-parallel 2d"}) {
        CAPTURE(shared);
        const auto other = report_of(folder, few + shared);
        CHECK(other["loss"]["curve"] == one["loss"]["curve"]);
        CHECK(other["loss"]["curve"].size() == 12);
        CHECK(other["parameter_hash"] == one["parameter_hash"]);
    }
}

TEST_CASE("what cannot be done is refused") {
    scratch_folder folder;
    with_texts(folder);
    const auto refused = [&](const std::string& arguments, const char* why) {
        const auto run = run_program(folder, "--pipeline mezo --data first " + arguments + model);
        CAPTURE(run.err);
        CHECK(run.code == 2);
        CHECK(run.err.find(why) != std::string::npos);
    };
    refused("--zo-parallel pairs", "--zo-parallel: 'pairs' is not one of perturbation, data, 2d");
    refused("--zo-parallel perturbation --ranks 4", "for 2 ranks, not 4; 2d has pairs");
    refused("--zo-parallel 2d --ranks 3", "--zo-parallel: 3 ranks are not pairs");
    refused("--epsilon 0", "--epsilon: 0 is not a positive number");
    refused("--directions 65", "--directions");
    refused("--shards 3 --ranks 2", "--shards: 3 cannot be divided among 2 ranks or pairs");
    refused("--shards 5 --ranks 1 --batch 12", "--batch: 12 sequences cannot be divided among 5 shards");
    refused("--checkpoint there", "--checkpoint: pipeline 'mezo' has none");
}
