// Ranks that have parts of the model: the losses, weights and bytes of one rank that has all of it.
#include <algorithm>    // max
#include <cmath>        // fabs
#include <cstdint>      // bytes
#include <filesystem>   // saved weights
#include <fstream>      // their bytes
#include <iterator>     // all of them
#include <string>       // files
#include <string_view>  // names
#include <vector>       // values

#include <unistd.h>  // getpid

#include <doctest/doctest.h>
#include <tutti/checkpoint/safetensors.hpp>  // saved weights

#include "parallel_run.hpp"
#include "training.hpp"

namespace {

using trainer_test::distance;
using trainer_test::some_text;
using trainer_test::train_on_threads;
using transformer::options;

constexpr double bar = 1e-12;
constexpr int steps = 10;

struct layout {
    int tp = 1, pp = 1, dp = 1;
};

options run_of(const char* pipeline, layout l = {}, const char* schedule = "1f1b", int zero = 0, int recompute = -1) {
    options o;
    o.model = {.vocabulary = 256, .context = 16, .layers = 8, .heads = 4, .width = 16};
    o.pipeline = pipeline;
    o.steps = steps;
    o.batch = 8;
    o.micro_batch = 1;
    o.learning_rate = 1e-2;
    o.quiet = true;
    o.eval_every = 6;
    o.pipeline_schedule = schedule;
    o.zero = zero;
    o.recompute = recompute;
    if (o.of_parts()) {
        o.tp = l.tp;
        o.pp = l.pp;
        o.dp = l.dp;
    }
    transformer::complete(o, std::string_view(pipeline) == "local", 0);
    return o;
}

const transformer::corpus& text() {
    static const transformer::corpus made = [] {  // little of it: validation goes through the pipelines too
        const auto whole = some_text(16);
        const auto part = whole.training().first(3000);
        return transformer::corpus(std::vector<std::uint8_t>(part.begin(), part.end()), 16);
    }();
    return made;
}
const transformer::result& on_one_rank() {
    static const auto made = train_on_threads<double>(run_of("local"), text());
    return made;
}
double from_one_rank(const options& o) {
    const auto r = train_on_threads<double>(o, text());
    CHECK(r.validation.size() == on_one_rank().validation.size());
    double worst = distance(r, on_one_rank());
    for (std::size_t i = 0; i < r.validation.size(); ++i) {
        worst = std::max(worst, std::fabs(r.validation[i].second / on_one_rank().validation[i].second - 1));
    }
    return worst;
}

std::string bytes_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Whole files of weights, tensor by tensor.
class scratch {
    std::filesystem::path folder_ =
        std::filesystem::temp_directory_path() / ("tutti-parallel-" + std::to_string(::getpid()));

public:
    scratch() { std::filesystem::create_directories(folder_); }
    ~scratch() { std::filesystem::remove_all(folder_); }
    [[nodiscard]] std::string file(const char* name) const { return (folder_ / name).string(); }
};

TEST_CASE("however the model is cut, and by every schedule: the losses of one rank") {
    CHECK(on_one_rank().training.back().second < 0.9 * on_one_rank().training.front().second);
    CHECK(from_one_rank(run_of("tp", {2})) <= bar);
    CHECK(from_one_rank(run_of("tp", {4})) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 2})) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 4})) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 1, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {1, 2, 2}, "1f1b", 1)) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2, 2}, "1f1b", 1)) <= bar);
    for (const char* const schedule : {"gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe"}) {
        CAPTURE(schedule);
        CHECK(from_one_rank(run_of("pp", {1, 2}, schedule, 0, 0)) <= bar);
    }
    CHECK(from_one_rank(run_of("3d", {2, 2}, "zb-v", 1, 3)) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2}, "dualpipe", 1, 3)) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2}, "interleaved", 1, 3)) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 2}, "1f1b", 0, 2)) <= bar);  // layer normalization computed again
}

TEST_CASE("in float, and with a vocabulary that does not divide") {
    auto o = run_of("local");
    o.model.vocabulary = 259;
    const auto alone = train_on_threads<double>(o, text());
    const auto alone_in_float = train_on_threads<float>(o, text());
    o = run_of("3d", {4, 2}, "zb-v");
    o.model.vocabulary = 259;
    CHECK(distance(train_on_threads<double>(o, text()), alone) <= bar);
    CHECK(distance(train_on_threads<float>(o, text()), alone_in_float) <= 1e-5);
}

TEST_CASE("heads that do not divide: some ranks have one more") {
    const scratch folder;
    auto o = run_of("local");
    o.model.heads = 5;
    o.model.width = 20;
    o.save = folder.file("alone");
    const auto alone = train_on_threads<double>(o, text());
    for (const layout l : {layout{2, 1, 2}, layout{3, 2}}) {
        auto cut = run_of("3d", l, "1f1b", 1);
        cut.model.heads = 5;
        cut.model.width = 20;
        CHECK(distance(train_on_threads<double>(cut, text()), alone) <= bar);
        cut.load = folder.file("alone");
        cut.save = folder.file("again");
        cut.learning_rate = 1e-30;
        cut.steps = 1;
        static_cast<void>(train_on_threads<double>(cut, text()));
        CHECK(bytes_of(folder.file("again")) == bytes_of(folder.file("alone")));
    }
}

TEST_CASE("gradients of many buckets, on their way while the last micro-batch goes backward") {
    auto alone = run_of("local"), cut = run_of("3d", {1, 2, 2});
    alone.model.width = cut.model.width = 64;
    alone.steps = cut.steps = 3;
    CHECK(distance(train_on_threads<double>(cut, text()), train_on_threads<double>(alone, text())) <= bar);
}

TEST_CASE("bytes along each dimension are those of the formulas") {
    const std::uint64_t m = 8, rows = 16, w = 16, layers = 8, e = sizeof(double), activation = rows * w * e;
    const auto bytes = [&](const options& o) { return train_on_threads<double>(o, text()).parallel->bytes; };
    const auto with_steps = [](options o) {
        o.steps = 2;
        return o;
    };
    // Each sum over t ranks sends 2 (t - 1) / t: twice a layer each way, behind the embedding and the classifier.
    const auto tensor = [&](std::uint64_t t, std::uint64_t sums_of_a_layer, std::uint64_t others) {
        return m * ((sums_of_a_layer * layers + others) * activation + 3 * rows * e) * 2 * (t - 1) / t;
    };
    for (const int t : {2, 4}) {
        const auto sent = bytes(with_steps(run_of("tp", {t})));
        CHECK(sent[0] == tensor(static_cast<std::uint64_t>(t), 4, 2));
        CHECK(sent[1] == 0);
        CHECK(sent[2] == 0);
    }
    CHECK(bytes(with_steps(run_of("tp", {2}, "1f1b", 0, 3)))[0] == tensor(2, 6, 3));  // forward is computed again
    // An activation and a gradient across each border between ranks; both ends add up the table's gradients.
    const std::uint64_t table = 256 * w * e;
    CHECK(bytes(with_steps(run_of("pp", {1, 2})))[1] == m * activation + table);
    CHECK(bytes(with_steps(run_of("pp", {1, 4})))[1] == std::max(2 * m * activation, m * activation + table));
    CHECK(bytes(with_steps(run_of("pp", {1, 2}, "interleaved")))[1] == 3 * m * activation + table);
    CHECK(bytes(with_steps(run_of("pp", {1, 2}, "zb-v")))[1] == 2 * m * activation);  // one rank has both ends
    // Two replicas send what they have once, whether it is added up or cut.
    const std::uint64_t layer = 12 * w * w + 13 * w, last_stage = 256 * w + layers / 2 * layer + 2 * w;
    const std::uint64_t first_stage = 256 * w + 16 * w + layers / 2 * layer;
    for (const int zero : {0, 1}) {
        CAPTURE(zero);
        const auto sent = bytes(with_steps(run_of("3d", {1, 2, 2}, "gpipe", zero)));
        CHECK(sent[2] == std::max(first_stage, last_stage) * e);
        CHECK(sent[1] == m / 2 * activation + table);
    }
}

TEST_CASE("what is kept: micro-batches in flight, or what enters stages") {
    const auto peak = [](const options& o) { return train_on_threads<float>(o, text()).peak_bytes; };
    auto o = run_of("pp", {1, 2}, "gpipe", 0, 0);
    o.steps = 2;
    const auto all = peak(o);
    o.pipeline_schedule = "1f1b";
    const auto few = peak(o);
    o.recompute = 3;
    CHECK(few < all);
    CHECK(peak(o) < few);
    CHECK(train_on_threads<float>(run_of("pp", {1, 4}), text()).parallel->bubble_fraction == doctest::Approx(3.0 / 11));
}

TEST_CASE("weights are saved whole, and loaded by any number of ranks; the same text is written") {
    const scratch folder;
    const auto trained = [&](options o, const char* file) {
        o.quiet = false;
        o.steps = 4;
        o.save = folder.file(file);
        return train_on_threads<double>(o, text());
    };
    const auto alone = trained(run_of("local"), "alone");
    const auto parts = trained(run_of("3d", {2, 2, 2}, "dualpipe", 1), "parts");
    CHECK(parts.sample.size() == 400);
    CHECK(parts.sample == alone.sample);
    const tutti::checkpoint::safetensors_file expected(folder.file("alone")), saved(folder.file("parts"));
    REQUIRE(saved.tensors().size() == expected.tensors().size());
    for (const auto& [key, stored] : expected.tensors()) {
        const std::string name = key;
        CAPTURE(name);
        REQUIRE(saved.at(name).shape == stored.shape);
        std::size_t count = 1;
        for (const auto extent : stored.shape) { count *= static_cast<std::size_t>(extent); }
        std::vector<float> a(count), b(count);
        expected.read(name, tutti::view<float>(a));
        saved.read(name, tutti::view<float>(b));
        double most = 0, apart = 0;
        for (std::size_t i = 0; i < count; ++i) {
            most = std::max(most, std::fabs(static_cast<double>(a[i])));
            apart = std::max(apart, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
        }
        CHECK(apart <= 1.2e-7 * most);  // the last bit of float
    }
    auto o = run_of("local"), cut = run_of("3d", {2, 2}, "zb-h1", 1);
    o.load = cut.load = folder.file("parts");
    o.steps = cut.steps = 3;
    CHECK(distance(train_on_threads<double>(cut, text()), train_on_threads<double>(o, text())) <= bar);
}

TEST_CASE("what cannot be is refused with the reason") {
    const auto refused = [](const char* pipeline, auto change) {
        options o;
        o.model = {.vocabulary = 256, .context = 16, .layers = 8, .heads = 4, .width = 16};
        o.pipeline = pipeline;
        o.batch = 8;
        o.micro_batch = 1;
        change(o);
        try {
            transformer::complete(o, false, 0);
            if (o.of_parts()) { static_cast<void>(transformer::schedule_of(o)); }
        } catch (const transformer::bad_input& e) { return std::string(e.what()); }
        return std::string("nothing");
    };
    using O = options;
    CHECK(refused("ddp", [](O& o) { o.tp = 2; }) ==
          "--tp: pipeline 'ddp' has the whole model on every rank; tp, pp and 3d do not");
    CHECK(refused("ddp", [](O& o) { o.recompute = 3; }) ==
          "--recompute 3: pipeline 'ddp' has the whole model on every rank; tp, pp and 3d do not");
    CHECK(refused("3d", [](O& o) { o.ranks = 8, o.tp = 2, o.pp = 2, o.dp = 1; }) ==
          "--ranks: 8 ranks, but --tp 2 x --pp 2 x --dp 1 are 4");
    CHECK(refused("3d", [](O& o) { o.ranks = 6, o.tp = 4; }) == "--ranks: 6 ranks, but --tp 4 x --pp 1 x --dp 1 are 4");
    CHECK(refused("tp", [](O& o) { o.pp = 2; }) ==
          "--pp: pipeline 'tp' has all layers on every rank; 3d divides them too");
    CHECK(refused("pp", [](O& o) { o.tp = 2; }) == "--tp: pipeline 'pp' has whole layers; 3d divides them too");
    CHECK(refused("tp", [](O& o) { o.tp = 8; }) == "--tp: 4 heads cannot be divided among 8 ranks");
    CHECK(refused("pp", [](O& o) { o.pp = 3, o.batch = 9; }) ==
          "--layers: 8 layers cannot be divided among the 3 stages of 1f1b on 3 ranks");
    CHECK(refused("pp", [](O& o) { o.pp = 8, o.pipeline_schedule = "interleaved"; }) ==
          "--layers: 8 layers cannot be divided among the 16 stages of interleaved on 8 ranks");
    CHECK(refused("pp", [](O& o) {
              o.pp = 2, o.batch = 7, o.pipeline_schedule = "interleaved";
          }).starts_with("--pipeline-schedule: interleaved: "));
    CHECK(refused("pp", [](O& o) {
              o.pp = 2, o.batch = 2, o.pipeline_schedule = "dualpipe";
          }).starts_with("--pipeline-schedule: dual_pipe: "));
    CHECK(refused("pp", [](O& o) { o.pipeline_schedule = "2f2b"; }) ==
          "--pipeline-schedule: '2f2b' is not one of gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe");
    CHECK(refused("pp", [](O& o) { o.pp = 2, o.pipeline_schedule = "zb-v", o.recompute = 1; }) ==
          "--recompute: 'zb-v' computes weights' gradients later, from what forward kept: 0 or 3");
    CHECK(refused("3d", [](O& o) { o.dp = 3, o.tp = o.pp = 1; }) ==
          "--batch: 8 sequences cannot be divided among 3 replicas");
    CHECK(refused("3d", [](O& o) { o.checkpoint = "x"; }) ==
          "--checkpoint: pipeline '3d' has none; --save writes weights");
}

}  // namespace
