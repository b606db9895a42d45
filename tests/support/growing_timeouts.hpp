// with_growing_timeouts: for tests in which one rank must miss a deadline and all others must not, on a machine that may
// let any thread stand still for a while.
// Needs doctest, core/deadline.
#pragma once

#include <chrono>            // timeouts
#include <exception>         // failed attempts
#include <initializer_list>  // timeouts
#include <string>            // why they failed

#include <doctest/doctest.h>

#include <tutti/core/deadline.hpp>  // duration

namespace tutti::test {

/// attempt(timeout), with one timeout after the other until one does not throw; what it waits for besides must be in
/// proportion to the timeout. A library that is wrong fails at each.
template <class Attempt>
void with_growing_timeouts(Attempt attempt, std::initializer_list<duration> timeouts = {
                                                std::chrono::milliseconds(300), std::chrono::milliseconds(1500),
                                                std::chrono::milliseconds(6000)}) {
    std::string failures;
    for (const duration timeout : timeouts) {
        try {
            attempt(timeout);
            return;
        } catch (const std::exception& e) { failures += std::string(failures.empty() ? "" : "; ") + e.what(); }
    }
    FAIL(failures);
}

}  // namespace tutti::test
