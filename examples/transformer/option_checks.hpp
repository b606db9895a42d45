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

/// Does `holds` for one, in a list with ", " between its members?
template <class Predicate> [[nodiscard]] bool any_member(std::string_view list, Predicate holds) {
    while (true) {
        const std::size_t comma = list.find(", ");
        if (holds(list.substr(0, comma))) { return true; }
        if (comma == list.npos) { return false; }
        list.remove_prefix(comma + 2);
    }
}
[[nodiscard]] inline bool is_member(std::string_view list, std::string_view name) {
    return any_member(list, [&](std::string_view member) { return member == name; });
}

}  // namespace detail

/// A command line that knows which pipelines look at which option. A list of them may begin with "all but "; "--other"
/// is all runs with that option, and "ddp-lgreco --family x" those of the pipeline with that value.
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

    /// `runs`: their pipelines, each with the values by which lists tell its runs apart.
    /// Errors  bad_input for an option that was given and that none of them looks at.
    void refuse_unused(const std::vector<std::string>& runs) const {
        constexpr std::string_view all_but = "all but ";
        for (const auto& declared : declared_) {
            const std::string_view users = declared.second;
            const bool excludes = users.starts_with(all_but);
            const auto looks = [&](const std::string& run) {
                return excludes != detail::any_member(users.substr(excludes ? all_but.size() : 0), [&](auto user) {
                           return user.starts_with("--") ? count(std::string(user)) > 0
                                                         : (run + ' ').starts_with(std::string(user) + ' ');
                       });
            };
            const bool used = users.empty() || std::any_of(runs.begin(), runs.end(), looks);
            detail::require(declared.first->count() == 0 || used,
                            fmt::format("{}: pipeline '{}' makes no use of it; {} {}", declared.first->get_name(),
                                        runs.front(), users, users.find(", ") == users.npos ? "does" : "do"));
        }
    }
};

}  // namespace transformer
