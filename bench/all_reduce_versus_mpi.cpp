// all_reduce over threads against MPI_Allreduce over processes of the same machine, in one run: ranks of MPI take turns
// with the threads of rank 0, size by size, several rounds each, so that a slow phase of the machine meets both. While
// the threads run, the processes sleep. MPI is started without support for threads, which would slow it down.
#include <algorithm>  // min
#include <chrono>     // naps
#include <fstream>    // report
#include <iostream>   // errors
#include <thread>     // naps
#include <vector>     // samples

#include <CLI/CLI.hpp>
#include <tutti/comm/mpi.hpp>
#include <tutti/comm/threads.hpp>

#include "support/environment.hpp"
#include "support/options.hpp"
#include "support/raw_mpi.hpp"
#include "support/suite.hpp"

namespace {

struct versus_options {
    bench::options common;
    int rounds = 3;
    double min_ratio = 0;
};

struct contest {
    std::vector<double> threads;
    std::vector<double> mpi;
    std::uint64_t wrong = 0;
    [[nodiscard]] double ratio() const { return bench::median(mpi) / bench::median(threads); }
};

void append(std::vector<double>& all, const std::vector<double>& more) {
    all.insert(all.end(), more.begin(), more.end());
}

// The processes meet without keeping a processor busy.
void sleep_until_all(MPI_Comm comm) {
    MPI_Request request = MPI_REQUEST_NULL;
    bench::expect_mpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
    for (int done = 0; done == 0;) {
        bench::expect_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        if (done == 0) { std::this_thread::sleep_for(std::chrono::microseconds(500)); }
    }
}

bench::algorithm<float> all_reduce_of(tutti::comm::threads& c) {
    return {bench::kind::all_reduce, "tutti",
            [&c](tutti::view<const float> in, tutti::view<float> out) { c.all_reduce(in, out, tutti::sum{}); }};
}

void compare(tutti::comm::mpi& world, std::size_t bytes, const versus_options& o, const std::vector<int>& processors,
             contest& out_of_place, contest& in_place) {
    const bench::options& b = o.common;
    const bench::repetition how{b.iterations, b.warmup, b.check, b.blocking, 0};
    const auto processor_of = [&](int rank) { return processors[static_cast<std::size_t>(rank) % processors.size()]; };
    const bench::algorithm<float> raw = bench::raw_mpi<float>(world.native_handle(), 0).front();
    bench::measurement<tutti::comm::mpi> over_mpi(world, bytes);
    for (int round = 0; round < o.rounds; ++round) {
        if (b.bind) { bench::bind_to(processor_of(world.rank())); }
        for (contest* c : {&out_of_place, &in_place}) {
            const bench::samples s = over_mpi.run(raw, bytes, c == &in_place, how);
            append(c->mpi, s.seconds);
            c->wrong += s.wrong;
        }
        if (world.rank() == 0) {
            tutti::comm::threads::launch(world.size(), [&](tutti::comm::threads& t) {
                if (b.bind) { bench::bind_to(processor_of(t.rank())); }
                bench::measurement<tutti::comm::threads> over_threads(t, bytes);
                for (contest* c : {&out_of_place, &in_place}) {
                    const bench::samples s = over_threads.run(all_reduce_of(t), bytes, c == &in_place, how);
                    if (t.rank() != 0) { continue; }
                    append(c->threads, s.seconds);
                    c->wrong += s.wrong;
                }
            });
        }
        sleep_until_all(world.native_handle());
    }
}

nlohmann::json json_of(const contest& c) {
    return {{"tutti_us", bench::json_of(bench::summarize(c.threads), 1e6)},
            {"mpi_us", bench::json_of(bench::summarize(c.mpi), 1e6)},
            {"ratio", c.ratio()},
            {"nwrong", c.wrong}};
}

// Rank 0 prints; its status is everybody's.
int contests(tutti::comm::mpi& world, const versus_options& o, nlohmann::json report) {
    const std::vector<int> processors = bench::allowed_processors();
    const bool first = world.rank() == 0;
    std::uint64_t wrong = 0;
    double worst_in_place = 0;
    double worst_out_of_place = 0;
    if (first) {
        fmt::print("# all_reduce, float, sum, {} ranks, {}: medians over {} rounds of the maximum over ranks\n",
                   world.size(), o.common.blocking ? "isolated" : "streaming", o.rounds);
        fmt::print("#{:>12}{:^34}{:^34}\n#{:>12}", "size", "out-of-place", "in-place", "(B)");
        for (int i = 0; i < 2; ++i) { fmt::print("{:>12}{:>12}{:>10}", "tutti (us)", "MPI (us)", "ratio"); }
        fmt::print("  #wrong\n");
    }
    for (const std::size_t size : o.common.sizes()) {
        contest out_of_place;
        contest in_place;
        compare(world, size, o, processors, out_of_place, in_place);
        if (!first) { continue; }
        fmt::print(" {:>12}", size);
        for (const contest* c : {&out_of_place, &in_place}) {
            fmt::print("{:>12.2f}{:>12.2f}{:>10.2f}", bench::median(c->threads) * 1e6, bench::median(c->mpi) * 1e6,
                       c->ratio());
        }
        fmt::print("{:>8}\n", out_of_place.wrong + in_place.wrong);
        std::fflush(stdout);
        wrong += out_of_place.wrong + in_place.wrong;
        const auto lower = [](double& worst, double ratio) { worst = worst == 0 ? ratio : std::min(worst, ratio); };
        lower(worst_in_place, in_place.ratio());
        lower(worst_out_of_place, out_of_place.ratio());
        report["rows"].push_back(
            {{"bytes", size}, {"out_of_place", json_of(out_of_place)}, {"in_place", json_of(in_place)}});
    }
    int status = 0;
    if (first) {
        fmt::print("# smallest ratio: {:.2f} out of place, {:.2f} in place\n", worst_out_of_place, worst_in_place);
        if (!o.common.json.empty()) { std::ofstream(o.common.json) << report.dump(1) << '\n'; }
        status = wrong != 0 || std::min(worst_in_place, worst_out_of_place) < o.min_ratio ? 1 : 0;
    }
    world.broadcast(tutti::view<int>(&status, 1), 0);
    return status;
}

int run(int argc, char** argv) {
    tutti::comm::mpi world({.single_threaded = true});
    const bool first = world.rank() == 0;
    CLI::App app("all_reduce: threads of tutti against processes of MPI; start it with mpirun");
    versus_options o;
    o.common.min_bytes = 4096;
    o.common.max_bytes = std::size_t{256} << 20;
    o.common.factor = 4;
    bench::add_size_options(app, o.common);
    bench::add_repetition_options(app, o.common);
    app.add_option("--rounds", o.rounds, "how often the two take turns at each size")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    app.add_option("--min-ratio", o.min_ratio, "fail when MPI takes less than this many times as long")
        ->check(CLI::Range(0.0, 1000.0));
    try {
        app.parse(argc, argv);
        bench::validate(o.common, world.size());
    } catch (const CLI::ParseError& e) {
        return first ? app.exit(e) : e.get_exit_code();
    } catch (const std::runtime_error& e) {
        if (first) { std::cerr << argv[0] << ": " << e.what() << '\n'; }
        return 2;
    }
    nlohmann::json report;
    if (first) {
        std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
        int length = 0;
        MPI_Get_library_version(text.data(), &length);
        const std::string library(text.data(), static_cast<std::size_t>(length));
        const nlohmann::json environment = bench::environment();
        bench::print_environment(environment, world.size());
        fmt::print("# {}\n", library.substr(0, library.find(',')));
        report = {{"schema", 1},           {"bench", "all_reduce_versus_mpi"},
                  {"ranks", world.size()}, {"command", bench::command_line(argc, argv)},
                  {"mpi", library},        {"environment", environment}};
    }
    return contests(world, o, std::move(report));
}

}  // namespace

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int status = 2;
    try {
        status = run(argc, argv);
    } catch (const std::exception& e) {
        std::cerr << argv[0] << ": " << e.what() << '\n';
        MPI_Abort(MPI_COMM_WORLD, status);
    }
    MPI_Finalize();
    return status;
}
