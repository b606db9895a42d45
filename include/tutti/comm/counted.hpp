// counted: counts the bytes this rank puts on the wire, by collective, in exact integers.
// Needs comm/decorator and comm/cost (wire_bytes is the convention).
#pragma once

#include <array>    // one entry a collective
#include <cstddef>  // size_t
#include <cstdint>  // exact counts
#include <memory>   // one ledger for all lanes
#include <mutex>    // lanes count while the trainer reads
#include <span>     // members of a child
#include <utility>  // move

#include <tutti/comm/cost.hpp>       // wire_bytes
#include <tutti/comm/decorator.hpp>  // decorator

namespace tutti::comm {

/// Calls made and bytes sent by one rank.
struct traffic {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
    friend constexpr bool operator==(const traffic&, const traffic&) = default;
    friend constexpr traffic operator+(traffic a, traffic b) noexcept { return {a.calls + b.calls, a.bytes + b.bytes}; }
    friend constexpr traffic operator-(traffic a, traffic b) noexcept { return {a.calls - b.calls, a.bytes - b.bytes}; }
};

/// Traffic by collective at one moment. The difference of two is what happened between them.
class traffic_snapshot {
    std::array<traffic, static_cast<std::size_t>(collective::barrier) + 1> by_kind_{};

public:
    [[nodiscard]] constexpr traffic& operator[](collective k) noexcept { return by_kind_[static_cast<std::size_t>(k)]; }
    [[nodiscard]] constexpr const traffic& operator[](collective k) const noexcept {
        return by_kind_[static_cast<std::size_t>(k)];
    }
    [[nodiscard]] constexpr traffic total() const noexcept {
        traffic all;
        for (const traffic& t : by_kind_) { all = all + t; }
        return all;
    }
    friend constexpr bool operator==(const traffic_snapshot&, const traffic_snapshot&) = default;
    /// `b` is the earlier one, with no reset since.
    friend constexpr traffic_snapshot operator-(traffic_snapshot a, const traffic_snapshot& b) noexcept {
        for (std::size_t i = 0; i < a.by_kind_.size(); ++i) { a.by_kind_[i] = a.by_kind_[i] - b.by_kind_[i]; }
        return a;
    }
};

/// What one rank's communicators sent so far.
///
/// Threads  any number of threads count and read; a snapshot is of one moment.
/// Cost     an uncontended lock.
class ledger {
    mutable std::mutex mutex_;
    traffic_snapshot counts_;

public:
    void add(collective kind, std::uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        traffic& t = counts_[kind];
        t = t + traffic{1, bytes};
    }
    [[nodiscard]] traffic_snapshot snapshot() const {
        const std::lock_guard lock(mutex_);
        return counts_;
    }
    [[nodiscard]] traffic total() const { return snapshot().total(); }
    void reset() {
        const std::lock_guard lock(mutex_);
        counts_ = {};
    }
};

/// A communicator that keeps a ledger.
///
/// Semantics    counts a call once it has returned without an error, also one of no bytes. duplicate and split share
///              the ledger. Control traffic (duplicate, split, agree, gather_control) is not counted.
/// Determinism  wire_bytes: exact, the same for every backend.
/// Cost         one lock a call.
template <decoratable C> class counted : public decorator<counted<C>, C> {
    using base = decorator<counted<C>, C>;
    friend base;
    std::shared_ptr<ledger> ledger_;

public:
    explicit counted(C inner, std::shared_ptr<ledger> into = std::make_shared<ledger>())
        : base(std::move(inner)), ledger_(std::move(into)) {
        if (ledger_ == nullptr) { throw usage_error("counted: no ledger to count into"); }
    }
    /// Never null; may outlive the communicator.
    [[nodiscard]] const std::shared_ptr<ledger>& traffic_ledger() const noexcept { return ledger_; }

    void execute(const call& c) {
        this->inner().execute(c);
        ledger_->add(c.kind, wire_bytes(c, this->rank(), this->size()));
    }

private:
    void before(const typename base::control_call&) noexcept {}
    [[nodiscard]] counted wrap(C child, std::span<const int>) { return counted(std::move(child), ledger_); }
};

}  // namespace tutti::comm
