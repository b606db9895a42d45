// What the README shows of strategies and checkpoints, word for word (readme.py compares), compiled and run on threads.
#include <cmath>      // sin
#include <cstdint>    // random state
#include <stdexcept>  // failures of ranks
#include <string>     // names
#include <utility>    // move
#include <vector>     // tensors

#include <doctest/doctest.h>

#include <support/scratch_folder.hpp>  // checkpoints
#include <tutti/checkpoint/checkpoint.hpp>
#include <tutti/checkpoint/safetensors.hpp>
#include <tutti/compress/compress.hpp>
#include <tutti/strategy/compressed_mean.hpp>
#include <tutti/strategy/local_update.hpp>
#include <tutti/strategy/selected_mean.hpp>
#include <tutti/strategy/zero.hpp>
#include <tutti/tutti.hpp>

namespace {

using namespace tutti;

// A model of two tensors, each drawn towards one of its own: the loss is half the sum of squares of what is missing.
struct quadratic {
    std::vector<float> weight = std::vector<float>(32 * 64), bias = std::vector<float>(32);
    std::vector<float> seen[2];

    strategy::parameters<float> parameters() {
        return {{"weight", {32, 64}, true, view<float>(weight), {}}, {"bias", {32}, true, view<float>(bias), {}}};
    }
    static float target(std::size_t i, std::size_t k) { return std::sin(static_cast<float>(i + 3 * k)); }
    void forward(std::size_t i, view<const float> value) { seen[i].assign(value.begin(), value.end()); }
    void backward(std::size_t i, view<const float> value, view<float> gradient) const {
        for (std::size_t k = 0; k < value.size(); ++k) { gradient[k] += value[k] - target(i, k); }
    }
    double loss() const {
        double sum = 0;
        for (std::size_t i = 0; i < 2; ++i) {
            for (std::size_t k = 0; k < seen[i].size(); ++k) { sum += std::pow(seen[i][k] - target(i, k), 2) / 2; }
        }
        return sum;
    }
};

template <strategy::strategy Strategy, class Model> void train(Strategy& replicas, Model& model, int steps) {
    auto list = model.parameters();  // name, shape, decay, value and gradient of each tensor
    replicas.attach(list);           // ranks agree on the list, or it throws
    for (int step = 0; step < steps; ++step) {
        replicas.begin({});  // or {.index = m, .count = n}: micro-batch m of n
        for (std::size_t i = 0; i < list.size(); ++i) {
            model.forward(i, replicas.before_use(i));  // zero<3> gathers the tensor, and prefetches the next
            replicas.after_use(i);
        }
        for (std::size_t i = list.size(); i-- > 0;) {
            model.backward(i, replicas.before_use(i), replicas.gradient(i));
            replicas.after_use(i);
            replicas.gradient_ready(i);  // its bucket may leave, behind the rest of backward
        }
        replicas.step({.learning_rate = 0.05});
    }
    replicas.finish();  // replicas are equal from here on
}

// Four ranks train a model of their own each with what `make` makes for them: the loss falls, and ends the same.
template <class Make> void learns(Make make) {
    std::vector<double> losses(4);
    comm::threads::launch(4, [&](comm::threads& world) {
        quadratic model;
        auto replicas = make(world);
        train(replicas, model, 80);
        losses[static_cast<std::size_t>(world.rank())] = model.loss();
    });
    for (const double loss : losses) { CHECK(loss < 20); }
}

TEST_CASE("ZeRO, stage 3") {
    learns([](comm::threads& world) {
        strategy::zero<3, comm::threads, optimize::adamw> replicas(world.duplicate("zero"), {.weight_decay = 0});
        return replicas;
    });
}

TEST_CASE("CO2 between nodes, ZeRO inside") {
    learns([](comm::threads& world) {
        const std::vector<int> node{0, 0, 1, 1}, place{0, 1, 0, 1};  // two nodes of two ranks
        strategy::zero<2, comm::threads, optimize::adamw> inside(*world.split(node, "inside"));
        strategy::co2<comm::threads, decltype(inside)> replicas(*world.split(place, "across"), std::move(inside),
                                                                {.period = 8, .momentum = 0.2});
        return replicas;
    });
}

TEST_CASE("CO2 between ranks, in 4 bits") {
    learns([](comm::threads& world) {
        strategy::local_update replicas(world.duplicate("co2"), strategy::local<optimize::adamw>(comm::self<>{}),
                                        strategy::co2_method{.period = 8, .momentum = 0.2}, {},
                                        strategy::compressed_mean<compress::quantize>{.level = 4});
        return replicas;
    });
}

TEST_CASE("compressed gradients, at one level and at chosen ones") {
    learns([](comm::threads& world) {
        // Four bits an element; what that loses is sent along with the next gradient.
        strategy::data_parallel uniform(world.duplicate("4 bits"), optimize::adamw{}, {},
                                        strategy::compressed_mean<compress::quantize>{.level = 4});
        // L-GreCo: every 20 steps each matrix gets the bits that together lose no more than 4 bits for all.
        strategy::data_parallel replicas(
            world.duplicate("l-greco"), optimize::adamw{}, {},
            strategy::selected_mean<compress::quantize>{.mean = {.level = 4},
                                                        .levels = {2, 3, 4, 5, 6, 7, 8},
                                                        .steps = {.warmup = 0, .period = 20, .window = 10}});
        return replicas;
    });
}

TEST_CASE("a checkpoint comes back, and weights go to other programs") {
    const test::scratch_folder own;
    const std::string folder = own.path().string();
    for (const std::uint64_t expected : {0u, 7u}) {
        comm::threads::launch(2, [&](comm::threads& world) {
            quadratic model;
            strategy::zero<3, comm::threads, optimize::adamw> replicas(world.duplicate("zero"));
            auto list = model.parameters();
            replicas.attach(list);
            std::vector<std::uint64_t> seeds{static_cast<std::uint64_t>(world.rank())};
            std::uint64_t step = 0;

            checkpoint::contents<host_queue> contents;
            contents.add(replicas.state());  // its entries say whose they are
            contents.add(state_of("random", view<std::uint64_t>(seeds)), ownership::local);  // each rank its own
            if (const auto found = checkpoint::load(world, folder, {}, contents)) {          // the newest that is whole
                replicas.restored();
                step = found->step;
            }
            if (step != expected) { throw std::runtime_error("not resumed"); }
            step = 7;
            checkpoint::saver saver(world.duplicate("checkpoints"), folder, {.keep = 3});
            saver.save(step, contents);  // copies and returns; a lane writes
            static_cast<void>(saver.wait());
        });
    }
    std::vector<float> table{1, 2, 3, 4}, again(4);
    const std::string path = folder + "/tuned.safetensors";
    const std::vector weights{state_of("wte.weight", view<float>(table), {2, 2})};
    checkpoint::write_safetensors(path, weights, {.metadata = {{"format", "pt"}}});  // whole or not at all
    const checkpoint::safetensors_file file(path);
    file.read("wte.weight", view<float>(again));  // from F32, F16, BF16 or F64
    CHECK(again == table);
}

}  // namespace
