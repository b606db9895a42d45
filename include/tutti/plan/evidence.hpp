// evidence: what a plan rests on: every figure of a machine, and whether it is published, fitted, given or assumed.
// Needs plan/tables.
#pragma once

#include <string>       // values
#include <string_view>  // names
#include <vector>       // rows

#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/tables.hpp>   // table_of

namespace tutti::plan {

/// A figure, or several of one origin.
struct machine_figure {
    std::string_view name;
    std::string value{};
    evidence from{};
};

/// All that times and memory are computed from, in words.
[[nodiscard]] inline std::vector<machine_figure> figures_of(const machine& m) {
    const machine_evidence& k = m.known;
    const auto percent = [](double share) { return formatted("{:.3g} %", 100 * share); };
    return {
        {"FLOPs", formatted("{:.4g} TFLOP/s", m.flops / 1e12), k.flops},
        {"memory", formatted("{:.1f} GiB, {:.4g} GB/s", m.memory_bytes / (1 << 30), m.memory_bandwidth / 1e9),
         k.memory},
        {"links",
         formatted("{:.4g} GB/s inside nodes of {}, {:.4g} between", m.inside.bytes_per_second / 1e9, m.ranks_per_node,
                   m.between.bytes_per_second / 1e9),
         k.links},
        {"latencies",
         formatted("{:.3g} us inside, {:.3g} between", m.inside.latency_seconds * 1e6, m.between.latency_seconds * 1e6),
         k.latencies},
        {"host link", formatted("{:.4g} GB/s", m.host_bandwidth / 1e9), k.host},
        {"share of FLOPs in products", percent(m.product_efficiency), k.product_efficiency},
        {"share of memory bandwidth", percent(m.memory_efficiency), k.memory_efficiency},
        {"share of links' bandwidth", percent(m.link_efficiency), k.link_efficiency},
        {"launch of a kernel", formatted("{:.3g} us", m.launch_seconds * 1e6), k.launch},
        {"computing beside communication", formatted("longer by {} of its time", percent(m.interference)),
         k.interference},
        {"results of a product at once", formatted("{:.0f}", m.wave), k.wave}};
}

/// A line for each.
[[nodiscard]] inline std::string text_of(const machine& m) {
    std::vector<std::vector<std::string>> rows;
    for (const machine_figure& f : figures_of(m)) {
        rows.push_back({std::string(f.name), f.value, std::string(name_of(f.from))});
    }
    return detail::table_of(rows);
}

}  // namespace tutti::plan
