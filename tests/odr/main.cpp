// Compares what two translation units saw.
#include <cstdio>  // fprintf

#include "seen.hpp"  // seen_by_first, seen_by_second

int main() {
    if (seen_by_first() == seen_by_second()) return 0;
    std::fprintf(stderr, "two translation units see different entities or layouts\n");
    return 1;
}
