// A toy for tests of zeroth: weights in three tensors, a loss that is quadratic in them, micro-batches with targets and
// numbers of terms of their own; and the steps of one rank.
// Needs zeroth.
#pragma once

#include <cstddef>     // size_t
#include <cstdint>     // terms
#include <functional>  // a loss that goes wrong
#include <limits>      // nan
#include <vector>      // weights

#include <support/oracle.hpp>          // random_element
#include <tutti/comm/self.hpp>         // one rank
#include <tutti/zeroth/in_memory.hpp>  // in_memory
#include <tutti/zeroth/replicate.hpp>  // replicated

namespace tutti::test {

using zeroth::loss_value;

/// Mean over dimensions of curvature (w - target)^2 / 2; the target is the micro-batch's. Sums in double.
template <class T> struct quadratic {
    std::function<double(std::size_t, double)> spoiled{};  // (micro-batch, loss) -> loss

    static double curvature(std::size_t i) { return 0.5 + static_cast<double>(i % 7) / 4; }
    static double target(std::size_t i, std::size_t micro_batch) {
        return 0.1 * static_cast<double>(random_element<float>(100 + micro_batch, i));
    }
    static std::uint32_t terms(std::size_t micro_batch) {
        return static_cast<std::uint32_t>(17 + micro_batch * 29 % 50);
    }

    loss_value operator()(view<const T> w, std::size_t micro_batch) const {
        double sum = 0;
        for (std::size_t i = 0; i < w.size(); ++i) {
            const double d = static_cast<double>(w[i]) - target(i, micro_batch);
            sum += 0.5 * curvature(i) * d * d;
        }
        const double loss = sum / static_cast<double>(w.size());
        return {spoiled ? spoiled(micro_batch, loss) : loss, terms(micro_batch)};
    }
};

inline constexpr std::size_t toy_size = 61;
inline std::vector<zeroth::tensor_slice> toy_slices() {
    return {{.tensor = 0, .offset = 0, .count = 40},
            {.tensor = 1, .offset = 40, .count = 5, .decayed = false},
            {.tensor = 2, .offset = 45, .count = 16}};
}
template <class T> std::vector<T> toy_weights(std::size_t n = toy_size) {
    std::vector<T> w(n);
    for (std::size_t i = 0; i < n; ++i) { w[i] = static_cast<T>(random_element<float>(5, i)); }
    return w;
}

template <class T, class Optimizer = zeroth::no_optimizer>
using toy_pipeline = zeroth::in_memory<T, host_queue, quadratic<T>, Optimizer>;

/// What a run leaves: the results of its steps, and its weights.
template <class T> struct toy_run {
    std::vector<zeroth::step_result> steps;
    std::vector<T> weights;
    std::uint64_t skipped = 0, flat = 0, scalar_bytes = 0;
};

/// Steps of one rank of a communicator, with a learning rate that changes.
template <class T, class C, class Optimizer = zeroth::no_optimizer>
toy_run<T> toy_steps(C comm, std::size_t steps, const zeroth::estimator& how, const zeroth::division& divided = {},
                     double rate = 0.02, quadratic<T> loss = {}, zeroth::applied when = zeroth::applied::at_once,
                     Optimizer optimizer = {}) {
    toy_run<T> run;
    run.weights = toy_weights<T>();
    toy_pipeline<T, Optimizer> weights(host_queue(), view<T>(run.weights), toy_slices(), std::move(loss), when,
                                       optimizer);
    zeroth::replicated<C, toy_pipeline<T, Optimizer>> driver(std::move(comm), weights, how, divided);
    for (std::size_t k = 0; k < steps; ++k) {
        run.steps.push_back(driver.step(rate / (1 + 0.1 * static_cast<double>(k % 10))));
    }
    weights.flush();
    run.skipped = driver.skipped();
    run.flat = driver.flat();
    run.scalar_bytes = driver.scalar_bytes();
    return run;
}

/// Same bits of losses, derivatives and weights.
template <class T> bool same_run(const toy_run<T>& a, const toy_run<T>& b) {
    if (a.steps.size() != b.steps.size() || !same_bytes(a.weights, b.weights)) { return false; }
    for (std::size_t k = 0; k < a.steps.size(); ++k) {
        const auto &x = a.steps[k], &y = b.steps[k];
        if (!same_bytes(x.derivatives, y.derivatives) || x.kept != y.kept || x.skipped != y.skipped) { return false; }
        const std::vector<double> l{x.loss_plus, x.loss_other, x.move}, m{y.loss_plus, y.loss_other, y.move};
        if (!same_bytes(l, m)) { return false; }
    }
    return true;
}

}  // namespace tutti::test
