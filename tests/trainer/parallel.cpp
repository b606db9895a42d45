// Ranks that have parts of the model: the losses, weights and bytes of one rank that has all of it.
#include <algorithm>    // max
#include <cmath>        // fabs
#include <cstdint>      // bytes
#include <fstream>      // lengths, weights
#include <iterator>     // all bytes
#include <set>          // ranks in a trace
#include <string>       // files
#include <string_view>  // names
#include <vector>       // values

#include <doctest/doctest.h>
#include <tutti/checkpoint/safetensors.hpp>      // saved weights
#include <tutti/plan/memory.hpp>                 // what is planned
#include <tutti/schedule/bucket.hpp>             // buckets
#include <tutti/strategy/detail/shard_plan.hpp>  // who has what of them

#include <support/scratch_folder.hpp>  // files

#include "cut.hpp"
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
    int tp = 1, pp = 1, dp = 1, sp = 1;
};

options asked_for(const char* pipeline, layout l, const char* schedule, int zero, int recompute) {
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
        o.sp = l.sp;
    }
    return o;
}
options run_of(const char* pipeline, layout l = {}, const char* schedule = "1f1b", int zero = 0, int recompute = -1) {
    options o = asked_for(pipeline, l, schedule, zero, recompute);
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

options with_rows_divided(options o) {
    o.sequence_parallel = true;
    return o;
}

TEST_CASE("rows over the ranks that share layers, beside all other dimensions: the losses of one rank") {
    const auto apart = [](layout l, const char* schedule = "1f1b", int zero = 0, int recompute = -1) {
        return from_one_rank(with_rows_divided(run_of("3d", l, schedule, zero, recompute)));
    };
    CHECK(from_one_rank(with_rows_divided(run_of("tp", {4}))) <= bar);
    CHECK(apart({2, 2}) <= bar);
    CHECK(apart({2, 1, 2}, "1f1b", 1) <= bar);
    CHECK(apart({2, 2, 2}, "1f1b", 1) <= bar);
    CHECK(apart({3, 1, 1, 2}) <= bar);                // eight rows over three ranks
    CHECK(apart({2, 2}, "zb-h1", 0, 0) <= bar);       // gradients of weights later
    CHECK(apart({2, 2, 1, 2}, "zb-v", 1, 3) <= bar);  // the same, forward computed again
    CHECK(apart({2, 2}, "dualpipe", 1) <= bar);       // two copies of each norm
    CHECK(apart({2, 2}, "interleaved", 0, 1) <= bar);
    CHECK(apart({2}, "1f1b", 0, 2) <= bar);  // layer normalization computed again
    auto alone = run_of("local"), few = with_rows_divided(run_of("tp", {4}));
    alone.model.context = few.model.context = 3;  // a rank has no rows
    alone.eval_every = few.eval_every = steps;
    CHECK(distance(train_on_threads<double>(few, text()), train_on_threads<double>(alone, text())) <= bar);
}

TEST_CASE("sequences over ranks, beside all other dimensions: the losses of one rank") {
    CHECK(from_one_rank(run_of("3d", {1, 1, 1, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {1, 1, 1, 4})) <= bar);
    auto of_two = run_of("tp", {2, 1, 1, 2});
    of_two.micro_batch = 2;
    CHECK(from_one_rank(of_two) <= bar);
    CHECK(from_one_rank(run_of("pp", {1, 2, 1, 2})) <= bar);
    CHECK(from_one_rank(run_of("3d", {1, 1, 2, 2}, "1f1b", 1)) <= bar);
    CHECK(from_one_rank(run_of("3d", {2, 2, 1, 2}, "1f1b", 1)) <= bar);
    CHECK(from_one_rank(run_of("3d", {1, 2, 1, 3}, "zb-v", 1, 3)) <= bar);  // chunks of two tokens and of three
    CHECK(from_one_rank(run_of("3d", {1, 2, 1, 2}, "dualpipe")) <= bar);
}

TEST_CASE("documents over ranks: the losses of one rank, and of the pipeline that places a step's documents") {
    const tutti::test::scratch_folder folder;
    std::ofstream(folder / "lengths") << "1 2 3 5 8 13 16 16";
    const auto documents_of = [&](const char* pipeline, layout l, int micro_batch, const char* schedule = "1f1b",
                                  int zero = 0, int recompute = -1) {
        auto o = asked_for(pipeline, l, schedule, zero, recompute);
        o.lengths = (folder / "lengths").string();
        o.micro_batch = micro_batch;
        if (!o.of_parts()) { o.ranks = 1; }
        transformer::complete(o, false, 0);
        return o;
    };
    const auto apart = [](const options& o, const transformer::result& expected) {
        return distance(train_on_threads<double>(o, text()), expected);
    };
    // All of a step's documents in one micro-batch, by another trainer.
    const auto at_once = train_on_threads<double>(documents_of("zeppelin", {}, 0), text());
    CHECK(at_once.training.back().second < 0.9 * at_once.training.front().second);
    CHECK(apart(documents_of("tp", {2}, 8), at_once) <= bar);
    CHECK(apart(documents_of("3d", {2, 1, 1, 2}, 8), at_once) <= bar);
    CHECK(apart(with_rows_divided(documents_of("3d", {2, 1, 1, 2}, 8)), at_once) <= bar);
    // Micro-batches in flight, each with documents of its own; losses are means over all tokens, not of means.
    const auto alone = train_on_threads<double>(documents_of("tp", {1}, 2), text());
    CHECK(distance(alone, at_once) > 1e-4);
    CHECK(apart(documents_of("3d", {1, 1, 2, 2}, 2, "1f1b", 1), alone) <= bar);
    CHECK(apart(documents_of("pp", {1, 2}, 2), alone) <= bar);
    CHECK(apart(documents_of("3d", {2, 2, 1, 2}, 2, "1f1b", 1), alone) <= bar);
    CHECK(apart(documents_of("pp", {1, 2, 1, 2}, 2, "zb-v"), alone) <= bar);
    CHECK(apart(documents_of("pp", {1, 2, 1, 2}, 2, "interleaved", 0, 3), alone) <= bar);
    CHECK(apart(documents_of("3d", {1, 2, 1, 2}, 2, "dualpipe", 1), alone) <= bar);
    auto tight = documents_of("3d", {1, 1, 1, 2}, 2);
    tight.capacity = 16;
    CHECK(apart(tight, alone) <= bar);
    auto routed = documents_of("3d", {1, 1, 1, 4}, 2);
    routed.nodes = 2;
    CHECK(apart(routed, alone) <= bar);
}

TEST_CASE("gradients and parameters shared, beside all dimensions but a pipeline: the losses of one rank") {
    for (const int zero : {2, 3}) {
        CAPTURE(zero);
        const auto shared = [&](layout l, int recompute = -1) { return run_of("3d", l, "1f1b", zero, recompute); };
        CHECK(from_one_rank(run_of("tp", {2, 1, 2}, "1f1b", zero)) <= bar);
        CHECK(from_one_rank(run_of("tp", {2}, "1f1b", zero)) <= bar);  // nobody to share with
        CHECK(from_one_rank(with_rows_divided(shared({2, 1, 2, 2}, 3))) <= bar);
        CHECK(from_one_rank(shared({1, 1, 2, 2}, 2)) <= bar);
    }
    // Several buckets under way; and a rank of four has no window of the last ones to validate on.
    auto alone = run_of("local");
    alone.model.width = 96;
    alone.steps = 3;
    const auto expected = train_on_threads<double>(alone, text());
    for (auto cut : {with_rows_divided(run_of("3d", {2, 1, 2}, "1f1b", 2)), run_of("3d", {1, 1, 4}, "1f1b", 3)}) {
        cut.model.width = 96;
        cut.steps = 3;
        CHECK(distance(train_on_threads<double>(cut, text()), expected) <= bar);
    }
}

TEST_CASE("in float, and with a vocabulary that does not divide") {
    auto o = run_of("local");
    o.model.vocabulary = 259;
    const auto alone = train_on_threads<double>(o, text());
    const auto alone_in_float = train_on_threads<float>(o, text());
    for (const layout l : {layout{4, 2}, layout{2, 2, 1, 2}}) {
        o = run_of("3d", l, "zb-v");
        o.model.vocabulary = 259;
        CHECK(distance(train_on_threads<double>(o, text()), alone) <= bar);
        CHECK(distance(train_on_threads<float>(o, text()), alone_in_float) <= 1e-5);
        CHECK(distance(train_on_threads<double>(with_rows_divided(o), text()), alone) <= bar);
    }
}

TEST_CASE("heads that do not divide: some ranks have one more") {
    const tutti::test::scratch_folder folder;
    auto o = run_of("local");
    o.model.heads = 5;
    o.model.width = 20;
    o.save = (folder / "alone").string();
    const auto alone = train_on_threads<double>(o, text());
    const std::pair<layout, int> cuts[] = {
        {{2, 1, 2}, 1}, {{3, 1, 1, 2}, 1}, {{3, 2}, 1}, {{2, 1, 2}, 2}, {{3, 1, 2}, 3}};
    for (const auto& [l, zero] : cuts) {
        auto cut = run_of("3d", l, "1f1b", zero);
        cut.model.heads = 5;
        cut.model.width = 20;
        CHECK(distance(train_on_threads<double>(cut, text()), alone) <= bar);
        cut.load = (folder / "alone").string();
        cut.save = (folder / "again").string();
        cut.learning_rate = 1e-30;
        cut.steps = 1;
        static_cast<void>(train_on_threads<double>(cut, text()));
        CHECK(bytes_of((folder / "again").string()) == bytes_of((folder / "alone").string()));
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
    const std::uint64_t table = 256 * w * e;
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
    // With rows divided each sum is a gather and a sum to rows; backward gathers inputs again, behind each of the two sums
    // of a layer and the classifier's; and norms' gradients are added up once a step.
    const std::uint64_t norms = (4 * layers + 2) * w * e;
    for (const std::uint64_t t : {2u, 4u}) {
        const auto sent = bytes(with_steps(with_rows_divided(run_of("tp", {static_cast<int>(t)}))));
        CHECK(sent[0] == tensor(t, 4, 2) + (m * (2 * layers + 1) * activation + 2 * norms) * (t - 1) / t);
    }
    // Of two calls, those of gradients of weights gather on their own.
    const auto later = bytes(with_steps(with_rows_divided(run_of("3d", {2, 2}, "zb-h1", 0, 0))));
    const auto at_once = bytes(with_steps(with_rows_divided(run_of("3d", {2, 2}, "1f1b", 0, 0))));
    CHECK(later[0] == at_once[0] + m * (2 * layers / 2) * activation / 2);
    CHECK(at_once[1] == m * activation / 2 + table / 2);  // shares of rows leave and enter stages
    // An activation and a gradient across each border between ranks; both ends add up the table's gradients.
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
    // Over s ranks: of each layer's keys and values, of w / t columns each, a rank passes on all rows but those of the
    // next one, forward and backward; and their gradients, but for its own.
    const auto ring = [&](std::uint64_t s, std::uint64_t t) {
        return m * layers * 2 * (w / t) * rows * e * 3 * (s - 1) / s;
    };
    const std::uint64_t all = 256 * w + 16 * w + layers * layer + 2 * w;
    for (const std::uint64_t s : {2u, 4u}) {
        CAPTURE(s);
        const auto sent = bytes(with_steps(run_of("3d", {1, 1, 1, static_cast<int>(s)})));
        CHECK(sent[4] == ring(s, 1));
        CHECK(sent[2] == 2 * (s - 1) * all * e / s);  // weights are averaged over them
        CHECK(sent[0] + sent[1] + sent[3] == 0);
    }
    CHECK(bytes(with_steps(run_of("3d", {1, 1, 1, 2}, "1f1b", 0, 3)))[4] == ring(2, 1) / 3 * 4);
    const auto cut = with_steps(run_of("3d", {2, 2, 1, 2}));
    const auto trained = train_on_threads<double>(cut, text());
    const auto& sent = trained.parallel->bytes;
    CHECK(sent[4] == ring(2, 2) / 2);  // half of the layers
    CHECK(sent[1] == m * activation / 2 + table / 2);
    CHECK(sent[3] == bytes(with_steps(run_of("3d", {2, 2})))[3]);
    const auto report = transformer::report_of(cut, trained)["parallel"];
    CHECK(report["sp"] == 2);
    CHECK(report["bytes_per_rank_per_step"]["sequence"] == sent[4]);
    std::set<int> ranks_that_pass_blocks;
    const auto trace = nlohmann::json::parse(trained.trace);
    for (const auto& event : trace["traceEvents"]) {
        if (event["name"] != "thread_name") { continue; }
        if (event["args"]["name"].get<std::string>().find("attention") != std::string::npos) {
            ranks_that_pass_blocks.insert(event["pid"].get<int>());
        }
    }
    CHECK(ranks_that_pass_blocks.size() == 8);
}

TEST_CASE("what ranks wait for in evaluations is no part of their steps") {
    // Each message takes a millisecond, and validation as many of them as a step.
    auto cut = run_of("tp", {2});
    auto both_ways = with_rows_divided(run_of("3d", {2, 2}, "dualpipe"));
    for (options* const o : {&cut, &both_ways}) {
        CAPTURE(o->pipeline);
        o->network = "1Gbit,1ms";
        o->steps = 2;
        o->eval_every = 1;
        o->model.layers = 2;
        const auto r = train_on_threads<double>(*o, text());
        CHECK(r.exposed_seconds >= 2 * 2 * 1e-3);  // a step has two messages at the least
        CHECK(r.compute_seconds > 0);
    }
}

// What a rank has, and shares with `ranks` others that have the same, as strategy/zero says: in buckets of half a
// megabyte a rank. Of one width and the same heads on all ranks of a tensor group.
struct shared_parameters {
    tutti::schedule::bucket_plan plan;
    int ranks;

    shared_parameters(const options& o, int count) : ranks(count) {
        std::vector<std::size_t> sizes;
        const auto words = static_cast<std::size_t>(o.model.vocabulary / o.tp);
        for (const auto& d : transformer::parameters_of(o.model, {o.tp, 0, words})) { sizes.push_back(d.size()); }
        plan = tutti::schedule::plan_buckets(sizes, sizeof(double),
                                             (std::size_t{512} << 10) * static_cast<unsigned>(ranks));
    }
    [[nodiscard]] std::size_t largest() const { return of(0).largest_bucket(); }
    [[nodiscard]] tutti::strategy::detail::shard_plan of(int rank) const { return {plan, ranks, rank}; }
};

TEST_CASE("bytes among ranks that share gradients and parameters are those of the formulas") {
    constexpr std::size_t e = sizeof(double);
    const auto bytes = [&](options o, int zero) {
        o.zero = zero;
        o.recompute = 0;
        o.steps = 2;
        o.model.width = 96;
        return train_on_threads<double>(o, text()).parallel->bytes;
    };
    for (const layout l : {layout{2, 1, 2}, layout{1, 1, 2, 2}}) {
        const auto cut = run_of("3d", l);
        auto wide = cut;
        wide.model.width = 96;
        const shared_parameters shared(wide, l.dp * l.sp);
        const std::size_t buckets = shared.plan.buckets.size(), m = 8 / static_cast<std::size_t>(l.dp);
        REQUIRE(buckets >= 3);
        REQUIRE(shared.plan.bucket_of[transformer::at(0, transformer::norm1_gain)] == buckets - 1);
        // The lists of buckets begin at the model's end.
        std::uint64_t reduced[2] = {}, gathered[2] = {};  // of the rank that sends most; stages 2 and 3
        for (int rank = 0; rank < shared.ranks; ++rank) {
            const auto own = shared.of(rank);
            std::uint64_t others = 0, once = 0, again = 0;
            for (std::size_t b = 0; b < buckets; ++b) {
                const std::size_t mine = own.own(b).count, to_all = mine * static_cast<unsigned>(shared.ranks - 1);
                others += own.bucket(b).size - mine;
                once += 2 * to_all;  // two steps, each behind its update
                // Forward and backward gather each, but for the bucket at which they meet, and which only the first
                // micro-batch of all, not knowing what comes next, lets go. The first bucket comes behind the update,
                // for the classifier, and at the end of backward, where it stays for the next micro-batch.
                const std::size_t times = b == 0 ? 2 * m + 1 : b + 1 == buckets ? 2 * (2 * m + 1) + 1 : 2 * 2 * m;
                again += times * to_all;
            }
            reduced[0] = std::max(reduced[0], (2 * m * others + once) * e / 2);
            gathered[0] = std::max(gathered[0], (2 * m * others + again) * e / 2);
        }
        const auto one = bytes(cut, 1), two = bytes(cut, 2), three = bytes(cut, 3);
        CHECK(two[2] == reduced[0]);
        CHECK(three[2] == gathered[0]);
        for (const std::size_t d : {0u, 1u, 3u, 4u}) {
            CAPTURE(d);
            CHECK(two[d] == one[d]);  // along other dimensions nothing more
            CHECK(three[d] == one[d]);
        }
        if (l.tp == 1) { continue; }
        // Gradients of norms are added up before they are cut: for each micro-batch, not for all.
        const std::uint64_t norms = (4 * 8 + 2) * 96 * e;
        const auto at_end = bytes(with_rows_divided(cut), 1), each = bytes(with_rows_divided(cut), 3);
        CHECK(each[0] == at_end[0] + (m - 1) * norms);
        CHECK(each[2] == three[2]);
    }
}

TEST_CASE("what is held of parameters, gradients and moments is what is planned") {
    auto o = run_of("3d", {2, 1, 2});
    o.model.width = 96;
    o.batch = 32;
    o.micro_batch = 16;  // more activations than parameters
    o.steps = 2;
    const shared_parameters shared(o, 2);
    const tutti::plan::job planned{.tensor = 2, .data = 2};
    const std::int64_t all = tutti::plan::rank_parameters({8, 96, 4, 256, 16}, planned, 0);
    CHECK(static_cast<std::size_t>(all) == shared.plan.elements);
    // Masters and two moments; stage 3 has no values beside masters of the same type. Beside states: what reductions
    // leave of whole gradients, or buckets at work, of each kind that of the words and two where a layer goes on.
    const auto held = [&](int zero) {
        const std::int64_t bucket = 8 * static_cast<std::int64_t>(shared.largest()), own = (all + 1) / 2;
        const std::int64_t border = 8 * 16 * 16 * 96;  // goes into and out of a rehearsal, before there are buckets
        const std::int64_t beside[] = {0, 8 * own + 2 * border, 3 * bucket, 6 * bucket};
        return tutti::plan::state_bytes(all, zero, 2, {zero == 3 ? 0 : 8, 8, 24}) + beside[zero];
    };
    const auto measured = [&](int zero) {
        o.zero = zero;
        return static_cast<std::int64_t>(train_on_threads<double>(o, text()).peak_bytes);
    };
    const auto one = measured(1);
    CHECK(one - measured(2) == held(1) - held(2));
    CHECK(one - measured(3) == held(1) - held(3));
    CHECK(held(3) < held(2));
    CHECK(held(2) < held(1));
}

TEST_CASE("what is kept: micro-batches in flight, or what enters stages") {
    const auto peak = [](const options& o) { return train_on_threads<float>(o, text()).peak_bytes; };
    auto o = run_of("pp", {1, 2}, "gpipe", 0, 0);
    o.steps = 2;
    const auto all = peak(o);
    auto more = o;
    more.batch += 2 * o.micro_batch;
    const auto room = (peak(more) - all) / 2;  // of a micro-batch in half of the layers
    o.pipeline_schedule = "1f1b";
    const auto few = peak(o);
    // At most five of a quarter of the layers instead of two of half: stages of a rank use the same memory.
    o.pipeline_schedule = "interleaved";
    CHECK(peak(o) - few < room * 3 / 4);
    o.pipeline_schedule = "1f1b";
    o.recompute = 3;
    CHECK(few < all);
    CHECK(peak(o) < few);
    CHECK(train_on_threads<float>(run_of("pp", {1, 4}), text()).parallel->bubble_fraction == doctest::Approx(3.0 / 11));
}

TEST_CASE("weights are saved whole, and loaded by any number of ranks; the same text is written") {
    const tutti::test::scratch_folder folder;
    const auto trained = [&](options o, const char* file) {
        o.quiet = false;
        o.steps = 4;
        o.save = (folder / file).string();
        return train_on_threads<double>(o, text());
    };
    const auto alone = trained(run_of("local"), "alone");
    const tutti::checkpoint::safetensors_file expected((folder / "alone").string());
    for (auto divided : {run_of("3d", {2, 2, 2}, "dualpipe", 1), run_of("3d", {2, 2, 1, 2}, "dualpipe", 1),
                         run_of("3d", {2, 1, 2}, "1f1b", 3)}) {
        divided.sequence_parallel = divided.sp == 1;
        const auto parts = trained(divided, "parts");
        CHECK(parts.sample.size() == 400);
        CHECK(parts.sample == alone.sample);
        const tutti::checkpoint::safetensors_file saved((folder / "parts").string());
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
    }
    auto o = run_of("local"), cut = run_of("3d", {2, 2, 1, 2}, "zb-h1", 1);
    o.load = cut.load = (folder / "parts").string();
    o.steps = cut.steps = 3;
    CHECK(distance(train_on_threads<double>(cut, text()), train_on_threads<double>(o, text())) <= bar);
}

TEST_CASE("a run that was ended early and resumed has the bits of one that was not; other parts do not go on from it") {
    const tutti::test::scratch_folder folder;
    std::ofstream(folder / "lengths") << "1 2 3 5 8 13 16 16";
    int number = 0;
    const auto check_resumed = [&](options o) {
        const auto whole = train_on_threads<double>(o, text());
        o.checkpoint = (folder / std::to_string(number++)).string();
        o.checkpoint_every = 3;
        o.resume = true;
        o.stop_after = 4;
        CHECK(train_on_threads<double>(o, text()).first_step == 0);
        o.stop_after = 0;
        const auto rest = train_on_threads<double>(o, text());
        CHECK(rest.first_step == 4);
        CHECK(rest.parameter_hash == whole.parameter_hash);
        REQUIRE(rest.training.size() == steps - 4);
        CHECK(std::equal(rest.training.begin(), rest.training.end(), whole.training.begin() + 4));
        return o;
    };
    static_cast<void>(check_resumed(run_of("3d", {1, 2, 1, 2}, "dualpipe", 1)));
    auto of_documents = asked_for("3d", {1, 2, 1, 2}, "zb-v", 0, -1);
    of_documents.lengths = (folder / "lengths").string();
    of_documents.micro_batch = 2;
    transformer::complete(of_documents, false, 0);
    static_cast<void>(check_resumed(of_documents));
    auto shared = run_of("3d", {2, 1, 2}, "1f1b", 3);
    shared.model.width = 96;
    static_cast<void>(check_resumed(with_rows_divided(shared)));
    auto o = check_resumed(run_of("3d", {2, 2, 2}, "interleaved", 1));
    const auto refused = [&](options other) {
        other.checkpoint = o.checkpoint;
        other.resume = true;
        try {
            static_cast<void>(train_on_threads<double>(other, text()));
        } catch (const transformer::bad_input& e) {
            const std::string why = e.what();
            const auto folder_at = why.find(o.checkpoint);
            REQUIRE(folder_at != std::string::npos);
            return std::string(why).erase(folder_at, o.checkpoint.size());
        }
        return std::string("nothing");
    };
    CHECK(refused(o) == "--resume: the run in '' is at step 10: nothing is left to do");
    const std::string begun_with = "--resume: the run in '' was begun with --tp 2 --pp 2 --dp 2 --sp 1 --zero 1 "
                                   "--micro-batch 1, without --sequence-parallel, and goes on like this";
    CHECK(refused(with_rows_divided(run_of("3d", {2, 2, 2}, "interleaved", 1))) == begun_with);
    CHECK(refused(run_of("3d", {2, 2, 1, 2}, "interleaved", 1)) == begun_with);
    CHECK(refused(run_of("3d", {2, 2, 4}, "interleaved", 1)) == begun_with);
    CHECK(refused(run_of("3d", {2, 2, 2}, "interleaved", 0)) == begun_with);
    const std::string_view other_parts =
        "--resume: the run in '' has another model, --precision, --pipeline, --tp, --pp or --pipeline-schedule (";
    CHECK(refused(run_of("3d", {1, 2, 2, 2}, "interleaved", 1)).starts_with(other_parts));
    CHECK(refused(run_of("3d", {2, 4}, "1f1b", 1)).starts_with(other_parts));
    CHECK(refused(run_of("3d", {2, 2, 2}, "1f1b", 1)).starts_with(other_parts));
    CHECK(refused(run_of("ddp"))
              .starts_with("--resume: the run in '' has another model, --precision, --pipeline or number of ranks ("));
    auto seeded = run_of("3d", {2, 2, 2}, "interleaved", 1);
    seeded.seed = 7;
    CHECK(refused(seeded) == "--resume: the run in '' has another --seed, --batch, --context, --lengths or text");
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
    CHECK(refused("ddp", [](O& o) { o.recompute = 3; }) ==
          "--recompute 3: pipeline 'ddp' has the whole model on every rank; tp, pp, 3d do not");
    CHECK(refused("3d", [](O& o) { o.ranks = 8, o.tp = 2, o.pp = 2, o.dp = 1; }) ==
          "--ranks: 8 ranks, but --tp 2 x --pp 2 x --dp 1 x --sp 1 are 4");
    CHECK(refused("3d", [](O& o) { o.ranks = 6, o.tp = 4; }) ==
          "--ranks: 6 ranks, but --tp 4 x --pp 1 x --dp 1 x --sp 1 are 4");
    CHECK(refused("tp", [](O& o) { o.ranks = 6, o.sp = 4; }) ==
          "--ranks: 6 ranks, but --tp 1 x --pp 1 x --dp 1 x --sp 4 are 4");
    CHECK(refused("tp", [](O& o) { o.sp = 16, o.tp = 1; }) ==
          "--sp: 16 ranks have two chunks each of a sequence, which are more than the 16 tokens of --context");
    CHECK(
        refused("tp", [](O& o) { o.tp = 2, o.sp = 3, o.nodes = 2; }) ==
        "--nodes: the 3 ranks that share sequences, every --tp 2 ranks one, would be unevenly on machines of 3 ranks; "
        "--tp times --sp and the ranks of a machine should divide one another");
    CHECK(refused("3d", [](O& o) { o.tp = 2, o.sp = 2, o.dp = 2, o.nodes = 4, o.network = "1Gbit"; }) == "nothing");
    CHECK(refused("tp", [](O& o) { o.sp = 2, o.capacity = 9; }) ==
          "--capacity: sequences of one length are divided evenly; --lengths draws documents");
    CHECK(refused("tp", [](O& o) { o.sp = 3, o.tp = 1, o.lengths = "magi"; }) ==
          "--sp: the 16 tokens of a micro-batch cannot be divided among 3 ranks");
    CHECK(refused("tp", [](O& o) { o.sp = 2, o.tp = 1, o.lengths = "magi", o.capacity = 7; }) ==
          "--capacity: --sp 2 ranks of 7 tokens do not hold the 16 of a micro-batch");
    CHECK(refused("pp", [](O& o) { o.lengths = "nowhere"; }).starts_with("--lengths: 'nowhere' is not one of"));
    CHECK(refused("pp", [](O& o) { o.lengths = "magi", o.steps = 100'000'000, o.batch = 1024, o.dp = 1; }) ==
          "--steps: documents of 100000000 steps of 1024 micro-batches are more than can be drawn");
    CHECK(refused("tp", [](O& o) { o.device = "cuda", o.sp = 2, o.tp = 1; }) == "nothing");
    CHECK(refused("tp", [](O& o) { o.device = "cuda", o.lengths = "magi"; }) == "nothing");
    CHECK(refused("tp", [](O& o) { o.pipeline_schedule = "zb-v"; }) ==
          "--pipeline-schedule: pipeline 'tp' has all layers on every rank, and no pipeline of them");
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
    CHECK(refused("3d", [](O& o) { o.zero = 3, o.tp = 2, o.dp = 2; }) == "nothing");
    CHECK(refused("3d", [](O& o) { o.zero = 2, o.pp = 2, o.dp = 2; }) ==
          "--zero: 2 shares gradients after every micro-batch, of which the 2 stages of --pp have several under way; "
          "--zero 1 goes with them, or --pp 1 and more of --tp, --dp or --sp");
    CHECK(refused("pp", [](O& o) { o.zero = 3; }).starts_with("--zero: 3 shares gradients after every micro-batch"));
    CHECK(refused("3d", [](O& o) { o.zero = 3, o.dp = 2, o.pipeline_schedule = "gpipe"; }) ==
          "--pipeline-schedule: --zero 3 has one micro-batch at a time, which is 1f1b on one rank");
    CHECK(refused("pp", [](O& o) { o.pp = 2, o.pipeline_schedule = "zb-v", o.recompute = 1; }) ==
          "--recompute: 'zb-v' computes weights' gradients later, from what forward kept: 0 or 3");
    CHECK(refused("3d", [](O& o) { o.dp = 3, o.tp = o.pp = 1; }) ==
          "--batch: 8 sequences cannot be divided among 3 replicas");
}

}  // namespace
