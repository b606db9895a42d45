// What a run learns from: the options of text and tokens, and their checks.
// Needs CLI11.
#pragma once

#include <string>  // names
#include <vector>  // paths

#include <CLI/CLI.hpp>  // command line

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct data_options {
    std::vector<std::string> data;      // files and folders
    std::string token_file;             // empty: `data` is the text
    std::string validation_token_file;  // empty: the last tenth of the other

    /// What a token is, and so what a loss is for.
    [[nodiscard]] const char* unit() const { return token_file.empty() ? "byte" : "token"; }
};

inline void declare(command_line& app, data_options& o) {
    using detail::named;
    app.begin("Data");
    app.add_option("--data", o.data, "text files, or folders of text files; default: this project's own sources")
        ->type_name("PATH...");
    app.add_option("--tokens", o.token_file, "instead of text: GPT-2 tokens, as llm.c's scripts write them (.bin)")
        ->check(named("file name"))
        ->type_name("FILE");
    app.add_option("--validation-tokens", o.validation_token_file,
                   "GPT-2 tokens to validate on; default: the last tenth of --tokens")
        ->needs("--tokens")
        ->check(named("file name"))
        ->type_name("FILE");
}

/// Errors: bad_input.
inline void complete(const data_options& o) {
    using detail::require;
    require(o.token_file.empty() || o.data.empty(), "--tokens: not together with --data");
}

}  // namespace transformer
