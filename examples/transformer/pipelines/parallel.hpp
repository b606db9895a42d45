// Pipelines `tp`, `pp` and `3d`: ranks share layers, have some layers each, or both; replicas of that average gradients.
// Needs pipelines/ddp and pipelines/zero for the replicas. parallel_training.hpp is their run.
#pragma once

#include <string_view>  // names
#include <utility>      // move

#include "any_strategy.hpp"
#include "pipelines/ddp.hpp"
#include "pipelines/zero.hpp"

namespace transformer::pipelines {

/// Ranks have parts of the model: strategies are over the replicas of a part alone, and no list makes them.
struct of_parts {
    static constexpr bool single_rank = false;

    /// By --zero. `rank` is what the trace calls this one.
    template <class T, class Comm>
    [[nodiscard]] static any_strategy<T, tutti::queue_of<Comm>> among_replicas(Comm comm, const options& o,
                                                                               tutti::schedule::timeline* trace,
                                                                               int rank) {
        switch (o.zero) {
        case 1: return sharing<zero1, T>(std::move(comm), o, trace, rank);
        case 2: return sharing<zero2, T>(std::move(comm), o, trace, rank);
        case 3: return sharing<zero3, T>(std::move(comm), o, trace, rank);
        default: break;
        }
        auto how = ddp::strategy_options<Comm>(trace);
        how.trace_rank = rank;
        return ddp::strategy<T, Comm>(std::move(comm), o.optimizer(), how);
    }

private:
    template <class Stage, class T, class Comm>
    [[nodiscard]] static any_strategy<T, tutti::queue_of<Comm>> sharing(Comm comm, const options& o,
                                                                        tutti::schedule::timeline* trace, int rank) {
        auto how = Stage::template strategy_options<Comm>(comm.size(), trace);
        how.trace_rank = rank;
        return typename Stage::template strategy<T, Comm>(std::move(comm), o.optimizer(), how);
    }
};

struct tp : of_parts {
    static constexpr std::string_view name = "tp";
    static constexpr std::string_view summary = "tensor parallel: ranks have some heads and columns of every layer";
};
struct pp : of_parts {
    static constexpr std::string_view name = "pp";
    static constexpr std::string_view summary = "pipeline parallel: ranks have some of the layers";
};
struct three_dimensional : of_parts {
    static constexpr std::string_view name = "3d";
    static constexpr std::string_view summary =
        "tensor x pipeline x data x sequence parallel, by --tp, --pp, --dp and --sp";
};

}  // namespace transformer::pipelines
