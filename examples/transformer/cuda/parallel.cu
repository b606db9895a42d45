// Runs on GPUs whose ranks have parts of the model, apart from the other trainer: neither is compiled for the other.
#include <tutti/core/cuda_run.cuh>                      // copies, fills
#include <tutti/core/hash.cuh>                          // hashes of weights
#include <tutti/core/philox.cuh>                        // initial weights
#include <tutti/optimize/clip.cuh>                      // norms
#include <tutti/parallel/vocabulary_cross_entropy.cuh>  // losses

#include "../parallel_training.hpp"
#include "device_of_rank.cuh"
#include "run.hpp"

namespace transformer::gpu {

result train_in_parts_on_gpu(any_ranks& world, int device, const options& o, const corpus& text,
                             tutti::deadline origin) {
    if (o.precision == "bf16") {
        device_of_rank<tutti::bfloat16> own(device, world.size());
        return train_in_parts(world, own, o, text, origin);
    }
    device_of_rank<float> own(device, world.size());
    return train_in_parts(world, own, o, text, origin);
}

}  // namespace transformer::gpu
