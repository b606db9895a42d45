// Runs a program of the trainer in a folder of its own and keeps what it said and wrote.
// Needs a POSIX shell. TRANSFORMER is the program's path, defined by CMake for each test.
#pragma once

#include <cstdlib>  // system
#include <fstream>  // files
#include <string>   // texts

#include <sys/wait.h>  // exit codes

#include <nlohmann/json.hpp>  // reports

#include <support/scratch_folder.hpp>  // folders

namespace trainer_test {

using tutti::test::content_of;
using tutti::test::scratch_folder;

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
