// all_gather: every rank's shard on all ranks, sent compressed.
// Needs comm/communicator, compress/compressor and compress/shards. Wang et al., ZeRO++, 2023, section 3.1 (qwZ).
#pragma once

#include <algorithm>    // all_of
#include <cstddef>      // size_t, byte
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <vector>       // counts

#include <tutti/comm/communicator.hpp>         // can_all_gather
#include <tutti/compress/compressor.hpp>       // compressor
#include <tutti/compress/reduce_scatter.hpp>   // checks
#include <tutti/compress/shards.hpp>           // shards
#include <tutti/core/buffer.hpp>               // scratch
#include <tutti/core/partition.hpp>            // part
#include <tutti/core/reduce_op.hpp>            // op_kind
#include <tutti/core/stochastic_rounding.hpp>  // half_element
#include <tutti/core/view.hpp>                 // view

namespace tutti::compress {

namespace detail {

/// Every rank decodes all wires, its own too: so all have the same bits. `mine` and `residual` begin at the lowest
/// element of this rank's shard.
template <communicator C, class Scheme, floating_element From, floating_element T>
void gather_shards(C& comm, const Scheme& x, const shards& parts, view<const From, memory_of<C>> mine,
                   view<float, memory_of<C>> residual, view<T, memory_of<C>> out, const draw_key& key, float factor) {
    using Q = queue_of<C>;
    const Q q = comm.queue();
    const layout own = parts.of(comm.rank());
    std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()));
    std::size_t all_bytes = 0;
    std::size_t own_at = 0;
    for (int r = 0; r < comm.size(); ++r) {
        if (r == comm.rank()) { own_at = all_bytes; }
        const std::size_t bytes = wire_bytes(x, parts.of(r));
        counts[static_cast<std::size_t>(r)] = bytes;
        all_bytes += bytes;
    }
    const std::size_t own_bytes = counts[static_cast<std::size_t>(comm.rank())];
    buffer<std::byte, Q> wires(q, all_bytes);
    const auto own_wire = wires.view().sub(own_at, own_bytes);
    if (!own.empty()) {
        const std::vector<segment> here = rebased(own, extent_of(own).first);
        x.encode(q, layout(here), mine, residual, own_wire, key);
    }
    if (std::all_of(counts.begin(), counts.end(), [&](std::size_t n) { return n == own_bytes; })) {
        comm.all_gather(own_wire, wires.view());  // backends have faster ways for equal parts
    } else {
        comm.all_gather_v(own_wire, wires.view(), counts);
    }
    const view<const std::byte, memory_of<C>> received = wires.view();
    if (!parts.all().empty()) { x.decode(q, parts.all(), received, out, factor); }
}

template <communicator C, class Scheme, floating_element From, floating_element T>
void all_gather(C& comm, const Scheme& x, const shards& parts, view<const From, memory_of<C>> in,
                view<T, memory_of<C>> out, view<float, memory_of<C>> residual, const draw_key& key) {
    constexpr std::string_view name = "compressed all_gather";
    expect_shards(name, comm, parts);
    expect_layout(name, parts.all(), out.size());
    const part extent = extent_of(parts.of(comm.rank()));
    expect_size(name, "in", in.size(), extent.count);
    if (!residual.empty()) { expect_size(name, "residual", residual.size(), in.size()); }
    expect_apart(name, out, in, extent.first, residual);
    expect_agreement(comm, x, parts.all(), key, op_kind::none, name);
    gather_shards(comm, x, parts, in, residual, out, key, 1.0f);
}

}  // namespace detail

/// out = the shards of all ranks, each as its wire decodes: the owner's, too, so that all ranks have the same bits.
///
/// Semantics    with a residual, what is sent is shard + residual, and what is lost stays.
/// Shapes       `in` and the residual hold this rank's shard from its lowest element to its last; `out` is a whole flat
///              view. Residual: as large as `in`, or empty.
/// Aliasing     in place when `in` is where that shard is in `out`: its values become those of its wire. Residual and
///              views share nothing.
/// Determinism  of the arguments; draws depend on key, tensor and element.
/// Cost         sent: the wire of the own shard to each other rank. Scratch: all wires. No host wait.
/// Errors       as for reduce_scatter.
template <communicator C, class Scheme, floating_element T>
requires compressor<Scheme, queue_of<C>, T> && comm::can_all_gather<C, std::byte>
void all_gather(C& comm, const Scheme& x, const shards& parts, view<const std::type_identity_t<T>, memory_of<C>> in,
                view<T, memory_of<C>> out, view<float, memory_of<C>> residual, draw_key key) {
    detail::all_gather(comm, x, parts, in, out, residual, key);
}
/// The same of masters, for values of 16 bits: what is sent is not rounded to these first. Not in place.
template <communicator C, class Scheme, half_element T>
requires(comm::can_all_gather<C, std::byte>&& compressor<Scheme, queue_of<C>, T>&&
             compressor<Scheme, queue_of<C>, float>) void all_gather(C& comm, const Scheme& x, const shards& parts,
                                                                     view<const float, memory_of<C>> in,
                                                                     view<T, memory_of<C>> out,
                                                                     view<float, memory_of<C>> residual, draw_key key) {
    detail::all_gather(comm, x, parts, in, out, residual, key);
}

}  // namespace tutti::compress
