// What a training run must know of the device it runs on, and how busy a model keeps it.
// Needs parameters.hpp. A device type has: math, the steps of a model; make_math(queue); communicator(world, options),
// what the replicas train over; along(world, options, mesh, dimensions), the part of it along some dimensions; name() and peak_flops() for reports; is_accelerator. host_device.hpp and cuda/run.cu have one.
#pragma once

#include <array>        // table
#include <cstddef>      // size_t
#include <string>       // text
#include <string_view>  // names
#include <utility>      // pairs

#include <fmt/format.h>  // text

#include "parameters.hpp"

namespace transformer {

/// Floating-point operations of a training step for each token: 6 a parameter, and the causal half of attention.
[[nodiscard]] inline double flops_per_token(const configuration& c, std::size_t parameters) {
    return 6.0 * static_cast<double>(parameters) + 6.0 * c.layers * static_cast<double>(c.width) * c.context;
}

/// Dense bfloat16 operations per second with float sums, as the maker's data sheets give them; 0 for a card not listed.
/// Cards of one name that differ in this differ in a later word, which is looked for first.
[[nodiscard]] inline double datasheet_flops(std::string_view card) {
    constexpr std::array<std::pair<std::string_view, double>, 14> known{{
        {"H100 PCIe", 756e12},
        {"H100 NVL", 835e12},
        {"H100", 989e12},
        {"H200 NVL", 836e12},
        {"H200", 989e12},
        {"H800 PCIe", 756e12},
        {"H800", 989e12},
        {"GH200", 989e12},
        {"A100", 312e12},
        {"A800", 312e12},
        {"A40", 149.7e12},
        {"A30", 165e12},
        {"L40S", 362e12},
        {"RTX 4090", 165.2e12},
    }};
    for (const auto& [name, flops] : known) {
        if (card.find(name) != std::string_view::npos) { return flops; }
    }
    return 0;
}

/// "MFU 41.3 %", or that there is no peak to compare with.
[[nodiscard]] inline std::string utilization_text(double flops, double peak) {
    return peak > 0 ? fmt::format("MFU {:.1f} %", 100 * flops / peak) : "MFU unknown";
}

}  // namespace transformer
