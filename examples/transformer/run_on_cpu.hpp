// run_on_cpu: training on the CPU, compiled once for the trainer and its tests, in run_on_cpu.cpp; by forward passes alone,
// in forward_tuning.cpp.
// Needs data.hpp, options.hpp and report.hpp.
#pragma once

#include <tutti/core/deadline.hpp>  // time zero of traces

#include "any_ranks.hpp"
#include "data.hpp"
#include "host_memory.hpp"
#include "options.hpp"
#include "report.hpp"

namespace transformer {

/// A pipeline of forward passes alone.
template <class T>
[[nodiscard]] result tune_on_cpu(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin);

/// What `ranks` ranks of a pipeline of forward passes keep in this machine's memory; on GPUs their weights alone are
/// there.
[[nodiscard]] memory_demand demand_of(const options& o, int ranks);

/// Trains on host_device in elements of T, float or double. As train(), or as tune_on_cpu() where the pipeline is one of
/// those.
template <class T>
[[nodiscard]] result run_on_cpu(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin);

}  // namespace transformer
