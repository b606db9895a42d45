// describe_compressor: what ranks have to agree on in a compressor, beside its level and the size of its wire.
// Needs compress/compressor.
// Exchanges put it in their descriptions, which attach compares.
#pragma once

#include <string>  // descriptions

#include <tutti/compress/detail/draws.hpp>  // rounding
#include <tutti/core/text.hpp>              // formatted

namespace tutti::strategy::detail {

/// "", or what there is of: ", granularity 512, rounded stochastically, unbiased".
template <class Scheme> [[nodiscard]] std::string describe_compressor(const Scheme& x) {
    std::string text;
    if constexpr (requires { x.granularity(); }) { text += formatted(", granularity {}", x.granularity()); }
    if constexpr (requires { x.mode(); }) {
        text += x.mode() == compress::rounding::stochastic ? ", rounded stochastically" : ", rounded to nearest";
    }
    if constexpr (requires { x.unbiased; }) { text += x.unbiased ? ", unbiased" : ""; }
    return text;
}

}  // namespace tutti::strategy::detail
