// Ranks of the backend `nccl` as processes: as many as mpirun started, each on a GPU. Where processes are more than
// GPUs they share one, as hosts of their own for NCCL, which then speaks over sockets between them.
#include <mpi.h>  // MPI_COMM_WORLD, MPI_Abort

#include <cstdio>     // fprintf
#include <exception>  // what a rank threw

#include <tutti/comm/mpi.hpp>  // where ranks meet

#include <conformance/backend_nccl.hpp>  // defined here
#include <gpu/device.hpp>                // device_of_process

namespace tutti::test {

std::vector<int> backend::sizes() {
    require_device();
    int n = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    return {n};
}

void backend::run(int, const std::function<void(communicator&)>& body, std::chrono::seconds timeout) {
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

}  // namespace tutti::test
