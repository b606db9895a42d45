// Fine-tuning by forward passes alone, with a model of your own: its blocks stay on the host and stream through two slots
// of the device, and two ranks each make one of the two passes of a direction. The device is the host itself here.
#include <cmath>    // tanh
#include <cstddef>  // sizes
#include <string>   // names of tensors
#include <vector>   // activations

#include <fmt/format.h>

#include <tutti/tutti.hpp>
#include <tutti/zeroth/zeroth.hpp>

using namespace tutti;
constexpr std::size_t rows = 16, width = 8, blocks = 6;

// Stands for data and for trained weights.
float noise(std::size_t stream, std::size_t i) {
    return std::sin(12.9f * static_cast<float>(stream) + 78.2f * static_cast<float>(i));
}

// x = scale * input; x += tanh(x W) in every block; the loss is how far x . v is from the sum of the inputs.
struct network {
    using weights = zeroth::module_weights<float, host_memory>;
    std::vector<std::vector<float>> x;  // one set for each branch: passes that run side by side

    explicit network(std::size_t branches) : x(branches, std::vector<float>(rows * width)) {}

    void head(host_queue, weights w, std::size_t branch, std::size_t micro_batch) {
        for (std::size_t i = 0; i < rows * width; ++i) { x[branch][i] = w[0][i % width] * noise(micro_batch, i); }
    }
    void block(host_queue, std::size_t, weights w, std::size_t branch, std::size_t) {
        const std::vector<float> in = x[branch];
        for (std::size_t i = 0; i < rows * width; ++i) {
            float sum = 0;
            for (std::size_t k = 0; k < width; ++k) { sum += in[i / width * width + k] * w[0][k * width + i % width]; }
            x[branch][i] += std::tanh(sum);
        }
    }
    void tail(host_queue, weights w, std::size_t branch, std::size_t micro_batch, view<double> loss) {
        loss[0] = 0;
        for (std::size_t r = 0; r < rows; ++r) {
            double error = 0;
            for (std::size_t i = r * width; i < (r + 1) * width; ++i) {
                error += x[branch][i] * w[0][i % width] - noise(micro_batch, i);
            }
            loss[0] += error * error / rows;
        }
        loss[1] = rows;  // terms of this mean: what it weighs beside other micro-batches
    }
};

int main() {
    zeroth::model_shape shape{.head = {{.count = width, .name = "scale"}},
                              .tail = {{.count = width, .name = "readout"}}};
    std::vector<std::string> names{"scale"};
    for (std::size_t b = 0; b < blocks; ++b) {
        names.push_back(fmt::format("blocks.{}.weight", b));
        shape.blocks.push_back({{.count = width * width, .name = names.back()}});
    }
    names.emplace_back("readout");
    const zeroth::estimator how{.epsilon = 1e-3, .directions = 4, .seed = 1};
    const zeroth::division shared{.sides = 2, .micro_batches = 3};  // two ranks make one pass of a direction each

    comm::threads::launch(2, [&](comm::threads& world) {
        zeroth::pinned_store<float, host_queue> store(zeroth::model_layout(shape, sizeof(float)));
        for (std::size_t t = 0; t < names.size(); ++t) {
            std::vector<float> trained(store.layout().count(names[t]));
            for (std::size_t i = 0; i < trained.size(); ++i) { trained[i] = 0.3f * noise(100 + t, i); }
            store.write(names[t], trained);
        }
        network model(zeroth::branches_of(how, shared));
        zeroth::offload pipeline(host_queue(), model, store, {.slot_count = 2});
        zeroth::replicated tuning(world.duplicate("tuning"), pipeline, how, shared);
        double first = 0, last = 0;
        for (int step = 0; step < 200; ++step) {
            last = tuning.step(2e-3).loss_plus;
            if (step == 0) { first = last; }
        }
        pipeline.flush();  // now the store has every update
        if (world.rank() == 0) { fmt::print("loss {:.3f}, after 200 steps {:.3f}\n", first, last); }
    });
}
