// The GPU's training run, compiled by nvcc once for each kind of `world`. The pipelines are in strategies.cu.
#include "run.hpp"

#include <string>  // names

#include <fmt/format.h>  // messages

#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // any number of GPUs
#else
#include <tutti/comm/self.hpp>  // one GPU
#endif

#include "../train.hpp"
#include "math.cuh"

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

/// Multiprocessors for collectives that run beside the products. Between H200s over sockets that makes up for a third of
/// what the two cost each other, and on one alone the products are no slower.
constexpr int reserve_for_collectives = 4;

/// One rank's GPU.
template <class T> class device_of_rank {
    tutti::cuda_queue queue_;
    int reserve_;
    cudaDeviceProp properties_{};

public:
    using math = cuda_math<T>;
    static constexpr bool is_accelerator = true;

    device_of_rank(int device, int ranks) : queue_(device), reserve_(ranks > 1 ? reserve_for_collectives : 0) {
        tutti::detail::check_cuda(cudaGetDeviceProperties(&properties_, device), "cudaGetDeviceProperties");
        tutti::detail::check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    [[nodiscard]] std::string name() const { return properties_.name; }
    [[nodiscard]] double peak_flops() const { return datasheet_flops(properties_.name); }
    [[nodiscard]] math make_math(const tutti::cuda_queue& q) const { return math(q, reserve_); }
    // NCCL's communicator of one rank copies, and nothing in place, as `self` does: no second one is compiled.
    template <class World> [[nodiscard]] auto communicator([[maybe_unused]] World& world, const options&) const {
#if TRANSFORMER_WITH_NCCL
        return tutti::comm::nccl::over(world, queue_, {.name = "training"});
#else
        return tutti::comm::self<tutti::cuda_queue>(queue_, {.name = "training"});
#endif
    }
};

template <class World> result run_on_gpu(World& world, const options& o, const corpus& text, tutti::deadline origin) {
    const int device = world.rank() % devices_present();  // processes of one machine have neighboring ranks
    if (o.precision == "bf16") {
        device_of_rank<tutti::bfloat16> own(device, world.size());
        return train(world, own, o, text, origin);
    }
    device_of_rank<float> own(device, world.size());
    return train(world, own, o, text, origin);
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
