// How this test program was compiled: whether sanitizers watch it, and whether it runs at full speed.
// Needs nothing. For tests that do less, or leave out what a sanitizer forbids, in such builds.
#pragma once

namespace tutti::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
#else
inline constexpr bool sanitized = false;
#endif

#ifdef __OPTIMIZE__
inline constexpr bool full_speed = !sanitized;
#else
inline constexpr bool full_speed = false;
#endif

}  // namespace tutti::test
