// Fine-tuning by forward passes alone, with a model of your own: its blocks stay on the host and stream through two slots
// of the device, and two ranks each make one of the two passes of a direction. The device is the host itself here.
#include <cmath>    // tanh
#include <cstdint>  // numbers of tensors
#include <vector>   // activations

#include <fmt/core.h>

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
    // One set for each branch: a rank has one side of four directions at a time.
    std::vector<std::vector<float>> x = std::vector<std::vector<float>>(4, std::vector<float>(rows* width));

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
    // Tensor numbers choose the random directions: each is there once.
    zeroth::model_shape shape{{{.tensor = 0, .count = width}}, {}, {{.tensor = 1, .count = width}}};
    for (std::uint32_t b = 0; b < blocks; ++b) { shape.blocks.push_back({{.tensor = 2 + b, .count = width * width}}); }

    comm::threads::launch(2, [&](comm::threads& world) {
        zeroth::pinned_store<float, host_queue> store(zeroth::model_layout(shape, sizeof(float)));
        for (std::size_t m = 0; m < store.layout().modules(); ++m) {  // the head, the blocks, the tail
            std::vector<float> trained(store.layout().slices(m)[0].count);
            for (std::size_t i = 0; i < trained.size(); ++i) { trained[i] = 0.3f * noise(100 + m, i); }
            store.write(m, 0, trained);
        }
        network model;
        zeroth::offload pipeline(host_queue(), model, store, {.slot_count = 2});
        zeroth::replicated tuning(world.duplicate("tuning"), pipeline, {.epsilon = 1e-3, .directions = 4, .seed = 1},
                                  {.sides = 2, .micro_batches = 3});
        double first = 0, last = 0;
        for (int step = 0; step < 200; ++step) {
            last = tuning.step(2e-3).loss_plus;
            if (step == 0) { first = last; }
        }
        pipeline.flush();  // now the store has every update
        if (world.rank() == 0) { fmt::print("loss {:.3f}, after 200 steps {:.3f}\n", first, last); }
    });
}
