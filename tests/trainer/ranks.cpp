// The same run on 1, 2, 3 and 4 ranks, in one micro-batch or several, with or without communication: the same losses.
#include <array>       // rank counts
#include <filesystem>  // saved weights
#include <fstream>     // saved weights
#include <iterator>    // whole files
#include <mutex>       // counting ranks
#include <string>      // files
#include <utility>     // pair
#include <vector>      // tiny text

#include <unistd.h>  // getpid

#include <doctest/doctest.h>

#include "host_device.hpp"
#include "training.hpp"

namespace {

using trainer_test::distance;
using trainer_test::short_run;
using trainer_test::some_text;
using trainer_test::train_on_threads;

/// For what needs no full-sized model.
transformer::options small_run(const char* pipeline, int ranks, int steps = 20) {
    auto o = short_run(pipeline, ranks, steps);
    o.model = {.vocabulary = 256, .context = 64, .layers = 2, .heads = 2, .width = 32};
    return o;
}

template <class T> constexpr double bar = std::is_same_v<T, double> ? 1e-12 : 1e-5;

TEST_CASE_TEMPLATE("losses do not depend on the number of ranks", T, double, float) {
    const auto text = some_text(64);
    const auto alone = train_on_threads<T>(short_run("local", 1), text);
    REQUIRE(alone.training.size() == 20);
    CHECK(alone.training.back().second < 0.9 * alone.training.front().second);  // it learns, so the weights matter
    CHECK(alone.wire_bytes_per_step == 0);
    for (const int ranks : {1, 2, 3, 4}) {
        CAPTURE(ranks);
        const auto together = train_on_threads<T>(short_run("ddp", ranks), text);
        CHECK(distance(together, alone) <= bar<T>);
        // 2 (n - 1) / n of the gradients leave each rank. Buckets are cut into n slices, some of which are one longer.
        const auto n = static_cast<std::uint64_t>(ranks);
        const double dense = 2.0 * static_cast<double>(n - 1) / static_cast<double>(n) *
                             static_cast<double>(together.parameters * sizeof(T));
        CHECK(std::abs(static_cast<double>(together.wire_bytes_per_step) - dense) <=
              64.0 * static_cast<double>(n * sizeof(T)));
    }
}

TEST_CASE_TEMPLATE("losses do not depend on how a rank's part is cut into micro-batches", T, double, float) {
    const auto text = some_text(64);
    auto o = small_run("ddp", 2);
    o.micro_batch = 6;
    const auto whole = train_on_threads<T>(o, text);
    for (const int sequences : {1, 2, 3}) {
        CAPTURE(sequences);
        o.micro_batch = sequences;
        CHECK(distance(train_on_threads<T>(o, text), whole) <= bar<T>);
    }
}

TEST_CASE("two runs are the same to the last bit; another seed is another run") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 3);
    const auto once = train_on_threads<float>(o, text), again = train_on_threads<float>(o, text);
    CHECK(once.parameter_hash == again.parameter_hash);
    CHECK(once.training == again.training);
    CHECK(once.validation == again.validation);
    o.seed = 2;
    CHECK(train_on_threads<float>(o, text).parameter_hash != once.parameter_hash);
}

TEST_CASE("a stated network takes its time and changes no bit") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 4, 5);
    const auto as_it_is = train_on_threads<float>(o, text);
    o.network = "20Mbit,1ms";
    const auto slow = train_on_threads<float>(o, text);
    CHECK(slow.parameter_hash == as_it_is.parameter_hash);
    CHECK(slow.wire_bytes_per_step == as_it_is.wire_bytes_per_step);
    // A rank cannot have sent its bytes sooner, and no step ends before they are sent.
    CHECK(slow.total_seconds >= 5.0 * static_cast<double>(slow.wire_bytes_per_step) / 2.5e6);
}

TEST_CASE("a stated network is between machines, and every rank is one unless it is said otherwise") {
    tutti::comm::threads::launch(4, [](tutti::comm::threads& world) {
        auto o = short_run("ddp", 4);
        const transformer::host_device<float> device;
        CHECK(device.communicator(world, o).network().between() == tutti::comm::link{});
        o.network = "8Mbit,2ms";
        for (const int nodes : {1, 2, 4}) {
            o.nodes = nodes;
            const auto network = device.communicator(world, o).network();
            CHECK(network.nodes() == nodes);
            CHECK(network.inside() == tutti::comm::link{});
            CHECK(network.between() == tutti::comm::link{2e-3, 1e6});
        }
        o.nodes = 0;
        CHECK(device.communicator(world, o).network().nodes() == 4);
    });
}

TEST_CASE("ranks that share the optimizer's state, gradients and parameters train to the same bits as replicas") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 4, 6);
    o.micro_batch = 3;  // the sums of several micro-batches are rounded in another order where gradients are shared
    o.eval_every = 4;
    const auto folder = std::filesystem::temp_directory_path() / ("tutti-ranks-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const auto saved = [&](const char* pipeline) {
        o.pipeline = pipeline;
        o.save = (folder / "weights.safetensors").string();
        auto r = train_on_threads<float>(o, text);
        std::ifstream file(o.save, std::ios::binary);
        return std::pair(std::move(r), std::string(std::istreambuf_iterator<char>(file), {}));
    };
    const auto [replicas, weights] = saved("ddp");
    CHECK(weights.size() > 4 * replicas.parameters);
    std::vector<std::uint64_t> peaks;
    for (const char* pipeline : {"zero1", "zero2", "zero3"}) {
        CAPTURE(pipeline);
        const auto [shared, same] = saved(pipeline);
        peaks.push_back(shared.peak_bytes);
        CHECK(shared.parameter_hash == replicas.parameter_hash);
        CHECK(shared.training == replicas.training);
        CHECK(shared.validation == replicas.validation);
        CHECK(same == weights);
        o.save.clear();
        o.load = (folder / "weights.safetensors").string();  // trained on, not from random weights
        o.pipeline = "ddp";
        const auto on = train_on_threads<float>(o, text);
        o.pipeline = pipeline;
        CHECK(train_on_threads<float>(o, text).parameter_hash == on.parameter_hash);
        CHECK(on.training.front().second < 0.99 * replicas.training.front().second);
        o.load.clear();
    }
    // All of this model is one bucket. It takes the place of the trainer's values, which are freed, and not hashed in the end:
    // one by one, and their hashes.
    CHECK(peaks[2] == peaks[1] - 8 * (replicas.tensors.size() + 1));
    std::filesystem::remove_all(folder);
}

TEST_CASE("replicas that meet now and then send less, learn, and end equal, the same bits twice") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 4, 20);
    o.tau = 5;
    const auto plain = train_on_threads<float>(o, text);
    for (const char* pipeline : {"local-sgd", "slowmo", "co2", "diloco", "co2-zero"}) {
        CAPTURE(pipeline);
        o.pipeline = pipeline;
        const auto once = train_on_threads<float>(o, text), again = train_on_threads<float>(o, text);
        CHECK(once.parameter_hash == again.parameter_hash);
        CHECK(once.training == again.training);
        CHECK(once.parameter_hash != plain.parameter_hash);
        CHECK(once.training.back().second < 0.97 * once.training.front().second);
        if (o.pipeline != "co2-zero") {
            // A mean in five steps, and one of a few numbers for the gap; with co2 those on their way at the end too.
            CHECK(once.wire_bytes_per_step >= plain.wire_bytes_per_step / 5);
            CHECK(once.wire_bytes_per_step <= plain.wire_bytes_per_step / 4);
        }
    }
    o.pipeline = "co2";
    const auto usual = train_on_threads<float>(o, text);
    const auto with = [&](double beta, const char* gap) {
        o.beta = beta;
        o.gap = gap;
        return train_on_threads<float>(o, text).parameter_hash;
    };
    CHECK(with(0.2, "scalar") == usual.parameter_hash);
    CHECK(with(0.4, "scalar") != usual.parameter_hash);
    CHECK(with(0.2, "constant:1") == with(0.2, "none"));
    CHECK(with(0.2, "constant:2") != with(0.2, "none"));
    CHECK(with(0.2, "elementwise") != with(0.2, "none"));
}

TEST_CASE("synchronous steps are those of ddp, and behind them come rounds") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 4, 12);
    o.tau = 4;
    const auto ddp = train_on_threads<float>(o, text);
    for (const char* pipeline : {"local-sgd", "slowmo", "co2", "diloco", "eager-diloco", "cocod"}) {
        CAPTURE(pipeline);
        o.pipeline = pipeline;
        o.synchronous_steps = 12;
        const auto all = train_on_threads<float>(o, text);
        CHECK(all.parameter_hash == ddp.parameter_hash);
        CHECK(all.training == ddp.training);
        CHECK(all.overlap.rounds == 0);
        o.synchronous_steps = 4;
        const auto some = train_on_threads<float>(o, text);
        CHECK(some.parameter_hash != ddp.parameter_hash);
        // The loss of a step is that of the parameters before it.
        for (std::size_t i = 0; i <= 4; ++i) { CHECK(some.training[i] == ddp.training[i]); }
        CHECK(some.training[5] != ddp.training[5]);
        CHECK(some.overlap.period == 4);
        CHECK(some.overlap.rounds == 1);  // of two the first is left out
    }
    o.pipeline = "co2-zero";
    o.synchronous_steps = 12;
    CHECK(distance(train_on_threads<float>(o, text), ddp) < 1e-5);
}

TEST_CASE("a chosen number of steps is one that hides the average") {
    const auto text = some_text(64);
    auto o = small_run("co2", 2, 20);
    o.tau = 2;
    o.automatic_tau = true;
    CHECK(train_on_threads<float>(o, text).overlap.period >= 1);
    o.network = "40Mbit";
    o.steps = 12;
    const auto slow = train_on_threads<float>(o, text);
    // Each of two ranks sends as many bytes as the average has, or waits longer for the other one.
    const double average = 4.0 * static_cast<double>(slow.parameters) / 5e6;
    CHECK(static_cast<double>(slow.overlap.period) * slow.overlap.step > 0.8 * average);
}

TEST_CASE("what backward computes again changes no bit") {
    const auto text = some_text(64);
    auto o = small_run("ddp", 2, 5);
    const auto once = train_on_threads<float>(o, text);
    for (const int level : {0, 1, 2}) {
        CAPTURE(level);
        o.recompute = level;
        const auto again = train_on_threads<float>(o, text);
        CHECK(again.parameter_hash == once.parameter_hash);
        CHECK(again.training == once.training);
    }
}

TEST_CASE("samples are a function of seed and global index, and cover the training text alone") {
    using namespace transformer;
    const auto text = some_text(16);
    batch whole, part;
    draw(whole, text.training(), 1, 1000, 12, 16);
    for (const std::size_t n : {1u, 2u, 3u, 4u, 6u, 12u}) {
        batch joined;
        for (std::size_t r = 0; r < n; ++r) {
            draw(part, text.training(), 1, 1000 + r * 12 / n, 12 / n, 16);
            joined.in.insert(joined.in.end(), part.in.begin(), part.in.end());
        }
        CHECK(joined.in == whole.in);
    }
    draw(part, text.training(), 2, 1000, 12, 16);
    CHECK(part.in != whole.in);
    for (std::size_t i = 0; i + 1 < whole.in.size(); ++i) {
        if (i % 16 != 15) { CHECK(whole.targets[i] == whole.in[i + 1]); }
    }
    // A text that just fits has two possible samples; its last byte is a target, never beyond the training part.
    const std::vector<std::uint16_t> tiny{0, 1, 2, 3, 4, 5};
    std::array<int, 3> seen{};
    for (std::uint64_t i = 0; i < 200; ++i) {
        draw(part, tokens(tiny).first(5), 1, i, 1, 3);
        REQUIRE(part.in.front() < 2);
        ++seen[part.in.front()];
        CHECK(part.targets.back() == part.in.front() + 3);
    }
    CHECK(seen[0] > 60);
    CHECK(seen[1] > 60);
}

TEST_CASE("validation covers the whole text once, whatever ranks, micro-batch and remainder") {
    using namespace transformer;
    const auto text = some_text(16);
    // 20 windows of 16 and a rest of 7, scored one at a time, is the reference
    const tokens validation = text.validation().first(20 * 16 + 7 + 1);
    struct fixed {
        tutti::strategy::parameters<double>& p;
        tutti::view<const double> before_use(std::size_t i) { return p[i].value; }
        void after_use(std::size_t) {}
    };
    const configuration c{.vocabulary = 256, .context = 16, .layers = 1, .heads = 2, .width = 16};
    double expected = 0;
    {
        host_model<double> net(c, 1, 1);
        fixed weights{net.parameters()};
        for (std::size_t w = 0; w <= 20; ++w) {
            const std::size_t length = w < 20 ? 16 : 7;
            expected += net.forward(weights, validation.subspan(w * 16, length), validation.subspan(w * 16 + 1, length),
                                    static_cast<int>(length));
        }
        expected /= 20 * 16 + 7;
    }
    for (const int ranks : {1, 2, 3, 4}) {
        for (const int at_once : {1, 3, 50}) {
            CAPTURE(ranks);
            CAPTURE(at_once);
            tutti::comm::threads::launch(ranks, [&](tutti::comm::threads& world) {
                host_model<double> net(c, at_once, 1);
                fixed weights{net.parameters()};
                const double loss = evaluate(net, weights, validation, world);
                CHECK(std::abs(loss / expected - 1) < 1e-13);
            });
        }
    }
}

TEST_CASE("a run that diverges ends with an error on every rank") {
    auto o = small_run("ddp", 2, 200);
    o.learning_rate = 1e3;  // times the weight decay: weights grow a hundredfold in a step
    int ended = 0;
    std::mutex mutex;
    const auto text = some_text(64);
    const auto run = [&] {
        tutti::comm::threads::launch(2, [&](tutti::comm::threads& rank) {
            transformer::any_ranks world(rank);
            try {
                (void)transformer::run_on_cpu<float>(world, o, text, tutti::clock_type::now());
            } catch (const std::runtime_error&) {
                const std::lock_guard lock(mutex);
                ++ended;
                throw;
            }
        });
    };
    CHECK_THROWS_WITH_AS(run(), doctest::Contains("not finite"), std::runtime_error);
    CHECK(ended == 2);
}

}  // namespace
