// Runs of the trainer that are ended early and go on from a checkpoint: the bits of a run that was not.
#include <algorithm>   // max_element
#include <filesystem>  // damage
#include <string>      // arguments
#include <vector>      // cases

#include <doctest/doctest.h>

#include "program.hpp"

namespace {

using namespace trainer_test;

/// A run of a second on a text of its own.
const std::string small =
    "--quiet --data text --batch 12 --context 16 --layers 1 --heads 2 --width 16 --lr 0.01 --eval-every 4 ";

struct trained_folder : scratch_folder {
    trained_folder() { with_text(*this); }
    outcome run(const std::string& arguments) const { return run_program(*this, small + arguments); }
    std::string trained(const std::string& arguments) const {
        const outcome o = run(arguments);
        CAPTURE(arguments);
        CAPTURE(o.err);
        REQUIRE(o.code == 0);
        return report_in(*this)["parameter_hash"];
    }
};

TEST_CASE("a run that was ended early and resumed has the bits of one that was not, in every pipeline") {
    const std::vector<std::string> pipelines{"local",
                                             "ddp",
                                             "ddp --precision double",
                                             "ddp-4bit",
                                             "ddp-topk --density 0.05",
                                             "zero1",
                                             "zero2",
                                             "zero3",
                                             "slowmo --tau 4",
                                             "ddp-lgreco --select-every 11",
                                             "local-sgd --tau 4",
                                             "co2 --tau 4",
                                             "co2 --gap elementwise --tau 4",
                                             "eager-diloco --tau 4",
                                             "cocod --fragments 3 --tau 4",
                                             "diloco --tau 4",
                                             "ddp-powersgd --rank 2",
                                             "co2-zero --nodes 2 --tau 4"};
    for (const std::string& pipeline : pipelines) {
        CAPTURE(pipeline);
        const trained_folder folder;
        const std::string arguments = "--steps 15 --pipeline " + pipeline;
        const std::string whole = folder.trained(arguments);
        const std::string kept = arguments + " --checkpoint kept --checkpoint-every 3 --resume";
        CHECK(folder.trained(kept + " --stop-after 7") != whole);
        CHECK(report_in(folder)["resumed_from_step"] == 0);
        CHECK(report_in(folder)["steps"] == 7);
        CHECK(folder.trained(kept + " --stop-after 13") != whole);
        CHECK(report_in(folder)["resumed_from_step"] == 7);
        CHECK(folder.trained(kept) == whole);
        const auto report = report_in(folder);
        CHECK(report["resumed_from_step"] == 13);
        CHECK(report["loss"]["curve"].size() == 2);
        CHECK(report["loss"]["curve"][0][0] == 14);
        CHECK(report["tokens"] == 2 * 12 * 16);
    }
}

TEST_CASE("ZeRO and data parallelism go on from each other, at another number of ranks") {
    const trained_folder folder;
    const std::string kept = "--steps 9 --checkpoint kept --resume ";
    static_cast<void>(folder.trained(kept + "--pipeline zero2 --ranks 4 --stop-after 3"));
    static_cast<void>(folder.trained(kept + "--pipeline zero3 --ranks 2 --stop-after 6"));
    static_cast<void>(folder.trained(kept + "--pipeline ddp --ranks 3"));
    const double resumed = report_in(folder)["loss"]["last"];
    static_cast<void>(folder.trained("--steps 9 --pipeline ddp --ranks 1"));
    CHECK(resumed == doctest::Approx(double(report_in(folder)["loss"]["last"])).epsilon(1e-4));
}

TEST_CASE("compressed gradients go on at another number of ranks, without what was owed") {
    const trained_folder folder;
    const std::string kept = "--steps 6 --pipeline ddp-4bit --checkpoint kept --resume ";
    const std::string whole = folder.trained("--steps 6 --pipeline ddp-4bit");
    static_cast<void>(folder.trained(kept + "--stop-after 3"));
    CHECK(folder.trained(kept + "--ranks 2") != whole);
    CHECK(report_in(folder)["resumed_from_step"] == 3);
}

TEST_CASE("a damaged checkpoint is passed over for the one before it") {
    const trained_folder folder;
    const std::string whole = folder.trained("--steps 12");
    const std::string kept = "--steps 12 --checkpoint kept --checkpoint-every 4 --resume ";
    static_cast<void>(folder.trained(kept + "--stop-after 8"));
    std::vector<std::filesystem::path> shards;
    for (const auto& file : std::filesystem::recursive_directory_iterator(folder / "kept")) {
        if (file.path().extension() == ".shard") { shards.push_back(file.path()); }
    }
    REQUIRE(shards.size() == 8);  // of 4 ranks, at steps 4 and 8
    const auto newest = *std::max_element(shards.begin(), shards.end());
    std::filesystem::resize_file(newest, std::filesystem::file_size(newest) - 1);
    CHECK(folder.trained(kept) == whole);
    CHECK(report_in(folder)["resumed_from_step"] == 4);
}

TEST_CASE("what cannot go on says why") {
    const trained_folder folder;
    static_cast<void>(folder.trained("--steps 4 --pipeline co2 --tau 3 --checkpoint kept --stop-after 2"));
    struct refusal {
        std::string arguments;
        int code;
        std::string says;
    };
    const std::vector<refusal> cases{
        {"--steps 4 --resume", 2, "--resume requires --checkpoint"},
        {"--steps 4 --checkpoint ''", 2, "--checkpoint"},
        {"--steps 4 --checkpoint kept", 2, "add --resume"},
        {"--steps 4 --stop-after 5", 2, "--stop-after: 5 steps"},
        {"--steps 4 --checkpoint-every 0", 2, "--checkpoint-every"},
        {"--steps 4 --pipeline co2 --tau 3 --checkpoint kept --resume --seed 2", 2, "has another --seed"},
        {"--steps 4 --pipeline co2 --tau 3 --checkpoint kept --resume --stop-after 2", 2, "nothing is left"},
        {"--steps 4 --pipeline co2 --tau 3 --checkpoint kept --resume --ranks 2", 2,
         "--resume: the run in 'kept' has another model, --precision, --pipeline or number of ranks (load: "},
        {"--steps 4 --pipeline co2 --tau 3 --checkpoint kept --resume --ranks 2", 2, "saved by 4 ranks, not 2"},
        {"--steps 4 --pipeline ddp --checkpoint kept --resume", 2, "--resume: the run in 'kept' has another"},
        {"--steps 4 --pipeline co2 --tau 3 --checkpoint kept --resume --precision double", 2, "--precision"},
        {"--steps 4 --pipeline ddp --checkpoint text/kept", 1, "text/kept"},
    };
    for (const refusal& c : cases) {
        CAPTURE(c.arguments);
        const outcome o = folder.run(c.arguments);
        CAPTURE(o.err);
        CHECK(o.code == c.code);
        CHECK(o.err.starts_with("transformer: "));
        CHECK(o.err.find(c.says) != std::string::npos);
    }
}

}  // namespace
