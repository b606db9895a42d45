// The umbrella: all of tutti that needs nothing but the standard library and fmt, and that most programs use. No MPI, no
// CUDA, no BLAS. Not here, since they take time to compile: strategy/zero, strategy/local_update, and the umbrellas of
// compress, sequence, zeroth, parallel, plan, simulate and checkpoint. For MPI include <tutti/comm/mpi.hpp> too, and link
// tutti::mpi. No source: it only re-exports.
#pragma once

#include <tutti/version.hpp>  // the version

// core: memory, views, buffers, queues, the door, elements, reductions, random numbers, errors
#include <tutti/core/buffer.hpp>
#include <tutti/core/config.hpp>
#include <tutti/core/deadline.hpp>
#include <tutti/core/element.hpp>
#include <tutti/core/elementwise.hpp>
#include <tutti/core/error.hpp>
#include <tutti/core/exact.hpp>
#include <tutti/core/hash.hpp>
#include <tutti/core/least_squares.hpp>
#include <tutti/core/memory.hpp>
#include <tutti/core/partition.hpp>
#include <tutti/core/philox.hpp>
#include <tutti/core/queue.hpp>
#include <tutti/core/reduce_op.hpp>
#include <tutti/core/run.hpp>
#include <tutti/core/state.hpp>
#include <tutti/core/stochastic_rounding.hpp>
#include <tutti/core/text.hpp>
#include <tutti/core/view.hpp>
#include <tutti/core/virtual_queue.hpp>

// comm: communicators and their decorators; without MPI
#include <tutti/comm/call.hpp>
#include <tutti/comm/checked.hpp>
#include <tutti/comm/communicator.hpp>
#include <tutti/comm/connect.hpp>
#include <tutti/comm/cost.hpp>
#include <tutti/comm/counted.hpp>
#include <tutti/comm/decorator.hpp>
#include <tutti/comm/faulty.hpp>
#include <tutti/comm/front.hpp>
#include <tutti/comm/node_groups.hpp>
#include <tutti/comm/self.hpp>
#include <tutti/comm/shaped.hpp>
#include <tutti/comm/store.hpp>
#include <tutti/comm/threads.hpp>
#include <tutti/comm/topology.hpp>

// schedule: lanes, tickets, buckets, timelines and their spans
#include <tutti/schedule/bucket.hpp>
#include <tutti/schedule/lane.hpp>
#include <tutti/schedule/overlap.hpp>
#include <tutti/schedule/span.hpp>
#include <tutti/schedule/ticket.hpp>
#include <tutti/schedule/timeline.hpp>

// optimize: optimizers, learning rates, clipping
#include <tutti/optimize/adamw.hpp>
#include <tutti/optimize/clip.hpp>
#include <tutti/optimize/learning_rate.hpp>
#include <tutti/optimize/loss_scale.hpp>
#include <tutti/optimize/optimizer.hpp>
#include <tutti/optimize/publication.hpp>
#include <tutti/optimize/sgd.hpp>

// strategy: what keeps replicas in step
#include <tutti/strategy/data_parallel.hpp>
#include <tutti/strategy/gradient_exchange.hpp>
#include <tutti/strategy/strategy.hpp>
