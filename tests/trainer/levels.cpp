// Pipeline ddp-lgreco in a whole training run: levels, bytes, what the report says of them, and the picture.
#include <algorithm>  // count
#include <string>     // pictures, refusals
#include <utility>    // pair
#include <vector>     // levels

#include <doctest/doctest.h>

#include "training.hpp"

namespace {

using trainer_test::short_run;
using trainer_test::some_text;
using trainer_test::train_on_threads;

transformer::options small_run(const char* pipeline, const char* family) {
    auto o = short_run(pipeline, 2, 42);
    o.model = {.vocabulary = 256, .context = 32, .layers = 2, .heads = 2, .width = 32};
    o.batch = 4;
    o.micro_batch = 2;
    o.family = family;
    o.level_range.reset();  // short_run has settled on those of another family
    o.error_sum.clear();
    transformer::complete(o, false, 0);
    o.select_every = 20;
    o.rank = 4;
    return o;
}

TEST_CASE(
    "levels are chosen when they should be, send less than the same level for all, and give the same bits again") {
    const auto text = some_text(32);
    for (const auto& [family, uniform] :
         {std::pair("quantize", "ddp-4bit"), std::pair("topk", "ddp-topk"), std::pair("powersgd", "ddp-powersgd")}) {
        CAPTURE(family);
        const auto o = small_run("ddp-lgreco", family);
        const auto once = train_on_threads<float>(o, text), again = train_on_threads<float>(o, text);
        CHECK(once.parameter_hash == again.parameter_hash);
        CHECK(once.training == again.training);
        CHECK(once.levels == again.levels);

        const auto same = train_on_threads<float>(small_run(uniform, family), text);
        REQUIRE(same.levels.size() == 1);
        CHECK(same.levels[0] == once.levels[0]);
        REQUIRE(once.levels.size() == 3);  // windows end with steps 20 and 40; their levels are used two steps later
        CHECK(once.levels[1].first == 22);
        CHECK(once.levels[2].first == 42);
        CHECK(once.levels[1].second != same.levels[0].second);
        // A little goes into tables: 8 bytes a matrix and level, twice in 42 steps, from and to each of two ranks.
        CHECK(once.wire_bytes_per_step < same.wire_bytes_per_step + 8 * 10 * 100 / 20);

        const auto report = transformer::report_of(o, once);
        CHECK(report["levels"]["unit"] == transformer::level_unit(family));
        std::size_t compressed = 0;
        for (std::size_t i = 0; i < once.tensors.size(); ++i) {
            const int level = once.levels.back().second[i];
            if (level == 0) {
                CHECK(!report["levels"]["by_layer"].contains(once.tensors[i]));
            } else {
                CHECK(report["levels"]["by_layer"][once.tensors[i]] == level);
                ++compressed;
            }
        }
        CHECK(compressed >= 8);
        CHECK(report["levels"]["changes"].size() == 3);
        CHECK(report["levels"]["changes"][1][1].size() == compressed);
    }
    const auto plain = train_on_threads<float>(small_run("ddp", "quantize"), text);
    CHECK(transformer::report_of(small_run("ddp", "quantize"), plain)["levels"].is_null());
}

TEST_CASE("machines of several ranks compress for each other alone; where each has one rank they are no machines") {
    const auto text = some_text(32);
    const auto trained = [&](const char* pipeline, int nodes) {
        auto o = short_run(pipeline, 4, 12);
        o.model = {.vocabulary = 256, .context = 32, .layers = 2, .heads = 2, .width = 32};
        o.batch = 4;
        o.micro_batch = 1;
        o.nodes = nodes;
        return train_on_threads<float>(o, text);
    };
    for (const char* pipeline : {"ddp-4bit", "ddp-topk"}) {
        CAPTURE(pipeline);
        const auto flat = trained(pipeline, 1), by_node = trained(pipeline, 2);
        CHECK(by_node.parameter_hash == trained(pipeline, 2).parameter_hash);
        CHECK(by_node.parameter_hash != flat.parameter_hash);
        CHECK(by_node.wire_bytes_per_step > flat.wire_bytes_per_step);  // gradients as they are, inside
        CHECK(trained(pipeline, 4).parameter_hash == flat.parameter_hash);
        CHECK(trained(pipeline, 0).parameter_hash == flat.parameter_hash);  // threads are on one host
    }
    CHECK(trained("ddp-powersgd", 2).parameter_hash == trained("ddp-powersgd", 1).parameter_hash);
}

TEST_CASE("the picture has a row for each tensor that is compressed, and a box for each level it had") {
    const std::vector<std::string> tensors{"wte", "ln<f>", "mlp"};
    const transformer::level_history history{{1, {4, 0, 4}}, {31, {8, 0, 4}}, {61, {8, 0, 2}}};
    const std::string svg = transformer::levels_picture("levels", tensors, history, 100);
    const auto has = [&](const std::string& part) { return svg.find(part) != std::string::npos; };
    CHECK(has("wte, steps 1 to 30: 4"));
    CHECK(has("wte, steps 31 to 100: 8"));
    CHECK(has("mlp, steps 1 to 60: 4"));
    CHECK(has("mlp, steps 61 to 100: 2"));
    CHECK(!has("ln&lt;f"));
    CHECK(has("fill=\"#deebf7\""));  // the lowest
    CHECK(has("fill=\"#08306b\""));  // the highest
    CHECK(svg.rfind("</svg>\n") == svg.size() - 7);
    CHECK(transformer::levels_picture("t", {"a"}, {{1, {3}}}, 5).find("a, steps 1 to 5: 3") != std::string::npos);
}

TEST_CASE("what cannot be chosen is refused") {
    const auto refusal = [](auto change) -> std::string {
        auto o = small_run("ddp-lgreco", "quantize");
        change(o);
        try {
            transformer::complete(o, false, 0);
        } catch (const transformer::bad_input& e) { return e.what(); }
        return {};
    };
    CHECK(refusal([](transformer::options&) {}).empty());
    CHECK(refusal([](transformer::options& o) { o.family = "bits"; }) ==
          "--family: 'bits' is not one of quantize, topk, powersgd");
    CHECK(refusal([](transformer::options& o) { o.nodes = 3; }) ==
          "--nodes: 2 ranks cannot be divided among 3 machines");
    CHECK(refusal([](transformer::options& o) { o.alpha = -1; }) == "--alpha: -1 is not a positive number up to 1000");
    CHECK(refusal([](transformer::options& o) { o.level_range = 0.5; }) ==
          "--level-range: 0.5 is not a number from 1 to 10000");
    CHECK(refusal([](transformer::options& o) { o.error_sum = "l1"; }) ==
          "--error-sum: 'l1' is not one of norms, squares");
    CHECK(refusal([](transformer::options& o) { o.measure = "all"; }) ==
          "--measure: 'all' is not one of local, averaged");
}

}  // namespace
