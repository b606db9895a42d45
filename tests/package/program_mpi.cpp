// What a consumer of tutti::mpi builds: MPI must come with it, without its C++ bindings.
#include <tutti/comm/mpi.hpp>  // the header of the component

#include <fmt/core.h>  // print
#include <mpi.h>       // the include guards of its C++ bindings

#include <vector>  // what is summed

#if defined(MPI_CXX_H) || defined(OMPI_MPICXX_H)
#error "the C++ bindings of MPI were included"
#endif

int main(int argc, char** argv) {
    return tutti::comm::mpi::launch(argc, argv, [](tutti::comm::mpi& comm) {
        std::vector<int> ones(5, 1);
        const tutti::view all{ones};
        comm.all_reduce(all, all, tutti::sum{});
        fmt::print("rank {} of {}\n", comm.rank(), ones.back());
    });
}
