// soon, until_failed: waits of tests for what a right library does at once, with a bound for a wrong one.
// Needs core/deadline.
#pragma once

#include <chrono>     // bounds
#include <stdexcept>  // what never came
#include <thread>     // sleep_for

#include <tutti/core/deadline.hpp>  // deadline

namespace tutti::test {

/// Whether holds() becomes true.
template <class Condition> bool soon(Condition holds, duration at_most = std::chrono::seconds(20)) {
    for (const deadline limit = after(at_most); clock_type::now() < limit;) {
        if (holds()) { return true; }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
}

/// Ends by the exception. One wait may return as if all were well: NCCL's kernels go on when a rank that heard sooner has
/// aborted.
template <class C> [[noreturn]] void until_failed(C& c) {
    soon([&] {
        c.synchronize();
        return false;
    });
    throw std::logic_error("the failure was not heard");
}

}  // namespace tutti::test
