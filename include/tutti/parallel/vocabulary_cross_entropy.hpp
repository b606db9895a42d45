// vocabulary_cross_entropy: the loss over logits that no rank has all of, for a vocabulary cut over ranks.
// Needs parallel/vocabulary; on a CUDA queue parallel/vocabulary_cross_entropy.cuh. Source: Shoeybi et al. 2019,
// arXiv:1909.08053, section 3.
#pragma once

#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <limits>       // infinity
#include <string_view>  // names
#include <type_traits>  // remove_const

#include <tutti/comm/communicator.hpp>      // queue_of
#include <tutti/core/buffer.hpp>            // scratch
#include <tutti/core/config.hpp>            // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>           // floating_element
#include <tutti/core/reduce_op.hpp>         // max, sum
#include <tutti/core/run.hpp>               // operations
#include <tutti/core/view.hpp>              // view
#include <tutti/parallel/linear.hpp>        // expect_elements
#include <tutti/parallel/tensor_group.hpp>  // tensor_group
#include <tutti/parallel/vocabulary.hpp>    // vocabulary_share

namespace tutti::parallel {

/// Logits of some rows, of the words that this rank has: rows x count, of which the first `real` are words of the
/// vocabulary; they are the words from `first` on.
template <class T, memory M> struct logits_share {
    view<T, M> logits;
    std::size_t count = 0;
    std::size_t real = 0;
    std::size_t first = 0;
    TUTTI_HOST_DEVICE T* row(std::size_t i) const noexcept { return logits.data() + i * count; }
    TUTTI_HOST_DEVICE bool has(std::int32_t word) const noexcept {
        return word >= 0 && static_cast<std::size_t>(word) >= first && static_cast<std::size_t>(word) < first + count;
    }
    /// Of the word in row i; 0 if it is not here.
    TUTTI_HOST_DEVICE auto logit(std::size_t i, std::int32_t word) const noexcept {
        using R = master_t<std::remove_const_t<T>>;
        return has(word) ? static_cast<R>(row(i)[static_cast<std::size_t>(word) - first]) : R{0};
    }
};

/// largest[i] = the largest logit of row i, -inf where no word is here; not a number where one is none.
template <floating_element T, memory M> struct logit_maxima_operation {
    static constexpr std::string_view name = "logit_maxima";
    logits_share<const T, M> in;
    view<master_t<T>, M> largest;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.logits.size_bytes() + largest.size_bytes()),
                static_cast<double>(in.logits.size())};
    }
    void operator()() const {
        using R = master_t<T>;
        for (std::size_t i = 0; i < largest.size(); ++i) {
            R most = -std::numeric_limits<R>::infinity();
            for (std::size_t j = 0; j < in.real; ++j) {
                const R x = static_cast<R>(in.row(i)[j]);
                most = x > most || x != x ? x : most;
            }
            largest.data()[i] = most;
        }
    }
};

/// sums[i] = the sum of exp(logit - largest[i]) over row i; sums[rows + i] = the target's logit if its word is here, 0
/// otherwise.
template <floating_element T, memory M> struct exponential_sums_operation {
    using R = master_t<T>;
    static constexpr std::string_view name = "exponential_sums";
    logits_share<const T, M> in;
    view<const std::int32_t, M> targets;
    view<const R, M> largest;
    view<R, M> sums;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.logits.size_bytes() + sums.size_bytes()),
                2.0 * static_cast<double>(in.logits.size())};
    }
    void operator()() const {
        const std::size_t rows = targets.size();
        for (std::size_t i = 0; i < rows; ++i) {
            R total = 0;
            for (std::size_t j = 0; j < in.real; ++j) {
                total += std::exp(static_cast<R>(in.row(i)[j]) - largest.data()[i]);
            }
            sums.data()[i] = total;
            sums.data()[rows + i] = in.logit(i, targets.data()[i]);
        }
    }
};

/// From sums of all ranks: normalizer[i], the largest logit until then, becomes the logarithm of the sum of all
/// exponentials, and loss[i] that less the target's logit; 0 without a target.
template <floating_element R, memory M> struct losses_operation {
    static constexpr std::string_view name = "losses";
    view<const std::int32_t, M> targets;
    view<const R, M> sums;
    view<R, M> normalizer;
    view<double, M> loss;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(sums.size_bytes() + 2 * normalizer.size_bytes() + loss.size_bytes()),
                2.0 * static_cast<double>(loss.size())};
    }
    TUTTI_HOST_DEVICE void of_row(std::size_t i) const {
        const std::size_t rows = targets.size();
        const R log_sum = normalizer.data()[i] + std::log(sums.data()[i]);
        normalizer.data()[i] = log_sum;
        loss.data()[i] =
            targets.data()[i] < 0 ? 0.0 : static_cast<double>(log_sum) - static_cast<double>(sums.data()[rows + i]);
    }
    void operator()() const {
        for (std::size_t i = 0; i < targets.size(); ++i) { of_row(i); }
    }
};

/// d = scale * (softmax - target), 0 for padding and for rows without a target. Aliasing: d may be the logits.
template <floating_element T, memory M> struct logit_gradients_operation {
    static constexpr std::string_view name = "logit_gradients";
    logits_share<const T, M> in;
    view<const std::int32_t, M> targets;
    view<const master_t<T>, M> normalizer;
    master_t<T> scale;
    view<T, M> d;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(2 * in.logits.size_bytes()), 3.0 * static_cast<double>(in.logits.size())};
    }
    TUTTI_HOST_DEVICE T of(std::size_t i, std::size_t j) const {
        using R = master_t<T>;
        const std::int32_t target = targets.data()[i];
        if (target < 0 || j >= in.real) { return static_cast<T>(R{0}); }
        const R softmax = std::exp(static_cast<R>(in.row(i)[j]) - normalizer.data()[i]);
        const bool is_target = in.has(target) && static_cast<std::size_t>(target) - in.first == j;
        return static_cast<T>(scale * softmax - (is_target ? scale : R{0}));
    }
    void operator()() const {
        for (std::size_t i = 0; i < targets.size(); ++i) {
            for (std::size_t j = 0; j < in.count; ++j) { d.data()[i * in.count + j] = of(i, j); }
        }
    }
};

/// Cross-entropy of targets over logits cut by words.
///
/// Semantics    loss[i] = normalizer[i] - logit of targets[i], normalizer the logarithm of the sum of all words'
///              exponentials; the same on all ranks. A row of target -1 has no loss and no gradient. backward writes
///              scale * (softmax - target), zero for padding; the loss of all tokens of all ranks is a mean when the
///              caller makes scale 1 / valid tokens of all. Where the host cannot read targets, that they are words is
///              the caller's to check.
/// Shapes       logits rows x count, all rows on all ranks; targets, loss, normalizer one a row.
/// Aliasing     d_logits may be logits.
/// Determinism  as far as the communicator's sums are.
/// Cost         forward two sums over ranks, of 3 numbers a row together, however many words there are; backward
///              nothing.
/// Errors       usage_error for a target that is no word or a size that is wrong, before anything moved.
template <communicator C, floating_element T> class vocabulary_cross_entropy {
    using Q = queue_of<C>;
    using M = memory_of<C>;
    using R = master_t<T>;
    tensor_group<C>* group_;
    vocabulary_share share_;

public:
    vocabulary_cross_entropy(tensor_group<C>& group, const vocabulary_share& share) : group_(&group), share_(share) {}

    void forward(view<const T, M> logits, view<const std::int32_t, M> targets, view<double, M> loss,
                 view<R, M> normalizer) {
        expect(logits.size(), targets, normalizer.size());
        detail::expect_elements("vocabulary_cross_entropy", "loss", loss.size(), targets.size(), 1);
        C& c = group_->communicator();
        const Q q = group_->queue();
        const buffer<R, Q> sums(q, 2 * targets.size());
        tutti::run(q, logit_maxima_operation<T, M>{own(logits), normalizer});
        c.all_reduce(view<const R, M>(normalizer), normalizer, max{});
        tutti::run(q, exponential_sums_operation<T, M>{own(logits), targets, normalizer, sums.view()});
        c.all_reduce(view<const R, M>(sums.view()), sums.view(), sum{});
        tutti::run(q, losses_operation<R, M>{targets, sums.view(), normalizer, loss});
    }
    void backward(view<const T, M> logits, view<const std::int32_t, M> targets, view<const R, M> normalizer, R scale,
                  view<T, M> d_logits) const {
        expect(logits.size(), targets, normalizer.size());
        detail::expect_elements("vocabulary_cross_entropy", "d_logits", d_logits.size(), targets.size(), share_.count);
        tutti::run(group_->queue(), logit_gradients_operation<T, M>{own(logits), targets, normalizer, scale, d_logits});
    }

private:
    [[nodiscard]] logits_share<const T, M> own(view<const T, M> logits) const noexcept {
        return {logits, share_.count, share_.real, share_.first};
    }
    void expect(std::size_t logits, view<const std::int32_t, M> targets, std::size_t normalizer) const {
        if constexpr (M::host_accessible) { share_.expect_words(targets, true); }
        detail::expect_elements("vocabulary_cross_entropy", "logits", logits, targets.size(), share_.count);
        detail::expect_elements("vocabulary_cross_entropy", "normalizer", normalizer, targets.size(), 1);
    }
};

}  // namespace tutti::parallel
