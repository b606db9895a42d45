// Runs a program of the trainer in a folder of its own and keeps what it said and wrote.
// Needs a POSIX shell. TRANSFORMER is the program's path, defined by CMake for each test.
#pragma once

#include <cstdlib>     // system, mkdtemp
#include <filesystem>  // folders
#include <fstream>     // files
#include <iterator>    // files
#include <stdexcept>   // runtime_error
#include <string>      // texts

#include <sys/wait.h>  // exit codes

#include <nlohmann/json.hpp>  // reports

namespace trainer_test {

[[nodiscard]] inline std::string content_of(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// An empty folder, gone with its owner.
class scratch_folder {
    std::filesystem::path path_;

public:
    scratch_folder() {
        std::string name = (std::filesystem::temp_directory_path() / "tutti_trainer_XXXXXX").string();
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

/// Writes "text" there, for runs of a second.
inline scratch_folder& with_text(scratch_folder& folder) {
    std::ofstream text(folder / "text", std::ios::binary);
    for (int i = 0; i < 400; ++i) { text << "line " << i * i << " of a text that a model can learn\n"; }
    return folder;
}

struct outcome {
    int code = -1;
    std::string out, err;
};

/// Runs `launcher TRANSFORMER arguments` with `folder` as the working directory; quoting is the shell's. Ended after
/// `limit` seconds: what should have been refused must not train instead.
[[nodiscard]] inline outcome run_program(const scratch_folder& folder, const std::string& arguments, int limit = 120,
                                         const std::string& launcher = "") {
    const scratch_folder said;  // apart, so that `folder` shows exactly what the program wrote
    const std::string command = "cd '" + folder.path().string() + "' && timeout " + std::to_string(limit) + " " +
                                launcher + " '" TRANSFORMER "' " + arguments + " >'" + (said / "out").string() +
                                "' 2>'" + (said / "err").string() + "' </dev/null";
    const int status = std::system(command.c_str());  // NOLINT: a shell is wanted
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, content_of(said / "out"), content_of(said / "err")};
}

[[nodiscard]] inline nlohmann::json report_in(const scratch_folder& folder,
                                              const std::string& name = "run/report.json") {
    return nlohmann::json::parse(content_of(folder / name));
}

}  // namespace trainer_test
