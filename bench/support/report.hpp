// The report of a bench that prints one: JSON on standard output, and in a file when asked for.
// Needs nlohmann-json and fmt.
#pragma once

#include <fstream>    // file
#include <stdexcept>  // a file that cannot be written
#include <string>     // text

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace bench {

/// Errors  runtime_error naming the file, after everything was printed.
inline void print_report(const nlohmann::ordered_json& report, const std::string& path) {
    const std::string text = report.dump(2) + "\n";
    fmt::print("{}", text);
    if (path.empty()) { return; }
    std::ofstream file(path);
    file << text;
    file.close();
    if (!file) { throw std::runtime_error("--json: cannot write " + path); }
}

}  // namespace bench
