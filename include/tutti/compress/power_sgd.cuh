// The device side of compress/power_sgd: three passes over the matrices, many of them in a launch.
// Needs compress/orthogonalize.cuh and nvcc. No host waits; scratch comes from the queue, so a step can be captured.
// Source: as compress/power_sgd.hpp.
#pragma once

#include <algorithm>  // max
#include <cstddef>    // size_t
#include <span>       // pieces
#include <vector>     // pieces

#include <tutti/compress/detail/batch.cuh>             // batches
#include <tutti/compress/detail/low_rank.hpp>          // operations
#include <tutti/compress/detail/low_rank_kernels.cuh>  // kernels
#include <tutti/compress/orthogonalize.cuh>            // orthogonalize
#include <tutti/compress/power_sgd.hpp>                // what it is the device side of
#include <tutti/core/buffer.hpp>                       // scratch
#include <tutti/core/cuda_queue.hpp>                   // cuda_queue
#include <tutti/core/cuda_run.cuh>                     // fill

namespace tutti::compress::detail {

// Kernels exist for 4, 8, 16 and 32 columns of the factors; more are done 32 at a time. Calls f<width>(pieces, first)
// for each width that has pieces and each such part of them.
template <class Piece, class F> void by_width(const std::vector<Piece>& all, F f) {
    const auto with = [&]<unsigned width>(unsigned above) {
        std::vector<Piece> some;
        unsigned most = 0;
        for (const Piece& p : all) {
            if (p.rank <= above || (p.rank > width && width < 32)) { continue; }
            some.push_back(p);
            most = std::max(most, p.rank);
        }
        for (unsigned first = 0; first < most; first += width) {
            std::erase_if(some, [&](const Piece& p) { return p.rank <= first; });
            f.template operator()<width>(std::span<const Piece>(some), first);
        }
    };
    with.template operator()<4>(0);
    with.template operator()<8>(4);
    with.template operator()<16>(8);
    with.template operator()<32>(16);
}

template <floating_element T> product_piece<T> piece_of(const device_matrix& a) {
    product_piece<T> p{};
    p.left = a.p.data();
    p.right = a.q.data();
    p.own = a.own.data();
    p.poison = a.poison.data();
    p.result = a.wire.data();
    p.rows = a.rows;
    p.cols = a.cols;
    p.rank = static_cast<unsigned>(a.rank);
    p.wide = a.cols % 4 == 0 && packed(p.right) && packed(p.own);
    return p;
}

inline void launch(const cuda_queue& q, const draw_operation<device_memory>& op) {
    start_batches(q, op.name, draw_columns<device_matrix>, 256, op.all,
                  [](const device_matrix& a) { return static_cast<std::size_t>(a.rank); });
}

inline void launch(const cuda_queue& q, const mean_factor_operation<device_memory>& op) {
    start_batches(q, op.name, poison_columns<device_matrix>, 256, op.all,
                  [](const device_matrix& a) { return static_cast<std::size_t>(a.rank); });
    start_batches(
        q, op.name, mean_factors<device_matrix>, 256, op.all,
        [](const device_matrix& a) { return parts_of(a.q.size(), 256); }, op.ranks);
}

template <floating_element T> void start_left(const cuda_queue& q, const std::vector<product_piece<T>>& all) {
    by_width(all, [&]<unsigned width>(std::span<const product_piece<T>> pieces, unsigned first) {
        const auto blocks = [](const product_piece<T>& p) {
            return parts_of(p.rows, rows_per_warp<width> * left_warps);
        };
        if (first == 0) {
            start_batches(q, "power_sgd_left", left_products<width, T>, 32 * left_warps, pieces, blocks, first);
            return;
        }
        // The first part has added the residual: what it left there is read now.
        std::vector<product_piece<T>> plain;
        std::vector<product_piece<float>> compensated;
        for (const product_piece<T>& p : pieces) {
            if (p.x == nullptr) {
                plain.push_back(p);
                continue;
            }
            product_piece<float> c{};
            c.in = p.x;
            c.right = p.right;
            c.result = p.result;
            c.rows = p.rows;
            c.cols = p.cols;
            c.rank = p.rank;
            c.wide = p.wide;
            compensated.push_back(c);
        }
        start_batches(q, "power_sgd_left", left_products<width, T>, 32 * left_warps,
                      std::span<const product_piece<T>>(plain), blocks, first);
        start_batches(
            q, "power_sgd_left", left_products<width, float>, 32 * left_warps,
            std::span<const product_piece<float>>(compensated),
            [](const product_piece<float>& p) { return parts_of(p.rows, rows_per_warp<width> * left_warps); }, first);
    });
}

/// Cost  one launch for each of up to four classes of ranks; from rank 33 on, one more and another read for every 32.
template <floating_element T> void launch(const cuda_queue& q, const left_product_operation<T, device_memory>& op) {
    std::vector<product_piece<T>> all;
    for (const device_matrix& a : op.all) {
        product_piece<T> p = piece_of<T>(a);
        p.in = op.in.data() + a.offset;
        p.wide = p.wide && packed(p.in);
        if (!op.residual.empty()) {
            p.x = op.residual.data() + a.offset;
            p.wide = p.wide && packed(p.x);
        }
        all.push_back(p);
    }
    start_left(q, all);
}

template <floating_element X> void start_right(const cuda_queue& q, device_matrices matrices, const X* x) {
    std::vector<product_piece<X>> all;
    std::vector<partial_piece> sums;
    std::vector<std::size_t> places;
    std::size_t scratch = 0;
    for (const device_matrix& a : matrices) {
        product_piece<X> p = piece_of<X>(a);
        p.in = x + a.offset;
        p.wide = p.wide && packed(p.in);
        all.push_back(p);
        partial_piece s{};
        s.wire = a.wire.data();
        s.own = a.own.data();
        s.size = a.q.size();
        s.chunks = static_cast<unsigned>(parts_of(a.rows, right_rows(p.rank)));
        sums.push_back(s);
        places.push_back(scratch);
        scratch += parts_of(s.chunks * s.size, 4) * 4;
    }
    const buffer<float, cuda_queue> storage(q, scratch);
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].result = storage.data() + places[i];
        sums[i].partial = all[i].result;
    }
    by_width(all, [&]<unsigned width>(std::span<const product_piece<X>> pieces, unsigned first) {
        start_batches(
            q, "power_sgd_right", right_products<width, X>, tile_threads, pieces,
            [](const product_piece<X>& p) {
                return parts_of(p.rows, right_rows(width)) * parts_of(p.cols, tile_columns);
            },
            first);
    });
    start_batches(q, "power_sgd_right", add_partials<partial_piece>, added_elements * added_lanes,
                  std::span<const partial_piece>(sums),
                  [](const partial_piece& s) { return parts_of(s.size, added_elements); });
}

/// Cost  as for the left product, and one launch that adds the partial sums: rank / 256 of the matrices' size, written
///       and read.
template <floating_element T> void launch(const cuda_queue& q, const right_product_operation<T, device_memory>& op) {
    if (op.residual.empty()) {
        start_right(q, op.all, op.in.data());
    } else {
        start_right(q, op.all, static_cast<const float*>(op.residual.data()));
    }
}

/// Cost  one launch.
template <floating_element T> void launch(const cuda_queue& q, const expand_operation<T, device_memory>& op) {
    std::vector<product_piece<T>> all;
    for (const device_matrix& a : op.all) {
        product_piece<T> p = piece_of<T>(a);
        p.in = op.in.data() + a.offset;
        p.out = op.out.data() + a.offset;
        p.wide = p.wide && packed(p.in) && packed(p.out);
        if (!op.residual.empty()) {
            p.x = op.residual.data() + a.offset;
            p.wide = p.wide && packed(p.x);
        }
        all.push_back(p);
    }
    start_batches(
        q, op.name, expand<T>, tile_threads, std::span<const product_piece<T>>(all),
        [](const product_piece<T>& p) { return parts_of(p.rows, expanded_rows) * parts_of(p.cols, tile_columns); });
}

}  // namespace tutti::compress::detail
