// bias: numbers that are added to all rows of a matrix, and their gradient, the sums of its columns.
// Needs core/run; on a CUDA queue parallel/bias.cuh.
#pragma once

#include <algorithm>    // min
#include <cstddef>      // size_t
#include <string_view>  // names

#include <tutti/core/element.hpp>  // master_t
#include <tutti/core/run.hpp>      // cost
#include <tutti/core/view.hpp>     // view

namespace tutti::parallel {

/// y[i][j] += bias[j], of rows one behind the other, as wide as the bias.
template <floating_element T, memory M> struct add_bias_operation {
    static constexpr std::string_view name = "add_bias";
    view<const T, M> bias;
    view<T, M> y;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(2 * y.size_bytes() + bias.size_bytes()), static_cast<double>(y.size())};
    }
    void operator()() const {
        using R = master_t<T>;
        for (std::size_t at = 0; at < y.size(); at += bias.size()) {
            for (std::size_t j = 0; j < bias.size(); ++j) {
                T& element = y.data()[at + j];
                element = static_cast<T>(static_cast<R>(element) + static_cast<R>(bias.data()[j]));
            }
        }
    }
};

/// sums[j] += y[0][j] + y[1][j] + ..., of rows as wide as the sums, rounded to T once.
///
/// Determinism  the host adds in ascending order of rows, a device in an order that their number fixes.
template <floating_element T, memory M> struct add_bias_gradient_operation {
    static constexpr std::string_view name = "add_bias_gradient";
    view<const T, M> y;
    view<T, M> sums;
    [[nodiscard]] tutti::cost cost() const noexcept {
        return {static_cast<double>(y.size_bytes() + 2 * sums.size_bytes()), static_cast<double>(y.size())};
    }
    void operator()() const {
        using R = master_t<T>;
        constexpr std::size_t most = 64;  // columns at a time: a row's are neighbors, and all have a sum at hand
        for (std::size_t first = 0; first < sums.size(); first += most) {
            const std::size_t count = std::min(most, sums.size() - first);
            R total[most];
            for (std::size_t j = 0; j < count; ++j) { total[j] = static_cast<R>(sums.data()[first + j]); }
            for (std::size_t at = first; at < y.size(); at += sums.size()) {
                for (std::size_t j = 0; j < count; ++j) { total[j] += static_cast<R>(y.data()[at + j]); }
            }
            for (std::size_t j = 0; j < count; ++j) { sums.data()[first + j] = static_cast<T>(total[j]); }
        }
    }
};

}  // namespace tutti::parallel
