// Under mpirun: ranks as processes give the losses of one rank, and so those of ranks as threads, by the same bars.
#include <mpi.h>

#include <doctest/doctest.h>

#include <tutti/comm/mpi.hpp>

#include "training.hpp"

namespace {

using trainer_test::distance;

template <class T> constexpr double bar = std::is_same_v<T, double> ? 1e-12 : 1e-5;

TEST_CASE_TEMPLATE("mpi: the losses of one rank, and of as many threads", T, double, float) {
    const auto text = trainer_test::some_text(64);
    tutti::comm::mpi world(MPI_COMM_WORLD);
    auto o = trainer_test::short_run("ddp", world.size());
    transformer::one_thread_per_rank();
    const auto processes = transformer::run_on_cpu<T>(world, o, text, tutti::clock_type::now());
    if (world.rank() != 0) { return; }  // the references take one process
    const auto threads = trainer_test::train_on_threads<T>(o, text);
    const auto alone = trainer_test::train_on_threads<T>(trainer_test::short_run("local", 1), text);
    CHECK(distance(processes, alone) <= bar<T>);
    CHECK(distance(processes, threads) <= bar<T>);
    CHECK(processes.wire_bytes_per_step == threads.wire_bytes_per_step);  // the same collectives, counted alike
}

}  // namespace
