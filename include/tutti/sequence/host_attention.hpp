// host_attention: attention of a block on the host, forward and backward, in tiles of query rows.
// Needs sequence/block_attention and sequence/products. A tile's scores are kept for one head at a time, and backward
// computes them again. Source: Dao et al. 2022, arXiv:2205.14135.
#pragma once

#include <algorithm>  // min, fill
#include <cmath>      // exp, log
#include <concepts>   // same_as
#include <cstddef>    // size_t
#include <limits>     // infinity

#include <tutti/core/buffer.hpp>               // scratch
#include <tutti/core/element.hpp>              // floating_element
#include <tutti/core/queue.hpp>                // host_queue
#include <tutti/sequence/block_attention.hpp>  // forward_block, backward_block
#include <tutti/sequence/products.hpp>         // plain_products

namespace tutti::sequence {

/// The block kernel of host queues.
///
/// Semantics    as block_attention says; a query whose scores are all -inf counts as one that sees no key.
/// Units        16-bit T is widened to float tile by tile; all products and sums are in accumulator_t<T>.
/// Determinism  the same block gives the same bits as far as Products does.
/// Cost         4 flops for each of width, query head and pair of query and key up to the last row of its tile forward,
///              10 backward. Scratch: tile rows x keys, twice backward; for 16-bit T also the keys and values of a
///              head, twice backward.
template <floating_element T, class Products = plain_products> class host_attention {
    using P = accumulator_t<T>;
    static constexpr bool widens = !std::same_as<T, P>;
    static constexpr std::size_t tile = 32;

    // By use: a tile's probabilities and their gradients; widened keys, values, queries, gradients of out.
    buffer<P> scores_, score_gradients_, keys_, values_, queries_, d_outs_;

public:
    using element_type = T;
    using queue_type = host_queue;

    void forward(host_queue q, const forward_block<T, host_memory>& b) {
        const std::size_t keys = b.key.tokens;
        for (std::size_t h = 0; h < b.query.heads; ++h) {
            const std::size_t source = h / (b.query.heads / b.key.heads);
            if (h % (b.query.heads / b.key.heads) == 0) { widen_keys(q, b.key, b.value, source); }
            const matrix<const P> key = keys_of(b.key, source, keys_);
            const matrix<const P> value = keys_of(b.value, source, values_);
            for (std::size_t first = 0; first < b.query.tokens; first += tile) {
                const std::size_t rows = std::min(tile, b.query.tokens - first);
                const std::size_t seen = b.seen.keys_of(first + rows - 1, keys);
                const matrix<P> out = rows_of(b.out, h, first, rows);
                const matrix<P> p = scratch(q, scores_, rows, seen);
                Products::multiply(factor<P>{widened(q, b.query, h, first, rows, queries_), false},
                                   factor<P>{key.top(seen), true}, p, static_cast<P>(b.scale), P{0});
                for (std::size_t i = 0; i < rows; ++i) {
                    *b.log_sum_exp.at(first + i, h) = softmax(p.row(i), b.seen.keys_of(first + i, keys), seen);
                }
                Products::multiply(factor<P>{p, false}, factor<P>{value.top(seen), false}, out, P{1}, P{0});
            }
        }
    }

    void backward(host_queue q, const backward_block<T, host_memory>& b) {
        const std::size_t keys = b.key.tokens;
        const P scale = static_cast<P>(b.scale);
        for (std::size_t h = 0; h < b.query.heads; ++h) {
            const std::size_t source = h / (b.query.heads / b.key.heads);
            if (h % (b.query.heads / b.key.heads) == 0) { widen_keys(q, b.key, b.value, source); }
            const matrix<const P> key = keys_of(b.key, source, keys_);
            const matrix<const P> value = keys_of(b.value, source, values_);
            for (std::size_t first = 0; first < b.query.tokens; first += tile) {
                const std::size_t rows = std::min(tile, b.query.tokens - first);
                const std::size_t seen = b.seen.keys_of(first + rows - 1, keys);
                if (seen == 0) { continue; }
                const matrix<const P> query = widened(q, b.query, h, first, rows, queries_);
                const matrix<const P> d_out = widened(q, b.d_out, h, first, rows, d_outs_);
                const matrix<P> p = scratch(q, scores_, rows, seen);
                const matrix<P> ds = scratch(q, score_gradients_, rows, seen);
                Products::multiply(factor<P>{query, false}, factor<P>{key.top(seen), true}, p, scale, P{0});
                Products::multiply(factor<P>{d_out, false}, factor<P>{value.top(seen), true}, ds, P{1}, P{0});
                for (std::size_t i = 0; i < rows; ++i) {
                    const P normalizer = *b.log_sum_exp.at(first + i, h);
                    // A row that attended to nothing has no normalizer.
                    const bool nothing = normalizer == -std::numeric_limits<P>::infinity();
                    const std::size_t visible = nothing ? 0 : b.seen.keys_of(first + i, keys);
                    const P along = *b.delta.at(first + i, h);
                    P* const x = p.row(i);
                    P* const g = ds.row(i);
                    for (std::size_t j = 0; j < visible; ++j) {
                        x[j] = std::exp(x[j] - normalizer);
                        g[j] = x[j] * (g[j] - along) * scale;
                    }
                    std::fill(x + visible, x + seen, P{0});
                    std::fill(g + visible, g + seen, P{0});
                }
                Products::multiply(factor<P>{ds, false}, factor<P>{key.top(seen), false},
                                   rows_of(b.d_query, h, first, rows), P{1}, P{1});
                Products::multiply(factor<P>{ds, true}, factor<P>{query, false}, rows_of(b.d_key, source, 0, seen),
                                   P{1}, P{1});
                Products::multiply(factor<P>{p, true}, factor<P>{d_out, false}, rows_of(b.d_value, source, 0, seen),
                                   P{1}, P{1});
            }
        }
    }

private:
    // Makes the `visible` scores at x their softmax, and those from there to `all` zero; returns ln of the sum.
    static P softmax(P* x, std::size_t visible, std::size_t all) {
        P largest = -std::numeric_limits<P>::infinity();
        for (std::size_t j = 0; j < visible; ++j) { largest = x[j] > largest || x[j] != x[j] ? x[j] : largest; }
        if (largest == -std::numeric_limits<P>::infinity()) {
            std::fill(x, x + all, P{0});
            return largest;
        }
        P total = 0;
        for (std::size_t j = 0; j < visible; ++j) {
            x[j] = std::exp(x[j] - largest);
            total += x[j];
        }
        const P inverse = P{1} / total;
        for (std::size_t j = 0; j < visible; ++j) { x[j] *= inverse; }
        std::fill(x + visible, x + all, P{0});
        return largest + std::log(total);
    }

    static matrix<P> scratch(const host_queue& q, buffer<P>& memory, std::size_t rows, std::size_t columns) {
        if (memory.size() < rows * columns) {
            memory = buffer<P>(q, 0);  // the old one goes first: peaks are counted
            memory = buffer<P>(q, rows * columns);
        }
        return {memory.data(), rows, columns, columns};
    }
    template <class U>
    static matrix<U> rows_of(const token_view<U, host_memory>& v, std::size_t head, std::size_t first,
                             std::size_t rows) {
        return {rows == 0 ? nullptr : v.at(first, head), rows, v.width, v.token_stride};
    }
    // Rows of one head in the precision of sums: themselves, or widened into `memory`.
    static matrix<const P> widened(const host_queue& q, const token_view<const T, host_memory>& v, std::size_t head,
                                   std::size_t first, std::size_t rows, buffer<P>& memory) {
        if constexpr (!widens) {
            return rows_of(v, head, first, rows);
        } else {
            const matrix<P> wide = scratch(q, memory, rows, v.width);
            for (std::size_t i = 0; i < rows; ++i) {
                const T* const x = v.at(first + i, head);
                for (std::size_t c = 0; c < v.width; ++c) { wide.row(i)[c] = static_cast<P>(x[c]); }
            }
            return wide;
        }
    }
    void widen_keys(const host_queue& q, const token_view<const T, host_memory>& key,
                    const token_view<const T, host_memory>& value, std::size_t head) {
        if constexpr (widens) {
            static_cast<void>(widened(q, key, head, 0, key.tokens, keys_));
            static_cast<void>(widened(q, value, head, 0, value.tokens, values_));
        }
    }
    static matrix<const P> keys_of(const token_view<const T, host_memory>& v, std::size_t head, const buffer<P>& wide) {
        if constexpr (widens) {
            return {wide.data(), v.tokens, v.width, v.width};
        } else {
            return rows_of(v, head, 0, v.tokens);
        }
    }
};
static_assert(block_attention<host_attention<float>>);

template <> struct default_attention<host_queue> {
    template <floating_element T> using of = host_attention<T>;
    using type = of<float>;
};

}  // namespace tutti::sequence
