// The one door for arithmetic: run(queue, operation), and fetch for scalars that come back.
// Needs core/queue. An operation is a small type with a cost(); the host body is its operator(), the device body is a
// `launch(device_queue, operation)` found by argument-dependent lookup, and a virtual queue only charges the cost.
#pragma once

#include <concepts>     // same_as
#include <string_view>  // operation names

#include <tutti/core/queue.hpp>  // queue
#include <tutti/core/view.hpp>   // fetch reads a view

namespace tutti {

/// What an operation moves and computes, once, independent of where it runs.
struct cost {
    double bytes = 0;  ///< read and written, each stream counted
    double flops = 0;
};

/// A piece of work on data: small, copyable, self-describing.
template <class O>
concept operation = std::copyable<O> && requires(const O& o) {
    { o.cost() } -> std::same_as<tutti::cost>;
    { O::name } -> std::convertible_to<std::string_view>;
};

/// A queue that accounts for work instead of doing it.
template <class Q>
concept charging_queue = queue<Q> && requires(Q q, std::string_view name, cost c) {
    q.charge(name, c);
    q.hold_host();  // the host waits until the queue is here
};

/// Runs `op` on `q`, in its order.
///
/// Semantics    host queue: complete on return; device queue: enqueued; virtual queue: charged to the clock.
/// Aliasing     as the operation states.
/// Cost         op.cost().
template <queue Q, operation O> void run(Q q, const O& op) {
    if constexpr (charging_queue<Q>) {
        q.charge(O::name, op.cost());
    } else if constexpr (Q::executes_inline) {
        op();
    } else {
        static_assert(
            requires { launch(q, op); }, "the queue has no launch for this operation: include its .cuh");
        launch(q, op);
    }
}

/// The first element of `v` as a host value, after everything queued before. On a virtual queue, which has no values,
/// the caller's prediction comes back, and what the rank's queues are given from now on runs behind.
///
/// Cost    a host wait on device queues: keep it out of the steady state.
/// Errors  usage_error when v is empty.
template <queue Q, class T>
[[nodiscard]] std::remove_const_t<T> fetch(Q q, view<T, typename Q::memory_type> v, std::remove_const_t<T> predicted) {
    if (v.empty()) { throw usage_error("fetch: the view is empty"); }
    if constexpr (charging_queue<Q>) {
        q.hold_host();
        return predicted;
    } else if constexpr (Q::executes_inline) {
        return *v.data();
    } else {
        return fetch_from_device(q, v);
    }
}

}  // namespace tutti
