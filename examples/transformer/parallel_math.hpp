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

#include <tutti/core/buffer.hpp>            // losses
#include <tutti/core/elementwise.hpp>       // fill
#include <tutti/core/run.hpp>               // run, fetch
#include <tutti/optimize/clip.hpp>          // ordered_sum_operation
#include <tutti/parallel/tensor_group.hpp>  // tensor_group
#include <tutti/parallel/vocabulary.hpp>    // cross-entropy of parts of the logits

#include "matrix.hpp"
#include "parameters.hpp"

namespace transformer {

/// Math as blocks.hpp says, on every rank of a tensor group at once.
///
/// Semantics    the residual stream, its gradient and normalization are whole and the same on all ranks; in between each
///              rank has its part. The first rank adds residuals, biases of whole rows and positions to its part, so
///              that they are in the sum once. With one rank this is Math.
/// Determinism  as far as the group's sums are; whole rows have the same bits on all ranks, if those have.
/// Cost         rows x width elements are added up: behind the embedding, twice a layer forward and twice backward, and
///              behind the classifier's input gradient; the loss takes 3 numbers a row.
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
    tutti::buffer<double, Q> total_;   // of the losses that take_loss() will fetch, then those of the rows at hand
    tutti::buffer<real, Q> normalizers_;
    clock::duration adding_{};
    bool rehearsing_ = false;

    [[nodiscard]] bool alone() const { return group_->size() == 1; }
    [[nodiscard]] bool leads() const { return group_->rank() == 0; }
    void find_own(tokens in) {
        here_.clear();
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
    void embed(matrix<const T> token_rows, matrix<const T> position_rows, matrix<T> out) {
        Math::embed(token_rows, leads() ? position_rows : matrix<const T>(), out);
        add_up(out);
    }
    void linear_onto(matrix<const T> in, matrix<const T> weight, const T* bias, matrix<const T> residual,
                     matrix<T> out) {
        if (leads()) {
            Math::linear_onto(in, weight, bias, residual, out);
        } else {
            Math::linear(in, weight, nullptr, out);
        }
        add_up(out);
    }
    /// Of rows one behind the other.
    void add_up(matrix<T> parts) {
        if (alone() || rehearsing_) { return; }
        const auto begin = clock::now();
        group_->add_up(tutti::view<T, M>(parts.data, parts.size())).wait(this->queue());
        adding_ += clock::now() - begin;
    }
    void classify_backward_input(matrix<const T> d_logits, matrix<const T> table, matrix<T> d_in) {
        Math::classify_backward_input(d_logits, table, d_in);
        add_up(d_in);
    }
    [[nodiscard]] double loss(matrix<T> logits) {
        if (alone()) { return Math::loss(logits); }
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
