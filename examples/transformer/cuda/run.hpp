// A training run on GPUs, as main.cpp sees it. run.cu has the definitions, for nvcc alone.
// Needs any_ranks.hpp, options.hpp and report.hpp; no CUDA.
#pragma once

#include <tutti/core/deadline.hpp>  // time zero of traces

#include "../any_ranks.hpp"
#include "../data.hpp"
#include "../options.hpp"
#include "../report.hpp"

namespace transformer::gpu {

/// Errors  bad_input unless this process has the CUDA devices that `o` asks for, and what several of them need.
void expect_devices(const options& o);

/// Trains on the GPU of this rank with the pipeline, precision and recomputation that `o` names.
///
/// Semantics  collective over `world`, which carries control, losses and statistics; gradients go over a communicator
///            of devices.
[[nodiscard]] result run(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin);

/// The same with pipelines of forward passes alone, on GPU `device`. Compiled apart, in forward_tuning.cu.
[[nodiscard]] result tune_on_gpu(any_ranks& world, int device, const options& o, const corpus& text,
                                 tutti::deadline origin);

/// The same of pipelines whose ranks have parts of the model, on GPU `device`. Compiled apart, in parallel.cu.
[[nodiscard]] result train_in_parts_on_gpu(any_ranks& world, int device, const options& o, const corpus& text,
                                           tutti::deadline origin);

}  // namespace transformer::gpu
