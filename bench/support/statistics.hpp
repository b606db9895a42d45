// Statistics of repeated timings. Repetitions of one row are samples; nothing is thrown away: p99 and max show all.
// Needs nothing.
#pragma once

#include <algorithm>  // sort
#include <cmath>      // sqrt
#include <cstddef>    // size_t
#include <utility>    // pair
#include <vector>     // samples

namespace bench {

/// Percentiles are samples (nearest rank), `cv` is standard deviation over mean.
struct summary {
    std::size_t samples = 0;
    double min = 0;
    double p50 = 0;
    double p95 = 0;
    double p99 = 0;
    double max = 0;
    double mean = 0;
    double cv = 0;
};

[[nodiscard]] inline summary summarize(std::vector<double> samples) {
    summary s;
    s.samples = samples.size();
    if (samples.empty()) { return s; }
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double share) {
        const double rank = std::ceil(share * static_cast<double>(samples.size()));
        return samples[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
    };
    s.min = samples.front();
    s.p50 = at(0.50);
    s.p95 = at(0.95);
    s.p99 = at(0.99);
    s.max = samples.back();
    for (const double x : samples) { s.mean += x / static_cast<double>(samples.size()); }
    double variance = 0;
    for (const double x : samples) { variance += (x - s.mean) * (x - s.mean) / static_cast<double>(samples.size()); }
    s.cv = s.mean > 0 ? std::sqrt(variance) / s.mean : 0;
    return s;
}

[[nodiscard]] inline double median(std::vector<double> samples) { return summarize(std::move(samples)).p50; }

/// time = alpha + beta * bytes, fitted by least squares of the relative error, so that small messages count as well.
struct line {
    double alpha = 0;  ///< seconds
    double beta = 0;   ///< seconds a byte
};

/// `points` are (bytes, seconds). Needs two different sizes; a single point gives beta = 0.
[[nodiscard]] inline line fit(const std::vector<std::pair<double, double>>& points) {
    double w = 0, wx = 0, wxx = 0, wy = 0, wxy = 0;
    for (const auto& [x, y] : points) {
        const double weight = 1 / (y * y);
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wy += weight * y;
        wxy += weight * x * y;
    }
    const double determinant = w * wxx - wx * wx;
    if (points.size() < 2 || determinant <= 0) { return {w > 0 ? wy / w : 0, 0}; }
    return {(wxx * wy - wx * wxy) / determinant, (w * wxy - wx * wy) / determinant};
}

}  // namespace bench
