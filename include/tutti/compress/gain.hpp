// gain: whether an all_reduce is faster compressed: t_encode + t_wire(compressed) + t_decode < t_wire(dense)?
// Needs comm/cost, comm/topology and compress/compressor. Of links, and of the rate that kernels reach, both stated.
#pragma once

#include <cmath>    // isfinite
#include <cstddef>  // size_t

#include <tutti/comm/cost.hpp>            // time_of
#include <tutti/comm/topology.hpp>        // topology
#include <tutti/compress/all_reduce.hpp>  // the three forms, by_level
#include <tutti/compress/compressor.hpp>  // layout
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/text.hpp>            // formatted

namespace tutti::compress {

/// What kernels of this machine reach: measured, not read off a data sheet.
struct kernel_rates {
    double bytes_per_second = 0;   ///< of streaming kernels, reads and writes counted
    double launch_seconds = 4e-6;  ///< what a kernel takes that has nothing to do
};

/// Seconds of one all_reduce, dense and compressed.
struct gain {
    double dense = 0;   ///< the plain all_reduce
    double encode = 0;  ///< reading gradients (and residuals), writing wires
    double wire = 0;    ///< the compressed collectives
    double decode = 0;  ///< sums of wires, and the last decoding
    [[nodiscard]] constexpr double compressed() const noexcept { return encode + wire + decode; }
    [[nodiscard]] constexpr bool worth_it() const noexcept { return compressed() < dense; }
    friend constexpr bool operator==(const gain&, const gain&) = default;
};

/// The times of all_reduce(comm, x, state, all, ...) over a network, and of the plain one in its place.
///
/// Semantics    segments of dense_level cost the same either way and are left out. Nothing is overlapped: a kernel runs
///              alone, links wait for it. One launch for each call of the compressor: many segments share it.
/// Units        `element_size` is that of the gradient, on the plain all_reduce's wire as well.
///              Bytes that kernels move, of N elements of s bytes, w wire bytes, n ranks, and f = 8 with a residual:
///   cut        encode: N (s + f) (n-1)/n + N (4 + f)/n + w;  decode: N (24 + s + f)/n + w (n-1)/n, then w + N s
///   whole      encode: N (s + f) + w;                        decode: N (16 + s) + n w
///   linear     encode: N (s + f), then N (4 or s) a round, and the wires;  decode: N (s + f) and the wires twice;
///              with a residual another 4 N, which hold the gradient in between
/// Determinism  a function of the arguments: equal on all ranks.
/// Errors       usage_error for rates that are not positive.
/// Source       wire times: comm/cost.
template <class Scheme>
[[nodiscard]] gain expected_gain(const Scheme& x, layout all, std::size_t element_size, bool with_residual,
                                 const comm::topology& network, kernel_rates rates) {
    using enum comm::collective;
    if (!(rates.bytes_per_second > 0) || !(rates.launch_seconds >= 0) || !std::isfinite(rates.launch_seconds)) {
        throw usage_error(formatted("expected_gain: kernels reach {} B/s and start in {} s", rates.bytes_per_second,
                                    rates.launch_seconds));
    }
    const detail::by_level split(all);
    const layout compressed = split.compressed;
    if (compressed.empty()) { return {}; }
    const auto kernels = [&](double bytes, int launches) {
        return bytes / rates.bytes_per_second + launches * rates.launch_seconds;
    };
    const auto transfer = [&](comm::collective kind, double bytes) {
        return comm::time_of(kind, bytes, network).seconds();
    };
    const double count = detail::elements_of(compressed);
    const auto size = static_cast<double>(element_size);
    const double feedback = with_residual ? 8 : 0;
    const double ranks = network.ranks();

    gain g;
    g.dense = transfer(comm::collective::all_reduce, count * size);
    if constexpr (requires { x.granularity(); }) {
        const auto bytes = static_cast<double>(detail::wire_bytes(x, compressed));
        if (x.granularity() != 0) {
            const double others = (ranks - 1) / ranks;
            g.encode = kernels(count * (size + feedback) * others + count * (4 + feedback) / ranks + bytes, 2);
            g.wire = transfer(all_to_all_v, bytes) + transfer(comm::collective::all_gather, bytes);
            g.decode = kernels(count * (24 + size + feedback) / ranks + bytes * others + bytes + count * size, 5);
        } else {
            g.encode = kernels(count * (size + feedback) + bytes, 1);
            g.wire = transfer(comm::collective::all_gather, ranks * bytes);
            g.decode = kernels(count * (16 + size) + ranks * bytes, 3);
        }
    } else {
        double wires = 0;
        for (int round = 0; round < Scheme::rounds; ++round) {
            const double bytes = 4.0 * static_cast<double>(detail::wire_count(x, compressed, round));
            g.wire += transfer(comm::collective::all_reduce, bytes);
            wires += bytes;
        }
        const double again = (Scheme::rounds - 1) * (with_residual ? 4 : size);
        g.encode = kernels(count * (size + feedback + again) + wires, Scheme::rounds);
        g.decode = kernels(count * (size + feedback + (with_residual ? 4 : 0)) + 2 * wires, Scheme::rounds + 1);
    }
    return g;
}

}  // namespace tutti::compress
