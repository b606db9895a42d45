// machine: what a planner knows of the hardware: peaks, memory, links, and what share of them work gets.
// Needs comm/cost for its links. Peaks are of 16-bit floats without sparsity, links of one direction and one rank.
#pragma once

#include <algorithm>    // min, max
#include <cmath>        // isfinite
#include <cstddef>      // size_t
#include <cstdint>      // ranks, size of an enumeration
#include <string_view>  // names
#include <utility>      // pair

#include <tutti/comm/cost.hpp>   // link, two_levels
#include <tutti/core/error.hpp>  // usage_error
#include <tutti/core/text.hpp>   // formatted

namespace tutti::plan {

/// Where a figure comes from.
enum class evidence : std::uint8_t {
    assumed,    ///< by us
    published,  ///< by who makes the hardware, or runs it
    fitted,     ///< to steps, products or collectives that somebody has measured, the machine says which
    given       ///< by the user
};
[[nodiscard]] constexpr std::string_view name_of(evidence e) noexcept {
    constexpr std::string_view names[] = {"assumed", "published", "fitted", "given"};
    return names[static_cast<std::size_t>(e)];
}
/// Of a machine's figures.
struct machine_evidence {
    evidence flops = evidence::assumed;
    evidence memory = evidence::assumed;  ///< size and bandwidth
    evidence links = evidence::assumed;   ///< bandwidth inside nodes and between them, and ranks of a node
    evidence latencies = evidence::assumed;
    evidence host = evidence::assumed;
    evidence product_efficiency = evidence::assumed;
    evidence memory_efficiency = evidence::assumed;
    evidence link_efficiency = evidence::assumed;
    evidence launch = evidence::assumed;
    evidence interference = evidence::fitted;
    evidence wave = evidence::assumed;
};

/// One rank's hardware, and how ranks are connected.
///
/// Units    FLOP/s, bytes, bytes/s, seconds. Efficiencies are shares of the peaks; calibrate them (plan/calibrate).
/// Sources  what a machine does not state itself is assumed, with the usual size of such figures; `interference` is
///          fitted: to CO2's rounds beside steps on two H200, bench/results/transformer_gpus_rounds.json.
struct machine {
    std::string_view name;
    double flops = 0;
    double memory_bytes = 0;
    double memory_bandwidth = 0;
    int ranks_per_node = 1;
    comm::link inside{};           ///< of a rank, to the others of its node
    comm::link between{};          ///< of a rank, its share of the node's NICs
    double host_bandwidth = 32e9;  ///< of a rank, to and from its host's memory, each way
    double product_efficiency = 0.7;
    double memory_efficiency = 0.8;
    double link_efficiency = 0.7;
    double launch_seconds = 4e-6;  ///< of a kernel, beyond its work
    double interference =
        0.1;          ///< of communication's time, that computing beside it takes longer: it needs processors too
    double wave = 0;  ///< elements of a product's result that are computed at once; the last wave is half empty
    machine_evidence known{};

    /// The link among `count` ranks, one every `stride`.
    [[nodiscard]] constexpr comm::link link_of(int count, int stride) const noexcept {
        comm::link l = count * stride <= ranks_per_node ? inside : between;
        l.bytes_per_second *= link_efficiency;
        return l;
    }
    /// Do groups of so many adjacent ranks, side by side from rank 0 on, lie alike: each inside a node, or on whole ones?
    [[nodiscard]] constexpr bool lies_evenly(std::int64_t adjacent, std::int64_t ranks) const noexcept {
        return ranks <= ranks_per_node || adjacent % ranks_per_node == 0 || ranks_per_node % adjacent == 0;
    }
    /// The network of `count` ranks, one every `stride`, from the first of a node on: what collectives among them cost. Of
    /// the groups of a job of `ranks`, some of which are inside a node and some are not, it is that of one that is not.
    [[nodiscard]] constexpr comm::two_levels group_of(int count, int stride, std::int64_t ranks) const noexcept {
        const std::int64_t adjacent = std::int64_t{count} * stride;
        int in_node = std::max(1, std::min(count, ranks_per_node / stride));
        if (count > 1 && adjacent <= ranks_per_node && !lies_evenly(adjacent, ranks)) {
            const int before = std::max(1, static_cast<int>(ranks_per_node % adjacent) / stride);  // the node's end
            in_node = std::max(before, count - before);
        }
        const int nodes = (count + in_node - 1) / in_node;
        comm::two_levels g{count, nodes, in_node, count - in_node * (nodes - 1), 1, inside, between};
        g.inside.bytes_per_second *= link_efficiency;
        g.between.bytes_per_second *= link_efficiency;
        return g;
    }
    /// Seconds of a product of an m x k and a k x n matrix: small ones are slower a FLOP than large ones.
    [[nodiscard]] constexpr double seconds_of_product(double m, double n, double k) const noexcept {
        return launch_seconds + 2 * k * (m * n + wave / 2) / (flops * product_efficiency);
    }
};

/// Errors  usage_error naming a figure that was not stated, or with which nothing can be computed.
inline void validate(const machine& m) {
    const std::pair<const char*, double> positive[] = {
        {"flops", m.flops},
        {"memory_bytes", m.memory_bytes},
        {"memory_bandwidth", m.memory_bandwidth},
        {"ranks_per_node", m.ranks_per_node},
        {"inside.bytes_per_second", m.ranks_per_node == 1 ? 1 : m.inside.bytes_per_second},  // nobody is there
        {"between.bytes_per_second", m.between.bytes_per_second},
        {"host_bandwidth", m.host_bandwidth},
        {"product_efficiency", m.product_efficiency},
        {"memory_efficiency", m.memory_efficiency},
        {"link_efficiency", m.link_efficiency}};
    const std::pair<const char*, double> zero_or_more[] = {{"inside.latency_seconds", m.inside.latency_seconds},
                                                           {"between.latency_seconds", m.between.latency_seconds},
                                                           {"launch_seconds", m.launch_seconds},
                                                           {"interference", m.interference},
                                                           {"wave", m.wave}};
    const auto refuse = [&](const char* figure, double x, const char* expected) {
        throw usage_error(formatted("plan: machine '{}': {} is {}, expected a number {}", m.name, figure, x, expected));
    };
    for (const auto& [figure, x] : positive) {
        if (!(x > 0) || !std::isfinite(x)) { refuse(figure, x, "above 0"); }
    }
    for (const auto& [figure, x] : zero_or_more) {
        if (!(x >= 0) || !std::isfinite(x)) { refuse(figure, x, "of 0 or more"); }
    }
}

namespace detail {
// A tile of 128 x 256 results for each of so many processors.
[[nodiscard]] constexpr double wave_of(int processors) noexcept { return processors * 128.0 * 256.0; }
}  // namespace detail

/// DGX A100 (80 GB): NVSwitch, one 200 Gb/s NIC a GPU, PCIe 4.0 x16.
///
/// Sources  published: NVIDIA's data sheets of A100 and DGX A100; PCI-SIG's rate. Fitted: the three efficiencies, to four
///          steps of 22 and 175 billion parameters in Korthikanti et al. 2022, arXiv:2205.05198, table 5; they predict
///          those of 530 and 1000 within 10 %. Assumed: latencies, launches, tiles.
inline constexpr machine dgx_a100{.name = "dgx-a100",
                                  .flops = 312e12,
                                  .memory_bytes = 80e9,
                                  .memory_bandwidth = 2.0e12,
                                  .ranks_per_node = 8,
                                  .inside = {5e-6, 300e9},
                                  .between = {10e-6, 25e9},
                                  .host_bandwidth = 31.5e9,
                                  .product_efficiency = 0.81,
                                  .memory_efficiency = 1.04,
                                  .link_efficiency = 0.5,
                                  .wave = detail::wave_of(108),
                                  .known = {.flops = evidence::published,
                                            .memory = evidence::published,
                                            .links = evidence::published,
                                            .host = evidence::published,
                                            .product_efficiency = evidence::fitted,
                                            .memory_efficiency = evidence::fitted,
                                            .link_efficiency = evidence::fitted}};
/// HGX H100 (SXM, 80 GB): one 400 Gb/s NIC a GPU, PCIe 5.0 x16.
///
/// Sources  published: NVIDIA's data sheets of H100 and HGX H100; PCI-SIG's rate. Assumed: efficiencies (the step that
///          llm.c publishes of GPT-2 1558M takes 3 % less than they say), latencies, launches, tiles.
inline constexpr machine hgx_h100{.name = "hgx-h100",
                                  .flops = 989e12,
                                  .memory_bytes = 80e9,
                                  .memory_bandwidth = 3.35e12,
                                  .ranks_per_node = 8,
                                  .inside = {5e-6, 450e9},
                                  .between = {10e-6, 50e9},
                                  .host_bandwidth = 63e9,
                                  .product_efficiency = 0.65,
                                  .memory_efficiency = 0.9,
                                  .link_efficiency = 0.8,
                                  .wave = detail::wave_of(132),
                                  .known = {.flops = evidence::published,
                                            .memory = evidence::published,
                                            .links = evidence::published,
                                            .host = evidence::published}};
/// HGX H200 (SXM, 141 GB), otherwise the same.
///
/// Sources  as of the H100; NVIDIA's data sheet of the H200. Measured on one, and not fitted to: copies to and from the
///          host at once 50.6e9 bytes/s each way, where 0.8 x 63e9 says 50.4e9 (bench/results/zeroth_offload_slots.json).
inline constexpr machine hgx_h200 = [] {
    machine m = hgx_h100;
    m.name = "hgx-h200";
    m.memory_bytes = 141e9;
    m.memory_bandwidth = 4.8e12;
    return m;
}();
/// A die of Frontier's MI250X: 8 of 64 GiB a node, 4 NICs of 200 Gb/s; the inside is its slowest link.
///
/// Sources  published: Frontier's user guide (OLCF); half of a card's 383 TFLOP/s. Fitted: the efficiency of products, to
///          the throughput of 22 billion parameters in Dash et al. 2023, arXiv:2312.12705, as cited by others (the body
///          could not be read), taken as FLOPs with recomputation; it predicts 175 and 1000 within 10 %. Assumed: the
///          efficiencies of memory and links, latencies, launches, tiles.
inline constexpr machine frontier{.name = "frontier",
                                  .flops = 191.5e12,
                                  .memory_bytes = 64.0 * (1 << 30),
                                  .memory_bandwidth = 1.6e12,
                                  .ranks_per_node = 8,
                                  .inside = {5e-6, 50e9},
                                  .between = {10e-6, 12.5e9},
                                  .host_bandwidth = 36e9,
                                  .product_efficiency = 0.46,
                                  .wave = detail::wave_of(110),
                                  .known = {.flops = evidence::published,
                                            .memory = evidence::published,
                                            .links = evidence::published,
                                            .host = evidence::published,
                                            .product_efficiency = evidence::fitted}};

}  // namespace tutti::plan
