// The layers of a transformer except attention, each forward and backward, over matrices of tokens x features.
// Needs blas.hpp, and parameters.hpp for tokens. Backward functions *add* to parameter gradients (micro-batches
// accumulate) and overwrite the gradients of activations unless they say "adds". Radford et al. 2019 (GPT-2).
#pragma once

#include <algorithm>  // copy, fill
#include <cmath>      // sqrt, log
#include <cstdint>    // positions
#include <span>       // positions

#include "blas.hpp"
#include "parameters.hpp"

// "omp simd" lets the compiler reorder the sum that a loop names, and nothing else (-fopenmp-simd, no OpenMP runtime).
namespace transformer {

// ---- embedding: out[t] = token_rows[token[t]] + position_rows[position[t]] --------------------------------------

// A token that is no_target is one whose row another rank has: zero here. No position_rows: others add them.

template <class T>
void embedding_forward(tokens in, std::span<const std::int64_t> positions, matrix<const T> token_rows,
                       matrix<const T> position_rows, matrix<T> out) {
    for (int t = 0; t < out.rows; ++t) {
        const auto i = static_cast<std::size_t>(t);
        T* const y = out.row(t);
        if (in[i] == no_target || position_rows.data == nullptr) {
            std::fill(y, y + out.columns, T{0});
            if (in[i] != no_target) { std::copy_n(token_rows.row(in[i]), out.columns, y); }
            if (position_rows.data != nullptr) {
                std::copy_n(position_rows.row(static_cast<int>(positions[i])), out.columns, y);
            }
            continue;
        }
        const T* const token = token_rows.row(in[i]);
        const T* const position = position_rows.row(static_cast<int>(positions[i]));
        for (int c = 0; c < out.columns; ++c) { y[c] = token[c] + position[c]; }
    }
}

template <class T>
void embedding_backward(tokens in, std::span<const std::int64_t> positions, matrix<const T> d_out,
                        matrix<T> d_token_rows, matrix<T> d_position_rows) {
    for (int t = 0; t < d_out.rows; ++t) {
        const auto i = static_cast<std::size_t>(t);
        const T* const dy = d_out.row(t);
        T* const position = d_position_rows.row(static_cast<int>(positions[i]));
        for (int c = 0; c < d_out.columns; ++c) { position[c] += dy[c]; }
        if (in[i] == no_target) { continue; }
        T* const token = d_token_rows.row(in[i]);
        for (int c = 0; c < d_out.columns; ++c) { token[c] += dy[c]; }
    }
}

// ---- layer normalization: out = normalized(in) * gain + bias, row by row ------------------------------------------

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
        const T mean = statistics[t].mean;
        const T inverse = statistics[t].inverse_deviation;
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

// ---- linear: out = in * weight + bias; weights are stored inputs x outputs, as GPT-2's files do -------------------

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

// ---- GELU, tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3) -----------------------------------------

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

/// Computes the output again (backward of the next layer wants it; keeping it would double the saved activations) and
/// turns the gradient of the output into that of the input, in place.
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

// ---- classifier: softmax and cross-entropy in the memory of the logits --------------------------------------------

/// Turns logits into probabilities and returns the sum of the losses in nats, added up in double. Rows without a target
/// stay as they are, and have no loss.
template <class T> [[nodiscard]] double cross_entropy_forward(matrix<T> logits, tokens targets) {
    double losses = 0;
    for (int t = 0; t < logits.rows; ++t) {
        const std::size_t right = targets[static_cast<std::size_t>(t)];
        if (right == no_target) { continue; }
        T* const x = logits.row(t);
        T largest = x[0];
#pragma omp simd reduction(max : largest)
        for (int c = 0; c < logits.columns; ++c) { largest = x[c] > largest ? x[c] : largest; }
        const auto target = static_cast<double>(x[right]);
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

/// Turns probabilities into the gradient of scale * (sum of the losses) with respect to the logits, 0 without a target.
template <class T> void cross_entropy_backward(matrix<T> probabilities, tokens targets, T scale) {
    for (int t = 0; t < probabilities.rows; ++t) {
        T* const p = probabilities.row(t);
        if (targets[static_cast<std::size_t>(t)] == no_target) {
            std::fill(p, p + probabilities.columns, T{0});
            continue;
        }
#pragma omp simd
        for (int c = 0; c < probabilities.columns; ++c) { p[c] *= scale; }
        p[targets[static_cast<std::size_t>(t)]] -= scale;
    }
}

}  // namespace transformer
