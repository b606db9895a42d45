// What selected_mean needs on a cuda_queue. Include it instead of the .hpp in a file that nvcc compiles.
// Needs core/cuda_run, compress/level_errors.cuh and nvcc; the compressor's own .cuh besides.
// Source: as strategy/selected_mean.hpp.
#pragma once

#include <tutti/compress/level_errors.cuh>   // measuring
#include <tutti/core/cuda_run.cuh>           // sums of elements
#include <tutti/strategy/selected_mean.hpp>  // selected_mean
