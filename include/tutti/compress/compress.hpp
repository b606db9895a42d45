// The umbrella of compress: gradients made smaller, and the collectives that carry them. No CUDA: device code is in the
// .cuh files next door.
// Apart from tutti.hpp, whose users need not wait for it to compile. No source: it only re-exports.
#pragma once

// what compressors are, and which level each layer gets
#include <tutti/compress/compressor.hpp>
#include <tutti/compress/critical_regime.hpp>
#include <tutti/compress/level_choice.hpp>
#include <tutti/compress/level_errors.hpp>
#include <tutti/compress/level_schedule.hpp>
#include <tutti/compress/level_table.hpp>
#include <tutti/compress/matrix.hpp>

// collectives, and what they keep and cost
#include <tutti/compress/all_gather.hpp>
#include <tutti/compress/all_reduce.hpp>
#include <tutti/compress/dense.hpp>
#include <tutti/compress/dense_or.hpp>
#include <tutti/compress/error_feedback.hpp>
#include <tutti/compress/gain.hpp>
#include <tutti/compress/hierarchical.hpp>
#include <tutti/compress/reduce_scatter.hpp>
#include <tutti/compress/shards.hpp>

// compressors
#include <tutti/compress/buckets.hpp>
#include <tutti/compress/float8.hpp>
#include <tutti/compress/momentum_feedback.hpp>
#include <tutti/compress/natural.hpp>
#include <tutti/compress/orthogonalize.hpp>
#include <tutti/compress/power_sgd.hpp>
#include <tutti/compress/quantize.hpp>
#include <tutti/compress/random_k.hpp>
#include <tutti/compress/sign.hpp>
#include <tutti/compress/ternary.hpp>
#include <tutti/compress/threshold.hpp>
#include <tutti/compress/top_k.hpp>
