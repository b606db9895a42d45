// A folder of a test's own, and what is in its files.
// Needs POSIX.
#pragma once

#include <cstdlib>       // mkdtemp
#include <filesystem>    // folders
#include <fstream>       // files
#include <iterator>      // files
#include <stdexcept>     // runtime_error
#include <string>        // texts
#include <system_error>  // error_code

namespace tutti::test {

[[nodiscard]] inline std::string content_of(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// An empty folder, gone with its owner.
class scratch_folder {
    std::filesystem::path path_;

public:
    scratch_folder() {
        std::string name = (std::filesystem::temp_directory_path() / "tutti_test_XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) { throw std::runtime_error("no temporary folder can be made"); }
        path_ = name;
    }
    scratch_folder(const scratch_folder&) = delete;
    scratch_folder& operator=(const scratch_folder&) = delete;
    ~scratch_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }
    [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
};

}  // namespace tutti::test
