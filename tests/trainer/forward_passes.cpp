// Fine-tuning by forward passes alone: it lowers the loss of a trained model on a text of another kind, with the same
// bits however ranks share the work and wherever the weights are; what moves, what is reported and what is refused.
#include <algorithm>  // max
#include <cmath>      // abs
#include <cstdint>    // bytes
#include <fstream>    // texts
#include <string>     // command lines
#include <vector>     // runs

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

// Bytes of a layer on its way, of width 32: each tensor at a multiple of 256 bytes.
std::uint64_t block_bytes(std::uint64_t element) {
    std::uint64_t sum = 0;
    for (const std::uint64_t count : {32u, 32u, 3072u, 96u, 1024u, 32u, 32u, 32u, 4096u, 128u, 4096u, 32u}) {
        sum += (count * element + 255) / 256 * 256;
    }
    return sum;
}
constexpr const char* trained = "--pipeline local --data first --steps 300 --batch 8 --save first.safetensors";
constexpr const char* tuning = " --data second --load first.safetensors --batch 8 --micro-batch 2 --seed 3 ";

}  // namespace

TEST_CASE("it lowers the loss of a trained model on a new text, the weights on the host") {
    scratch_folder folder;
    with_texts(folder);
    const auto from = report_of(folder, trained);
    // Nothing moves, and the same text: what a model of layers that can go backward says, it says, also of more tokens
    // than it has logits of at a time. The second step has other samples than the first.
    const auto same = report_of(folder, "--pipeline zo2 --data first --load first.safetensors --steps 2 --lr 1e-30 "
                                        "--batch 24 --micro-batch 24");
    CHECK(same["loss"]["validation"].get<double>() ==
          doctest::Approx(from["loss"]["validation"].get<double>()).epsilon(1e-6));
    const auto& curve = same["loss"]["curve"];
    CHECK(std::abs(curve[0][1].get<double>() - curve[1][1].get<double>()) > 0.02);
    CHECK(same["parameter_hash"] == from["parameter_hash"]);

    // So do they write the same text.
    const auto written = [&](const std::string& pipeline) {
        const auto run = run_program(folder, "--data first --load first.safetensors --steps 1 --lr 1e-30 --batch 8 "
                                             "--layers 2 --heads 2 --width 32 --context 32 --pipeline " +
                                                 pipeline);
        REQUIRE_MESSAGE(run.code == 0, run.err);
        const auto begin = run.out.find("---- the model writes");
        REQUIRE(begin != std::string::npos);
        return run.out.substr(begin, run.out.find("-----\n", begin + 400) - begin);
    };
    const std::string text = written("local");
    for (const char* const pipeline : {"mezo --ranks 1", "zo2", "distzo2 --ranks 2 --sliced"}) {
        CAPTURE(pipeline);
        CHECK(written(pipeline) == text);
    }

    const std::string line = std::string(tuning) + "--pipeline zo2 --lr 3e-4 --steps 120 --shards 2 ";
    const auto begun = report_of(folder, line + "--eval-every 1 --stop-after 2");
    const double before = begun["loss"]["validations"][0][1];
    const auto whole = report_of(folder, line);
    const double after = whole["loss"]["validation"];
    CAPTURE(before);
    CAPTURE(after);
    CHECK(after < before - 0.2);

    const auto& figures = whole["zeroth"];
    CHECK(figures["scalar_bytes"] == 32);
    CHECK(figures["skipped"] == 0);
    CHECK(figures["flat"] == 0);
    const double plus = figures["loss_plus"], minus = figures["loss_minus"], gradient = figures["gradient"];
    CHECK(gradient == doctest::Approx((plus - minus) / 2e-3).epsilon(1e-3));
    CHECK(figures["largest_move"] > 0);
    const double overlap = figures["overlap_efficiency"];
    CHECK(overlap > 0);
    CHECK(overlap <= 1);
}

TEST_CASE("every way to share the work, and every place for the weights, has the same bits") {
    scratch_folder folder;
    with_texts(folder);
    report_of(folder, trained);
    for (const std::string precision : {"float", "double"}) {
        const std::string few =
            std::string(tuning) + "--steps 6 --shards 2 --directions 2 --precision " + precision + " --save ";
        const auto one = report_of(folder, few + "one --pipeline mezo --ranks 1");
        CHECK(one["zeroth"]["upload_bytes"] == 0);
        CHECK(one["zeroth"]["overlap_efficiency"].is_null());
        const std::string weights = trainer_test::content_of(folder / "one");
        std::vector<const char*> all{"zo2", "distzo2 --ranks 2 --zo-parallel perturbation --sliced"};
        if (precision == "float") {
            all.insert(all.end(),
                       {"mezo --ranks 2 --zo-parallel perturbation", "mezo --ranks 4 --zo-parallel 2d", "zo2 --slots 1",
                        "zo2 --slots 2 --eval-every 1", "zo2 --blocks-resident 1", "zo2 --blocks-resident 2",
                        "distzo2 --ranks 1", "distzo2 --ranks 2", "distzo2 --ranks 2 --sliced --slots 2",
                        "distzo2 --ranks 2 --zo-parallel perturbation",
                        "distzo2 --ranks 4 --zo-parallel 2d --sliced --blocks-resident 1"});
        }
        for (const char* const shared : all) {
            CAPTURE(shared);
            const auto other = report_of(folder, few + "other --pipeline " + shared);
            CHECK(other["loss"]["curve"] == one["loss"]["curve"]);
            CHECK(other["loss"]["curve"].size() == 6);
            CHECK(other["parameter_hash"] == one["parameter_hash"]);
            for (const char* const figure : {"loss_plus", "loss_minus", "gradient"}) {
                CHECK(other["zeroth"][figure] == one["zeroth"][figure]);
            }
            CHECK(trainer_test::content_of(folder / "other") == weights);
        }
    }
}

TEST_CASE("one big batch has the slope of its micro-batches, but for the rounding of products") {
    scratch_folder folder;
    with_texts(folder);
    report_of(folder, trained);
    const std::string line = "--data second --load first.safetensors --batch 16 --seed 3 --steps 1 --pipeline zo2 ";
    const auto whole = report_of(folder, line + "--micro-batch 16");
    for (const char* const small : {"--micro-batch 4", "--micro-batch 1", "--micro-batch 2 --shards 4"}) {
        CAPTURE(small);
        const auto parts = report_of(folder, line + small);
        const double loss = whole["zeroth"]["loss_plus"], slope = whole["zeroth"]["gradient"];
        CHECK(std::abs(parts["zeroth"]["loss_plus"].get<double>() - loss) <= 1e-6 * loss);
        CHECK(std::abs(parts["zeroth"]["gradient"].get<double>() - slope) <= 1e-4 * loss);  // epsilon is 1e-3
        CHECK(std::abs(slope) > 1e-2 * loss);
    }
}

TEST_CASE("slices are gathered by the way that is asked for, or by the fastest of what ranks have") {
    scratch_folder folder;
    with_texts(folder);
    report_of(folder, trained);
    const std::string line = std::string(tuning) + "--steps 3 --pipeline distzo2 --ranks 2 ";
    const auto whole = report_of(folder, line);
    CHECK(whole["zeroth"]["gather"].is_null());
    CHECK(whole["zeroth"]["gather_seconds"].is_null());
    const auto expect_same_bits = [&](const nlohmann::json& sliced) {
        CHECK(sliced["loss"]["curve"] == whole["loss"]["curve"]);
        CHECK(sliced["parameter_hash"] == whole["parameter_hash"]);
        CHECK(sliced["zeroth"]["gathered_bytes"] == sliced["zeroth"]["upload_bytes"]);
    };
    const std::uint64_t scalars = 3 * 16;  // two ranks, three steps: what a rank sends of losses
    std::uint64_t on_wire = 0;
    for (const std::string way : {"collective", "messages", "copies"}) {
        CAPTURE(way);
        const auto sliced = report_of(folder, line + "--sliced --gather " + way);
        expect_same_bits(sliced);
        CHECK(sliced["zeroth"]["gather"] == way);
        CHECK(sliced["zeroth"]["gather_seconds"].is_null());  // nothing to choose
        const std::uint64_t sent = sliced["wire_bytes_per_rank_per_step"];
        if (way == "collective") { on_wire = sent; }
        CHECK(sent == (way == "copies" ? scalars / 3 : on_wire));
    }
    CHECK(on_wire > 10 * scalars);
    for (const bool network : {false, true}) {
        const auto sliced = report_of(folder, line + (network ? "--sliced --network 10Gbit,10us" : "--sliced"));
        expect_same_bits(sliced);
        const auto& seconds = sliced["zeroth"]["gather_seconds"];
        CHECK(seconds.size() == (network ? 2 : 3));  // copies would not take the time of a network
        CHECK(seconds.contains("copies") == !network);
        const double taken = seconds[sliced["zeroth"]["gather"].get<std::string>()];
        for (const double other : seconds) { CHECK(taken <= other); }
    }
}

TEST_CASE("bytes that move, and memory: slots of a layer, whatever their number") {
    scratch_folder folder;
    with_texts(folder);
    const std::string line =
        "--data second --batch 8 --micro-batch 2 --heads 2 --width 32 --context 32 --quiet --steps 4 ";
    const auto figures = [&](const std::string& arguments) {
        const auto run = run_program(folder, line + arguments);
        REQUIRE_MESSAGE(run.code == 0, run.err);
        return report_in(folder)["zeroth"];
    };
    for (const std::uint64_t element : {4u, 8u}) {
        const std::string precision = element == 4 ? "--precision float " : "--precision double ";
        const std::uint64_t block = block_bytes(element);
        const std::uint64_t tables = (256 + 32) * 32 * element;
        const std::uint64_t ends = tables + 2 * std::max<std::uint64_t>(256, 32 * element);
        const std::uint64_t rows = 2 * 32;
        // Streams of both sides and one more, the widest of all layers and logits, statistics, sums of heads, losses.
        const std::uint64_t work = rows * ((3 * 32 + 256 + 2 + 2) * element) + 4 * sizeof(double);
        const std::uint64_t copy = std::max(block, tables);
        for (const std::uint64_t layers : {3u, 5u}) {
            for (const std::uint64_t slot_count : {1u, 3u}) {
                if (element == 8 && layers + slot_count > 4) { continue; }
                CAPTURE(layers);
                CAPTURE(slot_count);
                const auto zo2 = figures(precision + "--pipeline zo2 --layers " + std::to_string(layers) + " --slots " +
                                         std::to_string(slot_count));
                CHECK(zo2["upload_bytes"] == 4 * layers * block);  // once for each micro-batch
                CHECK(zo2["offload_bytes"] == layers * block);     // once for each step
                CHECK(zo2["gathered_bytes"] == 0);
                CHECK(zo2["scalar_bytes"] == 16);
                CHECK(zo2["host_bytes"] == ends + layers * block);
                CHECK(zo2["peak_device_bytes"] == ends + slot_count * block + copy + work);
            }
        }
        const auto validated = figures(precision + "--pipeline zo2 --layers 3 --eval-every 3");  // before the last step
        CHECK(validated["upload_bytes"] == 4 * 3 * block);
        CHECK(validated["offload_bytes"] == 3 * block);
        const auto resident = figures(precision + "--pipeline zo2 --layers 4 --slots 2 --blocks-resident 1");
        CHECK(resident["upload_bytes"] == 4 * 3 * block);
        CHECK(resident["offload_bytes"] == 3 * block);
        CHECK(resident["peak_device_bytes"] == ends + (2 + 1) * block + copy + work);
        const auto sliced = figures(precision + "--pipeline distzo2 --ranks 2 --sliced --layers 3");
        const auto half = [](std::uint64_t module) { return (module + 511) / 512 * 256; };  // of 256 bytes each
        CHECK(sliced["upload_bytes"] == 2 * 3 * half(block));                               // two micro-batches a rank
        CHECK(sliced["offload_bytes"] == 3 * half(block));
        CHECK(sliced["gathered_bytes"] == 2 * 3 * half(block));
        CHECK(sliced["scalar_bytes"] == 16);
        CHECK(sliced["host_bytes"] == half(tables) + half(ends - tables) + 3 * half(block));
        const auto side = figures(precision + "--pipeline distzo2 --ranks 2 --zo-parallel perturbation --layers 3");
        CHECK(side["upload_bytes"] == 4 * 3 * block);
        CHECK(side["peak_device_bytes"] == ends + 3 * block + copy + work - rows * 32 * element - 2 * sizeof(double));
        const auto all = figures(precision + "--pipeline mezo --ranks 1 --layers 3");
        CHECK(all["peak_device_bytes"] == 2 * (ends + 3 * block) + work - rows * 32 * element - 2 * sizeof(double));
    }
}

TEST_CASE(
    "floats on the host that travel in 16 or 8 bits take every update, and have the same bits however blocks come") {
    scratch_folder folder;
    with_texts(folder);
    const auto from = report_of(folder, trained);
    const std::string weights = trainer_test::content_of(folder / "first.safetensors");
    const std::string few = "--data second --load first.safetensors --batch 2 --seed 3 --steps 7 --save ";
    const auto exact = report_of(folder, few + "exact --pipeline zo2");
    CHECK(exact["zeroth"]["upload_error"].is_null());
    CHECK(exact["zeroth"]["upload_bits"].is_null());
    struct figures {
        const char* bits;
        double least, most;  // error of the weights
        double loss;         // likewise, of the loss
    };
    for (const figures& f : {figures{"16", 1e-5, 3e-4, 1e-4}, figures{"8", 1e-2, 4e-2, 3e-2}}) {
        CAPTURE(f.bits);
        const std::string wire = std::string("--upload-bits ") + f.bits + " ";
        // Nothing is learned, so nothing may change: what travels is not what is kept.
        const auto same = report_of(folder, std::string(tuning) + wire +
                                                "--steps 5 --renew-every 2 --lr 1e-30 "
                                                "--save same --pipeline zo2");
        CHECK(same["parameter_hash"] == from["parameter_hash"]);
        CHECK(trainer_test::content_of(folder / "same") == weights);

        const auto one = report_of(folder, few + "one " + wire + "--renew-every 3 --pipeline zo2");
        CHECK(one["zeroth"]["upload_bits"] == std::stoi(f.bits));
        CHECK(one["zeroth"]["upload_error"] > f.least);
        CHECK(one["zeroth"]["upload_error"] < f.most);
        CHECK(one["loss"]["curve"] != exact["loss"]["curve"]);
        for (std::size_t step = 0; step < 7; ++step) {
            const double loss = one["loss"]["curve"][step][1], right = exact["loss"]["curve"][step][1];
            CHECK(std::abs(loss / right - 1) < f.loss);
        }
        CHECK(one["parameter_hash"] != exact["parameter_hash"]);
        for (const char* const shared :
             {"zo2 --slots 1", "distzo2 --ranks 1 --slots 2", "distzo2 --ranks 2 --zo-parallel perturbation",
              "distzo2 --ranks 2 --zo-parallel perturbation --sliced --slots 2"}) {
            CAPTURE(shared);
            const auto other = report_of(folder, few + "other " + wire + "--renew-every 3 --pipeline " + shared);
            CHECK(other["loss"]["curve"] == one["loss"]["curve"]);
            CHECK(other["parameter_hash"] == one["parameter_hash"]);
            CHECK(trainer_test::content_of(folder / "other") == trainer_test::content_of(folder / "one"));
        }
        // In the seventh step come what travels of both layers, and the floats of those whose turn it is: of the tables
        // and the last normalization, and every 8 steps of the second layer.
        const std::uint64_t floats = block_bytes(4), weights_of_layer = floats / sizeof(float);
        const std::uint64_t travels =
            f.bits[0] == '8' ? (weights_of_layer * 33 / 32 + 255) / 256 * 256 : weights_of_layer * 2;
        const std::uint64_t ends = (256 + 32) * 32 * sizeof(float) + 2 * 256;
        CHECK(one["zeroth"]["upload_bytes"] == 2 * travels + ends);
        CHECK(one["zeroth"]["offload_bytes"] == ends);
        const auto rarely = report_of(folder, few + "rarely " + wire + "--pipeline zo2");
        CHECK(rarely["zeroth"]["upload_bytes"] == 2 * travels + floats);
        CHECK(rarely["zeroth"]["offload_bytes"] == floats + travels);
        CHECK(rarely["zeroth"]["host_bytes"] == ends + 2 * (floats + travels));
    }
}

TEST_CASE("steps that learned nothing are counted, and the run says what to change") {
    scratch_folder folder;
    with_texts(folder);
    const auto run = run_program(folder, "--pipeline mezo --ranks 1 --data first --steps 3 --epsilon 1e-30 --layers 2 "
                                         "--heads 2 --width 32 --context 32");
    REQUIRE_MESSAGE(run.code == 0, run.err);
    CHECK(run.out.find("\n3 steps moved nothing, as both losses were the same: try a larger --epsilon\n") !=
          std::string::npos);
    CHECK(report_in(folder)["zeroth"]["flat"] == 3);
}

TEST_CASE("what cannot be done is refused") {
    scratch_folder folder;
    with_texts(folder);
    const auto refused = [&](const std::string& arguments, const char* why) {
        const auto run = run_program(folder, (arguments.starts_with("--pipeline") ? "" : "--pipeline mezo ") +
                                                 ("--data first " + arguments) + model);
        CAPTURE(run.err);
        CHECK(run.code == 2);
        CHECK(run.err.find(why) != std::string::npos);
    };
    refused("--zo-parallel pairs", "--zo-parallel: 'pairs' is not one of perturbation, data, 2d");
    refused("--zo-parallel perturbation --ranks 4", "for 2 ranks, not 4; 2d has pairs");
    refused("--zo-parallel 2d --ranks 3", "--zo-parallel: 3 ranks are not pairs");
    refused("--pipeline distzo2 --ranks 2 --gather copies", "--gather requires --sliced");
    refused("--pipeline distzo2 --ranks 2 --sliced --gather copies --network 1Gbit",
            "--gather copies: for ranks that are threads of one process");
    refused("--pipeline distzo2 --ranks 2 --sliced --gather post",
            "--gather: post not in {collective,messages,copies}");
    refused("--epsilon 0", "--epsilon: 0 is not a positive number");
    refused("--directions 65", "--directions");
    refused("--shards 3 --ranks 2", "--shards: 3 cannot be divided among 2 ranks or pairs");
    refused("--shards 5 --ranks 1 --batch 12", "--batch: 12 sequences cannot be divided among 5 shards");
    refused("--checkpoint there", "--checkpoint: pipeline 'mezo' has none");
    refused("--slots 2", "--slots: pipeline 'mezo' makes no use of it; zo2, distzo2 do");
    refused("--pipeline zo2 --ranks 2", "--ranks: pipeline 'zo2' is for 1 rank, not 2");
    refused("--pipeline zo2 --sliced", "--sliced: pipeline 'zo2' makes no use of it");
    refused("--zo-parallel perturbation --ranks 1", "for 2 ranks, not 1");
    refused("--pipeline distzo2 --ranks 1 --sliced", "--sliced: 1 rank has whole blocks");
    refused("--pipeline distzo2 --blocks-resident 3", "--blocks-resident: 3 blocks of a model of 2");
    refused("--pipeline distzo2 --slots 0", "--slots");
    refused("--pipeline distzo2 --checkpoint there", "--checkpoint: pipeline 'distzo2' has none");
    refused("--pipeline zo2 --upload-bits 4", "--upload-bits");
    refused("--pipeline zo2 --upload-bits 8 --precision double", "--upload-bits: weights are kept as floats");
    refused("--pipeline zo2 --precision float16", "--precision: float16 needs --device cuda");
    refused("--pipeline ddp --device cuda --precision float16",
            "--precision: gradients of 'ddp' leave float16's range, use bf16; mezo, zo2 and distzo2 have none");
}
