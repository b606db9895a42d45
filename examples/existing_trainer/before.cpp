// A small trainer as one finds them: it owns its tensors, its loop and its optimizer, and runs in one process.
// after.cpp is the same trainer with tutti's data_parallel; compare the two.
#include <cmath>
#include <string>
#include <vector>

#include <fmt/core.h>

struct tensor {
    std::string name;
    std::vector<float> value;
    std::vector<float> gradient;
    tensor(std::string n, std::size_t size) : name(std::move(n)), value(size), gradient(size) {
        for (std::size_t i = 0; i < size; ++i) { value[i] = std::sin(12.9898f * static_cast<float>(i + 1)) * 0.7f; }
    }
};

// y = v * tanh(w x + b) + c, fitted to a sine
struct network {
    static constexpr std::size_t width = 32;
    tensor w{"w", width}, b{"b", width}, v{"v", width}, c{"c", 1};
    std::vector<tensor*> tensors() { return {&w, &b, &v, &c}; }

    float loss(float x, float weight) {  // adds the gradient of weight * squared error
        float hidden[width];
        float y = c.value[0];
        for (std::size_t j = 0; j < width; ++j) {
            hidden[j] = std::tanh(w.value[j] * x + b.value[j]);
            y += v.value[j] * hidden[j];
        }
        const float error = y - std::sin(3 * x);
        const float dy = 2 * weight * error;
        c.gradient[0] += dy;
        for (std::size_t j = 0; j < width; ++j) {
            v.gradient[j] += dy * hidden[j];
            const float dh = dy * v.value[j] * (1 - hidden[j] * hidden[j]);
            w.gradient[j] += dh * x;
            b.gradient[j] += dh;
        }
        return weight * error * error;
    }
};

float sample(int i) { return std::remainder(0.618034f * static_cast<float>(i), 2.0f); }

void train(int rank, int ranks) {
    constexpr int batch = 64;
    const float rate = 0.05f;
    network net;
    for (int step = 0; step < 2000; ++step) {
        for (tensor* t : net.tensors()) { t->gradient.assign(t->gradient.size(), 0.0f); }
        for (int i = rank; i < batch; i += ranks) {  // this rank's part of the batch
            net.loss(sample(step * batch + i), static_cast<float>(ranks) / static_cast<float>(batch));
        }
        for (tensor* t : net.tensors()) {
            for (std::size_t i = 0; i < t->value.size(); ++i) { t->value[i] -= rate * t->gradient[i]; }
        }
    }
    float loss = 0;
    for (int i = 0; i < batch; ++i) { loss += net.loss(sample(i), 1.0f / static_cast<float>(batch)); }
    if (rank == 0) { fmt::print("loss {:.4f}\n", loss); }
}

int main() {
    // options would be read here
    train(0, 1);
}
