// linear: layers whose weights are cut over ranks: by outputs (columns of the product), and by inputs (rows).
// Needs parallel/tensor_group and core/products; on a CUDA queue core/cuda_products and parallel/bias.cuh. Source:
// Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
#pragma once

#include <cstddef>      // size_t
#include <string_view>  // names
#include <utility>      // move

#include <tutti/comm/communicator.hpp>      // queue_of
#include <tutti/core/element.hpp>           // floating_element
#include <tutti/core/error.hpp>             // usage_error
#include <tutti/core/products.hpp>          // plain_products
#include <tutti/core/run.hpp>               // run
#include <tutti/core/text.hpp>              // formatted
#include <tutti/core/view.hpp>              // view
#include <tutti/parallel/bias.hpp>          // biases and their gradients
#include <tutti/parallel/tensor_group.hpp>  // tensor_group

namespace tutti::parallel {

namespace detail {

inline void expect_elements(std::string_view layer, std::string_view what, std::size_t got, std::size_t rows,
                            std::size_t columns) {
    if (got != rows * columns) {
        throw usage_error(formatted("{}: {} of {} elements, not {} x {}", layer, what, got, rows, columns));
    }
}

// y = x W^T + b on one rank, W outputs x inputs: what both kinds of layers do with their part of W.
template <floating_element T, memory M, class Products> struct linear_part {
    using R = master_t<T>;
    std::size_t inputs;
    std::size_t outputs;
    Products products;

    template <class U> [[nodiscard]] static matrix<U> rows_of(view<U, M> v, std::size_t columns) {
        return {v.data(), columns == 0 ? 0 : v.size() / columns, columns, columns};
    }
    [[nodiscard]] factor<T> weight_of(view<const T, M> weight, bool transposed) const {
        return {rows_of(weight, inputs), transposed};
    }
    void forward(view<const T, M> x, view<const T, M> weight, view<T, M> y) {
        products.multiply(factor<T>{rows_of(x, inputs)}, weight_of(weight, true), rows_of(y, outputs), R{1}, R{0});
    }
    void backward_input(view<const T, M> d_y, view<const T, M> weight, view<T, M> d_x) {
        products.multiply(factor<T>{rows_of(d_y, outputs)}, weight_of(weight, false), rows_of(d_x, inputs), R{1}, R{0});
    }
    template <queue Q>
    void backward_weight(const Q& q, view<const T, M> x, view<const T, M> d_y, view<T, M> d_weight, view<T, M> d_bias) {
        products.multiply(factor<T>{rows_of(d_y, outputs), true}, factor<T>{rows_of(x, inputs)},
                          rows_of(d_weight, inputs), R{1}, R{1});
        if (!d_bias.empty()) { tutti::run(q, add_bias_gradient_operation<T, M>{d_y, d_bias}); }
    }
    template <queue Q> void add_bias(const Q& q, view<const T, M> bias, view<T, M> y) const {
        if (!bias.empty()) { tutti::run(q, add_bias_operation<T, M>{bias, y}); }
    }
    void expect_weight(std::string_view layer, std::string_view what, std::size_t weight, std::size_t bias) const {
        expect_elements(layer, what, weight, outputs, inputs);
        if (bias != 0) { expect_elements(layer, "bias", bias, 1, outputs); }
    }
};

}  // namespace detail

/// y = x W^T + b, W cut by outputs: each rank has outputs/t of them and computes that part of y.
///
/// Products     multiplies where the communicator's queue works: a policy as plain_products, or, on a CUDA queue,
///              cuda_products of that queue; any element type that it takes.
/// Semantics    backward writes d_x, adds to d_weight and d_bias (empty where bias is). `x` is what forward got: in the
///              sequence-parallel form all rows are gathered again, so only the share need be kept. backward_input and
///              backward_weight do the same in two calls, in any order, with the bits of the one: what pipelines that
///              defer gradients of weights want.
/// Shapes       weight outputs/t x inputs, bias outputs/t or empty, y rows x outputs/t. x and d_x are rows x inputs,
///              the same on all ranks; in the sequence-parallel form this rank's share of the rows.
/// Aliasing     outputs overlap no inputs.
/// Determinism  as far as Products' and the communicator's sums are.
/// Cost         2 rows inputs outputs/t flops forward, twice that backward. Forward sends nothing (sequence-parallel:
///              one gather of rows x inputs), backward one sum of rows x inputs (a gather and a sum to rows). Where
///              they overlap, the gather is beside the product for d_x, the sum beside the one for d_weight; of two
///              calls each waits for its own.
/// Errors       usage_error when outputs do not divide, or a size is wrong, before anything moved.
template <communicator C, floating_element T, class Products = plain_products> class column_linear {
    using M = memory_of<C>;
    tensor_group<C>* group_;
    detail::linear_part<T, M, Products> part_;

public:
    column_linear(tensor_group<C>& group, std::size_t inputs, std::size_t outputs, Products products = {})
        : group_(&group), part_{inputs, group.feature_share(outputs, "outputs").count, std::move(products)} {}

    [[nodiscard]] std::size_t weights() const noexcept { return part_.outputs * part_.inputs; }
    [[nodiscard]] std::size_t inputs() const noexcept { return part_.inputs; }
    /// Of this rank.
    [[nodiscard]] std::size_t outputs() const noexcept { return part_.outputs; }

    void forward(std::size_t rows, view<const T, M> x, view<const T, M> weight, view<const T, M> bias, view<T, M> y) {
        expect(rows, "x", x.size(), "y", y.size());
        part_.expect_weight("column_linear", "weight", weight.size(), bias.size());
        group_->on_whole_rows(rows, part_.inputs, x, [&](view<const T, M> whole) {
            part_.forward(whole, weight, y);
            part_.add_bias(group_->queue(), bias, y);
        });
    }
    void backward(std::size_t rows, view<const T, M> x, view<const T, M> weight, view<const T, M> d_y, view<T, M> d_x,
                  view<T, M> d_weight, view<T, M> d_bias) {
        expect(rows, "x", x.size(), "d_y", d_y.size());
        expect(rows, "d_x", d_x.size(), "d_y", d_y.size());
        part_.expect_weight("column_linear", "weight", weight.size(), 0);
        part_.expect_weight("column_linear", "d_weight", d_weight.size(), d_bias.size());
        group_->back_from_whole_rows(
            rows, part_.inputs, x, d_x, [&](view<T, M> d_whole) { part_.backward_input(d_y, weight, d_whole); },
            [&](view<const T, M> whole) { part_.backward_weight(group_->queue(), whole, d_y, d_weight, d_bias); });
    }
    void backward_input(std::size_t rows, view<const T, M> weight, view<const T, M> d_y, view<T, M> d_x) {
        expect(rows, "d_x", d_x.size(), "d_y", d_y.size());
        part_.expect_weight("column_linear", "weight", weight.size(), 0);
        group_->sum_of_parts(rows, part_.inputs, d_x,
                             [&](view<T, M> d_whole) { part_.backward_input(d_y, weight, d_whole); });
    }
    void backward_weight(std::size_t rows, view<const T, M> x, view<const T, M> d_y, view<T, M> d_weight,
                         view<T, M> d_bias) {
        expect(rows, "x", x.size(), "d_y", d_y.size());
        part_.expect_weight("column_linear", "d_weight", d_weight.size(), d_bias.size());
        group_->on_whole_rows(rows, part_.inputs, x, [&](view<const T, M> whole) {
            part_.backward_weight(group_->queue(), whole, d_y, d_weight, d_bias);
        });
    }

private:
    void expect(std::size_t rows, const char* outer, std::size_t x, const char* inner, std::size_t y) const {
        detail::expect_elements("column_linear", outer, x, group_->outer_rows(rows), part_.inputs);
        detail::expect_elements("column_linear", inner, y, rows, part_.outputs);
    }
};

/// y = x W^T + b, W cut by inputs: each rank has inputs/t columns of x and of W, and the products are added up.
///
/// Products     as column_linear's.
/// Semantics    the bias is added once, behind the sum. backward writes d_x, adds to d_weight and d_bias; d_bias is
///              that of all rows, in both forms, and the same on all ranks. backward_input and backward_weight do the
///              same in two calls, as column_linear's.
/// Shapes       weight outputs x inputs/t, bias outputs or empty and the same on all ranks, x rows x inputs/t. y and
///              d_y are rows x outputs, the same on all ranks; in the sequence-parallel form this rank's share of the
///              rows.
/// Aliasing     outputs overlap no inputs.
/// Determinism  as far as Products' and the communicator's sums are.
/// Cost         2 rows inputs/t outputs flops forward, twice that backward. Forward sends one sum of rows x outputs
///              (sequence-parallel: to rows), backward nothing (a gather of rows x outputs; of two calls each has one).
/// Errors       usage_error when inputs do not divide, or a size is wrong, before anything moved.
template <communicator C, floating_element T, class Products = plain_products> class row_linear {
    using M = memory_of<C>;
    tensor_group<C>* group_;
    detail::linear_part<T, M, Products> part_;

public:
    row_linear(tensor_group<C>& group, std::size_t inputs, std::size_t outputs, Products products = {})
        : group_(&group), part_{group.feature_share(inputs, "inputs").count, outputs, std::move(products)} {}

    [[nodiscard]] std::size_t weights() const noexcept { return part_.outputs * part_.inputs; }
    /// Of this rank.
    [[nodiscard]] std::size_t inputs() const noexcept { return part_.inputs; }
    [[nodiscard]] std::size_t outputs() const noexcept { return part_.outputs; }

    void forward(std::size_t rows, view<const T, M> x, view<const T, M> weight, view<const T, M> bias, view<T, M> y) {
        expect(rows, "x", x.size(), "y", y.size());
        part_.expect_weight("row_linear", "weight", weight.size(), bias.size());
        group_->sum_of_parts(rows, part_.outputs, y, [&](view<T, M> part) { part_.forward(x, weight, part); });
        part_.add_bias(group_->queue(), bias, y);
    }
    void backward(std::size_t rows, view<const T, M> x, view<const T, M> weight, view<const T, M> d_y, view<T, M> d_x,
                  view<T, M> d_weight, view<T, M> d_bias) {
        expect(rows, "x", x.size(), "d_y", d_y.size());
        expect(rows, "d_x", d_x.size(), "d_y", d_y.size());
        part_.expect_weight("row_linear", "weight", weight.size(), 0);
        part_.expect_weight("row_linear", "d_weight", d_weight.size(), d_bias.size());
        group_->on_whole_rows(rows, part_.outputs, d_y, [&](view<const T, M> d_whole) {
            part_.backward_input(d_whole, weight, d_x);
            part_.backward_weight(group_->queue(), x, d_whole, d_weight, d_bias);
        });
    }
    void backward_input(std::size_t rows, view<const T, M> weight, view<const T, M> d_y, view<T, M> d_x) {
        expect(rows, "d_x", d_x.size(), "d_y", d_y.size());
        part_.expect_weight("row_linear", "weight", weight.size(), 0);
        group_->on_whole_rows(rows, part_.outputs, d_y,
                              [&](view<const T, M> d_whole) { part_.backward_input(d_whole, weight, d_x); });
    }
    void backward_weight(std::size_t rows, view<const T, M> x, view<const T, M> d_y, view<T, M> d_weight,
                         view<T, M> d_bias) {
        expect(rows, "x", x.size(), "d_y", d_y.size());
        part_.expect_weight("row_linear", "d_weight", d_weight.size(), d_bias.size());
        group_->on_whole_rows(rows, part_.outputs, d_y, [&](view<const T, M> d_whole) {
            part_.backward_weight(group_->queue(), x, d_whole, d_weight, d_bias);
        });
    }

private:
    void expect(std::size_t rows, const char* inner, std::size_t x, const char* outer, std::size_t y) const {
        detail::expect_elements("row_linear", inner, x, rows, part_.inputs);
        detail::expect_elements("row_linear", outer, y, group_->outer_rows(rows), part_.outputs);
    }
};

}  // namespace tutti::parallel
