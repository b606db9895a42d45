// detour: work of one queue that another one does part of, in order.
// Needs core/queue. How two communicators are used in one piece of work.
#pragma once

#include <utility>  // move

#include <tutti/core/queue.hpp>  // queue

namespace tutti::detail {

/// While it lives, work goes to `second`; behind it and before it, to `first`. Also when an exception ends it, so that
/// what is released on `first` outlives the work on `second`.
template <queue Q> class detour {
    Q first_;
    Q second_;

    static void order(Q earlier, Q later) {
        auto done = earlier.record();
        later.wait(done);
    }

public:
    detour(Q first, Q second) : first_(std::move(first)), second_(std::move(second)) { order(first_, second_); }
    detour(const detour&) = delete;
    detour& operator=(const detour&) = delete;
    ~detour() {
        try {
            order(second_, first_);
        } catch (...) {}  // the device is lost: nothing runs on either queue
    }
};

}  // namespace tutti::detail
