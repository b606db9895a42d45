// GPT-2's weights in a safetensors file: which tensor is which parameter.
// Needs checkpoint/safetensors and parameters.hpp. Files have the names of parameters_of, or these behind
// "transformer.".
#pragma once

#include <algorithm>    // min, transform
#include <cstddef>      // size_t
#include <cstdint>      // shapes
#include <cstring>      // memcmp
#include <map>          // names without their prefix
#include <span>         // elements
#include <string>       // names
#include <string_view>  // names
#include <vector>       // names by parameter

#include <fmt/format.h>  // messages

#include <tutti/checkpoint/safetensors.hpp>  // the files
#include <tutti/core/error.hpp>              // what they are refused with
#include <tutti/core/view.hpp>               // destination of tensors

#include "bad_input.hpp"
#include "parameters.hpp"

namespace transformer {

using tutti::checkpoint::detail::shape_text;
using tutti::checkpoint::detail::shown;

/// Elements that are compared or converted at a time: a buffer that stays in cache.
inline constexpr std::size_t weights_part = 1 << 16;

/// A file that has every parameter of a configuration.
class weights_file {
    static constexpr std::string_view prefix = "transformer.";

    tutti::checkpoint::safetensors_file file_;
    std::vector<std::string> names_;  // in the file, by parameter
    std::string head_;                // the classifier's, if the file has one

    /// Causal masks, which old files keep: "h.3.attn.bias", "h.3.attn.masked_bias".
    [[nodiscard]] static bool is_mask(std::string_view name) {
        if (!name.starts_with("h.")) { return false; }
        name.remove_prefix(2);
        const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
        name.remove_prefix(digits);
        return digits > 0 && (name == ".attn.bias" || name == ".attn.masked_bias");
    }
    [[nodiscard]] static tutti::checkpoint::safetensors_file opened(const std::string& path) {
        try {
            return tutti::checkpoint::safetensors_file(path);
        } catch (const tutti::error& e) { throw bad_input(fmt::format("--load: {}", e.what())); }
    }
    [[noreturn]] void refuse(const std::string& fact) const {
        throw bad_input(fmt::format("--load: '{}': {}", file_.path(), fact));
    }
    [[nodiscard]] static std::string_view without_prefix(std::string_view name) {
        if (name.starts_with(prefix)) { name.remove_prefix(prefix.size()); }
        return name;
    }
    void require_loadable(const std::string& name, const std::vector<std::uint64_t>& shape) const {
        const auto& t = file_.at(name);
        if (t.shape != shape) {
            refuse(fmt::format("tensor '{}' has shape {}, the model needs {}", name, shape_text(t.shape),
                               shape_text(shape)));
        }
        if (t.type != "F32" && t.type != "F16" && t.type != "BF16") {
            refuse(fmt::format("tensor '{}' has type {}, not F32, F16 or BF16", name, t.type));
        }
    }

public:
    /// Errors  bad_input names the first tensor that is missing, of another shape or type, or unknown.
    weights_file(const std::string& path, const configuration& c) : file_(opened(path)) {
        std::map<std::string_view, const std::string*> found;
        for (const auto& [name, stored] : file_.tensors()) {
            const auto [at, is_new] = found.emplace(without_prefix(name), &name);
            if (!is_new) { refuse(fmt::format("has both '{}' and '{}'", shown(*at->second), shown(name))); }
        }
        for (const declaration& d : parameters_of(c)) {
            const auto at = found.find(d.name);
            if (at == found.end()) {
                refuse(fmt::format("has no tensor '{}' of shape {}", d.name, shape_text(d.shape)));
            }
            require_loadable(*at->second, {d.shape.begin(), d.shape.end()});
            names_.push_back(*at->second);
            found.erase(at);
        }
        if (const auto at = found.find("lm_head.weight"); at != found.end()) {
            head_ = *at->second;
            require_loadable(head_, file_.at(names_[token_table]).shape);
            found.erase(at);
        }
        for (const auto& [name, in_file] : found) {
            if (!is_mask(name)) {
                refuse(fmt::format("has tensor '{}' of shape {}, which the model has not: are --model, --layers, "
                                   "--heads and --width right?",
                                   shown(*in_file), shape_text(file_.at(*in_file).shape)));
            }
        }
    }

    /// Errors  bad_input when the file has a classifier of its own: the model's is the token table.
    /// Cost    reads both, where there are both.
    void require_tied_head(const configuration& c) {
        if (head_.empty()) { return; }
        const std::size_t count = parameters_of(c)[token_table].size();
        std::vector<float> table, head;
        for (std::size_t first = 0; first < count; first += weights_part) {
            table.resize(std::min(weights_part, count - first));
            head.resize(table.size());
            file_.read(names_[token_table], first, tutti::view<float>(table));
            file_.read(head_, first, tutti::view<float>(head));
            if (std::memcmp(table.data(), head.data(), table.size() * sizeof(float)) != 0) {
                refuse(fmt::format("tensors '{}' and '{}' differ: the model uses one table for tokens and classifier",
                                   names_[token_table], head_));
            }
        }
    }

    /// Fills `out` with parameter i, converted to T.
    /// Errors  tutti::checkpoint::damaged_error when the file has become shorter.
    template <class T> void read(std::size_t i, tutti::view<T> out) const { file_.read(names_[i], out); }
};

/// Writes parameters as F32, as tutti::checkpoint::write_safetensors does. values(i) is asked once for each and returns
/// its elements as a contiguous range on the host.
template <class List, class Values> void write_weights(const std::string& path, const List& parameters, Values values) {
    std::vector<tutti::checkpoint::safetensors_declaration> list;
    for (const auto& p : parameters) {
        list.push_back({p.name, tutti::dtype::float32, {p.shape.begin(), p.shape.end()}});
    }
    const auto as_floats = [&](std::size_t i, const tutti::checkpoint::byte_sink& put) {
        const auto elements = values(i);
        const std::span all(elements.data(), elements.size());
        std::vector<float> floats;
        for (std::size_t first = 0; first < all.size(); first += weights_part) {
            const auto part = all.subspan(first, std::min(all.size() - first, weights_part));
            floats.resize(part.size());
            std::transform(part.begin(), part.end(), floats.begin(), [](auto x) { return static_cast<float>(x); });
            put(std::as_bytes(std::span(floats)));
        }
    };
    tutti::checkpoint::write_safetensors(path, list, as_floats, {.metadata = {{"format", "pt"}}});
}

}  // namespace transformer
