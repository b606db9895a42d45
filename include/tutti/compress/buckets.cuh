// The device side of the compressors of buckets: one launch for many tensors.
// Needs core/cuda_run, compress/buckets and nvcc.
#pragma once

#include <algorithm>    // max
#include <bit>          // bit_ceil
#include <cstddef>      // size_t
#include <type_traits>  // bool_constant

#include <tutti/compress/buckets.hpp>               // schemes
#include <tutti/compress/detail/bucket_decode.cuh>  // kernels
#include <tutti/compress/detail/bucket_encode.cuh>  // kernels
#include <tutti/core/cuda_run.cuh>                  // start

namespace tutti::compress {

namespace detail {

/// Threads that encode one bucket, a power of two up to a warp; each has up to `each` chunks, `threads` chunks apart.
/// Ordered sums want 32 threads before a second chunk, to add up as on the host. Otherwise chunks share what a thread
/// does once: `most`, if a bucket has twice as many and their elements leave enough registers.
struct bucket_shares {
    unsigned threads, each;
    bucket_shares(std::size_t bucket, unsigned most, bool ordered, std::size_t element_bytes) {
        const auto chunks = static_cast<unsigned>(bucket / chunk);
        const unsigned shared = ordered || element_bytes > 4 || chunks < 4 ? 1 : chunks < 2 * most ? 2 : most;
        each = std::max(shared, chunks <= 32 ? 1u : chunks <= 64 ? 2u : most);
        threads = std::bit_ceil((chunks + each - 1) / each);
    }
};

/// Threads that decode one bucket.
template <class T> unsigned decoding_threads(std::size_t bucket) {
    return std::bit_ceil(static_cast<unsigned>((bucket + decoded_each<T> - 1) / decoded_each<T>));
}

// Calls begin(table) for the segments that have elements, as many at once as a table holds.
template <class C, class Begin> void for_tables(const C& x, layout all, Begin begin) {
    segment_table table;
    std::size_t wire = 0;
    for (const segment& s : all) {
        const wire_shape shape = shape_of(x, s);
        if (shape.buckets != 0) {
            table.of[table.count++] = {table.buckets, s.offset,           s.first,  s.size(),
                                       wire,          wire + shape.codes, s.tensor, x.bits(s)};
            table.buckets += shape.buckets;
        }
        wire += shape.bytes;
        if (table.count == table_segments) {
            begin(table);
            table.buckets = 0;
            table.count = 0;
        }
    }
    if (table.count != 0) { begin(table); }
}

}  // namespace detail

/// Determinism  the host's bytes and bits.
/// Cost         one launch for every 64 segments; each element is read once. Elements go in packs of 16 bytes where a
///              segment begins at 16 bytes. No host synchronization.
template <class C, class T> void launch(const cuda_queue& q, const encode_buckets<C, T, device_memory>& op) {
    using operation = encode_buckets<C, T, device_memory>;
    const detail::keyed_stream stream(op.key.stream(0, C::purpose));
    const auto encode = [&]<bool feedback, bool draws>(std::bool_constant<feedback>, std::bool_constant<draws>) {
        constexpr unsigned most = detail::most_chunks<C, T, feedback>;
        const detail::bucket_shares shares(op.scheme.granularity(), most, detail::ordered_sums<typename C::folds>,
                                           sizeof(T));
        detail::for_tables(op.scheme, op.all, [&](const detail::segment_table& table) {
            const auto begin = [&](auto kernel) {
                tutti::detail::start(q, op.name, kernel, table.buckets * shares.threads, detail::bucket_threads, op,
                                     table, stream, shares.threads);
            };
            switch (shares.each) {
            case 1: return begin(detail::encode_kernel<1, feedback, draws, operation>);
            case 2: return begin(detail::encode_kernel<2, feedback, draws, operation>);
            default: return begin(detail::encode_kernel<most, feedback, draws, operation>);
            }
        });
    };
    const auto encode_drawing = [&](auto feedback) {
        op.scheme.mode() == rounding::stochastic ? encode(feedback, std::true_type())
                                                 : encode(feedback, std::false_type());
    };
    op.residual.empty() ? encode_drawing(std::false_type()) : encode_drawing(std::true_type());
}
template <class C, class T> void launch(const cuda_queue& q, const decode_buckets<C, T, device_memory>& op) {
    const unsigned threads = detail::decoding_threads<T>(op.scheme.granularity());
    detail::for_tables(op.scheme, op.all, [&](const detail::segment_table& table) {
        tutti::detail::start(q, op.name, detail::decode_kernel<decode_buckets<C, T, device_memory>>,
                             table.buckets * threads, detail::bucket_threads, op, table, threads);
    });
}
template <class C> void launch(const cuda_queue& q, const add_buckets<C, device_memory>& op) {
    if (op.count == 0) { return; }
    const unsigned threads = detail::decoding_threads<float>(op.scheme.granularity());
    const std::size_t stride = op.wires.size() / op.count;
    detail::for_tables(op.scheme, op.all, [&](const detail::segment_table& table) {
        tutti::detail::start(q, op.name, detail::add_kernel<add_buckets<C, device_memory>>, table.buckets * threads,
                             detail::bucket_threads, op, table, stride, threads);
    });
}

}  // namespace tutti::compress
