// threads: ranks are threads of one process. Direct two-shot reductions, sums in rank order, abort without a crash.
// Needs comm/front and comm/detail/{channel,direct,mail}.
// `threads::launch(n, f)` starts ranks; `threads::create(n)` makes endpoints for threads that exist already.
#pragma once

#include <algorithm>    // min
#include <atomic>       // owners
#include <cstddef>      // size_t
#include <cstdint>      // epochs
#include <cstring>      // memcpy
#include <exception>    // first error, uncaught_exceptions
#include <memory>       // channel
#include <mutex>        // first error
#include <optional>     // split
#include <span>         // counts
#include <string>       // names
#include <string_view>  // names
#include <thread>       // ranks
#include <utility>      // exchange
#include <vector>       // rows

#include <tutti/comm/detail/channel.hpp>  // shared memory of a communicator
#include <tutti/comm/detail/direct.hpp>   // data movement
#include <tutti/comm/detail/mail.hpp>     // exchange
#include <tutti/comm/front.hpp>           // typed collectives
#include <tutti/core/state.hpp>           // hash_bytes
#include <tutti/core/text.hpp>            // formatted

namespace tutti::comm {

/// A rank that is a thread.
///
/// Semantics    collectives are complete on return. Ranks that disagree (kind, type, count, operator, root, counts
///              table) all get a mismatch_error before any data moved.
/// Determinism  every element is reduced by one rank in ascending rank order, 16-bit floats in float: the bits depend
///              on the inputs alone, not on size, slicing, bucketing or timing. All ranks get the same bits.
/// Threads      as the concept says; a lane's worker uses a duplicate.
/// Cost         n ranks, S bytes each. all_reduce up to 512 bytes (8 KiB where ranks share processors): one
///              synchronization, every rank sums everything. Above: rank r sums slice r of all inputs and writes it to
///              all outputs, two synchronizations and 2nS bytes of memory traffic, the least possible when every rank
///              wants its own copy. The other collectives pull what they need straight from the peers' inputs. A
///              synchronization polls n flags.
/// Errors       mismatch_error also when a peer's endpoint is gone ("has left"); timeout_error names who did not
///              arrive; aborted_error once any rank of the family has failed. Memory that a peer may still touch is not
///              released before the peer has stopped: a leaving rank waits for data phases to end.
/// Source       per-rank epoch flags as in NCCL's LSA barrier; direct two-shot with rank order.
class threads : public front<threads, host_queue> {
    std::shared_ptr<detail::channel> channel_;
    int rank_ = 0;
    std::string name_;
    host_queue queue_;
    std::uint32_t epoch_ = 0;        // arrivals of this rank
    std::uint32_t announced_ = 0;    // epoch in which the current call was announced: that of its letters
    std::vector<const void*> rows_;  // scratch: one pointer a rank

    threads(std::shared_ptr<detail::channel> c, int rank, std::string name, host_queue q)
        : channel_(std::move(c)), rank_(rank), name_(std::move(name)), queue_(std::move(q)), rows_(ranks()) {}

public:
    threads(threads&&) noexcept = default;  // the moved-from endpoint has no channel and says nothing when it dies
    threads& operator=(threads&& other) noexcept {
        if (this != &other) {
            leave();
            front::operator=(std::move(other));
            channel_ = std::move(other.channel_);
            rank_ = other.rank_;
            name_ = std::move(other.name_);
            queue_ = other.queue_;
            epoch_ = other.epoch_;
            announced_ = other.announced_;
            rows_ = std::move(other.rows_);
        }
        return *this;
    }
    ~threads() { leave(); }

    /// Endpoints of a new root communicator, one a rank; each has a memory account of its own.
    /// Errors  usage_error when n < 1 or the timeout is not positive.
    [[nodiscard]] static std::vector<threads> create(int n, const options& o = {}) {
        if (n < 1) { throw usage_error(formatted("threads: {} is not a number of ranks", n)); }
        expect_timeout("threads", o.timeout);
        const auto shared = std::make_shared<detail::channel>(n, std::make_shared<detail::family>(o.timeout));
        std::vector<threads> endpoints;
        endpoints.reserve(static_cast<std::size_t>(n));
        for (int r = 0; r < n; ++r) { endpoints.push_back(threads(shared, r, o.name, host_queue{})); }
        return endpoints;
    }

    /// Runs f(communicator) on n threads and returns when all have ended.
    ///
    /// Errors  a rank that throws aborts the family, so the others end by aborted_error; the first cause is rethrown.
    template <class F> static void launch(int n, F f, const options& o = {});

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return channel_->ranks; }
    [[nodiscard]] std::string_view name() const noexcept { return name_; }
    [[nodiscard]] host_queue queue() const noexcept { return queue_; }

    [[nodiscard]] threads duplicate(std::string_view name) {
        const std::vector<int> colors(ranks(), 0);
        return *child(colors, name, "duplicate");
    }
    [[nodiscard]] std::optional<threads> split(std::span<const int> colors, std::string_view name) {
        if (colors.size() != ranks()) {
            throw usage_error(formatted("split: {} colors for {} ranks, on '{}'", colors.size(), ranks(), name_));
        }
        return child(colors, name, "split");
    }
    void synchronize() {
        channel_->relatives->raise_if_poisoned({"synchronize", name_, rank_, 0, 0, dtype::byte, 0, {}});
    }
    void abort(std::string_view why) noexcept { channel_->relatives->poison(why); }

    /// The byte-level core; called by the typed front.
    void execute(const call& c) {
        if (channel_->relatives->poisoned()) { channel_->relatives->raise(context_of(c, name_, rank_)); }
        try {
            if (c.kind == collective::exchange) {
                detail::mail_exchange(*channel_, c, rank_, context_of(c, name_, rank_)).run();
            } else {
                collective_call(c);
            }
        } catch (const std::exception& e) {
            retreat(e.what());
            throw;
        }
    }

private:
    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(channel_->ranks); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(rank_); }
    [[nodiscard]] detail::letter& letter_of(std::size_t rank) const noexcept {
        return channel_->arrivals.card(rank, announced_);
    }

    // Nothing that an exception leaves behind may be touched by a peer.
    void retreat(std::string_view why) noexcept {
        channel_->relatives->poison(why);
        channel_->quiesce();
    }
    void leave() noexcept {
        if (channel_ == nullptr) { return; }
        const auto how = std::uncaught_exceptions() > 0 ? detail::presence::thrown : detail::presence::left;
        channel_->of(rank_).owner.store(how, std::memory_order_release);
    }

    // Arrives, then waits for everybody.
    void meet(const call& c) {
        ++epoch_;
        channel_->arrivals.arrive(me(), epoch_);
        deadline limit{};  // of the whole meeting
        for (std::size_t p = 0; p < ranks(); ++p) {
            if (channel_->arrivals.has_arrived(p, epoch_)) { continue; }
            bool thrown = false;
            const auto give_up = [&] {
                const auto owner = channel_->per_rank[p].owner.load(std::memory_order_acquire);
                if (channel_->relatives->poisoned() || owner == detail::presence::left) { return true; }
                if (limit == deadline{}) { limit = after(channel_->relatives->timeout); }
                if (owner == detail::presence::thrown && !std::exchange(thrown, true)) {
                    limit = std::min(limit, after(detail::cause_time));
                }
                return clock_type::now() >= limit;
            };
            if (!channel_->arrivals.wait(p, epoch_, detail::machine::ladder(channel_->spin_time), give_up)) {
                explain_absence(c, p);
            }
        }
    }
    [[noreturn]] void explain_absence(const call& c, std::size_t absent) {
        const error_context context = context_of(c, name_, rank_);
        // In this order: a rank that fails poisons before it goes.
        const auto owner = channel_->per_rank[absent].owner.load(std::memory_order_acquire);
        channel_->relatives->raise_if_poisoned(context);
        if (owner == detail::presence::left) {
            throw mismatch_error(formatted("{}: rank {} has left{}", name_of(c.kind), absent, where(context)),
                                 {static_cast<int>(absent)}, context);
        }
        if (owner == detail::presence::thrown) {
            channel_->relatives->poison(formatted("rank {} was left by an exception", absent));
            channel_->relatives->raise(context);
        }
        std::vector<int> missing;
        for (std::size_t p = 0; p < ranks(); ++p) {
            if (!channel_->arrivals.has_arrived(p, epoch_)) { missing.push_back(static_cast<int>(p)); }
        }
        throw timeout_error(formatted("{}: rank {} did not arrive within {} s{}", name_of(c.kind), list_of(missing),
                                      seconds(channel_->relatives->timeout), where(context)),
                            missing, context);
    }

    void collective_call(const call& c) {
        announced_ = epoch_ + 1;
        detail::letter& mine = letter_of(me());
        mine.head = detail::post(c);
        const bool staged = detail::input_bound(c, ranks()) <= channel_->staged_bytes;
        if (staged && c.in_bytes() != 0) { std::memcpy(mine.stage(), c.in, c.in_bytes()); }
        meet(c);
        compare_postings(c);
        if (staged) {  // inputs are in channel memory: nobody has to wait until they have been read
            for (std::size_t p = 0; p < ranks(); ++p) { rows_[p] = letter_of(p).stage(); }
            // A part in place is left alone, as a large one is: its owner may be reading it.
            if (c.kind == collective::all_gather || c.kind == collective::all_gather_v) { rows_[me()] = c.in; }
            pull(c);
            return;
        }
        std::optional<mismatch_error> disagreement;  // thrown behind the second meeting: all ranks find it
        {
            const detail::data_phase phase(*channel_, rank_, [&] { return context_of(c, name_, rank_); });
            for (std::size_t p = 0; p < ranks(); ++p) { rows_[p] = letter_of(p).head.in; }
            if (c.kind == collective::all_reduce || c.kind == collective::reduce) {
                detail::reduce_slice(c, me(), rows_, [&](std::size_t p) { return letter_of(p).head.out; });
            } else {
                // The tables of all_to_all_v lie in user memory, as the data does.
                if (c.kind == collective::all_to_all_v) { disagreement = compare_tables(c); }
                if (!disagreement) { pull(c); }
            }
        }
        meet(c);
        if (disagreement) { throw *disagreement; }
    }
    void pull(const call& c) {
        detail::pull(c, me(), rows_, [&](std::size_t p) { return letter_of(p).head.send_counts; });
    }

    // Compares the postings of all ranks. Every rank sees all of them, so all throw the same.
    void compare_postings(const call& c) {
        const detail::posted& mine = letter_of(me()).head;
        bool same = true;
        for (std::size_t p = 0; p < ranks(); ++p) { same = same && letter_of(p).head.agrees_with(mine); }
        if (!same) { detail::explain_mismatch(heads(), context_of(c, name_, rank_)); }
    }
    [[nodiscard]] std::optional<mismatch_error> compare_tables(const call& c) {
        return detail::compare_tables(heads(), context_of(c, name_, rank_));
    }
    [[nodiscard]] std::vector<const detail::posted*> heads() const {
        std::vector<const detail::posted*> all(ranks());
        for (std::size_t p = 0; p < ranks(); ++p) { all[p] = &letter_of(p).head; }
        return all;
    }

    // Three meetings: agreement on the table, the leader's channel is there, everybody has it.
    [[nodiscard]] std::optional<threads> child(std::span<const int> colors, std::string_view name,
                                               std::string_view operation) {
        const std::uint64_t text = hash_bytes(as_bytes(view(name.data(), name.size())));
        agree(hash_bytes(as_bytes(view(colors.data(), colors.size())), text),
              formatted("{}: name or table of '{}'", operation, name));
        const int color = colors[me()];
        std::size_t leader = 0;
        int group = 0;
        int place = 0;
        for (std::size_t p = ranks(); p-- > 0;) {
            if (colors[p] != color) { continue; }
            leader = p;
            ++group;
            place += p < me() ? 1 : 0;
        }
        call c;
        c.sequence = next_collective();
        std::optional<threads> result;
        try {
            if (color >= 0 && leader == me()) {
                channel_->of(rank_).child = std::make_shared<detail::channel>(group, channel_->relatives);
            }
            meet(c);
            if (color >= 0) {
                result =
                    threads(channel_->per_rank[leader].child, place, name_ + "/" + std::string(name), queue_.sibling());
            }
            meet(c);
            channel_->of(rank_).child.reset();
        } catch (const std::exception& e) {
            retreat(e.what());
            throw;
        }
        return result;
    }
};

template <class F> void threads::launch(int n, F f, const options& o) {
    std::vector<threads> endpoints = create(n, o);
    const std::shared_ptr<detail::family> relatives = endpoints.front().channel_->relatives;
    std::mutex mutex;
    std::exception_ptr first;    // the first error that is not a consequence of another
    std::exception_ptr aborted;  // somebody called abort() and nobody threw anything else
    const auto body = [&](std::size_t r) {
        threads own = std::move(endpoints[r]);  // dies behind the poison: peers learn the cause, not that it "has left"
        try {
            f(own);
        } catch (const aborted_error&) {
            const std::lock_guard lock(mutex);
            if (aborted == nullptr) { aborted = std::current_exception(); }
        } catch (...) {
            std::string why = formatted("rank {} failed", r);
            try {
                throw;
            } catch (const std::exception& e) { why = formatted("rank {}: {}", r, e.what()); } catch (...) {
            }
            relatives->poison(why);
            const std::lock_guard lock(mutex);
            if (first == nullptr) { first = std::current_exception(); }
        }
    };
    std::vector<std::thread> ranks;
    ranks.reserve(endpoints.size());
    try {
        for (std::size_t r = 0; r < endpoints.size(); ++r) { ranks.emplace_back(body, r); }
    } catch (...) {  // no more threads to be had: end those that run
        relatives->poison("a thread could not be started");
        for (std::thread& t : ranks) { t.join(); }
        throw;
    }
    for (std::thread& t : ranks) { t.join(); }
    if (first != nullptr) { std::rethrow_exception(first); }
    if (aborted != nullptr) { std::rethrow_exception(aborted); }
}

static_assert(communicator<threads> && can_gather_control<threads>);

}  // namespace tutti::comm
