// threads: ranks are threads of one process. Direct two-shot reductions, sums in rank order, abort without a crash.
// Needs comm/front and comm/detail/{channel,mail}. `threads::launch(n, f)` starts ranks; `threads::create(n)` makes
// endpoints for threads that exist already.
#pragma once

#include <algorithm>    // min, max
#include <cstddef>      // size_t
#include <cstring>      // memcpy
#include <exception>    // first error
#include <memory>       // channel
#include <mutex>        // first error
#include <numeric>      // accumulate
#include <optional>     // split
#include <span>         // counts
#include <string>       // names
#include <string_view>  // names
#include <thread>       // ranks
#include <utility>      // exchange
#include <vector>       // rows

#include <tutti/comm/detail/channel.hpp>  // shared memory of a communicator
#include <tutti/comm/detail/mail.hpp>     // exchange
#include <tutti/comm/front.hpp>           // typed collectives
#include <tutti/core/partition.hpp>       // slices
#include <tutti/core/state.hpp>           // hash_bytes

namespace tutti::comm {

/// A rank that is a thread.
///
/// Semantics    collectives are complete on return. Ranks that disagree (kind, type, count, operator, root, counts table)
///              all get a mismatch_error before any data moved.
/// Determinism  every element is reduced by one rank in ascending rank order, 16-bit floats in float: the bits depend on
///              the inputs alone, not on size, slicing, bucketing or timing. All ranks get the same bits.
/// Threads      as the concept says; a lane's worker uses a duplicate.
/// Cost         n ranks, S bytes each. all_reduce up to 8 KiB: one synchronization, every rank sums everything. Above:
///              rank r sums slice r of all inputs and writes it to all outputs, two synchronizations and 2nS bytes of
///              memory traffic, the least possible when every rank wants its own copy. The other collectives pull what
///              they need straight from the peers' inputs. A synchronization polls n flags.
/// Errors       mismatch_error also when a peer's endpoint is gone ("has left"); timeout_error names who did not arrive;
///              aborted_error once any rank of the family has failed. Memory that a peer may still touch is not released
///              before the peer has stopped: a leaving rank waits for data phases to end.
/// Source       per-rank epoch flags as in NCCL's LSA barrier; direct two-shot with rank order.
class threads : public front<threads, host_queue> {
    std::shared_ptr<detail::channel> channel_;
    int rank_ = 0;
    std::string name_;
    host_queue queue_;
    std::uint32_t epoch_ = 0;        // arrivals of this rank
    std::uint32_t call_ = 0;         // calls of this rank: their parity picks the letter
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
            call_ = other.call_;
            rows_ = std::move(other.rows_);
        }
        return *this;
    }
    ~threads() { leave(); }

    /// Endpoints of a new root communicator, one a rank; each has a memory account of its own.
    /// Errors  usage_error when n < 1.
    [[nodiscard]] static std::vector<threads> create(int n, const options& o = {}) {
        if (n < 1) { throw usage_error(fmt::format("threads: {} is not a number of ranks", n)); }
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
            throw usage_error(fmt::format("split: {} colors for {} ranks, on '{}'", colors.size(), ranks(), name_));
        }
        return child(colors, name, "split");
    }
    void synchronize() { channel_->relatives->check({"synchronize", name_, rank_, 0, 0, dtype::byte, 0, {}}); }
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
    using letter = detail::slot::letter;
    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(channel_->ranks); }
    [[nodiscard]] std::size_t me() const noexcept { return static_cast<std::size_t>(rank_); }
    [[nodiscard]] letter& letter_of(std::size_t rank) const noexcept {
        return channel_->slots[rank].letters[call_ & 1u];
    }

    // Nothing that an exception leaves behind may be touched by a peer.
    void retreat(std::string_view why) noexcept {
        channel_->relatives->poison(why);
        channel_->quiesce();
    }
    void leave() noexcept {
        if (channel_ != nullptr) { channel_->of(rank_).left.store(true, std::memory_order_release); }
    }

    // Arrives, then waits for everybody.
    void meet(const call& c) {
        ++epoch_;
        channel_->arrivals.arrive(me(), epoch_);
        for (std::size_t p = 0; p < ranks(); ++p) {
            if (channel_->arrivals.has_arrived(p, epoch_)) { continue; }
            deadline limit{};
            const auto give_up = [&] {
                if (channel_->relatives->poisoned() || channel_->slots[p].left.load(std::memory_order_acquire)) {
                    return true;
                }
                const deadline now = clock_type::now();
                if (limit == deadline{}) { limit = after(channel_->relatives->timeout); }
                return now >= limit;
            };
            if (!channel_->arrivals.wait(p, epoch_, detail::machine::ladder(channel_->spin_time), give_up)) {
                explain_absence(c, p);
            }
        }
    }
    [[noreturn]] void explain_absence(const call& c, std::size_t absent) {
        const error_context context = context_of(c, name_, rank_);
        channel_->relatives->check(context);
        if (channel_->slots[absent].left.load(std::memory_order_acquire)) {
            throw mismatch_error(fmt::format("{}: rank {} has left{}", name_of(c.kind), absent, where(context)),
                                 {static_cast<int>(absent)}, context);
        }
        std::vector<int> missing;
        for (std::size_t p = 0; p < ranks(); ++p) {
            if (!channel_->arrivals.has_arrived(p, epoch_)) { missing.push_back(static_cast<int>(p)); }
        }
        throw timeout_error(fmt::format("{}: rank {} did not arrive within {} s{}", name_of(c.kind), list_of(missing),
                                        seconds(channel_->relatives->timeout), where(context)),
                            missing, context);
    }

    void collective_call(const call& c) {
        ++call_;
        letter& mine = letter_of(me());
        mine.head = head_of(c);
        const bool staged = input_bound(c) <= detail::stage_bytes;
        if (staged && c.in_bytes() != 0 && c.kind != collective::barrier) {
            std::memcpy(mine.stage, c.in, c.in_bytes());
        }
        meet(c);
        verify(c);
        if (staged) {  // inputs are in channel memory: nobody has to wait until they have been read
            for (std::size_t p = 0; p < ranks(); ++p) { rows_[p] = letter_of(p).stage; }
            pull(c);
            return;
        }
        {
            const detail::data_phase phase(*channel_, rank_, [&] { return context_of(c, name_, rank_); });
            for (std::size_t p = 0; p < ranks(); ++p) { rows_[p] = letter_of(p).head.in; }
            if (c.kind == collective::all_reduce || c.kind == collective::reduce) {
                reduce_slice(c);
            } else {
                pull(c);
            }
        }
        meet(c);
    }

    [[nodiscard]] static detail::posted head_of(const call& c) {
        detail::posted h;
        h.in = c.in;
        h.out = c.out;
        h.agreed = agreed_of(c);
        h.sequence = c.sequence;
        h.send_counts = c.send_counts.data();
        h.recv_counts = c.recv_counts.data();
        h.element_size = static_cast<std::uint32_t>(c.element_size);
        h.root = c.root;
        h.kind = c.kind;
        h.type = c.type;
        h.op = c.op;
        return h;
    }
    // The number that must be the same on all ranks.
    [[nodiscard]] static std::uint64_t agreed_of(const call& c) noexcept {
        switch (c.kind) {
        case collective::all_reduce:
        case collective::reduce:
        case collective::all_gather:
        case collective::gather:
        case collective::all_to_all: return c.in_count;
        case collective::reduce_scatter:
        case collective::scatter:
        case collective::broadcast: return c.out_count;
        case collective::reduce_scatter_v:
        case collective::all_gather_v: return hash_bytes(as_bytes(view(c.send_counts.data(), c.send_counts.size())));
        case collective::all_to_all_v:
        case collective::exchange:
        case collective::barrier: return 0;
        }
        return 0;
    }
    // The largest input of any rank in bytes, from what is the same everywhere: all ranks stage, or none does.
    [[nodiscard]] std::size_t input_bound(const call& c) const noexcept {
        switch (c.kind) {
        case collective::barrier: return 0;
        case collective::scatter: return ranks() * c.out_bytes();
        case collective::broadcast: return c.out_bytes();
        case collective::all_gather_v:
            return *std::max_element(c.send_counts.begin(), c.send_counts.end()) * c.element_size;
        case collective::all_to_all_v: return detail::stage_bytes + 1;  // each rank knows its own table only
        default: return c.in_bytes();
        }
    }

    void verify(const call& c) {
        const detail::posted& mine = letter_of(me()).head;
        bool same = true;
        for (std::size_t p = 0; p < ranks(); ++p) { same = same && letter_of(p).head.agrees_with(mine); }
        if (!same) { explain_mismatch(c); }
        if (c.kind == collective::all_to_all_v) { verify_tables(c); }
    }
    // Every rank sees all postings, so all of them throw the same.
    [[noreturn]] void explain_mismatch(const call& c) {
        const auto head = [&](std::size_t p) -> const detail::posted& { return letter_of(p).head; };
        std::size_t reference = 0;  // the posting most ranks share, of several the one of the lowest rank
        std::size_t votes = 0;
        for (std::size_t r = 0; r < ranks(); ++r) {
            std::size_t same = 0;
            for (std::size_t p = 0; p < ranks(); ++p) { same += head(p).agrees_with(head(r)) ? 1u : 0u; }
            if (same > votes) {
                votes = same;
                reference = r;
            }
        }
        const detail::posted& common = head(reference);
        const auto field = [&](const detail::posted& h,
                               const detail::posted& other) -> std::pair<std::string_view, std::string> {
            if (h.kind != other.kind) { return {"collective", std::string(name_of(h.kind))}; }
            if (h.type != other.type) { return {"type", std::string(name_of(h.type))}; }
            if (h.element_size != other.element_size) { return {"element size", std::to_string(h.element_size)}; }
            if (h.op != other.op) { return {"operator", std::string(name_of(h.op))}; }
            if (h.root != other.root) { return {"root", std::to_string(h.root)}; }
            const bool table = h.kind == collective::all_gather_v || h.kind == collective::reduce_scatter_v;
            return table ? std::pair<std::string_view, std::string>{"counts table", fmt::format("{:016x}", h.agreed)}
                         : std::pair<std::string_view, std::string>{"count", std::to_string(h.agreed)};
        };
        std::string what;
        std::string list;
        std::vector<int> differing;
        for (std::size_t p = 0; p < ranks(); ++p) {
            if (head(p).agrees_with(common)) { continue; }
            if (differing.empty()) {
                const auto [name, value] = field(common, head(p));
                what = name;
                list = fmt::format("rank {}: {}", reference, value);
            }
            list += fmt::format(", rank {}: {}", p, field(head(p), common).second);
            differing.push_back(static_cast<int>(p));
        }
        const error_context context = context_of(c, name_, rank_);
        throw mismatch_error(fmt::format("{}: {} differs ({}){}", name_of(common.kind), what, list, where(context)),
                             differing, context);
    }
    void verify_tables(const call& c) {
        for (std::size_t p = 0; p < ranks(); ++p) {
            for (std::size_t q = 0; q < ranks(); ++q) {
                const std::size_t sent = letter_of(p).head.send_counts[q];
                const std::size_t expected = letter_of(q).head.recv_counts[p];
                if (sent == expected) { continue; }
                const error_context context = context_of(c, name_, rank_);
                throw mismatch_error(
                    fmt::format("all_to_all_v: count differs (rank {} sends {} to rank {}, which expects {}){}", p,
                                sent, q, expected, where(context)),
                    {static_cast<int>(p)}, context);
            }
        }
    }

    // Direct two-shot: this rank reduces its slice of all inputs and writes it to every output that wants it. Blocks stay
    // in the second-level cache, so the copies to the other outputs hit lines that were just read or written.
    void reduce_slice(const call& c) {
        constexpr std::size_t line = 128;
        constexpr std::size_t block_bytes = 16384;
        const std::size_t size = c.element_size;
        const part slice = partition(c.in_count, ranks(), me(), line / size);
        const std::size_t step = block_bytes / size;
        const std::size_t first_target = c.kind == collective::reduce ? static_cast<std::size_t>(c.root) : me();
        const std::size_t others = c.kind == collective::reduce ? 0 : ranks();
        auto* const target = static_cast<std::byte*>(letter_of(first_target).head.out);
        std::vector<const void*> block(ranks());
        for (std::size_t at = slice.first; at < slice.first + slice.count; at += step) {
            const std::size_t n = std::min(step, slice.first + slice.count - at);
            for (std::size_t p = 0; p < ranks(); ++p) {
                block[p] = static_cast<const std::byte*>(rows_[p]) + at * size;
            }
            c.reduce(target + at * size, block.data(), size_of_ranks(), n);
            for (std::size_t p = 0; p < others; ++p) {
                if (p == first_target) { continue; }
                std::memcpy(static_cast<std::byte*>(letter_of(p).head.out) + at * size, target + at * size, n * size);
            }
        }
    }
    [[nodiscard]] int size_of_ranks() const noexcept { return channel_->ranks; }

    // Fills this rank's output from rows_, the ranks' inputs.
    void pull(const call& c) {
        const std::size_t part = c.out_bytes();
        switch (c.kind) {
        case collective::barrier:
        case collective::exchange: return;
        case collective::all_reduce: return c.reduce(c.out, rows_.data(), size_of_ranks(), c.out_count);
        case collective::reduce:
            return rank_ == c.root ? c.reduce(c.out, rows_.data(), size_of_ranks(), c.out_count) : void();
        case collective::reduce_scatter: return reduce_at(c, me() * part);
        case collective::reduce_scatter_v: return reduce_at(c, sum_before(c.send_counts.data(), me()) * c.element_size);
        case collective::broadcast: return move(c, 0, rows_[static_cast<std::size_t>(c.root)], 0, part);
        case collective::scatter: return move(c, 0, rows_[static_cast<std::size_t>(c.root)], me() * part, part);
        case collective::gather:
            if (rank_ != c.root) { return; }
            [[fallthrough]];
        case collective::all_gather:
            for (std::size_t p = 0; p < ranks(); ++p) { move(c, p * c.in_bytes(), rows_[p], 0, c.in_bytes()); }
            return;
        case collective::all_gather_v:
            for (std::size_t p = 0, at = 0; p < ranks(); at += c.send_counts[p++] * c.element_size) {
                move(c, at, rows_[p], 0, c.send_counts[p] * c.element_size);
            }
            return;
        case collective::all_to_all: {
            const std::size_t share = c.in_bytes() / ranks();
            for (std::size_t p = 0; p < ranks(); ++p) { move(c, p * share, rows_[p], me() * share, share); }
            return;
        }
        case collective::all_to_all_v:
            for (std::size_t p = 0, at = 0; p < ranks(); at += c.recv_counts[p++] * c.element_size) {
                const std::size_t from = sum_before(letter_of(p).head.send_counts, me()) * c.element_size;
                move(c, at, rows_[p], from, c.recv_counts[p] * c.element_size);
            }
            return;
        }
    }
    void reduce_at(const call& c, std::size_t offset) {
        for (const void*& row : rows_) { row = row == nullptr ? nullptr : static_cast<const std::byte*>(row) + offset; }
        if (c.out_count != 0) { c.reduce(c.out, rows_.data(), size_of_ranks(), c.out_count); }
    }
    static void move(const call& c, std::size_t to, const void* row, std::size_t from, std::size_t bytes) {
        if (bytes == 0) { return; }
        std::byte* const target = static_cast<std::byte*>(c.out) + to;
        const std::byte* const source = static_cast<const std::byte*>(row) + from;
        if (target != source) { std::memcpy(target, source, bytes); }  // equal: the in-place part is where it belongs
    }
    [[nodiscard]] static std::size_t sum_before(const std::size_t* counts, std::size_t rank) noexcept {
        return std::accumulate(counts, counts + rank, std::size_t{0});
    }

    // Three meetings: agreement on the table, the leader's channel is there, everybody has it.
    [[nodiscard]] std::optional<threads> child(std::span<const int> colors, std::string_view name,
                                               std::string_view operation) {
        const std::uint64_t text = hash_bytes(as_bytes(view(name.data(), name.size())));
        agree(hash_bytes(as_bytes(view(colors.data(), colors.size())), text),
              fmt::format("{}: name or table of '{}'", operation, name));
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
                    threads(channel_->slots[leader].child, place, name_ + "/" + std::string(name), queue_.sibling());
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
        try {
            threads own = std::move(endpoints[r]);
            f(own);
        } catch (const aborted_error&) {
            const std::lock_guard lock(mutex);
            if (aborted == nullptr) { aborted = std::current_exception(); }
        } catch (...) {
            std::string why = fmt::format("rank {} failed", r);
            try {
                throw;
            } catch (const std::exception& e) { why = fmt::format("rank {}: {}", r, e.what()); } catch (...) {
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
