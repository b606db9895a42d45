// explorer: runs a few fibers under every schedule, with atomics that check happens-before by vector clocks.
// Each access to a model word is a scheduling point. Sleeping has no timeout here: a lost wake-up is a deadlock that
// the search finds. States that were reached before, judged by word values and by what each fiber has observed, are not
// explored twice.
#pragma once

#include <array>          // clocks
#include <atomic>         // memory_order names
#include <cstddef>        // size_t
#include <cstdint>        // hashes
#include <functional>     // fiber bodies
#include <memory>         // stacks
#include <string>         // failures
#include <unordered_set>  // visited states
#include <vector>         // fibers

#include <ucontext.h>  // fibers

namespace model {

inline constexpr std::size_t max_fibers = 4;
using vector_clock = std::array<std::uint32_t, max_fibers>;

inline void join(vector_clock& into, const vector_clock& from) {
    for (std::size_t i = 0; i < max_fibers; ++i) {
        if (into[i] < from[i]) { into[i] = from[i]; }
    }
}
inline bool happened_before(const vector_clock& a, const vector_clock& b) {
    for (std::size_t i = 0; i < max_fibers; ++i) {
        if (a[i] > b[i]) { return false; }
    }
    return true;
}

class word;

/// What a search found.
struct verdict {
    std::string failure;        ///< empty: every schedule is fine
    std::size_t schedules = 0;  ///< run to their end or to a known state
    std::size_t states = 0;
};

/// One world: fibers, and the schedule that is being followed.
class explorer {
    struct fiber {
        ucontext_t context{};
        vector_clock clock{};
        std::uint64_t seen = 0;  // hash of everything this fiber has observed: stands for its local state
        std::uint64_t resumed = 0;
        const word* asleep_on = nullptr;
        bool done = false;
    };
    struct choice {
        std::vector<std::size_t> options;
        std::size_t taken = 0;
    };
    static constexpr std::size_t stack_bytes = 64 * 1024;

    std::vector<fiber> fibers_;
    std::array<std::unique_ptr<char[]>, max_fibers> stacks_;  // reused: a run leaves nothing on them that needs an end
    std::vector<std::function<void(std::size_t)>> bodies_;
    std::vector<const word*> words_;
    std::vector<choice> path_;
    std::unordered_set<std::uint64_t> visited_;
    std::string failure_;
    ucontext_t home_{};
    std::size_t running_ = 0;

    static explorer*& active() {
        static explorer* e = nullptr;
        return e;
    }
    static void enter() {
        explorer& e = *active();
        const std::size_t self = e.running_;
        e.bodies_[self](self);
        e.fibers_[self].done = true;
        swapcontext(&e.fibers_[self].context, &e.home_);
    }
    static std::uint64_t mix(std::uint64_t h, std::uint64_t v) {
        h = (h ^ v) * 0x9E3779B97F4A7C15ull;
        return h ^ (h >> 29);
    }
    std::uint64_t state() const;
    void start();
    bool run_once(std::size_t& steps);

public:
    static explorer& current() { return *active(); }
    [[nodiscard]] std::size_t self() const { return running_; }
    [[nodiscard]] vector_clock& clock() { return fibers_[running_].clock; }
    void observe(std::uint64_t value) { fibers_[running_].seen = mix(fibers_[running_].seen, value); }
    void fail(const std::string& why) {
        if (failure_.empty()) { failure_ = why; }
    }
    void add(const word* w) { words_.push_back(w); }
    /// Lets the scheduler choose who goes on.
    void yield() { swapcontext(&fibers_[running_].context, &home_); }
    void sleep(const word* w) {
        fibers_[running_].asleep_on = w;
        yield();
    }
    void wake(const word* w) {
        for (fiber& f : fibers_) {
            if (f.asleep_on == w) { f.asleep_on = nullptr; }
        }
    }

    /// Explores all schedules of `bodies`. `reset` rebuilds the shared objects before each run.
    verdict explore(std::vector<std::function<void(std::size_t)>> bodies, const std::function<void()>& reset);
};

/// An atomic 32-bit word with the operations the barrier uses.
class word {
    std::uint32_t value_;
    vector_clock released_{};  // what an acquiring reader learns

    static bool acquires(std::memory_order o) {
        return o != std::memory_order_relaxed && o != std::memory_order_release;
    }
    static bool releases(std::memory_order o) {
        return o == std::memory_order_release || o == std::memory_order_acq_rel || o == std::memory_order_seq_cst;
    }
    std::uint32_t arrive_at(std::memory_order order) const {
        explorer& e = explorer::current();
        e.yield();
        ++e.clock()[e.self()];
        if (acquires(order)) { join(e.clock(), released_); }
        return value_;
    }
    // A read-modify-write continues the release sequence of the value it replaces.
    void replace(std::uint32_t value, std::memory_order order) {
        value_ = value;
        if (releases(order)) { join(released_, explorer::current().clock()); }
    }

public:
    explicit word(std::uint32_t value) : value_(value) { explorer::current().add(this); }
    word(const word&) = delete;
    word& operator=(const word&) = delete;

    [[nodiscard]] std::uint32_t peek() const { return value_; }
    [[nodiscard]] std::uint32_t load(std::memory_order order) const {
        const std::uint32_t value = arrive_at(order);
        explorer::current().observe(value);
        return value;
    }
    std::uint32_t exchange(std::uint32_t desired, std::memory_order order) {
        const std::uint32_t old = arrive_at(order);
        replace(desired, order);
        explorer::current().observe(old);
        return old;
    }
    bool compare_exchange_strong(std::uint32_t& expected, std::uint32_t desired, std::memory_order order) {
        const std::uint32_t old = arrive_at(order);
        explorer::current().observe(old);
        if (old != expected) {
            expected = old;
            return false;
        }
        replace(desired, order);
        return true;
    }
    /// Not atomic: what a careless waiter would do instead of compare-and-swap.
    void blind_store(std::uint32_t value) {
        explorer::current().yield();
        value_ = value;
    }
};

/// Ordinary memory: every access must be ordered against the conflicting ones before it.
class cell {
    std::uint32_t value_ = 0;
    vector_clock written_{};
    vector_clock read_{};

public:
    void write(std::uint32_t value) {
        explorer& e = explorer::current();
        ++e.clock()[e.self()];
        if (!happened_before(written_, e.clock()) || !happened_before(read_, e.clock())) {
            e.fail("race: a write is not ordered");
        }
        value_ = value;
        written_ = e.clock();
    }
    [[nodiscard]] std::uint32_t read() {
        explorer& e = explorer::current();
        ++e.clock()[e.self()];
        if (!happened_before(written_, e.clock())) { e.fail("race: a read is not ordered"); }
        join(read_, e.clock());
        e.observe(value_);
        return value_;
    }
};

inline std::uint64_t explorer::state() const {
    std::uint64_t h = 0;
    for (const fiber& f : fibers_) {
        h = mix(h, f.seen);
        h = mix(h, f.resumed);
        h = mix(h, f.done ? 1 : 0);
        h = mix(h, f.asleep_on == nullptr ? 0 : 1);
    }
    for (const word* w : words_) { h = mix(h, w->peek()); }
    return h;
}

inline void explorer::start() {
    fibers_.clear();
    fibers_.resize(bodies_.size());
    for (std::size_t i = 0; i < fibers_.size(); ++i) {
        fiber& f = fibers_[i];
        if (stacks_[i] == nullptr) { stacks_[i] = std::make_unique_for_overwrite<char[]>(stack_bytes); }
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks_[i].get();
        f.context.uc_stack.ss_size = stack_bytes;
        f.context.uc_link = nullptr;
        makecontext(&f.context, &explorer::enter, 0);
    }
}

// Follows path_ and extends it. False once a failure is known.
inline bool explorer::run_once(std::size_t& steps) {
    for (std::size_t step = 0;; ++step, ++steps) {
        std::vector<std::size_t> options;
        bool all_done = true;
        for (std::size_t f = 0; f < fibers_.size(); ++f) {
            all_done = all_done && fibers_[f].done;
            if (!fibers_[f].done && fibers_[f].asleep_on == nullptr) { options.push_back(f); }
        }
        if (all_done) { return failure_.empty(); }
        if (options.empty()) {
            fail("deadlock: everybody sleeps");
            return false;
        }
        if (step == path_.size()) {
            if (!visited_.insert(state()).second) { return true; }
            path_.push_back({options, 0});
        }
        const choice& c = path_[step];
        running_ = c.options[c.taken];
        ++fibers_[running_].resumed;
        swapcontext(&home_, &fibers_[running_].context);
        if (!failure_.empty()) { return false; }
    }
}

inline verdict explorer::explore(std::vector<std::function<void(std::size_t)>> bodies,
                                 const std::function<void()>& reset) {
    verdict v;
    bodies_ = std::move(bodies);
    explorer* const outer = active();
    active() = this;
    std::size_t steps = 0;
    do {
        words_.clear();
        reset();
        start();
        ++v.schedules;
        if (!run_once(steps)) { break; }
        while (!path_.empty() && path_.back().taken + 1 == path_.back().options.size()) { path_.pop_back(); }
        if (!path_.empty()) { ++path_.back().taken; }
    } while (!path_.empty());
    active() = outer;
    v.failure = failure_;
    v.states = visited_.size();
    return v;
}

}  // namespace model
