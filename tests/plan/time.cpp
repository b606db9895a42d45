// Time: two published runs calibrate, the others are predicted; what must hold between layouts; FLOPs by definition.
#include <doctest/doctest.h>  // checks

#include <algorithm>  // max
#include <cmath>      // fabs
#include <cstddef>    // size_t
#include <cstdint>    // counts
#include <span>       // first rows
#include <vector>     // rows

#include <tutti/plan/machine.hpp>  // machines
#include <tutti/plan/model.hpp>    // jobs
#include <tutti/plan/time.hpp>     // under test

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
    CAPTURE(a100.product_efficiency);
    CAPTURE(a100.memory_efficiency);
    CAPTURE(a100.link_efficiency);
    CHECK(a100.product_efficiency > 0.5);  // efficiencies that are some
    CHECK(a100.product_efficiency < 0.9);
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

TEST_CASE("bubbles: (p - 1)/(m + p - 1) of the pipeline's time, a v-th interleaved, a third or half of that split") {
    const model_shape m{48, 1024, 16, 16, 128};
    for (const int p : {1, 2, 8, 48}) {
        job j{.pipeline = p, .micro_batches = 96};
        const auto share = [&] {
            const step_time t = time_of_step(m, j, hgx_h100);
            // The head is the last stage's alone.
            const double head = 96 * 6.0 * 128 * 1024 * 16 / (hgx_h100.flops * hgx_h100.product_efficiency);
            return t.bubble / (t.total() - t.data - head);
        };
        CHECK(share() == doctest::Approx((p - 1.0) / (96 + p - 1)).epsilon(1e-12));
        j.schedule = pipelining::zero_bubble_v;
        CHECK(share() == 0);
        j.schedule = pipelining::zero_bubble;
        CHECK(share() == doctest::Approx((p - 1.0) / (3 * 96 + p - 1)).epsilon(1e-12));
        j.recompute = recomputation::full;
        CHECK(share() == doctest::Approx((p - 1.0) / (2 * 96 + p - 1)).epsilon(1e-12));
        if (p == 8) {
            j.schedule = pipelining::interleaved;
            j.chunks = 3;
            CHECK(share() == doctest::Approx(7.0 / (3 * 96 + 7)).epsilon(1e-12));
        }
    }
    CHECK((8 - 1.0) / (64 + 8 - 1) == doctest::Approx(0.099).epsilon(0.01));
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
    CHECK(hardware_flops(m, j) - model_flops(m, j) == doctest::Approx(tokens * 4.0 * 96 * 12288 * 2048).epsilon(1e-9));
}

TEST_CASE("replicas take time, ZeRO-3 half as much again; nothing measured calibrates nothing") {
    const model_shape m{12, 768, 12, 50304, 1024};
    job j{.data = 8, .micro_batches = 4};
    const double once = time_of_step(m, j, dgx_a100).data;
    CHECK(once > 0);
    j.zero_stage = 3;
    CHECK(time_of_step(m, j, dgx_a100).data == doctest::Approx(1.5 * once));
    j.data = 16;  // over two nodes
    CHECK(time_of_step(m, j, dgx_a100).data > 5 * once);
    j.data = 1;
    CHECK(time_of_step(m, j, dgx_a100).data == 0);
    CHECK_THROWS_AS(static_cast<void>(calibrated(dgx_a100, {})), usage_error);
    const measured_step none{m, j, 0};
    CHECK_THROWS_AS(static_cast<void>(calibrated(dgx_a100, std::span(&none, 1))), usage_error);
}
