// The model: the layers put together, forward and backward, over any mathematics (host_math.hpp, cuda/math.cuh).
// Needs parameters.hpp and matrix.hpp. Parameters are reached through a strategy only (before_use, after_use, gradient,
// gradient_ready), so the same code trains replicated, sharded or compressed.
#pragma once

#include <algorithm>    // copy
#include <cstddef>      // byte, size_t
#include <cstdint>      // seed, positions
#include <exception>    // uncaught_exceptions
#include <span>         // positions
#include <type_traits>  // element types
#include <utility>      // declval
#include <vector>       // saved activations

#include <tutti/core/buffer.hpp>        // storage of parameters and activations
#include <tutti/core/state.hpp>         // hash_bytes
#include <tutti/strategy/strategy.hpp>  // parameters

#include "matrix.hpp"
#include "parameters.hpp"

namespace transformer {

/// What backward computes again instead of keeping it. The results are the same to the last bit.
enum class recompute : int {
    nothing = 0,
    gelu = 1,   ///< GELU's output
    norms = 2,  ///< that, and the outputs of layer normalization
};

/// Attention of rows whose sequences other ranks have parts of, by layer. Forward of all layers, then backward of all.
///
/// Semantics  collective: a rank without rows calls it too. As Math's attention, but the rows' sequences are its own
///            business; `qkv` and `out` stay as they are until backward has returned.
template <class T> struct shared_attention {
    virtual ~shared_attention() = default;
    virtual void forward(int layer, matrix<const T> qkv, matrix<T> out) = 0;
    virtual void backward(int layer, matrix<const T> d_out, matrix<T> d_qkv) = 0;
};

/// Rows of documents: tokens, their targets (or no_target), and where they stand in their documents.
struct document_rows {
    tokens in, targets;
    std::span<const std::int64_t> positions;
};

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

/// GPT-2, with room for `batch` sequences of `context` tokens.
///
/// Math         where and in what precision the steps run. It names each step in the form that a device fuses:
///   take             the tokens of the following steps, of sequences of one length, or with the position of each
///   embed, layer_norm, linear, attention   and their backward
///   linear_onto      out = residual + in * weight + bias: the sum is stored once, rounded once
///   linear_gelu      before = in * weight + bias; out = GELU(before), which may be the same memory
///   linear_backward_input_gelu   d_before = (d_out * weight^T) times GELU's slope at before; restores `out` where
///                    gelu_backward_restores_output says so
///   linear_backward_weight       adds to both gradients; all gradients of parameters are added to
///   loss             returned at once
///   add_loss         for forward_model: of some rows, added to a number in the queue's memory
///   loss_and_gradient            added to the sum that take_loss() returns; turns logits into their gradient
///                Steps run in the order of math.queue().
/// Semantics    attach `parameters()` to a strategy; then per micro-batch forward_training(), backward(). Tokens must
///              live until backward() has returned.
/// Determinism  initial weights are a function of (seed, tensor, element); no result depends on time or threads.
/// Cost         a step takes 6 flops a weight and token, plus attention. For each token and layer forward keeps 16
///              * width elements; 12 with recompute::gelu, or 8 where GELU's input is computed again with its output;
///              2 * width less with recompute::norms.
template <class Math> class model {
public:
    using element = typename Math::element;
    using queue_type = typename Math::queue_type;
    using memory_type = typename queue_type::memory_type;

private:
    using T = element;
    using Q = queue_type;
    using M = memory_type;
    using real = typename Math::real;
    using statistics = typename Math::statistics;

public:
    model(const configuration& c, int batch, std::uint64_t seed, Math math = Math{}, recompute level = recompute::gelu);

    /// All parameters in model order, in one contiguous buffer; names and layouts are those of GPT-2's files.
    [[nodiscard]] tutti::strategy::parameters<T, M>& parameters() { return parameters_; }
    [[nodiscard]] std::size_t parameter_count() const { return values_.size(); }
    /// The contiguous buffer itself: what is hashed and saved.
    [[nodiscard]] tutti::view<const T, M> values() const { return values_; }
    /// A view where the host can read it: the view itself, or a copy.
    template <class U> [[nodiscard]] auto on_host(tutti::view<const U, M> v) const {
        if constexpr (M::host_accessible) {
            return v;
        } else {
            std::vector<U> copy(v.size());
            download(math_.queue(), v, tutti::view<U>(copy));
            return copy;
        }
    }
    /// The other way.
    template <class U> void put(const std::vector<U>& from, tutti::view<U, M> to) const {
        if constexpr (M::host_accessible) {
            std::copy(from.begin(), from.end(), to.begin());
        } else {
            upload(math_.queue(), tutti::view<const U>(from), to);
        }
    }
    /// Of all values, wherever they are. Cost: on a device, a copy of them all.
    [[nodiscard]] std::uint64_t hash() const {
        const auto all = on_host(values());
        return tutti::hash_bytes(tutti::as_bytes(tutti::view<const T>(all)));
    }
    [[nodiscard]] const configuration& config() const { return config_; }
    [[nodiscard]] int batch() const { return batch_; }
    /// Where its memory is counted.
    [[nodiscard]] const tutti::memory_account& account() const { return memory_.account(); }

    /// Sum over all tokens of -ln p(target), for in.size() / length sequences of `length` <= context tokens.
    template <class S> [[nodiscard]] double forward(S& s, tokens in, tokens targets, int length) {
        trunk_forward(s, in, targets, length);
        classify(s);
        return math_.loss(logits_.top(rows_));
    }

    /// Forward of a training step: the loss stays where it is computed until take_loss(), and backward() will add the
    /// gradient of scale * (the sum that forward returns).
    template <class S> void forward_training(S& s, tokens in, tokens targets, int length, real scale) {
        trunk_forward(s, in, targets, length);
        classify(s);
        math_.loss_and_gradient(logits_.top(rows_), scale);
    }
    /// The same of rows, at most batch * context of them, that attend by `attention`, which backward() uses too.
    template <class S>
    void forward_training(S& s, const document_rows& rows, shared_attention<T>& attention, real scale) {
        rows_ = static_cast<int>(rows.in.size());
        shared_ = &attention;
        math_.take(rows.in, rows.targets, rows.positions);
        layers_forward(s);
        classify(s);
        math_.loss_and_gradient(logits_.top(rows_), scale);
    }
    /// Adds to the strategy's gradients and announces each when it is complete.
    template <class S> void backward(S& s);
    /// The losses of the calls of forward_training since the last call of this.
    [[nodiscard]] double take_loss() { return math_.take_loss(); }

    /// Probabilities of the token after `in`, a single sequence of at most `context` tokens.
    template <class S> [[nodiscard]] auto predict(S& s, tokens in);

private:
    [[nodiscard]] std::size_t final_gain() const { return at(config_.layers, in_layer{}); }
    [[nodiscard]] std::size_t final_bias() const { return final_gain() + 1; }

    // What backward needs of a layer's forward pass.
    struct activations {
        matrix<T> in, norm1, qkv, attended, middle, norm2, expanded, hidden;
        statistics* statistics1;
        statistics* statistics2;
        real* log_sum_exp;
    };

    void make_parameters(std::uint64_t seed);
    template <class Take> void lay_out(Take take);
    [[nodiscard]] attention_shape attention_of() const {
        return {rows_ / length_, length_, config_.heads, config_.width / config_.heads};
    }
    template <class S> void trunk_forward(S& s, tokens in, tokens targets, int length) {
        rows_ = static_cast<int>(in.size());
        length_ = length;
        shared_ = nullptr;
        math_.take(in, targets, length);
        layers_forward(s);
    }
    template <class S> void layers_forward(S& s);
    template <class S> void classify(S& s) {
        const use table(s, token_table);  // tied: the classifier's weight is the token table
        math_.classify(normalized_.top(rows_), shaped(token_table, table), logits_.top(rows_));
    }
    template <class S> void layer_forward(S& s, int layer, matrix<T> out);
    template <class S> void layer_backward(S& s, int layer);
    template <class S> void norm1_forward(S& s, int layer) {
        const activations& a = layers_[static_cast<std::size_t>(layer)];
        const use gain(s, at(layer, norm1_gain)), bias(s, at(layer, norm1_bias));
        math_.layer_norm(a.in.top(rows_), gain, bias, a.norm1.top(rows_), a.statistics1);
    }
    template <class S> void norm2_forward(S& s, int layer) {
        const activations& a = layers_[static_cast<std::size_t>(layer)];
        const use gain(s, at(layer, norm2_gain)), bias(s, at(layer, norm2_bias));
        math_.layer_norm(a.middle.top(rows_), gain, bias, a.norm2.top(rows_), a.statistics2);
    }
    template <class S> void expand_forward(S& s, int layer) {
        const activations& a = layers_[static_cast<std::size_t>(layer)];
        const use weight(s, at(layer, expand_weight)), bias(s, at(layer, expand_bias));
        math_.linear_gelu(a.norm2.top(rows_), shaped(at(layer, expand_weight), weight), bias, a.expanded.top(rows_),
                          a.hidden.top(rows_));
    }

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
    Math math_;
    recompute recompute_;
    int rows_ = 0, length_ = 0;              // of the micro-batch at hand
    shared_attention<T>* shared_ = nullptr;  // its attention, where that is not Math's
    tutti::strategy::parameters<T, M> parameters_;
    Q memory_;
    tutti::buffer<T, Q> values_;
    tutti::buffer<std::byte, Q> workspace_;
    std::vector<activations> layers_;
    matrix<T> last_, normalized_, logits_;  // after the last layer: residual stream, normalized, logits
    statistics* final_statistics_;
    matrix<T> d_stream_, d_narrow_, d_wide_;  // gradients of the residual stream, of `width` and of 4 x `width` columns
};

// ---- parameters and storage -----------------------------------------------------------------------------------------

template <class Math>
model<Math>::model(const configuration& c, int batch, std::uint64_t seed, Math math, recompute level)
    : config_(c)
    , batch_(batch)
    , math_(std::move(math))
    , recompute_(level)
    , memory_(math_.queue())
    , values_(memory_, 0)
    , workspace_(memory_, 0) {
    make_parameters(seed);
    constexpr std::size_t apart = 256;  // rows of different matrices share no cache line, and device loads are aligned
    std::size_t needed = 0;             // the same walk twice: once to count, once to hand out
    lay_out([&](std::size_t bytes) -> std::byte* {
        needed += (bytes + apart - 1) / apart * apart;
        return nullptr;
    });
    workspace_ = tutti::buffer<std::byte, Q>(memory_, needed);
    std::byte* next = workspace_.data();
    lay_out([&](std::size_t bytes) {
        std::byte* const p = next;
        next += (bytes + apart - 1) / apart * apart;
        return p;
    });
}

template <class Math> void model<Math>::make_parameters(std::uint64_t seed) {
    const std::vector<declaration> list = parameters_of(config_);
    std::size_t total = 0;
    for (const declaration& d : list) { total += d.size(); }
    values_ = tutti::buffer<T, Q>(memory_, total);
    std::size_t offset = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
        const auto value = values_.view().sub(offset, list[i].size());
        initialize<T>(math_.queue(), value, list[i], seed, static_cast<std::uint32_t>(i));
        parameters_.push_back({.name = list[i].name,
                               .shape = list[i].shape,
                               .decay = list[i].shape.size() == 2,  // gains and biases do not decay
                               .value = value,
                               .gradient = {}});
        offset += value.size();
    }
}

template <class Math> template <class Take> void model<Math>::lay_out(Take take) {
    const int rows = batch_ * config_.context;
    const int w = config_.width;
    const auto tall = [&](int r, int c) {
        const int stride = (c + Math::row_multiple - 1) / Math::row_multiple * Math::row_multiple;
        const std::size_t count = static_cast<std::size_t>(r) * static_cast<std::size_t>(stride);
        return matrix<T>(reinterpret_cast<T*>(take(count * sizeof(T))), r, c, stride);
    };
    const auto flat = [&](int r, int c) {
        const std::size_t count = static_cast<std::size_t>(r) * static_cast<std::size_t>(c);
        return matrix<T>(reinterpret_cast<T*>(take(count * sizeof(T))), r, c);
    };
    const auto row_statistics = [&] {
        return reinterpret_cast<statistics*>(take(sizeof(statistics) * static_cast<std::size_t>(rows)));
    };
    // What backward computes again needs one place for all layers.
    const bool keeps_hidden = recompute_ == recompute::nothing;
    const bool keeps_expanded = keeps_hidden || Math::gelu_backward_restores_output;
    const bool keeps_norms = recompute_ < recompute::norms;
    const matrix<T> hidden = keeps_hidden ? matrix<T>() : flat(rows, 4 * w);
    const matrix<T> expanded = keeps_expanded ? matrix<T>() : flat(rows, 4 * w);
    const matrix<T> norm = keeps_norms ? matrix<T>() : flat(rows, w);
    layers_.resize(static_cast<std::size_t>(config_.layers));
    for (auto& a : layers_) {
        a = {.in = flat(rows, w),
             .norm1 = keeps_norms ? flat(rows, w) : norm,
             .qkv = flat(rows, 3 * w),
             .attended = flat(rows, w),
             .middle = flat(rows, w),
             .norm2 = keeps_norms ? flat(rows, w) : norm,
             .expanded = keeps_expanded ? flat(rows, 4 * w) : expanded,
             .hidden = keeps_hidden ? flat(rows, 4 * w) : hidden,
             .statistics1 = row_statistics(),
             .statistics2 = row_statistics(),
             .log_sum_exp = reinterpret_cast<real*>(
                 take(sizeof(real) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(config_.heads)))};
    }
    last_ = flat(rows, w);
    normalized_ = flat(rows, w);
    final_statistics_ = row_statistics();
    logits_ = tall(rows, config_.vocabulary);
    d_stream_ = flat(rows, w);
    d_narrow_ = flat(rows, w);
    d_wide_ = flat(rows, 4 * w);
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class Math> template <class S> void model<Math>::layer_forward(S& s, int layer, matrix<T> out) {
    const activations& a = layers_[static_cast<std::size_t>(layer)];
    const auto top = [&](matrix<T> m) { return m.top(rows_); };
    norm1_forward(s, layer);
    {
        const use weight(s, at(layer, attention_weight)), bias(s, at(layer, attention_bias));
        math_.linear(top(a.norm1), shaped(at(layer, attention_weight), weight), bias, top(a.qkv));
    }
    if (shared_ != nullptr) {
        shared_->forward(layer, top(a.qkv), top(a.attended));
    } else {
        math_.attention(attention_of(), top(a.qkv), top(a.attended), a.log_sum_exp);
    }
    {
        const use weight(s, at(layer, project_weight)), bias(s, at(layer, project_bias));
        math_.linear_onto(top(a.attended), shaped(at(layer, project_weight), weight), bias, top(a.in), top(a.middle));
    }
    norm2_forward(s, layer);
    expand_forward(s, layer);
    {
        const use weight(s, at(layer, contract_weight)), bias(s, at(layer, contract_bias));
        math_.linear_onto(top(a.hidden), shaped(at(layer, contract_weight), weight), bias, top(a.middle), top(out));
    }
}

template <class Math> template <class S> void model<Math>::layers_forward(S& s) {
    {
        const use token(s, token_table), position(s, position_table);
        math_.embed(shaped(token_table, token), shaped(position_table, position), layers_[0].in.top(rows_));
    }
    for (int l = 0; l < config_.layers; ++l) {
        layer_forward(s, l, (l + 1 < config_.layers ? layers_[static_cast<std::size_t>(l) + 1].in : last_).top(rows_));
    }
    const use gain(s, final_gain()), bias(s, final_bias());
    math_.layer_norm(last_.top(rows_), gain, bias, normalized_.top(rows_), final_statistics_);
}

template <class Math> template <class S> auto model<Math>::predict(S& s, tokens in) {
    const int last = static_cast<int>(in.size()) - 1;
    std::vector<tokens::value_type> whole(in.begin(), in.end());
    // No token sees a later one: where each length has a cost of its own, all are computed at full length.
    if (Math::wants_whole_context) { whole.resize(static_cast<std::size_t>(config_.context)); }
    trunk_forward(s, whole, whole, static_cast<int>(whole.size()));
    const use table(s, token_table);
    const matrix<T> logits = logits_.top(1);
    math_.classify(normalized_.block(last, 1, 0, config_.width), shaped(token_table, table), logits);
    return math_.probabilities(logits);
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <class Math> template <class S> void model<Math>::layer_backward(S& s, int layer) {
    const activations& a = layers_[static_cast<std::size_t>(layer)];
    const auto top = [&](matrix<T> m) { return m.top(rows_); };
    const auto data = [&](in_layer p) { return s.gradient(at(layer, p)).data(); };
    const auto weights = [&](matrix<T> d_out, matrix<T> in, in_layer weight, in_layer bias) {
        math_.linear_backward_weight(d_out, in, gradient(s, at(layer, weight)), data(bias));
        s.gradient_ready(at(layer, bias));
        s.gradient_ready(at(layer, weight));
    };
    const auto through_norm = [&](matrix<T> in, statistics* rows, in_layer gain_of, in_layer bias_of) {
        {
            const use gain(s, at(layer, gain_of));
            math_.layer_norm_backward(top(d_narrow_), in, gain, rows, top(d_stream_), true, data(gain_of),
                                      data(bias_of));
        }
        s.gradient_ready(at(layer, bias_of));
        s.gradient_ready(at(layer, gain_of));
    };
    const matrix<T> d_stream = top(d_stream_), d_narrow = top(d_narrow_), d_wide = top(d_wide_);
    const matrix<T> d_qkv(d_wide_.data, rows_, 3 * config_.width);

    if (recompute_ == recompute::norms) { norm2_forward(s, layer); }
    if (recompute_ != recompute::nothing && !Math::gelu_backward_restores_output) { expand_forward(s, layer); }
    {
        const use weight(s, at(layer, contract_weight));
        math_.linear_backward_input_gelu(d_stream, shaped(at(layer, contract_weight), weight), top(a.expanded),
                                         top(a.hidden), d_wide);
    }
    weights(d_stream, top(a.hidden), contract_weight, contract_bias);
    {
        const use weight(s, at(layer, expand_weight));
        math_.linear_backward_input(d_wide, shaped(at(layer, expand_weight), weight), d_narrow);
    }
    weights(d_wide, top(a.norm2), expand_weight, expand_bias);
    through_norm(top(a.middle), a.statistics2, norm2_gain, norm2_bias);
    {
        const use weight(s, at(layer, project_weight));
        math_.linear_backward_input(d_stream, shaped(at(layer, project_weight), weight), d_narrow);
    }
    weights(d_stream, top(a.attended), project_weight, project_bias);
    if (shared_ != nullptr) {
        shared_->backward(layer, d_narrow, d_qkv);
    } else {
        math_.attention_backward(attention_of(), d_narrow, top(a.qkv), top(a.attended), a.log_sum_exp, d_qkv);
    }
    {
        const use weight(s, at(layer, attention_weight));
        math_.linear_backward_input(d_qkv, shaped(at(layer, attention_weight), weight), d_narrow);
    }
    if (recompute_ == recompute::norms) { norm1_forward(s, layer); }
    weights(d_qkv, top(a.norm1), attention_weight, attention_bias);
    through_norm(top(a.in), a.statistics1, norm1_gain, norm1_bias);
}

template <class Math> template <class S> void model<Math>::backward(S& s) {
    const matrix<T> d_logits = logits_.top(rows_), d_stream = d_stream_.top(rows_), d_narrow = d_narrow_.top(rows_);
    {
        const use table(s, token_table);
        math_.classify_backward_input(d_logits, shaped(token_table, table), d_narrow);
    }
    math_.classify_backward_table(d_logits, normalized_.top(rows_), gradient(s, token_table));
    {
        const use gain(s, final_gain());
        math_.layer_norm_backward(d_narrow, last_.top(rows_), gain, final_statistics_, d_stream, false,
                                  s.gradient(final_gain()).data(), s.gradient(final_bias()).data());
    }
    s.gradient_ready(final_bias());
    s.gradient_ready(final_gain());
    for (int l = config_.layers - 1; l >= 0; --l) { layer_backward(s, l); }
    math_.embed_backward(d_stream, gradient(s, token_table), gradient(s, position_table));
    s.gradient_ready(position_table);
    s.gradient_ready(token_table);
}

}  // namespace transformer
