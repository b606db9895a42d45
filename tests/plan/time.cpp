// Time: two published runs calibrate, the others are predicted; what must hold between layouts; pipelines against
// their replays, exchanges of data ranks against closed forms; FLOPs by definition.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max
#include <cmath>      // fabs
#include <cstddef>    // size_t
#include <cstdint>    // counts
#include <limits>     // what is not measured
#include <set>        // nodes
#include <span>       // first rows
#include <vector>     // rows

#include <tutti/comm/cost.hpp>                       // collectives
#include <tutti/compress/gain.hpp>                   // what compression takes
#include <tutti/compress/quantize.hpp>               // a compressor
#include <tutti/parallel/pipeline_replay.hpp>        // schedules by the clock
#include <tutti/parallel/schedules/dual_pipe.hpp>    // schedules
#include <tutti/parallel/schedules/one_way.hpp>      // schedules
#include <tutti/parallel/schedules/zero_bubble.hpp>  // schedules
#include <tutti/plan/calibrate.hpp>                  // under test
#include <tutti/plan/exchange.hpp>                   // under test
#include <tutti/plan/machine.hpp>                    // machines
#include <tutti/plan/model.hpp>                      // jobs
#include <tutti/plan/rings.hpp>                      // under test
#include <tutti/plan/time.hpp>                       // under test
#include <tutti/sequence/calibration.hpp>            // measured rings
#include <tutti/sequence/estimate.hpp>               // rings of a placement
#include <tutti/sequence/partition/even_ring.hpp>    // such a placement

using namespace tutti;
using namespace tutti::plan;

namespace {

// Korthikanti et al. 2022, arXiv:2205.05198: seconds of an iteration on A100s, everything recomputed and, then,
// sequence parallelism with attention alone recomputed.
std::vector<measured_step> published() {
    const model_shape gpt_22b{48, 6144, 64, 51200, 2048};
    const model_shape gpt_175b{96, 12288, 96, 51200, 2048};
    const model_shape gpt_530b{105, 20480, 128, 51200, 2048};
    const model_shape gpt_1t{128, 25600, 160, 51200, 2048};
    std::vector<measured_step> all;
    const auto add = [&](const model_shape& m, int pipeline, int chunks, std::int64_t micro_batch, std::int64_t count,
                         double full, double selective) {
        job j{.tensor = 8, .pipeline = pipeline, .chunks = chunks, .micro_batch = micro_batch, .micro_batches = count};
        j.schedule = chunks > 1 ? pipelining::interleaved : pipelining::one_forward_one_backward;
        j.recompute = recomputation::full;
        all.push_back({m, j, full, true});
        j.recompute = recomputation::selective;
        j.sequence_parallel = true;
        all.push_back({m, j, selective, true});
    };
    add(gpt_22b, 1, 1, 4, 1, 1.42, 1.10);
    add(gpt_175b, 8, 3, 1, 64, 18.13, 13.75);
    add(gpt_530b, 35, 3, 1, 280, 49.05, 37.83);
    add(gpt_1t, 64, 1, 1, 512, 94.42, 71.49);
    return all;
}

// FLOPs with recomputation over time and ranks, as the authors' program prints them: logits by their fourth.
double printed_flops(const model_shape& m, const job& j, double seconds) {
    const auto h = static_cast<double>(m.hidden);
    const auto s = static_cast<double>(m.sequence);
    const auto l = static_cast<double>(m.layers);
    return 96 * static_cast<double>(j.sequences()) * s * l * h * h *
           (1 + s / (6 * h) + static_cast<double>(m.vocabulary) / (16 * l * h)) /
           (seconds * static_cast<double>(j.ranks()));
}

}  // namespace

TEST_CASE(
    "calibrated on 22 and 175 billion parameters, predicts 530 and 1000: 5 % in the mean, 10 % at worst, in order") {
    const auto rows = published();
    const machine a100 = calibrated(dgx_a100, std::span(rows).first(4));
    // What dgx_a100 says of itself.
    CHECK(a100.product_efficiency == dgx_a100.product_efficiency);
    CHECK(a100.memory_efficiency == dgx_a100.memory_efficiency);
    CHECK(a100.link_efficiency == dgx_a100.link_efficiency);
    machine guess = dgx_a100;
    guess.known = {};
    const machine_evidence known = calibrated(guess, std::span(rows).first(4)).known;
    CHECK(known.product_efficiency == dgx_a100.known.product_efficiency);
    CHECK(known.memory_efficiency == dgx_a100.known.memory_efficiency);
    CHECK(known.link_efficiency == dgx_a100.known.link_efficiency);
    std::vector<double> predicted;
    for (const measured_step& s : rows) {
        predicted.push_back(time_of_step(s.model, s.how, a100, s.kept_scores).total());
    }
    double sum = 0;
    double worst = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const double error = std::fabs(predicted[i] / rows[i].seconds - 1);
        CAPTURE(i);
        CAPTURE(predicted[i]);
        if (i < 4) {
            CHECK(error < 0.03);
            continue;
        }
        sum += error / 4;
        worst = std::max(worst, error);
    }
    CHECK(sum <= 0.05);
    CHECK(worst <= 0.10);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        for (std::size_t k = 0; k < rows.size(); ++k) {
            CHECK((predicted[i] < predicted[k]) == (rows[i].seconds < rows[k].seconds));
        }
    }
}

TEST_CASE("Frontier: one efficiency from 22 billion parameters predicts 175 and 1000 within 10 %, in order") {
    // Dash et al. 2023, arXiv:2312.12705: 73.5, 69.2 and 61.2 TFLOP/s a die, taken as FLOPs with recomputation.
    const auto on = [](int t, int p, std::int64_t count) {
        return job{.tensor = t,
                   .pipeline = p,
                   .data = 2,
                   .zero_stage = 1,
                   .recompute = recomputation::full,
                   .micro_batches = count};
    };
    const model_shape models[] = {
        {48, 6144, 48, 50688, 2048}, {96, 12288, 96, 50688, 2048}, {128, 25600, 128, 50688, 2048}};
    const job jobs[] = {on(1, 8, 320), on(4, 16, 320), on(8, 64, 512)};
    machine fitted = frontier;
    double closest = 1;
    for (int percent = 20; percent <= 90; ++percent) {
        machine trial = frontier;
        trial.product_efficiency = percent / 100.0;
        const double error =
            std::fabs(printed_flops(models[0], jobs[0], time_of_step(models[0], jobs[0], trial).total()) / 73.5e12 - 1);
        if (error < closest) {
            closest = error;
            fitted = trial;
        }
    }
    CHECK(closest < 0.02);
    CHECK(fitted.product_efficiency == frontier.product_efficiency);
    double flops[3];
    for (int i = 0; i < 3; ++i) {
        flops[i] = printed_flops(models[i], jobs[i], time_of_step(models[i], jobs[i], fitted).total());
    }
    CHECK(std::fabs(flops[1] / 69.2e12 - 1) <= 0.10);
    CHECK(std::fabs(flops[2] / 61.2e12 - 1) <= 0.10);
    CHECK(flops[0] > flops[1]);
    CHECK(flops[1] > flops[2]);
}

TEST_CASE("22 billion parameters on 16 dies: pipelines before tensors, which do not pay across slow links") {
    const model_shape m{48, 6144, 48, 50688, 2048};
    const auto speed = [&](int t, int p) {
        const int d = 16 / (t * p);
        const job j{.tensor = t,
                    .pipeline = p,
                    .data = d,
                    .zero_stage = 1,
                    .recompute = recomputation::full,
                    .micro_batches = 640 / d};
        return 1 / time_of_step(m, j, frontier).total();
    };
    CHECK(speed(1, 8) > speed(2, 4));
    CHECK(std::fabs(speed(2, 4) / speed(2, 8) - 1) < 0.05);
    CHECK(speed(2, 8) > speed(8, 2));
}

TEST_CASE("Frontier: replicas scale, wide tensors and deep pipelines cost, micro-batches pay") {
    // Dash et al. 2023, arXiv:2312.12705: 100 % weak scaling to 1024 dies (175 billion parameters) and 3072 (1000).
    const model_shape gpt_175b{96, 12288, 96, 50688, 2048};
    const model_shape gpt_1t{128, 25600, 128, 50688, 2048};
    const auto with = [](int t, int p, int d, std::int64_t count) {
        return job{.tensor = t,
                   .pipeline = p,
                   .data = d,
                   .zero_stage = 1,
                   .recompute = recomputation::full,
                   .micro_batches = count};
    };
    const auto seconds = [](const model_shape& m, const job& j) { return time_of_step(m, j, frontier).total(); };
    const auto speed = [&](const model_shape& m, const job& j) {  // by die
        return static_cast<double>(j.sequences()) / seconds(m, j) / static_cast<double>(j.ranks());
    };
    CHECK(seconds(gpt_175b, with(4, 16, 2, 640)) / seconds(gpt_175b, with(4, 16, 16, 640)) > 0.985);
    CHECK(seconds(gpt_1t, with(8, 64, 2, 1600)) / seconds(gpt_1t, with(8, 64, 6, 1600)) > 0.985);
    // The same batch on more dies: less than that.
    const double strong = speed(gpt_1t, with(8, 64, 6, 1600)) / speed(gpt_1t, with(8, 64, 2, 4800));
    CHECK(strong < 0.985);
    CHECK(strong > 0.85);
    // Wider tensors lower the speed, across nodes most of all.
    CHECK(speed(gpt_175b, with(4, 16, 2, 320)) > speed(gpt_175b, with(8, 16, 1, 640)));
    CHECK(speed(gpt_175b, with(8, 16, 1, 640)) > 1.3 * speed(gpt_175b, with(16, 8, 1, 640)));
    // More micro-batches raise it, more stages with as many lower it, and in proportion they keep it, but for heads.
    CHECK(speed(gpt_175b, with(8, 16, 1, 128)) > speed(gpt_175b, with(8, 16, 1, 32)));
    CHECK(speed(gpt_175b, with(8, 16, 1, 128)) > speed(gpt_175b, with(8, 32, 1, 128)));
    CHECK(speed(gpt_175b, with(8, 32, 1, 256)) / speed(gpt_175b, with(8, 16, 1, 128)) > 0.95);
    // TP 8, PP 12 and 12 sequences: half of it is bubble.
    const step_time few = time_of_step(gpt_175b, with(8, 12, 1, 12), frontier);
    CHECK(std::fabs(few.bubble / (few.total() - few.data - few.updates) / 0.477 - 1) <= 0.03);
    CHECK(speed(gpt_175b, with(8, 12, 1, 12)) < 0.56 * speed(gpt_175b, with(8, 12, 1, 640)));
    // A thousand billion parameters as TP 4, PP 128 and as TP 8, PP 64: bubbles take what tensors save.
    CHECK(std::fabs(speed(gpt_1t, with(4, 128, 2, 512)) / speed(gpt_1t, with(8, 64, 2, 512)) - 1) < 0.05);
}

TEST_CASE("bubbles: (p - 1)/(m + p - 1) of the pipeline's time, a v-th interleaved, less where backward is split") {
    const model_shape m{96, 1024, 16, 16, 128};
    for (const int p : {1, 2, 8, 48}) {
        job j{.pipeline = p, .micro_batches = 96};
        const auto share = [&] {
            const step_time t = time_of_step(m, j, hgx_h100);
            // The head is the last stage's alone.
            const double head = 96 * 6.0 * 128 * 1024 * 16 / (hgx_h100.flops * hgx_h100.product_efficiency);
            return t.bubble / (t.products - head + t.memory + t.tensor + t.bubble);
        };
        CHECK(share() == doctest::Approx((p - 1.0) / (96 + p - 1)).epsilon(1e-12));
        j.schedule = pipelining::zero_bubble_v;
        CHECK(share() == doctest::Approx((p - 1.0) / (6 * 96 + p - 1)).epsilon(1e-12));
        j.schedule = pipelining::zero_bubble;
        CHECK(share() == doctest::Approx((p - 1.0) / (3 * 96 + p - 1)).epsilon(1e-12));
        j.recompute = recomputation::full;
        CHECK(share() == doctest::Approx((p - 1.0) / (2 * 96 + p - 1)).epsilon(1e-12));
        if (p > 1) {  // 2(p/2 - 1) and 4(p/2 - 1) - 1 units, of which a micro-batch has 3 and 4
            j.schedule = pipelining::dual_pipe;
            const step_time t = time_of_step(m, j, hgx_h100);
            const double half = 48 * 6.0 * 128 * 1024 * 16 / (hgx_h100.flops * hgx_h100.product_efficiency);
            const double work = t.products - half + t.memory + t.tensor;
            CHECK(t.bubble == doctest::Approx(work * (p == 2 ? 0 : 2 * p - 5.0) / (4 * 96)).epsilon(1e-12));
            j.recompute = recomputation::none;
            const step_time once = time_of_step(m, j, hgx_h100);
            CHECK(once.bubble ==
                  doctest::Approx((once.products - half + once.memory) * (p - 2.0) / (3 * 96)).epsilon(1e-12));
            j.recompute = recomputation::full;
        }
        if (p == 8) {
            j.schedule = pipelining::interleaved;
            j.chunks = 3;
            CHECK(share() == doctest::Approx(7.0 / (3 * 96 + 7)).epsilon(1e-12));
        }
    }
    // 64 micro-batches: 9.9 % on 8 stages, 42.3 % on 48.
    const auto percent = [&](int p) {
        const step_time t = time_of_step(m, {.pipeline = p, .micro_batches = 64}, hgx_h100);
        const double head = 64 * 6.0 * 128 * 1024 * 16 / (hgx_h100.flops * hgx_h100.product_efficiency);
        return 100 * t.bubble / (t.products - head + t.memory + t.tensor + t.bubble);
    };
    CHECK(std::fabs(percent(8) - 9.9) < 0.05);
    CHECK(std::fabs(percent(48) - 42.3) < 0.05);
}

TEST_CASE("bubbles and messages that are waited for are those of this library's schedules, replayed") {
    // A micro-batch on a rank takes 4 or, recomputed, 3 times 1000 ticks a chunk; a message takes one.
    for (const bool repeats : {false, true}) {
        for (const int p : {2, 4, 8}) {
            for (const int m : {16, 32}) {
                const parallel::pass_times still{1000, repeats ? 2000 : 1000, 1000, 0, {}};
                parallel::pass_times moving = still;
                moving.transfer = 1;
                const auto check = [&](pipelining schedule, int chunks, const parallel::pipeline_schedule& s) {
                    const int ranks = s.ranks, count = s.micro_batches;
                    const job j{.pipeline = ranks,
                                .chunks = schedule == pipelining::interleaved ? chunks : 1,
                                .schedule = schedule,
                                .recompute = repeats ? recomputation::full : recomputation::none,
                                .micro_batches = count};
                    const auto makespan = static_cast<double>(parallel::replayed(s, still).makespan());
                    const double micro_batch = (repeats ? 4000.0 : 3000.0) * chunks;
                    CAPTURE(s.name);
                    CAPTURE(ranks);
                    CAPTURE(count);
                    CAPTURE(repeats);
                    const double bubble = makespan - count * micro_batch;
                    const double messages = static_cast<double>(parallel::replayed(s, moving).makespan()) - makespan;
                    // Recomputed in a V, some ranks wait less for a second chunk than the form says.
                    const bool bound = schedule == pipelining::zero_bubble_v;
                    if (bound) {
                        CHECK(bubble <= plan::detail::bubble_share(j) * micro_batch * (1 + 1e-12));
                        CHECK(bubble >= plan::detail::bubble_share(j) * micro_batch * 0.5);
                        CHECK(messages <= plan::detail::waited_messages(j) * 1.5);
                        CHECK(messages >= plan::detail::waited_messages(j) * 0.75);
                    } else {
                        CHECK(bubble == doctest::Approx(plan::detail::bubble_share(j) * micro_batch).epsilon(1e-12));
                        const double within = j.copies() > 1 ? 1 : 1e-12 * messages;
                        CHECK(std::fabs(messages - plan::detail::waited_messages(j)) <= within);
                    }
                    if (bound && !repeats) { CHECK(bubble == 1000.0 * (p - 1)); }
                };
                check(pipelining::gpipe, 1, parallel::gpipe(p, m));
                check(pipelining::one_forward_one_backward, 1, parallel::one_forward_one_backward(p, m));
                check(pipelining::interleaved, 2, parallel::interleaved(p, m, 2));
                check(pipelining::interleaved, 4, parallel::interleaved(p, m, 4));
                check(pipelining::zero_bubble, 1, parallel::zero_bubble(p, m, still));
                check(pipelining::zero_bubble_v, 2, parallel::zero_bubble_v(p, m, still));
                check(pipelining::dual_pipe, 1, parallel::dual_pipe(p, m));
                check(pipelining::dual_pipe, 1, parallel::dual_pipe(p + 2, m + 6));
            }
        }
    }
}

TEST_CASE("two copies of the model: heads at both ends, sums of copies, and gradients that nothing hides") {
    const model_shape m{16, 1024, 16, 50304, 1024};
    machine on = hgx_h100;
    on.interference = 0;
    const job one{.pipeline = 4, .data = 8, .micro_batches = 16};
    job two = one;
    two.schedule = pipelining::dual_pipe;
    const step_time a = time_of_step(m, one, on), b = time_of_step(m, two, on);
    const double head = 6.0 * 1024 * 1024 * 50304 / (on.flops * on.product_efficiency);
    CHECK(a.products - b.products == doctest::Approx(8 * head).epsilon(1e-9));
    CHECK(b.memory == a.memory);
    CHECK(b.sequence == 0);
    // Eight layers, the words, positions and the last norm on each end; twice what 1F1B has, but for one table.
    const double parameters = 8 * (12.0 * 1024 * 1024 + 13 * 1024) + (50304 + 1024) * 1024 + 2 * 1024;
    const auto sum = comm::time_of(comm::collective::all_reduce, 2 * parameters, 2, on.link_of(4, 8)).seconds();
    const auto each = comm::time_of(comm::collective::all_reduce, 2 * parameters / 8, on.group_of(8, 1, 8)).seconds();
    CHECK(b.data == doctest::Approx(sum + 8 * each).epsilon(1e-12));
    CHECK(b.hidden == doctest::Approx(0).epsilon(1e-12));
    CHECK(b.updates == doctest::Approx(30 * parameters / (on.memory_bandwidth * on.memory_efficiency)).epsilon(1e-12));
    two.zero_stage = 1;  // reduced without cover, gathered beside the next step's first forward
    const double micro_batch = (b.products - 8 * head + b.memory) / 16;
    const auto part = [&](comm::collective kind) {
        return comm::time_of(kind, 2 * parameters / 8, on.group_of(8, 1, 8)).seconds();
    };
    const double reduce = part(comm::collective::reduce_scatter), gather = part(comm::collective::all_gather);
    CHECK(time_of_step(m, two, on).data ==
          doctest::Approx(sum + 8 * reduce + std::max(gather, 8 * gather - micro_batch / 3 * 7 / 8)).epsilon(1e-12));
}

TEST_CASE("ranks that share sequences: products and sums are divided, rings are as sequence/estimate has them") {
    const model_shape m{4, 1024, 16, 4096, 65536};
    machine on = hgx_h100;
    on.wave = 0;
    on.launch_seconds = 0;
    on.inside.latency_seconds = 1e-5;
    const auto with = [&](int sequence) {
        job j{.tensor = 2, .sequence = sequence};
        j.recompute = recomputation::selective;
        j.micro_batch = 3;
        j.micro_batches = 2;
        return time_of_step(m, j, on);
    };
    const step_time whole = with(1), shared = with(4);
    CHECK(whole.sequence == 0);
    CHECK(shared.products == doctest::Approx(whole.products / 4).epsilon(1e-12));
    CHECK(shared.memory == doctest::Approx(whole.memory / 4).epsilon(1e-12));
    const double latency = 2 * on.inside.latency_seconds;  // of a sum over two ranks
    const double sums = 4 * 4 * 2;                         // of four layers in two micro-batches
    CHECK(shared.tensor - sums * latency == doctest::Approx((whole.tensor - sums * latency) / 4).epsilon(1e-12));
    // Four layers, two micro-batches, of three sequences each. Keys and values twice and their gradients in floats: 8
    // heads of 64 features; a step passes over them 25 times. Sixteen blocks of 16384 tokens, half of them visible.
    const double tokens = 16384, features = 512;
    const double block = 4 * tokens * tokens * features * 4 / 2 / (on.flops * on.product_efficiency);
    const double step = 50 * features * tokens / (on.memory_bandwidth * on.memory_efficiency);
    const double sending = 16 * features * tokens / (on.inside.bytes_per_second * on.link_efficiency);
    const double round = 3 * (block + step);
    const double waiting = std::max(0.0, 2e-5 + 3 * sending - round);
    CHECK(shared.sequence == doctest::Approx(4 * 2 * (3 * waiting + 4 * 3 * step)).epsilon(1e-12));
    CHECK(waiting == 0);
    on.inside.bytes_per_second /= 100;  // what a round does not hide
    const double slowly = 2e-5 + 3 * sending * 100 - round;
    CHECK(slowly > 0);
    CHECK(with(4).sequence == doctest::Approx(4 * 2 * (3 * slowly + 4 * 3 * step)).epsilon(1e-12));
    CHECK(with(4).products == shared.products);
    // Stages wait for rings, too; what they send each other is a rank's rows.
    on.inside.bytes_per_second *= 100;
    on.interference = 0;
    job stages{.tensor = 2, .pipeline = 4, .sequence = 4, .micro_batches = 8};
    const step_time t = time_of_step(m, stages, on);
    const double head = 6 * tokens * 1024 * 4096 / 2 / (on.flops * on.product_efficiency);
    CHECK(t.sequence > 0);
    CHECK(t.bubble == doctest::Approx(3 * (t.working() / 8 - head)).epsilon(1e-12));
    // 1F1B waits for 2 (p - 1)/p m + 2 (p - 2) messages, here between nodes of eight: stages are eight ranks apart.
    const double message =
        on.between.latency_seconds + 2 * tokens * 1024 / 2 / (on.between.bytes_per_second * on.link_efficiency);
    CHECK(t.messages == doctest::Approx((2 * 3.0 / 4 * 8 + 4) * message).epsilon(1e-12));
}

TEST_CASE("rings without a placement: as even_ring's, inside a node and over nodes") {
    const sequence::attention_cost cost{3e-11, 2e-8, 1e-5};
    const sequence::transfer_cost transfers =
        sequence::training_transfers(8, 128, 2, 4, {5e-6, 60e9}, {1e-5, 5e9}, {4e-8, 9e-5});
    for (const int ranks : {2, 4, 8}) {
        for (const std::int64_t count : {1, 3}) {
            const std::int64_t tokens = 16 * 1024;
            const std::vector<std::int64_t> lengths(static_cast<std::size_t>(count), tokens);
            const sequence::cluster machines{.nodes = ranks / 4 > 0 ? ranks / 4 : 1,
                                             .ranks_per_node = ranks > 4 ? 4 : ranks};
            const auto placed = sequence::partition::even_ring{}(lengths, machines);
            const auto where = machines.nodes > 1 ? sequence::zone::world : sequence::zone::node;
            const auto expected = sequence::estimated(placed, cost, transfers).ranks.at(1);
            const auto found = sequence::time_of_even_rings(ranks, where, cost(tokens), tokens, count, transfers);
            CHECK(found.computing == doctest::Approx(expected.computing).epsilon(1e-12));
            CHECK(found.steps == doctest::Approx(expected.steps).epsilon(1e-12));
            CHECK(found.waiting == doctest::Approx(expected.waiting).epsilon(1e-12));
            CHECK(found.tokens == expected.tokens);
            CHECK((ranks < 8 || found.waiting > 0));
        }
    }
}

TEST_CASE("steps of rings on H200s are the measured ones, and so are whole rings of two") {
    const model_shape m{1, 4096, 32, 32000, 32768};
    job j{.sequence = 2};
    j.recompute = recomputation::selective;
    const sequence::calibration measured = sequence::h200_training();
    const sequence::transfer_cost c = ring_transfers(m, j, hgx_h200);
    CHECK(std::fabs(c.step.linear / measured.step.linear - 1) <= 0.03);
    CHECK(std::fabs(c.step.constant / measured.step.constant - 1) <= 0.03);
    CHECK(c.bytes_per_token == 12.0 * 4096);
    for (const sequence::ring_sample& r : measured.rings) {
        CAPTURE(r.tokens);
        const auto t = sequence::time_of_even_rings(2, sequence::zone::node, measured.cost(r.tokens), r.tokens, 1, c);
        CHECK(std::fabs(t.seconds() / r.seconds - 1) <= 0.15);
    }
    j.sequence = 4;
    CHECK(ring_transfers(m, j, hgx_h200).bytes_per_token == 16.0 * 4096);
    j.recompute = recomputation::full;  // keys and values once more
    const sequence::transfer_cost again = ring_transfers(m, j, hgx_h200);
    CHECK(again.bytes_per_token == 20.0 * 4096);
    CHECK(again.step.linear == doctest::Approx(c.step.linear * 4 / 3).epsilon(1e-12));
    CHECK(again.inside.latency_seconds == doctest::Approx(3 * hgx_h200.inside.latency_seconds).epsilon(1e-12));
    CHECK(c.inside.latency_seconds == doctest::Approx(2 * hgx_h200.inside.latency_seconds).epsilon(1e-12));
}

TEST_CASE("rings between nodes: over the NICs of all of their ranks there, as far as links inside carry it") {
    const model_shape m{1, 4096, 32, 32000, 1 << 20};
    const auto between = [&](const job& j, const machine& on) { return ring_transfers(m, j, on).between; };
    machine on = hgx_h100;
    on.link_efficiency = 1;
    CHECK(between({.sequence = 16}, on).bytes_per_second == 8 * 50e9);
    CHECK(between({.sequence = 16}, on).latency_seconds == doctest::Approx(2 * (10e-6 + 2 * 5e-6)).epsilon(1e-12));
    CHECK(between({.tensor = 4, .sequence = 16}, on).bytes_per_second == 2 * 50e9);  // two ranks of each node
    CHECK(between({.tensor = 8, .sequence = 16}, on).bytes_per_second == 50e9);
    CHECK(between({.tensor = 8, .sequence = 16}, on).latency_seconds == doctest::Approx(2 * 10e-6).epsilon(1e-12));
    on.inside.bytes_per_second = 70e9;  // 7 of 8 parts are brought to other NICs
    CHECK(between({.sequence = 16}, on).bytes_per_second == doctest::Approx(80e9).epsilon(1e-12));
    on.inside.bytes_per_second = 20e9;  // no use
    CHECK(between({.sequence = 16}, on).bytes_per_second == 50e9);
    // A ring of tensor ranks' neighbors is inside, of those of another node not.
    CHECK(time_of_rings(m, {.tensor = 2, .sequence = 4}, hgx_h100, 1e-3) <
          time_of_rings(m, {.tensor = 4, .sequence = 4}, hgx_h100, 1e-3));
}

TEST_CASE("a ring waits for transfers where ranks have fewer tokens than hide them, and not from there on") {
    machine on = hgx_h100;
    on.inside.latency_seconds = on.launch_seconds = 0;
    on.memory_bandwidth = 1e30;  // steps take nothing
    for (const recomputation r : {recomputation::none, recomputation::selective, recomputation::stages}) {
        job j{.sequence = 4};
        j.recompute = r;
        // Bytes a token over 2 h FLOPs a token^2 in each of 3, 4 or 5 forwards' worth.
        const double bytes = r == recomputation::stages ? 20 : 16;
        const double worth = r == recomputation::none ? 3 : r == recomputation::selective ? 4 : 5;
        const double expected =
            bytes * on.flops * on.product_efficiency / (2 * worth) / (on.inside.bytes_per_second * on.link_efficiency);
        const auto waits = [&](double tokens) {
            const model_shape m{1, 512, 4, 4096, 4 * static_cast<std::int64_t>(tokens)};
            return time_of_step(m, j, on).sequence;
        };
        CHECK(waits(expected + 1) <= 1e-15);
        CHECK(waits(expected - 2) > 1e-9);
    }
}

TEST_CASE("gradients are averaged over data and sequence ranks together") {
    const model_shape m{12, 768, 12, 50304, 1024};
    for (const int stage : {0, 1, 2, 3}) {
        job data{.tensor = 2, .data = 16, .zero_stage = stage, .micro_batches = 4};
        job both = data;
        both.data = 4;
        both.sequence = 4;
        CHECK(both.ranks() == data.ranks());
        const rank_passes passes{1e-3, 2e-3, 12e-3};
        const exchange_time a = time_of_exchange(m, data, hgx_h100, 60'000'000, passes);
        const exchange_time b = time_of_exchange(m, both, hgx_h100, 60'000'000, passes);
        CHECK(a.sent == b.sent);
        CHECK(a.exposed == b.exposed);
        CHECK(a.updates == b.updates);
        // Replicas are of whole sequences: four ranks in each.
        data.replicas = both.replicas = 4;
        data.tau = both.tau = 8;
        CHECK(both.shards() == 4);
        CHECK(time_of_exchange(m, data, hgx_h100, 60'000'000, passes).sent ==
              time_of_exchange(m, both, hgx_h100, 60'000'000, passes).sent);
    }
    CHECK(job{.data = 4, .sequence = 4, .replicas = 4, .tau = 2}.shards() == 4);
}

TEST_CASE("ranks of a group: on how many nodes, and what share of links they get") {
    machine on = hgx_h100;
    on.link_efficiency = 0.5;
    const auto expect = [&](const comm::two_levels& g, int ranks, int nodes, int largest, int smallest) {
        CHECK(g.ranks == ranks);
        CHECK(g.nodes == nodes);
        CHECK(g.largest_node == largest);
        CHECK(g.smallest_node == smallest);
        CHECK(g.inside.bytes_per_second == 225e9);
        CHECK(g.between.bytes_per_second == 25e9);
        CHECK(g.inside.latency_seconds == on.inside.latency_seconds);
        CHECK(g.between.latency_seconds == on.between.latency_seconds);
    };
    expect(on.group_of(8, 1, 8), 8, 1, 8, 8);
    expect(on.group_of(20, 1, 20), 20, 3, 8, 4);
    expect(on.group_of(6, 2, 12), 6, 2, 4, 2);
    expect(on.group_of(3, 16, 48), 3, 3, 1, 1);
    // Of groups side by side some are on two nodes: {6, 7, 8}; {6 to 11}; {6, 8, 10}; not where all are on one.
    expect(on.group_of(3, 1, 24), 3, 2, 2, 1);
    expect(on.group_of(6, 1, 12), 6, 2, 4, 2);
    expect(on.group_of(3, 2, 12), 3, 2, 2, 1);
    expect(on.group_of(3, 1, 6), 3, 1, 3, 3);
    expect(on.group_of(4, 1, 12), 4, 1, 4, 4);
    expect(on.group_of(1, 3, 24), 1, 1, 1, 1);
    CHECK(on.link_of(8, 1).bytes_per_second == 225e9);
    CHECK(on.link_of(2, 4).bytes_per_second == 225e9);
    CHECK(on.link_of(3, 4).bytes_per_second == 25e9);
}

TEST_CASE("groups are priced as inside a node if and only if each of them is") {
    machine on = hgx_h100;
    int inside = 0, even = 0;
    for (on.ranks_per_node = 1; on.ranks_per_node <= 12; ++on.ranks_per_node) {
        for (int stride = 1; stride <= 4; ++stride) {
            for (int count = 2; count <= 8; ++count) {
                for (const int groups : {1, 3, 12}) {
                    const int adjacent = count * stride, ranks = adjacent * groups;
                    std::set<int> nodes_of_groups;
                    bool alike = true;  // all inside one node, or all of whole nodes
                    for (int first = 0; first < ranks; first += adjacent) {
                        const int begin = first / on.ranks_per_node, end = (first + adjacent - 1) / on.ranks_per_node;
                        const bool whole = first % on.ranks_per_node == 0 && adjacent % on.ranks_per_node == 0;
                        alike = alike && (begin == end || whole);
                        for (int at = first; at < first + stride; ++at) {
                            const int last = at + (count - 1) * stride;
                            nodes_of_groups.insert(1 + last / on.ranks_per_node - at / on.ranks_per_node);
                        }
                    }
                    const comm::two_levels g = on.group_of(count, stride, ranks);
                    CHECK((g.nodes == 1) == (nodes_of_groups == std::set{1}));
                    CHECK(g.largest_node + (g.nodes - 2) * g.largest_node + g.smallest_node == count);
                    CHECK(on.lies_evenly(adjacent, ranks) == alike);
                    inside += g.nodes == 1 ? 1 : 0;
                    even += alike ? 1 : 0;
                }
            }
        }
    }
    CHECK(inside > 100);
    CHECK(even > inside);
    // Layers on three ranks, and rings of three: at NVLink's speed where all groups are inside nodes.
    const model_shape m{36, 6144, 48, 50304, 4096};
    const auto seconds = [&](int groups, int places) {
        on.ranks_per_node = places;
        return time_of_step(m, {.tensor = 3, .data = groups}, on).tensor;
    };
    CHECK(seconds(1, 8) == seconds(8, 3));
    CHECK(seconds(2, 8) == seconds(1, 8));
    CHECK(seconds(8, 8) > 3 * seconds(1, 8));
    on = hgx_h100;
    CHECK(time_of_rings(m, {.data = 8, .sequence = 3}, on, 1e-5) >
          2 * time_of_rings(m, {.data = 2, .sequence = 3}, on, 1e-5));
}

TEST_CASE("FLOPs of the model and of the hardware") {
    const model_shape m{96, 12288, 96, 51200, 2048};
    job j{.data = 4, .micro_batch = 2, .micro_batches = 3};
    const double tokens = 24 * 2048.0;
    // 6 for each weight that multiplies and token, and attention.
    const double layers = 96 * 12.0 * 12288 * 12288;
    CHECK(model_flops(m, j) ==
          doctest::Approx(tokens * (6 * (layers + 51200.0 * 12288) + 12.0 * 96 * 12288 * 2048)).epsilon(1e-12));
    CHECK(hardware_flops(m, j) == model_flops(m, j));
    j.recompute = recomputation::full;
    CHECK(hardware_flops(m, j) / tokens - model_flops(m, j) / tokens ==
          doctest::Approx(2 * layers + 4.0 * 96 * 12288 * 2048).epsilon(1e-9));
    j.recompute = recomputation::selective;
    const double scores = tokens * 4.0 * 96 * 12288 * 2048;
    CHECK(hardware_flops(m, j) - model_flops(m, j) == doctest::Approx(scores).epsilon(1e-9));
    j.recompute = recomputation::stages;
    CHECK(hardware_flops(m, j) - model_flops(m, j) == doctest::Approx(tokens * 2 * layers + 2 * scores).epsilon(1e-9));
}

TEST_CASE("stages that run again take what full recomputation takes, and attention that keeps no scores") {
    const model_shape m{24, 1024, 16, 50304, 1024};
    for (const pipelining schedule : {pipelining::one_forward_one_backward, pipelining::zero_bubble}) {
        job full{.tensor = 2, .pipeline = 4, .schedule = schedule, .micro_batches = 16};
        full.recompute = recomputation::full;
        job stages = full;
        stages.recompute = recomputation::stages;
        const step_time a = time_of_step(m, full, hgx_h100), b = time_of_step(m, stages, hgx_h100);
        const double again = 6 * 4.0 * 1024 * 1024 * 512 / (hgx_h100.flops * hgx_h100.product_efficiency);
        CHECK(b.products - a.products == doctest::Approx(16 * again).epsilon(1e-9));
        CHECK(b.memory == a.memory);
        CHECK(b.tensor == a.tensor);
        CHECK(b.bubble - a.bubble == doctest::Approx(plan::detail::bubble_share(full) * again).epsilon(1e-9));
    }
}

TEST_CASE("a forward is a third of a micro-batch's passes, and a quarter where it is made twice") {
    const model_shape m{12, 768, 12, 50304, 1024};
    machine on = hgx_h100;
    on.inside.bytes_per_second = 60e9;  // what is gathered takes longer than a forward, not longer than a backward
    on.interference = 0;
    for (const recomputation again : {recomputation::selective, recomputation::full, recomputation::stages}) {
        job j{.data = 8, .zero_stage = 1, .micro_batch = 4};
        j.recompute = again;
        const step_time t = time_of_step(m, j, on);
        const double head = 6.0 * 4 * 1024 * 768 * 50304 / (on.flops * on.product_efficiency);
        const double micro_batch = t.products - head + t.memory;
        const double forward = micro_batch / (again == recomputation::selective ? 3 : 4);
        // ZeRO-1: gradients of 12 layers beside backward, their values beside the forward of the next step.
        const double bytes = 2.0 * static_cast<double>(m.parameters()) / 12;
        const auto each = [&](comm::collective kind) {
            return comm::time_of(kind, bytes, on.group_of(8, 1, 8)).seconds();
        };
        const auto waited = [](double one, double beside) { return std::max(one, 12 * one - beside * 11 / 12); };
        const double reduce = each(comm::collective::reduce_scatter), gather = each(comm::collective::all_gather);
        const double exposed = waited(reduce, micro_batch - forward) + waited(gather, forward);
        CHECK(waited(reduce, micro_batch - forward) == reduce);
        CHECK(waited(gather, forward) > 1.5 * gather);
        CHECK(t.data == doctest::Approx(exposed).epsilon(1e-9));
        CHECK(t.hidden == doctest::Approx(12 * (reduce + gather) - exposed).epsilon(1e-9));
    }
}

TEST_CASE("data ranks: what is sent, and what of it computing does not hide, by strategy") {
    const model_shape m{12, 768, 12, 50304, 1024};
    const machine on = [] {
        machine x = hgx_h100;
        x.inside = {0, 450e9};  // no latency: bytes alone
        x.between = {0, 50e9};
        x.link_efficiency = 1;
        x.interference = 0;
        return x;
    }();
    constexpr std::int64_t p = 96'000'000;
    constexpr double memory = 3.35e12 * 0.9;
    const auto of = [&](job j, rank_passes passes) { return time_of_exchange(m, j, on, p, passes); };
    const rank_passes none{};                // hides nothing
    const rank_passes endless{10, 20, 100};  // hides all but one message of twelve
    job j{.data = 8, .micro_batches = 4};
    const double all = 2 * 7.0 / 8 * 2 * p / 450e9;  // an all_reduce
    const auto close = [](double x) { return doctest::Approx(x).epsilon(1e-12); };
    CHECK(of(j, none).sent == close(all));
    CHECK(of(j, none).exposed == close(all));
    CHECK(of(j, endless).sent == close(all));
    CHECK(of(j, endless).exposed == close(all / 12));
    CHECK(of(j, {0, all / 2, 0}).exposed == close(all - all / 2 * 11 / 12));
    CHECK(of(j, none).updates == close(30.0 * p / memory));
    j.zero_stage = 1;
    CHECK(of(j, none).sent == close(all));
    CHECK(of(j, endless).exposed == close(all / 12));
    CHECK(of(j, none).updates == close(30.0 * p / 8 / memory));
    j.zero_stage = 2;  // reductions in each of 4 micro-batches, a gather
    CHECK(of(j, none).sent == close(all / 2 * 5));
    CHECK(of(j, none).exposed == close(all / 2 * 5));
    CHECK(of(j, endless).exposed == close(all / 12));
    j.zero_stage = 3;  // two gathers and a reduction in each
    CHECK(of(j, none).sent == close(all / 2 * 12));
    CHECK(of(j, none).exposed == close(all / 2 * 12 + all / 12));
    CHECK(of(j, endless).exposed == close(all / 12));

    SUBCASE("over two nodes a rank's part alone goes between") {
        j = {.data = 16, .micro_batches = 4};
        CHECK(of(j, none).sent == close(all + 2 * p / 8.0 / 50e9));
        j.tensor = 8;  // a rank of each node
        j.data = 2;
        CHECK(of(j, none).sent == close(2.0 * p / 50e9));
        // node_shards: each node has all states, and what goes between is no more however many micro-batches there are.
        j = {.data = 16, .zero_stage = 3, .micro_batches = 4, .replicas = 2};
        CHECK(of(j, none).sent == close(all / 2 * 12 + 2 * p / 8.0 / 50e9));
        CHECK(of(j, none).updates == close(30.0 * p / 8 / memory));
        // secondary_shards: what backward gathers again stays inside the nodes.
        j = {.data = 16, .zero_stage = 3, .micro_batches = 4};
        const double once = all / 2 + p / 8.0 / 50e9;  // a gather or a reduction among all
        CHECK(of(j, none).sent == close(12 * once));
        j.secondary = 8;
        CHECK(of(j, none).sent == close(8 * once + 4 * all / 2));
        CHECK(of(j, none).exposed == close(8 * once + 4 * all / 2 + once / 6));
    }
    SUBCASE("rounds: masters once in tau steps, waited for or beside the next round") {
        j = {.data = 16, .zero_stage = 1, .micro_batches = 4, .replicas = 2, .tau = 10};
        const double round = 4 * p / 8.0 / 50e9;
        CHECK(of(j, none).sent == close(all + round / 10));
        CHECK(of(j, none).exposed == close(all + round / 10));
        CHECK(of(j, endless).exposed == close(all / 12 + round / 10));
        j.delayed = true;
        CHECK(of(j, endless).exposed == close(all / 12));
        CHECK(of(j, endless).updates == close((30 + 40 / 10.0) * p / 8 / memory));
        // Each rank a replica, on a slow network: what 10 steps do not hide.
        machine slow = on;
        slow.between = {0, 1e9};
        j = {.data = 16, .replicas = 16, .tau = 10, .delayed = true};
        const exchange_time t = time_of_exchange(m, j, slow, p, {0, 0, 1e-3});
        const double sent = 2 * 7.0 / 8 * 4 * p / 450e9 + 4 * p / 8.0 / 1e9;
        CHECK(t.exposed == close((sent - 10 * (1e-3 + t.updates)) / 10));
    }
    SUBCASE("compression: of what goes between nodes; encoding and decoding as compress::expected_gain has them") {
        j = {.data = 16, .compression = 4};
        CHECK(of(j, none).sent == close(all + (2 * p / 8.0 / 50e9) / 4));
        // Four bits and nothing else, of float, on one node; the wire has the scales of its buckets too.
        const compress::quantize four_bits{};
        const compress::segment one{.level = 4, .rows = 12, .cols = p / 12};
        const compress::layout gradients(&one, 1);
        const auto expected =
            compress::expected_gain(four_bits, gradients, 2, true, comm::topology::one_node(8, {0, 450e9}),
                                    {.bytes_per_second = memory, .launch_seconds = 0});
        j = {.data = 8, .compression = 4};
        const exchange_time t = of(j, none);
        CHECK(std::fabs((t.updates - 30.0 * p / memory) / (expected.encode + expected.decode) - 1) <= 0.01);
        CHECK(t.sent / expected.wire < 1);
        CHECK(t.sent / expected.wire > 0.9);
    }
    SUBCASE("what is not waited for costs computing a part of its time") {
        machine busy = on;
        busy.interference = 0.25;
        j = {.data = 8, .micro_batches = 4};
        CHECK(time_of_exchange(m, j, busy, p, endless).exposed == close(all / 12 + 0.25 * all * 11 / 12));
        CHECK(time_of_exchange(m, j, busy, p, none).exposed == close(all));
    }
    SUBCASE("what one rank does") {
        j = {};
        CHECK(of(j, none).sent == 0);
        CHECK(of(j, none).exposed == 0);
        CHECK(time_of_step(m, {.data = 8}, dgx_a100).hidden > 0);
        CHECK(time_of_step(m, {.data = 8}, dgx_a100).data > 0);
    }
}

TEST_CASE("what this project has measured: rounds over sockets, from steps alone and with gradients averaged") {
    // bench/results/transformer_gpus_rounds.json: GPT-2 124M on two H200, 32 sequences each, milliseconds a step.
    const struct { double data_parallel, slow_mo, co2; } networks[] = {{145.3, 72.2, 57.6}, {70.6, 58.5, 56.5}};
    constexpr double alone = 55.0;
    const model_shape m{12, 768, 12, 50304, 1024};
    for (const auto& n : networks) {
        machine on = hgx_h200;
        on.ranks_per_node = 1;
        const auto milliseconds = [&](const job& j) { return 1e3 * time_of_step(m, j, on).total(); };
        // A step alone says how fast products are, one of data parallelism how fast the network is.
        const auto fit = [&](double& figure, double low, double high, const job& j, double measured) {
            for (int i = 0; i < 60; ++i) {
                figure = (low + high) / 2;
                (milliseconds(j) > measured ? low : high) = figure;
            }
            CHECK(milliseconds(j) == doctest::Approx(measured).epsilon(1e-6));
        };
        job j{.recompute = recomputation::selective, .micro_batch = 32};
        fit(on.product_efficiency, 0.1, 1, j, alone);
        j.data = 2;
        fit(on.between.bytes_per_second, 1e8, 1e11, j, n.data_parallel);
        j.replicas = 2;
        j.tau = 12;
        CHECK(std::fabs(milliseconds(j) / n.slow_mo - 1) <= 0.06);
        j.delayed = true;
        CHECK(std::fabs(milliseconds(j) / n.co2 - 1) <= 0.02);
        on.interference = 0;
        CHECK(milliseconds(j) < alone * 1.01);
    }
}

TEST_CASE("an H100 node: llm.c's GPT-2 1558M, whose efficiencies are not calibrated on it") {
    // scripts/run_gpt2_1558M.sh of llm.c: 1,048,576 tokens on eight H100 in 2.8 s, shared optimizer states.
    const job j{
        .data = 8, .zero_stage = 1, .recompute = recomputation::selective, .micro_batch = 16, .micro_batches = 8};
    CHECK(std::fabs(time_of_step({48, 1600, 25, 50304, 1024}, j, hgx_h100).total() / 2.8 - 1) <= 0.05);
}

TEST_CASE("products, collectives and steps that were measured give back the machine they come from") {
    machine truth = hgx_h100;
    truth.product_efficiency = 0.613;
    truth.launch_seconds = 7e-6;
    truth.link_efficiency = 0.62;
    std::vector<measured_product> products;
    for (const double n : {256.0, 512.0, 1024.0, 4096.0}) {
        products.push_back({1024, n, 768, truth.seconds_of_product(1024, n, 768)});
    }
    const machine blank = hgx_h100;
    const machine fitted = calibrated(blank, std::span<const measured_product>(products));
    CHECK(fitted.product_efficiency == doctest::Approx(0.613).epsilon(1e-9));
    CHECK(std::fabs(fitted.launch_seconds / 7e-6 - 1) <= 1e-9);
    // Where a launch would have to take less than nothing it takes nothing.
    const measured_product steep[] = {{1000, 1000, 1000, 1e-3}, {1000, 1000, 2000, 3e-3}};
    CHECK(calibrated(blank, std::span(steep)).launch_seconds == 0);
    std::vector<measured_collective> collectives;
    for (const int ranks : {2, 8, 16}) {
        const auto seconds =
            comm::time_of(comm::collective::all_reduce, 1e8, truth.group_of(ranks, 1, ranks)).seconds();
        collectives.push_back({comm::collective::all_reduce, ranks, 1, 1e8, seconds});
    }
    CHECK(calibrated(blank, std::span<const measured_collective>(collectives)).link_efficiency == 0.62);

    std::vector<measured_step> steps;
    const model_shape gpt2{12, 768, 12, 50304, 1024};
    for (const std::int64_t n : {2, 16}) {
        measured_step s{gpt2, {.micro_batch = n, .micro_batches = 32 / n}, 0};
        s.seconds = time_of_step(s.model, s.how, truth).total();
        steps.push_back(s);
    }
    machine other = truth;
    other.product_efficiency = 0.5;
    other.link_efficiency = 0.47;
    const machine of_one = calibrated(other, std::span<const measured_step>(steps));
    CHECK(of_one.product_efficiency == doctest::Approx(0.613).epsilon(0.02));
    CHECK(of_one.link_efficiency == 0.47);  // one GPU says nothing of it
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span<const measured_step>{})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span<const measured_product>{})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span<const measured_collective>{})), usage_error);
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span<const measured_product>(products).first(1))),
                    usage_error);
    const measured_step none{{12, 768, 12, 50304, 1024}, {}, 0};
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span(&none, 1))), usage_error);
    const measured_product no_time{1, 1, 1, 0};
    CHECK_THROWS_AS(static_cast<void>(calibrated(blank, std::span(&no_time, 1))), usage_error);
    const double inf = std::numeric_limits<double>::infinity();
    for (const double size : {0.0, -1.0, inf, std::nan("")}) {
        for (double measured_product::*of : {&measured_product::m, &measured_product::n, &measured_product::k}) {
            measured_product odd[] = {{2, 2, 2, 1}, {4, 2, 2, 2}};
            CHECK_NOTHROW(static_cast<void>(calibrated(blank, std::span<const measured_product>(odd))));
            odd[1].*of = size;
            CHECK_THROWS_WITH_AS(static_cast<void>(calibrated(blank, std::span<const measured_product>(odd))),
                                 doctest::Contains("plan: a product of "), usage_error);
        }
    }
    constexpr auto sum = comm::collective::all_reduce;
    for (const measured_collective& odd : {measured_collective{sum, 1, 1, 1e6, 1e-3},
                                           {sum, 1 << 25, 1, 1e6, 1e-3},
                                           {sum, 2, 0, 1e6, 1e-3},
                                           {sum, 2, 1, 0, 1e-3},
                                           {sum, 2, 1, -5, 1e-3},
                                           {sum, 2, 1, inf, 1e-3},
                                           {sum, 2, 1, 1e6, 0},
                                           {sum, 2, 1, 1e6, inf}}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(calibrated(blank, std::span(&odd, 1))),
                             doctest::Contains("plan: a collective of "), usage_error);
    }
    const measured_collective sound{sum, 1 << 24, std::numeric_limits<int>::max(), 1e6, 1e-3};
    CHECK(calibrated(blank, std::span(&sound, 1)).link_efficiency <= 1);
}
