// calibration: attention, links and rings timed on the machine at hand, and what a planner wants to know fitted to it.
// Needs sequence/cost. The caller says how attention and rings of a length are timed; nothing is run here by itself.
// calibration_json keeps the result, measured_link times links.
#pragma once

#include <algorithm>  // sort, max
#include <array>      // columns
#include <cmath>      // fabs, isfinite
#include <concepts>   // what measures
#include <cstddef>    // size_t
#include <cstdint>    // tokens
#include <optional>   // links that were measured
#include <span>       // samples
#include <string>     // names
#include <utility>    // move
#include <vector>     // samples

#include <tutti/comm/topology.hpp>       // link
#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/least_squares.hpp>  // fitted_line
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/cost.hpp>       // attention_cost, attention_sample

namespace tutti::sequence {

/// The largest |cost / time - 1| over the samples.
[[nodiscard]] inline double worst_relative_error(const attention_cost& cost,
                                                 std::span<const attention_sample> samples) {
    double worst = 0;
    for (const attention_sample& s : samples) { worst = std::max(worst, std::fabs(cost(s.tokens) / s.seconds - 1)); }
    return worst;
}

namespace detail {
inline void expect_samples(std::span<const attention_sample> samples) {
    std::vector<std::int64_t> lengths;
    for (const attention_sample& s : samples) {
        if (s.tokens < 1 || !std::isfinite(s.seconds) || s.seconds <= 0) {
            throw usage_error(formatted("calibration: {} s for {} tokens is no measurement", s.seconds, s.tokens));
        }
        lengths.push_back(s.tokens);
    }
    std::sort(lengths.begin(), lengths.end());
    const auto distinct = std::unique(lengths.begin(), lengths.end()) - lengths.begin();
    if (distinct < 3) {
        throw usage_error(formatted("calibration: {} lengths; three coefficients need at least 3", distinct));
    }
}
// The middle of `repeats` times, behind one that does not count.
template <class Measure> [[nodiscard]] double median_of(int repeats, Measure seconds) {
    if (repeats < 1) { throw usage_error(formatted("calibration: {} repeats measure nothing", repeats)); }
    (void)seconds();
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) { times.push_back(static_cast<double>(seconds())); }
    std::sort(times.begin(), times.end());
    const std::size_t half = times.size() / 2;
    return times.size() % 2 != 0 ? times[half] : (times[half - 1] + times[half]) / 2;
}
}  // namespace detail

/// The cost that comes closest to the samples: least sum of (cost / time - 1)^2, so that short sequences count as much
/// as long ones, with no coefficient below 0.
///
/// Determinism  of the samples alone.
/// Cost         7 small least-squares problems: every choice of coefficients that may be other than 0 is tried.
/// Errors       usage_error: fewer than 3 lengths, or a time that is not positive and finite.
[[nodiscard]] inline attention_cost fitted(std::span<const attention_sample> samples) {
    detail::expect_samples(samples);
    double longest = 0;
    for (const attention_sample& s : samples) { longest = std::max(longest, static_cast<double>(s.tokens)); }
    std::array<std::vector<double>, 3> columns;
    for (const attention_sample& s : samples) {
        const double share = static_cast<double>(s.tokens) / longest;
        columns[0].push_back(share * share / s.seconds);
        columns[1].push_back(share / s.seconds);
        columns[2].push_back(1 / s.seconds);
    }
    const auto found = non_negative_least_squares(columns, std::vector<double>(samples.size(), 1.0));
    return {found[0] / (longest * longest), found[1] / longest, found[2]};
}

/// One measured time of a message, from `bytes` on one rank to another.
struct link_sample {
    std::size_t bytes = 0;
    double seconds = 0;
    friend constexpr bool operator==(const link_sample&, const link_sample&) = default;
};

/// The link that comes closest to the samples: least sum of (latency / time + bytes / bandwidth / time - 1)^2.
/// Errors  usage_error: fewer than 2 sizes, a size of 0, a time that is not positive and finite, or times that do not grow
///         with the size.
[[nodiscard]] inline comm::link fitted_link(std::span<const link_sample> samples) {
    std::vector<measured_work> points;
    for (const link_sample& s : samples) { points.push_back({static_cast<double>(s.bytes), s.seconds}); }
    const work_line line = fitted_line(points, "calibration of a link");
    return {line.start, 1 / line.each};
}

/// One measured time of attention over a ring inside a node.
struct ring_sample {
    std::int64_t tokens = 0;  ///< of the sequence
    int ranks = 0;
    double seconds = 0;
    friend constexpr bool operator==(const ring_sample&, const ring_sample&) = default;
};

namespace detail {
inline void expect_rings(std::span<const ring_sample> samples) {
    if (samples.empty()) { throw usage_error("calibration: no rings were measured"); }
    for (const ring_sample& s : samples) {
        if (s.tokens < 1 || s.ranks < 2 || !std::isfinite(s.seconds) || s.seconds <= 0) {
            throw usage_error(formatted("calibration: {} s for {} tokens on a ring of {} is no measurement", s.seconds,
                                        s.tokens, s.ranks));
        }
    }
}
}  // namespace detail

/// What steps of rings take beside attention: the coefficients, none below 0, that come closest to the samples, by the sum
/// of squares of relative errors of times. By the model a ring of G takes (G - 1) max(x, sending) + x, x the time of a
/// step: each sample gives an x, and what of it is not attention.
/// Errors  usage_error: no samples, a ring of fewer than 2 ranks or without tokens, a time that is not positive and finite.
[[nodiscard]] inline step_cost fitted_steps(const attention_cost& cost, const transfer_cost& transfers,
                                            std::span<const ring_sample> samples) {
    detail::expect_rings(samples);
    const comm::link& link = transfers.inside;
    std::array<std::vector<double>, 2> columns;
    std::vector<double> beside;
    for (const ring_sample& s : samples) {
        const double size = s.ranks;
        const double tokens = static_cast<double>(s.tokens) / size;
        const double sending = link.latency_seconds + transfers.bytes_per_token * tokens / link.bytes_per_second;
        const bool hides = s.seconds >= size * sending;
        const double step = hides ? s.seconds / size : s.seconds - (size - 1) * sending;
        const double weight = (hides ? size : 1) / s.seconds;  // of an error of the step, in the time of the ring
        columns[0].push_back(weight * tokens);
        columns[1].push_back(weight);
        beside.push_back(weight * (step - cost(s.tokens) / size / size));
    }
    const auto found = non_negative_least_squares(columns, beside);
    return {found[0], found[1]};
}

/// A machine's attention: what was measured, and what was fitted to it.
struct calibration {
    std::string name{};  ///< of machine and kernel, one line
    attention_cost cost{};
    std::vector<attention_sample> samples{};
    std::optional<comm::link> inside{};   ///< between ranks of a node, where it was measured
    std::optional<comm::link> between{};  ///< between nodes
    step_cost step{};                     ///< fitted to the rings
    std::vector<ring_sample> rings{};
    friend bool operator==(const calibration&, const calibration&) = default;

    /// With these links and steps; links that were not measured cost nothing.
    [[nodiscard]] transfer_cost transfers(int kv_heads, int head_size, int bytes_per_element, int bytes_per_sum) const {
        return training_transfers(kv_heads, head_size, bytes_per_element, bytes_per_sum, inside.value_or(comm::link{}),
                                  between.value_or(comm::link{}), step);
    }
};

/// Training's attention on H200s in one node, for those who have measured nothing: forward and backward in bfloat16, 32
/// heads of 128, cuDNN's faster kernels, and rings of two over NVLink; a measurement of ours,
/// bench/results/sequence_calibration_2.json. Costs and steps are fits of these samples and go with the number of heads.
[[nodiscard]] inline calibration h200_training() {
    calibration c;
    c.name = "NVIDIA H200, fast";
    c.samples = {{1024, 148.66e-6},  {2048, 355.01e-6},    {4096, 1039.36e-6},
                 {8192, 3510.88e-6}, {16384, 14213.54e-6}, {32768, 56404.11e-6}};
    c.cost = {4.986e-11, 3.564e-8, 6.148e-5};
    c.inside = comm::link{1.342e-5, 2.682e11};
    c.rings = {{2048, 2, 498.16e-6},
               {4096, 2, 930.62e-6},
               {8192, 2, 2399.86e-6},
               {16384, 2, 8150.58e-6},
               {32768, 2, 29945.39e-6}};
    c.step = {4.814e-8, 8.966e-5};
    return c;
}

/// Times attention at the given lengths and fits the cost.
///
/// Semantics  seconds_of(tokens) runs attention once and returns what a sequence took; it is called once without being
///            counted, then `repeats` times, and the median counts. Where a call holds many sequences, as in training,
///            divide by their number: a launch then weighs as little as it will.
/// Errors     usage_error: as of `fitted`, or no repeats. What seconds_of throws passes through.
template <std::invocable<std::int64_t> Measure>
[[nodiscard]] calibration calibrated(std::string name, std::span<const std::int64_t> lengths, int repeats,
                                     Measure seconds_of) {
    calibration c;
    c.name = std::move(name);
    for (const std::int64_t tokens : lengths) {
        c.samples.push_back({tokens, detail::median_of(repeats, [&] { return seconds_of(tokens); })});
    }
    c.cost = fitted(c.samples);
    return c;
}

/// Times rings of `ranks` inside a node at the given lengths, and adds them and the steps fitted to them to `c`, whose cost
/// and links are known already. seconds_of as of `calibrated`; `transfers` as of c.transfers.
/// Errors  usage_error: as of `fitted_steps`, or no repeats. What seconds_of throws passes through.
template <std::invocable<std::int64_t> Measure>
void calibrate_rings(calibration& c, const transfer_cost& transfers, int ranks, std::span<const std::int64_t> lengths,
                     int repeats, Measure seconds_of) {
    for (const std::int64_t tokens : lengths) {
        c.rings.push_back({tokens, ranks, detail::median_of(repeats, [&] { return seconds_of(tokens); })});
    }
    c.step = fitted_steps(c.cost, transfers, c.rings);
}

}  // namespace tutti::sequence
