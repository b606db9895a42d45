// The version of tutti: three macros for the preprocessor, one number and one string for the program.
// Needs nothing; CMakeLists.txt and conanfile.py read the numbers from this file, so they stand nowhere else.
// Source: semantic versioning, https://semver.org.
#pragma once

#define TUTTI_VERSION_MAJOR 0
#define TUTTI_VERSION_MINOR 1
#define TUTTI_VERSION_PATCH 0

namespace tutti {

/// The version as one number that can be compared: 10000 * major + 100 * minor + patch.
inline constexpr int version_number = TUTTI_VERSION_MAJOR * 10000 + TUTTI_VERSION_MINOR * 100 + TUTTI_VERSION_PATCH;

#define TUTTI_DETAIL_TEXT_OF(x) #x
#define TUTTI_DETAIL_TEXT(x, y, z) TUTTI_DETAIL_TEXT_OF(x) "." TUTTI_DETAIL_TEXT_OF(y) "." TUTTI_DETAIL_TEXT_OF(z)

/// The version as text, "major.minor.patch", with static storage.
inline constexpr const char* version_string =
    TUTTI_DETAIL_TEXT(TUTTI_VERSION_MAJOR, TUTTI_VERSION_MINOR, TUTTI_VERSION_PATCH);

#undef TUTTI_DETAIL_TEXT
#undef TUTTI_DETAIL_TEXT_OF

}  // namespace tutti
