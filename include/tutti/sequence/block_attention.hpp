// block_attention: attention of some queries to some keys, and its gradients: what an engine asks of a kernel.
// Needs sequence/token_view. host_attention is one on the host; a policy for another queue has the same two calls.
#pragma once

#include <algorithm>  // clamp
#include <concepts>   // movable
#include <cstddef>    // size_t
#include <cstdint>    // positions
#include <span>       // lengths

#include <tutti/core/element.hpp>         // accumulator_t
#include <tutti/core/queue.hpp>           // queue
#include <tutti/sequence/token_view.hpp>  // token_view

namespace tutti::sequence {

/// What a token attends to: every token of its sequence, or itself and those before it.
enum class mask : unsigned char { full, causal };

/// Which keys of a block the queries of a block see, by their positions in the sequence.
struct visibility {
    mask rule = mask::full;
    std::int64_t first_query = 0;
    std::int64_t first_key = 0;
    /// Query `row` of the block sees keys [0, this) of its `keys`.
    [[nodiscard]] constexpr std::size_t keys_of(std::size_t row, std::size_t keys) const noexcept {
        if (rule == mask::full) { return keys; }
        const std::int64_t end = first_query + static_cast<std::int64_t>(row) + 1 - first_key;
        return static_cast<std::size_t>(std::clamp<std::int64_t>(end, 0, static_cast<std::int64_t>(keys)));
    }
};

/// One forward call: out = softmax(scale * query key') value over the keys seen; log_sum_exp = ln of the softmax's sum.
/// out: query heads; log_sum_exp: query heads of width 1. Both are written.
template <floating_element T, memory M> struct forward_block {
    token_view<const T, M> query, key, value;
    visibility seen;
    double scale = 1;
    token_view<accumulator_t<T>, M> out, log_sum_exp;
};

/// One backward call: adds this block's part to the gradients of query, key and value, or starts them: writes.
///
/// log_sum_exp and delta are of all keys that the queries attended to, not of this block's: with them the softmax needs
/// no other block. delta = sum over width of d_out * out; where wants_out<kernel>, delta is empty and out is there, which
/// else is empty.
template <floating_element T, memory M> struct backward_block {
    token_view<const T, M> query, key, value;
    visibility seen;
    double scale = 1;
    token_view<const T, M> d_out, out;
    token_view<const accumulator_t<T>, M> log_sum_exp, delta;
    token_view<accumulator_t<T>, M> d_query, d_key, d_value;
    bool starts_query = false, starts_keys = false;  ///< true for no kernel but those of which starts_gradients says so
};

/// The same with results that are written, in T: of a block that is all that its queries and its keys have to do with,
/// or, where rounds_blocks<kernel>, of any.
template <floating_element T, memory M> struct final_forward_block {
    token_view<const T, M> query, key, value;
    visibility seen;
    double scale = 1;
    token_view<T, M> out;
    token_view<accumulator_t<T>, M> log_sum_exp;
};
template <floating_element T, memory M> struct final_backward_block {
    token_view<const T, M> query, key, value;
    visibility seen;
    double scale = 1;
    token_view<const T, M> d_out, out;
    token_view<const accumulator_t<T>, M> log_sum_exp, delta;
    token_view<T, M> d_query, d_key, d_value;
};

/// The same of several sequences, one behind the other in the rows of `all`: sequence i has lengths[i] of them, and each
/// attends to itself.
template <floating_element T, memory M> struct packed_forward_block {
    std::span<const std::size_t> lengths;
    final_forward_block<T, M> all;
};
template <floating_element T, memory M> struct packed_backward_block {
    std::span<const std::size_t> lengths;
    final_backward_block<T, M> all;
};

/// A kernel of attention.
///
/// Semantics    in the order of the queue. Logarithms are natural. A query that sees no key gets out 0 and log_sum_exp
///              -inf, and gradients of exactly 0; a kernel with another convention (+inf, 0, base 2) is converted by
///              its policy. Blocks may have no queries or no keys.
/// Shapes       query, d_out, out: query heads, value as wide as key. key, value: kv heads, a divisor of the query's.
/// Units        sums and partial results are accumulator_t<T>: float for 16-bit T.
/// Aliasing     what is written overlaps nothing else.
/// Determinism  the same block gives the same bits, or the engine's promise does not hold.
template <class B>
concept block_attention = std::movable<B> && queue<typename B::queue_type> &&
    requires(B& b, typename B::queue_type q,
             const forward_block<typename B::element_type, typename B::queue_type::memory_type>& f,
             const backward_block<typename B::element_type, typename B::queue_type::memory_type>& g) {
    b.forward(q, f);
    b.backward(q, g);
};

/// Does the kernel compute delta by itself, from out, which it is given instead? It says so by `static constexpr bool wants_out = true`.
template <block_attention B> inline constexpr bool wants_out = requires { requires B::wants_out; };

/// Does the kernel write gradients that a block starts? It says so by `static constexpr bool starts_gradients = true`.
template <block_attention B> inline constexpr bool starts_gradients = requires { requires B::starts_gradients; };

/// Does the kernel take final blocks? Sums beside results of 16 bits, and passes over them, are saved then.
template <class B>
concept final_attention = block_attention<B> &&
    requires(B& b, typename B::queue_type q,
             const final_forward_block<typename B::element_type, typename B::queue_type::memory_type>& f,
             const final_backward_block<typename B::element_type, typename B::queue_type::memory_type>& g) {
    b.forward(q, f);
    b.backward(q, g);
};

/// Does the kernel take packed blocks? One call is of many short sequences then.
template <class B>
concept packed_attention = final_attention<B> &&
    requires(B& b, typename B::queue_type q,
             const packed_forward_block<typename B::element_type, typename B::queue_type::memory_type>& f,
             const packed_backward_block<typename B::element_type, typename B::queue_type::memory_type>& g) {
    b.forward(q, f);
    b.backward(q, g);
};

/// Are the kernel's results rounded to T in any case? It says so by `static constexpr bool rounds_blocks = true`: blocks
/// of sequences that several ranks share are final ones then, and sums in the precision of sums are made of their results.
template <block_attention B> inline constexpr bool rounds_blocks = final_attention<B>&& requires {
    requires B::rounds_blocks;
};

/// The kernels that an engine has which names none: a header of kernels specializes it for its queue.
///
/// Semantics  `of<T>`: for elements of T. `type`: for the elements that are usual there.
template <queue Q> struct default_attention;

}  // namespace tutti::sequence
