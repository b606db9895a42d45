// The device side of compress/top_k.
// Needs core/cuda_run, CUB and nvcc.
#pragma once

#include <tutti/compress/detail/sparse_encode.cuh>  // encode
#include <tutti/compress/detail/sparse_wire.cuh>    // decode, decode_add
#include <tutti/compress/top_k.hpp>                 // the scheme
