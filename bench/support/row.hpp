// One row of a collective bench: what was measured, its line in the table, its entry in the report.
// Needs fmt and nlohmann-json. Table layout as nccl-tests prints it, with the share of the roofline behind #wrong.
#pragma once

#include <cstddef>   // size_t
#include <cstdint>   // counts
#include <optional>  // variants that do not exist
#include <string>    // names

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "statistics.hpp"  // summary
#include "traffic.hpp"     // kind

namespace bench {

/// Out of place or in place.
struct variant_result {
    summary seconds;      ///< per iteration the maximum over ranks
    summary bandwidth;    ///< W: bytes per second of `a += b` on the same memory; no samples below `roofline_from`
    double roofline = 0;  ///< median over iterations of least traffic / time / W; 0: not measured
    double traffic = 0;   ///< least bytes of memory traffic
    std::uint64_t wrong = 0;
    bool checked = false;
};

/// Below this footprint a rank's `a += b` takes less than a few microseconds, and a row measures latency.
inline constexpr double roofline_from = 64 * 1024;

struct row {
    bench::kind kind = kind::all_reduce;
    std::string algorithm;
    int ranks = 0;
    std::size_t bytes = 0;
    std::size_t count = 0;
    std::string type;
    int root = -1;
    std::string cadence;
    std::optional<variant_result> out_of_place;
    std::optional<variant_result> in_place;
};

[[nodiscard]] inline double algorithm_bandwidth(const row& r, const variant_result& v) {
    return v.seconds.p50 > 0 ? static_cast<double>(r.bytes) / v.seconds.p50 : 0;
}
[[nodiscard]] inline double bus_bandwidth(const row& r, const variant_result& v) {
    return algorithm_bandwidth(r, v) * bus_factor(r.kind, r.ranks);
}

[[nodiscard]] inline std::string table_head() {
    constexpr std::string_view half = "   time   algbw   busbw #wrong  roof";
    std::string text;
    text += fmt::format("#{:>54}{:^38}{:^38}\n", "", "out-of-place", "in-place");
    text += fmt::format("#{:>12}{:>12}{:>10}{:>8}{:>6}       {}  {}\n", "size", "count", "type", "redop", "root", half,
                        half);
    constexpr std::string_view units = "   (us)  (GB/s)  (GB/s)            ";
    text += fmt::format("#{:>12}{:>12}{:>10}{:>8}{:>6}       {}  {}\n", "(B)", "(elements)", "", "", "", units, units);
    return text;
}

[[nodiscard]] inline std::string table_line(const row& r) {
    std::string text = fmt::format(" {:>12}{:>12}{:>10}{:>8}{:>6}     ", r.bytes, r.count, r.type,
                                   reduces(r.kind) ? "sum" : "none", rooted(r.kind) ? r.root : -1);
    const auto number = [](double x) { return fmt::format("{:.{}f}", x, x < 10 ? 3 : x < 1000 ? 2 : 0); };
    for (const auto* v : {&r.out_of_place, &r.in_place}) {
        if (!v->has_value()) {
            text += fmt::format("{:>9}{:>8}{:>8}{:>7}{:>6}", "N/A", "N/A", "N/A", "N/A", "N/A");
            continue;
        }
        const variant_result& x = **v;
        text += fmt::format("{:>9}{:>8}{:>8}{:>7}{:>6}", number(x.seconds.p50 * 1e6),
                            number(algorithm_bandwidth(r, x) * 1e-9), number(bus_bandwidth(r, x) * 1e-9),
                            x.checked ? std::to_string(x.wrong) : "N/A",
                            x.roofline > 0 ? fmt::format("{:.2f}", x.roofline) : "-");
    }
    return text;
}

/// Times in microseconds.
[[nodiscard]] inline nlohmann::json json_of(const summary& s, double scale) {
    return {{"samples", s.samples},
            {"min", s.min * scale},
            {"p50", s.p50 * scale},
            {"p95", s.p95 * scale},
            {"p99", s.p99 * scale},
            {"max", s.max * scale},
            {"cv", s.cv}};
}

[[nodiscard]] inline nlohmann::json json_of(const row& r) {
    nlohmann::json j = {{"bench", name_of(r.kind)},
                        {"algorithm", r.algorithm},
                        {"ranks", r.ranks},
                        {"bytes", r.bytes},
                        {"count", r.count},
                        {"type", r.type},
                        {"redop", reduces(r.kind) ? "sum" : "none"},
                        {"root", rooted(r.kind) ? r.root : -1},
                        {"cadence", r.cadence}};
    const auto variant = [&](const char* name, const std::optional<variant_result>& v) {
        if (!v.has_value()) { return; }
        nlohmann::json& o = j[name];
        o = {{"us", json_of(v->seconds, 1e6)},
             {"algbw", algorithm_bandwidth(r, *v) * 1e-9},
             {"busbw", bus_bandwidth(r, *v) * 1e-9},
             {"dram_bytes", v->traffic}};
        if (v->checked) { o["nwrong"] = v->wrong; }
        if (v->roofline > 0) {
            o["roofline"] = v->roofline;
            o["w"] = json_of(v->bandwidth, 1e-9);
        }
    };
    variant("out_of_place", r.out_of_place);
    variant("in_place", r.in_place);
    return j;
}

}  // namespace bench
