// channel: the shared memory of one communicator of threads: what ranks post, stage and mail to each other.
// Needs comm/detail/{posting,epoch_barrier,family}. One channel per communicator; endpoints hold it by shared pointer.
#pragma once

#include <atomic>   // busy, presence, signals
#include <cstddef>  // size_t
#include <cstdint>  // sequence numbers
#include <deque>    // mail
#include <memory>   // slots
#include <mutex>    // mailboxes

#include <tutti/comm/detail/epoch_barrier.hpp>  // arrivals
#include <tutti/comm/detail/family.hpp>         // abort
#include <tutti/comm/detail/posting.hpp>        // posted
#include <tutti/comm/detail/wait.hpp>           // machine

namespace tutti::comm::detail {

/// Inputs up to this size are staged in the channel: one synchronization instead of two, and no pointers into user
/// memory. While ranks have processors of their own, a synchronization costs less than moving half a KiB twice.
inline constexpr std::size_t stage_bytes = 8192;
inline constexpr std::size_t stage_bytes_when_free = 512;

/// What a rank says by arriving: what it calls, and the data itself where there is little.
struct letter {
    static constexpr std::size_t stage_offset = offsetof(posted, in);
    posted head;
    std::byte more[stage_bytes - (sizeof(posted) - stage_offset)];

    /// Staged data takes the place of the addresses, which a staged call does not need, so that the first bytes travel
    /// in the cache line that tells of the arrival.
    [[nodiscard]] std::byte* stage() noexcept { return reinterpret_cast<std::byte*>(this) + stage_offset; }
};
static_assert(sizeof(letter) == letter::stage_offset + stage_bytes);

/// A word that is changed to say "look again". Bit 0: somebody may be asleep.
class signal {
    std::atomic<std::uint32_t> word_{0};

public:
    [[nodiscard]] std::uint32_t value() const noexcept { return word_.load(std::memory_order_acquire); }
    void notify() noexcept {
        if ((word_.fetch_add(2, std::memory_order_acq_rel) & 1u) != 0) {
            word_.fetch_and(~1u, std::memory_order_relaxed);
            wake_all(word_);
        }
    }
    /// Sleeps unless the word has changed since `seen` was read.
    void sleep(std::uint32_t seen) noexcept {
        if ((seen & 1u) == 0 && !word_.compare_exchange_strong(seen, seen | 1u, std::memory_order_relaxed)) { return; }
        sleep_on(word_, seen | 1u, machine::slice);
    }
};

/// A message on offer. Lives in the sender's frame; `state` is guarded by the receiver's mailbox.
struct mail {
    enum class progress : std::uint8_t { offered, taken, done };
    int source = -1;
    int destination = -1;
    const void* data = nullptr;
    std::size_t bytes = 0;
    progress state = progress::offered;
};

struct mailbox {
    std::mutex mutex;
    std::deque<mail*> offers;
    signal changed;  ///< something was offered to this rank, or one of its own offers is done
};

struct channel;

/// Whether a rank's endpoint still exists. One that died while an exception was passing through announces an abort with
/// a better text than "has left": peers wait `cause_time` for it.
enum class presence : std::uint8_t { here, left, thrown };
inline constexpr duration cause_time = std::chrono::seconds(1);

/// One rank's part of a channel.
struct alignas(128) slot {
    std::atomic<bool> busy{false};  ///< in a data phase: may touch peers' user memory
    std::atomic<presence> owner{presence::here};
    std::shared_ptr<channel> child;  ///< handed from a group's leader to its members
    mailbox box;
};

struct channel {
    channel(int n, std::shared_ptr<family> f)
        : ranks(n)
        , relatives(std::move(f))
        , spin_time(spin_time_for(n))
        , staged_bytes(spin_time > duration::zero() ? stage_bytes_when_free : stage_bytes)
        , arrivals(static_cast<std::size_t>(n))
        , per_rank(std::make_unique<slot[]>(static_cast<std::size_t>(n))) {}

    const int ranks;
    const std::shared_ptr<family> relatives;
    const duration spin_time;
    const std::size_t staged_bytes;
    epoch_barrier<machine, letter> arrivals;
    const std::unique_ptr<slot[]> per_rank;

    [[nodiscard]] slot& of(int rank) const noexcept { return per_rank[static_cast<std::size_t>(rank)]; }

    /// Waits until no rank touches foreign memory. Call after poisoning: data phases contain no waits and nobody enters
    /// a new one, so this is bounded by one copy loop.
    void quiesce() const noexcept {
        for (int p = 0; p < ranks; ++p) {
            while (of(p).busy.load(std::memory_order_seq_cst)) { std::this_thread::yield(); }
        }
    }
};

/// Announces a data phase. Dekker with leavers: busy is raised before the poison flag is read, they raise the flag
/// before they read busy; so either this phase sees the abort or the leaver waits for it.
class data_phase {
    std::atomic<bool>& busy_;

public:
    template <class Context> data_phase(const channel& c, int rank, Context context) : busy_(c.of(rank).busy) {
        busy_.store(true, std::memory_order_seq_cst);
        if (c.relatives->poisoned()) {
            busy_.store(false, std::memory_order_release);
            c.relatives->raise(context());
        }
    }
    ~data_phase() { busy_.store(false, std::memory_order_release); }
    data_phase(const data_phase&) = delete;
    data_phase& operator=(const data_phase&) = delete;
};

}  // namespace tutti::comm::detail
