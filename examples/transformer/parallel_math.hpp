// parallel_math: the mathematics of layers that the ranks of a tensor group share, over that of one rank.
// Needs tutti/parallel/tensor_group and vocabulary. Each rank has some heads and some columns of the wider layers;
// products of parts are added up. Shoeybi et al. 2019, arXiv:1909.08053, section 3.
#pragma once

#include <chrono>   // time spent adding up
#include <cstddef>  // size_t
#include <cstdint>  // words
#include <span>     // positions
#include <utility>  // move
#include <vector>   // tokens

#include <tutti/core/buffer.hpp>                        // losses
#include <tutti/core/elementwise.hpp>                   // fill
#include <tutti/core/run.hpp>                           // run, fetch
#include <tutti/optimize/clip.hpp>                      // ordered_sum_operation
#include <tutti/parallel/tensor_group.hpp>              // tensor_group
#include <tutti/parallel/vocabulary.hpp>                // vocabulary_share
#include <tutti/parallel/vocabulary_cross_entropy.hpp>  // cross-entropy of parts of the logits

#include "matrix.hpp"
#include "parameters.hpp"

namespace transformer {

/// Math as blocks.hpp says, on every rank of a tensor group at once.
///
/// Semantics    the residual stream, its gradient and normalization are whole and the same on all ranks, or, where the
///              group is sequence-parallel, this rank's share of the rows; in between each rank has its part of all. The
///              first rank adds residuals, biases of whole rows and positions to its part, or each to its rows, so that
///              they are in the sum once. With one rank this is Math.
///   divides_rows   whether ranks have shares of the rows: then gradients of what all rows have in common, and only
///                  this rank's were normalized by, are to be added up by `add_up` before they are complete.
/// Determinism  as far as the group's sums are; whole rows have the same bits on all ranks, if those have.
/// Cost         rows x width elements are added up: behind the embedding, twice a layer forward and twice backward, and
///              behind the classifier's input gradient; the loss takes 3 numbers a row. Sequence-parallel: sums go to
///              rows, and rows are gathered in front of the layers that those follow, twice a layer forward, four times
///              backward, at the embedding's end, and for the classifier forward and backward.
template <class Math, class C> class parallel_math : public Math {
public:
    using typename Math::element;
    using typename Math::queue_type;
    using typename Math::real;

private:
    using T = element;
    using Q = queue_type;
    using M = typename Q::memory_type;
    using clock = std::chrono::steady_clock;

    tutti::parallel::tensor_group<C>* group_;
    tutti::parallel::vocabulary_share share_;
    tutti::parallel::vocabulary_cross_entropy<C, T> entropy_;
    std::vector<std::uint16_t> here_;  // tokens of this rank's part of the table
    std::size_t taken_ = 0;
    tutti::buffer<double, Q> total_;  // of the losses that take_loss() will fetch, then those of the rows at hand
    tutti::buffer<real, Q> normalizers_;
    clock::duration adding_{};
    bool rehearsing_ = false;

    [[nodiscard]] bool alone() const { return group_->size() == 1; }
    [[nodiscard]] bool leads() const { return group_->rank() == 0; }
    static tutti::view<const T, M> seen(matrix<const T> m) { return {m.data, m.size()}; }
    static tutti::view<T, M> seen(matrix<T> m) { return {m.data, m.size()}; }
    // Runs what a group does around `work`, and counts the time that `work` does not take.
    template <class Around> void timed(Around around) {
        const auto begin = clock::now();
        clock::duration working{};
        around([&](auto work) {
            return [&working, work](auto part) {
                const auto started = clock::now();
                work(part);
                working += clock::now() - started;
            };
        });
        adding_ += clock::now() - begin - working;
    }
    [[nodiscard]] bool silent() const { return alone() || rehearsing_; }
    // What no other rank is asked for, in a rehearsal.
    [[nodiscard]] tutti::buffer<T, Q> blank(int rows, int columns) const {
        tutti::buffer<T, Q> b(this->queue(), divides_rows() ? matrix<T>(nullptr, rows, columns).size() : 0);
        tutti::fill(this->queue(), b.view(), static_cast<T>(0.0f));
        return b;
    }
    void find_own(tokens in) {
        here_.clear();
        taken_ = in.size();
        for (const std::uint16_t t : in) {
            const bool own = share_.has(t);
            here_.push_back(own ? static_cast<std::uint16_t>(t - share_.first) : no_target);
        }
    }
    // Adds the losses of the rows at hand to `total`, which has room for one a row behind it.
    void add_losses_of(matrix<T> logits, const tutti::buffer<double, Q>& total) {
        const auto rows = static_cast<std::size_t>(logits.rows);
        if (normalizers_.size() < rows) { normalizers_ = tutti::buffer<real, Q>(this->queue(), rows); }
        entropy_.forward(tutti::view<const T, M>(logits.data, logits.size()), this->targets(),
                         total.view().sub(1, rows), normalizers_.view().sub(0, rows));
        tutti::run(this->queue(),
                   tutti::optimize::ordered_sum_operation<M>{total.view().sub(0, rows + 1), total.view().sub(0, 1)});
    }
    [[nodiscard]] tutti::buffer<double, Q> total_for(std::size_t rows) const {
        tutti::buffer<double, Q> total(this->queue(), rows + 1);
        tutti::fill(this->queue(), total.view(), 0.0);
        return total;
    }

public:
    /// `most_rows`: of a micro-batch. The group stays where it is.
    parallel_math(Math math, tutti::parallel::tensor_group<C>& group, const tutti::parallel::vocabulary_share& share,
                  std::size_t most_rows)
        : Math(std::move(math))
        , group_(&group)
        , share_(share)
        , entropy_(group, share)
        , total_(total_for(most_rows))
        , normalizers_(this->queue(), 0) {}

    void take(tokens in, tokens targets, int length) {
        if (alone()) { return Math::take(in, targets, length); }
        find_own(in);
        Math::take(here_, targets, length);
    }
    void take(tokens in, tokens targets, std::span<const std::int64_t> positions) {
        if (alone()) { return Math::take(in, targets, positions); }
        find_own(in);
        Math::take(here_, targets, positions);
    }
    [[nodiscard]] bool divides_rows() const { return group_->sequence_parallel() && !alone(); }
    [[nodiscard]] int outer_rows(int rows) const {
        return static_cast<int>(group_->outer_rows(static_cast<std::size_t>(rows)));
    }
    void embed(matrix<const T> token_rows, matrix<const T> position_rows, matrix<T> out) {
        if (alone()) { return Math::embed(token_rows, position_rows, out); }
        sum_of_parts(out, static_cast<int>(taken_), [&](matrix<T> part) {
            Math::embed(token_rows, leads() ? position_rows : matrix<const T>(), part);
        });
    }
    /// The residual has outer rows.
    void linear_onto(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> residual,
                     matrix<T> out) {
        const tutti::part own = divides_rows() ? group_->row_share(static_cast<std::size_t>(in.rows))
                                               : tutti::part{0, leads() ? static_cast<std::size_t>(in.rows) : 0};
        sum_of_parts(out, in.rows, [&](matrix<T> part) {
            const int first = static_cast<int>(own.first), count = static_cast<int>(own.count);
            const int end = first + count, rest = in.rows - end;
            if (first > 0) { Math::linear(in.top(first), weight, nullptr, part.top(first)); }
            if (count > 0) {
                Math::linear_onto(in.block(first, count, 0, in.columns), weight, bias, residual,
                                  part.block(first, count, 0, part.columns));
            }
            if (rest > 0) {
                Math::linear(in.block(end, rest, 0, in.columns), weight, nullptr,
                             part.block(end, rest, 0, part.columns));
            }
        });
    }
    template <class Work> void on_whole_rows(matrix<const T> share, int rows, Work work) {
        const auto whole = [&](tutti::view<const T, M> v) { work(matrix<const T>(v.data(), rows, share.columns)); };
        if (!divides_rows()) { return work(share); }
        if (silent()) { return whole(blank(rows, share.columns).view()); }
        timed([&](auto counted) {
            group_->on_whole_rows(static_cast<std::size_t>(rows), static_cast<std::size_t>(share.columns), seen(share),
                                  counted(whole));
        });
    }
    template <class Work> void sum_of_parts(matrix<T> sum, int rows, Work work) {
        const auto part = [&](tutti::view<T, M> v) { work(matrix<T>(v.data(), rows, sum.columns)); };
        if (silent()) { return part(divides_rows() ? blank(rows, sum.columns).view() : seen(sum)); }
        timed([&](auto counted) {
            group_->sum_of_parts(static_cast<std::size_t>(rows), static_cast<std::size_t>(sum.columns), seen(sum),
                                 counted(part));
        });
    }
    template <class Input, class Weight>
    void back_from_whole_rows(matrix<const T> share, matrix<T> d_share, int rows, Input input, Weight weight) {
        if (silent()) {
            sum_of_parts(d_share, rows, input);
            return on_whole_rows(share, rows, weight);
        }
        timed([&](auto counted) {
            group_->back_from_whole_rows(
                static_cast<std::size_t>(rows), static_cast<std::size_t>(share.columns), seen(share), seen(d_share),
                counted([&](tutti::view<T, M> v) { input(matrix<T>(v.data(), rows, share.columns)); }),
                counted([&](tutti::view<const T, M> v) { weight(matrix<const T>(v.data(), rows, share.columns)); }));
        });
    }
    /// A gradient of which each rank has a part becomes the sum.
    void add_up(tutti::view<T, M> parts) {
        const auto begin = clock::now();
        group_->add_up(parts).wait(this->queue());
        adding_ += clock::now() - begin;
    }
    [[nodiscard]] double loss(matrix<T> logits) {
        if (alone()) { return Math::loss(logits); }
        if (rehearsing_) { return 0; }
        const auto total = total_for(static_cast<std::size_t>(logits.rows));
        add_losses_of(logits, total);
        return tutti::fetch(this->queue(), total.view().sub(0, 1), 0.0);
    }
    void loss_and_gradient(matrix<T> logits, real scale) {
        if (alone()) { return Math::loss_and_gradient(logits, scale); }
        if (rehearsing_) { return; }
        add_losses_of(logits, total_);
        const tutti::view<T, M> all(logits.data, logits.size());
        entropy_.backward(tutti::view<const T, M>(all), this->targets(),
                          normalizers_.view().sub(0, static_cast<std::size_t>(logits.rows)), scale, all);
    }
    [[nodiscard]] double take_loss() {
        if (alone()) { return Math::take_loss(); }
        const double total = tutti::fetch(this->queue(), total_.view().sub(0, 1), 0.0);
        tutti::fill(this->queue(), total_.view().sub(0, 1), 0.0);
        return total;
    }

    /// Until it is taken back, nothing is added up and no rank waits for another; results mean nothing.
    void rehearse(bool yes) { rehearsing_ = yes; }

    /// Host time spent adding up since the last call of this: where a queue runs inline, waiting for the others included.
    [[nodiscard]] clock::duration take_adding() { return std::exchange(adding_, clock::duration{}); }
};

}  // namespace transformer
