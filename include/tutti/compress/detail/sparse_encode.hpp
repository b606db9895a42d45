// sparse_encode: from a segment to its sparse wire and its residual, for schemes that say which elements are sent.
// Needs compress/detail/magnitude and compress/detail/sparse_wire; on a CUDA queue compress/detail/sparse_encode.cuh.
#pragma once

#include <cstddef>      // size_t, byte
#include <string_view>  // names

#include <tutti/compress/compressor.hpp>          // layout, draw_key
#include <tutti/compress/detail/magnitude.hpp>    // selection
#include <tutti/compress/detail/sparse_wire.hpp>  // sparse_format
#include <tutti/core/element.hpp>                 // floating_element
#include <tutti/core/run.hpp>                     // run, cost
#include <tutti/core/view.hpp>                    // view

namespace tutti::compress::detail {

/// Writes what is selected; what was sent, or is not finite, is owed no longer.
template <class At>
void write_selected(const At& at, std::size_t n, selection s, sparse_format f, float* owed, std::byte* wire) {
    std::size_t entries = 0;
    for_each_from(at, n, s.grade << s.shift, [&](std::size_t i, std::uint32_t m) {
        const bool tied = m >> s.shift == s.grade;
        if (!tied || s.quota > 0) {
            s.quota -= tied ? 1 : 0;
            f.put(wire, entries++, i, sent_value(at(i)));
        } else if (m != not_finite) {
            return;
        }
        if (owed != nullptr) { owed[i] = 0; }
    });
    f.finish(wire, entries);
}

/// X says which elements are sent: X::select(search, at, n, k, stream), and how: scheme.format(segment).
template <class X, floating_element T, memory M> struct sparse_encode_operation {
    static constexpr std::string_view name = X::name;
    X scheme;
    layout all;  ///< read while the call runs
    view<const T, M> in;
    view<float, M> residual;
    view<std::byte, M> wire;
    draw_key key;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double elements = elements_of(all);
        const auto each = static_cast<double>(residual.empty() ? X::passes * sizeof(T) : sizeof(T) + 4 + X::passes * 4);
        return {elements * each + static_cast<double>(wire.size()), elements * X::passes};
    }
    [[nodiscard]] random_stream sample(const segment& s) const noexcept { return key.stream(s.tensor, X::purpose); }

    void operator()() const {
        grade_search search;
        std::byte* to = wire.data();
        for (const segment& s : all) {
            const sparse_format f = scheme.format(s);
            const T* const from = in.data() + s.offset;
            const auto encode_from = [&](const auto& at, float* owed) {
                const selection found = X::select(search, at, s.size(), kept(X::name, s), sample(s));
                write_selected(at, s.size(), found, f, owed, to);
            };
            if (s.size() == 0) {
            } else if (residual.empty()) {
                encode_from([from](std::size_t i) { return formed(from[i]); }, nullptr);
            } else {
                float* const owed = residual.data() + s.offset;
                for (std::size_t i = 0; i < s.size(); ++i) { owed[i] = formed(from[i], owed[i]); }
                encode_from([owed](std::size_t i) { return owed[i]; }, owed);
            }
            to += f.bytes();
        }
    }
};

template <class X, queue Q, class T, class M = typename Q::memory_type>
void sparse_encode(const X& x, Q q, layout all, view<T, M> in, view<float, M> residual, view<std::byte, M> wire,
                   draw_key key) {
    expect_wires(x, all, wire, 1, in.size());
    if (!residual.empty()) { expect_size(X::name, "the residual", residual.size(), in.size()); }
    run(q, sparse_encode_operation<X, std::remove_const_t<T>, M>{x, all, in, residual, wire, key});
}

}  // namespace tutti::compress::detail
