// route_time: how long messages between two nodes take, directly or spread over all NICs, and from when on that pays.
// Needs comm/topology. The routing layer of Zeppelin (Chen et al., EuroSys 2026), in the alpha-beta model.
#pragma once

#include <algorithm>  // max, clamp
#include <cmath>      // sqrt
#include <cstddef>    // chunks
#include <limits>     // never

#include <tutti/comm/topology.hpp>  // topology

namespace tutti::sequence {

/// The messages from one node to another, in bytes that pass through what is busiest.
struct crossing {
    double direct = 0;  ///< a NIC, when each message leaves and arrives by its ranks' own
    double spread = 0;  ///< a NIC, when all are spread over the NICs
    double inside = 0;  ///< a rank's link inside its node, when all are spread
};

/// One message of n bytes over x NICs, of which one is its source's: n/x of it through each, the rest of it inside.
[[nodiscard]] constexpr crossing single_crossing(double bytes, int nics) noexcept {
    return {bytes, bytes / nics, bytes * (nics - 1) / nics};
}

/// Without detours, with latencies a and times a byte b: a_between + direct b_between.
[[nodiscard]] inline double direct_seconds(const crossing& c, const comm::topology& t) noexcept {
    return t.between().latency_seconds + c.direct / t.between().bytes_per_second;
}

/// Inside to the ranks of all NICs, between, inside to the destination, each of `chunks` equal parts one step behind
/// the one before it:
///   1 chunk    2 (a_inside + inside b_inside) + a_between + spread b_between
///   q chunks   first and last step     2 (a_inside + inside b_inside / q)
///              q steps that do all     q max(a_inside, a_between) + max(inside b_inside, spread b_between)
[[nodiscard]] inline double routed_seconds(const crossing& c, std::size_t chunks, const comm::topology& t) noexcept {
    const double inside = c.inside / t.inside().bytes_per_second;
    const double between = c.spread / t.between().bytes_per_second;
    const double ends = 2 * (t.inside().latency_seconds + inside / static_cast<double>(chunks));
    if (chunks == 1) { return ends + t.between().latency_seconds + between; }
    const double latency = std::max(t.inside().latency_seconds, t.between().latency_seconds);
    return ends + static_cast<double>(chunks) * latency + std::max(inside, between);
}

/// The number of chunks, at most 64, of which routed_seconds is least. More would hide 1/64 of the way inside.
[[nodiscard]] inline std::size_t best_chunks(const crossing& c, const comm::topology& t) noexcept {
    constexpr double most = 64;
    const double latency = std::max(t.inside().latency_seconds, t.between().latency_seconds);
    const double inside = c.inside / t.inside().bytes_per_second;
    // From two chunks on the time is convex in their number, and stationary here.
    const double stationary = latency > 0 ? std::sqrt(2 * inside / latency) : (inside > 0 ? most : 1);
    const auto below = static_cast<std::size_t>(std::clamp(stationary, 1.0, most));
    std::size_t best = 1;
    for (const std::size_t q : {below, below + 1}) {
        if (q <= static_cast<std::size_t>(most) && routed_seconds(c, q, t) < routed_seconds(c, best, t)) { best = q; }
    }
    return best;
}

/// Bytes above which one message over x NICs is faster in one chunk than directly; infinite where it never is:
///   2 a_inside / ((1 - 1/x) (b_between - 2 b_inside))
/// Chunks pay off earlier, and already where b_inside < x / (x - 1) b_between.
[[nodiscard]] inline double break_even_bytes(int nics, const comm::topology& t) noexcept {
    const double gain =
        (1 - 1.0 / nics) * (1 / t.between().bytes_per_second - 2 / t.inside().bytes_per_second);  // seconds a byte
    return gain > 0 ? 2 * t.inside().latency_seconds / gain : std::numeric_limits<double>::infinity();
}

}  // namespace tutti::sequence
