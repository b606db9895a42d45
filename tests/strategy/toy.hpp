// A toy trainer over the strategy interface: least squares with a known gradient, elementwise in every parameter.
// Needs strategy/strategy. What a sample contributes is a function of its global index alone, as in a real trainer.
#pragma once

#include <algorithm>  // shuffle, copy
#include <chrono>     // delays
#include <cstddef>    // size_t, byte
#include <numeric>    // iota
#include <random>     // orders
#include <string>     // names
#include <thread>     // delays
#include <vector>     // storage

#include <doctest/doctest.h>  // requirements

#include "support/oracle.hpp"           // random elements
#include <tutti/core/error.hpp>         // usage_error
#include <tutti/strategy/strategy.hpp>  // parameters

namespace tutti::test {

/// What an error of f says.
template <class E = usage_error, class F> std::string refusal(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); }
    return "no such error";
}

using saved_state = std::vector<std::vector<std::byte>>;
/// All bytes of a strategy's state.
template <class S> saved_state saved(S& s) {
    saved_state all;
    for (const auto& e : s.state()) { all.emplace_back(e.data.begin(), e.data.end()); }
    return all;
}
/// Into the first of its entries, as many as were saved.
template <class S> void restore(S& s, const saved_state& from) {
    const auto entries = s.state();
    REQUIRE(entries.size() >= from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
        REQUIRE(entries[i].data.size() == from[i].size());
        std::copy(from[i].begin(), from[i].end(), entries[i].data.begin());
    }
    s.restored();
}

/// Where a toy keeps its tensors: one behind the other, each by itself, or nowhere (gradients only).
enum class layout { together, scattered, none };

/// Parameters of odd sizes with random values, every third without decay.
template <class T> class toy {
    std::vector<std::vector<T>> memory_;

    std::vector<view<T>> place(layout how) {
        std::vector<view<T>> views;
        std::size_t offset = 0;
        if (how == layout::together) { memory_.emplace_back(std::reduce(sizes.begin(), sizes.end())); }
        const std::size_t whole = memory_.size() - 1;
        for (const std::size_t n : sizes) {
            if (how == layout::together) { views.push_back(view<T>(memory_[whole]).sub(offset, n)); }
            // A gap behind each: neighbors must not look contiguous by accident.
            if (how == layout::scattered) { views.push_back(view<T>(memory_.emplace_back(n + 3)).sub(0, n)); }
            if (how == layout::none) { views.emplace_back(); }
            offset += n;
        }
        return views;
    }

public:
    static inline const std::vector<std::size_t> sizes{5, 64, 1, 33, 200, 7, 0, 129, 12};
    strategy::parameters<T> parameters;

    explicit toy(layout values = layout::together, layout gradients = layout::none, std::uint64_t seed = 1) {
        const auto value = place(values);
        const auto gradient = place(gradients);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            for (std::size_t e = 0; e < sizes[i]; ++e) {
                value[i][e] = static_cast<T>(random_element<float>(seed + i, e));
            }
            parameters.push_back({"p" + std::to_string(i), {sizes[i]}, i % 3 != 0, value[i], gradient[i]});
        }
    }

    /// All values, one parameter after the other.
    [[nodiscard]] std::vector<T> values() const {
        std::vector<T> all;
        for (const auto& p : parameters) { all.insert(all.end(), p.value.begin(), p.value.end()); }
        return all;
    }
};

/// d loss(sample) / d x, the loss being curvature (x - target)^2 / 2.
inline double slope(std::uint64_t sample, std::size_t parameter, std::size_t element, double x) {
    const double curvature = 1.5 + random_element<double>(sample * 131 + parameter, element);
    const double target = random_element<double>(sample * 173 + parameter + 7, element);
    return curvature * (x - target);
}

/// How a rank announces its gradients.
struct announcing {
    std::uint32_t shuffle = 0;  ///< 0: last to first, as backward does; else a random order from this seed
    bool delays = false;        ///< now and then a pause
};

/// One micro-batch: forward and backward over samples [first, first + count). The loss is the mean over them, times
/// `scale`.
template <class S> void backward(S& s, std::uint64_t first, std::uint64_t count, double scale, announcing how = {}) {
    using T = typename S::element_type;
    std::vector<std::size_t> order(toy<T>::sizes.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    std::mt19937 random(how.shuffle + static_cast<std::uint32_t>(first));
    if (how.shuffle != 0) { std::shuffle(order.begin(), order.end(), random); }
    for (const std::size_t i : order) {
        const auto x = s.before_use(i);
        const auto g = s.gradient(i);
        for (std::size_t e = 0; e < g.size(); ++e) {
            double sum = 0;
            for (std::uint64_t k = 0; k < count; ++k) { sum += slope(first + k, i, e, static_cast<double>(x[e])); }
            g[e] = static_cast<T>(static_cast<double>(g[e]) + scale * sum / static_cast<double>(count));
        }
        s.after_use(i);
        if (how.delays && random() % 8 == 0) { std::this_thread::sleep_for(std::chrono::microseconds(random() % 500)); }
        s.gradient_ready(i);
    }
}

/// The toy with matrices among its tensors; the rest are vectors.
inline toy<float> matrices() {
    toy<float> t;
    t.parameters[1].shape = {8, 8};
    t.parameters[3].shape = {3, 11};
    t.parameters[4].shape = {10, 20};
    t.parameters[7].shape = {3, 43};
    return t;
}

/// Of a step whose gradients are functions of step, rank and element alone.
inline float known_gradient(std::uint64_t step, int rank, std::size_t element) {
    return random_element<float>(1000 * (step + 1) + static_cast<std::uint64_t>(rank), element);
}
/// Takes it on rank `rank` of `ranks`, and off `plain` what a plain step over all of them would be.
template <class S>
void known_step(S& s, std::uint64_t step, int rank, int ranks, float rate, std::vector<double>& plain) {
    s.begin({});
    std::size_t at = 0;
    for (std::size_t p = 0; p < toy<float>::sizes.size(); ++p) {
        for (std::size_t e = 0; e < toy<float>::sizes[p]; ++e, ++at) {
            s.gradient(p)[e] = known_gradient(step, rank, at);
            for (int r = 0; r < ranks; ++r) { plain[at] -= rate * double{known_gradient(step, r, at)} / ranks; }
        }
        s.gradient_ready(p);
    }
    s.step({rate});
}
/// Steps that do not look at values: gradients of values that are not finite would skip them.
template <class S> void blind_steps(S& s, int count) {
    for (int k = 0; k < count; ++k) {
        s.begin({});
        for (std::size_t i = toy<float>::sizes.size(); i-- > 0;) { s.gradient_ready(i); }
        s.step({.learning_rate = 0.1});
    }
}

/// Global batches of `batch` samples over `ranks` ranks and `micro` micro-batches.
struct recipe {
    int steps = 6;
    std::uint64_t batch = 12;
    int micro = 1;
    double learning_rate = 0.05;
    double clip_norm = 1.0;
    announcing how{};
    int first_step = 0;
};
template <class S> std::vector<strategy::step_result> train(S& s, int rank, int ranks, const recipe& r) {
    std::vector<strategy::step_result> results;
    const std::uint64_t part = r.batch / static_cast<std::uint64_t>(ranks * r.micro);
    for (int step = r.first_step; step < r.first_step + r.steps; ++step) {
        for (int m = 0; m < r.micro; ++m) {
            s.begin({m, r.micro});
            const auto first =
                static_cast<std::uint64_t>(step) * r.batch + static_cast<std::uint64_t>(rank * r.micro + m) * part;
            backward(s, first, part, 1.0 / r.micro, r.how);
        }
        results.push_back(s.step({r.learning_rate / (1 + step), r.clip_norm}));
    }
    return results;
}

}  // namespace tutti::test
