// What in_memory needs on a cuda_queue. Include it instead of the .hpp in a file that nvcc compiles.
// Needs core/hash.cuh, zeroth/perturbation.cuh and nvcc.
#pragma once

#include <tutti/core/hash.cuh>            // the check of replicas
#include <tutti/zeroth/in_memory.hpp>     // in_memory
#include <tutti/zeroth/perturbation.cuh>  // perturbed copies, updates
