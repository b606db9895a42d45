// self<Queue>: a communicator of one rank on any queue. What a strategy runs over when there is nobody to talk to.
// Needs comm/front. Collectives are copies through the door, so a virtual or device queue works as well.
#pragma once

#include <cstddef>      // byte
#include <memory>       // family state shared with children
#include <mutex>        // first cause of an abort
#include <optional>     // split
#include <span>         // colors
#include <string>       // name
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // pending receives

#include <tutti/comm/front.hpp>        // typed collectives
#include <tutti/core/deadline.hpp>     // duration, expect_timeout
#include <tutti/core/elementwise.hpp>  // copy
#include <tutti/core/text.hpp>         // formatted

namespace tutti::comm {

/// One rank.
///
/// Semantics    every collective copies `in` to `out` in queue order (mean of one is itself); exchange matches sends to
///              rank 0 with receives from rank 0 in order.
/// Determinism  exact.
/// Cost         one copy, none in place.
/// Errors       usage_error for messages without a partner, which nobody else could ever send, or a timeout that is not
///              positive.
template <queue Q = host_queue> class self : public front<self<Q>, Q> {
    struct family {
        std::mutex mutex;
        std::string cause;
        bool aborted = false;
    };
    Q queue_;
    std::string name_;
    duration timeout_;
    std::shared_ptr<family> family_ = std::make_shared<family>();

    self(const self& parent, std::string_view name)
        : queue_(parent.queue_.sibling())
        , name_(parent.name_ + "/" + std::string(name))
        , timeout_(parent.timeout_)
        , family_(parent.family_) {}

public:
    explicit self(Q q = Q{}, options o = {.name = "self"})
        : queue_(std::move(q)), name_(std::move(o.name)), timeout_(o.timeout) {
        expect_timeout("self", timeout_);
    }
    self(self&&) noexcept = default;
    self& operator=(self&&) noexcept = default;

    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }
    [[nodiscard]] std::string_view name() const noexcept { return name_; }
    [[nodiscard]] Q queue() const noexcept { return queue_; }

    [[nodiscard]] self duplicate(std::string_view name) {
        throw_if_aborted("duplicate");
        this->next_collective();
        return self(*this, name);
    }
    [[nodiscard]] std::optional<self> split(std::span<const int> colors, std::string_view name) {
        throw_if_aborted("split");
        this->next_collective();
        if (colors.size() != 1) {
            throw usage_error(formatted("split: {} colors for 1 rank, on '{}'", colors.size(), name_));
        }
        if (colors[0] < 0) { return std::nullopt; }
        return self(*this, name);
    }
    void synchronize() {
        queue_.record().wait_host(after(timeout_));
        throw_if_aborted("synchronize");
    }
    void abort(std::string_view why) noexcept {
        const std::lock_guard lock(family_->mutex);
        if (family_->aborted) { return; }
        family_->aborted = true;
        try {
            family_->cause = why;
        } catch (...) {}  // out of memory: the abort stands without its text
    }
    /// The record itself: one rank has nobody to ask.
    [[nodiscard]] std::vector<control_record> gather_control(control_record mine) {
        throw_if_aborted("gather_control");
        this->next_collective();
        return {mine};
    }

    /// The byte-level core; called by the typed front.
    void execute(const call& c) {
        throw_if_aborted(name_of(c.kind));
        if (c.kind == collective::exchange) {
            exchange_with_self(c);
        } else if (c.out != c.in) {
            copy_bytes(c.in, c.out, c.out_bytes());
        }
    }

private:
    using M = typename Q::memory_type;

    void throw_if_aborted(std::string_view operation) {
        const std::lock_guard lock(family_->mutex);
        if (!family_->aborted) { return; }
        throw aborted_error(formatted("{}: aborted: {}, on '{}'", operation, family_->cause, name_),
                            {std::string(operation), name_, 0, 0, 0, dtype::byte, 0, {}});
    }
    void copy_bytes(const void* in, void* out, std::size_t bytes) {
        copy(queue_, view<const std::byte, M>(static_cast<const std::byte*>(in), bytes),
             view<std::byte, M>(static_cast<std::byte*>(out), bytes));
    }
    void exchange_with_self(const call& c) {
        std::vector<message> sends;
        std::vector<message> receives;
        for (const message& m : c.messages) { (m.sends ? sends : receives).push_back(m); }
        const error_context context = context_of(c, name_, 0);
        if (sends.size() != receives.size()) {
            throw usage_error(formatted("exchange: {} sends and {} receives with one rank{}", sends.size(),
                                        receives.size(), where(context)),
                              context);
        }
        for (std::size_t i = 0; i < sends.size(); ++i) {
            if (sends[i].bytes != receives[i].bytes) {
                throw usage_error(formatted("exchange: message {} has {} bytes, its receiver {}{}", i, sends[i].bytes,
                                            receives[i].bytes, where(context)),
                                  context);
            }
        }
        for (std::size_t i = 0; i < sends.size(); ++i) { copy_bytes(sends[i].data, receives[i].data, sends[i].bytes); }
    }
};

static_assert(communicator<self<host_queue>> && can_gather_control<self<host_queue>>);

}  // namespace tutti::comm
