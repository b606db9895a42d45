// squared_errors: what each level of a compressor would lose of tensors, all levels at once. What level_table holds.
// Needs compress/{quantize, power_sgd, top_k}; on a CUDA queue compress/level_errors.cuh.
// Source: Markov et al., L-GreCo, MLSys 2024 (arXiv 2210.17357), section 3; there each level is compressed by itself.
#pragma once

#include <algorithm>    // max, min
#include <cstddef>      // size_t
#include <span>         // levels
#include <string_view>  // names
#include <type_traits>  // type_identity
#include <vector>       // cuts

#include <tutti/compress/compressor.hpp>                     // layout, draw_key
#include <tutti/compress/detail/level_error_operations.hpp>  // operations
#include <tutti/compress/power_sgd.hpp>                      // low rank
#include <tutti/compress/quantize.hpp>                       // grids
#include <tutti/compress/top_k.hpp>                          // largest elements
#include <tutti/core/buffer.hpp>                             // scratch
#include <tutti/core/error.hpp>                              // usage_error
#include <tutti/core/partition.hpp>                          // part
#include <tutti/core/run.hpp>                                // run
#include <tutti/core/text.hpp>                               // formatted
#include <tutti/core/view.hpp>                               // view

namespace tutti::compress {

/// Numbers of a segment's row: its squared norm, and a squared error a level.
[[nodiscard]] constexpr std::size_t error_row(std::span<const int> levels) noexcept { return levels.size() + 1; }

namespace detail {

inline void expect_measurable(layout all, std::span<const int> levels, std::size_t in, std::size_t out) {
    constexpr std::string_view name = "squared_errors";
    expect_inside(name, all, in);
    expect_size(name, "out", out, all.size() * error_row(levels));
    if (levels.empty() || levels.size() > most_levels) {
        throw usage_error(formatted("{}: {} levels, not 1 to {}", name, levels.size(), most_levels));
    }
    for (std::size_t l = 1; l < levels.size(); ++l) {
        if (levels[l] <= levels[l - 1]) {
            throw usage_error(
                formatted("{}: level {} comes after {}; levels must ascend", name, levels[l], levels[l - 1]));
        }
    }
}

}  // namespace detail

/// What each of `levels` of a scheme loses of each segment of `in`.
///
/// Semantics    out has a row for each segment: its squared norm, then |x - decoded(x)|^2 at each level. The levels of
///              the segments themselves are not read. A segment with something in it that its scheme counts as not
///              finite has a row of which all errors are NaN.
///   grids      (quantize, qsgd) exact to rounding: extremes are those of the wire. With stochastic rounding the mean
///              over all draws, which varies less than the error of one.
///   top_k      exact to rounding.
///   power_sgd  of a power iteration from drawn factors, `power_iterations` long. A column of it does not depend on
///              those behind it, so the columns of the largest level are, one after the other, what all the lower ones
///              would have found. Warm-started training comes close to it. To 1e-6 of the squared norm.
/// Shapes       `levels` ascend; at most 256. power_sgd: whole matrices.
/// Determinism  of arguments alone; host and device agree to rounding. `key` is of power_sgd's draws, the same on all
///              ranks.
/// Cost         grids: one read of `in`, some 8 flops an element and level. top_k: a selection (host) or a radix sort
///              (device) of one segment at a time, whose size in floats it holds, the device three times. power_sgd:
///              2 power_iterations reads, 4 power_iterations * rank flops an element, and the state of a power_sgd of
///              the largest level. No host wait.
/// Errors       usage_error for sizes that do not fit, levels that do not ascend or that the scheme does not have.
template <queue Q, detail::grid_scheme C, floating_element T>
void squared_errors(Q q, const C& x, layout all, std::span<const int> levels, view<const T, typename Q::memory_type> in,
                    std::type_identity_t<view<double, typename Q::memory_type>> out, draw_key = {}) {
    detail::expect_measurable(all, levels, in.size(), out.size());
    for (const int level : levels) { static_cast<void>(x.bits(segment{.level = level})); }  // refuses
    run(q, detail::bucket_losses<C, T, typename Q::memory_type>{x, all, levels, in, out});
}

/// Likewise for top_k: the squares of what each level would leave out.
template <queue Q, floating_element T>
void squared_errors(Q q, const top_k&, layout all, std::span<const int> levels,
                    view<const T, typename Q::memory_type> in,
                    std::type_identity_t<view<double, typename Q::memory_type>> out, draw_key = {}) {
    using M = typename Q::memory_type;
    detail::expect_measurable(all, levels, in.size(), out.size());
    const std::size_t width = error_row(levels);
    std::size_t most = 0;
    for (const segment& s : all) { most = std::max(most, s.size()); }
    const buffer<float, Q> ordered(q, most);
    std::vector<std::size_t> cuts(levels.size());
    std::vector<part> runs(width);
    for (std::size_t t = 0; t < all.size(); ++t) {
        segment s = all[t];
        std::size_t before = 0;
        for (std::size_t l = 0; l < levels.size(); ++l) {
            s.level = levels[l];
            cuts[l] = top_k::kept(s);
            runs[l] = {before, cuts[l] - before};
            before = cuts[l];
        }
        runs[levels.size()] = {before, s.size() - before};
        const auto magnitudes = ordered.view().sub(0, s.size());
        run(q, detail::order_magnitudes<T, M>{cuts, in.sub(s.offset, s.size()), magnitudes});
        run(q, detail::run_squares<float, M>{runs, magnitudes, out.sub(t * width, width)});
    }
    run(q, detail::finish_rows<M>{out, width, detail::row_sums::lost, {}});
}

/// Steps of the power iteration by which squared_errors measures power_sgd: as many as the published code takes.
inline constexpr int power_iterations = 5;

/// Likewise for power_sgd, whose directions are found by that iteration.
template <queue Q, floating_element T>
void squared_errors(Q q, const power_sgd& x, layout all, std::span<const int> levels,
                    view<const T, typename Q::memory_type> in,
                    std::type_identity_t<view<double, typename Q::memory_type>> out, draw_key key = {}) {
    using M = typename Q::memory_type;
    detail::expect_measurable(all, levels, in.size(), out.size());
    if (levels.front() < 1) {
        throw usage_error(formatted("squared_errors: level {} of power_sgd, expected ranks", levels.front()));
    }
    std::vector<segment> largest(all.begin(), all.end());
    for (segment& s : largest) { s.level = levels.back(); }
    auto state = x.make_state(q, largest);
    std::size_t floats[power_sgd::rounds] = {};
    for (const segment& s : largest) {
        for (int round = 0; round < power_sgd::rounds; ++round) { floats[round] += x.wire_count(s, round); }
    }
    const buffer<float, Q> wire(q, std::max(floats[0], floats[1]));
    for (int step = 0; step < power_iterations; ++step) {
        for (int round = 0; round < power_sgd::rounds; ++round) {
            const auto own = wire.view().sub(0, floats[round]);
            x.contribute(q, largest, state, round, in, {}, own, key);
            x.absorb(q, largest, state, round, own, 1);
        }
    }
    // The left factor is orthonormal, so the squares of column j of the right one are what the j-th adds.
    const std::size_t width = error_row(levels);
    std::vector<part> wholes, columns;
    std::size_t at = 0;
    for (const segment& s : largest) {
        wholes.push_back({s.offset, s.size()});
        columns.push_back({});  // the whole
        std::size_t before = 0;
        for (const int level : levels) {
            const std::size_t rank = std::min({static_cast<std::size_t>(level), s.rows, s.cols});
            columns.push_back({at + before * s.cols, (rank - before) * s.cols});
            before = rank;
        }
        at += before * s.cols;
    }
    const buffer<double, Q> norms(q, all.size());
    run(q, detail::run_squares<T, M>{wholes, in, norms.view()});
    run(q, detail::run_squares<float, M>{columns, wire.view().sub(0, floats[1]), out});
    run(q, detail::finish_rows<M>{out, width, detail::row_sums::kept, norms.view()});
}

/// A compressor whose levels squared_errors can tell apart.
template <class Scheme, class Q, class T = float>
concept measurable = queue<Q> &&
    requires(Q q, const Scheme& x, layout all, std::span<const int> levels, view<const T, typename Q::memory_type> in,
             view<double, typename Q::memory_type> out, draw_key key) {
    squared_errors(q, x, all, levels, in, out, key);
};

}  // namespace tutti::compress
