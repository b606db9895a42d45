// buckets: what the compressors have in common that code the elements of a bucket by a few numbers measured of it.
// Needs compress/compressor; on a CUDA queue compress/buckets.cuh. The schemes are in quantize, sign, ternary, natural
// and float8.
#pragma once

#include <cstddef>      // size_t, byte
#include <cstdint>      // addresses
#include <string_view>  // names
#include <type_traits>  // remove_const_t

#include <tutti/compress/compressor.hpp>                // segments, keys
#include <tutti/compress/detail/bucket_operations.hpp>  // operations
#include <tutti/core/config.hpp>                        // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>                       // floating_element
#include <tutti/core/error.hpp>                         // usage_error
#include <tutti/core/run.hpp>                           // run
#include <tutti/core/text.hpp>                          // formatted
#include <tutti/core/view.hpp>                          // views

namespace tutti::compress {

/// The calls of a compressor, for a scheme C that derives from bucketed<C>.
///
/// Semantics    as concept compressor says. Whatever is measured of a bucket that holds a NaN, an infinity or a
///              magnitude from 2^126 on: the bucket decodes to NaN and its residual stays as it was.
/// Shapes       a wire, and each of the wires of decode_add, is detail::wire_bytes long and begins at a multiple of 16
///              bytes. Tensors of at most 2^37 elements.
/// Determinism  the same bytes and bits on host and device, except which NaN a NaN is. They depend on neither the
///              layout's other segments nor on where a tensor was cut.
/// Cost         one pass over the elements each; on a device one launch for every 64 segments.
/// Errors       usage_error for sizes that do not fit, a bucket or a level that the scheme does not have, a segment
///              that does not begin at a bucket, a wire that does not begin at 16 bytes; before anything is written.
template <class C> class bucketed {
    std::size_t bucket_;
    rounding mode_;

public:
    /// Errors  usage_error for a bucket that is not a multiple of 8 from 8 to 1024.
    constexpr bucketed(std::size_t bucket, rounding mode) : bucket_(bucket), mode_(mode) {
        if (bucket == 0 || bucket % detail::chunk != 0 || bucket > detail::largest_bucket) {
            throw usage_error(formatted("{}: a bucket of {} elements; it must be a multiple of {}, at most {}",
                                        C::names[0], bucket, detail::chunk, detail::largest_bucket));
        }
    }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr std::size_t granularity() const noexcept { return bucket_; }
    [[nodiscard]] TUTTI_HOST_DEVICE constexpr rounding mode() const noexcept { return mode_; }

    [[nodiscard]] std::size_t wire_bytes(const segment& s) const { return detail::shape_of(self(), s).bytes; }

    template <queue Q, class From>
    void encode(Q q, layout all, view<From, typename Q::memory_type> in, view<float, typename Q::memory_type> residual,
                view<std::byte, typename Q::memory_type> wire, draw_key key) const {
        using T = std::remove_const_t<From>;
        expect_fitting(C::names[0], all, in.size(), wire.data(), wire.size(), 1);
        if (!residual.empty()) { detail::expect_size(C::names[0], "residual", residual.size(), in.size()); }
        run(q, encode_buckets<C, T, typename Q::memory_type>{self(), all, in, residual, wire, key});
    }
    template <queue Q, floating_element T>
    void decode(Q q, layout all, view<const std::byte, typename Q::memory_type> wire,
                view<T, typename Q::memory_type> out, float factor = 1) const {
        expect_fitting(C::names[1], all, out.size(), wire.data(), wire.size(), 1);
        run(q, decode_buckets<C, T, typename Q::memory_type>{self(), all, wire, out, factor});
    }
    template <queue Q>
    void decode_add(Q q, layout all, view<const std::byte, typename Q::memory_type> wires, std::size_t count,
                    view<float, typename Q::memory_type> sum) const {
        expect_fitting(C::names[2], all, sum.size(), wires.data(), wires.size(), count);
        run(q, add_buckets<C, typename Q::memory_type>{self(), all, wires, count, sum});
    }

private:
    [[nodiscard]] const C& self() const noexcept { return static_cast<const C&>(*this); }
    void expect_fitting(std::string_view operation, layout all, std::size_t elements, const void* wire,
                        std::size_t bytes, std::size_t count) const {
        detail::expect_inside(operation, all, elements);
        for (const segment& s : all) {
            if (s.first % bucket_ != 0) {
                throw usage_error(formatted("{}: a segment begins at element {} of tensor {}, which is not a multiple "
                                            "of the bucket, {}",
                                            operation, s.first, s.tensor, bucket_));
            }
        }
        detail::expect_wires(operation, bytes, count, detail::wire_bytes(self(), all));
        if (reinterpret_cast<std::uintptr_t>(wire) % wire_alignment != 0) {
            throw usage_error(
                formatted("{}: the wire does not begin at a multiple of {} bytes", operation, wire_alignment));
        }
    }
};

namespace detail {

/// The bits of a scheme that has one width: a level of 0 means it too.
[[nodiscard]] inline unsigned only_width(std::string_view scheme, const segment& s, int bits) {
    if (s.level != 0 && s.level != bits) {
        throw usage_error(
            formatted("{}: tensor {} has level {}; bits are {}, or 0 for the same", scheme, s.tensor, s.level, bits));
    }
    return static_cast<unsigned>(bits);
}

}  // namespace detail

}  // namespace tutti::compress
