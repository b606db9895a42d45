// dense_or: a compressor that leaves segments of dense_level as they are and compresses the others, on one wire.
// Needs compress/{compressor, dense}. For reduce_scatter and all_gather, which take one compressor; all_reduce sees to
// dense segments itself.
#pragma once

#include <concepts>     // copyable
#include <cstddef>      // size_t, byte
#include <string_view>  // names of operations
#include <utility>      // move

#include <tutti/compress/compressor.hpp>  // segment, layout
#include <tutti/compress/dense.hpp>       // dense
#include <tutti/core/element.hpp>         // floating_element
#include <tutti/core/view.hpp>            // view

namespace tutti::compress {

/// Scheme, or floats for segments of dense_level.
///
/// Semantics    a compressor. Each segment's wire is that of Scheme or of dense<>, which begin where they would.
/// Not finite   as Scheme and dense<> have it. Determinism, errors: theirs; levels and sizes are looked at before
///              anything is written.
/// Cost         one call of Scheme or dense<> for each run of neighbors of one kind; where there are several runs,
///              decode_add makes one for each run and wire.
template <std::copyable Scheme> class dense_or {
    Scheme scheme_;

public:
    explicit dense_or(Scheme scheme = {}) : scheme_(std::move(scheme)) {}

    [[nodiscard]] std::size_t granularity() const { return scheme_.granularity(); }
    [[nodiscard]] std::size_t wire_bytes(const segment& s) const {
        return s.level == dense_level ? dense<>::wire_bytes(s) : scheme_.wire_bytes(s);
    }

    template <queue Q, floating_element T>
    requires compressor<Scheme, Q, T>
    void encode(Q q, layout all, view<const T, typename Q::memory_type> in,
                view<float, typename Q::memory_type> residual, view<std::byte, typename Q::memory_type> wire,
                draw_key key) const {
        expect("encode", all, in.size(), wire.size(), 1);
        for_runs(all, [&](const auto& x, layout some, std::size_t at, std::size_t bytes) {
            x.encode(q, some, in, residual, wire.sub(at, bytes), key);
        });
    }
    template <queue Q, floating_element T>
    requires compressor<Scheme, Q, T>
    void decode(Q q, layout all, view<const std::byte, typename Q::memory_type> wire,
                view<T, typename Q::memory_type> out, float factor) const {
        expect("decode", all, out.size(), wire.size(), 1);
        for_runs(all, [&](const auto& x, layout some, std::size_t at, std::size_t bytes) {
            x.decode(q, some, wire.sub(at, bytes), out, factor);
        });
    }
    template <queue Q>
    requires compressor<Scheme, Q>
    void decode_add(Q q, layout all, view<const std::byte, typename Q::memory_type> wires, std::size_t count,
                    view<float, typename Q::memory_type> total) const {
        expect("decode_add", all, total.size(), wires.size(), count);
        const std::size_t stride = detail::wire_bytes(*this, all);
        for_runs(all, [&](const auto& x, layout some, std::size_t at, std::size_t bytes) {
            if (bytes == stride) {
                x.decode_add(q, some, wires, count, total);
                return;
            }
            for (std::size_t k = 0; k < count; ++k) {
                x.decode_add(q, some, wires.sub(k * stride + at, bytes), 1, total);
            }
        });
    }

private:
    void expect(std::string_view operation, layout all, std::size_t size, std::size_t wire, std::size_t count) const {
        detail::expect_inside(operation, all, size);
        detail::expect_wires(operation, wire, count, detail::wire_bytes(*this, all));
    }
    /// f(compressor, segments, where their wire begins, its bytes) for each run of one kind.
    template <class F> void for_runs(layout all, F f) const {
        std::size_t at = 0;
        for (std::size_t i = 0; i < all.size();) {
            const bool as_is = all[i].level == dense_level;
            std::size_t bytes = 0;
            std::size_t end = i;
            for (; end < all.size() && (all[end].level == dense_level) == as_is; ++end) {
                bytes += wire_bytes(all[end]);
            }
            const layout some = all.subspan(i, end - i);
            if (as_is) {
                f(dense<>(), some, at, bytes);
            } else {
                f(scheme_, some, at, bytes);
            }
            at += bytes;
            i = end;
        }
    }
};

}  // namespace tutti::compress
