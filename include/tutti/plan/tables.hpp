// tables: plans, and what they were preferred to, as text in columns.
// Needs plan/explain.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <span>       // lists
#include <string>     // tables
#include <vector>     // rows

#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/explain.hpp>  // alternative, strategy_of
#include <tutti/plan/machine.hpp>  // machine
#include <tutti/plan/model.hpp>    // job
#include <tutti/plan/search.hpp>   // planned
#include <tutti/plan/space.hpp>    // search_space
#include <tutti/plan/time.hpp>     // step_time

namespace tutti::plan {

namespace detail {

// Columns as wide as their widest cell; the first is set left.
[[nodiscard]] inline std::string table_of(const std::vector<std::vector<std::string>>& rows) {
    std::vector<std::size_t> widths;
    for (const auto& row : rows) {
        widths.resize(std::max(widths.size(), row.size()), 0);
        for (std::size_t c = 0; c < row.size(); ++c) { widths[c] = std::max(widths[c], row[c].size()); }
    }
    std::string text;
    for (const auto& row : rows) {
        std::string line;
        for (std::size_t c = 0; c < row.size(); ++c) {
            line += c == 0 ? "" : "  ";
            line += row[c];
            if (c + 1 < row.size()) { line.append(widths[c] - row[c].size(), ' '); }
        }
        text += line + '\n';
    }
    return text;
}

}  // namespace detail

/// A line for each plan: layout, memory, and where its seconds go.
[[nodiscard]] inline std::string text_of(const model_shape& m, const machine& on, std::span<const planned> plans) {
    std::vector<std::vector<std::string>> rows{
        {"tp",    "pp",    "dp",       "sp",      "micro",  "schedule", "recompute", "data ranks", "GiB",  "s/step",
         "MFU %", "HFU %", "products", "traffic", "tensor", "rings",    "bubble",    "messages",   "data", "updates"}};
    const auto number = [](double x) { return formatted("{:.3g}", x); };
    for (const planned& p : plans) {
        const job& j = p.how;
        const utilization u = utilization_of(m, on, p);
        const step_time& t = p.time;
        rows.push_back({formatted("{}{}", j.tensor, j.sequence_parallel ? "+rows" : ""),
                        formatted("{}", j.pipeline),
                        formatted("{}", j.data),
                        formatted("{}", j.sequence),
                        formatted("{} x {}", j.micro_batches, j.micro_batch),
                        schedule_of(j),
                        std::string(name_of(j.recompute)),
                        strategy_of(j),
                        formatted("{:.1f}", p.peak.memory.total() / (1 << 30)),
                        formatted("{:.4g}", p.seconds()),
                        formatted("{:.1f}", 100 * u.model),
                        formatted("{:.1f}", 100 * u.hardware),
                        number(t.products),
                        number(t.memory),
                        number(t.tensor),
                        number(t.sequence),
                        number(t.bubble),
                        number(t.messages),
                        number(t.data),
                        number(t.updates)});
    }
    return detail::table_of(rows);
}

/// A line for each alternative, and one for what the space does not have because it would change training.
[[nodiscard]] inline std::string text_of(std::span<const alternative> list, const search_space& s) {
    std::vector<std::vector<std::string>> rows;
    for (const alternative& a : list) { rows.push_back({a.dimension, a.value, a.verdict}); }
    std::string text = detail::table_of(rows);
    if (s.compressions.empty()) { text += "compression is not searched: it changes gradients\n"; }
    if (s.taus.empty()) { text += "rounds of local steps are not searched: they change training\n"; }
    return text;
}

}  // namespace tutti::plan
