// Runs of forward passes alone on GPUs, for ranks that are threads and for processes.
#include "run.hpp"

#include <tutti/compress/buckets.cuh>     // eight bits
#include <tutti/zeroth/in_memory.cuh>     // weights on the device
#include <tutti/zeroth/perturbation.cuh>  // perturbed copies, updates

#include "../forward_tuning.hpp"
#include "device_of_rank.cuh"

namespace transformer::gpu {

// Products count on all multiprocessors, however many ranks there are: so they have the same bits on any number.
result tune_on_gpu(any_ranks& world, int device, const options& o, const corpus& text, tutti::deadline origin) {
    constexpr int alone = 1;
    if (o.precision == "bf16") {
        device_of_rank<tutti::bfloat16> own(device, alone);
        return tune(world, own, o, text, origin);
    }
    if (o.precision == "float16") {
        device_of_rank<tutti::float16> own(device, alone);
        return tune(world, own, o, text, origin);
    }
    device_of_rank<float> own(device, alone);
    return tune(world, own, o, text, origin);
}

}  // namespace transformer::gpu
