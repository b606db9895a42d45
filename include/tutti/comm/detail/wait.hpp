// How threads wait for each other: usable processors, the spin / yield / sleep ladder, and the futex under it.
// Needs core/deadline. Budgets are times, not iterations: a PAUSE takes 10 to 150 cycles depending on the machine.
#pragma once

#include <algorithm>  // max
#include <atomic>     // words waited on
#include <chrono>     // budgets
#include <cstdint>    // 32-bit futex words
#include <cstdio>     // cgroup files
#include <thread>     // yield, hardware_concurrency

#if defined(__linux__)
#include <linux/futex.h>  // FUTEX_WAIT, FUTEX_WAKE
#include <sched.h>        // affinity mask
#include <sys/syscall.h>  // SYS_futex
#include <time.h>         // timespec
#include <unistd.h>       // syscall
#endif

#include <tutti/core/deadline.hpp>  // clock_type

namespace tutti::comm::detail {

/// Processors this process may use: the affinity mask, further limited by a cgroup's quota. At least 1.
[[nodiscard]] inline int count_usable_processors() noexcept {
    int processors = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) { processors = CPU_COUNT(&mask); }
    long long quota = -1;
    long long period = 0;
    const auto read = [](const char* path, const char* format, auto*... value) noexcept {
        std::FILE* const file = std::fopen(path, "r");
        if (file == nullptr) { return false; }
        const int fields = std::fscanf(file, format, value...);
        std::fclose(file);
        return fields == static_cast<int>(sizeof...(value));
    };
    // "max 100000" of cgroup v2 has no number in front and leaves the quota unset.
    const bool limited = read("/sys/fs/cgroup/cpu.max", "%lld %lld", &quota, &period) ||
                         (read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "%lld", &quota) &&
                          read("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "%lld", &period));
    if (limited && quota > 0 && period > 0) {
        processors = std::min(processors, static_cast<int>((quota + period - 1) / period));
    }
#endif
    return std::max(processors, 1);
}
[[nodiscard]] inline int usable_processors() noexcept {
    static const int processors = count_usable_processors();
    return processors;
}

/// One step of a busy wait.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

/// Sleeps while `word` holds `expected`, at most `slice`. May return early.
inline void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t expected, duration slice) noexcept {
#if defined(__linux__)
    static_assert(sizeof(word) == sizeof(std::uint32_t), "a futex is one 32-bit word");
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(slice).count();
    const timespec limit{static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, &limit, nullptr, 0);
#else
    if (word.load(std::memory_order_relaxed) == expected) {
        std::this_thread::sleep_for(std::min<duration>(slice, std::chrono::microseconds(50)));
    }
#endif
}

/// Wakes everybody asleep on `word`.
inline void wake_all(std::atomic<std::uint32_t>& word) noexcept {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    static_cast<void>(word);
#endif
}

/// The real machine, as the epoch barrier sees it. Tests replace it by one that explores interleavings.
struct machine {
    using word = std::atomic<std::uint32_t>;

    /// Spins, then yields, for as long as it pays. `again` is false once the caller should sleep.
    class ladder {
        static constexpr int free_polls = 256;  // before the first look at the clock: a peer is that close
        static constexpr duration yield_time = std::chrono::microseconds(100);
        duration spin_time_;
        deadline start_{};
        int polls_ = 0;

    public:
        explicit ladder(duration spin_time) noexcept : spin_time_(spin_time) {}
        [[nodiscard]] bool again() noexcept {
            if (spin_time_ > duration::zero() && ++polls_ < free_polls) { return true; }
            const deadline now = clock_type::now();
            if (start_ == deadline{}) { start_ = now; }
            const duration waited = now - start_;
            if (waited < spin_time_) {
                relax();
                return true;
            }
            if (waited < spin_time_ + yield_time) {
                std::this_thread::yield();
                return true;
            }
            return false;
        }
    };
    /// A sleeper looks at abort flags and deadlines this often.
    static constexpr duration slice = std::chrono::milliseconds(2);
    static void sleep(word& w, std::uint32_t expected) noexcept { sleep_on(w, expected, slice); }
    static void wake(word& w) noexcept { wake_all(w); }
};

/// Spinning helps only while every rank has a processor of its own.
[[nodiscard]] inline duration spin_time_for(int ranks) noexcept {
    return ranks <= usable_processors() ? duration(std::chrono::microseconds(4)) : duration::zero();
}

}  // namespace tutti::comm::detail
