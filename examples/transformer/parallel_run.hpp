// parallel_run: runs whose ranks have parts of the model, `tp`, `pp` and `3d`; compiled once for the trainer and its
// tests, in parallel.cpp and, for GPUs, cuda/parallel.cu.
// Needs data.hpp, options.hpp and report.hpp.
#pragma once

#include <tutti/core/deadline.hpp>               // time zero of traces
#include <tutti/parallel/pipeline_schedule.hpp>  // pipeline_schedule

#include "any_ranks.hpp"
#include "data.hpp"
#include "options.hpp"
#include "report.hpp"

namespace transformer {

/// --pipeline-schedule, of a replica's ranks and micro-batches. Errors: bad_input when it cannot be had of so many, or
/// layers do not divide over its stages.
[[nodiscard]] tutti::parallel::pipeline_schedule schedule_of(const options& o);

/// On the CPU; T is float or double. As train().
template <class T>
[[nodiscard]] result train_in_parts_on_cpu(any_ranks& world, const options& o, const corpus& text,
                                           tutti::deadline origin);

}  // namespace transformer
