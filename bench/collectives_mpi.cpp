// Collectives over MPI, started by mpirun, beside MPI's own calls in the same run: the difference is what tutti adds.
#include <iostream>  // errors
#include <vector>    // algorithms

#include <CLI/CLI.hpp>
#include <tutti/comm/mpi.hpp>

#include "support/raw_mpi.hpp"
#include "support/suite.hpp"

namespace {

template <class T> bench::outcome measure(tutti::comm::mpi& world, const bench::options& o) {
    std::vector<bench::algorithm<T>> others;
    if constexpr (!std::same_as<T, tutti::bfloat16>) {  // MPI has no such type
        if (o.baselines) { others = bench::raw_mpi<T>(world.native_handle(), o.root); }
    }
    return bench::suite<tutti::comm::mpi>(world, o, "mpi").run(others);
}

int run(tutti::comm::mpi& world, int argc, char** argv) {
    const bool first = world.rank() == 0;
    CLI::App app("Collectives of tutti over MPI; start it with mpirun");
    bench::options o;
    bench::add_options(app, o, false);
    try {
        app.parse(argc, argv);
        bench::validate(o, world.size());
    } catch (const CLI::ParseError& e) {
        return first ? app.exit(e) : e.get_exit_code();
    } catch (const std::runtime_error& e) {
        if (first) { std::cerr << argv[0] << ": " << e.what() << '\n'; }
        return 2;
    }
    nlohmann::json environment;
    const std::vector<int> processors = bench::allowed_processors();
    if (first) {
        environment = bench::environment();
        bench::print_environment(environment, world.size());
    }
    if (o.bind) { bench::bind_to(processors[static_cast<std::size_t>(world.rank()) % processors.size()]); }
    bench::outcome result = o.type == "float"    ? measure<float>(world, o)
                            : o.type == "double" ? measure<double>(world, o)
                                                 : measure<tutti::bfloat16>(world, o);
    int status = 0;
    if (first) {
        status =
            bench::conclude(std::move(result), o, environment, "mpi", world.size(), bench::command_line(argc, argv));
    }
    world.broadcast(tutti::view<int>(&status, 1), 0);
    return status;
}

}  // namespace

int main(int argc, char** argv) {
    return tutti::comm::mpi::launch(argc, argv, [&](tutti::comm::mpi& world) { return run(world, argc, argv); });
}
