// What one translation unit sees of tutti: the addresses of entities that must be one a program, and the layout of
// types that must not depend on macros.
// Needs the standard library.
#pragma once

#include <cstddef>  // size_t
#include <vector>   // the lists

struct seen {
    std::vector<const void*> addresses;
    std::vector<std::size_t> layouts;
    bool operator==(const seen&) const = default;
};

seen seen_by_first();
seen seen_by_second();
