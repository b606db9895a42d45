// The device side of the compressors of buckets: one launch for many tensors.
// Needs core/cuda_run, compress/buckets and nvcc.
#pragma once

#include <algorithm>    // min
#include <bit>          // bit_ceil
#include <cstddef>      // size_t
#include <type_traits>  // decay_t

#include <tutti/compress/buckets.hpp>                // schemes
#include <tutti/compress/detail/bucket_kernels.cuh>  // kernels
#include <tutti/core/cuda_run.cuh>                   // start

namespace tutti::compress {

namespace detail {

/// Threads of one bucket, a power of two up to a warp; each has up to `each` chunks, `threads` chunks apart. Ordered sums
/// want 32 threads before a second chunk, to add up as on the host; otherwise four chunks share what a thread does once.
struct bucket_shares {
    unsigned threads, each;
    bucket_shares(std::size_t bucket, bool ordered) {
        const auto chunks = static_cast<unsigned>(bucket / chunk);
        if (ordered) {
            each = chunks <= 32 ? 1 : chunks <= 64 ? 2 : 4;
            threads = std::min(std::bit_ceil(chunks), 32u);
        } else {
            each = chunks < 16 ? 1 : 4;
            threads = std::bit_ceil((chunks + each - 1) / each);
        }
    }
};
template <class C> inline constexpr bool ordered_sums = false;
template <class... Fold> inline constexpr bool ordered_sums<folds<Fold...>> = (... || Fold::ordered);

// Calls begin(table, shares) for the segments that have elements, as many at once as a table holds.
template <std::size_t capacity, class C, class Begin> void for_tables(const C& x, layout all, Begin begin) {
    const bucket_shares shares(x.granularity(), ordered_sums<typename C::folds>);
    segment_table<capacity> table;
    table.buckets = 0;
    table.count = 0;
    std::size_t wire = 0;
    for (const segment& s : all) {
        const wire_shape shape = shape_of(x, s);
        if (shape.buckets != 0) {
            table.of[table.count++] = {table.buckets, s.offset,           s.first,  s.size(),
                                       wire,          wire + shape.codes, s.tensor, x.bits(s)};
            table.buckets += shape.buckets;
        }
        wire += shape.bytes;
        if (table.count == capacity) {
            begin(table, shares);
            table.buckets = 0;
            table.count = 0;
        }
    }
    if (table.count != 0) { begin(table, shares); }
}
template <class C, class Begin> void for_tables(const C& x, layout all, Begin begin) {
    if (all.size() <= few_segments) {
        for_tables<few_segments>(x, all, begin);
    } else {
        for_tables<many_segments>(x, all, begin);
    }
}

template <unsigned each> struct chunks_each {};
// Calls begin(chunks_each<n>()) for the number of chunks that a thread has.
template <class C, class Begin> void for_shares(const bucket_shares& shares, Begin begin) {
    if (shares.each == 1) { return begin(chunks_each<1>()); }
    if constexpr (ordered_sums<typename C::folds>) {
        if (shares.each == 2) { return begin(chunks_each<2>()); }
    }
    begin(chunks_each<4>());
}

}  // namespace detail

/// Determinism  the host's bytes and bits.
/// Cost         one launch for up to 16 segments, one for every 560 beyond; each element is read once. Elements go in
///              packs of 16 bytes where a segment begins at 16 bytes. No host synchronization.
template <class C, class T> void launch(const cuda_queue& q, const encode_buckets<C, T, device_memory>& op) {
    detail::for_tables(op.scheme, op.all, [&](const auto& table, const detail::bucket_shares& shares) {
        const detail::keyed_stream stream(op.key.stream(0, C::purpose));
        detail::for_shares<C>(shares, [&]<unsigned each>(detail::chunks_each<each>) {
            tutti::detail::start(
                q, op.name,
                detail::encode_kernel<each, encode_buckets<C, T, device_memory>, std::decay_t<decltype(table)>>,
                table.buckets * shares.threads, detail::bucket_threads, op, table, stream, shares.threads);
        });
    });
}
template <class C, class T> void launch(const cuda_queue& q, const decode_buckets<C, T, device_memory>& op) {
    detail::for_tables(op.scheme, op.all, [&](const auto& table, const detail::bucket_shares& shares) {
        detail::for_shares<C>(shares, [&]<unsigned each>(detail::chunks_each<each>) {
            tutti::detail::start(
                q, op.name,
                detail::decode_kernel<each, decode_buckets<C, T, device_memory>, std::decay_t<decltype(table)>>,
                table.buckets * shares.threads, detail::bucket_threads, op, table, shares.threads);
        });
    });
}
template <class C> void launch(const cuda_queue& q, const add_buckets<C, device_memory>& op) {
    if (op.count == 0) { return; }
    detail::for_tables(op.scheme, op.all, [&](const auto& table, const detail::bucket_shares& shares) {
        detail::for_shares<C>(shares, [&]<unsigned each>(detail::chunks_each<each>) {
            tutti::detail::start(q, op.name,
                                 detail::add_kernel<each, add_buckets<C, device_memory>, std::decay_t<decltype(table)>>,
                                 table.buckets * shares.threads, detail::bucket_threads, op, table, shares.threads);
        });
    });
}

}  // namespace tutti::compress
