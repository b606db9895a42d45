// What a consumer of tutti::mpi builds: MPI must come with it, without its C++ bindings.
#include <tutti/tutti.hpp>  // the headers must come too

#include <mpi.h>  // MPI_Init

#include <cstdio>  // printf

#if defined(MPI_CXX_H) || defined(OMPI_MPICXX_H)
#error "the C++ bindings of MPI were included"
#endif

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    std::printf("rank %d of %d\n", rank, size);
    MPI_Finalize();
}
