// The GPU's training run, compiled by nvcc once for each kind of `world`. The pipelines are in strategies.cu.
#include "run.hpp"

#include <string>  // names

#include <fmt/format.h>  // messages

#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // several GPUs
#endif
#include <tutti/comm/self.hpp>  // one GPU

#include "../train.hpp"
#include "math.cuh"

namespace transformer::gpu {

namespace {

/// What replicas on one GPU train over, and on several.
struct alone {
    template <class World>
    [[nodiscard]] static tutti::comm::self<tutti::cuda_queue> communicator(World&, const tutti::cuda_queue& q) {
        return tutti::comm::self<tutti::cuda_queue>(q, {.name = "training"});
    }
};
#if TRANSFORMER_WITH_NCCL
struct together {
    template <class World>
    [[nodiscard]] static tutti::comm::nccl communicator(World& world, const tutti::cuda_queue& q) {
        return tutti::comm::nccl::over(world, q, {.name = "training"});
    }
};
#endif

[[nodiscard]] int devices_present() {
    int present = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&present); status != cudaSuccess) {
        throw bad_input(fmt::format("--device: no CUDA device answers: {}", cudaGetErrorString(status)));
    }
    if (present == 0) { throw bad_input("--device: no CUDA device answers: the driver lists none"); }
    return present;
}

/// One rank's GPU.
template <class T, class Replicas> class device_of_rank {
    tutti::cuda_queue queue_;
    cudaDeviceProp properties_{};

public:
    using math = cuda_math<T>;
    static constexpr bool is_accelerator = true;

    explicit device_of_rank(int device) : queue_(device) {
        tutti::detail::check_cuda(cudaGetDeviceProperties(&properties_, device), "cudaGetDeviceProperties");
        tutti::detail::check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    [[nodiscard]] std::string name() const { return properties_.name; }
    [[nodiscard]] double peak_flops() const { return datasheet_flops(properties_.name); }
    [[nodiscard]] math make_math() const { return math(queue_); }
    template <class World> [[nodiscard]] auto communicator(World& world, const options&) const {
        return Replicas::communicator(world, queue_);
    }
};

template <class Replicas, class World>
result run_over(World& world, const options& o, const corpus& text, tutti::deadline origin) {
    const int device = world.rank() % devices_present();  // processes of one machine have neighboring ranks
    if (o.precision == "bf16") {
        device_of_rank<tutti::bfloat16, Replicas> own(device);
        return train(world, own, o, text, origin);
    }
    device_of_rank<float, Replicas> own(device);
    return train(world, own, o, text, origin);
}

template <class World> result run_on_gpu(World& world, const options& o, const corpus& text, tutti::deadline origin) {
#if TRANSFORMER_WITH_NCCL
    if (world.size() > 1) { return run_over<together>(world, o, text, origin); }
#endif
    return run_over<alone>(world, o, text, origin);
}

}  // namespace

void expect_devices(const options& o) {
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

result run(tutti::comm::threads& world, const options& o, const corpus& text, tutti::deadline origin) {
    return run_on_gpu(world, o, text, origin);
}
#if TRANSFORMER_WITH_MPI
result run(tutti::comm::mpi& world, const options& o, const corpus& text, tutti::deadline origin) {
    return run_on_gpu(world, o, text, origin);
}
#endif

}  // namespace transformer::gpu
