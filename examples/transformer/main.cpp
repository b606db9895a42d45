// The trainer's command line: reads options and text, runs the ranks (threads, or mpirun's processes), reports.
// Exit codes: 0 trained; 2 the user asked for something impossible (nothing was written); 1 anything else.
#include <algorithm>   // replace, find_if
#include <cmath>       // bits
#include <cstdint>     // tokens
#include <cstdio>      // stderr
#include <cstdlib>     // getenv
#include <filesystem>  // own sources
#include <new>         // bad_alloc
#include <optional>    // exit code
#include <string>      // messages
#include <utility>     // pair
#include <vector>      // paths

#include <CLI/CLI.hpp>             // command line
#include <fmt/format.h>            // messages
#include <tutti/comm/threads.hpp>  // ranks as threads
#if TRANSFORMER_WITH_MPI
#include <tutti/comm/mpi.hpp>  // ranks as processes
#endif

#include "any_ranks.hpp"
#include "blas.hpp"
#include "comparison.hpp"
#include "data.hpp"
#include "options.hpp"
#include "parallel_run.hpp"
#include "pipelines.hpp"
#include "report.hpp"
#include "run_on_cpu.hpp"
#include "weights.hpp"
#if TRANSFORMER_WITH_CUDA
#include "cuda/run.hpp"
#endif

namespace {

using namespace transformer;

/// mpirun's variables, by which a process knows before MPI_Init that it has siblings.
int launcher_number(const char* of_open_mpi, const char* of_mpich, int otherwise) {
    for (const char* const name : {of_open_mpi, of_mpich}) {
        if (const char* const text = std::getenv(name)) { return std::atoi(text); }
    }
    return otherwise;
}
bool is_first_process() { return launcher_number("OMPI_COMM_WORLD_RANK", "PMI_RANK", 0) == 0; }
int launched_processes() { return launcher_number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", 1); }

void print_results(const options& o, const corpus& text, const result& r) {
    const double bits = r.validation_loss() / std::log(2.0);
    const char* const unit = o.unit();
    fmt::print("{} parameters, {} {}s ({} to train on), {} {} ({}, {}, {})\n", r.parameters, text.size(), unit,
               text.training().size(), o.ranks, o.ranks == 1 ? "rank" : "ranks", o.pipeline, o.backend, o.precision);
    fmt::print("{} steps in {:.1f} s, {:.0f} tokens/s, exposed communication {:.1f} % of it, {} bytes sent per rank "
               "and step\n",
               r.training.size(), r.total_seconds, tokens_of(o, r) / r.total_seconds,
               100 * r.exposed_seconds / r.total_seconds, r.wire_bytes_per_step);
    if (o.device == "cuda") {
        fmt::print("{}: {:.1f} model TFLOP/s, {}\n", r.device, model_flops(o, r) / 1e12,
                   utilization_text(model_flops(o, r), r.peak_flops * o.ranks));
    }
    fmt::print("loss {0:.3f} -> {1:.3f} nats per {4}; validation {2:.4f} nats per {4}, {3:.3f} bits per {4}\n",
               r.training.front().second, r.training.back().second, r.validation_loss(), bits, unit);
    std::string sample;
    for (const std::uint16_t t : r.sample) {
        if (!o.token_file.empty()) {
            sample += fmt::format("{}{}", sample.empty() ? "" : " ", t);
        } else {  // half-learned UTF-8 would confuse the terminal
            sample += t == '\n' || (t >= ' ' && t <= '~') ? static_cast<char>(t) : '?';
        }
    }
    if (!sample.empty()) {
        fmt::print("---- the model writes{} ----\n{}\n--------------------------\n",
                   o.token_file.empty() ? "" : ", as numbers of GPT-2 tokens", sample);
    }
    if (r.zeroth) { fmt::print("{}\n", text_of(*r.zeroth)); }
    if (!o.save.empty()) { fmt::print("weights  {}\n", o.save); }
    fmt::print("report   {}\ntrace    {}  (open it in https://ui.perfetto.dev)\npicture  {}\n", o.report, o.trace,
               o.plot);
}

/// Rank 0 writes the results. Returns them.
result run_rank(any_ranks& world, const options& o, const corpus& text, tutti::deadline origin) {
    result r = [&] {
#if TRANSFORMER_WITH_CUDA
        if (o.device == "cuda") { return gpu::run(world, o, text, origin); }
#endif
        return o.precision == "double" ? run_on_cpu<double>(world, o, text, origin)
                                       : run_on_cpu<float>(world, o, text, origin);
    }();
    if (world.rank() != 0) { return r; }
    write_results(o, r);
    if (!o.quiet && o.compare.empty()) { print_results(o, text, r); }
    return r;
}

/// What is to be done, all of it checked.
struct plan {
    options asked;              // the files of a comparison are its own
    std::vector<options> runs;  // one, or those of a comparison
    corpus text;
};

/// Of runs, one after the other.
void announce(const plan& p, std::size_t run) {
    if (!p.asked.compare.empty() && !p.asked.quiet) {
        fmt::print(stderr, "{} of {}: {}\n", run + 1, p.runs.size(), p.runs[run].pipeline);
    }
}
void conclude(const plan& p, std::vector<result> results) {
    if (p.asked.compare.empty()) { return; }
    std::vector<compared_run> all;
    for (std::size_t i = 0; i < results.size(); ++i) { all.push_back({p.runs[i], std::move(results[i])}); }
    write_comparison(p.asked, all);
    if (p.asked.quiet) { return; }
    fmt::print("{}report   {}\npicture  {}\n", comparison_table(all), p.asked.report, p.asked.plot);
}

/// This project's own sources: real text that is always there.
std::vector<std::string> own_sources() {
    std::vector<std::string> paths;
    for (const char* const part : {"README.md", "include", "tests", "bench", "examples"}) {
        const std::string path = std::string(TUTTI_SOURCE_DIR "/") + part;
        if (std::filesystem::exists(path)) { paths.push_back(path); }
    }
    return paths;
}

/// All that can be refused before something is written, the cheap questions first.
void check(options& o, int processes) {
    complete(o, pipelines_known::is_single_rank(o.pipeline), processes);
    if (o.of_parts()) { static_cast<void>(schedule_of(o)); }  // refuses
    if (o.device == "cuda") {
#if TRANSFORMER_WITH_CUDA
        gpu::expect_devices(o);
#else
        throw bad_input("--device: this build is without CUDA: when it was configured, no nvcc, no cuBLAS or no GPU was "
                        "found (the preset cuda builds for GPUs elsewhere)");
#endif
    }
    if (o.of_forward_passes()) {
        const int here =
            processes == 0 ? o.ranks : launcher_number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", processes);
        require_memory(demand_of(o, here),
                       fmt::format("'{}' on {} {} in {}", o.pipeline, here, here == 1 ? "rank" : "ranks", o.precision));
    }
    if (!o.load.empty()) { weights_file(o.load, o.model).require_tied_head(o.model); }
}
plan prepare(const options& asked, int processes) {
    std::vector<options> runs = runs_of(asked);
    options whole = asked;
    for (options& o : runs) {
        check(o, processes);
        whole.trace = o.trace;
        whole.plot = o.plot;
        if (asked.compare.empty()) { continue; }
        for (std::string* const file : {&o.report, &o.trace, &o.plot}) { *file = file_of_run(*file, o.pipeline); }
    }
    const options& o = runs.front();
    corpus text = o.token_file.empty() ? corpus(read_text(o.data.empty() ? own_sources() : o.data), o.model.context)
                                       : corpus(o.token_file, o.validation_token_file, o.model);
    one_thread_per_rank();
    return {std::move(whole), std::move(runs), std::move(text)};
}
void claim_files(const plan& p) {
    for (const options& o : p.runs) { transformer::claim_files(o); }
    if (!p.asked.compare.empty()) { transformer::claim_files(p.asked); }
}

void run_threads(const options& o) {
    if (launched_processes() > 1) {
        throw bad_input(fmt::format("--backend: 'threads' under mpirun would train {} times over; use --backend {}",
                                    launched_processes(), o.device == "cuda" ? "nccl" : "mpi"));
    }
    const plan p = prepare(o, 0);
    claim_files(p);
    std::vector<result> results(p.runs.size());
    for (std::size_t i = 0; i < p.runs.size(); ++i) {
        announce(p, i);
        const tutti::deadline origin = tutti::clock_type::now();
        tutti::comm::threads::launch(p.runs[i].ranks, [&](tutti::comm::threads& rank) {
            any_ranks world(rank);
            result r = run_rank(world, p.runs[i], p.text, origin);
            if (world.rank() == 0) { results[i] = std::move(r); }
        });
    }
    conclude(p, std::move(results));
}

#if TRANSFORMER_WITH_MPI
/// Did work() refuse on any rank? The first one that did says why: a file may be readable on one machine alone.
template <class Work> bool any_refuses(any_ranks& world, Work work) {
    std::string refused;
    try {
        work();
    } catch (const bad_input& e) { refused = e.what(); }
    const auto answers = world.gather_control({refused.empty() ? 0u : 1u, 0, 0, 0});
    const auto first = std::find_if(answers.begin(), answers.end(), [](const auto& a) { return a[0] != 0; });
    if (first == answers.end()) { return false; }
    if (first - answers.begin() == world.rank()) { fmt::print(stderr, "transformer: {}\n", refused); }
    return true;
}

int run_mpi(int argc, char** argv, const options& o) {
    return tutti::comm::mpi::launch(argc, argv, [&](tutti::comm::mpi& process) {
        any_ranks world(process);
        std::optional<plan> p;
        if (any_refuses(world, [&] { p.emplace(prepare(o, world.size())); })) { return 2; }
        for (const auto& [part, name] :
             {std::pair(p->text.training(), "training text"), std::pair(p->text.validation(), "validation text")}) {
            world.agree(tutti::hash_bytes(tutti::as_bytes(tutti::view<const std::uint16_t>(part))), name);
        }
        if (any_refuses(world, [&] { world.rank() == 0 ? claim_files(*p) : void(); })) { return 2; }
        std::vector<result> results;
        for (std::size_t i = 0; i < p->runs.size(); ++i) {
            if (world.rank() == 0) { announce(*p, i); }
            world.barrier();  // machines share no clock: they agree on this moment as the traces' time zero
            results.push_back(run_rank(world, p->runs[i], p->text, tutti::clock_type::now()));
        }
        if (world.rank() == 0) { conclude(*p, std::move(results)); }
        return 0;
    });
}
#endif

/// Parses the command line. Returns the exit code when there is nothing to run.
std::optional<int> parse(int argc, char** argv, options& o) {
    command_line app("Trains a decoder-only transformer on text or GPT-2 tokens, over ranks that are threads, MPI "
                     "processes or GPUs.",
                     "transformer");
    declare(app, o, pipelines_known::help());
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (is_first_process()) { fmt::print("{}", app.help()); }
        return 0;
    } catch (const CLI::ExtrasError& e) {
        throw bad_input(fmt::format("{}; --help lists the options", e.what()));
    } catch (const CLI::ParseError& e) { throw bad_input(e.what()); }
    choose_model(app, o);
    for (const std::string& name : o.compare.empty() ? std::vector{o.pipeline} : o.compare) {
        if (!pipelines_known::has(name)) {
            throw bad_input(fmt::format("{}: '{}' is not one of {}", o.compare.empty() ? "--pipeline" : "--compare",
                                        name, pipelines_known::names()));
        }
    }
    refuse_unused(app, o);
    return std::nullopt;
}

/// A request refused before ranks could talk is refused by every process of mpirun. The first one speaks; the others
/// end as if all were well, since mpirun kills what still runs once a process fails, and would cut the first one short.
int complain(const char* what, int code) {
    if (code == 2 && !is_first_process()) { return 0; }
    std::string line = what;  // one line, whatever a library wrote
    std::replace(line.begin(), line.end(), '\n', ' ');
    fmt::print(stderr, "transformer: {}\n", line);
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        options o;
        if (const auto code = parse(argc, argv, o)) { return *code; }
        if (o.backend == "threads") {
            run_threads(o);
        }
#if TRANSFORMER_WITH_MPI
        else if (o.backend == "mpi" || o.backend == "nccl") {
            return run_mpi(argc, argv, o);
        }
#endif
        else {
            throw bad_input(
                fmt::format("--backend: '{}' is not one of {}", o.backend,
                            TRANSFORMER_WITH_MPI ? "threads, mpi, nccl" : "threads (this build found no MPI)"));
        }
    } catch (const bad_input& e) { return complain(e.what(), 2); } catch (const std::bad_alloc&) {
        return complain(
            "there is not enough memory; --micro-batch, --context, --layers and --width make a run smaller, "
            "and ranks of zero3, tp and pp share a model",
            1);
    } catch (const std::exception& e) { return complain(e.what(), 1); }
    return 0;
}
