// linear: layers whose weights are cut over ranks: by outputs (columns of the product), and by inputs (rows).
// Needs parallel/tensor_group and core/products, for host memory. Source: Shoeybi et al. 2019, arXiv:1909.08053,
// section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (sequence parallelism).
#pragma once

#include <cstddef>      // size_t
#include <string_view>  // names

#include <tutti/comm/communicator.hpp>      // queue_of
#include <tutti/core/buffer.hpp>            // scratch
#include <tutti/core/element.hpp>           // element
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/products.hpp>          // plain_products
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/parallel/tensor_group.hpp>  // tensor_group
#include <tutti/schedule/ticket.hpp>        // ticket

namespace tutti::parallel {

namespace detail {

template <class T> [[nodiscard]] matrix<T> rows_by(view<T> v, std::size_t rows, std::size_t columns) {
    return {v.data(), rows, columns, columns};
}
inline void expect_elements(std::string_view layer, std::string_view what, std::size_t got, std::size_t rows,
                            std::size_t columns) {
    if (got != rows * columns) {
        throw usage_error(formatted("{}: {} of {} elements, not {} x {}", layer, what, got, rows, columns));
    }
}
template <class T> void add_to_rows(matrix<T> y, view<const T> bias) {
    if (bias.empty()) { return; }
    for (std::size_t i = 0; i < y.rows; ++i) {
        for (std::size_t j = 0; j < y.columns; ++j) { y.row(i)[j] += bias[j]; }
    }
}
template <class T> void add_sums_of_columns(matrix<const T> y, view<T> sums) {
    if (sums.empty()) { return; }
    for (std::size_t i = 0; i < y.rows; ++i) {
        for (std::size_t j = 0; j < y.columns; ++j) { sums[j] += y.row(i)[j]; }
    }
}

}  // namespace detail

/// y = x W^T + b, W cut by outputs: each rank has outputs/t of them and computes that part of y.
///
/// Semantics    backward writes d_x, adds to d_weight and d_bias (empty where bias is). `x` is what forward got: in the
///              sequence-parallel form all rows are gathered again, so only the share need be kept. Backward is one
///              call: stages of a pipeline make it in backward_input, and have no part of it left for backward_weight.
/// Shapes       weight outputs/t x inputs, bias outputs/t or empty, y rows x outputs/t. x and d_x are rows x inputs,
///              the same on all ranks; in the sequence-parallel form this rank's share of the rows.
/// Aliasing     outputs overlap no inputs.
/// Determinism  as far as Products' and the communicator's sums are.
/// Cost         2 rows inputs outputs/t flops forward, twice that backward. Forward sends nothing (sequence-parallel:
///              one gather of rows x inputs), backward one sum of rows x inputs (a gather and a sum to rows). Where
///              they overlap, the gather is beside the product for d_x, the sum beside the one for d_weight.
/// Errors       usage_error when outputs do not divide, or a size is wrong, before anything moved.
template <communicator C, class T, class Products = plain_products>
requires(queue_of<C>::executes_inline) class column_linear {
    using Q = queue_of<C>;
    tensor_group<C>* group_;
    std::size_t inputs_;
    std::size_t outputs_;  // of this rank

public:
    column_linear(tensor_group<C>& group, std::size_t inputs, std::size_t outputs)
        : group_(&group), inputs_(inputs), outputs_(group.feature_share(outputs, "outputs").count) {}

    [[nodiscard]] std::size_t weights() const noexcept { return outputs_ * inputs_; }
    [[nodiscard]] std::size_t inputs() const noexcept { return inputs_; }
    /// Of this rank.
    [[nodiscard]] std::size_t outputs() const noexcept { return outputs_; }

    void forward(std::size_t rows, view<const T> x, view<const T> weight, view<const T> bias, view<T> y) {
        expect(rows, x.size(), weight.size(), bias.size(), y.size());
        const Q q = group_->queue();
        const bool gathers = group_->sequence_parallel();
        const buffer<T, Q> all(q, gathers ? rows * inputs_ : 0);
        if (gathers) { group_->gather_rows(rows, inputs_, x, all.view()).wait(q); }
        const matrix<const T> whole = detail::rows_by<const T>(gathers ? all.view() : x, rows, inputs_);
        const matrix<T> out = detail::rows_by(y, rows, outputs_);
        Products::multiply(factor<T>{whole, false}, factor<T>{detail::rows_by(weight, outputs_, inputs_), true}, out,
                           T{1}, T{0});
        detail::add_to_rows(out, bias);
    }

    void backward(std::size_t rows, view<const T> x, view<const T> weight, view<const T> d_y, view<T> d_x,
                  view<T> d_weight, view<T> d_bias) {
        expect(rows, x.size(), weight.size(), d_bias.size(), d_y.size());
        detail::expect_elements("column_linear", "d_x", d_x.size(), group_->outer_rows(rows), inputs_);
        detail::expect_elements("column_linear", "d_weight", d_weight.size(), outputs_, inputs_);
        const Q q = group_->queue();
        const bool gathers = group_->sequence_parallel();
        const buffer<T, Q> all(q, gathers ? rows * inputs_ : 0);
        const buffer<T, Q> d_all(q, gathers ? rows * inputs_ : 0);
        schedule::ticket<Q> gathered;
        schedule::ticket<Q> summed;  // goes first when something throws: what it uses is above
        if (gathers) { gathered = group_->gather_rows(rows, inputs_, x, all.view()); }
        const matrix<const T> dy = detail::rows_by(d_y, rows, outputs_);
        const view<T> d_whole = gathers ? d_all.view() : d_x;
        Products::multiply(factor<T>{dy, false}, factor<T>{detail::rows_by(weight, outputs_, inputs_), false},
                           detail::rows_by(d_whole, rows, inputs_), T{1}, T{0});
        summed = gathers ? group_->sum_to_rows(rows, inputs_, view<const T>(d_whole), d_x) : group_->add_up(d_x);
        gathered.wait(q);
        Products::multiply(factor<T>{dy, true},
                           factor<T>{detail::rows_by<const T>(gathers ? all.view() : x, rows, inputs_), false},
                           detail::rows_by(d_weight, outputs_, inputs_), T{1}, T{1});
        detail::add_sums_of_columns(dy, d_bias);
        summed.wait(q);
    }

private:
    void expect(std::size_t rows, std::size_t x, std::size_t weight, std::size_t bias, std::size_t y) const {
        detail::expect_elements("column_linear", "x", x, group_->outer_rows(rows), inputs_);
        detail::expect_elements("column_linear", "weight", weight, outputs_, inputs_);
        if (bias != 0) { detail::expect_elements("column_linear", "bias", bias, 1, outputs_); }
        detail::expect_elements("column_linear", "y", y, rows, outputs_);
    }
};

/// y = x W^T + b, W cut by inputs: each rank has inputs/t columns of x and of W, and the products are added up.
///
/// Semantics    the bias is added once, behind the sum. backward writes d_x, adds to d_weight and d_bias; d_bias is
///              that of all rows, in both forms, and the same on all ranks.
/// Shapes       weight outputs x inputs/t, bias outputs or empty and the same on all ranks, x rows x inputs/t. y and
///              d_y are rows x outputs, the same on all ranks; in the sequence-parallel form this rank's share of the
///              rows.
/// Aliasing     outputs overlap no inputs.
/// Determinism  as far as Products' and the communicator's sums are.
/// Cost         2 rows inputs/t outputs flops forward, twice that backward. Forward sends one sum of rows x outputs
///              (sequence-parallel: to rows), backward nothing (a gather of rows x outputs).
/// Errors       usage_error when inputs do not divide, or a size is wrong, before anything moved.
template <communicator C, class T, class Products = plain_products>
requires(queue_of<C>::executes_inline) class row_linear {
    using Q = queue_of<C>;
    tensor_group<C>* group_;
    std::size_t inputs_;  // of this rank
    std::size_t outputs_;

public:
    row_linear(tensor_group<C>& group, std::size_t inputs, std::size_t outputs)
        : group_(&group), inputs_(group.feature_share(inputs, "inputs").count), outputs_(outputs) {}

    [[nodiscard]] std::size_t weights() const noexcept { return outputs_ * inputs_; }
    /// Of this rank.
    [[nodiscard]] std::size_t inputs() const noexcept { return inputs_; }
    [[nodiscard]] std::size_t outputs() const noexcept { return outputs_; }

    void forward(std::size_t rows, view<const T> x, view<const T> weight, view<const T> bias, view<T> y) {
        expect(rows, x.size(), weight.size(), bias.size(), y.size());
        const Q q = group_->queue();
        const bool scatters = group_->sequence_parallel();
        const buffer<T, Q> all(q, scatters ? rows * outputs_ : 0);
        const view<T> part_of = scatters ? all.view() : y;
        Products::multiply(factor<T>{detail::rows_by(x, rows, inputs_), false},
                           factor<T>{detail::rows_by(weight, outputs_, inputs_), true},
                           detail::rows_by(part_of, rows, outputs_), T{1}, T{0});
        const auto summed =
            scatters ? group_->sum_to_rows(rows, outputs_, view<const T>(part_of), y) : group_->add_up(y);
        summed.wait(q);
        detail::add_to_rows(detail::rows_by(y, group_->outer_rows(rows), outputs_), bias);
    }

    void backward(std::size_t rows, view<const T> x, view<const T> weight, view<const T> d_y, view<T> d_x,
                  view<T> d_weight, view<T> d_bias) {
        expect(rows, x.size(), weight.size(), d_bias.size(), d_y.size());
        detail::expect_elements("row_linear", "d_x", d_x.size(), rows, inputs_);
        detail::expect_elements("row_linear", "d_weight", d_weight.size(), outputs_, inputs_);
        const Q q = group_->queue();
        const bool gathers = group_->sequence_parallel();
        const buffer<T, Q> all(q, gathers ? rows * outputs_ : 0);
        if (gathers) { group_->gather_rows(rows, outputs_, d_y, all.view()).wait(q); }
        const matrix<const T> dy = detail::rows_by<const T>(gathers ? all.view() : d_y, rows, outputs_);
        Products::multiply(factor<T>{dy, false}, factor<T>{detail::rows_by(weight, outputs_, inputs_), false},
                           detail::rows_by(d_x, rows, inputs_), T{1}, T{0});
        Products::multiply(factor<T>{dy, true}, factor<T>{detail::rows_by(x, rows, inputs_), false},
                           detail::rows_by(d_weight, outputs_, inputs_), T{1}, T{1});
        detail::add_sums_of_columns(dy, d_bias);
    }

private:
    void expect(std::size_t rows, std::size_t x, std::size_t weight, std::size_t bias, std::size_t y) const {
        detail::expect_elements("row_linear", "x", x, rows, inputs_);
        detail::expect_elements("row_linear", "weight", weight, outputs_, inputs_);
        if (bias != 0) { detail::expect_elements("row_linear", "bias", bias, 1, outputs_); }
        detail::expect_elements("row_linear", "y", y, group_->outer_rows(rows), outputs_);
    }
};

}  // namespace tutti::parallel
