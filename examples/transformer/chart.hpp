// chart: the axes of a diagram in an SVG picture, lines in it, and the smoothing of noisy curves.
// Needs fmt and svg.hpp. One function from numbers to text each.
#pragma once

#include <algorithm>    // min, max
#include <cmath>        // floor, ceil
#include <cstddef>      // size_t
#include <string>       // SVG
#include <string_view>  // texts
#include <utility>      // pair
#include <vector>       // curves

#include <fmt/format.h>  // coordinates

#include "svg.hpp"

namespace transformer {

/// (step, loss in nats per token or byte) in ascending order of steps.
using curve = std::vector<std::pair<int, double>>;

/// The mean over the 2 % of all steps around each, as far on both sides: no lag.
[[nodiscard]] inline curve running_mean(const curve& noisy) {
    curve mean;
    const std::size_t half = noisy.size() / 100;
    std::vector<double> sums{0};
    for (const auto& point : noisy) { sums.push_back(sums.back() + point.second); }
    for (std::size_t i = 0; i < noisy.size(); ++i) {
        const std::size_t reach = std::min({half, i, noisy.size() - 1 - i});
        mean.emplace_back(noisy[i].first, (sums[i + reach + 1] - sums[i - reach]) / static_cast<double>(2 * reach + 1));
    }
    return mean;
}

namespace detail {

/// A rectangle of the picture whose horizontal axis begins at 0, and whose vertical one has round ends.
class chart {
    double left_, top_, right_, bottom_;
    double last_, low_, high_, tick_;

public:
    chart(double left, double top, double right, double bottom, double last, double low, double high)
        : left_(left)
        , top_(top)
        , right_(right)
        , bottom_(bottom)
        , last_(last)
        , tick_(tick_distance(std::max(high - low, 1e-3))) {
        low_ = std::floor(low / tick_) * tick_;
        high_ = std::max(std::ceil(high / tick_) * tick_, low_ + tick_);
    }
    [[nodiscard]] double x(double at) const { return left_ + (right_ - left_) * at / last_; }
    [[nodiscard]] double y(double at) const { return top_ + (bottom_ - top_) * (high_ - at) / (high_ - low_); }

    /// Lines at ticks, numbers and titles. Ticks of the horizontal axis are `least` apart or more.
    [[nodiscard]] std::string axes(std::string_view x_title, std::string_view y_title, double least = 0) const {
        std::string svg;
        for (int i = 0; low_ + i * tick_ <= high_ + tick_ / 2; ++i) {
            const double at = low_ + i * tick_;
            svg += fmt::format("<path d=\"M{} {:.1f}H{}\" stroke=\"#e4e4e4\"/>\n", left_, y(at), right_);
            svg += svg_text(left_ - 8, y(at) + 4, "end", fmt::format("{:.{}f}", at, tick_ < 0.1 ? 2 : 1));
        }
        const double tick = std::max(least, tick_distance(last_));
        for (int i = 0; i * tick <= last_; ++i) {
            svg += fmt::format("<path d=\"M{0:.1f} {1}v5\" stroke=\"#888\"/>\n", x(i * tick), bottom_);
            svg += svg_text(x(i * tick), bottom_ + 20, "middle", fmt::format("{:g}", i * tick));
        }
        svg += fmt::format("<path d=\"M{} {}H{}\" stroke=\"#888\"/>\n", left_, bottom_, right_);
        svg += svg_text((left_ + right_) / 2, bottom_ + 42, "middle", x_title);
        return svg + fmt::format("<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}"
                                 "</text>\n",
                                 left_ - 46, (top_ + bottom_) / 2, escaped(y_title));
    }

    /// Through points of the data's own units.
    template <class Points> [[nodiscard]] std::string line(const Points& points, std::string_view style) const {
        std::string path;
        for (const auto& [at, value] : points) {
            path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(at), y(value));
        }
        return fmt::format("<path d=\"{}\" fill=\"none\" {}/>\n", path, style);
    }
    /// What is drawn between the two stays inside the axes.
    [[nodiscard]] std::string clip_begin(std::string_view name) const {
        return fmt::format("<clipPath id=\"{0}\"><rect x=\"{1}\" y=\"{2}\" width=\"{3}\" height=\"{4}\"/></clipPath>\n"
                           "<g clip-path=\"url(#{0})\">\n",
                           name, left_, top_, right_ - left_, bottom_ - top_);
    }
    [[nodiscard]] static std::string clip_end() { return "</g>\n"; }
};

}  // namespace detail
}  // namespace transformer
