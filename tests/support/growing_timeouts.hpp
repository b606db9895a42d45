// with_growing_timeouts: for tests in which one rank must miss a deadline and all others must not, on a machine that may
// let any thread stand still for a while.
// Needs doctest, core/deadline.
#pragma once

#include <chrono>     // timeouts
#include <exception>  // failed attempts
#include <string>     // why they failed

#include <doctest/doctest.h>

#include <tutti/core/deadline.hpp>  // duration

namespace tutti::test {

/// attempt(timeout), with 0.3 s, then 1.5 s and 6 s, until one does not throw; what it waits for besides must be in
/// proportion to the timeout. A library that is wrong fails at each.
template <class Attempt> void with_growing_timeouts(Attempt attempt) {
    using std::chrono::milliseconds;
    std::string failures;
    for (const duration timeout : {milliseconds(300), milliseconds(1500), milliseconds(6000)}) {
        try {
            attempt(timeout);
            return;
        } catch (const std::exception& e) { failures += std::string(failures.empty() ? "" : "; ") + e.what(); }
    }
    FAIL(failures);
}

}  // namespace tutti::test
