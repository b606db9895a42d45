// What a run of forward passes alone says about itself: the report's "zeroth".
// Needs nlohmann-json and zeroth_options.hpp.
#pragma once

#include <array>    // times
#include <cmath>    // isfinite
#include <cstdint>  // counts
#include <limits>   // not measured
#include <string>   // a line
#include <utility>  // move

#include <fmt/format.h>       // numbers
#include <nlohmann/json.hpp>  // report

#include "zeroth_options.hpp"

namespace transformer {

/// Of the last step, and over the run. Bytes and memory are the most of any rank.
struct zeroth_result {
    double loss_plus = 0, loss_minus = 0;
    double gradient = 0;                                         // along the first direction
    double largest_move = 0;                                     // of a step, in epsilons
    std::uint64_t skipped = 0;                                   // steps whose loss was not finite
    std::uint64_t flat = 0;                                      // steps whose losses did not differ: nothing learned
    std::uint64_t scalar_bytes = 0;                              // that a rank tells the others in a step
    std::uint64_t upload_bytes = 0;                              // of weights, in a step, and not for validation
    std::uint64_t offload_bytes = 0;                             // likewise, back to the host
    std::uint64_t gathered_bytes = 0;                            // likewise, from other ranks
    std::string gather;                                          // one of ways_to_gather; empty: nothing is gathered
    std::array<double, ways_to_gather.size()> gather_seconds{};  // of each for a block; 0, infinity: not measured
    std::uint64_t host_bytes = 0;                                // of weights kept there
    int upload_bits = 0;                                         // of a weight that travels; 0: as it is computed with
    /// What those bits change of weights, as a share of them, by root mean squares; not a number where they change none.
    double upload_error = std::numeric_limits<double>::quiet_NaN();
    std::uint64_t peak_device_bytes = 0;
    /// The longest of uploads, computation and offloads as a part of the time of passes; not a number where nothing moves.
    double overlap_efficiency = std::numeric_limits<double>::quiet_NaN();
};

/// A line for the terminal.
[[nodiscard]] inline std::string text_of(const zeroth_result& r) {
    std::string text = fmt::format(
        "slope {:.4g} ({:.6f} and {:.6f}), largest step {:.2g} epsilons; {:.1f} MiB on a device", r.gradient,
        r.loss_plus, r.loss_minus, r.largest_move, static_cast<double>(r.peak_device_bytes) / (1 << 20));
    if (r.upload_bytes != 0) {
        text += fmt::format(", a step moves {} bytes to it and {} back", r.upload_bytes, r.offload_bytes);
    }
    if (!r.gather.empty()) { text += fmt::format(", gathered by {}", r.gather); }
    if (std::isfinite(r.upload_error)) {
        text +=
            fmt::format(", in {} bits, which change weights by {:.2g} of themselves", r.upload_bits, r.upload_error);
    }
    if (std::isfinite(r.overlap_efficiency)) { text += fmt::format(", overlap {:.3f}", r.overlap_efficiency); }
    if (r.skipped != 0) {
        text += fmt::format("\n{} steps skipped, as a loss was not finite: try a smaller --lr or --epsilon", r.skipped);
    }
    if (r.flat != 0) {
        text += fmt::format("\n{} steps moved nothing, as both losses were the same: try a larger --epsilon", r.flat);
    }
    return text;
}

[[nodiscard]] inline nlohmann::ordered_json report_of(const zeroth_result& r) {
    nlohmann::ordered_json efficiency, bits, error;  // null where there was none
    if (std::isfinite(r.overlap_efficiency)) { efficiency = r.overlap_efficiency; }
    if (r.upload_bits != 0) { bits = r.upload_bits; }
    if (std::isfinite(r.upload_error)) { error = r.upload_error; }
    nlohmann::ordered_json gather, seconds;
    if (!r.gather.empty()) {
        gather = r.gather;
        for (std::size_t i = 0; i < ways_to_gather.size(); ++i) {
            const double t = r.gather_seconds[i];
            if (std::isfinite(t) && t > 0) { seconds[std::string(ways_to_gather[i])] = t; }
        }
    }
    return {{"loss_plus", r.loss_plus},
            {"loss_minus", r.loss_minus},
            {"gradient", r.gradient},
            {"largest_move", r.largest_move},
            {"skipped", r.skipped},
            {"flat", r.flat},
            {"scalar_bytes", r.scalar_bytes},
            {"upload_bytes", r.upload_bytes},
            {"offload_bytes", r.offload_bytes},
            {"gathered_bytes", r.gathered_bytes},
            {"gather", std::move(gather)},
            {"gather_seconds", std::move(seconds)},
            {"host_bytes", r.host_bytes},
            {"upload_bits", std::move(bits)},
            {"upload_error", std::move(error)},
            {"peak_device_bytes", r.peak_device_bytes},
            {"overlap_efficiency", std::move(efficiency)}};
}

}  // namespace transformer
