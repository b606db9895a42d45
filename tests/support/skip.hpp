// skip(): ends a test program that cannot run here, so that ctest reports it as skipped, with the reason.
// Needs the standard library; call it before anything was tested.
// The exit code is the SKIP_RETURN_CODE that cmake/testing.cmake sets for every test.
#pragma once

#include <cstdio>       // printf, fflush
#include <cstdlib>      // exit
#include <string_view>  // the reason

namespace tutti::test {

inline constexpr int skip_code = 77;

[[noreturn]] inline void skip(std::string_view reason) {
    std::printf("skipped: %.*s\n", static_cast<int>(reason.size()), reason.data());
    std::fflush(stdout);
    std::exit(skip_code);
}

}  // namespace tutti::test
