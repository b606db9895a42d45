// What parameters a GPT-2 has: their order, names, shapes and initial values.
// Needs tutti/core/philox. Names and layouts are those of GPT-2's published files (weights are inputs x outputs).
// Initialization: Radford et al. 2019, as in nanoGPT; every element is a function of (seed, tensor, element) alone.
#pragma once

#include <array>        // published sizes
#include <cmath>        // sqrt
#include <cstddef>      // size_t
#include <cstdint>      // seeds, tokens
#include <span>         // tokens of a batch
#include <string>       // names
#include <string_view>  // names
#include <vector>       // shapes

#include <tutti/core/elementwise.hpp>  // fill
#include <tutti/core/philox.hpp>       // normals
#include <tutti/core/view.hpp>         // values

namespace transformer {

using tokens = std::span<const std::uint16_t>;

struct configuration {
    int vocabulary = 256;  // bytes
    int context = 64;      // longest sequence
    int layers = 4;
    int heads = 4;
    int width = 128;
    int positions = 0;  // rows of the position table, at least `context`; 0: as many
    [[nodiscard]] int position_rows() const { return positions == 0 ? context : positions; }
};

/// Sizes of a published model.
struct published_size {
    std::string_view name;
    int layers, heads, width;
};
/// GPT-2 (Radford et al. 2019): four sizes over one vocabulary and one number of positions.
inline constexpr std::array<published_size, 4> gpt2_sizes{{{"gpt2-124m", 12, 12, 768},
                                                           {"gpt2-350m", 24, 16, 1024},
                                                           {"gpt2-774m", 36, 20, 1280},
                                                           {"gpt2-1558m", 48, 25, 1600}}};
inline constexpr int gpt2_vocabulary = 50257;
inline constexpr int gpt2_positions = 1024;
/// OPT (Zhang et al., arXiv 2205.01068): its extents alone. Blocks are GPT-2's: theirs have ReLU for GELU, and as many
/// weights; the table of positions has two rows more.
inline constexpr std::array<published_size, 7> opt_sizes{{{"opt-1.3b", 24, 32, 2048},
                                                          {"opt-2.7b", 32, 32, 2560},
                                                          {"opt-6.7b", 32, 32, 4096},
                                                          {"opt-13b", 40, 40, 5120},
                                                          {"opt-30b", 48, 56, 7168},
                                                          {"opt-66b", 64, 72, 9216},
                                                          {"opt-175b", 96, 96, 12288}}};
inline constexpr int opt_vocabulary = 50272;
inline constexpr int opt_positions = 2048;
inline constexpr std::uint16_t gpt2_end_of_text = 50256;

/// The target of a token that has none to predict: it does not count. No vocabulary has it.
inline constexpr std::uint16_t no_target = 0xffff;

/// What the seeds of random streams are split by.
enum class purpose : std::uint32_t { weights = 0, data = 1, sample = 2, lengths = 3 };
[[nodiscard]] inline tutti::random_stream random_for(std::uint64_t seed, purpose p, std::uint32_t tensor = 0) {
    return {.seed = seed, .stream = tensor, .step = static_cast<std::uint32_t>(p)};
}

// Positions in the list of parameters: the two tables, then these for each layer, then the final gain and bias.
inline constexpr std::size_t token_table = 0;
inline constexpr std::size_t position_table = 1;
enum in_layer : std::size_t {
    norm1_gain = 0,
    norm1_bias,
    attention_weight,
    attention_bias,
    project_weight,
    project_bias,
    norm2_gain,
    norm2_bias,
    expand_weight,
    expand_bias,
    contract_weight,
    contract_bias,
    per_layer
};
[[nodiscard]] constexpr std::size_t at(int layer, in_layer p) {
    return 2 + static_cast<std::size_t>(layer) * per_layer + p;
}

struct declaration {
    std::string name;
    std::vector<std::size_t> shape;
    float deviation;     // of the normal distribution it starts with,
    float constant = 0;  // or, where that is 0, this value
    [[nodiscard]] std::size_t size() const { return shape.size() == 2 ? shape[0] * shape[1] : shape[0]; }
};

/// In the order of the positions above.
[[nodiscard]] inline std::vector<declaration> parameters_of(const configuration& c) {
    const auto w = static_cast<std::size_t>(c.width);
    const float deviation = 0.02f;
    // The residual stream is a sum of 2 * layers outputs: each starts that much smaller.
    const float residual = deviation / std::sqrt(2.0f * static_cast<float>(c.layers));
    std::vector<declaration> list{
        {"wte.weight", {static_cast<std::size_t>(c.vocabulary), w}, deviation},
        {"wpe.weight", {static_cast<std::size_t>(c.position_rows()), w}, deviation},
    };
    for (int l = 0; l < c.layers; ++l) {
        const std::string h = "h." + std::to_string(l) + ".";
        list.push_back({h + "ln_1.weight", {w}, 0, 1});
        list.push_back({h + "ln_1.bias", {w}, 0});
        list.push_back({h + "attn.c_attn.weight", {w, 3 * w}, deviation});
        list.push_back({h + "attn.c_attn.bias", {3 * w}, 0});
        list.push_back({h + "attn.c_proj.weight", {w, w}, residual});
        list.push_back({h + "attn.c_proj.bias", {w}, 0});
        list.push_back({h + "ln_2.weight", {w}, 0, 1});
        list.push_back({h + "ln_2.bias", {w}, 0});
        list.push_back({h + "mlp.c_fc.weight", {w, 4 * w}, deviation});
        list.push_back({h + "mlp.c_fc.bias", {4 * w}, 0});
        list.push_back({h + "mlp.c_proj.weight", {4 * w, w}, residual});
        list.push_back({h + "mlp.c_proj.bias", {w}, 0});
    }
    list.push_back({"ln_f.weight", {w}, 0, 1});
    list.push_back({"ln_f.bias", {w}, 0});
    return list;
}

/// Initial values of tensor number `tensor`, the same wherever they are computed.
template <class T, tutti::queue Q>
void initialize(const Q& q, tutti::view<T, typename Q::memory_type> value, const declaration& d, std::uint64_t seed,
                std::uint32_t tensor) {
    if (d.deviation > 0) {
        tutti::fill_normal(q, value, random_for(seed, purpose::weights, tensor), d.deviation);
    } else {
        tutti::fill(q, value, static_cast<T>(d.constant));
    }
}

}  // namespace transformer
