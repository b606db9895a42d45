// catalog: published machines and models by name.
// Needs plan/machine, plan/model.
#pragma once

#include <array>        // lists
#include <string>       // messages
#include <string_view>  // names

#include <tutti/core/error.hpp>    // usage_error
#include <tutti/core/text.hpp>     // formatted
#include <tutti/plan/machine.hpp>  // machines
#include <tutti/plan/model.hpp>    // model_shape

namespace tutti::plan {

inline constexpr std::array machines{frontier, dgx_a100, hgx_h100, hgx_h200};

struct named_model {
    std::string_view name;
    model_shape shape{};
};

/// GPT-2 with words padded to a multiple of 128 (Radford et al. 2019), and the models of Korthikanti et al. 2022,
/// arXiv:2205.05198, table 3.
inline constexpr std::array models{
    named_model{"gpt2-124m", {12, 768, 12, 50304, 1024}},    named_model{"gpt2-350m", {24, 1024, 16, 50304, 1024}},
    named_model{"gpt2-774m", {36, 1280, 20, 50304, 1024}},   named_model{"gpt2-1558m", {48, 1600, 25, 50304, 1024}},
    named_model{"gpt-22b", {48, 6144, 64, 51200, 2048}},     named_model{"gpt-175b", {96, 12288, 96, 51200, 2048}},
    named_model{"gpt-530b", {105, 20480, 128, 51200, 2048}}, named_model{"gpt-1t", {128, 25600, 160, 51200, 2048}}};

namespace detail {
template <class List> [[nodiscard]] std::string names_of(const List& list) {
    std::string names;
    for (const auto& one : list) { names += (names.empty() ? "" : ", ") + std::string(one.name); }
    return names;
}
}  // namespace detail

/// Errors  usage_error with all names, for one that is not among them. Likewise `model_named`.
[[nodiscard]] inline machine machine_named(std::string_view name) {
    for (const machine& m : machines) {
        if (m.name == name) { return m; }
    }
    throw usage_error(formatted("plan: '{}' is not a machine; there are {}", name, detail::names_of(machines)));
}
[[nodiscard]] inline model_shape model_named(std::string_view name) {
    for (const named_model& m : models) {
        if (m.name == name) { return m.shape; }
    }
    throw usage_error(formatted("plan: '{}' is not a model; there are {}", name, detail::names_of(models)));
}

}  // namespace tutti::plan
