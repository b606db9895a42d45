// A run of the toy chain: the same steps by an offload pipeline and by the reference, compared by bits.
// Needs chain.hpp and doctest.
#pragma once

#include <cmath>    // isfinite
#include <cstddef>  // size_t
#include <cstdint>  // seeds
#include <cstring>  // memcmp
#include <vector>   // losses, weights

#include <doctest/doctest.h>  // checks

#include <tutti/zeroth/offload.hpp>  // under test

#include "chain.hpp"  // model, reference

namespace tutti::test {

// How the steps go, the same for both.
struct trial {
    std::size_t blocks = 3;
    std::size_t steps = 4;
    std::vector<float> signs{1, -1};  // probes of a direction
    std::size_t directions = 1;
    std::uint64_t seed = 0;
    zeroth::distribution kind = zeroth::distribution::normal;
    double weight_decay = 0.1;
    static constexpr double epsilon = 1e-2;

    [[nodiscard]] zeroth::direction direction(std::size_t step, std::size_t k) const {
        return {seed, step, static_cast<std::uint32_t>(k), kind};
    }
    [[nodiscard]] std::vector<zeroth::probe> probes(std::size_t step) const {
        std::vector<zeroth::probe> all;
        for (std::size_t k = 0; k < directions; ++k) {
            for (const float s : signs) { all.push_back({direction(step, k), static_cast<double>(s) * epsilon}); }
        }
        return all;
    }
    // Another learning rate every step. Step 1 has a gradient of exactly 0, which still decays; step 2 is skipped.
    [[nodiscard]] std::vector<zeroth::pending_update> updates(std::size_t step,
                                                              const std::vector<zeroth::loss_value>& losses) const {
        if (step == 2) { return {}; }
        std::vector<zeroth::pending_update> all;
        for (std::size_t k = 0; k < directions; ++k) {
            const double first = losses[k * signs.size()].mean;
            const double other = signs.size() > 1 ? losses[k * signs.size() + 1].mean : 1.0;
            const double g = step == 1 ? 0 : (first - other) / (2 * epsilon * static_cast<double>(directions));
            all.push_back({direction(step, k), g, 0.02 / static_cast<double>(step + 1), weight_decay});
        }
        return all;
    }
};

template <class T> struct trace_of {
    std::vector<double> losses;
    chain_reference<T> weights;
};

// `between(step, weights)` sees the weights after each step.
template <class T, class Between, queue Q = host_queue>
trace_of<T> by_reference(const trial& t, Between between, Q q = {}) {
    trace_of<T> r{{}, chain_reference<T>({t.blocks})};
    for (std::size_t step = 0; step < t.steps; ++step) {
        std::vector<zeroth::loss_value> losses;
        for (const zeroth::probe& p : t.probes(step)) {
            losses.push_back({r.weights.loss(q, p, step), 1});
            r.losses.push_back(losses.back().mean);
        }
        r.weights.update(t.updates(step, losses));
        between(step, r.weights);
    }
    return r;
}
template <class T> trace_of<T> by_reference(const trial& t) {
    return by_reference<T>(t, [](std::size_t, const chain_reference<T>&) {});
}

template <class T, queue Q> void fill(zeroth::block_store<T, Q>& store, const chain_reference<T>& from) {
    for (std::size_t m = 0; m < store.layout().modules(); ++m) {
        for (std::size_t k = 0; k < store.layout().slices(m).size(); ++k) {
            store.write(m, k, view<const T>(from.values(store.layout().slices(m)[k].tensor)));
        }
    }
}

// The elements of every tensor that the store has are those of `expected`, bit by bit.
template <class T, queue Q> bool holds(zeroth::block_store<T, Q>& store, const chain_reference<T>& expected) {
    for (std::size_t m = 0; m < store.layout().modules(); ++m) {
        for (std::size_t k = 0; k < store.layout().slices(m).size(); ++k) {
            const std::vector<T>& right = expected.values(store.layout().slices(m)[k].tensor);
            std::vector<T> found = right;
            for (const zeroth::tensor_slice& piece :
                 zeroth::slices_within({&store.layout().slices(m)[k], 1}, store.own(m))) {
                for (std::size_t i = 0; i < piece.count; ++i) { found[piece.first + i] = T{}; }
            }
            store.read(m, k, view<T>(found));
            if (std::memcmp(found.data(), right.data(), right.size() * sizeof(T)) != 0) { return false; }
        }
    }
    return true;
}

// One step; its losses are appended.
template <class Pipeline> void take_step(Pipeline& p, const trial& t, std::size_t step, std::vector<double>& losses) {
    const auto probes = t.probes(step);
    std::vector<zeroth::loss_value> out(probes.size());
    p.evaluate(probes, step, out);
    for (const zeroth::loss_value& l : out) { losses.push_back(l.mean); }
    p.update(t.updates(step, out));
}

// All steps by a pipeline over `store`, flushed by its destruction.
template <class T, queue Q, class Pause, class Exchange = zeroth::whole>
std::vector<double> by_pipeline(Q q, const trial& t, zeroth::block_store<T, Q>& store, zeroth::offload_options o,
                                Pause pause, Exchange exchange = Exchange{}) {
    chain_model<Q, T, Pause> model(q, t.signs.size() * t.directions, pause);
    std::vector<double> losses;
    zeroth::offload<Q, T, chain_model<Q, T, Pause>, Exchange> p(q, model, store, o, std::move(exchange));
    for (std::size_t step = 0; step < t.steps; ++step) { take_step(p, t, step, losses); }
    return losses;
}

}  // namespace tutti::test
