// The communicator concept and one capability concept per collective: algorithms require exactly what they use.
// Needs core and comm/call. `split_by_color` and `options` serve every backend.
#pragma once

#include <concepts>     // movable, same_as
#include <cstddef>      // size_t
#include <cstdint>      // hashes
#include <optional>     // split
#include <span>         // color tables
#include <string>       // names
#include <string_view>  // names
#include <vector>       // gathered colors

#include <tutti/comm/call.hpp>       // control_record, transfer
#include <tutti/core/deadline.hpp>   // timeouts
#include <tutti/core/queue.hpp>      // queue
#include <tutti/core/reduce_op.hpp>  // reducible
#include <tutti/core/view.hpp>       // views

namespace tutti {

/// A group of ranks that works in the order of its queue.
///
/// Semantics   Every collective is called by all ranks of the communicator in the same order. It is ordered on the
///             communicator's queue: complete on return for a host queue, complete when the stream gets there for a
///             device queue. Buffers must outlive the queue's use of them.
///   duplicate same ranks, separate channel and queue (what a lane owns); collective.
///   split     the same table on all ranks: rank r joins color colors[r], -1 joins none and gets nullopt. Ranks keep
///             their relative order. Collective.
///   synchronize  the only host wait: until the queue is empty or the deadline passes; reports errors of the family.
///   agree     throws mismatch_error naming the ranks whose hash differs; collective.
///   abort     poisons the root communicator and all that was duplicated or split from it: every rank's current or next
///             call throws aborted_error with this text. Not collective, callable from any thread, idempotent.
/// Threads     one thread at a time uses a communicator, except for abort. Different communicators are independent.
/// Errors      after the first error a communicator stays failed: each later call throws aborted_error.
template <class C>
concept communicator = std::movable<C> && queue<typename C::queue_type> &&
    requires(C& c, const C& k, std::span<const int> colors, std::string_view s, std::uint64_t h) {
    { k.rank() }
    noexcept->std::same_as<int>;
    { k.size() }
    noexcept->std::same_as<int>;
    { k.name() }
    noexcept->std::convertible_to<std::string_view>;
    { k.queue() }
    noexcept->std::same_as<typename C::queue_type>;
    { c.duplicate(s) } -> std::same_as<C>;
    { c.split(colors, s) } -> std::same_as<std::optional<C>>;
    c.barrier();
    c.synchronize();
    c.agree(h, s);
    { c.abort(s) }
    noexcept;
};

/// What the calls of a communicator run on, and the memory that they read and write.
template <communicator C> using queue_of = typename C::queue_type;
template <communicator C> using memory_of = typename queue_of<C>::memory_type;

namespace comm {

template <class C, class T> using in_view = view<const T, memory_of<C>>;
template <class C, class T> using out_view = view<T, memory_of<C>>;
using count_table = std::span<const std::size_t>;

/// One capability each, of a communicator for elements and an operator: an algorithm requires exactly what it uses.
template <class C, class T, class Op>
concept can_all_reduce = communicator<C> && reducible<T, Op> &&
    requires(C& c, in_view<C, T> in, out_view<C, T> out, Op op) {
    c.all_reduce(in, out, op);
};
template <class C, class T, class Op>
concept can_reduce_scatter = communicator<C> && reducible<T, Op> &&
    requires(C& c, in_view<C, T> in, out_view<C, T> out, Op op, count_table n) {
    c.reduce_scatter(in, out, op);
    c.reduce_scatter_v(in, out, n, op);
};
template <class C, class T>
concept can_all_gather = communicator<C> && requires(C& c, in_view<C, T> in, out_view<C, T> out, count_table n) {
    c.all_gather(in, out);
    c.all_gather_v(in, out, n);
};
template <class C, class T>
concept can_broadcast = communicator<C> && requires(C& c, out_view<C, T> data) {
    c.broadcast(data, 0);
};
template <class C, class T, class Op>
concept can_reduce = communicator<C> && reducible<T, Op> &&
    requires(C& c, in_view<C, T> in, out_view<C, T> out, Op op) {
    c.reduce(in, out, op, 0);
};
template <class C, class T>
concept can_gather = communicator<C> && requires(C& c, in_view<C, T> in, out_view<C, T> out) {
    c.gather(in, out, 0);
};
template <class C, class T>
concept can_scatter = communicator<C> && requires(C& c, in_view<C, T> in, out_view<C, T> out) {
    c.scatter(in, out, 0);
};
template <class C, class T>
concept can_all_to_all = communicator<C> && requires(C& c, in_view<C, T> in, out_view<C, T> out, count_table n) {
    c.all_to_all(in, out);
    c.all_to_all_v(in, n, out, n);
};
template <class C>
concept can_exchange = communicator<C> && requires(C& c, std::span<const transfer<memory_of<C>>> m) {
    c.exchange(m);
};

/// What every backend lets its user choose.
struct options {
    std::string name = "world";            ///< root communicator's name; children append "/name"
    duration timeout = default_timeout();  ///< deadline of every wait
};

/// The control plane: every rank's record, by rank. Host-blocking and collective.
template <class C>
concept can_gather_control = communicator<C> && requires(C& c, control_record r) {
    { c.gather_control(r) } -> std::same_as<std::vector<control_record>>;
};

/// Splits by a color known only to its own rank; gathers the table first. A negative color joins no group.
///
/// Semantics  collective. Ranks of one color keep their relative order.
/// Cost       one control gather and one split.
template <can_gather_control C> [[nodiscard]] std::optional<C> split_by_color(C& c, int color, std::string_view name) {
    const auto records = c.gather_control({static_cast<std::uint64_t>(static_cast<std::int64_t>(color)), 0, 0, 0});
    std::vector<int> colors;
    colors.reserve(records.size());
    for (const control_record& r : records) { colors.push_back(static_cast<int>(static_cast<std::int64_t>(r[0]))); }
    return c.split(colors, name);
}

}  // namespace comm
}  // namespace tutti
