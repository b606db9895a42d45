// Whole steps of a strategy on any communicator: what tests on a GPU compare with the host.
// Needs gpu/toy.hpp; on a device core/cuda_run.cuh and the strategy's .cuh.
#pragma once

#include <algorithm>  // copy
#include <cstddef>    // size_t
#include <cstdint>    // samples
#include <cstring>    // memcmp
#include <string>     // names
#include <utility>    // move
#include <vector>     // values

#include <doctest/doctest.h>  // checks

#include <tutti/core/buffer.hpp>        // storage
#include <tutti/strategy/strategy.hpp>  // parameters

#include "toy.hpp"  // what is trained

namespace tutti::test {

template <class T> struct outcome {
    std::vector<std::vector<T>> values;
    std::vector<double> norms;
};

/// Six steps of two micro-batches each, with clipping, state that is read and restored, and a consensus, with the strategy
/// that make(comm) gives. Ranks have slopes of their own.
template <class T, class C, class Make> outcome<T> train(C comm, Make make, bool own_gradients) {
    using Q = queue_of<C>;
    using M = typename Q::memory_type;
    const Q q = comm.queue();
    const auto rank = static_cast<std::uint32_t>(comm.rank());
    std::vector<buffer<T, Q>> values;
    std::vector<buffer<T, Q>> gradients;
    strategy::parameters<T, M> list;
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        values.emplace_back(q, toy_sizes[p]);
        gradients.emplace_back(q, own_gradients ? toy_sizes[p] : 0);
        const std::vector<T> first = initial<T>(p);
        if constexpr (Q::executes_inline) {
            std::copy(first.begin(), first.end(), values.back().data());
        } else {
            upload(q, view<const T>(first), values.back().view());
        }
        list.push_back(
            {"p" + std::to_string(p), toy_shape(p), p % 2 == 0, values.back().view(), gradients.back().view()});
    }
    auto s = make(std::move(comm));
    s.attach(list);
    outcome<T> result;
    for (std::uint32_t step = 0; step < 6; ++step) {
        for (std::uint32_t m = 0; m < 2; ++m) {
            s.begin({static_cast<int>(m), 2});
            for (std::size_t p = toy_sizes.size(); p-- > 0;) {
                const auto sample = 1000 * rank + 100 * step + 10 * static_cast<std::uint32_t>(p) + m;
                run(s.queue(), slope_operation<T, M>{s.before_use(p), s.gradient(p), sample});
                s.after_use(p);
                s.gradient_ready(p);
            }
        }
        result.norms.push_back(s.step({.learning_rate = 0.01, .clip_norm = 1}).norm);
        if (step == 2) {
            static_cast<void>(s.state());
            s.restored();
        }
        if (step == 3) { const auto common = s.consensus(); }
    }
    s.finish();
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        std::vector<T>& to = result.values.emplace_back(toy_sizes[p]);
        const view<const T, M> value = s.before_use(p);
        if constexpr (Q::executes_inline) {
            std::copy_n(value.data(), value.size(), to.begin());
        } else {
            download(q, value, view<T>(to));
        }
        s.after_use(p);
    }
    return result;
}

/// Equal to the last bit, after steps in which clipping took part.
template <class T> void expect_same_bits(const outcome<T>& host, const outcome<T>& device) {
    CHECK(host.norms == device.norms);
    for (std::size_t p = 0; p < toy_sizes.size(); ++p) {
        CAPTURE(p);
        CHECK(std::memcmp(host.values[p].data(), device.values[p].data(), toy_sizes[p] * sizeof(T)) == 0);
    }
    CHECK(host.norms.front() > 1);
}

}  // namespace tutti::test
