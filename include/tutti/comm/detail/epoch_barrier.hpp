// epoch_barrier: two padded words per rank, written by their owner, polled by the others; no wake-up is lost.
// Needs a machine (word, ladder, sleep, wake): comm/detail/wait has the real one, tests one that explores schedules.
#pragma once

#include <array>    // two parities
#include <atomic>   // memory orders
#include <cstddef>  // size_t
#include <cstdint>  // epochs
#include <memory>   // flags

namespace tutti::comm::detail {

struct no_card {};

/// Each rank counts its own arrivals (epochs). Waiting for rank p means waiting until p has reached an epoch.
///
/// Even and odd epochs have flags of their own. A flag carries a card: what its owner says by arriving. The beginning
/// of the card lies in the cache line of the word, so that who sees an arrival has been told its reason by the same
/// transfer. The owner writes the card before it arrives; the others read it after they have seen the arrival and
/// before they arrive again. Since a rank gets to epoch e + 2 only when all have arrived at e + 1, nothing is
/// overwritten that a slow rank still reads.
///
/// Invariants of a flag's word: bits 31..1 are the owner's last epoch of this parity, bit 0 says that somebody may be
/// asleep on the word.
///   - Only the owner changes the epoch, with an exchange that also takes bit 0: it wakes the sleepers it finds.
///   - A waiter sets bit 0 by compare-and-swap from the very value it has judged too old and sleeps on the result. If
///     the owner came first the swap fails and the waiter looks again; if the waiter came first the owner sees the bit.
///     So no wake-up is lost, and an arrival without sleepers costs no system call.
///   - The exchange releases and a poll acquires: what a rank wrote before arriving is seen by those it let go.
/// Epochs may wrap: ranks of one barrier are never more than two epochs apart, and 31-bit differences are signed.
template <class Machine, class Card = no_card> class epoch_barrier {
    using word = typename Machine::word;
    struct alignas(128) flag {  // a pair of cache lines: the adjacent-line prefetcher would couple neighbors
        word value{0};
        [[no_unique_address]] Card card;
    };
    std::unique_ptr<std::array<flag, 2>[]> flags_;

    [[nodiscard]] flag& of(std::size_t rank, std::uint32_t epoch) const noexcept { return flags_[rank][epoch & 1u]; }

    [[nodiscard]] static bool reached(std::uint32_t value, std::uint32_t epoch) noexcept {
        return static_cast<std::int32_t>((value & ~1u) - (epoch << 1)) >= 0;
    }

public:
    explicit epoch_barrier(std::size_t ranks) : flags_(std::make_unique<std::array<flag, 2>[]>(ranks)) {}

    [[nodiscard]] Card& card(std::size_t rank, std::uint32_t epoch) const noexcept { return of(rank, epoch).card; }

    /// Announces that `rank` has reached `epoch`.
    void arrive(std::size_t rank, std::uint32_t epoch) noexcept {
        word& w = of(rank, epoch).value;
        if ((w.exchange(epoch << 1, std::memory_order_acq_rel) & 1u) != 0) { Machine::wake(w); }
    }

    [[nodiscard]] bool has_arrived(std::size_t rank, std::uint32_t epoch) const noexcept {
        return reached(of(rank, epoch).value.load(std::memory_order_acquire), epoch);
    }

    /// Waits until `rank` has reached `epoch`: true, or until `give_up()` says so: false. It is asked where the ladder
    /// ends, a fraction of a millisecond later than it might be, since its answer costs more than a poll. An arrival
    /// that happened before the reason to give up still counts, so all ranks judge a completed barrier alike.
    template <class GiveUp>
    [[nodiscard]] bool wait(std::size_t rank, std::uint32_t epoch, typename Machine::ladder ladder, GiveUp give_up) {
        word& w = of(rank, epoch).value;
        for (;;) {
            std::uint32_t seen = w.load(std::memory_order_acquire);
            if (reached(seen, epoch)) { return true; }
            if (ladder.again()) { continue; }
            if (give_up()) { return has_arrived(rank, epoch); }
            if ((seen & 1u) == 0 && !w.compare_exchange_strong(seen, seen | 1u, std::memory_order_relaxed)) {
                continue;
            }
            Machine::sleep(w, seen | 1u);
        }
    }
};

}  // namespace tutti::comm::detail
