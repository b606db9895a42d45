// W: the memory bandwidth that a roofline is made of. Every rank runs `a += b` at once on memory of its own.
// Needs nothing. Counted bytes: read a, read b, write a.
#pragma once

#include <cstddef>  // size_t

namespace bench {

// Not inlined: the compiler must not know what becomes of `a`.
[[gnu::noinline]] inline void add_pass(float* a, const float* b, std::size_t count) {
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (std::size_t i = 0; i < count; ++i) { a[i] += b[i]; }
}

/// The memory of one row's buffers, seen as two arrays: W is measured on the very pages and with the very footprint of
/// the row it is compared with, so that cache sizes, page sizes and neighbors on the machine act on both alike.
class add_arrays {
    float* a_;
    std::size_t count_;

public:
    add_arrays(void* memory, std::size_t bytes)
        : a_(static_cast<float*>(memory)), count_(bytes / (2 * sizeof(float)) / 32 * 32) {}  // both aligned alike
    void fill() const {
        for (std::size_t i = 0; i < 2 * count_; ++i) { a_[i] = 1; }
    }
    void run() const { add_pass(a_, a_ + count_, count_); }
    [[nodiscard]] double bytes() const { return 3.0 * static_cast<double>(count_ * sizeof(float)); }
};

}  // namespace bench
