// Files that appear whole or not at all.
// Needs the standard library and fmt.
#pragma once

#include <cerrno>        // why a stream failed
#include <filesystem>    // folders, rename
#include <fstream>       // files
#include <stdexcept>     // runtime_error
#include <string>        // names
#include <system_error>  // the system's reason

#include <fmt/format.h>  // message

namespace transformer {

/// Where a file is written before it takes its name.
[[nodiscard]] inline std::string neighbor_of(const std::string& path) { return path + ".unfinished"; }

/// Hands a binary stream to `write`, which writes into a neighbor that then takes the place of `path`: a reader never
/// sees half a file, and a failure keeps the old one.
/// Errors  runtime_error with the system's reason; the neighbor is gone again, as it is after an exception of `write`.
template <class Write> void write_whole(const std::string& path, Write write) {
    namespace fs = std::filesystem;
    struct neighbor {
        std::string path;
        ~neighbor() {  // after the rename there is none
            std::error_code ignored;
            fs::remove(path, ignored);
        }
    } const unfinished{neighbor_of(path)};
    const fs::path folder = fs::path(path).parent_path();
    std::error_code failed;
    if (!folder.empty()) { fs::create_directories(folder, failed); }
    if (!failed) {
        std::ofstream out(unfinished.path, std::ios::binary);
        if (out) { write(out); }
        out.close();
        if (!out) { failed = std::error_code(errno, std::generic_category()); }
    }
    if (!failed) { fs::rename(unfinished.path, path, failed); }
    if (failed) { throw std::runtime_error(fmt::format("cannot write '{}': {}", path, failed.message())); }
}

}  // namespace transformer
