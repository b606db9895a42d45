// What a consumer of tutti::tutti builds: the umbrella header, through the package.
#include <tutti/tutti.hpp>  // version_string

#include <fmt/core.h>  // print: fmt must come with tutti::tutti

int main() { fmt::print("tutti {}\n", tutti::version_string); }
