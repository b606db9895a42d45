// What a consumer of the Conan package builds.
#include <tutti/tutti.hpp>  // version_string

#include <fmt/core.h>  // print: fmt must come with tutti::tutti

int main() { fmt::print("tutti {} from its Conan package\n", tutti::version_string); }
