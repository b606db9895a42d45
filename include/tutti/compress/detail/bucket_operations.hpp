// The operations of the compressors of buckets: what encode, decode and decode_add run; one loop, one wire.
// Needs compress/compressor; on a CUDA queue compress/buckets.cuh. A scheme says what is measured of a bucket and how
// an element is coded by it.
#pragma once

#include <algorithm>    // min
#include <cmath>        // fabs
#include <concepts>     // scheme
#include <cstddef>      // size_t, byte
#include <cstdint>      // codes
#include <cstring>      // memcpy
#include <string_view>  // names

#include <tutti/compress/compressor.hpp>    // segments, keys
#include <tutti/compress/detail/bits.hpp>   // packing
#include <tutti/compress/detail/draws.hpp>  // rounding
#include <tutti/compress/detail/folds.hpp>  // what is measured
#include <tutti/core/config.hpp>            // TUTTI_EXACT
#include <tutti/core/element.hpp>           // master_t
#include <tutti/core/exact.hpp>             // products and sums rounded separately
#include <tutti/core/run.hpp>               // cost

namespace tutti::compress {

/// What makes a compressor of buckets. Elements are coded as floats; a double is rounded to one, and what that loses is
/// part of the error.
///
/// Semantics
///   granularity()   the bucket: elements measured together; mode(): how they are rounded. Both from bucketed.
///   bits(s)         of a code of segment s, 1 to 8. Throws usage_error for a level that the scheme does not have.
///   folds           detail::folds of what is measured; measured(results, n, bits) makes of it what the wire says of a
///                   bucket of n elements: a `meta` of 1, 4 or 8 bytes.
///   coder(m, bits)  the arithmetic of that bucket: code(x), code(x, 16 random bits), value(code) for any code, and
///                   finite(): false where all is to decode to NaN.
///   purpose         of its random numbers. names: of encode, decode and decode_add.
template <class C>
concept bucket_scheme = std::copyable<C> &&
    requires(const C& x, const segment& s, std::size_t n, unsigned bits, typename C::meta m,
             typename C::folds::results measured, std::uint32_t draw) {
    { x.granularity() } -> std::same_as<std::size_t>;
    { x.mode() } -> std::same_as<rounding>;
    { x.bits(s) } -> std::same_as<unsigned>;
    { x.measured(measured, n, bits) } -> std::same_as<typename C::meta>;
    { x.coder(m, bits).code(1.0f, draw) } -> std::same_as<std::uint32_t>;
    { x.coder(m, bits).code(1.0f) } -> std::same_as<std::uint32_t>;
    { x.coder(m, bits).value(draw) } -> std::same_as<float>;
    { x.coder(m, bits).finite() } -> std::same_as<bool>;
    { C::purpose } -> std::convertible_to<std::uint32_t>;
    { C::names[2] } -> std::convertible_to<std::string_view>;
};

namespace detail {

inline constexpr std::size_t largest_bucket = 1024;

/// Where things are in the wire of a segment: one meta a bucket, zeros up to a multiple of 16 bytes, `bits` bytes for
/// every eight elements, zeros up to a multiple of 16. Buckets are multiples of eight: their codes begin at bytes.
struct wire_shape {
    std::size_t buckets, meta_bytes, code_bytes, codes, bytes;
    TUTTI_HOST_DEVICE constexpr wire_shape(std::size_t elements, std::size_t bucket, std::size_t meta,
                                           unsigned bits) noexcept
        : buckets(elements / bucket + (elements % bucket != 0 ? 1 : 0))
        , meta_bytes(buckets * meta)
        , code_bytes(chunks_of(elements) * bits)
        , codes(aligned_wire(meta_bytes))
        , bytes(codes + aligned_wire(code_bytes)) {}
};
template <class C> [[nodiscard]] wire_shape shape_of(const C& x, const segment& s) {
    return {s.size(), x.granularity(), sizeof(typename C::meta), x.bits(s)};
}

}  // namespace detail

/// The wire of in + residual; the residual becomes what was lost.
template <bucket_scheme C, floating_element T, memory M> struct encode_buckets {
    static constexpr std::string_view name = C::names[0];
    using real = master_t<T>;
    C scheme;
    layout all;
    view<const T, M> in;
    view<float, M> residual;  ///< empty: none
    view<std::byte, M> wire;
    draw_key key;

    [[nodiscard]] tutti::cost cost() const {
        const double n = detail::elements_of(all);
        const double residuals = residual.empty() ? 0 : 2 * sizeof(float);
        return {n * (sizeof(T) + residuals) + static_cast<double>(wire.size()), 12 * n};
    }

    void operator()() const {
        std::size_t at = 0;
        for (const segment& s : all) {
            const detail::wire_shape shape = detail::shape_of(scheme, s);
            const random_stream stream = key.stream(s.tensor, C::purpose);
            std::byte* const to = wire.data() + at;
            for (std::size_t b = 0; b < shape.buckets; ++b) { encode_bucket(s, b, scheme.bits(s), stream, to, shape); }
            if (shape.bytes != 0) {
                std::memset(to + shape.meta_bytes, 0, shape.codes - shape.meta_bytes);
                std::memset(to + shape.codes + shape.code_bytes, 0, shape.bytes - shape.codes - shape.code_bytes);
            }
            at += shape.bytes;
        }
    }

private:
    void encode_bucket(const segment& s, std::size_t b, unsigned bits, const random_stream& stream, std::byte* to,
                       const detail::wire_shape& shape) const {
        const std::size_t first = b * scheme.granularity();
        const std::size_t n = std::min(scheme.granularity(), s.size() - first);
        const std::size_t chunks = detail::chunks_of(n);
        float* const left = residual.empty() ? nullptr : residual.data() + s.offset + first;
        alignas(64) real x[detail::largest_bucket];
        load(in.data() + s.offset + first, left, x, n);
        const auto meta = scheme.measured(C::folds::of(x, n), n, bits);
        std::memcpy(to + b * sizeof(meta), &meta, sizeof(meta));
        const auto coder = scheme.coder(meta, bits);
        alignas(64) std::uint8_t codes[detail::largest_bucket];
        if (!coder.finite()) {
            std::memset(codes, 0, detail::chunk * chunks);
            if (left != nullptr) { keep_finite(left, n); }
        } else {
            if (scheme.mode() == rounding::stochastic) {
                alignas(64) std::uint16_t halves[detail::largest_bucket];
                detail::draw_halves(stream, (s.first + first) / detail::chunk, chunks, halves);
                draw_codes(coder, x, halves, codes, n);
            } else {
                round_codes(coder, x, codes, n);
            }
            for (std::size_t i = n; i < detail::chunk * chunks; ++i) { codes[i] = 0; }
            if (left != nullptr) { keep_rest(coder, x, codes, left, n); }
        }
        detail::pack(codes, chunks, bits);
        std::memcpy(to + shape.codes + first / detail::chunk * bits, codes, chunks * bits);
    }
    TUTTI_EXACT static void load(const T* from, const float* left, real* x, std::size_t n) {
        TUTTI_EXACT_BODY
        if (left == nullptr) {
            TUTTI_INDEPENDENT
            for (std::size_t i = 0; i < n; ++i) { x[i] = static_cast<real>(from[i]); }
        } else {
            TUTTI_INDEPENDENT
            for (std::size_t i = 0; i < n; ++i) { x[i] = static_cast<real>(from[i]) + static_cast<real>(left[i]); }
        }
    }
    template <class Coder>
    TUTTI_EXACT static void draw_codes(const Coder coder, const real* x, const std::uint16_t* halves,
                                       std::uint8_t* codes, std::size_t n) {
        TUTTI_EXACT_BODY
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) {
            codes[i] = static_cast<std::uint8_t>(coder.code(static_cast<float>(x[i]), halves[i]));
        }
    }
    template <class Coder>
    TUTTI_EXACT static void round_codes(const Coder coder, const real* x, std::uint8_t* codes, std::size_t n) {
        TUTTI_EXACT_BODY
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) {
            codes[i] = static_cast<std::uint8_t>(coder.code(static_cast<float>(x[i])));
        }
    }
    template <class Coder>
    TUTTI_EXACT static void keep_rest(const Coder coder, const real* x, const std::uint8_t* codes, float* left,
                                      std::size_t n) {
        TUTTI_EXACT_BODY
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) {
            left[i] = static_cast<float>(x[i] - static_cast<real>(coder.value(codes[i])));
        }
    }
    // Nothing of this bucket is sent: its residual stays, and loses what is not finite.
    static void keep_finite(float* left, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) { left[i] = std::fabs(left[i]) < detail::infinite_from ? left[i] : 0.0f; }
    }
};

namespace detail {

// The codes of chunks of one segment's wire, one a byte.
inline void read_codes(const std::byte* from, std::uint8_t* codes, std::size_t chunks, unsigned bits) {
    std::uint8_t packed[largest_bucket + chunk];
    std::memcpy(packed, from, chunks * bits);
    std::memset(packed + chunks * bits, 0, chunk);
    unpack(packed, codes, chunks, bits);
}

template <class C> [[nodiscard]] auto coder_at(const C& x, const std::byte* wire, std::size_t b, unsigned bits) {
    typename C::meta meta;
    std::memcpy(&meta, wire + b * sizeof(meta), sizeof(meta));
    return x.coder(meta, bits);
}

}  // namespace detail

/// out = factor * decoded(wire).
template <bucket_scheme C, floating_element T, memory M> struct decode_buckets {
    static constexpr std::string_view name = C::names[1];
    using real = master_t<T>;
    C scheme;
    layout all;
    view<const std::byte, M> wire;
    view<T, M> out;
    float factor;

    [[nodiscard]] tutti::cost cost() const {
        const double n = detail::elements_of(all);
        return {n * sizeof(T) + static_cast<double>(wire.size()), 4 * n};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE real scaled(float value) const noexcept {
        return (exact(static_cast<real>(factor)) * exact(static_cast<real>(value))).value;
    }
    [[nodiscard]] TUTTI_HOST_DEVICE T result(float value) const noexcept { return static_cast<T>(scaled(value)); }
    void operator()() const {
        const std::byte* from = wire.data();
        for (const segment& s : all) {
            const detail::wire_shape shape = detail::shape_of(scheme, s);
            const unsigned bits = scheme.bits(s);
            for (std::size_t b = 0; b < shape.buckets; ++b) {
                const std::size_t first = b * scheme.granularity();
                const std::size_t n = std::min(scheme.granularity(), s.size() - first);
                alignas(64) std::uint8_t codes[detail::largest_bucket];
                detail::read_codes(from + shape.codes + first / detail::chunk * bits, codes, detail::chunks_of(n),
                                   bits);
                write(detail::coder_at(scheme, from, b, bits), codes, out.data() + s.offset + first, n);
            }
            from += shape.bytes;
        }
    }

private:
    template <class Coder>
    TUTTI_EXACT void write(const Coder coder, const std::uint8_t* codes, T* to, std::size_t n) const {
        TUTTI_EXACT_BODY
        const decode_buckets k = *this;
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) { to[i] = k.result(coder.value(codes[i])); }
    }
};

/// sum += decoded(wire 0) + decoded(wire 1) + ..., in that order.
template <bucket_scheme C, memory M> struct add_buckets {
    static constexpr std::string_view name = C::names[2];
    C scheme;
    layout all;
    view<const std::byte, M> wires;
    std::size_t count;
    view<float, M> sum;

    [[nodiscard]] tutti::cost cost() const {
        const double n = detail::elements_of(all);
        return {2 * n * sizeof(float) + static_cast<double>(wires.size()), 4 * n * static_cast<double>(count)};
    }
    void operator()() const {
        if (count == 0) { return; }
        const std::size_t stride = wires.size() / count;
        const std::byte* from = wires.data();
        for (const segment& s : all) {
            const detail::wire_shape shape = detail::shape_of(scheme, s);
            const unsigned bits = scheme.bits(s);
            for (std::size_t b = 0; b < shape.buckets; ++b) {
                const std::size_t first = b * scheme.granularity();
                const std::size_t n = std::min(scheme.granularity(), s.size() - first);
                for (std::size_t w = 0; w < count; ++w) {
                    alignas(64) std::uint8_t codes[detail::largest_bucket];
                    const std::byte* const one = from + w * stride;
                    detail::read_codes(one + shape.codes + first / detail::chunk * bits, codes, detail::chunks_of(n),
                                       bits);
                    add(detail::coder_at(scheme, one, b, bits), codes, sum.data() + s.offset + first, n);
                }
            }
            from += shape.bytes;
        }
    }

private:
    template <class Coder>
    TUTTI_EXACT static void add(const Coder coder, const std::uint8_t* codes, float* to, std::size_t n) {
        TUTTI_EXACT_BODY
        TUTTI_INDEPENDENT
        for (std::size_t i = 0; i < n; ++i) { to[i] = (exact(to[i]) + exact(coder.value(codes[i]))).value; }
    }
};

}  // namespace tutti::compress
