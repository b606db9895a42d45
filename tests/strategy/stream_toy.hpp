// The sized toy's backward as work of a device-like queue, and a run there beside one on the host.
// Needs sharded_toy.hpp and schedule/stream_queue.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // samples
#include <cstring>      // memcmp
#include <string_view>  // names

#include <tutti/core/run.hpp>   // cost
#include <tutti/core/view.hpp>  // view

#include "schedule/stream_queue.hpp"  // stream_memory
#include "sharded_toy.hpp"            // pass

namespace tutti::test {

struct slope_operation {
    static constexpr std::string_view name = "slope";
    view<const float, stream_memory> x;
    view<float, stream_memory> g;
    std::size_t parameter;
    std::uint64_t sample;
    [[nodiscard]] tutti::cost cost() const noexcept { return {}; }
    void operator()() const {
        for (std::size_t e = 0; e < x.size(); ++e) {
            g.data()[e] = static_cast<float>(static_cast<double>(g.data()[e]) +
                                             slope(sample, parameter, e, static_cast<double>(x.data()[e])));
        }
    }
};

/// The toy's tensors, in memory of that queue.
inline strategy::parameters<float, stream_memory> on_stream_of(const sized_toy<float>& t) {
    strategy::parameters<float, stream_memory> list;
    for (const auto& p : t.parameters) {
        list.push_back(
            {p.name, p.shape, p.decay, {p.value.data(), p.value.size()}, {p.gradient.data(), p.gradient.size()}});
    }
    return list;
}
/// Steps of two micro-batches give the same norms, and masters, on both.
template <class Host, class Stream> void check_same_bits(Host& on_host, Stream& on_stream, std::size_t parameters) {
    const stream_queue q = on_stream.queue();
    for (std::uint64_t step = 0; step < 3; ++step) {
        for (int m = 0; m < 2; ++m) {
            on_host.begin({m, 2});
            pass(on_host, parameters, step, 1.0);
            on_stream.begin({m, 2});
            for (std::size_t i = 0; i < parameters; ++i) {
                static_cast<void>(on_stream.before_use(i));
                on_stream.after_use(i);
            }
            for (std::size_t i = parameters; i-- > 0;) {
                run(q, slope_operation{on_stream.before_use(i), on_stream.gradient(i), i, step});
                on_stream.after_use(i);
                on_stream.gradient_ready(i);
            }
        }
        const double norm = on_host.step({.learning_rate = 0.05, .clip_norm = 20}).norm;
        CHECK(on_stream.step({.learning_rate = 0.05, .clip_norm = 20}).norm == norm);
    }
    on_stream.flush();
    const auto owned = on_stream.owned();
    CHECK(std::memcmp(owned.data(), on_host.owned().data(), owned.size() * sizeof(float)) == 0);
}

}  // namespace tutti::test
