// Does what a run keeps fit into this machine's memory? Asked before it starts: later the system would end it.
// Needs bad_input.hpp; Linux's /proc and control groups. Elsewhere nothing is known, and nothing refused.
#pragma once

#include <algorithm>  // min
#include <cstddef>    // size_t
#include <fstream>    // what the system says
#include <optional>   // not everywhere
#include <string>     // names

#include <fmt/format.h>  // messages

#include "bad_input.hpp"

namespace transformer {

/// Bytes of this machine's memory, for all ranks on it.
struct memory_demand {
    std::size_t weights = 0;  ///< all that are kept
    std::size_t work = 0;     ///< those at hand, perturbed copies and activations
};

/// Bytes that the system and the process's control group (either version) still have.
[[nodiscard]] inline std::optional<std::size_t> available_memory() {
    const auto figure = [](const std::string& file, const std::string& name) -> std::optional<std::size_t> {
        std::ifstream in(file);
        std::size_t value = 0;
        for (std::string word; !name.empty() && in >> word && word != name;) {}
        return in >> value ? std::optional(value) : std::nullopt;  // a limit may be "max"
    };
    std::optional<std::size_t> available;
    const auto at_most = [&](std::size_t bytes) { available = std::min(available.value_or(bytes), bytes); };
    if (const auto kib = figure("/proc/meminfo", "MemAvailable:")) { at_most(*kib * 1024); }
    struct group {
        std::string limit, used, statistics, idle_files;
    };
    const std::string root = "/sys/fs/cgroup/";
    for (const group& g : {group{root + "memory.max", root + "memory.current", root + "memory.stat", "inactive_file"},
                           group{root + "memory/memory.limit_in_bytes", root + "memory/memory.usage_in_bytes",
                                 root + "memory/memory.stat", "total_inactive_file"}}) {
        const auto limit = figure(g.limit, ""), used = figure(g.used, "");
        if (!limit || !used) { continue; }
        const std::size_t taken = *used - std::min(*used, figure(g.statistics, g.idle_files).value_or(0));
        at_most(*limit > taken ? *limit - taken : 0);
    }
    return available;
}

/// Errors  bad_input with both numbers.
inline void require_memory(const memory_demand& needed, const std::string& who) {
    const std::optional<std::size_t> there = available_memory();
    if (!there || needed.weights + needed.work <= *there) { return; }
    const auto gib = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
    throw bad_input(fmt::format("--model: {} needs {:.2f} GiB of this machine's memory, {:.2f} of it for weights; "
                                "{:.2f} GiB are available",
                                who, gib(needed.weights + needed.work), gib(needed.weights), gib(*there)));
}

}  // namespace transformer
