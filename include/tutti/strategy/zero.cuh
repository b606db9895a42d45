// What zero and its optimizers need on a cuda_queue. Include it instead of the .hpp in a file that nvcc compiles.
// Needs core/cuda_run, optimize/clip.cuh and nvcc.
#pragma once

#include <tutti/core/cuda_run.cuh>           // elementwise operations
#include <tutti/optimize/clip.cuh>           // global norm
#include <tutti/strategy/data_parallel.cuh>  // hash of all parameters
#include <tutti/strategy/zero.hpp>           // zero
