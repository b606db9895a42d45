// float8_wire: weights that travel in eight bits, with a power of two for each block.
// Needs compress/float8; on a CUDA queue include compress/buckets.cuh too.
// Source: Micikevicius et al., FP8 formats for deep learning, 2022; Open Compute Project, Microscaling formats 1.0.
#pragma once

#include <cstddef>  // size_t, byte

#include <tutti/compress/float8.hpp>  // float8
#include <tutti/core/element.hpp>     // floating_element
#include <tutti/core/queue.hpp>       // queue
#include <tutti/core/view.hpp>        // view

namespace tutti::zeroth {

/// Blocks of 8-bit floats, rounded to nearest even.
///
/// Units        with E4M3 and blocks of 32, 1.031 bytes a weight. Of weights above 2^-13 of their block's largest the
///              error is at most 2^-4 of the weight.
/// Determinism  the same bytes and bits on host and device.
/// Cost         one pass each. Errors: compress::float8's.
template <compress::float8_format format = compress::float8_format::e4m3> struct float8_wire {
    static constexpr bool plain = false;
    compress::float8<format> coder{32};

    [[nodiscard]] std::size_t bytes(std::size_t count) const { return count == 0 ? 0 : coder.wire_bytes(whole(count)); }
    template <queue Q, floating_element A>
    void encode(Q q, view<const A, typename Q::memory_type> masters,
                view<std::byte, typename Q::memory_type> out) const {
        if (masters.empty()) { return; }
        const compress::segment s = whole(masters.size());
        coder.encode(q, {&s, 1}, masters, {}, out, {});
    }
    template <queue Q, floating_element T>
    void decode(Q q, view<const std::byte, typename Q::memory_type> in, view<T, typename Q::memory_type> out) const {
        if (out.empty()) { return; }
        const compress::segment s = whole(out.size());
        coder.decode(q, {&s, 1}, in, out);
    }

private:
    [[nodiscard]] static compress::segment whole(std::size_t count) noexcept { return {.level = 8, .rows = count}; }
};

}  // namespace tutti::zeroth
