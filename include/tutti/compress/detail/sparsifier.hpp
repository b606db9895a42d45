// sparsifier: the calls that schemes of sparse wires have in common. A scheme says what it keeps and how its wire looks.
// Needs compress/detail/{sparse_encode,sparse_wire}.
#pragma once

#include <cstddef>  // size_t, byte

#include <tutti/compress/compressor.hpp>            // segment, layout, draw_key
#include <tutti/compress/detail/sparse_encode.hpp>  // encoding
#include <tutti/compress/detail/sparse_wire.hpp>    // the wire
#include <tutti/core/element.hpp>                   // floating_element
#include <tutti/core/queue.hpp>                     // queue
#include <tutti/core/view.hpp>                      // view

namespace tutti::compress::detail {

/// C has a name, purpose, exact, capacity(k) and format(segment).
template <class C> struct sparsifier {
    [[nodiscard]] static constexpr std::size_t granularity() noexcept { return 0; }
    /// Elements that the level asks for.
    [[nodiscard]] static std::size_t kept(const segment& s) { return detail::kept(C::name, s); }
    [[nodiscard]] static std::size_t wire_bytes(const segment& s) { return C::format(s).bytes(); }

    template <queue Q, class T>
    void encode(Q q, layout all, view<T, typename Q::memory_type> in, view<float, typename Q::memory_type> residual,
                view<std::byte, typename Q::memory_type> wire, draw_key key) const {
        sparse_encode(static_cast<const C&>(*this), q, all, in, residual, wire, key);
    }
    template <queue Q, floating_element T>
    void decode(Q q, layout all, view<const std::byte, typename Q::memory_type> wire,
                view<T, typename Q::memory_type> out, float factor) const {
        sparse_decode(static_cast<const C&>(*this), q, all, wire, out, factor);
    }
    template <queue Q>
    void decode_add(Q q, layout all, view<const std::byte, typename Q::memory_type> wires, std::size_t count,
                    view<float, typename Q::memory_type> sum) const {
        sparse_add(static_cast<const C&>(*this), q, all, wires, count, sum);
    }
};

}  // namespace tutti::compress::detail
