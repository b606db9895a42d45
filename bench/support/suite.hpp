// The collective tables: all sizes of all algorithms, overhead rows, footer and report. Runs over any communicator.
// Needs support/measure. Every rank calls `run`; rank 0 prints and returns the report.
#pragma once

#include <cstdio>   // flush
#include <map>      // fits
#include <string>   // names
#include <utility>  // pair
#include <vector>   // rows

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "environment.hpp"  // report
#include "measure.hpp"      // measurement
#include "options.hpp"      // options
#include "row.hpp"          // table

namespace bench {

/// Exit status of a bench program: something was wrong or below the floor asked for.
struct outcome {
    std::uint64_t wrong = 0;
    int below_floor = 0;
    nlohmann::json report;
};

template <tutti::communicator C> class suite {
    C& comm_;
    const options& options_;
    const std::string backend_;
    measurement<C> measure_;
    outcome outcome_;
    std::map<std::string, std::vector<std::pair<double, double>>> points_;
    std::vector<std::string> notes_;
    double bus_sum_ = 0;
    int bus_count_ = 0;
    int restless_ = 0;  // measurements that vary by more than 5 %

public:
    suite(C& comm, const options& o, std::string backend)
        : comm_(comm), options_(o), backend_(std::move(backend)), measure_(comm, o.max_bytes) {}

    /// tutti's own collectives first, then `others`.
    template <class T> [[nodiscard]] outcome run(const std::vector<algorithm<T>>& others) {
        outcome_.report["rows"] = nlohmann::json::array();
        for (const kind k : {kind::all_reduce, kind::reduce_scatter, kind::all_gather, kind::broadcast, kind::reduce,
                             kind::all_to_all, kind::memory_copy}) {
            if (!options_.wants(k)) { continue; }
            if (k != kind::memory_copy) { table(own<T>(k)); }
            for (const algorithm<T>& a : others) {
                if (a.kind == k) { table(a); }
            }
        }
        if (options_.baselines) { overheads<T>(); }
        finish();
        return std::move(outcome_);
    }

private:
    [[nodiscard]] bool first() const { return comm_.rank() == 0; }
    template <class... A> void print(fmt::format_string<A...> text, A&&... a) const {
        if (!first()) { return; }
        fmt::print(text, std::forward<A>(a)...);
        std::fflush(stdout);
    }

    template <class T> [[nodiscard]] algorithm<T> own(kind k) {
        using in = tutti::view<const T>;
        using out = tutti::view<T>;
        const int root = options_.root;
        C& c = comm_;
        switch (k) {
        case kind::all_reduce: return {k, "tutti", [&c](in a, out b) { c.all_reduce(a, b, tutti::sum{}); }};
        case kind::reduce_scatter: return {k, "tutti", [&c](in a, out b) { c.reduce_scatter(a, b, tutti::sum{}); }};
        case kind::all_gather: return {k, "tutti", [&c](in a, out b) { c.all_gather(a, b); }};
        case kind::broadcast: return {k, "tutti", [&c, root](in, out b) { c.broadcast(b, root); }};
        case kind::reduce: return {k, "tutti", [&c, root](in a, out b) { c.reduce(a, b, tutti::sum{}, root); }};
        case kind::all_to_all: return {k, "tutti", [&c](in a, out b) { c.all_to_all(a, b); }};
        case kind::memory_copy: break;
        }
        throw std::logic_error("a copy is no collective");
    }

    template <class T> void table(const algorithm<T>& a) {
        const std::string cadence = options_.blocking ? "isolated" : "streaming";
        print("\n# {} ({}, {} ranks, {}, {})\n", name_of(a.kind), backend_, comm_.size(), a.name, cadence);
        print("{}", table_head());
        const repetition how{options_.iterations, options_.warmup, options_.check, options_.blocking, options_.root};
        std::size_t last = 0;
        for (const std::size_t size : options_.sizes()) {
            const counts n = counts_of(a.kind, static_cast<std::size_t>(comm_.size()), size, sizeof(T));
            if (n.count == 0 || n.bytes == last) { continue; }  // less than one element a rank
            last = n.bytes;
            row r{a.kind, a.name, comm_.size(), n.bytes, n.count, options_.type, options_.root, cadence, {}, {}};
            if (has_out_of_place(a.kind)) {
                r.out_of_place = result_of(measure_.run(a, size, false, how), options_.check);
            }
            if (a.in_place) { r.in_place = result_of(measure_.run(a, size, true, how), options_.check); }
            print("{}\n", table_line(r));
            account(r);
        }
    }

    void account(const row& r) {
        outcome_.report["rows"].push_back(json_of(r));
        for (const auto* v : {&r.out_of_place, &r.in_place}) {
            if (!v->has_value()) { continue; }
            const bool in_place = v == &r.in_place;
            const std::string what =
                fmt::format("{} {} {}", name_of(r.kind), r.algorithm, in_place ? "in place" : "out of place");
            const variant_result& x = **v;
            outcome_.wrong += x.wrong;
            bus_sum_ += bus_bandwidth(r, x);
            ++bus_count_;
            restless_ += x.seconds.cv > 0.05 ? 1 : 0;
            points_[what].emplace_back(static_cast<double>(r.bytes), x.seconds.p50);
            if (x.bandwidth.samples > 0 && r.kind == kind::all_reduce && r.algorithm == "tutti") {
                notes_.push_back(fmt::format("W {:.1f} GB/s beside {} of {} B", x.bandwidth.p50 * 1e-9, what, r.bytes));
            }
            if (x.roofline > 0 && x.roofline < options_.min_roofline && r.algorithm == "tutti") {
                ++outcome_.below_floor;
                notes_.push_back(fmt::format("BELOW THE FLOOR {:.2f}: {} of {} B reaches {:.2f}", options_.min_roofline,
                                             what, r.bytes, x.roofline));
            }
        }
    }

    // Calls that move nothing, or nowhere: what the wrapper itself costs.
    template <class T> void overheads() {
        outcome_.report["overhead"] = nlohmann::json::array();
        print("\n# overhead ({}, {} ranks, streaming)   p50 (us)   min (us)\n", backend_, comm_.size());
        const auto line = [&](const char* what, const summary& s) {
            print("# {:<36}{:>10.3f} {:>10.3f}\n", what, s.p50 * 1e6, s.min * 1e6);
            outcome_.report["overhead"].push_back({{"what", what}, {"us", json_of(s, 1e6)}});
        };
        std::array<T, 8> in{};
        std::array<T, 8> out{};
        const tutti::view<const T> a(in);
        const tutti::view<T> b(out);
        line("barrier", measure_.overhead([&] { comm_.barrier(); }));
        line("all_reduce of no elements",
             measure_.overhead([&] { comm_.all_reduce(a.sub(0, 0), b.sub(0, 0), tutti::sum{}); }));
        line("all_reduce of 8 elements", measure_.overhead([&] { comm_.all_reduce(a, b, tutti::sum{}); }));
        std::vector<int> colors;
        for (int r = 0; r < comm_.size(); ++r) { colors.push_back(r); }
        C alone = *comm_.split(colors, "alone");
        line("all_reduce of 8 elements, one rank", measure_.overhead([&] { alone.all_reduce(a, b, tutti::sum{}); }));
        line("barrier, one rank", measure_.overhead([&] { alone.barrier(); }));
    }

    void finish() {
        print("\n# roof: least memory traffic / time / W. W: bandwidth of a += b, three streams counted, all ranks at "
              "once, on\n"
              "# the memory of the row itself and in the same iteration; caches act on both. Times: median over "
              "iterations of\n"
              "# the maximum over ranks.\n");
        nlohmann::json fits = nlohmann::json::array();
        for (const auto& [what, list] : points_) {
            const line l = fit(list);
            fits.push_back({{"what", what}, {"alpha_us", l.alpha * 1e6}, {"beta_us_per_byte", l.beta * 1e6}});
        }
        outcome_.report["fits"] = fits;
        for (const std::string& note : notes_) { print("# {}\n", note); }
        if (restless_ != 0) {
            print("# warning: {} of {} measurements vary by more than 5 %: the machine was not quiet\n", restless_,
                  bus_count_);
        }
        if (options_.check) {
            print("# Out of bounds values : {} {}\n", outcome_.wrong, outcome_.wrong == 0 ? "OK" : "FAILED");
        }
        print("# Avg bus bandwidth    : {:.4f}\n", bus_count_ > 0 ? bus_sum_ / bus_count_ * 1e-9 : 0.0);
    }
};

/// Prints what is known before measuring.
inline void print_environment(const nlohmann::json& e, int ranks) {
    fmt::print("# {}, {} usable of {} processors, third-level cache {}\n", e["processor"].get<std::string>(),
               e["usable_processors"].get<int>(), e["processors"].get<int>(),
               e["third_level_cache"].get<std::string>());
    fmt::print("# tutti {} ({}), {}, {}\n", e["version"].get<std::string>(), e["commit"].get<std::string>(),
               e["compiler"].get<std::string>(), e["date"].get<std::string>());
    for (const std::string& w : environment_warnings(ranks)) { fmt::print("# warning: {}\n", w); }
}

/// Writes the report when asked for; gives the program's exit status.
inline int conclude(outcome o, const options& opt, const nlohmann::json& environment, const std::string& backend,
                    int ranks, const std::string& command) {
    if (!opt.json.empty()) {
        const nlohmann::json head = {
            {"schema", 1},        {"bench", "collectives"},     {"backend", backend},           {"ranks", ranks},
            {"command", command}, {"environment", environment}, {"iterations", opt.iterations}, {"warmup", opt.warmup},
            {"check", opt.check}};
        o.report.update(head);
        std::ofstream(opt.json) << o.report.dump(1) << '\n';
    }
    return o.wrong != 0 || o.below_floor != 0 ? 1 : 0;
}

[[nodiscard]] inline std::string command_line(int argc, char** argv) {
    std::string text = argv[0];
    text.erase(0, text.find_last_of('/') + 1);  // where it was built says nothing
    for (int i = 1; i < argc; ++i) { text += fmt::format(" {}", argv[i]); }
    return text;
}

}  // namespace bench
