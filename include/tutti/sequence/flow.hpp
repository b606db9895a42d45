// flow: one message of an exchange that all ranks know of.
// Needs nothing.
#pragma once

#include <cstddef>  // bytes

namespace tutti::sequence {

/// A message of a routed exchange.
struct flow {
    int source = 0;
    int destination = 0;
    std::size_t bytes = 0;
    friend constexpr bool operator==(const flow&, const flow&) = default;
};

}  // namespace tutti::sequence
