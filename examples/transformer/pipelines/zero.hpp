// Pipelines `zero1`, `zero2` and `zero3`: data parallel whose ranks share the optimizer's state, also the gradients, also
// the parameters. Needs strategy/zero.
#pragma once

#include <cstddef>      // size_t
#include <string_view>  // name
#include <utility>      // move

#include <tutti/optimize/adamw.hpp>     // optimizer
#include <tutti/schedule/timeline.hpp>  // trace
#include <tutti/strategy/zero.hpp>      // zero

#include "options.hpp"
#include "pipelines/ddp.hpp"

namespace transformer::pipelines {

template <int Stage> struct zero_stage {
    static constexpr bool single_rank = false;

    template <class T, class Comm> using strategy = tutti::strategy::zero<Stage, Comm, tutti::optimize::adamw, T>;

    /// A part of each message is one rank's: messages are as many times larger than those of ddp.
    template <class Comm>
    [[nodiscard]] static tutti::strategy::zero_options strategy_options(int ranks, tutti::schedule::timeline* trace) {
        const std::size_t bucket = ddp::strategy_options<Comm>(nullptr).bucket_bytes;
        return {.bucket_bytes = bucket * static_cast<std::size_t>(ranks), .trace = trace};
    }
    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        const auto how = strategy_options<Comm>(comm.size(), trace);
        return strategy<T, Comm>(std::move(comm), o.optimizer(), how);
    }
};

struct zero1 : zero_stage<1> {
    static constexpr std::string_view name = "zero1";
    static constexpr std::string_view summary = "ddp, ranks share the optimizer's state";
};
struct zero2 : zero_stage<2> {
    static constexpr std::string_view name = "zero2";
    static constexpr std::string_view summary = "zero1, and gradients";
};
struct zero3 : zero_stage<3> {
    static constexpr std::string_view name = "zero3";
    static constexpr std::string_view summary = "zero2, and parameters, gathered where they are used";
};

}  // namespace transformer::pipelines
