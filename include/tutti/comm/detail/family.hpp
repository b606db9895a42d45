// family: what all communicators derived from one root share: the abort flag with its first cause, and the deadline.
// Needs core/error. Used by every backend that lives in one process.
#pragma once

#include <atomic>       // poison flag
#include <mutex>        // first cause
#include <string>       // cause
#include <string_view>  // texts

#include <tutti/core/deadline.hpp>  // timeout
#include <tutti/core/error.hpp>     // aborted_error
#include <tutti/core/text.hpp>      // formatted

namespace tutti::comm::detail {

class family {
    std::atomic<bool> poisoned_{false};
    std::mutex mutex_;
    std::string cause_;

public:
    const duration timeout;

    explicit family(duration t) noexcept : timeout(t) {}

    /// The first caller's text becomes the cause. Sequentially consistent: data phases announce themselves before they
    /// look at this flag, leavers raise it before they look for data phases.
    void poison(std::string_view why) noexcept {
        {
            const std::lock_guard lock(mutex_);
            if (poisoned_.load(std::memory_order_relaxed)) { return; }
            try {
                cause_ = why;
            } catch (...) {}  // out of memory: the abort stands without its text
            poisoned_.store(true, std::memory_order_seq_cst);
        }
    }
    [[nodiscard]] bool poisoned() const noexcept { return poisoned_.load(std::memory_order_seq_cst); }
    [[nodiscard]] std::string cause() {
        const std::lock_guard lock(mutex_);
        return cause_;
    }
    void raise_if_poisoned(error_context context) {
        if (poisoned()) { raise(std::move(context)); }
    }
    [[noreturn]] void raise(error_context context) {
        throw aborted_error(formatted("{}: aborted: {}{}", context.operation, cause(), where(context)), context);
    }
};

}  // namespace tutti::comm::detail
