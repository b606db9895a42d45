// device_of_rank: a GPU as a device of the trainer, over NCCL.
// Needs math.cuh and nvcc.
#pragma once

#include <initializer_list>  // dimensions
#include <string>            // names

#if TRANSFORMER_WITH_NCCL
#include <tutti/comm/nccl.hpp>  // any number of GPUs
#else
#include <tutti/comm/self.hpp>  // one GPU
#endif
#include <tutti/parallel/mesh.hpp>  // dimensions

#include "../device.hpp"
#include "../options.hpp"
#include "math.cuh"

namespace transformer::gpu {

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
    /// Ranks along dimensions of a mesh; all are in the order of one stream.
    template <class World>
    [[nodiscard]] auto along(World& world, const options& o, const tutti::parallel::mesh& m,
                             std::initializer_list<tutti::parallel::dimension> dimensions) const {
        World part = tutti::parallel::split_along(world, m, dimensions);
        return communicator(part, o);
    }
};

}  // namespace transformer::gpu
