// gather_by_copies: parts of a block that ranks of one process read from each other's memory: on GPUs, copy engines over
// NVLink, and no multiprocessors. Needs zeroth/slice, whose other gathers are collectives and messages.
// Source: peer copies by copy engines instead of kernels are what the CUDA programming guide offers for devices of one
// process; that slices of blocks are gathered so is ours.
#pragma once

#include <array>               // rounds
#include <condition_variable>  // ranks that wait
#include <cstddef>             // size_t
#include <cstdint>             // devices
#include <map>                 // boards
#include <memory>              // shared by ranks
#include <mutex>               // words
#include <optional>            // events
#include <random>              // keys
#include <string>              // the first cause
#include <string_view>         // texts
#include <utility>             // move
#include <vector>              // words

#include <tutti/comm/communicator.hpp>  // memory_of
#include <tutti/core/deadline.hpp>      // after
#include <tutti/core/elementwise.hpp>   // copy
#include <tutti/core/error.hpp>         // usage_error, timeout_error
#include <tutti/core/partition.hpp>     // part
#include <tutti/core/text.hpp>          // formatted
#include <tutti/core/view.hpp>          // view

namespace tutti::zeroth {

/// Where ranks, threads of one process, tell each other where their blocks are and how far their queues have to be.
///
/// Threads  one object for all ranks, which all call in the same order. Errors: as gather_by_copies says.
template <queue Q> class peer_board {
public:
    using event = typename Q::event_type;
    struct word {
        const void* data = nullptr;
        std::optional<event> behind;
    };

    explicit peer_board(int ranks)
        : rounds_(static_cast<std::size_t>(ranks)), words_{{std::vector<word>(rounds_.size()), {}}} {
        words_[1].resize(rounds_.size());
    }
    /// One for all ranks of `c`, where they are threads of this process; else null. Collective.
    template <communicator C> [[nodiscard]] static std::shared_ptr<peer_board> among_threads(C& c) {
        static std::mutex one_at_a_time;
        static std::map<std::uint64_t, std::weak_ptr<peer_board>> boards;  // of this process, while ranks look for them
        std::shared_ptr<peer_board> board;
        std::uint64_t key = 0;
        if (c.rank() == 0) {
            std::random_device draw;
            key = std::uint64_t{draw()} << 32 | draw();  // which no other process has
            board = std::make_shared<peer_board>(c.size());
            const std::lock_guard lock(one_at_a_time);
            boards[key] = board;
        }
        key = c.gather_control({key, 0, 0, 0}).front()[0];
        {
            const std::lock_guard lock(one_at_a_time);
            if (const auto found = boards.find(key); found != boards.end()) { board = found->second.lock(); }
        }
        // All have looked: a barrier would hold up queues alone.
        static_cast<void>(c.gather_control({}));
        const std::lock_guard lock(one_at_a_time);
        boards.erase(key);
        return board;
    }
    /// Collective: all ranks' words. Two rounds' are kept: who begins the next but one knows that all have left this one.
    [[nodiscard]] std::vector<word> exchange(int rank, word mine) {
        std::unique_lock lock(mutex_);
        const std::uint64_t round = rounds_.at(static_cast<std::size_t>(rank))++;
        const std::size_t side = round % 2;
        words_[side][static_cast<std::size_t>(rank)] = std::move(mine);
        const std::uint64_t all = (round / 2 + 1) * rounds_.size();
        if (++told_[side] == all) { changed_.notify_all(); }
        changed_.wait_until(lock, after(default_timeout()), [&] { return told_[side] >= all || why_.has_value(); });
        if (told_[side] >= all) { return words_[side]; }
        if (why_.has_value()) { throw aborted_error(formatted("gather_by_copies: another rank: {}", *why_)); }
        std::vector<int> missing;
        for (std::size_t r = 0; r < rounds_.size(); ++r) {
            if (rounds_[r] <= round) { missing.push_back(static_cast<int>(r)); }
        }
        throw timeout_error("gather_by_copies: a rank did not come", std::move(missing));
    }
    /// The others stop waiting. Only the first cause counts.
    void abort(std::string_view why) noexcept {
        const std::lock_guard lock(mutex_);
        if (!why_.has_value()) { why_ = std::string(why); }
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint64_t> rounds_;       // that each rank has begun
    std::array<std::vector<word>, 2> words_;  // of even and odd rounds
    std::array<std::uint64_t, 2> told_{};     // words of all those rounds
    std::optional<std::string> why_;
};

/// Every rank copies the others' parts out of their memory.
///
/// Semantics    for ranks that are threads of one process. over() is collective, and finds out whether they are, and
///              whether their devices can read each other's memory: else what it returns is not available(), on no rank.
///              Parts are read behind what their ranks have enqueued, and nobody writes on before all have read.
/// Determinism  the bits of the other gathers.
/// Cost         (N-1)/N of a block over the links between devices, by one copy a rank, and no kernel. The host meets the
///              other ranks twice a call.
/// Errors       of a call: usage_error where it is not available; aborted_error when a rank has failed; timeout_error
///              naming ranks that do not come.
template <queue Q> class gather_by_copies {
    std::shared_ptr<peer_board<Q>> board_;

public:
    gather_by_copies() = default;  // not available
    template <communicator C> [[nodiscard]] static gather_by_copies over(C& c) {
        gather_by_copies made;
        std::shared_ptr<peer_board<Q>> board = peer_board<Q>::among_threads(c);
        const bool mine = reaches(c) && board != nullptr;
        bool all = true;
        for (const auto& r : c.gather_control({static_cast<std::uint64_t>(mine), 0, 0, 0})) { all = all && r[0] != 0; }
        if (all) { made.board_ = std::move(board); }
        return made;
    }
    [[nodiscard]] bool available() const noexcept { return board_ != nullptr; }

    void abort(std::string_view why) const noexcept {
        if (board_ != nullptr) { board_->abort(why); }
    }

    template <communicator C, class T> void operator()(C& c, view<T, memory_of<C>> all, part own) const {
        if (board_ == nullptr) {
            throw usage_error(
                "gather_by_copies: ranks are of several processes, or a device cannot read another's memory");
        }
        const Q q = c.queue();
        const auto n = static_cast<std::size_t>(c.size());
        const auto me = static_cast<std::size_t>(c.rank());
        const auto there = board_->exchange(c.rank(), {all.data(), q.record()});
        for (std::size_t step = 1; step < n; ++step) {  // each from another rank than all others
            const std::size_t from = (me + step) % n;
            q.wait(*there[from].behind);
            const view<const T, memory_of<C>> of_peer(static_cast<const T*>(there[from].data), all.size());
            copy(q, of_peer.sub(from * own.count, own.count), all.sub(from * own.count, own.count));
        }
        const auto read = board_->exchange(c.rank(), {nullptr, q.record()});
        for (std::size_t step = 1; step < n; ++step) { q.wait(*read[(me + step) % n].behind); }
    }

private:
    // Lets all others read this rank's memory; on the host they can.
    template <communicator C> [[nodiscard]] static bool reaches(C& c) {
        if constexpr (requires(const Q& q) { Q::share(q.device(), q.device()); }) {
            const int mine = c.queue().device();
            bool all = true;
            for (const auto& of : c.gather_control({static_cast<std::uint64_t>(mine), 0, 0, 0})) {
                try {
                    Q::share(mine, static_cast<int>(of[0]));
                } catch (const backend_error&) { all = false; }
            }
            return all;
        } else {
            return true;
        }
    }
};

}  // namespace tutti::zeroth
