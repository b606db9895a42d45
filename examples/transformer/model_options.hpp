// What is trained: the options of a model's sizes, by themselves or by a published model's name.
// Needs CLI11.
#pragma once

#include <algorithm>  // find_if
#include <string>     // names

#include <CLI/CLI.hpp>   // command line
#include <fmt/format.h>  // messages

#include "bad_input.hpp"
#include "option_checks.hpp"
#include "parameters.hpp"

namespace transformer {

struct model_options {
    std::string model_name;       // a published one; empty: sizes are given one by one
    bool random_weights = false;  // it has none but random ones
    configuration model;
    std::string load;  // weights to start from; empty: random ones
};

/// "gpt2-124m, gpt2-350m, ...": for messages.
template <class Sizes> [[nodiscard]] std::string names_of(const Sizes& sizes) {
    std::string text;
    for (const published_size& size : sizes) { text += fmt::format("{}{}", text.empty() ? "" : ", ", size.name); }
    return text;
}

inline void declare(command_line& app, model_options& o) {
    using detail::named;
    using detail::within;
    app.begin("Model");
    app.add_option(
           "--model", o.model_name,
           "sizes of a published model with its positions, 1024 or OPT's 2048; --context is as much unless "
           "given less:\n" +
               names_of(gpt2_sizes) +
               "\nor, to measure mezo, zo2 and distzo2, GPT-2 with random weights of OPT's extents "
               "(vocabulary, positions, layers or the first --layers of them, heads, width; GELU where OPT has ReLU, "
               "so no weights of OPT):\n" +
               names_of(opt_sizes))
        ->type_name("NAME");
    app.add_option("--context", o.model.context, "tokens per sequence")
        ->check(within(1, 65'536))
        ->capture_default_str();
    app.add_option("--layers", o.model.layers, "layers")->check(within(1, 1000))->capture_default_str();
    app.add_option("--heads", o.model.heads, "attention heads")->check(within(1, 1000))->capture_default_str();
    app.add_option("--width", o.model.width, "width of the residual stream")
        ->check(within(1, 65'536))
        ->capture_default_str();
    app.add_option("--load", o.load, "start from these GPT-2 weights (safetensors)")
        ->check(named("file name"))
        ->type_name("FILE");
}

/// The sizes that --model and --tokens stand for. `app` has parsed the command line into `o`.
/// Errors  bad_input for an unknown name, and for a size that contradicts it.
inline void choose_model(const command_line& app, model_options& o) {
    using detail::require;
    const bool named = app.count("--model") > 0;
    if (named || app.count("--tokens") > 0) { o.model.vocabulary = gpt2_vocabulary; }
    if (!named) { return; }
    const auto size_in = [&](const auto& sizes) -> const published_size* {
        const auto at = std::find_if(sizes.begin(), sizes.end(), [&](const auto& s) { return s.name == o.model_name; });
        return at == sizes.end() ? nullptr : &*at;
    };
    const published_size* const opt = size_in(opt_sizes);
    const published_size* const found = opt != nullptr ? opt : size_in(gpt2_sizes);
    require(found != nullptr,
            fmt::format("--model: '{}' is not one of {}, {}", o.model_name, names_of(gpt2_sizes), names_of(opt_sizes)));
    const auto fix = [&](const char* option, int& size, int published) {
        require(app.count(option) == 0 || size == published,
                fmt::format("{}: {} contradicts --model {}, which has {}", option, size, o.model_name, published));
        size = published;
    };
    if (opt == nullptr || app.count("--layers") == 0 || o.model.layers > opt->layers) {
        fix("--layers", o.model.layers, found->layers);
    }
    fix("--heads", o.model.heads, found->heads);
    fix("--width", o.model.width, found->width);
    o.random_weights = opt != nullptr;
    if (opt != nullptr) { o.model.vocabulary = opt_vocabulary; }
    o.model.positions = opt != nullptr ? opt_positions : gpt2_positions;
    if (app.count("--context") == 0) { o.model.context = o.model.positions; }
    require(o.model.context <= o.model.positions,
            fmt::format("--context: {} is more than the {} positions of --model {}", o.model.context, o.model.positions,
                        o.model_name));
}

}  // namespace transformer
