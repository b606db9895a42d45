// pending_span: a span whose times are known later, when the marks at its ends have been reached.
// Needs core/queue. One virtual call hides which queue the marks are of.
#pragma once

#include <optional>  // not known yet
#include <utility>   // pair, move

#include <tutti/core/deadline.hpp>  // deadline

namespace tutti::schedule::detail {

class pending_span {
public:
    pending_span() = default;
    pending_span(const pending_span&) = delete;
    pending_span& operator=(const pending_span&) = delete;
    virtual ~pending_span() = default;
    /// Begin and end; nothing as long as they lie ahead. Throws when they will never be known.
    [[nodiscard]] virtual std::optional<std::pair<deadline, deadline>> times() const = 0;
};

/// Between two marks of one queue, which reaches them in this order.
template <class Mark> class span_between final : public pending_span {
    Mark begin_;
    Mark end_;

public:
    span_between(Mark begin, Mark end) : begin_(std::move(begin)), end_(std::move(end)) {}
    [[nodiscard]] std::optional<std::pair<deadline, deadline>> times() const override {
        if (!end_.ready()) { return std::nullopt; }
        const deadline begin = begin_.when();
        return std::pair(begin, begin + end_.since(begin_));
    }
};

}  // namespace tutti::schedule::detail
