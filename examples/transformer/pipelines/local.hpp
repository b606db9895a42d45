// Pipeline `local`: one rank, no communication. What the others are compared with.
// Needs strategy/data_parallel.
#pragma once

#include <string_view>  // name

#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/schedule/timeline.hpp>       // trace
#include <tutti/strategy/data_parallel.hpp>  // strategy::local

#include "options.hpp"

namespace transformer::pipelines {

struct local {
    static constexpr std::string_view name = "local";
    static constexpr std::string_view summary = "one rank, no communication";
    static constexpr bool single_rank = true;

    template <class Comm> using queue = tutti::queue_of<Comm>;
    template <class T, class Comm> using strategy = tutti::strategy::local<tutti::optimize::adamw, T, queue<Comm>>;

    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return strategy<T, Comm>(tutti::comm::self<queue<Comm>>(comm.queue()), o.optimizer(), {.trace = trace});
    }
};

}  // namespace transformer::pipelines
