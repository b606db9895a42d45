// One model on four ranks: two stages of a pipeline, each a pair of layers that two tensor ranks share, trained by 1F1B.
#include <cmath>    // sin
#include <utility>  // exchange
#include <vector>   // weights, activations

#include <fmt/core.h>

#include <tutti/parallel/parallel.hpp>
#include <tutti/tutti.hpp>

using namespace tutti;
using floats = std::vector<float>;
constexpr std::size_t rows = 4, width = 8, hidden = 16;  // rows of a micro-batch
constexpr int micro_batches = 6;

floats waves(std::size_t count, int what) {  // stands for data and for initial weights
    floats x(count);
    for (std::size_t i = 0; i < count; ++i) {
        x[i] = 0.5f * std::sin(static_cast<float>(what) + 7.7f * static_cast<float>(i));
    }
    return x;
}

// A stage as one rank has it: relu(in U) D, with its share of the columns of U and of the rows of D.
struct stage {
    parallel::tensor_group<comm::threads>& group;
    parallel::column_linear<comm::threads, float> up{group, width, hidden};
    parallel::row_linear<comm::threads, float> down{group, hidden, width};
    floats u = waves(up.weights(), 100 + group.rank()), d_u = floats(u.size());
    floats d = waves(down.weights(), 200 + group.rank()), d_d = floats(d.size());
    std::vector<floats> inner = std::vector<floats>(micro_batches), error = inner;  // until their backward
    double loss = 0;

    void forward(const parallel::stage_call& call, view<const float> in, view<float> out) {
        const floats sample = waves(rows * width, call.micro_batch);
        floats& h = inner[static_cast<std::size_t>(call.micro_batch)];
        h.resize(rows * up.outputs());
        up.forward(rows, in.empty() ? view<const float>(sample) : in, u, {}, h);
        for (float& x : h) { x = x > 0 ? x : 0; }
        if (!out.empty()) { return down.forward(rows, h, d, {}, out); }
        floats& e = error[static_cast<std::size_t>(call.micro_batch)];  // the last stage: how far from the sample
        e.resize(rows * width);
        down.forward(rows, h, d, {}, e);
        for (std::size_t i = 0; i < e.size(); ++i) {
            e[i] -= sample[i];
            loss += e[i] * e[i] / (2.0 * rows * micro_batches);
        }
    }
    void backward_input(const parallel::stage_call& call, view<const float> in, view<const float> d_out,
                        view<float> d_in) {
        const floats sample = waves(rows * width, call.micro_batch);
        const floats& h = inner[static_cast<std::size_t>(call.micro_batch)];
        floats& e = error[static_cast<std::size_t>(call.micro_batch)];
        for (float& x : e) { x /= rows * micro_batches; }
        floats d_h(h.size()), unused(rows * width);
        down.backward(rows, h, d, d_out.empty() ? view<const float>(e) : d_out, d_h, d_d, {});
        for (std::size_t i = 0; i < h.size(); ++i) { d_h[i] = h[i] > 0 ? d_h[i] : 0; }
        up.backward(rows, in.empty() ? view<const float>(sample) : in, u, d_h,
                    d_in.empty() ? view<float>(unused) : d_in, d_u, {});
    }
    void backward_weight(const parallel::stage_call&, view<const float>, view<const float>) {}  // added to above
};

int main() {
    comm::threads::launch(4, [](comm::threads& world) {
        const parallel::mesh grid({.pipeline = 2, .tensor = 2}, world.size());
        parallel::tensor_group layers(split_along(world, grid, parallel::dimension::tensor));
        parallel::pipeline<comm::threads, float> pipe(split_along(world, grid, parallel::dimension::pipeline),
                                                      parallel::one_forward_one_backward(2, micro_batches),
                                                      {.elements = {rows * width}});
        stage mine{layers};  // yours: forward, backward_input, backward_weight
        for (int step = 0; step <= 100; ++step) {
            mine.loss = 0;
            pipe.run(mine);
            if (step % 100 == 0 && world.rank() == 2) { fmt::print("step {}: loss {:.3f}\n", step, mine.loss); }
            for (std::size_t i = 0; i < mine.u.size(); ++i) { mine.u[i] -= 0.02f * std::exchange(mine.d_u[i], 0.0f); }
            for (std::size_t i = 0; i < mine.d.size(); ++i) { mine.d[i] -= 0.02f * std::exchange(mine.d_d[i], 0.0f); }
        }
    });
}
