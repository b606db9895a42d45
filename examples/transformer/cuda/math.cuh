// cuda_math: the model's mathematics on a GPU, in float or 16-bit floats, in the order of one stream.
// Needs products.hpp, the kernels beside it, cuDNN where TRANSFORMER_WITH_CUDNN says so, and nvcc.
#pragma once

#include <algorithm>    // max, transform
#include <array>        // staging
#include <cmath>        // exp
#include <cstdint>      // tokens
#include <optional>     // events
#include <span>         // positions, probabilities
#include <type_traits>  // precision
#include <utility>      // move
#include <vector>       // counts

#include <tutti/core/buffer.hpp>       // storage
#include <tutti/core/cuda_run.cuh>     // fill
#include <tutti/core/elementwise.hpp>  // fill
#include <tutti/core/philox.cuh>       // initial weights

#include "../model.hpp"
#include "attention.cuh"
#include "classifier.cuh"
#include "column_sums.cuh"
#include "elementwise.cuh"
#include "embedding.cuh"
#include "layer_norm.cuh"
#include "products.hpp"
#if TRANSFORMER_WITH_CUDNN
#include "attention_cudnn.hpp"
#endif

namespace transformer::gpu {

/// The tokens of a micro-batch on the device, and the lists that embedding_backward wants.
///
/// Cost  one copy through page-locked memory; the host waits only when two earlier batches have not been copied yet.
class device_batch {
    using integers = tutti::buffer<std::int32_t, tutti::cuda_queue>;
    struct staging {
        tutti::buffer<std::int32_t, tutti::pinned_queue> memory;
        std::optional<tutti::cuda_queue::event_type> copied;
    };
    std::array<staging, 2> staging_;
    std::size_t turn_ = 0;
    integers memory_;
    std::vector<std::int32_t> count_;  // by number; starts of numbers while rows are sorted
    std::size_t rows_ = 0;
    numbered_rows tokens_, positions_;

public:
    explicit device_batch(const tutti::cuda_queue& q) : memory_(q, 0) {}

    /// positions: none for sequences of one length, else one a row.
    void upload(const tutti::cuda_queue& q, tokens in, tokens targets, std::span<const std::int64_t> positions = {}) {
        rows_ = in.size();
        const std::size_t list = 3 * rows_ + 1;  // numbers, order, starts
        const std::size_t needed = rows_ + list * (positions.empty() ? 1 : 2);
        staging& s = staging_[turn_++ % staging_.size()];
        if (s.copied) { s.copied->wait_host(tutti::after(tutti::default_timeout())); }
        if (s.memory.size() < needed) { s.memory = tutti::buffer<std::int32_t, tutti::pinned_queue>({}, needed); }
        if (memory_.size() < needed) { memory_ = integers(q, needed); }
        std::int32_t* const p = s.memory.data();
        std::transform(targets.begin(), targets.end(), p,
                       [](std::uint16_t t) { return t == no_target ? -1 : std::int32_t{t}; });
        tokens_ = sorted(in, p, rows_);
        positions_ = positions.empty() ? numbered_rows() : sorted(positions, p, rows_ + list);
        tutti::upload(q, tutti::view<const std::int32_t, tutti::pinned_memory>(p, needed),
                      memory_.view().sub(0, needed));
        s.copied = q.record();
    }
    [[nodiscard]] const std::int32_t* targets() const { return memory_.data(); }
    [[nodiscard]] std::size_t rows() const { return rows_; }
    [[nodiscard]] const numbered_rows& by_token() const { return tokens_; }
    /// Without numbers for sequences of one length.
    [[nodiscard]] const numbered_rows& by_position() const { return positions_; }

private:
    /// The list of these numbers, from `first` on in the host's memory, which will be at the same place in the device's.
    template <class Numbers>
    [[nodiscard]] numbered_rows sorted(const Numbers& numbers, std::int32_t* host, std::size_t first) {
        std::int32_t* const own = host + first;
        std::int32_t* const order = own + rows_;
        std::int32_t* const starts = order + rows_;
        std::int32_t largest = 0;
        constexpr bool of_tokens = std::is_same_v<std::remove_cvref_t<decltype(numbers[0])>, tokens::value_type>;
        for (std::size_t r = 0; r < rows_; ++r) {
            own[r] = of_tokens && numbers[r] == no_target ? -1 : static_cast<std::int32_t>(numbers[r]);
            largest = std::max(largest, own[r]);
        }
        count_.assign(static_cast<std::size_t>(largest) + 1, 0);
        for (std::size_t r = 0; r < rows_; ++r) {
            if (own[r] >= 0) { ++count_[static_cast<std::size_t>(own[r])]; }
        }
        std::int32_t next = 0;
        int distinct = 0;
        for (std::int32_t& n : count_) {
            const std::int32_t occurs = n;
            if (occurs > 0) { starts[distinct++] = next; }
            n = next;
            next += occurs;
        }
        std::fill(starts + distinct, starts + rows_ + 1, next);
        for (std::size_t r = 0; r < rows_; ++r) {
            if (own[r] < 0) { continue; }
            order[count_[static_cast<std::size_t>(own[r])]++] = static_cast<std::int32_t>(r);
        }
        const std::int32_t* const there = memory_.data() + first;
        return {there, there + rows_, there + 2 * rows_, distinct};
    }
};

/// The steps of a model over element type T, queued on one stream. See model.hpp for what each means.
///
/// Shapes       of no rows nothing is done: ranks that share documents may have none of a step's.
/// Determinism  the same bits in every run on the same kind of device: no sum depends on timing.
/// Cost         no step waits, except loss, take_loss and probabilities.
template <class T> class cuda_math : public whole_layers<T> {
    using floats = tutti::buffer<float, tutti::cuda_queue>;

    tutti::cuda_queue queue_;
    products products_;
    device_batch batch_;
    int length_ = 0;
    floats scratch_, losses_, along_;
    tutti::buffer<T, tutti::cuda_queue> table_;       // rows behind the vocabulary's are zero
    tutti::buffer<double, tutti::cuda_queue> total_;  // of the losses that take_loss() will fetch
    tutti::buffer<double, tutti::cuda_queue> alone_;  // of an evaluation
    tutti::buffer<double, tutti::pinned_queue> total_on_host_;
    std::optional<tutti::cuda_queue::event_type> total_copied_;
    std::vector<float> probabilities_;
#if TRANSFORMER_WITH_CUDNN
    cudnn_attention cudnn_;
#endif

    [[nodiscard]] float* at_least(floats& buffer, std::size_t size) {
        if (buffer.size() < size) { buffer = floats(queue_, size); }
        return buffer.data();
    }
    [[nodiscard]] float* partials(int columns) {
        return at_least(scratch_, std::size_t{2 * most_partials} * static_cast<std::size_t>(columns));
    }
    /// May bias and GELU be part of the product? cuBLASLt has that for 16 bits and aligned rows; in float, its GELU is
    /// less precise than float.
    [[nodiscard]] static bool fuses(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> out) {
        return is_half<T> && in_groups(in) && in_groups(weight) && in_groups(bias) && in_groups(out);
    }
    [[nodiscard]] static bool by_cudnn(const attention_shape& s, matrix<const T> qkv) {
#if TRANSFORMER_WITH_CUDNN
        return is_half<T> && cudnn_attention::takes(s) && in_groups(qkv) && qkv.stride == 3 * s.width();
#else
        (void)s, (void)qkv;
        return false;
#endif
    }
    // Products over an odd vocabulary run at a fifth of the speed: they get whole rows of logits, padding and all,
    // and a copy of the table with as many rows.
    template <class U> [[nodiscard]] static matrix<U> padded(matrix<U> logits) {
        return {logits.data, logits.rows, logits.stride, logits.stride};
    }
    [[nodiscard]] matrix<T> padded_copy(matrix<const T> table, int rows) {
        const std::size_t size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(table.columns);
        if (table_.size() < size) {
            table_ = tutti::buffer<T, tutti::cuda_queue>(queue_, size);
            tutti::fill(queue_, table_.view(), static_cast<T>(0.0f));
        }
        queue_.copy(table_.data(), table.data, table.size() * sizeof(T), cudaMemcpyDeviceToDevice);
        return {table_.data(), rows, table.columns};
    }
    // As it is where its rows need no padding, or have it already.
    [[nodiscard]] matrix<const T> padded_table(matrix<const T> table, int rows) {
        return table.rows == rows && in_groups(table) ? table : padded_copy(table, rows);
    }
    void add_losses_of(matrix<T> logits, int first, bool gradient, float scale, double* total) {
        if (logits.rows == 0) { return; }
        cross_entropy<T>(queue_, logits, batch_.targets() + first, gradient, scale,
                         at_least(losses_, static_cast<std::size_t>(logits.rows)), total);
    }

public:
    using element = T;
    using real = float;
    using queue_type = tutti::cuda_queue;
    using statistics = norm_statistics;
    /// Rows of logits are padded to whole cache lines: products want aligned rows.
    static constexpr int row_multiple = 128;
    static constexpr bool wants_whole_context = true;
    static constexpr bool gelu_backward_restores_output = false;

    /// `reserve`: multiprocessors left to collectives that run meanwhile.
    explicit cuda_math(const tutti::cuda_queue& q, int reserve = 0)
        : queue_(q)
        , products_(q, reserve)
        , batch_(q)
        , scratch_(q, 0)
        , losses_(q, 0)
        , along_(q, 0)
        , table_(q, 0)
        , total_(q, 1)
        , alone_(q, 1)
        , total_on_host_(tutti::pinned_queue{}, 1)
#if TRANSFORMER_WITH_CUDNN
        , cudnn_(q)
#endif
    {
        tutti::fill(queue_, total_.view(), 0.0);
    }

    [[nodiscard]] queue_type queue() const { return queue_; }

    void take(tokens in, tokens targets, int length) {
        batch_.upload(queue_, in, targets);
        length_ = length;
    }
    void take(tokens in, tokens targets, std::span<const std::int64_t> positions) {
        batch_.upload(queue_, in, targets, positions);
        length_ = 0;
    }
    /// -1 for rows that have none.
    [[nodiscard]] tutti::view<const std::int32_t, tutti::device_memory> targets() const {
        return {batch_.targets(), batch_.rows()};
    }
    void embed(matrix<const T> token_rows, matrix<const T> position_rows, matrix<T> out) {
        if (out.rows == 0) { return; }
        embedding<T>(queue_, batch_.by_token().numbers, batch_.by_position().numbers, length_, token_rows,
                     position_rows, out);
    }
    void embed_backward(matrix<const T> d_out, matrix<T> d_token_rows, matrix<T> d_position_rows) {
        if (d_out.rows == 0) { return; }
        add_by_number<T>(queue_, batch_.by_token(), d_out, d_token_rows);
        if (length_ != 0) {
            add_by_position<T>(queue_, length_, d_out, d_position_rows);
        } else {
            add_by_number<T>(queue_, batch_.by_position(), d_out, d_position_rows);
        }
    }

    void layer_norm(matrix<const T> in, const T* gain, const T* bias, matrix<T> out, statistics* rows) {
        if (in.rows == 0) { return; }
        gpu::layer_norm<T>(queue_, in, gain, bias, out, rows);
    }
    void layer_norm_backward(matrix<const T> d_out, matrix<const T> in, const T* gain, const statistics* rows,
                             matrix<T> d_in, bool adds, T* d_gain, T* d_bias) {
        if (d_out.rows == 0) { return; }
        gpu::layer_norm_backward<T>(queue_, d_out, in, gain, rows, d_in, adds, partials(in.columns), d_gain, d_bias);
    }

    void linear(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<T> out) {
        if (in.rows == 0) { return; }
        if (bias == nullptr) {
            products_.multiply<T>(in, weight, out, {});
        } else if (fuses(in, weight, bias, out)) {
            products_.multiply<T>(in, weight, out, {.after = after_product::bias, .bias = bias});
        } else {
            start_rows<T>(queue_, bias, {}, out);
            products_.multiply<T>(in, weight, out, {.addend = out});
        }
    }
    /// The residual is added inside the product, before the only rounding: two passes over memory less than adding it
    /// in the layer normalization that follows.
    void linear_onto(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> residual,
                     matrix<T> out) {
        if (in.rows == 0) { return; }
        if (fuses(in, weight, bias, out) && in_groups(residual)) {
            products_.multiply<T>(in, weight, out, {.after = after_product::bias, .bias = bias, .addend = residual});
        } else {
            start_rows<T>(queue_, bias, residual, out);
            products_.multiply<T>(in, weight, out, {.addend = out});
        }
    }
    void linear_gelu(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<T> before, matrix<T> out) {
        if (in.rows == 0) { return; }
        if (fuses(in, weight, bias, out) && before.data == out.data) {
            products_.multiply<T>(in, weight, out, {.after = after_product::bias_gelu, .bias = bias});
        } else if (fuses(in, weight, bias, out) && in_groups(before)) {
            products_.multiply<T>(in, weight, out, {.after = after_product::bias_gelu, .bias = bias, .kept = before});
        } else {
            linear(in, weight, bias, before);
            gelu<T>(queue_, before.data, out.data, before.size());
        }
    }
    void linear_backward_input(matrix<const T> d_out, matrix<const T> weight, matrix<T> d_in) {
        if (d_out.rows == 0) { return; }
        products_.multiply<T>(d_out, across(weight), d_in);
    }
    void linear_backward_input_gelu(matrix<const T> d_out, matrix<const T> weight, matrix<T> before, matrix<const T>,
                                    matrix<T> d_before) {
        if (d_out.rows == 0) { return; }
        if (fuses(d_out, weight, weight.data, d_before) && in_groups(before)) {
            products_.multiply<T>(d_out, across(weight), d_before,
                                  {.after = after_product::gelu_slope, .kept = before});
        } else {
            linear_backward_input(d_out, weight, d_before);
            times_gelu_slope<T>(queue_, before.data, d_before.data, d_before.size());
        }
    }
    void linear_backward_weight(matrix<const T> d_out, matrix<const T> in, matrix<T> d_weight, T* d_bias) {
        if (d_out.rows == 0) { return; }
        products_.multiply<T>(across(in), d_out, d_weight, {.addend = d_weight});
        add_column_sums<T>(queue_, d_out, partials(d_out.columns), d_bias);
    }

    void attention(const attention_shape& s, matrix<const T> qkv, matrix<T> out, float* log_sum_exp) {
#if TRANSFORMER_WITH_CUDNN
        if constexpr (is_half<T>) {
            if (by_cudnn(s, qkv)) { return cudnn_.forward(s, qkv.data, out.data, log_sum_exp); }
        }
#endif
        gpu::attention<T>(queue_, s, qkv, out, log_sum_exp);
    }
    void attention_backward(const attention_shape& s, matrix<const T> d_out, matrix<const T> qkv, matrix<const T> out,
                            const float* log_sum_exp, matrix<T> d_qkv) {
#if TRANSFORMER_WITH_CUDNN
        if constexpr (std::is_same_v<T, tutti::bfloat16>) {
            if (by_cudnn(s, qkv)) {
                return cudnn_.backward(s, d_out.data, qkv.data, out.data, log_sum_exp, d_qkv.data);
            }
        }
#endif
        const std::size_t count = static_cast<std::size_t>(out.rows) * static_cast<std::size_t>(s.heads);
        gpu::attention_backward<T>(queue_, s, d_out, qkv, out, log_sum_exp, at_least(along_, count), d_qkv);
    }

    void classify(matrix<const T> in, matrix<const T> table, matrix<T> logits) {
        if (in.rows == 0) { return; }
        if (table.rows == logits.columns && table.rows % group == 0 && in_groups(table)) {  // aligned without padding
            products_.multiply<T>(in, across(table), logits);
        } else {
            products_.multiply<T>(in, across(padded_table(table, logits.stride)), padded(logits));
        }
    }
    [[nodiscard]] double loss(matrix<T> logits) {
        tutti::fill(queue_, alone_.view(), 0.0);
        add_losses_of(logits, 0, false, 0, alone_.data());
        return tutti::fetch(queue_, alone_.view(), 0.0);
    }
    void add_loss(matrix<T> logits, int first, double* sum) { add_losses_of(logits, first, false, 0, sum); }
    void loss_and_gradient(matrix<T> logits, float scale) {
        add_losses_of(logits, 0, true, scale, total_.data());
        // Copied now, so that it has arrived by the time the host has waited for anything later.
        queue_.copy(total_on_host_.data(), total_.data(), sizeof(double), cudaMemcpyDeviceToHost);
        total_copied_ = queue_.record();
    }
    [[nodiscard]] double take_loss() {
        if (!total_copied_) { return 0; }
        total_copied_->wait_host(tutti::after(tutti::default_timeout()));
        total_copied_.reset();
        tutti::fill(queue_, total_.view(), 0.0);
        return *total_on_host_.data();
    }
    void classify_backward_input(matrix<const T> d_logits, matrix<const T> table, matrix<T> d_in) {
        if (d_logits.rows == 0) { return; }
        products_.multiply<T>(padded(d_logits), padded_table(table, d_logits.stride), d_in);
    }
    void classify_backward_table(matrix<const T> d_logits, matrix<const T> in, matrix<T> d_table) {
        if (d_logits.rows == 0) { return; }
        if (d_table.rows == d_logits.stride) {
            products_.multiply<T>(across(padded(d_logits)), in, d_table, {.addend = d_table});
            return;
        }
        const matrix<T> sum = padded_copy(matrix<const T>(d_table), d_logits.stride);
        products_.multiply<T>(across(padded(d_logits)), in, sum, {.addend = sum});
        queue_.copy(d_table.data, sum.data, d_table.size() * sizeof(T), cudaMemcpyDeviceToDevice);
    }
    /// One row of logits comes to the host.
    [[nodiscard]] std::span<const float> probabilities(matrix<T> logits) {
        std::vector<T> row(static_cast<std::size_t>(logits.columns));
        tutti::download(queue_, tutti::view<const T, tutti::device_memory>(logits.data, row.size()),
                        tutti::view<T>(row));
        probabilities_.assign(row.begin(), row.end());
        const float largest = *std::max_element(probabilities_.begin(), probabilities_.end());
        double sum = 0;
        for (float& p : probabilities_) { sum += static_cast<double>(p = std::exp(p - largest)); }
        for (float& p : probabilities_) { p = static_cast<float>(static_cast<double>(p) / sum); }
        return probabilities_;
    }
};

}  // namespace transformer::gpu
