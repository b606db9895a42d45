// reduce_scatter: sums over ranks of which each gets its shard, sent compressed.
// Needs comm/communicator, compress/compressor and compress/shards. Wang et al., ZeRO++, 2023, section 3.3 (qgZ): one
// exchange, so that an element is compressed once, and sums in full precision.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t, byte
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <vector>       // counts

#include <tutti/comm/communicator.hpp>          // can_all_to_all
#include <tutti/compress/compressor.hpp>        // compressor
#include <tutti/compress/detail/agreement.hpp>  // expect_agreement
#include <tutti/compress/detail/flat.hpp>       // add_all, convert_scaled
#include <tutti/compress/shards.hpp>            // shards
#include <tutti/core/buffer.hpp>                // scratch
#include <tutti/core/elementwise.hpp>           // fill
#include <tutti/core/error.hpp>                 // usage_error
#include <tutti/core/partition.hpp>             // part
#include <tutti/core/reduce_op.hpp>             // sum, mean
#include <tutti/core/text.hpp>                  // formatted
#include <tutti/core/view.hpp>                  // overlaps

namespace tutti::compress {

/// What compressed collectives reduce with.
template <class Op>
concept sum_or_mean = std::same_as<Op, tutti::sum> || std::same_as<Op, tutti::mean>;

namespace detail {

template <sum_or_mean Op> [[nodiscard]] constexpr float factor_of(int ranks) noexcept {
    return std::same_as<Op, tutti::mean> ? 1.0f / static_cast<float>(ranks) : 1.0f;
}

template <communicator C> void expect_shards(std::string_view operation, const C& comm, const shards& parts) {
    if (parts.ranks() != comm.size()) {
        throw usage_error(formatted("{}: {} shards for {} ranks, on '{}'", operation, parts.ranks(), comm.size(),
                                    std::string_view(comm.name())));
    }
}

/// `part` is element `base` of `flat` and those behind it, or apart from all of it; the residual is apart from both.
template <class A, class B, memory M>
void expect_apart(std::string_view operation, view<A, M> flat, view<B, M> part, std::size_t base,
                  view<float, M> residual) {
    const auto* const whole = reinterpret_cast<const std::byte*>(flat.data());
    const auto* const own = reinterpret_cast<const std::byte*>(part.data());
    if (overlaps(whole, flat.size_bytes(), own, part.size_bytes()) && own != whole + base * sizeof(A)) {
        throw usage_error(formatted("{}: in and out overlap, but not as the in-place form asks", operation));
    }
    if (overlaps(residual.data(), residual.size_bytes(), whole, flat.size_bytes()) ||
        overlaps(residual.data(), residual.size_bytes(), own, part.size_bytes())) {
        throw usage_error(formatted("{}: the residual overlaps in or out", operation));
    }
}

/// total = sum over ranks, in rank order, of what they have of this rank's shard; its own in full precision.
/// `total` begins at the shard's lowest element.
template <communicator C, class Scheme, floating_element T>
void sum_of_shard(C& comm, const Scheme& x, const shards& parts, view<const T, memory_of<C>> in,
                  view<float, memory_of<C>> residual, view<float, memory_of<C>> total, const draw_key& key) {
    using Q = queue_of<C>;
    const Q q = comm.queue();
    const auto ranks = static_cast<std::size_t>(comm.size());
    const auto me = static_cast<std::size_t>(comm.rank());
    const layout own = parts.of(comm.rank());
    const std::vector<segment> others = parts.without(comm.rank());
    const std::size_t own_bytes = wire_bytes(x, own);

    std::vector<std::size_t> send(ranks);
    std::vector<std::size_t> receive(ranks, own_bytes);
    std::size_t all_bytes = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
        send[r] = r == me ? 0 : wire_bytes(x, parts.of(static_cast<int>(r)));
        all_bytes += send[r];
    }
    receive[me] = 0;
    buffer<std::byte, Q> outgoing(q, all_bytes);
    buffer<std::byte, Q> incoming(q, own_bytes * (ranks - 1));
    if (!others.empty()) { x.encode(q, layout(others), in, residual, outgoing.view(), key); }
    comm.all_to_all_v(outgoing.view(), send, incoming.view(), receive);

    if (own.empty()) { return; }
    const std::size_t base = extent_of(own).first;
    const std::vector<segment> here = rebased(own, base);
    const view<const std::byte, memory_of<C>> wires = incoming.view();
    for_runs(here, [&](part run) { fill(q, total.sub(run.first, run.count), 0.0f); });
    if (me > 0) { x.decode_add(q, layout(here), wires.sub(0, me * own_bytes), me, total); }
    for_runs(own, [&](part run) {
        add_all(q, in.sub(run.first, run.count), part_of(residual, run.first, run.count),
                total.sub(run.first - base, run.count));
    });
    const std::size_t behind = ranks - 1 - me;
    if (behind > 0) { x.decode_add(q, layout(here), wires.sub(me * own_bytes, behind * own_bytes), behind, total); }
}

}  // namespace detail

/// Rank r gets its shard of the sum, or the mean, over ranks. What it gets from others went through the compressor
/// once; what it has itself counts in full precision.
///
/// Semantics    shards cut no tensor where the compressor must not (cut() sees to it). With a residual, this rank's
///              part of every other shard is sent with what is left over, and what is lost stays; its own shard's
///              residual is used up.
/// Shapes       `in` and the residual are whole flat views. `out` holds this rank's shard from its lowest element to
///              its last: shards::of(rank). Residual: as large as `in`, or empty.
/// Aliasing     in place when out is where that shard is in `in`. Residual and views share nothing.
/// Determinism  sums in rank order. Every draw depends on key, tensor and element: keys of ranks must differ in `rank`.
/// Cost         sent: the wires of all other shards, in one all_to_all_v. Scratch: those, the others' wires of this
///              shard, and a float an element of it. No host wait.
/// Errors       usage_error before anything is sent. Where the communicator is `checked`: mismatch_error when ranks
///              differ in segments, levels, step, seed or operator.
template <communicator C, class Scheme, floating_element T, sum_or_mean Op = tutti::mean>
requires compressor<Scheme, queue_of<C>, T> && comm::can_all_to_all<C, std::byte>
void reduce_scatter(C& comm, const Scheme& x, const shards& parts, view<const std::type_identity_t<T>, memory_of<C>> in,
                    view<T, memory_of<C>> out, view<float, memory_of<C>> residual, draw_key key, Op = {}) {
    constexpr std::string_view name = "compressed reduce_scatter";
    detail::expect_shards(name, comm, parts);
    detail::expect_layout(name, parts.all(), in.size());
    const layout own = parts.of(comm.rank());
    const part extent = detail::extent_of(own);
    detail::expect_size(name, "out", out.size(), extent.count);
    if (!residual.empty()) { detail::expect_size(name, "residual", residual.size(), in.size()); }
    detail::expect_apart(name, in, out, extent.first, residual);
    detail::expect_agreement(comm, x, parts.all(), key, Op::kind, name);

    const auto q = comm.queue();
    const buffer<float, queue_of<C>> total(q, extent.count);
    detail::sum_of_shard(comm, x, parts, in, residual, total.view(), key);
    const view<const float, memory_of<C>> result = total.view();
    detail::for_runs(detail::rebased(own, extent.first), [&](part run) {
        detail::convert_scaled(q, result.sub(run.first, run.count), out.sub(run.first, run.count),
                               detail::factor_of<Op>(comm.size()));
    });
}

}  // namespace tutti::compress
