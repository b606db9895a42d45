// The conformance backend `nccl_processes`: as many ranks as mpirun started, each a process on a GPU. Where processes
// are more than GPUs they share one, as hosts of their own for NCCL, which then speaks over sockets between them.
#pragma once

#include <mpi.h>  // MPI_COMM_WORLD, MPI_Abort

#include <chrono>       // timeout
#include <cstdio>       // fprintf
#include <exception>    // what a rank threw
#include <string_view>  // name
#include <vector>       // sizes

#include <tutti/comm/mpi.hpp>   // where ranks meet
#include <tutti/comm/nccl.hpp>  // under test

#include <conformance/staged.hpp>  // host memory
#include <gpu/device.hpp>          // device_of_process

namespace tutti::test {

struct backend {
    using communicator = staged<comm::nccl>;
    static constexpr std::string_view name = "nccl over mpi";
    static constexpr bool deterministic = false;
    static constexpr bool keeps_nan = false;
    static std::vector<int> sizes() {
        require_device();
        int n = 0;
        MPI_Comm_size(MPI_COMM_WORLD, &n);
        return {n};
    }
    template <class Body> static void run(int, Body body, std::chrono::seconds timeout = std::chrono::seconds(50)) {
        comm::mpi world(MPI_COMM_WORLD, {.timeout = timeout});
        try {
            const cuda_queue q(device_of_process(world.rank(), world.size()));
            communicator c(comm::nccl::over(world, q, {.name = "world", .timeout = timeout}));
            body(c);
        } catch (const std::exception& e) {  // the others wait for this rank: the job cannot go on
            std::fprintf(stderr, "rank %d: %s\n", world.rank(), e.what());
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
};

}  // namespace tutti::test
