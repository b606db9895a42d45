// orthogonalize: makes the columns of tall matrices orthonormal, many matrices at once; safe for any content.
// Needs core/run. The device side is orthogonalize.cuh; both factorize with the same code.
// Source: CholeskyQR2, Fukaya et al., ScalA 2014, section 3; Yamamoto et al., ETNA 44 (2015), for its error bounds.
#pragma once

#include <algorithm>    // min, max
#include <cmath>        // sqrt
#include <cstddef>      // size_t
#include <limits>       // quiet_NaN
#include <span>         // batches
#include <string_view>  // names
#include <vector>       // scratch

#include <tutti/core/config.hpp>  // TUTTI_HOST_DEVICE
#include <tutti/core/error.hpp>   // usage_error
#include <tutti/core/run.hpp>     // operations
#include <tutti/core/text.hpp>    // formatted
#include <tutti/core/view.hpp>    // data

namespace tutti::compress {

/// A matrix of few columns, one column behind the other: element (i, j) is j * rows + i.
template <memory M> struct tall_matrix {
    view<const float, M> in;
    view<float, M> out;  ///< may be `in`
    std::size_t rows = 0;
    int columns = 0;
};

namespace detail {

// A column is dropped where what is left of its square, once its share in the columns before it is taken off, is less
// than this part of it: ten times what the rounding of sums in double makes of nothing.
inline constexpr double dependent_part = 1e-14;

TUTTI_HOST_DEVICE constexpr bool is_finite(double x) noexcept { return x - x == 0; }

/// The inverse W of the lower Cholesky factor of a Gram matrix G of r columns: the columns times W's transpose are
/// orthonormal. Row and column of W are zero for a column that depends on those before it; all is NaN when G is not
/// finite.
///
/// Semantics    called by `threads` threads together, of which this is `thread`; sync() is a barrier among them. The
///              elimination that makes the factor is applied to the identity at the same time.
/// Shapes       cells: r * r. Entry: G(i, j), j <= i, in cell i * r + j; zeros in the others. Exit: W(i, j), j <= i, in
///              cell j * r + i. diagonal: r cells of scratch.
/// Determinism  every cell is computed by the same operations whatever the number of threads.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // the barrier is the caller's: on the device, the device's
#endif
template <class Sync>
TUTTI_HOST_DEVICE void inverse_cholesky(double* cells, double* diagonal, unsigned r, unsigned thread, unsigned threads,
                                        Sync sync) {
    for (unsigned i = thread; i < r; i += threads) { diagonal[i] = cells[i * r + i]; }
    sync();
    bool finite = true;
    for (unsigned i = 0; i < r; ++i) { finite = finite && is_finite(diagonal[i]); }
    for (unsigned j = 0; j < r; ++j) {
        const double left = cells[j * r + j];
        const bool independent = left > dependent_part * diagonal[j];
        const double scale =
            finite ? (independent ? 1 / std::sqrt(left) : 0.0) : std::numeric_limits<double>::quiet_NaN();
        for (unsigned i = thread; i < r; i += threads) {
            if (i > j) { cells[i * r + j] *= scale; }  // column j of the factor
            if (i < j) { cells[i * r + j] *= scale; }  // row j of the inverse
        }
        sync();
        if (thread == 0) { cells[j * r + j] = scale; }
        for (unsigned at = (j + 1) * r + thread; at < r * r; at += threads) {
            const unsigned i = at / r;
            const unsigned k = at % r;
            if (k > i) { continue; }
            if (k > j) {
                cells[i * r + k] -= cells[i * r + j] * cells[k * r + j];
            } else {
                cells[k * r + i] -= cells[i * r + j] * (k == j ? scale : cells[k * r + j]);
            }
        }
        sync();
    }
}

/// Rows of a matrix that the host works on at a time: 16 KiB of 8 columns.
inline constexpr std::size_t tall_block = 512;

/// Writes the Gram matrix of r columns of n elements into the lower triangle of cells; zeros above.
inline void gram(const float* columns, std::size_t n, unsigned r, double* cells) {
    constexpr std::size_t lanes = 8;
    std::fill_n(cells, std::size_t{r} * r, 0.0);
    for (std::size_t first = 0; first < n; first += tall_block) {
        const std::size_t end = std::min(n, first + tall_block);
        for (unsigned a = 0; a < r; ++a) {
            for (unsigned b = 0; b <= a; ++b) {
                const float* const x = columns + a * n;
                const float* const y = columns + b * n;
                double partial[lanes] = {};
                std::size_t i = first;
                for (; i + lanes <= end; i += lanes) {
                    for (std::size_t l = 0; l < lanes; ++l) {
                        partial[l] += static_cast<double>(x[i + l]) * static_cast<double>(y[i + l]);
                    }
                }
                for (std::size_t l = 0; i < end; ++i, ++l) {
                    partial[l] += static_cast<double>(x[i]) * static_cast<double>(y[i]);
                }
                double total = 0;
                for (const double p : partial) { total += p; }
                cells[a * r + b] += total;
            }
        }
    }
}

/// out = in times the transpose of W, which is in `cells` as inverse_cholesky leaves it. In place too: a column needs
/// none behind it.
inline void apply_inverse(const float* in, float* out, std::size_t n, unsigned r, const double* cells) {
    double sums[tall_block];
    for (std::size_t first = 0; first < n; first += tall_block) {
        const std::size_t count = std::min(n - first, tall_block);
        for (unsigned j = r; j-- > 0;) {
            std::fill_n(sums, count, 0.0);
            for (unsigned k = 0; k <= j; ++k) {
                const double w = cells[k * r + j];
                const float* const x = in + k * n + first;
                for (std::size_t i = 0; i < count; ++i) { sums[i] += w * static_cast<double>(x[i]); }
            }
            float* const y = out + j * n + first;
            for (std::size_t i = 0; i < count; ++i) { y[i] = static_cast<float>(sums[i]); }
        }
    }
}

}  // namespace detail

/// Orthonormal columns for a batch of tall matrices. See orthogonalize().
template <memory M> struct orthogonalize_operation {
    static constexpr std::string_view name = "orthogonalize";
    std::span<const tall_matrix<M>> all;

    [[nodiscard]] tutti::cost cost() const noexcept {
        tutti::cost c;
        for (const tall_matrix<M>& a : all) {
            const auto n = static_cast<double>(a.rows);
            const auto r = static_cast<double>(a.columns);
            c.bytes += 6 * 4 * n * r;  // two passes: read, read and written
            c.flops += 4 * n * r * (r + 1);
        }
        return c;
    }
    void operator()() const {
        std::vector<double> scratch;
        for (const tall_matrix<M>& a : all) {
            const auto r = static_cast<unsigned>(a.columns);
            scratch.resize(std::size_t{r} * r + r);
            double* const cells = scratch.data();
            const float* from = a.in.data();
            for (int pass = 0; pass < 2; ++pass) {
                detail::gram(from, a.rows, r, cells);
                detail::inverse_cholesky(cells, cells + std::size_t{r} * r, r, 0, 1, [] {});
                detail::apply_inverse(from, a.out.data(), a.rows, r, cells);
                from = a.out.data();
            }
        }
    }
};

/// Makes the columns of each matrix orthonormal, from the first on: column j of `out` is column j of `in` less its
/// share in those before it, at length one.
///
/// Semantics    a column that depends on those before it becomes zero, as a column of zeros does; so every column of
///              `out` is zero or orthonormal to 1e-5 with the others. Columns count as dependent where less than 1e-7
///              of their length is their own: condition numbers up to 1e6 keep all. Any finite float will do, however
///              large or small. A matrix with a NaN or an infinity becomes all NaN.
/// Aliasing     out may be in; nothing else may overlap.
/// Determinism  of arguments alone, one by one or in a batch; host and device agree to rounding.
/// Cost         24 bytes and 4 r (r + 1) flops a row of r columns, in double. Device: six launches for the batch.
/// Errors       usage_error when a view's size is not rows * columns.
template <queue Q> void orthogonalize(Q q, std::span<const tall_matrix<typename Q::memory_type>> all) {
    for (const auto& a : all) {
        const std::size_t size = a.rows * static_cast<std::size_t>(std::max(a.columns, 0));
        if (a.columns < 0 || a.in.size() != size || a.out.size() != size) {
            throw usage_error(formatted("orthogonalize: {} rows of {} columns do not fit views of {} and {} elements",
                                        a.rows, a.columns, a.in.size(), a.out.size()));
        }
    }
    run(q, orthogonalize_operation<typename Q::memory_type>{all});
}

}  // namespace tutti::compress
