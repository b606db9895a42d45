// The model without backward: one module after the other, each on weights that are there for as long as it runs.
// Needs matrix.hpp, parameters.hpp and zeroth. Weights may be anywhere: in one view, or on the host and only passing by.
#pragma once

#include <algorithm>  // max, min
#include <cstddef>    // size_t
#include <cstdint>    // tensors, counts
#include <span>       // probes
#include <utility>    // move
#include <vector>     // streams

#include <tutti/core/buffer.hpp>       // activations
#include <tutti/core/elementwise.hpp>  // fill, scale
#include <tutti/zeroth/layout.hpp>     // model_shape
#include <tutti/zeroth/offload.hpp>    // module_weights
#include <tutti/zeroth/probe.hpp>      // probe, loss_value

#include "matrix.hpp"
#include "parameters.hpp"

namespace transformer {

/// The model as modules: both tables; each layer; the final normalization and, tied, the token table. Tensor numbers are
/// positions in the list of parameters.
[[nodiscard]] inline tutti::zeroth::model_shape modules_of(const configuration& c) {
    const std::vector<declaration> list = parameters_of(c);
    const auto tensor = [&](std::size_t i) -> tutti::zeroth::tensor_shape {
        return {.tensor = static_cast<std::uint32_t>(i), .count = list[i].size(), .decayed = list[i].shape.size() == 2};
    };
    tutti::zeroth::model_shape m;
    m.head = {tensor(token_table), tensor(position_table)};
    for (int l = 0; l < c.layers; ++l) {
        auto& block = m.blocks.emplace_back();
        for (std::size_t p = 0; p < per_layer; ++p) { block.push_back(tensor(at(l, static_cast<in_layer>(p)))); }
    }
    const std::size_t final_gain = at(c.layers, in_layer{});
    m.tail = {tensor(final_gain), tensor(final_gain + 1), tensor(token_table)};
    return m;
}

/// GPT-2's forward pass in the modules of modules_of(), for zeroth::offload and zeroth::in_memory.
///
/// Math         as model's, of which it uses what goes forward, and add_loss(logits, first, sum): the losses of rows that
///              begin with row `first` of the batch are added to *sum, where the queue's memory is.
/// Semantics    take() a micro-batch, then passes over it: a block_model whose `branches` streams are at work in turn. What
///              `micro_batch` counts is the caller's business. forward() and predict() run a pass of a pipeline that
///              runs this model, with its weights as they are.
/// Determinism  each module does the same whatever pipeline runs it, if weights are aligned alike.
/// Cost         the flops of forward. Of a token: a stream of `width` elements a branch, `width` and 4 * width for all
///              layers; logits of 512 tokens at a time.
template <class Math> class forward_model {
public:
    using element = typename Math::element;
    using queue_type = typename Math::queue_type;

private:
    using T = element;
    using Q = queue_type;
    using M = typename Q::memory_type;
    using real = typename Math::real;
    using statistics = typename Math::statistics;
    using weights = tutti::zeroth::module_weights<T, M>;
    static constexpr int logit_rows = 512;

    configuration config_;
    int batch_;
    Math math_;
    int rows_ = 0, length_ = 0;
    bool predicts_ = false;  // what comes after row last_
    int last_ = 0;
    std::vector<real> probabilities_;  // after the last token
    std::vector<tutti::buffer<T, Q>> streams_;
    tutti::buffer<T, Q> narrow_, wide_;
    tutti::buffer<statistics, Q> statistics_;
    tutti::buffer<real, Q> log_sum_exp_;

    [[nodiscard]] static std::size_t area(int rows, int columns) {
        return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    }
    [[nodiscard]] static int logit_stride(const configuration& c) {
        return (c.vocabulary + Math::row_multiple - 1) / Math::row_multiple * Math::row_multiple;
    }
    [[nodiscard]] static std::size_t wide_size(const configuration& c, int rows) {
        return std::max(area(rows, 4 * c.width), area(std::min(rows, logit_rows), logit_stride(c)));
    }
    // A tensor of a module in the shape that layers take.
    [[nodiscard]] static matrix<const T> shaped(tutti::view<const T, M> w, int rows) {
        return {w.data(), rows, static_cast<int>(w.size() / static_cast<std::size_t>(rows))};
    }
    [[nodiscard]] matrix<T> stream(std::size_t branch) { return {streams_[branch].data(), rows_, config_.width}; }
    [[nodiscard]] matrix<T> logits(int rows) { return {wide_.data(), rows, config_.vocabulary, logit_stride(config_)}; }

public:
    /// Room for `branches` streams of `batch` sequences of `context` tokens.
    forward_model(Q q, const configuration& c, int batch, std::size_t branches, Math math)
        : config_(c)
        , batch_(batch)
        , math_(std::move(math))
        , narrow_(q, area(batch * c.context, c.width))
        , wide_(q, wide_size(c, batch * c.context))
        , statistics_(q, area(batch, c.context))
        , log_sum_exp_(q, area(batch * c.context, c.heads)) {
        for (std::size_t b = 0; b < branches; ++b) { streams_.emplace_back(q, area(batch * c.context, c.width)); }
    }
    /// What the constructor takes, in bytes.
    [[nodiscard]] static std::size_t bytes(const configuration& c, int batch, std::size_t branches) {
        const int rows = batch * c.context;
        return ((branches + 1) * area(rows, c.width) + wide_size(c, rows)) * sizeof(T) +
               area(batch, c.context) * sizeof(statistics) + area(rows, c.heads) * sizeof(real);
    }

    [[nodiscard]] const configuration& config() const { return config_; }
    [[nodiscard]] int batch() const { return batch_; }

    /// The tokens of the following passes, sequences of `length` tokens; they live until those are over.
    void take(tokens in, tokens targets, int length) {
        rows_ = static_cast<int>(in.size());
        length_ = length;
        math_.take(in, targets, length);
    }

    // ---- a block_model ----------------------------------------------------------------------------------------------
    void head(Q, weights w, std::size_t branch, std::size_t) {
        math_.embed(shaped(w[token_table], config_.vocabulary), shaped(w[position_table], config_.position_rows()),
                    stream(branch));
    }
    void block(Q, std::size_t, weights w, std::size_t branch, std::size_t) {
        const int d = config_.width;
        const matrix<T> x = stream(branch), narrow(narrow_.data(), rows_, d), qkv(wide_.data(), rows_, 3 * d),
                        wide(wide_.data(), rows_, 4 * d);
        const auto bias = [&](in_layer p) { return w[p].data(); };
        math_.layer_norm(x, bias(norm1_gain), bias(norm1_bias), narrow, statistics_.data());
        math_.linear(narrow, shaped(w[attention_weight], d), bias(attention_bias), qkv);
        math_.attention({rows_ / length_, length_, config_.heads, d / config_.heads}, qkv, narrow, log_sum_exp_.data());
        math_.linear_onto(narrow, shaped(w[project_weight], d), bias(project_bias), x, x);
        math_.layer_norm(x, bias(norm2_gain), bias(norm2_bias), narrow, statistics_.data());
        math_.linear_gelu(narrow, shaped(w[expand_weight], d), bias(expand_bias), wide, wide);
        math_.linear_onto(wide, shaped(w[contract_weight], 4 * d), bias(contract_bias), x, x);
    }
    void tail(Q q, weights w, std::size_t branch, std::size_t, tutti::view<double, M> loss) {
        const matrix<T> narrow(narrow_.data(), rows_, config_.width);
        const matrix<const T> table = shaped(w[2], config_.vocabulary);
        math_.layer_norm(stream(branch), w[0].data(), w[1].data(), narrow, statistics_.data());
        const tutti::view<double, M> sum = loss.sub(0, 1);
        tutti::fill(q, sum, 0.0);
        tutti::fill(q, loss.sub(1, 1), static_cast<double>(rows_));
        if (predicts_) {
            math_.classify(narrow.block(last_, 1, 0, config_.width), table, logits(1));
            const auto next = math_.probabilities(logits(1));
            probabilities_.assign(next.begin(), next.end());
            return;
        }
        for (int first = 0; first < rows_; first += logit_rows) {
            const int count = std::min(logit_rows, rows_ - first);
            math_.classify(narrow.block(first, count, 0, config_.width), table, logits(count));
            math_.add_loss(logits(count), first, sum.data());
        }
        tutti::scale(q, tutti::view<const double, M>(sum), sum, 1.0 / static_cast<double>(rows_));
    }

    // ---- passes -----------------------------------------------------------------------------------------------------
    /// One module after the other on weights that are all there. `weights_of(m)`: module m's, as in its layout.
    template <class WeightsOf>
    [[nodiscard]] tutti::zeroth::loss_value run(Q q, std::size_t modules, WeightsOf weights_of,
                                                tutti::view<double, M> loss) {
        head(q, weights_of(0), 0, 0);
        for (std::size_t m = 1; m + 1 < modules; ++m) { block(q, m - 1, weights_of(m), 0, 0); }
        tail(q, weights_of(modules - 1), 0, 0, loss);
        return {tutti::fetch(q, tutti::view<const double, M>(loss.sub(0, 1)), 0.0), static_cast<std::uint32_t>(rows_)};
    }
    /// Sum over all tokens of -ln p(target), by a pipeline that runs this model.
    template <class Pipeline> [[nodiscard]] double forward(Pipeline& p, tokens in, tokens targets, int length) {
        take(in, targets, length);
        const tutti::zeroth::probe as_they_are[1];
        tutti::zeroth::loss_value loss[1];
        p.evaluate(as_they_are, 0, loss);
        return loss[0].mean * static_cast<double>(in.size());
    }
    /// Probabilities of the token after `in`, a single sequence of at most `context` tokens.
    template <class Pipeline> [[nodiscard]] std::span<const real> predict(Pipeline& p, tokens in) {
        std::vector<tokens::value_type> whole(in.begin(), in.end());
        last_ = static_cast<int>(in.size()) - 1;
        if (Math::wants_whole_context) { whole.resize(static_cast<std::size_t>(config_.context)); }
        predicts_ = true;
        static_cast<void>(forward(p, whole, whole, static_cast<int>(whole.size())));
        predicts_ = false;
        return probabilities_;
    }
};

}  // namespace transformer
