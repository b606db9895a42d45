// The umbrella: all of tutti that needs nothing but the standard library and fmt. No MPI, no CUDA, no BLAS.
// Needs fmt. For MPI include <tutti/comm/mpi.hpp> too, and link tutti::mpi.
// No source: it only re-exports.
#pragma once

#include <tutti/version.hpp>  // the version

#include <tutti/comm/self.hpp>
#include <tutti/core/buffer.hpp>
#include <tutti/core/config.hpp>
#include <tutti/core/deadline.hpp>
#include <tutti/core/element.hpp>
#include <tutti/core/elementwise.hpp>
#include <tutti/core/error.hpp>
#include <tutti/core/memory.hpp>
#include <tutti/core/partition.hpp>
#include <tutti/core/philox.hpp>
#include <tutti/core/queue.hpp>
#include <tutti/core/reduce_op.hpp>
#include <tutti/core/run.hpp>
#include <tutti/core/state.hpp>
#include <tutti/core/view.hpp>
#include <tutti/core/virtual_queue.hpp>
