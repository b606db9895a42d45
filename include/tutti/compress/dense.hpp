// dense: the compressor that leaves every element as it is. What segments of level dense_level go through, what other
// compressors are compared with, and the reference of their tests.
// Needs compress/compressor and core/elementwise; on a CUDA queue core/cuda_run.cuh.
#pragma once

#include <cstddef>      // size_t, byte
#include <string_view>  // names
#include <tuple>        // inputs, outputs
#include <type_traits>  // is_const

#include <tutti/compress/compressor.hpp>   // segment, layout
#include <tutti/compress/detail/flat.hpp>  // convert_scaled
#include <tutti/core/element.hpp>          // floating_element
#include <tutti/core/elementwise.hpp>      // copy, fill
#include <tutti/core/run.hpp>              // run, cost
#include <tutti/core/view.hpp>             // view

namespace tutti::compress {

/// The level of a segment that is not compressed. No compressor has it; all_reduce sends such segments as floats.
inline constexpr int dense_level = 0;

namespace detail {

/// wire[i] = Wire(in[i] + residual[i]); residual[i] = what that rounded off, 0 where the sum is not finite.
template <floating_element T, floating_element Wire, memory M> struct dense_encode_operation {
    static constexpr std::string_view name = "dense_encode";
    view<const T, M> in;
    view<float, M> residual;
    view<Wire, M> wire;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.size_bytes() + 2 * residual.size_bytes() + wire.size_bytes()),
                3.0 * static_cast<double>(in.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(in, residual); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(wire, residual); }
    [[nodiscard]] TUTTI_HOST_DEVICE auto result(std::size_t, T value, float left) const noexcept {
        const float x = static_cast<float>(value) + left;
        const Wire sent = static_cast<Wire>(x);
        const float lost = x - static_cast<float>(sent);
        return std::tuple(sent, lost - lost == 0.0f ? lost : 0.0f);
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

/// total[i] += wire 0 [i] + wire 1 [i] + ...
template <floating_element Wire, memory M> struct dense_add_operation {
    static constexpr std::string_view name = "dense_add";
    view<const Wire, M> first;
    std::size_t count;   // of wires
    std::size_t stride;  // elements from one wire to the next
    view<float, M> total;
    [[nodiscard]] tutti::cost cost() const noexcept {
        const auto wires = static_cast<double>(count);
        return {wires * static_cast<double>(first.size_bytes()) + 2.0 * static_cast<double>(total.size_bytes()),
                wires * static_cast<double>(total.size())};
    }
    [[nodiscard]] constexpr auto inputs() const noexcept { return std::tuple(total); }
    [[nodiscard]] constexpr auto outputs() const noexcept { return std::tuple(total); }
    [[nodiscard]] TUTTI_HOST_DEVICE float result(std::size_t i, float x) const noexcept {
        for (std::size_t k = 0; k < count; ++k) { x += static_cast<float>(first.data()[k * stride + i]); }
        return x;
    }
    void operator()() const { tutti::detail::for_each_element(*this); }
};

}  // namespace detail

/// Sends each element as a Wire: float, or a 16-bit float.
///
/// Semantics    a compressor. Its level is not read: segments of any compressor's layout can be sent through it. With
///              float the residual is zero afterwards; with 16 bits it is what rounding took away, at most half a last
///              place.
/// Not finite   an element arrives as it is, one beyond the range of Wire as an infinity; others are not touched.
/// Determinism  to nearest even, sums in the order of the wires.
/// Cost         sizeof(Wire) bytes an element; one launch a segment, another where its wire is padded.
template <floating_element Wire = float> struct dense {
    static_assert(sizeof(Wire) <= sizeof(float), "residuals are floats: a wire of double keeps nothing that they hold");

    /// A cache line of floats: any cut would do, this one keeps vector instructions aligned.
    [[nodiscard]] static constexpr std::size_t granularity() noexcept { return 32; }
    [[nodiscard]] static constexpr std::size_t wire_bytes(const segment& s) noexcept {
        return aligned_wire(s.size() * sizeof(Wire));
    }

    template <queue Q, floating_element T>
    void encode(Q q, layout all, view<const T, typename Q::memory_type> in,
                view<float, typename Q::memory_type> residual, view<std::byte, typename Q::memory_type> wire,
                draw_key) const {
        using M = typename Q::memory_type;
        expect("dense encode", all, in.size(), wire.size(), 1);
        if (!residual.empty()) { detail::expect_size("dense encode", "residual", residual.size(), in.size()); }
        std::size_t at = 0;
        for (const segment& s : all) {
            const std::size_t places = wire_bytes(s) / sizeof(Wire);
            const auto to = elements(wire, at, places);
            const auto from = in.sub(s.offset, s.size());
            if (residual.empty()) {
                copy(q, from, to.sub(0, s.size()));
            } else {
                run(q, detail::dense_encode_operation<T, Wire, M>{from, residual.sub(s.offset, s.size()),
                                                                  to.sub(0, s.size())});
            }
            if (places != s.size()) { fill(q, to.sub(s.size(), places - s.size()), Wire{}); }
            at += places * sizeof(Wire);
        }
    }

    template <queue Q, floating_element T>
    void decode(Q q, layout all, view<const std::byte, typename Q::memory_type> wire,
                view<T, typename Q::memory_type> out, float factor) const {
        expect("dense decode", all, out.size(), wire.size(), 1);
        std::size_t at = 0;
        for (const segment& s : all) {
            detail::convert_scaled(q, elements(wire, at, s.size()), out.sub(s.offset, s.size()), factor);
            at += wire_bytes(s);
        }
    }

    template <queue Q>
    void decode_add(Q q, layout all, view<const std::byte, typename Q::memory_type> wires, std::size_t count,
                    view<float, typename Q::memory_type> total) const {
        using M = typename Q::memory_type;
        expect("dense decode_add", all, total.size(), wires.size(), count);
        if (count == 0) { return; }
        const std::size_t stride = wires.size() / count / sizeof(Wire);
        std::size_t at = 0;
        for (const segment& s : all) {
            run(q, detail::dense_add_operation<Wire, M>{elements(wires, at, s.size()), count, stride,
                                                        total.sub(s.offset, s.size())});
            at += wire_bytes(s);
        }
    }

private:
    template <class Byte, memory M>
    [[nodiscard]] static auto elements(view<Byte, M> wire, std::size_t at, std::size_t count) {
        using E = std::conditional_t<std::is_const_v<Byte>, const Wire, Wire>;
        return view<E, M>(reinterpret_cast<E*>(wire.sub(at, count * sizeof(Wire)).data()), count);
    }
    static void expect(std::string_view operation, layout all, std::size_t size, std::size_t wire, std::size_t count) {
        detail::expect_inside(operation, all, size);
        detail::expect_wires(operation, wire, count, detail::wire_bytes(dense{}, all));
    }
};

}  // namespace tutti::compress
