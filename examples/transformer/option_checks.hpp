// What options of all kinds are checked by while the command line is read.
// Needs CLI11.
#pragma once

#include <string>  // messages

#include <CLI/CLI.hpp>  // validators

namespace transformer::detail {

/// A whole number.
[[nodiscard]] inline CLI::Range within(long least, long most) { return CLI::Range(least, most); }

/// Not empty: the name of a thing of that kind.
[[nodiscard]] inline CLI::Validator named(const std::string& kind) {
    return CLI::Validator(
        [kind](const std::string& text) { return text.empty() ? "no " + kind + " given" : std::string(); }, "");
}

}  // namespace transformer::detail
