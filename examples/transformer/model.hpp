// The model: the layers put together, forward and backward.
// Needs layers.hpp, attention.hpp and parameters.hpp. Parameters are reached through a strategy only (before_use,
// after_use, gradient, gradient_ready), so the same code trains replicated, sharded or compressed.
#pragma once

#include <algorithm>  // fill
#include <cstdint>    // seed, tokens
#include <exception>  // uncaught_exceptions
#include <span>       // probabilities
#include <utility>    // declval
#include <vector>     // saved activations

#include <tutti/core/buffer.hpp>        // storage of parameters and activations
#include <tutti/strategy/strategy.hpp>  // parameters

#include "attention.hpp"
#include "layers.hpp"
#include "parameters.hpp"

namespace transformer {

/// A parameter between before_use and after_use.
template <class S> class use {
    S& strategy_;
    std::size_t index_;
    decltype(std::declval<S&>().before_use(0)) value_;
    int exceptions_ = std::uncaught_exceptions();

public:
    use(S& strategy, std::size_t index) : strategy_(strategy), index_(index), value_(strategy.before_use(index)) {}
    use(const use&) = delete;
    use& operator=(const use&) = delete;
    ~use() noexcept(false) {  // may throw, but a strategy is left alone while an earlier error travels
        if (std::uncaught_exceptions() == exceptions_) { strategy_.after_use(index_); }
    }
    operator auto() const { return value_.data(); }
};

/// GPT-2 over element type T, with room for `batch` sequences of `context` tokens.
///
/// Semantics    attach `parameters()` to a strategy; then per micro-batch forward(), backward() alike.
/// Determinism  initial weights are a function of (seed, tensor, element); no result depends on time or threads.
/// Cost         a step takes about 6 flops a weight and token, plus attention; forward keeps 14 * width numbers for
///              each token and layer.
template <class T> class model {
public:
    model(const configuration& c, int batch, std::uint64_t seed);

    /// All parameters in model order, in one contiguous buffer; names and layouts are those of GPT-2's files.
    [[nodiscard]] tutti::strategy::parameters<T>& parameters() { return parameters_; }
    [[nodiscard]] std::size_t parameter_count() const { return values_.size(); }
    /// The contiguous buffer itself: what is hashed and saved.
    [[nodiscard]] tutti::view<const T> values() const { return values_; }
    [[nodiscard]] const configuration& config() const { return config_; }
    [[nodiscard]] int batch() const { return batch_; }

    /// Sum over all tokens of -ln p(target), for in.size() / length sequences of `length` <= context tokens.
    template <class S> [[nodiscard]] double forward(S& s, tokens in, tokens targets, int length);

    /// Adds the gradient of scale * (the sum that forward returned) to the strategy's gradients, and announces each
    /// when it is complete.
    template <class S> void backward(S& s, tokens in, tokens targets, int length, T scale);

    /// Probabilities of the token after `in`, a single sequence of at most `context` tokens.
    template <class S> [[nodiscard]] std::span<const T> predict(S& s, tokens in);

private:
    [[nodiscard]] std::size_t final_gain() const { return at(config_.layers, in_layer{}); }
    [[nodiscard]] std::size_t final_bias() const { return final_gain() + 1; }

    // What backward needs of a layer's forward pass.
    struct activations {
        matrix<T> in, norm1, qkv, attended, middle, norm2, expanded;
        row_statistics<T>* statistics1;
        row_statistics<T>* statistics2;
        T* log_sum_exp;
    };

    void make_parameters(std::uint64_t seed);
    template <class Take> void lay_out(Take take);
    [[nodiscard]] attention_shape attention_of(int rows, int length) const {
        return {rows / length, length, config_.heads, config_.width / config_.heads};
    }
    template <class S> void trunk_forward(S& s, tokens in, int length);
    template <class S> void layer_forward(S& s, int layer, int rows, int length, matrix<T> out);
    template <class S> void layer_backward(S& s, int layer, int rows, int length);

    // Views of parameter i in the shapes that layers take.
    [[nodiscard]] matrix<const T> shaped(std::size_t i, const T* data) const {
        return {data, static_cast<int>(parameters_[i].shape[0]), static_cast<int>(parameters_[i].shape[1])};
    }
    template <class S> [[nodiscard]] matrix<T> gradient(S& s, std::size_t i) {
        return {s.gradient(i).data(), static_cast<int>(parameters_[i].shape[0]),
                static_cast<int>(parameters_[i].shape[1])};
    }

    configuration config_;
    int batch_;
    tutti::strategy::parameters<T> parameters_;
    tutti::buffer<T> values_;
    tutti::buffer<T> workspace_;
    std::vector<activations> layers_;
    matrix<T> last_, normalized_, logits_;  // after the last layer: residual stream, normalized, logits
    row_statistics<T>* final_statistics_;
    matrix<T> hidden_;                        // GELU's output: used at once, computed again by backward
    matrix<T> d_stream_, d_narrow_, d_wide_;  // gradients of the residual stream, of `width` and of 4 x `width` columns
    matrix<T> scores_;                        // attention's scratch
};

// ---- parameters and storage -----------------------------------------------------------------------------------------

template <class T> model<T>::model(const configuration& c, int batch, std::uint64_t seed) : config_(c), batch_(batch) {
    make_parameters(seed);
    std::size_t needed = 0;  // the same walk twice: once to count, once to hand out
    lay_out([&](std::size_t n) -> T* {
        needed += (n + 31) / 32 * 32;
        return nullptr;
    });
    workspace_ = tutti::buffer<T>({}, needed);
    T* next = workspace_.data();
    lay_out([&](std::size_t n) {
        T* const p = next;
        next += (n + 31) / 32 * 32;  // rows of different matrices share no cache line
        return p;
    });
}

template <class T> void model<T>::make_parameters(std::uint64_t seed) {
    const std::vector<declaration> list = parameters_of(config_);
    std::size_t total = 0;
    for (const declaration& d : list) { total += d.size(); }
    values_ = tutti::buffer<T>({}, total);
    std::size_t offset = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
        const auto value = values_.view().sub(offset, list[i].size());
        initialize(value, list[i], seed, static_cast<std::uint32_t>(i));
        parameters_.push_back({.name = list[i].name,
                               .shape = list[i].shape,
                               .decay = list[i].shape.size() == 2,  // gains and biases do not decay
                               .value = value,
                               .gradient = {}});
        offset += value.size();
    }
}

template <class T> template <class Take> void model<T>::lay_out(Take take) {
    const int rows = batch_ * config_.context;
    const int w = config_.width;
    const auto tall = [&](int r, int c) {
        return matrix<T>(take(static_cast<std::size_t>(r) * static_cast<std::size_t>(c)), r, c);
    };
    const auto statistics = [&] {
        return reinterpret_cast<row_statistics<T>*>(take(2 * static_cast<std::size_t>(rows)));
    };
    layers_.resize(static_cast<std::size_t>(config_.layers));
    for (auto& a : layers_) {
        a = {.in = tall(rows, w),
             .norm1 = tall(rows, w),
             .qkv = tall(rows, 3 * w),
             .attended = tall(rows, w),
             .middle = tall(rows, w),
             .norm2 = tall(rows, w),
             .expanded = tall(rows, 4 * w),
             .statistics1 = statistics(),
             .statistics2 = statistics(),
             .log_sum_exp = take(static_cast<std::size_t>(rows) * static_cast<std::size_t>(config_.heads))};
    }
    last_ = tall(rows, w);
    normalized_ = tall(rows, w);
    final_statistics_ = statistics();
    logits_ = tall(rows, config_.vocabulary);
    hidden_ = tall(rows, 4 * w);
    d_stream_ = tall(rows, w);
    d_narrow_ = tall(rows, w);
    d_wide_ = tall(rows, 4 * w);
    scores_ = tall(2 * attention_block, config_.context);
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class T>
template <class S>
void model<T>::layer_forward(S& s, int layer, int rows, int length, matrix<T> out) {
    const activations& a = layers_[static_cast<std::size_t>(layer)];
    const auto top = [&](matrix<T> m) { return m.top(rows); };
    {
        const use gain(s, at(layer, norm1_gain)), bias(s, at(layer, norm1_bias));
        layer_norm_forward<T>(top(a.in), gain, bias, top(a.norm1), a.statistics1);
    }
    {
        const use weight(s, at(layer, attention_weight)), bias(s, at(layer, attention_bias));
        linear_forward<T>(top(a.norm1), shaped(at(layer, attention_weight), weight), bias, top(a.qkv));
    }
    attention_forward<T>(attention_of(rows, length), top(a.qkv), top(a.attended), a.log_sum_exp, scores_);
    {
        const use weight(s, at(layer, project_weight)), bias(s, at(layer, project_bias));
        linear_forward<T>(top(a.attended), shaped(at(layer, project_weight), weight), bias, top(a.in), top(a.middle));
    }
    {
        const use gain(s, at(layer, norm2_gain)), bias(s, at(layer, norm2_bias));
        layer_norm_forward<T>(top(a.middle), gain, bias, top(a.norm2), a.statistics2);
    }
    {
        const use weight(s, at(layer, expand_weight)), bias(s, at(layer, expand_bias));
        linear_forward<T>(top(a.norm2), shaped(at(layer, expand_weight), weight), bias, top(a.expanded));
    }
    gelu_forward<T>(a.expanded.data, hidden_.data, top(a.expanded).size());
    {
        const use weight(s, at(layer, contract_weight)), bias(s, at(layer, contract_bias));
        linear_forward<T>(top(hidden_), shaped(at(layer, contract_weight), weight), bias, top(a.middle), top(out));
    }
}

template <class T> template <class S> void model<T>::trunk_forward(S& s, tokens in, int length) {
    const int rows = static_cast<int>(in.size());
    {
        const use token(s, token_table), position(s, position_table);
        embedding_forward<T>(in, length, shaped(token_table, token), shaped(position_table, position),
                             layers_[0].in.top(rows));
    }
    for (int l = 0; l < config_.layers; ++l) {
        layer_forward(s, l, rows, length, l + 1 < config_.layers ? layers_[static_cast<std::size_t>(l) + 1].in : last_);
    }
    const use gain(s, final_gain()), bias(s, final_bias());
    layer_norm_forward<T>(last_.top(rows), gain, bias, normalized_.top(rows), final_statistics_);
}

template <class T> template <class S> double model<T>::forward(S& s, tokens in, tokens targets, int length) {
    const int rows = static_cast<int>(in.size());
    trunk_forward(s, in, length);
    const use table(s, token_table);  // tied: the classifier's weight is the token table
    multiply<T>(normalized_.top(rows), transposed(shaped(token_table, table)), logits_.top(rows));
    return cross_entropy_forward<T>(logits_.top(rows), targets);
}

template <class T> template <class S> std::span<const T> model<T>::predict(S& s, tokens in) {
    const int rows = static_cast<int>(in.size());
    trunk_forward(s, in, rows);
    const use table(s, token_table);
    const matrix<T> logits = logits_.top(1);
    multiply<T>(normalized_.block(rows - 1, 1, 0, config_.width), transposed(shaped(token_table, table)), logits);
    constexpr std::uint16_t any = 0;
    (void)cross_entropy_forward<T>(logits, tokens(&any, 1));  // for the probabilities that it leaves
    return {logits.data, static_cast<std::size_t>(config_.vocabulary)};
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <class T> template <class S> void model<T>::layer_backward(S& s, int layer, int rows, int length) {
    const activations& a = layers_[static_cast<std::size_t>(layer)];
    const auto top = [&](matrix<T> m) { return m.top(rows); };
    const auto data = [&](in_layer p) { return s.gradient(at(layer, p)).data(); };
    const auto ready = [&](in_layer weight, in_layer bias) {
        s.gradient_ready(at(layer, bias));
        s.gradient_ready(at(layer, weight));
    };
    const matrix<T> d_stream = top(d_stream_), d_narrow = top(d_narrow_), d_wide = top(d_wide_);
    const matrix<T> d_qkv(d_wide_.data, rows, 3 * config_.width);
    {
        const use weight(s, at(layer, contract_weight));
        multiply<T>(d_stream, transposed(shaped(at(layer, contract_weight), weight)), d_wide);
    }
    gelu_backward<T>(a.expanded.data, hidden_.data, d_wide.data, d_wide.size());
    linear_backward_weight<T>(d_stream, top(hidden_), gradient(s, at(layer, contract_weight)), data(contract_bias));
    ready(contract_weight, contract_bias);
    {
        const use weight(s, at(layer, expand_weight));
        linear_backward<T>(d_wide, top(a.norm2), shaped(at(layer, expand_weight), weight), d_narrow,
                           gradient(s, at(layer, expand_weight)), data(expand_bias));
    }
    ready(expand_weight, expand_bias);
    {
        const use gain(s, at(layer, norm2_gain));
        layer_norm_backward<T>(d_narrow, top(a.middle), gain, a.statistics2, d_stream, data(norm2_gain),
                               data(norm2_bias));
    }
    ready(norm2_gain, norm2_bias);
    {
        const use weight(s, at(layer, project_weight));
        linear_backward<T>(d_stream, top(a.attended), shaped(at(layer, project_weight), weight), d_narrow,
                           gradient(s, at(layer, project_weight)), data(project_bias));
    }
    ready(project_weight, project_bias);
    attention_backward<T>(attention_of(rows, length), d_narrow, top(a.qkv), top(a.attended), a.log_sum_exp, d_qkv,
                          scores_);
    {
        const use weight(s, at(layer, attention_weight));
        linear_backward<T>(d_qkv, top(a.norm1), shaped(at(layer, attention_weight), weight), d_narrow,
                           gradient(s, at(layer, attention_weight)), data(attention_bias));
    }
    ready(attention_weight, attention_bias);
    {
        const use gain(s, at(layer, norm1_gain));
        layer_norm_backward<T>(d_narrow, top(a.in), gain, a.statistics1, d_stream, data(norm1_gain), data(norm1_bias));
    }
    ready(norm1_gain, norm1_bias);
}

template <class T> template <class S> void model<T>::backward(S& s, tokens in, tokens targets, int length, T scale) {
    const int rows = static_cast<int>(in.size());
    const matrix<T> d_logits = logits_.top(rows), d_stream = d_stream_.top(rows), d_narrow = d_narrow_.top(rows);
    cross_entropy_backward<T>(d_logits, targets, scale);
    {
        const use table(s, token_table);
        multiply<T>(d_logits, shaped(token_table, table), d_narrow);
    }
    multiply<T>(transposed(d_logits), normalized_.top(rows), gradient(s, token_table), 1);
    std::fill(d_stream.data, d_stream.data + d_stream.size(), T{0});
    {
        const use gain(s, final_gain());
        layer_norm_backward<T>(d_narrow, last_.top(rows), gain, final_statistics_, d_stream,
                               s.gradient(final_gain()).data(), s.gradient(final_bias()).data());
    }
    s.gradient_ready(final_bias());
    s.gradient_ready(final_gain());
    for (int l = config_.layers - 1; l >= 0; --l) { layer_backward(s, l, rows, length); }
    embedding_backward<T>(in, length, d_stream, gradient(s, token_table), gradient(s, position_table));
    s.gradient_ready(position_table);
    s.gradient_ready(token_table);
}

}  // namespace transformer
