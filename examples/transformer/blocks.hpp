// blocks: the layers of a transformer put together, forward and backward, over any mathematics (host_math.hpp,
// cuda/math.cuh), for a whole model (model.hpp) or a rank's part of one (stages.hpp). Needs parameters.hpp, matrix.hpp.
// Parameters are reached through a strategy only (before_use, after_use, gradient, gradient_ready).
#pragma once

#include <algorithm>  // max
#include <cstddef>    // byte, size_t
#include <exception>  // uncaught_exceptions
#include <utility>    // declval, move
#include <vector>     // layers

#include <tutti/core/buffer.hpp>       // storage of activations
#include <tutti/core/elementwise.hpp>  // copy
#include <tutti/core/view.hpp>         // views

#include "matrix.hpp"
#include "parameters.hpp"

namespace transformer {

/// What backward computes again instead of keeping it. The results are the same to the last bit.
enum class recompute : int {
    nothing = 0,
    gelu = 1,    ///< GELU's output
    norms = 2,   ///< that, and the outputs of layer normalization
    stages = 3,  ///< all of a pipeline's stage but what enters it: stages.hpp alone
};

/// Attention of rows whose sequences other ranks have parts of. What forward keeps is in a slot until backward: one for
/// each layer of each micro-batch in flight.
///
/// Semantics  collective: a rank without rows calls it too. As Math's attention, but the rows' sequences are its own
///            business; `qkv` and `out` stay as they are until backward has returned.
template <class T> struct shared_attention {
    virtual ~shared_attention() = default;
    virtual void forward(int slot, matrix<const T> qkv, matrix<T> out) = 0;
    virtual void backward(int slot, matrix<const T> d_out, matrix<T> d_qkv) = 0;
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

/// Layers, and what comes before the first and behind the last, of as many rows at a time as there is room for.
///
/// Math         where and in what precision the steps run. It names each step in the form that a device fuses:
///   take             the tokens of the following steps, of sequences of one length, or with the position of each
///   embed, layer_norm, linear, attention   and their backward; linear's bias may be null, and embed's positions
///   linear_onto      out = residual + in * weight + bias: the sum is stored once, rounded once
///   linear_gelu      before = in * weight + bias; out = GELU(before), which may be the same memory
///   linear_backward_input_gelu   d_before = (d_out * weight^T) times GELU's slope at before; restores `out` where
///                    gelu_backward_restores_output says so
///   linear_backward_weight       adds to both gradients; all gradients of parameters are added to
///   outer_rows, on_whole_rows, sum_of_parts, back_from_whole_rows   where layers that ranks share begin and end, as
///                    tutti/parallel/tensor_group says: `rows` is the number of all, matrices outside have outer_rows
///   loss             returned at once
///   add_loss         for forward_model: of some rows, added to a number in the queue's memory
///   loss_and_gradient            added to the sum that take_loss() returns; turns logits into their gradient
///                Steps run in the order of math.queue().
/// Semantics    `list` has all parameters of the model in the shapes that this rank has of them, by which widths are
///              known: the residual stream is whole, heads and columns between may be some of them. Of the rows of the
///              residual stream, of its gradient and of normalization, this rank has outer_rows. Indices of parameters
///              are those of the whole model.
///   deferred     gradients of the layers' weights are left to layer_backward_weight, which finds what it needs in the
///                micro-batch's memory.
/// Cost         for each token and layer forward keeps 16 * width elements; 12 with recompute::gelu, or 8 where GELU's
///              input is computed again with its output; 2 * width less with recompute::norms. Deferred: 9 more.
template <class Math> class blocks {
public:
    using element = typename Math::element;
    using queue_type = typename Math::queue_type;
    using memory_type = typename queue_type::memory_type;

protected:
    using T = element;
    using Q = queue_type;
    using M = memory_type;
    using real = typename Math::real;
    using statistics = typename Math::statistics;

    // What backward needs of a layer's forward pass; of its own backward pass, the gradients that deferred ones need.
    struct activations {
        matrix<const T> in;
        matrix<T> norm1, qkv, attended, middle, norm2, expanded, hidden;
        statistics* statistics1;
        statistics* statistics2;
        real* log_sum_exp;
        matrix<T> d_out{}, d_expanded{}, d_middle{}, d_qkv{};
    };
    // What is kept of a micro-batch in some consecutive layers.
    struct kept_activations {
        std::vector<matrix<T>> stream;  // what enters each layer; none for the first one where others have it
        std::vector<activations> layers;
        matrix<T> last, normalized;  // behind the last layer of all: residual stream, normalized
        statistics* final_statistics = nullptr;
    };

    blocks(const configuration& c, std::vector<declaration> list, int most_rows, recompute level, bool deferred,
           Math math)
        : config_(c)
        , list_(std::move(list))
        , math_(std::move(math))
        , recompute_(level)
        , deferred_(deferred)
        , most_rows_(most_rows)
        , memory_(math_.queue())
        , attended_(static_cast<int>(list_[at(0, project_weight)].shape[0]))
        , expanded_(static_cast<int>(list_[at(0, expand_bias)].shape[0]))
        , words_(static_cast<int>(list_[token_table].shape[0])) {}

    [[nodiscard]] std::size_t final_gain() const { return at(config_.layers, in_layer{}); }
    [[nodiscard]] std::size_t final_bias() const { return final_gain() + 1; }

    // Memory for what walk(take) takes: `take` returns as many bytes as it is asked for. The same walk twice: once to
    // count, once to hand out.
    template <class Walk> [[nodiscard]] tutti::buffer<std::byte, Q> room_for(Walk walk) const {
        constexpr std::size_t apart = 256;  // rows of different matrices share no cache line, device loads are aligned
        std::size_t needed = 0;
        walk([&](std::size_t bytes) -> std::byte* {
            needed += (bytes + apart - 1) / apart * apart;
            return nullptr;
        });
        tutti::buffer<std::byte, Q> memory(memory_, needed);
        std::byte* next = memory.data();
        walk([&](std::size_t bytes) {
            std::byte* const p = next;
            next += (bytes + apart - 1) / apart * apart;
            return p;
        });
        return memory;
    }
    // What all micro-batches have in common. `classifies`: logits too.
    template <class Take> void lay_out_shared(Take take, bool classifies) {
        const int w = config_.width;
        if (recompute_ != recompute::nothing && !deferred_) {
            shared_hidden_ = flat(take, expanded_);
            if (!Math::gelu_backward_restores_output) { shared_expanded_ = flat(take, expanded_); }
            if (recompute_ == recompute::norms) { shared_norm_ = outer(take, w); }
        }
        if (classifies) {
            const int stride = (words_ + Math::row_multiple - 1) / Math::row_multiple * Math::row_multiple;
            const std::size_t count = static_cast<std::size_t>(most_rows_) * static_cast<std::size_t>(stride);
            logits_ = matrix<T>(reinterpret_cast<T*>(take(count * sizeof(T))), most_rows_, words_, stride);
        }
        d_stream_ = outer(take, w);
        const matrix<T> d_norm(nullptr, most_outer(), w), d_attended(nullptr, most_rows_, attended_);
        d_narrow_ = reinterpret_cast<T*>(take(std::max(d_norm.size(), d_attended.size()) * sizeof(T)));
        d_wide_ = flat(take, std::max(expanded_, 3 * attended_));
    }
    // Those of a micro-batch in `layers` layers: the first one of all if it `embeds`, the last one if it `classifies`.
    template <class Take> void lay_out(Take take, kept_activations& k, int layers, bool embeds, bool classifies) const {
        const int w = config_.width;
        const auto row_statistics = [&] {
            return reinterpret_cast<statistics*>(take(sizeof(statistics) * static_cast<std::size_t>(most_outer())));
        };
        const bool keeps_hidden = deferred_ || recompute_ == recompute::nothing;
        const bool keeps_expanded = keeps_hidden || Math::gelu_backward_restores_output;
        const bool keeps_norms = deferred_ || recompute_ < recompute::norms;
        const int heads = attended_ / (w / config_.heads);
        k.layers.resize(static_cast<std::size_t>(layers));
        k.stream.resize(static_cast<std::size_t>(layers));
        for (std::size_t l = 0; l < k.layers.size(); ++l) {
            activations& a = k.layers[l];
            if (l > 0 || embeds) { k.stream[l] = outer(take, w); }
            a = {.in = k.stream[l],
                 .norm1 = keeps_norms ? outer(take, w) : shared_norm_,
                 .qkv = flat(take, 3 * attended_),
                 .attended = flat(take, attended_),
                 .middle = outer(take, w),
                 .norm2 = keeps_norms ? outer(take, w) : shared_norm_,
                 .expanded = keeps_expanded ? flat(take, expanded_) : shared_expanded_,
                 .hidden = keeps_hidden ? flat(take, expanded_) : shared_hidden_,
                 .statistics1 = row_statistics(),
                 .statistics2 = row_statistics(),
                 .log_sum_exp = reinterpret_cast<real*>(
                     take(sizeof(real) * static_cast<std::size_t>(most_rows_) * static_cast<std::size_t>(heads)))};
            if (deferred_) {
                a.d_out = outer(take, w);
                a.d_expanded = flat(take, expanded_);
                a.d_middle = outer(take, w);
                a.d_qkv = flat(take, 3 * attended_);
            }
        }
        if (classifies) {
            k.last = outer(take, w);
            k.normalized = outer(take, w);
            k.final_statistics = row_statistics();
        }
    }

    /// The micro-batch at hand: `rows` of them, sequences of `length`, or attended to by `shared`, layer 0 in `slot`.
    void enter(int rows, int length, shared_attention<T>* shared, int slot = 0) {
        rows_ = rows;
        outer_ = math_.outer_rows(rows);
        length_ = length;
        shared_ = shared;
        first_slot_ = slot;
    }

    template <class S> void embed(S& s, matrix<T> out) {
        const use token(s, token_table), position(s, position_table);
        math_.embed(shaped(token_table, token), shaped(position_table, position), out.top(outer_));
    }
    template <class S> void layer_forward(S& s, const activations& a, int layer, matrix<T> out);
    template <class S> void final_norm(S& s, const kept_activations& k) {
        const use gain(s, final_gain()), bias(s, final_bias());
        math_.layer_norm(k.last.top(outer_), gain, bias, k.normalized.top(outer_), k.final_statistics);
    }
    // Of rows that are there whole.
    template <class S> void classify(S& s, matrix<const T> normalized, matrix<T> logits) {
        const use table(s, token_table);  // tied: the classifier's weight is the token table
        math_.classify(normalized, shaped(token_table, table), logits);
    }

    template <class S> void classify(S& s, const kept_activations& k) {
        math_.on_whole_rows(matrix<const T>(k.normalized.top(outer_)), rows_,
                            [&](matrix<const T> normalized) { classify(s, normalized, logits_.top(rows_)); });
    }

    // Of logits that are gradients already, to that of the residual stream.
    template <class S> void head_backward(S& s, const kept_activations& k);
    // d_stream_, of what leaves the layer, becomes that of what enters it.
    template <class S> void layer_backward(S& s, const activations& a, int layer);
    template <class S> void layer_backward_weight(S& s, const activations& a, int layer);
    template <class S> void embed_backward(S& s) {
        math_.on_whole_rows(matrix<const T>(d_stream_.top(outer_)), rows_, [&](matrix<const T> d_stream) {
            math_.embed_backward(d_stream, gradient(s, token_table), gradient(s, position_table));
        });
        s.gradient_ready(position_table);
        s.gradient_ready(token_table);
    }

    // Parameter i in the shape that layers take.
    [[nodiscard]] matrix<const T> shaped(std::size_t i, const T* data) const {
        return {data, static_cast<int>(list_[i].shape[0]), static_cast<int>(list_[i].shape[1])};
    }
    template <class S> [[nodiscard]] matrix<T> gradient(S& s, std::size_t i) const {
        return {s.gradient(i).data(), static_cast<int>(list_[i].shape[0]), static_cast<int>(list_[i].shape[1])};
    }

    configuration config_;
    std::vector<declaration> list_;
    Math math_;
    recompute recompute_;
    bool deferred_;
    int most_rows_;
    int rows_ = 0, outer_ = 0, length_ = 0;  // of the micro-batch at hand; rows of the residual stream
    shared_attention<T>* shared_ = nullptr;  // its attention, where that is not Math's
    int first_slot_ = 0;
    Q memory_;
    int attended_, expanded_, words_;  // columns that this rank has: of attention, of the wider layers, of logits
    matrix<T> logits_;
    matrix<T> d_stream_, d_wide_;  // gradients of the residual stream, of what is wider
    T* d_narrow_ = nullptr;        // of what is normalized, or of what is attended to

private:
    template <class Take> [[nodiscard]] static matrix<T> taken(Take& take, int rows, int columns) {
        const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
        return matrix<T>(reinterpret_cast<T*>(take(count * sizeof(T))), rows, columns);
    }
    // Of all rows that this rank attends to, and of those that it has outside of layers.
    template <class Take> [[nodiscard]] matrix<T> flat(Take& take, int columns) const {
        return taken(take, most_rows_, columns);
    }
    template <class Take> [[nodiscard]] matrix<T> outer(Take& take, int columns) const {
        return taken(take, most_outer(), columns);
    }
    [[nodiscard]] int most_outer() const { return math_.outer_rows(most_rows_); }
    [[nodiscard]] attention_shape attention_of() const {
        const int head_width = config_.width / config_.heads;
        return {rows_ / length_, length_, attended_ / head_width, head_width};
    }
    template <class S> void norm1_forward(S& s, const activations& a, int layer) {
        const use gain(s, at(layer, norm1_gain)), bias(s, at(layer, norm1_bias));
        math_.layer_norm(a.in.top(outer_), gain, bias, a.norm1.top(outer_), a.statistics1);
    }
    template <class S> void norm2_forward(S& s, const activations& a, int layer) {
        const use gain(s, at(layer, norm2_gain)), bias(s, at(layer, norm2_bias));
        math_.layer_norm(a.middle.top(outer_), gain, bias, a.norm2.top(outer_), a.statistics2);
    }
    template <class S> void expand_forward(S& s, const activations& a, int layer) {
        const use weight(s, at(layer, expand_weight)), bias(s, at(layer, expand_bias));
        math_.on_whole_rows(matrix<const T>(a.norm2.top(outer_)), rows_, [&](matrix<const T> in) {
            math_.linear_gelu(in, shaped(at(layer, expand_weight), weight), bias, a.expanded.top(rows_),
                              a.hidden.top(rows_));
        });
    }
    // Of all rows.
    template <class S>
    void weights_backward(S& s, int layer, matrix<const T> d_out, matrix<const T> in, in_layer weight, in_layer bias) {
        math_.linear_backward_weight(d_out, in, gradient(s, at(layer, weight)), s.gradient(at(layer, bias)).data());
        s.gradient_ready(at(layer, bias));
        s.gradient_ready(at(layer, weight));
    }
    // Of a layer whose weight is cut by outputs, from d_out to d_in, both gradients or, deferred, the input's.
    template <class S>
    void column_backward(S& s, int layer, matrix<T> d_out, matrix<const T> in, matrix<T> d_in, in_layer weight,
                         in_layer bias) {
        const auto input = [&](matrix<T> d_whole) {
            const use values(s, at(layer, weight));
            math_.linear_backward_input(d_out, shaped(at(layer, weight), values), d_whole);
        };
        if (deferred_) { return math_.sum_of_parts(d_in, rows_, input); }
        math_.back_from_whole_rows(in, d_in, rows_, input, [&](matrix<const T> whole) {
            weights_backward(s, layer, d_out, whole, weight, bias);
        });
    }

    matrix<T> shared_hidden_, shared_expanded_, shared_norm_;  // one place for all layers: computed again
};

template <class Math>
template <class S>
void blocks<Math>::layer_forward(S& s, const activations& a, int layer, matrix<T> out) {
    const auto top = [&](matrix<T> m) { return m.top(rows_); };
    norm1_forward(s, a, layer);
    {
        const use weight(s, at(layer, attention_weight)), bias(s, at(layer, attention_bias));
        math_.on_whole_rows(matrix<const T>(a.norm1.top(outer_)), rows_, [&](matrix<const T> in) {
            math_.linear(in, shaped(at(layer, attention_weight), weight), bias, top(a.qkv));
        });
    }
    if (shared_ != nullptr) {
        shared_->forward(first_slot_ + layer, top(a.qkv), top(a.attended));
    } else {
        math_.attention(attention_of(), top(a.qkv), top(a.attended), a.log_sum_exp);
    }
    {
        const use weight(s, at(layer, project_weight)), bias(s, at(layer, project_bias));
        math_.linear_onto(top(a.attended), shaped(at(layer, project_weight), weight), bias, a.in.top(outer_),
                          a.middle.top(outer_));
    }
    norm2_forward(s, a, layer);
    expand_forward(s, a, layer);
    {
        const use weight(s, at(layer, contract_weight)), bias(s, at(layer, contract_bias));
        math_.linear_onto(top(a.hidden), shaped(at(layer, contract_weight), weight), bias, a.middle.top(outer_),
                          out.top(outer_));
    }
}

template <class Math> template <class S> void blocks<Math>::head_backward(S& s, const kept_activations& k) {
    const matrix<T> d_logits = logits_.top(rows_), d_normalized(d_narrow_, outer_, config_.width);
    math_.back_from_whole_rows(
        matrix<const T>(k.normalized.top(outer_)), d_normalized, rows_,
        [&](matrix<T> d_whole) {
            const use table(s, token_table);
            math_.classify_backward_input(d_logits, shaped(token_table, table), d_whole);
        },
        [&](matrix<const T> normalized) {
            math_.classify_backward_table(d_logits, normalized, gradient(s, token_table));
        });
    {
        const use gain(s, final_gain());
        math_.layer_norm_backward(d_normalized, k.last.top(outer_), gain, k.final_statistics, d_stream_.top(outer_),
                                  false, s.gradient(final_gain()).data(), s.gradient(final_bias()).data());
    }
    s.gradient_ready(final_bias());
    s.gradient_ready(final_gain());
}

template <class Math> template <class S> void blocks<Math>::layer_backward(S& s, const activations& a, int layer) {
    const auto top = [&](matrix<T> m) { return m.top(rows_); };
    const auto data = [&](in_layer p) { return s.gradient(at(layer, p)).data(); };
    const auto weights = [&](matrix<const T> d_out, matrix<const T> in, in_layer weight, in_layer bias) {
        if (!deferred_) { weights_backward(s, layer, d_out, in, weight, bias); }
    };
    // d_stream_ goes on: what deferred gradients need of it is set aside.
    const matrix<T> d_stream = d_stream_.top(outer_);
    const matrix<T> d_norm(d_narrow_, outer_, config_.width), d_attended(d_narrow_, rows_, attended_);
    const auto set_aside = [&](matrix<T> to) {
        if (!deferred_) { return; }
        const tutti::view<const T, M> now(d_stream.data, d_stream.size());
        tutti::copy(math_.queue(), now, tutti::view<T, M>(to.data, now.size()));
    };
    const matrix<T> d_expanded = deferred_ ? top(a.d_expanded) : matrix<T>(d_wide_.data, rows_, expanded_);
    const matrix<T> d_qkv = deferred_ ? top(a.d_qkv) : matrix<T>(d_wide_.data, rows_, 3 * attended_);
    const auto through_norm = [&](matrix<const T> in, statistics* rows, in_layer gain_of, in_layer bias_of) {
        {
            const use gain(s, at(layer, gain_of));
            math_.layer_norm_backward(d_norm, in, gain, rows, d_stream, true, data(gain_of), data(bias_of));
        }
        s.gradient_ready(at(layer, bias_of));
        s.gradient_ready(at(layer, gain_of));
    };

    if (!deferred_ && recompute_ == recompute::norms) { norm2_forward(s, a, layer); }
    if (!deferred_ && recompute_ != recompute::nothing && !Math::gelu_backward_restores_output) {
        expand_forward(s, a, layer);
    }
    set_aside(a.d_out);
    math_.on_whole_rows(matrix<const T>(d_stream), rows_, [&](matrix<const T> d_out) {
        {
            const use weight(s, at(layer, contract_weight));
            math_.linear_backward_input_gelu(d_out, shaped(at(layer, contract_weight), weight), top(a.expanded),
                                             top(a.hidden), d_expanded);
        }
        weights(d_out, top(a.hidden), contract_weight, contract_bias);
    });
    column_backward(s, layer, d_expanded, a.norm2.top(outer_), d_norm, expand_weight, expand_bias);
    through_norm(a.middle.top(outer_), a.statistics2, norm2_gain, norm2_bias);
    set_aside(a.d_middle);
    math_.on_whole_rows(matrix<const T>(d_stream), rows_, [&](matrix<const T> d_out) {
        {
            const use weight(s, at(layer, project_weight));
            math_.linear_backward_input(d_out, shaped(at(layer, project_weight), weight), d_attended);
        }
        weights(d_out, top(a.attended), project_weight, project_bias);
    });
    if (shared_ != nullptr) {
        shared_->backward(first_slot_ + layer, d_attended, d_qkv);
    } else {
        math_.attention_backward(attention_of(), d_attended, top(a.qkv), top(a.attended), a.log_sum_exp, d_qkv);
    }
    if (!deferred_ && recompute_ == recompute::norms) { norm1_forward(s, a, layer); }
    column_backward(s, layer, d_qkv, a.norm1.top(outer_), d_norm, attention_weight, attention_bias);
    through_norm(a.in.top(outer_), a.statistics1, norm1_gain, norm1_bias);
}

template <class Math>
template <class S>
void blocks<Math>::layer_backward_weight(S& s, const activations& a, int layer) {
    // The gradient of all rows against the input of some columns, and the other way round.
    const auto rows = [&](matrix<T> d_out, matrix<T> in, in_layer weight, in_layer bias) {
        math_.on_whole_rows(matrix<const T>(d_out.top(outer_)), rows_, [&](matrix<const T> whole) {
            weights_backward(s, layer, whole, in.top(rows_), weight, bias);
        });
    };
    const auto columns = [&](matrix<T> d_out, matrix<T> in, in_layer weight, in_layer bias) {
        math_.on_whole_rows(matrix<const T>(in.top(outer_)), rows_, [&](matrix<const T> whole) {
            weights_backward(s, layer, d_out.top(rows_), whole, weight, bias);
        });
    };
    rows(a.d_out, a.hidden, contract_weight, contract_bias);
    columns(a.d_expanded, a.norm2, expand_weight, expand_bias);
    rows(a.d_middle, a.attended, project_weight, project_bias);
    columns(a.d_qkv, a.norm1, attention_weight, attention_bias);
}

}  // namespace transformer
