// require_device(): skips the program, with the reason, where no CUDA device answers. device_of_process(): whose is which.
// Needs the CUDA runtime and support/skip.hpp.
#pragma once

#include <cuda_runtime_api.h>  // cudaGetDeviceCount

#include <cstdlib>  // setenv
#include <string>   // the reason

#include "support/skip.hpp"  // skip

namespace tutti::test {

inline void require_device() {
    int count = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess)
        skip(std::string("no CUDA device: ") + cudaGetErrorString(status));
    if (count == 0) skip("no CUDA device: the driver lists none");
}

/// The device of the process with that rank among `processes` of this machine. NCCL refuses two ranks of one host on one
/// device: processes that have to share become hosts of their own, which it learns from the environment at its start, unless
/// virtual_nodes.sh has told it more.
inline int device_of_process(int rank, int processes) {
    require_device();
    int count = 0;
    static_cast<void>(cudaGetDeviceCount(&count));
    if (processes > count) { setenv("NCCL_HOSTID", ("host " + std::to_string(rank)).c_str(), 0); }
    return rank % count;
}

}  // namespace tutti::test
