// kept_number: a number that a strategy knows without a wait, and whose copy in a queue's memory is saved and restored.
// Needs core/buffer and core/state.
#pragma once

#include <string>   // names
#include <utility>  // move

#include <tutti/core/buffer.hpp>       // the copy
#include <tutti/core/elementwise.hpp>  // fill
#include <tutti/core/run.hpp>          // fetch
#include <tutti/core/state.hpp>        // state_entry

namespace tutti::strategy::detail {

template <transportable T, queue Q> class kept_number {
    Q queue_;
    T value_;
    buffer<T, Q> copy_;

public:
    kept_number(Q q, T value) : queue_(q), value_(value), copy_(q, 1) { fill(queue_, copy_.view(), value_); }

    [[nodiscard]] T value() const noexcept { return value_; }
    void set(T value) {
        value_ = value;
        fill(queue_, copy_.view(), value_);
    }

    [[nodiscard]] state_entry<typename Q::memory_type> entry(std::string name, ownership whose) const {
        return state_of(std::move(name), copy_.view(), whose);
    }
    /// The copy was written.
    void restored() { value_ = fetch(queue_, copy_.view(), value_); }
};

}  // namespace tutti::strategy::detail
