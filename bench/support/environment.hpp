// Where and with what a bench ran: processor, usable processors, kernel settings, compiler, version, git commit.
// Needs nlohmann-json and, for the commit, the generated <bench_commit.hpp>.
#pragma once

#include <array>    // host name
#include <ctime>    // date
#include <fstream>  // /proc, /sys
#include <string>   // values
#include <thread>   // hardware_concurrency
#include <vector>   // warnings

#include <sched.h>   // affinity
#include <unistd.h>  // host name

#include <fmt/format.h>       // warnings
#include <nlohmann/json.hpp>  // report

#include <bench_commit.hpp>            // BENCH_COMMIT
#include <tutti/comm/detail/wait.hpp>  // usable_processors
#include <tutti/version.hpp>           // version_string

namespace bench {

/// The first line of a file, or nothing.
[[nodiscard]] inline std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string text;
    std::getline(file, text);
    return text;
}

[[nodiscard]] inline std::string processor_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string text; std::getline(file, text);) {
        if (text.starts_with("model name")) { return text.substr(text.find(':') + 2); }
    }
    return "unknown";
}

/// The processors of the affinity mask.
[[nodiscard]] inline std::vector<int> allowed_processors() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    std::vector<int> list;
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0) { return list; }
    for (std::size_t p = 0; p < CPU_SETSIZE; ++p) {
        if (CPU_ISSET(p, &mask)) { list.push_back(static_cast<int>(p)); }
    }
    return list;
}

/// Ties the calling thread to one processor.
inline void bind_to(int processor) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(static_cast<std::size_t>(processor), &mask);
    static_cast<void>(sched_setaffinity(0, sizeof(mask), &mask));  // refused: it runs where it may
}

[[nodiscard]] inline double load_average() {
    std::array<double, 1> load{};
    return getloadavg(load.data(), 1) == 1 ? load[0] : -1;
}

/// What is true for the whole run. The load average is read now: call it before the measuring threads start.
[[nodiscard]] inline nlohmann::json environment() {
    std::array<char, 32> date{};
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
#if defined(__clang__)
    const std::string compiler = "clang " __clang_version__;
#else
    const std::string compiler = "gcc " __VERSION__;
#endif
    return {
        {"date", date.data()},
        {"processor", processor_name()},
        {"processors", std::thread::hardware_concurrency()},
        {"affinity", allowed_processors()},
        {"usable_processors", tutti::comm::detail::usable_processors()},
        {"cgroup_quota", first_line("/sys/fs/cgroup/cpu.max")},
        {"governor", first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")},
        {"transparent_hugepage", first_line("/sys/kernel/mm/transparent_hugepage/enabled")},
        {"third_level_cache", first_line("/sys/devices/system/cpu/cpu0/cache/index3/size")},
        {"load_average", load_average()},
        {"compiler", compiler},
        {"version", tutti::version_string},
        {"commit", BENCH_COMMIT},
    };
}

/// Reasons to distrust the numbers that are known before measuring.
[[nodiscard]] inline std::vector<std::string> environment_warnings(int ranks) {
    std::vector<std::string> list;
    const int usable = tutti::comm::detail::usable_processors();
    if (ranks > usable) { list.push_back(fmt::format("{} ranks share {} processors", ranks, usable)); }
    const double load = load_average();
    if (load > 0.5) { list.push_back(fmt::format("other work is running: load average {:.1f}", load)); }
    const std::string governor = first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    if (!governor.empty() && governor != "performance") { list.push_back("frequency governor is " + governor); }
    return list;
}

}  // namespace bench
