// The model: the layers put together, forward and backward, over any mathematics (host_math.hpp, cuda/math.cuh).
// Needs blocks.hpp. Parameters are reached through a strategy only (before_use, after_use, gradient, gradient_ready),
// so the same code trains replicated, sharded or compressed.
#pragma once

#include <algorithm>  // copy
#include <cstddef>    // byte, size_t
#include <cstdint>    // seed, positions
#include <span>       // positions
#include <utility>    // move
#include <vector>     // tokens

#include <tutti/core/buffer.hpp>        // storage of parameters and activations
#include <tutti/strategy/strategy.hpp>  // parameters

#include "blocks.hpp"

namespace transformer {

/// Rows of documents: tokens, their targets (or no_target), and where they stand in their documents.
struct document_rows {
    tokens in, targets;
    std::span<const std::int64_t> positions;
};

/// A view where the host can read it: the view itself, or a copy.
template <class U, tutti::queue Q>
[[nodiscard]] auto on_host(const Q& q, tutti::view<const U, typename Q::memory_type> v) {
    if constexpr (Q::memory_type::host_accessible) {
        return v;
    } else {
        std::vector<U> copy(v.size());
        download(q, v, tutti::view<U>(copy));
        return copy;
    }
}
/// The other way.
template <class U, tutti::queue Q>
void put(const Q& q, const std::vector<U>& from, tutti::view<U, typename Q::memory_type> to) {
    if constexpr (Q::memory_type::host_accessible) {
        std::copy(from.begin(), from.end(), to.begin());
    } else {
        upload(q, tutti::view<const U>(from), to);
    }
}

/// GPT-2, with room for `batch` sequences of `context` tokens.
///
/// Math         as blocks.hpp says.
/// Semantics    attach `parameters()` to a strategy; then per micro-batch forward_training(), backward(). Tokens must
///              live until backward() has returned.
/// Determinism  initial weights are a function of (seed, tensor, element); no result depends on time or threads.
/// Cost         a step takes 6 flops a weight and token, plus attention.
template <class Math> class model : blocks<Math> {
    using base = blocks<Math>;
    using typename base::M;
    using typename base::Q;
    using typename base::real;
    using typename base::T;

public:
    using typename base::element;
    using typename base::memory_type;
    using typename base::queue_type;

    model(const configuration& c, int batch, std::uint64_t seed, Math math = Math{}, recompute level = recompute::gelu);

    /// All parameters in model order, in one contiguous buffer; names and layouts are those of GPT-2's files.
    [[nodiscard]] tutti::strategy::parameters<T, M>& parameters() { return parameters_; }
    [[nodiscard]] std::size_t parameter_count() const { return count_; }
    /// The contiguous buffer itself; empty once it was released.
    [[nodiscard]] tutti::view<const T, M> values() const { return values_; }
    /// The strategy does without the memory that values began in; of parameters() names and sizes are left.
    void release_values() { values_ = tutti::buffer<T, Q>(memory_, 0); }
    /// Parameter i as the strategy has it. Collective where ranks share values.
    template <class S> [[nodiscard]] std::vector<T> value_on_host(S& strategy, std::size_t i) const {
        const auto there = on_host(strategy.before_use(i));
        std::vector<T> value(there.begin(), there.end());
        strategy.after_use(i);
        return value;
    }
    template <class U> [[nodiscard]] auto on_host(tutti::view<const U, M> v) const {
        return transformer::on_host<U>(math_.queue(), v);
    }
    template <class U> void put(const std::vector<U>& from, tutti::view<U, M> to) const {
        transformer::put<U>(math_.queue(), from, to);
    }
    [[nodiscard]] const configuration& config() const { return config_; }
    [[nodiscard]] int batch() const { return batch_; }
    /// Where its memory is counted.
    [[nodiscard]] const tutti::memory_account& account() const { return memory_.account(); }

    /// Sum over all tokens of -ln p(target), for in.size() / length sequences of `length` <= context tokens.
    template <class S> [[nodiscard]] double forward(S& s, tokens in, tokens targets, int length) {
        trunk_forward(s, in, targets, length);
        this->classify(s, kept_);
        return math_.loss(logits_.top(rows_));
    }

    /// Forward of a training step: the loss stays where it is computed until take_loss(), and backward() will add the
    /// gradient of scale * (the sum that forward returns).
    template <class S> void forward_training(S& s, tokens in, tokens targets, int length, real scale) {
        trunk_forward(s, in, targets, length);
        this->classify(s, kept_);
        math_.loss_and_gradient(logits_.top(rows_), scale);
    }
    /// The same of rows, at most batch * context of them, that attend by `attention`, which backward() uses too.
    template <class S>
    void forward_training(S& s, const document_rows& rows, shared_attention<T>& attention, real scale) {
        this->enter(static_cast<int>(rows.in.size()), 0, &attention);
        math_.take(rows.in, rows.targets, rows.positions);
        layers_forward(s);
        this->classify(s, kept_);
        math_.loss_and_gradient(logits_.top(rows_), scale);
    }
    /// Adds to the strategy's gradients and announces each when it is complete.
    template <class S> void backward(S& s) {
        this->head_backward(s, kept_);
        for (int l = config_.layers; l-- > 0;) {
            this->layer_backward(s, kept_.layers[static_cast<std::size_t>(l)], l);
        }
        this->embed_backward(s);
    }
    /// The losses of the calls of forward_training since the last call of this.
    [[nodiscard]] double take_loss() { return math_.take_loss(); }

    /// Probabilities of the token after `in`, a single sequence of at most `context` tokens.
    template <class S> [[nodiscard]] auto predict(S& s, tokens in);

private:
    using base::config_;
    using base::logits_;
    using base::math_;
    using base::memory_;
    using base::rows_;

    void make_parameters(std::uint64_t seed);
    template <class S> void trunk_forward(S& s, tokens in, tokens targets, int length) {
        this->enter(static_cast<int>(in.size()), length, nullptr);
        math_.take(in, targets, length);
        layers_forward(s);
    }
    template <class S> void layers_forward(S& s) {
        this->embed(s, kept_.stream[0]);
        for (std::size_t l = 0; l < kept_.layers.size(); ++l) {
            const bool last = l + 1 == kept_.layers.size();
            this->layer_forward(s, kept_.layers[l], static_cast<int>(l), last ? kept_.last : kept_.stream[l + 1]);
        }
        this->final_norm(s, kept_);
    }

    int batch_;
    tutti::strategy::parameters<T, M> parameters_;
    std::size_t count_ = 0;  // of all values
    tutti::buffer<T, Q> values_;
    tutti::buffer<std::byte, Q> workspace_;
    typename base::kept_activations kept_;
};

template <class Math>
model<Math>::model(const configuration& c, int batch, std::uint64_t seed, Math math, recompute level)
    : base(c, parameters_of(c), batch * c.context, level, false, std::move(math))
    , batch_(batch)
    , values_(memory_, 0)
    , workspace_(memory_, 0) {
    make_parameters(seed);
    workspace_ = this->room_for([&](auto take) {
        this->lay_out_shared(take, true);
        this->lay_out(take, kept_, config_.layers, true, true);
    });
}

template <class Math> void model<Math>::make_parameters(std::uint64_t seed) {
    for (const declaration& d : this->list_) { count_ += d.size(); }
    values_ = tutti::buffer<T, Q>(memory_, count_);
    std::size_t offset = 0;
    for (std::size_t i = 0; i < this->list_.size(); ++i) {
        const declaration& d = this->list_[i];
        const auto value = values_.view().sub(offset, d.size());
        initialize<T>(math_.queue(), value, d, seed, static_cast<std::uint32_t>(i));
        parameters_.push_back({.name = d.name,
                               .shape = d.shape,
                               .decay = d.shape.size() == 2,  // gains and biases do not decay
                               .value = value,
                               .gradient = {}});
        offset += value.size();
    }
}

template <class Math> template <class S> auto model<Math>::predict(S& s, tokens in) {
    const int last = static_cast<int>(in.size()) - 1;
    std::vector<tokens::value_type> whole(in.begin(), in.end());
    // No token sees a later one: where each length has a cost of its own, all are computed at full length.
    if (Math::wants_whole_context) { whole.resize(static_cast<std::size_t>(config_.context)); }
    trunk_forward(s, whole, whole, static_cast<int>(whole.size()));
    const matrix<T> logits = logits_.top(1);
    this->classify(s, kept_.normalized.block(last, 1, 0, config_.width), logits);
    return math_.probabilities(logits);
}

}  // namespace transformer
