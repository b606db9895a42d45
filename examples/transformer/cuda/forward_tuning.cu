// Runs of forward passes alone on GPUs, compiled by nvcc once for each kind of `world`.
#include "run.hpp"

#include <tutti/zeroth/in_memory.cuh>     // weights on the device
#include <tutti/zeroth/perturbation.cuh>  // perturbed copies, updates

#include "../forward_tuning.hpp"
#include "device_of_rank.cuh"

namespace transformer::gpu {

namespace {

// Products count on all multiprocessors, however many ranks there are: so they have the same bits on any number.
template <class World> result tune_on_gpu(World& world, const options& o, const corpus& text, tutti::deadline origin) {
    constexpr int alone = 1;
    if (o.precision == "bf16") {
        device_of_rank<tutti::bfloat16> own(device_of(world), alone);
        return transformer::tune(world, own, o, text, origin);
    }
    device_of_rank<float> own(device_of(world), alone);
    return transformer::tune(world, own, o, text, origin);
}

}  // namespace

result tune(tutti::comm::threads& world, const options& o, const corpus& text, tutti::deadline origin) {
    return tune_on_gpu(world, o, text, origin);
}
#if TRANSFORMER_WITH_MPI
result tune(tutti::comm::mpi& world, const options& o, const corpus& text, tutti::deadline origin) {
    return tune_on_gpu(world, o, text, origin);
}
#endif

}  // namespace transformer::gpu
