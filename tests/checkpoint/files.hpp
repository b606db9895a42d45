// The folder of a test, and whole files in it.
// Needs the standard library, support/failure and a POSIX system.
#pragma once

#include <algorithm>   // sort
#include <cstddef>     // byte
#include <filesystem>  // folders
#include <fstream>     // files
#include <iterator>    // whole files
#include <span>        // bytes
#include <string>      // names
#include <vector>      // bytes

#include <support/failure.hpp>         // expect
#include <support/scratch_folder.hpp>  // folders

namespace tutti::test {

namespace fs = std::filesystem;

struct scratch_directory {
    scratch_folder whole;
    std::string path = whole.path().string();
    [[nodiscard]] std::string folder() const { return path + "/checkpoints"; }
};

inline std::vector<std::byte> bytes_of(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    const std::vector<char> chars((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const auto* const p = reinterpret_cast<const std::byte*>(chars.data());
    return {p, p + chars.size()};
}
inline void write_bytes(const fs::path& path, std::span<const std::byte> bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    out.close();
    expect(bool(out), "cannot write {}", path.string());
}
/// What lies in a folder, sorted.
inline std::vector<std::string> listing(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(folder)) { names.push_back(e.path().filename().string()); }
    std::sort(names.begin(), names.end());
    return names;
}

}  // namespace tutti::test
