// dealii/dealii#2951, arborx/ArborX#347, Nek5000/gslib#52, cwpearson/stencil#8: communicators that are freed after
// MPI_Finalize. One lives in static storage, one in a static container, one outlives the environment in main().
#include <mpi.h>

#include <cstdio>    // puts
#include <optional>  // built late, destroyed at exit
#include <utility>   // move
#include <vector>    // containers

#include <tutti/comm/mpi.hpp>  // under test

namespace {
std::optional<tutti::comm::mpi> in_static_storage;
std::vector<tutti::comm::mpi> in_a_container;
}  // namespace

int main(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    std::optional<tutti::comm::mpi> in_main;
    {
        tutti::comm::mpi world;
        in_main.emplace(world.duplicate("main"));
        in_static_storage.emplace(world.duplicate("static"));
        in_a_container.push_back(in_static_storage->duplicate("child"));
        in_a_container.push_back(std::move(world));
        std::vector<int> v{1};
        in_a_container[0].all_reduce(v, tutti::view<int>(v), tutti::sum{});
        if (v[0] != in_main->size()) { return 1; }
    }
    MPI_Finalize();
    in_main.reset();
    return 0;  // the others end behind main
}
