// host_math: the model's mathematics on the CPU: layers.hpp and attention.hpp behind the steps that model.hpp names.
// Needs layers.hpp and attention.hpp. cuda/math.cuh is its sibling for a GPU.
#pragma once

#include <algorithm>  // fill
#include <cstddef>    // size_t
#include <cstdint>    // positions
#include <span>       // probabilities
#include <utility>    // exchange, move
#include <vector>     // scratch, positions

#include <tutti/core/queue.hpp>  // host_queue
#include <tutti/core/view.hpp>   // targets

#include "attention.hpp"
#include "layers.hpp"
#include "model.hpp"

namespace transformer {

/// The steps of a model over element type T, each complete on return. See model.hpp for what each means.
template <class T> class host_math : public whole_layers<T> {
    tutti::host_queue queue_;
    tokens in_, targets_;
    std::vector<std::int64_t> positions_;
    std::vector<std::int32_t> words_;
    double losses_ = 0;
    std::vector<T> scratch_;

    [[nodiscard]] matrix<T> scratch_for(const attention_shape& s) {
        scratch_.resize(static_cast<std::size_t>(2 * attention_block) * static_cast<std::size_t>(s.length));
        return {scratch_.data(), 2 * attention_block, s.length};
    }

public:
    using element = T;
    using real = T;
    using queue_type = tutti::host_queue;
    using statistics = row_statistics<T>;
    static constexpr int row_multiple = 1;
    static constexpr bool wants_whole_context = false;
    static constexpr bool gelu_backward_restores_output = true;

    host_math() = default;
    explicit host_math(queue_type queue) : queue_(std::move(queue)) {}
    [[nodiscard]] queue_type queue() const { return queue_; }

    void take(tokens in, tokens targets, int length) {
        in_ = in;
        targets_ = targets;
        positions_.resize(in.size());
        for (std::size_t t = 0; t < in.size(); ++t) {
            positions_[t] = static_cast<std::int64_t>(t % static_cast<std::size_t>(length));
        }
    }
    void take(tokens in, tokens targets, std::span<const std::int64_t> positions) {
        in_ = in;
        targets_ = targets;
        positions_.assign(positions.begin(), positions.end());
    }
    /// -1 for rows that have none. Valid until the next call of this.
    [[nodiscard]] tutti::view<const std::int32_t> targets() {
        words_.resize(targets_.size());
        for (std::size_t t = 0; t < words_.size(); ++t) {
            words_[t] = targets_[t] == no_target ? -1 : std::int32_t{targets_[t]};
        }
        return tutti::view<const std::int32_t>(words_);
    }
    void embed(matrix<const T> token_rows, matrix<const T> position_rows, matrix<T> out) {
        embedding_forward<T>(in_, positions_, token_rows, position_rows, out);
    }
    void embed_backward(matrix<const T> d_out, matrix<T> d_token_rows, matrix<T> d_position_rows) {
        embedding_backward<T>(in_, positions_, d_out, d_token_rows, d_position_rows);
    }

    void layer_norm(matrix<const T> in, const T* gain, const T* bias, matrix<T> out, statistics* rows) {
        layer_norm_forward<T>(in, gain, bias, out, rows);
    }
    void layer_norm_backward(matrix<const T> d_out, matrix<const T> in, const T* gain, const statistics* rows,
                             matrix<T> d_in, bool adds, T* d_gain, T* d_bias) {
        if (!adds) { std::fill(d_in.data, d_in.data + d_in.size(), T{0}); }
        transformer::layer_norm_backward<T>(d_out, in, gain, rows, d_in, d_gain, d_bias);
    }

    void linear(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<T> out) {
        if (bias == nullptr) { return multiply<T>(in, weight, out); }
        linear_forward<T>(in, weight, bias, out);
    }
    void linear_onto(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> residual,
                     matrix<T> out) {
        linear_forward<T>(in, weight, bias, residual, out);
    }
    void linear_gelu(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<T> before, matrix<T> out) {
        linear_forward<T>(in, weight, bias, before);
        gelu_forward<T>(before.data, out.data, before.size());
    }
    void linear_backward_input(matrix<const T> d_out, matrix<const T> weight, matrix<T> d_in) {
        multiply<T>(d_out, transposed(weight), d_in);
    }
    void linear_backward_input_gelu(matrix<const T> d_out, matrix<const T> weight, matrix<const T> before,
                                    matrix<T> out, matrix<T> d_before) {
        multiply<T>(d_out, transposed(weight), d_before);
        gelu_backward<T>(before.data, out.data, d_before.data, d_before.size());
    }
    void linear_backward_weight(matrix<const T> d_out, matrix<const T> in, matrix<T> d_weight, T* d_bias) {
        transformer::linear_backward_weight<T>(d_out, in, d_weight, d_bias);
    }

    void attention(attention_shape s, matrix<const T> qkv, matrix<T> out, T* log_sum_exp) {
        attention_forward<T>(s, qkv, out, log_sum_exp, scratch_for(s));
    }
    void attention_backward(attention_shape s, matrix<const T> d_out, matrix<const T> qkv, matrix<const T> out,
                            const T* log_sum_exp, matrix<T> d_qkv) {
        transformer::attention_backward<T>(s, d_out, qkv, out, log_sum_exp, d_qkv, scratch_for(s));
    }

    void classify(matrix<const T> in, matrix<const T> table, matrix<T> logits) {
        multiply<T>(in, transposed(table), logits);
    }
    [[nodiscard]] double loss(matrix<T> logits) { return cross_entropy_forward<T>(logits, targets_); }
    void add_loss(matrix<T> logits, int first, double* sum) {
        *sum += cross_entropy_forward<T>(logits, targets_.subspan(static_cast<std::size_t>(first)));
    }
    void loss_and_gradient(matrix<T> logits, T scale) {
        losses_ += loss(logits);
        cross_entropy_backward<T>(logits, targets_, scale);
    }
    [[nodiscard]] double take_loss() { return std::exchange(losses_, 0); }
    void classify_backward_input(matrix<const T> d_logits, matrix<const T> table, matrix<T> d_in) {
        multiply<T>(d_logits, table, d_in);
    }
    void classify_backward_table(matrix<const T> d_logits, matrix<const T> in, matrix<T> d_table) {
        multiply<T>(transposed(d_logits), in, d_table, 1);
    }
    [[nodiscard]] std::span<const T> probabilities(matrix<T> logits) {
        const tokens::value_type any[1] = {0};
        (void)cross_entropy_forward<T>(logits, tokens(any));  // for the probabilities that it leaves
        return {logits.data, logits.size()};
    }
};

/// The CPU's model.
template <class T> using host_model = model<host_math<T>>;

}  // namespace transformer
