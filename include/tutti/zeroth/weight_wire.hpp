// weight_wire: how weights travel to the device: rounded to 16 bits, or in fewer, made of masters and decoded there.
// Needs core/elementwise. zeroth/float8_wire has the one of eight bits; zeroth/{master,renewed}_store use them.
#pragma once

#include <concepts>  // same_as
#include <cstddef>   // size_t, byte

#include <tutti/core/element.hpp>      // floating_element
#include <tutti/core/elementwise.hpp>  // copy
#include <tutti/core/queue.hpp>        // queue
#include <tutti/core/view.hpp>         // view

namespace tutti::zeroth {

/// What is encoded on a queue of kind Q, from masters of type A.
template <class W, class A, class Q>
concept weight_encoder = std::copyable<W> &&
    requires(const W& w, std::size_t count, Q q, view<const A, typename Q::memory_type> masters,
             view<std::byte, typename Q::memory_type> out) {
    { w.bytes(count) } -> std::same_as<std::size_t>;
    w.encode(q, masters, out);
};

/// What is decoded on a queue of kind Q, to the T with which the device computes.
template <class W, class T, class Q>
concept weight_decoder = std::copyable<W> &&
    requires(const W& w, std::size_t count, Q q, view<const std::byte, typename Q::memory_type> in,
             view<T, typename Q::memory_type> weights) {
    { w.bytes(count) } -> std::same_as<std::size_t>;
    w.decode(q, in, weights);
};

/// A wire that the host encodes and the device decodes. `plain`: what is encoded are the weights already.
template <class W, class T, class Q>
concept weight_wire = weight_encoder<W, float, host_queue> && weight_decoder<W, T, Q> && requires {
    { W::plain } -> std::convertible_to<bool>;
};

/// Rounded to nearest even in W: float16, bfloat16 or float. The device computes in T, which may be wider.
template <floating_element W, floating_element T = W> struct rounded_wire {
    static constexpr bool plain = std::same_as<W, T>;
    [[nodiscard]] std::size_t bytes(std::size_t count) const noexcept { return count * sizeof(W); }
    template <queue Q, floating_element A>
    void encode(Q q, view<const A, typename Q::memory_type> masters,
                view<std::byte, typename Q::memory_type> out) const {
        using M = typename Q::memory_type;
        copy(q, masters, view<W, M>(reinterpret_cast<W*>(out.data()), masters.size()));
    }
    template <queue Q>
    void decode(Q q, view<const std::byte, typename Q::memory_type> in, view<T, typename Q::memory_type> out) const {
        using M = typename Q::memory_type;
        copy(q, view<const W, M>(reinterpret_cast<const W*>(in.data()), out.size()), out);
    }
};

}  // namespace tutti::zeroth
