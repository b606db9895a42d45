// require_device(): skips the program, with the reason, where no CUDA device answers.
// Needs the CUDA runtime and support/skip.hpp.
#pragma once

#include <cuda_runtime_api.h>  // cudaGetDeviceCount

#include <string>  // the reason

#include "support/skip.hpp"  // skip

namespace tutti::test {

inline void require_device() {
    int count = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess)
        skip(std::string("no CUDA device: ") + cudaGetErrorString(status));
    if (count == 0) skip("no CUDA device: the driver lists none");
}

}  // namespace tutti::test
