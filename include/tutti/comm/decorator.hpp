// decorator: the common part of communicators that wrap another one (checked, counted, faulty, shaped).
// Needs comm/front. A decorator owns its inner communicator, and its children wrap the inner one's children.
#pragma once

#include <algorithm>    // min
#include <chrono>       // slices of a wait
#include <concepts>     // same_as
#include <cstddef>      // size_t
#include <cstdint>      // codes, sequence numbers
#include <iterator>     // size
#include <optional>     // split
#include <span>         // colors
#include <string>       // contexts
#include <string_view>  // names
#include <thread>       // sleep_until
#include <utility>      // move
#include <vector>       // control records

#include <tutti/comm/call.hpp>          // call
#include <tutti/comm/communicator.hpp>  // can_gather_control
#include <tutti/comm/front.hpp>         // typed collectives
#include <tutti/core/deadline.hpp>      // deadline

namespace tutti::comm {

/// What a communicator does collectively besides moving data.
enum class control : std::uint8_t { duplicate, split, gather_control };

/// A collective or a control operation.
class operation {
    std::uint8_t code_;

public:
    constexpr operation(collective k) noexcept : code_(static_cast<std::uint8_t>(k)) {}
    constexpr operation(control k) noexcept : code_(static_cast<std::uint8_t>(first_control + static_cast<int>(k))) {}
    /// From what `code` gave, perhaps on another rank. Any other number is an operation called "unknown".
    [[nodiscard]] static constexpr operation of(std::uint8_t code) noexcept {
        operation o = collective::barrier;
        o.code_ = code;
        return o;
    }

    [[nodiscard]] constexpr std::uint8_t code() const noexcept { return code_; }
    friend constexpr bool operator==(operation, operation) noexcept = default;
    [[nodiscard]] friend constexpr std::string_view name_of(operation o) noexcept {
        constexpr std::string_view controls[] = {"duplicate", "split", "gather_control"};
        if (o.code_ < first_control) { return name_of(static_cast<collective>(o.code_)); }
        const std::size_t k = o.code_ - std::size_t{first_control};
        return k < std::size(controls) ? controls[k] : "unknown";
    }

private:
    static constexpr int first_control = static_cast<int>(collective::barrier) + 1;
};

/// A communicator with the byte-level door: what every backend and every decorator is.
template <class C>
concept decoratable = can_gather_control<C> && requires(C& c, const call& k) {
    c.execute(k);
};

/// Forwards everything to the inner communicator. A decorator D<C> derives from decorator<D<C>, C> and brings
///   void execute(const call&)                          around inner().execute(call), with the same call
///   void before(const control_call&)                   ahead of a control operation
///   D wrap(C child, std::span<const int> members)      members: parent's ranks that are in the child
///
/// Semantics  a collective keeps the number that it got from the outermost decorator; duplicate, split and
///            gather_control count as one call each. Decorators nest in any order; `inner()` reaches the next one.
/// Cost       one function call.
template <class Derived, decoratable C> class decorator : public front<Derived, queue_of<C>> {
    C inner_;

public:
    using inner_type = C;

    [[nodiscard]] static constexpr bool reduces(dtype t) noexcept { return C::reduces(t); }
    [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
    [[nodiscard]] int size() const noexcept { return inner_.size(); }
    [[nodiscard]] std::string_view name() const noexcept { return inner_.name(); }
    [[nodiscard]] queue_of<C> queue() const noexcept { return inner_.queue(); }
    [[nodiscard]] C& inner() noexcept { return inner_; }
    [[nodiscard]] const C& inner() const noexcept { return inner_; }

    [[nodiscard]] Derived duplicate(std::string_view name) {
        self().before({control::duplicate, this->next_collective(), {}, name});
        std::vector<int> all;
        for (int r = 0; r < size(); ++r) { all.push_back(r); }
        return self().wrap(inner_.duplicate(name), all);
    }
    [[nodiscard]] std::optional<Derived> split(std::span<const int> colors, std::string_view name) {
        self().before({control::split, this->next_collective(), colors, name});
        std::optional<C> child = inner_.split(colors, name);  // checks the table
        if (!child) { return std::nullopt; }
        const int color = colors[static_cast<std::size_t>(rank())];
        std::vector<int> members;
        for (int r = 0; r < size(); ++r) {
            if (colors[static_cast<std::size_t>(r)] == color) { members.push_back(r); }
        }
        return self().wrap(std::move(*child), members);
    }
    [[nodiscard]] std::vector<control_record> gather_control(control_record mine) {
        self().before({control::gather_control, this->next_collective(), {}, {}});
        return inner_.gather_control(mine);
    }
    void synchronize() { inner_.synchronize(); }
    void abort(std::string_view why) noexcept { inner_.abort(why); }

protected:
    /// A control operation about to happen.
    struct control_call {
        control kind;
        std::uint64_t sequence;
        std::span<const int> colors;  ///< split
        std::string_view name;        ///< duplicate, split
    };

    explicit decorator(C inner) : inner_(std::move(inner)) {}

    [[nodiscard]] error_context context(operation o, std::uint64_t sequence) const {
        return {std::string(name_of(o)), std::string(name()), rank(), sequence, 0, dtype::byte, 0, {}};
    }

private:
    [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
};

/// Where time comes from; tests bring a clock that jumps.
template <class K>
concept sleeping_clock = std::movable<K> && requires(K& k, deadline until) {
    { k.now() } -> std::same_as<deadline>;
    k.sleep_until(until);
};

/// The steady clock and a sleeping thread.
struct wall_clock {
    [[nodiscard]] deadline now() const noexcept { return clock_type::now(); }
    void sleep_until(deadline until) const { std::this_thread::sleep_until(until); }
};
static_assert(sleeping_clock<wall_clock>);

/// Sleeps until `until`, looking every 2 ms whether the family still stands.
/// Errors  what c.synchronize() throws, aborted_error above all.
template <communicator C, sleeping_clock K> void sleep_watching(C& c, K& clock, deadline until) {
    constexpr duration slice = std::chrono::milliseconds(2);
    for (deadline now = clock.now(); now < until; now = clock.now()) {
        clock.sleep_until(std::min(until, now + slice));
        c.synchronize();
    }
}

}  // namespace tutti::comm
