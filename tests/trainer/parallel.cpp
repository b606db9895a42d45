// Ranks that have parts of the model: the losses, weights and bytes of one rank that has all of it.
#include <algorithm>   // max
#include <cmath>       // fabs
#include <cstdint>     // bytes
#include <filesystem>  // saved weights
#include <fstream>     // saved weights
#include <iterator>    // whole files
#include <string>      // files
#include <string_view> // names
#include <utility>     // move
#include <vector>      // curves

#include <unistd.h>  // getpid

#include <doctest/doctest.h>
#include <tutti/checkpoint/safetensors.hpp>  // saved weights
#include <tutti/core/error.hpp>              // what a run throws

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
    static const auto made = some_text(16);
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

TEST_CASE("however the model is cut, and by every schedule: the losses of one rank") {
    CHECK(on_one_rank().training.back().second < 0.9 * on_one_rank().training.front().second);
    CHECK(from_one_rank(run_of("tp", {2})) <= bar);
    CHECK(from_one_rank(run_of("tp", {4})) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 2})) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 4})) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 1, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {1, 2, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2, 2})) <= bar);
    for (const char* const schedule : {"gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe"}) {
        CAPTURE(schedule);
        CHECK(from_one_rank(run_of("pp", {1, 2}, schedule)) <= bar);
        CHECK(from_one_rank(run_of("3d", {2, 2}, schedule, 1, 3)) <= bar);
    }
}

}  // namespace
