// tinyshakespeare at nanoGPT's CPU configuration (4 layers, 4 heads, width 128, context 64, batch 12, 2000 steps), for
// which it reports a validation loss of 1.88 nats: one rank and four, with the same global batch, must reach 1.90. And
// long runs by forward passes alone.
#include <cmath>       // abs
#include <cstdlib>     // getenv
#include <filesystem>  // is the text there?
#include <string>      // paths

#include <doctest/doctest.h>

#include "program.hpp"
#include "support/skip.hpp"

namespace {

using namespace trainer_test;

// The text's path; without one the test is skipped.
std::string given_text() {
    const char* const given = std::getenv("TUTTI_DATA");
    const std::string text = given != nullptr ? given : TUTTI_SOURCE_DIR "/../shared/data/tinyshakespeare.txt";
    if (!std::filesystem::is_regular_file(text)) {
        tutti::test::skip("no text at '" + text + "'; TUTTI_DATA names tinyshakespeare");
    }
    return text;
}

TEST_CASE("nanoGPT's configuration reaches 1.90 nats on one rank and on four") {
    const std::string configuration =
        "--layers 4 --heads 4 --width 128 --context 64 --batch 12 --steps 2000 --lr 1e-3 --eval-every 2000 --data '" +
        given_text() + "' ";
    const scratch_folder folder;
    nlohmann::json alone, together;
    REQUIRE(run_program(folder, configuration + "--pipeline local --quiet", 600).code == 0);
    alone = report_in(folder);
    REQUIRE(run_program(folder, configuration + "--pipeline ddp --ranks 4 --quiet", 600).code == 0);
    together = report_in(folder);
    const double one = alone["loss"]["validation"], four = together["loss"]["validation"];
    MESSAGE("validation, nats per byte: 1 rank " << one << ", 4 ranks " << four);
    CHECK(one <= 1.90);
    CHECK(four <= 1.90);
    CHECK(std::abs(one - four) < 0.02);  // the same samples in the same order: only rounding sets the two apart
    CHECK(alone["loss"]["first"].get<double>() ==
          doctest::Approx(together["loss"]["first"].get<double>()).epsilon(1e-5));
}

TEST_CASE(
    "two thousand steps of forward passes lower the loss on a new text, by one curve wherever weights and ranks are") {
    const std::string text = given_text();
    const scratch_folder folder;
    const std::string shape = " --layers 2 --heads 2 --width 64 --context 64 --quiet ";
    const auto run = [&](const std::string& arguments) {
        const auto done = run_program(folder, arguments + shape, 600);
        REQUIRE_MESSAGE(done.code == 0, done.err);
        return report_in(folder);
    };
    run("--pipeline local --data '" TUTTI_SOURCE_DIR "/include' --batch 12 --steps 400 --save first.safetensors");
    const std::string tuning = "--data '" + text +
                               "' --load first.safetensors --batch 8 --micro-batch 4 --shards 2 --seed 5 --lr 3e-4 "
                               "--steps 2000 --pipeline ";
    const double before = run(tuning + "mezo --ranks 1 --eval-every 1 --stop-after 2")["loss"]["validations"][0][1];
    const auto one = run(tuning + "mezo --ranks 1");
    const double after = one["loss"]["validation"];
    MESSAGE("validation, nats per byte: before " << before << ", after " << after);
    CHECK(after < before - 0.2);
    CHECK(one["loss"]["curve"].size() == 2000);
    for (const char* const other : {"zo2 --slots 2", "distzo2 --ranks 2 --zo-parallel perturbation",
                                    "distzo2 --ranks 2 --sliced", "distzo2 --ranks 4 --zo-parallel 2d --sliced"}) {
        CAPTURE(other);
        const auto report = run(tuning + other);
        CHECK(report["loss"]["curve"] == one["loss"]["curve"]);
        CHECK(report["parameter_hash"] == one["parameter_hash"]);
    }
}

}  // namespace
