// make_strategy's definition, for the files that compile strategies: strategies.cpp and, for GPUs, cuda/strategies.cu.
// Needs pipelines.hpp. Apart from the trainer: neither is compiled again for the other.
#pragma once

#include <utility>  // move

#include "pipelines.hpp"

namespace transformer {

template <class T, class Comm>
any_strategy<T, tutti::queue_of<Comm>> make_strategy(Comm comm, const options& o, tutti::schedule::timeline* trace) {
    return pipelines_known::make<T>(std::move(comm), o, trace);
}

template <class T, class Comm>
any_strategy<T, tutti::queue_of<Comm>> make_strategy_of_parts(Comm comm, const options& o,
                                                              tutti::schedule::timeline* trace, int rank) {
    return pipelines::of_parts::among_replicas<T>(std::move(comm), o, trace, rank);
}

}  // namespace transformer
