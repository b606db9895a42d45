// low_rank: the operations that PowerSGD consists of, each over all matrices of a call; their host loops.
// Needs core/run and core/philox. The device side is in power_sgd.cuh.
// Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2.
#pragma once

#include <algorithm>    // min, fill
#include <cstddef>      // size_t
#include <cstdint>      // positions of draws
#include <limits>       // quiet_NaN
#include <span>         // batches
#include <string_view>  // names
#include <vector>       // rows

#include <tutti/compress/detail/add_products.hpp>  // the host's products
#include <tutti/core/config.hpp>                   // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>                  // floating_element, master_t
#include <tutti/core/philox.hpp>                   // random_stream, fill_normal_operation
#include <tutti/core/run.hpp>                      // cost
#include <tutti/core/view.hpp>                     // data

namespace tutti::compress::detail {

/// A matrix of a call, rows x cols, row after row from element `offset` of the flat views; and its factors, whose
/// columns follow each other: element (i, j) of p is j * rows + i, of q and own j * cols + i.
template <memory M> struct factored_matrix {
    std::size_t offset = 0;
    std::size_t rows = 0;
    std::size_t cols = 0;
    int rank = 0;
    std::uint32_t tensor = 0;
    view<float, M> q;       ///< right factor: the mean over the ranks
    view<float, M> p;       ///< left factor
    view<float, M> own;     ///< right factor of this rank alone
    view<float, M> poison;  ///< one a column: NaN where that of the summed right factor is not finite, else 0
    view<float, M> wire;    ///< of the round
    random_stream draws;

    [[nodiscard]] constexpr std::size_t size() const noexcept { return rows * cols; }
};
template <memory M> using factored_matrices = std::span<const factored_matrix<M>>;

/// The elements of the flat views, and of the factors, that a call touches.
template <memory M> [[nodiscard]] double elements_of(factored_matrices<M> all) noexcept {
    double sum = 0;
    for (const auto& a : all) { sum += static_cast<double>(a.size()); }
    return sum;
}
template <memory M> [[nodiscard]] double right_elements_of(factored_matrices<M> all) noexcept {
    double sum = 0;
    for (const auto& a : all) { sum += static_cast<double>(a.rank) * static_cast<double>(a.cols); }
    return sum;
}
/// Of both factors.
template <memory M> [[nodiscard]] double factor_elements_of(factored_matrices<M> all) noexcept {
    double sum = 0;
    for (const auto& a : all) { sum += static_cast<double>(a.rank) * static_cast<double>(a.rows + a.cols); }
    return sum;
}
template <memory M> [[nodiscard]] double product_flops_of(factored_matrices<M> all) noexcept {
    double sum = 0;
    for (const auto& a : all) { sum += 2.0 * static_cast<double>(a.rank) * static_cast<double>(a.size()); }
    return sum;
}

TUTTI_HOST_DEVICE constexpr bool is_finite(float x) noexcept { return x - x == 0; }
TUTTI_HOST_DEVICE constexpr float finite_or_zero(float x) noexcept { return is_finite(x) ? x : 0.0f; }
/// What is compressed: the input and what earlier steps left behind.
template <floating_element T> TUTTI_HOST_DEVICE constexpr float compensated(T in, float residual) noexcept {
    return static_cast<float>(static_cast<master_t<T>>(in) + static_cast<master_t<T>>(residual));
}

/// Draws the columns of q that hold nothing: zeros, which the columns of a new state are and those of a matrix of
/// lower rank become. Element i of column j is position j * cols + i of the matrix's stream.
template <memory M> struct draw_operation {
    static constexpr std::string_view name = "power_sgd_draw";
    factored_matrices<M> all;
    [[nodiscard]] tutti::cost cost() const noexcept { return {4 * right_elements_of(all), 0}; }
    void operator()() const {
        for (const auto& a : all) {
            for (std::size_t j = 0; j < static_cast<std::size_t>(a.rank); ++j) {
                const view<float, M> column = a.q.sub(j * a.cols, a.cols);
                const bool empty = std::all_of(column.data(), column.data() + a.cols, [](float x) { return x == 0; });
                if (empty) { fill_normal_operation<float, M>{column, a.draws, j * a.cols, 1.0f}(); }
            }
        }
    }
};

/// wire = X Q with X = in + residual, which residual becomes; X = in where residual is empty.
template <floating_element T, memory M> struct left_product_operation {
    static constexpr std::string_view name = "power_sgd_left";
    factored_matrices<M> all;
    view<const T, M> in;
    view<float, M> residual;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double per = static_cast<double>(sizeof(T)) + (residual.empty() ? 0.0 : 8.0);
        return {per * elements_of(all) + 4 * factor_elements_of(all), product_flops_of(all)};
    }
    void operator()() const {
        constexpr std::size_t together = 2;
        std::vector<float> converted;
        for (const auto& a : all) {
            if (residual.empty()) { converted.resize(together * a.cols); }
            for (std::size_t i = 0; i < a.rows; i += together) {
                const std::size_t count = std::min(together, a.rows - i);
                const std::size_t at = a.offset + i * a.cols;
                const T* const g = in.data() + at;
                float* const x = residual.empty() ? converted.data() : residual.data() + at;
                if (residual.empty()) {
                    for (std::size_t k = 0; k < count * a.cols; ++k) { x[k] = as_float(g[k]); }
                } else {
                    for (std::size_t k = 0; k < count * a.cols; ++k) { x[k] = compensated(g[k], x[k]); }
                }
                const auto r = static_cast<std::size_t>(a.rank);
                std::size_t j = 0;
                const auto columns = [&]<std::size_t width>() {
                    if (count == together) {
                        dot<together, width>(a, x, i, j);
                    } else {
                        dot<1, width>(a, x, i, j);
                    }
                    j += width;
                };
                while (j + 4 <= r) { columns.template operator()<4>(); }
                if (j + 2 <= r) { columns.template operator()<2>(); }
                if (j < r) { columns.template operator()<1>(); }
            }
        }
    }

private:
    // Rows i ... of X with columns j ... of Q. Element k of a row goes to partial sum k mod 8.
    template <std::size_t height, std::size_t width>
    static void dot(const factored_matrix<M>& a, const float* x, std::size_t i, std::size_t j) {
        constexpr std::size_t lanes = 8;
        const std::size_t m = a.cols;
        const float* const q = a.q.data() + j * m;
        float partial[height][width][lanes] = {};
        std::size_t k = 0;
        for (; k + lanes <= m; k += lanes) {
            for (std::size_t h = 0; h < height; ++h) {
                for (std::size_t w = 0; w < width; ++w) {
                    for (std::size_t l = 0; l < lanes; ++l) { partial[h][w][l] += x[h * m + k + l] * q[w * m + k + l]; }
                }
            }
        }
        for (std::size_t l = 0; k < m; ++k, ++l) {
            for (std::size_t h = 0; h < height; ++h) {
                for (std::size_t w = 0; w < width; ++w) { partial[h][w][l] += x[h * m + k] * q[w * m + k]; }
            }
        }
        for (std::size_t h = 0; h < height; ++h) {
            for (std::size_t w = 0; w < width; ++w) {
                float total = 0;
                for (const float p : partial[h][w]) { total += p; }
                a.wire.data()[(j + w) * a.rows + i + h] = total;
            }
        }
    }
};

/// wire = the transpose of X, times P; own too. X is residual, or in where residual is empty.
template <floating_element T, memory M> struct right_product_operation {
    static constexpr std::string_view name = "power_sgd_right";
    factored_matrices<M> all;
    view<const T, M> in;
    view<float, M> residual;

    // A tile of columns stays in the first cache with the sums over its rows; those of a block of rows are added to the
    // result together, so that the rounding of long sums does not grow with their length.
    static constexpr std::size_t tile = 512;
    static constexpr std::size_t row_block = 256;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const double per = residual.empty() ? static_cast<double>(sizeof(T)) : 4.0;
        return {per * elements_of(all) + 4 * (factor_elements_of(all) + right_elements_of(all)), product_flops_of(all)};
    }
    void operator()() const {
        for (const auto& a : all) {
            if (residual.empty()) {
                product(a, in.data() + a.offset);
            } else {
                product(a, residual.data() + a.offset);
            }
            std::copy_n(a.wire.data(), a.wire.size(), a.own.data());
        }
    }

private:
    static constexpr std::size_t width = 16;  // columns of the factor at a time

    template <class Element> static void product(const factored_matrix<M>& a, const Element* x) {
        const auto r = static_cast<std::size_t>(a.rank);
        float sums[width * tile];
        std::fill_n(a.wire.data(), a.wire.size(), 0.0f);
        for (std::size_t j = 0; j < r; j += width) {
            const std::size_t columns = std::min(width, r - j);
            for (std::size_t k = 0; k < a.cols; k += tile) {
                const std::size_t count = std::min(tile, a.cols - k);
                for (std::size_t i = 0; i < a.rows; i += row_block) {
                    std::fill_n(sums, columns * tile, 0.0f);
                    add_products(sums, tile, columns, x + i * a.cols + k, a.cols, std::min(row_block, a.rows - i),
                                 a.p.data() + j * a.rows + i, a.rows, 1, count);
                    for (std::size_t c = 0; c < columns; ++c) {
                        float* const out = a.wire.data() + (j + c) * a.cols + k;
                        for (std::size_t l = 0; l < count; ++l) { out[l] += sums[c * tile + l]; }
                    }
                }
            }
        }
    }
};

/// q = wire / ranks; zeros where any of the matrix's wire is not finite. Poison: NaN for a column that is not finite.
template <memory M> struct mean_factor_operation {
    static constexpr std::string_view name = "power_sgd_mean";
    factored_matrices<M> all;
    float ranks;
    [[nodiscard]] tutti::cost cost() const noexcept { return {12 * right_elements_of(all), right_elements_of(all)}; }
    void operator()() const {
        for (const auto& a : all) {
            bool usable = true;
            for (std::size_t j = 0; j < a.poison.size(); ++j) {
                const float* const from = a.wire.data() + j * a.cols;
                const bool finite = std::all_of(from, from + a.cols, [](float x) { return is_finite(x); });
                a.poison.data()[j] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
                usable = usable && finite;
            }
            for (std::size_t i = 0; i < a.q.size(); ++i) { a.q.data()[i] = usable ? a.wire.data()[i] / ranks : 0.0f; }
        }
    }
};

/// out = P times the transpose of Q; residual -= P times that of own. After a step that was not finite, out is NaN, and
/// the residual what it was before: less `in`, up to rounding.
template <floating_element T, memory M> struct expand_operation {
    static constexpr std::string_view name = "power_sgd_expand";
    factored_matrices<M> all;
    view<const T, M> in;
    view<float, M> residual;
    view<T, M> out;

    [[nodiscard]] tutti::cost cost() const noexcept {
        const bool both = !residual.empty();
        const double per = static_cast<double>(sizeof(T)) + (both ? 8.0 : 0.0);
        return {per * elements_of(all) + 4 * (factor_elements_of(all) + (both ? right_elements_of(all) : 0.0)),
                (both ? 2.0 : 1.0) * product_flops_of(all)};
    }
    void operator()() const {
        for (const auto& a : all) {
            const bool poisoned = !std::all_of(a.poison.begin(), a.poison.end(), [](float x) { return x == 0; });
            for (std::size_t k = 0; k < a.cols; k += tile) {
                for (std::size_t i = 0; i < a.rows; i += row_block) {
                    piece(a, i, std::min(row_block, a.rows - i), k, std::min(tile, a.cols - k), poisoned);
                }
            }
        }
    }

private:
    // Long rows, which memory brings fast; few of them, so that their products stay in the first cache.
    static constexpr std::size_t tile = 1024;
    static constexpr std::size_t row_block = 4;

    void piece(const factored_matrix<M>& a, std::size_t i, std::size_t rows, std::size_t k, std::size_t count,
               bool poisoned) const {
        float product[row_block * tile];
        const auto multiply = [&](view<float, M> right) {
            std::fill_n(product, rows * tile, 0.0f);
            add_products(product, tile, rows, right.data() + k, a.cols, static_cast<std::size_t>(a.rank),
                         a.p.data() + i, 1, a.rows, count);
        };
        if (!residual.empty()) {
            multiply(a.own);
            for (std::size_t h = 0; h < rows; ++h) {
                const std::size_t at = a.offset + (i + h) * a.cols + k;
                float* const e = residual.data() + at;
                const T* const g = in.data() + at;
                for (std::size_t l = 0; l < count; ++l) {
                    e[l] = finite_or_zero(e[l] - (poisoned ? as_float(g[l]) : product[h * tile + l]));
                }
            }
        }
        multiply(a.q);
        for (std::size_t h = 0; h < rows; ++h) {
            T* const o = out.data() + a.offset + (i + h) * a.cols + k;
            for (std::size_t l = 0; l < count; ++l) {
                o[l] = static_cast<T>(poisoned ? std::numeric_limits<float>::quiet_NaN() : product[h * tile + l]);
            }
        }
    }
};

}  // namespace tutti::compress::detail
