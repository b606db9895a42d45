// Pipelines `ddp-4bit`, `ddp-topk`, `ddp-powersgd` and `ddp-lgreco`: data parallel, with gradients of matrices sent
// compressed and what that loses fed back into the next step's. The last chooses levels for each matrix as training
// goes on, at no more error and fewer bytes than one level for all. Needs strategy/selected_mean and the compressors.
#pragma once

#include <algorithm>    // max, min
#include <cmath>        // floor
#include <cstdint>      // periods
#include <optional>     // nodes
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // levels

#include <tutti/comm/topology.hpp>           // nodes
#include <tutti/compress/compressor.hpp>     // linear_compressor
#include <tutti/compress/level_table.hpp>    // as many levels as it takes
#include <tutti/compress/power_sgd.hpp>      // compressor
#include <tutti/compress/quantize.hpp>       // compressor
#include <tutti/compress/top_k.hpp>          // compressor
#include <tutti/optimize/adamw.hpp>          // optimizer
#include <tutti/schedule/timeline.hpp>       // trace
#include <tutti/strategy/data_parallel.hpp>  // data_parallel
#include <tutti/strategy/selected_mean.hpp>  // exchange

#include "any_strategy.hpp"
#include "options.hpp"
#include "pipelines/ddp.hpp"

namespace transformer::pipelines {

/// One level, and those that may be chosen in its place.
struct level_range {
    int uniform;
    std::vector<int> all;

    explicit level_range(int level) : uniform(level), all{level} {}
    /// From `least` to `most`, `apart` from each other or, where those were too many, farther, and the uniform one.
    level_range(int level, int least, int most, int apart) : uniform(level) {
        apart =
            std::max(apart, (most - least) / (static_cast<int>(tutti::compress::level_table::most_options) - 2) + 1);
        for (int l = std::max(least, 1); l <= most; l += apart) {
            if (l > uniform && (all.empty() || all.back() < uniform)) { all.push_back(uniform); }
            all.push_back(l);
        }
        if (all.empty() || all.back() < uniform) { all.push_back(uniform); }
    }
};

/// Where the ranks are, if they compress for other nodes alone: several nodes, of several ranks each, all as many.
template <class Comm> [[nodiscard]] std::optional<tutti::comm::topology> nodes_of(Comm& comm, const options& o) {
    auto where = o.nodes == 0 ? tutti::comm::topology::discover(comm)
                              : tutti::comm::topology::uniform(o.nodes, comm.size() / o.nodes);
    return where.has_two_levels() ? std::optional(std::move(where)) : std::nullopt;
}

/// Data parallel through a compressor. One level for all is a choice among one: both pipelines are one type.
template <class Compressor> struct compressed {
    static constexpr bool single_rank = false;

    template <class T, class Comm>
    using strategy =
        tutti::strategy::data_parallel<Comm, tutti::optimize::adamw, T, tutti::strategy::selected_mean<Compressor>>;

    template <class T, class Comm>
    [[nodiscard]] static strategy<T, Comm> make_with(Comm comm, const options& o, tutti::schedule::timeline* trace,
                                                     level_range levels) {
        tutti::strategy::selected_mean<Compressor> exchange;
        exchange.mean.level = levels.uniform;
        exchange.mean.seed = o.seed;
        if constexpr (!tutti::compress::linear_compressor<Compressor, tutti::queue_of<Comm>, T>) {
            exchange.mean.nodes = nodes_of(comm, o);  // wires of the others are too small for that to pay
        }
        exchange.levels = std::move(levels.all);
        exchange.steps = {.warmup = 0, .period = static_cast<std::uint64_t>(o.select_every), .window = 10};
        exchange.choice.alpha = o.alpha;
        exchange.choice.sum =
            o.error_sum == "norms" ? tutti::compress::error_sum::norms : tutti::compress::error_sum::squares;
        exchange.measured = o.measure == "local" ? tutti::strategy::measured_gradient::local
                                                 : tutti::strategy::measured_gradient::averaged;
        return strategy<T, Comm>(std::move(comm), o.optimizer(), ddp::strategy_options<Comm>(trace), exchange);
    }
};

struct ddp_4bit : compressed<tutti::compress::quantize> {
    static constexpr std::string_view name = "ddp-4bit";
    static constexpr std::string_view summary = "ddp, gradients quantized to --bits";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, level_range(o.bits));
    }
};

struct ddp_topk : compressed<tutti::compress::top_k> {
    static constexpr std::string_view name = "ddp-topk";
    static constexpr std::string_view summary = "ddp, the --density largest gradients of each matrix";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, level_range(o.kept_in_10000()));
    }
};

struct ddp_powersgd : compressed<tutti::compress::power_sgd> {
    static constexpr std::string_view name = "ddp-powersgd";
    static constexpr std::string_view summary = "ddp, gradients of matrices as products of --rank columns";
    template <class T, class Comm>
    [[nodiscard]] static auto make(Comm comm, const options& o, tutti::schedule::timeline* trace) {
        return make_with<T>(std::move(comm), o, trace, level_range(o.rank));
    }
};

struct ddp_lgreco {
    static constexpr std::string_view name = "ddp-lgreco";
    static constexpr std::string_view summary = "ddp, compressed by --family, at levels chosen for each matrix";
    static constexpr bool single_rank = false;

    template <class T, class Comm>
    [[nodiscard]] static any_strategy<T, tutti::queue_of<Comm>> make(Comm comm, const options& o,
                                                                     tutti::schedule::timeline* trace) {
        const auto range = [&](int uniform, int most, int apart) {
            const double factor = *o.level_range;
            const int least = static_cast<int>(std::floor(uniform / factor));
            return level_range(uniform, least, static_cast<int>(std::min<double>(uniform * factor, most)), apart);
        };
        if (o.family == "quantize") { return ddp_4bit::make_with<T>(std::move(comm), o, trace, range(o.bits, 8, 1)); }
        if (o.family == "topk") {
            const int kept = o.kept_in_10000();
            return ddp_topk::make_with<T>(std::move(comm), o, trace, range(kept, 10'000, std::max(kept / 10, 1)));
        }
        return ddp_powersgd::make_with<T>(std::move(comm), o, trace, range(o.rank, 65'536, std::max(o.rank / 64, 1)));
    }
};

}  // namespace transformer::pipelines
