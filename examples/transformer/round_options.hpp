// When ranks that train by themselves meet: the options of local updates, and their checks.
// Needs CLI11.
#pragma once

#include <charconv>      // from_chars
#include <cstddef>       // size_t
#include <optional>      // what may be left to the pipeline
#include <string>        // messages
#include <string_view>   // parts of them
#include <system_error>  // errc

#include <CLI/CLI.hpp>                   // command line
#include <fmt/format.h>                  // messages
#include <tutti/strategy/staleness.hpp>  // gaps

#include "bad_input.hpp"
#include "option_checks.hpp"

namespace transformer {

struct round_options {
    int tau = 8;                 // steps of a round
    bool automatic_tau = false;  // tau steps at first, then what was measured asks for
    int synchronous_steps = 0;   // before the first round
    int fragments = 1;           // parts of the model whose rounds end in turn
    std::optional<double> beta;  // momentum over rounds; none: what suits the pipeline
    std::string gap = "scalar";  // co2: none, constant:X, scalar, elementwise

    [[nodiscard]] std::size_t period() const { return static_cast<std::size_t>(tau); }
    [[nodiscard]] double outer_momentum(double usual) const { return beta.value_or(usual); }
    /// --gap. Errors: bad_input.
    [[nodiscard]] tutti::strategy::staleness_gap staleness() const {
        constexpr std::string_view constant = "constant:";
        if (gap == "none") { return tutti::strategy::no_gap{}; }
        if (gap == "scalar") { return tutti::strategy::scalar_gap{}; }
        if (gap == "elementwise") { return tutti::strategy::elementwise_gap{}; }
        double value = 0;
        const char* const end = gap.data() + gap.size();
        if (gap.starts_with(constant) && std::from_chars(gap.data() + constant.size(), end, value).ptr == end &&
            value >= 1 && value <= 1e30) {
            return tutti::strategy::constant_gap{value};
        }
        throw bad_input(
            fmt::format("--gap: '{}' is not one of none, constant:X (X at least 1), scalar, elementwise", gap));
    }
};

inline void declare(command_line& app, round_options& o) {
    using detail::within;
    app.begin("Local updates", "local-sgd, slowmo, co2, co2-zero, diloco, eager-diloco, cocod");
    app.add_option_function<std::string>(
           "--tau",
           [&o](const std::string& text) {
               o.automatic_tau = text == "auto";
               const char* const end = text.data() + text.size();
               if (o.automatic_tau) { return; }
               const auto [rest, problem] = std::from_chars(text.data(), end, o.tau);
               if (problem != std::errc{} || rest != end || o.tau < 1 || o.tau > 100'000'000) {
                   throw CLI::ValidationError("--tau", fmt::format("'{}' is neither a number of steps nor auto", text));
               }
           },
           "steps between two averages; auto: as few as let at most 1 % of the time wait, measured in three rounds of "
           "8")
        ->default_str("8")
        ->type_name("INT|auto");
    app.add_option("--sync-steps", o.synchronous_steps,
                   "steps before the first round, in which ranks average gradients as ddp does")
        ->check(within(0, 100'000'000))
        ->capture_default_str();
    app.add_option("--fragments", o.fragments,
                   "parts of the model, of whole tensors, whose rounds end in turn, so that less is sent at once")
        ->check(within(1, 100'000'000))
        ->capture_default_str();
    app.used_by("slowmo, co2, co2-zero, diloco, eager-diloco");
    app.add_option("--beta", o.beta,
                   "momentum over rounds, 0 to less than 1; default 0.5, those of co2 0.2, of diloco 0.9");
    app.used_by("co2, co2-zero");
    app.add_option("--gap", o.gap,
                   "what divides an average that comes a round late: none, constant:X, scalar or elementwise")
        ->capture_default_str();
}

/// Errors: bad_input.
inline void complete(const round_options& o) {
    using detail::require;
    require(!o.beta || (*o.beta >= 0 && *o.beta < 1),
            fmt::format("--beta: {} is not a momentum from 0 to less than 1", o.outer_momentum(0)));
    static_cast<void>(o.staleness());  // refuses
    require(
        o.fragments == 1 || (o.fragments <= o.tau && !o.automatic_tau),
        fmt::format("--fragments: {} parts end their rounds in turn, each at a step of its own: --tau must be a number "
                    "of at least as many steps",
                    o.fragments));
}

}  // namespace transformer
