// cost: how long attention of a sequence takes, what its keys and values weigh, and when a ring hides them.
// Needs comm/topology for links. Pure host code.
// Source: the idea that transfers hide behind computing from a length on, and that this makes zones, is that of
// Zeppelin (arXiv 2509.21841); the thresholds as written here are ours.
#pragma once

#include <array>    // measured table
#include <cmath>    // ceil
#include <cstdint>  // tokens

#include <tutti/comm/topology.hpp>       // link
#include <tutti/core/error.hpp>          // usage_error
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // zone

namespace tutti::sequence {

/// Seconds that one rank takes for causal attention within a whole sequence of s tokens: a2 s^2 + a1 s + a0, and 0
/// where there are none. The default counts squares: for balance alone, units do not matter.
struct attention_cost {
    double quadratic = 1;  ///< a2, seconds a token^2
    double linear = 0;     ///< a1, seconds a token
    double constant = 0;   ///< a0, seconds
    [[nodiscard]] constexpr double operator()(std::int64_t tokens) const noexcept {
        if (tokens <= 0) { return 0; }
        const auto s = static_cast<double>(tokens);
        return (quadratic * s + linear) * s + constant;
    }
    /// The same on a machine, or with heads, that take `factor` times as long; 3.5 for forward and backward together.
    [[nodiscard]] constexpr attention_cost scaled(double factor) const noexcept {
        return {quadratic * factor, linear * factor, constant * factor};
    }
    friend constexpr bool operator==(const attention_cost&, const attention_cost&) = default;
};

/// Seconds that one rank takes for the modules that see each token by itself.
struct linear_cost {
    double seconds_per_token = 0;
    [[nodiscard]] constexpr double operator()(std::int64_t tokens) const noexcept {
        return seconds_per_token * static_cast<double>(tokens);
    }
};

/// Bytes of keys and values of one token: what a ring passes on in forward.
[[nodiscard]] constexpr double kv_bytes_per_token(int kv_heads, int head_size, int bytes_per_element) noexcept {
    return 2.0 * kv_heads * head_size * bytes_per_element;
}

/// Seconds that a step of a ring takes on a rank beside its share of the sequence's attention: blocks are packed, partial
/// results merged and gradients summed, and a call for a block takes longer than its share of a call for all. Tokens are
/// those that the rank has of the sequence.
struct step_cost {
    double linear = 0;    ///< seconds a token
    double constant = 0;  ///< seconds
    [[nodiscard]] constexpr double operator()(double tokens) const noexcept { return linear * tokens + constant; }
    friend constexpr bool operator==(const step_cost&, const step_cost&) = default;
};

/// What rings cost that one rank does not: their transfers, and their steps.
struct transfer_cost {
    double bytes_per_token = 0;  ///< passed on while a step computes
    comm::link inside{};         ///< between ranks of a node
    comm::link between{};  ///< between nodes: what one ring gets out of a node, of a NIC, or of all that routing uses
    step_cost step{};
    [[nodiscard]] const comm::link& link_of(zone z) const noexcept { return z == zone::world ? between : inside; }
};

/// What ring_attention passes on in forward and backward together: keys and values twice, and behind them the sums of
/// their gradients.
[[nodiscard]] constexpr transfer_cost training_transfers(int kv_heads, int head_size, int bytes_per_element,
                                                         int bytes_per_sum, comm::link inside, comm::link between,
                                                         step_cost step = {}) noexcept {
    const double block = kv_bytes_per_token(kv_heads, head_size, bytes_per_element);
    return {2 * block + kv_bytes_per_token(kv_heads, head_size, bytes_per_sum), inside, between, step};
}

/// c*: the tokens a rank needs for a step of a ring to take as long as passing them on, whatever the ring's size G.
///
/// A step computes a2 (s/G)^2 and passes on s/G tokens, so it hides the transfer iff s/G >= bytes / (a2 * bandwidth).
/// Hence zones: a sequence below 2 c* inside a node is better off on one rank, a ring inside a node has at most s / c*
/// ranks, and one over nodes needs s/G >= c* of the slower link.
/// Units   tokens; infinite where attention costs nothing but transfers do, 0 where transfers cost nothing.
[[nodiscard]] constexpr double tokens_that_hide(double quadratic, double bytes_per_token,
                                                double bytes_per_second) noexcept {
    return bytes_per_token / bytes_per_second == 0 ? 0 : bytes_per_token / (quadratic * bytes_per_second);
}

/// Tokens that a rank keeps at least, when a sequence is cut inside a node and when it is cut across nodes. 0: any.
struct least_tokens {
    std::int64_t node = 0;
    std::int64_t world = 0;
    [[nodiscard]] constexpr std::int64_t of(zone z) const noexcept {
        return z == zone::local ? 0 : z == zone::node ? node : world;
    }
    friend constexpr bool operator==(const least_tokens&, const least_tokens&) = default;
};

/// The least tokens that hide the transfers of either kind of ring, rounded up.
/// Errors  usage_error when there is no such number: attention has no quadratic cost, and transfers are not free.
[[nodiscard]] inline least_tokens least_tokens_that_hide(const attention_cost& cost, const transfer_cost& transfers) {
    const auto rounded = [&](const comm::link& l) {
        const double c = std::ceil(tokens_that_hide(cost.quadratic, transfers.bytes_per_token, l.bytes_per_second));
        if (!(c >= 0 && c < 0x1p62)) {
            throw usage_error(
                formatted("cost: attention of {} s/token^2 hides no transfer of {} bytes a token at {} B/s",
                          cost.quadratic, transfers.bytes_per_token, l.bytes_per_second));
        }
        return static_cast<std::int64_t>(c);
    };
    return {rounded(transfers.inside), rounded(transfers.between)};
}

/// One measured time of attention in a sequence.
struct attention_sample {
    std::int64_t tokens = 0;
    double seconds = 0;
    friend constexpr bool operator==(const attention_sample&, const attention_sample&) = default;
};

/// Query heads of the table below; times go with their number.
inline constexpr int h100_query_heads = 64;
/// Forward of causal attention on one H100: FlashAttention with variable lengths, bfloat16, 64 query heads, 4 key-value
/// heads of 128, time a document when a call holds many. A public measurement, of others:
/// distca/profiling/data/compute-attn-H100.csv of hao-ai-lab/DistCA on GitHub.
inline constexpr std::array<attention_sample, 11> h100_forward_samples{{{64, 0.02843e-3},
                                                                        {128, 0.03041e-3},
                                                                        {256, 0.03664e-3},
                                                                        {512, 0.06133e-3},
                                                                        {1024, 0.13274e-3},
                                                                        {2048, 0.35504e-3},
                                                                        {4096, 1.05508e-3},
                                                                        {8192, 3.70672e-3},
                                                                        {16384, 13.50330e-3},
                                                                        {32768, 51.89390e-3},
                                                                        {65536, 206.28664e-3}}};
/// What `fitted` makes of the table: within 8.5 % of each of its times. For those who have measured nothing.
inline constexpr attention_cost h100_forward{4.7825e-11, 5.3535e-8, 2.29e-5};

}  // namespace tutti::sequence
