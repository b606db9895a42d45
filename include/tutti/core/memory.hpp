// Memory kinds: tags that say where data lives and whether the host may dereference it.
// Needs nothing. `memory_account` counts live and peak bytes of one rank.
#pragma once

#include <atomic>       // counters shared by a rank's threads
#include <concepts>     // memory
#include <cstddef>      // size_t
#include <string_view>  // names in messages

namespace tutti {

/// Ordinary host memory.
struct host_memory {
    static constexpr bool host_accessible = true;
    static constexpr std::string_view name = "host";
};
/// Page-locked host memory: the host reads it, copy engines reach it asynchronously.
struct pinned_memory {
    static constexpr bool host_accessible = true;
    static constexpr std::string_view name = "pinned";
};
/// Accelerator memory: never dereferenced by host code.
struct device_memory {
    static constexpr bool host_accessible = false;
    static constexpr std::string_view name = "device";
};
/// Sizes without storage: what a virtual rank owns.
struct phantom_memory {
    static constexpr bool host_accessible = false;
    static constexpr std::string_view name = "phantom";
};

template <class M>
concept memory = requires {
    { M::host_accessible } -> std::convertible_to<bool>;
    { M::name } -> std::convertible_to<std::string_view>;
};

/// Live and peak bytes of one rank. All queues of a rank share one account, so the peak covers its lanes too.
/// Thread-safe; the peak is exact as long as one thread allocates at a time and never too low by more than the
/// allocations in flight.
class memory_account {
    std::atomic<std::size_t> live_{0};
    std::atomic<std::size_t> peak_{0};

public:
    void allocated(std::size_t bytes) noexcept {
        const std::size_t now = live_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
        std::size_t seen = peak_.load(std::memory_order_relaxed);
        while (seen < now && !peak_.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {}
    }
    void released(std::size_t bytes) noexcept { live_.fetch_sub(bytes, std::memory_order_relaxed); }
    [[nodiscard]] std::size_t live() const noexcept { return live_.load(std::memory_order_relaxed); }
    [[nodiscard]] std::size_t peak() const noexcept { return peak_.load(std::memory_order_relaxed); }
    /// Forgets the history: the peak restarts at what is live now.
    void reset_peak() noexcept { peak_.store(live(), std::memory_order_relaxed); }
};

}  // namespace tutti
