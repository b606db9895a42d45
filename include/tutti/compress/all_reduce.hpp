// all_reduce: sums over ranks, sent compressed; one call for every compressor.
// Needs comm/communicator, compress/{dense, reduce_scatter, all_gather}. Cut among owners as Markov et al., CGX, 2022,
// section 4 (scatter-reduce, all-gather); gathered whole where a payload cannot be cut; summed as floats where it can.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t, byte
#include <span>         // entries
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <vector>       // segments

#include <tutti/comm/communicator.hpp>        // capabilities
#include <tutti/compress/all_gather.hpp>      // the second half
#include <tutti/compress/compressor.hpp>      // compressor, linear_compressor
#include <tutti/compress/dense.hpp>           // dense_level
#include <tutti/compress/reduce_scatter.hpp>  // the first half
#include <tutti/compress/shards.hpp>          // cut
#include <tutti/core/buffer.hpp>              // scratch
#include <tutti/core/elementwise.hpp>         // fill, scale
#include <tutti/core/reduce_op.hpp>           // sum, mean
#include <tutti/core/state.hpp>               // state_entry
#include <tutti/core/view.hpp>                // view

namespace tutti::compress {

/// The state of a compressor that has none.
template <queue Q> struct stateless {
    [[nodiscard]] std::span<const state_entry<typename Q::memory_type>> entries() const noexcept { return {}; }
    void restored() const noexcept {}
};

/// The state of Scheme on Q: its own, or `stateless`.
template <class Scheme, queue Q> [[nodiscard]] auto make_state(const Scheme& x, Q q, layout all) {
    if constexpr (linear_compressor<Scheme, Q>) {
        return x.make_state(q, all);
    } else {
        return stateless<Q>{};
    }
}

/// What all_reduce accepts: either kind of compressor, and a communicator that can carry it.
template <class Scheme, class C, class T>
concept reducible_by = comm::can_all_reduce<C, float, tutti::sum> &&
    (linear_compressor<Scheme, queue_of<C>, T> ||
     (compressor<Scheme, queue_of<C>, T> && compressor<Scheme, queue_of<C>, float> &&
      comm::can_all_to_all<C, std::byte> && comm::can_all_gather<C, std::byte>));

namespace detail {

/// A layout's dense segments, neighbors joined, and its others.
struct by_level {
    std::vector<segment> dense;
    std::vector<segment> compressed;
    explicit by_level(layout all) {
        for (const segment& s : all) {
            if (s.level != dense_level) {
                compressed.push_back(s);
            } else if (!dense.empty() && dense.back().offset + dense.back().size() == s.offset) {
                dense.back().rows += s.size();
            } else {
                dense.push_back({s.tensor, dense_level, s.offset, 0, s.size(), 1});
            }
        }
    }
};

/// Dense segments, as a wire of floats that an all_reduce sums.
template <communicator C, floating_element T> class dense_round {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    layout all_;

public:
    explicit dense_round(layout all) : all_(all) {}
    [[nodiscard]] std::size_t count() const { return wire_bytes(dense<>(), all_) / sizeof(float); }
    void contribute(Q q, view<const T, M> in, view<float, M> residual, view<float, M> wire) const {
        dense<>().encode(q, all_, in, residual, as_bytes(wire), {});
    }
    void finish(Q q, view<const float, M> wire, view<T, M> out, float factor) const {
        dense<>().decode(q, all_, as_bytes(wire), out, factor);
    }
};

// The first wire of floats carries the dense segments too: no collective of their own.
template <communicator C, class Scheme, class State, floating_element T>
void all_reduce_linear(C& comm, const Scheme& x, State& state, const by_level& all, view<const T, memory_of<C>> in,
                       view<T, memory_of<C>> out, view<float, memory_of<C>> residual, const draw_key& key,
                       bool is_mean) {
    using Q = queue_of<C>;
    const Q q = comm.queue();
    const layout compressed = all.compressed;
    const dense_round<C, T> as_is(all.dense);
    const float factor = is_mean ? 1.0f / static_cast<float>(comm.size()) : 1.0f;
    const int rounds = compressed.empty() ? 1 : Scheme::rounds;
    for (int round = 0; round < rounds; ++round) {
        const std::size_t ahead = round == 0 ? as_is.count() : 0;
        const std::size_t count = compressed.empty() ? 0 : wire_count(x, compressed, round);
        const buffer<float, Q> wire(q, ahead + count);
        const auto head = wire.view().sub(0, ahead);
        const auto tail = wire.view().sub(ahead, count);
        if (round == 0) { as_is.contribute(q, in, residual, head); }
        if (!compressed.empty()) { x.contribute(q, compressed, state, round, in, residual, tail, key); }
        comm.all_reduce(wire.view(), wire.view(), tutti::sum{});
        if (round == 0) { as_is.finish(q, head, out, factor); }
        if (!compressed.empty()) { x.absorb(q, compressed, state, round, tail, comm.size()); }
    }
    if (compressed.empty()) { return; }
    x.finish(q, compressed, state, in, residual, out);
    if (is_mean || comm.size() == 1) { return; }
    for_runs(compressed, [&](part run) {
        const auto mean_of = out.sub(run.first, run.count);
        scale(q, mean_of, mean_of, static_cast<master_t<T>>(comm.size()));
    });
}

template <communicator C, floating_element T>
void all_reduce_dense(C& comm, layout all, view<const T, memory_of<C>> in, view<T, memory_of<C>> out,
                      view<float, memory_of<C>> residual, float factor) {
    const dense_round<C, T> as_is(all);
    const buffer<float, queue_of<C>> wire(comm.queue(), as_is.count());
    as_is.contribute(comm.queue(), in, residual, wire.view());
    comm.all_reduce(wire.view(), wire.view(), tutti::sum{});
    as_is.finish(comm.queue(), wire.view(), out, factor);
}

template <communicator C, class Scheme, floating_element T>
void all_reduce_cut(C& comm, const Scheme& x, layout all, view<const T, memory_of<C>> in, view<T, memory_of<C>> out,
                    view<float, memory_of<C>> residual, const draw_key& key, float factor) {
    const shards parts = cut(all, x.granularity(), comm.size());
    const part own = extent_of(parts.of(comm.rank()));
    const buffer<float, queue_of<C>> total(comm.queue(), own.count);
    sum_of_shard(comm, x, parts, in, residual, total.view(), key);
    const view<const float, memory_of<C>> result = total.view();
    gather_shards(comm, x, parts, result, part_of(residual, own.first, own.count), out, key, factor);
}

template <communicator C, class Scheme, floating_element T>
void all_reduce_whole(C& comm, const Scheme& x, layout all, view<const T, memory_of<C>> in, view<T, memory_of<C>> out,
                      view<float, memory_of<C>> residual, const draw_key& key, float factor) {
    using Q = queue_of<C>;
    const Q q = comm.queue();
    const auto ranks = static_cast<std::size_t>(comm.size());
    const std::size_t own_bytes = wire_bytes(x, all);
    const buffer<std::byte, Q> wires(q, ranks * own_bytes);
    const auto own = wires.view().sub(static_cast<std::size_t>(comm.rank()) * own_bytes, own_bytes);
    x.encode(q, all, in, residual, own, key);
    comm.all_gather(own, wires.view());

    const part extent = extent_of(all);
    const std::vector<segment> here = rebased(all, extent.first);
    const buffer<float, Q> total(q, extent.count);
    for_runs(here, [&](part run) { fill(q, total.view().sub(run.first, run.count), 0.0f); });
    const view<const std::byte, memory_of<C>> received = wires.view();
    x.decode_add(q, layout(here), received, ranks, total.view());
    const view<const float, memory_of<C>> result = total.view();
    for_runs(all, [&](part run) {
        convert_scaled(q, result.sub(run.first - extent.first, run.count), out.sub(run.first, run.count), factor);
    });
}

template <communicator C, floating_element T>
void expect_all_reduce(std::string_view operation, layout all, view<const T, memory_of<C>> in,
                       view<T, memory_of<C>> out, view<float, memory_of<C>> residual) {
    expect_size(operation, "in", in.size(), out.size());
    expect_layout(operation, all, in.size());
    if (!residual.empty()) { expect_size(operation, "residual", residual.size(), in.size()); }
    expect_apart(operation, in, out, 0, residual);
}

}  // namespace detail

/// out = sum, or mean, over ranks of in, as far as the compressor lets it through; the same bits on every rank.
///
/// Semantics    segments of dense_level are summed as floats. Of the others:
///   granularity > 0   the layout is cut among the ranks. Each sends the others' parts compressed; a part's owner sums
///              them, its own uncompressed, and sends the sum compressed; every rank decodes the same wires, owners too.
///   granularity 0     every rank sends its wire to all, and all add them up.
///   linear     the ranks sum wires of floats, round by round; dense segments go along in the first.
///              With a residual: it is added to what is compressed, and keeps what was lost on the way, also of the sum,
///              whose loss stays with its owner. So out (as a sum) + residuals, summed over ranks = in + residuals
///              before, up to the rounding of out to T, which no residual keeps. Dense segments leave none. Elements
///              outside of all segments are not touched.
///   state      of make_state(): for linear compressors; equal on all ranks.
/// Shapes       flat views of one size; the residual may be empty. Sums are in float for every T, and rounded to T for
///              out. Linear compressors round the mean to T, of which a sum is n times, rounded again: for T of 16 bits
///              a sum then lacks what a mean cannot hold (in float16, 2^-24 of one of 4 ranks). Take T = float where
///              that matters.
/// Aliasing     out may be in. The residual shares nothing with them.
/// Determinism  on backends that sum in rank order, of the arguments alone: also with threads, lanes and devices. Draws
///              depend on key, tensor and element: keys of ranks must differ in `rank`. How a gradient is grouped into
///              calls decides who owns an element, except with granularity 0.
/// Cost         bytes sent by one of n ranks, for a layout of w wire bytes, of which it owns w_own:
///              cut: (w - w_own) + (n - 1) w_own, 2 (n-1)/n w together; whole: (n-1) w; linear: 2 (n-1)/n of all rounds.
///              Scratch: wires as received; a float an element of what this rank sums. No host wait.
/// Errors       usage_error before anything is sent. Where the communicator is `checked`: mismatch_error when ranks
///              differ in segments, levels, step, seed or operator.
template <communicator C, class Scheme, class State, floating_element T, sum_or_mean Op = tutti::mean>
requires reducible_by<Scheme, C, T>
void all_reduce(C& comm, const Scheme& x, State& state, layout all,
                view<const std::type_identity_t<T>, memory_of<C>> in, view<T, memory_of<C>> out,
                view<float, memory_of<C>> residual, draw_key key, Op = {}) {
    constexpr std::string_view name = "compressed all_reduce";
    detail::expect_all_reduce<C, T>(name, all, in, out, residual);
    detail::expect_agreement(comm, x, all, key, Op::kind, name);
    const detail::by_level split(all);
    const float factor = detail::factor_of<Op>(comm.size());
    if constexpr (linear_compressor<Scheme, queue_of<C>, T>) {
        constexpr bool is_mean = std::same_as<Op, tutti::mean>;
        if (!all.empty()) { detail::all_reduce_linear(comm, x, state, split, in, out, residual, key, is_mean); }
    } else {
        const layout compressed = split.compressed;
        if (!compressed.empty() && x.granularity() != 0) {
            detail::all_reduce_cut(comm, x, compressed, in, out, residual, key, factor);
        } else if (!compressed.empty()) {
            detail::all_reduce_whole(comm, x, compressed, in, out, residual, key, factor);
        }
        if (!split.dense.empty()) { detail::all_reduce_dense(comm, layout(split.dense), in, out, residual, factor); }
    }
}

}  // namespace tutti::compress
