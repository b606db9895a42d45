// front: the typed collectives that every backend and decorator shares. Checks, names types, fills in a call.
// Needs comm/call. A backend derives from front<Backend, Queue> and implements execute(const call&).
#pragma once

#include <algorithm>    // adjacent_find
#include <cstddef>      // size_t
#include <cstdint>      // sequence numbers
#include <functional>   // not_equal_to
#include <span>         // counts, transfers
#include <string>       // agree's text
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <utility>      // move
#include <vector>       // messages

#include <tutti/comm/call.hpp>               // call
#include <tutti/comm/communicator.hpp>       // control_record
#include <tutti/comm/detail/call_check.hpp>  // demands on arguments
#include <tutti/comm/detail/majority.hpp>    // who differs
#include <tutti/core/element.hpp>            // transportable
#include <tutti/core/error.hpp>              // mismatch_error
#include <tutti/core/queue.hpp>              // queue
#include <tutti/core/reduce_op.hpp>          // reducible
#include <tutti/core/text.hpp>               // formatted
#include <tutti/core/view.hpp>               // view

namespace tutti::comm {

namespace detail {

/// Aborts for a finding that every rank has made alike: a communicator that failed stays failed. An abort would reach
/// ranks that have not yet left the last gather and take their finding from them, so all pass through one more first.
template <class C> void abort_together(C& comm, std::string_view text) {
    try {
        static_cast<void>(comm.gather_control({}));
    } catch (const error&) {}  // a peer is gone; the finding stands
    comm.abort(text);
}

// Does the backend reduce elements of T? A concept, because nvcc would look into Backend where it is still incomplete.
template <class T, class Backend>
concept reducible_by = Backend::reduces(dtype_of<T>);

}  // namespace detail

/// The collectives. All are called by every rank of the communicator in the same order, except exchange.
///
/// Shapes        n = size(), r = rank(). Element type T comes from the output view alone.
/// Aliasing      in place is positional: all_reduce and reduce in == out; reduce_scatter out == in + r * count;
///               all_gather in == out + r * count; gather and scatter likewise at the root. Any other overlap, and any
///               overlap in all_to_all, is a usage_error.
/// Determinism   as the backend states.
/// Errors        usage_error before anything moved; mismatch_error when a backend or `checked` sees ranks disagree.
template <class Derived, queue Q> class front {
    std::uint64_t collectives_ = 0;  // also counts calls of no elements: all ranks must stay in step
    std::uint64_t exchanges_ = 0;

public:
    using queue_type = Q;
    using memory_type = typename Q::memory_type;
    template <class T> using in_view = view<const std::type_identity_t<T>, memory_type>;
    template <class T> using out_view = view<T, memory_type>;
    using counts = std::span<const std::size_t>;

    /// Does the backend reduce elements of this type? One that does not hides this function.
    [[nodiscard]] static constexpr bool reduces(dtype) noexcept { return true; }

    /// out[i] = op over ranks of in[i]. Cost: 2(n-1)/n of the data sent by each rank.
    template <class T, class Op>
    requires reducible<T, Op> && detail::reducible_by<T, Derived>
    void all_reduce(in_view<T> in, out_view<T> out, Op) {
        call c = reducing<T, Op>(collective::all_reduce, in, out);
        demand(c).in_as_large_as_out();
        demand(c).in_place_at(0, 0);
        submit(c);
    }

    /// Rank r gets elements [r * count, (r+1) * count) of the reduction. Cost: (n-1)/n of the input sent.
    template <class T, class Op>
    requires reducible<T, Op> && detail::reducible_by<T, Derived>
    void reduce_scatter(in_view<T> in, out_view<T> out, Op) {
        call c = reducing<T, Op>(collective::reduce_scatter, in, out);
        demand(c).in_has_a_part_for_each_rank();
        demand(c).in_place_at(0, me() * out.size());
        submit(c);
    }

    /// reduce_scatter with uneven parts: rank r gets counts[r] elements. `counts` is the same on all ranks.
    template <class T, class Op>
    requires reducible<T, Op> && detail::reducible_by<T, Derived>
    void reduce_scatter_v(in_view<T> in, out_view<T> out, counts n, Op) {
        call c = reducing<T, Op>(collective::reduce_scatter_v, in, out);
        c.send_counts = n;
        demand(c).counts(n, "in", in.size(), "out", out.size());
        demand(c).in_place_at(0, detail::offset_of(n, me()));
        submit(c);
    }

    /// out = in of rank 0, rank 1, ... one after the other. Cost: (n-1)/n of the output received.
    template <transportable T> void all_gather(in_view<T> in, out_view<T> out) {
        call c = moving<T>(collective::all_gather, in, out);
        demand(c).out_has_a_part_of_each_rank();
        demand(c).in_place_at(me() * in.size(), 0);
        submit(c);
    }

    /// all_gather of uneven parts: rank r gives counts[r] elements. `counts` is the same on all ranks.
    template <transportable T> void all_gather_v(in_view<T> in, out_view<T> out, counts n) {
        call c = moving<T>(collective::all_gather_v, in, out);
        c.send_counts = n;
        demand(c).counts(n, "out", out.size(), "in", in.size());
        demand(c).in_place_at(detail::offset_of(n, me()), 0);
        submit(c);
    }

    /// `data` of the root reaches all. Cost: the data leaves the root once.
    template <transportable T> void broadcast(out_view<T> data, int root) {
        call c = moving<T>(collective::broadcast, data, data);
        set_root(c, root);
        submit(c);
    }

    /// The reduction arrives at the root; elsewhere `out` is not touched and may be empty.
    template <class T, class Op>
    requires reducible<T, Op> && detail::reducible_by<T, Derived>
    void reduce(in_view<T> in, out_view<T> out, Op, int root) {
        call c = reducing<T, Op>(collective::reduce, in, out);
        set_root(c, root);
        if (root == self().rank()) {
            demand(c).in_as_large_as_out();
            demand(c).in_place_at(0, 0);
        } else {
            drop_out(c);
        }
        submit(c);
    }

    /// The parts of all ranks arrive at the root in rank order; elsewhere `out` is not touched and may be empty.
    template <transportable T> void gather(in_view<T> in, out_view<T> out, int root) {
        call c = moving<T>(collective::gather, in, out);
        set_root(c, root);
        if (root == self().rank()) {
            demand(c).out_has_a_part_of_each_rank();
            demand(c).in_place_at(me() * in.size(), 0);
        } else {
            drop_out(c);
        }
        submit(c);
    }

    /// Rank r gets part r of the root's `in`; elsewhere `in` is not read and may be empty.
    template <transportable T> void scatter(in_view<T> in, out_view<T> out, int root) {
        call c = moving<T>(collective::scatter, in, out);
        set_root(c, root);
        if (root == self().rank()) {
            demand(c).in_has_a_part_for_each_rank();
            demand(c).in_place_at(0, me() * out.size());
        } else {
            c.in = nullptr;
            c.in_count = 0;
        }
        submit(c);
    }

    /// Part s of `in` goes to rank s, where it becomes part r of `out`. No in-place form.
    template <transportable T> void all_to_all(in_view<T> in, out_view<T> out) {
        call c = moving<T>(collective::all_to_all, in, out);
        demand(c).equal_parts();
        demand(c).apart();
        submit(c);
    }

    /// all_to_all of uneven parts: send_counts[s] elements go to rank s, recv_counts[s] come from it, packed in rank
    /// order.
    template <transportable T>
    void all_to_all_v(in_view<T> in, counts send_counts, out_view<T> out, counts recv_counts) {
        call c = moving<T>(collective::all_to_all_v, in, out);
        c.send_counts = send_counts;
        c.recv_counts = recv_counts;
        demand(c).counts(send_counts, "in", in.size());
        demand(c).counts(recv_counts, "out", out.size());
        demand(c).expect(send_counts[me()] == recv_counts[me()], [&] {
            return formatted("rank {} sends itself {} elements and receives {}", me(), send_counts[me()],
                             recv_counts[me()]);
        });
        demand(c).apart();
        submit(c);
    }

    /// Sends and receives as one grouped call: returns (in queue order) when all its messages are done. Only the ranks
    /// named take part. Messages between a pair of ranks match in order; sizes of a matching pair must be equal.
    void exchange(std::span<const transfer<memory_type>> transfers) {
        call c;
        c.kind = collective::exchange;
        c.sequence = ++exchanges_;
        std::vector<message> messages;
        messages.reserve(transfers.size());
        for (const auto& t : transfers) {
            messages.push_back(t.bytes);
            c.in_count += t.bytes.sends ? t.bytes.bytes : 0;
            c.out_count += t.bytes.sends ? 0 : t.bytes.bytes;
            demand(c).member("peer", t.bytes.peer);
        }
        demand(c).disjoint(messages);
        c.messages = messages;
        self().execute(c);
    }

    /// Returns when every rank has called it.
    void barrier() {
        call c;
        c.sequence = ++collectives_;
        self().execute(c);
    }

    /// Every rank's record, by rank; host-blocking. Device backends bring their own.
    [[nodiscard]] std::vector<control_record> gather_control(control_record mine) requires(
        memory_type::host_accessible) {
        std::vector<control_record> all(ranks());
        call c;
        c.kind = collective::all_gather;
        c.element_size = sizeof(control_record);
        c.in = &mine;
        c.in_count = 1;
        c.out = all.data();
        c.out_count = all.size();
        c.sequence = ++collectives_;
        self().execute(c);
        return all;
    }

    /// Throws mismatch_error on every rank when hashes differ. The ranks it names are those that differ from the most
    /// common hash (of several, the one of the lowest rank).
    void agree(std::uint64_t hash, std::string_view what) {
        expect_agreement(self().gather_control({hash, 0, 0, 0}), what);
    }

protected:
    front() = default;
    /// Number of the collective in progress, for calls that do not go through execute (duplicate, split).
    std::uint64_t next_collective() noexcept { return ++collectives_; }
    /// What agree says of the records that all gave.
    void expect_agreement(const std::vector<control_record>& all, std::string_view what) {
        if (std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>{}) == all.end()) { return; }
        const std::size_t reference =
            detail::majority(all.size(), [&](std::size_t a, std::size_t b) { return all[a] == all[b]; });
        std::vector<int> differing;
        for (std::size_t r = 0; r < all.size(); ++r) {
            if (all[r] != all[reference]) { differing.push_back(static_cast<int>(r)); }
        }
        std::string list = formatted("rank {}: {:016x}", reference, all[reference][0]);
        for (const int r : differing) {
            list += formatted(", rank {}: {:016x}", r, all[static_cast<std::size_t>(r)][0]);
        }
        const error_context context{"agree", std::string(self().name()), self().rank(), collectives_, 0, dtype::byte, 0,
                                    {}};
        const std::string text = formatted("agree: {} differs ({}){}", what, list, where(context));
        detail::abort_together(self(), text);
        throw mismatch_error(text, std::move(differing), context);
    }

private:
    [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
    [[nodiscard]] std::size_t ranks() noexcept { return static_cast<std::size_t>(self().size()); }
    [[nodiscard]] std::size_t me() noexcept { return static_cast<std::size_t>(self().rank()); }

    void submit(call& c) {
        c.sequence = ++collectives_;
        self().execute(c);
    }

    template <class T> [[nodiscard]] call moving(collective kind, in_view<T> in, out_view<T> out) {
        call c;
        c.kind = kind;
        c.type = dtype_of<T>;
        c.element_size = sizeof(T);
        c.in = in.data();
        c.in_count = in.size();
        c.out = out.data();
        c.out_count = out.size();
        c.sequence = collectives_ + 1;  // for messages; submit counts
        return c;
    }
    template <class T, class Op> [[nodiscard]] call reducing(collective kind, in_view<T> in, out_view<T> out) {
        call c = moving<T>(kind, in, out);
        c.op = Op::kind;
        c.reduce = reduce_function_of<T, Op>();
        return c;
    }
    static void drop_out(call& c) noexcept {
        c.out = nullptr;
        c.out_count = 0;
    }

    /// What `c` must satisfy; throws in this communicator's name.
    [[nodiscard]] detail::call_check demand(const call& c) {
        return detail::call_check(c, self().name(), self().rank(), self().size());
    }
    void set_root(call& c, int root) {
        c.root = root;
        demand(c).member("root", root);
    }
};

}  // namespace tutti::comm
