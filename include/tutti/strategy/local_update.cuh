// What local_update needs on a cuda_queue. Include it instead of the .hpp in a file that nvcc compiles: its operations
// are elementwise, or those of data_parallel.
// Needs strategy/data_parallel.cuh and nvcc.
#pragma once

#include <tutti/strategy/data_parallel.cuh>  // elementwise operations, norms, hashes
#include <tutti/strategy/local_update.hpp>   // local_update
