// slope_operation: the toy's backward as work of a device-like queue.
// Needs toy.hpp and schedule/stream_queue.
#pragma once

#include <cstddef>      // size_t
#include <cstdint>      // samples
#include <string_view>  // names

#include <tutti/core/run.hpp>   // cost
#include <tutti/core/view.hpp>  // view

#include "schedule/stream_queue.hpp"  // stream_memory
#include "toy.hpp"                    // slope

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

}  // namespace tutti::test
