// main() of tests that mpirun starts: initializes MPI for any thread, runs doctest on every rank, and ends the job at
// once when a rank has a failure, since its peers may be waiting for it in a collective.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>  // the runner
#include <mpi.h>              // MPI_Init_thread, MPI_Abort

#include <cstdio>   // fprintf
#include <cstdlib>  // EXIT_FAILURE

int main(int argc, char** argv) {
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (provided < MPI_THREAD_MULTIPLE) {
        std::fprintf(stderr, "this MPI offers thread level %d, the tests need MPI_THREAD_MULTIPLE\n", provided);
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }

    doctest::Context context(argc, argv);
    // Every rank runs the same cases; a passing rank other than 0 has nothing to add.
    if (rank != 0) context.setOption("minimal", true);
    const int failures = context.run();
    std::fflush(nullptr);
    if (failures != 0) {
        std::fprintf(stderr, "rank %d failed\n", rank);
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }
    MPI_Finalize();
    return 0;
}
