// What data_parallel and its optimizers need on a cuda_queue. Include it instead of the .hpp in a file that nvcc
// compiles. Needs core/cuda_run, core/hash.cuh, optimize/clip.cuh and nvcc.
#pragma once

#include <tutti/core/cuda_run.cuh>           // elementwise operations
#include <tutti/core/hash.cuh>               // hashes
#include <tutti/optimize/clip.cuh>           // global norm
#include <tutti/strategy/data_parallel.hpp>  // data_parallel
