// The collectives of MPI itself, called as a program without tutti would call them: what tutti::mpi is compared with.
// Needs MPI.
#pragma once

#include <stdexcept>  // failures
#include <string>     // names
#include <vector>     // algorithms

#include <mpi.h>

#include "measure.hpp"  // algorithm

namespace bench {

inline void expect_mpi(int code, const char* function) {
    if (code != MPI_SUCCESS) { throw std::runtime_error(std::string(function) + " failed"); }
}

template <class T> [[nodiscard]] MPI_Datatype mpi_type() {
    static_assert(std::same_as<T, float> || std::same_as<T, double>);
    return std::same_as<T, float> ? MPI_FLOAT : MPI_DOUBLE;
}

/// Plain calls on `comm`. MPI's in-place form of reduce_scatter leaves its result elsewhere than tutti's: not compared.
template <class T> [[nodiscard]] std::vector<algorithm<T>> raw_mpi(MPI_Comm comm, int root) {
    using in = tutti::view<const T>;
    using out = tutti::view<T>;
    const MPI_Datatype type = mpi_type<T>();
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    const auto together = [comm] { expect_mpi(MPI_Barrier(comm), "MPI_Barrier"); };
    const auto size_of = [](auto v) { return static_cast<int>(v.size()); };
    const auto inside = [](in a, out b) {  // a is a part of b
        return !b.empty() && tutti::overlaps(a.data(), a.size_bytes(), b.data(), b.size_bytes());
    };
    return {
        {kind::all_reduce, "MPI_Allreduce",
         [=](in a, out b) {
             const void* const from = inside(a, b) ? MPI_IN_PLACE : a.data();
             expect_mpi(MPI_Allreduce(from, b.data(), size_of(b), type, MPI_SUM, comm), "MPI_Allreduce");
         },
         true, together},
        {kind::reduce_scatter, "MPI_Reduce_scatter_block",
         [=](in a, out b) {
             expect_mpi(MPI_Reduce_scatter_block(a.data(), b.data(), size_of(b), type, MPI_SUM, comm),
                        "MPI_Reduce_scatter_block");
         },
         false, together},
        {kind::all_gather, "MPI_Allgather",
         [=](in a, out b) {
             const void* const from = inside(a, b) ? MPI_IN_PLACE : a.data();
             expect_mpi(MPI_Allgather(from, size_of(a), type, b.data(), size_of(a), type, comm), "MPI_Allgather");
         },
         true, together},
        {kind::broadcast, "MPI_Bcast",
         [=](in, out b) { expect_mpi(MPI_Bcast(b.data(), size_of(b), type, root, comm), "MPI_Bcast"); }, true,
         together},
        {kind::reduce, "MPI_Reduce",
         [=](in a, out b) {
             const void* const from = inside(a, b) && rank == root ? MPI_IN_PLACE : a.data();
             expect_mpi(MPI_Reduce(from, rank == root ? b.data() : nullptr, size_of(a), type, MPI_SUM, root, comm),
                        "MPI_Reduce");
         },
         true, together},
        {kind::all_to_all, "MPI_Alltoall",
         [=](in a, out b) {
             int ranks = 1;
             MPI_Comm_size(comm, &ranks);
             const int part = size_of(a) / ranks;
             expect_mpi(MPI_Alltoall(a.data(), part, type, b.data(), part, type, comm), "MPI_Alltoall");
         },
         false, together},
    };
}

}  // namespace bench
