// What a strategy does with master values when it writes the trainer's: rounds, by chance if asked to.
// Needs core/elementwise and core/stochastic_rounding.
#pragma once

#include <cstddef>   // size_t
#include <cstdint>   // seeds
#include <optional>  // a seed
#include <string>    // descriptions

#include <tutti/core/element.hpp>              // master_t
#include <tutti/core/elementwise.hpp>          // copy
#include <tutti/core/philox.hpp>               // random_stream
#include <tutti/core/stochastic_rounding.hpp>  // copy_stochastically
#include <tutti/core/text.hpp>                 // formatted
#include <tutti/core/view.hpp>                 // view

namespace tutti::strategy::detail {

/// What rounds the values of the t-th update; nothing without a seed.
[[nodiscard]] inline std::optional<random_stream> rounding_noise(std::optional<std::uint64_t> seed,
                                                                 std::uint64_t t) noexcept {
    if (!seed) { return std::nullopt; }
    constexpr std::uint32_t purpose = 0x726f756e;  // "roun": apart from streams that are counted from 0
    return random_stream{*seed, purpose, static_cast<std::uint32_t>(t)};
}

/// Part of what describes a strategy.
[[nodiscard]] inline std::string describe_rounding(std::optional<std::uint64_t> seed) {
    return seed ? formatted(", values rounded stochastically with seed {}", *seed) : std::string();
}

/// values = masters, which are elements of the model from `first` on; to nearest even without noise.
template <queue Q, floating_element T>
void round_values(Q q, view<const master_t<T>, typename Q::memory_type> masters,
                  view<T, typename Q::memory_type> values, const std::optional<random_stream>& noise,
                  std::size_t first) {
    if constexpr (half_element<T>) {
        if (noise) {
            copy_stochastically(q, masters, values, *noise, first);
            return;
        }
    }
    copy(q, masters, values);
}

}  // namespace tutti::strategy::detail
