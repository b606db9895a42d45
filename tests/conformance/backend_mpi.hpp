// The conformance backend `mpi`: as many ranks as mpirun started. Sums come in MPI's order.
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
    static constexpr bool keeps_nan = true;
    static std::vector<int> sizes() {
        int n = 0;
        MPI_Comm_size(MPI_COMM_WORLD, &n);
        return {n};
    }
    static void run(int, const std::function<void(communicator&)>& body,
                    std::chrono::seconds timeout = std::chrono::seconds(50)) {
        communicator c(MPI_COMM_WORLD, {.timeout = timeout});
        try {
            body(c);
        } catch (const std::exception& e) {  // the others wait for this rank: the job cannot go on
            std::fprintf(stderr, "rank %d: %s\n", c.rank(), e.what());
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
};

}  // namespace tutti::test
