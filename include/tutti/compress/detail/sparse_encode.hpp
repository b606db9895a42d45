// sparse_encode: from a segment to its sparse wire and its residual, for schemes that say which elements are sent.
// Needs compress/detail/magnitude and compress/detail/sparse_wire; on a CUDA queue compress/detail/sparse_encode.cuh.
#pragma once

#include <algorithm>    // max
#include <cstddef>      // size_t, byte
#include <cstdint>      // grades
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
        } else if (m != infinite_magnitude) {
            return;
        }
        if (owed != nullptr) { owed[i] = 0; }
    });
    f.finish(wire, entries);
}

/// The host's search. A sample says where to look; where an exact scheme is led too high, it looks at everything.
template <class C, class At>
[[nodiscard]] selection select(grade_search& search, const At& at, std::size_t n, std::size_t k, random_stream sample) {
    selection found;
    const std::uint32_t lowest = search.estimate(at, n, k, sample);
    const bool enough = search.first(at, n, C::exact ? lowest : std::max<std::uint32_t>(1, lowest), k, found);
    if constexpr (C::exact) {
        if (!enough) { static_cast<void>(search.first(at, n, 0, k, found)); }
        search.refine(at, n, found);
    }
    found.quota += C::capacity(k) - k;
    return found;
}

/// Of C: name, purpose, format(segment), capacity(k), and whether it is exact: takes the k largest,
/// instead of what the first digit tells apart.
template <class C, floating_element T, memory M> struct sparse_encode_operation {
    static constexpr std::string_view name = C::name;
    C scheme;
    layout all;  ///< read while the call runs
    view<const T, M> in;
    view<float, M> residual;
    view<std::byte, M> wire;
    draw_key key;

    [[nodiscard]] tutti::cost cost() const noexcept {
        // One pass, which is what a device needs.
        const double each = static_cast<double>(sizeof(T)) + (residual.empty() ? 0 : 8);
        return {elements_of(all) * each + static_cast<double>(wire.size()), elements_of(all)};
    }
    [[nodiscard]] random_stream sample(const segment& s) const noexcept { return key.stream(s.tensor, C::purpose); }

    void operator()() const {
        grade_search search;
        std::byte* to = wire.data();
        for (const segment& s : all) {
            const sparse_format f = scheme.format(s);
            const T* const from = in.data() + s.offset;
            const auto encode_from = [&](const auto& at, float* owed) {
                const selection found = select<C>(search, at, s.size(), kept(C::name, s), sample(s));
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

template <class C, queue Q, class T, class M = typename Q::memory_type>
void sparse_encode(const C& x, Q q, layout all, view<T, M> in, view<float, M> residual, view<std::byte, M> wire,
                   draw_key key) {
    expect_wires(x, all, wire, 1, in.size());
    if (!residual.empty()) { expect_size(C::name, "the residual", residual.size(), in.size()); }
    run(q, sparse_encode_operation<C, std::remove_const_t<T>, M>{x, all, in, residual, wire, key});
}

}  // namespace tutti::compress::detail
