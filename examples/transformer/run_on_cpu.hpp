// run_on_cpu: training on the CPU, compiled once for the trainer and its tests, in run_on_cpu.cpp.
// Needs data.hpp, options.hpp and report.hpp.
#pragma once

#include <tutti/core/deadline.hpp>  // time zero of traces

#include "data.hpp"
#include "options.hpp"
#include "report.hpp"

namespace transformer {

/// Trains on host_device in elements of T, float or double; Comm is threads or mpi. As train().
template <class T, class Comm>
[[nodiscard]] result run_on_cpu(Comm& world, const options& o, const corpus& text, tutti::deadline origin);

}  // namespace transformer
