// The epoch barrier of the threads backend under every schedule of a few ranks and calls. Each rank writes its letter,
// arrives, waits for all and reads all letters; letters alternate between two buffers, as in the channel. No reading
// may race with the writing two calls later, no wake-up may be lost, and every seeded mistake must be found.
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include <tutti/comm/detail/epoch_barrier.hpp>

#include "explorer.hpp"

namespace {

enum class mistake { none, no_wake, unordered, blind_bit, sleep_without_bit };

// Sleeps at once: the shortest ladder has the most interleavings with the bit.
template <mistake Mistake> struct model_machine {
    class word {
        model::word word_;

    public:
        explicit word(std::uint32_t v) : word_(v) {}
        model::word& raw() { return word_; }
        static std::memory_order order(std::memory_order o) {
            return Mistake == mistake::unordered ? std::memory_order_relaxed : o;
        }
        std::uint32_t load(std::memory_order o) const { return word_.load(order(o)); }
        std::uint32_t exchange(std::uint32_t v, std::memory_order o) { return word_.exchange(v, order(o)); }
        bool compare_exchange_strong(std::uint32_t& expected, std::uint32_t desired, std::memory_order o) {
            if constexpr (Mistake == mistake::blind_bit) {
                word_.blind_store(desired);
                return true;
            } else if constexpr (Mistake == mistake::sleep_without_bit) {
                return true;
            } else {
                return word_.compare_exchange_strong(expected, desired, o);
            }
        }
    };
    struct ladder {
        bool again() const { return false; }
    };
    static void sleep(word& w, std::uint32_t expected) {
        // The kernel compares and falls asleep in one step.
        const std::uint32_t value = w.raw().load(std::memory_order_relaxed);
        if (value == expected || (Mistake == mistake::sleep_without_bit && (value | 1u) == expected)) {
            model::explorer::current().sleep(&w.raw());
        }
    }
    static void wake(word& w) {
        if constexpr (Mistake != mistake::no_wake) { model::explorer::current().wake(&w.raw()); }
    }
};

template <mistake Mistake>
model::verdict explore(std::size_t ranks, std::uint32_t calls, std::size_t buffers, std::uint32_t first_epoch = 0) {
    using barrier = tutti::comm::detail::epoch_barrier<model_machine<Mistake>>;
    std::unique_ptr<barrier> arrivals;
    std::vector<std::vector<model::cell>> letters;
    const auto reset = [&] {
        arrivals = std::make_unique<barrier>(ranks);
        letters.assign(ranks, std::vector<model::cell>(buffers));
    };
    const auto rank = [&](std::size_t me) {
        for (std::uint32_t call = 1; call <= calls; ++call) {
            letters[me][call % buffers].write(call);
            const std::uint32_t epoch = first_epoch + call;
            arrivals->arrive(me, epoch);
            for (std::size_t p = 0; p < ranks; ++p) {
                if (!arrivals->wait(p, epoch, {}, [] { return false; })) { model::explorer::current().fail("gave up"); }
            }
            for (std::size_t p = 0; p < ranks; ++p) {
                if (letters[p][call % buffers].read() != call) { model::explorer::current().fail("a stale letter"); }
            }
        }
    };
    model::explorer world;
    return world.explore(std::vector<std::function<void(std::size_t)>>(ranks, rank), reset);
}

}  // namespace

TEST_CASE("epoch barrier: every schedule of two ranks and three calls") {
    const auto v = explore<mistake::none>(2, 3, 2);
    CHECK(v.failure == "");
    CHECK(v.states > 500);  // the search did branch
    MESSAGE(v.schedules << " schedules, " << v.states << " states");
}

TEST_CASE("epoch barrier: every schedule of three ranks in one call") {
    const auto v = explore<mistake::none>(3, 1, 2);
    CHECK(v.failure == "");
    CHECK(v.states > 5000);
    MESSAGE(v.schedules << " schedules, " << v.states << " states");
}

TEST_CASE("epoch barrier: seeded mistakes are found") {
    CHECK(explore<mistake::no_wake>(2, 2, 2).failure == "deadlock: everybody sleeps");
    CHECK(explore<mistake::sleep_without_bit>(2, 2, 2).failure == "deadlock: everybody sleeps");
    CHECK(explore<mistake::unordered>(2, 2, 2).failure.starts_with("race"));
    CHECK(explore<mistake::blind_bit>(2, 2, 2).failure != "");
    // One letter instead of two: a fast rank overwrites what a slow one still reads.
    CHECK(explore<mistake::none>(2, 3, 1).failure != "");
}

TEST_CASE("epoch barrier: an arrival before the reason to give up counts") {
    using machine = model_machine<mistake::none>;
    using barrier = tutti::comm::detail::epoch_barrier<machine>;
    std::unique_ptr<barrier> arrivals;
    std::unique_ptr<model::word> aborted;
    const auto reset = [&] {
        arrivals = std::make_unique<barrier>(2);
        aborted = std::make_unique<model::word>(0);
    };
    // Rank 1 arrives and only then fails; rank 0 may see the abort first and must still find the barrier complete.
    const auto patient = [&](std::size_t) {
        arrivals->arrive(0, 1);
        const bool complete = arrivals->wait(1, 1, {}, [&] { return aborted->load(std::memory_order_acquire) != 0; });
        if (!complete) { model::explorer::current().fail("a completed barrier was given up"); }
    };
    const auto failing = [&](std::size_t) {
        arrivals->arrive(1, 1);
        aborted->exchange(1, std::memory_order_acq_rel);
    };
    model::explorer world;
    const auto v = world.explore({patient, failing}, reset);
    CHECK(v.failure == "");
    CHECK(v.states > 10);
}

TEST_CASE("epoch barrier: epochs wrap around") {
    // From a fresh barrier (epoch 0) the first epoch of a long-lived one looks 2^31 calls ahead or behind; what matters
    // is that consecutive epochs compare right across the wrap.
    using barrier = tutti::comm::detail::epoch_barrier<model_machine<mistake::none>>;
    std::unique_ptr<barrier> arrivals;
    bool ok = true;
    const auto body = [&](std::size_t) {
        constexpr std::uint32_t last = 0x7fffffffu;  // epochs have 31 bits
        arrivals->arrive(0, last - 1);               // even and odd epochs have words of their own
        arrivals->arrive(0, last);
        ok = ok && arrivals->has_arrived(0, last) && arrivals->has_arrived(0, last - 1) &&
             !arrivals->has_arrived(0, last + 1);
        arrivals->arrive(0, last + 1);
        ok = ok && arrivals->has_arrived(0, last + 1) && arrivals->has_arrived(0, last) &&
             !arrivals->has_arrived(0, last + 2);
    };
    model::explorer world;
    const auto v = world.explore({body}, [&] { arrivals = std::make_unique<barrier>(1); });
    CHECK(v.failure == "");
    CHECK(ok);
}
