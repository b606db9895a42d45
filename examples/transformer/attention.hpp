// Causal self-attention, forward and backward, in blocks of query rows.
// Needs blas.hpp. A block sees only the keys up to its own last row, so most of the masked half is never computed;
// no table of length x length is kept, backward recomputes it. Dao et al. 2022, arXiv:2205.14135.
#pragma once

#include <algorithm>  // fill, min
#include <cmath>      // sqrt, log

#include "blas.hpp"

// A row of qkv holds a token's queries, keys and values, of all heads side by side: 3 x width numbers. Forward saves
// one number for each row of scores, the logarithm of the sum of their exponentials.
namespace transformer {

inline constexpr int attention_block = 32;

/// Queries, keys and values of one head of one sequence.
template <class T> struct head_of {
    matrix<T> queries, keys, values;
    head_of(matrix<T> qkv, attention_shape s, int sequence, int head)
        : queries(qkv.block(sequence * s.length, s.length, head * s.head_width, s.head_width))
        , keys(qkv.block(sequence * s.length, s.length, s.width() + head * s.head_width, s.head_width))
        , values(qkv.block(sequence * s.length, s.length, 2 * s.width() + head * s.head_width, s.head_width)) {}
};

/// log_sum_exp: one number for each (sequence, head, row). scratch: attention_block x length.
template <class T>
void attention_forward(attention_shape s, matrix<const T> qkv, matrix<T> out, T* log_sum_exp, matrix<T> scratch) {
    const T scale = T{1} / std::sqrt(static_cast<T>(s.head_width));
    for (int sequence = 0; sequence < s.batch; ++sequence) {
        for (int head = 0; head < s.heads; ++head, log_sum_exp += s.length) {
            const head_of<const T> h(qkv, s, sequence, head);
            for (int first = 0; first < s.length; first += attention_block) {
                const int rows = std::min(attention_block, s.length - first);
                const int seen = first + rows;
                const matrix<T> p = scratch.block(0, rows, 0, seen);
                multiply<T>(h.queries.block(first, rows, 0, s.head_width), transposed(h.keys.top(seen)), p, 0, scale);
                for (int i = 0; i < rows; ++i) {
                    T* const x = p.row(i);
                    const int visible = first + i + 1;
                    T largest = x[0];
#pragma omp simd reduction(max : largest)
                    for (int j = 0; j < visible; ++j) { largest = x[j] > largest ? x[j] : largest; }
                    T sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (int j = 0; j < visible; ++j) {
                        x[j] = exponential(x[j] - largest);
                        sum += x[j];
                    }
                    const T inverse = T{1} / sum;
#pragma omp simd
                    for (int j = 0; j < visible; ++j) { x[j] *= inverse; }
                    std::fill(x + visible, x + seen, T{0});
                    log_sum_exp[first + i] = largest + std::log(sum);
                }
                multiply<T>(p, h.values.top(seen),
                            out.block(sequence * s.length + first, rows, head * s.head_width, s.head_width));
            }
        }
    }
}

/// scratch: 2 * attention_block x length.
template <class T>
void attention_backward(attention_shape s, matrix<const T> d_out, matrix<const T> qkv, matrix<const T> out,
                        const T* log_sum_exp, matrix<T> d_qkv, matrix<T> scratch) {
    const T scale = T{1} / std::sqrt(static_cast<T>(s.head_width));
    for (int sequence = 0; sequence < s.batch; ++sequence) {
        for (int head = 0; head < s.heads; ++head, log_sum_exp += s.length) {
            const head_of<const T> h(qkv, s, sequence, head);
            const head_of<T> d(d_qkv, s, sequence, head);
            // Keys of a block collect from all later blocks: the last block, which sees them all, starts their sums.
            const int last = (s.length - 1) / attention_block * attention_block;
            for (int first = last; first >= 0; first -= attention_block) {
                const int rows = std::min(attention_block, s.length - first);
                const int seen = first + rows;
                const T keep = first == last ? T{0} : T{1};
                const auto query = h.queries.block(first, rows, 0, s.head_width);
                const auto dy = d_out.block(sequence * s.length + first, rows, head * s.head_width, s.head_width);
                const auto y = out.block(sequence * s.length + first, rows, head * s.head_width, s.head_width);
                const matrix<T> p = scratch.block(0, rows, 0, seen);
                const matrix<T> ds = scratch.block(attention_block, rows, 0, seen);
                multiply<T>(query, transposed(h.keys.top(seen)), p, 0, scale);
                multiply<T>(dy, transposed(h.values.top(seen)), ds);
                for (int i = 0; i < rows; ++i) {
                    const int visible = first + i + 1;
                    T* const x = p.row(i);
                    T* const g = ds.row(i);
                    T along = 0;  // sum over j of p_j dp_j, which is dy . y
#pragma omp simd reduction(+ : along)
                    for (int c = 0; c < s.head_width; ++c) { along += dy.row(i)[c] * y.row(i)[c]; }
                    const T normalizer = log_sum_exp[first + i];
#pragma omp simd
                    for (int j = 0; j < visible; ++j) {
                        x[j] = exponential(x[j] - normalizer);
                        g[j] = x[j] * (g[j] - along) * scale;
                    }
                    std::fill(x + visible, x + seen, T{0});
                    std::fill(g + visible, g + seen, T{0});
                }
                multiply<T>(ds, h.keys.top(seen), d.queries.block(first, rows, 0, s.head_width));
                multiply<T>(transposed(ds), query, d.keys.top(seen), keep);
                multiply<T>(transposed(p), dy, d.values.top(seen), keep);
            }
        }
    }
}

}  // namespace transformer
