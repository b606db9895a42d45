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
    tutti::comm::mpi process(MPI_COMM_WORLD);
    transformer::any_ranks world(process);
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

TEST_CASE("mpi: documents whose attention processes share have the losses of one rank") {
    const auto text = trainer_test::some_text(64);
    tutti::comm::mpi process(MPI_COMM_WORLD);
    transformer::any_ranks world(process);
    transformer::one_thread_per_rank();
    const auto run_of = [](const char* pipeline, int ranks) {
        transformer::options o;
        o.model = {.vocabulary = 256, .context = 64, .layers = 2, .heads = 2, .width = 16};
        o.pipeline = pipeline;
        o.lengths = "magi";
        o.ranks = ranks;
        o.steps = 5;
        o.quiet = true;
        transformer::complete(o, false, 0);
        return o;
    };
    for (const char* const pipeline : {"packed", "even-ring", "zeppelin"}) {
        const auto processes =
            transformer::run_on_cpu<double>(world, run_of(pipeline, world.size()), text, tutti::clock_type::now());
        if (world.rank() != 0) { continue; }
        const auto alone = trainer_test::train_on_threads<double>(run_of("zeppelin", 1), text);
        CHECK(distance(processes, alone) <= bar<double>);
        const auto threads = trainer_test::train_on_threads<double>(run_of(pipeline, world.size()), text);
        CHECK(processes.wire_bytes_per_step == threads.wire_bytes_per_step);
        CHECK(processes.sequence->imbalance == threads.sequence->imbalance);
    }
}

TEST_CASE("mpi: processes that have parts of the model, and of sequences, have the losses of one rank") {
    const auto text = trainer_test::some_text(64);
    tutti::comm::mpi process(MPI_COMM_WORLD);
    transformer::any_ranks world(process);
    transformer::one_thread_per_rank();
    const auto run_of = [](const char* pipeline, int ranks, int sp = 1, const char* lengths = "", int zero = 1) {
        transformer::options o;
        o.model = {.vocabulary = 256, .context = 64, .layers = 4, .heads = 2, .width = 16};
        o.pipeline = pipeline;
        o.ranks = ranks;
        o.steps = 4;
        o.quiet = true;
        if (o.of_parts()) {
            const int rest = ranks / sp;
            o.micro_batch = sp == 1 ? 1 : 3;
            o.tp = rest % 2 == 0 ? 2 : 1;
            o.pp = rest == 4 && zero == 1 ? 2 : 1;
            o.dp = rest / o.tp / o.pp;
            o.sp = sp;
            o.zero = zero;
            o.pipeline_schedule = zero == 1 ? "zb-h1" : "1f1b";
            o.lengths = lengths;
        }
        transformer::complete(o, ranks == 1 && !o.of_parts(), 0);
        return o;
    };
    const int sp = world.size() == 3 ? 3 : 2;
    for (const auto& cut :
         {run_of("3d", world.size()), run_of("3d", world.size(), sp), run_of("3d", world.size(), sp, "magi"),
          run_of("3d", world.size(), 1, "", 2), run_of("3d", world.size(), 1, "", 3)}) {
        const auto processes = transformer::run_on_cpu<double>(world, cut, text, tutti::clock_type::now());
        if (world.rank() != 0) { continue; }
        auto whole = run_of("local", 1);
        if (cut.of_documents()) {
            whole = run_of("3d", 1, 1, "magi");
            whole.micro_batch = cut.micro_batch;
        }
        CHECK(distance(processes, trainer_test::train_on_threads<double>(whole, text)) <= bar<double>);
        const auto threads = trainer_test::train_on_threads<double>(cut, text);
        CHECK(processes.parallel->bytes == threads.parallel->bytes);
    }
}

}  // namespace
