// vocabulary: a table of words cut over ranks: which words are whose, and the embedding. The loss over such words is in
// vocabulary_cross_entropy.
// Needs parallel/tensor_group; on a CUDA queue parallel/vocabulary.cuh. Source: Shoeybi et al. 2019, arXiv:1909.08053,
// section 3.
#pragma once

#include <algorithm>    // copy, fill, min
#include <cstddef>      // size_t
#include <cstdint>      // words
#include <span>         // words
#include <string_view>  // names

#include <tutti/comm/communicator.hpp>      // memory_of
#include <tutti/core/config.hpp>            // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>           // floating_element
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/partition.hpp>         // part
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

}  // namespace tutti::parallel
