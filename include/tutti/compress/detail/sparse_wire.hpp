// sparse_wire: wires of indices and values, and how they are decoded: shared by the sparsifiers that pick elements by
// their magnitude. Needs compress/compressor and core/run; on a CUDA queue compress/detail/sparse_wire.cuh.
#pragma once

#include <algorithm>    // fill, min
#include <cstddef>      // size_t, byte
#include <cstdint>      // indices
#include <cstring>      // memcpy, memset
#include <string_view>  // names

#include <tutti/compress/compressor.hpp>  // segment, layout
#include <tutti/core/config.hpp>          // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>         // floating_element
#include <tutti/core/error.hpp>           // usage_error
#include <tutti/core/run.hpp>             // run, cost
#include <tutti/core/text.hpp>            // formatted
#include <tutti/core/view.hpp>            // view

namespace tutti::compress::detail {

/// Elements that a segment keeps: level of 10,000, at least one of a segment that has any.
/// Errors  usage_error for a level outside of 1 to 10000, and for a segment that does not begin its tensor.
[[nodiscard]] inline std::size_t kept(std::string_view scheme, const segment& s) {
    if (s.level < 1 || s.level > 10000) {
        throw usage_error(
            formatted("{}: level {} of tensor {}: kept elements in 10,000 are 1 to 10000", scheme, s.level, s.tensor));
    }
    if (s.first != 0) {
        throw usage_error(formatted("{}: a segment of tensor {} begins at its element {}: give the tensor as one",
                                    scheme, s.tensor, s.first));
    }
    const auto level = static_cast<std::size_t>(s.level);
    const std::size_t n = s.size();
    return n == 0 ? 0 : std::max<std::size_t>(1, n / 10000 * level + n % 10000 * level / 10000);
}

// A number of a wire. The device's wires are aligned; there a memcpy would go byte by byte.
template <class W> [[nodiscard]] TUTTI_HOST_DEVICE W load(const std::byte* from) noexcept {
#if defined(__CUDA_ARCH__)
    return *reinterpret_cast<const W*>(from);
#else
    W word{};
    std::memcpy(&word, from, sizeof(W));
    return word;
#endif
}
template <class W> TUTTI_HOST_DEVICE void store(std::byte* to, W word) noexcept {
#if defined(__CUDA_ARCH__)
    *reinterpret_cast<W*>(to) = word;
#else
    std::memcpy(to, &word, sizeof(W));
#endif
}

/// The wire of one segment: with `counted`, 16 bytes of which the first 8 are the number of entries; then `capacity`
/// indices in the segment, of 4 bytes, or of 8 where a segment has more than 2^32 elements; then as many floats; then
/// zeros up to a multiple of 16 bytes. Entries are in ascending order of their indices. Numbers as memory has them:
/// little-endian on all machines that there is a backend for.
struct sparse_format {
    std::size_t capacity = 0;
    bool wide = false;
    bool counted = false;

    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t indices_at() const noexcept {
        return counted && capacity != 0 ? wire_alignment : 0;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t values_at() const noexcept {
        return indices_at() + capacity * (wide ? 8 : 4);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t end() const noexcept { return values_at() + capacity * 4; }
    [[nodiscard]] constexpr std::size_t bytes() const noexcept { return aligned_wire(end()); }

    /// Entries of a wire: what its header says, or what there is room for, if that is less.
    [[nodiscard]] TUTTI_HOST_DEVICE std::size_t entries(const std::byte* wire) const noexcept {
        if (!counted || capacity == 0) { return capacity; }
        const auto count = load<std::uint64_t>(wire);
        return count < capacity ? static_cast<std::size_t>(count) : capacity;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE std::size_t index(const std::byte* wire, std::size_t entry) const noexcept {
        const std::byte* const indices = wire + indices_at();
        return wide ? static_cast<std::size_t>(load<std::uint64_t>(indices + entry * 8))
                    : load<std::uint32_t>(indices + entry * 4);
    }
    [[nodiscard]] TUTTI_HOST_DEVICE float value(const std::byte* wire, std::size_t entry) const noexcept {
        return load<float>(wire + values_at() + entry * 4);
    }
    TUTTI_HOST_DEVICE void put(std::byte* wire, std::size_t entry, std::size_t index, float value) const noexcept {
        std::byte* const indices = wire + indices_at();
        wide ? store(indices + entry * 8, static_cast<std::uint64_t>(index))
             : store(indices + entry * 4, static_cast<std::uint32_t>(index));
        store(wire + values_at() + entry * 4, value);
    }
    /// Ends a wire of `entries` entries: the header, and zeros where there is nothing.
    void finish(std::byte* wire, std::size_t entries) const noexcept {
        if (capacity == 0) { return; }
        if (counted) {
            const std::uint64_t header[2] = {entries, 0};
            std::memcpy(wire, header, sizeof(header));
        }
        std::memset(wire + indices_at() + entries * (wide ? 8 : 4), 0, (capacity - entries) * (wide ? 8 : 4));
        std::memset(wire + values_at() + entries * 4, 0, bytes() - values_at() - entries * 4);
    }
};

/// Calls f(index, value) for the entries of a wire that are inside of the segment; a wire that was damaged on its way
/// may have others.
template <class F> void for_each_entry(sparse_format f, const std::byte* wire, std::size_t n, F use) {
    const std::size_t entries = f.entries(wire);
    for (std::size_t e = 0; e < entries; ++e) {
        if (const std::size_t i = f.index(wire, e); i < n) { use(i, f.value(wire, e)); }
    }
}

/// Refuses wires that do not fit, before anything is written.
template <class C, class T, memory M>
void expect_wires(const C& x, layout all, view<T, M> wires, std::size_t count, std::size_t elements) {
    expect_inside(C::name, all, elements);
    expect_wires(C::name, wires.size(), count, wire_bytes(x, all));
}

/// out = factor * decoded(wire): zeros, and the entries.
template <class C, floating_element T, memory M> struct sparse_decode_operation {
    static constexpr std::string_view name = "sparse_decode";
    C scheme;
    layout all;  ///< read while the call runs
    view<const std::byte, M> wire;
    view<T, M> out;
    float factor;

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(wire.size()) + elements_of(all) * static_cast<double>(sizeof(T)),
                static_cast<double>(wire.size() / 8)};
    }
    void operator()() const {
        const std::byte* from = wire.data();
        for (const segment& s : all) {
            T* const to = out.data() + s.offset;
            std::fill(to, to + s.size(), T(0.0f));
            for_each_entry(scheme.format(s), from, s.size(),
                           [&](std::size_t i, float v) { to[i] = static_cast<T>(factor * v); });
            from += scheme.format(s).bytes();
        }
    }
};

/// sum += the entries of `count` wires, wire by wire.
template <class C, memory M> struct sparse_add_operation {
    static constexpr std::string_view name = "sparse_add";
    C scheme;
    layout all;  ///< read while the call runs
    view<const std::byte, M> wires;
    std::size_t count;
    view<float, M> sum;

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {2.0 * static_cast<double>(wires.size()), static_cast<double>(wires.size() / 8)};
    }
    void operator()() const {
        const std::byte* from = wires.data();
        for (std::size_t w = 0; w < count; ++w) {
            for (const segment& s : all) {
                float* const to = sum.data() + s.offset;
                for_each_entry(scheme.format(s), from, s.size(), [&](std::size_t i, float v) { to[i] += v; });
                from += scheme.format(s).bytes();
            }
        }
    }
};

template <class C, queue Q, class T, class M = typename Q::memory_type>
void sparse_decode(const C& x, Q q, layout all, view<const std::byte, M> wire, view<T, M> out, float factor) {
    expect_wires(x, all, wire, 1, out.size());
    run(q, sparse_decode_operation<C, T, M>{x, all, wire, out, factor});
}
template <class C, queue Q, class M = typename Q::memory_type>
void sparse_add(const C& x, Q q, layout all, view<const std::byte, M> wires, std::size_t count, view<float, M> sum) {
    expect_wires(x, all, wires, count, sum.size());
    run(q, sparse_add_operation<C, M>{x, all, wires, count, sum});
}

}  // namespace tutti::compress::detail
