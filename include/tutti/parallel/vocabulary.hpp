// vocabulary: a table of words cut over ranks: embedding, and the loss over logits that no rank has all of.
// Needs parallel/tensor_group; on a CUDA queue parallel/vocabulary.cuh. Source: Shoeybi et al. 2019, arXiv:1909.08053,
// section 3.
#pragma once

#include <algorithm>    // copy, fill, min
#include <cmath>        // exp, log
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <limits>       // infinity
#include <span>         // words
#include <string_view>  // names

#include <tutti/comm/communicator.hpp>      // queue_of
#include <tutti/core/buffer.hpp>            // scratch
#include <tutti/core/config.hpp>            // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>           // floating_element
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/partition.hpp>         // part
#include <tutti/core/reduce_op.hpp>         // max, sum
#include <tutti/core/run.hpp>               // operations
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

/// y[i] = the table's row of the i-th word of a list if it is here, 0 otherwise; `table` has the words from `first` on.
template <floating_element T, memory M> struct look_up_operation {
    static constexpr std::string_view name = "look_up";
    view<const std::int32_t, M> words;
    view<const T, M> table;
    view<T, M> y;
    std::size_t width;
    std::size_t first;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(words.size_bytes() + 2 * y.size_bytes()), 0};
    }
    /// Where the word's row is, nowhere if it is not here.
    [[nodiscard]] TUTTI_HOST_DEVICE const T* row_of(std::int32_t word) const noexcept {
        const std::size_t own = static_cast<std::size_t>(word) - first;  // negative ones are far beyond the end
        return own < table.size() / width ? table.data() + own * width : nullptr;
    }
    void operator()() const {
        for (std::size_t i = 0; i < words.size(); ++i) {
            T* const to = y.data() + i * width;
            if (const T* const row = row_of(words.data()[i]); row != nullptr) {
                std::copy(row, row + width, to);
            } else {
                std::fill(to, to + width, static_cast<T>(0.0f));
            }
        }
    }
};

/// The table's row of each word that is here += the i-th row of d_y.
///
/// Determinism  in ascending order of i; a device rounds a word's sum to T once, the host each addition.
template <floating_element T, memory M> struct add_looked_up_operation {
    static constexpr std::string_view name = "add_looked_up";
    view<const std::int32_t, M> words;
    view<const T, M> d_y;
    view<T, M> d_table;
    std::size_t width;
    std::size_t first;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(words.size_bytes() + 3 * d_y.size_bytes()), static_cast<double>(d_y.size())};
    }
    void operator()() const {
        using R = master_t<T>;
        for (std::size_t i = 0; i < words.size(); ++i) {
            const std::size_t own = static_cast<std::size_t>(words.data()[i]) - first;
            if (own >= d_table.size() / width) { continue; }
            T* const row = d_table.data() + own * width;
            for (std::size_t j = 0; j < width; ++j) {
                row[j] = static_cast<T>(static_cast<R>(row[j]) + static_cast<R>(d_y.data()[i * width + j]));
            }
        }
    }
};

/// y[i] = row words[i] of a table cut by words.
///
/// Semantics    backward adds to d_weight. Where the host cannot read the list, that it has words is the caller's to
///              check.
/// Shapes       weight count x width; `list` has all rows on all ranks; y and d_y rows x width, or this rank's share of
///              the rows in the sequence-parallel form.
/// Determinism  exact: of each element of y one rank has a number and all others zero; gradients are added up in
///              ascending order of rows.
/// Cost         forward one sum of rows x width (sequence-parallel: to rows), backward nothing (a gather).
/// Errors       usage_error for a word that is none or a size that is wrong, before anything moved.
template <communicator C, floating_element T> class vocabulary_embedding {
    using M = memory_of<C>;
    tensor_group<C>* group_;
    vocabulary_share share_;
    std::size_t width_;

public:
    vocabulary_embedding(tensor_group<C>& group, const vocabulary_share& share, std::size_t width)
        : group_(&group), share_(share), width_(width) {}

    [[nodiscard]] std::size_t weights() const noexcept { return share_.count * width_; }

    void forward(view<const std::int32_t, M> list, view<const T, M> weight, view<T, M> y) {
        expect(list, weight.size(), y.size());
        group_->sum_of_parts(list.size(), width_, y, [&](view<T, M> part) {
            tutti::run(group_->queue(), look_up_operation<T, M>{list, weight, part, width_, share_.first});
        });
    }
    void backward(view<const std::int32_t, M> list, view<const T, M> d_y, view<T, M> d_weight) {
        expect(list, d_weight.size(), d_y.size());
        group_->on_whole_rows(list.size(), width_, d_y, [&](view<const T, M> d_whole) {
            tutti::run(group_->queue(), add_looked_up_operation<T, M>{list, d_whole, d_weight, width_, share_.first});
        });
    }

private:
    void expect(view<const std::int32_t, M> list, std::size_t weight, std::size_t y) const {
        if constexpr (M::host_accessible) { share_.expect_words(list, false); }
        detail::expect_elements("vocabulary_embedding", "weight", weight, share_.count, width_);
        detail::expect_elements("vocabulary_embedding", "y", y, group_->outer_rows(list.size()), width_);
    }
};

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
    static constexpr std::string_view name = "exponential_sums";
    logits_share<const T, M> in;
    view<const std::int32_t, M> targets;
    view<const master_t<T>, M> largest;
    view<master_t<T>, M> sums;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(in.logits.size_bytes() + sums.size_bytes()),
                2.0 * static_cast<double>(in.logits.size())};
    }
    void operator()() const {
        using R = master_t<T>;
        const std::size_t rows = targets.size();
        for (std::size_t i = 0; i < rows; ++i) {
            R total = 0;
            for (std::size_t j = 0; j < in.real; ++j) {
                total += std::exp(static_cast<R>(in.row(i)[j]) - largest.data()[i]);
            }
            const std::int32_t target = targets.data()[i];
            sums.data()[i] = total;
            sums.data()[rows + i] =
                in.has(target) ? static_cast<R>(in.row(i)[static_cast<std::size_t>(target) - in.first]) : R{0};
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
        const logits_share<const T, M> own{logits, share_.count, share_.real, share_.first};
        const buffer<R, Q> sums(q, 2 * targets.size());
        tutti::run(q, logit_maxima_operation<T, M>{own, normalizer});
        c.all_reduce(view<const R, M>(normalizer), normalizer, max{});
        tutti::run(q, exponential_sums_operation<T, M>{own, targets, normalizer, sums.view()});
        c.all_reduce(view<const R, M>(sums.view()), sums.view(), sum{});
        tutti::run(q, losses_operation<R, M>{targets, sums.view(), normalizer, loss});
    }
    void backward(view<const T, M> logits, view<const std::int32_t, M> targets, view<const R, M> normalizer, R scale,
                  view<T, M> d_logits) const {
        expect(logits.size(), targets, normalizer.size());
        detail::expect_elements("vocabulary_cross_entropy", "d_logits", d_logits.size(), targets.size(), share_.count);
        const logits_share<const T, M> own{logits, share_.count, share_.real, share_.first};
        tutti::run(group_->queue(), logit_gradients_operation<T, M>{own, targets, normalizer, scale, d_logits});
    }

private:
    void expect(std::size_t logits, view<const std::int32_t, M> targets, std::size_t normalizer) const {
        if constexpr (M::host_accessible) { share_.expect_words(targets, true); }
        detail::expect_elements("vocabulary_cross_entropy", "logits", logits, targets.size(), share_.count);
        detail::expect_elements("vocabulary_cross_entropy", "normalizer", normalizer, targets.size(), 1);
    }
};

}  // namespace tutti::parallel
