// level_error_operations: what the measurements of compress/level_errors consist of; their host loops.
// Needs core/run and what the schemes are made of. The device side is in compress/level_errors.cuh.
// All sums are in double, in an order that only the arguments decide.
#pragma once

#include <algorithm>    // nth_element, min, max
#include <concepts>     // what a scheme has
#include <cstddef>      // size_t
#include <functional>   // greater
#include <limits>       // NaN
#include <span>         // runs, cuts
#include <string_view>  // names

#include <tutti/compress/compressor.hpp>                // segment, layout
#include <tutti/compress/detail/bucket_operations.hpp>  // schemes of buckets
#include <tutti/compress/detail/magnitude.hpp>          // magnitude, formed
#include <tutti/compress/level_table.hpp>               // most_options
#include <tutti/core/config.hpp>                        // TUTTI_HOST_DEVICE
#include <tutti/core/element.hpp>                       // floating_element
#include <tutti/core/partition.hpp>                     // part
#include <tutti/core/run.hpp>                           // cost
#include <tutti/core/view.hpp>                          // view

namespace tutti::compress::detail {

/// The largest number of levels measured at once: as many as a level_table has options.
inline constexpr std::size_t most_levels = level_table::most_options;

/// sums[i] = the squares of run i of `in`, added up.
template <floating_element T, memory M> struct run_squares {
    static constexpr std::string_view name = "run_squares";
    static constexpr std::size_t lanes = 8;
    std::span<const part> runs;
    view<const T, M> in;
    view<double, M> sums;

    [[nodiscard]] tutti::cost cost() const noexcept {
        double elements = 0;
        for (const part& r : runs) { elements += static_cast<double>(r.count); }
        return {elements * sizeof(T) + 8.0 * static_cast<double>(runs.size()), 2 * elements};
    }
    [[nodiscard]] TUTTI_HOST_DEVICE static double square(T x) noexcept {
        const auto d = static_cast<double>(static_cast<master_t<T>>(x));
        return d * d;
    }
    void operator()() const {
        for (std::size_t r = 0; r < runs.size(); ++r) {
            const T* const x = in.data() + runs[r].first;
            const std::size_t n = runs[r].count;
            double partial[lanes] = {};
            std::size_t i = 0;
            for (; i + lanes <= n; i += lanes) {
                for (std::size_t j = 0; j < lanes; ++j) { partial[j] += square(x[i + j]); }
            }
            for (std::size_t j = 0; i < n; ++i, ++j) { partial[j] += square(x[i]); }
            double total = 0;
            for (const double p : partial) { total += p; }
            sums.data()[r] = total;
        }
    }
};

/// out = the magnitudes of `in`, so that in front of each of `cuts` stand the largest, in any order.
template <floating_element T, memory M> struct order_magnitudes {
    static constexpr std::string_view name = "order_magnitudes";
    std::span<const std::size_t> cuts;  ///< ascending, at most as many elements as there are
    view<const T, M> in;
    view<float, M> out;

    [[nodiscard]] tutti::cost cost() const noexcept {  // of a radix sort, which reads and writes four times
        return {static_cast<double>(in.size_bytes() + 9 * out.size_bytes()), 0};
    }
    void operator()() const {
        for (std::size_t i = 0; i < in.size(); ++i) {
            out.data()[i] = __builtin_bit_cast(float, magnitude(formed(in.data()[i])));
        }
        select(out.data(), 0, out.size(), cuts);
    }

private:
    // The cut in the middle first: every element is moved about as often as the logarithm of the number of cuts says.
    static void select(float* x, std::size_t first, std::size_t end, std::span<const std::size_t> cuts) {
        if (cuts.empty() || end - first < 2) { return; }
        const std::size_t middle = cuts.size() / 2;
        const std::size_t at = cuts[middle];
        if (at < end) { std::nth_element(x + first, x + at, x + end, std::greater<>()); }
        select(x, first, at, cuts.first(middle));
        select(x, at, end, cuts.subspan(middle + 1));
    }
};

/// Whether rounding to the codes of C loses what a place between two codes says, and nothing else: no element is beyond
/// the codes.
template <class C>
concept grid_scheme = bucket_scheme<C> && C::spans_all && requires(const C& x, typename C::meta m, unsigned bits) {
    { x.coder(m, bits).place(1.0f) } -> std::same_as<float>;
    { x.coder(m, bits).unit } -> std::convertible_to<float>;
};

/// What rounding loses of an element at `place` between codes, in squared units. By chance: on average over the draws.
[[nodiscard]] TUTTI_HOST_DEVICE inline float rounding_loss(float place, bool by_chance) noexcept {
    const auto low = static_cast<float>(static_cast<int>(place));  // places are from 0 to 255
    const float above = place - low;
    const float below = 1 - above;
    if (by_chance) { return above * below; }
    const float nearest = above < below ? above : below;
    return nearest * nearest;
}

/// rows: for each segment its squares added up, and the squared errors at each of `levels`.
template <grid_scheme C, floating_element T, memory M> struct bucket_losses {
    static constexpr std::string_view name = "bucket_losses";
    C scheme;
    layout all;
    std::span<const int> levels;
    view<const T, M> in;
    view<double, M> rows;

    [[nodiscard]] unsigned bits(std::size_t level) const { return scheme.bits(segment{.level = levels[level]}); }
    [[nodiscard]] tutti::cost cost() const {
        const double n = elements_of(all);
        return {n * sizeof(T) + 8.0 * static_cast<double>(rows.size()),
                n * (4 + 8 * static_cast<double>(levels.size()))};
    }
    void operator()() const {
        const std::size_t width = levels.size() + 1;
        for (std::size_t t = 0; t < all.size(); ++t) {
            double* const row = rows.data() + t * width;
            std::fill_n(row, width, 0.0);
            const std::size_t bucket = scheme.granularity();
            for (std::size_t first = 0; first < all[t].size(); first += bucket) {
                add_bucket(all[t].offset + first, std::min(bucket, all[t].size() - first), row);
            }
        }
    }

private:
    void add_bucket(std::size_t at, std::size_t n, double* row) const {
        alignas(64) float x[largest_bucket];
        double squares = 0;
        for (std::size_t i = 0; i < n; ++i) {
            x[i] = formed(in.data()[at + i]);
            squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        }
        row[0] += squares;
        const auto measured = C::folds::of(x, n);
        const bool by_chance = scheme.mode() == rounding::stochastic;
        for (std::size_t l = 0; l < levels.size(); ++l) {
            const auto coder = scheme.coder(scheme.measured(measured, n, bits(l)), bits(l));
            if (!coder.finite()) {
                row[l + 1] += std::numeric_limits<double>::quiet_NaN();
                continue;
            }
            row[l + 1] += static_cast<double>(coder.unit) * static_cast<double>(coder.unit) *
                          static_cast<double>(loss_of(coder, x, n, by_chance));
        }
    }
    template <class Coder> static float loss_of(const Coder coder, const float* x, std::size_t n, bool by_chance) {
        constexpr std::size_t lanes = 16;
        float partial[lanes] = {};
        std::size_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            for (std::size_t j = 0; j < lanes; ++j) { partial[j] += rounding_loss(coder.place(x[i + j]), by_chance); }
        }
        for (std::size_t j = 0; i < n; ++i, ++j) { partial[j] += rounding_loss(coder.place(x[i]), by_chance); }
        float total = 0;
        for (const float p : partial) { total += p; }
        return total;
    }
};

/// How the sums of a row become what levels lose.
enum class row_sums : unsigned char {
    lost,  ///< number i: what level i keeps beyond level i - 1; the last: what the last level loses
    kept   ///< number 0: all; number i: what level i - 1 keeps beyond the level before it
};

/// rows: the squares of the segment, and what each level loses of them, from what is in them. All of a row is NaN where
/// its first number is not finite.
template <memory M> struct finish_rows {
    static constexpr std::string_view name = "finish_rows";
    view<double, M> rows;
    std::size_t width;
    row_sums sums;
    view<const double, M> firsts;  ///< takes the place of the rows' first numbers; empty: they are there

    [[nodiscard]] tutti::cost cost() const noexcept {
        return {2.0 * static_cast<double>(rows.size_bytes()), static_cast<double>(rows.size())};
    }
    TUTTI_HOST_DEVICE void finish(std::size_t r) const noexcept {
        double* const row = rows.data() + r * width;
        if (!firsts.empty()) { row[0] = firsts.data()[r]; }
        if (sums == row_sums::lost) {
            for (std::size_t i = width - 1; i-- > 0;) { row[i] += row[i + 1]; }
        } else {
            for (std::size_t i = 1; i < width; ++i) {
                const double left = row[i - 1] - row[i];
                row[i] = left < 0 ? 0 : left;  // a NaN stays
            }
        }
        if (!(row[0] - row[0] == 0)) {
            for (std::size_t i = 0; i < width; ++i) { row[i] = std::numeric_limits<double>::quiet_NaN(); }
        }
    }
    void operator()() const {
        for (std::size_t r = 0; r < rows.size() / width; ++r) { finish(r); }
    }
};

}  // namespace tutti::compress::detail
