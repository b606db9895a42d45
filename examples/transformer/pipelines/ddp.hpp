// Pipeline `ddp`: every rank holds all parameters; gradients are averaged in buckets while backward still runs.
// Needs strategy/data_parallel.
#pragma once

#include <string_view>  // name

#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/schedule/timeline.hpp>       // trace
#include <tutti/strategy/data_parallel.hpp>  // data_parallel

#include "options.hpp"

namespace transformer::pipelines {

struct ddp {
    static constexpr std::string_view name = "ddp";
    static constexpr std::string_view summary = "data parallel: replicas average their gradients behind backward";
    static constexpr bool single_rank = false;

    template <class T, class Comm> using strategy = tutti::strategy::data_parallel<Comm, tutti::optimize::adamw, T>;

    template <class Comm>
    [[nodiscard]] static tutti::strategy::data_parallel_options strategy_options(tutti::schedule::timeline* trace) {
        // Half a megabyte: a model of a few megabytes still overlaps all but its last bucket with backward. A device
        // trains larger ones, and a collective there has to be larger to reach its bandwidth.
        constexpr std::size_t bucket =
            tutti::queue_of<Comm>::executes_inline ? std::size_t{512} << 10 : std::size_t{32} << 20;
        return {.bucket_bytes = bucket, .trace = trace};
    }
    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return strategy<T, Comm>(std::move(comm), o.optimizer(), strategy_options<Comm>(trace));
    }
};

}  // namespace transformer::pipelines
