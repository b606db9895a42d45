// A training run on GPUs, as main.cpp sees it. run.cu has the definitions, for nvcc alone.
// Needs options.hpp, report.hpp and the communicators; no CUDA.
#pragma once

#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif
#include <tutti/core/deadline.hpp>  // time zero of traces

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
[[nodiscard]] result run(tutti::comm::threads& world, const options& o, const corpus& text, tutti::deadline origin);
#if TRANSFORMER_WITH_MPI
[[nodiscard]] result run(tutti::comm::mpi& world, const options& o, const corpus& text, tutti::deadline origin);
#endif

/// The same with pipelines of forward passes alone, on GPU `device`. Compiled apart, in forward_tuning.cu.
template <class World>
[[nodiscard]] result tune_on_gpu(World& world, int device, const options& o, const corpus& text,
                                 tutti::deadline origin);

/// The same of pipelines whose ranks have parts of the model, on GPU `device`. Compiled apart, in parallel.cu.
template <class World>
[[nodiscard]] result train_in_parts_on_gpu(World& world, int device, const options& o, const corpus& text,
                                           tutti::deadline origin);

}  // namespace transformer::gpu
