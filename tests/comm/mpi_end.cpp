// mpi: how a job begins and ends: what the last line says, thread levels, communicators that outlive MPI. One scenario
// a run, named by the first argument; those that must end the job are expected to fail with their text.
#include <tutti/comm/mpi.hpp>  // what is tested

#include <chrono>     // deadlines
#include <cstdio>     // reports
#include <cstdlib>    // setenv
#include <cstring>    // strcmp
#include <optional>   // static storage
#include <stdexcept>  // an error that is not ours
#include <string>     // texts
#include <thread>     // second threads

#include <stdlib.h>  // setenv

using namespace std::chrono_literals;
using namespace tutti;
using comm::failure_policy;
using comm::mpi;
using comm::mpi_options;

namespace {

// Static storage: destroyed after main, long after MPI_Finalize (dealii/dealii#2951, arborx/ArborX#347).
std::optional<mpi> forever;
std::optional<mpi> child_forever;

int failures = 0;
void expect(bool holds, const char* what, const std::string& seen = {}) {
    if (holds) { return; }
    std::fprintf(stderr, "not so: %s (%s)\n", what, seen.c_str());
    ++failures;
}
template <class E, class F> std::string text_of(F f) {
    try {
        f();
    } catch (const E& e) { return e.what(); } catch (const std::exception& e) {
        return std::string("another error: ") + e.what();
    }
    return "nothing was thrown";
}

mpi_options patient(duration timeout) {
    mpi_options o;
    o.timeout = timeout;
    o.on_failure = failure_policy::end_job;
    return o;
}
float sum_of_ones(mpi& c) {
    float x = 1;
    c.all_reduce(view(&x, 1), view(&x, 1), sum{});
    return x;
}
int world_rank() {
    int r = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    return r;
}
int world_size() {
    int n = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    return n;
}

std::string world_key() { return comm::detail::mpi_start_key(MPI_COMM_WORLD, "world", {}); }

// --- scenarios that end the job --------------------------------------------------------------------------------------

int timeout(int argc, char** argv) {
    return mpi::launch(
        argc, argv,
        [](mpi& world) {
            world.barrier();
            if (world.rank() == world.size() - 1) { std::this_thread::sleep_for(60s); }
            sum_of_ones(world);
        },
        patient(1s));
}

// dmlc/xgboost#11217: rank 1 throws between two collectives
int throws(int argc, char** argv) {
    return mpi::launch(
        argc, argv,
        [](mpi& world) {
            world.barrier();
            if (world.rank() == 1) { throw std::runtime_error("disk is full"); }
            world.barrier();
            world.barrier();
        },
        patient(60s));
}

int throws_an_int(int argc, char** argv) {
    return mpi::launch(
        argc, argv,
        [](mpi& world) {
            if (world.rank() == 1) { throw 1; }
            world.barrier();
        },
        patient(60s));
}

int aborts(int argc, char** argv) {
    return mpi::launch(
        argc, argv,
        [](mpi& world) {
            if (world.rank() == 1) { world.abort("loss is nan"); }
            world.barrier();
            world.barrier();
        },
        patient(60s));
}

int exception_leaves_environment(int argc, char** argv) {
    try {
        mpi::environment started(&argc, &argv);
        mpi world(patient(60s));
        if (world.rank() == 1) { throw std::runtime_error("caught too late"); }
        world.barrier();
        world.barrier();
    } catch (const std::exception&) {}
    return 0;
}

int failure_is_caught(int argc, char** argv) {
    mpi::environment started(&argc, &argv);
    mpi world(patient(60s));
    world.abort("enough");
    text_of<aborted_error>([&] { world.barrier(); });
    return 0;  // not a success, whatever main says
}

// pytorch/gloo#520: the first use of a communicator must keep the deadline too
int start(int argc, char** argv) {
    mpi::environment started(&argc, &argv);
    if (world_rank() == world_size() - 1) { std::this_thread::sleep_for(60s); }
    mpi world(patient(1s));
    return 0;
}

// NVIDIA/nccl#582: a rank that cannot start tells the others
int start_fails(int argc, char** argv) {
    mpi::environment started(&argc, &argv);
    if (world_rank() == 1) {
        comm::file_store store(comm::default_store_directory(), comm::detail::mpi_job_id());
        store.arrive(world_key(), 1);  // so that it cannot arrive again
        text_of<usage_error>([] { mpi world(patient(60s)); });
        std::this_thread::sleep_for(60s);
    }
    return mpi::launch(
        argc, argv, [](mpi&) {}, patient(60s));
}

int start_stuck(int argc, char** argv) {
    mpi::environment started(&argc, &argv);
    if (world_rank() == 1) {
        comm::file_store store(comm::default_store_directory(), comm::detail::mpi_job_id());
        store.arrive(world_key(), 1);
        std::this_thread::sleep_for(60s);
    }
    mpi world(patient(1s));
    return 0;
}

// --- scenarios that pass ---------------------------------------------------------------------------------------------

int returns(int argc, char** argv) {
    const int code = mpi::launch(argc, argv, [](mpi& world) { return static_cast<int>(sum_of_ones(world)) * 10 + 7; });
    expect(code % 10 == 7 && code > 10, "launch returns what the function returns", std::to_string(code));
    int finalized = 0;
    MPI_Finalized(&finalized);
    expect(finalized != 0, "launch finalizes MPI");
    expect(text_of<usage_error>([] { mpi::environment again; }) ==
               "mpi: MPI has been finalized and cannot be started again",
           "MPI cannot be started twice");
    expect(text_of<usage_error>([] { mpi late; }).starts_with("mpi: MPI is not running"),
           "no communicator without MPI");
    return failures;
}

// Rank 1 makes a root of its own while rank 0, the first of another one with the same name, waits in the store.
int start_in_groups(int argc, char** argv) {
    mpi::environment started(&argc, &argv);
    const int rank = world_rank();
    MPI_Comm group = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &group);
    if (rank == 1) { std::this_thread::sleep_for(300ms); }
    if (rank == 2) { MPI_Recv(nullptr, 0, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }
    const std::string seen = text_of<usage_error>([&] {
        mpi mine(group, patient(20s));
        const float ranks = rank == 1 ? 1.0f : 2.0f;
        expect(sum_of_ones(mine) == ranks, "the root is of its own group");
        if (rank == 1) { MPI_Send(nullptr, 0, MPI_BYTE, 2, 0, MPI_COMM_WORLD); }
    });
    expect(seen == "nothing was thrown", "groups make roots of one name at the same time", seen);
    if (failures != 0) { MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE); }
    MPI_Comm_free(&group);
    return failures;
}

int outlives(int argc, char** argv) {
    expect(text_of<usage_error>([] { mpi early; }).starts_with("mpi: MPI is not running"),
           "no communicator before MPI");
    {
        mpi::environment started(&argc, &argv);
        forever.emplace(patient(60s));
        child_forever.emplace(forever->duplicate("child"));
        expect(sum_of_ones(*child_forever) == static_cast<float>(world_size()), "the child works");
    }
    // MPI is gone: calls are refused, moves and destructors do nothing.
    const std::string refused = text_of<usage_error>([] { forever->barrier(); });
    expect(refused.starts_with("barrier: MPI has been finalized, call "), "a call after MPI_Finalize is refused",
           refused);
    forever->abort("harmless");
    mpi moved = std::move(*forever);
    expect(moved.size() > 0, "it still knows its size");
    return failures;
}

// MPI belongs to the application: an environment that comes second finalizes nothing.
int foreign_start(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    expect(mpi::launch(argc, argv, [](mpi& world) { world.barrier(); }) == 0, "launch works in a running MPI");
    int finalized = 0;
    MPI_Finalized(&finalized);
    expect(finalized == 0, "and leaves it running");
    {
        mpi world(patient(60s));
        world.barrier();
        world.abort("the next one must not care");
    }
    mpi world(patient(60s));
    world.barrier();
    MPI_Finalize();
    return failures;
}

int single_threaded(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    if (level == MPI_THREAD_MULTIPLE) {
        std::printf("skipped: this MPI gives MPI_THREAD_MULTIPLE to everybody\n");
        MPI_Finalize();
        return 77;
    }
    const std::string refused = text_of<usage_error>([] { mpi world(patient(60s)); });
    expect(refused.starts_with("mpi: MPI was initialized below MPI_THREAD_MULTIPLE"), "a lower level is refused",
           refused);
    mpi_options o = patient(60s);
    o.on_failure = failure_policy::throw_error;
    o.single_threaded = true;
    {
        mpi world(o);
        mpi lane = world.duplicate("lane");
        expect(sum_of_ones(lane) == static_cast<float>(lane.size()), "a duplicate works");
        std::string seen;
        std::thread([&] { seen = text_of<usage_error>([&] { lane.barrier(); }); }).join();
        expect(seen.starts_with("barrier: called from a second thread, but MPI runs single-threaded"),
               "a call from a second thread is refused", seen);
        lane.barrier();  // and spoiled nothing
        auto half = world.split(std::vector<int>(static_cast<std::size_t>(world.size()), 0), "all");
        expect(half.has_value(), "split works");
        // An abort may come from any thread; the owner passes it on.
        MPI_Barrier(MPI_COMM_WORLD);
        if (world.rank() == 0) {
            std::thread([&] { world.abort("from a watchdog"); }).join();
        }
        const std::string heard = text_of<aborted_error>([&] {
            world.barrier();
            world.barrier();
        });
        expect(heard.find("aborted: from a watchdog") != std::string::npos, "an abort from a second thread is heard",
               heard);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    return failures;
}

int policy(int, char**) {
    ::unsetenv("OMPI_MCA_orte_enable_recovery");
    expect(comm::default_failure_policy() == failure_policy::end_job, "the default ends the job");
    ::setenv("OMPI_MCA_orte_enable_recovery", "1", 1);
    expect(comm::default_failure_policy() == failure_policy::throw_error,
           "mpirun --enable-recovery lets survivors live");
    expect(mpi_options{}.on_failure == failure_policy::throw_error, "options follow");
    return failures;
}

struct scenario {
    const char* name;
    int (*run)(int, char**);
};
constexpr scenario scenarios[] = {
    {"timeout", timeout},
    {"throws", throws},
    {"throws_an_int", throws_an_int},
    {"aborts", aborts},
    {"exception_leaves_environment", exception_leaves_environment},
    {"failure_is_caught", failure_is_caught},
    {"start", start},
    {"start_fails", start_fails},
    {"start_stuck", start_stuck},
    {"start_in_groups", start_in_groups},
    {"returns", returns},
    {"outlives", outlives},
    {"foreign_start", foreign_start},
    {"single_threaded", single_threaded},
    {"policy", policy},
};

}  // namespace

int main(int argc, char** argv) {
    // The store is a directory of the build, given behind the scenario's name.
    if (argc > 2) { ::setenv("TUTTI_STORE", argv[2], 1); }
    for (const scenario& s : scenarios) {
        if (argc > 1 && std::strcmp(argv[1], s.name) == 0) { return s.run(argc, argv); }
    }
    std::fprintf(stderr, "usage: %s SCENARIO [STORE]\n", argv[0]);
    return 2;
}
