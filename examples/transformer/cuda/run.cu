// The GPU's training run, compiled by nvcc. The pipelines are in strategies.cu.
#include "run.hpp"

#include <cstdlib>  // setenv
#include <string>   // advice

#include <fmt/format.h>          // messages
#include <tutti/core/error.hpp>  // memory_error

#include "../parallel_run.hpp"
#include "../train.hpp"
#include "device_of_rank.cuh"

namespace transformer::gpu {

namespace {

[[nodiscard]] int devices_present() {
    int present = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&present); status != cudaSuccess) {
        throw bad_input(fmt::format("--device: no CUDA device answers: {}", cudaGetErrorString(status)));
    }
    if (present == 0) { throw bad_input("--device: no CUDA device answers: the driver lists none"); }
    return present;
}

// How to do with less than a rank's device has.
[[nodiscard]] std::string ways_to_less(const options& o) {
    std::string ways = o.micro_batch > 1 ? fmt::format("--micro-batch below {}, ", o.micro_batch) : "";
    if (o.recompute < 2 && !o.pipeline_schedule.starts_with("zb-")) { ways += "--recompute 2, "; }
    return ways + "or more GPUs that share states (zero1, zero2, zero3) or the model (tp, pp, 3d)";
}
template <class Train> result train_where_there_is_room(const options& o, Train train) {
    try {
        return train();
    } catch (const tutti::memory_error& e) {
        throw tutti::memory_error(fmt::format("{}; less is needed with {}", e.what(), ways_to_less(o)), e.context());
    }
}

}  // namespace

void expect_devices(const options& o) {
    // What cuDNN compiles while ranks run is loaded for all devices of the process at once, if code is loaded eagerly, and
    // CUDA waits for all of them to do so: also for one that waits for the rank that loads. Loaded when it is first used it
    // concerns one device. CUDA reads this with its first call.
    if (o.backend == "threads" && o.gpus > 1) { setenv("CUDA_MODULE_LOADING", "LAZY", 1); }
#if !TRANSFORMER_WITH_NCCL
    if (o.gpus > 1) {
        throw bad_input(fmt::format("--gpus: {} asked for, but this build trains on one: no NCCL was found when it was "
                                    "configured",
                                    o.gpus));
    }
#endif
    const int present = devices_present();
    const int needed = o.backend == "threads" ? o.gpus : 1;  // of this process
    if (present < needed) { throw bad_input(fmt::format("--gpus: {} asked for, but there are {}", needed, present)); }
}

result run(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin) {
    const int device = world.rank() % devices_present();  // processes of one machine have neighboring ranks
    if (o.of_forward_passes()) { return tune_on_gpu(world, device, o, text, origin); }
    return train_where_there_is_room(o, [&] {
        if (o.of_parts()) { return train_in_parts_on_gpu(world, device, o, text, origin); }
        if (o.precision == "bf16") {
            device_of_rank<tutti::bfloat16> own(device, world.size());
            return train(world, own, o, text, origin);
        }
        device_of_rank<float> own(device, world.size());
        return train(world, own, o, text, origin);
    });
}

}  // namespace transformer::gpu
