// The command line of the collective benches. Letters as in nccl-tests where the meaning is the same.
// Needs CLI11.
#pragma once

#include <algorithm>  // find
#include <cstddef>    // size_t
#include <fstream>    // writable reports
#include <string>     // names
#include <vector>     // choices

#include <CLI/CLI.hpp>

#include "traffic.hpp"  // names

namespace bench {

struct options {
    std::size_t min_bytes = 8;
    std::size_t max_bytes = std::size_t{64} << 20;
    std::size_t factor = 8;
    int iterations = 0;
    int warmup = 5;
    bool check = true;
    bool blocking = true;
    std::string type = "float";
    int root = 0;
    std::vector<std::string> collectives;
    bool baselines = true;
    bool bind = false;
    double min_roofline = 0;
    std::string json;
    int ranks = 0;

    [[nodiscard]] bool wants(kind k) const {
        return collectives.empty() ||
               std::find(collectives.begin(), collectives.end(), std::string(name_of(k))) != collectives.end();
    }
    [[nodiscard]] std::vector<std::size_t> sizes() const {
        std::vector<std::size_t> list;
        for (std::size_t s = min_bytes; s <= max_bytes; s *= factor) {
            list.push_back(s);
            if (s > max_bytes / factor) { break; }  // the next one would be too large, or overflow
        }
        return list;
    }
};

/// Which sizes, and where the report goes.
inline void add_size_options(CLI::App& app, options& o) {
    const CLI::AsSizeValue bytes(false);
    app.add_option("-b,--minbytes", o.min_bytes, "smallest size (K, M, G are powers of 1024)")
        ->transform(bytes)
        ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 40))
        ->capture_default_str();
    app.add_option("-e,--maxbytes", o.max_bytes, "largest size")
        ->transform(bytes)
        ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 40))
        ->capture_default_str();
    app.add_option("-f,--stepfactor", o.factor, "size of a row over the size of the row above")
        ->check(CLI::Range(std::size_t{2}, std::size_t{1} << 30))
        ->capture_default_str();
    app.add_option("-J,--json", o.json, "write a report here");
}

/// How a row is measured.
inline void add_repetition_options(CLI::App& app, options& o) {
    app.add_option("-n,--iters", o.iterations, "timed iterations of a row; 0: what takes about 0.1 s, 10 to 2000")
        ->check(CLI::Range(0, 1000000))
        ->capture_default_str();
    app.add_option("-w,--warmup_iters", o.warmup, "iterations before the timed ones")
        ->check(CLI::Range(0, 1000000))
        ->capture_default_str();
    app.add_option("-c,--check", o.check, "1: count wrong results of every iteration; 0: do not look")
        ->capture_default_str();
    app.add_option("-z,--blocking", o.blocking, "1: a barrier before each call (isolated); 0: back to back (streaming)")
        ->capture_default_str();
    app.add_flag("--bind", o.bind, "tie rank r to the r-th processor");
}

/// All options of the tables. `own_ranks`: the program starts its ranks itself; otherwise mpirun does.
inline void add_options(CLI::App& app, options& o, bool own_ranks) {
    add_size_options(app, o);
    add_repetition_options(app, o);
    app.add_option("-d,--datatype", o.type, "element type")
        ->check(CLI::IsMember({"float", "double", "bfloat16"}))
        ->capture_default_str();
    app.add_option("-r,--root", o.root, "root of broadcast and reduce")
        ->check(CLI::Range(0, 1023))
        ->capture_default_str();
    const std::vector<std::string> names(kind_names.begin(), kind_names.end());
    app.add_option("-C,--collectives", o.collectives, "only these (several, separated by commas)")
        ->delimiter(',')
        ->check(CLI::IsMember(names));
    app.add_flag("!--no-baselines", o.baselines, "leave out other algorithms and the overhead rows");
    app.add_option("--min-roofline", o.min_roofline, "fail when a row of tutti falls below this share of the roofline")
        ->check(CLI::Range(0.0, 10.0));
    if (own_ranks) {
        o.ranks = 2;
        app.add_option("-t,--ranks", o.ranks, "ranks, one thread each")
            ->check(CLI::Range(1, 1024))
            ->capture_default_str();
    }
}

/// What CLI11 cannot see by one option alone. Throws std::runtime_error before anything was measured.
inline void validate(const options& o, int ranks) {
    if (o.max_bytes < o.min_bytes) { throw std::runtime_error("--maxbytes is below --minbytes"); }
    if (o.root >= ranks) { throw std::runtime_error("--root is not one of " + std::to_string(ranks) + " ranks"); }
    if (o.type == "bfloat16" && ranks > 17) {
        throw std::runtime_error("bfloat16 sums of this bench are exact for at most 17 ranks");
    }
    if (!o.json.empty() && !std::ofstream(o.json, std::ios::app)) {
        throw std::runtime_error("--json: cannot write " + o.json);
    }
}

}  // namespace bench
