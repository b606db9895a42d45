// Search: equal to trying everything, jobs complete and each once, nothing that changes training unless allowed, what is
// published of good layouts, and the words that explain a choice.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // sort
#include <cmath>      // fabs
#include <cstddef>    // size_t
#include <cstdint>    // counts
#include <random>     // machines
#include <set>        // jobs
#include <span>       // plans
#include <string>     // texts
#include <tuple>      // jobs
#include <utility>    // pair
#include <vector>     // jobs

#include <tutti/plan/calibrate.hpp>  // calibrated
#include <tutti/plan/catalog.hpp>    // names
#include <tutti/plan/evidence.hpp>   // under test
#include <tutti/plan/explain.hpp>    // under test
#include <tutti/plan/memory.hpp>     // fits
#include <tutti/plan/render.hpp>     // under test
#include <tutti/plan/search.hpp>     // under test
#include <tutti/plan/tables.hpp>     // under test

using namespace tutti;
using namespace tutti::plan;

namespace {

constexpr model_shape small{8, 512, 4, 4096, 256};

using key =
    std::tuple<int, int, int, int, int, int, int, bool, int, std::int64_t, std::int64_t, int, int, bool, double, int>;
key key_of(const job& j) {
    return {j.tensor,
            j.pipeline,
            j.data,
            j.sequence,
            j.chunks,
            static_cast<int>(j.schedule),
            j.zero_stage,
            j.sequence_parallel,
            static_cast<int>(j.recompute),
            j.micro_batch,
            j.micro_batches,
            j.replicas,
            j.tau,
            j.delayed,
            j.compression,
            j.secondary};
}

// A machine of nodes of four, whose memory makes some jobs of `small` not fit.
machine some_machine(std::mt19937_64& random) {
    const auto between = [&](double low, double high) {
        return std::exp(std::uniform_real_distribution(std::log(low), std::log(high))(random));
    };
    machine m = hgx_h100;
    m.ranks_per_node = 4;
    m.memory_bytes = between(2e7, 2e9);
    m.inside.bytes_per_second = between(1e10, 1e12);
    m.between.bytes_per_second = between(1e8, 1e11);
    m.flops = between(1e13, 1e15);
    return m;
}

search_space everything(int ranks, std::int64_t sequences) {
    search_space s{.ranks = ranks, .sequences = sequences, .sequence = {1, 2, 4}};
    s.recomputations = {recomputation::none, recomputation::selective, recomputation::full, recomputation::stages};
    s.compressions = {4, 32};
    s.taus = {4, 12};
    s.delayed = true;
    return s;
}

}  // namespace

TEST_CASE("jobs of a space are all that make sense, each once") {
    const machine on = [] {
        machine m = hgx_h100;
        m.ranks_per_node = 4;
        return m;
    }();
    search_space space = everything(8, 16);
    space.compressions = {4};
    space.taus = {4};
    std::multiset<key> found;
    for_each_job(small, on, space, [&](const job& j) {
        CHECK_NOTHROW(validate(small, j));
        CHECK(j.ranks() == 8);
        CHECK(j.sequences() == 16);
        found.insert(key_of(j));
    });
    // Every combination of values, of which the ones that do not go together are refused.
    std::set<key> expected;
    const auto try_one = [&](const job& j) {
        if (j.ranks() != 8 || j.sequences() != 16) { return; }
        // One thing by one name.
        if (j.tensor == 1 && j.sequence_parallel) { return; }
        if (j.pipeline == 1 && j.schedule != pipelining::one_forward_one_backward) { return; }
        if (j.averaging() == 1 && j.compression > 1) { return; }
        const comm::two_levels group = on.group_of(j.averaging(), j.tensor, 8);
        const bool of_nodes = group.nodes > 1 && group.largest_node > 1 && j.replicas == group.nodes;
        const bool two_levels = group.nodes > 1 && group.largest_node > 1;
        if (j.secondary > 0 && (!two_levels || j.secondary != group.largest_node)) { return; }
        if (j.replicas > 1 && !of_nodes && (j.replicas != j.data || j.tau == 0)) { return; }
        if (j.data % j.replicas != 0 || (j.shards() == 1 && j.zero_stage > 0)) { return; }
        if (j.zero_stage > 1 && j.pipeline > 1) { return; }  // gradients are cut after every micro-batch
        try {
            validate(small, j);
        } catch (const usage_error&) { return; }
        expected.insert(key_of(j));
    };
    job j;
    for (j.tensor = 1; j.tensor <= 8; ++j.tensor) {
        for (j.pipeline = 1; j.tensor * j.pipeline <= 8; ++j.pipeline) {
            if (8 % (j.tensor * j.pipeline) != 0) { continue; }
            for (const int q : space.sequence) {
                if (8 % (j.tensor * j.pipeline * q) != 0) { continue; }
                j.sequence = q;
                j.data = 8 / (j.tensor * j.pipeline * q);
                for (j.micro_batch = 1; j.micro_batch <= 16; ++j.micro_batch) {
                    if (16 % (j.micro_batch * j.data) != 0) { continue; }
                    j.micro_batches = 16 / j.data / j.micro_batch;
                    for (j.chunks = 1; j.chunks <= 4; ++j.chunks) {
                        for (const pipelining schedule : space.schedules) {
                            for (const recomputation again : space.recomputations) {
                                for (int rest = 0; rest < 2 * 4 * 4 * 2 * 2 * 2 * 3; ++rest) {
                                    int left = rest;
                                    const auto digit = [&](int base) {
                                        const int d = left % base;
                                        left /= base;
                                        return d;
                                    };
                                    job k = j;
                                    k.schedule = schedule;
                                    k.recompute = again;
                                    k.sequence_parallel = digit(2) == 1;
                                    k.zero_stage = digit(4);
                                    k.replicas = 1 << digit(4);
                                    k.tau = 4 * digit(2);
                                    k.delayed = digit(2) == 1;
                                    k.compression = digit(2) == 1 ? 4 : 1;
                                    k.secondary = 2 * digit(3);
                                    try_one(k);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    CHECK(expected.size() > 5000);
    CHECK(found.size() == expected.size());
    CHECK(std::equal(found.begin(), found.end(), expected.begin(), expected.end()));
}

TEST_CASE("of this library's trainer nothing is planned that it does not run") {
    machine on = hgx_h100;
    on.ranks_per_node = 4;
    search_space space{.ranks = 16, .sequences = 32, .of_trainer = true};
    space.recomputations = {recomputation::selective, recomputation::stages};
    space.compressions = {4};
    space.taus = {8};
    std::size_t interleaved = 0, stages = 0, compressed = 0, rounds = 0, shared = 0;
    const auto expect_runs = [&](const job& j) {
        const bool is_whole = j.tensor * j.pipeline * j.sequence == 1;
        CHECK((j.chunks == 1 || j.chunks == 2));
        CHECK(j.secondary == 0);
        CHECK((j.replicas == 1 || j.tau > 0));
        CHECK((j.compression == 1 || j.tau == 0));
        CHECK(((j.compression == 1 && j.tau == 0) || (is_whole && j.zero_stage == 0)));
        interleaved += j.chunks == 2 ? 1U : 0U;
        stages += j.recompute == recomputation::stages ? 1U : 0U;
        compressed += j.compression > 1 ? 1U : 0U;
        rounds += j.tau > 0 ? 1U : 0U;
        shared += j.zero_stage == 3 ? 1U : 0U;
    };
    for_each_job(small, on, space, expect_runs);
    for (const std::size_t found : {interleaved, stages, compressed, rounds, shared}) { CHECK(found > 0); }
    space.pipeline = {2};
    space.schedules = {pipelining::interleaved};
    const planned best = search(small, on, space, 1).best.at(0);
    CHECK(best.how.chunks == 2);
    const std::string why = text_of(alternatives(small, on, space, best), space);
    CHECK(why.find("interleaved x") == std::string::npos);
    CHECK(why.find("_shards") == std::string::npos);
    space.of_trainer = false;
    CHECK(text_of(alternatives(small, on, space, best), space).find("interleaved x 4") != std::string::npos);
}

TEST_CASE("where nothing is shared, the lowest of the stages that may be") {
    search_space space{.ranks = 4, .sequences = 8};
    space.zero_stages = {3, 2};
    std::size_t alone = 0, shared = 0;
    for_each_job(small, hgx_h100, space, [&](const job& j) {
        CHECK((j.zero_stage == 2 || (j.zero_stage == 3 && j.shards() > 1)));
        ++(j.shards() == 1 ? alone : shared);
    });
    CHECK(alone > 0);
    CHECK(shared > 0);
}

TEST_CASE("stages 2 and 3 are not planned with a pipeline, which the trainer would refuse") {
    search_space space{.ranks = 8, .sequences = 16};
    std::size_t pipelines = 0, shared = 0;
    for_each_job(small, hgx_h100, space, [&](const job& j) {
        CHECK((j.pipeline == 1 || j.zero_stage <= 1));
        CHECK(can_run(j));
        pipelines += j.pipeline > 1 && j.zero_stage == 1 ? 1U : 0U;
        shared += j.tensor > 1 && j.zero_stage == 3 ? 1U : 0U;
    });
    CHECK(pipelines > 0);
    CHECK(shared > 0);
    space.zero_stages = {2, 3};
    for_each_job(small, hgx_h100, space, [&](const job& j) { CHECK(j.pipeline == 1); });
    for (const planned& p : search(small, hgx_h100, space, 100).best) { CHECK(p.how.pipeline == 1); }
    space.pipeline = {2};
    CHECK_THROWS_WITH_AS(static_cast<void>(search(small, hgx_h100, space)),
                         "plan: no layout divides 8 ranks, 8 layers, 4 heads, 4096 words and 16 sequences, with stages "
                         "of 2, with ZeRO stages that take no pipeline",
                         usage_error);
    // A neighbor of the best that cannot be run says why.
    space = {.ranks = 8, .sequences = 16, .tensor = {1}, .pipeline = {2}};
    bool told = false;
    for (const alternative& a : alternatives(small, hgx_h100, space, search(small, hgx_h100, space, 1).best.at(0))) {
        if (a.dimension != "ZeRO stage" || a.value != "2") { continue; }
        told = true;
        CHECK_FALSE(a.possible);
        CHECK(a.verdict == "ZeRO stages 2 and 3 take no pipeline");
    }
    CHECK(told);
    // Nor is a pipeline beside stage 2 or 3: it is looked at with stage 1, if that may be, which here is nearly as fast.
    const model_shape m = model_named("gpt2-1558m");
    space = {.ranks = 8, .sequences = 8};
    const planned best = search(m, hgx_h200, space, 1).best.at(0);
    REQUIRE(best.how.zero_stage == 2);
    const auto pipeline = [&] {
        for (const alternative& a : alternatives(m, hgx_h200, space, best)) {
            if (a.dimension == "pipeline") { return a; }
        }
        return alternative{};
    };
    CHECK(pipeline().value == "2 with zero<1>");
    CHECK(pipeline().possible);
    CHECK(pipeline().job.how.pipeline == 2);
    CHECK(pipeline().job.how.zero_stage == 1);
    CHECK(pipeline().verdict.find(" % time: ") != std::string::npos);
    space.zero_stages = {2};
    CHECK(pipeline().value == "2");
    CHECK(pipeline().verdict == "ZeRO stages 2 and 3 take no pipeline");
}

TEST_CASE("the search has what trying everything has, in the same order, and tries a small part") {
    std::mt19937_64 random(5);
    std::size_t fitting = 0;
    std::size_t nothing = 0;
    std::size_t tried = 0;
    std::size_t all_jobs = 0;
    for (int round = 0; round < 25; ++round) {
        const machine on = some_machine(random);
        search_space space = everything(std::vector{1, 4, 8, 24}[static_cast<std::size_t>(round) % 4], 48);
        if (round % 3 == 1) { space.zero_stages = {1}; }
        if (round % 5 == 2) { space.schedules = {pipelining::gpipe, pipelining::zero_bubble_v}; }
        if (round % 7 == 3) { space.kept_scores = true; }
        if (round % 4 == 2) { space.sequence = {}; }
        std::vector<planned> all;
        double lightest = 0;
        for_each_job(small, on, space, [&](const job& j) {
            planned one{j, time_of_step(small, j, on, space.kept_scores), peak_of(small, j)};
            ++all_jobs;
            const double held = one.peak.memory.total();
            if (lightest == 0 || held < lightest) { lightest = held; }
            if (fits(small, j, on, space.margin)) { all.push_back(one); }
        });
        std::sort(all.begin(), all.end(), precedes);
        const search_result found = search(small, on, space, 7);
        tried += found.evaluated;
        CAPTURE(round);
        REQUIRE(found.best.size() == std::min<std::size_t>(7, all.size()));
        for (std::size_t i = 0; i < found.best.size(); ++i) {
            CHECK(key_of(found.best[i].how) == key_of(all[i].how));
            CHECK(found.best[i].seconds() == all[i].seconds());
            CHECK(found.best[i].peak.memory.total() == all[i].peak.memory.total());
        }
        fitting += all.size() > 7 ? 1U : 0U;
        nothing += all.empty() ? 1U : 0U;
        if (all.empty()) { CHECK(found.lightest.peak.memory.total() == lightest); }
    }
    CHECK(fitting >= 8);
    CHECK(nothing >= 3);
    CHECK(tried * 10 < all_jobs);
}

TEST_CASE("of jobs that are as fast the one that holds less comes first, then the simpler one") {
    planned light{{.tensor = 8}, {.products = 1}, {0, {.states = 5}}};
    planned heavy{{.tensor = 1}, {.products = 1}, {0, {.states = 6}}};
    CHECK(precedes(light, heavy));
    CHECK_FALSE(precedes(heavy, light));
    heavy.time.memory = -0.5;
    CHECK(precedes(heavy, light));
    heavy = light;
    CHECK_FALSE(precedes(heavy, light));
    heavy.how.zero_stage = 1;
    CHECK(precedes(light, heavy));
    heavy = light;
    heavy.how.sequence = 2;
    CHECK(precedes(light, heavy));
    CHECK_FALSE(precedes(heavy, light));
}

TEST_CASE("the rank that holds most is one of three") {
    for_each_job(small, hgx_h100, everything(24, 48), [&](const job& j) {
        const peak_memory peak = peak_of(small, j);
        for (int stage = 0; stage < j.pipeline; ++stage) {
            const double held = memory_of_rank(small, j, stage).total();
            if (held > peak.memory.total() || (held == peak.memory.total() && stage < peak.stage)) {
                CAPTURE(stage);
                CAPTURE(peak.stage);
                CHECK(held <= peak.memory.total());
                CHECK(stage >= peak.stage);
            }
        }
    });
}

TEST_CASE("heads that do not divide are searched too: a rank has one more") {
    const model_shape odd{4, 500, 5, 4096, 256};
    const search_result found = search(odd, hgx_h100, {.ranks = 4, .sequences = 4, .tensor = {2, 4}}, 100);
    bool two = false;
    bool four = false;
    for (const planned& p : found.best) {
        two = two || p.how.tensor == 2;
        four = four || p.how.tensor == 4;
        CHECK(p.seconds() == time_of_step(odd, p.how, hgx_h100).total());
    }
    CHECK(two);
    CHECK(four);
    CHECK_THROWS_AS(static_cast<void>(search(odd, hgx_h100, {.ranks = 8, .sequences = 8, .tensor = {8}})), usage_error);
}

TEST_CASE("what changes training is not chosen unless it is allowed") {
    machine slow = hgx_h100;
    slow.ranks_per_node = 1;
    slow.between = {1e-3, 1e7};
    search_space space{.ranks = 8, .sequences = 64};
    const auto best = [&] { return search(small, slow, space, 1).best.at(0); };
    const planned exact = best();
    CHECK(exact.how.compression == 1);
    CHECK(exact.how.tau == 0);
    space.compressions = {32};
    const planned compressed = best();
    CHECK(compressed.how.compression == 32);
    CHECK(compressed.how.tau == 0);
    CHECK(compressed.seconds() < exact.seconds());
    space.compressions = {};
    space.taus = {16};
    const planned rounds = best();
    CHECK(rounds.how.tau == 16);
    CHECK_FALSE(rounds.how.delayed);
    CHECK(rounds.how.compression == 1);
    CHECK(rounds.seconds() < exact.seconds());
    space.delayed = true;
    CHECK(best().how.delayed);
    CHECK(best().seconds() < rounds.seconds());
    CHECK(best().how.sequences() == 64);
}

TEST_CASE("a thousand billion parameters on 3072 dies of Frontier: tensors in a node, stages over nodes, stage 1") {
    // Dash et al. 2023, arXiv:2312.12705, recommend TP 4 to 8, deep pipelines and ZeRO-1; they had no rings.
    const model_shape m = model_named("gpt-1t");
    const search_result found = search(m, frontier, {.ranks = 3072, .sequences = 3072});
    CHECK(found.layouts > 20000);
    CHECK(found.evaluated < 500);
    REQUIRE(found.best.size() == 5);
    for (const planned& p : found.best) {
        CHECK(p.how.ranks() == 3072);
        CHECK((p.how.tensor == 4 || p.how.tensor == 8));
        CHECK(p.how.tensor * p.how.sequence == 8);
        CHECK(p.how.pipeline >= 32);
        CHECK(p.how.zero_stage == 1);
        CHECK(p.peak.memory.total() <= 0.9 * frontier.memory_bytes);
    }
    CHECK(found.best[0].how.sequence == 2);
    const search_result whole = search(m, frontier, {.ranks = 3072, .sequences = 3072, .sequence = {1}}, 1);
    CHECK(whole.best.at(0).how.tensor == 8);
    CHECK(whole.best[0].how.pipeline == 32);
    CHECK(whole.best[0].seconds() > 1.03 * found.best[0].seconds());
    // The same every time, to the last bit.
    const search_result again = search(m, frontier, {.ranks = 3072, .sequences = 3072});
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(key_of(again.best[i].how) == key_of(found.best[i].how));
        CHECK(again.best[i].seconds() == found.best[i].seconds());
    }
    // 14 TB of states do not fit into few of them, whatever one does.
    const search_result few = search(m, frontier, {.ranks = 64, .sequences = 64});
    CHECK(few.best.empty());
    CHECK(few.lightest.peak.memory.total() > frontier.memory_bytes);
    CHECK(few.lightest.how.ranks() == 64);
    // 2 + 2 + 12 bytes a parameter.
    CHECK(16e12 / 64 / frontier.memory_bytes > 3);
}

TEST_CASE("published shapes, without rings: no tensors across nodes, fewer where the model is small") {
    const auto best = [](const char* name, const machine& on, int ranks, std::int64_t sequences) {
        const search_space space{.ranks = ranks, .sequences = sequences, .sequence = {1}};
        return search(model_named(name), on, space, 1).best.at(0).how;
    };
    CHECK(best("gpt-22b", frontier, 16, 640).tensor == 1);
    CHECK(best("gpt-175b", frontier, 1024, 10240).tensor <= 4);
    CHECK(best("gpt-175b", dgx_a100, 512, 64).tensor == 8);
    CHECK(best("gpt-1t", dgx_a100, 512, 512).tensor == 8);
    CHECK(best("gpt-530b", dgx_a100, 2240, 2240).tensor <= 8);
    const job one_node = best("gpt2-1558m", hgx_h100, 8, 1024);
    CHECK(one_node.tensor == 1);
    CHECK(one_node.pipeline == 1);
    CHECK(one_node.zero_stage == 1);
}

TEST_CASE("alternatives: one dimension each, none of them better, with the reason") {
    std::mt19937_64 random(11);
    int looked = 0;
    int too_large = 0;
    int slower = 0;
    int refused = 0;
    for (int round = 0; round < 30; ++round) {
        const machine on = some_machine(random);
        const search_space space = everything(std::vector{4, 8, 24}[static_cast<std::size_t>(round) % 3], 48);
        const search_result found = search(small, on, space, 1);
        if (found.best.empty()) { continue; }
        const planned& best = found.best[0];
        for (const alternative& a : alternatives(small, on, space, best)) {
            ++looked;
            CAPTURE(a.dimension);
            CAPTURE(a.value);
            CAPTURE(a.verdict);
            CHECK_FALSE(a.verdict.empty());
            if (!a.possible) {
                ++refused;
                continue;
            }
            const job& b = best.how;
            const job& j = a.job.how;
            CHECK(j.ranks() == b.ranks());
            CHECK(j.sequences() == b.sequences());
            const bool layout = j.tensor != b.tensor || j.pipeline != b.pipeline;
            const bool shared = j.zero_stage != b.zero_stage && a.dimension != "pipeline";
            CHECK((layout ? 1 : 0) + (j.micro_batch != b.micro_batch ? 1 : 0) + (shared ? 1 : 0) +
                      (j.recompute != b.recompute ? 1 : 0) + (j.sequence != b.sequence ? 1 : 0) +
                      (j.compression != b.compression ? 1 : 0) +
                      (a.dimension == "sequence parallel" || a.dimension == "replicas" || a.dimension == "schedule"
                           ? 1
                           : 0) ==
                  1);
            if (!fits(small, j, on)) {
                ++too_large;
                CHECK(a.verdict.starts_with("does not fit: "));
            } else {
                CHECK(precedes(best, a.job));
                slower += a.job.seconds() > best.seconds() ? 1 : 0;
                CHECK((a.job.seconds() > best.seconds()) == (a.verdict.find("% time: ") != std::string::npos));
            }
        }
    }
    CHECK(looked > 300);
    CHECK(too_large > 20);
    CHECK(slower > 100);
    CHECK(refused > 5);
}

TEST_CASE("what data ranks may do is listed beside the best of it: without what it adds, too") {
    const auto listed = [](const model_shape& m, const machine& on, const search_space& space, const planned& best) {
        std::set<std::string> found;
        for (const alternative& a : alternatives(m, on, space, best)) {
            if (a.dimension != "replicas" && a.dimension != "compression") { continue; }
            CHECK(a.possible);
            found.insert(a.dimension + ' ' + a.value);
        }
        return found;
    };
    machine slow = hgx_h100;
    slow.between.bytes_per_second = 1e9;
    search_space space{.ranks = 16, .sequences = 64, .tensor = {1}, .pipeline = {1}, .sequence = {1}};
    space.zero_stages = {0};
    space.compressions = {16, 4};
    const model_shape gpt2 = model_named("gpt2-1558m");
    const planned best = search(gpt2, slow, space, 1).best.at(0);
    REQUIRE(strategy_of(best.how) == "data_parallel, compressed 16 times");
    CHECK(listed(gpt2, slow, space, best) ==
          std::set<std::string>{"compression data_parallel", "compression data_parallel, compressed 4 times"});

    const model_shape large = model_named("gpt-22b");
    space = {.ranks = 16, .sequences = 64, .tensor = {4, 8}, .sequence = {1}};
    space.zero_stages = {3};
    const planned keeps = search(large, hgx_h200, space, 1).best.at(0);
    REQUIRE(strategy_of(keeps.how) == "zero<3>, secondary_shards of 2");
    CHECK(listed(large, hgx_h200, space, keeps) ==
          std::set<std::string>{"replicas zero<3>", "replicas zero<3>, node_shards of 2"});
    // Eight ranks that share layers are a node: there is nothing to keep in it.
    for (const alternative& a : alternatives(large, hgx_h200, space, keeps)) {
        if (a.dimension == "tensor") { CHECK(strategy_of(a.job.how) == "zero<3>"); }
    }
}

TEST_CASE("long contexts are divided over rings, short ones are not") {
    // 7 billion parameters, four million tokens a step.
    const auto found = [](const machine& on, int ranks, std::int64_t tokens) {
        const model_shape m{32, 4096, 32, 32000, tokens};
        return search(m, on, {.ranks = ranks, .sequences = (std::int64_t{1} << 22) / tokens}, 1).best.at(0);
    };
    for (const machine& on : {hgx_h100, dgx_a100, frontier}) {
        CAPTURE(on.name);
        for (const int ranks : {8, 64}) {
            CAPTURE(ranks);
            for (const std::int64_t tokens : {1024, 2048, 4096, 8192}) {
                CHECK(found(on, ranks, tokens).how.sequence == 1);
            }
            for (const std::int64_t tokens : {65536, 131072}) {
                const planned best = found(on, ranks, tokens);
                CHECK(best.how.sequence > 1);
                CHECK(best.time.sequence > 0);
                CHECK(best.time.sequence < 0.1 * best.seconds());
                CHECK(best.how.tensor <= 2);
            }
        }
        // A million tokens fit no single rank's memory, however they are computed, nor tensor ranks of one node alone.
        const model_shape m{32, 4096, 32, 32000, 1 << 20};
        CHECK(found(on, 256, 1 << 20).how.sequence >= 8);
        const search_result without = search(m, on, {.ranks = 256, .sequences = 4, .sequence = {1}}, 1);
        CHECK((without.best.empty() || without.best[0].seconds() > 1.5 * found(on, 256, 1 << 20).seconds()));
    }
    // Between slow links, too, and there rather than tensors.
    machine alone = hgx_h100;
    alone.ranks_per_node = 1;
    const job far = found(alone, 64, 131072).how;
    CHECK(far.sequence > 1);
    CHECK(far.tensor == 1);
}

TEST_CASE("all that divides is tried, whatever is not asked for: where rings wait, too") {
    // Sequences, fewer than ranks: rings, though all of them wait.
    const model_shape few{32, 4096, 32, 32000, 16384};
    const planned ring = search(few, frontier, {.ranks = 16, .sequences = 1}, 1).best.at(0);
    CHECK(ring.how.sequence == 8);
    CHECK(ring.time.sequence > 0.1 * ring.seconds());
    CHECK(ring.seconds() <
          0.7 * search(few, frontier, {.ranks = 16, .sequences = 1, .sequence = {1}}, 1).best.at(0).seconds());
    // Seven layers, one head, one sequence: nothing else divides.
    CHECK(search({7, 64, 1, 128, 2048}, frontier, {.ranks = 4, .sequences = 1}, 1).best.at(0).how.sequence == 4);
    // A list of all numbers allows what no list does.
    const model_shape long_ones{8, 512, 4, 4096, 1 << 15};
    std::mt19937_64 random(31);
    std::size_t rings = 0;
    for (int round = 0; round < 12; ++round) {
        machine on = some_machine(random);
        on.memory_bytes = hgx_h100.memory_bytes;
        search_space space{.ranks = std::vector{8, 24}[static_cast<std::size_t>(round) % 2], .sequences = 24};
        const search_result all = search(long_ones, on, space, 9);
        space.tensor = space.pipeline = space.sequence = {1, 2, 3, 4, 6, 8, 12, 24};
        const search_result listed = search(long_ones, on, space, 9);
        REQUIRE(all.best.size() == listed.best.size());
        CHECK(all.layouts == listed.layouts);
        for (std::size_t i = 0; i < all.best.size(); ++i) {
            CHECK(key_of(all.best[i].how) == key_of(listed.best[i].how));
            rings += all.best[i].how.sequence > 1 ? 1U : 0U;
        }
    }
    CHECK(rings >= 5);
}

TEST_CASE("ranks that share layers or sequences are inside a node each, or on whole nodes") {
    const model_shape m{36, 6144, 48, 50304, 4096};
    const auto tried = [&](int ranks, const machine& on) {
        std::set<std::pair<int, int>> found;
        for_each_job(m, on, {.ranks = ranks, .sequences = ranks, .schedules = {pipelining::gpipe}}, [&](const job& j) {
            found.insert({j.tensor, j.sequence});
        });
        return found;
    };
    for (const auto& [t, q] : tried(96, hgx_h100)) {
        CHECK((8 % t == 0 || t % 8 == 0));
        CHECK((8 % (t * q) == 0 || t * q % 8 == 0));
    }
    const auto many = tried(96, hgx_h100);
    for (const auto& even : {std::pair{8, 3}, {1, 24}, {24, 2}, {2, 12}}) { CHECK(many.contains(even)); }
    for (const auto& uneven : {std::pair{6, 1}, {3, 1}, {1, 12}, {4, 3}, {3, 8}, {12, 4}}) {
        CHECK_FALSE(many.contains(uneven));
    }
    // On one node six are as good as four, and of six ranks, or of twelve, a node has groups of three.
    CHECK(tried(6, hgx_h100).contains({3, 2}));
    machine twelve = hgx_h100;
    twelve.ranks_per_node = 12;
    CHECK(tried(48, twelve).contains({6, 2}));
    CHECK_FALSE(tried(48, twelve).contains({8, 1}));
    CHECK_THROWS_WITH_AS(
        static_cast<void>(search(m, hgx_h100, {.ranks = 96, .sequences = 16, .tensor = {6}})),
        "plan: no layout divides 96 ranks, 36 layers, 48 heads, 50304 words and 16 sequences, with tensor ranks of 6, "
        "evenly over nodes of 8",
        usage_error);
    // The best one's neighbors that lie unevenly say so.
    const search_space space{.ranks = 96, .sequences = 96, .pipeline = {3}};
    const planned best{
        {.tensor = 4, .pipeline = 3, .data = 4, .sequence = 2, .micro_batches = 24}, {.products = 1}, {}};
    const std::string why = text_of(alternatives(m, hgx_h100, space, best), space);
    CAPTURE(why);
    for (const char* const line :
         {"tensor             2 ",
          "tensor             3                 groups of 3 ranks lie unevenly on nodes of 8\n",
          "tensor             6                 groups of 6 ranks lie unevenly on nodes of 8\n",
          "tensor             8 ", "sequence           1 ",
          "sequence           3                 groups of 12 ranks lie unevenly on nodes of 8\n",
          "sequence           4 "}) {
        CHECK(why.find(line) != std::string::npos);
    }
    const planned rings{
        {.tensor = 2, .pipeline = 3, .data = 4, .sequence = 4, .micro_batches = 24}, {.products = 1}, {}};
    CHECK(
        text_of(alternatives(m, hgx_h100, space, rings), space).find("groups of 6 ranks lie unevenly on nodes of 8") !=
        std::string::npos);
}

TEST_CASE("no job takes less than its layout is said to, nor has a rank less than two tokens of a sequence") {
    const model_shape wide{8, 64, 4, 1 << 16, 6};  // nearly all of it is the head
    const search_space space = everything(8, 32);
    std::size_t both_ends = 0, shared = 0;
    for_each_job(wide, hgx_h100, space, [&](const job& j) {
        job layout = j;
        layout.chunks = 1;
        const auto bound = plan::detail::least_working(wide, hgx_h100, space, layout);
        const step_time t = time_of_step(wide, j, hgx_h100);
        const double least = bound.step.working(), working = t.working();
        if (least > working) { CHECK(least <= working); }
        // Nor than its division is, of which it has one of several micro-batches.
        layout.micro_batch *= layout.micro_batches;
        layout.micro_batches = 1;
        const double of_division = plan::detail::least_working(wide, hgx_h100, space, layout).step.working();
        if ((1 - 1e-9) * of_division > least) { CHECK((1 - 1e-9) * of_division <= least); }
        const double waiting = plan::detail::bubble_share(j) * bound.micro_batch;
        if (waiting != t.bubble) { CHECK(waiting == t.bubble); }
        both_ends += j.copies() == 2 && least == working ? 1U : 0U;
        shared += j.sequence == 2 ? 1U : 0U;
        if (j.sequence == 4) { CHECK(j.sequence <= 3); }
    });
    CHECK(both_ends > 0);
    CHECK(shared > 0);
}

TEST_CASE("more choices are never slower") {
    std::mt19937_64 random(23);
    for (int round = 0; round < 12; ++round) {
        const machine on = some_machine(random);
        search_space space{.ranks = 8, .sequences = 16, .sequence = {1}};
        space.schedules.pop_back();
        const auto best = [&] {
            const search_result found = search(small, on, space, 1);
            return found.best.empty() ? 1e30 : found.best[0].seconds();
        };
        const double first = best();
        space.sequence = {1, 2};
        const double rings = best();
        CHECK(rings <= first);
        space.sequence = {1, 2, 4, 8};
        CHECK(best() <= rings);
        space.sequence = {1};
        space.schedules.push_back(pipelining::dual_pipe);
        CHECK(best() <= first);
    }
    // Long pipelines, few micro-batches, a head as long as a layer and memory for two copies: entered from both ends.
    machine on = hgx_h100;
    on.between = on.inside;
    const model_shape m{16, 1024, 16, 8 * 51200, 1024};
    search_space space{.ranks = 16, .sequences = 32, .tensor = {1}, .pipeline = {16}, .micro_batches = {1}};
    CHECK(search(m, on, space, 1).best.at(0).how.schedule == pipelining::dual_pipe);
    space.zero_stages = {2, 3};  // whose gradients are never whole
    for_each_job(m, on, space, [&](const job& j) { CHECK(j.schedule != pipelining::dual_pipe); });
}

TEST_CASE("a choice is explained in words and numbers") {
    const model_shape m = model_named("gpt-1t");
    const search_space space{.ranks = 3072, .sequences = 3072};
    const std::vector<planned> best = search(m, frontier, space, 3).best;
    const std::string table = text_of(m, frontier, best);
    CHECK(table.starts_with("tp "));
    CHECK(std::count(table.begin(), table.end(), '\n') == 4);
    CHECK(table.find("4+rows") != std::string::npos);
    CHECK(table.find("zero<1>") != std::string::npos);
    const std::string why = text_of(alternatives(m, frontier, space, best[0]), space);
    CHECK(why.find("does not fit: ") != std::string::npos);
    // The values next to the best one's tensor 4, pipeline 64 and sequence 2.
    REQUIRE(best[0].how.pipeline == 64);
    for (const char* const line : {"tensor             2 ", "tensor             8 ", "pipeline           32 ",
                                   "pipeline           128 ", "sequence           1 ",
                                   "sequence           3                          groups of 12 ranks lie unevenly on "
                                   "nodes of 8\n",
                                   "sequence           4 "}) {
        CAPTURE(line);
        CHECK(why.find(line) != std::string::npos);
    }
    CHECK(why.find("pipeline           16 ") == std::string::npos);
    CHECK(why.find("sequence           6 ") == std::string::npos);
    CHECK(why.find("schedule           dual_pipe                  does not fit: ") != std::string::npos);
    const planned odd{{.tensor = 2, .pipeline = 4, .data = 8, .sequence = 16}, {.products = 1}, {}};
    const std::string columns = text_of(m, frontier, std::span(&odd, 1));
    CHECK(columns.starts_with("tp  pp  dp  sp  micro "));
    CHECK(columns.find("\n2   4   8   16  1 x 1 ") != std::string::npos);
    CHECK(why.find("% time: tensor collectives +") != std::string::npos);
    CHECK(why.find("compression is not searched: it changes gradients\n") != std::string::npos);
    CHECK(why.find("rounds of local steps are not searched: they change training\n") != std::string::npos);
    const std::string svg = svg_of(frontier, best, "a < b & c");
    CHECK(svg.starts_with("<svg "));
    CHECK(svg.ends_with("</svg>\n"));
    CHECK(svg.find("a &lt; b &amp; c") != std::string::npos);
    CHECK(svg.find("zero&lt;1&gt;") != std::string::npos);
    CHECK(svg.find("57.6 GiB may be used") != std::string::npos);
    CHECK(svg.find("tp 4+rows · pp 64 · dp 6 · sp 2 · 512 x 1") != std::string::npos);
    CHECK(svg.find(">rings</text>") != std::string::npos);
    CHECK(strategy_of({.sequence = 4}) == "data_parallel");
    CHECK(strategy_of({.data = 2, .sequence = 4, .zero_stage = 1, .replicas = 2, .tau = 4}) ==
          "slow_mo of 4 steps over zero<1>");
    CHECK(schedule_of({.pipeline = 4, .schedule = pipelining::dual_pipe}) == "dual_pipe");
    CHECK(strategy_of({}) == "-");
    CHECK(strategy_of({.data = 8}) == "data_parallel");
    CHECK(strategy_of({.data = 8, .zero_stage = 3, .replicas = 2}) == "zero<3>, node_shards of 4");
    CHECK(strategy_of({.data = 8, .zero_stage = 3, .secondary = 4}) == "zero<3>, secondary_shards of 4");
    CHECK(strategy_of({.data = 8, .replicas = 8, .tau = 4}) == "slow_mo of 4 steps over local");
    CHECK(strategy_of({.data = 8, .zero_stage = 2, .replicas = 2, .tau = 4, .delayed = true, .compression = 8}) ==
          "co2 of 4 steps over zero<2>, compressed 8 times");
    const utilization u = utilization_of(m, frontier, best[0]);
    CHECK(u.model == doctest::Approx(model_flops(m, best[0].how) / best[0].seconds() / (3072 * 191.5e12)));
    CHECK(u.hardware > u.model);
}

TEST_CASE("what a plan rests on: each figure with its origin, which calibration changes") {
    CHECK(text_of(hgx_h100) == "FLOPs                           989 TFLOP/s                             published\n"
                               "memory                          74.5 GiB, 3350 GB/s                     published\n"
                               "links                           450 GB/s inside nodes of 8, 50 between  published\n"
                               "latencies                       5 us inside, 10 between                 assumed\n"
                               "host link                       63 GB/s                                 published\n"
                               "share of FLOPs in products      65 %                                    assumed\n"
                               "share of memory bandwidth       90 %                                    assumed\n"
                               "share of links' bandwidth       80 %                                    assumed\n"
                               "launch of a kernel              4 us                                    assumed\n"
                               "computing beside communication  longer by 10 % of its time              fitted\n"
                               "results of a product at once    4325376                                 assumed\n");
    // Every machine says of its peaks who publishes them, and a blank one nothing.
    for (const machine& m : machines) {
        CAPTURE(m.name);
        for (const evidence e : {m.known.flops, m.known.memory, m.known.links, m.known.host}) {
            CHECK(e == evidence::published);
        }
        CHECK(m.known.latencies == evidence::assumed);
    }
    CHECK(dgx_a100.known.memory_efficiency == evidence::fitted);
    CHECK(frontier.known.product_efficiency == evidence::fitted);
    CHECK(frontier.known.memory_efficiency == evidence::assumed);
    CHECK(machine{}.known.flops == evidence::assumed);
    CHECK(name_of(evidence::given) == "given");
    const measured_product products[] = {{1000, 1000, 1000, 1e-3}, {1000, 1000, 2000, 1.9e-3}};
    const machine by_products = calibrated(hgx_h100, std::span(products));
    CHECK(by_products.known.product_efficiency == evidence::fitted);
    CHECK(by_products.known.launch == evidence::fitted);
    CHECK(by_products.known.link_efficiency == evidence::assumed);
    const measured_collective collectives[] = {{comm::collective::all_reduce, 8, 1, 1e8, 1e-3}};
    const machine by_collectives = calibrated(hgx_h100, std::span(collectives));
    CHECK(by_collectives.known.link_efficiency == evidence::fitted);
    CHECK(by_collectives.known.product_efficiency == evidence::assumed);
    const measured_step steps[] = {{model_named("gpt2-124m"), {.recompute = recomputation::selective}, 0.05}};
    const machine by_steps = calibrated(hgx_h100, std::span(steps));
    CHECK(by_steps.known.product_efficiency == evidence::fitted);
    CHECK(by_steps.known.memory_efficiency == evidence::fitted);
    CHECK(by_steps.known.link_efficiency == evidence::assumed);  // one rank tells nothing of links
    CHECK(by_steps.known.latencies == evidence::assumed);
}

TEST_CASE("a machine that lacks a figure is refused, rather than taken for one that needs no time") {
    const model_shape m = model_named("gpt2-124m");
    const auto refusal = [&](const machine& on) -> std::string {
        try {
            static_cast<void>(search(m, on, {.ranks = 8, .sequences = 8}));
        } catch (const usage_error& e) { return e.what(); }
        return {};
    };
    machine own{.name = "own", .flops = 1e14, .memory_bytes = 8e10, .memory_bandwidth = 1e12, .ranks_per_node = 8};
    own.inside.bytes_per_second = 1e11;
    CHECK(refusal(own) ==
          "plan: machine 'own': between.bytes_per_second is inf, expected a number above 0");  // the default
    CHECK_THROWS_AS(static_cast<void>(time_of_step(m, {}, own)), usage_error);
    own.between.bytes_per_second = 1e10;
    CHECK(refusal(own).empty());
    own.inside.latency_seconds = -1;
    CHECK(refusal(own) == "plan: machine 'own': inside.latency_seconds is -1, expected a number of 0 or more");
    CHECK(refusal(machine{.name = "none"}) == "plan: machine 'none': flops is 0, expected a number above 0");
}

TEST_CASE("a space that makes no sense, or in which nothing divides, is refused") {
    const auto of = [&](const search_space& s) { static_cast<void>(search(small, hgx_h100, s)); };
    CHECK_THROWS_WITH_AS(of({.ranks = 0}), "plan: 0 ranks and 1 sequences a step; both must be positive", usage_error);
    CHECK_THROWS_WITH_AS(of({.ranks = 7, .sequences = 16, .sequence = {1}}),
                         "plan: no layout divides 7 ranks, 8 layers, 4 heads, 4096 words and 16 sequences, with "
                         "sequence ranks of 1",
                         usage_error);
    CHECK_THROWS_WITH_AS(
        of({.ranks = 8, .sequences = 16, .tensor = {3, 5}, .micro_batches = {32}}),
        "plan: no layout divides 8 ranks, 8 layers, 4 heads, 4096 words and 16 sequences, with tensor ranks of 3, 5, "
        "with micro-batches of 32",
        usage_error);
    CHECK_THROWS_WITH_AS(
        of({.ranks = 8, .sequences = 16, .sequence = {3}}),
        "plan: no layout divides 8 ranks, 8 layers, 4 heads, 4096 words and 16 sequences, with sequence "
        "ranks of 3",
        usage_error);
    // Two stages divide, but dual_pipe wants an even number of micro-batches, zero_bubble four, interleaved chunks twos.
    const auto of_two = [&](pipelining schedule, std::int64_t sequences) {
        search_space s{.ranks = 2, .sequences = sequences, .tensor = {1}, .pipeline = {2}};
        s.schedules = {schedule};
        return search(small, hgx_h100, s, 1).best.size();
    };
    for (const pipelining schedule : {pipelining::dual_pipe, pipelining::zero_bubble, pipelining::interleaved}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(of_two(schedule, 3)),
                             "plan: no layout can have a schedule of those allowed: its micro-batches are too few, odd "
                             "or do not divide, or its layers do not",
                             usage_error);
        CHECK(of_two(schedule, 4) == 1);
    }
    CHECK_THROWS_WITH_AS(of({.zero_stages = {4}}), "plan: ZeRO stage 4 of 0 to 3", usage_error);
    CHECK_THROWS_WITH_AS(of({.zero_stages = {}}),
                         "plan: a search needs a ZeRO stage, a recomputation and a schedule at least", usage_error);
    // What is listed twice would be planned twice.
    CHECK_THROWS_WITH_AS(of({.zero_stages = {1, 0, 1}}), "plan: a search has each ZeRO stage once", usage_error);
    CHECK_THROWS_WITH_AS(of({.recomputations = {recomputation::full, recomputation::full}}),
                         "plan: a search has each recomputation once", usage_error);
    CHECK_THROWS_WITH_AS(of({.schedules = {pipelining::gpipe, pipelining::gpipe}}),
                         "plan: a search has each schedule once", usage_error);
    CHECK_THROWS_WITH_AS(of({.compressions = {4, 2, 4}}), "plan: a search has each compression once", usage_error);
    CHECK_THROWS_WITH_AS(of({.taus = {4, 4}}), "plan: a search has each tau once", usage_error);
    CHECK_THROWS_WITH_AS(of({.compressions = {0.5}}), "plan: compression 0.5; at least 1, and finite", usage_error);
    CHECK_THROWS_WITH_AS(of({.taus = {0}}), "plan: rounds of 0 steps; at least 1", usage_error);
    CHECK_THROWS_WITH_AS(of({.of_trainer = true}), "plan: this library's trainer recomputes selective or stages",
                         usage_error);
    CHECK_THROWS_WITH_AS(of({.margin = 1}), "plan: a margin of 1; 0 to below 1", usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(model_named("gpt")),
                         "plan: 'gpt' is not a model; there are gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m, gpt-22b, "
                         "gpt-175b, gpt-530b, gpt-1t",
                         usage_error);
    CHECK_THROWS_WITH_AS(static_cast<void>(machine_named("cray")),
                         "plan: 'cray' is not a machine; there are frontier, dgx-a100, hgx-h100, hgx-h200",
                         usage_error);
    CHECK(model_named("gpt2-124m").parameters() - (50304 - 50257) * 768 == 124439808);
    CHECK(std::fabs(static_cast<double>(model_named("gpt-175b").parameters()) / 174.6e9 - 1) < 0.001);
    CHECK(std::fabs(static_cast<double>(model_named("gpt-1t").parameters()) / 1008e9 - 1) < 0.001);
}
