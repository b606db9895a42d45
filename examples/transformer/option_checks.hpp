// What options of all kinds are declared with, and checked by while the command line is read.
// Needs CLI11.
#pragma once

#include <algorithm>    // any_of
#include <cstddef>      // positions
#include <string>       // messages
#include <string_view>  // names
#include <utility>      // forward, move, pair
#include <vector>       // users

#include <CLI/CLI.hpp>   // validators
#include <fmt/format.h>  // messages

#include "bad_input.hpp"

namespace transformer {

namespace detail {

/// A whole number.
[[nodiscard]] inline CLI::Range within(long least, long most) { return CLI::Range(least, most); }

/// Not empty: the name of a thing of that kind.
[[nodiscard]] inline CLI::Validator named(const std::string& kind) {
    return CLI::Validator(
        [kind](const std::string& text) { return text.empty() ? "no " + kind + " given" : std::string(); }, "");
}

/// Is it there, in a list with ", " between its members?
[[nodiscard]] inline bool is_member(std::string_view list, std::string_view name) {
    while (true) {
        const std::size_t comma = list.find(", ");
        if (list.substr(0, comma) == name) { return true; }
        if (comma == list.npos) { return false; }
        list.remove_prefix(comma + 2);
    }
}

}  // namespace detail

/// A command line that knows which pipelines look at which option.
class command_line : public CLI::App {
    std::string users_;                                                 // of options that are being declared
    std::vector<std::pair<const CLI::Option*, std::string>> declared_;  // with their users; "": all pipelines

    CLI::Option* note(CLI::Option* option) {
        declared_.emplace_back(option, users_);
        return users_.empty() ? option : option->description(users_ + ": " + option->get_description());
    }

public:
    using CLI::App::App;

    /// What --help has the options under that are declared from here on, and what pipelines look at them: "" is all.
    void begin(const std::string& group, std::string users = "") {
        option_defaults()->group(group);
        used_by(std::move(users));
    }
    /// The same of others in the group. Their help begins with `users`.
    void used_by(std::string users) { users_ = std::move(users); }
    template <class... Of> CLI::Option* add_option(Of&&... of) {
        return note(CLI::App::add_option(std::forward<Of>(of)...));
    }
    template <class T, class... Of> CLI::Option* add_option_function(Of&&... of) {
        return note(CLI::App::add_option_function<T>(std::forward<Of>(of)...));
    }
    template <class... Of> CLI::Option* add_flag(Of&&... of) {
        return note(CLI::App::add_flag(std::forward<Of>(of)...));
    }

    /// Errors  bad_input for an option that was given and that none of `pipelines` looks at.
    void refuse_unused(const std::vector<std::string>& pipelines) const {
        for (const auto& [option, users] : declared_) {
            const bool used = std::any_of(pipelines.begin(), pipelines.end(),
                                          [list = users](const auto& name) { return detail::is_member(list, name); });
            detail::require(users.empty() || option->count() == 0 || used,
                            fmt::format("{}: pipeline '{}' makes no use of it; {} {}", option->get_name(),
                                        pipelines.front(), users, users.find(", ") == users.npos ? "does" : "do"));
        }
    }
};

}  // namespace transformer
