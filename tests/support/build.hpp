// How this test program was compiled: whether sanitizers watch it, and whether it runs at full speed.
// Needs nothing. For tests that do less, or leave out what a sanitizer forbids, in such builds.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TUTTI_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TUTTI_TEST_SANITIZED 1
#endif
#endif
#ifndef TUTTI_TEST_SANITIZED
#define TUTTI_TEST_SANITIZED 0
#endif

// Of types for TEST_CASE_TEMPLATE the first alone where a sanitizer watches: it looks for races and stray accesses, which
// do not depend on the type, and each type costs it seconds of compilation.
#if TUTTI_TEST_SANITIZED
#define TUTTI_TEST_TYPES(first, ...) first
#else
#define TUTTI_TEST_TYPES(...) __VA_ARGS__
#endif

namespace tutti::test {

inline constexpr bool sanitized = TUTTI_TEST_SANITIZED;

#ifdef __OPTIMIZE__
inline constexpr bool full_speed = !sanitized;
#else
inline constexpr bool full_speed = false;
#endif

}  // namespace tutti::test
