// majority: whose value counts as right when ranks differ.
// Needs nothing.
#pragma once

#include <cstddef>  // size_t

namespace tutti::comm::detail {

/// The first of n ranks whose value most ranks share; of several such values, the one met first. same(a, b): whether
/// ranks a and b have the same value.
/// Cost  quadratic: for messages about ranks.
template <class Same> [[nodiscard]] std::size_t majority(std::size_t n, Same same) {
    std::size_t reference = 0;
    std::size_t most = 0;
    for (std::size_t r = 0; r < n; ++r) {
        std::size_t votes = 0;
        for (std::size_t p = 0; p < n; ++p) { votes += same(r, p) ? 1u : 0u; }
        if (votes > most) {
            most = votes;
            reference = r;
        }
    }
    return reference;
}

}  // namespace tutti::comm::detail
