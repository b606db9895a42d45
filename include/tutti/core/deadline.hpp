// Deadlines: every wait of the library ends by one of these.
// Needs core/error. The default of ten minutes is changed by TUTTI_TIMEOUT (seconds) or per communicator.
#pragma once

#include <chrono>       // steady_clock
#include <cstdlib>      // getenv, strtod
#include <string_view>  // who waits

#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti {

/// The clock of all deadlines and measurements.
using clock_type = std::chrono::steady_clock;
using deadline = clock_type::time_point;
using duration = clock_type::duration;

/// The point in time `timeout` from now, saturating instead of overflowing.
[[nodiscard]] inline deadline after(duration timeout) noexcept {
    const deadline now = clock_type::now();
    return timeout > deadline::max() - now ? deadline::max() : now + timeout;
}

/// TUTTI_TIMEOUT in seconds when set, ten minutes otherwise.
/// Errors  usage_error when the variable is not a number from 1e-9 to 1e9.
[[nodiscard]] inline duration default_timeout() {
    const char* const text = std::getenv("TUTTI_TIMEOUT");
    if (text == nullptr) { return std::chrono::minutes(10); }
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    constexpr double least = 1e-9;  // smaller values would be rounded to none
    constexpr double most = 1e9;    // thirty years; larger values would overflow the clock
    if (end == text || *end != '\0' || !(seconds >= least) || seconds > most) {
        throw usage_error(formatted("TUTTI_TIMEOUT: '{}' is not a number of seconds from 1e-9 to 1e9", text));
    }
    return std::chrono::duration_cast<duration>(std::chrono::duration<double>(seconds));
}

/// Errors  usage_error when no time is left to wait: whoever did would fail at once.
inline void expect_timeout(std::string_view who, duration timeout) {
    if (timeout <= duration::zero()) {
        throw usage_error(formatted("{}: the timeout is {} s, expected more than 0", who,
                                    std::chrono::duration<double>(timeout).count()));
    }
}

/// A duration as a number, for reports and models.
[[nodiscard]] inline double seconds(duration d) noexcept { return std::chrono::duration<double>(d).count(); }

}  // namespace tutti
