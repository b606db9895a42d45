// compressor: what compressed collectives require of a scheme that makes a gradient smaller, and what they hand to it.
// Needs core/run and core/philox. Two kinds: a `compressor` writes bytes that only it can read; a `linear_compressor`
// writes floats that may be summed as they are, so an ordinary all_reduce carries them.
#pragma once

#include <concepts>     // same_as
#include <cstddef>      // size_t, byte
#include <cstdint>      // seeds
#include <span>         // layouts
#include <string_view>  // names

#include <tutti/core/error.hpp>   // usage_error
#include <tutti/core/philox.hpp>  // random_stream
#include <tutti/core/queue.hpp>   // queue
#include <tutti/core/state.hpp>   // state_entry
#include <tutti/core/text.hpp>    // formatted
#include <tutti/core/view.hpp>    // data

namespace tutti::compress {

/// A tensor, or a part of one, inside flat views.
///
/// Semantics  element i of the segment is element `offset + i` of the views given along, and element `first + i` of its
///            tensor. Random numbers and buckets are counted from the tensor's own first element, so they do not depend
///            on how tensors are cut into segments, nor on the number of ranks. A segment starts and ends at multiples
///            of the compressor's granularity, or at the ends of its tensor.
/// Units      elements; `level` is the compressor's: bits, rank, kept elements in 10,000.
struct segment {
    std::uint32_t tensor = 0;  ///< place of the tensor in the model, the same in all runs
    int level = 0;
    std::size_t offset = 0;
    std::size_t first = 0;
    std::size_t rows = 0;  ///< of the matrix that a whole tensor is read as; a vector or a part of a tensor has
    std::size_t cols = 1;  ///< one column
    [[nodiscard]] constexpr std::size_t size() const noexcept { return rows * cols; }
    friend bool operator==(const segment&, const segment&) = default;
};

/// Segments in the order in which their wires follow each other. Read while the call runs, and not kept.
using layout = std::span<const segment>;

/// Where random numbers come from, besides tensor and element: no two (step, rank) use the same ones.
struct draw_key {
    std::uint64_t seed = 0;
    std::uint32_t step = 0;
    std::uint32_t rank = 0;

    /// The numbers of one tensor and one purpose. Purposes are constants of the compressors.
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr random_stream stream(std::uint32_t tensor,
                                                                   std::uint32_t purpose) const noexcept {
        // Philox is a bijection of its counter: distinct (rank, purpose) give distinct keys for one seed.
        const auto mixed = philox({rank, purpose, 0x636f6d70u, 0},  // "comp"
                                  {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
        return {(std::uint64_t{mixed[1]} << 32) | mixed[0], tensor, step};
    }
    /// The same numbers on all ranks.
    [[nodiscard]] constexpr draw_key shared() const noexcept { return {seed, step, 0xffffffffu}; }
};

/// Wires begin at multiples of this, so that every part of one can be read in words of 16 bytes.
inline constexpr std::size_t wire_alignment = 16;

/// The bytes that `bytes` take in a wire.
[[nodiscard]] constexpr std::size_t aligned_wire(std::size_t bytes) noexcept {
    return (bytes + wire_alignment - 1) / wire_alignment * wire_alignment;
}

/// A scheme whose wire only itself can read. A value: hyper-parameters, no state.
///
/// Semantics
///   granularity   a tensor may be cut into segments at multiples of this many elements without changing what any
///                 element decodes to; 0: a tensor must be one segment.
///   wire_bytes    of one segment: a multiple of wire_alignment, equal on all ranks. The wire of a layout is those of
///                 its segments, one behind the other.
///   encode        writes the wire of x = in + residual, then residual = x - decoded(wire). An empty residual is none.
///                 Bytes of the wire that carry nothing are zero.
///   decode        out = factor * decoded(wire).
///   decode_add    sum += decoded(wire 0) + decoded(wire 1) + ..., in that order, of `count` wires of one layout that
///                 follow each other in `wires`.
/// Not finite      a NaN or an infinity makes what is encoded together with it decode to NaN, so that a step can be
///                 skipped; the residual stays finite.
/// Aliasing        none. Determinism: of arguments alone, the same bytes and bits on host and device.
/// Errors          usage_error for a level or a size that the scheme does not have, before anything is written.
///                 decode and decode_add read any bytes without leaving their views.
template <class C, class Q, class T = float>
concept compressor = queue<Q> && floating_element<T> && std::copyable<C> &&
    requires(const C& x, Q q, const segment& s, layout all, draw_key key, std::size_t count,
             view<const T, typename Q::memory_type> in, view<float, typename Q::memory_type> residual,
             view<std::byte, typename Q::memory_type> wire, view<const std::byte, typename Q::memory_type> received,
             view<T, typename Q::memory_type> out, view<float, typename Q::memory_type> sum) {
    { x.granularity() } -> std::same_as<std::size_t>;
    { x.wire_bytes(s) } -> std::same_as<std::size_t>;
    x.encode(q, all, in, residual, wire, key);
    x.decode(q, all, received, out, 1.0f);
    x.decode_add(q, all, received, count, sum);
};

/// A scheme whose wire is floats that the ranks sum, in one round or more. Its state (warm starts) is apart, so that it
/// can be saved: `typename C::template state_type<Q>`, made by make_state for tensors at their largest levels.
///
/// Semantics
///   wire_count    floats of one segment in one round.
///   contribute    round 0 reads x = in + residual; writes this rank's part of the round's wire. With a residual, x is
///                 kept there until finish; without, `in` must stay as it is until the last round.
///   absorb        takes the wire back once it is the sum over `ranks` ranks.
///   finish        out = mean over the ranks of what they sent; residual = x - what this rank sent. `in` as given to
///                 contribute, and may be `out`.
///   state entries named pieces for strategy::state(), and restored() after they were written.
/// Calls come round by round: contribute, sum, absorb; then finish; for the same layout.
/// Not finite, aliasing, determinism, errors: as for a compressor, out may be in.
template <class C, class Q, class T = float>
concept linear_compressor = queue<Q> && floating_element<T> && std::copyable<C> &&
    requires(const C& x, Q q, const segment& s, layout all, draw_key key, int round, int ranks,
             typename C::template state_type<Q>& state, view<const T, typename Q::memory_type> in,
             view<float, typename Q::memory_type> residual, view<float, typename Q::memory_type> wire,
             view<T, typename Q::memory_type> out) {
    { C::rounds } -> std::convertible_to<int>;
    { x.make_state(q, all) } -> std::same_as<typename C::template state_type<Q>>;
    { state.entries() } -> std::convertible_to<std::span<const state_entry<typename Q::memory_type>>>;
    state.restored();
    { x.wire_count(s, round) } -> std::same_as<std::size_t>;
    x.contribute(q, all, state, round, in, residual, wire, key);
    x.absorb(q, all, state, round, wire, ranks);
    x.finish(q, all, state, in, residual, out);
};

namespace detail {

/// The whole wire of a layout.
template <class C> [[nodiscard]] std::size_t wire_bytes(const C& x, layout all) {
    std::size_t bytes = 0;
    for (const segment& s : all) { bytes += x.wire_bytes(s); }
    return bytes;
}
template <class C> [[nodiscard]] std::size_t wire_count(const C& x, layout all, int round) {
    std::size_t count = 0;
    for (const segment& s : all) { count += x.wire_count(s, round); }
    return count;
}

/// Elements of a layout, for costs.
[[nodiscard]] inline double elements_of(layout all) noexcept {
    double elements = 0;
    for (const segment& s : all) { elements += static_cast<double>(s.size()); }
    return elements;
}

/// Refuses segments outside of a view of `size` elements.
inline void expect_inside(std::string_view operation, layout all, std::size_t size) {
    for (const segment& s : all) {
        std::size_t end = 0;
        if (__builtin_mul_overflow(s.rows, s.cols, &end) || __builtin_add_overflow(s.offset, end, &end)) {
            throw usage_error(formatted("{}: tensor {} is {} x {} elements from {} on, of {}", operation, s.tensor,
                                        s.rows, s.cols, s.offset, size));
        }
        if (end > size) {
            throw usage_error(
                formatted("{}: tensor {} is at elements {} to {} of {}", operation, s.tensor, s.offset, end, size));
        }
    }
}
inline void expect_size(std::string_view operation, std::string_view what, std::size_t have, std::size_t need) {
    if (have != need) {
        throw usage_error(formatted("{}: {} has {} elements instead of {}", operation, what, have, need));
    }
}
/// Refuses `have` bytes that are not those of `count` wires of `bytes` each.
inline void expect_wires(std::string_view operation, std::size_t have, std::size_t count, std::size_t bytes) {
    if (bytes != 0 && count > have / bytes) {  // their product may overflow
        throw usage_error(formatted("{}: {} wires of {} bytes do not fit in {}", operation, count, bytes, have));
    }
    expect_size(operation, "the wire", have, count * bytes);
}

}  // namespace detail

}  // namespace tutti::compress
