// vocabulary: a table of words cut over ranks: embedding, and the loss over logits that no rank has all of.
// Needs parallel/tensor_group, for host memory. Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
#pragma once

#include <algorithm>  // copy, fill, min
#include <cmath>      // exp, log
#include <cstddef>    // size_t
#include <cstdint>    // words
#include <limits>     // infinity
#include <span>       // words

#include <tutti/comm/communicator.hpp>      // queue_of
#include <tutti/core/buffer.hpp>            // scratch
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/partition.hpp>         // part
#include <tutti/core/reduce_op.hpp>         // max, sum
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/parallel/linear.hpp>        // expect_elements
#include <tutti/parallel/tensor_group.hpp>  // tensor_group

namespace tutti::parallel {

/// Words of a table, padded so that every rank has as many.
///
/// Semantics  `padded` is the least multiple of ranks * multiple that holds all words; this rank has words [first,
///            first + count) of it, of which `real` are words. Padding is never looked up and has no probability, so
///            results do not depend on how much there is.
struct vocabulary_share {
    std::size_t words = 0;
    std::size_t padded = 0;
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t real = 0;

    template <communicator C>
    vocabulary_share(const tensor_group<C>& group, std::size_t all_words, std::size_t multiple = 1) : words(all_words) {
        if (all_words == 0 || multiple == 0) {
            throw usage_error(formatted("vocabulary: {} words in multiples of {}", all_words, multiple));
        }
        const std::size_t unit = multiple * static_cast<std::size_t>(group.size());
        padded = (words + unit - 1) / unit * unit;
        const part own = group.feature_share(padded, "words");
        first = own.first;
        count = own.count;
        real = words <= first ? 0 : std::min(count, words - first);
    }
    [[nodiscard]] bool has(std::int32_t word) const noexcept {
        return word >= 0 && static_cast<std::size_t>(word) >= first && static_cast<std::size_t>(word) < first + count;
    }
    /// Throws usage_error for words that are none; -1 is one where `none_allowed`.
    void expect_words(std::span<const std::int32_t> list, bool none_allowed) const {
        for (const std::int32_t w : list) {
            if ((w == -1 && none_allowed) || (w >= 0 && static_cast<std::size_t>(w) < words)) { continue; }
            throw usage_error(formatted("vocabulary: word {} of {}", w, words));
        }
    }
};

/// y[i] = row words[i] of a table cut by words.
///
/// Shapes       weight count x width; `list` has all rows on all ranks; y and d_y rows x width, or this rank's share of
///              the rows in the sequence-parallel form.
/// Semantics    backward adds to d_weight, in ascending order of rows.
/// Determinism  exact: of each element one rank has a number and all others zero.
/// Cost         forward one sum of rows x width (sequence-parallel: to rows), backward nothing (a gather).
/// Errors       usage_error for a word that is none or a size that is wrong, before anything moved.
template <communicator C, class T>
requires(queue_of<C>::executes_inline) class vocabulary_embedding {
    using Q = queue_of<C>;
    tensor_group<C>* group_;
    vocabulary_share share_;
    std::size_t width_;

public:
    vocabulary_embedding(tensor_group<C>& group, const vocabulary_share& share, std::size_t width)
        : group_(&group), share_(share), width_(width) {}

    [[nodiscard]] std::size_t weights() const noexcept { return share_.count * width_; }

    void forward(std::span<const std::int32_t> list, view<const T> weight, view<T> y) {
        expect(list, weight.size(), y.size());
        const Q q = group_->queue();
        const bool scatters = group_->sequence_parallel();
        const buffer<T, Q> all(q, scatters ? list.size() * width_ : 0);
        const view<T> found = scatters ? all.view() : y;
        std::fill(found.begin(), found.end(), T{0});
        for (std::size_t i = 0; i < list.size(); ++i) {
            if (!share_.has(list[i])) { continue; }
            const T* const row = weight.data() + (static_cast<std::size_t>(list[i]) - share_.first) * width_;
            std::copy(row, row + width_, found.data() + i * width_);
        }
        const auto summed =
            scatters ? group_->sum_to_rows(list.size(), width_, view<const T>(found), y) : group_->add_up(y);
        summed.wait(q);
    }
    void backward(std::span<const std::int32_t> list, view<const T> d_y, view<T> d_weight) {
        expect(list, d_weight.size(), d_y.size());
        const Q q = group_->queue();
        const bool gathers = group_->sequence_parallel();
        const buffer<T, Q> all(q, gathers ? list.size() * width_ : 0);
        if (gathers) { group_->gather_rows(list.size(), width_, d_y, all.view()).wait(q); }
        const T* const dy = gathers ? all.data() : d_y.data();
        for (std::size_t i = 0; i < list.size(); ++i) {
            if (!share_.has(list[i])) { continue; }
            T* const row = d_weight.data() + (static_cast<std::size_t>(list[i]) - share_.first) * width_;
            for (std::size_t j = 0; j < width_; ++j) { row[j] += dy[i * width_ + j]; }
        }
    }

private:
    void expect(std::span<const std::int32_t> list, std::size_t weight, std::size_t y) const {
        share_.expect_words(list, false);
        detail::expect_elements("vocabulary_embedding", "weight", weight, share_.count, width_);
        detail::expect_elements("vocabulary_embedding", "y", y, group_->outer_rows(list.size()), width_);
    }
};

/// Cross-entropy of targets over logits cut by words.
///
/// Shapes       logits rows x count, all rows on all ranks; targets, loss, normalizer one a row.
/// Semantics    loss[i] = normalizer[i] - logit of targets[i], normalizer the logarithm of the sum of all words'
///              exponentials; the same on all ranks. A row of target -1 has no loss and no gradient. backward writes
///              scale * (softmax - target), zero for padding; the loss of all tokens of all ranks is a mean when the
///              caller makes scale 1 / valid tokens of all.
/// Aliasing     d_logits may be logits.
/// Determinism  as far as the communicator's sums are.
/// Cost         forward two sums over ranks, of 3 numbers a row together, however many words there are; backward
///              nothing.
/// Errors       usage_error for a target that is no word or a size that is wrong, before anything moved.
template <communicator C, class T>
requires(queue_of<C>::executes_inline) class vocabulary_cross_entropy {
    using Q = queue_of<C>;
    tensor_group<C>* group_;
    vocabulary_share share_;

public:
    vocabulary_cross_entropy(tensor_group<C>& group, const vocabulary_share& share) : group_(&group), share_(share) {}

    void forward(view<const T> logits, std::span<const std::int32_t> targets, view<T> loss, view<T> normalizer) {
        expect(logits.size(), targets, normalizer.size());
        detail::expect_elements("vocabulary_cross_entropy", "loss", loss.size(), targets.size(), 1);
        const std::size_t rows = targets.size();
        C& c = group_->communicator();
        for (std::size_t i = 0; i < rows; ++i) {
            const T* const x = logits.data() + i * share_.count;
            T most = -std::numeric_limits<T>::infinity();
            for (std::size_t j = 0; j < share_.real; ++j) { most = x[j] > most || x[j] != x[j] ? x[j] : most; }
            normalizer[i] = most;
        }
        c.all_reduce(view<const T>(normalizer), normalizer, max{});
        const buffer<T, Q> memory(group_->queue(), 2 * rows);  // sums of exponentials, then logits of targets
        const view<T> sums = memory.view().sub(0, rows);
        const view<T> own = memory.view().sub(rows, rows);
        for (std::size_t i = 0; i < rows; ++i) {
            const T* const x = logits.data() + i * share_.count;
            T total = 0;
            for (std::size_t j = 0; j < share_.real; ++j) { total += std::exp(x[j] - normalizer[i]); }
            sums[i] = total;
            own[i] = share_.has(targets[i]) ? x[static_cast<std::size_t>(targets[i]) - share_.first] : T{0};
        }
        c.all_reduce(view<const T>(memory.view()), memory.view(), sum{});
        for (std::size_t i = 0; i < rows; ++i) {
            normalizer[i] += std::log(sums[i]);
            loss[i] = targets[i] < 0 ? T{0} : normalizer[i] - own[i];
        }
    }
    void backward(view<const T> logits, std::span<const std::int32_t> targets, view<const T> normalizer, T scale,
                  view<T> d_logits) const {
        expect(logits.size(), targets, normalizer.size());
        detail::expect_elements("vocabulary_cross_entropy", "d_logits", d_logits.size(), targets.size(), share_.count);
        for (std::size_t i = 0; i < targets.size(); ++i) {
            const T* const x = logits.data() + i * share_.count;
            T* const d = d_logits.data() + i * share_.count;
            const T weight = targets[i] < 0 ? T{0} : scale;
            for (std::size_t j = 0; j < share_.count; ++j) {
                d[j] = j < share_.real && weight != 0 ? weight * std::exp(x[j] - normalizer[i]) : T{0};
            }
            if (share_.has(targets[i])) { d[static_cast<std::size_t>(targets[i]) - share_.first] -= weight; }
        }
    }

private:
    void expect(std::size_t logits, std::span<const std::int32_t> targets, std::size_t normalizer) const {
        share_.expect_words(targets, true);
        detail::expect_elements("vocabulary_cross_entropy", "logits", logits, targets.size(), share_.count);
        detail::expect_elements("vocabulary_cross_entropy", "normalizer", normalizer, targets.size(), 1);
    }
};

}  // namespace tutti::parallel
