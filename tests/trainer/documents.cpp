// Documents of all lengths: the same losses on one rank and on many, wherever they are placed; what is reported of that.
#include <algorithm>  // max
#include <array>      // pipelines
#include <chrono>     // deadlines
#include <cmath>      // abs, isfinite
#include <cstdint>    // lengths
#include <fstream>    // files of lengths
#include <numeric>    // accumulate
#include <string>     // names
#include <utility>    // pair
#include <vector>     // lengths

#include <doctest/doctest.h>

#include <tutti/comm/counted.hpp>    // what attention is over
#include <tutti/comm/shaped.hpp>     // likewise
#include <tutti/sequence/remap.hpp>  // rows outside of attention

#include <support/scratch_folder.hpp>  // files

#include "document_rules.hpp"
#include "document_steps.hpp"
#include "micro_batches.hpp"
#include "training.hpp"

namespace {

using tutti::test::scratch_folder;
using trainer_test::some_text;
using trainer_test::train_on_threads;

constexpr std::array pipelines{"packed", "even-ring", "zeppelin"};

/// A small model over documents.
transformer::options documents_of(const char* pipeline, int ranks, const std::string& lengths, int context = 48,
                                  int steps = 10) {
    transformer::options o;
    o.model = {.vocabulary = 256, .context = context, .layers = 2, .heads = 2, .width = 16};
    o.pipeline = pipeline;
    o.ranks = ranks;
    o.lengths = lengths;
    o.batch = 6;
    o.steps = steps;
    o.quiet = true;
    transformer::complete(o, false, 0);
    return o;
}
std::string file_of(const scratch_folder& folder, const std::string& numbers) {
    std::ofstream(folder / "lengths") << numbers;
    return (folder / "lengths").string();
}
/// Documents of the step, and where they are.
tutti::sequence::placement placed(const transformer::options& o, int step) {
    const auto lengths =
        transformer::document_lengths(o.lengths).of_step(o.seed, step, o.tokens_per_step(), o.model.context);
    const tutti::sequence::cluster machines{1, o.ranks};
    return transformer::rules_of(o).partition(lengths, machines, tutti::sequence::no_capacity);
}
/// Ranks of the step none of whose rows has a target.
int ranks_without_targets(const transformer::options& o, int step) {
    const auto p = placed(o, step);
    auto pieces = p.pieces;
    if (o.pipeline == "zeppelin") { pieces = tutti::sequence::remap(p).balanced_pieces(p); }
    int count = 0;
    for (const auto& own : pieces) {
        bool any = false;
        for (const auto& piece : own) {
            any = any || piece.size() > (piece.end == p.lengths[static_cast<std::size_t>(piece.sequence)] ? 1 : 0);
        }
        count += any ? 0 : 1;
    }
    return count;
}

double loss_distance(const transformer::result& a, const transformer::result& b) {
    REQUIRE(a.training.size() == b.training.size());
    double worst = std::abs(a.validation_loss() - b.validation_loss());
    for (std::size_t i = 0; i < a.training.size(); ++i) {
        worst = std::max(worst, std::abs(a.training[i].second - b.training[i].second));
    }
    return worst;
}

}  // namespace

TEST_CASE("one rank, and many ranks by any pipeline, have the same losses") {
    const scratch_folder folder;
    const std::string lengths = file_of(folder, "1 2 3 5 8 8\n13 21 34 55 300\n");
    const auto text = some_text(48);
    const auto alone = train_on_threads<double>(documents_of("zeppelin", 1, lengths), text);
    REQUIRE(alone.training.size() == 10);
    CHECK(alone.training.back().second < 0.97 * alone.training.front().second);  // it learns, so gradients matter
    CHECK(alone.sequence->intra_node_bytes + alone.sequence->inter_node_bytes == 0);
    CHECK(alone.sequence->imbalance == 1);
    for (const char* const pipeline : pipelines) {
        for (const int ranks : {2, 3, 4}) {
            CAPTURE(pipeline);
            CAPTURE(ranks);
            const auto together = train_on_threads<double>(documents_of(pipeline, ranks, lengths), text);
            CHECK(loss_distance(together, alone) <= 1e-12);
        }
    }
    auto routed = documents_of("zeppelin", 4, lengths);
    routed.nodes = 2;
    CHECK(loss_distance(train_on_threads<double>(routed, text), alone) <= 1e-12);
    auto tight = documents_of("zeppelin", 4, lengths);
    tight.capacity = 80;
    CHECK(loss_distance(train_on_threads<double>(tight, text), alone) <= 1e-12);
    const auto in_float = train_on_threads<float>(documents_of("zeppelin", 4, lengths), text);
    CHECK(loss_distance(in_float, alone) <= 1e-4);
}

TEST_CASE("ranks without a token that has a target change no loss") {
    const scratch_folder folder;
    const auto text = some_text(8);
    // 12 tokens a step on 4 ranks: many of documents that end at once.
    const std::string short_ones = file_of(folder, "1 1 1 1 2 5");
    const auto small = [&](const char* pipeline, int ranks) {
        auto o = documents_of(pipeline, ranks, short_ones, 6);
        o.batch = 2;
        return o;
    };
    const auto alone = train_on_threads<double>(small("even-ring", 1), text);
    for (const char* const pipeline : pipelines) {
        CAPTURE(pipeline);
        const auto o = small(pipeline, 4);
        int idle = 0;
        for (int step = 0; step < o.steps; ++step) { idle += ranks_without_targets(o, step); }
        CHECK(idle > 0);
        CHECK(loss_distance(train_on_threads<double>(o, text), alone) <= 1e-12);
    }
}

TEST_CASE("the report says what attention over the ranks was planned to be, and was") {
    const scratch_folder folder;
    const auto text = some_text(48);
    auto o = documents_of("packed", 4, file_of(folder, "48 48 48 48 6 6"), 48, 3);
    o.plan_picture = (folder / "plan.svg").string();
    o.report = (folder / "report.json").string();
    o.nodes = 2;
    const auto packed = train_on_threads<double>(o, text);
    double imbalance = 0;
    for (int step = 0; step < 3; ++step) { imbalance += transformer::imbalance_of(placed(o, step)) / 3; }
    CHECK(packed.sequence->imbalance == doctest::Approx(imbalance).epsilon(1e-12));
    CHECK(packed.sequence->imbalance > 1.2);  // 6 documents of 48 tokens on 4 ranks at best
    CHECK(packed.sequence->intra_node_bytes == 0);
    CHECK(packed.sequence->inter_node_bytes == 0);
    CHECK(packed.sequence->remapped_tokens == 0);
    CHECK(packed.sequence->planned_seconds > 0);
    CHECK(packed.sequence->measured_seconds > 0);
    CHECK(packed.sequence->picture.starts_with("<svg"));

    const auto sent = [&](const char* pipeline) {
        o.pipeline = pipeline;
        return train_on_threads<double>(o, text);
    };
    const auto even = sent("even-ring");
    CHECK(even.sequence->imbalance < 1.1);
    CHECK(std::isfinite(even.sequence->planned_seconds));  // by costs that were measured
    CHECK(even.sequence->planned_seconds > 0);
    // A ring over two nodes of two ranks crosses twice: as many bytes on the two links inside as between.
    CHECK(even.sequence->inter_node_bytes > 0);
    CHECK(even.sequence->intra_node_bytes > 0);
    // What is sent beside the gradients is attention's, on one of four equal ranks a quarter.
    const double attention = (even.sequence->inter_node_bytes + even.sequence->intra_node_bytes) / 4;
    const double beside = static_cast<double>(even.wire_bytes_per_step - packed.wire_bytes_per_step);
    CHECK(std::abs(beside - attention) < 0.1 * attention);
    const auto zeppelin = sent("zeppelin");
    CHECK(zeppelin.sequence->imbalance <= packed.sequence->imbalance);
    CHECK(zeppelin.sequence->inter_node_bytes < even.sequence->inter_node_bytes);

    const auto report = transformer::report_of(o, zeppelin)["sequence"];
    CHECK(report["imbalance"] == zeppelin.sequence->imbalance);
    CHECK(report["planned_seconds"] == zeppelin.sequence->planned_seconds);
    CHECK(report["measured_seconds"] == zeppelin.sequence->measured_seconds);
    CHECK(report["intra_node_bytes"] == zeppelin.sequence->intra_node_bytes);
    CHECK(report["inter_node_bytes"] == zeppelin.sequence->inter_node_bytes);
    CHECK(report["remapped_tokens"] == zeppelin.sequence->remapped_tokens);
    transformer::write_results(o, zeppelin);
    CHECK(tutti::test::content_of(folder / "plan.svg") == zeppelin.sequence->picture);
}

TEST_CASE("documents are drawn by their lengths, from the text, the same for all pipelines") {
    const scratch_folder folder;
    const transformer::document_lengths of_file(file_of(folder, "3 3 3 9"));
    int threes = 0, nines = 0;
    for (int step = 0; step < 50; ++step) {
        const auto lengths = of_file.of_step(1, step, 120, 100);
        CHECK(lengths == of_file.of_step(1, step, 120, 100));
        CHECK(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) == 120);
        for (std::size_t i = 0; i + 1 < lengths.size(); ++i) {
            CHECK((lengths[i] == 3 || lengths[i] == 9));
            ++(lengths[i] == 3 ? threes : nines);
        }
    }
    CHECK(std::abs(threes - 3 * nines) < 0.2 * threes);
    CHECK(of_file.of_step(1, 0, 120, 100) != of_file.of_step(2, 0, 120, 100));
    for (const char* const name : {"prolong", "wlb", "wikipedia", "magi", "arxiv-surrogate"}) {
        for (const std::int64_t length : transformer::document_lengths(name).of_step(1, 0, 50'000, 2'000)) {
            CHECK((length >= 1 && length <= 2'000));
        }
    }

    // Rows of pieces are those of the whole document.
    const auto text = some_text(20);
    const std::int64_t lengths[] = {20, 1, 7};
    const tutti::sequence::piece whole[] = {{0, 0, 20}, {1, 0, 1}, {2, 0, 7}};
    const tutti::sequence::piece cut[] = {{2, 2, 7}, {0, 5, 20}, {0, 0, 0}};
    transformer::batch all, some;
    CHECK(draw(all, text.training(), 1, 4, 20, lengths, whole) == 19 + 0 + 6);
    CHECK(draw(some, text.training(), 1, 4, 20, lengths, cut) == 4 + 14);
    CHECK(transformer::document_start(text.training(), 1, 4, 0, 20) !=
          transformer::document_start(text.training(), 1, 5, 0, 20));
    CHECK(all.targets[18] == all.in[19]);
    CHECK(all.targets[19] == transformer::no_target);
    CHECK(all.targets[20] == transformer::no_target);
    CHECK(std::equal(some.in.begin(), some.in.begin() + 5, all.in.begin() + 23));
    CHECK(std::equal(some.targets.begin(), some.targets.begin() + 5, all.targets.begin() + 23));
    CHECK(std::equal(some.in.begin() + 5, some.in.end(), all.in.begin() + 5));
    CHECK(std::equal(some.targets.begin() + 5, some.targets.end(), all.targets.begin() + 5));
}

TEST_CASE("each micro-batch has documents of its own, whichever replica has it") {
    const scratch_folder folder;
    const auto text = some_text(16);
    transformer::options o;
    o.model = {.vocabulary = 256, .context = 16, .layers = 2, .heads = 2, .width = 16};
    o.pipeline = "3d";
    o.ranks = 1;
    o.lengths = file_of(folder, "1 2 3 5 8 13 16 16");
    o.batch = 8;
    o.micro_batch = 1;
    transformer::complete(o, false, 0);
    tutti::comm::threads::launch(1, [&](tutti::comm::threads& rank) {
        transformer::any_ranks world(rank);
        const auto drawn = [&](int dp, int step, int replica) {
            o.dp = dp;
            tutti::comm::counted comm(
                tutti::comm::shaped(world.duplicate("sequence"), tutti::comm::shaped_network(tutti::comm::link{})));
            const auto attention = transformer::make_document_attention<double>(comm, o, nullptr, 0, o.model.heads);
            const transformer::micro_batch_rows<double> rows(o, attention.get());
            std::vector<transformer::batch> all;
            const std::uint64_t valid = rows.draw(all, text.training(), step, replica);
            return std::pair(all, valid);
        };
        const auto [all, valid] = drawn(1, 3, 0);
        REQUIRE(all.size() == 8);
        std::size_t documents = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(all[i].in.size() == 16);
            documents += all[i].lengths.size();
            for (std::size_t k = 0; k < i; ++k) { CHECK(all[i].in != all[k].in); }
        }
        CHECK(valid == 8 * 16 - documents);
        for (const int replica : {0, 1}) {
            const auto [half, of_both] = drawn(2, 3, replica);
            CHECK(of_both == valid);
            REQUIRE(half.size() == 4);
            for (std::size_t i = 0; i < 4; ++i) {
                CHECK(half[i].in == all[4 * static_cast<std::size_t>(replica) + i].in);
                CHECK(half[i].targets == all[4 * static_cast<std::size_t>(replica) + i].targets);
            }
        }
        CHECK(drawn(1, 4, 0).first[0].in != all[0].in);
    });
}

TEST_CASE("attention that a rank rehearses alone is zero and waits for nobody") {
    const scratch_folder folder;
    transformer::options o;
    o.model = {.vocabulary = 256, .context = 16, .layers = 2, .heads = 2, .width = 16};
    o.pipeline = "3d";
    o.ranks = o.sp = 2;
    o.batch = o.micro_batch = 1;
    transformer::complete(o, false, 0);
    tutti::comm::threads::launch(
        2,
        [&](tutti::comm::threads& rank) {
            transformer::any_ranks world(rank);
            tutti::comm::counted comm(
                tutti::comm::shaped(world.duplicate("sequence"), tutti::comm::shaped_network(tutti::comm::link{})));
            const auto attention =
                transformer::make_document_attention<double>(comm, o, nullptr, world.rank(), o.model.heads);
            attention->plan(std::vector<std::int64_t>{16});
            std::vector<double> in(std::size_t{8} * 3 * 16, 1.0), out(std::size_t{8} * 16, 7.0), d_in(in.size(), 7.0);
            const transformer::matrix<double> to(out.data(), 8, 16), d_to(d_in.data(), 8, 3 * 16);
            const transformer::matrix<const double> from(in.data(), 8, 3 * 16), d_from(out.data(), 8, 16);
            if (world.rank() == 0) {  // the other one is not asked
                attention->rehearse(true);
                attention->forward(0, from, to);
                attention->backward(0, d_from, d_to);
                attention->rehearse(false);
                CHECK(out == std::vector<double>(out.size(), 0.0));
                CHECK(d_in == std::vector<double>(d_in.size(), 0.0));
            }
            CHECK(comm.traffic_ledger()->total().bytes == 0);
            attention->connect();
            attention->forward(0, from, to);
            for (const double x : out) { CHECK(std::abs(x - 1) < 1e-12); }  // all values are 1
            CHECK(comm.traffic_ledger()->total().bytes > 0);
        },
        {.timeout = std::chrono::seconds(20)});
}

TEST_CASE("what documents cannot be trained on is refused") {
    const scratch_folder folder;
    const auto refused = [](auto change, const char* pipeline = "zeppelin") {
        transformer::options o;
        o.pipeline = pipeline;
        o.lengths = "prolong";
        change(o);
        try {
            transformer::complete(o, false, 0);
        } catch (const transformer::bad_input& e) { return std::string(e.what()); }
        return std::string("nothing was refused");
    };
    using options = transformer::options;
    CHECK(refused([](options& o) { o.lengths.clear(); }) == "--pipeline: 'zeppelin' needs --lengths");
    CHECK(refused([](options&) {}, "ddp") == "--lengths: pipeline 'ddp' trains on sequences of one length");
    CHECK(refused([](options& o) { o.capacity = 100; }) ==
          "--capacity: 4 ranks of 100 tokens do not hold the 768 of a step");
    CHECK(refused([](options& o) { o.ranks = 64, o.capacity = 63; }, "packed") ==
          "--capacity: 63 tokens are less than a document of --context 64, which 'packed' does not cut");
    CHECK(refused([](options& o) {
              o.lengths = "nowhere";
          }).starts_with("--lengths: 'nowhere' is not one of prolong, wlb, wikipedia, magi, arxiv-surrogate"));
    CHECK(refused([](options& o) { o.lengths = "nowhere"; }).ends_with("No such file or directory"));
    for (const char* const text : {"12 x", "0", "-3", "4.5", "99999999999999999999"}) {
        const std::string path = file_of(folder, text);
        CHECK(refused([&](options& o) { o.lengths = path; }).ends_with("is not a number of tokens, 1 or more"));
    }
    for (const char* const text : {"", " \n", "1 1"}) {
        const std::string path = file_of(folder, text);
        CHECK(refused([&](options& o) { o.lengths = path; }).find("has no length of 2 or more") != std::string::npos);
    }
    transformer::options several;
    several.compare = {"packed", "zeppelin"};
    several.plan_picture = "x";
    CHECK_THROWS_AS(static_cast<void>(transformer::runs_of(several)), transformer::bad_input);
}
