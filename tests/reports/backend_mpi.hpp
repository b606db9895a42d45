// The backend `mpi` of the reports: as in conformance, but a communicator that fails throws instead of ending the job.
#pragma once

#include <mpi.h>  // MPI_COMM_WORLD, MPI_Abort

#include <chrono>       // timeout
#include <cstdio>       // fprintf
#include <exception>    // what a rank threw
#include <functional>   // bodies
#include <string_view>  // name
#include <vector>       // sizes

#include <tutti/comm/mpi.hpp>  // under test

namespace tutti::test {

struct backend {
    using communicator = comm::mpi;
    static constexpr std::string_view name = "mpi";
    static constexpr bool deterministic = false;
    static std::vector<int> sizes() {
        int n = 0;
        MPI_Comm_size(MPI_COMM_WORLD, &n);
        return {n};
    }
    static void run(int, const std::function<void(communicator&)>& body,
                    std::chrono::seconds timeout = std::chrono::seconds(50)) {
        comm::mpi_options o;
        o.timeout = timeout;
        o.on_failure = comm::failure_policy::throw_error;
        communicator c(MPI_COMM_WORLD, o);
        try {
            body(c);
        } catch (const std::exception& e) {  // the others wait for this rank: the job cannot go on
            std::fprintf(stderr, "rank %d: %s\n", c.rank(), e.what());
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        MPI_Barrier(MPI_COMM_WORLD);  // cases that fail on purpose do not run into each other
    }
};

}  // namespace tutti::test
