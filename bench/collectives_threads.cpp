// Collectives over threads, with two yardsticks in the same run: the staged algorithm of most shared-memory libraries
// (copy in, reduce, copy out) and memcpy.
#include <cstring>   // memcpy
#include <iostream>  // errors
#include <vector>    // staging memory

#include <CLI/CLI.hpp>
#include <tutti/comm/threads.hpp>
#include <tutti/core/partition.hpp>

#include "support/suite.hpp"

namespace {

// One copy of every rank's input, and one of the result.
struct staging {
    std::vector<tutti::buffer<std::byte>> inputs;
    tutti::buffer<std::byte> result;
    staging(int ranks, std::size_t bytes) : result(tutti::host_queue{}, bytes) {
        for (int r = 0; r < ranks; ++r) { inputs.emplace_back(tutti::host_queue{}, bytes); }
    }
};

template <class T> bench::algorithm<T> staged(tutti::comm::threads& c, staging& s) {
    return {bench::kind::all_reduce, "staged", [&c, &s](tutti::view<const T> in, tutti::view<T> out) {
                const auto ranks = static_cast<std::size_t>(c.size());
                const auto me = static_cast<std::size_t>(c.rank());
                std::memcpy(s.inputs[me].data(), in.data(), in.size_bytes());
                c.barrier();
                const tutti::part slice = tutti::partition(in.size(), ranks, me, 128 / sizeof(T));
                std::vector<const void*> rows;
                for (const auto& b : s.inputs) { rows.push_back(b.data() + slice.first * sizeof(T)); }
                tutti::reduce_function_of<T, tutti::sum>()(s.result.data() + slice.first * sizeof(T), rows.data(),
                                                           c.size(), slice.count);
                c.barrier();
                std::memcpy(out.data(), s.result.data(), out.size_bytes());
            }};
}

template <class T> bench::algorithm<T> copies() {
    return {bench::kind::memory_copy, "memcpy",
            [](tutti::view<const T> in, tutti::view<T> out) { std::memcpy(out.data(), in.data(), in.size_bytes()); }};
}

template <class T> bench::outcome measure(const bench::options& o) {
    bench::outcome result;
    const std::vector<int> processors = bench::allowed_processors();
    staging shared(o.ranks, o.baselines ? o.max_bytes : 0);
    tutti::comm::threads::launch(o.ranks, [&](tutti::comm::threads& c) {
        if (o.bind) { bench::bind_to(processors[static_cast<std::size_t>(c.rank()) % processors.size()]); }
        bench::suite<tutti::comm::threads> suite(c, o, "threads");
        std::vector<bench::algorithm<T>> others;
        if (o.baselines) {
            std::memset(shared.inputs[static_cast<std::size_t>(c.rank())].data(), 0, o.max_bytes);  // first touch
            if (c.rank() == 0) { std::memset(shared.result.data(), 0, o.max_bytes); }
            others = {staged<T>(c, shared), copies<T>()};
        }
        bench::outcome mine = suite.run(others);
        if (c.rank() == 0) { result = std::move(mine); }
    });
    return result;
}

}  // namespace

int main(int argc, char** argv) try {
    CLI::App app("Collectives of tutti over threads of this process");
    bench::options o;
    bench::add_options(app, o, true);
    CLI11_PARSE(app, argc, argv);
    bench::validate(o, o.ranks);
    const nlohmann::json environment = bench::environment();
    bench::print_environment(environment, o.ranks);
    bench::outcome result = o.type == "float"    ? measure<float>(o)
                            : o.type == "double" ? measure<double>(o)
                                                 : measure<tutti::bfloat16>(o);
    return bench::conclude(std::move(result), o, environment, "threads", o.ranks, bench::command_line(argc, argv));
} catch (const std::exception& e) {
    std::cerr << argv[0] << ": " << e.what() << '\n';
    return 2;
}
