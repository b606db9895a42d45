// Pipelines `ddp-4bit`, `ddp-topk` and `ddp-powersgd`: data parallel, with gradients of matrices sent compressed and
// what that loses fed back into the next step's. Needs strategy/compressed_mean and the compressors.
#pragma once

#include <string_view>  // name

#include <tutti/compress/power_sgd.hpp>        // compressor
#include <tutti/compress/quantize.hpp>         // compressor
#include <tutti/compress/top_k.hpp>            // compressor
#include <tutti/optimize/adamw.hpp>            // optimizer
#include <tutti/schedule/timeline.hpp>         // trace
#include <tutti/strategy/compressed_mean.hpp>  // exchange
#include <tutti/strategy/data_parallel.hpp>    // data_parallel

#include "options.hpp"
#include "pipelines/ddp.hpp"

namespace transformer::pipelines {

/// Data parallel through the compressor X.
template <class X> struct compressed {
    static constexpr bool single_rank = false;

    template <class T, class Comm>
    using strategy =
        tutti::strategy::data_parallel<Comm, tutti::optimize::adamw, T, tutti::strategy::compressed_mean<X>>;

    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make_with(Comm comm, const options& o, tutti::schedule::timeline* trace,
                                                     tutti::strategy::compressed_mean<X> mean) {
        mean.seed = o.seed;
        return strategy<T, Comm>(std::move(comm), o.optimizer(), ddp::strategy_options<Comm>(trace), mean);
    }
};

struct ddp_4bit : compressed<tutti::compress::quantize> {
    static constexpr std::string_view name = "ddp-4bit";
    static constexpr std::string_view summary = "ddp, gradients quantized to --bits";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, {.level = o.bits});
    }
};

struct ddp_topk : compressed<tutti::compress::top_k> {
    static constexpr std::string_view name = "ddp-topk";
    static constexpr std::string_view summary = "ddp, the --density largest gradients of each matrix";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, {.level = o.kept_in_10000()});
    }
};

struct ddp_powersgd : compressed<tutti::compress::power_sgd> {
    static constexpr std::string_view name = "ddp-powersgd";
    static constexpr std::string_view summary = "ddp, gradients of matrices as products of --rank columns";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, {.level = o.rank});
    }
};

}  // namespace transformer::pipelines
