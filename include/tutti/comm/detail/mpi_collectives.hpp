// mpi_collectives: the 13 kinds of call on MPI's nonblocking collectives, in pieces where an int cannot count.
// Needs comm/detail/mpi_session. One path for every version of MPI: no call moves more than `largest_call` bytes.
#pragma once

#include <mpi.h>  // MPI

#include <algorithm>    // min, any_of
#include <cstddef>      // size_t
#include <cstdint>      // tags
#include <numeric>      // accumulate
#include <span>         // counts
#include <string_view>  // names
#include <utility>      // move
#include <vector>       // counts, messages

#include <tutti/comm/call.hpp>                // call
#include <tutti/comm/detail/mpi_scratch.hpp>  // copies and accumulators
#include <tutti/comm/detail/mpi_session.hpp>  // waits
#include <tutti/comm/detail/mpi_types.hpp>    // reductions
#include <tutti/core/queue.hpp>               // host_queue

namespace tutti::comm::detail {

/// Semantics    every rank takes the same path: what is decided here depends on counts that all ranks share, never on
///              whether this rank works in place, since implementations choose algorithms by that too.
/// Determinism  MPI's: sums may depend on the number of ranks and the size, not on in place or not.
/// Cost         the MPI call's, plus a copy where it says so. Above largest_call bytes: reductions and broadcasts in
///              pieces, all_gather as one broadcast a rank, reduce_scatter as one reduction a rank, the rest as
///              messages.
class mpi_collective {
    mpi_session& session_;
    MPI_Comm comm_;
    const call& c_;
    host_queue queue_;
    mpi_workspace& workspace_;
    std::size_t largest_;
    std::size_t ranks_;
    std::size_t me_;

public:
    mpi_collective(mpi_session& s, MPI_Comm comm, const call& c, host_queue q, mpi_workspace& w, std::size_t ranks)
        : session_(s)
        , comm_(comm)
        , c_(c)
        , queue_(std::move(q))
        , workspace_(w)
        , largest_(s.largest_call())
        , ranks_(ranks)
        , me_(static_cast<std::size_t>(s.context().rank)) {}

    void run() {
        switch (c_.kind) {
        case collective::all_reduce: reduce(in(), out(), c_.in_count, -1); break;
        case collective::reduce: reduce(in(), out(), c_.in_count, c_.root); break;
        case collective::reduce_scatter: reduce_scatter(std::vector<std::size_t>(ranks_, c_.out_count)); break;
        case collective::reduce_scatter_v: reduce_scatter({c_.send_counts.begin(), c_.send_counts.end()}); break;
        case collective::all_gather: all_gather(std::vector<std::size_t>(ranks_, c_.in_count)); break;
        case collective::all_gather_v: all_gather({c_.send_counts.begin(), c_.send_counts.end()}); break;
        case collective::broadcast: broadcast(out(), c_.out_bytes(), c_.root); break;
        case collective::gather: gather(); break;
        case collective::scatter: scatter(); break;
        case collective::all_to_all: all_to_all(); break;
        case collective::all_to_all_v: all_to_all_v(); break;
        case collective::exchange: session_.transfer(c_.messages, comm_, exchange_tag); break;
        case collective::barrier: start("MPI_Ibarrier", [&](MPI_Request* r) { return MPI_Ibarrier(comm_, r); }); break;
        }
    }

private:
    [[nodiscard]] const std::byte* in() const noexcept { return static_cast<const std::byte*>(c_.in); }
    [[nodiscard]] std::byte* out() const noexcept { return static_cast<std::byte*>(c_.out); }
    [[nodiscard]] bool is_root() const noexcept { return c_.root == session_.context().rank; }

    template <class F> void start(std::string_view function, F call_mpi) {
        MPI_Request request = MPI_REQUEST_NULL;
        session_.expect(call_mpi(&request), function);
        session_.complete(request, function);
    }

    // Reduces `count` elements to `root`, or to all when it is negative. MPI never works in place here: where the input
    // is also the output, or is widened, it is read from a copy.
    void reduce(const std::byte* from, std::byte* to, std::size_t count, int root) {
        const mpi_reduction how = reduction_of(c_.type, c_.op, c_.reduce);
        constexpr std::size_t copied_at_once = std::size_t{16} << 20;
        const std::size_t step = std::max<std::size_t>(1, std::min(largest_, copied_at_once) / how.bytes);
        const bool receives = root < 0 || root == session_.context().rank;
        const bool copies = how.widens || from == to;
        const std::size_t room = std::min(step, count) * how.bytes;
        std::byte* const copy = copies ? workspace_.at_least(how.widens ? 2 * room : room) : nullptr;
        for (std::size_t first = 0; first < count; first += step) {
            const std::size_t n = std::min(step, count - first);
            const std::byte* source = from + first * c_.element_size;
            std::byte* const result = receives ? to + first * c_.element_size : nullptr;
            if (how.widens) {
                widen(c_.type, source, reinterpret_cast<float*>(copy), n);
            } else if (copies) {
                copy_bytes(copy, source, n * how.bytes);
            }
            if (copies) { source = copy; }
            std::byte* const target = how.widens ? copy + room : result;
            reduce_piece(source, target, static_cast<int>(n), root, how);
            if (receives) { finish(how, reinterpret_cast<const float*>(target), result, n); }
        }
    }
    void reduce_piece(const std::byte* source, std::byte* target, int count, int root, const mpi_reduction& how) {
        if (root < 0) {
            start("MPI_Iallreduce",
                  [&](MPI_Request* r) { return MPI_Iallreduce(source, target, count, how.type, how.op, comm_, r); });
        } else {
            start("MPI_Ireduce",
                  [&](MPI_Request* r) { return MPI_Ireduce(source, target, count, how.type, how.op, root, comm_, r); });
        }
    }
    // Rounds what was widened, divides what is a mean.
    void finish(const mpi_reduction& how, const float* sums, std::byte* to, std::size_t n) const {
        const int divisor = how.divides ? static_cast<int>(ranks_) : 1;
        if (how.widens) {
            deliver(c_.type, sums, to, n, divisor);
        } else if (how.divides) {
            divide(c_.type, to, n, divisor);
        }
    }

    void reduce_scatter(const std::vector<std::size_t>& parts) {
        const mpi_reduction how = reduction_of(c_.type, c_.op, c_.reduce);
        if (c_.in_count == 0) { return; }
        if (c_.in_count * how.bytes > largest_) {
            std::size_t first = 0;
            for (std::size_t r = 0; r < ranks_; ++r) {
                if (parts[r] != 0) { reduce(in() + first * c_.element_size, out(), parts[r], static_cast<int>(r)); }
                first += parts[r];
            }
            return;
        }
        const std::size_t own = parts[me_];
        const bool in_place = overlaps(c_.in, c_.in_bytes(), c_.out, c_.out_bytes());
        const mpi_scratch wide(queue_, how.widens ? c_.in_count * how.bytes : 0);
        const mpi_scratch sums(queue_, how.widens || in_place ? own * how.bytes : 0);
        const mpi_scratch counts(queue_, ranks_ * sizeof(int));
        if (how.widens) { widen(c_.type, c_.in, wide.as<float>(), c_.in_count); }
        for (std::size_t r = 0; r < ranks_; ++r) { counts.as<int>()[r] = static_cast<int>(parts[r]); }
        const void* const source = how.widens ? wide.data() : c_.in;
        // A rank without a part may have an `out` inside of `in`: MPI must not see it.
        void* const target = how.widens || in_place || own == 0 ? sums.data() : c_.out;
        start("MPI_Ireduce_scatter", [&](MPI_Request* r) {
            return MPI_Ireduce_scatter(source, target, counts.as<int>(), how.type, how.op, comm_, r);
        });
        if (in_place && !how.widens) { copy_bytes(c_.out, sums.data(), own * how.bytes); }
        finish(how, sums.as<float>(), out(), own);
    }

    void broadcast(std::byte* data, std::size_t bytes, int root) {
        for (std::size_t first = 0; first < bytes; first += largest_) {
            const int n = static_cast<int>(std::min(largest_, bytes - first));
            start("MPI_Ibcast", [&](MPI_Request* r) { return MPI_Ibcast(data + first, n, MPI_BYTE, root, comm_, r); });
        }
    }

    void all_gather(const std::vector<std::size_t>& parts) {
        if (c_.out_count == 0) { return; }
        const std::size_t before =
            std::accumulate(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(me_), std::size_t{0});
        copy_bytes(out() + before * c_.element_size, c_.in, c_.in_bytes());
        if (c_.out_bytes() > largest_) {
            std::size_t first = 0;
            for (std::size_t r = 0; r < ranks_; ++r) {
                const std::size_t bytes = parts[r] * c_.element_size;
                broadcast(out() + first, bytes, static_cast<int>(r));
                first += bytes;
            }
            return;
        }
        if (c_.kind == collective::all_gather) {
            const int bytes = static_cast<int>(c_.in_bytes());
            start("MPI_Iallgather", [&](MPI_Request* r) {
                return MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, c_.out, bytes, MPI_BYTE, comm_, r);
            });
            return;
        }
        const mpi_scratch tables(queue_, 2 * ranks_ * sizeof(int));
        int* const counts = tables.as<int>();
        int* const offsets = counts + ranks_;
        int first = 0;
        for (std::size_t r = 0; r < ranks_; ++r) {
            counts[r] = static_cast<int>(parts[r] * c_.element_size);
            offsets[r] = first;
            first += counts[r];
        }
        start("MPI_Iallgatherv", [&](MPI_Request* r) {
            return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, c_.out, counts, offsets, MPI_BYTE, comm_, r);
        });
    }

    void gather() {
        const std::size_t part = c_.in_bytes();
        if (part == 0) { return; }
        if (part > largest_ / ranks_) {
            std::vector<message> messages;
            if (!is_root()) { messages.push_back(sending(c_.root, in(), part)); }
            for (std::size_t r = 0; r < ranks_ && is_root(); ++r) {
                if (r == me_) {
                    copy_bytes(out() + r * part, in(), part);
                } else {
                    messages.push_back(receiving(r, out() + r * part, part));
                }
            }
            pass(messages);
            return;
        }
        const void* const source = is_root() && in() == out() + me_ * part ? MPI_IN_PLACE : c_.in;
        const int bytes = static_cast<int>(part);
        start("MPI_Igather", [&](MPI_Request* r) {
            return MPI_Igather(source, bytes, MPI_BYTE, c_.out, bytes, MPI_BYTE, c_.root, comm_, r);
        });
    }

    void scatter() {
        const std::size_t part = c_.out_bytes();
        if (part == 0) { return; }
        if (part > largest_ / ranks_) {
            std::vector<message> messages;
            if (!is_root()) { messages.push_back(receiving(static_cast<std::size_t>(c_.root), out(), part)); }
            for (std::size_t r = 0; r < ranks_ && is_root(); ++r) {
                if (r == me_) {
                    copy_bytes(out(), in() + r * part, part);
                } else {
                    messages.push_back(sending(static_cast<int>(r), in() + r * part, part));
                }
            }
            pass(messages);
            return;
        }
        void* const target = is_root() && in() + me_ * part == out() ? MPI_IN_PLACE : c_.out;
        const int bytes = static_cast<int>(part);
        start("MPI_Iscatter", [&](MPI_Request* r) {
            return MPI_Iscatter(c_.in, bytes, MPI_BYTE, target, bytes, MPI_BYTE, c_.root, comm_, r);
        });
    }

    void all_to_all() {
        if (c_.in_count == 0) { return; }
        if (c_.in_bytes() > largest_) {
            const std::vector<std::size_t> parts(ranks_, c_.in_count / ranks_);
            all_to_all_messages(parts, parts);
            return;
        }
        const int bytes = static_cast<int>(c_.in_bytes() / ranks_);
        start("MPI_Ialltoall",
              [&](MPI_Request* r) { return MPI_Ialltoall(c_.in, bytes, MPI_BYTE, c_.out, bytes, MPI_BYTE, comm_, r); });
    }
    // As messages of our own, so that sizes which differ are seen, and empty peers cost nothing.
    void all_to_all_v() { all_to_all_messages(c_.send_counts, c_.recv_counts); }

    void all_to_all_messages(std::span<const std::size_t> sent, std::span<const std::size_t> received) {
        std::vector<message> messages;
        std::size_t at_in = 0;
        std::size_t at_out = 0;
        const std::byte* own_in = nullptr;
        std::byte* own_out = nullptr;
        for (std::size_t r = 0; r < ranks_; ++r) {
            const std::size_t in_bytes = sent[r] * c_.element_size;
            const std::size_t out_bytes = received[r] * c_.element_size;
            if (r == me_) {
                own_in = in() + at_in;
                own_out = out() + at_out;
            } else {
                if (in_bytes != 0) { messages.push_back(sending(static_cast<int>(r), in() + at_in, in_bytes)); }
                if (out_bytes != 0) { messages.push_back(receiving(r, out() + at_out, out_bytes)); }
            }
            at_in += in_bytes;
            at_out += out_bytes;
        }
        copy_bytes(own_out, own_in, sent[me_] * c_.element_size);
        pass(messages);
    }
    [[nodiscard]] static message sending(int peer, const std::byte* data, std::size_t bytes) noexcept {
        return {true, peer, const_cast<std::byte*>(data), bytes};  // `sends` keeps the promise not to write
    }
    [[nodiscard]] static message receiving(std::size_t peer, std::byte* data, std::size_t bytes) noexcept {
        return {false, static_cast<int>(peer), data, bytes};
    }
    // A tag of this call: a message that nobody took cannot be mistaken for one of a later call.
    void pass(const std::vector<message>& messages) {
        constexpr std::uint64_t tags = 32767 - first_call_tag;  // the least that MPI promises
        session_.transfer(messages, comm_, first_call_tag + static_cast<int>(session_.position() % tags));
    }
};

}  // namespace tutti::comm::detail
