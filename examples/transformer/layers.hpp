// The layers of a decoder-only transformer, each as a forward and a backward function over matrices of tokens x features.
// Needs matrix.hpp. Backward functions *add* to parameter gradients (micro-batches accumulate) and overwrite the gradients of
// activations unless they say "adds". Radford et al. 2019 (GPT-2); attention blocks as in Dao et al. 2022, arXiv:2205.14135.
#pragma once

#include <algorithm>  // fill, copy, min
#include <cmath>      // sqrt, log
#include <cstdint>    // tokens
#include <span>       // tokens of a batch

#include "matrix.hpp"

// "omp simd" lets the compiler reorder the sum that the loop names, and nothing else (-fopenmp-simd, no OpenMP runtime).
namespace transformer {

using tokens = std::span<const std::uint8_t>;

// ---- embedding: out[t] = token_table[token[t]] + position_table[t mod length] -----------------------------------------

template <class T>
void embedding_forward(tokens in, int length, matrix<const T> token_table, matrix<const T> position_table,
                       matrix<T> out) {
    for (int t = 0; t < out.rows; ++t) {
        const T* const token = token_table.row(in[static_cast<std::size_t>(t)]);
        const T* const position = position_table.row(t % length);
        T* const y = out.row(t);
        for (int c = 0; c < out.columns; ++c) { y[c] = token[c] + position[c]; }
    }
}

template <class T>
void embedding_backward(tokens in, int length, matrix<const T> d_out, matrix<T> d_token_table,
                        matrix<T> d_position_table) {
    for (int t = 0; t < d_out.rows; ++t) {
        T* const token = d_token_table.row(in[static_cast<std::size_t>(t)]);
        T* const position = d_position_table.row(t % length);
        const T* const dy = d_out.row(t);
        for (int c = 0; c < d_out.columns; ++c) {
            token[c] += dy[c];
            position[c] += dy[c];
        }
    }
}

// ---- layer normalization: out = normalized(in) * gain + bias, row by row ----------------------------------------------

/// What backward needs of a row besides its input.
template <class T> struct row_statistics {
    T mean;
    T inverse_deviation;
};

template <class T>
void layer_norm_forward(matrix<const T> in, const T* gain, const T* bias, matrix<T> out,
                        row_statistics<T>* statistics) {
    const int width = in.columns;
    for (int t = 0; t < in.rows; ++t) {
        const T* const x = in.row(t);
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < width; ++c) { sum += x[c]; }
        const T mean = sum / static_cast<T>(width);
        T squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < width; ++c) { squares += (x[c] - mean) * (x[c] - mean); }
        const T inverse = T{1} / std::sqrt(squares / static_cast<T>(width) + static_cast<T>(1e-5));
        T* const y = out.row(t);
#pragma omp simd
        for (int c = 0; c < width; ++c) { y[c] = (x[c] - mean) * inverse * gain[c] + bias[c]; }
        statistics[t] = {mean, inverse};
    }
}

/// Adds to d_in: the residual stream's gradient flows around the layer, and this is its way through.
template <class T>
void layer_norm_backward(matrix<const T> d_out, matrix<const T> in, const T* gain, const row_statistics<T>* statistics,
                         matrix<T> d_in, T* d_gain, T* d_bias) {
    const int width = in.columns;
    for (int t = 0; t < in.rows; ++t) {
        const T* const x = in.row(t);
        const T* const dy = d_out.row(t);
        T* const dx = d_in.row(t);
        const auto [mean, inverse] = statistics[t];
        T mean_g = 0;   // mean of g = dy * gain
        T mean_gx = 0;  // mean of g * normalized
#pragma omp simd reduction(+ : mean_g, mean_gx)
        for (int c = 0; c < width; ++c) {
            const T normalized = (x[c] - mean) * inverse;
            mean_g += dy[c] * gain[c];
            mean_gx += dy[c] * gain[c] * normalized;
            d_gain[c] += dy[c] * normalized;
            d_bias[c] += dy[c];
        }
        mean_g /= static_cast<T>(width);
        mean_gx /= static_cast<T>(width);
#pragma omp simd
        for (int c = 0; c < width; ++c) {
            const T normalized = (x[c] - mean) * inverse;
            dx[c] += (dy[c] * gain[c] - mean_g - normalized * mean_gx) * inverse;
        }
    }
}

// ---- linear: out = in * weight + bias; weights are stored inputs x outputs, as GPT-2's files do ------------------------

template <class T> void linear_forward(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<T> out) {
    for (int t = 0; t < out.rows; ++t) { std::copy(bias, bias + out.columns, out.row(t)); }
    multiply<T>(in, weight, out, 1);
}

/// The same on top of a residual: out = residual + in * weight + bias.
template <class T>
void linear_forward(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> residual,
                    matrix<T> out) {
    for (int t = 0; t < out.rows; ++t) {
        const T* const x = residual.row(t);
        T* const y = out.row(t);
#pragma omp simd
        for (int c = 0; c < out.columns; ++c) { y[c] = x[c] + bias[c]; }
    }
    multiply<T>(in, weight, out, 1);
}

template <class T>
void linear_backward(matrix<const T> d_out, matrix<const T> in, matrix<const T> weight, matrix<T> d_in,
                     matrix<T> d_weight, T* d_bias) {
    multiply<T>(d_out, transposed(weight), d_in);
    linear_backward_weight(d_out, in, d_weight, d_bias);
}

/// The parameters' part alone, for a layer whose input is recomputed between the two.
template <class T>
void linear_backward_weight(matrix<const T> d_out, matrix<const T> in, matrix<T> d_weight, T* d_bias) {
    multiply<T>(transposed(in), d_out, d_weight, 1);
    for (int t = 0; t < d_out.rows; ++t) {
        const T* const dy = d_out.row(t);
#pragma omp simd
        for (int c = 0; c < d_out.columns; ++c) { d_bias[c] += dy[c]; }
    }
}

// ---- GELU, tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3) -----------------------------------------------

template <class T> inline constexpr T gelu_scale = static_cast<T>(0.79788456080286535588);  // sqrt(2 / pi)
template <class T> inline constexpr T gelu_cube = static_cast<T>(0.044715);

template <class T> void gelu_forward(const T* in, T* out, std::size_t count) {
#pragma omp simd
    for (std::size_t i = 0; i < count; ++i) {
        const T x = in[i];
        const T u = gelu_scale<T> * (x + gelu_cube<T> * x * x * x);
        out[i] = x * (T{1} / (T{1} + exponential(-2 * u)));
    }
}

/// Computes the output again (backward of the next layer wants it; keeping it would double the saved activations) and turns the
/// gradient of the output into that of the input, in place.
template <class T> void gelu_backward(const T* in, T* out_again, T* gradient, std::size_t count) {
#pragma omp simd
    for (std::size_t i = 0; i < count; ++i) {
        const T x = in[i];
        const T u = gelu_scale<T> * (x + gelu_cube<T> * x * x * x);
        const T slope = gelu_scale<T> * (1 + 3 * gelu_cube<T> * x * x);
        const T sigmoid = T{1} / (T{1} + exponential(-2 * u));
        out_again[i] = x * sigmoid;
        gradient[i] *= sigmoid + 2 * x * sigmoid * (1 - sigmoid) * slope;
    }
}

// ---- causal self-attention --------------------------------------------------------------------------------------------
// qkv holds, for each token, queries, keys and values of all heads side by side (3 x width). Rows of queries are taken in blocks:
// a block sees only the keys up to its own last row, so most of the masked half is never computed, and the scores live in
// a scratch of block x length. Backward recomputes the probabilities from one saved number per row, their log-sum-exp.

inline constexpr int attention_block = 32;

/// Extents of a batch of sequences in one matrix of batch * length rows.
struct attention_shape {
    int batch;
    int length;
    int heads;
    int head_width;
    [[nodiscard]] int width() const { return heads * head_width; }
};

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

// ---- classifier: softmax and cross-entropy in the memory of the logits -------------------------------------------------

/// Turns logits into probabilities and returns the sum of the losses in nats, added up in double.
template <class T> [[nodiscard]] double cross_entropy_forward(matrix<T> logits, tokens targets) {
    double losses = 0;
    for (int t = 0; t < logits.rows; ++t) {
        T* const x = logits.row(t);
        T largest = x[0];
#pragma omp simd reduction(max : largest)
        for (int c = 0; c < logits.columns; ++c) { largest = x[c] > largest ? x[c] : largest; }
        const auto target = static_cast<double>(x[targets[static_cast<std::size_t>(t)]]);
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < logits.columns; ++c) {
            x[c] = exponential(x[c] - largest);
            sum += x[c];
        }
        const T inverse = T{1} / sum;
#pragma omp simd
        for (int c = 0; c < logits.columns; ++c) { x[c] *= inverse; }
        losses += std::log(static_cast<double>(sum)) + static_cast<double>(largest) - target;
    }
    return losses;
}

/// Turns probabilities into the gradient of scale * (sum of the losses) with respect to the logits.
template <class T> void cross_entropy_backward(matrix<T> probabilities, tokens targets, T scale) {
    for (int t = 0; t < probabilities.rows; ++t) {
        T* const p = probabilities.row(t);
#pragma omp simd
        for (int c = 0; c < probabilities.columns; ++c) { p[c] *= scale; }
        p[targets[static_cast<std::size_t>(t)]] -= scale;
    }
}

}  // namespace transformer
